import numpy as np
import pytest

from hts_torchrl.buffers.action_buffer import ActionBuffer
from hts_torchrl.buffers.arena import SharedArena
from hts_torchrl.config import ArraySpec

OUTPUTS = {
    "action": ArraySpec((2,), np.dtype(np.int64)),
    "state_value": ArraySpec((1,), np.dtype(np.float32)),
}


@pytest.fixture
def buffer():
    arena = SharedArena(ActionBuffer.layout(OUTPUTS, 4))
    yield ActionBuffer(arena, OUTPUTS)
    arena.close()


def test_each_environment_has_a_slot_of_each_answer(buffer):
    shapes = {key: slots.shape for key, slots in buffer.answers.items()}
    assert shapes == {"action": (4, 2), "state_value": (4, 1)}


def test_an_answer_reaches_the_environment_that_asked(buffer):
    answers = {"action": np.array([[3, 3], [1, 1]]), "state_value": np.array([[0.3], [0.1]])}
    buffer.put(np.array([3, 1], np.int32), answers)
    assert buffer.answers["action"].tolist() == [[0, 0], [1, 1], [0, 0], [3, 3]]
    assert buffer.answers["state_value"].ravel().tolist() == pytest.approx([0, 0.1, 0, 0.3])
