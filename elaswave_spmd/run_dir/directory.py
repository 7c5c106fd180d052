"""The directory of a run, and those of its files whose form is stable (docs/run_files.md).

The directory is created as a whole: if that fails nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from elaswave_spmd.conf.format_version import FORMAT_FIELD, FORMAT_VERSION
from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.errors import ConfigError, DataError, FilesError
from elaswave_spmd.regular_files import A_LINK, read_regular
from elaswave_spmd.run_dir.atomic_write import (
    READ_ONLY,
    make_private_folder,
    open_private,
    replacing,
    sync_directory,
    sync_file,
    writing,
)
from elaswave_spmd.run_dir.in_place import InPlace
from elaswave_spmd.run_dir.journal import BALLOT, Ballot
from elaswave_spmd.run_dir.json_lines import (
    JsonLines,
    float_of_hex,
    is_count,
    is_number,
    line_name,
    plain,
    read_json,
    read_json_lines,
)
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.trace import TRACE, parts_in
from elaswave_spmd.run_dir.weights import save_weights

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
SUMMARY, WEIGHTS, COSTS, BOARD = "summary.json", "weights.safetensors", "costs.json", "tensorboard"
WEIGHTS_EMA = "weights_ema.safetensors"
TRACKERS = "trackers"
# Written by journal.py, checkpoints.py and lock.py.
RECOVERY = ("epochs.jsonl", "checkpoints", "controller.lock", "workers.lock")
_FOLDERS = (BOARD, "checkpoints")
RUN_FILES = (CONFIG, METRICS, EVENTS, SUMMARY, WEIGHTS, WEIGHTS_EMA, COSTS, BOARD, *RECOVERY[:2])
_NAME_TRIES = 100


class RunDir:
    """A run's directory, open for writing. Made by `RunDir.create` or `RunDir.reopen`.

    Call `close` at the end, or `discard` if the run was refused before it started. Every method that writes raises
    FilesError when the disk is full, except `write_costs`. All but `write_event` also raise it if the directory is not
    at its path any more, or another one is there.

    Args:
        path: the absolute path of the directory.
        made_folders: the folders that were made for it, outermost first; `discard` removes those that are empty.
        is_new: False if it is the directory of a run that is resumed, whose files `discard` must keep.
    """

    def __init__(self, path: Path, made_folders: tuple[Path, ...] = (), *, is_new: bool = True) -> None:
        self.path = path
        self._is_new = is_new
        self._made_folders = made_folders
        self._in_place = InPlace(path)
        self._metrics = JsonLines(path / METRICS)
        try:
            self._events = JsonLines(path / EVENTS)
        except BaseException:
            self._metrics.close()
            raise

    @classmethod
    def create(
        cls,
        path: str | Path | None,
        config_yaml: str,
        *,
        model: str,
        mesh: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> RunDir:
        """Create the directory and its config.yaml, and open its logs. If that fails, nothing is left behind.

        Args:
            path: `run.dir`; None means `runs/<model>-<mesh>-<time>` below the working directory.
            config_yaml: the settings in YAML, as config.yaml contains them after its first line (the format version).
            model, mesh: names from which the name of the default directory is made.
            now: returns the time for the name of the default directory.

        Raises:
            ConfigError: the directory has a run in it already, is not a directory, cannot be written, or its path is
                not UTF-8.
        """
        if path is not None and not str(path).strip():
            raise ConfigError(
                "run.dir= is empty", rule="run.dir names a directory", where="run.dir", fix="run.dir=runs/a"
            )
        candidates = _default_paths(model, mesh, now()) if path is None else [Path(os.path.expanduser(path))]
        for candidate in candidates:
            if path is None and candidate.exists():
                continue
            folder = candidate.absolute()
            _refuse_unreadable(folder)
            _refuse_occupied(folder)
            # Each step that creates something registers how to remove it; `pop_all` at the end cancels the removals.
            with contextlib.ExitStack() as undo, _directory_errors(candidate):
                made = _make_folders(folder, undo)
                if path is None and folder not in made:  # another run has taken the name meanwhile
                    continue
                _claim(folder / CONFIG, f"{FORMAT_FIELD}: {FORMAT_VERSION}\n{config_yaml}", undo)
                undo.callback(_remove_files, folder, (METRICS, EVENTS))
                run_dir = cls(folder, made)
                undo.callback(run_dir.close)
                _sync_names(folder, made)
                undo.pop_all()
                return run_dir
        raise ConfigError(f"no free name under runs/ after {_NAME_TRIES} tries", where="run.dir", fix="run.dir=runs/a")

    @classmethod
    def reopen(cls, path: Path) -> RunDir:
        """Open the directory of a run that is resumed. Only the process that has locked it (lock.py) may do so.

        Weights without a summary are removed: they were left by a run that ended while it wrote its result, and will be
        written again.

        Raises:
            ConfigError: the directory cannot be written, or a file of it is a pipe, a device or a directory, or one
                that is continued is a link.
        """
        with _directory_errors(path):
            _check_writable(path)
            _refuse_other_kinds(path)
            if not os.path.lexists(path / SUMMARY):
                _remove_files(path, (WEIGHTS, WEIGHTS_EMA))
            return cls(path.absolute(), is_new=False)

    @property
    def board_path(self) -> Path:
        """The folder of TensorBoard's files."""
        return self.path / BOARD

    def write_metrics(self, line: MetricsLine) -> None:
        """Append a line to metrics.jsonl."""
        self._in_place.check()
        self._metrics.append(line.to_dict())

    def write_event(self, kind: str, time: float, fields: Mapping[str, object]) -> None:
        """Append a line to events.jsonl: {"event": kind, "time": seconds since 1970, ...fields}."""
        if clash := {"event", "time"} & fields.keys():
            raise ValueError(f"an event's own fields cannot be called {sorted(clash)}")
        self._events.append({"event": kind, "time": round(time, 6), **fields})

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json, whole or not at all, and flush it to the disk. From then on the run is finished.

        What it tells of is on the disk before it: the last metrics and events, which nobody computes again.
        """
        text = json.dumps(plain(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._in_place.check()
        for name in (METRICS, EVENTS):
            with writing(self.path / name):
                sync_file(self.path / name)
        with replacing(self.path / SUMMARY, durable=True) as scratch:
            scratch.write_text(text, encoding="utf-8")

    def write_costs(self, text: str) -> str:
        """Write costs.json, whole or not at all. If that fails the run can go on without these measurements.

        Returns:
            The reason why the file was not written, and is as it was before; empty if it was written.

        Raises:
            FilesError: the directory is not at its path any more, or another one is there.
        """
        self._in_place.check()
        try:
            with replacing(self.path / COSTS, durable=False) as scratch:
                scratch.write_text(text + "\n", encoding="utf-8")
        except FilesError as error:
            return error.why
        return ""

    def write_weights(self, weights: Mapping[str, np.ndarray], name: str = WEIGHTS) -> None:
        """Write weights.safetensors, or another such file, whole or not at all, and flush it to the disk.

        To be called before `write_summary`: a run that has a summary has its weights.
        """
        self._in_place.check()
        with replacing(self.path / name, durable=True) as scratch:
            save_weights(scratch, weights)

    def close(self) -> None:
        """Close the logs; closing again is allowed."""
        self._metrics.close()
        self._events.close()

    def discard(self) -> bool:
        """Remove the run's files and the folders that `create` made. Called if no step was done.

        Returns:
            True if they were removed; False for a directory that was opened by `reopen`, which keeps its files.
        """
        self.close()
        if not self._is_new:
            return False
        # config.yaml goes last: while it is there, no other run takes the directory.
        traces = _traces_in(self.path)  # of this run: `create` has refused a directory with others
        weights = (WEIGHTS, WEIGHTS_EMA)
        _remove_files(self.path, (METRICS, EVENTS, SUMMARY, *weights, COSTS, RECOVERY[0], *RECOVERY[2:], *traces))
        with contextlib.suppress(OSError):
            for file in sorted(self.board_path.iterdir()):
                file.unlink()
            self.board_path.rmdir()
        _remove_files(self.path, (CONFIG,))
        for folder in reversed(self._made_folders):
            _remove_if_empty(folder)
        return True


def is_run_directory(folder: Path) -> bool:
    """True for a directory with the settings of a run.

    Raises:
        PermissionError: whether it is one cannot be told, as it may not be entered: runs keep theirs from other users.
    """
    try:
        return stat.S_ISREG(os.stat(folder / CONFIG).st_mode)
    except PermissionError:
        raise
    except OSError:  # it is not there; also of a name that is too long
        return False


def has_result(folder: Path) -> bool:
    """True for the directory of a run that has finished and has its weights. Weights without a summary do not count."""
    return os.path.exists(folder / SUMMARY) and os.path.exists(folder / WEIGHTS)


def read_metrics(path: str | Path) -> list[MetricsLine]:
    """The lines of a run's metrics.jsonl; `path` is the run's directory. A torn last line is left out.

    Raises:
        DataError: the file is missing or malformed.
    """
    file = Path(path) / METRICS
    lines = enumerate(read_json_lines(file), start=1)
    return [MetricsLine.from_dict(fields, line_name(file, number)) for number, fields in lines]


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The events of a run's events.jsonl, in order; `path` is the run's directory. A torn last line is left out.

    Raises:
        DataError: the file is missing or malformed.
    """
    file = Path(path) / EVENTS
    events = read_json_lines(file)
    for number, event in enumerate(events, start=1):
        if not _is_event(event):
            where = line_name(file, number)
            rule = "an event has a name and a time, and the fields of its kind (docs/run_files.md)"
            raise DataError(f"{where} is not an event: {str(event)[:500]}", rule=rule, where=where)
    return events


