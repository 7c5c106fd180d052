"""A child that goes on with what this process has imported, and nothing else of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from itertools import pairwise

_PERIOD_S = 0.002
_MOST_DESCRIPTORS = 1 << 20


class Forked:
    """Such a child, in the terms of `subprocess.Popen`. For one thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once it has ended; reaps it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended. subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_PERIOD_S)
        return code

    def kill(self) -> None:
        """SIGKILL; nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(main: Callable[[], object], keep: Collection[int]) -> Forked:
    """Run `main` in a child that has nothing open but the descriptors `keep`, output, and an empty input.

    To be called while this process has one thread. The child ends with `main`, or with code 1 where it raises. Signals
    are as after an exec: what this process handles is at its default there, what it ignores or blocks stays so.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for before, after in pairwise(sorted({2, *keep, _MOST_DESCRIPTORS})):
            os.closerange(before + 1, after)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # never back to where this process was
