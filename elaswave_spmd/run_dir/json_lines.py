"""Append-only files of one JSON object per line, and plain JSON values for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import read_regular, regular_fd
from elaswave_spmd.run_dir.atomic_write import append_whole, open_private, writing

_DEEPEST = 100
"""The deepest nesting of lists and objects that is read. A run writes a few levels; Python's reader fails at about
1000."""


class JsonLines:
    """A file of JSON lines, open for appending. A line is handed to the operating system before `append` returns.

    So a line survives the end of this process, but perhaps not a crash of the machine. A last line that an earlier
    crash cut short is removed when the file is opened.
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
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error})") from error
    lines = content.split(b"\n")[:-1]
    return [read_json_line(line, line_name(path, number)) for number, line in enumerate(lines, start=1)]


def line_name(path: str | Path, number: int) -> str:
    """The name of a line in errors."""
    return f"{path}, line {number}"


def read_json_line(line: bytes, where: str) -> dict[str, Any]:
    """The fields of one line.

    Args:
        where: the name of the line in errors.

    Raises:
        DataError: the line is not a JSON object that a run can have written.
    """
    try:
        fields = read_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {line[:80]!r}", where=where) from error
    if not isinstance(fields, dict):
        raise DataError(f"{where} is not a JSON object: {line[:80]!r}", where=where)
    return fields


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text as a run writes it: UTF-8, numbers that a float can hold, and few levels of nesting.

    Python's own reader accepts more: NaN and 1e999, and whole numbers that no float can hold. These would lead to all
    kinds of errors where the values are used. Very deep nesting makes the reader itself fail.

    Raises:
        ValueError: the text is malformed, or has such values.
    """
    try:
        value = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError as error:
        raise ValueError("it is nested without an end") from error
    _refuse_deep(value)
    return value


def float_of_hex(text: object) -> float:
    """The number whose `float.hex` is this text.

    Raises:
        ValueError: the text is malformed, or its number is larger than any float.
    """
    try:
        return float.fromhex(str(text))
    except OverflowError as error:
        raise ValueError(f"{text} is larger than any float") from error


def is_count(value: object) -> bool:
    """True for a whole number, 0 or more, as steps and workers are counted in files of a run."""
    return type(value) is int and 0 <= value < 2**63


def is_number(value: object) -> bool:
    """True for an int or a float. A bool does not count as a number, as in JSON."""
    return type(value) in (int, float)


def _refuse_deep(value: object) -> None:
    level, levels = [value], 0
    while level := [item for it in level if isinstance(it, (dict, list)) for item in _items(it)]:
        levels += 1
        if levels > _DEEPEST:
            raise ValueError(f"it is nested in more than {_DEEPEST} levels")


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is larger than any float")
    return number


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_whole, parse_constant=_refuse)


def plain(value: object) -> Any:
    """The value in JSON's own types: tuples and sets become lists, numpy scalars numbers, and unknown types text.

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
    with open(regular_fd(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)
            file.flush()
            os.fsync(file.fileno())
