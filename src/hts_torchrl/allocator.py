"""The C library's allocator, told to keep what a process frees."""

from __future__ import annotations

import ctypes
import functools

# Names and meaning: mallopt(3) of the Linux manual pages.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


@functools.cache
def keep_freed_memory() -> bool:
    """Keep freed memory in this process instead of returning it to the system; once is enough.

    A network's activations are tens of megabytes, allocated and freed in every pass. glibc gives
    such blocks back at once, and the system clears every page again when the next pass asks for
    it. ``python benchmarks/overhead.py --only parts`` measures it. The process stays as
    large as it was at its largest.

    Returns:
        Whether the C library has such a setting; glibc has.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))
