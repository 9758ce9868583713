"""The exhaustive search: every state that a protocol can reach, breadth first, and what must hold.

Breadth first, so the first state found wrong is reached by one of the shortest ways.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.protocol.model import Protocol
from tests.protocol.state import EXECUTORS, Cell, State, Step

Path = list[tuple[Step, State]]
"""Steps from the initial state, each with the state that it leads to."""


def reads_what_is_not_written(protocol: Protocol, state: State) -> bool:
    """Somebody is about to read a slot or a cell that another has not written, or still writes."""
    for index, executor in enumerate(state.executors):
        answer = state.answers[index]
        if executor.at == "step" and (answer is None or answer.observation != executor.played):
            return True
    for actor in state.actors:
        for env in actor.batch:
            executor = state.executors[env]
            is_there = executor.at == "wake" and state.observations[env] == executor.played
            if not is_there and executor.at not in ("crashed", "left"):
                return True
    return state.parent.at in ("note", "learn") and any(
        cell.observation != played or cell.answer is None or cell.answer.observation != played
        for cell, played in cells_of_batch(protocol, state)
    )


def cells_of_batch(protocol: Protocol, state: State) -> list[tuple[Cell, int]]:
    """Cells of the learner's batch, each with the steps that its environment had played."""
    number = state.parent.round
    return [
        (state.cells[number % 2][env][step], number * protocol.alpha + step)
        for env in EXECUTORS
        for step in range(protocol.alpha)
    ]


def shares_a_storage(_: Protocol, state: State) -> bool:
    """An executor is in a round that writes the storage of the learner's batch."""
    batch = state.parent.batch
    return batch is not None and any(
        executor.at not in ("start", "begin", "crashed", "left") and executor.round % 2 == batch % 2
        for executor in state.executors
    )


def lags_otherwise_than_by_one(protocol: Protocol, state: State) -> bool:
    """The weights that are updated are not one ahead of those that collected; round 0 has none."""
    if state.parent.at != "learn":
        return False
    newest = state.acting if state.published is None else state.published
    lag = min(state.parent.round, 1)
    return newest != state.parent.round or any(
        cell.answer is None or newest - cell.answer.version != lag
        for cell, _ in cells_of_batch(protocol, state)
    )


INVARIANTS: list[Callable[[Protocol, State], bool]] = [
    reads_what_is_not_written,
    shares_a_storage,
    lags_otherwise_than_by_one,
]
DEADLOCK = "deadlock"


@dataclass
class Graph:
    """What was reached, up to actors changing places."""

    protocol: Protocol
    states: list[State] = field(default_factory=list)
    came_from: array[int] = field(default_factory=lambda: array("l"))
    """State from which each was reached first."""
    heads: array[int] = field(default_factory=lambda: array("l"))
    """To where every transition leads, in the order of the states from which they go."""
    offsets: array[int] = field(default_factory=lambda: array("l"))
    """Where those of each state begin in ``heads``."""
    first: dict[Step, tuple[int, int]] = field(default_factory=dict)
    """The first transition of each kind."""
    wrong: str = ""
    """The invariant that the last state of ``wrong_path`` breaks; empty if all of them hold."""
    wrong_path: Path = field(default_factory=list)

    def path(self, number: int) -> Path:
        """One of the shortest ways to a state, from the initial one."""
        numbers = []
        while number:
            numbers.append(number)
            number = self.came_from[number]
        path, state = [], self.protocol.initial()
        for each in reversed(numbers):
            wanted = self.states[each]
            step, state = next(
                (step, after)
                for step, after in self.protocol.steps(state)
                if after.representative() == wanted
            )
            path.append((step, state))
        return path

    def is_acyclic(self) -> bool:
        """Whether no run goes on for ever: states can be put in an order that all steps follow."""
        incoming = [0] * len(self.states)
        for head in self.heads:
            incoming[head] += 1
        ends = [*self.offsets[1:], len(self.heads)]
        order = [number for number, count in enumerate(incoming) if not count]
        for number in order:
            for head in self.heads[self.offsets[number] : ends[number]]:
                incoming[head] -= 1
                if not incoming[head]:
                    order.append(head)
        return len(order) == len(self.states)


def explore(protocol: Protocol) -> Graph:
    """Reach every state, or stop at the first that breaks an invariant."""
    graph = Graph(protocol)
    start = protocol.initial()
    numbers = {start: 0}
    graph.states.append(start)
    graph.came_from.append(0)
    for number, state in enumerate(graph.states):  # which grows meanwhile
        can_go_on = False
        graph.offsets.append(len(graph.heads))
        for step, after in protocol.steps(state):
            after = after.representative()
            head = numbers.setdefault(after, len(numbers))
            if head == len(graph.states):
                graph.states.append(after)
                graph.came_from.append(number)
            graph.heads.append(head)
            graph.first.setdefault(step, (number, head))
            can_go_on = can_go_on or step.what != "crash"
        graph.wrong = _broken(protocol, state, can_go_on)
        if graph.wrong:
            graph.wrong_path = graph.path(number)
            break
    return graph


def _broken(protocol: Protocol, state: State, can_go_on: bool) -> str:
    for invariant in INVARIANTS:
        if invariant(protocol, state):
            return invariant.__name__
    return "" if can_go_on or state.is_final else DEADLOCK


def walk(
    protocol: Protocol, generator: random.Random, path: Path, crash_share: float = 0.0
) -> Path:
    """Go on at random from where a path ends to an end of the run; some steps may be crashes."""
    path = list(path)
    state = path[-1][1] if path else protocol.initial()
    while not state.is_final:
        found = list(protocol.steps(state))
        crashes = [each for each in found if each[0].what == "crash"]
        steps = [each for each in found if each[0].what != "crash"]
        is_crash = crashes and generator.random() < crash_share
        path.append(generator.choice(crashes if is_crash else steps))
        state = path[-1][1]
    return path


def covering_paths(graph: Graph, generator: random.Random) -> Iterator[Path]:
    """Yield runs to an end that together take a step of every kind."""
    covered: set[Step] = set()
    for kind, (tail, head) in graph.first.items():
        if kind.of_role() in covered:
            continue
        path = graph.path(tail)
        state = path[-1][1] if path else graph.protocol.initial()
        wanted = graph.states[head]
        path += [
            (step, after)
            for step, after in graph.protocol.steps(state)
            if step.of_role() == kind.of_role() and after.representative() == wanted
        ][:1]
        path = walk(graph.protocol, generator, path)
        covered |= {step.of_role() for step, _ in path}
        yield path
