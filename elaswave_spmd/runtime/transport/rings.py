"""A ring buffer: passes records from one process to another through shared memory, without a system call.

The writer's process owns the memory. The *tail* counts the bytes that were ever written, and only the writer stores it;
the *head* counts the bytes that were ever read, and only the reader stores it. A record is written before the tail
moves past it, so a writer that is killed at any moment leaves only whole records behind. If a record does not fit
nothing is written: the writer never waits.

A reader that is about to sleep sets `waiting`, then checks once more for a record. A writer moves the tail, then checks
`waiting`, and rings the reader's bell if it is set. Between their store and their check both take a lock, which is a
full memory barrier. So at least one of the two sees what the other has stored, and no wake-up is lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence

_TAIL, _HEAD, _WAITING = 0, 8, 16  # 64-bit words; a cache line each
_CONTROL_BYTES = 192
_SKIP = (1 << 64) - 1  # in place of a record's length: the next record is at the start of the ring

RING_BYTES = 1 << 17
"""Bytes of a ring's records."""

MOST_RECORD_BYTES = RING_BYTES // 4
"""The largest record that a ring takes."""

MOST_RECORDS = RING_BYTES // 8
"""The most records that a ring can hold, as each takes at least the 8 bytes of its length."""

MEMORY_BYTES = _CONTROL_BYTES + RING_BYTES
"""The bytes of shared memory that a ring takes."""


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
        """Write one record that consists of these parts. Returns False, and writes nothing, if it does not fit now."""
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
        """True, once, if the reader sleeps and has to be woken. To be called after every record."""
        with self._fence:  # the barrier between storing the tail and looking at `waiting`
            pass
        if not self._words[_WAITING]:
            return False
        self._words[_WAITING] = 0
        return True


class RingReader:
    """The reading end of a ring. Its caller lets one thread in at a time.

    Args:
        memory: the `MEMORY_BYTES` of the writer, mapped into this process.
    """

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_CONTROL_BYTES].cast("Q")
        self._bytes = memory[_CONTROL_BYTES:]
        self._lengths = self._bytes.cast("Q")
        self._head = 0

    def read(self) -> bytearray | None:
        """The next record; None if there is none.

        Raises:
            ValueError: there is no valid record at the head. The ring cannot be read any more.
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
        """Ask the writer for a wake-up at its next record. A barrier and `has_record` must follow."""
        self._words[_WAITING] = 1

    def is_awake(self) -> None:
        """Withdraw the request of `wait`, so that the writer need not ring the bell."""
        self._words[_WAITING] = 0

    def has_record(self) -> bool:
        """True if there is a record to read."""
        return self._words[_TAIL] != self._head

    def close(self) -> None:
        """Let go of the memory. It cannot be used after that."""
        for view in (self._words, self._lengths, self._bytes):
            view.release()


class Bell:
    """The bell of a process that sleeps until a record arrives: a named pipe into which other processes write a byte.

    Args:
        path: the path of the pipe. The pipe is made here, and `close` removes it.

    Raises:
        OSError: the pipe cannot be made.
    """

    def __init__(self, path: str) -> None:
        os.mkfifo(path, 0o600)
        self._path = path
        # Opened for writing as well, so that it always has a writer: a pipe whose last writer has gone stays readable.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def quiet(self) -> None:
        """Read everything that was written into the pipe, so that it is not readable any more."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close and remove the pipe."""
        os.close(self.fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class BellRope:
    """The writing end of another process's bell.

    Args:
        path: the path of its pipe.

    Raises:
        OSError: there is no such pipe, or its process has ended.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the process. Never waits; does nothing if the process has ended."""
        # BlockingIOError: the pipe is full, so the process is being woken already.
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._fd >= 0:
                os.write(self._fd, b"\0")

    def close(self) -> None:
        """Close this end of the pipe. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
