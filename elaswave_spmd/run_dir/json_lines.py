"""Append-only files of one JSON object per line, and plain JSON values for them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import DataError, FilesError


class JsonLines:
    """Appends objects to a file; each line is handed to the operating system before `append` returns.

    So a line survives the death of this process, not of the machine. A line torn by an earlier crash is cut off first.
    """

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run; `close` has nothing to write

    def append(self, fields: Mapping[str, object]) -> None:
        """Write one line, whole or not at all; values are made plain by `plain`.

        Raises:
            FilesError: the disk is full.
        """
        left = memoryview((json.dumps(plain(fields), ensure_ascii=False, allow_nan=False) + "\n").encode())
        with writing(self._path):
            start = os.fstat(self._file.fileno()).st_size
            try:
                while left:
                    left = left[self._file.write(left) :]
            except BaseException:  # half a line would spoil the one that comes after it
                with contextlib.suppress(OSError):
                    self._file.truncate(start)
                raise

    def close(self) -> None:
        """Close the file; closing again is allowed."""
        self._file.close()


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


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Every whole line. A last line without its newline was torn by a crash, and is left out.

    Raises:
        DataError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error})") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            where = f"{path}, line {number}"
            raise DataError(f"{where} is not JSON: {line[:80]!r}", where=where) from error
        if not isinstance(fields, dict):
            where = f"{path}, line {number}"
            raise DataError(f"{where} is not a JSON object: {line[:80]!r}", where=where)
        found.append(fields)
    return found


def plain(value: object) -> Any:
    """JSON's own types only: tuples become lists, numpy scalars numbers, nan and inf their names, others text."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in sorted(value)]
    if not isinstance(value, (int, float)) and callable(item := getattr(value, "item", None)):
        value = item()  # a numpy or torch scalar
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return int(value) if isinstance(value, int) else str(value)


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())


# Files that survive the machine: written beside their place, flushed to the disk, then moved there.
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
