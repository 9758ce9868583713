"""Faults, each many times over: what breaks, and what must come of it.

Run: python benchmarks/faults [--quick] [--only words of a row's name]

Every row is a fault at random moments, with the number of trials and of those that ended as they
must. The exit status is 1 if one did not. Processes are real, and so are the signals. A file of
this folder has the faults of one kind, and the rows that they make.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing.util
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

# The folder of the tests, some of whose helpers are used, is not where modules are looked for.
sys.path.append(str(Path(__file__).parents[2]))

import closing
import configurations
import failing
import finite
import killed_ranks
import resuming
import saving
import shared_memory
import signals
import soak
import workers

ROWS: dict[str, tuple[int, Callable[[random.Random], bool]]] = {
    **workers.ROWS,
    **resuming.ROWS,
    **killed_ranks.ROWS,
    **saving.ROWS,
    **failing.ROWS,
    **closing.ROWS,
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
    if not any(arguments.only in name for name in ROWS):
        parser.error(f"--only {arguments.only!r} is in no row's name; these are: {'; '.join(ROWS)}")
    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module="lightning")
    logger = logging.getLogger("hts_torchrl")
    logger.propagate = False  # a trial that asks what is logged listens there
    logger.addHandler(logging.NullHandler())
    multiprocessing.util.get_temp_dir()  # the fork server's, which outlives the next line's
    with tempfile.TemporaryDirectory() as folder:  # so that what is left there is ours
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        return 1 if run(arguments.only, quick=arguments.quick) else 0


def run(only: str, *, quick: bool) -> int:
    """Print a line for each row; returns the trials that failed."""
    print("| fault and outcome | trials | passed | seconds |\n|---|---|---|---|")
    failures = 0
    for name, (trials, trial) in ROWS.items():
        if only not in name:
            continue
        trials = max(1, trials // 10) if quick else trials
        began_s = time.monotonic()
        passed = sum(trial(random.Random(number)) for number in range(trials))
        failures += trials - passed
        print(f"| {name} | {trials} | {passed} | {time.monotonic() - began_s:.0f} |", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
