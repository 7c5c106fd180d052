"""Links: what arrives, in which order, and what is heard of the dead, the stopped and the strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.recovery.messages import Reconfigure
from elaswave_spmd.recovery.peers import Reached
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, ForkServerSpec
from elaswave_spmd.runtime.transport.credentials import Credentials, RunKeys, RunToken
from elaswave_spmd.runtime.transport.frames import FRAME_BYTES
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, Transport, socket_directory
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Mailbox, PeerClosed
from elaswave_spmd.worker.heartbeat import Progress
from elaswave_spmd.worker.process import WorkerProcess
from tests import waiting
from tests.waiting import PATIENCE_S

# Encrypted and not; over Unix sockets there are no credentials.
WAYS: dict[str, Credentials | None] = {"shm": None, "ipc": None, "tcp": RunKeys.make(), "tcp-plain": RunToken.make()}


class Ends:
    """Opens link ends of one test in this process and closes them all."""

    def __init__(self, way: str, stack: ExitStack) -> None:
        self.way = way
        self.transport: Transport = "tcp" if way.startswith("tcp") else cast(Transport, way)
        self.credentials = WAYS[way]
        self.directory = socket_directory()
        self._stack = stack
        stack.callback(os.rmdir, self.directory)  # runs last, and fails when a socket file is left behind

    def open(self, me: int, life_fd: int | None = None) -> tuple[Links, Mailbox]:
        mailbox = Mailbox()
        links = Links(
            me,
            mailbox,
            transport=self.transport,
            directory=self.directory,
            credentials=self.credentials,
            life_fd=life_fd,
        )
        self._stack.callback(links.close)
        return links, mailbox


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, stack)


def envelope(mailbox: Mailbox) -> Envelope:
    item = mailbox.get(PATIENCE_S)
    assert isinstance(item, Envelope), item
    return item


def joined(ends: Ends) -> tuple[Links, Links, Mailbox]:
    """Two ends, 0 -> 1 connected: the sender, the receiver, the receiver's mailbox."""
    one, _ = ends.open(0)
    other, mailbox = ends.open(1)
    one.connect(1, other.address)
    assert one.wait_connected([1], PATIENCE_S) == []
    return one, other, mailbox


def broken(links: Links) -> None:
    """An exception in the thread of the links."""

    def divide() -> None:
        raise ZeroDivisionError("in the thread of the links")

    links._loop._hand_over(divide)


