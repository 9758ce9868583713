"""What do kernels of older instruction sets cost: the price of bits that other CPUs could repeat.

Run: python benchmarks/kernels.py [--quick] [--turns 7] [--emulator qemu-x86_64]

Of the MLP of CartPole and the Nature network of Atari, on one thread: microseconds of CPU a row, of
an actor's pass over 8 rows, and of a learner's pass over 256 rows with gradient and optimiser. Time
that others take from this process does not count. Each setting runs in a process of its own, in
turns; the median, with the smallest and the largest. *steps/s* is the number of rows that are acted
on and learned from once, in a second of CPU; no environment is stepped. *bits* is a digest of the
weights after 3 updates: with the same one, two settings or CPUs agree. ``--emulator`` computes
such digests, and no times, on CPUs that QEMU emulates, with 16 rows, as each row takes long there.
"""

from __future__ import annotations

import hashlib
import json
import os
from itertools import product
from typing import Any

import numpy as np
import torch
from harness import (
    EMULATED_CPUS,
    cpu_us,
    in_fresh_process,
    machine,
    markdown,
    number,
    options,
    spread,
)

from hts_torchrl.models import MLP, NatureCNN

OLDEST = {
    "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE",
}  # fmt: skip
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
SETTINGS: dict[str, dict[str, str]] = {
    "as installed": {},
    "all AVX2": AVX2,
    "AVX2, oldest MKL": AVX2 | {"MKL_CBWR": "COMPATIBLE"},
    "all oldest": OLDEST,
    "oldest ATen": {"ATEN_CPU_CAPABILITY": "default"},
    "oldest oneDNN": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oldest MKL": {"MKL_CBWR": "COMPATIBLE"},
    "all oldest, no oneDNN": OLDEST | {"MKLDNN": "0"},
}
"""Variables of the environment; ``MKLDNN`` is this program's, for ``torch.backends``."""
NETWORKS = {"MLP": (MLP, (4,)), "Nature": (NatureCNN, (4, 84, 84))}
ACTING, LEARNING, EMULATED, LIMIT_S = 8, 256, 16, 3600


def measure(name: str, seconds: float, count: int) -> dict[str, Any]:
    """Return the times of a network, and the digest of its weights after 3 updates of so many rows.

    With no seconds there are no times.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.mkldnn.enabled = os.environ.get("MKLDNN") != "0"
    kind, shape = NETWORKS[name]
    trunk = kind(shape)
    rows = torch.randn(count, *shape)
    if len(shape) == 3:
        rows = rows.mul(80).clamp(0, 255).to(torch.uint8)
    optimizer = torch.optim.Adam(trunk.parameters(), 1e-3, fused=True)

    @torch.no_grad()
    def act() -> None:
        trunk(rows[:ACTING])

    def learn() -> None:
        optimizer.zero_grad()
        trunk(rows).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        learn()
    sha = hashlib.sha256()
    for parameter in trunk.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    found: dict[str, Any] = {"digest": sha.hexdigest()[:8]}
    if seconds:
        found["act_us"] = cpu_us(act, seconds) / ACTING
        found["learn_us"] = cpu_us(learn, seconds) / count
    return found


def row(name: str, setting: str, turns: list[dict[str, Any]]) -> dict[str, object]:
    """Return a row of the table."""
    acting, learning = ([turn[key] for turn in turns] for key in ("act_us", "learn_us"))
    steps = 1e6 / (np.median(acting) + np.median(learning))
    return {
        "network": name,
        "kernels": setting,
        "act, us a row": spread(acting),
        "learn, us a row": spread(learning),
        "steps/s": number(float(steps)),
        "bits": "/".join(sorted({turn["digest"] for turn in turns})),
    }


def bits(emulator: str) -> list[dict[str, object]]:
    """Return a row of digests for each network and setting, on this CPU and on emulated ones."""
    prefixes = {"this CPU": []} | {cpu: [emulator, "-cpu", cpu] for cpu in EMULATED_CPUS}
    rows = []
    for name, setting in product(NETWORKS, ("AVX2, oldest MKL", "as installed")):
        child = [name, 0.0, EMULATED]
        digests = {
            cpu: in_fresh_process(
                __file__, child, LIMIT_S, emulator=prefix, variables=SETTINGS[setting]
            )["digest"]
            for cpu, prefix in prefixes.items()
        }
        rows.append({"network": name, "kernels": setting, **digests})
    return rows


def main() -> None:
    parser = options(__doc__, "1 turn of 0.1 s")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of CPU, for each pass")
    parser.add_argument("--emulator", default="", help="QEMU's program of user mode: digests alone")
    args = parser.parse_args()
    if args.emulator:
        print(f"{machine()}\n{markdown(bits(args.emulator))}")
        return
    if args.child:
        print(json.dumps(measure(*args.child)))
        return
    args.turns, args.seconds = (1, 0.1) if args.quick else (args.turns, args.seconds)
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _, name, setting in product(range(args.turns), NETWORKS, SETTINGS):
        child = [name, args.seconds, LEARNING]
        found = in_fresh_process(__file__, child, variables=SETTINGS[setting])
        taken.setdefault((name, setting), []).append(found)
    rows = [row(*key, turns) for key, turns in sorted(taken.items(), key=lambda item: item[0][0])]
    args.output.mkdir(parents=True, exist_ok=True)
    print(document := f"{machine()}\n{markdown(rows)}")
    (args.output / "kernels.md").write_text(document)


if __name__ == "__main__":
    main()
