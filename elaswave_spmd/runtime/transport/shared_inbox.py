"""An inbox for what peers of this host send through shared memory, in order with what they send over sockets.

A message of a peer comes as a record of its ring or, when the ring was full or not there yet, over the socket. Both
ways keep their order, and each message has a number, so those that come early wait here. The rings are read by the
thread that consumes the mailbox, when it looks for messages: as long as it computes, no other thread is woken for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elaswave_spmd.runtime.transport.frames import (
    MALFORMED,
    NOT_SHARED,
    UNORDERED,
    Message,
    MessageLimits,
    MessageRejected,
    message_in,
)
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES, MOST_RECORDS, RingReader
from elaswave_spmd.runtime.transport.shared_memory import MemoryLocation, PeerMemory

_MOST_EARLY = 1 << 16
"""The most messages of a peer that wait for others. One that has gone wrong has more: its link counts as closed."""


@dataclass(slots=True)
class _Sender:
    """One peer, as of one link.

    Args:
        rank: of the peer.
        link: number of the link.
        memory: the peer's, once it is mapped.
        ring: of this link, in that memory.
        next_number: of the message that is delivered next.
        early: messages with larger numbers; None: one that was rejected.
        pid: of the peer, once its memory is mapped.
        forgotten: it is no peer any more.
        broken: nothing more is taken from it.
    """

    rank: int
    link: int
    memory: PeerMemory | None = None
    ring: RingReader | None = None
    next_number: int = 0
    early: dict[int, Envelope | None] = field(default_factory=dict)
    pid: int = 0
    forgotten: bool = False
    broken: bool = False


class SharedInbox:
    """The rings of all peers, and the order of their messages. The mailbox asks it for more.

    Args:
        mailbox: messages are filed here.
        limits: of the messages that are taken.
        on_broken: called with a peer and the number of its link when nothing more is taken from that link. The peer
            does not see that, and has to be told: else it would go on sending into it. Any thread; not to call this.
    """

    def __init__(self, mailbox: Mailbox, limits: MessageLimits, on_broken: Callable[[int, int], None]) -> None:
        self._mailbox = mailbox
        self._limits = limits
        self._on_broken = on_broken
        self._lock = threading.Lock()  # guards the rest: the event loop adds what comes over sockets
        self._fence = threading.Lock()  # see rings.py
        self._senders: dict[int, _Sender] = {}  # also of the past: what was under way comes late
        self._mapping: dict[int, _Sender] = {}  # those whose memory is mapped: nobody else has a ring to look at
        self._memories: dict[MemoryLocation, PeerMemory] = {}
        self._rejected: list[str] = []
        self._asked = False  # to be woken, by some ring, since the consumer has looked last

    def add_ring(self, sender: int, link: int, location: MemoryLocation, at: int) -> None:
        """A peer has a new link, with a ring at an offset of its shared memory.

        Raises:
            OSError: that memory cannot be mapped.
            ValueError: no ring can be there.
        """
        memory = self._memories.get(location) or PeerMemory(location)
        if at % 64 or not 0 < at <= location.num_bytes - MEMORY_BYTES:
            raise ValueError(f"no ring is at {at}")
        with self._lock:
            if (found := self._sender(sender, link)) is not None:
                self._memories[location] = memory
                found.memory, found.pid = memory, location.pid
                self._mapping[sender] = found
                found.ring = RingReader(memory.view[at : at + MEMORY_BYTES])
                self._asked = True
                found.ring.wait()  # the consumer may sleep already, and has not asked this one to wake it
            self._unmap()

    def accept(self, message: Message) -> None:
        """Take a message that came over the socket.

        Raises:
            MessageRejected: its payloads are not where it says.
        """
        with self._lock:
            sender = self._sender(message.sender, message.link)
            if sender is not None:
                if message.number > sender.next_number:
                    self._drain(sender, wake=True)  # the ring was full, so those before it are there
                self._file(sender, message, wake=True)

    def skip(self, sender: int, link: int, number: int) -> None:
        """A message that came over the socket was rejected: those after it do not wait for it."""
        with self._lock:
            found = self._sender(sender, link)
            if found is not None:
                self._deliver(found, number, None, wake=True)

    def forget(self, *peers: int) -> None:
        """Peers are none any more. Their memory stays mapped until their processes end: they may become some again."""
        with self._lock:
            for peer in peers:
                if (found := self._senders.get(peer)) is not None:
                    found.forgotten = True
            self._unmap()  # once, as it looks at all former peers

    def close(self) -> None:
        """Let go of all memory of peers; payloads that were delivered stay valid."""
        with self._lock:
            for sender in list(self._mapping.values()):
                self._let_go_of_memory(sender)
            self._memories = {}

    def drain(self) -> None:
        """File everything that is there. For the thread that consumes the mailbox."""
        with self._lock:
            # Between two layers nothing has come, mostly: this is called hundreds of times in a step.
            for sender in self._mapping.values():
                if (ring := sender.ring) is not None:
                    if self._asked:
                        ring.is_awake()
                    if ring.has_record():
                        self._drain(sender, wake=False)
            self._asked = False

    def sleeps(self) -> bool:
        """Have the consumer woken by the next record. Returns False if there is one already."""
        with self._lock:
            self._asked = True
            rings = [sender.ring for sender in self._mapping.values() if sender.ring is not None]
            for ring in rings:
                ring.wait()
            with self._fence:
                pass
            return not any(ring.has_record() for ring in rings)

    def unmap_dead(self) -> None:
        """Let go of the memory of former peers that have ended since `forget`. To be called now and then.

        A process that was killed is there for a while after it is known to be lost, and its memory with it.
        """
        with self._lock:
            if any(sender.forgotten for sender in self._mapping.values()):
                self._unmap()

    def take_rejected(self) -> list[str]:
        """The reasons of the records that were rejected since the last call."""
        with self._lock:
            found, self._rejected = self._rejected, []
            return found

    def _sender(self, rank: int, link: int) -> _Sender | None:
        """The peer as of this link; None for a message of an older one."""
        found = self._senders.get(rank)
        if found is not None and found.link > link:
            return None
        if found is None or found.link < link:
            if found is not None:
                self._drain(found, wake=True)
                self._let_go_of_memory(found)
            found = self._senders[rank] = _Sender(rank, link)
        return found

    def _unmap(self) -> None:
        """Let go of the memory of former peers that have ended."""
        for sender in list(self._mapping.values()):
            if sender.forgotten and not Path(f"/proc/{sender.pid}").exists():
                self._drain(sender, wake=True)
                sender.early.clear()  # what they wait for was lost with the process, and payloads keep its memory
                self._let_go_of_memory(sender)
        used = {sender.memory for sender in self._mapping.values()}
        # That of a process that lives is kept: blocks are let go of through it.
        self._memories = {
            at: memory for at, memory in self._memories.items() if memory in used or Path(f"/proc/{at.pid}").exists()
        }

    def _let_go_of_memory(self, sender: _Sender) -> None:
        if sender.ring is not None:
            sender.ring.close()
        sender.ring = sender.memory = None
        self._mapping.pop(sender.rank, None)

    def _drain(self, sender: _Sender, *, wake: bool) -> None:
        """File what is in a peer's ring, but no more than a ring holds: what comes meanwhile is for the next time."""
        for _ in range(MOST_RECORDS):
            try:
                record = None if sender.ring is None else sender.ring.read()
            except ValueError:
                self._rejected.append(MALFORMED)
                self._break(sender, wake=wake)
                return
            if record is None:
                return
            try:
                message = message_in(record, self._limits)
                if message.number == UNORDERED or message.sender != sender.rank:
                    raise MessageRejected(MALFORMED)
                self._file(sender, message, wake=wake)
            except MessageRejected as rejected:
                self._rejected.append(str(rejected))
                if rejected.numbered is not None:
                    self._deliver(sender, rejected.numbered[2], None, wake=wake)

    def _break(self, sender: _Sender, *, wake: bool) -> None:
        """A peer has gone wrong, so that messages of it are lost: as if its link were closed."""
        if not sender.broken:
            sender.broken, sender.ring = True, None
            sender.early.clear()
            self._on_broken(sender.rank, sender.link)
            self._mailbox.put(PeerClosed(sender.rank), wake=wake)

    def _file(self, sender: _Sender, message: Message, *, wake: bool) -> None:
        if sender.forgotten and sender.memory is None and any(place != NOT_SHARED for place in message.places):
            return  # it was under way when the peer's memory was let go of
        try:
            payloads = tuple(
                payload if place == NOT_SHARED else _payload(sender, place, size)
                for payload, place, size in zip(message.payloads, message.places, message.sizes, strict=True)
            )
        except ValueError:
            raise MessageRejected(MALFORMED, (message.sender, message.link, message.number)) from None
        self._deliver(sender, message.number, Envelope(message.sender, message.header, payloads), wake=wake)

    def _deliver(self, sender: _Sender, number: int, envelope: Envelope | None, *, wake: bool) -> None:
        """Put a message in the mailbox, or keep it until those before it have come. None: it was rejected."""
        if number == UNORDERED:
            if envelope is not None:
                self._mailbox.put(envelope, wake=wake)
            return
        if number < sender.next_number or sender.broken:
            return  # none of ours: each number comes once
        if number > sender.next_number and len(sender.early) >= _MOST_EARLY:
            self._break(sender, wake=wake)
            return
        sender.early[number] = envelope
        while sender.next_number in sender.early:
            if (found := sender.early.pop(sender.next_number)) is not None:
                self._mailbox.put(found, wake=wake)
            sender.next_number += 1


def _payload(sender: _Sender, place: int, size: int) -> memoryview:
    if sender.memory is None:
        raise ValueError(f"a payload at {place} of memory that is not mapped")
    return sender.memory.payload(place, size)
