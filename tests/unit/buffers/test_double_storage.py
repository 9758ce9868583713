import numpy as np
import pytest

from hts_torchrl.buffers.arena import SharedArena
from hts_torchrl.buffers.double_storage import DoubleStorage
from hts_torchrl.errors import ProtocolError
from tests.unit.buffers.test_rollout_storage import OUTPUTS, SPEC


@pytest.fixture
def storages():
    arena = SharedArena(DoubleStorage.layout(SPEC, OUTPUTS, num_envs=3, steps=5))
    yield DoubleStorage(arena, SPEC, OUTPUTS)
    arena.close()


def test_each_storage_has_a_row_for_each_environment_and_a_column_for_each_step(storages):
    assert storages[0].arrays["observation"].shape == (3, 5, 1, 2, 2)


def test_both_storages_have_every_entry(storages):
    assert storages[0].arrays.keys() == storages[1].arrays.keys()


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
    settings = {"num_envs": 3, "steps": 5}
    arena = SharedArena(DoubleStorage.layout(SPEC, OUTPUTS, **settings, debug=True))
    storages = DoubleStorage(arena, SPEC, OUTPUTS, debug=True)
    for storage in (storages[0], storages[1]):
        storage.poison()
    for cells in storages[0].cells(slice(None)).values():
        for step in range(5):
            cells[step] = 0
    storages[0].check(0, 0)
    with pytest.raises(ProtocolError, match="never"):
        storages[1].check(1, 0)
    arena.close()
