import threading
from functools import partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    EnvBase,
    EnvCreator,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

from hts_torchrl.envs.group import EnvFactory
from hts_torchrl.envs.make_group import env_spec_of, make_group, number_of_envs
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


@pytest.mark.parametrize(
    ("module", "hint"), [("gym.core", "; shimmy's GymV21CompatibilityV0"), ("mine", "$")]
)
def test_an_environment_of_the_old_gym_is_refused_with_what_wraps_it(module, hint):
    env = type("Env", (), {"__module__": module})
    with pytest.raises(ConfigurationError, match=rf"returned a Env; .*EnvBase is needed{hint}"):
        make_group(env, [0])


def test_making_an_environment_leaves_torchs_global_generator_alone():
    """The tutorials of TorchRL seed it in the constructor."""
    before = torch.get_rng_state()
    make_group(lambda _: (torch.manual_seed(0), CoordinateEnv(0))[1], [0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_vector_environment_of_a_list_is_refused():
    """The other functions of the list would never be called."""

    def make(_):
        return gymnasium.make_vec("CartPole-v1", num_envs=2)

    with pytest.raises(ConfigurationError, match=r"is a list, .* returned a vector environment"):
        make_group([make, make], [0, 1])


class Told(CoordinateEnv):
    """Keeps what it was made with."""

    def __init__(self, told="nothing") -> None:
        super().__init__(0)
        self.told = told

    @classmethod
    def make(cls):
        return cls("by a method")


class Needing(Told):
    def __init__(self, told) -> None:
        super().__init__(told)


class HandingOn(Told):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize(
    ("maker", "told"),
    [
        (lambda: Told(), "nothing"),
        (Told, "nothing"),
        (Told.make, "by a method"),
        (lambda name="kept": Told(name), "kept"),
        (lambda *, name="kept": Told(name), "kept"),
        (partial(Needing, "bound"), "bound"),
        (partial(Needing, told="bound"), "bound"),
        (Needing, 6),
        (lambda index: Told(index), 6),
        (lambda index, name="kept": Told((index, name)), (6, "kept")),
        (lambda *indices: Told(indices), (6,)),
        (HandingOn, "nothing"),
        (lambda *args, **kwargs: Told(*args, **kwargs), "nothing"),
        (lambda index, *args, **kwargs: Told(index, *args, **kwargs), 6),
        (partial(lambda name, index: Told((name, index)), "bound"), ("bound", 6)),
    ],
)
def test_a_function_gets_the_index_where_it_needs_an_argument(maker, told):
    (env,) = make_group(maker, [6]).envs
    assert env.told == told


class Quiet(EnvBase):
    """TorchRL's environments have a metaclass that hides what their constructors take."""

    def __init__(self, told="nothing", batch_size=()) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        self.told = told
        self.observation_spec = Composite(seen=Unbounded((*batch_size, 1)), shape=batch_size)
        self.action_spec = Categorical(2, shape=batch_size)
        self.reward_spec = Unbounded((*batch_size, 1))

    def _reset(self, tensordict=None, **_):  # noqa: ARG002
        return TensorDict(seen=torch.zeros(1))

    def _step(self, tensordict):  # noqa: ARG002
        ends = {"done": torch.zeros(1, dtype=torch.bool)}
        return TensorDict({"seen": torch.zeros(1), "reward": torch.ones(1), **ends})

    def _set_seed(self, seed):
        self.seed = seed


class Indexed(Quiet):
    def __init__(self, told) -> None:
        super().__init__(told)


@pytest.mark.parametrize(
    ("maker", "told"),
    [
        (lambda: Quiet(), "nothing"),
        (Quiet, "nothing"),
        (partial(Quiet, "bound"), "bound"),
        (partial(Indexed, "bound"), "bound"),
        (Indexed, 6),
        (EnvCreator(Quiet), "nothing"),
        (EnvCreator(Quiet, {"told": "bound"}), "bound"),
    ],
)
def test_torchrls_environments_are_made_as_torchrl_makes_them(maker, told):
    (env,) = make_group(maker, [6]).envs
    assert env.told == told


class TestInstances:
    def test_every_environment_is_a_copy_of_the_instance_that_was_given(self):
        given = Quiet("given")
        given.is_closed = False
        group = make_group(given, [3, 4])
        group.reset([30, 40])
        group.close()
        assert [(env.told, env.seed) for env in group.envs] == [("given", 30), ("given", 40)]
        assert not given.is_closed
        assert not hasattr(given, "seed")

    def test_a_list_may_hold_instances_and_functions(self):
        group = make_group([Quiet("first"), lambda: Quiet("second")], [0, 1])
        assert [env.told for env in group.envs] == ["first", "second"]

    def test_an_instance_that_cannot_be_copied_is_refused(self):
        env = Quiet()
        env.handle = threading.Lock()
        with pytest.raises(
            ConfigurationError, match=r"cannot be copied \(TypeError: .*`lambda: Qui"
        ):
            make_group(env, [0])

    def test_a_batch_of_another_size_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"batch size \(2,\), .* envs_per_executor=2"):
            make_group(SerialEnv(2, Quiet), [0])

    def test_a_batch_is_asked_for_its_spec_whatever_its_size(self):
        assert env_spec_of(lambda: SerialEnv(2, Quiet)) == env_spec_of(Quiet)
        assert env_spec_of(SerialEnv(3, Quiet)) == env_spec_of(Quiet)

    @pytest.mark.parametrize("env", [CoordinateEnv(0), gymnasium.make_vec("CartPole-v1")])
    def test_one_environment_of_gymnasium_is_refused(self, env):
        with pytest.raises(ConfigurationError, match=r"lambda: gymnasium\.make"):
            make_group(env, [0])


class TestNumberOfEnvs:
    @pytest.mark.parametrize("maker", [CoordinateEnvs(), Listing(), CoordinateEnv])
    def test_without_a_list_it_is_what_was_asked_for_or_sixteen(self, maker):
        assert (number_of_envs(maker, None), number_of_envs(maker, 5)) == (16, 5)

    def test_a_list_has_as_many_as_it_is_long(self):
        makers = [CoordinateEnvs()] * 3
        assert (number_of_envs(makers, None), number_of_envs(makers, 3)) == (3, 3)

    @pytest.mark.parametrize("num_envs", [1, 2, 4, 16])
    def test_another_number_than_a_list_has_is_refused(self, num_envs):
        with pytest.raises(ConfigurationError, match=f"lists 3 .* num_envs={num_envs}"):
            number_of_envs([CoordinateEnvs()] * 3, num_envs)

    @pytest.mark.parametrize("given", [{"num_envs": "2"}, {"first_env": "0"}, {"first_env": 0.5}])
    def test_beside_a_list_both_are_whole_numbers(self, given):
        ((name, value),) = given.items()
        message = f"^{name}={value!r}; a whole number is needed$"
        with pytest.raises(ConfigurationError, match=message):
            number_of_envs([CoordinateEnvs()] * 2, **{"num_envs": None} | given)

    def test_an_empty_list_is_refused(self):
        with pytest.raises(ConfigurationError, match="lists 0"):
            number_of_envs([], None)

    def test_ranks_may_share_a_list(self):
        makers = [CoordinateEnvs()] * 8
        assert (number_of_envs(makers, 2, 4), number_of_envs(makers, None, 5)) == (2, 3)
        with pytest.raises(ConfigurationError, match="lists 4 environments from first_env=4"):
            number_of_envs(makers, 5, 4)


@pytest.mark.parametrize("wrong", [7, None, {}, [None]])
def test_what_is_neither_function_nor_list_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=r"is a \w+; a function that returns"):
        make_group(wrong, [0])


