"""Protocols with one thing wrong in each, for the search to find."""

from __future__ import annotations

from tests.protocol.model import Protocol
from tests.protocol.state import Actor


class SwappedBeforeLearned(Protocol):
    """The next but one round starts as soon as the next is finished, whatever the learner does."""

    def parent(self, state):
        yield from super().parent(state)
        if state.parent.at == "learn" and len(state.reports) == 2:
            rung = self.ring(self.ring(state, 0), 1)
            yield "swap", rung._replace(reports=())


class PublishedMidRound(Protocol):
    """Published weights act at once."""

    def publish(self, state):
        state = super().publish(state)
        return state._replace(acting=state.published, published=None)


class RendezvousSkipped(Protocol):
    """The first report ends the round."""

    def is_finished(self, seen):
        return bool(seen)


class SlotTakenTwice(Protocol):
    """What was taken stays in the queue, once."""

    def take(self, state, index):
        taken = super().take(state, index)
        return taken._replace(ready=state.ready)


class RingLost(Protocol):
    """A ring is lost on an executor that does not wait."""

    def ring(self, state, executor):
        waits = state.executors[executor].at in ("begin", "wake")
        return super().ring(state, executor) if waits else state


class OneStepTooFew(Protocol):
    """An executor reports a step early."""

    def step(self, state, index, executor):
        state, executor = super().step(state, index, executor)
        late = executor.step == self.alpha - 1
        return state, executor._replace(at="report" if late else executor.at)


class AnnouncedBeforePut(Protocol):
    """The signal comes before the observation."""

    def announce(self, state, index, executor):
        return super().put(state, index, executor)[0], executor._replace(at="wake")

    def put(self, state, index, executor):
        return super().announce(state, index, executor)[0], executor._replace(at="announce")


class RungBeforeAnswered(Protocol):
    """The signal comes before the answer."""

    def actor(self, state, index):
        actor = state.actors[index]
        for what, after in super().actor(state, index):
            if actor.at == "load":
                for env in actor.batch:
                    after = self.ring(after, env)
            yield what, after

    def answer(self, state, index):
        answered = super().answer(state, index)
        actors = list(answered.actors)
        actors[index] = Actor("wake")
        return answered._replace(actors=tuple(actors))


class PipesKept(Protocol):
    """The next worker pool inherits what waits in the pipes of the last."""

    def renew(self, state):
        signals = {name: getattr(state, name) for name in ("ready", "reports", "bells")}
        return super().renew(state)._replace(**signals)


class NewestAfterCrash(Protocol):
    """The next worker pool acts with the weights that were published meanwhile."""

    def renew(self, state):
        newest = state.acting if state.published is None else state.published
        return super().renew(state)._replace(acting=newest, published=None)


class NothingPlayedAgain(Protocol):
    """The next worker pool begins new games."""

    def renew(self, state):
        state = super().renew(state)
        blank = [executor._replace(played=0) for executor in state.executors]
        return state._replace(executors=tuple(blank))


class DeathUnnoticed(Protocol):
    """The collector waits for reports alone."""

    def wait(self, state):
        return (each for each in super().wait(state) if each[0] == "poll")


class WokenForNothing(Protocol):
    """An actor wakes up although nothing waits: no invariant is broken, but nobody need go on."""

    def actor(self, state, index):
        yield from super().actor(state, index)
        if state.actors[index].at == "wake" and not state.ready:
            actors = list(state.actors)
            actors[index] = Actor("take")
            yield "wake", state._replace(actors=tuple(actors))
