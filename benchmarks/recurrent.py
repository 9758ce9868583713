"""What a step of the built-in memories costs, and how far a sequence is from its steps.

Run: python benchmarks/recurrent.py [--quick]

TorchRL's LSTM and GRU have two implementations: one in Python (``python_based``, which the built-in
networks take), and torch's own layers. With the same weights, on one thread, in float32:

- *step*: microseconds of CPU of a pass over 8 rows, as an actor makes it, in turns; the median,
  with the smallest and the largest;
- *difference*: the largest between 32 steps without gradient, as actors make them, and one sequence
  with gradient, as the learner does: of 1, 3, 8 and 16 rows, without an end in between.
"""

from __future__ import annotations

from itertools import product

import torch
from harness import cpu_us, machine, markdown, options, spread
from tensordict import TensorDict, TensorDictBase
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from hts_torchrl.models.recurrent import CELLS, FEATURES, Cell, make_memory

ROWS, STEPS, WIDTHS = (1, 3, 8, 16), 32, (64, 512)
TIMED_ROWS = 8
Module = LSTMModule | GRUModule


def implementations(cell: Cell, width: int) -> dict[str, Module]:
    """Return TorchRL's implementation and torch's, with the same weights."""
    torch.manual_seed(0)
    python, torchs = make_memory(cell, width), make_memory(cell, width)
    torchs.load_state_dict(python.state_dict())
    return {"TorchRL's": python, "torch's": torchs.make_cudnn_based()}


def states_of(module: Module) -> list[str]:
    """Return the keys of what a module remembers."""
    return [key for key in module.in_keys if key not in (FEATURES, "is_init")]


def inputs(module: Module, width: int, rows: int) -> TensorDictBase:
    """Return features ``[B, T, width]`` of running trajectories, and a memory for each step."""
    generator = torch.Generator().manual_seed(1)
    entries = {
        FEATURES: torch.randn(rows, STEPS, width, generator=generator),
        "is_init": torch.zeros(rows, STEPS, 1, dtype=torch.bool),
        **{key: torch.zeros(rows, STEPS, 1, width) for key in states_of(module)},
    }
    return TensorDict(entries, [rows, STEPS])


@torch.no_grad()
def step_us(module: Module, width: int, seconds: float) -> float:
    """Return the microseconds of CPU of one step."""
    given = inputs(module, width, TIMED_ROWS)[:, 0]
    return cpu_us(lambda: module(given.copy()), seconds)


def difference(module: Module, width: int, rows: int) -> float:
    """Return the largest difference of the output between steps and a sequence."""
    given = inputs(module, width, rows)
    with set_recurrent_mode(True):
        sequence = module(given.clone())["hidden"].detach()
    memory = given[:, 0].select(*states_of(module))
    hidden = []
    with torch.no_grad():
        for step in range(STEPS):
            written = module(given[:, step].clone().update(memory))
            memory = written["next"].select(*states_of(module))
            hidden.append(written["hidden"])
    return float((torch.stack(hidden, 1) - sequence).abs().max())


def main() -> None:
    parser = options(__doc__, "one repeat of 0.1 s")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.seconds = 1, 0.1
    torch.set_num_threads(1)
    text = [machine()]
    print(text[0])
    table: list[dict[str, str]] = []
    for cell, width in product(CELLS, WIDTHS):
        modules = implementations(cell, width)
        took: dict[str, list[float]] = {name: [] for name in modules}
        for _ in range(args.repeats):
            for name, module in modules.items():
                took[name].append(step_us(module, width, args.seconds))
        table += [
            {
                "memory": f"{cell} of {width}", "implementation": name,
                "step of 8 rows, us": spread(took[name]),
                "difference": f"{max(difference(module, width, n) for n in ROWS):.1e}",
            }
            for name, module in modules.items()
        ]  # fmt: skip
    text.append(markdown(table))
    print(text[-1])
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "recurrent.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
