"""Links over TCP that nobody closes and nobody answers on: they end, and those of a peer that stands still do not."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.namespaces import CUT, Way, host_address, hosts, why_not
from elaswave_spmd.errors import RunError
from elaswave_spmd.runtime.transport.agent_links import AgentLinks
from elaswave_spmd.runtime.transport.credentials import RunToken, credentials_from_dict
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.tcp_silence import Silence, has_unsent
from tests.descriptors import keepalive_of_accepted, none_left, open_descriptors
from tests.waiting import PATIENCE_S, eventually

SILENCE_S = 0.5
"""After which a link ends that cannot be connected."""
STALL_S = 6.0
"""After which a link ends that was up. Frames are carried by a process, which stands still for some seconds on a busy
machine: a link that was not cut off must not end by that."""
SILENT_S = 2.0
"""No connection is silent for so long that is answered within the time of a packet."""
LISTENS = "listens at "
WITHOUT_DESCRIPTORS = "without descriptors"


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
        for fd in (file.fileno(), unix.fileno(), 9999):
            assert Silence().seconds(fd, 1.0) == 0.0 and not has_unsent(fd)


def test_what_there_is_no_room_for_is_unsent_until_there_is(connection: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connection
    assert not has_unsent(ours.fileno())
    ours.setblocking(False)
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += ours.send(bytes(1 << 16))
    assert has_unsent(ours.fileno())
    while num_bytes:
        num_bytes -= len(theirs.recv(1 << 20))
    eventually(lambda: not has_unsent(ours.fileno()))


def test_links_are_sending_while_a_large_payload_is_under_way() -> None:
    """To a peer that stands still, and so takes nothing out of its machine's buffers."""
    credentials, mailbox = RunToken.make(), Mailbox()
    command = [sys.executable, "-m", "tests.multiprocess.test_silent_links", "receive"]
    words = [json.dumps(credentials.to_dict()), "127.0.0.1"]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(subprocess.Popen([*command, *words], stdin=pipe, stdout=pipe, text=True))
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        address = receiver.stdout.readline().removeprefix(LISTENS).strip()
        links = Links(0, mailbox, transport="tcp", credentials=credentials)
        stack.callback(links.close)
        links.connect(1, address)
        assert not links.wait_connected([1], PATIENCE_S)
        links.send(1, b"a heartbeat")
        assert not links.is_sending()
        receiver.send_signal(signal.SIGSTOP)
        links.send(1, b"state", [bytes(64 << 20)])
        eventually(links.is_sending)
        receiver.send_signal(signal.SIGCONT)
        eventually(lambda: not links.is_sending())
        assert links.reaches(1)


@pytest.mark.parametrize(("kind", "periods"), [(Links, (300, 60, 5)), (AgentLinks, (10, 5, 4))])
def test_a_machine_that_has_vanished_is_asked_for_on_its_own_connections(
    kind: type[Links], periods: tuple[int, int, int]
) -> None:
    """Nothing is sent on them, so nothing else ends one that nobody closes, with what was received of a message."""
    credentials = RunToken.make()
    with contextlib.ExitStack() as stack:

        def opened(me: int) -> Links:
            way = {"transport": "tcp"} if kind is Links else {"host": "127.0.0.1"}
            links = kind(me, Mailbox(), credentials=credentials, **way)  # type: ignore[arg-type]
            stack.callback(links.close)
            return links

        receiver, sender = opened(CONTROLLER), opened(-2)
        sender.connect(CONTROLLER, receiver.address)
        assert not sender.wait_connected([CONTROLLER], PATIENCE_S)
        assert keepalive_of_accepted(receiver.address) == [(True, *periods)]


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


@pytest.mark.parametrize("silence_s", [4e6, 1e9])
def test_a_patience_of_months_is_longer_than_the_system_can_count_and_serves(silence_s: float) -> None:
    credentials = RunToken.make()
    receiver = Links(1, Mailbox(), transport="tcp", credentials=credentials)
    sender = Links(0, Mailbox(), transport="tcp", credentials=credentials, silence_s=silence_s)
    with contextlib.closing(receiver), contextlib.closing(sender):
        sender.connect(1, receiver.address)
        assert not sender.wait_connected([1], PATIENCE_S)


def test_a_link_for_which_no_descriptor_was_left_ends() -> None:
    """libzmq tells nothing of a try to connect that it could not begin, and it begins no other.

    In a process of its own: other threads of this one open files, too.
    """
    command = [sys.executable, "-m", "tests.multiprocess.test_silent_links", WITHOUT_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout == "has ended, and was made again\n", done


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


def _link_without_descriptors() -> None:
    """A program that makes a link when there are descriptors for its sockets, and none for its connection."""
    room = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # the numbers that are taken, and given back
    mailbox = Mailbox()
    links = Links(0, mailbox, transport="tcp", credentials=RunToken.make(), silence_s=SILENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for descriptor in room:
            os.close(descriptor)
        address = "tcp://{}:{}".format(*server.getsockname())
        with none_left() as taken:
            (limit, _), num_free = resource.getrlimit(resource.RLIMIT_NOFILE), 0
            while not links.peers:
                try:
                    links.connect(1, address)
                except RunError as error:
                    assert "there can be no link to 1" in str(error)
                    eventually(lambda free=num_free: len(open_descriptors(limit)) == limit - free)
                    os.close(taken.pop())
                    num_free += 1
            assert num_free and len(open_descriptors(limit)) == limit, "its sockets have the last ones"
            assert mailbox.get(PATIENCE_S) == PeerClosed(1) and not links.peers
        links.connect(1, address)
        assert links.peers == (1,)
        links.close()
    print("has ended, and was made again")


if __name__ == "__main__":
    if sys.argv[1:] == [WITHOUT_DESCRIPTORS]:
        _link_without_descriptors()
    else:
        _end_of_a_link(*sys.argv[1:])
