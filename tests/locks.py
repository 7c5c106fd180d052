"""Locks that other processes hold."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_locked(path: str | Path) -> bool:
    """True if a process has locked a file, or a directory, by flock."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
