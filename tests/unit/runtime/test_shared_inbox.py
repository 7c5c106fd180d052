"""The inbox of shared memory: messages come in the order of their numbers, whichever way each of them took."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.runtime.transport import shared_inbox
from elaswave_spmd.runtime.transport.frames import (
    MALFORMED,
    NOT_SHARED,
    NUMBERED,
    TOO_LARGE,
    UNORDERED,
    Message,
    MessageLimits,
    MessageRejected,
    numbered_head,
    record_of,
)
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES, RingWriter
from elaswave_spmd.runtime.transport.shared_inbox import SharedInbox
from elaswave_spmd.runtime.transport.shared_memory import MemoryLocation, SharedMemory, why_not_shared

pytestmark = pytest.mark.skipif(bool(why_not_shared()), reason=why_not_shared())
LIMITS = MessageLimits(header_bytes=1000, payload_bytes=1000)


class Peer:
    """A sender with a ring, in this process."""

    def __init__(self, inbox: SharedInbox, rank: int, link: int, memory: SharedMemory) -> None:
        self.inbox, self.rank, self.link, self.memory = inbox, rank, link, memory
        at = memory.reserve(MEMORY_BYTES, link)
        assert at is not None
        self.ring = RingWriter(memory.view[at : at + MEMORY_BYTES])
        inbox.add_ring(rank, link, memory.location, at)

    def by_ring(self, number: int, header: bytes, *payloads: bytes, places: tuple[int, ...] = ()) -> None:
        views = [memoryview(payload) for payload in payloads]
        places = places or (NOT_SHARED,) * len(payloads)
        head = numbered_head(self.rank, self.link, header, [len(view) for view in views], number, places)
        rest = [view for view, place in zip(views, places, strict=True) if place == NOT_SHARED]
        assert self.ring.write(record_of(head, rest))

    def by_socket(self, number: int, header: bytes) -> None:
        self.inbox.accept(Message(self.rank, self.link, NUMBERED, header, (), number))


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(16 << 20)


def opened(broken: list[tuple[int, int]] | None = None) -> tuple[SharedInbox, Mailbox]:
    mailbox = Mailbox()
    told = [] if broken is None else broken
    inbox = SharedInbox(mailbox, LIMITS, lambda peer, link: told.append((peer, link)))
    mailbox.attach(inbox)
    return inbox, mailbox


def headers(mailbox: Mailbox) -> list[bytes]:
    return [item.header for item in mailbox.take_all() if isinstance(item, Envelope)]


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 1 << 32))
def test_messages_keep_their_order_whichever_way_they_take(ways: list[bool], seed: int) -> None:
    """Each way keeps its own order; between the two there is none."""
    inbox, mailbox = opened()
    peer, draw = Peer(inbox, 3, 7, SharedMemory(1 << 20)), random.Random(seed)
    queues = [[n for n, way in enumerate(ways) if way], [n for n, way in enumerate(ways) if not way]]
    got: list[bytes] = []
    while any(queues):
        queue = draw.choice([queue for queue in queues if queue])
        number = queue.pop(0)
        (peer.by_ring if queue is queues[0] else peer.by_socket)(number, b"%d" % number)
        if draw.random() < 0.3:
            got += headers(mailbox)
    got += headers(mailbox)
    assert got == [b"%d" % number for number in range(len(ways))]


def test_payloads_come_with_their_messages(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    place = memory.place(memoryview(b"in a block"), 7)
    assert place is not None
    peer.by_ring(0, b"h", b"odd", b"in a block", b"", b"last one", places=(0, place, 0, 0))
    (item,) = mailbox.take_all()
    assert isinstance(item, Envelope) and item.sender == 3
    assert [bytes(payload) for payload in item.payloads] == [b"odd", b"in a block", b"", b"last one"]
    assert not any(payload.readonly for payload in item.payloads if payload.nbytes)


def test_a_peer_that_comes_while_the_consumer_sleeps_wakes_it(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    first = Peer(inbox, 3, 7, memory)
    assert not mailbox.wait(0)  # from here on it is to be woken
    second = Peer(inbox, 4, 8, memory)
    second.by_ring(0, b"from the new one")
    assert second.ring.must_ring() and not second.ring.must_ring()
    first.by_ring(0, b"from the old one")
    assert first.ring.must_ring()
    assert headers(mailbox) == [b"from the old one", b"from the new one"]
    second.by_ring(1, b"another")
    assert not second.ring.must_ring(), "the consumer does not sleep"


def test_a_message_that_need_not_wait_does_not(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    peer.by_socket(1, b"second")
    peer.by_socket(UNORDERED, b"whenever")
    assert headers(mailbox) == [b"whenever"]
    peer.by_ring(0, b"first")
    assert headers(mailbox) == [b"first", b"second"]


def test_those_after_a_message_that_is_rejected_do_not_wait_for_it(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    peer.by_ring(1, b"after it")
    inbox.skip(3, 7, 0)
    peer.by_ring(2, b"large", bytes(1001))
    peer.by_ring(3, b"a payload that is nowhere", b"x", places=(1 << 40,))
    peer.by_ring(4, b"last")
    assert headers(mailbox) == [b"after it", b"last"]
    assert inbox.take_rejected() == [TOO_LARGE, MALFORMED] and inbox.take_rejected() == []
    with pytest.raises(MessageRejected, match=MALFORMED) as caught:
        inbox.accept(Message(3, 7, NUMBERED, b"h", (memoryview(b""),), 5, (1 << 40,), (10,)))
    assert caught.value.numbered == (3, 7, 5)


@pytest.mark.parametrize("record", [b"", b"short", b"\xff" * 100, bytes(200)])
def test_a_record_that_is_no_message_is_counted_and_the_next_one_read(record: bytes, memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    peer.ring.write([record])
    peer.by_ring(0, b"next")
    assert headers(mailbox) == [b"next"] and len(inbox.take_rejected()) == 1


def test_what_no_peer_sends_by_a_ring_is_counted(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    peer.by_ring(UNORDERED, b"need not wait")
    peer.rank = 4
    peer.by_ring(0, b"of another sender")
    peer.rank = 3
    peer.by_ring(0, b"next")
    assert headers(mailbox) == [b"next"] and inbox.take_rejected() == [MALFORMED] * 2


@pytest.mark.parametrize("tail", [1 << 62, 1 << 20, 3])
def test_a_ring_that_cannot_be_read_counts_as_a_closed_link(tail: int, memory: SharedMemory) -> None:
    broken = list[tuple[int, int]]()
    inbox, mailbox = opened(broken)
    peer = Peer(inbox, 3, 7, memory)
    peer.by_ring(0, b"first")
    peer.ring._words[0] += tail
    assert headers(mailbox) == ([b"first"] if tail == 3 else [])
    assert inbox.take_rejected() == [MALFORMED] and not mailbox.wait(0)
    inbox.skip(3, 7, 1)
    assert broken == [(3, 7)], "the peer is told once, and of which link"


def test_a_peer_whose_messages_never_come_counts_as_gone(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_inbox, "_MOST_EARLY", 10)
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    for number in range(1, 12):
        inbox.accept(Message(3, 7, NUMBERED, b"h", (), number))
    inbox.skip(3, 7, 12)
    peer.by_ring(0, b"too late")
    assert mailbox.take_all() == [PeerClosed(3)]


def is_mapped(inode: int) -> bool:
    """True if shared memory with this number is mapped here; a file of another kind may have the same number."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return any("/memfd:" in line and line.split()[4] == str(inode) for line in lines)


