"""One block of anonymous shared memory that holds every shared array.

Nothing names it, so a killed process leaks nothing and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from hts_torchrl.compat.processes import DupFd
from hts_torchrl.errors import ConfigurationError
from hts_torchrl.machine import require_memory
from hts_torchrl.specs import Array, ArraySpec, Key, array_name

Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array, by name."""

_ALIGNMENT = 64


class SharedArrays:
    """Named numpy arrays in one anonymous mapping, the same in every process that is given it.

    Pages are committed when they are first written. They are allocated before the workers start
    and travels to them as a process argument; unpickled anywhere else they cannot be.

    Example:
        >>> arrays = SharedArrays({"step": ((4,), "int64")})
        >>> arrays["step"][2] = 7
    """

    _close = staticmethod(os.close)  # the module may be gone when the interpreter ends

    def __init__(self, layout: Layout) -> None:
        self.layout = dict(layout)
        _, size = _place(self.layout)
        require_memory(
            size,
            "the shared arrays of a round take",
            "a lower frames_per_batch or num_envs is needed",
        )
        self._fd = _anonymous_file(size)
        self._map()

    def _map(self) -> None:
        offsets, size = _place(self.layout)
        memory = mmap.mmap(self._fd, size)
        self._arrays = {
            name: np.frombuffer(
                memory, dtype, count=math.prod(shape), offset=offsets[name]
            ).reshape(shape)
            for name, (shape, dtype) in self.layout.items()
        }

    def __getitem__(self, name: str) -> Array:
        """Return one array; it keeps the mapping alive."""
        return self._arrays[name]

    def by_key(self, kind: str, keys: Iterable[Key]) -> dict[Key, Array]:
        """Return the arrays that :func:`layout_of` has named by their kind and keys."""
        return {key: self[f"{kind}/{array_name(key)}"] for key in keys}

    def close(self) -> None:
        """Close the descriptor; arrays stay valid until the last of them is dropped."""
        if self._fd >= 0:
            self._close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Close the descriptor of arrays that were dropped without being closed."""
        if hasattr(self, "_fd"):
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pass the descriptor on to a process that is being started."""
        return {"layout": self.layout, "fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the same memory in the new process."""
        self.layout = state["layout"]
        self._fd = state["fd"].detach()
        self._map()


def _place(layout: Layout) -> tuple[dict[str, int], int]:
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(size, _ALIGNMENT)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hts_torchrl")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.truncate(fd, size)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EFBIG:
            raise
        raise ConfigurationError(
            f"the shared arrays of a round take {size / 1e6:.1f} MB, and no file may be so large "
            "here: raise the limit (ulimit -f)"
        ) from error
    return fd


def layout_of(kind: str, specs: Mapping[Key, ArraySpec], *lead: int) -> Layout:
    """Return the layout of one kind of arrays, ``[*lead, *shape]`` each."""
    return {
        f"{kind}/{array_name(key)}": ((*lead, *array.shape), array.dtype.str)
        for key, array in specs.items()
    }
