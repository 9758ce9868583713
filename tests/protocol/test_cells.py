"""Every cell of every batch in its place, with two actors and one executor an environment."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hts_torchrl import HTSCollector, ProtocolError
from tests import philox
from tests.fakes import (
    NUM_ACTIONS,
    SEED_RANGE,
    CoordinateEnv,
    CoordinateEnvs,
    ForgetfulEnvs,
    JitterEnv,
)
from tests.policies import VERSION_UNIT, JitterNet, echo_policy, echo_weights
from tests.runs import digest, play

pytestmark = pytest.mark.processes

ENVS, STEPS, ROUNDS, SEED = 4, 4, 5, 11


def collect(create_env_fn, policy, num_actors, **settings) -> HTSCollector:
    return HTSCollector(
        create_env_fn,
        policy,
        num_envs=ENVS,
        frames_per_batch=ENVS * STEPS,
        total_frames=ENVS * STEPS * ROUNDS,
        num_actors=num_actors,
        seed=SEED,
        **settings,
    )


@pytest.fixture(scope="module")
def batches():
    """One run, with random delays in executors and actors."""
    jittery = collect(JitterEnv(CoordinateEnvs()), echo_policy(JitterNet()), num_actors=2)
    return play(jittery, echo_weights)


@pytest.fixture(scope="module")
def entry(batches):
    """Reads one entry of the whole run: ``[N, rounds * T]``, with what follows."""

    def read(*key: str) -> np.ndarray:
        return torch.cat([batch[key] for batch in batches], 1).numpy()

    return read


@pytest.fixture(scope="module")
def story(entry) -> dict[str, np.ndarray]:
    """What must have happened, told again from the actions: arrays ``[N, rounds * T]``."""
    rows: list[dict[str, list]] = []
    for index, actions in enumerate(entry("action")):
        env, row = CoordinateEnv(index), {}
        rows.append(row)
        observation, _ = env.reset(seed=philox.env_seed(SEED, index))
        score = np.float32(0)
        for action in actions:
            before, episode = observation, env.episode
            observation, reward, terminated, truncated, _ = env.step(action)
            score += np.float32(reward)
            told = {
                "observation": before, "next_observation": observation, "reward": reward,
                "terminated": terminated, "truncated": truncated, "step_count": env.steps,
                "episode_reward": score, "episode": episode,
            }  # fmt: skip
            for key, value in told.items():
                row.setdefault(key, []).append(value)
            if terminated or truncated:
                seed = philox.env_seed(SEED, index, env.episode + 1)
                observation, score = env.reset(seed=seed)[0], np.float32(0)
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def test_every_observation_is_in_its_cell(entry, story):
    assert np.array_equal(entry("observation"), story["observation"])


def test_every_next_observation_is_the_true_one_also_where_an_episode_ends(entry, story):
    assert np.array_equal(entry("next", "observation"), story["next_observation"])


def test_environments_are_seeded_by_their_index(entry):
    seeds = [philox.env_seed(SEED, index) % SEED_RANGE for index in range(ENVS)]
    assert entry("observation")[:, 0, 4].tolist() == seeds


def test_a_step_after_the_end_of_an_episode_starts_the_next_one(entry):
    ended = entry("next", "done")[:, :-1, 0]
    after = entry("observation")[:, 1:][ended]
    assert len(after) > 10
    assert (after[:, 2] == 0).all()


@pytest.mark.parametrize("key", ["terminated", "truncated", "step_count", "episode_reward"])
def test_every_number_of_a_step_is_in_its_cell(entry, story, key):
    assert np.array_equal(entry("next", key)[..., 0], story[key])


def test_every_reward_is_in_its_cell(entry, story):
    assert np.array_equal(entry("next", "reward")[..., 0], story["reward"].astype(np.float32))


@pytest.mark.parametrize("key", ["terminated", "truncated"])
def test_both_kinds_of_end_occur(entry, key):
    """Else the tests above would not tell them apart."""
    assert entry("next", key).any()


def test_trajectories_are_numbered_by_environment_and_episode(entry, story):
    expected = np.arange(ENVS)[:, None] + ENVS * story["episode"]
    assert np.array_equal(entry("collector", "traj_ids"), expected)


def test_every_action_is_what_the_environments_own_draw_decides(entry):
    steps = range(ROUNDS * STEPS)
    draws = [[philox.uniform(SEED, index, step, 1)[0] for step in steps] for index in range(ENVS)]
    assert np.array_equal(entry("action"), np.floor(np.array(draws) * NUM_ACTIONS))


def test_every_log_probability_is_that_of_the_action(entry):
    assert entry("action_log_prob") == pytest.approx(-math.log(NUM_ACTIONS))


def test_every_value_was_computed_from_the_observation_beside_it(entry):
    env, episode, step = np.moveaxis(entry("observation")[..., :3], -1, 0)
    place = entry("state_value")[..., 0] % VERSION_UNIT
    assert np.array_equal(place, env * 1024 + episode * 32 + step)


def test_every_value_was_computed_by_the_version_that_is_named(entry):
    version = entry("state_value")[..., 0] // VERSION_UNIT
    assert np.array_equal(version, entry("collector", "policy_version"))


def test_each_round_acts_one_update_behind(batches):
    versions = [batch["collector", "policy_version"].unique().tolist() for batch in batches]
    assert versions == [[0], [0], [1], [2], [3]]


def test_random_delays_in_executors_and_actors_change_no_bit(batches):
    calm = collect(CoordinateEnvs(), echo_policy(), num_actors=0)
    assert digest(batches) == digest(play(calm, echo_weights))


def test_debug_mode_changes_no_bit(batches):
    debugged = collect(JitterEnv(CoordinateEnvs()), echo_policy(JitterNet()), 2, debug=True)
    assert digest(play(debugged, echo_weights)) == digest(batches)


def test_debug_mode_finds_a_cell_that_an_executor_process_forgets():
    collector = collect(ForgetfulEnvs(), echo_policy(), 1, debug=True)
    with pytest.raises(ProtocolError, match=r"action of environment 2, round 0, step 1, .* never"):
        play(collector)
