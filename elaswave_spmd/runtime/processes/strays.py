"""Strays: processes that a user's code has started in a worker and that outlive the worker, such as a process pool.

Without this module they would stay for ever: they wait for orders that never come, each with a copy of the worker's
memory and descriptors. Therefore each worker, and the fork server, becomes a *subreaper* (Linux:
PR_SET_CHILD_SUBREAPER): the kernel makes it the parent of processes whose own parents among its descendants have ended.
While a worker lives, its strays are the worker's children, and are left alone. When the worker ends they become
children of the fork server, which ends them.

Two kinds of processes are left alone even then. A process with a process group of its own, such as a daemon, was meant
to stay. And a resource tracker of `multiprocessing` ends by itself after the others, when it has removed what they have
left in /dev/shm.
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
    """Make this process the parent of processes that its descendants leave behind, if the kernel can list children.

    Returns:
        The process ids of the children that this process has already; empty if the kernel cannot list them.
    """
    if sys.platform != "linux" or (found := _children()) is None:
        return frozenset()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return found


def reap_strays(known: Collection[int]) -> bool:
    """Reap the children of this process that have ended, except for `known` ones. For a process with one thread.

    Returns:
        True if there was any. Processes that it has left behind itself are strays now.
    """
    found = False
    for pid in (_children() or frozenset()) - frozenset(known):
        with contextlib.suppress(ChildProcessError):
            found = bool(os.waitpid(pid, os.WNOHANG)[0]) or found
    return found


def kill_strays(known: Collection[int]) -> bool:
    """Kill the strays among the children of this process. Returns True if there was any.

    Args:
        known: process ids of children that are not strays.
    """
    found = False
    for pid in (_children() or frozenset()) - frozenset(known):
        with contextlib.suppress(OSError):  # it is gone, or may not be killed
            if _is_left_behind(pid):
                os.kill(pid, signal.SIGKILL)
                found = True
    return found


def _children() -> frozenset[int] | None:
    """The children of this process's main thread; None if the kernel does not list them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return None
    return frozenset(map(int, listed.split()))


def _is_left_behind(pid: int) -> bool:
    """True for a stray that is to be ended; see the module docstring.

    Raises:
        OSError: the process has ended.
    """
    command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty if it has ended and is not reaped yet
    return bool(command) and os.getpgid(pid) == os.getpgrp() and _TRACKER not in command
