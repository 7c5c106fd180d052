"""Files that a user names, and those of a run: a pipe, a device or a directory in their place is refused at once.

Without the refusal each of these tests would wait until its time is up: nobody writes to the pipes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import elaswave_spmd as ew
from elaswave_spmd.data.cache import _read_entry
from elaswave_spmd.data.corpus import read_corpus, text_corpus
from elaswave_spmd.data.tokenizer import load_tokenizer
from elaswave_spmd.errors import CheckpointError, ConfigError, DataError, FilesError, UserError
from elaswave_spmd.regular_files import A_LINK, NO_FILE, open_regular, read_regular, regular_fd
from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.run_dir import RunDir, read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.checkpoint_shard import read_shard
from elaswave_spmd.run_dir.checkpoints import open_checkpoint
from elaswave_spmd.run_dir.in_place import InPlace
from elaswave_spmd.run_dir.journal import Journal, read_journal
from elaswave_spmd.run_dir.json_lines import JsonLines
from elaswave_spmd.run_dir.lock import LOCK, WORKERS_LOCK, lock_run_dir, workers_live
from elaswave_spmd.run_dir.trace import merge_trace
from elaswave_spmd.runtime.processes.rendezvous import read_secret
from elaswave_spmd.runtime.processes.scratch import hold_lock
from elaswave_spmd.weights.resolve import existing_path
from elaswave_spmd.weights.tensor_files import TensorFiles
from elaswave_spmd.worker.checkpoint_writer import read_reports

pytestmark = pytest.mark.timeout(60)


def test_a_regular_file_is_read_and_written(tmp_path: Path) -> None:
    with open(regular_fd(tmp_path / "a", os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b"1")
    (tmp_path / "link").symlink_to("a")
    with open_regular(str(tmp_path / "link")) as file:
        assert not os.get_inheritable(file.fileno()) and file.read() == b"1" == read_regular(tmp_path / "a")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_pipes_devices_sockets_and_directories_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    number = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "socket", "/dev/null"):
        with pytest.raises(OSError, match=NO_FILE) as caught:
            regular_fd(path, flags)
        assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        regular_fd(tmp_path, flags)
    assert len(os.listdir("/proc/self/fd")) == number, "nothing stays open"


READS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "metrics.jsonl": (read_metrics, DataError),
    "events.jsonl": (read_events, DataError),
    "summary.json": (read_summary, DataError),
    "epochs.jsonl": (read_journal, DataError),
    "controller.lock": (lock_run_dir, ConfigError),
    "workers.lock": (workers_live, ConfigError),
    "weights.safetensors": (lambda run: TensorFiles([run / "weights.safetensors"], "where"), ConfigError),
    "manifest.json": (lambda run: open_checkpoint(run, verify=False), CheckpointError),
    "shard_0.safetensors": (lambda run: read_shard(run / "shard_0.safetensors"), CheckpointError),
    "token": (lambda run: read_secret(str(run / "token"), where="runtime.token_file"), ConfigError),
    "a.txt": (lambda run: read_corpus("text", [run / "a.txt"]), DataError),
}


@pytest.mark.parametrize("name", READS)
def test_a_pipe_in_a_run_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    reads, kind = READS[name]
    with pytest.raises(kind, match=NO_FILE):
        reads(tmp_path)


def test_what_does_without_a_file_does_without_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    for name in ("epochs.jsonl", "reports_0.json", "meta.json", "trace-0.jsonl"):
        os.mkfifo(tmp_path / name)
    InPlace(tmp_path).check()
    assert read_reports(tmp_path)[0] == {} and _read_entry(tmp_path, 256) is None
    assert merge_trace(tmp_path) is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("reads_before", [False, True])
def test_a_report_of_a_run_with_a_pipe_is_refused(tmp_path: Path, name: str, reads_before: bool) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    reader = RunReader(tmp_path)
    if reads_before:
        reader.read()
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=NO_FILE):
        reader.read()


def test_a_run_with_a_pipe_is_not_opened_to_be_written(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ConfigError, match=rf"{name}: {NO_FILE}"):
            RunDir.reopen(tmp_path)
        os.remove(tmp_path / name)
    os.mkfifo(tmp_path / "epochs.jsonl")
    with pytest.raises(DataError, match=NO_FILE):
        Journal(tmp_path)


@pytest.mark.parametrize("name", ["weights.safetensors", "summary.json", "costs.json", "tensorboard", "checkpoints"])
def test_a_run_with_a_directory_for_a_file_is_refused_before_it_trains(tmp_path: Path, name: str) -> None:
    """Else it would be found when the result is written."""
    if name in ("tensorboard", "checkpoints"):
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=rf"{name}: (Is|Not) a directory"):
        RunDir.reopen(tmp_path)


@pytest.mark.parametrize(("name", "opens"), [(LOCK, lock_run_dir), (WORKERS_LOCK, workers_live)])
def test_a_lock_that_is_a_directory_is_refused(tmp_path: Path, name: str, opens: Callable[[Path], object]) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"cannot be locked \(Is a directory\)"):
        opens(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(FilesError) if name == LOCK else contextlib.nullcontext():
        opens(tmp_path)


@pytest.mark.parametrize("name", [LOCK, WORKERS_LOCK])
@pytest.mark.parametrize("is_there", [True, False], ids=["of a file", "of nothing"])
def test_the_lock_of_a_new_run_follows_no_link(tmp_path: Path, name: str, is_there: bool) -> None:
    """Where others may write to the directory, it could point to any file of the user, which was overwritten."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    if is_there:
        mine.write_text("of the user")
        mine.chmod(0o644)
    (run / name).symlink_to(mine)
    with pytest.raises(ConfigError, match=f"{name} cannot be locked .{A_LINK}"):
        lock_run_dir(run)
    with pytest.raises(OSError, match="symbolic links"):
        hold_lock(run / name)
    if name == WORKERS_LOCK:
        with pytest.raises(ConfigError, match=A_LINK):
            workers_live(run)
    assert mine.exists() == is_there
    if is_there:
        assert mine.read_text() == "of the user" and stat.S_IMODE(mine.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("name", "opens", "kind"),
    [
        ("metrics.jsonl", RunDir.reopen, ConfigError),
        ("events.jsonl", RunDir.reopen, ConfigError),
        ("epochs.jsonl", RunDir.reopen, ConfigError),
        ("events.jsonl", lambda run: JsonLines(run / "events.jsonl"), OSError),
        ("epochs.jsonl", Journal, FilesError),
    ],
)
def test_what_a_resumed_run_appends_to_is_no_link(
    tmp_path: Path, name: str, opens: Callable[[Path], object], kind: type[Exception]
) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    run.mkdir()
    mine.write_text("of the user, and no whole line")
    mine.chmod(0o644)
    (run / name).symlink_to(mine)
    with pytest.raises(kind, match=A_LINK):
        opens(run)
    assert mine.read_text() == "of the user, and no whole line" and stat.S_IMODE(mine.stat().st_mode) == 0o644


TOO_LONG = "a" * 5000


@pytest.mark.parametrize(
    "reads",
    [
        lambda: text_corpus(TOO_LONG),
        lambda: load_tokenizer(TOO_LONG),
        lambda: existing_path(TOO_LONG),
        lambda: ew.load_model(TOO_LONG),
        lambda: ew.load_run(TOO_LONG),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_refused_in_words(reads: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        reads()
