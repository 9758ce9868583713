"""One moment of the modelled protocol: where everybody is, and what everything holds."""

from __future__ import annotations

from typing import NamedTuple

EXECUTORS = ACTORS = STORAGES = range(2)


class Executor(NamedTuple):
    """Where ``Executor.run`` is."""

    at: str = "start"
    round: int = 0
    step: int = 0
    played: int = 0
    """Steps of its environment since the start of the run."""


class Answer(NamedTuple):
    """A slot of the ``ActionBuffer``: to what, and by which weights."""

    observation: int | None
    version: int


class Actor(NamedTuple):
    """Where ``Actor.run`` is, and with what in hand."""

    at: str = "start"
    batch: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()


class Parent(NamedTuple):
    """Where ``HTSCollector.iterator`` is, or the learner's loop around it."""

    at: str = "exchange"
    round: int = 0
    """The round that is waited for, or that of the batch in hand."""
    after_rings: str = "wait"
    seen: tuple[int, ...] = ()
    """Executors whose reports have been taken."""
    recoveries: int = 0
    """Of the round that is waited for."""

    @property
    def batch(self) -> int | None:
        """The round whose storage is not the executors' now, if there is one."""
        meeting = self.at in ("exchange", "ring 0", "ring 1") and self.after_rings == "note"
        return self.round if meeting or self.at in ("note", "learn", "publish") else None


class Cell(NamedTuple):
    """One ``(n, t)`` of a ``RolloutStorage``: what was seen, and what was answered."""

    observation: int | None = None
    answer: Answer | None = None


class State(NamedTuple):
    """Everything that decides what can happen next."""

    parent: Parent
    executors: tuple[Executor, ...]
    actors: tuple[Actor, ...]
    cells: tuple[tuple[tuple[Cell, ...], ...], ...]
    """``DoubleStorage``: ``[2][N][T]``."""
    observations: tuple[int | None, ...] = (None, None)
    """``StateBuffer``."""
    answers: tuple[Answer | None, ...] = (None, None)
    """``ActionBuffer``."""
    ready: tuple[int, ...] = ()
    """``ReadyQueue`` of environments; in order of number, since whoever takes some takes all."""
    reports: tuple[int, ...] = ()
    """``ReadyQueue`` of executors that have finished, likewise."""
    bells: tuple[int, ...] = (0, 0)
    """Rings in each ``Doorbell`` that were not heard yet."""
    acting: int = 0
    published: int | None = None
    """``PolicyWeights``: the version in either slot."""
    crashes: int = 0

    @property
    def lifeline_closed(self) -> bool:
        """Whether workers leave where they wait."""
        return self.parent.at in ("renew", "raised", "done", "crashed")

    @property
    def all_ended(self) -> bool:
        """Whether no worker lives."""
        return all(worker.at in ("crashed", "left") for worker in self.executors + self.actors)

    @property
    def is_final(self) -> bool:
        """Whether the run is over, learned to its end or stopped, and nobody left behind."""
        return self.parent.at in ("raised", "done", "crashed") and self.all_ended

    def representative(self) -> State:
        """The same state, or that in which the actors, who are all alike, have changed places."""
        first, second = self.actors
        return self if first <= second else self._replace(actors=(second, first))


class Step(NamedTuple):
    """One transition: who, being where, does what."""

    who: str
    at: str
    what: str

    def of_role(self) -> Step:
        """The kind of the step: which of two workers takes it makes none."""
        return self._replace(who=self.who.partition(" ")[0])
