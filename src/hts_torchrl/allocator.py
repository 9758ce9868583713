"""The C library's allocator, told to keep what a process frees."""

from __future__ import annotations

import ctypes
import functools

# Names and meaning: mallopt(3) of the Linux manual pages.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@functools.cache
def keep_freed_memory() -> bool:
    """Keep freed memory in this process instead of returning it to the system.

    Call it once. A network's activations are tens of megabytes, allocated and freed in every pass.
    glibc returns such blocks at once, and the system clears every page again for the next pass.
    ``python benchmarks/overhead.py --only parts`` measures the gain. The process keeps its
    largest size.

    Returns:
        Whether the C library has such a setting, as glibc does.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
