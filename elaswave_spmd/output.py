"""The output of a command whose reader may have gone: a closed terminal or pipe, a disk that is full. It ends no run.

What an output has not taken stays in Python's buffer, where it would fail again: when a process is forked, and at the
end of the interpreter, which makes an exit code of its own (120) of it. So an output that has failed is /dev/null from
then on.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any


def say(text: str) -> None:
    """Print a line on the standard output, where it is seen at once, or lost where that output takes nothing."""
    try:
        print(text, flush=True)
    except OSError:
        mute_output()


def say_error(text: object) -> None:
    """Print a line on stderr, where it is seen at once, or lost where that output takes nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        mute_output(2)


def flush_output() -> None:
    """Flush the standard output and stderr. What they do not take is lost."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            with contextlib.suppress(ValueError):  # a user's code has closed it
                stream.flush()
        except OSError:
            mute_output(fd)


def mute_output(fd: int = 1) -> None:
    """Redirect the standard output, or stderr (2), to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def let_anybody_print() -> None:
    """Make `print` of any code lose what the standard output, or stderr, does not take, instead of raising OSError.

    For processes that run a user's code: a print of a model must not end a worker whose run goes on.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # Else a user's code has put a stream of its own in its place, which may raise what it likes.
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            output = _Lenient(fd, "w", closefd=False)
            is_unbuffered = stream.write_through  # python -u
            lenient = io.TextIOWrapper(
                output if is_unbuffered else io.BufferedWriter(output),  # pyright: ignore[reportArgumentType]
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=is_unbuffered,
            )
            setattr(sys, name, lenient)


class _Lenient(io.FileIO):
    """An output that becomes /dev/null when it takes nothing."""

    def write(self, data: Any) -> int | None:
        """Write what the output takes; None if it would block, else the number of bytes that were taken or lost."""
        try:
            return super().write(data)
        except OSError:
            mute_output(self.fileno())
            return memoryview(data).nbytes
