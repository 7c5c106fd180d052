"""The wait for file descriptors, of any number."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from elaswave_spmd.runtime.processes.ready import is_any_ready

HIGH = 1500  # select.select takes descriptors below 1,024


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """The limit of this process allows descriptors above HIGH."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft <= HIGH:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HIGH + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_descriptors_of_any_number_are_waited_for() -> None:
    here, there = socket.socketpair()
    with here, there:
        descriptor = fcntl.fcntl(here, fcntl.F_DUPFD, HIGH)
        try:
            assert descriptor >= HIGH and not is_any_ready([descriptor], timeout_s=0.0)
            assert is_any_ready([descriptor], [descriptor], 0.0), "it can be written"
            there.send(b"x")
            assert is_any_ready([here, descriptor])
        finally:
            os.close(descriptor)


def test_an_end_counts_as_ready() -> None:
    here, there = socket.socketpair()
    with here:
        there.close()
        assert is_any_ready([here])
