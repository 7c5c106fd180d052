"""Forked processes: children that keep the imported modules of this process, and nothing else of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

from elaswave_spmd.output import flush_output

_POLL_S = 0.002
_MAX_DESCRIPTORS = 1 << 20


class ForkedProcess:
    """A forked child, with the few methods of `subprocess.Popen` that its users need. Not thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal, once the child has ended, which is reaped then; None before.

        0 if it was reaped by somebody else, as `subprocess.Popen` has it.
        """
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it, or the kernel, where SIGCHLD is ignored
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the child; the result is that of `poll`.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Send SIGKILL, unless the child has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_process(
    main: Callable[[], object], keep: Collection[int], streams: Mapping[int, int] | None = None
) -> ForkedProcess:
    """Run `main` in a child whose only open descriptors are `keep`, the output streams, and an empty input.

    It must be called while this process has only one thread: a fork copies only the calling thread, and locks that
    another thread held would stay locked. The child ends with code 0 when `main` returns, or with 1 if it raises.
    Signals are as after an exec: those that this process handles have their default action in the child, those that it
    ignores or blocks stay ignored or blocked.

    Args:
        main: what the child does.
        keep: the descriptors that stay open in the child.
        streams: output stream of the child (1 or 2) -> the descriptor of this process that takes its place.
    """
    flush_output()
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for stream, descriptor in (streams or {}).items():
            os.dup2(descriptor, stream)
        # Close the ranges between the descriptors to keep.
        for before, after in pairwise(sorted({2, *keep, _MAX_DESCRIPTORS})):
            os.closerange(before + 1, after)
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # the child must never return to the caller's stack
