import gymnasium
import pytest

from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.gym import SerialGroup, VectorGroup
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.errors import ConfigurationError
from tests.fakes import CoordinateEnv, CoordinateEnvs


class Listing(EnvFactory):
    """A factory that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked = None

    def group(self, indices, *, render=False):
        self.asked = (list(indices), render)
        return "group"


def test_a_factory_makes_its_own_group():
    factory = Listing()
    assert make_group(factory, [3, 4], render=True) == "group"
    assert factory.asked == ([3, 4], True)


def test_a_function_is_called_once_with_each_index():
    group = make_group(CoordinateEnvs(), [4, 6])
    assert [env.index for env in group.envs] == [4, 6]


def test_a_list_has_one_function_for_each_environment():
    makers = [lambda index, place=place: CoordinateEnv(10 * place + index) for place in range(4)]
    group = make_group(makers, [1, 3])
    assert [env.index for env in group.envs] == [11, 33]


def test_a_list_that_is_too_short_is_refused():
    with pytest.raises(ConfigurationError, match="lists 2 environments, but environment 3"):
        make_group([CoordinateEnvs()] * 2, [3])


def test_single_gymnasium_environments_are_stepped_one_after_another():
    assert isinstance(make_group(CoordinateEnvs(), [0, 1]), SerialGroup)


def test_a_gymnasium_vector_environment_is_taken_whole():
    def make(index):
        makers = [lambda place=place: CoordinateEnv(place) for place in (index, index + 1)]
        return gymnasium.vector.SyncVectorEnv(
            makers, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
        )

    assert isinstance(make_group(make, [4, 5]), VectorGroup)


def test_what_is_neither_function_nor_list_is_refused():
    with pytest.raises(ConfigurationError, match="is a int"):
        make_group(7, [0])


def test_a_function_that_returns_no_environment_is_refused():
    with pytest.raises(ConfigurationError, match="returned a dict"):
        make_group(lambda _: {}, [0])
