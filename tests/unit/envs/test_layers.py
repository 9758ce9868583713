import gymnasium
import pytest
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymEnv, GymWrapper, TransformedEnv
from torchrl.envs.transforms import Compose, ObservationNorm, StepCounter, VecNorm, VecNormV2

from hts_torchrl.envs.layers import is_a, layers_of, running_statistics
from hts_torchrl.envs.make_group import make_group
from tests.fakes import CoordinateEnv


def normalised(*layers):
    """An environment of single ones inside these wrappers."""

    def make(index=0):
        env = CoordinateEnv(index)
        for layer in layers:
            env = layer(env)
        return env

    return make


def frozen(env):
    env = wrappers.NormalizeObservation(env)
    env.update_running_mean = False
    return env


def fixed():
    norm = VecNormV2(in_keys=["observation"])
    norm.freeze()
    return norm


OBSERVATION, REWARD = wrappers.NormalizeObservation, wrappers.NormalizeReward


def vectorised(make, wrapper=lambda envs: envs):
    return wrapper(SyncVectorEnv([make], autoreset_mode=AutoresetMode.SAME_STEP))


def transformed(*transforms):
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (normalised(), []),
        (normalised(OBSERVATION), ["NormalizeObservation"]),
        (
            normalised(OBSERVATION, REWARD, wrappers.RecordEpisodeStatistics),
            ["NormalizeObservation", "NormalizeReward"],
        ),
        (normalised(frozen), []),
        (lambda: vectorised(normalised(OBSERVATION)), ["NormalizeObservation"]),
        (
            lambda: vectorised(normalised(), wrappers.vector.NormalizeReward),
            ["NormalizeReward"],
        ),
        (lambda: transformed(StepCounter(), VecNorm(new_api=False)), ["VecNorm"]),
        (lambda: transformed(VecNormV2(in_keys=["observation"])), ["VecNormV2"]),
        (lambda: transformed(fixed()), []),
        (lambda: transformed(ObservationNorm(0.0, 1.0, in_keys=["observation"])), []),
        (lambda: GymWrapper(OBSERVATION(gymnasium.make("CartPole-v1"))), ["NormalizeObservation"]),
    ],
)
@pytest.mark.filterwarnings("ignore:This class is to be deprecated:FutureWarning")  # TorchRL's own
def test_layers_with_statistics_of_their_own_are_named_once_each(make, names):
    group = make_group(lambda _: make(), [0])
    assert running_statistics(group) == names
    group.close()


def test_a_loop_of_layers_ends():
    class Looped:
        pass

    looped = Looped()
    looped.env = looped
    assert list(layers_of(looped)) == [looped]


def test_a_class_is_told_by_the_library_that_defines_it_and_its_name():
    env = CoordinateEnv(0)
    assert is_a(env, "gymnasium.Env")
    assert is_a(env, "tests.CoordinateEnv")
    assert not is_a(env, "torchrl.Env")
