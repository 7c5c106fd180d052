"""Strays: what code of the user has started in a worker, and that outlives the worker, such as a pool of processes.

Nobody else would end them: they wait for orders that never come, each with a copy of the worker's memory and of its
descriptors. A worker, and the fork server, become the parents of what their descendants leave behind (Linux:
PR_SET_CHILD_SUBREAPER). So a worker's strays come to the fork server when the worker has ended, and it ends them; one
whose own parent in the worker ends stays the worker's until then.

Two are left alone. What has a process group of its own, as a daemon has, was meant to stay. And a resource tracker, as
`multiprocessing` has it, ends by itself after the others, when it has removed what they have left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = b"resource_tracker"  # of multiprocessing, and of the packages that are made after it


def adopt_strays() -> frozenset[int]:
    """Make this process the parent of what its descendants leave behind, where the kernel can tell who that is.

    Returns:
        The process ids of the children that it has already.
    """
    if sys.platform != "linux" or (found := _children()) is None:
        return frozenset()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return found


def reap_strays(known: Collection[int]) -> bool:
    """Reap the children of this process that have ended, but for those that are known; for its only thread.

    Returns:
        True if there was any. What it has left behind itself is a stray then.
    """
    found = False
    for pid in (_children() or frozenset()) - frozenset(known):
        with contextlib.suppress(ChildProcessError):
            found = bool(os.waitpid(pid, os.WNOHANG)[0]) or found
    return found


def kill_strays(known: Collection[int]) -> bool:
    """Kill the children of this process that nobody needs any more. Returns True if there was any.

    Args:
        known: process ids of children that are no strays.
    """
    found = False
    for pid in (_children() or frozenset()) - frozenset(known):
        with contextlib.suppress(OSError):  # it is gone, or may not be killed
            if _is_left_behind(pid):
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


def _children() -> frozenset[int] | None:
    """The children of this process's only thread, or of its first one; None where the kernel does not tell."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return None
    return frozenset(map(int, listed.split()))


def _is_left_behind(pid: int) -> bool:
    """True of a process that has nothing to do any more; see the top of the file.

    Raises:
        OSError: it has ended.
    """
    command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty if it has ended, and is to be reaped
    return bool(command) and os.getpgid(pid) == os.getpgrp() and _TRACKER not in command
