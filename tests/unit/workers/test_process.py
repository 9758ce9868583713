import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.shared.pipes import PoolStopped
from hts_torchrl.shared.worker_status import WorkerStatus
from hts_torchrl.workers.process import LEFT_TO_THE_PARENT, close, run_task, run_worker


def status() -> WorkerStatus:
    return WorkerStatus(SharedArrays(WorkerStatus.layout(4, 2)))


@dataclass
class Task:
    """Raises what it is given, or returns; its buffers have a worker status only."""

    error: BaseException | None = None
    index: int = 0
    worker: int = 3
    status: WorkerStatus = field(default_factory=status)

    @property
    def shared(self):
        return SimpleNamespace(status=self.status)

    @property
    def told(self) -> str:
        return self.status.read_error(3)

    def run(self, lifeline):  # noqa: ARG002
        self.handlers = [signal.getsignal(number) for number in LEFT_TO_THE_PARENT]
        self.close()

    def close(self):
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
    run_task(task, None)
    for handler in task.handlers:
        assert handler(signal.SIGTERM, None) is None


def test_a_limit_on_threads_is_told_as_one(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    ended = []
    group = SimpleNamespace(end=lambda: ended.append(True))
    monkeypatch.setattr("hts_torchrl.workers.process.ProcessGroup", lambda *_: group)
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    monkeypatch.setattr("threading.Thread.start", start)
    monkeypatch.setattr("resource.getrlimit", lambda _: (123, 456))
    task = Task()
    task.status.groups = None
    with pytest.raises(SystemExit):
        run_worker(task, None, SimpleNamespace(answer=lambda: None), dict(os.environ))
    assert ended
    assert task.status.refused[3]
    assert "ulimit -u is 123" in task.told


def test_a_worker_that_is_told_to_stop_leaves_quietly():
    task = Task(PoolStopped("lifeline"))
    assert run_task(task, None)
    assert task.told == ""


def test_what_a_worker_starts_answers_signals_as_usual():
    """Else an environment could not terminate the process that it has started."""
    run_task(Task(), None)
    script = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert subprocess.run([sys.executable, "-S", "-c", script]).returncode == -signal.SIGTERM


class Unprintable(Exception):
    def __str__(self):
        raise ArithmeticError("as asked")


@dataclass(frozen=True)
class Frozen(Exception):  # takes no note
    where: str


ERRORS = [
    BrokenPipeError("its child died"),
    EOFError("oh"),
    ConnectionResetError("oh"),
    ValueError("a lone \ud800 surrogate"),
    ValueError("oh" * 10**6),
    Unprintable(),
    Frozen("oh"),
    RecursionError("oh"),
    SystemExit(0),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_worker_raises_is_left_in_the_worker_status(error):
    task = Task(error)
    assert not run_task(task, None)
    assert type(error).__name__ in task.told
    assert "in close\n    raise self.error\n" in task.told
    error.with_traceback(None)  # which keeps the worker status's memory


def test_what_is_raised_when_a_task_is_closed_comes_behind_what_it_raised_before():
    task = Task(ValueError("first"))
    run_task(task, None)
    task.error = OSError("second")
    assert not close(task)
    assert 0 < task.told.index("ValueError: first") < task.told.index("OSError: second")


def test_notes_on_an_exception_reach_the_worker_status():
    error = ValueError("oh")
    error.add_note("raised by step() of environment 4")
    task = Task(error)
    run_task(task, None)
    assert "environment 4" in task.told


STARTS_ANOTHER = """
import os, subprocess, numpy
from hts_torchrl.workers.process import ProcessGroup
groups = numpy.zeros(1, int)
group = ProcessGroup(groups, 0)
before = subprocess.Popen(["sleep", "60"])
group.end()
after = subprocess.Popen(["sleep", "60"])
print(before.wait(), os.getpgid(after.pid) == groups[0])
after.kill()
after.wait()
"""


def test_what_is_started_after_a_group_was_ended_belongs_to_it_too():
    """A ``multiprocessing.Pool`` replaces workers that were killed."""
    ran = subprocess.run([sys.executable, "-c", STARTS_ANOTHER], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("-9 True\n", "")
