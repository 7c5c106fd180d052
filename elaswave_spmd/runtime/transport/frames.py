"""Form of a message on a link, and how one is received: sizes are declared first, and checked before memory is taken.

The first frame of a message is its head: sender, kind, sizes of header and payloads, and mostly the header itself. The
payloads follow, one frame each. Over TCP no frame is larger than `FRAME_BYTES`: libzmq reads a frame whole, also one of
a connection that is not authenticated yet, so the largest frame is what a stranger can make a process hold. Larger
headers and payloads go in pieces, each but the last of exactly that size, and are put together in one buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
# libzmq reads from a connection in batches of 8 KiB, and delivers the messages within a batch at any byte offset.
# Payloads below this size are therefore copied, which aligns them; larger ones have memory of their own.
_SMALL_BYTES = 16 * 1024


class MessageRejected(Exception):  # noqa: N818  (an expected event: it is counted)
    """A message that is dropped; its text is the reason by which it is counted."""


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


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it arrived; see `Links` for the kinds.

    Args:
        link: number of the sender's link; a later link of a sender has a larger one.
    """

    sender: int
    link: int
    kind: int
    header: bytes
    payloads: tuple[memoryview, ...]


def frames_of(
    sender: int, link: int, kind: int, header: bytes, views: Sequence[memoryview], frame_bytes: int | None
) -> tuple[bytes, list[memoryview]]:
    """The head of a message, and the frames that follow it.

    Args:
        link: number of the link that it goes over.
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
            MessageRejected: it was dropped, with all of its frames.
        """
        head = self._pull.recv(zmq.NOBLOCK)
        try:
            return self._rest_of(head)
        except MessageRejected:
            while self._pull.getsockopt(zmq.RCVMORE):  # each frame is freed before the next is taken
                self._pull.recv(copy=False)
            raise

    def _rest_of(self, head: bytes) -> Message:
        if len(head) < _PREFIX.size:
            raise MessageRejected(MALFORMED)
        sender, link, kind, count, header_bytes = _PREFIX.unpack_from(head)
        if header_bytes > self._limits.header_bytes:
            raise MessageRejected(TOO_LARGE)
        start = _PREFIX.size + _SIZE_BYTES * count
        here = len(head) - start
        if here not in (0, header_bytes):
            raise MessageRejected(MALFORMED)
        sizes = struct.unpack_from(f"<{count}Q", head, _PREFIX.size)
        header = head[start:] if here == header_bytes else bytes(self._read(header_bytes))
        if sizes and max(sizes) > self._limits.payload_limit(header):
            raise MessageRejected(TOO_LARGE)
        payloads = tuple([self._read(size) for size in sizes])
        if self._pull.getsockopt(zmq.RCVMORE):
            raise MessageRejected(MALFORMED)
        return Message(sender, link, kind, header, payloads)

    def _read(self, size: int) -> memoryview:
        """The next payload, of the size that was declared: one frame, or pieces that are copied into one buffer."""
        frame = self._next_frame()
        if len(frame) == size:
            return memoryview(bytearray(frame.buffer)) if size < _SMALL_BYTES else frame.buffer
        # All pieces are full, so their number is bounded by the declared size.
        piece = self._frame_bytes
        if piece is None or len(frame) != piece or size < piece:
            raise MessageRejected(MALFORMED)
        try:
            whole = np.empty(size, np.uint8).data
        except MemoryError:
            raise MessageRejected(TOO_LARGE) from None
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
