"""The output of a command whose reader may have gone: a closed terminal or pipe, a disk that is full. It ends no run.

What an output has not taken stays in Python's buffer, where it would fail again: when a process is forked, and at the
end of the interpreter, which makes an exit code of its own (120) of it. So an output that has failed is /dev/null from
then on.
"""

from __future__ import annotations

import contextlib
import os
import sys


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
