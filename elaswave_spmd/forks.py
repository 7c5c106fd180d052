"""Processes that code of the user forks from one of ours, such as a pool of `multiprocessing`: what they must not keep.

A forked process has all descriptors of its parent, and may outlive it. The end of a parent that is killed is told by
the end of its pipes and connections, which would stay open. So each of these processes closes them as it begins.
Programs that are started inherit none: descriptors of ours are closed by `exec`.

It has the signal handlers of its parent, too. One that only notes SIGTERM for the parent makes a process that
`Process.terminate()` does not end, and for whose end a pool or a dataset then waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any


def call_in_forks(method: Callable[[], object], held: Collection[int] = ()) -> None:
    """Have a method called in each process that is forked from this one from now on, as long as its object lives.

    Args:
        held: signals that wait until the method has returned. One that came while Python sets the new process up would
            be lost.
    """
    found, before = weakref.WeakMethod(method), threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, held)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def call() -> None:
        if (here := found()) is not None:
            here()
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=call)


def drop_input(process: subprocess.Popen[Any] | None) -> None:
    """Close the input of a process of the parent's, which ends by that, in a fork; None: there is no such process.

    The null device takes its place, so that the Python object stays usable. Another thread of the parent may have been
    writing to it, and in the fork nobody gives up its lock.
    """
    if process is None or process.stdin is None or process.stdin.closed:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, process.stdin.fileno(), inheritable=False)
    os.close(null)


def close_bound(address: str | tuple[str, int]) -> None:
    """Close the sockets of this process that are bound to an address: the one that listens there, and its connections.

    Args:
        address: path of a Unix socket, or (address, port).
    """
    with contextlib.suppress(OSError):  # it is Linux that has this folder
        for name in os.listdir("/proc/self/fd"):
            if _is_bound(int(name), address):
                os.close(int(name))


def _is_bound(descriptor: int, address: str | tuple[str, int]) -> bool:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed since
        return False
    try:
        return found.getsockname() == address
    except OSError:
        return False
    finally:
        found.detach()
