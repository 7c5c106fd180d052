"""Links through shared memory: all arrives whole and in order, no receiver holds up a sender, and nothing is left."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elaswave_spmd.runtime.transport import shared_inbox
from elaswave_spmd.runtime.transport.frames import Message
from elaswave_spmd.runtime.transport.links import (
    _BROKEN,
    _BROKEN_LINK,
    _MAPPED,
    _MAPPED_LINK,
    _SHARE,
    Links,
    socket_directory,
)
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES, RING_BYTES
from elaswave_spmd.runtime.transport.shared_memory import MemoryLocation, PeerMemory, SharedMemory, why_not_shared
from elaswave_spmd.runtime.transport.shared_way import INLINE_BYTES, SharedWay
from tests.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.skipif(bool(why_not_shared()), reason=why_not_shared())
ROOT = Path(__file__).parents[2]

PEER = """
import sys, time
import numpy as np
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
mailbox = Mailbox()
links = Links(1, mailbox, transport="shm", directory=sys.argv[1])
print(links.address, flush=True)
links.connect(0, sys.stdin.readline().strip())
while not links._links[0].shared.is_open:
    time.sleep(0.001)
print("open", flush=True)
kept = []
while True:
    item = mailbox.get()
    if not isinstance(item, Envelope):
        continue
    if item.header == b"keep":
        kept.append(item.payloads)
    elif item.header == b"tell":
        for number in range(50):
            assert links.send(0, number.to_bytes(2, "big"), [np.full(30_000, number, np.uint8), bytes([number])])
        print("told", flush=True)
    else:
        links.send(0, item.header, item.payloads)
