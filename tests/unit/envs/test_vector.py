"""Vector environments that reset in the next step, or not at all; see also ``test_gym.py``."""

import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from hts_torchrl.envs.adapter import AdapterGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.envs.vector import VectorAdapter
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.training.evaluation import image_of
from tests.fakes import CoordinateEnv

LATER = pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED])
SEEDS = [100, 200]


def group_of(envs: VectorEnv, indices: list[int]) -> AdapterGroup:
    return AdapterGroup([VectorAdapter(envs, indices)])


class Counting(CoordinateEnv):
    """Counts the calls."""

    def __init__(self, index) -> None:
        super().__init__(index)
        self.calls = []

    def reset(self, **given):
        self.calls.append("reset")
        return super().reset(**given)

    def step(self, action):
        self.calls.append("step")
        return super().step(action)


class Native(VectorEnv):
    """Counts to 2 in the first environment and to 3 in the others; heeds no mask, if told so."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, num_envs, *, heeds) -> None:
        self.num_envs, self.heeds = num_envs, heeds
        self.single_observation_space = spaces.Box(0, 9, (1,), np.float64)
        self.single_action_space = spaces.Discrete(2)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.count = np.zeros((num_envs, 1))
        self.last = np.array([2] + [3] * (num_envs - 1))
        self.ends = np.zeros(num_envs, bool)

    def reset(self, *, seed=None, options=None):  # noqa: ARG002
        mask = options["reset_mask"] if options and self.heeds else slice(None)
        self.count[mask] = 0
        self.ends[mask] = False
        return self.count, {}

    def step(self, actions):  # noqa: ARG002
        self.count += 1
        np.equal(self.count[:, 0], self.last, out=self.ends)
        return self.count, self.count[:, 0], self.ends, np.zeros(self.num_envs, bool), {}


def native(num_envs=2, *, heeds=True):
    return lambda _: Native(num_envs, heeds=heeds)


@LATER
def test_nobody_is_stepped_or_reset_more_often_than_in_an_episode(mode):
    """Episodes of environment 0 have 3, 5 and 2 steps, those of environment 1 have 5, 2 and 3."""
    envs = [Counting(0), Counting(1)]
    group = group_of(SyncVectorEnv([lambda e=e: e for e in envs], autoreset_mode=mode), [0, 1])
    group.reset(SEEDS)
    for _ in range(9):
        group.step(np.array([1, 2]))
    begin, step = ["reset"], ["step"]
    assert envs[0].calls == begin + 3 * step + begin + 5 * step + begin + step
    assert envs[1].calls == begin + 5 * step + begin + 2 * step + begin + 2 * step


@LATER
def test_all_modes_give_the_same_transitions(mode):
    def played(mode):
        makers = [lambda: CoordinateEnv(0), lambda: CoordinateEnv(1)]
        group = group_of(SyncVectorEnv(makers, autoreset_mode=mode), [0, 1])
        group.reset(SEEDS)
        for step in range(12):
            t = group.step(np.array([step % 4, 1]))
            observations = t.observation["observation"], t.next_observation["observation"]
            flags = t.terminated, t.truncated, t.episode_end
            yield [each.tolist() for each in (*observations, t.reward, t.score, *flags)]

    assert list(played(mode)) == list(played(AutoresetMode.SAME_STEP))


@pytest.mark.processes
@LATER
def test_environments_in_processes_of_their_own_are_reset_at_once(mode):
    makers = [lambda: CoordinateEnv(0), lambda: CoordinateEnv(1)]
    group = group_of(AsyncVectorEnv(makers, autoreset_mode=mode), [0, 1])
    try:
        group.reset(SEEDS)
        seen = [group.step(np.array([2, 3])) for _ in range(4)][2:]
    finally:
        group.close()
    third, fourth = seen
    assert third.observation["observation"].tolist() == [[0, 0, 3, 2, 100], [1, 0, 3, 3, 200]]
    assert third.next_observation["observation"][0].tolist() == [0, 1, 0, -1, 100]
    assert fourth.observation["observation"].tolist() == [[0, 1, 1, 2, 100], [1, 0, 4, 3, 200]]


@pytest.mark.processes
def test_processes_that_would_reset_twice_are_refused():
    envs = AsyncVectorEnv([lambda: CoordinateEnv(0)], shared_memory=False)
    try:
        with pytest.raises(ConfigurationError, match=r"shared_memory=False .*SAME_STEP"):
            group_of(envs, [0])
    finally:
        envs.close()


def test_memory_that_is_written_again_by_the_reset_is_copied_first():
    group = make_group(native(), [0, 1])
    group.reset(SEEDS)
    group.step(np.array([0, 0]))
    ended = group.step(np.array([0, 0]))
    assert ended.observation["observation"].tolist() == [[2], [2]]
    assert ended.next_observation["observation"].tolist() == [[0], [2]]
    assert ended.reward.tolist() == [2, 2]
    assert ended.terminated.tolist() == [True, False]


def test_a_mask_that_is_not_heeded_is_noticed():
    group = make_group(native(heeds=False), [6, 7])
    group.reset(SEEDS)
    group.step(np.array([0, 0]))
    message = r"reset_mask.* of environments \[6, 7\] changed those .*goes on.*SAME_STEP"
    with pytest.raises(ConfigurationError, match=message):
        group.step(np.array([0, 0]))


class Leaving(Native):
    """Ends the process as if all had gone well, in the first reset or in the one after a game."""

    def __init__(self, *, late) -> None:
        super().__init__(2, heeds=True)
        self.late = late

    def reset(self, *, seed=None, options=None):
        if (options is not None) is self.late:
            sys.exit()
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("late", [False, True])
def test_a_reset_that_would_end_the_process_is_refused(late):
    group = make_group(lambda _: Leaving(late=late), [6, 7])
    calls = [partial(group.reset, SEEDS), *[partial(group.step, np.array([0, 0]))] * 2]
    with pytest.raises(ConfigurationError, match=r"reset\(\) of environments \[6, 7\] calls sys"):
        [call() for call in calls]


def test_a_wrapper_that_takes_no_mask_is_told_in_one_line():
    group = make_group(lambda _: NormalizeObservation(Native(2, heeds=True)), [6, 7])
    group.reset(SEEDS)
    group.step(np.array([0, 0]))
    message = r"environments \[6, 7\] cannot be reset one by one: NormalizeObservation .*single env"
    with pytest.raises(ConfigurationError, match=message):
        group.step(np.array([0, 0]))


@LATER
def test_a_wrapper_that_forgets_the_returns_of_all_is_refused(mode):
    """Gymnasium 1.4's sets them to 0 in each reset, whatever the mask says."""

    def normalised(number, mode):
        makers = [partial(CoordinateEnv, index) for index in range(number)]
        return NormalizeReward(SyncVectorEnv(makers, autoreset_mode=mode))

    group_of(normalised(2, AutoresetMode.SAME_STEP), [0, 1])
    group_of(normalised(1, mode), [0])
    frozen = normalised(2, mode)
    frozen.update_running_mean = False
    group_of(frozen, [0, 1])
    with pytest.raises(ConfigurationError, match=r"vector\.NormalizeReward .*SAME_STEP"):
        group_of(normalised(2, mode), [0, 1])