def test_an_exception_in_the_thread_of_the_links_fails_whoever_waits(ends: Ends) -> None:
    sender, receiver, mailbox = joined(ends)
    receiver.connect(0, sender.address)
    broken(receiver)
    with pytest.raises(RunError, match="cannot receive messages any more: ZeroDivisionError: in the thread") as caught:
        mailbox.get(PATIENCE_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert mailbox.get(0) is None, "once: what is done at the end of the process may look again"


def test_who_cannot_receive_any_more_can_still_report_it(ends: Ends) -> None:
    receiver, _ = ends.open(1)
    sender, heard = ends.open(0)
    broken(receiver)
    waiting.eventually(lambda: len(receiver._mailbox) == 1)
    receiver.connect(0, sender.address)
    receiver.send(0, b"it failed")
    assert envelope(heard).header == b"it failed"
    receiver.close()  # and it can be closed


def test_links_can_be_closed_whose_thread_fails_as_it_is_told_to_stop(ends: Ends) -> None:
    """One wake-up told it of both: it must not wait for another one before it ends."""
    links, _ = ends.open(1)
    at_work, both_are_there = threading.Event(), threading.Event()

    def wait_and_divide() -> None:
        at_work.set()
        both_are_there.wait(PATIENCE_S)
        raise ZeroDivisionError("in the thread of the links")

    links._loop._hand_over(wait_and_divide)
    assert at_work.wait(PATIENCE_S)
    links._loop._pending_work.append(lambda: setattr(links._loop, "_stopping", True))  # `stop`, but for its byte
    both_are_there.set()
    links._thread.join(PATIENCE_S)
    assert not links._thread.is_alive()


def test_a_payload_for_which_there_is_no_memory_ends_its_receiver_and_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        sender, receiver, mailbox = joined(Ends("tcp-plain", stack))
        made = np.empty

        def without_memory(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name == "links-1":
                raise MemoryError("Unable to allocate 2.00 MiB")
            return made(*arguments, **named)

        monkeypatch.setattr(np, "empty", without_memory)
        sender.send(1, b"pages", [bytes(2 * FRAME_BYTES)])
        with pytest.raises(RunError, match="MemoryError: Unable to allocate"):
            mailbox.get(PATIENCE_S)
        assert receiver.rejected == {}


def test_payloads_arrive_whole_and_aligned_to_8_bytes(ends: Ends):
    one, _, mailbox = joined(ends)
    generator = np.random.default_rng(0)
    sizes = (0, 1, 7, 100, 5_000, 9_001, 20_000, 70_001, 1_000_003, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES)
    sent = [generator.integers(0, 255, size, np.uint8) for size in sizes]
    assert one.send(1, b"head", sent)
    got = envelope(mailbox)
    assert (got.sender, got.header, len(got.payloads)) == (0, b"head", len(sent))
    for expected, payload in zip(sent, got.payloads, strict=True):
        array = np.frombuffer(payload, np.uint8)
        assert np.array_equal(array, expected)
        assert array.size == 0 or array.ctypes.data % 8 == 0
    assert one.messages_sent(1) == 1
    number_and_places = 8 + 8 * len(sizes) if ends.way == "shm" else 0
    assert one.bytes_sent(1) == sum(sizes) + 14 + 8 * len(sizes) + number_and_places + len(b"head")


def test_messages_of_one_sender_keep_their_order_whatever_their_size(ends: Ends):
    one, _, mailbox = joined(ends)
    sizes = [0, 10, 200_000, 3_000_000, 70_000, 8_192, 1]
    for number in range(210):
        one.send(1, number.to_bytes(4, "big"), [bytes(sizes[number % len(sizes)])])
    for number in range(210):
        got = envelope(mailbox)
        assert got.header == number.to_bytes(4, "big")
        assert got.payloads[0].nbytes == sizes[number % len(sizes)]


def test_threads_that_share_a_link_do_not_mix_their_messages(ends: Ends):
    one, _, mailbox = joined(ends)

    def send(thread: int) -> None:
        for number in range(200):
            one.send(1, bytes([thread, number]), [bytes([thread]) * 10, bytes([number]) * 70_000])

    threads = [threading.Thread(target=send, args=[thread]) for thread in range(3)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(600):
        got = envelope(mailbox)
        thread, number = got.header
        assert bytes(got.payloads[0]) == bytes([thread]) * 10
        assert bytes(got.payloads[1]) == bytes([number]) * 70_000
        seen[thread].append(number)
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(200)) for numbers in seen.values())


def test_a_payload_with_gaps_is_refused_and_leaves_the_link_usable(ends: Ends):
    one, _, mailbox = joined(ends)
    with pytest.raises(ValueError, match="contiguous"):
        one.send(1, b"bad", [b"fine", np.zeros((4, 4))[:, 1]])
    one.send(1, b"good")
    assert envelope(mailbox) == Envelope(0, b"good", ())


def test_a_header_larger_than_a_frame_arrives_whole(ends: Ends):
    """The first Reconfigure of a very large mesh is a long header."""
    one, _, mailbox = joined(ends)
    header = np.random.default_rng(0).bytes(3 * FRAME_BYTES + 5)
    for payloads in ([], [b"behind it"], [bytes(2 * FRAME_BYTES)]):
        assert one.send(1, header, payloads)
        got = envelope(mailbox)
        assert got.header == header and [bytes(payload) for payload in got.payloads] == payloads


def test_connect_twice_is_one_link_and_unknown_peers_are_no_error(ends: Ends):
    one, other, mailbox = joined(ends)
    one.connect(1, other.address)
    assert one.peers == (1,)
    one.send(1, b"once")
    assert envelope(mailbox).header == b"once"
    assert one.send(7, b"nobody") is False
    assert one.wait_connected([7], 0) == [7]
    one.drop(7)


def test_drop_files_no_notice_and_the_peer_can_be_linked_again(ends: Ends):
    one, mailbox_one = ends.open(0)
    other, mailbox = ends.open(1)
    for header in (b"first", b"second"):
        one.connect(1, other.address)
        assert one.wait_connected([1], PATIENCE_S) == []
        one.send(1, header)
        assert envelope(mailbox).header == header
        one.drop(1)
        assert one.send(1, b"late") is False
    assert not mailbox_one.wait(0.1)
    assert not mailbox.wait(0)


def test_a_closed_peer_is_noticed_once(ends: Ends):
    one, mailbox_one = ends.open(0)
    other, _ = ends.open(1)
    one.connect(1, other.address)
    assert one.wait_connected([1], PATIENCE_S) == []
    other.close()
    assert mailbox_one.get(PATIENCE_S) == PeerClosed(1)
    assert one.send(1, b"to the dead") is False
    assert one.wait_connected([1], 0) == [1]
    assert not mailbox_one.wait(0.1)


def test_an_end_is_told_if_the_link_is_made_again_just_then(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    """A Reconfigure may come in the very moment. What was on the link is lost, and only the notice says so."""
    one, notices = ends.open(0)
    other, _ = ends.open(1)
    one.connect(1, other.address)
    assert one.wait_connected([1], PATIENCE_S) == []
    link = one._links[1]
    closes = link.close

    def close(linger_ms: int = 0) -> bool:
        was_open = closes(linger_ms)
        if not one._edit.locked():  # then another thread may come in between
            one.connect(1, other.address)
        return was_open

    monkeypatch.setattr(link, "close", close)
    one._end(link)  # as the event loop does
    assert notices.take_all() == [PeerClosed(1)]


def test_a_refused_connect_is_noticed(ends: Ends):
    one, mailbox_one = ends.open(0)
    one.connect(1, "tcp://127.0.0.1:1" if ends.transport == "tcp" else f"ipc://{ends.directory}/nobody")
    assert mailbox_one.get(PATIENCE_S) == PeerClosed(1)
    assert one.wait_connected([1], PATIENCE_S) == [1]
    others = {"tcp": "ipc:///tmp/x", "ipc": "tcp://127.0.0.1:1", "shm": "tcp://127.0.0.1:1"}
    # A name would be looked up in libzmq's one thread; the rest reaches sockets of this process.
    wrong = ("nonsense", "tcp://some.host:1", "inproc://zeromq.zap.01", "tcp://127.0.0.1:1\0", others[ends.transport])
    for number, address in enumerate(wrong, start=2):
        with pytest.raises(RunError, match="no address"):
            one.connect(number, address)


def worker_of(links: Links, mailbox: Mailbox) -> WorkerProcess:
    """Worker 0, as far as a Reconfigure changes its links."""
    worker = WorkerProcess.__new__(WorkerProcess)
    worker._rank, worker._links, worker._mailbox, worker._trace = 0, links, mailbox, None
    worker._executor, worker._reached, worker._progress = None, Reached(), Progress()
    return worker


def test_what_another_worker_reports_as_its_address_ends_no_worker(ends: Ends):
    """The link is a closed one, which the controller is told; all workers had ended by an exception."""
    links, mailbox = ends.open(0)
    addresses = {0: links.address, 1: "tcp://127.0.0.1:99999", 2: "nonsense"}
    worker = worker_of(links, mailbox)
    worker._members_changed(Reconfigure(0, ((0, 1, 2),), (0, 1), ((1, 1, 1),), addresses))
    assert worker._progress.num_workers == 3, "by which its heartbeats come"
    assert {mailbox.get(PATIENCE_S), mailbox.get(PATIENCE_S)} == {PeerClosed(1), PeerClosed(2)}


def test_a_message_to_a_member_without_a_link_is_noticed(ends: Ends):
    """Once: the controller makes the link with the next mesh epoch. A worker that is no member is nobody's loss."""
    links, mailbox = ends.open(0)
    worker = worker_of(links, mailbox)
    worker._members_changed(Reconfigure(0, ((0, 1), (2,)), (0, 1, 2), ((1, 1), (2,)), {0: links.address}))
    assert not links.send(3, b"x") and not worker._send_probe(2, b"a measurement", ())
    assert mailbox.take_all() == []
    assert not links.send(2, b"x") and not links.send(2, b"y")
    assert mailbox.get(PATIENCE_S) == PeerClosed(2, was_linked=False)
    other, received = ends.open(2)
    worker._members_changed(Reconfigure(1, ((0, 1), (2,)), (0, 1, 2), ((1, 1), (2,)), {0: "", 2: other.address}))
    assert links.wait_connected([2], PATIENCE_S) == [] and links.send(2, b"z")
    assert envelope(received).header == b"z"
    assert not links.send(1, b"x") and mailbox.get(PATIENCE_S) == PeerClosed(1, was_linked=False)


def test_links_to_peers_stay_until_another_mesh_epoch_is_entered(ends: Ends):
    """Epoch 1 was overtaken: in the middle of an action a worker still sends what epoch 0 wants when epoch 2 comes."""
    links, mailbox = ends.open(0)
    other, received = ends.open(1)
    worker = worker_of(links, mailbox)

    def comes(epoch: int, addresses: dict[int, str]) -> None:
        worker._members_changed(Reconfigure(epoch, ((0,), (1,)), (0, 1, 2), ((2,), (2,)), addresses))

    def has_entered(epoch: int) -> None:
        worker._executor = cast(Any, SimpleNamespace(configuration=SimpleNamespace(epoch=epoch)))

    comes(0, {0: links.address, 1: other.address})
    assert links.wait_connected([1], PATIENCE_S) == []
    has_entered(0)
    for epoch in (1, 2):
        comes(epoch, {0: links.address})
        assert links.send(1, bytes([epoch])) and envelope(received).header == bytes([epoch])
    has_entered(2)
    comes(3, {0: links.address})
    assert links.peers == () and not links.send(1, b"x")
    assert mailbox.get(PATIENCE_S) == PeerClosed(1, was_linked=False)


def test_the_end_of_the_life_pipe_is_noticed(ends: Ends):
    read, write = os.pipe()
    _, mailbox = ends.open(0, life_fd=read)
    assert not mailbox.wait(0.05)
    os.close(write)
    assert mailbox.get(PATIENCE_S) == ControllerLost()
    assert not mailbox.wait(0.05)
    os.close(read)


def test_open_and_close_leave_nothing(ends: Ends):
    """Closing meets every state of the event loop; a descriptor too many or too few shows after some rounds."""
    one, _, mailbox = joined(ends)
    one.send(1, b"x", [bytes(100_000)])  # libraries open theirs, pyzmq's with its first large payload
    envelope(mailbox)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(40):
        with ExitStack() as stack:
            inner = Ends(ends.way, stack)
            one, other, mailbox = joined(inner)
            one.send(1, b"x", [bytes(100_000)])
            envelope(mailbox)
            other.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2
    assert not [thread for thread in threading.enumerate() if thread.name == "links-5"]


class Peers:
    """Worker processes of one test that echo."""

    def __init__(self, ends: Ends, fork_server: ForkServerClient) -> None:
        self.links, self.mailbox = ends.open(CONTROLLER)
        self._ends, self._fork_server = ends, fork_server
        self.addresses: dict[int, str] = {}

    def add(self, rank: int) -> int:
        spec = {
            "transport": self._ends.transport,
            "directory": self._ends.directory,
            "credentials": self._ends.credentials and self._ends.credentials.to_dict(),
            "controller": self.links.address,
        }
        pid = self._fork_server.spawn(rank, spec)
        hello = envelope(self.mailbox)
        assert hello.sender == rank
        self.addresses[rank] = hello.header.removeprefix(b"address ").decode()
        self.links.connect(rank, self.addresses[rank])
        assert self.links.wait_connected([rank], PATIENCE_S) == []
        return pid


@pytest.fixture
def peers(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with ForkServerClient.start("runtime_targets:peer", ForkServerSpec(preload=("runtime_targets",))) as fork_server:
        yield Peers(ends, fork_server)
        fork_server.stop(0)
        for name in os.listdir(ends.directory):  # of the killed
            if not name.startswith("c-"):
                os.unlink(os.path.join(ends.directory, name))


def test_a_killed_process_is_noticed_and_the_others_go_on(peers: Peers):
    pids = [peers.add(rank) for rank in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    assert peers.mailbox.get(PATIENCE_S) == PeerClosed(1)
    for rank in (0, 2):
        assert peers.links.send(rank, b"still there", [bytes(200_000)])
        got = envelope(peers.mailbox)
        assert (got.sender, got.header, got.payloads[0].nbytes) == (rank, b"still there", 200_000)


def is_stopped(pid: int) -> bool:
    """True while SIGSTOP keeps all threads of a process from running."""
    return all(
        task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def stop(pid: int) -> None:
    """Stop a process, and wait until it stands still: what it receives from then on it does not take."""
    os.kill(pid, signal.SIGSTOP)
    waiting.eventually(lambda: is_stopped(pid))


def test_a_stopped_process_blocks_no_sender_and_gets_everything_when_it_wakes(peers: Peers):
    pid = peers.add(0)
    stop(pid)
    payload = np.arange(1 << 20, dtype=np.uint8)
    for number in range(32):
        assert peers.links.send(0, bytes([number]), [payload])
    assert is_stopped(pid), "every send has returned before it could take anything"
    assert not len(peers.mailbox), "it has answered"
    os.kill(pid, signal.SIGCONT)
    assert [envelope(peers.mailbox).header[0] for _ in range(32)] == list(range(32))


MANY = 150
"""More connections than libzmq lets wait for a process that does not accept them, unless it is told otherwise."""


@pytest.mark.parametrize("ends", ["ipc", "tcp"], indirect=True)
@pytest.mark.skipif(
    int(Path("/proc/sys/net/core/somaxconn").read_text()) < MANY, reason="net.core.somaxconn lets fewer wait"
)
def test_a_stopped_process_is_connected_to_by_all_others_once_it_wakes(peers: Peers, ends: Ends):
    """On a Unix socket a connection for which there is no room is refused at once, and so for good."""
    pid, address, others = peers.add(0), peers.addresses[0], range(1, MANY + 1)
    stop(pid)
    for other in others:  # one process in the place of many: it opens so many connections
        peers.links.connect(other, address)
    last, _ = ends.open(MANY + 1)
    peers.links.connect(MANY + 1, last.address)
    assert peers.links.wait_connected([MANY + 1], PATIENCE_S) == [], "they are opened one after the other"
    assert is_stopped(pid)
    os.kill(pid, signal.SIGCONT)
    assert peers.links.wait_connected(others, PATIENCE_S) == [] and not len(peers.mailbox)


def test_dropping_a_stopped_process_frees_what_is_queued_for_it(peers: Peers):
    pid = peers.add(0)
    stop(pid)

    def send() -> weakref.ref[Any]:
        payload = np.zeros(1 << 20, np.uint8)
        peers.links.send(0, b"x", [payload])
        return weakref.ref(payload)

    queued = [send() for _ in range(16)]
    assert peers.links.copies_payloads or queued[-1]() is not None, "it is sent from where it lies"
    peers.links.drop(0)
    waiting.eventually(lambda: not any(payload() is not None for payload in queued))
    peers.links.close()
    assert is_stopped(pid), "neither has waited for it"


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"transport": "pigeon"}, "runtime.transport=pigeon is no transport"),
        ({"transport": "ipc", "directory": "/nowhere/at/all"}, "/nowhere/at/all.* does not exist"),
        (
            {"transport": "tcp", "host": "192.0.2.1", "credentials": RunKeys.make()},
            "cannot bind an address in 192.0.2.1",
        ),
    ],
)
def test_bad_settings_are_named(arguments: dict, rule: str):
    with pytest.raises(ConfigError, match=rule):
        Links(0, Mailbox(), **arguments)


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    with pytest.raises(ConfigError, match="108 bytes"):
        Links(0, Mailbox(), directory=str(deep))


def test_links_import_neither_torch_nor_asyncio():
    code = (
        "import sys, elaswave_spmd.runtime.transport.links\n"
        "print([m for m in ('torch', 'asyncio') if m in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True, timeout=PATIENCE_S
    )
    assert result.stdout.strip() == "[]"


class Cable:
    """Stands between two ends on tcp, and can be cut while both live."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._to = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._sides: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                self._sides += [near, far]
                for ways in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ways))
                    self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)

    def cut(self) -> None:
        for side in self._sides:
            with suppress(OSError):  # it is cut already
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for side in (self._server, *self._sides):
            side.close()


@pytest.mark.parametrize("ends", ["tcp", "tcp-plain"], indirect=True)
def test_a_connection_that_breaks_between_the_living_is_told_once_and_can_be_made_again(ends: Ends) -> None:
    """Nothing comes again by itself: whoever reconnects knows that what was on its way is lost."""
    one, notices = ends.open(0)
    other, mailbox = ends.open(1)
    cable = Cable(other.address)
    one.connect(1, cable.address)
    assert one.wait_connected([1], PATIENCE_S) == [] and one.send(1, b"first")
    assert envelope(mailbox).header == b"first"
    for number in (b"second", b"third"):
        cable.cut()
        assert notices.get(PATIENCE_S) == PeerClosed(1) and one.peers == () and not one.send(1, b"lost")
        one.connect(1, cable.address)
        assert one.wait_connected([1], PATIENCE_S) == [] and one.send(1, number)
        assert envelope(mailbox).header == number
    assert notices.take_all() == [] and mailbox.take_all() == []
    cable.close()
