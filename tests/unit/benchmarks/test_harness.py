"""Contests: programs take turns; one that does not start ends all or is left out."""

import signal
import sys
import time

import pytest
from benchmarks import harness

COUNTS = """
import os, time
import numpy as np
counter = np.memmap(os.environ["BENCHMARK_ROUNDS"], np.int64, "r+", shape=1)
counter[0] = 0
while True:
    time.sleep(0.01)
    counter[0] += 1
"""
WORKS = [sys.executable, "-c", COUNTS]
BREAKS = [sys.executable, "-c", "raise RuntimeError('no such game')"]

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _own_signals():
    """A contest changes what SIGTERM does to its program."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("at_once", [1, 2])
def test_each_has_all_its_turns(at_once, monkeypatch):
    monkeypatch.setattr(harness, "AT_ONCE", at_once)
    taken = harness.take_turns({"one": WORKS, "two": WORKS}, turns=2, seconds=0.1)
    assert list(taken) == ["one", "two"]
    for turns in taken.values():
        assert len(turns) == 2
        assert all(turn.rounds >= 1 and turn.seconds >= 0.1 for turn in turns)


def test_one_that_does_not_start_ends_the_contest():
    with pytest.raises(harness.Failed, match="no such game"):
        harness.take_turns({"one": WORKS, "broken": BREAKS}, turns=1, seconds=0.1)


def test_one_that_does_not_start_is_left_out_where_that_is_asked_for():
    failed = {}
    commands = {"broken": BREAKS, "one": WORKS}
    taken = harness.take_turns(commands, turns=1, seconds=0.1, failed=failed)
    assert list(taken) == ["one"]
    assert list(failed) == ["broken"]
    assert "no such game" in failed["broken"]


def test_one_that_hangs_is_ended_before_the_turns(monkeypatch, tmp_path):
    here = tmp_path / "alive"
    beats = (
        f"import pathlib, time\nwhile True: pathlib.Path({str(here)!r}).touch(); time.sleep(0.01)"
    )
    monkeypatch.setattr(harness, "_LIMIT_S", 1.0)
    ended = []

    def turn(_, seconds):
        here.unlink(missing_ok=True)
        time.sleep(0.1)
        ended.append(not here.exists())
        return harness.Turn(1, seconds, 0.0)

    monkeypatch.setattr(harness._Contestant, "turn", turn)
    commands = {"hangs": [sys.executable, "-c", beats], "one": WORKS}
    harness.take_turns(commands, turns=2, seconds=0.1, failed={})
    assert ended == [True, True]
