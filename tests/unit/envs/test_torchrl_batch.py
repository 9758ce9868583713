"""A batched TorchRL environment does what its environments do one by one."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    AsyncEnvPool,
    EnvBase,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.transforms import TensorDictPrimer

from hts_torchrl import ConfigurationError, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.envs.adapter import AdapterGroup
from hts_torchrl.envs.group import SeededGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.policy.inference import one_thread
from tests.runs import digest, play, stopped_after
from tests.unit.envs.test_torchrl import ACTIONS, BothEnv, CountingEnv, DrawingEnv


def cart_pole() -> GymEnv:
    return GymEnv("CartPole-v1")


def counting(index: int, action: str):
    return lambda: CountingEnv(index, action)


def batch(action: str = "discrete") -> AdapterGroup:
    return make_group(lambda: SerialEnv(2, [counting(index, action) for index in (0, 1)]), [0, 1])


def test_a_batch_makes_a_group_of_its_own_kind():
    group = batch()
    assert not isinstance(group, SeededGroup)
    group.close()
    assert group.envs[0].is_closed


@pytest.mark.parametrize("kind", ACTIONS)
def test_each_environment_does_what_it_does_alone(kind):
    """Over the ends of two episodes, of which one is terminated and the other truncated."""
    together = batch(kind)
    alone = make_group([counting(index, kind) for index in (0, 1)], [0, 1])
    assert together.spec == alone.spec
    assert same(together.reset([7, 8]), alone.reset([7, 8]))
    for step in range(6):
        actions = np.zeros((2, *ACTIONS[kind].shape), alone.spec.action.array.dtype)
        actions[step % 2] = 1
        found, wanted = together.step(actions), alone.step(actions)
        assert same(found.observation, wanted.observation)
        assert same(found.next_observation, wanted.next_observation)
        for name in ("reward", "score", "terminated", "truncated", "episode_end"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert (one.tolist(), one.dtype) == (other.tolist(), other.dtype)
    together.close()


def test_a_batch_without_pictures_says_how_it_would_have_some():
    group = batch()
    group.reset([7, 8])
    with pytest.raises(ConfigurationError, match=r"observes no 'pixels'.*from_pixels=True"):
        group.render()
    group.close()


class InPlace(EnvBase):
    """A batch of two that counts, and ends after 2 and 3 steps, in tensors that it writes again."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        flag = Categorical(2, shape=(2, 1), dtype=torch.bool)
        self.observation_spec = Composite(observation=Unbounded((2, 1)), shape=[2])
        self.action_spec = Categorical(2, shape=(2,))
        self.reward_spec = Unbounded((2, 1))
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), shape=[2])
        self.count, self.ends = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.bool)

    def _observed(self, **more) -> TensorDict:
        flags = {"done": self.ends, "terminated": self.ends}
        return TensorDict({"observation": self.count, **flags, **more}, [2])

    def _reset(self, tensordict=None):
        whole = tensordict is None or "_reset" not in tensordict
        begins = torch.ones_like(self.ends) if whole else tensordict["_reset"].reshape(2, 1)
        self.count[begins], self.ends[begins] = 0, False
        return self._observed()

    def _step(self, _):
        self.count += 1
        self.ends[:] = self.count >= torch.tensor([[2], [3]])
        return self._observed(reward=torch.ones(2, 1))

    def _set_seed(self, seed):
        return seed


def test_a_batch_that_resets_in_place_gives_the_last_observation_of_a_game():
    group = make_group(InPlace, [0, 1])
    group.reset([7, 8])
    found = []
    for _ in range(3):
        step = group.step(np.zeros(2, np.int64))
        observations = step.observation, step.next_observation
        counts = [each["observation"].ravel().tolist() for each in observations]
        found.append((*counts, step.terminated.tolist()))
    assert found == [
        ([1, 1], [1, 1], [False, False]),
        ([2, 2], [0, 2], [True, False]),
        ([1, 3], [1, 0], [False, True]),
    ]


