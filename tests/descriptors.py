"""Open files: numbers of them that are rare in tests (none is left, or the next one is larger than `select` takes), and
what is set on connections."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterator

OF_SELECT = 1024
"""`select.select` takes descriptors below it."""


@contextlib.contextmanager
def unread() -> Iterator[int]:
    """A descriptor of a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


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


def keepalive_of_accepted(address: str) -> list[tuple[bool, int, int, int]]:
    """What the kernel does on the silent connections that this process has accepted at `tcp://HOST:PORT`.

    Returns:
        For each: whether it asks, after how many seconds, how many seconds later again, and how many times.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    found = []
    for descriptor in open_descriptors(-1):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            connection = stack.enter_context(socket.socket(fileno=os.dup(descriptor)))
            connection.getpeername()
            if connection.family == socket.AF_INET and connection.getsockname() == (host, int(port)):
                asks = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
                after, again, times = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                found.append((asks, after, again, times))
    return found
