"""The directory of a command's sockets, which is removed with its last process, or by the next command.

A command and its fork server hold a lock on a file in it, and so do the workers that are forked from there. If all of
them are killed at once nobody is left to remove it: the next command that makes such a directory beside it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from elaswave_spmd.runtime.transport.links import SOCKETS, socket_directory

_OWNER = "owner"


class Scratch:
    """A directory for sockets, as `socket_directory` makes it, that this process holds until `remove`, or its own end.

    Directories beside it whose processes were killed are removed.
    """

    def __init__(self) -> None:
        folder = Path(socket_directory())
        self.path = str(folder)
        _remove_dead(folder.parent)
        # The file gets its name when it is locked: without it, a directory is left alone.
        new = folder / f".{_OWNER}"
        self._held = hold_lock(new)
        new.rename(folder / _OWNER)

    def remove(self) -> None:
        """Remove the directory, if its fork server has not; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def hold_scratch(folder: str) -> None:
    """Hold a `Scratch` as well, with all processes that are forked from this one later."""
    with contextlib.suppress(FileNotFoundError):  # it was made by other means, or its command has ended
        hold_lock(Path(folder) / _OWNER, os.O_RDWR)


def hold_lock(file: str | Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Share the lock of a file until this process has ended, and all that are forked from it from now on.

    Returns:
        The descriptor, whose closing ends it for this process. Programs that are started do not inherit it.
    """
    fd = os.open(file, flags | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def _remove_dead(base: Path) -> None:
    """Remove the directories in `base` that no process holds any more."""
    for folder in base.glob(f"{SOCKETS}*"):
        with contextlib.suppress(OSError):  # another user's; held; or just removed by another command
            fd = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)