def read_summary(path: str | Path) -> dict[str, Any]:
    """A run's summary.json; `path` is the run's directory.

    Raises:
        DataError: the file is missing (the run has not finished) or malformed.
    """
    file = Path(path) / SUMMARY
    try:
        summary = read_json(read_regular(file))
        if not isinstance(summary, dict):
            raise ValueError("it is not a JSON object")
        return summary
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"cannot read {file} ({why})", rule="a run writes its summary when it has finished") from error


def _is_event(event: Mapping[str, Any]) -> bool:
    """True if an event has a name, a time, and the fields by which a run that is resumed goes on."""
    if not isinstance(event.get("event"), str) or not is_number(event.get("time")):
        return False
    match event["event"]:
        case "validation":
            return is_count(event.get("step")) and is_count(event.get("microbatches")) and _is_hex(event)
        case "rollback":
            return is_count(event.get("step"))
        case "corrupt" | "mismatch" | "checkpoint_lost" | "uncompared" if BALLOT in event:
            ballot = event[BALLOT]
            is_ballot = isinstance(ballot, list) and len(ballot) == len(Ballot._fields) and all(map(is_count, ballot))
            return is_ballot and is_count(event.get("step"))
        case "model_check":
            rows = event.get("layers")
            return isinstance(rows, list) and all(
                isinstance(row, dict) and isinstance(row.get("layer"), str) and isinstance(row.get("digest"), str)
                for row in rows
            )
    return True


