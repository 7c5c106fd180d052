"""An output whose reader may take its time: a stopped terminal (Ctrl-S), a pager that nobody scrolls.

Who writes to such a stream waits until it is read on. The controller must not: without it all workers end.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import IO, TextIO

from elaswave_spmd.ready import is_any_ready

_MOST = 1 << 22  # bytes that wait
_PATIENCE_S = 10.0


class PatientStream(io.TextIOBase):
    """A terminal or pipe that is written to without waiting: what it does not take now is sent by a later write.

    It has an open file of its own, as the flag for that belongs to the file: the shell shares the other one. If more
    than 4 MiB wait, lines are left out, and the next one that is not says so.

    Raises:
        OSError: it cannot be opened again: a socket, or another system than Linux.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._stream = stream
        self._file = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        self._waiting = bytearray()
        self._left_out = 0  # lines
        self._is_within_one = False

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
            OSError: nobody reads any more.
        """
        self.send()
        if self._is_within_one or (len(self._waiting) > _MOST and self._waiting.endswith(b"\n")):
            self._left_out += text.count("\n")
            self._is_within_one = not text.endswith("\n")  # `print` writes the end of a line by itself
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
        """Wait until all has been sent, or until nothing has been taken for ten seconds."""
        while not self.send():
            if not is_any_ready(writable=[self._file], timeout_s=_PATIENCE_S):
                return

    def close(self) -> None:
        """Closing again is allowed. What waits is lost."""
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
