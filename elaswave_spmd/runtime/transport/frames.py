"""Form of a message on a link, and how one is received: sizes are declared first, and checked before memory is taken.

The first frame of a message is its head: sender, kind, sizes of header and payloads, and mostly the header itself. The
payloads follow, one frame each. Over TCP no frame is larger than `FRAME_BYTES`: libzmq reads a frame whole, also one of
a connection that is not authenticated yet, so the largest frame is what a stranger can make a process hold. Larger
headers and payloads go in pieces, each but the last of exactly that size, and are put together in one buffer.

Between processes that share memory messages are numbered, since they come two ways: as frames, and as records of a
ring, which hold small payloads. Of a payload that lies in shared memory only the place is sent, either way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import zmq

FRAME_BYTES = 1 << 20
"""The largest frame over TCP."""

MAX_FRAME_BYTES = FRAME_BYTES + 64
"""The same on the wire: CURVE adds 33 bytes to a frame (RFC 26)."""

MAX_PAYLOADS = 255

# Sender, number of its link, kind, number of payloads, bytes of the header; the bytes of each payload follow as 64-bit
# numbers.
_PREFIX = struct.Struct("<iIBBI")
_SIZE_BYTES = 8

NUMBERED = 1
"""The kind of messages with a number, and a place for each payload, both between the payloads' sizes and the header."""
UNORDERED = (1 << 64) - 1
"""The number of a message that need not wait for others."""
NOT_SHARED = 0
"""The place of a payload that is a part of the message."""
_NUMBER = struct.Struct("<Q")
# libzmq reads from a connection in batches of 8 KiB, and delivers the messages within a batch at any byte offset.
# Payloads below this size are therefore copied, which aligns them; larger ones have memory of their own.
_SMALL_BYTES = 16 * 1024


class MessageRejected(Exception):  # noqa: N818  (an expected event: it is counted)
    """A message that is dropped.

    Args:
        reason: by which it is counted.
        numbered: sender, link and number, if the message has a number: others wait for it.
    """

    def __init__(self, reason: str, numbered: tuple[int, int, int] | None = None) -> None:
        super().__init__(reason)
        self.numbered = numbered


MALFORMED, TOO_LARGE = "malformed message", "message over its limit"


@dataclass(frozen=True)
class MessageLimits:
    """The largest message that a process takes; one that declares more is dropped before memory is taken for it.

    Args:
        header_bytes: of any message.
        payload_bytes: of each payload, where `kinds` says nothing else.
        kinds: (first bytes of a header, most bytes of each payload of such a message).
    """

    header_bytes: int = 1 << 28
    payload_bytes: int = 1 << 36
    kinds: tuple[tuple[bytes, int], ...] = ()

    def __post_init__(self) -> None:
        assert min(self.header_bytes, self.payload_bytes, *(limit for _, limit in self.kinds)) >= 0, self

    def payload_limit(self, header: bytes) -> int:
        """The most bytes of a payload that comes with this header."""
        for start, limit in self.kinds:
            if header.startswith(start):
                return limit
        return self.payload_bytes


class Message(NamedTuple):
    """A message as it arrived; see `Links` for the kinds.

    Args:
        link: number of the sender's link; a later link of a sender has a larger one.
        payloads: empty where they lie in shared memory.
        number: of the message among those of its link, if it is NUMBERED.
        places: of the payloads in the sender's shared memory, if it is NUMBERED.
        sizes: bytes of the payloads.
    """

    sender: int
    link: int
    kind: int
    header: bytes
    payloads: tuple[memoryview, ...]
    number: int = UNORDERED
    places: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def numbered_head(
    sender: int, link: int, header: bytes, sizes: Sequence[int], number: int, places: Sequence[int]
) -> bytes:
    """The head of a NUMBERED message, with its header."""
    prefix = _PREFIX.pack(sender, link, NUMBERED, len(sizes), len(header))
    return prefix + struct.pack(f"<{len(sizes)}QQ{len(sizes)}Q", *sizes, number, *places) + header


def record_of(head: bytes, views: Sequence[memoryview]) -> list[bytes | memoryview]:
    """The parts of a ring's record: a head, and the payloads that are not in shared memory, at multiples of 8 bytes.

    Args:
        views: of bytes.
    """
    parts: list[bytes | memoryview] = [head]
    before = head
    for view in views:
        parts += [bytes(-len(before) % 8), view]
        before = view
    return parts


def message_in(record: bytearray, limits: MessageLimits) -> Message:
    """The message in a ring's record. Its payloads lie in the record.

    Raises:
        MessageRejected: there is none in it, or it is over a limit.
    """
    head = _Head.of(record, limits)
    if head.kind != NUMBERED or head.header is None:
        raise MessageRejected(MALFORMED)
    at, payloads = head.length, []
    for size, place in zip(head.sizes, head.places, strict=True):
        if place != NOT_SHARED:
            payloads.append(memoryview(b""))
            continue
        at += -at % 8
        payloads.append(memoryview(record)[at : at + size])
        at += size
    if at != len(record):
        raise MessageRejected(MALFORMED)
    return head.message(head.header, tuple(payloads))


