import numpy as np
import pytest

from hts_torchrl.shared.memory import Memory
from hts_torchrl.specs import MemorySpec

ZERO = np.zeros(2, np.float32)
SPEC = MemorySpec({"state": ZERO, ("agent", "steps"): np.array(7)}, reads_is_init=True)


def answers(first: float, steps: int) -> dict:
    """What a policy wrote for three environments."""
    return {
        ("next", "state"): np.arange(6, dtype=np.float32).reshape(3, 2) + first,
        ("next", "agent", "steps"): np.full(3, steps),
        "action": np.zeros(3),
    }


@pytest.fixture
def memory():
    return Memory.blank(SPEC, 3)


def test_a_trajectory_begins_with_the_first_values(memory):
    assert memory.arrays["state"].tolist() == [[0, 0]] * 3
    assert memory.arrays["agent", "steps"].tolist() == [7] * 3
    assert memory.arrays["is_init"].tolist() == [[True]] * 3
    assert memory.arrays["state"].dtype == np.float32


def test_what_the_policy_wrote_is_read_in_the_next_step(memory):
    memory.carry(answers(10, 8), ended=np.zeros(3, bool))
    assert memory.arrays["state"].tolist() == [[10, 11], [12, 13], [14, 15]]
    assert memory.arrays["agent", "steps"].tolist() == [8] * 3
    assert not memory.arrays["is_init"].any()


def test_only_the_environment_whose_trajectory_ended_forgets(memory):
    memory.carry(answers(10, 8), ended=np.array([False, True, False]))
    assert memory.arrays["state"].tolist() == [[10, 11], [0, 0], [14, 15]]
    assert memory.arrays["agent", "steps"].tolist() == [8, 7, 8]
    assert memory.arrays["is_init"].tolist() == [[False], [True], [False]]


def test_after_a_round_its_last_step_is_remembered_and_the_round_before_stays(memory):
    cells = {key: np.stack([rows + 90, rows], 1) for key, rows in answers(20, 9).items()}
    cells["next", "terminated"] = np.zeros((3, 2, 1), bool)
    cells["next", "truncated"] = np.zeros((3, 2, 1), bool)
    cells["next", "terminated"][0, 1] = cells["next", "truncated"][2, 1] = True
    cells["next", "terminated"][1, 0] = True  # of an earlier step
    later = memory.after(cells)
    assert later.arrays["state"].tolist() == [[0, 0], [22, 23], [0, 0]]
    assert later.arrays["is_init"].tolist() == [[True], [False], [True]]
    assert memory.arrays["state"].tolist() == [[0, 0]] * 3


def test_arrays_of_the_callers_are_changed_in_place():
    slots = {"state": np.ones((3, 2), np.float32)}
    Memory(MemorySpec({"state": ZERO}), slots).carry(answers(1, 0), np.ones(3, bool))
    assert slots["state"].tolist() == [[0, 0]] * 3
