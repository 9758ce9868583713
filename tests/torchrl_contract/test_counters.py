"""Counters, states and the iterator, as TorchRL's collectors have them."""

import json

import pytest
import torch
from torchrl.data import Categorical

from tests.runs import digest, perturbed, stopped_after
from tests.torchrl_contract.test_batches import ENVS, ROUNDS, STEPS, collect

FRAMES = ENVS * STEPS


def test_stats_have_torchrls_entries_before_during_and_after_a_run():
    collector = collect()
    expected = {
        "total_frames": ROUNDS * FRAMES,
        "requested_frames_per_batch": FRAMES,
        "frames": 0,
        "batches": 0,
        "completed": False,
        "policy_version": 0,
    }
    assert expected.items() <= collector.stats().items()
    for number, _ in enumerate(collector, 1):
        done = {"frames": number * FRAMES, "batches": number, "completed": number == ROUNDS}
        assert done.items() <= collector.stats().items()
    assert done.items() <= collector.stats().items()


def test_stats_are_plain_numbers():
    collector = collect()
    next(iter(collector))
    assert json.loads(json.dumps(collector.stats())) == collector.stats()
    collector.shutdown()


def test_a_run_without_end_names_none():
    assert "total_frames" not in collect(total_frames=-1).stats()


def test_next_hands_out_one_batch_after_another_and_then_none():
    expected, collector = list(collect()), collect()
    found = [collector.next() for _ in range(ROUNDS)]
    assert digest(found) == digest(expected)
    assert collector.next() is None


def test_numbers_of_trajectories_are_never_used_twice():
    batches = list(collect())
    seen: dict[int, int] = {}
    for batch in batches:
        for env, row in enumerate(batch["collector", "traj_ids"].tolist()):
            assert all(seen.setdefault(number, env) == env for number in row)
    ends = sum(int(batch["next", "done"].sum()) for batch in batches)
    assert len(seen) in range(ends, ends + ENVS + 1)


def test_the_state_has_torchrls_keys_before_during_and_after_a_run():
    collector = collect()
    assert collector.state_dict()["iter"] == -1
    weights_of = perturbed(collector.policy)
    for number, _ in enumerate(collector):
        collector.update_policy_weights_(weights_of(number))
        state = collector.state_dict()
        assert (state["iter"], state["frames"]) == (number, FRAMES * (number + 1))
        newest = weights_of(number)
        assert state["policy_state_dict"].keys() == newest.keys()
        assert all(
            torch.equal(newest[name], each) for name, each in state["policy_state_dict"].items()
        )
    assert collector.state_dict()["iter"] == ROUNDS - 1


def test_a_state_before_the_first_batch_has_the_weights_of_the_policy_and_starts_nothing():
    collector = collect()
    state = collector.state_dict()
    weights = collector.policy.state_dict()
    assert all(
        torch.equal(weights[name], each) for name, each in state["policy_state_dict"].items()
    )
    collector.load_state_dict(state)  # which a running pool would refuse


def test_a_state_leaves_the_weights_of_the_policy_alone():
    state = collect().state_dict()
    other = collect()
    marked = perturbed(other.policy)(1)
    other.policy.load_state_dict(marked)
    other.load_state_dict(state)
    assert all(torch.equal(marked[name], each) for name, each in other.policy.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"postproc": lambda batch: batch.select("observation", "action"), "split_trajs": True},
        {"set_truncated": True, "compact_obs": True, "track_traj_ids": False},
        {"max_frames_per_traj": 7},
    ],
)
def test_a_run_goes_on_with_the_bits_of_one_that_was_not_stopped(settings):
    whole = digest(list(collect(**settings)))
    assert digest(stopped_after(1, lambda: collect(**settings))) == whole


def test_what_torchrl_starts_in_a_thread_is_shut_down_here():
    collector = collect()
    collector.start()
    collector.async_shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(iter(collector))


def test_the_policy_may_be_asked_for_an_attribute_as_torchrls_is():
    collector = collect()
    assert collector.getattr_policy("in_keys") == ["observation"]
    with pytest.raises(AttributeError, match="no attribute 'such'"):
        collector.getattr_policy("such")
    collector.shutdown()


def test_trainers_may_ask_what_the_environments_accept():
    collector = collect()
    spec = collector.getattr_env("full_action_spec_unbatched")
    assert spec["action"] == collector.getattr_env("action_spec") == Categorical(2)
    with pytest.raises(AttributeError, match="'pole' of the environments"):
        collector.getattr_env("pole")