class Ending(CountingEnv):
    """Has no ``truncated``."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone())

    def _ends(self, terminated, truncated):
        ends = super()._ends(terminated or truncated, False)
        return {key: ends[key] for key in ("done", "terminated")}


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[key], other[key]) for key in (*one, *other))


def test_a_batch_draws_from_one_global_generator_of_its_own():
    group = make_group(lambda: SerialEnv(2, lambda: DrawingEnv(0)), [0, 1])
    before = torch.get_rng_state()
    found = [group.reset([7, 8]), group.step(np.zeros(2, np.int64)).observation]
    assert torch.equal(torch.get_rng_state(), before)
    group.close()
    drawn = torch.rand(16, generator=torch.Generator().manual_seed(7))
    assert (
        np.concatenate([entries["place"].ravel() for entries in found]).tolist() == drawn.tolist()
    )


def four_poles() -> SerialEnv:
    return SerialEnv(4, cart_pole)


def collect(**settings) -> HTSCollector:
    torch.manual_seed(0)
    with one_thread():  # a SerialEnv leaves two, with which the first weights have other last bits
        policy = make_actor_critic("mlp", env_spec_of(cart_pole))
    settings = {"frames_per_batch": 160, "total_frames": 480, "num_actors": 0} | settings
    return HTSCollector(four_poles, policy, num_envs=8, envs_per_executor=4, **settings)


@pytest.mark.processes
def test_two_batches_are_collected_alike_in_processes():
    serial = play(collect())
    starts = serial[0]["observation"][:, 0]
    assert starts.unique(dim=0).shape == (8, 4)
    assert serial[0]["next", "terminated"].any()
    assert digest(play(collect(num_actors=2))) == digest(serial)


def test_a_stopped_run_goes_on_with_the_same_bits():
    assert digest(stopped_after(1, collect)) == digest(play(collect()))


def test_games_of_a_batch_have_the_limit_that_is_asked_for():
    (batch,) = play(collect(max_frames_per_traj=5, total_frames=160))
    assert batch["next", "step_count"].max() == 5
    assert batch["next", "truncated"].any()


class MultiThreadedEnvWrapper(InPlace):
    """TorchRL's for EnvPool has this name, and needs packages that are not installed."""

    __module__ = "torchrl.envs.libs.envpool"


def gymnasiums(mode: AutoresetMode) -> GymWrapper:
    poles = [partial(gymnasium.make, "CartPole-v1")] * 2
    return GymWrapper(SyncVectorEnv(poles, autoreset_mode=mode))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AsyncEnvPool([cart_pole] * 2), "takes no seed: a SerialEnv"),
        (lambda: InPlace(auto_reset=True), "does not keep its last observation: leave it out"),
        (MultiThreadedEnvWrapper, r"play the same games: .*EnvPoolEnvs\('CartPole-v1'\)"),
        (
            lambda: gymnasiums(AutoresetMode.SAME_STEP),
            "lose their last observations: give the vector environment itself",
        ),
        (lambda: SerialEnv(3, cart_pole), r"batch size \(3,\), .* set envs_per_executor=3"),
        (lambda: SerialEnv(2, lambda: SerialEnv(2, cart_pole)), r"\(2, 2\), .* one dimension"),
        (
            lambda: TransformedEnv(
                SerialEnv(2, cart_pole), TensorDictPrimer(h=Unbounded((8,)), expand_specs=True)
            ),
            "TensorDictPrimer of a batch: leave it out where a module of the policy has it",
        ),
    ],
)
def test_other_batches_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make_group(make, [0, 1])


def test_a_vector_environment_that_leaves_resets_to_torchrl_gives_last_observations():
    group = make_group(lambda: gymnasiums(AutoresetMode.DISABLED), [0, 1])
    before, last, ended = group.reset([7, 8])["observation"], None, np.zeros(2, bool)
    while not ended.any():
        step = group.step(np.eye(2, dtype=np.int64))
        last, ended = step.observation["observation"], step.terminated
        moved, before = np.abs(last - before).max(), step.next_observation["observation"]
    assert moved < 0.5
    assert (np.abs(last[ended, 2]) > 0.2).all()  # where the pole has fallen
    assert (np.abs(before[ended]) < 0.05).all()
    group.close()


@pytest.mark.processes
def test_the_workers_of_a_parallel_environment_outlive_the_look_for_its_transforms():
    """They end when they are asked for an attribute that their environments lack."""
    env = TransformedEnv(ParallelEnv(2, cart_pole), StepCounter(9))
    env.reset()  # its workers run
    group = make_group(lambda: env, [0, 1])
    assert group.reset([0, 1])["observation"].shape == (2, 4)
    group.close()


def test_games_of_a_batch_may_be_terminated_and_truncated_at_once():
    group = make_group(lambda: SerialEnv(2, lambda: BothEnv(0)), [0, 1])
    group.reset([7, 8])
    last = [group.step(np.zeros(2, np.int64)) for _ in range(3)][-1]
    assert last.terminated.tolist() == last.truncated.tolist() == [True, True]
    group.close()


def test_games_of_a_batch_that_only_terminate_are_not_truncated():
    group = make_group(lambda: SerialEnv(2, lambda: Ending(0)), [0, 1])
    group.reset([7, 8])
    last = [group.step(np.zeros(2, np.int64)) for _ in range(3)][-1]
    assert last.terminated.tolist() == [True, True]
    assert last.truncated.tolist() == [False, False]
    group.close()