"""


class Pair:
    """Links of this process, rank 0, to those of a child, rank 1."""

    def __init__(self, stack: ExitStack) -> None:
        self.directory = socket_directory()
        stack.callback(os.rmdir, self.directory)
        self.mailbox = Mailbox()
        self.links = Links(0, self.mailbox, transport="shm", directory=self.directory)
        stack.callback(self.links.close)
        words = [sys.executable, "-c", PEER, self.directory]
        self.child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        stack.callback(self._end)
        self.links.connect(1, self.said())
        assert self.links.wait_connected([1], PATIENCE_S) == [] and self.child.stdin is not None
        self.child.stdin.write(f"{self.links.address}\n")
        self.child.stdin.flush()
        assert self.said() == "open"

    def said(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def _end(self) -> None:
        self.child.kill()
        self.child.communicate()
        for name in os.listdir(self.directory):
            if name.startswith("1-"):
                os.unlink(os.path.join(self.directory, name))

    def is_open(self) -> bool:
        way = self.links._links[1].shared
        return way is not None and way.is_open

    def num_held(self) -> int:
        assert self.links._memory is not None
        return self.links._memory.num_held

    def got(self) -> Envelope:
        item = self.mailbox.get(PATIENCE_S)
        assert isinstance(item, Envelope), item
        return item


def both(stack: ExitStack) -> tuple[list[Links], list[Mailbox]]:
    """Two ends in this process, connected."""
    directory = socket_directory()
    stack.callback(os.rmdir, directory)
    boxes = [Mailbox(), Mailbox()]
    ends = [Links(rank, box, transport="shm", directory=directory) for rank, box in enumerate(boxes)]
    for rank, links in enumerate(ends):
        stack.callback(links.close)
        links.connect(1 - rank, ends[1 - rank].address)
    assert ends[0].wait_connected([1], PATIENCE_S) == ends[1].wait_connected([0], PATIENCE_S) == []
    return ends, boxes


def way_of(links: Links, peer: int) -> SharedWay:
    way = links._links[peer].shared
    assert way is not None
    return way


def exchange(ends: list[Links], boxes: list[Mailbox], sender: int) -> None:
    """Large payloads from one end to the other, all of which arrive in their order."""
    for number in range(20):
        assert ends[sender].send(1 - sender, bytes([number]), [bytes([number]) * 100_000])
    for number in range(20):
        item = boxes[1 - sender].get(PATIENCE_S)
        assert isinstance(item, Envelope) and item.header == bytes([number])
        assert set(item.payloads[0]) == {number}


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        found = Pair(stack)
        eventually(found.is_open)
        yield found


def test_payloads_of_all_sizes_arrive_whole_and_in_order_and_are_let_go_of(pair: Pair) -> None:
    draw = np.random.default_rng(0)
    sizes = [0, 1, 10, INLINE_BYTES, INLINE_BYTES + 1, 70_000, RING_BYTES, 3_000_001]
    for batch in range(10):
        sent = [[draw.integers(0, 255, int(draw.choice(sizes)), np.uint8) for _ in range(2)] for _ in range(40)]
        for number, payloads in enumerate(sent):
            assert pair.links.send(1, bytes([batch, number]), payloads)
            for payload in payloads:
                payload_copy, payload[:] = payload.copy(), 0  # it is the sender's again
                sent[number] = [payload_copy if payload is other else other for other in sent[number]]
        for number, payloads in enumerate(sent):
            check(pair.got(), bytes([batch, number]), payloads)
    pair.links.send(1, b"in place of the last one, to which the child refers")
    pair.got()
    eventually(lambda: not pair.num_held())
    assert pair.links._memory is not None and pair.links._memory.num_used_bytes < 400 << 20


def check(got: Envelope, header: bytes, payloads: list[np.ndarray]) -> None:
    """Of which nothing is referred to when it returns."""
    assert got.header == header
    for expected, payload in zip(payloads, got.payloads, strict=True):
        assert np.array_equal(np.frombuffer(payload, np.uint8), expected) and not payload.readonly


def test_what_was_written_where_the_receiver_reads_it_arrives_without_a_copy(pair: Pair) -> None:
    assert pair.links._memory is not None and pair.links.lend(2, 1_000_000) is None, "no peer"
    assert pair.links.lend(1, INLINE_BYTES) is None, "it goes with the message"
    values = pair.links.lend(1, 1_000_000)
    assert values is not None
    values[:] = np.arange(1_000_000) % 251
    used = pair.links._memory.num_used_bytes
    assert pair.links.send(1, b"keep", [values])
    assert pair.links.send(1, b"back", [values]), "a copy: the first one is the receiver's"
    check(pair.got(), b"back", [values])
    assert used < pair.links._memory.num_used_bytes < used + 1_300_000 and pair.num_held() >= 1
    pair.links.drop(1)
    assert pair.links.lend(1, 1_000_000) is None


def test_a_sleeping_consumer_is_woken_each_time(pair: Pair) -> None:
    for number in range(3000):
        pair.links.send(1, number.to_bytes(4, "big"))
        assert pair.got().header == number.to_bytes(4, "big")


def test_a_stopped_receiver_holds_up_nobody_and_gets_everything_in_order(pair: Pair) -> None:
    """The ring is full soon; the rest goes over the socket, and later by the ring again."""
    number, draw = 6000, random.Random(1)
    sizes = [draw.choice([0, 100, 3000, 20_000]) for _ in range(number)]
    os.kill(pair.child.pid, signal.SIGSTOP)
    for i in range(number // 2):
        assert pair.links.send(1, i.to_bytes(4, "big"), [bytes([i % 256]) * sizes[i]])
    os.kill(pair.child.pid, signal.SIGCONT)
    for i in range(number // 2, number):
        assert pair.links.send(1, i.to_bytes(4, "big"), [bytes([i % 256]) * sizes[i]])
    for i in range(number):
        got = pair.got()
        assert got.header == i.to_bytes(4, "big") and bytes(got.payloads[0]) == bytes([i % 256]) * sizes[i]


def test_what_a_killed_receiver_held_is_free(pair: Pair) -> None:
    for _ in range(5):
        pair.links.send(1, b"keep", [bytes(50_000)])
    pair.links.send(1, b"after these")
    assert pair.got().header == b"after these" and pair.num_held() == 5
    pair.links.drop(1)  # evicted, but alive: it may still read
    assert pair.num_held() == 5
    pair.child.kill()
    pair.child.wait()
    eventually(lambda: not pair.num_held())


def test_what_a_killed_sender_has_sent_arrives(pair: Pair) -> None:
    pair.links.send(1, b"tell")
    assert pair.said() == "told"
    pair.child.kill()
    pair.child.wait()
    items = list[object]()

    def has_ended() -> bool:
        items.extend(pair.mailbox.take_all())
        return PeerClosed(1) in items

    eventually(has_ended)
    items += pair.mailbox.take_all()
    assert items.count(PeerClosed(1)) == 1
    got = [item for item in items if isinstance(item, Envelope)]
    assert [envelope.header for envelope in got] == [number.to_bytes(2, "big") for number in range(50)]
    for number, envelope in enumerate(got):
        assert [set(payload) for payload in envelope.payloads] == [{number}, {number}]
    assert pair.links.send(1, b"to the dead", [bytes(50_000)]) is False


def test_a_receiver_that_cannot_map_gets_everything_over_the_socket_and_says_why_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(location: object) -> PeerMemory:
        raise PermissionError(1, "refused", str(location))

    monkeypatch.setattr(shared_inbox, "PeerMemory", refuse)
    with ExitStack() as stack:
        ends, boxes = both(stack)
        exchange(ends, boxes, sender=0)
        ends[0].drop(1)
        ends[0].connect(1, ends[1].address)
        exchange(ends, boxes, sender=0)
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be mapped" in line]
    assert len([line for line in said if line.startswith("links of 1: all from 0 comes over a socket")]) == 1, said
    assert all("refused" in line for line in said)


def test_a_receiver_says_nothing_of_memory_whose_owner_is_ending(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that is lost or leaves while a newcomer opens its links: /proc lists it still, not its descriptors."""
    closed = MemoryLocation(os.getpid(), 1 << 20, 1, 1 << 30)  # no descriptor has this number
    refused = list[MemoryLocation]()

    def refuse(location: MemoryLocation) -> PeerMemory:  # as the kernel does for a zombie, except to root
        refused.append(location)
        raise PermissionError(13, "refused", str(location))

    with ExitStack() as stack:
        ends, _ = both(stack)
        ended = stack.enter_context(subprocess.Popen([sys.executable, "-c", ""]))
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as nobody has taken note of its end
        of_zombie = MemoryLocation(ended.pid, 3, 1, 1 << 30)
        for location in (closed, of_zombie):
            ends[1]._map_memory(2, 1, location, 64)
        monkeypatch.setattr(shared_inbox, "PeerMemory", refuse)
        ends[1]._map_memory(2, 1, of_zombie, 64)
        assert refused == [of_zombie] and "mapped" not in capfd.readouterr().err
        ends[1]._map_memory(2, 1, MemoryLocation(os.getpid(), 3, 1, of_zombie.num_bytes), 64)
        assert "all from 2 comes over a socket" in capfd.readouterr().err


