import numpy as np
import pytest

from hts_torchrl.buffers.rollout_storage import RolloutStorage, next_key, storage_specs
from hts_torchrl.config import ActionSpec, ArraySpec, EnvSpec

PIXELS = ArraySpec((1, 2, 2), np.dtype(np.uint8))
SPEC = EnvSpec(
    {"observation": PIXELS}, ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (3,))
)
OUTPUTS = {"action": ArraySpec((), np.dtype(np.int64))}


def test_the_next_entry_of_a_name_is_under_next():
    assert next_key("observation") == ("next", "observation")


def test_the_next_entry_of_a_path_keeps_the_path():
    assert next_key(("agent", "vector")) == ("next", "agent", "vector")


def test_observation_and_next_observation_have_the_same_description():
    specs = storage_specs(SPEC, OUTPUTS)
    assert specs["observation"] == specs["next", "observation"] == PIXELS


def test_numbers_of_a_step_have_a_last_dimension_of_one_as_in_torchrl():
    specs = storage_specs(SPEC, OUTPUTS)
    names = ("reward", "terminated", "truncated", "episode_end", "episode_reward", "step_count")
    assert {specs["next", name].shape for name in names} == {(1,)}


def test_answers_of_the_policy_are_stored_as_they_come():
    assert storage_specs(SPEC, OUTPUTS)["action"] == OUTPUTS["action"]


def test_trajectories_are_numbered_in_64_bits():
    traj_ids = storage_specs(SPEC, OUTPUTS)["collector", "traj_ids"]
    assert traj_ids == ArraySpec((), np.dtype(np.int64))


@pytest.fixture
def storage():
    """Three environments, four steps."""
    specs = storage_specs(SPEC, OUTPUTS)
    return RolloutStorage({k: np.zeros((3, 4, *a.shape), a.dtype) for k, a in specs.items()})


def test_what_is_written_to_a_cell_is_stored_there_and_nowhere_else(storage):
    storage.cells(slice(1, 3))["action"][2] = 7, 8
    expected = np.zeros((3, 4))
    expected[1:3, 2] = 7, 8
    assert np.array_equal(storage.arrays["action"], expected)


def test_numbers_are_written_without_their_last_dimension(storage):
    storage.cells(slice(0, 2))["next", "reward"][3] = 0.5, -1.0
    assert storage.arrays["next", "reward"][:, 3].tolist() == [[0.5], [-1.0], [0.0]]


def test_every_array_has_cells(storage):
    assert storage.cells(slice(0, 1)).keys() == storage.arrays.keys()
