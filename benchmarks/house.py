"""The package in figures: what one transition touches, lines, longest class and function, rooms.

Run: python benchmarks/house.py [CHECKOUT ...]

*One transition* is a round of CartPole with PPO, from ``env.step`` to ``optimizer.step``, by the
serial twin (``num_actors=0``), so that all of it runs in one process. Counted are the files in
which a function is called once everything is constructed, from the first step of the second round
to the end of its update, and the physical lines of those files. *Its functions* are those that
are called then, and their lines, with comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAME = "hts_torchrl"


def modules(package: Path) -> dict[str, Path]:
    """Return the files by dotted names; a folder's is that of its ``__init__``."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str, names: dict[str, Path]) -> str:
    """Return the folder a module is in, or the module itself where that is the package's own."""
    folder = module if names[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == NAME else folder


def imported(tree: ast.Module, names: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, for types and in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in names:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in names else node.module for name in inner)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)


def longest(trees: dict[str, ast.Module], *kinds: type[ast.AST]) -> str:
    lines, name = max(
        (node.end_lineno - node.lineno + 1, f"{module.partition('.')[2]}.{node.name}")
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )
    return f"{lines} lines, `{name}`"


def figures(checkout: Path) -> dict[str, str]:
    package = checkout / "src" / NAME
    names = modules(package)
    trees = {name: ast.parse(path.read_text()) for name, path in names.items()}
    lines = {path: len(path.read_text().splitlines()) for path in names.values()}
    rooms = {name: room(name, names) for name in names}
    arrows = {(rooms[m], rooms[i]) for m, tree in trees.items() for i in imported(tree, names)}
    output = subprocess.run(
        [sys.executable, __file__, "--child"], check=True, text=True, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
    ).stdout  # fmt: skip
    called = {tuple(call) for call in json.loads(output.splitlines()[-1]) if Path(call[0]) in lines}
    touched = {Path(file) for file, *_ in called}
    read = {(file, line) for file, first, last in called for line in range(first, last + 1)}
    return {
        "one transition": f"{len(touched)} files, {sum(lines[p] for p in touched):,} lines",
        "its functions": f"{len(called)} functions, {len(read):,} lines",
        "source": f"{len(lines)} files, {sum(lines.values()):,} lines",
        "longest class": longest(trees, ast.ClassDef),
        "longest function": longest(trees, ast.FunctionDef, ast.AsyncFunctionDef),
        "rooms": str(len(set(rooms.values()))),
        "import arrows between rooms": str(sum(one != other for one, other in arrows)),
    }


def trace() -> None:
    """Train three rounds; prints file, first and last line of what the second one calls."""
    from lightning.pytorch import Callback, Trainer  # noqa: PLC0415  the parent needs none of it

    from hts_torchrl import PPO, GymEnvs, HTSDataModule  # noqa: PLC0415

    called = set()

    def note(frame, *_: object) -> None:
        called.add(frame.f_code)

    class SecondRound(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch.is_last:
                sys.setprofile(note if pl_module.updates == 1 else None)

    data = HTSDataModule(
        GymEnvs("CartPole-v1"), num_envs=4, num_actors=0, frames_per_batch=32, total_frames=96
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_val_batches=0, callbacks=[SecondRound()],
        logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(PPO(network="mlp", epochs=1, minibatches=1), data)
    functions = [code for code in called if not code.co_name.startswith("<")]
    print(json.dumps([
        (code.co_filename, code.co_firstlineno, max(line for *_, line in code.co_lines() if line))
        for code in functions
    ]))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    arguments = parser.parse_args()
    tables = [figures(checkout.resolve()) for checkout in arguments.checkouts]
    print(f"| | {' | '.join(map(str, arguments.checkouts))} |" + "\n|" + "---|" * (len(tables) + 1))
    for name in tables[0]:
        print(f"| {name} | {' | '.join(table[name] for table in tables)} |")


if __name__ == "__main__":
    trace() if sys.argv[1:] == ["--child"] else main()
