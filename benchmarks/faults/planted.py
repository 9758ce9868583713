"""Bugs planted into a copy of the package: each must be found by a test that passes without it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CELLS = "tests/protocol/test_cells.py::"
RENDEZVOUS = "tests/protocol/test_rendezvous.py::"


@dataclass(frozen=True)
class Bug:
    """One piece of a source file in place of another, and the test that must find it."""

    file: str
    right: str
    wrong: str
    test: str

    def plant(self, source: Path) -> None:
        path = source / "hts_torchrl" / self.file
        text = path.read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"{self.file} does not have this once: {self.right!r}")
        path.write_text(text.replace(self.right, self.wrong))


BUGS = {
    "skipped barrier": Bug(
        "workers/crew.py",
        "while missing:",
        "while len(missing) > 1:",
        RENDEZVOUS + "test_a_batch_waits_for_the_slowest_executor",
    ),
    "early swap": Bug(
        "workers/executor.py",
        "self._schedule.storage_of(round_index)",
        "self._schedule.storage_of(round_index + 1)",
        RENDEZVOUS + "test_a_batch_stays_what_it_is_while_the_next_round_is_collected",
    ),
    "alpha off by one": Bug(
        "workers/executor.py",
        "for step in range(board.schedule.steps_per_round):",
        "for step in range(board.schedule.steps_per_round - 1):",
        CELLS + "test_every_observation_is_in_its_cell",
    ),
    "stale weights": Bug(
        "weights.py",
        "if version != self.acting_version:",
        "if version < 0:",
        CELLS + "test_every_value_was_computed_by_the_version_that_is_named",
    ),
    "torn write": Bug(
        "workers/executor.py",
        "executor.put_state(step)\n                board.ready.put(executor.envs)\n",
        "board.ready.put(executor.envs)\n                executor.put_state(step)\n",
        "tests/unit/workers/test_executor.py::TestAnnouncements"
        "::test_a_state_is_whole_when_it_is_announced",
    ),
    "seed used twice": Bug(
        "workers/executor.py",
        "self._seeds_given[row] += 1",
        "self._seeds_given[row] += 0",
        CELLS + "test_every_observation_is_in_its_cell",
    ),
}


def found(name: str, _: random.Random) -> bool:
    bug = BUGS[name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        _copy(source)
        bug.plant(source)
        return _outcome(bug.test, source) == "1 failed" and _passes_without(bug.test)


@cache
def _passes_without(test: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        _copy(source)
        return _outcome(test, source) == "1 passed"


def _copy(source: Path) -> None:
    shutil.copytree(REPOSITORY / "src", source, ignore=shutil.ignore_patterns("__pycache__"))


def _outcome(test: str, source: Path) -> str:
    """Return ``1 failed`` or ``1 passed`` of one test on the package in ``source``."""
    pytest = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # A test that fails may leave workers behind, which the summary counts beside it.
    return " ".join(pytest.stdout.splitlines()[-1].replace(",", "").split()[:2])


ROWS = {f"planted bug, {name}: a test finds it": (1, partial(found, name)) for name in BUGS}
