"""The wait for file descriptors, of any number."""

from __future__ import annotations

import fcntl
import os
import queue
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.run_dir import patient_stream
from elaswave_spmd.run_dir.patient_stream import PatientStream
from elaswave_spmd.runtime.processes.beat_relay import BeatRelay, RelayClient
from elaswave_spmd.runtime.processes.fork_server import ForkServer
from elaswave_spmd.runtime.processes.ready import is_any_ready
from tests.waiting import PATIENCE_S

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


@pytest.fixture
def crowded(many_descriptors: None) -> Iterator[None]:
    """All descriptors below HIGH are taken, as by connections of strangers."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < HIGH:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for descriptor in taken:
        os.close(descriptor)


@pytest.mark.usefixtures("crowded")
def test_an_output_is_drained_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w") as writer, PatientStream(writer) as stream:
        assert stream.fileno() > HIGH
        while stream.send():  # until the pipe is full
            stream.write("x" * 65536)
        monkeypatch.setattr(patient_stream, "_PATIENCE_S", 0.0)
        stream.drain()
        waiting = len(stream._waiting)
        assert len(reader.read(waiting)) == waiting
        stream.drain()
        assert stream.send()


@pytest.mark.usefixtures("crowded")
def test_heartbeats_are_relayed_whatever_the_number_of_the_socket(tmp_path: Path) -> None:
    sent: queue.SimpleQueue[list[tuple[int, bytes]]] = queue.SimpleQueue()
    relay = BeatRelay(str(tmp_path / "beats"), {0}, lambda beats: sent.put([*beats]))
    client = RelayClient(0, str(tmp_path / "beats"))
    try:
        client.send(b"alive", 1.0)
        assert sent.get(timeout=PATIENCE_S) == [(0, b"alive")]
    finally:
        client.close()
        relay.close()


@pytest.mark.usefixtures("crowded")
def test_a_fork_server_takes_orders_whatever_the_number_of_their_socket() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    server = ForkServer(theirs, write)
    try:
        assert theirs.fileno() > HIGH
        ours.sendall(b'{"signal": 0, "rank": 3, "order": 1}\n{"stop": 0.0, "order": 2}\n')
        server._loop()
        assert ours.recv(4096).splitlines() == [b'{"sent": false, "to": 1}', b'{"stopped": true, "to": 2}']
    finally:
        for end in (ours, theirs):
            end.close()
        for descriptor in (read, write, server._wake_read, server._wake_write):
            os.close(descriptor)