def test_an_id_is_refused_with_the_factory_that_takes_it():
    with pytest.raises(ConfigurationError, match=r"GymEnvs\('CartPole-v1'\)"):
        make_group("CartPole-v1", [0])


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigurationError, match="create_env_fn is an empty list"):
        env_spec_of([])


def test_environments_of_two_kinds_are_refused():
    makers = [CoordinateEnv, lambda _: Quiet()]
    with pytest.raises(ConfigurationError, match=r"a Quiet; another gymnasium\.Env, as the first"):
        make_group(makers, [0, 1])


def test_what_was_made_is_closed_where_it_is_refused():
    closed = []

    class Closing(CoordinateEnv):
        def close(self):
            closed.append(self.index)
            raise OSError("which would hide the reason")

    with pytest.raises(ConfigurationError, match="a dict"):
        make_group([Closing, Closing, lambda: {}], [0, 1, 2])
    assert closed == [0, 1]


class TestEnvSpec:
    def test_it_is_that_of_the_environment_which_is_closed(self):
        closed = []

        class Env(gymnasium.wrappers.TimeLimit):
            def close(self):
                closed.append(True)
                super().close()

        spec = env_spec_of(lambda: Env(gymnasium.make("CartPole-v1"), 9))
        assert (spec.observations["observation"].shape, spec.action.sizes) == ((4,), (2,))
        assert closed == [True]


def one_of_gymnasium():
    env = CoordinateEnv(0)
    return lambda: gymnasium.wrappers.TimeLimit(env, 9)


def one_of_torchrl():
    env = GymEnv("CartPole-v1")
    return lambda: TransformedEnv(env, StepCounter())


def one_inside_of_torchrls():
    env = gymnasium.make("CartPole-v1")
    return lambda: GymWrapper(env)


@pytest.mark.parametrize("maker", [one_of_gymnasium, one_of_torchrl, one_inside_of_torchrls])
def test_a_function_that_returns_the_same_environment_is_refused(maker):
    """What it observed would depend on who else is in its executor."""
    with pytest.raises(ConfigurationError, match=r"environments 3 and 4 are the same \w+, "):
        make_group(maker(), [3, 4])
