"""The sending half of a link between processes of one host that share memory; `shared_inbox.py` is the receiving half.

Messages go by a ring of the link (rings.py), payloads are written once into blocks that the receiver reads where they
lie (shared_memory.py). What finds no room there is left to the link's socket; numbers keep the order.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Sequence

import numpy as np

from elaswave_spmd.runtime.transport.frames import NOT_SHARED, UNORDERED, record_of
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES, BellRope, RingWriter
from elaswave_spmd.runtime.transport.shared_memory import SharedMemory

INLINE_BYTES = 4096
"""Up to this size a payload is a part of its message, also where memory is shared."""

SHARED_RING = struct.Struct("<iiQQQ")
"""Where a link's ring is: pid, descriptor, inode and bytes of the memory, and the offset of the ring in it."""

_OWNER = re.compile(r"-(\d+)$")
"""How the address of a process on this host ends: with its process id."""

BELL = ".bell"
"""How the name of the bell of a process ends, which begins as that of its Unix socket."""


class SharedWay:
    """The way of a link through this process's shared memory: a ring for its messages, and blocks for their payloads.

    It is used from `open` on, which is called when the receiver has mapped the memory.

    Args:
        memory: of this process.
        ring_at: offset of the link's ring.
        number: of the link.
        address: of the receiver, which ends with its process id.
    """

    def __init__(self, memory: SharedMemory, ring_at: int, number: int, address: str) -> None:
        self._memory = memory
        self._ring_at = ring_at
        self._number = number
        self._bell_path = address.removeprefix("ipc://") + BELL
        self._ring = RingWriter(memory.view[ring_at : ring_at + MEMORY_BYTES])
        # It may map the memory without a word of it, as one does that is stopped meanwhile.
        owner = _OWNER.search(address)
        self._receiver = int(owner[1]) if owner else None
        self._rope: BellRope | None = None
        self._next_number = 0
        self.is_open = False

    def location(self) -> bytes:
        """The location, which the receiver needs in order to map it."""
        at = self._memory.location
        return SHARED_RING.pack(at.pid, at.fd, at.inode, at.num_bytes, self._ring_at)

    def open(self, receiver: int) -> None:
        """The receiver, a process, has mapped the memory."""
        self._receiver = receiver
        if not self.is_open:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self._rope = BellRope(self._bell_path)
                self.is_open = True

    def place(self, view: memoryview) -> int:
        """Copy a payload into a block. Returns its place; NOT_SHARED if it is small, or if there is no room."""
        if not self.is_open or view.nbytes <= INLINE_BYTES:
            return NOT_SHARED
        return self._memory.place(view, self._number) or NOT_SHARED

    def lend(self, num_bytes: int) -> np.ndarray | None:
        """Memory for a payload that is yet to be written; None if there is none for it. See `SharedMemory.lend`."""
        return self._memory.lend(num_bytes, self._number) if self.is_open and num_bytes > INLINE_BYTES else None

    def next_number(self, ordered: bool) -> int:
        """The number of the next message."""
        if not ordered:
            return UNORDERED
        self._next_number += 1
        return self._next_number - 1

    def write(self, head: bytes, views: Sequence[memoryview]) -> bool:
        """Send a message by the ring. False if it has no room, or is not open."""
        return self.is_open and self._ring.write(record_of(head, views))

    def wake(self) -> None:
        """Wake the receiver if it sleeps. To be called after `write`."""
        if self._ring.must_ring() and self._rope is not None:
            self._rope.ring()

    def close(self) -> None:
        """The link is closed. It cannot be used after that."""
        self.is_open = False
        self._ring.close()
        if self._receiver is not None:  # else it may live and have mapped the memory: nobody else gets the ring
            self._memory.close_link(self._number, self._receiver)
        if self._rope is not None:
            self._rope.close()
