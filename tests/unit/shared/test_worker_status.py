import pytest

from hts_torchrl.shared import worker_status
from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.shared.worker_status import BusyTimer, WorkerStatus


@pytest.fixture
def status():
    arrays = SharedArrays(WorkerStatus.layout(3, 2))
    yield WorkerStatus(arrays)
    arrays.close()


def test_both_ends_of_a_long_error_are_kept_in_the_row_of_its_worker(status):
    """The message may be long, and where it was raised comes before it."""
    status.write_error(1, "Traceback: in step\nValueError: " + "x" * 100_000 + "here")
    assert status.read_error(1).startswith("Traceback: in step\nValueError: x")
    assert status.read_error(1).endswith("xhere")
    assert [status.read_error(worker) for worker in (0, 2)] == ["", ""]


def test_a_text_that_is_no_unicode_is_told(status):
    status.write_error(0, "ValueError: \ud800")
    assert status.read_error(0) == "ValueError: \\ud800"


def test_a_shorter_text_leaves_nothing_of_the_one_before(status):
    status.write_error(0, "Traceback: größer\n")
    assert status.read_error(0) == "Traceback: größer\n"
    status.write_error(0, "OSError")
    assert status.read_error(0) == "OSError"


def test_a_letter_cut_in_two_does_not_hide_the_rest(status):
    status.write_error(0, "€" * 20_000 + "end")
    assert status.read_error(0).endswith("€end")


@pytest.mark.parametrize("name", ["rounds", "steps", "busy_s", "waiting_s"])
def test_a_sign_is_in_the_row_of_its_worker(status, name):
    before = status.signs()
    getattr(status, name)[1] += 1
    assert (status.signs() != before).any(axis=1).tolist() == [False, True, False]


def test_the_stopwatch_splits_time_into_work_and_waiting(status, monkeypatch):
    times = iter([10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(worker_status.time, "perf_counter", lambda: next(times))
    watch = BusyTimer(status, 2)
    watch.waits()
    watch.works()
    watch.waits()
    assert (status.busy_s[2], status.waiting_s[2]) == (3.0 + 1.0, 7.0)


def test_a_stopwatch_goes_on_where_the_last_one_of_its_worker_ended(status, monkeypatch):
    times = iter([10.0, 13.0, 20.0, 30.0, 31.0, 35.0])
    monkeypatch.setattr(worker_status.time, "perf_counter", lambda: next(times))
    for _ in range(2):
        watch = BusyTimer(status, 2)
        watch.waits()
        watch.works()
    assert (status.busy_s[2], status.waiting_s[2]) == (3.0 + 1.0, 7.0 + 4.0)


def test_spans_of_work_are_kept_while_a_round_is_traced(status, monkeypatch):
    times = iter([10.0, 13.0, 20.0, 21.0, 25.0, 26.0])
    monkeypatch.setattr(worker_status.time, "perf_counter", lambda: next(times))
    watch = BusyTimer(status, 2)
    watch.waits()
    watch.works()
    status.trace(True)
    assert watch.waits() == 21.0
    status.trace(False)
    watch.works()
    watch.waits()
    assert [status.spans(worker) for worker in range(3)] == [[], [], [(20.0, 21.0)]]


def test_spans_beyond_their_number_are_lost(status):
    status.trace(True)
    for begin in range(5):
        status.add_span(1, begin, begin + 0.5)
    assert status.spans(1) == [(0.0, 0.5), (1.0, 1.5)]
    assert status.spans(0) == []


def test_another_trace_forgets_the_one_before(status):
    status.trace(True)
    status.add_span(1, 0.0, 1.0)
    status.trace(False)
    assert status.spans(1) == [(0.0, 1.0)]
    status.trace(True)
    assert status.spans(1) == []
