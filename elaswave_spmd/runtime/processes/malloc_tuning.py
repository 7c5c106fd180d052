"""Settings of the C library's allocator for a worker, in which the same large blocks come and go at every step."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
_KEEP_BYTES = 1 << 30
_HEAP_BYTES = 4 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next allocation. Called before a worker's first large tensor.

    By default glibc maps blocks from 128 KiB on one by one and returns the top of the heap to the system: a training
    step then takes thousands of page faults for memory that it had a step before (docs/design/cost_of_a_step.md).
    The peak does not change, only how soon memory goes back.

    Returns:
        False with other C libraries, where nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES))
