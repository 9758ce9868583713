"""Small faults in the source, one at a time: which test sees each of them?

Run: python benchmarks/mutants.py [--only TEXT] [--set quick|all] [--check]

The faults are in ``mutants.toml``: a file, what it holds, what it holds then, and in words what is
wrong. Each is put into a copy of the package, never into the working tree. The test that is known
to see it runs against the copy; if that passes, so do those of its file until one fails. Before all
this they must pass on a copy without a fault. ``--set quick`` has the tests of ``.ci/test`` only.

A fault that changes nothing that can be seen has a reason. The exit status is 1 if another one
survives. It is 2, before any test runs, if a text is not found exactly once in its file, the table
names no tests of that file, or what it holds then is no sound Python; with ``--check`` that is all.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "hts_torchrl"
TABLE = Path(__file__).with_suffix(".toml")
SETS = {
    "quick": "not slow and not gpu and not thorough",
    "all": "not slow and not gpu",
}
"""What ``.ci/test`` and ``.ci/run`` run."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
BROKEN = (2, 3, 4, 5)
"""Statuses of pytest when it was stopped, or failed itself, or found no test."""
IMPORTED = ("gymnasium", "lightning.pytorch", "torchrl.collectors", "torchrl.objectives")
"""What takes seconds: imported once, and then each run of the tests is forked."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    file: str
    what: str
    old: str
    new: str
    seen_by: str = ""
    """The test that is known to see it, which is tried first."""
    reason: str = ""
    """Why no test can see it; empty where one must."""

    def put_into(self, package: Path) -> None:
        """Break a copy of the package."""
        path = package / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def read(only: str) -> tuple[dict[str, list[str]], list[Mutant]]:
    """Return the tests of each file, and the mutants with ``only`` in their file or words."""
    faults = tomllib.loads(TABLE.read_text())
    tests = faults.pop("tests")
    mutants = [Mutant(file, **each) for file, entries in faults.items() for each in entries]
    return tests, [m for m in mutants if only in f"{m.file}: {m.what}"]


def misplaced(mutants: list[Mutant]) -> list[str]:
    """Name the mutants whose old text is not in its file exactly once."""
    return [
        f"{mutant.file}: {mutant.what}: found {count} times: {mutant.old!r}"
        for mutant in mutants
        if (count := (PACKAGE / mutant.file).read_text().count(mutant.old)) != 1
    ]


def senseless(mutants: list[Mutant]) -> list[str]:
    """Name the mutants that are no Python, or name what is not there: any test fails with those."""
    with tempfile.TemporaryDirectory() as folder:
        for number, mutant in enumerate(mutants):
            text = (PACKAGE / mutant.file).read_text().replace(mutant.old, mutant.new)
            (Path(folder) / f"{number}.py").write_text(text)
        options = ["--isolated", "--select=E9,F821", "--output-format=concise", folder]
        command = [sys.executable, "-m", "ruff", "check", *options]
        said = subprocess.run(command, text=True, capture_output=True)
    found = {int(number) for number in re.findall(r"(\d+)\.py:", said.stdout)}
    return [f"{mutants[n].file}: {mutants[n].what}: is no sound Python" for n in sorted(found)]


def failing_test(mutant: Mutant | None, tests: list[str]) -> str | None:
    """Return the first test that fails with a mutant in the package, or None."""
    with tempfile.TemporaryDirectory() as folder:
        package, log = Path(folder) / PACKAGE.relative_to(ROOT), Path(folder) / "log"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "configs").symlink_to(ROOT / "configs")  # the package looks for them there
        if mutant is not None:
            mutant.put_into(package)
        child = os.fork()
        if child == 0:
            run_tests(package.parent, log, tests)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = log.read_text(errors="replace")
    failed = FAILED.search(said)
    if failed is not None:
        return failed[1].removeprefix("tests/")
    if status in BROKEN or status < 0:
        raise SystemExit(f"pytest broke down:\n{said[-5000:]}")
    return f"exit status {status}" if status else None


def run_tests(source: Path, log: Path, tests: list[str]) -> None:
    """Run pytest on the package in a folder, in this process, which ends with it."""
    folder = str(source)
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.path[:1] = [folder, str(ROOT)]
    os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}  # of processes it starts
    sys.dont_write_bytecode = True
    tempfile.tempdir = folder  # where nothing is left of a process that ends without cleaning up
    status = 4
    try:
        package = importlib.import_module(PACKAGE.name)
        if str(package.__file__).startswith(folder):
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def known(mutant: Mutant, tests: list[str]) -> list[str]:
    """Return the test that is known to see a mutant, or else those of its file."""
    return [f"tests/{mutant.seen_by}"] if mutant.seen_by else tests


def verdict(mutant: Mutant, tests: list[str]) -> str | None:
    """Return who sees a mutant, or why nobody can; None if it survives."""
    seen = failing_test(mutant, known(mutant, tests))
    if seen is None and mutant.seen_by:
        seen = failing_test(mutant, tests)
    if seen is not None and mutant.reason:
        raise SystemExit(f"{mutant.what}: is said to be harmless, but {seen} fails")
    return f"harmless: {mutant.reason}" if mutant.reason else seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="mutants with this text in file or words")
    parser.add_argument("--set", default="all", choices=SETS, help="whose tests may see them")
    parser.add_argument("--check", action="store_true", help="only look whether all apply")
    arguments = parser.parse_args()
    tests, mutants = read(arguments.only)
    untested = [f"[tests] lacks {m.file}" for m in mutants if m.file not in tests]
    if wrong := untested or misplaced(mutants) or senseless(mutants):
        print("\n".join(wrong), file=sys.stderr)
        raise SystemExit(2)
    if arguments.check:
        print(f"{len(mutants)} mutants apply")
        return
    os.chdir(ROOT)
    os.environ["PYTEST_ADDOPTS"] = f"-m '{SETS[arguments.set]}'"
    for module in IMPORTED:
        importlib.import_module(module)
    needed = dict.fromkeys(test for m in mutants for test in known(m, tests[m.file]))
    if seen := failing_test(None, list(needed)):
        raise SystemExit(f"{seen} fails without a mutant")
    print("| file | mutant | seen by |\n|---|---|---|", flush=True)
    survivors = 0
    for mutant in mutants:
        seen = verdict(mutant, tests[mutant.file])
        survivors += seen is None
        print(f"| `{mutant.file}` | {mutant.what} | {seen or '**nobody**'} |", flush=True)
    print(f"\n{len(mutants)} mutants, {survivors} survived")
    raise SystemExit(survivors > 0)


if __name__ == "__main__":
    main()
