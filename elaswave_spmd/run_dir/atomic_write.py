"""Writing the files of a run: private to the user, and whole or not at all. Errors of the disk become FilesError."""

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
"""The modes of files and folders that a run makes, whatever the umask. Nobody but the user may read checkpoints,
weights and journal."""
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The errors for a directory in which this user can make no file, and for a file that this user cannot write."""


def open_private(path: Path, flags: int) -> int:
    """Open a file of the run, and make it private to its owner. Returns the descriptor.

    A link is not followed: in a directory that other users can write to, it may point to any file of this user.

    Args:
        flags: as for `os.open`; with os.O_CREAT a missing file is made.

    Raises:
        OSError: the file cannot be opened, is a link, a pipe or a device, or its mode cannot be set.
    """
    fd = regular_fd(path, flags | os.O_NOFOLLOW, FILE_MODE)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_private_folder(path: Path) -> None:
    """Make a directory of the run that is private to its owner.

    Raises:
        FileExistsError: the directory exists; its mode is left as it is.
        OSError: the directory cannot be made.
    """
    path.mkdir(mode=FOLDER_MODE)
    path.chmod(FOLDER_MODE)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context for a block that writes a file of the run.

    Raises:
        FilesError: in place of an OSError in the block.
    """
    try:
        yield
    except OSError as error:
        raise FilesError(path, error) from error


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool) -> Iterator[Path]:
    """Context for a block that writes a new version of a file, which takes the file's name if the block succeeds.

    The block writes to a file beside it, which exists, empty and private, when the block begins. Readers find the old
    version or the new one, never half a file. If the block raises, nothing has changed.

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
        # The name is always the same, so that the next version removes what a killed process has left. A file of this
        # name is never opened: in a directory that other users can write to, it may be a link to a file of this user.
        scratch.unlink(missing_ok=True)
        os.close(open_private(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        try:
            yield scratch
            scratch.chmod(FILE_MODE)  # a library may have replaced the file
            if durable:
                _sync(scratch, os.O_RDONLY)
            os.replace(scratch, path)
            if durable:
                sync_directory(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


def append_whole(file: FileIO, data: bytes, *, durable: bool) -> None:
    """Append to a file, whole or not at all: if writing fails, the part that was written is cut off again.

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
    """Flush a directory to the disk, so that new, renamed and removed files in it survive a crash of the machine."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Flush an existing file to the disk, so that everything in it survives a crash of the machine.

    This includes what other processes have written.
    """
    _sync(path, os.O_RDONLY)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all data to an unbuffered file, with several system calls if one writes less than it is given."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
