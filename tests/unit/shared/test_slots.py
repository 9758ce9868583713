"""Each environment has a slot of observations and draws, and one of answers."""

import numpy as np
import pytest

from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.shared.buffers import ActionBuffer, StateBuffer
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec(
    {
        "picture": ArraySpec((1, 2, 2), np.dtype(np.uint8)),
        ("agent", "vector"): ArraySpec((3,), np.dtype(np.float32)),
    },
    ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (3, 5)),
)
OUTPUTS = {
    "action": ArraySpec((2,), np.dtype(np.int64)),
    "state_value": ArraySpec((1,), np.dtype(np.float32)),
}


@pytest.fixture
def states():
    arrays = SharedArrays(StateBuffer.layout(SPEC, 4))
    yield StateBuffer(arrays, SPEC)
    arrays.close()


def observation(value: int, rows: int) -> dict:
    return {
        "picture": np.full((rows, 1, 2, 2), value, np.uint8),
        ("agent", "vector"): np.full((rows, 3), value, np.float32),
    }


def test_each_environment_has_a_slot_of_each_observation(states):
    shapes = {key: slots.shape for key, slots in states.observations.items()}
    assert shapes == {"picture": (4, 1, 2, 2), ("agent", "vector"): (4, 3)}
    assert states.observations["picture"].dtype == np.uint8


def test_each_environment_has_as_many_draws_as_its_action_needs(states):
    assert (states.draws.shape, states.draws.dtype) == ((4, 2), np.float64)


def test_a_put_fills_the_slots_of_its_rows_and_leaves_others_alone(states):
    states.put(slice(1, 3), observation(7, 2), np.full((2, 2), 0.25))
    assert (states.observations["picture"][1:3] == 7).all()
    assert (states.observations["agent", "vector"][1:3] == 7).all()
    assert (states.draws[1:3] == 0.25).all()
    others = [0, 3]
    assert not states.observations["picture"][others].any()
    assert not states.draws[others].any()


@pytest.fixture
def actions():
    arrays = SharedArrays(ActionBuffer.layout(OUTPUTS, 4))
    yield ActionBuffer(arrays, OUTPUTS)
    arrays.close()


def test_each_environment_has_a_slot_of_each_answer(actions):
    shapes = {key: slots.shape for key, slots in actions.answers.items()}
    assert shapes == {"action": (4, 2), "state_value": (4, 1)}


def test_an_answer_reaches_the_environment_that_asked(actions):
    answers = {"action": np.array([[3, 3], [1, 1]]), "state_value": np.array([[0.3], [0.1]])}
    actions.put(np.array([3, 1], np.int32), answers)
    assert actions.answers["action"].tolist() == [[0, 0], [1, 1], [0, 0], [3, 3]]
    assert actions.answers["state_value"].ravel().tolist() == pytest.approx([0, 0.1, 0, 0.3])
