import os

import numpy as np
import pytest

from hts_torchrl.buffers.board import Board
from hts_torchrl.config import CrewConfig
from hts_torchrl.schedule import Schedule
from tests.unit.buffers.test_rollout_storage import OUTPUTS, SPEC


@pytest.fixture
def board():
    config = CrewConfig(num_envs=4, envs_per_executor=2, num_actors=1)
    schedule = Schedule.from_frames(12, total_frames=-1, num_envs=4, delay=1)
    board = Board(SPEC, OUTPUTS, config, schedule, {"weights": ((8,), "uint8")})
    yield board
    board.close()


def test_every_executor_has_a_doorbell(board):
    assert sorted(board.doorbells) == [0, 1]


def test_an_executor_gets_its_own_doorbell_only(board):
    assert list(board.for_executor(1).doorbells) == [1]


def test_an_actor_gets_every_doorbell_without_its_reading_end(board):
    bells = board.for_actor().doorbells
    assert sorted(bells) == [0, 1]
    assert not any(hasattr(bell, "_reader") for bell in bells.values())


def test_taking_parts_leaves_the_board_whole(board):
    board.for_executor(1)
    board.for_actor()
    assert all(hasattr(bell, "_reader") for bell in board.doorbells.values())


def test_parts_see_the_same_memory(board):
    board.for_executor(0).state.draws[3] = 0.5
    assert board.for_actor().state.draws[3] == 0.5


def test_executors_and_actors_have_a_row_in_the_logbook(board):
    assert board.logbook.steps.shape == (3,)


def test_buffers_are_rebuilt_in_a_worker_and_not_sent(board):
    assert not {"state", "actions", "storages", "logbook"} & set(board.__getstate__())


def test_closing_twice_is_allowed(board):
    board.close()
    board.close()


def test_closing_returns_every_descriptor_but_the_mapping():
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    config = CrewConfig(num_envs=4, num_actors=1)
    schedule = Schedule.from_frames(12, total_frames=-1, num_envs=4, delay=1)
    board = Board(SPEC, OUTPUTS, config, schedule, {})
    board.close()
    del board
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_observations_of_all_environments_fit(board):
    assert board.state.observations["observation"].shape == (4, 1, 2, 2)
    assert board.storages[1].arrays["action"].shape == (4, 3)
    assert board.storages[1].arrays["action"].dtype == np.int64
