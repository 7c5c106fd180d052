"""The files of a run that a report is made of, read while the run goes on or after its end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import open_regular, read_regular
from elaswave_spmd.run_dir.directory import EVENTS, METRICS, SUMMARY, is_run_directory
from elaswave_spmd.run_dir.json_lines import line_name, read_json, read_json_line
from elaswave_spmd.run_dir.metrics import MetricsLine


@dataclass(frozen=True)
class RecordedRun:
    """A run as its files show it at one moment.

    Args:
        path: the run's directory.
        config: the text of config.yaml.
        metrics, events: all whole lines so far.
        summary: summary.json, or None while the run has not finished.
    """

    path: Path
    config: str
    metrics: tuple[MetricsLine, ...]
    events: tuple[Mapping[str, Any], ...] = field(hash=False)
    summary: Mapping[str, Any] | None = field(default=None, hash=False)


class FollowedLines:
    """A file of JSON lines that grows: each call of `read` returns the lines that are new since the last one.

    What was read once is not read again. A last line without its newline is left for the next call. A file that does
    not exist yet has no lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0

    def read(self) -> list[dict[str, Any]]:
        """The new lines.

        Raises:
            DataError: the file cannot be read, has become shorter, or a whole line is not a JSON object.
        """
        try:
            with open_regular(self._path) as file:
                if file.seek(0, 2) < self._offset:
                    raise DataError(f"{self._path} has become shorter", rule="the files of a run only grow")
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"cannot read {self._path} ({error.strerror or error})") from error
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [self._parse(line) for line in whole.split(b"\n")[:-1]]

    def name_of(self, number: int) -> str:
        """The name in errors of a line that was read; `number`: -1 is the newest."""
        return line_name(self._path, self._number + 1 + number)

    def _parse(self, line: bytes) -> dict[str, Any]:
        self._number += 1
        return read_json_line(line, self.name_of(-1))


class RunReader:
    """Reads a run's directory again and again; only what is new is read from the files that grow.

    Args:
        path: the run's directory.

    Raises:
        DataError: there is no run.
    """

    def __init__(self, path: Path) -> None:
        try:
            is_run = is_run_directory(path)
        except PermissionError as error:
            raise DataError(
                f"cannot read {path / CONFIG} ({error.strerror or error})",
                rule="the files of a run are read by the user that it belongs to",
                fix="a copy of the run that you may read",
            ) from error
        if not is_run:
            raise DataError(
                f"{path} is no run directory",
                rule="a run is named by its directory",
                exists=f"directories with a {CONFIG}",
                fix="the run directory, as the run shows it when it starts",
            )
        self._path = path
        self._metrics = FollowedLines(path / METRICS)
        self._events = FollowedLines(path / EVENTS)
        self._error: dict[str, str] | None = None
        self._run = RecordedRun(path, _text_of(path / CONFIG), (), ())

    def read(self) -> RecordedRun:
        """The run as its files are now. The same object as before if nothing is new.

        Raises:
            DataError: a file cannot be read, or is malformed; from then on every call raises it.
        """
        if self._error is not None:  # lines that were read with the malformed one are not read again
            raise DataError(**self._error)
        run = self._run
        try:
            new = self._metrics.read()
            lines = tuple(
                MetricsLine.from_dict(fields, self._metrics.name_of(number - len(new)))
                for number, fields in enumerate(new)
            )
            events = tuple(self._events.read())
        except DataError as error:
            self._error = error.fields()
            raise
        if lines or events:
            summary = _read_summary(self._path / SUMMARY)
            self._run = RecordedRun(run.path, run.config, run.metrics + lines, run.events + events, summary)
        return self._run


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not os.path.exists(path):
        return None
    try:
        summary = read_json(_text_of(path))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path} is not a JSON object")
    return summary


def _text_of(path: Path) -> str:
    try:
        return read_regular(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"cannot read {path} ({why})") from error
