"""The output of workers while a live view is shown. It goes to a file without a name, and is then shown above the view.

It is a file and not a pipe, so that no worker ever waits for a reader, or fails when the reader is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile

_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_AT_ONCE = 1 << 18  # bytes


class CapturedOutput:
    """A file without a name for the output of workers.

    All processes write at its end. This process reads what is new, and frees the disk space of what it has read.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="elaswave-output-")  # noqa: SIM115
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)
        self._read = 0
        self._rest = b""  # a line without its end

    def fileno(self) -> int:
        """The descriptor that other processes write to."""
        return self._file.fileno()

    @property
    def streams(self) -> dict[int, int]:
        """Descriptor of an output stream -> descriptor of the file, which replaces it in workers.

        It has only those of the streams 1 and 2 that are terminals.
        """
        return {stream: self.fileno() for stream in (1, 2) if os.isatty(stream)}

    def lines(self, *, rest: bool = False) -> list[str]:
        """The new lines, without newlines. If there is much output, only some of them; later calls return the others.

        Args:
            rest: True for all new lines, and a last one that has no newline yet.
        """
        parts = [self._rest]
        while some := os.pread(self.fileno(), _AT_ONCE, self._read):
            self._forget(len(some))
            parts.append(some)
            if not rest:
                break
        *lines, self._rest = b"".join(parts).split(b"\n")
        # Progress bars may never end their line, so a line that is too long is returned in parts.
        if self._rest and (rest or len(self._rest) > _AT_ONCE):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        """Close the file; closing again is allowed. What processes write afterwards is lost."""
        self._file.close()

    def _forget(self, number: int) -> None:
        """Note that the next `number` bytes were read, and free their disk space if the file system can do that."""
        with contextlib.suppress(AttributeError, OSError):  # fallocate is Linux's; without it the file only grows
            fallocate = ctypes.CDLL(None).fallocate
            fallocate(self.fileno(), _PUNCH_HOLE, ctypes.c_int64(self._read), ctypes.c_int64(number))
        self._read += number
