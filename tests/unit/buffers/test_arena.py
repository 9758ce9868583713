import os

import numpy as np
import pytest

from hts_torchrl.buffers.arena import SharedArena
from hts_torchrl.errors import ConfigurationError
from tests.conftest import shared_memories

LAYOUT = {"flags": ((3,), "bool"), "pixels": ((2, 5), "uint8"), "numbers": ((4,), "float64")}


class _Descriptor:
    """Stands for what a starting process is handed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return os.dup(self._fd)


def attached_to(arena: SharedArena) -> SharedArena:
    """The same memory, mapped as another process maps it."""
    other = SharedArena.__new__(SharedArena)
    other.__setstate__({"layout": arena.layout, "fd": _Descriptor(arena._fd)})
    return other


@pytest.fixture
def arena():
    arena = SharedArena(LAYOUT)
    yield arena
    arena.close()


def test_arrays_have_the_shapes_and_types_of_the_layout(arena):
    found = {name: (arena[name].shape, arena[name].dtype.name) for name in LAYOUT}
    assert found == LAYOUT


def test_fresh_memory_is_zero(arena):
    assert not any(arena[name].any() for name in LAYOUT)


def test_every_array_starts_at_a_cache_line(arena):
    assert all(arena[name].ctypes.data % 64 == 0 for name in LAYOUT)


def test_arrays_do_not_overlap(arena):
    arena["flags"][:] = True
    arena["numbers"][:] = -1.0
    arena["pixels"][:] = 255
    assert arena["flags"].all()
    assert (arena["numbers"] == -1.0).all()


def test_what_one_mapping_writes_the_other_reads(arena):
    other = attached_to(arena)
    arena["numbers"][2] = 7.5
    assert other["numbers"][2] == 7.5
    other.close()


def test_arrays_outlive_the_descriptor(arena):
    numbers = arena["numbers"]
    arena.close()
    numbers[0] = 1.0
    assert numbers[0] == 1.0


def test_closing_twice_is_allowed(arena):
    arena.close()
    arena.close()


def test_nothing_stays_open_when_the_last_array_is_dropped():
    before = shared_memories()
    arena = SharedArena(LAYOUT)
    numbers = arena["numbers"]
    arena.close()
    del arena, numbers
    assert shared_memories() == before


def test_the_memory_has_no_name_in_the_file_system(arena):
    link = os.readlink(f"/proc/self/fd/{arena._fd}")  # noqa: PTH115
    assert link.startswith("/memfd:")


def test_an_empty_layout_is_allowed():
    SharedArena({}).close()


def test_an_array_without_elements_is_allowed():
    arena = SharedArena({"none": ((0, 3), "int64"), "one": ((1,), "int64")})
    assert arena["none"].shape == (0, 3)
    arena.close()


def test_arrays_can_be_larger_than_the_small_dev_shm_of_a_container():
    arena = SharedArena({"large": ((512 * 2**20,), "uint8")})
    arena["large"][-1] = 1
    assert np.count_nonzero(arena["large"][-10:]) == 1
    arena.close()


def test_more_than_the_machine_can_hold_is_refused():
    with pytest.raises(ConfigurationError, match=r"take 100000\.0 GB, and the machine has"):
        SharedArena({"much": ((10**14,), "uint8")})


def test_an_arena_that_is_dropped_leaves_no_descriptor():
    before = shared_memories()
    SharedArena(LAYOUT)
    assert shared_memories() == before
