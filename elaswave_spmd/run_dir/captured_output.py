"""The output of workers while a live view is shown: it goes to a file without a name, and from there above the view.

A file, not a pipe: no worker ever waits for its reader, and none fails when the reader is gone.
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
    """The file. Processes write at its end, this one reads what is new, which takes no room on the disk any more."""

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
        """Descriptor of an output stream that is a terminal -> that of the file, which takes its place in workers."""
        return {stream: self.fileno() for stream in (1, 2) if os.isatty(stream)}

    def lines(self, *, rest: bool = False) -> list[str]:
        """The lines that are new, without their ends, a part of them if they are many.

        Args:
            rest: all of them, with a last one that has no end.
        """
        parts = [self._rest]
        while some := os.pread(self.fileno(), _AT_ONCE, self._read):
            self._forget(len(some))
            parts.append(some)
            if not rest:
                break
        *lines, self._rest = b"".join(parts).split(b"\n")
        # Bars of progress have no ends of lines: they are cut, not kept for ever.
        if self._rest and (rest or len(self._rest) > _AT_ONCE):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        """Closing again is allowed. What processes write afterwards is lost."""
        self._file.close()

    def _forget(self, number: int) -> None:
        """Give the room of the next so many bytes back, where the file system can."""
        with contextlib.suppress(AttributeError, OSError):  # fallocate is Linux's; without it the file only grows
            fallocate = ctypes.CDLL(None).fallocate
            fallocate(self.fileno(), _PUNCH_HOLE, ctypes.c_int64(self._read), ctypes.c_int64(number))
        self._read += number
