import copy

import numpy as np
import pytest
import torch

from hts_torchrl.config import PoolConfig
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.policy.examination import find_outputs
from hts_torchrl.policy.inference import PolicyInference
from hts_torchrl.policy.shared_weights import PolicyWeights
from hts_torchrl.schedule import Schedule
from hts_torchrl.shared.buffers import SharedBuffers
from hts_torchrl.workers.actor import Actor, ActorSettings
from tests.fakes import CoordinateEnvs
from tests.policies import VERSION_UNIT, echo_policy, echo_weights

SETTINGS = ActorSettings(
    batch_size=2, device="cpu", precision="32-true", matmul_precision="highest", deterministic=False
)


@pytest.fixture
def shared():
    spec, policy = make_group(CoordinateEnvs(), [0]).spec, echo_policy()
    outputs = find_outputs(PolicyInference(copy.deepcopy(policy), spec, batch_size=2))
    schedule = Schedule.from_frames(10, total_frames=-1, num_envs=5, delay=1)
    layout = PolicyWeights.layout(policy)
    shared = SharedBuffers(spec, outputs, PoolConfig(num_envs=5), schedule, layout)
    shared.state.observations["observation"][:, 0] = np.arange(5)
    shared.state.draws[:] = 0.5
    yield shared
    shared.close()


@pytest.fixture
def weights(shared):
    weights = PolicyWeights(shared.arrays, echo_policy())
    weights.publish(echo_weights(0), 0)
    weights.exchange()
    return weights


def values(shared) -> list[float]:
    return shared.actions.answers["state_value"][:, 0].tolist()


def test_each_environment_is_answered_from_its_own_observation(shared, weights):  # noqa: ARG001
    Actor(shared, echo_policy(), SETTINGS).answer(np.array([3, 1, 4], np.int32))
    assert values(shared) == [0, 1024, 0, 3072, 4096]


def test_environments_that_did_not_ask_are_left_alone(shared, weights):  # noqa: ARG001
    shared.actions.answers["action"][:] = 9
    Actor(shared, echo_policy(), SETTINGS).answer(np.array([3], np.int32))
    assert shared.actions.answers["action"].tolist() == [9, 9, 9, 2, 9]


def test_published_weights_are_not_used_before_the_exchange(shared, weights):
    actor = Actor(shared, echo_policy(), SETTINGS)
    weights.publish(echo_weights(1))
    actor.answer(np.array([0], np.int32))
    assert values(shared)[0] == 0


def test_a_waiting_actor_uses_new_weights_from_the_exchange_on(shared, weights):
    actor = Actor(shared, echo_policy(), SETTINGS)
    actor.answer(np.array([0], np.int32))
    weights.publish(echo_weights(1))
    weights.exchange()
    actor.answer(np.array([0], np.int32))
    assert values(shared)[0] == VERSION_UNIT


def test_settings_are_applied_to_the_process():
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        settings = {"matmul_precision": "high", "deterministic": True}
        ActorSettings(batch_size=2, device="cpu", precision="32-true", **settings).apply()
        applied = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.use_deterministic_algorithms(False)
    assert applied == (1, "high", True)
