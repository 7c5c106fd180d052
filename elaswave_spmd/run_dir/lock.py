"""Who drives a run: the lock on its directory, and the journal of its epochs.

Epochs are ballots (incarnation, epoch): a controller that starts, or resumes, a run takes the next incarnation, and
journals every epoch before it tells anybody (protocol.md, "Controller"). The lock says that no other controller lives;
the journal says what the dead ones have used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from elaswave_spmd.errors import ConfigError, DataError
from elaswave_spmd.run_dir.json_lines import sync_directory, write_all, writing

LOCK, EPOCHS = "controller.lock", "epochs.jsonl"


class Ballot(NamedTuple):
    """A mesh epoch under the controller that made it; ordered by incarnation, then epoch."""

    incarnation: int
    epoch: int


class RunLock:
    """The exclusive lock on a run's directory. It lasts until `close`, or the end of the process, however it ends.

    The descriptor is not inherited by programs that this process starts, so no worker keeps the lock of a dead
    controller.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def close(self) -> None:
        """Give the lock up; closing again is allowed. The file stays: removing it would let two hold two files."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_run_dir(path: str | Path) -> RunLock:
    """Take the lock of a run's directory, at once or not at all.

    Raises:
        ConfigError: another controller holds it; names its process where that can be read.
        FilesError: the lock file cannot be written.
    """
    file = Path(path) / LOCK
    with writing(file):
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            # The file is locked before its owner writes its number into it, so the number may be missing.
            user = f"process {pid}" if pid.isdigit() else "another process, which has not written its number yet"
            os.close(fd)
            raise ConfigError(
                f"run.dir={path} is in use by {user}",
                rule="a run has one controller at a time, which locks its directory",
                where="run.dir",
                fix="wait until that process has ended, or end it, or choose another run.dir",
            ) from None
        except BaseException:
            os.close(fd)
            raise
    return RunLock(Path(path), fd)


class Journal:
    """epochs.jsonl, open for appending: one line per ballot, on the disk before `append` returns.

    A line torn by an earlier crash is cut off first: nobody was told of its epoch. Only the holder of the run's lock
    opens the journal.
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
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
            if is_new:
                sync_directory(self._path.parent)
            elif os.fstat(self._file.fileno()).st_size > end:
                self._file.truncate(end)
                os.fsync(self._file.fileno())

    def append(self, incarnation: int, epoch: int, reason: str, **fields: object) -> Ballot:
        """Journal a ballot, whole or not at all, and flush it to the disk.

        Args:
            fields: more of the line, JSON's own types.

        Raises:
            FilesError: the disk is full.
        """
        ballot = Ballot(incarnation, epoch)
        assert self._last is None or ballot > self._last, f"{ballot} after {self._last}"
        line = json.dumps({**ballot._asdict(), "reason": reason, **fields}, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self._path):
            start = os.fstat(self._file.fileno()).st_size
            try:
                write_all(self._file, line.encode())
                os.fsync(self._file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    self._file.truncate(start)
                raise
        self._last = ballot
        return ballot

    def last(self) -> Ballot | None:
        """The highest ballot ever journalled, or None."""
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
    """Every whole line of a run's epochs.jsonl, oldest first; empty where there is none. A torn last line is left out.

    Raises:
        DataError: the journal is damaged before its last line.
    """
    return _read(Path(run_dir) / EPOCHS)[0]


def next_incarnation(run_dir: str | Path) -> int:
    """The incarnation of the next controller, from 1. It is taken once a line with it is journalled.

    Raises:
        DataError: the journal is damaged before its last line.
    """
    lines = read_journal(run_dir)
    return _ballot_of(lines[-1]).incarnation + 1 if lines else 1


def _ballot_of(line: dict[str, Any]) -> Ballot:
    return Ballot(line["incarnation"], line["epoch"])


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The good lines, and the number of bytes that they take.

    Whatever comes after the last newline, and a last line that is none of ours, were never flushed as a whole.
    """
    try:
        content = path.read_bytes()
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
        if fields is None or (found and _ballot_of(fields) <= _ballot_of(found[-1])):
            raise DataError(
                f"{path}, line {number} is damaged: {line[:80]!r}",
                rule="every line but the last is a JSON object whose incarnation and epoch are above those before it",
                where=f"{path}, line {number}",
            )
        found.append(fields)
        end += len(line) + 1
    return found, end


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    is_ballot = all(type(fields.get(name)) is int for name in Ballot._fields)
    return fields if is_ballot else None