def test_one_environment_needs_no_mask():
    group = make_group(native(1, heeds=False), [0])
    group.reset([1])
    firsts = [group.step(np.array([0])).next_observation["observation"].item() for _ in range(4)]
    assert firsts == [1, 0, 1, 0]


def test_a_vector_environment_that_does_not_tell_when_it_resets_is_refused():
    def make(_):
        envs = Native(2, heeds=True)
        envs.metadata = {}
        return envs

    with pytest.raises(ConfigurationError, match="does not tell when it resets"):
        make_group(make, [0, 1])


def test_one_that_takes_a_single_seed_for_all_is_refused():
    make = partial(gymnasium.make_vec, "CartPole-v1", 2, vectorization_mode="vector_entry_point")
    group = make_group(lambda _: make(), [4, 5])
    with pytest.raises(ConfigurationError, match=r"environments \[4, 5\]: .*a seed for each, as"):
        group.reset(SEEDS)
    group.close()


def test_ale_pys_own_vector_environment_is_refused_with_what_makes_it():
    ale_py = pytest.importorskip("ale_py.vector_env")
    group = make_group(lambda _: ale_py.AtariVectorEnv("pong", 2), [0, 1])
    with pytest.raises(ConfigurationError, match=r"environments \[0, 1\]: .*AtariEnvs\('pong'\)"):
        group.reset(SEEDS)
    group.close()


