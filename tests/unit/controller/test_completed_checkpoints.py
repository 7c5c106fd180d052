"""A checkpoint that workers wrote when their controller was gone: the next controller completes it, or leaves it."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.controller import resume
from elaswave_spmd.controller.resume import complete
from elaswave_spmd.errors import UserError
from elaswave_spmd.regular_files import regular_fd
from elaswave_spmd.run_dir import checkpoint_shard, read_metrics
from elaswave_spmd.run_dir.checkpoint_shard import UnreadableError
from elaswave_spmd.run_dir.checkpoints import load_newest_good, newest_complete
from elaswave_spmd.run_dir.journal import Ballot, Journal
from elaswave_spmd.run_dir.manifest import MANIFEST, layout_fingerprint
from elaswave_spmd.worker import checkpoint_writer
from elaswave_spmd.worker.checkpoint_writer import StepRecord, _save_reports
from tests.unit.run_dir.checkpoint_cases import KINDS, flip, save, small_layout, state_of, whole, write_shards

STEP = 2
OPTIM = {"lr": 0.5, "schedule": "constant", "warmup_steps": 0, "final_lr_ratio": 0.0}


def identity(vocab_size: int = 256) -> dict[str, Any]:
    train = {"steps": 9, "global_batch": 8, "seq_len": 12}
    return {"train": train, "optim": OPTIM, "data": {"vocab_size": vocab_size}}


def saved_by_workers(folder: Path, **about: Any) -> Path:
    """A run without a line of metrics, whose workers have saved the state after step 2. Returns the checkpoint."""
    directory, _ = save(folder, STEP)
    (directory / MANIFEST).unlink()
    record(folder, directory, **about)
    return directory


def record(folder: Path, directory: Path, incarnation: int = 1, **about: Any) -> None:
    """What a life of the run, and its workers that have saved their state in `directory`, write beside the shards."""
    (folder / "metrics.jsonl").touch()
    _save_reports(directory, 0, [StepRecord(step, 3, 1.5, 0.25, 2) for step in (1, STEP)])
    fields = {"run": "r1", "layout": layout_fingerprint(small_layout()), "kinds": list(KINDS), "identity": identity()}
    with Journal(folder) as journal:
        journal.append(incarnation, 3, "start", **(fields | about))


def damage(directory: Path, how: str) -> None:
    """Make a bad checkpoint of a good one."""
    shard = sorted(directory.glob("shard_*"))[0]
    match how:
        case "flipped":
            flip(shard, -1)
        case "missing":
            shard.unlink()
        case "torn":
            (directory / MANIFEST).write_text("{")


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that cannot be read while they are in it, as on a mount that is stale."""
    names: list[str] = []

    def opened(path: Path, flags: int) -> int:
        if path.name in names:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return regular_fd(path, flags)

    monkeypatch.setattr(checkpoint_shard, "regular_fd", opened)
    return names


@pytest.mark.parametrize(("vocab_size", "tokens"), [(256, 96), (0, 8)])
def test_missing_lines_have_the_tokens_of_the_run_that_was_saved(tmp_path: Path, vocab_size: int, tokens: int) -> None:
    directory = saved_by_workers(tmp_path, identity=identity(vocab_size))
    assert complete(tmp_path) == directory
    lines = [(line.step, line.tokens, line.lr) for line in read_metrics(tmp_path)]
    assert lines == [(1, tokens, 0.5), (2, tokens, 0.5)]
    assert newest_complete(tmp_path) == STEP


def test_the_next_resume_does_not_look_again_at_what_was_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look whether a checkpoint is good is to read all of it."""
    directory = saved_by_workers(tmp_path)
    assert complete(tmp_path) == directory
    monkeypatch.setattr(resume, "_is_good", lambda path: pytest.fail(f"{path} is read"))
    assert complete(tmp_path) is None
    save(tmp_path, STEP + 1)
    assert complete(tmp_path) is None, "nor at a newer one"


def test_lines_and_events_are_on_the_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, order = saved_by_workers(tmp_path), list[str]()

    def sync(path: Path) -> None:
        assert read_metrics(tmp_path)[-1].step == STEP
        order.append(path.name)

    monkeypatch.setattr(resume, "sync_file", sync)
    monkeypatch.setattr(resume, "write_manifest", lambda path, manifest: order.append(path.name))
    assert complete(tmp_path) == directory
    assert order == ["metrics.jsonl", "events.jsonl", directory.name]


def test_a_shard_that_cannot_be_read_now_is_waited_for(tmp_path: Path, unreadable: list[str]) -> None:
    save(tmp_path, 1)
    directory = saved_by_workers(tmp_path)
    shards = sorted(file.name for file in directory.glob("shard_*"))
    for names in (shards[:1], shards):
        unreadable[:] = names
        with pytest.raises(UnreadableError, match=rf"step 2, .*: cannot read {names[0]} \(Stale file handle\)") as it:
            complete(tmp_path)
        assert isinstance(it.value, UserError) and f"remove {directory}" in it.value.fix
    unreadable.clear()
    assert complete(tmp_path) == directory and load_newest_good(tmp_path)[0].step == STEP


def test_records_that_cannot_be_read_now_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has no line in the metrics without them, so the state could not be gone on from, and was removed."""
    directory = saved_by_workers(tmp_path)

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "read_regular", stale)
        with pytest.raises(UnreadableError, match=r"cannot read reports_0\.json \(Stale file handle\)"):
            complete(tmp_path)
    assert complete(tmp_path) == directory and load_newest_good(tmp_path)[0].step == STEP


