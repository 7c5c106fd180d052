"""An output stream whose reader may be slow: a stopped terminal (Ctrl-S), or a pager that nobody scrolls.

A process that writes to such an output normally blocks until somebody reads it. The controller must not block, because
workers that do not hear from it end themselves.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import IO, TextIO

from elaswave_spmd.ready import is_any_ready

_MOST = 1 << 22  # the number of bytes that may wait to be sent before lines are left out
_PATIENCE_S = 10.0  # `drain` gives up if the output takes nothing for this many seconds


class PatientStream(io.TextIOBase):
    """A terminal or pipe that is written to without blocking. What it does not take now is sent by a later write.

    The output is opened a second time for this, because O_NONBLOCK is set for an open file, and the original open file
    is shared with the shell. If more than 4 MiB wait, lines are left out, and a note before the next line says how
    many.

    Raises:
        OSError: the output cannot be opened again, as it is a socket, or the system is not Linux.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._file = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._waiting = bytearray()
        self._left_out = 0  # lines
        self._is_within_one = False  # the beginning of the present line was left out, so its rest is, too

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  (a plain attribute there)
        return self._stream.encoding

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Send the text, or keep it until the output takes more.

        Raises:
            OSError: the reader has gone, as of a closed terminal or pipe.
        """
        self.send()
        if self._is_within_one or (len(self._waiting) > _MOST and self._waiting.endswith(b"\n")):
            self._left_out += text.count("\n")
            self._is_within_one = not text.endswith("\n")  # `print` writes the newline in a call of its own
            return len(text)
        if self._left_out:
            self._waiting += f"({self._left_out} lines are left out: the output took none)\n".encode()
            self._left_out = 0
        self._waiting += text.encode(self.encoding, "replace")
        self.send()
        return len(text)

    def send(self) -> bool:
        """Send what the output takes now. True if nothing waits any more."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                del self._waiting[: os.write(self._file, self._waiting)]
        return not self._waiting

    def drain(self) -> None:
        """Wait until everything has been sent, or until the output has taken nothing for ten seconds."""
        while not self.send():
            if not is_any_ready(writable=[self._file], timeout_s=_PATIENCE_S):
                return

    def close(self) -> None:
        """Close the output; closing again is allowed. Text that still waits is lost."""
        if not self.closed:
            os.close(self._file)
        super().close()


def patient(stream: TextIO) -> IO[str]:
    """The stream as a `PatientStream`, or itself if that is not possible or not needed, as for a file."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stream.isatty():
            return PatientStream(stream)  # pyright: ignore[reportReturnType]  (IO is no protocol)
    except (OSError, ValueError):
        pass
    return stream


def end(stream: IO[str]) -> None:
    """Drain and close a `PatientStream`; another stream is left alone. Ending again is allowed."""
    if isinstance(stream, PatientStream) and not stream.closed:
        try:
            stream.drain()
        finally:
            stream.close()
