"""Links over TCP that nobody closes and nobody answers on: they end, and those of a peer that stands still do not."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import CUT, Way, host_address, hosts, why_not
from elaswave_spmd.runtime.transport.credentials import RunToken, credentials_from_dict
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.tcp_silence import Silence
from tests.waiting import PATIENCE_S, eventually

SILENCE_S = 0.5
"""After which a link ends that cannot be connected."""
STALL_S = 6.0
"""After which a link ends that was up. Frames are carried by a process, which stands still for some seconds on a busy
machine: a link that was not cut off must not end by that."""
SILENT_S = 2.0
"""No connection is silent for so long that is answered within the time of a packet."""
LISTENS = "listens at "


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends; the second one is never read from unless a test does."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            yield ours, theirs


def test_a_peer_that_stands_still_is_not_silent(connection: tuple[socket.socket, socket.socket]) -> None:
    """Its kernel answers for it, with as much unread as there is room for, and each probe that asks for room."""
    ours, _ = connection
    silence = Silence()
    ours.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    found: list[float] = []
    began = now = time.monotonic()
    while now - began < 2 * SILENT_S:  # a look that found nothing but silence would have seen this much of it
        found.append(silence.seconds(ours.fileno(), now))
        time.sleep(0.1)
        now = time.monotonic()
    assert max(found) < SILENT_S


def test_a_descriptor_of_something_else_is_not_silent(tmp_path: Path) -> None:
    """The owner of a connection may just have closed it."""
    one, other = socket.socketpair()
    with open(tmp_path / "file", "w") as file, one as unix, other:
        assert [Silence().seconds(fd, 1.0) for fd in (file.fileno(), unix.fileno(), 9999)] == [0.0] * 3


def test_a_link_that_is_not_connected_in_time_ends() -> None:
    """A listener whose queue is full answers no connection, as nobody does behind a firewall that drops packets."""
    mailbox = Mailbox()
    links = Links(0, mailbox, transport="tcp", credentials=RunToken.make(), silence_s=SILENCE_S)
    with socket.socket() as full, contextlib.ExitStack() as stack:
        stack.callback(links.close)
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than its queue holds
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = "tcp://{}:{}".format(*full.getsockname())
        links.connect(CONTROLLER, address)  # who is cut off from the controller is given up there
        links.connect(1, address)
        assert mailbox.get(PATIENCE_S) == PeerClosed(1)
        assert links.peers == (CONTROLLER,)


@pytest.mark.parametrize("cut_off", [(0, 1), (1, 0)], ids=["what is sent is lost", "what is acknowledged is lost"])
def test_a_link_on_which_nothing_is_acknowledged_ends(cut_off: tuple[int, int]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    if not hasattr(socket, "TCP_INFO"):
        pytest.skip("this system does not tell what is acknowledged")
    credentials = json.dumps(RunToken.make().to_dict())
    with hosts(2) as network, contextlib.ExitStack() as stack:

        def start(number: int, *words: str) -> subprocess.Popen[str]:
            command = network.command(number, sys.executable, "-m", "tests.multiprocess.test_silent_links", *words)
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            stack.callback(process.kill)
            return process

        receiver = start(1, "receive", credentials, host_address(1))
        assert receiver.stdout is not None
        address = receiver.stdout.readline().removeprefix(LISTENS).strip()
        sender = start(0, "send", credentials, host_address(0), address)
        assert sender.stdout is not None and sender.stdin is not None
        assert sender.stdout.readline() == "up\n"
        network.set_way(*cut_off, CUT)
        sender.stdin.write("\n")
        sender.stdin.flush()
        assert sender.stdout.readline() == f"{PeerClosed(1)}\n"
        assert sender.stdout.readline() == "silent\n", "the controller's, which stays"
        network.set_way(*cut_off, Way())


def _end_of_a_link(role: str, credentials: str, host: str, address: str = "") -> None:
    """A program on a host: one end of a link."""
    mailbox = Mailbox()
    own = credentials_from_dict(json.loads(credentials))
    links = Links(int(role == "receive"), mailbox, transport="tcp", credentials=own, host=host, silence_s=STALL_S)
    if role == "receive":
        print(f"{LISTENS}{links.address}", flush=True)
        sys.stdin.read()
    else:
        for peer in (1, CONTROLLER):
            links.connect(peer, address)
        assert not links.wait_connected([1, CONTROLLER], PATIENCE_S)
        eventually(lambda: links.unacknowledged_s(CONTROLLER) == 0.0)
        print("up", flush=True)
        sys.stdin.readline()
        for peer in (1, CONTROLLER):
            links.send(peer, b"is lost")
        print(mailbox.get(PATIENCE_S), flush=True)
        eventually(lambda: links.unacknowledged_s(CONTROLLER) >= SILENT_S)
        print("silent", flush=True)
    links.close()


if __name__ == "__main__":
    _end_of_a_link(*sys.argv[1:])
