"""Strays: processes that a user's code has started in a worker and that outlive the worker, such as a process pool.

Without this module they would stay for ever: they wait for orders that never come, each with a copy of the worker's
memory and descriptors. Therefore the fork server becomes a *subreaper* (Linux: PR_SET_CHILD_SUBREAPER): the kernel
makes it the parent of processes whose own parents among its descendants have ended. It reaps those that end, and ends
those of a worker that has ended.

Each worker marks itself, so that a process shows whose it is: forks have a mapping of the mark, started programs a
variable. Programs that were started with other variables show nothing, and end when no worker lives.

A worker is no subreaper itself. It could not reap what it has adopted: nothing tells that from a child of its own, for
whose end other code may wait, and would wait in vain. So each process that was orphaned would stay a zombie for as long
as the worker lives.

Two kinds of processes are left alone even then. A process with a process group of its own, such as a daemon, was meant
to stay. And a resource tracker of `multiprocessing` ends by itself after the others, when it has removed what they have
left in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = b"resource_tracker"  # of multiprocessing, and of the packages that are made after it
_MARK, _VARIABLE = "elaswave-worker-{}", "ELASWAVE_WORKER"


def adopt_strays() -> frozenset[int]:
    """Make this process the parent of processes that its descendants leave behind, if the kernel can list children.

    Returns:
        The process ids of the children that this process has already; empty if the kernel cannot list them.
    """
    if sys.platform != "linux" or (found := _children()) is None:
        return frozenset()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return found


def mark_own() -> mmap.mmap | None:
    """Mark this process as a worker, and with it what is forked or started in it from now on.

    Returns:
        What is to be kept for as long as the worker lives; None if the system has no such mapping.
    """
    os.environ[_VARIABLE] = str(os.getpid())
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
        fd = os.memfd_create(_MARK.format(os.getpid()), os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            return mmap.mmap(fd, mmap.PAGESIZE, prot=0)
        finally:
            os.close(fd)
    return None


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


def kill_strays(known: Collection[int], workers: Collection[int] | None) -> bool:
    """Kill the strays of workers that have ended, among the children of this process.

    Returns:
        True if there was any, or a process that is ending: what it leaves behind is found when it has ended.

    Args:
        known: process ids of children that are not strays.
        workers: the process ids of these workers; None if no worker lives, so that whose they are does not matter.
    """
    found = False
    for pid in (_children() or frozenset()) - frozenset(known):
        with contextlib.suppress(OSError):  # it is gone, or may not be killed
            if not Path(f"/proc/{pid}/cmdline").read_bytes():  # its memory is gone, and the marks with it
                found = True
            elif (workers is None or _is_of(pid, workers)) and _is_left_behind(pid):
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


def _is_of(pid: int, workers: Collection[int]) -> bool:
    """True if a process has the mark of one of these workers.

    Raises:
        OSError: the process has ended.
    """
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    mapped = Path(f"/proc/{pid}/maps").read_bytes()
    return any(
        f"{_VARIABLE}={worker}".encode() in variables or f"/memfd:{_MARK.format(worker)} ".encode() in mapped
        for worker in workers
    )


def _is_left_behind(pid: int) -> bool:
    """True for a stray that is to be ended; see the module docstring.

    Raises:
        OSError: the process has ended.
    """
    command = Path(f"/proc/{pid}/cmdline").read_bytes()  # empty if it is ending
    return bool(command) and os.getpgid(pid) == os.getpgrp() and _TRACKER not in command
