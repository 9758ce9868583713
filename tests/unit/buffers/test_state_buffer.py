import numpy as np
import pytest

from hts_torchrl.buffers.arena import SharedArena
from hts_torchrl.buffers.state_buffer import StateBuffer
from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec

SPEC = EnvSpec(
    {
        "picture": ArraySpec((1, 2, 2), np.dtype(np.uint8)),
        ("agent", "vector"): ArraySpec((3,), np.dtype(np.float32)),
    },
    ActionSpec("multi_discrete", ArraySpec((2,), np.dtype(np.int64)), (3, 5)),
)


@pytest.fixture
def buffer():
    arena = SharedArena(StateBuffer.layout(SPEC, 4))
    yield StateBuffer(arena, SPEC)
    arena.close()


def observation(value: int, rows: int) -> dict:
    return {
        "picture": np.full((rows, 1, 2, 2), value, np.uint8),
        ("agent", "vector"): np.full((rows, 3), value, np.float32),
    }


def test_each_environment_has_a_slot_of_each_observation(buffer):
    shapes = {key: slots.shape for key, slots in buffer.observations.items()}
    assert shapes == {"picture": (4, 1, 2, 2), ("agent", "vector"): (4, 3)}


def test_each_environment_has_as_many_draws_as_its_action_needs(buffer):
    assert (buffer.draws.shape, buffer.draws.dtype) == ((4, 2), np.float64)


def test_a_put_fills_the_slots_of_its_rows(buffer):
    buffer.put(slice(1, 3), observation(7, 2), np.full((2, 2), 0.25))
    assert (buffer.observations["picture"][1:3] == 7).all()
    assert (buffer.observations["agent", "vector"][1:3] == 7).all()
    assert (buffer.draws[1:3] == 0.25).all()


def test_a_put_leaves_the_slots_of_other_rows_alone(buffer):
    buffer.put(slice(1, 3), observation(7, 2), np.full((2, 2), 0.25))
    others = [0, 3]
    assert not buffer.observations["picture"][others].any()
    assert not buffer.draws[others].any()


def test_observations_keep_their_type(buffer):
    assert buffer.observations["picture"].dtype == np.uint8
