"""Numbers of open files that are rare in tests: none is left, or the next one is larger than `select` takes."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

OF_SELECT = 1024
"""`select.select` takes descriptors below it."""


@contextlib.contextmanager
def none_left() -> Iterator[list[int]]:
    """This process can open no file more, as if strangers had taken all of its descriptors.

    Yields:
        The descriptors that were taken; to close one (and remove it) leaves room for one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(open_descriptors(soft)), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@contextlib.contextmanager
def beyond_select() -> Iterator[None]:
    """What this process opens next has a number that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 2 * OF_SELECT:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * OF_SELECT, hard))
    taken: list[int] = []
    try:
        while not taken or taken[-1] < OF_SELECT:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_descriptors(below: int) -> list[int]:
    """The descriptors that are open, below a number. Opens none itself."""
    found = []
    for descriptor in range(min(below, 1 << 16) if below > 0 else 1 << 16):
        with contextlib.suppress(OSError):
            os.fstat(descriptor)
            found.append(descriptor)
    return found
