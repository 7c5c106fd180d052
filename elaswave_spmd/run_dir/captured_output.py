"""The output of workers while a live view is shown. It goes to a file without a name, and is then shown above the view.

It is a file and not a pipe, so that no worker ever waits for a reader, or fails when the reader is gone. It is in
memory, so that no worker fails when a disk is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
from typing import IO

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_AT_ONCE = 1 << 18  # bytes
_MOST = 1 << 22  # the number of bytes that may wait to be read before lines are left out


class CapturedOutput:
    """A file without a name for the output of workers.

    All processes write at its end. This process reads what is new, and frees the memory of what it has read. If more
    than 4 MiB wait, the oldest lines are left out, and a note in their place says how many.
    """

    def __init__(self) -> None:
        self._file = _file_in_memory()
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)
        self._read = 0
        self._rest = b""  # a line without its end
        self._left_out = 0  # lines

    def fileno(self) -> int:
        """The descriptor that other processes write to."""
        return self._file.fileno()

    @property
    def streams(self) -> dict[int, int]:
        """Descriptor of an output stream -> descriptor of the file, which replaces it in workers.

        It has only those of the streams 1 and 2 that are terminals.
        """
        return {stream: self.fileno() for stream in (1, 2) if os.isatty(stream)}

    @property
    def waiting(self) -> int:
        """The number of bytes that wait to be read; below 0 if a worker has emptied the file, by opening it anew."""
        return os.fstat(self.fileno()).st_size - self._read

    def lines(self, *, rest: bool = False) -> list[str]:
        """The new lines, without newlines. If there is much output, only some of them; later calls return the others.

        Args:
            rest: True for all new lines, and a last one that has no newline yet.
        """
        self.trim()
        note = f"({self._left_out:,} lines of workers are left out: more waited than is kept)"
        lines, self._left_out = [note.encode()] if self._left_out else [], 0
        while self.waiting > 0:
            lines += self._next(_AT_ONCE)
            if not rest:
                break
        if rest and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def trim(self) -> None:
        """Leave out the oldest lines, if more wait than are kept. Needed while nobody calls `lines`."""
        until = self._read + self.waiting - _MOST
        while self._read < until and self.waiting > 0:
            self._left_out += len(self._next(min(_AT_ONCE, until - self._read)))

    def _next(self, number: int) -> list[bytes]:
        """Read at most so many bytes. Returns the lines that end in them."""
        some = os.pread(self.fileno(), number, self._read)
        self._forget(len(some))
        *lines, self._rest = (self._rest + some).split(b"\n")
        if len(self._rest) > _AT_ONCE:  # progress bars may never end their line, so it is returned in parts
            lines.append(self._rest)
            self._rest = b""
        return lines

    def close(self) -> None:
        """Close the file; closing again is allowed. What processes write afterwards is lost."""
        self._file.close()

    def _forget(self, number: int) -> None:
        """Note that the next `number` bytes were read, and free their room if the file system can do that."""
        with contextlib.suppress(AttributeError, OSError):  # fallocate is Linux's; without it the file only grows
            fallocate = ctypes.CDLL(None).fallocate
            fallocate(self.fileno(), _PUNCH_HOLE, ctypes.c_int64(self._read), ctypes.c_int64(number))
        self._read += number


def _file_in_memory() -> IO[bytes]:
    try:
        return open(os.memfd_create("elaswave-output"), "r+b", buffering=0)
    except (AttributeError, OSError):  # a Python made for an old libc has no such function, and some sandboxes neither
        return tempfile.TemporaryFile(prefix="elaswave-output-", buffering=0)