def test_one_that_is_needed_by_nobody_is_not(tmp_path: Path, unreadable: list[str]) -> None:
    directory = saved_by_workers(tmp_path)
    superfluous = directory / "shard_9_1-3.safetensors"
    superfluous.write_bytes(b"")
    unreadable.append(superfluous.name)
    assert complete(tmp_path) == directory


def test_a_damaged_one_is_not_either(tmp_path: Path) -> None:
    save(tmp_path, 1)
    directory = saved_by_workers(tmp_path)
    next(directory.glob("shard_*")).write_bytes(b"torn")
    assert complete(tmp_path) is None


def test_a_checkpoint_that_cannot_be_listed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved_by_workers(tmp_path)

    def stale(path: Path) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_shard.os, "listdir", stale)
        with pytest.raises(UnreadableError, match="Stale file handle"):
            complete(tmp_path)
    assert complete(tmp_path) == directory


DAMAGES = ("flipped", "missing", "torn")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_newer_checkpoint_that_is_bad_is_passed_over(tmp_path: Path, how: str) -> None:
    """The run went on from a checkpoint before it, and its controller was killed before it had come so far again."""
    save(tmp_path, 1)
    bad, _ = save(tmp_path, STEP + 1)
    damage(bad, how)
    directory = saved_by_workers(tmp_path)
    assert complete(tmp_path) == directory
    found, others = load_newest_good(tmp_path)
    assert found.step == STEP and [path for path, _ in others] == [bad]


@pytest.mark.parametrize("how", DAMAGES)
def test_what_workers_have_saved_beside_a_bad_checkpoint_takes_its_place(tmp_path: Path, how: str) -> None:
    directory, _ = save(tmp_path, STEP)
    damage(directory, how)
    layout = small_layout()
    shards = {0: whole(layout)}
    write_shards(directory, layout, state_of(layout, STEP), shards, step=STEP, ballot=Ballot(2, 3))
    record(tmp_path, directory, incarnation=2)
    assert complete(tmp_path) == directory
    found, others = load_newest_good(tmp_path)
    assert found.manifest.ballot == Ballot(2, 3) and not others


@pytest.mark.parametrize("how", ["", *DAMAGES])
def test_a_checkpoint_is_not_made_anew_of_its_own_shards(tmp_path: Path, how: str) -> None:
    """A good one stays, as does what is before it. A bad one is left to whoever looks for the newest good one."""
    directory = saved_by_workers(tmp_path)
    newest, _ = save(tmp_path, STEP + 1)
    damage(newest, how)
    before = (newest / MANIFEST).read_bytes()
    assert complete(tmp_path) == (directory if how else None)
    assert (newest / MANIFEST).read_bytes() == before


def test_whether_the_newest_is_good_is_not_looked_at_if_nothing_depends_on_it(
    tmp_path: Path, unreadable: list[str]
) -> None:
    """To look is to read all of it."""
    for step in (1, STEP):
        directory, _ = save(tmp_path, step)
    unreadable += [file.name for file in directory.glob("shard_*")]
    assert complete(tmp_path) is None


@pytest.mark.parametrize("kind", ["corrupt", "mismatch", "checkpoint_lost", "uncompared"])
def test_shards_that_may_be_of_a_wrong_replica_are_left(tmp_path: Path, kind: str) -> None:
    """The run has an event about them, by their ballot: those of a later mesh epoch or life are others."""
    directory = saved_by_workers(tmp_path)
    (ballot,) = {shard.ballot for shard in checkpoint_shard.find_shards(directory)[0]}
    events = tmp_path / "events.jsonl"

    def say(step: int, **about: Any) -> None:
        events.write_text(json.dumps({"event": kind, "time": 0.0, "step": step, **about}) + "\n")

    say(STEP, ballot=list(ballot))
    assert complete(tmp_path) is None
    say(STEP, ballot=[ballot.incarnation, ballot.epoch + 1])
    assert complete(tmp_path) is None
    for other in ({}, {"ballot": [ballot.incarnation, ballot.epoch - 1]}, {"ballot": [ballot.incarnation - 1, 99]}):
        say(STEP, **other)
        assert complete(tmp_path) == directory
        (directory / MANIFEST).unlink()
    say(STEP + 1, ballot=list(ballot))
    assert complete(tmp_path) == directory