def test_the_memory_of_who_ends_after_it_was_forgotten_is_let_go_of_later() -> None:
    inbox, _ = opened()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, fd, inode, at, _ = map(int, owner.stdout.readline().split())
        inbox.add_ring(3, 7, MemoryLocation(pid, fd, inode, 1 << 20), at)
        inbox.forget(3)
        inbox.unmap_dead()
        assert is_mapped(inode), "it lives"
        owner.kill()
    assert inbox.take_rejected() == [] and is_mapped(inode)
    inbox.unmap_dead()
    gc.collect()
    assert not is_mapped(inode)


OWNER = """
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES
from elaswave_spmd.runtime.transport.shared_memory import SharedMemory
memory = SharedMemory(1 << 20)
at = memory.location
print(at.pid, at.fd, at.inode, memory.reserve(MEMORY_BYTES, 1), memory.place(memoryview(bytes(9)), 1), flush=True)
input()
"""


def dead_peer(inbox: SharedInbox) -> tuple[int, int]:
    """A peer, 3, whose process has ended: the inode of its memory, and the place of a payload of 9 bytes there."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid, fd, inode, at, place = map(int, owner.stdout.readline().split())
        inbox.add_ring(3, 7, MemoryLocation(pid, fd, inode, 1 << 20), at)
        owner.kill()
    assert is_mapped(inode)
    return inode, place


def test_what_is_under_way_when_a_dead_peer_is_forgotten_is_dropped() -> None:
    inbox, mailbox = opened()
    inode, place = dead_peer(inbox)
    inbox.accept(Message(3, 7, NUMBERED, b"before", (memoryview(b""),), 0, (place,), (9,)))
    inbox.forget(3)
    inbox.accept(Message(3, 7, NUMBERED, b"after", (memoryview(b""),), 1, (place,), (9,)))
    (item,) = mailbox.take_all()
    assert isinstance(item, Envelope) and bytes(item.payloads[0]) == bytes(9) and not inbox.take_rejected()
    del item
    gc.collect()
    assert not is_mapped(inode)


def test_peers_of_the_past_whose_processes_have_ended_are_not_looked_at() -> None:
    """The consumer looks hundreds of times in a step, and on a large mesh workers come and go."""
    inbox, mailbox = opened()
    for link in range(3):
        with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            pid, fd, inode, at, _ = map(int, owner.stdout.readline().split())
            inbox.add_ring(link, link, MemoryLocation(pid, fd, inode, 1 << 20), at)
            owner.kill()
    assert len(inbox._mapping) == 3
    inbox.forget(0, 2)
    assert [*inbox._mapping] == [1] and mailbox.take_all() == []
    inbox.accept(Message(0, 0, NUMBERED, b"late", (), 0))
    assert headers(mailbox) == [b"late"]


def test_what_waits_for_a_message_that_died_with_its_sender_keeps_no_memory() -> None:
    inbox, mailbox = opened()
    inode, place = dead_peer(inbox)
    inbox.accept(Message(3, 7, NUMBERED, b"second", (memoryview(b""),), 1, (place,), (9,)))
    inbox.forget(3)
    gc.collect()
    assert mailbox.take_all() == [] and not is_mapped(inode)


def test_the_memory_of_a_dead_peer_that_had_gone_wrong_is_let_go_of() -> None:
    inbox, mailbox = opened()
    inode, _ = dead_peer(inbox)
    inbox.accept(Message(3, 7, NUMBERED, b"first", (), 0))
    ring = inbox._senders[3].ring
    assert ring is not None
    ring._words[0] = 1 << 62
    del ring
    assert [type(item) for item in mailbox.take_all()] == [Envelope, PeerClosed]
    inbox.forget(3)
    gc.collect()
    assert not is_mapped(inode)


def test_a_new_link_begins_anew_after_what_the_old_one_has_brought(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    old = Peer(inbox, 3, 7, memory)
    old.by_ring(0, b"old")
    old.by_ring(2, b"one is missing before it")
    new = Peer(inbox, 3, 8, memory)
    new.by_ring(0, b"new")
    old.by_socket(1, b"too late")
    assert headers(mailbox) == [b"old", b"new"]


def test_peers_do_not_wait_for_each_other(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    one, other = Peer(inbox, 3, 7, memory), Peer(inbox, 4, 8, memory)
    one.by_ring(1, b"waits")
    other.by_ring(0, b"goes")
    assert headers(mailbox) == [b"goes"]
    inbox.forget(3)  # its process lives: what it sends still comes
    one.by_socket(0, b"late")
    one.by_ring(2, b"later")
    assert headers(mailbox) == [b"late", b"waits", b"later"]


def test_a_consumer_that_would_sleep_finds_what_is_there(memory: SharedMemory) -> None:
    inbox, mailbox = opened()
    peer = Peer(inbox, 3, 7, memory)
    assert not mailbox.wait(0) and inbox.sleeps()
    peer.by_ring(1, b"out of order")
    assert peer.ring.must_ring(), "it sleeps"
    assert not mailbox.wait(0), "nothing can be delivered"
    peer.by_ring(0, b"first")
    assert mailbox.wait(0) and headers(mailbox) == [b"first", b"out of order"]
