"""Large payloads between processes of one host: lent, not sent; the receiver copies them out of the sender's memory.

A socket copies each byte twice, into the kernel and out of it; `process_vm_readv` (Linux 3.2) copies it once, as MPI
libraries do ("cross-memory attach"). The sender's buffer stays where it is until the receiver says that it has it.

What is lent has a slot: a number in the sender's memory that is set as long as the buffer is left alone. A reader takes
the buffer and then the slot, in one call; a slot that has another number by then says that the buffer may have been
given up in between, so that nothing of it counts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from dataclasses import dataclass

import numpy as np

LEND_BYTES, _MOST_BYTES = 256 * 1024, 1 << 30
"""From this size on lending is faster than a socket (benchmarks/links.py). A call of the kernel copies up to 2 GiB."""

_SLOTS = 1024
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1).value
_LOAN = struct.Struct("<iQQQq")


class LentGone(Exception):  # noqa: N818  (no error: the sender has ended, or closed its link)
    """The lender has taken back what it lent, or is gone."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Where something lent lies.

    Args:
        pid: of the process.
        address, num_bytes: of the buffer in it.
        slot: address of the slot.
        number: what the slot says as long as the loan is good; never 0.
    """

    pid: int
    address: int
    num_bytes: int
    slot: int
    number: int

    def encode(self) -> bytes:
        return _LOAN.pack(self.pid, self.address, self.num_bytes, self.slot, self.number)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Loan:
        return cls(*_LOAN.unpack(data))


class Lender:
    """What this process has lent. Any thread.

    Makes the process readable to others of the same user, where the kernel asks for that (Yama).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots = np.zeros(_SLOTS, np.int64)
        self._free = list(range(_SLOTS))
        self._lent: dict[int, tuple[int, int, np.ndarray]] = {}  # number -> slot, whom to, the buffer
        self._last = 0
        _allow_reading()

    def lend(self, view: memoryview, to: int) -> Loan | None:
        """A loan of a contiguous buffer, which stays alive as long; None: that is too much at once.

        Args:
            to: a number for the link that it is lent on.
        """
        array = np.frombuffer(view, np.uint8)
        with self._lock:
            if not self._free or array.nbytes > _MOST_BYTES:
                return None
            slot = self._free.pop()
            self._last += 1
            self._lent[self._last] = slot, to, array
            self._slots[slot] = self._last
            return Loan(os.getpid(), array.ctypes.data, array.nbytes, self._slots.ctypes.data + 8 * slot, self._last)

    def returned(self, number: int) -> None:
        """Whoever borrowed it has it. What was taken back before is ignored."""
        with self._lock:
            self._give_up(number)

    def take_back(self, to: int) -> None:
        """The link is gone: nothing that was lent on it may be read any more."""
        with self._lock:
            for number in [number for number, (_, other, _) in self._lent.items() if other == to]:
                self._give_up(number)

    def _give_up(self, number: int) -> None:
        if number in self._lent:
            slot, _, _ = self._lent[number]
            self._slots[slot] = 0  # before the memory goes to somebody else
            del self._lent[number]
            self._free.append(slot)

    @property
    def num_large(self) -> int:
        """How many payloads are lent now."""
        with self._lock:
            return sum(array.nbytes >= LEND_BYTES for _, _, array in self._lent.values())


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Reader:
    """Copies out of other processes' memory.

    Raises:
        OSError: this system has no process_vm_readv.
    """

    def __init__(self) -> None:
        try:
            self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        except AttributeError:
            raise OSError(errno.ENOSYS, "process_vm_readv") from None
        self._call.restype = ctypes.c_ssize_t
        self._call.argtypes = [
            *(ctypes.c_int, ctypes.POINTER(_Vector), ctypes.c_ulong),
            *(ctypes.POINTER(_Vector), ctypes.c_ulong, ctypes.c_ulong),
        ]

    def read(self, loan: Loan) -> memoryview:
        """The bytes of a loan, in new memory that may be written to.

        Raises:
            LentGone: it was taken back, or the process has ended.
            PermissionError: the kernel does not let this process read that one.
        """
        found, slot = np.empty(loan.num_bytes, np.uint8), np.zeros(1, np.int64)
        into = (_Vector * 2)((found.ctypes.data, loan.num_bytes), (slot.ctypes.data, slot.nbytes))
        out = (_Vector * 2)((loan.address, loan.num_bytes), (loan.slot, slot.nbytes))
        count = self._call(loan.pid, into, 2, out, 2, 0)  # in this order: the slot after the buffer
        if count < 0 and (number := ctypes.get_errno()) in (errno.EPERM, errno.ENOSYS):
            raise PermissionError(number, os.strerror(number), f"memory of process {loan.pid}")
        if count != loan.num_bytes + slot.nbytes:
            raise LentGone(f"process {loan.pid}: {os.strerror(ctypes.get_errno())}")
        if slot[0] != loan.number:
            raise LentGone(f"process {loan.pid} has taken back what it lent")
        return found.data


def lending() -> tuple[Lender, Reader] | tuple[None, None]:
    """Both sides, where the system can do it."""
    try:
        return Lender(), Reader()
    except OSError:
        return None, None


def _allow_reading() -> None:
    """Has Yama, a security module, let other processes of this user read this one; no effect where there is none."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return
    prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
