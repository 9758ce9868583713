import os

import numpy as np
import pytest

from hts_torchrl.config import CollectorSettings
from hts_torchrl.shared.buffers import SharedBuffers
from tests.unit.shared.test_rollout import OUTPUTS, SPEC


@pytest.fixture
def shared():
    config = CollectorSettings(num_envs=4, envs_per_executor=2, num_actors=1, frames_per_batch=12)
    shared = SharedBuffers(SPEC, OUTPUTS, config, {"weights": ((8,), "uint8")})
    yield shared
    shared.close()


def test_every_executor_has_a_doorbell(shared):
    assert sorted(shared.doorbells) == [0, 1]


def test_an_executor_gets_its_own_doorbell_only(shared):
    assert list(shared.for_executor(1).doorbells) == [1]


def test_an_actor_gets_every_doorbell_without_its_reading_end(shared):
    bells = shared.for_actor().doorbells
    assert sorted(bells) == [0, 1]
    assert not any(hasattr(bell, "_reader") for bell in bells.values())


def test_taking_parts_leaves_the_shared_buffers_whole(shared):
    shared.for_executor(1)
    shared.for_actor()
    assert all(hasattr(bell, "_reader") for bell in shared.doorbells.values())


def test_parts_see_the_same_memory(shared):
    shared.for_executor(0).state.draws[3] = 0.5
    assert shared.for_actor().state.draws[3] == 0.5


def test_executors_and_actors_have_a_row_in_the_worker_status(shared):
    assert shared.status.steps.shape == (3,)


def test_buffers_are_rebuilt_in_a_worker_and_not_sent(shared):
    assert not {"state", "actions", "storages", "status"} & set(shared.__getstate__())


def test_closing_twice_is_allowed(shared):
    shared.close()
    shared.close()


def test_closing_returns_every_descriptor_but_the_mapping():
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    config = CollectorSettings(num_envs=4, num_actors=1, frames_per_batch=12)
    shared = SharedBuffers(SPEC, OUTPUTS, config, {})
    shared.close()
    del shared
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_observations_of_all_environments_fit(shared):
    assert shared.state.observations["observation"].shape == (4, 1, 2, 2)
    assert shared.storages[1].arrays["action"].shape == (4, 3)
    assert shared.storages[1].arrays["action"].dtype == np.int64
