"""Environments that a user's module registers: worker processes know them if they import it."""

import sys

import gymnasium
import pytest

from hts_torchrl import ConfigurationError, GymEnvs, HTSCollector
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


def collect(create, start_method) -> HTSCollector:
    return HTSCollector(
        create, echo_policy(), num_envs=2, frames_per_batch=8, total_frames=16, num_actors=1,
        start_method=start_method,
    )  # fmt: skip


@pytest.mark.parametrize("start_method", ["forkserver", SPAWN])
@pytest.mark.parametrize("named", ["in the id", "in imports"])
def test_workers_import_the_module_that_registers(package, start_method, named):
    by_id = GymEnvs(f"{package}:Mine-v0")
    envs = by_id if named == "in the id" else GymEnvs("Mine-v0", imports=[package])
    batches = play(collect(envs, start_method))
    assert batches[0]["observation"][:, :, 2].tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]


def test_what_only_the_main_program_registers_is_refused_with_the_remedy():
    gymnasium.register("Mine-v0", entry_point=lambda: CoordinateEnv(0))
    try:
        GymEnvs("Mine-v0").group([0]).close()
        with pytest.raises(ConfigurationError, match=r"workers must import .*id='module:Mine-v0'"):
            play(collect(GymEnvs("Mine-v0"), "forkserver"))
    finally:
        gymnasium.registry.pop("Mine-v0")
