"""The command line, ``hts-torchrl``.

It ends here if its working folder was removed, before torch is loaded: without a working folder, a
library of torch ends the process with a message of its own.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

try:
    Path.cwd()
except FileNotFoundError:
    sys.stderr.write("hts-torchrl: error: the working folder was removed: change to another\n")
    raise SystemExit(2) from None


_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
)
"""Variables of launchers and clusters."""


def program() -> None:
    """Run the command line as a process of its own; signals while torch is loaded end it, too.

    Threads of a learner sleep while they wait for each other, unless the user's environment says
    otherwise: OpenMP would let them spin, on cores that executors and actors need. It reads the
    variable when torch is loaded.
    """
    signal.signal(signal.SIGTERM, _end)
    _require_numbers()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from hts_torchrl.cli.main import program  # noqa: PLC0415 - takes seconds
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    program()


def _require_numbers() -> None:
    """Refuse what a launcher has set wrongly, before Lightning reads it when it is imported."""
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not value.strip().isdecimal():
            sys.stderr.write(f"hts-torchrl: error: {name}={value}; a whole number is needed\n")
            raise SystemExit(2)


def _end(number: int, _: FrameType | None) -> None:
    """End at once; without a handler SIGTERM does not reach the first process of a container."""
    os._exit(128 + number)