def _is_hex(event: Mapping[str, Any]) -> bool:
    try:
        float_of_hex(event.get("loss_hex"))
    except ValueError:
        return False
    return True


def _default_paths(model: str, mesh: str, time: datetime) -> Iterator[Path]:
    # Model and mesh come from the user and may contain any character; keep those that are safe in a file name.
    parts = (re.sub(r"[^A-Za-z0-9_.]+", "_", part).strip("._") or "run" for part in (model, mesh))
    name = "-".join((*parts, time.strftime("%Y%m%d_%H%M%S")))
    yield Path("runs", name)
    for number in range(2, _NAME_TRIES + 1):
        yield Path("runs", f"{name}_{number}")


def _refuse_unreadable(folder: Path) -> None:
    """Refuse a path that is not UTF-8 (Python represents it with surrogates): safetensors could not open its files."""
    if str(folder).encode(errors="replace").decode() != str(folder):
        raise ConfigError(
            f"run.dir={folder} is not UTF-8",
            rule="the files of a run are in UTF-8, its own path among the texts in them",
            where="run.dir",
            fix="run.dir=DIR with another name, or start in a directory with another one",
        )


def _refuse_occupied(folder: Path) -> None:
    # The timeline (trace) of another run counts, too: this run would merge its parts into its own timeline, or remove
    # them when it is discarded.
    found = [name for name in RUN_FILES if os.path.lexists(folder / name)] + _traces_in(folder)
    if found:
        raise _holds_a_run(folder, ", ".join(found))


