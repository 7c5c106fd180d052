"""The files that the launcher keeps beside the directory of a run, in RUN.ray: they outlive its actors."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from elaswave_spmd.controller.on_ray.decisions import Progress
from elaswave_spmd.controller.on_ray.job import Job
from elaswave_spmd.errors import ConfigError, FilesError
from elaswave_spmd.run_dir.atomic_write import open_private, replacing
from elaswave_spmd.run_dir.lock import lock_run_dir, take_flock, workers_live
from elaswave_spmd.run_dir.manifest import MANIFEST

LOG = "log"
TOKEN = "token"
_NONCE = "nonce"
_JOB = "job.json"
_PROGRESS = "progress.json"
_ENDED = "ended.json"
_STOP = "stop"
_BEGIN = "begin.lock"
_METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"
_SHARDS = "shard_*.safetensors"
_SUMMARY = "summary.json"


class JobFiles:
    """The files of one run on Ray. All of them are for their owner alone.

    What writes `progress`, or the end, raises FilesError where that cannot be written.

    Args:
        job: names the folder.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = job.files

    @property
    def log(self) -> Path:
        """The file of what the run's command prints, and the supervisor."""
        return self._folder / LOG

    def make(self) -> None:
        """Begin a run: the folder, a secret if the run has none, and no trace of an earlier end.

        Raises:
            ConfigError: they cannot be written.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            for name in (_ENDED, _PROGRESS, _STOP):
                (self._folder / name).unlink(missing_ok=True)
            self.remove_notes()
            self._write(_NONCE, self._job.nonce)
            self._write(_JOB, json.dumps({"words": self._job.words}))
            if self._job.token_file == str(self._folder / TOKEN) and not (self._folder / TOKEN).exists():
                self._write(TOKEN, secrets.token_hex(32))
            self.opened(LOG).close()
        except FilesError as error:
            raise self._not_written(error.why) from error
        except OSError as error:
            raise self._not_written(error.strerror or str(error)) from error

    def _not_written(self, why: str) -> ConfigError:
        return ConfigError(
            f"cannot write {self._folder} ({why})",
            rule="a run on Ray keeps its secret, its log and its progress beside its directory",
            where="run.dir",
            fix="run.dir=FOLDER/NAME, in a folder that you may write",
        )

    @contextlib.contextmanager
    def beginning(self) -> Iterator[bool]:
        """No other command begins a run in this directory meanwhile. Yields True if none was begun there before.

        Raises:
            ConfigError: another command does, or the folder cannot be written, or its file system has no locks.
        """
        is_new = not self.exists
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self.opened(_BEGIN)
        except OSError as error:
            raise self._not_written(error.strerror or str(error)) from error
        with lock:
            try:
                take_flock(lock.fileno(), self._folder)
            except BlockingIOError:
                raise begun_twice(self._job.run_dir) from None
            except OSError as error:
                raise self._not_written(error.strerror or str(error)) from error
            yield is_new

    @property
    def exists(self) -> bool:
        """True if a run on Ray was begun in this directory."""
        return self._folder.exists()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def why_not_shared(self) -> str:
        """Why this machine does not see the files of the run; empty if it does."""
        try:
            nonce = (self._folder / _NONCE).read_text(encoding="utf-8")
        except OSError as error:
            return f"{self._folder} cannot be read there ({error.strerror or error})"
        return "" if nonce == self._job.nonce else f"{self._folder} is another folder there, or of another run"

    def words(self) -> list[str] | None:
        """The words of the run that was begun last in this directory; None: none was."""
        found = self._read(_JOB)
        return None if found is None else found["words"]

    @property
    def progress(self) -> Progress:
        found = self._read(_PROGRESS)
        return Progress() if found is None else Progress(**found)

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._write(_PROGRESS, json.dumps(dataclasses.asdict(progress)))

    @property
    def code(self) -> int | None:
        """The exit code of the run that has ended; None: it goes on."""
        found = self._read(_ENDED)
        return None if found is None else found["code"]

    def end(self, code: int) -> None:
        """Write the exit code.

        Raises:
            FilesError: it cannot be written.
        """
        self._write(_ENDED, json.dumps({"code": code}))

    def ask_to_stop(self) -> None:
        """Have the supervisor end the run, also one that is being started again and hears no call."""
        self.opened(_STOP).close()

    @property
    def is_asked_to_stop(self) -> bool:
        return (self._folder / _STOP).exists()

    def tell(self, line: str) -> None:
        """Write a line to the log."""
        self.append(f"ray: {line}\n".encode())

    def append(self, text: bytes) -> None:
        """Write to the end of the log. A disk that is full takes lines away, and not the run."""
        with contextlib.suppress(OSError), self.opened(LOG) as log:
            log.write(text)

    def opened(self, name: str) -> IO[bytes]:
        """A file that is written at its end."""
        return os.fdopen(open_private(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)

    def last_line(self, name: str) -> str:
        """The last line of a file that has something in it."""
        try:
            with open(self._folder / name, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def note_for(self, node: str, start: str) -> Path:
        """The file by which an agent is told another rendezvous.

        Args:
            node: the name of its node, which may have two of them for a while.
            start: identifies its start.
        """
        return self._folder / f"agent-{node}-{start}.moved"

    def remove_notes(self) -> None:
        """Remove the notes that agents have not read: they were lost, or have ended."""
        for pattern in ("agent-*.moved", ".agent-*.moved.taken"):
            for note in self._folder.glob(pattern):
                note.unlink(missing_ok=True)

    @property
    def steps(self) -> int:
        """The steps that the run has done, as its directory tells."""
        try:
            return (Path(self._job.run_dir) / _METRICS).read_bytes().count(b"\n")
        except OSError:
            return 0

    @property
    def has_begun(self) -> bool:
        """True if the run has a directory."""
        return Path(self._job.run_dir).exists()

    @property
    def has_workers(self) -> bool:
        """True if workers that were beside a controller live, or their fork server.

        Where a file system has locks that hold on several machines, they may be on another one.
        """
        return workers_live(self._job.run_dir)

    @property
    def has_checkpoint(self) -> bool:
        """True if there is a checkpoint that was completed: its manifest is written last.

        Raises:
            OSError: the file system does not tell: a run that seems to have none would be put aside.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return any((path / MANIFEST).exists() for path in (Path(self._job.run_dir) / _CHECKPOINTS).iterdir())
        return False

    @property
    def shards(self) -> frozenset[str]:
        """The files of state that workers have written. They may be whole: workers left alone write no manifest.

        Raises:
            OSError: as for `has_checkpoint`.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return frozenset(map(str, (Path(self._job.run_dir) / _CHECKPOINTS).glob(f"*/{_SHARDS}")))
        return frozenset()

    @property
    def has_result(self) -> bool:
        """True if the run has finished."""
        return (Path(self._job.run_dir) / _SUMMARY).exists()

    def check_free(self, *, nobody_waits: bool) -> None:
        """Check that no controller has the directory.

        Args:
            nobody_waits: the next one need not wait for agents with workers, since there are none.

        Raises:
            ConfigError: one still has it.
        """
        with lock_run_dir(Path(self._job.run_dir)) as lock:
            if nobody_waits:
                lock.life_began()

    def put_aside(self) -> Path | None:
        """Rename the directory of a run that has no checkpoint to go on from, and return its new name.

        None: the controller before has completed a checkpoint at its end.

        Raises:
            ConfigError: it still has the directory.
        """
        number, path = 1, Path(self._job.run_dir)
        with lock_run_dir(path):
            if self.has_checkpoint:
                return None
            while (aside := path.with_name(f"{path.name}.without_checkpoint.{number}")).exists():
                number += 1
            path.rename(aside)
        return aside

    def _write(self, name: str, text: str) -> None:
        with replacing(self._folder / name, durable=True) as scratch:
            scratch.write_text(text, encoding="utf-8")

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None


def begun_twice(run_dir: str) -> ConfigError:
    """The error of a command that finds another one beginning a run in the same directory."""
    return ConfigError(
        f"another command begins a run in {run_dir} at this moment",
        rule="a run has one controller at a time; the same command as the other one shows it once it has begun",
        where="run.dir",
        fix="wait a moment and try again, or another run.dir",
    )
