"""Typed errors: whose mistake it is decides the class.

What refuses something raises a ConfigurationError, which names it and what would be right.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Of an OSError: a file cannot grow, whoever writes it."""


class HTSError(Exception):
    """Base of all errors raised by this package on purpose."""


class ConfigurationError(HTSError, ValueError):
    """The user's settings cannot work; the message says which, and what would work."""


def require(condition: bool, setting: str, wanted: str) -> None:
    """Refuse a setting unless ``condition`` holds.

    Args:
        condition: what must be true of it.
        setting: its name and value, as in ``gamma=2``.
        wanted: what would be accepted, as in ``0 to 1``.

    Raises:
        ConfigurationError: with both.
    """
    if not condition:
        raise ConfigurationError(f"{setting}; {wanted} is needed")


def require_type(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Refuse a setting, by its name, unless it is of the kind that is wanted (:func:`require`)."""
    require(isinstance(value, kind), f"{name} of type {type(value).__name__}", wanted)


def require_counts(settings: object, *names: str) -> None:
    """Refuse settings, by their attributes' names, unless each is None, or 1 or more."""
    for name in names:
        count = getattr(settings, name)
        require(count is None or count >= 1, f"{name}={count}", "1 or more")


def in_one_line(told: object) -> str:
    """Describe something: bounds of an array, and some errors, would take several lines."""
    return " ".join(str(told).split())


def reason_of(error: OSError, path: object) -> str:
    """Return in words what the system refuses.

    Args:
        error: which it raised.
        path: that the caller names; if the error is about another one, that is told too.
    """
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "a file is where a folder is needed"
    other = error.filename
    return reason if other is None or str(other) == str(path) else f"{reason}: {other}"


@contextlib.contextmanager
def naming(setting: str, path: object) -> Iterator[None]:
    """Refuse a setting, such as ``--output``, where the system or a reader refuses its path."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{setting}={path}: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"{setting}={path}: {reason_of(error, path)}") from error


class CheckpointError(HTSError, OSError):
    """A checkpoint cannot be written; the previous file is still there."""


class ProtocolError(HTSError, RuntimeError):
    """A mistake of this package: a call came out of order."""


class NotFiniteError(HTSError, ArithmeticError):
    """A gradient is NaN or infinite; no step was taken with it.

    A checkpoint saved because of it has the weights before the round.
    """


class DifferenceError(HTSError, RuntimeError):
    """Two runs of one task do not have the same bits."""


class ReplayError(HTSError, RuntimeError):
    """An environment behaves differently when its game is replayed with the same actions."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker was when it failed.

    ``envs`` holds environment indices (empty for an actor); ``step`` counts from 0 in its round,
    and is None if it is not known.
    """

    role: str
    index: int
    envs: tuple[int, ...]
    round_index: int
    step: int | None

    def __str__(self) -> str:
        """Name the worker, its environments, its round and its step."""
        envs = f" (environments {list(self.envs)})" if self.envs else ""
        step = f", step {self.step}" if self.envs and self.step is not None else ""
        return f"{self.role} {self.index}{envs}, round {self.round_index}{step}"


class WorkerError(HTSError, RuntimeError):
    """A worker process raised, died or hung.

    Attributes:
        place: which worker, and how far it was.
        cause: the signal, the exit status, the worker's own traceback, or the stack where it hangs.
    """

    def __init__(self, place: WorkerPlace, cause: str) -> None:
        super().__init__(f"{place}: {cause}")
        self.place = place
        self.cause = cause

    def __reduce__(self) -> tuple[type[WorkerError], tuple[WorkerPlace, str]]:
        """Pickle by the constructor's arguments."""
        return type(self), (self.place, self.cause)


class WorkerKilled(WorkerError):
    """A worker process was ended by a signal: by the kernel for want of memory, or by a crash."""
