"""The journal of mesh epochs: no two controllers of a run ever use the same ballot.

A ballot is (incarnation, epoch). A controller that starts or resumes a run takes the next incarnation, and writes every
epoch to the journal before it sends it to any worker (docs/protocol.md, "Controller"). A controller that resumes a run
reads there which ballots its predecessors may have used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from elaswave_spmd.errors import DataError
from elaswave_spmd.regular_files import read_regular
from elaswave_spmd.run_dir.atomic_write import append_whole, open_private, sync_directory, writing
from elaswave_spmd.run_dir.json_lines import read_json

EPOCHS = "epochs.jsonl"
ORPHAN_GRACE = "orphan_grace"
"""A field of the first line of a life whose workers wait to be adopted by a later controller: the number of seconds
that they may live without one."""

CHECKPOINT = "checkpoint"
"""A field of the same line: the step of the newest good checkpoint in the run's directory when the life began, or 0."""

BALLOT = "ballot"
"""A field of events about shards of their step that do not count: those up to this ballot, [incarnation, epoch]."""

_TYPES: dict[str, tuple[type, ...]] = {
    ORPHAN_GRACE: (float, int),
    CHECKPOINT: (int,),
    "run": (str,),
    "identity": (dict,),
    "layout": (dict,),
    "kinds": (list,),
    "scratch": (str,),
}
"""The types of the optional fields of a line that a later controller reads, by field."""


class Ballot(NamedTuple):
    """A mesh epoch and the controller that made it. Ordered by incarnation, then by epoch."""

    incarnation: int
    epoch: int


class Journal:
    """epochs.jsonl, open for appending: one line per ballot, on the disk before `append` returns.

    A last line that an earlier crash cut short is removed when the journal is opened: its epoch was not sent to any
    worker yet. Only the process that has locked the run's directory (lock.py) may open the journal.
    """

    def __init__(self, run_dir: str | Path) -> None:
        """
        Raises:
            DataError: the journal is damaged before its last line.
            FilesError: it cannot be written.
        """
        self._path = Path(run_dir) / EPOCHS
        lines, end = _read(self._path)
        self._last = _ballot_of(lines[-1]) if lines else None
        with writing(self._path):
            is_new = not self._path.exists()
            fd = open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
            if is_new:
                # The name must be on the disk as well; fsync of the file alone does not write its directory.
                sync_directory(self._path.parent)
            elif os.fstat(self._file.fileno()).st_size > end:
                self._file.truncate(end)
                os.fsync(self._file.fileno())

    def append(self, incarnation: int, epoch: int, reason: str, **fields: object) -> Ballot:
        """Write a ballot to the journal, whole or not at all, and flush it to the disk.

        Args:
            fields: further fields of the line, in JSON's own types.

        Raises:
            FilesError: the disk is full.
        """
        ballot = Ballot(incarnation, epoch)
        assert self._last is None or ballot > self._last, f"{ballot} after {self._last}"
        line = json.dumps({**ballot._asdict(), "reason": reason, **fields}, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self._path):
            append_whole(self._file, line.encode(), durable=True)
        self._last = ballot
        return ballot

    def last(self) -> Ballot | None:
        """The highest ballot in the journal, or None if it is empty."""
        return self._last

    def close(self) -> None:
        """Close the file; closing again is allowed."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(run_dir: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a run's epochs.jsonl, oldest first; empty if there is no such file.

    Raises:
        DataError: the journal is damaged before its last line.
    """
    return _read(Path(run_dir) / EPOCHS)[0]


def next_incarnation(run_dir: str | Path) -> int:
    """The incarnation of the next controller, from 1. It is in use once a line with it is in the journal.

    Raises:
        DataError: the journal is damaged before its last line.
    """
    lines = read_journal(run_dir)
    return _ballot_of(lines[-1]).incarnation + 1 if lines else 1


def _ballot_of(line: dict[str, Any]) -> Ballot:
    return Ballot(line["incarnation"], line["epoch"])


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The good lines of a journal, and the number of bytes that they take.

    Two kinds of last lines are left out, since a crash may leave them: one without a newline, and one that is not a
    line of a journal (a file that was extended but not filled reads as zeros). Anywhere else they are damage.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error})") from error
    found: list[dict[str, Any]] = []
    lines = content.split(b"\n")[:-1]
    end = 0
    for number, line in enumerate(lines, start=1):
        fields = _parse(line)
        if fields is None and number == len(lines):
            break
        if fields is None or _is_odd(fields) or (found and _ballot_of(fields) <= _ballot_of(found[-1])):
            raise DataError(
                f"{path}, line {number} is damaged: {line[:80]!r}",
                rule="every line but the last is a JSON object whose incarnation and epoch are above those before it",
                where=f"{path}, line {number}",
            )
        found.append(fields)
        end += len(line) + 1
    return found, end


def _parse(line: bytes) -> dict[str, Any] | None:
    """The fields of one line, or None if it is not a line of a journal."""
    try:
        fields = read_json(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    is_ballot = all(type(fields.get(name)) is int for name in Ballot._fields)
    return fields if is_ballot else None


def _is_odd(fields: dict[str, Any]) -> bool:
    """True for fields that no controller can have written, and that would make the next controller fail.

    No crash leaves such a line, so it is damage even if it is the last line: if it were left out, its ballot would be
    used again.
    """
    if not all(0 <= fields[name] < 2**53 for name in Ballot._fields):
        return True
    return any(name in fields and not isinstance(fields[name], of) for name, of in _TYPES.items())
