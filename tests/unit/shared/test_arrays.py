"""Arrays in shared memory: shapes, names, and who closes them."""

import os
import resource

import numpy as np
import pytest

from hts_torchrl.errors import ConfigurationError
from hts_torchrl.shared.arrays import SharedArrays
from hts_torchrl.specs import array_name
from tests.conftest import shared_memories

LAYOUT = {"flags": ((3,), "bool"), "pixels": ((2, 5), "uint8"), "numbers": ((4,), "float64")}


class _Descriptor:
    """Stands for what a starting process is handed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return os.dup(self._fd)


def attached_to(arrays: SharedArrays) -> SharedArrays:
    """The same memory, mapped as another process maps it."""
    other = SharedArrays.__new__(SharedArrays)
    other.__setstate__({"layout": arrays.layout, "fd": _Descriptor(arrays._fd)})
    return other


@pytest.fixture
def arrays():
    arrays = SharedArrays(LAYOUT)
    yield arrays
    arrays.close()


def test_arrays_have_the_shapes_and_types_of_the_layout(arrays):
    found = {name: (arrays[name].shape, arrays[name].dtype.name) for name in LAYOUT}
    assert found == LAYOUT


def test_fresh_memory_is_zero(arrays):
    assert not any(arrays[name].any() for name in LAYOUT)


def test_every_array_starts_at_a_cache_line(arrays):
    assert all(arrays[name].ctypes.data % 64 == 0 for name in LAYOUT)


def test_arrays_do_not_overlap(arrays):
    arrays["flags"][:] = True
    arrays["numbers"][:] = -1.0
    arrays["pixels"][:] = 255
    assert arrays["flags"].all()
    assert (arrays["numbers"] == -1.0).all()


def test_what_one_mapping_writes_the_other_reads(arrays):
    other = attached_to(arrays)
    arrays["numbers"][2] = 7.5
    assert other["numbers"][2] == 7.5
    other.close()


def test_arrays_outlive_the_descriptor(arrays):
    numbers = arrays["numbers"]
    arrays.close()
    numbers[0] = 1.0
    assert numbers[0] == 1.0


def test_nothing_stays_open_when_the_last_array_is_dropped():
    before = shared_memories()
    arrays = SharedArrays(LAYOUT)
    numbers = arrays["numbers"]
    arrays.close()
    del arrays, numbers
    assert shared_memories() == before


def test_the_memory_has_no_name_in_the_file_system(arrays):
    link = os.readlink(f"/proc/self/fd/{arrays._fd}")  # noqa: PTH115
    assert link.startswith("/memfd:")


def test_a_python_without_memfd_create_shares_memory_that_has_no_name_either(monkeypatch):
    """One that was built for an older C library lacks it."""
    monkeypatch.delattr(os, "memfd_create")
    arrays = SharedArrays(LAYOUT)
    other = attached_to(arrays)
    arrays["numbers"][2] = 7.0
    assert other["numbers"][2] == 7.0
    assert os.readlink(f"/proc/self/fd/{arrays._fd}").endswith(" (deleted)")  # noqa: PTH115
    arrays.close()
    other.close()


def test_an_empty_layout_is_allowed():
    SharedArrays({}).close()


def test_an_array_without_elements_is_allowed():
    arrays = SharedArrays({"none": ((0, 3), "int64"), "one": ((1,), "int64")})
    assert arrays["none"].shape == (0, 3)
    arrays.close()


def test_arrays_can_be_larger_than_the_small_dev_shm_of_a_container():
    arrays = SharedArrays({"large": ((512 * 2**20,), "uint8")})
    arrays["large"][-1] = 1
    assert np.count_nonzero(arrays["large"][-10:]) == 1
    arrays.close()


def test_more_than_the_machine_can_hold_is_refused():
    with pytest.raises(ConfigurationError, match=r"take 100000\.0 GB, and the machine has"):
        SharedArrays({"much": ((10**14,), "uint8")})


def test_an_shared_array_that_is_dropped_leaves_no_descriptor():
    before = shared_memories()
    SharedArrays(LAYOUT)
    assert shared_memories() == before


def test_a_name_is_its_own_array_name():
    assert array_name("observation") == "observation"


def test_a_path_is_joined_by_dots():
    assert array_name(("next", "agent", "vector")) == "next.agent.vector"


def test_a_limit_on_the_size_of_files_is_told_as_one():
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), shared_memories()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match=r"take 8\.0 MB, .* limit \(ulimit -f\)$"):
            SharedArrays({"numbers": ((1_000_000,), "float64")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shared_memories() == before
