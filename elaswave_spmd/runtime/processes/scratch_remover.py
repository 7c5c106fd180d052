"""The process that removes a directory of sockets when all processes that use it have ended, however they ended.

A command starts this file as a program of its own, with the directory as its argument (`scratch.Scratch`). The program
waits for the lock that the command's processes share. The kernel releases the lock with the last of them, even if all
of them are killed at once. The program is in no process group of theirs, has none of their descriptors, and imports
next to nothing, so that it costs little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys

WITH = "with"
"""The name of a file in the directory that lists files elsewhere which are to be removed with it, as by `entry`."""


def entry(path: bytes) -> bytes:
    """The entry for a file: its path, and the numbers by which another file that took its name can be told apart.

    It is bytes, since this process knows no locale, and ends with a zero, since any other byte may be part of a name.
    """
    status = os.lstat(path)
    return b"%d %d %d %b\0" % (status.st_dev, status.st_ino, status.st_mtime_ns, path)


def remove_when_free(folder: str, owner: str) -> None:
    """Wait until nobody holds the lock of the file `owner` in the folder, and remove the folder."""
    try:
        fd = os.open(os.path.join(folder, owner), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # it has been removed
    fcntl.flock(fd, fcntl.LOCK_EX)
    with contextlib.suppress(OSError), open(os.path.join(folder, WITH), "rb") as entries:  # mostly there is none
        for found in entries.read().split(b"\0")[:-1]:  # what follows the last zero was not written completely
            path = found.split(b" ", 3)[3]
            with contextlib.suppress(OSError):
                if entry(path) == found + b"\0":
                    os.unlink(path)
    for path, folders, files in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # the next command removes what its processes have left as well
            for name in files:
                os.unlink(os.path.join(path, name))
            for name in folders:
                os.rmdir(os.path.join(path, name))
    with contextlib.suppress(OSError):
        os.rmdir(folder)


if __name__ == "__main__":
    remove_when_free(*sys.argv[1:])
