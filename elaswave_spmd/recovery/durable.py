"""Files that survive the machine: written beside their place, flushed to the disk, then moved there.

Whoever reads such a file finds it whole or not at all, whenever the writer died.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from elaswave_spmd.errors import FilesError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around whatever writes a file of the run.

    Raises:
        FilesError: for an OSError.
    """
    try:
        yield
    except OSError as error:
        raise FilesError(path, error) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[FileIO]:
    """An unbuffered file, for writing and reading, that becomes `path` when the block ends well; else nothing changes.

    Raises:
        FilesError: the disk is full, or the directory is gone.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with open(scratch, "w+b", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            os.replace(scratch, path)
            sync_directory(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Flush a directory: names made, moved or removed in it survive the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write everything; a system call may take less than it is given."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
