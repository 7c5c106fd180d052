"""A ring: records from one process to one other through shared memory, without a system call.

The writer's process owns the memory. Its *tail* counts the bytes that were ever written, the reader's *head* those that
were read; each is stored by one side only. A record is written before the tail moves over it, so that a writer that is
killed at any moment leaves whole records behind. A ring that is full takes nothing: its writer never waits.

A reader that is about to sleep sets `waiting`, then looks once more; a writer looks at `waiting` after it has moved the
tail, and rings the reader's bell if it is set. Between storing and looking both take a lock, which is a full barrier:
one of the two sees what the other has stored.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

_TAIL, _HEAD, _WAITING = 0, 8, 16  # 64-bit words; a cache line each
_CONTROL_BYTES = 192
_SKIP = (1 << 64) - 1  # in place of a record's length: the next one begins at the ring's start

RING_BYTES = 1 << 17
"""Bytes of a ring's records."""

MOST_RECORD_BYTES = RING_BYTES // 4
"""The largest record that a ring takes."""

MOST_RECORDS = RING_BYTES // 8
"""No ring holds more records: the length of each takes 8 bytes."""

MEMORY_BYTES = _CONTROL_BYTES + RING_BYTES
"""What a ring needs of shared memory."""


class RingWriter:
    """The writing end of a ring. Its caller lets one thread in at a time.

    Args:
        memory: `MEMORY_BYTES` of this process's shared memory, all zero at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_CONTROL_BYTES].cast("Q")
        self._bytes = memory[_CONTROL_BYTES:]
        self._lengths = self._bytes.cast("Q")
        self._tail = 0
        self._fence = threading.Lock()

    def write(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Write one record, the parts one after the other. False if it does not fit now: nothing is written then."""
        length = sum(map(len, parts))
        size = 8 + -(-length // 8) * 8
        start = self._tail % RING_BYTES
        skipped = RING_BYTES - start if start + size > RING_BYTES else 0
        if length > MOST_RECORD_BYTES or self._tail + skipped + size - self._words[_HEAD] > RING_BYTES:
            return False
        if skipped:
            self._lengths[start // 8] = _SKIP
            start = 0
        self._lengths[start // 8] = length
        at = start + 8
        for part in parts:
            self._bytes[at : at + len(part)] = part
            at += len(part)
        self._tail += skipped + size
        self._words[_TAIL] = self._tail
        return True

    def close(self) -> None:
        """Let go of the memory. It cannot be used after that."""
        for view in (self._words, self._lengths, self._bytes):
            view.release()

    def must_ring(self) -> bool:
        """True, once, if the reader sleeps and is to be woken. To be asked after every record."""
        with self._fence:
            pass
        if not self._words[_WAITING]:
            return False
        self._words[_WAITING] = 0
        return True


class RingReader:
    """The reading end of a ring. Its caller lets one thread in at a time.

    Args:
        memory: the writer's, mapped here.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_CONTROL_BYTES].cast("Q")
        self._bytes = memory[_CONTROL_BYTES:]
        self._lengths = self._bytes.cast("Q")
        self._head = 0

    def read(self) -> bytearray | None:
        """The next record; None if there is none.

        Raises:
            ValueError: what is there is no record. The ring cannot be read any more.
        """
        tail = self._words[_TAIL]
        if tail == self._head:
            return None
        if not 0 < tail - self._head <= RING_BYTES:
            raise ValueError(f"records between {self._head} and {tail}, in a ring of {RING_BYTES} bytes")
        start = self._head % RING_BYTES
        length = self._lengths[start // 8]
        if length == _SKIP:
            self._head += RING_BYTES - start
            start, length = 0, self._lengths[0]
        size = 8 + -(-length // 8) * 8
        if length > MOST_RECORD_BYTES or start + size > RING_BYTES or self._head + size > tail:
            raise ValueError(f"a record of {length} bytes at {start}, between {self._head} and {tail}")
        record = bytearray(self._bytes[start + 8 : start + 8 + length])
        self._head += size
        self._words[_HEAD] = self._head
        return record

    def wait(self) -> None:
        """Ask to be woken at the next record. To be followed by a barrier, and by `has_record`."""
        self._words[_WAITING] = 1

    def is_awake(self) -> None:
        """Ask not to be woken."""
        self._words[_WAITING] = 0

    def has_record(self) -> bool:
        """True if there is one."""
        return self._words[_TAIL] != self._head

    def close(self) -> None:
        """Let go of the memory. It cannot be used after that."""
        for view in (self._words, self._lengths, self._bytes):
            view.release()


class Bell:
    """A bell that wakes a process that waits for records: a named pipe into which others write a byte.

    Args:
        path: of the pipe; made here. `close` removes it.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: str) -> None:
        os.mkfifo(path, 0o600)
        self._path = path
        # For writing as well: a pipe without a writer is readable for ever, and one without a reader cannot be opened.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def quiet(self) -> None:
        """Take out what was written."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close and remove the pipe."""
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class BellRope:
    """Another process's bell.

    Raises:
        OSError: there is none, or that process has ended.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the process; never waits. Nothing happens if it has ended."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):  # a full pipe is readable as well
            if self._fd >= 0:
                os.write(self._fd, b"\0")

    def close(self) -> None:
        """Let go of it. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
