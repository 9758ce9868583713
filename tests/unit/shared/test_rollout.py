"""Cells lie where rounds and environments say, and debug mode counts each write."""

import numpy as np
import pytest

from hts_torchrl.errors import ProtocolError
from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.shared.rollout import (
    DoubleStorage,
    RolloutStorage,
    next_key,
    storage_specs,
)
from hts_torchrl.specs import ActionSpec, ArraySpec, EnvSpec

PIXELS = ArraySpec((1, 2, 2), np.dtype(np.uint8))
SPEC = EnvSpec(
    {"observation": PIXELS}, ActionSpec("discrete", ArraySpec((), np.dtype(np.int64)), (3,))
)
OUTPUTS = {"action": ArraySpec((), np.dtype(np.int64))}


def test_the_next_entry_of_a_name_is_under_next():
    assert next_key("observation") == ("next", "observation")


def test_the_next_entry_of_a_path_keeps_the_path():
    assert next_key(("agent", "vector")) == ("next", "agent", "vector")


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


@pytest.fixture
def storages():
    specs = storage_specs(SPEC, OUTPUTS)
    arrays = SharedArrays(DoubleStorage.layout(specs, num_envs=3, steps=5))
    yield DoubleStorage(arrays, specs)
    arrays.close()


def test_each_storage_has_a_row_for_each_environment_and_a_column_for_each_step(storages):
    assert storages[0].arrays["observation"].shape == (3, 5, 1, 2, 2)


def test_writing_one_storage_leaves_the_other_alone(storages):
    for array in storages[0].arrays.values():
        array[:] = 1
    assert not any(array.any() for array in storages[1].arrays.values())


def test_no_two_entries_share_memory(storages):
    arrays = list(storages[0].arrays.values())
    overlaps = [
        np.shares_memory(one, other) for place, one in enumerate(arrays) for other in arrays[:place]
    ]
    assert not any(overlaps)


def test_in_debug_mode_each_storage_counts_its_own_cells():
    specs, settings = storage_specs(SPEC, OUTPUTS), {"num_envs": 3, "steps": 5}
    arrays = SharedArrays(DoubleStorage.layout(specs, **settings, debug=True))
    storages = DoubleStorage(arrays, specs, debug=True)
    for storage in (storages[0], storages[1]):
        storage.poison()
    for cells in storages[0].cells(slice(None)).values():
        for step in range(5):
            cells[step] = 0
    storages[0].check(0, 0)
    with pytest.raises(ProtocolError, match="never"):
        storages[1].check(1, 0)
    arrays.close()


ENVS, STEPS = 3, 4


@pytest.fixture
def counted():
    specs = storage_specs(SPEC, OUTPUTS)
    return RolloutStorage(
        {key: np.zeros((ENVS, STEPS, *spec.shape), spec.dtype) for key, spec in specs.items()},
        {key: np.zeros((ENVS, STEPS), np.uint8) for key in specs},
    )


def fill(counted, but=None):
    """Record every cell once, or all but one."""
    for env in range(ENVS):
        for step in range(STEPS):
            for key, cells in counted.cells(slice(env, env + 1)).items():
                if (key, env, step) != but:
                    cells[step] = 0


def test_poison_fills_every_byte(counted):
    counted.poison()
    assert all((array.view(np.uint8) == 255).all() for array in counted.arrays.values())
    assert np.isnan(counted.arrays["next", "reward"]).all()


def test_a_round_that_writes_every_cell_once_passes(counted):
    counted.poison()
    fill(counted)
    counted.check(0, 0)
    assert not any(array.any() for array in counted.arrays.values())


def test_a_cell_that_was_never_written_is_named(counted):
    counted.poison()
    fill(counted, but=(("next", "reward"), 1, 2))
    with pytest.raises(ProtocolError) as raised:
        counted.check(7, 10)
    message = "next.reward of environment 11, round 7, step 2, was written never, not once"
    assert str(raised.value) == message


@pytest.mark.parametrize(("more", "times"), [(1, "twice"), (2, "many times")])
def test_a_cell_that_was_written_again_is_named(counted, more, times):
    counted.poison()
    fill(counted)
    for _ in range(more):
        counted.cells(slice(2, 3))["action"][1] = 0
    with pytest.raises(ProtocolError) as raised:
        counted.check(7, 10)
    assert str(raised.value) == (
        f"action of environment 12, round 7, step 1, was written {times}, not once"
    )


def test_a_storage_that_is_poisoned_again_counts_anew(counted):
    for round_index in range(2):
        counted.poison()
        fill(counted)
        counted.check(round_index, 0)
