"""Append-only files of one JSON object per line, and plain JSON values for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.errors import DataError
from elaswave_spmd.run_dir.atomic_write import append_whole, open_private, writing


class JsonLines:
    """A file of JSON lines, open for appending. A line is handed to the operating system before `append` returns.

    So a line survives the death of this process, though not a crash of the machine. A last line that an earlier crash
    cut short is removed when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        _cut_torn_line(path)
        self._path = path
        fd = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open as long as the run; unbuffered

    def append(self, fields: Mapping[str, object]) -> None:
        """Write one line, whole or not at all; values are converted by `plain`.

        Raises:
            FilesError: the disk is full.
        """
        with writing(self._path):
            append_whole(self._file, json_text(fields).encode(), durable=False)

    def close(self) -> None:
        """Close the file; closing again is allowed."""
        self._file.close()


def json_text(fields: Mapping[str, object]) -> str:
    """The line of one JSON object; values are converted by `plain`."""
    return json.dumps(plain(fields), ensure_ascii=False, allow_nan=False) + "\n"


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a file. A last line without a newline was cut short by a crash, and is left out.

    Raises:
        DataError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error})") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {line[:80]!r}", where=where) from error
        if not isinstance(fields, dict):
            raise DataError(f"{where} is not a JSON object: {line[:80]!r}", where=where)
        found.append(fields)
    return found


def plain(value: object) -> Any:
    """The value in JSON's own types: tuples become lists, numpy scalars numbers, nan and inf their names, others text.

    nan and inf become text because JSON has no numbers for them, and readers other than Python's refuse them.
    """
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
    """Remove a last line without a newline, so that the next line does not continue it."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())
