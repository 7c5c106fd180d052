"""Preloaded into a fork server: no process is left for it (as by pids.max), while the file $NO_PROCESSES exists."""

from __future__ import annotations

import errno
import os

_fork = os.fork


def _limited_fork() -> int:
    if os.path.exists(os.environ["NO_PROCESSES"]):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return _fork()


os.fork = _limited_fork
