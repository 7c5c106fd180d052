"""The receiving half of links through shared memory. It merges what arrives by rings and by sockets, in order.

A message of a peer arrives as a record of the peer's ring or, if the ring was full or not mapped yet, over the socket.
Each of the two keeps its own order, and each message has a number, so a message that overtakes others waits here. The
rings are read by the thread that consumes the mailbox, when it looks for messages. So while that thread computes, no
other thread has to be woken for them.
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
"""How many messages of a peer may wait for earlier ones. A peer with more has gone wrong: its link counts as closed."""


@dataclass(slots=True)
class _Sender:
    """A peer and its newest link to this process.

    Args:
        rank: the peer's id.
        link: the number of the link, among those of the peer's process.
        memory: the peer's shared memory; None while it is not mapped.
        ring: the ring of this link in that memory; None if there is none.
        next_number: the number of the message that is delivered next.
        early: number -> message that has to wait for earlier ones; None for one that was rejected.
        pid: the peer's process id; 0 while its memory is not mapped.
        forgotten: True if it is not a peer any more.
        broken: True if nothing more is taken from this link.
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
    """The rings of all peers, and the order of their messages. It is the `Source` of the mailbox.

    The consuming thread calls `drain` and `sleeps`; the event-loop thread of the links calls `add_ring`, `accept` and
    `skip`; any thread may call the others. A lock lets one thread in at a time.

    Args:
        mailbox: messages are filed here.
        limits: the limits of messages; a message beyond them is rejected.
        on_broken: called with a peer and the number of its link when nothing more is taken from that link. The peer
            cannot see that and has to be told, or it would go on sending. Called in any of these threads, with the lock
            held: so it must not call this object.
    """

    def __init__(self, mailbox: Mailbox, limits: MessageLimits, on_broken: Callable[[int, int], None]) -> None:
        self._mailbox = mailbox
        self._limits = limits
        self._on_broken = on_broken
        self._lock = threading.Lock()  # guards the rest: the event loop adds what comes over sockets
        self._fence = threading.Lock()  # taking it is a full memory barrier, see rings.py
        self._senders: dict[int, _Sender] = {}  # former peers included, as their messages may arrive late
        self._mapping: dict[int, _Sender] = {}  # the senders whose memory is mapped; only these can have a ring
        self._memories: dict[MemoryLocation, PeerMemory] = {}
        self._rejected: list[str] = []
        self._asked = False  # True if some ring was asked to wake the consumer since the consumer last looked

    def add_ring(self, sender: int, link: int, location: MemoryLocation, at: int) -> None:
        """A peer has opened a new link, with a ring at an offset of its shared memory.

        Raises:
            FileNotFoundError: the peer has ended, or has closed that memory.
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
                found.ring.wait()  # the consumer may be sleeping already, and could not ask this ring to wake it
            self._unmap()

    def accept(self, message: Message) -> None:
        """Take a message that came over the socket.

        Raises:
            MessageRejected: there can be no payload at the place that the message names.
        """
        with self._lock:
            sender = self._sender(message.sender, message.link)
            if sender is not None:
                if message.number > sender.next_number:
                    self._drain(sender, wake=True)  # the ring was full, so the earlier messages are in it
                self._file(sender, message, wake=True)

    def skip(self, sender: int, link: int, number: int) -> None:
        """A message that came over the socket was rejected: later ones must not wait for it."""
        with self._lock:
            found = self._sender(sender, link)
            if found is not None:
                self._deliver(found, number, None, wake=True)

    def forget(self, *peers: int) -> None:
        """These are not peers any more. Their memory stays mapped until their processes end, as they may become peers
        again."""
        with self._lock:
            for peer in peers:
                if (found := self._senders.get(peer)) is not None:
                    found.forgotten = True
            self._unmap()  # once, as it looks at all former peers

    def close(self) -> None:
        """Unmap the memory of all peers. Payloads that were delivered stay valid."""
        with self._lock:
            for sender in list(self._mapping.values()):
                self._let_go_of_memory(sender)
            self._memories = {}

    def drain(self) -> None:
        """File all messages that are in the rings. For the thread that consumes the mailbox."""
        with self._lock:
            # This is called hundreds of times in a step, and usually finds nothing, so it must be cheap then.
            for sender in self._mapping.values():
                if (ring := sender.ring) is not None:
                    if self._asked:
                        ring.is_awake()
                    if ring.has_record():
                        self._drain(sender, wake=False)
            self._asked = False

    def sleeps(self) -> bool:
        """Ask all rings to wake the consumer at their next record. Returns False if there is a record already."""
        with self._lock:
            self._asked = True
            rings = [sender.ring for sender in self._mapping.values() if sender.ring is not None]
            for ring in rings:
                ring.wait()
            with self._fence:  # the barrier between storing `waiting` and looking at the tail, see rings.py
                pass
            return not any(ring.has_record() for ring in rings)

    def unmap_dead(self) -> None:
        """Unmap the memory of former peers whose processes have ended since `forget`. To be called now and then.

        A process that was killed still exists for a while after it is known to be lost, so `forget` comes too early.
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
        """The state of the peer's link, new if the link is; None if the peer has a newer link already."""
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
        """Unmap the memory of former peers whose processes have ended."""
        for sender in list(self._mapping.values()):
            if sender.forgotten and not Path(f"/proc/{sender.pid}").exists():
                self._drain(sender, wake=True)
                # The messages that these wait for were lost with the process, and their payloads keep its memory.
                sender.early.clear()
                self._let_go_of_memory(sender)
        used = {sender.memory for sender in self._mapping.values()}
        # The memory of a living process is kept even if no link uses it: its blocks are released through it.
        self._memories = {
            at: memory for at, memory in self._memories.items() if memory in used or Path(f"/proc/{at.pid}").exists()
        }

    def _let_go_of_memory(self, sender: _Sender) -> None:
        if sender.ring is not None:
            sender.ring.close()
        sender.ring = sender.memory = None
        self._mapping.pop(sender.rank, None)

    def _drain(self, sender: _Sender, *, wake: bool) -> None:
        """File the messages in a peer's ring, at most as many as a ring holds: a peer that writes as fast as this reads
        must not keep it here."""
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
        """A peer has gone wrong and its messages are lost: treat its link as closed."""
        if not sender.broken:
            sender.broken, sender.ring = True, None
            sender.early.clear()
            self._on_broken(sender.rank, sender.link)
            self._mailbox.put(PeerClosed(sender.rank), wake=wake)

    def _file(self, sender: _Sender, message: Message, *, wake: bool) -> None:
        if sender.forgotten and sender.memory is None and any(place != NOT_SHARED for place in message.places):
            return  # the message arrived after the peer's memory was unmapped, which has its payloads
        try:
            payloads = tuple(
                payload if place == NOT_SHARED else _payload(sender, place, size)
                for payload, place, size in zip(message.payloads, message.places, message.sizes, strict=True)
            )
        except ValueError:
            raise MessageRejected(MALFORMED, (message.sender, message.link, message.number)) from None
        self._deliver(sender, message.number, Envelope(message.sender, message.header, payloads), wake=wake)

    def _deliver(self, sender: _Sender, number: int, envelope: Envelope | None, *, wake: bool) -> None:
        """Put a message in the mailbox, or keep it until all earlier ones have arrived.

        Args:
            envelope: the message; None if it was rejected, so that only its number counts.
        """
        if number == UNORDERED:
            if envelope is not None:
                self._mailbox.put(envelope, wake=wake)
            return
        if number < sender.next_number or sender.broken:
            return  # malformed, as each number is sent once; or the link is broken
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