def test_a_ring_is_used_again_when_a_receiver_has_ended_that_had_not_said_that_it_maps_it() -> None:
    """A newcomer that is stopped before it has come to that, and is lost."""
    code = """
import os, sys, zmq
pull = zmq.Context().socket(zmq.PULL)
address = f"ipc://{sys.argv[1]}/2-{os.getpid()}"
pull.bind(address)
print(address, flush=True)
input()
"""
    with ExitStack() as stack:
        ends, _ = both(stack)
        directory = os.path.dirname(ends[0].address.removeprefix("ipc://"))
        rings = []
        for _ in range(2):
            words = [sys.executable, "-c", code, directory]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                address = child.stdout.readline().strip()
                ends[0].connect(2, address)
                rings.append(way_of(ends[0], 2)._ring_at)
                ends[0].drop(2)
                ends[0].connect(2, address)
                rings.append(way_of(ends[0], 2)._ring_at)
                ends[0].drop(2)
                child.kill()
            Path(address.removeprefix("ipc://")).unlink()
        assert rings[0] != rings[1] and rings[:2] == rings[2:], "while it lives it may map both"


def test_what_is_told_late_of_a_mapped_ring_of_an_older_link_changes_nothing() -> None:
    """The reader has a link only after that: what it then reports is of the newest one."""
    with ExitStack() as stack:
        ends, boxes = both(stack)
        eventually(lambda: way_of(ends[0], 1).is_open)
        first, location = ends[0]._links[1].number, way_of(ends[0], 1).location()
        ends[1]._links.pop(0).close()
        ends[0].drop(1)
        ends[0].connect(1, ends[1].address)
        eventually(lambda: ends[1]._mapped[0] > first)
        ends[1]._handle_handshake(Message(0, first, _SHARE, location, ()))
        ends[1].connect(0, ends[0].address)
        eventually(lambda: way_of(ends[0], 1).is_open)
        exchange(ends, boxes, sender=0)


