"""The protocol, explored: any order of steps, a crash at any point; and the real classes in it."""

import functools
import gc
import random
from pathlib import Path

import pytest

from tests.policies import echo_weights
from tests.protocol import mutations
from tests.protocol.explorer import DEADLOCK, covering_paths, explore, walk
from tests.protocol.model import Protocol
from tests.protocol.players import Differs
from tests.protocol.stage import Stage, make_collector
from tests.runs import digest, play

EITHER = ("fail", "replay")
ROUNDS = 3


@pytest.fixture(scope="module")
def once():
    """One crash of any process."""
    graph = explore(Protocol(rounds=ROUNDS, alpha=2, most_crashes=1, recover=EITHER))
    gc.freeze()  # else each collection between two tests goes through all of its states
    return graph


@pytest.fixture(scope="module")
def twice():
    """Two crashes, of a worker pool or of one and the next, in the smallest of runs."""
    return explore(Protocol(rounds=1, alpha=1, most_crashes=2, recover=EITHER))


@pytest.fixture(params=["once", "twice"])
def graph(request):
    return request.getfixturevalue(request.param)


def check(graph):
    """Nothing is broken, deadlocks included, and no run goes in a circle: all come to an end."""
    assert (graph.wrong, graph.wrong_path) == ("", [])
    assert graph.is_acyclic()


def test_no_order_of_steps_and_crashes_breaks_an_invariant_or_goes_on_for_ever(graph):
    check(graph)


def test_the_documents_say_how_much_was_explored(graph):
    text = (Path(__file__).parents[2] / "docs" / "how_it_works.md").read_text()
    assert f"| {len(graph.states):,} | {len(graph.heads):,} |" in text


def test_every_process_may_crash_wherever_it_can_be(once, twice):
    kinds = {*once.first, *twice.first}
    crashes = {(step.who, step.at) for step in kinds if step.what == "crash"}
    assert crashes == {(step.who, step.at) for step in kinds}


def test_a_run_is_learned_to_its_end_or_stopped_because_of_a_crash(graph):
    ends = {state.parent for state in graph.states if state.is_final}
    assert {parent.at for parent in ends} == {"done", "raised", "crashed"}
    assert {parent.round + 1 for parent in ends if parent.at == "done"} == {graph.protocol.rounds}
    crashes = {state.crashes for state in graph.states if state.parent.at in ("raised", "crashed")}
    assert 0 not in crashes


def test_with_recovery_no_single_crash_of_a_worker_stops_a_run():
    graph = explore(Protocol(rounds=2, alpha=1, most_crashes=1, recover=("replay",)))
    assert {state.parent.at for state in graph.states if state.is_final} == {"done", "crashed"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"most_crashes": 2}, {"rounds": 5, "most_crashes": 1}])
def test_nor_does_a_second_crash_or_a_longer_run(settings):
    check(explore(Protocol(recover=EITHER, **settings)))


WRONG = {
    mutations.SwappedBeforeLearned: ("shares_a_storage", 77),
    mutations.PublishedMidRound: ("lags_otherwise_than_by_one", 82),
    mutations.RendezvousSkipped: ("shares_a_storage", 28),
    mutations.SlotTakenTwice: ("reads_what_is_not_written", 15),
    mutations.RingLost: (DEADLOCK, 7),
    mutations.OneStepTooFew: ("reads_what_is_not_written", 28),
    mutations.AnnouncedBeforePut: ("reads_what_is_not_written", 8),
    mutations.RungBeforeAnswered: ("reads_what_is_not_written", 11),
    mutations.PipesKept: ("reads_what_is_not_written", 18),
    mutations.NewestAfterCrash: ("lags_otherwise_than_by_one", 63),
    mutations.NothingPlayedAgain: ("reads_what_is_not_written", 62),
    mutations.DeathUnnoticed: (DEADLOCK, 16),
}


@functools.cache
def counterexample(mutation):
    """Protocol, invariant and path; with one crash where that is what it takes."""
    graph = explore(mutation())
    if not graph.wrong:
        graph = explore(mutation(rounds=2, alpha=1, most_crashes=1))
    return graph.protocol, graph.wrong, graph.wrong_path


@pytest.mark.parametrize("mutation", WRONG)
def test_a_mutation_is_found_by_a_shortest_counterexample(mutation):
    _, invariant, path = counterexample(mutation)
    assert (invariant, len(path)) == WRONG[mutation]


def test_a_run_that_may_go_in_a_circle_is_found():
    graph = explore(mutations.WokenForNothing(rounds=1, alpha=1))
    assert graph.wrong == ""
    assert not graph.is_acyclic()


# With the exception of one whose real counterpart could go on from where the mutation cannot.
@pytest.mark.parametrize(
    "mutation", [each for each in WRONG if each is not mutations.DeathUnnoticed]
)
def test_the_real_classes_do_not_follow_a_counterexample(mutation):
    protocol, _, path = counterexample(mutation)
    with pytest.raises(Differs):
        replay(protocol, path)


def replay(protocol, path):
    """The batches of a run on the real classes, in the order of the path."""
    done = {step.what for step, _ in path}
    recover = "fail" if "give up" in done and "repeat" not in done else "replay"
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(protocol, recover, patch)
        try:
            stage.play(path)
        finally:
            stage.close()
    return stage.batches


@pytest.fixture(scope="module")
def twin():
    """The batches of the serial twin."""
    return play(make_collector(Protocol(rounds=ROUNDS), num_actors=0), echo_weights)


def check_on_the_real_classes(protocol, path, twin):
    batches = replay(protocol, path)
    assert digest(batches) == digest(twin[: len(batches)])
    if path[-1][1].parent.at == "done":
        assert len(batches) == ROUNDS


def test_the_real_classes_take_a_step_of_every_kind_as_the_model_does(once, twin):
    for path in covering_paths(once, random.Random(0)):
        check_on_the_real_classes(once.protocol, path, twin)


@pytest.mark.parametrize("crash_share", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("recover", EITHER)
def test_the_real_classes_go_wherever_the_model_goes(crash_share, recover, twin):
    protocol = Protocol(rounds=ROUNDS, most_crashes=2, recover=(recover,))
    for seed in range(8):
        path = walk(protocol, random.Random(seed), [], crash_share)
        check_on_the_real_classes(protocol, path, twin)
