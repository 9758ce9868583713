import numpy as np
import pytest

from hts_torchrl.buffers.counted_storage import CountedStorage
from hts_torchrl.buffers.rollout_storage import storage_specs
from hts_torchrl.errors import ProtocolError
from tests.unit.buffers.test_rollout_storage import OUTPUTS, SPEC

ENVS, STEPS = 3, 4


@pytest.fixture
def storage():
    specs = storage_specs(SPEC, OUTPUTS)
    return CountedStorage(
        {key: np.zeros((ENVS, STEPS, *spec.shape), spec.dtype) for key, spec in specs.items()},
        {key: np.zeros((ENVS, STEPS), np.uint8) for key in specs},
    )


def fill(storage, but=None):
    """Record every cell once, or all but one."""
    for env in range(ENVS):
        for step in range(STEPS):
            for key, cells in storage.cells(slice(env, env + 1)).items():
                if (key, env, step) != but:
                    cells[step] = 0


def test_poison_fills_every_byte(storage):
    storage.poison()
    assert all((array.view(np.uint8) == 255).all() for array in storage.arrays.values())
    assert np.isnan(storage.arrays["next", "reward"]).all()


def test_a_round_that_writes_every_cell_once_passes(storage):
    storage.poison()
    fill(storage)
    storage.check(0, 0)
    assert not any(array.any() for array in storage.arrays.values())


def test_a_cell_that_was_never_written_is_named(storage):
    storage.poison()
    fill(storage, but=(("next", "reward"), 1, 2))
    with pytest.raises(ProtocolError) as raised:
        storage.check(7, 10)
    message = "next.reward of environment 11, round 7, step 2, was written never, not once"
    assert str(raised.value) == message


@pytest.mark.parametrize(("more", "times"), [(1, "twice"), (2, "many times")])
def test_a_cell_that_was_written_again_is_named(storage, more, times):
    storage.poison()
    fill(storage)
    for _ in range(more):
        storage.cells(slice(2, 3))["action"][1] = 0
    with pytest.raises(ProtocolError) as raised:
        storage.check(7, 10)
    assert str(raised.value) == (
        f"action of environment 12, round 7, step 1, was written {times}, not once"
    )


def test_a_storage_that_is_poisoned_again_counts_anew(storage):
    for round_index in range(2):
        storage.poison()
        fill(storage)
        storage.check(round_index, 0)
