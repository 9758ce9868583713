"""The protocol of a worker pool as a transition system: who may take which step in which state.

Two executors of one environment each, two actors, two storages, and the learner's process, which is
the collector's too. The memory of the model holds what tells observations and answers apart: how
many steps the environment had played, and the version of the weights.

A worker's ``at`` names the step that it takes next. A step is as much of the real code as no other
process can tell apart; ``stage.py`` plays the same steps on the real classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hts_torchrl.config import Recover
from tests.protocol.state import (
    ACTORS,
    EXECUTORS,
    STORAGES,
    Actor,
    Answer,
    Cell,
    Executor,
    Parent,
    State,
    Step,
)


@dataclass(frozen=True)
class Protocol:
    """What each process may do next. A mutation (``mutations.py``) differs in one method."""

    rounds: int = 3
    """Three, so that the last one writes the storage of the first again."""
    alpha: int = 2
    most_crashes: int = 0
    """Of all processes together, each at any moment."""
    recover: tuple[Recover, ...] = ("replay",)
    """Settings of the collector; of several, any at every crash."""
    most_recoveries: int = 1

    def initial(self) -> State:
        """The worker pool has been made, and no worker has done anything."""
        return State(
            Parent(),
            tuple(Executor() for _ in EXECUTORS),
            tuple(Actor() for _ in ACTORS),
            tuple(self._blank_storage() for _ in STORAGES),
        )

    def _blank_storage(self) -> tuple[tuple[Cell, ...], ...]:
        return ((Cell(),) * self.alpha,) * len(EXECUTORS)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Every step that is possible, with the state after it."""
        if state.crashes < self.most_crashes:
            yield from self._crashes(state._replace(crashes=state.crashes + 1))
        for what, after in self.parent(state):
            yield Step("parent", state.parent.at, what), after
        for index, executor in enumerate(state.executors):
            for what, after in self.executor(state, index):
                yield Step(f"executor {index}", executor.at, what), after
        for index, actor in enumerate(state.actors):
            for what, after in self.actor(state, index):
                yield Step(f"actor {index}", actor.at, what), after

    def _crashes(self, state: State) -> Iterator[tuple[Step, State]]:
        """Any process that lives ends without a word."""
        if state.parent.at not in ("raised", "done", "crashed"):
            yield Step("parent", state.parent.at, "crash"), _closed(state, Parent("crashed"))
        end = "left" if state.lifeline_closed else "crashed"
        for index, executor in enumerate(state.executors):
            if executor.at not in ("crashed", "left"):
                after = _with_executor(state, index, Executor(end))
                yield Step(f"executor {index}", executor.at, "crash"), after
        for index, actor in enumerate(state.actors):
            if actor.at not in ("crashed", "left"):
                after = _with_actor(state, index, Actor(end))
                yield Step(f"actor {index}", actor.at, "crash"), after

    # start, then each round: begin, alpha times (put, announce, wake, step), report.

    def executor(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        """What an executor can do."""
        executor = state.executors[index]
        at = executor.at
        if at in ("begin", "wake") and state.lifeline_closed:
            yield "leave", _with_executor(state, index, Executor("left"))
        elif at in ("begin", "wake"):
            if state.bells[index]:
                heard = state._replace(bells=_put(state.bells, index, state.bells[index] - 1))
                after = executor._replace(at="put" if at == "begin" else "step")
                yield at, _with_executor(heard, index, after)
        elif at not in ("crashed", "left"):
            state, executor = getattr(self, at)(state, index, executor)
            yield at, _with_executor(state, index, executor)

    def start(self, state: State, _: int, executor: Executor) -> tuple[State, Executor]:
        """Make the environments, and play again what the action log says."""
        return state, executor._replace(at="begin")

    def put(self, state: State, index: int, executor: Executor) -> tuple[State, Executor]:
        """Write the observation into slot and cell."""
        seen = executor.played
        state = state._replace(observations=_put(state.observations, index, seen))
        return _record(state, index, observation=seen), executor._replace(at="announce")

    def announce(self, state: State, index: int, executor: Executor) -> tuple[State, Executor]:
        """Enter the queue."""
        ready = tuple(sorted((*state.ready, index)))
        return state._replace(ready=ready), executor._replace(at="wake")

    def step(self, state: State, index: int, executor: Executor) -> tuple[State, Executor]:
        """Take the answer, step the environment, write the cell."""
        state = _record(state, index, answer=state.answers[index])
        step = executor.step + 1
        following = "put" if step < self.alpha else "report"
        return state, executor._replace(at=following, step=step, played=executor.played + 1)

    def report(self, state: State, index: int, executor: Executor) -> tuple[State, Executor]:
        """Tell the collector that the round is finished."""
        reports = tuple(sorted((*state.reports, index)))
        after = Executor("begin", executor.round + 1, played=executor.played)
        return state._replace(reports=reports), after

    # start, then again and again: wake, take, load, answer, a ring for each executor.

    def actor(self, state: State, index: int) -> Iterator[tuple[str, State]]:
        """What an actor can do."""
        at, batch, answers = state.actors[index]
        if at == "start":
            yield at, _with_actor(state, index, Actor("wake"))
        elif at == "wake" and state.lifeline_closed:
            yield "leave", _with_actor(state, index, Actor("left"))
        elif at == "wake" and state.ready:
            yield at, _with_actor(state, index, Actor("take"))
        elif at == "take" and state.ready:
            yield at, self.take(state, index)
        elif at == "take":
            yield "miss", _with_actor(state, index, Actor("wake"))  # the other one was faster
        elif at == "load":
            answers = tuple(Answer(state.observations[env], state.acting) for env in batch)
            yield at, _with_actor(state, index, Actor("answer", batch, answers))
        elif at == "answer":
            yield at, self.answer(state, index)
        elif at == "ring":
            after = Actor("ring" if batch[1:] else "wake", batch[1:])
            yield at, _with_actor(self.ring(state, batch[0]), index, after)

    def take(self, state: State, index: int) -> State:
        """Take all that wait."""
        return _with_actor(state._replace(ready=()), index, Actor("load", state.ready))

    def answer(self, state: State, index: int) -> State:
        """Write the answers into their slots."""
        actor = state.actors[index]
        slots = list(state.answers)
        for env, answer in zip(actor.batch, actor.answers, strict=True):
            slots[env] = answer
        state = state._replace(answers=tuple(slots))
        return _with_actor(state, index, Actor("ring", actor.batch))

    def ring(self, state: State, executor: int) -> State:
        """Ring a bell that remembers what was not heard."""
        return state._replace(bells=_put(state.bells, executor, state.bells[executor] + 1))

    # Each round: exchange, both rings, (note, learn, publish of the round before), wait. After the
    # last one nobody is rung: the exchange is for a longer run, which would go on from there.

    def parent(self, state: State) -> Iterator[tuple[str, State]]:
        """What the collector and the learner can do."""
        parent = state.parent
        at = parent.at
        if at == "wait":
            yield from self.wait(state)
        elif at == "renew" and state.all_ended:
            yield at, self.renew(state)
        elif at == "exchange":
            acting = state.acting if state.published is None else state.published
            exchanged = state._replace(acting=acting, published=None)
            is_over = parent.after_rings == "note" and parent.round + 1 == self.rounds
            after = parent._replace(at="note" if is_over else "ring 0")
            yield at, exchanged._replace(parent=after)
        elif at in ("ring 0", "ring 1"):
            after = parent._replace(at="ring 1" if at == "ring 0" else parent.after_rings)
            yield at, self.ring(state, int(at[-1]))._replace(parent=after)
        elif at in ("note", "learn"):
            after = parent._replace(at="learn" if at == "note" else "publish")
            yield at, state._replace(parent=after)
        elif at == "publish":
            yield at, self._asking(self.publish(state))

    def wait(self, state: State) -> Iterator[tuple[str, State]]:
        """Take the reports, or notice that a worker is gone, however late that can be seen."""
        parent = state.parent
        if state.reports:
            seen = tuple(sorted({*parent.seen, *state.reports}))
            after = parent._replace(seen=seen)
            if self.is_finished(seen):
                after = Parent("exchange", parent.round, "note")
            yield "poll", state._replace(parent=after, reports=())
        if any(worker.at == "crashed" for worker in state.executors + state.actors):
            for recover in self.recover:
                yield self._notice(state, recover)

    def _notice(self, state: State, recover: Recover) -> tuple[str, State]:
        """Stop the worker pool, to begin the round again with another or to raise."""
        parent = state.parent
        if recover == "fail" or parent.recoveries == self.most_recoveries:
            return "give up", _closed(state, parent._replace(at="raised", seen=()))
        after = Parent("renew", parent.round, recoveries=parent.recoveries + 1)
        return "repeat", _closed(state, after)

    def is_finished(self, seen: tuple[int, ...]) -> bool:
        """Whether nobody is missing at the rendezvous."""
        return len(seen) == len(EXECUTORS)

    def publish(self, state: State) -> State:
        """Write weights with one update more into the slot that does not act."""
        newest = state.acting if state.published is None else state.published
        return state._replace(published=newest + 1)

    def _asking(self, state: State) -> State:
        """Ask for the next batch, if there is one."""
        following = state.parent.round + 1
        if following < self.rounds:
            return state._replace(parent=Parent("wait", following))
        return _closed(state, Parent("done", state.parent.round))

    def renew(self, state: State) -> State:
        """Make another pool for the round, with other pipes; what the last one wrote is lost."""
        number = state.parent.round
        executor = Executor(round=number, played=number * self.alpha)
        return state._replace(
            parent=state.parent._replace(at="ring 0"),
            executors=tuple(executor for _ in EXECUTORS),
            actors=tuple(Actor() for _ in ACTORS),
            cells=_put(state.cells, number % 2, self._blank_storage()),
            observations=(None, None),
            answers=(None, None),
            ready=(),
            reports=(),
            bells=(0, 0),
        )


def _put(items: tuple[Any, ...], index: int, item: object) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _with_executor(state: State, index: int, executor: Executor) -> State:
    return state._replace(executors=_put(state.executors, index, executor))


def _with_actor(state: State, index: int, actor: Actor) -> State:
    return state._replace(actors=_put(state.actors, index, actor))


def _record(state: State, index: int, **values: Any) -> State:
    """Write into the cell at which an executor is."""
    executor = state.executors[index]
    storage = state.cells[executor.round % 2]
    row = storage[index]
    row = _put(row, executor.step, row[executor.step]._replace(**values))
    cells = _put(state.cells, executor.round % 2, _put(storage, index, row))
    return state._replace(cells=cells)


def _closed(state: State, parent: Parent) -> State:
    """Close the lifeline; how a worker has ended makes no difference from then on."""
    executors = (Executor("left") if one.at == "crashed" else one for one in state.executors)
    actors = (Actor("left") if one.at == "crashed" else one for one in state.actors)
    return state._replace(parent=parent, executors=tuple(executors), actors=tuple(actors))
