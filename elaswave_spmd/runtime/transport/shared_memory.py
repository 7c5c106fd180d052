"""Memory that processes of one host share: its owner writes payloads into it, and others map it and read them there.

The memory is an anonymous file (`memfd_create`, Linux 3.17). Other processes open it through the owner's descriptor in
/proc, which the kernel allows to processes of the same user. It is freed when no process has it mapped any more. So
what was sent stays readable after the owner's death, and nothing is left in a file system, whichever process is killed.

A payload is in a *block*. Its owner sets the block's mark when it hands the block over, and the receiver clears the
mark when nothing refers to the payload any more; only then is the block used again. The blocks of a receiver whose
process has ended are free at once. Those of a receiver that only seems lost are not, as it may still read them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import threading
import weakref
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_NAME = "elaswave"
_LINE = 64
"""Blocks begin at multiples of this many bytes: a cache line, and what AVX-512 loads at once."""
_PAGE = mmap.PAGESIZE
_MOST_BYTES = 1 << 36  # size of the memory of one process; the machine provides pages only as they are first written
_LOOKED_AT = 8  # at most this many blocks of the right size are checked before a new one is made
_TRIM_EVERY = 4096  # after this many blocks were handed over, pages of blocks that are long unused are given back


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """Where other processes find the shared memory of a process.

    Args:
        pid: the owner's process id.
        fd: the owner's descriptor of the memory.
        inode: the inode of the memory. It is compared when the memory is opened, as a new process may get the process
            id of one that has ended.
        num_bytes: the size of the memory.
    """

    pid: int
    fd: int
    inode: int
    num_bytes: int


def why_unsupported() -> str:
    """The reason why no process of this machine can share memory; empty if no such reason is known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        # Rings and marks rely on stores becoming visible to other cores in order. This was tried on x86-64 only.
        return f"it relies on the memory order of x86-64, and this is {platform.machine()}"
    return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"


def why_not_shared() -> str:
    """The reason why processes like this one cannot share memory, found by trying it; empty if they can."""
    if why := why_unsupported():
        return why
    try:
        memory = SharedMemory()
        try:
            PeerMemory(memory.location)
        finally:
            memory.close()
    except OSError as error:  # a limit of this process (`ulimit`), or there is no /proc
        return f"a process may not make it, or others not map it ({error})"
    return ""


