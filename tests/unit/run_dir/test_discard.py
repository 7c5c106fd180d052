"""What a run gives up when it goes back: checkpoints, metrics and validations after a step."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elaswave_spmd.errors import FilesError
from elaswave_spmd.run_dir import discard
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.discard import discard_after
from elaswave_spmd.run_dir.rollback import still_valid, unfinished_rollback
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def events(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.touch()
    return path


def test_all_after_the_step_goes_and_the_rest_stays(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        folder = checkpoint_path(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "shard").write_text("x")
    (checkpoint_path(tmp_path, 12) / "manifest.json").unlink()  # unfinished
    lines = [{"step": step, "loss": 0.5} for step in range(1, 14)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 14')
    discard_after(tmp_path, 8)
    assert [checkpoint_path(tmp_path, step).exists() for step in (4, 8, 12)] == [True, True, False]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == lines[:8]
    discard_after(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == "" and not checkpoint_path(tmp_path, 4).exists()


def test_the_event_is_on_the_disk_before_anything_is_removed(
    tmp_path: Path, events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, flushed, fsync = checkpoint_path(tmp_path, 12), list[Path](), os.fsync
    folder.mkdir(parents=True)
    manifest = folder / "manifest.json"
    manifest.touch()
    (tmp_path / "metrics.jsonl").touch()

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        assert manifest.exists() == (not flushed), path
        flushed.append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    discard_after(tmp_path, 8)
    assert flushed[0] == events and not folder.exists()


def made_meanwhile(shard: Path) -> OSError:
    """A worker on another machine makes a file between the look into the folder and its removal."""
    shard.touch()
    return OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(shard.parent))


def renamed_meanwhile(shard: Path) -> OSError:
    """It gives a file its name, which had another one when the folder was looked into."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(shard))


def removed_meanwhile(shard: Path) -> OSError:
    shard.unlink()
    shard.parent.rmdir()
    return renamed_meanwhile(shard)


@pytest.mark.parametrize("meanwhile", [made_meanwhile, renamed_meanwhile, removed_meanwhile])
@pytest.mark.parametrize("times", [1, 3])
def test_workers_that_write_for_a_moment_still_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Path], OSError], times: int
) -> None:
    folder, rmtree, left = checkpoint_path(tmp_path, 12), shutil.rmtree, [meanwhile] * times
    folder.mkdir(parents=True)
    (folder / "shard").touch()
    (tmp_path / "metrics.jsonl").touch()

    def remove(path: Path) -> None:
        if left:
            raise left.pop()(path / "shard")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    discard_after(tmp_path, 8)
    assert not folder.exists()


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EACCES])
def test_what_cannot_be_removed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    checkpoint_path(tmp_path, 12).mkdir(parents=True)

    def remove(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(shutil, "rmtree", remove)
    monkeypatch.setattr(discard, "_WRITING_S", 0.0 if number == errno.ENOTEMPTY else PATIENCE_S)
    with pytest.raises(FilesError, match=re.escape(os.strerror(number))):
        discard_after(tmp_path, 8)


def test_events_of_steps_that_were_given_up_do_not_count() -> None:
    def event(kind: str, step: int, loss: str = "") -> dict[str, object]:
        return {"event": kind, "step": step, "loss_hex": loss}

    events = [event("validation", 5, "a"), event("fail", 6), event("validation", 10, "b"), event("rollback", 8)]
    assert still_valid(events, "validation") == events[:1]
    events.append(event("validation", 10, "c"))
    assert still_valid(events, "validation") == [events[0], events[-1]]


def test_a_rollback_is_over_when_the_next_life_of_the_run_has_begun() -> None:
    def event(kind: str, step: int = 0) -> dict[str, object]:
        return {"event": kind, "step": step}

    lives = [event("start"), event("rollback", 8), event("start"), event("resume", 8)]
    assert unfinished_rollback(lives) is None
    assert unfinished_rollback([*lives, event("rollback", 4), event("stop")]) == 4
    assert unfinished_rollback([event("start"), event("rollback", 0)]) == 0, "to the begin of the run"
    assert unfinished_rollback([]) is None
