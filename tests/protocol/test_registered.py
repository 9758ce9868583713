"""Environments that a user's module or program registers are known to worker processes."""

import copy
import sys
import threading
from functools import partial

import ale_py
import cloudpickle
import gymnasium
import pytest
import torchrl.envs.libs.utils  # noqa: F401 - it keeps the frames of whoever imports it first
from torchrl.envs import EnvCreator, GymEnv, TransformedEnv, VecNormV2

from hts_torchrl import ConfigurationError, GymEnvs, HTSCollector, env_spec_of, make_actor_critic
from hts_torchrl.envs.registered import pickle_envs
from tests.fakes import CoordinateEnv, write_package
from tests.policies import echo_policy
from tests.runs import play

pytestmark = pytest.mark.processes

SPAWN = pytest.param("spawn", marks=pytest.mark.thorough)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package that is found as the user's own would be."""
    write_package(tmp_path, "worker_test_package")
    monkeypatch.syspath_prepend(tmp_path)
    yield "worker_test_package"
    gymnasium.registry.pop("Mine-v0", None)
    sys.modules.pop("worker_test_package", None)


def collect(create, start_method, policy=None) -> HTSCollector:
    return HTSCollector(
        create,
        policy or echo_policy(),
        num_envs=2,
        frames_per_batch=8,
        total_frames=16,
        num_actors=1,
        start_method=start_method,
    )


@pytest.mark.parametrize("start_method", ["forkserver", SPAWN])
@pytest.mark.parametrize("named", ["in the id", "in imports"])
def test_workers_import_the_module_that_registers(package, start_method, named):
    by_id = GymEnvs(f"{package}:Mine-v0")
    envs = by_id if named == "in the id" else GymEnvs("Mine-v0", imports=[package])
    batches = play(collect(envs, start_method))
    assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]


class Mine(CoordinateEnv):
    """Of the environment that a program registers itself."""

    def __init__(self, lock=None):  # noqa: ARG002
        super().__init__(0, lengths=(3,))


@pytest.fixture
def main_program(monkeypatch):
    """This test's program, which no worker runs, and what it has registered."""
    monkeypatch.setattr(sys.modules["__main__"], "Mine", Mine, raising=False)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    gymnasium.registry.pop("Mine-v0", None)


MAKERS = {
    "by its id": GymEnvs("Mine-v0"),
    "gymnasium.make": lambda: gymnasium.make("Mine-v0"),
    "gymnasium.make_vec": lambda: gymnasium.make_vec("Mine-v0", num_envs=1),
    "TorchRL's GymEnv": lambda: GymEnv("Mine-v0", categorical_action_encoding=True),
}


@pytest.mark.usefixtures("main_program")
class TestWhatTheProgramRegisters:
    @pytest.mark.parametrize("maker", MAKERS)
    @pytest.mark.parametrize("entry_point", [Mine, "__main__:Mine"])
    def test_is_known_to_workers(self, entry_point, maker):
        gymnasium.register("Mine-v0", entry_point)
        batches = play(collect(MAKERS[maker], "forkserver"))
        assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]

    def test_is_what_it_was_when_the_workers_started(self):
        gymnasium.register("Mine-v0", Mine, max_episode_steps=2)
        batches = play(collect(GymEnvs("Mine-v0"), "forkserver"))
        assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]

    def test_takes_the_place_of_gymnasiums_own(self, monkeypatch):
        spec = copy.copy(gymnasium.spec("CartPole-v1"))
        spec.entry_point = Mine
        monkeypatch.setitem(gymnasium.registry, "CartPole-v1", spec)
        batches = play(collect(GymEnvs("CartPole-v1"), "forkserver"))
        assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]

    def test_is_left_out_if_it_cannot_be_pickled(self):
        gymnasium.register("Mine-v0", partial(Mine, threading.Lock()))
        with pytest.raises(ConfigurationError, match=r"no environment 'Mine-v0'.*imports="):
            play(collect(GymEnvs("Mine-v0"), "forkserver"))


def test_what_a_package_registers_when_imported_is_known_to_workers_and_does_not_warn(capfd):
    """Gymnasium warns where a package registers what is registered already."""
    gymnasium.register_envs(ale_py)
    maker = partial(gymnasium.make, "ALE/Pong-v5", obs_type="ram")
    play(collect(maker, "forkserver", make_actor_critic("mlp", env_spec_of(maker))))
    assert "Overriding environment" not in capfd.readouterr().err


def test_a_maker_that_uses_what_cannot_be_pickled_is_refused():
    lock = threading.Lock()

    def make():
        with lock:
            return CoordinateEnv(0)

    named = r"^create_env_fn cannot be sent to the executors \(TypeError: cannot pickle"
    with pytest.raises(ConfigurationError, match=named):
        play(collect(make, "forkserver"))


def test_an_env_creator_that_shares_statistics_is_refused_with_what_would_do():
    creator = EnvCreator(
        lambda: TransformedEnv(GymEnv("CartPole-v1"), VecNormV2(in_keys=["observation"]))
    )
    named = r"^create_env_fn cannot be sent .*Lock.*: an EnvCreator shares .*give the function"
    with pytest.raises(ConfigurationError, match=named):
        pickle_envs(creator)
