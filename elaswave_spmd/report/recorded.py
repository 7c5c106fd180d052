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
    not exist yet has no lines. One that was written anew, as by a run that goes back to a checkpoint, is read from its
    begin.

    Attributes:
        is_anew: the last `read` was from the begin of a file that was written anew: lines before it do not count.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._last = b""  # the line before the offset. It has moved where the file was written anew
        self.is_anew = False

    def read(self) -> list[dict[str, Any]]:
        """The new lines.

        Raises:
            DataError: the file cannot be read, or a whole line is not a JSON object.
        """
        self.is_anew = False
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset - len(self._last))
                self.is_anew = file.read(len(self._last)) != self._last
                if self.is_anew:
                    self._offset, self._number, self._last = 0, 0, b""
                    file.seek(0)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"cannot read {self._path} ({error.strerror or error})") from error
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._last = whole[whole[:-1].rfind(b"\n") + 1 :] or self._last
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
        if lines or events or self._metrics.is_anew:
            summary = _read_summary(self._path / SUMMARY)
            metrics = () if self._metrics.is_anew else run.metrics
            self._run = RecordedRun(run.path, run.config, metrics + lines, run.events + events, summary)
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
