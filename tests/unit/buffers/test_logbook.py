import pytest

from hts_torchrl.buffers import logbook as logbook_module
from hts_torchrl.buffers.arena import SharedArena
from hts_torchrl.buffers.logbook import Logbook, Stopwatch


@pytest.fixture
def logbook():
    arena = SharedArena(Logbook.layout(3))
    yield Logbook(arena)
    arena.close()


def test_a_worker_without_an_error_has_an_empty_text(logbook):
    assert logbook.read_error(1) == ""


def test_an_error_is_read_as_it_was_written(logbook):
    logbook.write_error(1, "Traceback: größer\n")
    assert logbook.read_error(1) == "Traceback: größer\n"


def test_an_error_is_kept_apart_from_other_workers(logbook):
    logbook.write_error(1, "x" * 100_000)
    assert [logbook.read_error(worker) for worker in (0, 2)] == ["", ""]


def test_the_end_of_a_long_traceback_is_kept(logbook):
    logbook.write_error(0, "x" * 100_000 + "ValueError: here")
    assert logbook.read_error(0).endswith("ValueError: here")


def test_a_letter_cut_in_two_does_not_hide_the_rest(logbook):
    logbook.write_error(0, "€" * 20_000 + "end")
    assert logbook.read_error(0).endswith("€end")


def test_the_stopwatch_splits_time_into_work_and_waiting(logbook, monkeypatch):
    times = iter([10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(logbook_module.time, "perf_counter", lambda: next(times))
    watch = Stopwatch(logbook, 2)
    watch.waits()
    watch.works()
    watch.waits()
    assert (logbook.busy_s[2], logbook.waiting_s[2]) == (3.0 + 1.0, 7.0)