def test_envpools_own_vector_environments_are_refused_with_what_seeds_them():
    envpool = pytest.importorskip("envpool")
    with pytest.raises(ConfigurationError, match=r"EnvPoolEnvs\('CartPole-v1'\)"):
        make_group(lambda _: envpool.make_gymnasium("CartPole-v1", num_envs=2), [0, 1])


class Saying(Native):
    """Returns rewards and ends of another form."""

    def __init__(self, reward=(1.0, 2.0), flag=np.uint8) -> None:
        super().__init__(2, heeds=True)
        self.reward, self.flag = reward, flag

    def step(self, actions):
        observation, _, *ends, info = super().step(actions)
        return observation, self.reward, *(each.astype(self.flag) for each in ends), info


@pytest.mark.parametrize("flag", [np.uint8, np.int64])
def test_ends_may_be_integers(flag):
    """As an index an integer is a place: the games of other environments would end."""
    group = group_of(Saying(flag=flag), [0, 1])
    group.reset(SEEDS)
    second = [group.step(np.array([0, 0])) for _ in range(2)][-1]
    for ends in (second.terminated, second.episode_end):
        assert ends.dtype == bool
        assert ends.tolist() == [True, False]
    assert second.truncated.tolist() == [False, False]
    assert second.next_observation["observation"].tolist() == [[0], [2]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"reward": np.ones(1)}, r"the reward is float64 \[1\], but one is needed for each of 2"),
        ({"flag": np.float32}, "terminated is a float32, but True or False is needed"),
    ],
)
def test_anything_but_a_number_and_a_flag_of_each_is_refused(returned, message):
    group = group_of(Saying(**returned), [4, 5])
    group.reset(SEEDS)
    with pytest.raises(ConfigurationError, match=rf"step\(\) of environments \[4, 5\] .*{message}"):
        group.step(np.array([0, 0]))


class Informing(Native):
    """Resets within the step, and says what it is told to."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, info) -> None:
        super().__init__(2, heeds=True)
        self.info = info

    def step(self, actions):
        *returned, _ = super().step(actions)
        return *returned, self.info


@pytest.mark.parametrize(
    "info", [{}, {"final_obs": {"count": np.zeros((2, 1))}}, {"final_obs": np.zeros((0, 1))}]
)
def test_a_last_observation_that_is_not_one_of_each_environment_is_refused(info):
    group = group_of(Informing(info), [6, 7])
    group.reset(SEEDS)
    group.step(np.array([0, 0]))
    message = r"step\(\) of environment 6 .*last observation .* is missing.* of each environment"
    with pytest.raises(ConfigurationError, match=message):
        group.step(np.array([0, 0]))


class Walking(CoordinateEnv):
    """Counts its steps by a choice of two."""

    observation_space = spaces.Discrete(2)

    def reset(self, **given):
        super().reset(**given)
        self.place = 0
        return self.place, {}

    def step(self, action):
        _, *rest = super().step(action)
        self.place += 1
        return self.place, *rest


@pytest.mark.parametrize("mode", AutoresetMode)
def test_what_is_none_of_the_declared_choices_is_refused(mode):
    makers = [lambda: Walking(1), lambda: Walking(1)]
    group = group_of(SyncVectorEnv(makers, autoreset_mode=mode), [0, 1])
    group.reset(SEEDS)
    group.step(np.array([0, 0]))
    with pytest.raises(
        ConfigurationError, match=r"step\(\) .* is 2, but range\(0, 2\) is declared"
    ):
        group.step(np.array([0, 0]))


@pytest.mark.parametrize("several", [np.stack, tuple])
def test_the_first_environments_picture_is_shown(several):
    group = make_group(native(), [0, 1])
    frames = [np.full((4, 6, 3), shade, np.uint8) for shade in (7, 8)]
    group.envs[0].render = lambda: several(frames)
    assert np.array_equal(image_of(group)[0, 0], [7, 7, 7])


def test_a_vector_environment_without_pictures_is_told():
    group = make_group(native(), [0, 1])
    group.envs[0].render = lambda: None
    with pytest.raises(ConfigurationError, match="the environment renders None, and no image"):
        image_of(group)
