"""EnvPool's environments, against EnvPool's own pools and the rules of the games."""

import sys

import envpool
import numpy as np
import pytest

from hts_torchrl.envs.envpool import EnvPoolEnvs
from hts_torchrl.envs.group import SeededGroup
from hts_torchrl.errors import ConfigurationError

SEEDS = [11, 12, 13, 14]
CARTPOLE = EnvPoolEnvs("CartPole-v1")
FAMILIES = {
    "classic control": (CARTPOLE, 120),
    "toy text": (EnvPoolEnvs("FrozenLake-v1"), 60),
    "mujoco": (EnvPoolEnvs("Hopper-v4"), 60),
    "dm_control": (EnvPoolEnvs("HopperHop-v1", {"max_episode_steps": 20}), 50),
    "atari": (EnvPoolEnvs("Breakout-v5", {"max_episode_steps": 20}), 50),
    "vizdoom": (EnvPoolEnvs("D1Basic-v1", {"use_combined_action": True}), 300),
}


def actions(group, steps):
    """A plan of actions, which is the same for all environments."""
    spec, random = group.spec.action, np.random.default_rng(0)
    if spec.kind == "discrete":
        plan = random.integers(0, spec.sizes[0], (steps, 1))
    else:
        plan = random.uniform(-1, 1, (steps, 1, *spec.array.shape)).astype(np.float32)
    return plan.repeat(group.num_envs, 1)


def played(envs, rows, steps):
    """What the environments ``rows`` bring in each step, by environment; and the games' number."""
    group = envs.group(rows)
    seeds = [SEEDS[row] for row in rows]
    record = {row: [] for row in rows}
    ends = 0
    group.reset(seeds)
    for batch in actions(group, steps):
        t = group.step(batch)
        ends += int(t.episode_end.sum())
        arrays = [*t.observation.values(), *t.next_observation.values(), t.reward, t.terminated]
        for place, row in enumerate(rows):
            record[row] += [array[place].tobytes() for array in arrays]
    group.close()
    return record, ends


@pytest.mark.parametrize(
    "name",
    [
        name if name == "classic control" else pytest.param(name, marks=pytest.mark.thorough)
        for name in FAMILIES
    ],
)
def test_a_game_is_the_same_in_a_group_of_any_size(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # VizDoom writes its settings there
    envs, steps = FAMILIES[name]
    four, ends = played(envs, [0, 1, 2, 3], steps)
    two = played(envs, [0, 1], steps)[0] | played(envs, [2, 3], steps)[0]
    one = {row: played(envs, [row], steps)[0][row] for row in range(4)}
    assert four == two == one
    assert ends > 0
    assert len({tuple(each) for each in four.values()}) == 4


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # of the pool made here
def test_it_plays_the_games_of_envpools_own_pool_without_the_step_that_resets():
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, num_threads=1, seed=SEEDS[:1])
    group = CARTPOLE.group([0])
    assert np.array_equal(group.reset(SEEDS[:1])["observation"], pool.reset()[0])
    ends = 0
    for batch in actions(group, 200):
        t = group.step(batch)
        observation, reward, terminated, _, _ = pool.step(batch)
        assert np.array_equal(t.observation["observation"], observation)
        assert (t.reward, t.terminated) == (reward, terminated)
        if terminated:
            ends += 1
            observation, reward, *_ = pool.step(batch)  # resets, and the action is ignored
            assert reward == 0
        assert np.array_equal(t.next_observation["observation"], observation)
    assert ends > 3
    group.close()


def test_the_last_observation_of_a_game_is_a_fallen_pole_and_the_next_one_stands():
    group = CARTPOLE.group([0, 1])
    group.reset(SEEDS[:2])
    fallen = 0
    for batch in actions(group, 100):
        t = group.step(batch)
        for row in np.flatnonzero(t.terminated):
            position, _, angle, _ = t.observation["observation"][row]
            assert abs(angle) > np.deg2rad(12) or abs(position) > 2.4
            assert (np.abs(t.next_observation["observation"][row]) <= 0.05).all()
            fallen += 1
    assert fallen > 3
    group.close()


def test_a_limit_of_steps_truncates():
    group = EnvPoolEnvs("Pendulum-v1", {"max_episode_steps": 3}).group([0])
    group.reset([1])
    steps = [group.step(np.zeros((1, 1), np.float32)) for _ in range(7)]
    assert [bool(t.truncated[0]) for t in steps] == [False, False, True] * 2 + [False]
    assert not any(t.terminated[0] for t in steps)
    group.close()


def test_one_game_begins_anew_by_its_seed_and_the_others_go_on():
    group, alone = CARTPOLE.group([0, 1]), CARTPOLE.group([5])
    assert isinstance(group, SeededGroup)
    group.reset(SEEDS[:2])
    group.step(np.array([0, 1]))
    before = group.step(np.array([0, 1])).next_observation["observation"].copy()
    after = group.restart([1], [99])["observation"]
    assert np.array_equal(after[0], before[0])
    assert np.array_equal(after[[1]], alone.reset([99])["observation"])
    for batch in actions(alone, 60):
        both = group.step(np.repeat(batch, 2)).observation["observation"]
        assert np.array_equal(both[[1]], alone.step(batch).observation["observation"])
    group.close()
    alone.close()


def test_it_can_be_filmed():
    group = CARTPOLE.group([0], render=True)
    group.reset([0])
    assert group.render().shape == (400, 600, 3)
    group.close()


def test_a_mistyped_id_is_refused_with_what_is_near():
    with pytest.raises(ConfigurationError, match=r"no environment 'CartPol-v1'; .*CartPole-v1"):
        EnvPoolEnvs("CartPol-v1").group([0])


@pytest.mark.parametrize("name", ["seed", "num_envs", "num_threads", "batch_size"])
def test_what_the_collector_decides_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"kwargs has \['{name}'\]"):
        EnvPoolEnvs("CartPole-v1", {name: 3})


def test_an_argument_that_envpool_does_not_know_is_refused():
    with pytest.raises(ConfigurationError, match=r"'CartPole-v1': .*frame_skips"):
        EnvPoolEnvs("CartPole-v1", {"frame_skips": 3}).group([0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_episode_steps": "many"}, "max_episode_steps='many'; int is needed, such as 500"),
        (
            {"max_episode_steps": 10, "reward_threshold": None},
            "reward_threshold=None; float is needed, such as 475.0",
        ),
    ],
)
def test_an_argument_of_another_type_is_named(kwargs, message):
    with pytest.raises(ConfigurationError) as refused:
        EnvPoolEnvs("CartPole-v1", kwargs).group([0])
    assert str(refused.value) == f"EnvPool's environment 'CartPole-v1': {message}"


@pytest.mark.parametrize("name", ["intersection-multi-agent-v0", "TicTacToe-v1"])
def test_games_of_several_players_are_refused(name):
    with pytest.raises(ConfigurationError, match=f"'{name}' has 2 players"):
        EnvPoolEnvs(name).group([0])


def test_the_remedy_is_named_where_envpool_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'hts-torchrl\[envpool\]'"):
        CARTPOLE.group([0])


def test_procgen_plays_or_names_what_it_lacks():
    """Its engine needs the system's Qt 5, which this machine may not have."""
    envs = EnvPoolEnvs("CoinrunEasy-v0")
    try:
        group = envs.group([0])
    except ConfigurationError as error:
        assert "'CoinrunEasy-v0': EnvPool Procgen requires" in str(error)  # noqa: PT017
    else:
        assert group.reset([3])["observation"].shape == (1, 3, 64, 64)
        group.close()
