"""Cross-memory copies: a receiver on the same host copies a large payload straight out of the sender's memory.

A socket copies each byte twice, into the kernel and out of it; `process_vm_readv` (Linux 3.2) copies it once, as MPI
libraries do ("cross-memory attach"). Only a `RemoteBuffer`, which says where the bytes lie, is sent over the socket.
The sender keeps the buffer alive and unchanged until the receiver reports that it has the copy.

Invariant: a reader never returns bytes of a buffer that was withdrawn meanwhile. Each offered buffer has a slot, a
number in the sender's memory that is set for as long as the offer stands. A reader copies the buffer first and the slot
after it, in one system call; if the slot holds another number by then, the buffer may have been reused in between, and
the copy is discarded.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from dataclasses import dataclass

import numpy as np

CROSS_MEMORY_BYTES = 256 * 1024
"""From this size on a cross-memory copy is faster than a socket (benchmarks/links.py)."""

_MAX_BYTES = 1 << 30  # one process_vm_readv copies at most 2 GiB, and more than one would break the invariant above
_NUM_SLOTS = 1024
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h: "Yama" in ASCII
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
_REMOTE_BUFFER = struct.Struct("<iQQQq")


class BufferWithdrawn(Exception):  # noqa: N818  (an expected event: the sender has ended, or closed its link)
    """The offered buffer was withdrawn before it was read, or its process has ended."""


@dataclass(frozen=True, slots=True)
class RemoteBuffer:
    """The location of an offered buffer in another process's memory.

    Args:
        pid: process id of the sender.
        address: of the buffer in that process.
        num_bytes: size of the buffer.
        slot: address of the offer's slot in that process.
        number: the value of the slot for as long as the offer stands; never 0.
    """

    pid: int
    address: int
    num_bytes: int
    slot: int
    number: int

    def encode(self) -> bytes:
        """The location as a fixed number of bytes, for a message."""
        return _REMOTE_BUFFER.pack(self.pid, self.address, self.num_bytes, self.slot, self.number)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> RemoteBuffer:
        """The inverse of `encode`.

        Raises:
            struct.error: `data` has another size.
            ValueError: no offer is of so many bytes, or has this number.
        """
        buffer = cls(*_REMOTE_BUFFER.unpack(data))
        if buffer.num_bytes > _MAX_BYTES or buffer.number <= 0:
            raise ValueError(f"no offered buffer: {buffer}")
        return buffer


class OfferedBuffers:
    """The buffers of this process that others may copy. Every method may be called from any thread.

    Creating one makes the process readable to other processes of the same user, where the kernel asks for that (Yama).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = np.zeros(_NUM_SLOTS, np.int64)
        self._free_slots = list(range(_NUM_SLOTS))
        self._offers: dict[int, tuple[int, int, np.ndarray]] = {}  # number -> (slot, link, the buffer, kept alive)
        self._last_number = 0
        _allow_reading()

    def offer(self, view: memoryview, link: int) -> RemoteBuffer | None:
        """Offer a contiguous buffer on a link, and keep it alive until `release` or `withdraw`.

        Args:
            link: number of the link on which the location is sent.

        Returns:
            None if the buffer is too large or all slots are in use; the payload must go through the socket then.
        """
        array = np.frombuffer(view, np.uint8)  # also keeps the memory alive: the array refers to the view's owner
        with self._lock:
            if not self._free_slots or array.nbytes > _MAX_BYTES:
                return None
            slot = self._free_slots.pop()
            self._last_number += 1
            self._offers[self._last_number] = slot, link, array
            self._slots[slot] = self._last_number
            slot_address = self._slots.ctypes.data + 8 * slot
            return RemoteBuffer(os.getpid(), array.ctypes.data, array.nbytes, slot_address, self._last_number)

    def release(self, number: int) -> None:
        """Drop an offer whose receiver has its copy. A number that was withdrawn before is ignored."""
        with self._lock:
            self._drop(number)

    def withdraw(self, link: int) -> None:
        """Drop all offers of a closed link: nothing that was offered on it may be read any more."""
        with self._lock:
            for number in [number for number, (_, other, _) in self._offers.items() if other == link]:
                self._drop(number)

    def _drop(self, number: int) -> None:
        if number in self._offers:
            slot, _, _ = self._offers[number]
            # The slot must change before the memory can be reused: that order is what readers rely on.
            self._slots[slot] = 0
            del self._offers[number]
            self._free_slots.append(slot)

    @property
    def num_large(self) -> int:
        """The number of large payloads that receivers have not copied yet."""
        with self._lock:
            return sum(array.nbytes >= CROSS_MEMORY_BYTES for _, _, array in self._offers.values())


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class RemoteReader:
    """Copies offered buffers out of other processes' memory.

    Raises:
        OSError: this system has no process_vm_readv.
    """

    def __init__(self) -> None:
        try:
            self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        except AttributeError:
            raise OSError(errno.ENOSYS, "process_vm_readv") from None
        self._readv.restype = ctypes.c_ssize_t
        self._readv.argtypes = [
            *(ctypes.c_int, ctypes.POINTER(_IoVector), ctypes.c_ulong),
            *(ctypes.POINTER(_IoVector), ctypes.c_ulong, ctypes.c_ulong),
        ]

    def read(self, buffer: RemoteBuffer) -> memoryview:
        """The bytes of an offered buffer, in new memory that may be written to.

        Raises:
            BufferWithdrawn: the offer no longer stands, or the process has ended.
            PermissionError: the kernel does not let this process read that one.
        """
        try:
            copy = np.empty(buffer.num_bytes, np.uint8)
        except MemoryError as error:
            raise BufferWithdrawn(f"process {buffer.pid}: {buffer.num_bytes:,} bytes do not fit here") from error
        slot = np.zeros(1, np.int64)
        local = (_IoVector * 2)((copy.ctypes.data, buffer.num_bytes), (slot.ctypes.data, slot.nbytes))
        remote = (_IoVector * 2)((buffer.address, buffer.num_bytes), (buffer.slot, slot.nbytes))
        # The kernel copies the vectors in this order: the slot after the buffer, as the module's invariant needs.
        count = self._readv(buffer.pid, local, 2, remote, 2, 0)
        if count < 0 and (number := ctypes.get_errno()) in (errno.EPERM, errno.ENOSYS):
            raise PermissionError(number, os.strerror(number), f"memory of process {buffer.pid}")
        if count != buffer.num_bytes + slot.nbytes:
            raise BufferWithdrawn(f"process {buffer.pid}: {os.strerror(ctypes.get_errno())}")
        if slot[0] != buffer.number:
            raise BufferWithdrawn(f"process {buffer.pid} has withdrawn the buffer")
        return copy.data


def open_cross_memory() -> tuple[OfferedBuffers, RemoteReader] | tuple[None, None]:
    """Both ends of cross-memory copies, or (None, None) on a system without them."""
    try:
        return OfferedBuffers(), RemoteReader()
    except OSError:
        return None, None


def _allow_reading() -> None:
    """Tell Yama, a Linux security module, that other processes of this user may read this one; else no effect."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return
    prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
