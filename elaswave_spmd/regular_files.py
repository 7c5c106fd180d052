"""Regular files: those that a user names, and those of a run, whose directory may come from elsewhere.

A pipe would be waited for, and a device such as /dev/zero read, for ever, without a word. Both are refused by an
OSError, which whoever opens a file has an answer to anyway.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

NO_FILE = "it is no regular file"
A_LINK = "it is a link, which is not followed"


def regular_fd(path: str | Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file, without waiting for anybody. Returns the descriptor, which programs do not inherit.

    Args:
        flags, mode: as of os.open. With os.O_NOFOLLOW a link is refused.

    Raises:
        OSError: it cannot be opened, or is something else: EISDIR for a directory, ELOOP with the text `A_LINK` for a
            link, else EINVAL with the text `NO_FILE`.
    """
    other = OSError(errno.EINVAL, NO_FILE, os.fspath(path))
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise other from None
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, A_LINK, os.fspath(path)) from None
        raise
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise other


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to be read, as `open(path, "rb")` does.

    Raises:
        OSError: as for `regular_fd`.
    """
    return open(regular_fd(path, os.O_RDONLY), "rb")


def read_regular(path: str | Path) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read; as for `regular_fd`.
    """
    with open_regular(path) as file:
        return file.read()
