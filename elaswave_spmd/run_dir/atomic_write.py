"""Writing the files of a run: private, whole or not at all, and with errors of the disk as FilesError."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from elaswave_spmd.errors import FilesError
from elaswave_spmd.regular_files import regular_fd

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""The modes of what a run makes, whatever the umask: checkpoints, weights and journal are the user's alone."""
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a directory in which this user can make no file, and of a file that it cannot write."""


def open_private(path: Path, flags: int) -> int:
    """Open a file of the run, for its owner alone; made if `flags` say so. Returns the descriptor.

    Raises:
        OSError: it cannot be opened, is a pipe or a device, or its mode cannot be set.
    """
    fd = regular_fd(path, flags, FILE_MODE)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_private_folder(path: Path) -> None:
    """Make a directory of the run, for its owner alone.

    Raises:
        OSError: it cannot be made. FileExistsError: it is there; its mode is left as it is.
    """
    path.mkdir(mode=FOLDER_MODE)
    path.chmod(FOLDER_MODE)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a file of the run.

    Raises:
        FilesError: for an OSError in the block.
    """
    try:
        yield
    except OSError as error:
        raise FilesError(path, error) from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool) -> Iterator[Path]:
    """A block that writes a new version of a file beside it; the new version takes the name when the block ends well.

    The new file is there, empty and private, when the block begins. Readers find the old version or the new one, never
    half a file. If the block raises, nothing has changed.

    Args:
        durable: flush the file to the disk before it gets its name, and the name after it, so that the new version
            survives a crash of the machine and not only of this process. Waits for the disk.

    Yields:
        The path to write to.

    Raises:
        FilesError: the disk is full, or the directory is missing.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    with writing(path):
        # Always the same name, so that what a process that was killed has left is gone with the next version. Never
        # opened as it lies there: in a directory of many users it may be a link to a file of this one.
        scratch.unlink(missing_ok=True)
        os.close(open_private(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
        try:
            yield scratch
            scratch.chmod(FILE_MODE)  # a library may have made the file anew
            if durable:
                _sync(scratch, os.O_RDONLY)
            os.replace(scratch, path)
            if durable:
                sync_directory(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


def append_whole(file: FileIO, data: bytes, *, durable: bool) -> None:
    """Append to a file, whole or not at all: what was written before an error is cut off again.

    Args:
        file: unbuffered, open for appending.
        durable: flush to the disk, so that the data survives a crash of the machine and not only of this process.

    Raises:
        OSError: the disk is full.
    """
    start = os.fstat(file.fileno()).st_size
    try:
        write_all(file, data)
        if durable:
            os.fsync(file.fileno())
    except BaseException:
        # Half a line would spoil the line that is appended after it.
        with contextlib.suppress(OSError):
            file.truncate(start)
        raise


def sync_directory(path: Path) -> None:
    """Flush a directory to the disk: files made, renamed or removed in it survive a crash of the machine."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Flush a file that is there to the disk: what any process has written to it survives a crash of the machine."""
    _sync(path, os.O_RDONLY)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all data to an unbuffered file; one system call may write less than it is given."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