def test_the_killed_leave_nothing_in_memory(pair: Pair) -> None:
    """The receiver has mapped the memory of both. It has no name: so nothing is left of it when both are dead."""
    pair.links.send(1, b"keep", [bytes(1 << 20)])
    of_child = Path(f"/proc/{pair.child.pid}")
    eventually(lambda: len([name for name in shared_files(of_child) if "memfd:elaswave" in name]) >= 2)
    named = [name for name in shared_files(of_child) | shared_files(Path("/proc/self")) if "elaswave" in name]
    assert named and all(name.startswith("/memfd:") for name in named), named
    assert not [name for name in shared_files(of_child) if name.startswith("/dev/shm/")]
    pair.child.kill()
    pair.child.wait()
    assert not [name for name in os.listdir("/dev/shm") if "elaswave" in name]


def shared_files(process: Path) -> set[str]:
    """The files that a process has mapped, each with its inode."""
    lines = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
    return {f"{words[5]} {words[4]}" for words in lines if len(words) == 6}


@pytest.mark.parametrize("lacking", [0, 1])
def test_with_one_that_has_no_memory_to_share_all_goes_over_sockets(
    lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that may have no more open files than it has, for example."""
    made = iter((0, 1))

    def refuse(self: SharedMemory, num_bytes: int = 0) -> None:
        if next(made) == lacking:
            raise OSError(24, "Too many open files")
        make(self, num_bytes)

    make = SharedMemory.__init__
    monkeypatch.setattr(SharedMemory, "__init__", refuse)
    with ExitStack() as stack:
        ends, boxes = both(stack)
        assert ["Too many open files" in links.why_not_shared for links in ends] == [lacking == 0, lacking == 1]
        for sender in (0, 1):
            exchange(ends, boxes, sender)
        assert not any(links.rejected for links in ends)


def test_a_ring_that_may_be_mapped_by_somebody_who_lives_is_given_to_nobody_else() -> None:
    with ExitStack() as stack:
        ends, boxes = both(stack)
        eventually(lambda: way_of(ends[0], 1).is_open)
        first = way_of(ends[0], 1)._ring_at
        os.unlink(ends[1].address.removeprefix("ipc://") + ".bell")  # as a program does that cleans /tmp
        ends[0].drop(1)
        ends[0].connect(1, ends[1].address)
        assert ends[0].wait_connected([1], PATIENCE_S) == []
        second = way_of(ends[0], 1)
        eventually(lambda: second._receiver is not None)
        assert not second.is_open and ends[0].send(1, b"all the same", [bytes(100_000)])
        item = boxes[1].get(PATIENCE_S)
        assert isinstance(item, Envelope) and item.header == b"all the same"
        ends[0].drop(1)
        ends[0].connect(1, ends[1].address)
        assert second._ring_at not in (first, way_of(ends[0], 1)._ring_at), "the last one may be the first again"


def test_a_peer_that_comes_and_goes_while_it_lives_takes_no_more_memory_each_time() -> None:
    """As on a large mesh. What it has not read of a ring that is closed arrives before the ring is used again."""
    with ExitStack() as stack:
        ends, boxes = both(stack)
        memory, used, rings = ends[0]._memory, list[int](), set[int]()
        assert memory is not None
        for turn in range(8):
            eventually(lambda: way_of(ends[0], 1).is_open)
            rings.add(way_of(ends[0], 1)._ring_at)
            for number in range(3):
                assert ends[0].send(1, bytes([turn, number]), [bytes([turn]) * 100_000])
            ends[0].drop_all_but([])
            ends[0].connect(1, ends[1].address)
            used.append(memory.num_used_bytes)
            for number in range(3):
                item = boxes[1].get(PATIENCE_S)
                assert isinstance(item, Envelope) and item.header == bytes([turn, number])
                assert set(item.payloads[0]) == {turn}
                del item
        assert len(rings) <= 3 and used[-1] - used[0] <= MEMORY_BYTES, (rings, used)


def test_a_way_that_is_closed_stays_closed() -> None:
    with ExitStack() as stack:
        ends, _ = both(stack)
        eventually(lambda: way_of(ends[0], 1).is_open)
        link = ends[0]._links[1]
        link.close()
        mapped = _MAPPED_LINK.pack(link.number, os.getpid())
        ends[0]._handle_handshake(Message(1, 1, _MAPPED, mapped, ()))
        assert not way_of(ends[0], 1).is_open


def breaks_ring(links: Links, peer: int) -> None:
    """What a process does that writes where it should not: the ring to a peer cannot be read any more."""
    eventually(lambda: way_of(links, peer).is_open)
    way_of(links, peer)._ring._words[0] = 1 << 62


@pytest.mark.parametrize("is_linked", [True, False])
def test_the_writer_of_a_ring_that_cannot_be_read_ends_its_link_and_makes_another(is_linked: bool) -> None:
    """Both ends notice, as with a connection that breaks. A reader without a link itself tells when it has one."""
    with ExitStack() as stack:
        ends, boxes = both(stack)
        breaks_ring(ends[0], 1)
        if not is_linked:
            ends[1]._links.pop(0).close()
        assert boxes[1].get(PATIENCE_S) == PeerClosed(0)
        if not is_linked:
            assert ends[0].reaches(1) and ends[0].send(1, b"lost, as nobody has told it yet")
            ends[1].connect(0, ends[0].address)
        assert boxes[0].get(PATIENCE_S) == PeerClosed(1)
        assert not ends[0].reaches(1) and not ends[0].send(1, b"lost"), "its link has ended"
        ends[0].connect(1, ends[1].address)
        eventually(lambda: way_of(ends[0], 1).is_open)
        for sender in (0, 1):
            exchange(ends, boxes, sender)


def test_what_is_told_late_of_an_older_link_ends_no_newer_one() -> None:
    with ExitStack() as stack:
        ends, boxes = both(stack)
        older = ends[0]._links[1].number
        ends[0].drop(1)
        ends[0].connect(1, ends[1].address)
        eventually(lambda: way_of(ends[0], 1).is_open)
        ends[0]._handle_handshake(Message(1, 1, _BROKEN, _BROKEN_LINK.pack(older), ()))
        exchange(ends, boxes, sender=0)
        assert ends[0].reaches(1) and not len(boxes[0])


def test_the_memory_of_the_dead_is_let_go_of(pair: Pair) -> None:
    """With their links, which are closed by then."""

    def mapped_by(pid: int) -> set[str]:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        return {line.split()[4] for line in lines if "/memfd:elaswave" in line}

    pair.links.send(1, b"echo", [bytes(50_000)])
    check(pair.got(), b"echo", [np.zeros(50_000, np.uint8)])
    both_mapped = mapped_by(os.getpid()) & mapped_by(pair.child.pid)  # other tests may have left memory of theirs
    assert len(both_mapped) == 2
    pair.child.kill()
    pair.child.wait()
    eventually(lambda: pair.links._links[1].open is None)
    pair.links.drop_all_but([])
    gc.collect()
    assert len(mapped_by(os.getpid()) & both_mapped) == 1