class SharedMemory:
    """The shared memory of this process, and the blocks in it. Every method may be called from any thread.

    Args:
        num_bytes: the size of the memory; 0 for the default, which is as large as the machine's memory, or 64 GiB.

    Raises:
        OSError: the system does not allow this process to make it.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        num_bytes = num_bytes or min(_MOST_BYTES, os.sysconf("SC_PHYS_PAGES") * _PAGE)
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, num_bytes)
            self._map = _mapped(self._fd, num_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.view = memoryview(self._map)
        self.location = MemoryLocation(os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes)
        self._lock = threading.Lock()  # guards the rest
        self._end = _LINE  # end of the part that was ever used. The first line stays unused: offset 0 means "no place"
        self._blocks: dict[int, deque[_Block]] = {}  # by size; the block that was handed over longest ago comes first
        self._ended: dict[int, int] = {}  # number of a closed link -> process id of its receiver, which may be alive
        self._dead: set[int] = set()  # numbers of the links whose receivers have ended
        self._replaced: set[int] = set()  # numbers of the links that a newer link to the same receiver has replaced
        self._reserved: dict[int, tuple[int, int]] = {}  # offset -> (bytes, number of the link)
        self._number = 0  # number of the block that was handed over last
        self._lent: dict[int, _Lent] = {}  # by the offset of the block
        # Blocks that were lent and are not referred to any more. `_give_back` adds to it without the lock.
        self._returned: deque[_Block] = deque()
        self._address = _address(self.view)
        self._pid = os.getpid()

    def reserve(self, num_bytes: int, link: int) -> int | None:
        """Reserve zeroed memory for a link, until its receiver has ended or a newer link has replaced it.

        Returns:
            The offset of the memory; None if not enough is left.
        """
        with self._lock:
            if self._fd < 0:
                return None
            old = next(
                (at for at, (size, of) in self._reserved.items() if size == num_bytes and self._is_unread(of)), None
            )
            at = self._reserve(num_bytes) if old is None else old
            if old is not None:
                self._replaced.discard(self._reserved[old][1])
                self.view[old : old + num_bytes] = bytes(num_bytes)
            if at is not None:
                self._reserved[at] = num_bytes, link
            return at

    def place(self, payload: memoryview, link: int) -> int | None:
        """Copy a payload into a block, and hand the block over to the receiver at the other end of a link.

        Args:
            payload: a contiguous buffer.
            link: the number of the link, by which `close_link` finds its blocks.

        Returns:
            The payload's offset, a multiple of 64; None if there is no room.
        """
        num_bytes = payload.nbytes
        lent = self._unsent(payload, link) if self._lent else None
        block = self._take(num_bytes, link) if lent is None else lent.block
        if block is None:
            return None
        if lent is None:
            self.view[block.at : block.at + num_bytes] = payload.cast("B")
        # Listed only after it is written: if this link is closed meanwhile, another one could take a listed block.
        with self._lock:
            self._number = block.number = self._number + 1
            self._map[block.at - _LINE] = 1
            if lent is None:
                self._blocks[block.num_bytes].append(block)
            if not block.number % _TRIM_EVERY:
                self._trim()
        return block.at

    def lend(self, num_bytes: int, link: int) -> np.ndarray | None:
        """Lend a block for a payload that the caller writes and sends once: `place` hands it over without a copy.

        The block is used again when neither this process nor the receiver refers to it any more.

        Returns:
            uint8 [num_bytes]; None if there is no block.
        """
        if (block := self._take(num_bytes, link)) is None:
            return None
        array = np.frombuffer(self._map, np.uint8, num_bytes, block.at)
        lent = self._lent[block.at] = _Lent(array, self._give_back)
        lent.block, lent.is_sent = block, False
        return array

    def close_link(self, link: int, receiver: int) -> None:
        """A link is closed. Its blocks become free when the receiver has released them or has ended.

        The memory that was reserved for its ring becomes free when the receiver has ended.

        Args:
            link: the number of the link.
            receiver: the process id of the receiver.
        """
        with self._lock:
            self._ended[link] = receiver

    def replace_links(self, links: Collection[int]) -> None:
        """The receivers of these links have newer links, and do not read the memory that was reserved for these any
        more. They may still read blocks of them."""
        with self._lock:
            self._replaced |= {link for _, link in self._reserved.values() if link in links}

    @property
    def num_held(self) -> int:
        """The number of blocks that receivers have not released yet."""
        with self._lock:
            self._take_back()
            return sum(not self._is_free(block) for blocks in self._blocks.values() for block in blocks)

    @property
    def num_used_bytes(self) -> int:
        """The size in bytes of the part of the memory that was ever used."""
        return self._end

    def close(self) -> None:
        """Close the memory: no process can map it from now on. Those that have mapped it keep it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            with contextlib.suppress(BufferError):  # a part of it is still in use
                self.view.release()
                self._map.close()

    def _take(self, num_bytes: int, link: int) -> _Block | None:
        """Take a block that nobody holds; None if there is none."""
        with self._lock:
            self._take_back()
            block = self._free_block(_rounded(num_bytes)) if self._fd >= 0 else None
            if block is not None:
                self._map[block.at - _LINE] = 0  # its last receiver may have ended without letting go of it
                block.link, block.trimmed = link, False
            return block

    def _take_back(self) -> None:
        """Add the blocks that were lent, and are not referred to here any more, to `_blocks`."""
        while self._returned:
            block = self._returned.popleft()
            self._blocks[block.num_bytes].append(block)

    def _unsent(self, payload: memoryview, link: int) -> _Lent | None:
        """The lent block in which a payload of this link is; None if it is in none, or was sent before."""
        lent = self._lent.get(_address(payload) - self._address)
        if lent is None or lent.is_sent or lent.block.link != link:
            return None
        lent.is_sent = True
        return lent

    def _give_back(self, lent: _Lent) -> None:
        # Called when the last reference is dropped, in any thread and at any moment, even while that thread holds the
        # lock: so it takes no lock. It does nothing in a forked process, as the block is the parent's.
        if os.getpid() == self._pid:
            del self._lent[lent.block.at]
            self._returned.append(lent.block)

    def _reserve(self, num_bytes: int) -> int | None:
        at, end = self._end, self._end + -(-num_bytes // _LINE) * _LINE
        if end > len(self.view) or not self._has_pages(at, num_bytes):
            return None
        self._end = end
        return at

    def _has_pages(self, at: int, num_bytes: int) -> bool:
        """Allocate the pages of a part now; False if the machine has no memory for them.

        Without this, the lack of memory would only show when the part is written to, as SIGBUS.
        """
        try:
            os.posix_fallocate(self._fd, at, num_bytes)
        except OSError:
            return False
        return True

    def _free_block(self, num_bytes: int) -> _Block | None:
        """A block that nobody holds, taken out of `_blocks`."""
        blocks = self._blocks.setdefault(num_bytes, deque())
        for _ in range(min(_LOOKED_AT, len(blocks))):
            if self._is_free(blocks[0]) and (not blocks[0].trimmed or self._has_pages(blocks[0].at, num_bytes)):
                return blocks.popleft()
            blocks.rotate(-1)
        at = self._reserve(_LINE + num_bytes)
        return None if at is None else _Block(at + _LINE, num_bytes)

    def _is_free(self, block: _Block) -> bool:
        return not self._map[block.at - _LINE] or self._has_ended(block.link)

    def _is_unread(self, link: int) -> bool:
        """True if the memory that was reserved for a link is not read any more."""
        return link in self._replaced or self._has_ended(link)

    def _has_ended(self, link: int) -> bool:
        """True if a link is closed and the process of its receiver has ended.

        Only closed links are checked, one file in /proc each: there may be many receivers.
        """
        receiver = self._ended.get(link)
        if receiver is not None and not Path(f"/proc/{receiver}").exists():
            del self._ended[link]
            self._dead.add(link)
        return link in self._dead

    def _trim(self) -> None:
        """Give the pages of free blocks that were not used for long back to the machine."""
        for blocks in self._blocks.values():
            for block in blocks:
                is_idle = not block.trimmed and block.number <= self._number - _TRIM_EVERY
                if is_idle and block.num_bytes >= 4 * _PAGE and self._is_free(block):
                    first, last = -(-block.at // _PAGE) * _PAGE, (block.at + block.num_bytes) // _PAGE * _PAGE
                    with contextlib.suppress(OSError):
                        self._map.madvise(mmap.MADV_REMOVE, first, last - first)
                    block.trimmed = True


_PF_EXITING = 0x4  # of a process's flags in /proc (Linux)


def is_ending(pid: int) -> bool:
    """True if a process has ended, or is at its end: its descriptors may be gone already.

    The kernel closes the descriptors first, and lists the process in /proc until its parent has taken note of its end.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    fields = stat.rpartition(")")[2].split()  # from the state on; the name before it may contain anything
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


class PeerMemory:
    """The shared memory of another process, mapped here.

    Args:
        location: where the memory is, as its owner has sent it.

    Raises:
        FileNotFoundError: the process has ended, or has closed its memory.
        OSError: the process belongs to another user, or its descriptor is not of such a memory.
    """

    def __init__(self, location: MemoryLocation) -> None:
        path = f"/proc/{location.pid}/fd/{location.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise OSError(f"{path} is no shared memory of a worker")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (location.inode, location.num_bytes):
                raise OSError(f"{path} is not the memory of {location.num_bytes:,} bytes that was reported")
            self._map = _mapped(fd, location.num_bytes)
        finally:
            os.close(fd)
        self.view = memoryview(self._map)
        self._taken: dict[int, _Taken] = {}
        self._pid = os.getpid()

    def payload(self, at: int, num_bytes: int) -> memoryview:
        """The payload at an offset, in place. Its block is released when nothing refers to the payload any more.

        Raises:
            ValueError: there can be no block at this offset.
        """
        if at % _LINE or at < 2 * _LINE or at + num_bytes > len(self.view):
            raise ValueError(f"no block of {num_bytes} bytes is at {at}")
        array = np.frombuffer(self._map, np.uint8, num_bytes, at)
        taken = self._taken[at] = _Taken(array, self._let_go)
        taken.at = at
        return array.data

    def _let_go(self, taken: _Taken) -> None:
        # Called when the last reference is dropped, in any thread and at any moment: so it takes no lock.
        if os.getpid() != self._pid:
            return  # in a process that a user's code has forked: the parent still uses the block
        if self._taken.get(taken.at) is taken:
            del self._taken[taken.at]
        self._map[taken.at - _LINE] = 0


class _Taken(weakref.ref[np.ndarray]):
    """A reference to a payload's array that knows its offset."""

    __slots__ = ("at",)
    at: int


@dataclass(slots=True)
class _Block:
    """A block of this process's memory.

    Args:
        at: the offset of the payload. The mark is the byte 64 bytes before it: 1 while a receiver may read the payload.
        num_bytes: the largest payload that fits.
        link: the number of the link by which it was handed over last.
        number: when it was handed over last, by the count of all blocks that were.
        trimmed: True if its pages were given back to the machine since.
    """

    at: int
    num_bytes: int
    link: int = -1
    number: int = 0
    trimmed: bool = False


class _Lent(weakref.ref[np.ndarray]):
    """A reference to the array over a lent block. While it exists the block is not in `_blocks`."""

    __slots__ = ("block", "is_sent")
    block: _Block
    is_sent: bool


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a file. It is left out of core dumps, which would read, and so allocate, all of it that was never used."""
    found = mmap.mmap(fd, num_bytes)
    found.madvise(mmap.MADV_DONTDUMP)
    return found


def _address(memory: memoryview) -> int:
    """The address of a buffer in this process."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


def _rounded(num_bytes: int) -> int:
    """The size of the block for a payload: at most an eighth larger, so that only few sizes of blocks occur."""
    step = max(_LINE, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-max(1, num_bytes) // step) * step
