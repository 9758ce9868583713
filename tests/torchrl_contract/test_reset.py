"""New games on demand: ``reset()``, as TorchRL's collector has it."""

import copy

import pytest

from hts_torchrl import ConfigurationError, ProtocolError
from tests.runs import digest, perturbed
from tests.torchrl_contract.test_batches import collect


def run(resets=(), *, after=None, rounds=4, **settings):
    """Play rounds with new weights each, with new games before some of them."""
    collector = collect(total_frames=rounds * 60, **settings)
    if after is not None:
        collector.load_state_dict(after)
    weights_of, batches = perturbed(collector.policy), []
    for batch in collector:
        batches.append(batch)
        collector.update_policy_weights_(weights_of(collector.rounds))
        if collector.rounds in resets:
            collector.reset()
    return batches


@pytest.mark.parametrize("delay", [1, 0])
def test_all_games_of_the_next_batch_begin_anew_and_the_others_stay(delay):
    whole, with_reset = run(delay=delay), run(resets=[2], delay=delay)
    assert digest(with_reset[:2]) == digest(whole[:2])
    assert (with_reset[2]["next", "step_count"][:, 0] == 1).all()
    assert not (whole[2]["next", "step_count"][:, 0] == 1).all()
    versions = [batch["collector", "policy_version"].unique().tolist() for batch in with_reset]
    assert versions == [batch["collector", "policy_version"].unique().tolist() for batch in whole]


def test_new_games_are_none_that_were_there_before():
    batches = run(resets=[1, 2, 3])
    first = [batch["observation"][:, 0].tolist() for batch in batches]
    assert len({str(each) for each in first}) == len(first)


@pytest.mark.processes
def test_workers_in_processes_begin_the_same_games():
    settings = {"num_actors": 2, "envs_per_executor": 1}
    assert digest(run(resets=[1, 3], **settings)) == digest(run(resets=[1, 3]))


def test_a_run_that_was_reset_goes_on_from_a_state_with_the_same_bits():
    whole = run(resets=[1])
    collector = collect(total_frames=240)
    weights_of, iterator = perturbed(collector.policy), iter(collector)
    begun = [next(iterator)]
    collector.update_policy_weights_(weights_of(1))
    collector.reset()
    begun.append(next(iterator))
    collector.update_policy_weights_(weights_of(2))
    state = copy.deepcopy(collector.state_dict())
    collector.shutdown()
    second = collect(total_frames=240)
    second.policy.load_state_dict(state["policy_state_dict"])
    second.load_state_dict(state)
    rest = []
    for batch in second:
        rest.append(batch)
        second.update_policy_weights_(weights_of(second.rounds))
    assert digest(begun + rest) == digest(whole)


def test_before_the_first_batch_nothing_changes():
    collector = collect()
    collector.reset()
    collector.start()
    collector.reset()
    assert digest(list(collector)) == digest(list(collect()))


def test_steps_that_were_held_back_are_dropped():
    collector = collect(trajs_per_batch=1, traj_format="cat", total_frames=900)
    iterator = iter(collector)
    next(iterator)
    rounds = collector.rounds
    collector.reset()
    whole = next(iterator)
    assert whole["next", "step_count"].flatten().tolist() == list(range(1, len(whole) + 1))
    assert collector.rounds > rounds
    collector.shutdown()


def test_an_index_is_refused_and_so_is_a_reset_after_the_end():
    collector = collect()
    with pytest.raises(ConfigurationError, match="all environments begin new games"):
        collector.reset(0)
    collector.shutdown()
    with pytest.raises(ProtocolError, match="shut down"):
        collector.reset()


def test_new_games_can_be_begun_before_a_round_is_started():
    """By the hook, when the batch before is not yet handed out; a later run has the same games."""
    hooked = collect(total_frames=240)
    hooked.pre_collect_hook = lambda: hooked.reset() if hooked.rounds == 2 else None
    batches = iter(hooked)
    begun = [next(batches) for _ in range(3)]
    state = hooked.state_dict()
    begun.append(next(batches))
    hooked.shutdown()
    assert (begun[2]["next", "step_count"][:, 0] == 1).all()
    assert digest(begun) == digest(without_weights(resets=[2]))
    second = collect(total_frames=240)
    second.load_state_dict(state)
    assert digest(list(second)) == digest(begun[3:])


def without_weights(resets):
    collector, batches = collect(total_frames=240), []
    for batch in collector:
        batches.append(batch)
        if collector.rounds in resets:
            collector.reset()
    return batches
