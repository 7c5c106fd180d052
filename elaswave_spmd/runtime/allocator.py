"""The C library's allocator, set for a worker: the same large blocks come and go at every step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
_KEEP_BYTES = 1 << 30
_HEAP_BYTES = 4 << 20


def keep_freed_memory() -> bool:
    """Has glibc keep what is freed for the next allocation. To be called before a worker's first large tensor.

    By default blocks from 128 KiB on are mapped one by one and the top of the heap goes back to the system: a training
    step then takes thousands of page faults for memory that it had a step before (docs/design.md has the measurement).
    The peak is not changed, only how soon memory goes back.

    Returns: whether it could be set: false with other C libraries, where nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES))
