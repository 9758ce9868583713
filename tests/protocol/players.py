"""Threads in the place of processes: each stops before every step until it is told to take it."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Callable

from hts_torchrl import WorkerError
from hts_torchrl.shared import pipes
from hts_torchrl.shared.pipes import PoolStopped, ReadyQueue

# Only a thread that has gone wrong makes anybody wait as long.
_PATIENCE_S = 60.0


class Differs(AssertionError):
    """The real classes are not where the model is."""


class Killed(BaseException):
    """What a crash is in a thread."""


class Player(threading.Thread):
    """One process of the model."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.at = "start"
        self.error: BaseException | None = None
        self._act, self._told = act, ""
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    @property
    def has_ended(self) -> bool:
        return self.at in ("crashed", "left", "raised", "done", "failed")

    def run(self) -> None:
        try:
            self._wait()
            self._act()
            end = "done"
        except Killed:
            end = "crashed"
        except PoolStopped:
            end = "left"
        except WorkerError:
            end = "raised"
        except BaseException as error:  # told to the director
            self.error, end = error, "failed"
        self.at = end
        self._stopped.release()

    def turn(self, at: str) -> str:
        """Stop before a step, in this thread; returns what it was told to do then."""
        self.at = at
        self._stopped.release()
        return self._wait()

    def _wait(self) -> str:
        self._go.acquire()
        if self._told == "crash":
            raise Killed
        return self._told

    def take(self, what: str) -> None:
        """Let it take one step, in the director's thread."""
        self._told = what
        self._go.release()
        if not self._stopped.acquire(timeout=_PATIENCE_S):
            raise Differs(f"{self.name} does not come back from {what!r}")
        if self.error is not None:
            raise Differs(f"{self.name} raised in {what!r}") from self.error


def turn(at: str) -> str:
    """Stop before a step, if this thread is a player."""
    player = threading.current_thread()
    return player.turn(at) if isinstance(player, Player) else ""


def sleep_until_readable(fd: int, lifeline) -> None:
    """The real one, once the model says that it does not sleep."""
    turn("wake")
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(lifeline.fileno(), select.POLLIN)
    if not poll.poll(0):
        raise Differs("nothing to wake up for")
    doorbell_sleep(fd, lifeline)


doorbell_sleep = pipes.sleep_until_readable


class StagedProcess:
    """What :class:`ProcessPool` asks of a process, of a thread."""

    def __init__(self, name: str, task, lifeline) -> None:
        self._lifeline = lifeline
        self.player = Player(name, lambda: task.run(lifeline))

    @property
    def exitcode(self) -> int | None:
        if not self.player.has_ended:
            return None
        return -signal.SIGKILL if self.player.at == "crashed" else 0

    def is_alive(self) -> bool:
        return not self.player.has_ended

    def join(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Wait, but only for a worker pool that is leaving: the others are asked in passing."""
        poll = select.poll()
        poll.register(self._lifeline.fileno(), select.POLLIN)
        while self.is_alive() and poll.poll(0):
            turn("join")

    def close(self) -> None:
        """A thread leaves nothing."""


class StagedPoll:
    """What the collector sees of its workers, when it is told to."""

    def __init__(self, finished: ReadyQueue) -> None:
        self._finished = finished

    def poll(self, _: float) -> list[tuple[int, int]]:
        seen = turn("wait")
        fd = self._finished.fileno() if seen == "poll" else -1
        return [(fd, select.POLLIN)]
