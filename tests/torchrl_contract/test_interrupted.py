"""Ctrl-C while a batch is asked for: none is lost, and a state can be taken. Serial pools."""

import copy
import functools
import itertools
import signal

import gymnasium
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from hts_torchrl import ProtocolError
from tests.runs import digest, play
from tests.torchrl_contract.test_batches import ROUNDS, STEPS, collect, make_env


@pytest.fixture(scope="module")
def whole():
    """The batches of a run that nobody interrupts."""
    return play(collect())


class Interrupted(gymnasium.Wrapper):
    """Ctrl-C comes in its step number ``at``, counted from 0."""

    def __init__(self, env: gymnasium.Env, at: int) -> None:
        super().__init__(env)
        self.at, self.steps = at, itertools.count()

    def step(self, action):
        if next(self.steps) == self.at:
            raise KeyboardInterrupt
        return super().step(action)


def make_interrupted(index: int, at: int) -> gymnasium.Env:
    return Interrupted(make_env(), at) if index == 1 else make_env()


def until_ctrl_c(collector) -> list:
    batches = []
    with pytest.raises(KeyboardInterrupt):
        batches.extend(collector)  # which keeps those before
    return batches


def in_round(number: int):
    """A collector to which Ctrl-C comes in the middle of a round."""
    return collect(functools.partial(make_interrupted, at=number * STEPS + 5))


def stop():
    raise KeyboardInterrupt


def once(at: int, act=stop):
    """A function that Ctrl-C ends in its call number ``at``, counted from 0."""
    calls = itertools.count()

    def function(*_):
        if next(calls) == at:
            act()

    return function


@pytest.mark.parametrize("at", range(ROUNDS))
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("hook", ["pre_collect_hook", "post_collect_hook"])
def test_a_hook_that_is_interrupted_costs_no_batch(whole, hook, at, delay):
    collector = collect(delay=delay, **{hook: once(at)})
    assert digest(until_ctrl_c(collector) + list(collector)) == digest(whole)


@pytest.mark.parametrize("at", range(ROUNDS))
def test_neither_does_ctrl_c_after_the_next_round_was_started(whole, monkeypatch, at):
    collector = collect()
    collector.start()
    interrupt, note = once(at), collector._runner._note
    monkeypatch.setattr(collector._runner, "_note", lambda number: interrupt() or note(number))
    assert digest(until_ctrl_c(collector) + list(collector)) == digest(whole)


@pytest.mark.parametrize("at", range(ROUNDS))
@pytest.mark.parametrize("delay", [0, 1])
def test_neither_does_ctrl_c_while_a_batch_is_processed(whole, at, delay):
    interrupt = once(at)
    collector = collect(postproc=lambda batch: interrupt() or batch, delay=delay)
    assert digest(until_ctrl_c(collector) + list(collector)) == digest(whole)


@pytest.fixture
def heeded_ctrl_c():
    """A job that a shell has put into the background ignores Ctrl-C, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_ctrl_c")
@pytest.mark.parametrize("at", range(ROUNDS))
def test_neither_does_ctrl_c_while_a_buffer_is_extended_which_has_each_row_once(
    whole, monkeypatch, at
):
    interrupt = once(at, lambda: signal.raise_signal(signal.SIGINT))
    kept = ReplayBuffer(storage=LazyTensorStorage(1000))
    write = kept.storage.set
    monkeypatch.setattr(kept.storage, "set", lambda *given: interrupt() or write(*given))
    collector = collect(replay_buffer=kept)
    assert until_ctrl_c(collector) == [None] * at
    assert collector.rounds == at + 1
    assert list(collector) == [None] * (ROUNDS - at - 1)
    assert digest([kept[:]]) == digest([torch.cat([batch.reshape(-1) for batch in whole])])


@pytest.mark.parametrize("number", [1, 2])
def test_a_state_that_is_taken_after_ctrl_c_goes_on_with_the_batch_that_was_asked_for(
    whole, number
):
    """Round ``number`` runs while the one before it is asked for."""
    collector = in_round(number)
    batches = until_ctrl_c(collector)
    state = copy.deepcopy(collector.state_dict())
    collector.shutdown()
    assert (len(batches), collector.rounds) == (number - 1, number - 1)
    resumed = collect()
    resumed.load_state_dict(state)
    assert digest(batches + list(resumed)) == digest(whole)


def test_a_round_that_was_played_in_part_is_refused_after_the_one_before_it(whole):
    collector = in_round(1)
    assert until_ctrl_c(collector) == []
    batches = iter(collector)
    assert digest([next(batches)]) == digest(whole[:1])
    with pytest.raises(ProtocolError, match="round 1 was interrupted"):
        next(batches)


def test_new_games_after_ctrl_c_begin_with_the_batch_that_was_asked_for():
    collector, other = in_round(2), collect()
    first = until_ctrl_c(collector)
    collector.reset()
    batches = iter(other)
    expected = [next(batches)]
    other.reset()
    assert digest(first + list(collector)) == digest(expected + list(batches))


def test_a_reset_that_is_interrupted_ends_the_run(monkeypatch):
    collector = collect()
    next(iter(collector))
    monkeypatch.setattr(collector._runner, "_make_pool", once(0))
    with pytest.raises(KeyboardInterrupt):
        collector.reset()
    with pytest.raises(ProtocolError, match="shut down: make a new one"):
        next(iter(collector))
