import copy

import numpy as np
import pytest
import torch

from hts_torchrl.buffers.board import Board
from hts_torchrl.config import CrewConfig
from hts_torchrl.envs.make_group import make_group
from hts_torchrl.inference import PolicyInference
from hts_torchrl.schedule import Schedule
from hts_torchrl.weights import PolicyWeights
from hts_torchrl.workers.actor import Actor, ActorSettings
from tests.fakes import CoordinateEnvs
from tests.policies import VERSION_UNIT, echo_policy, echo_weights

SETTINGS = ActorSettings(
    batch_size=2, device="cpu", precision="32-true", matmul_precision="highest", deterministic=False
)


@pytest.fixture
def board():
    spec, policy = make_group(CoordinateEnvs(), [0]).spec, echo_policy()
    outputs = PolicyInference(copy.deepcopy(policy), spec, batch_size=2).outputs()
    schedule = Schedule.from_frames(10, total_frames=-1, num_envs=5, delay=1)
    layout = PolicyWeights.layout(policy)
    board = Board(spec, outputs, CrewConfig(num_envs=5), schedule, layout)
    board.state.observations["observation"][:, 0] = np.arange(5)
    board.state.draws[:] = 0.5
    yield board
    board.close()


@pytest.fixture
def weights(board):
    weights = PolicyWeights(board.arena, echo_policy())
    weights.publish(echo_weights(0), 0)
    weights.exchange()
    return weights


def values(board) -> list[float]:
    return board.actions.answers["state_value"][:, 0].tolist()


def test_each_environment_is_answered_from_its_own_observation(board, weights):  # noqa: ARG001
    Actor(board, echo_policy(), SETTINGS).answer(np.array([3, 1, 4], np.int32))
    assert values(board) == [0, 1024, 0, 3072, 4096]


def test_environments_that_did_not_ask_are_left_alone(board, weights):  # noqa: ARG001
    board.actions.answers["action"][:] = 9
    Actor(board, echo_policy(), SETTINGS).answer(np.array([3], np.int32))
    assert board.actions.answers["action"].tolist() == [9, 9, 9, 2, 9]


def test_published_weights_are_not_used_before_the_exchange(board, weights):
    actor = Actor(board, echo_policy(), SETTINGS)
    weights.publish(echo_weights(1))
    actor.answer(np.array([0], np.int32))
    assert values(board)[0] == 0


def test_a_waiting_actor_uses_new_weights_from_the_exchange_on(board, weights):
    actor = Actor(board, echo_policy(), SETTINGS)
    actor.answer(np.array([0], np.int32))
    weights.publish(echo_weights(1))
    weights.exchange()
    actor.answer(np.array([0], np.int32))
    assert values(board)[0] == VERSION_UNIT


def test_settings_are_applied_to_the_process():
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        ActorSettings(2, "cpu", "32-true", "high", True).apply()
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