def _traces_in(folder: Path) -> list[str]:
    """The names of the timeline in a directory, and of its parts."""
    return [*([TRACE] if os.path.lexists(folder / TRACE) else []), *(part.name for part in parts_in(folder))]


def _holds_a_run(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"run.dir={folder} holds another run",
        rule="a run is never overwritten",
        where="run.dir",
        exists=found,
        fix="choose another run.dir, or leave it out",
    )


@contextlib.contextmanager
def _directory_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # If the error is about a file in the directory, such as a pipe, its name is part of the message.
        of_file = "" if error.filename in (None, str(folder)) else f"{error.filename}: "
        raise ConfigError(
            f"run.dir={folder} cannot be written ({of_file}{error.strerror or error})",
            where="run.dir",
            fix="run.dir=DIR with a directory that can be written",
        ) from error


def _check_writable(folder: Path) -> None:
    """Check that files can be created in a directory.

    Existing files may be writable in a directory in which none can be created: a run would train, and then could not
    write its result.

    Raises:
        OSError: no file can be created. A full disk is not reported here, as there may be room when it is needed.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno in READ_ONLY:
            raise


def _refuse_other_kinds(folder: Path) -> None:
    """Refuse a folder at the path of a run's file, a file at the path of a folder of it, or a link that is appended to.

    Otherwise the run would fail only after its last step, when it writes its result, or at its first one.

    Raises:
        OSError: there is such a path.
    """
    for name in (METRICS, EVENTS, RECOVERY[0]):
        if (folder / name).is_symlink():
            raise OSError(errno.ELOOP, A_LINK, str(folder / name))
    for name in RUN_FILES:
        number = errno.ENOTDIR if name in _FOLDERS else errno.EISDIR
        if (folder / name).exists() and (folder / name).is_dir() == (number == errno.EISDIR):
            raise OSError(number, os.strerror(number), str(folder / name))


def _make_folders(folder: Path, undo: contextlib.ExitStack) -> tuple[Path, ...]:
    """Create `folder` and its missing parents. Returns the folders that were created, outermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    made: list[Path] = []
    for parent in reversed(missing):
        try:
            make_private_folder(parent)
        except FileExistsError:  # another run has created it meanwhile
            continue
        made.append(parent)
        undo.callback(_remove_if_empty, parent)
    return tuple(made)


def _claim(path: Path, text: str, undo: contextlib.ExitStack) -> None:
    """Create config.yaml exclusively (O_EXCL), so that of two runs that start in one directory one is refused."""
    try:
        os.close(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError as error:
        raise _holds_a_run(path.parent, path.name) from error
    undo.callback(_remove_files, path.parent, (path.name,))
    path.write_text(text, encoding="utf-8")
    sync_file(path)


def _sync_names(folder: Path, made: tuple[Path, ...]) -> None:
    """Flush the names of a new run's files, and those of the folders that were made for it, to the disk.

    What the run writes and flushes later is lost in a crash of the machine if its directory's own name is.
    """
    sync_directory(folder)
    for each in reversed(made):
        with contextlib.suppress(OSError):  # a folder of the user's may be one that cannot be read
            sync_directory(each.parent)


def _remove_files(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
