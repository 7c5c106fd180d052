"""How soon TCP tries again, and when it ends: both are set on a connection, and nothing is done to what is none."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from elaswave_spmd.runtime.transport.tcp_retries import _TCP_RTO_MAX_MS, bound_retries


@pytest.fixture
def pipe() -> Iterator[int]:
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


def test_a_number_that_is_another_files_by_now_stays_as_it_is(pipe: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert not bound_retries(pipe, 1.0)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1, "that of the look itself"
    os.fstat(pipe)


def test_the_connection_stays_its_owners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        bound_retries(client.fileno(), 1.5)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
        other, _ = server.accept()
        with other:
            client.sendall(b"a")
            assert other.recv(1) == b"a"


class SocketBeforeLinux615(socket.socket):
    """A socket whose kernel does not know the first of the two options."""

    def setsockopt(self, *arguments: Any) -> None:
        if arguments[1] == _TCP_RTO_MAX_MS:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        super().setsockopt(*arguments)


def test_a_kernel_that_cannot_bound_the_pauses_ends_the_connection_in_time_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", SocketBeforeLinux615)
            assert not bound_retries(client.fileno(), 1.5)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