def frames_of(
    sender: int, link: int, kind: int, header: bytes, views: Sequence[memoryview], frame_bytes: int | None
) -> tuple[bytes, list[memoryview]]:
    """The head of a message, and the frames that follow it.

    Args:
        link: number of the link that it goes over.
        kind: not NUMBERED.
        views: the payloads, contiguous.
        frame_bytes: the largest frame; None for any size.
    """
    sizes = [view.nbytes for view in views]
    head = _PREFIX.pack(sender, link, kind, len(views), len(header)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    if frame_bytes is None:
        return head + header, list(views)
    rest = [piece for view in views for piece in _pieces(view, frame_bytes)]
    if len(head) + len(header) <= frame_bytes:
        return head + header, rest
    return head, [*_pieces(memoryview(header), frame_bytes), *rest]


def _pieces(view: memoryview, frame_bytes: int) -> Iterator[memoryview]:
    """The frames of one payload; an empty payload is an empty frame."""
    if view.nbytes <= frame_bytes:
        yield view
        return
    flat = view.cast("B")
    for start in range(0, flat.nbytes, frame_bytes):
        yield flat[start : start + frame_bytes]


class _Head(NamedTuple):
    """The head of a message.

    Args:
        length: bytes of the head, header included if it is here.
        header: None if it follows in frames of its own.
    """

    sender: int
    link: int
    kind: int
    sizes: tuple[int, ...]
    number: int
    places: tuple[int, ...]
    header_bytes: int
    header: bytes | None
    length: int

    @classmethod
    def of(cls, frame: bytes | bytearray, limits: MessageLimits) -> _Head:
        """The head at the beginning of a frame, or of a record.

        Raises:
            MessageRejected: there is none, or the message is over a limit.
        """
        if len(frame) < _PREFIX.size:
            raise MessageRejected(MALFORMED)
        sender, link, kind, count, header_bytes = _PREFIX.unpack_from(frame)
        if header_bytes > limits.header_bytes:
            raise MessageRejected(TOO_LARGE)
        start = _PREFIX.size + _SIZE_BYTES * count
        number, places, after = UNORDERED, (), start
        if kind == NUMBERED:
            after += _NUMBER.size + _SIZE_BYTES * count
        if len(frame) < after:
            raise MessageRejected(MALFORMED)
        sizes = struct.unpack_from(f"<{count}Q", frame, _PREFIX.size)
        if kind == NUMBERED:
            number, *listed = struct.unpack_from(f"<Q{count}Q", frame, start)
            places = tuple(listed)
        if len(frame) == after and header_bytes:
            return cls(sender, link, kind, sizes, number, places, header_bytes, None, after)
        if len(frame) < after + header_bytes:
            raise MessageRejected(MALFORMED)
        header = bytes(frame[after : after + header_bytes])
        found = cls(sender, link, kind, sizes, number, places, header_bytes, header, after + header_bytes)
        found.check_sizes(header, limits)
        return found

    def check_sizes(self, header: bytes, limits: MessageLimits) -> None:
        """Raise MessageRejected if a payload is over the limit of messages with this header."""
        if self.sizes and max(self.sizes) > limits.payload_limit(header):
            numbered = (self.sender, self.link, self.number) if self.kind == NUMBERED else None
            raise MessageRejected(TOO_LARGE, numbered)

    def message(self, header: bytes, payloads: tuple[memoryview, ...]) -> Message:
        """The message with this head."""
        return Message(self.sender, self.link, self.kind, header, payloads, self.number, self.places, self.sizes)


class MessageReader:
    """Receives messages from a PULL socket, for the thread that owns it.

    Args:
        limits: of what is taken.
        frame_bytes: the largest frame; None for any size.
    """

    def __init__(self, pull: zmq.Socket[bytes], limits: MessageLimits, frame_bytes: int | None) -> None:
        self._pull = pull
        self._limits = limits
        self._frame_bytes = frame_bytes

    def read(self) -> Message:
        """The next message.

        Raises:
            zmq.Again: none has come.
            MemoryError: there is no memory for it.
            MessageRejected: it was dropped, with all of its frames.
        """
        head = self._pull.recv(zmq.NOBLOCK)
        try:
            return self._rest_of(head)
        except MessageRejected:
            while self._pull.getsockopt(zmq.RCVMORE):  # each frame is freed before the next is taken
                self._pull.recv(copy=False)
            raise

    def _rest_of(self, frame: bytes) -> Message:
        head = _Head.of(frame, self._limits)
        header = head.header
        if header is None:
            header = bytes(self._read(head.header_bytes))
            head.check_sizes(header, self._limits)
        elif len(frame) != head.length:
            raise MessageRejected(MALFORMED)
        if head.places:
            pairs = zip(head.sizes, head.places, strict=True)
            payloads = [self._read(size) if place == NOT_SHARED else memoryview(b"") for size, place in pairs]
        else:
            payloads = [self._read(size) for size in head.sizes]
        if self._pull.getsockopt(zmq.RCVMORE):
            raise MessageRejected(MALFORMED)
        return head.message(header, tuple(payloads))

    def _read(self, size: int) -> memoryview:
        """The next payload, of the size that was declared: one frame, or pieces that are copied into one buffer."""
        frame = self._next_frame()
        if len(frame) == size:
            return memoryview(bytearray(frame.buffer)) if size < _SMALL_BYTES else frame.buffer
        # All pieces are full, so their number is bounded by the declared size.
        piece = self._frame_bytes
        if piece is None or len(frame) != piece or size < piece:
            raise MessageRejected(MALFORMED)
        # A MemoryError is no fault of the message: it ends this process (EventLoop). If the message were dropped, its
        # sender would count on its arrival.
        whole = np.empty(size, np.uint8).data
        done = 0
        while True:
            whole[done : done + len(frame)] = frame.buffer
            done += len(frame)
            if done == size:
                return whole
            frame = self._next_frame()
            if len(frame) != min(piece, size - done):
                raise MessageRejected(MALFORMED)

    def _next_frame(self) -> zmq.Frame:
        if not self._pull.getsockopt(zmq.RCVMORE):
            raise MessageRejected(MALFORMED)
        return self._pull.recv(copy=False)
