"""Orphans: what code of the user has started in a worker, and that outlives the worker, such as a pool of processes.

Nobody else would end them: they wait for orders that never come, each with a copy of the worker's memory and of its
descriptors. The fork server becomes their parent (Linux: PR_SET_CHILD_SUBREAPER), and ends them after their worker.

Two are left alone. What has a process group of its own, as a daemon has, was meant to stay. And the resource tracker of
`multiprocessing` ends by itself after the others, when it has removed what they have left in /dev/shm.
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
_TRACKER = b"multiprocessing.resource_tracker"


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(known: Collection[int], *, kill: bool) -> bool:
    """Reap the children of this process that have ended, but for those that are known; for its only thread.

    Args:
        known: process ids of children that are no orphans.
        kill: kill the others as well, with SIGKILL.

    Returns:
        True if any was killed that has not ended yet. What it leaves behind itself becomes an orphan then.
    """
    is_any_left = False
    for pid in _children() - frozenset(known):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            done, _ = os.waitpid(pid, os.WNOHANG)
            if not done and kill and _belongs_to_a_worker(pid):
                os.kill(pid, signal.SIGKILL)
                is_any_left = True
    return is_any_left


def _children() -> frozenset[int]:
    """The children of this process's only thread; none where the kernel does not tell."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return frozenset()
    return frozenset(map(int, listed.split()))


def _belongs_to_a_worker(pid: int) -> bool:
    """True of an orphan that has nothing to do any more; see the top of the file."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended
    return os.getpgid(pid) == os.getpgrp() and _TRACKER not in command
