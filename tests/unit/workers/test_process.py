import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hts_torchrl.buffers.doorbell import CrewStopped
from hts_torchrl.workers.process import LEFT_TO_THE_PARENT, work


@dataclass
class Task:
    """Raises what it is given, or returns; its board has a logbook that keeps one text."""

    error: BaseException | None = None
    index: int = 0
    worker: int = 3
    texts: dict = field(default_factory=dict)

    @property
    def board(self):
        logbook = SimpleNamespace(write_error=self.texts.__setitem__)
        return SimpleNamespace(logbook=logbook)

    def run(self, lifeline):  # noqa: ARG002
        self.handlers = [signal.getsignal(number) for number in LEFT_TO_THE_PARENT]
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _keep_handlers():
    handlers = [(number, signal.getsignal(number)) for number in LEFT_TO_THE_PARENT]
    yield
    for number, handler in handlers:
        signal.signal(number, handler)


def test_a_worker_leaves_ctrl_c_and_sigterm_to_the_parent():
    task = Task()
    work(task, None)
    assert task.handlers == [signal.SIG_IGN, signal.SIG_IGN]


@pytest.mark.parametrize("error", [CrewStopped("lifeline"), BrokenPipeError()])
def test_a_worker_that_is_told_to_stop_leaves_quietly(error):
    task = Task(error)
    work(task, None)
    assert not task.texts


@pytest.mark.parametrize("error", [ValueError("oh"), SystemExit(0), KeyboardInterrupt()])
def test_whatever_a_worker_raises_is_left_in_the_logbook(error):
    task = Task(error)
    with pytest.raises(SystemExit):
        work(task, None)
    assert type(error).__name__ in task.texts[3]


def test_a_worker_that_raised_ends_with_a_status_of_failure():
    with pytest.raises(SystemExit) as ended:
        work(Task(ValueError("oh")), None)
    assert ended.value.code == 1


def test_notes_on_an_exception_reach_the_logbook():
    error = ValueError("oh")
    error.add_note("raised by step() of environment 4")
    task = Task(error)
    with pytest.raises(SystemExit):
        work(task, None)
    assert "environment 4" in task.texts[3]
