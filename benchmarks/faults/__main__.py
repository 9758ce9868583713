"""Faults, each many times over: what breaks, and what must come of it.

Run: python benchmarks/faults [--quick] [--only words of a row's name]

Every row is a fault at random moments, with the number of trials and of those that ended as they
must. The exit status is 1 if one did not. Processes are real, and so are the signals. A file of
this folder has the faults of one kind, and the rows that they make.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable

import configurations
import finite
import resuming
import saving
import shared_memory
import signals
import soak
import workers

ROWS: dict[str, tuple[int, Callable[[random.Random], bool]]] = {
    **workers.ROWS,
    **resuming.ROWS,
    **saving.ROWS,
    **signals.ROWS,
    **finite.ROWS,
    **configurations.ROWS,
    **shared_memory.ROWS,
    **soak.ROWS,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials")
    parser.add_argument("--only", default="", help="rows that have this in their names")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| fault and outcome | trials | passed | seconds |\n|---|---|---|---|")
    failures = 0
    for name, (trials, trial) in ROWS.items():
        if arguments.only not in name:
            continue
        trials = max(1, trials // 10) if arguments.quick else trials
        began_s = time.monotonic()
        passed = sum(trial(random.Random(number)) for number in range(trials))
        failures += trials - passed
        print(f"| {name} | {trials} | {passed} | {time.monotonic() - began_s:.0f} |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
