"""Whole checkpoints: the same bits at every cut, and never a damaged one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elaswave_spmd.controller.io import newest_checkpoint
from elaswave_spmd.errors import CheckpointError, FilesError, UserError
from elaswave_spmd.regular_files import regular_fd
from elaswave_spmd.run_dir import checkpoint_shard
from elaswave_spmd.run_dir.checkpoint_shard import Shard, checkpoint_path, find_shards
from elaswave_spmd.run_dir.checkpoints import (
    Checkpoint,
    Looks,
    find_checkpoints,
    load_newest_good,
    newest_complete,
    newest_of_life,
    open_checkpoint,
    prune,
    remove_superfluous,
    remove_unfinished,
    unfinished_shards,
    write_manifest,
)
from elaswave_spmd.run_dir.directory import EVENTS
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from tests.unit.run_dir.checkpoint_cases import (
    KINDS,
    State,
    cuts,
    flip,
    layouts,
    manifest_of,
    part,
    save,
    small_layout,
    state_of,
    whole,
    write_shards,
)


def _same(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def _read(checkpoint: Checkpoint, layout: ModelLayout, pages: PageRange, kind: str) -> np.ndarray:
    """As worker 7 of a mesh reads a page range of which it is the only replica."""
    target: ReplicaMap = {layer: () for layer in range(len(layout.layers))}
    target = {**target, pages[0]: (ReplicaSet(*pages, 7, frozenset((7,))),)}
    plan = checkpoint.plan_to(layout, target)
    return checkpoint.read(plan, 7, pages, kind)


def _holds(run_dir: Path, step: int, state: State) -> bool:
    """True if the newest good checkpoint has this step and this state."""
    checkpoint, _ = load_newest_good(run_dir)
    layout = small_layout()
    return checkpoint.step == step and all(
        _same(_read(checkpoint, layout, run, kind), part(layout, state, run, kind))
        for run in whole(layout)
        for kind in KINDS
    )


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), st.data())
def test_any_page_ranges_read_what_any_others_wrote(
    tmp_path_factory: pytest.TempPathFactory, layout: ModelLayout, data: st.DataObject
) -> None:
    run_dir, state = tmp_path_factory.mktemp("run"), state_of(layout, 1)
    by_rank: dict[int, list] = {rank: [] for rank in range(data.draw(st.integers(1, 4)))}
    for run in data.draw(cuts(layout)):
        for rank in data.draw(st.sets(st.sampled_from(sorted(by_rank)), min_size=1, max_size=2)):
            by_rank[rank].append(run)
    shards = write_shards(checkpoint_path(run_dir, 8), layout, state, by_rank, step=8)
    write_manifest(checkpoint_path(run_dir, 8), manifest_of(layout, shards, 8))
    checkpoint, bad = load_newest_good(run_dir)
    assert bad == [] and checkpoint.step == 8
    for run in data.draw(cuts(layout)):
        for kind in KINDS:
            found = _read(checkpoint, layout, run, kind)
            assert found.flags.writeable and found.flags.c_contiguous
            assert _same(found, part(layout, state, run, kind)), (run, kind)


def test_a_part_is_read_without_the_rest(tmp_path: Path) -> None:
    directory, state = save(tmp_path, 10)
    for shard in directory.glob("shard_*"):
        flip(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"^\S+ has no good checkpoint\n"):
        load_newest_good(tmp_path)
    checkpoint = open_checkpoint(directory, verify=False)
    assert _same(
        _read(checkpoint, small_layout(), (0, 1, 3), "master"), part(small_layout(), state, (0, 1, 3), "master")
    )


def _cut_shard(directory: Path) -> str:
    path = sorted(directory.glob("shard_*"))[0]
    os.truncate(path, path.stat().st_size - 64)
    return "is torn or damaged (Error while deserializing header: incomplete metadata, file not fully covered)"


def _flip_shard(directory: Path) -> str:
    path = sorted(directory.glob("shard_*"))[1]
    flip(path, path.stat().st_size - 100, 6)
    return "does not match its sha256"


def _remove_shard(directory: Path) -> str:
    path = sorted(directory.glob("shard_*"))[0]
    path.unlink()
    return f"{path.name} is missing"


def _other_shard(directory: Path) -> str:
    """A good file, but not the one that was meant."""
    a, b = sorted(directory.glob("shard_*"))
    shutil.copy(a, b)
    return f"{b.name} is not the shard that the manifest names"


def _folder_for_shard(directory: Path) -> str:
    path = sorted(directory.glob("shard_*"))[0]
    path.unlink()
    path.mkdir()
    return f"cannot read {path.name} (Is a directory)"


def _cut_manifest(directory: Path) -> str:
    os.truncate(directory / MANIFEST, (directory / MANIFEST).stat().st_size // 2)
    return "the manifest is torn"


def _flip_manifest(directory: Path) -> str:
    text = (directory / MANIFEST).read_text()
    (directory / MANIFEST).write_text(text.replace('"seed":7', '"seed":5'))
    return "the manifest does not match its sha256"


def _no_manifest(directory: Path) -> str:
    (directory / MANIFEST).unlink()
    return "never finished"


def _other_manifest(directory: Path) -> str:
    shutil.copytree(directory.parent / "step_00000010", directory, dirs_exist_ok=True)
    return "the manifest belongs to step 10"


def _nothing(directory: Path) -> str:
    for file in directory.iterdir():
        file.unlink()
    return "never finished"


HARM = [
    _cut_shard,
    _flip_shard,
    _remove_shard,
    _other_shard,
    _folder_for_shard,
    _cut_manifest,
    _flip_manifest,
    _no_manifest,
    _other_manifest,
    _nothing,
]


@pytest.mark.parametrize("harm", HARM)
def test_the_checkpoint_before_serves(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    _, old = save(tmp_path, 10)
    newest, new = save(tmp_path, 20)
    assert _holds(tmp_path, 20, new)
    why = harm(newest)
    assert _holds(tmp_path, 10, old)
    _, [(path, reason)] = load_newest_good(tmp_path)
    assert path == newest and why in reason and "\n" not in reason


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_manifest_that_is_cut_anywhere_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    directory, _ = save(tmp_path, 10)
    content = (directory / MANIFEST).read_bytes()
    assert content.endswith(b"}\n")
    (directory / MANIFEST).write_bytes(content[: data.draw(st.integers(0, len(content) - 2))])
    with pytest.raises(CheckpointError, match="the manifest is torn"):
        open_checkpoint(directory, verify=True)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_bit_flipped_in_a_manifest_changes_nothing_unseen(tmp_path: Path, data: st.DataObject) -> None:
    directory, _ = save(tmp_path, 10)
    good = open_checkpoint(directory, verify=True).manifest
    size = (directory / MANIFEST).stat().st_size
    flip(directory / MANIFEST, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    try:
        assert open_checkpoint(directory, verify=True).manifest == good
    except CheckpointError as error:
        assert "manifest" in error.what


def test_without_a_good_checkpoint_the_error_names_each_and_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing in checkpoints/"):
        load_newest_good(tmp_path)
    for step in (10, 20, 30):
        save(tmp_path, step)
    _no_manifest(checkpoint_path(tmp_path, 10))
    _flip_shard(checkpoint_path(tmp_path, 20))
    _cut_manifest(checkpoint_path(tmp_path, 30))
    with pytest.raises(CheckpointError) as caught:
        load_newest_good(tmp_path)
    assert isinstance(caught.value, UserError)
    assert caught.value.what == f"{tmp_path} has no good checkpoint"
    assert caught.value.exists.split("; ") == [
        "step_00000030: the manifest is torn, or is not a manifest",
        "step_00000020: shard_5_1-3.safetensors does not match its sha256",
        "step_00000010: it has no manifest: it was never finished",
    ]


def test_a_controller_completes_a_checkpoint_of_its_predecessor(tmp_path: Path) -> None:
    """After a crash between the last shard and the manifest, the shards contain all that a manifest needs."""
    save(tmp_path, 10)
    directory, state = save(tmp_path, 20)
    (directory / MANIFEST).unlink()
    found, bad = find_shards(directory)
    assert not bad and load_newest_good(tmp_path)[0].step == 10
    write_manifest(directory, manifest_of(small_layout(), found, 20))
    assert _holds(tmp_path, 20, state)


def test_a_step_that_is_saved_again_replaces_a_torn_checkpoint(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, 20)
    _flip_shard(directory)
    _, state = save(tmp_path, 20, Ballot(2, 0))
    assert _holds(tmp_path, 20, state)
    assert len(list(directory.iterdir())) == 5


def test_checkpoints_are_found_by_number(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path) == []
    for step in (9, 99999999, 123456789):
        save(tmp_path, step)
    for other in ("step_5", "step_00000007x", "tmp"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "step_00000008").touch()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_123456789", "step_99999999", "step_00000009"]


def test_what_writers_that_were_ended_have_left_beside_a_checkpoint_is_removed(tmp_path: Path) -> None:
    directory, state = save(tmp_path, 20)
    good = {path.name for path in directory.iterdir()}
    (directory / ".shard_0_1-4.safetensors.tmp").touch()
    (directory / "shard_0_1-4.safetensors").touch()
    unfinished, _ = save(tmp_path, 30)
    (unfinished / MANIFEST).unlink()
    left = {path.name for path in unfinished.iterdir()}
    remove_superfluous(tmp_path)
    assert {path.name for path in directory.iterdir()} == good and _holds(tmp_path, 20, state)
    assert {path.name for path in unfinished.iterdir()} == left, "the next controller may complete it"


def test_what_the_run_has_given_up_is_not_loaded_before_it_is_removed(tmp_path: Path) -> None:
    """Its controller was killed between the event and the removal: export, generate and others find what is right."""
    for step in (10, 20, 50):
        save(tmp_path, step)
    events = [{"event": "start", "time": 1.0}, {"event": "rollback", "time": 2.0, "step": 20}]
    (tmp_path / EVENTS).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    checkpoint, bad = load_newest_good(tmp_path)
    assert checkpoint.step == 20 and [(path.name, "going back to step 20" in why) for path, why in bad] == [
        ("step_00000050", True)
    ]
    assert load_newest_good(tmp_path, 10)[0].step == 10
    with open(tmp_path / EVENTS, "a") as file:  # the next life has removed it, and has come to the same step again
        file.write(json.dumps({"event": "start", "time": 3.0}) + "\n")
    assert load_newest_good(tmp_path)[0].step == 50


# ---- prune


def _names(paths: list[Path]) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in paths]


def _paths(run_dir: Path, *steps: int) -> list[Path]:
    return [checkpoint_path(run_dir, step) for step in steps]


def test_prune_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
    _no_manifest(checkpoint_path(tmp_path, 7))  # under way
    _flip_shard(checkpoint_path(tmp_path, 5))
    _nothing(checkpoint_path(tmp_path, 3))
    assert _names(prune(tmp_path, 2)) == [5, 3, 2, 1]
    assert _names(find_checkpoints(tmp_path)) == [7, 6, 4]
    assert prune(tmp_path, 2) == []
    assert _names(prune(tmp_path, 1)) == [4]
    assert prune(tmp_path, 1) == []


def test_prune_keeps_one_that_the_run_may_go_back_to(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
    _flip_shard(checkpoint_path(tmp_path, 3))
    assert _names(prune(tmp_path, 2, trusted=3)) == [5, 4, 3, 1]
    assert _names(prune(tmp_path, 2, trusted=6)) == [2]
    assert _names(prune(tmp_path, 1, trusted=9)) == [6]


def test_prune_keeps_the_best_that_are_good_besides_the_newest(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, step)
    _flip_shard(checkpoint_path(tmp_path, 2))
    assert _names(prune(tmp_path, 2, None, (9, 2, 3, 7, 1), 2)) == [6, 5, 4, 2, 1]
    assert _names(find_checkpoints(tmp_path)) == [8, 7, 3]
    assert _names(prune(tmp_path, 1, None, (8, 3), 1)) == [7, 3], "the best is the newest as well"


def test_prune_keeps_what_cannot_be_read_now_and_counts_it_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a lack of descriptors, or a network file system that does not answer."""
    for step in range(1, 7):
        save(tmp_path, step)
    unread = {checkpoint_path(tmp_path, 3), checkpoint_path(tmp_path, 5)}

    def opened(path: Path, flags: int) -> int:
        if path.parent in unread:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return regular_fd(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_shard, "regular_fd", opened)
        assert _names(prune(tmp_path, 2, None, (3, 1), 1)) == [2]
        assert _names(find_checkpoints(tmp_path)) == [6, 5, 4, 3, 1], "two of the newest, and the best"
    assert _names(prune(tmp_path, 2, None, (3, 1), 1)) == [4, 1]


def test_prune_removes_no_more_once_it_is_over(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    assert prune(tmp_path, 1, is_over=lambda: True) == []
    gone = checkpoint_path(tmp_path, 4)
    assert _names(prune(tmp_path, 1, is_over=lambda: not gone.exists())) == [4]
    assert _names(find_checkpoints(tmp_path)) == [5, 3, 2, 1]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the checkpoints whose shards are read as a whole, in order."""
    found: list[int] = []
    verify = Shard.verify

    def verifying(shard: Shard) -> None:
        if (step := shard.info.step) not in found[-1:]:
            found.append(step)
        verify(shard)

    monkeypatch.setattr(Shard, "verify", verifying)
    return found


def test_prune_reads_nothing_where_nothing_would_be_removed(tmp_path: Path, verified: list[int]) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert prune(tmp_path, 3) == prune(tmp_path, 2, trusted=1) == prune(tmp_path, 1, None, (1, 2), 2) == []
    assert prune(tmp_path, 1, trusted=2, best=(1,), keep_best=1) == [] and not verified


def test_prune_reads_again_only_the_newest_good_one_and_those_with_other_files(
    tmp_path: Path, verified: list[int]
) -> None:
    looks = Looks()
    for step in range(1, 5):
        save(tmp_path, step)
    assert _names(prune(tmp_path, 3, looks=looks)) == [1] and verified == [4, 3, 2]
    save(tmp_path, 5)
    assert _names(prune(tmp_path, 3, looks=looks)) == [2] and verified == [4, 3, 2, 5]
    save(tmp_path, 6)
    _flip_shard(checkpoint_path(tmp_path, 5))
    assert _names(prune(tmp_path, 3, looks=looks)) == [5], "nothing that is good is removed for one that is not"
    assert verified == [4, 3, 2, 5, 6, 5]
    _flip_shard(checkpoint_path(tmp_path, 6))
    save(tmp_path, 7)
    _flip_shard(checkpoint_path(tmp_path, 7))
    assert prune(tmp_path, 1, looks=looks) == _paths(tmp_path, 3) and verified[6:] == [7, 6, 4]
    assert _names(find_checkpoints(tmp_path)) == [7, 6, 4]


def test_prune_removes_nothing_without_a_good_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        _cut_shard(save(tmp_path, step)[0])
    assert prune(tmp_path, 1) == []
    assert _names(find_checkpoints(tmp_path)) == [2, 1]


@pytest.mark.parametrize("harm", HARM)
def test_prune_never_removes_the_last_good_one(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    _, state = save(tmp_path, 10)
    save(tmp_path, 15)
    harm(checkpoint_path(tmp_path, 15))
    harm(save(tmp_path, 20)[0])
    assert prune(tmp_path, 1) == []
    assert _holds(tmp_path, 10, state)


def test_a_removal_cut_short_leaves_an_unfinished_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", die)
        prune(tmp_path, 1)
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(checkpoint_path(tmp_path, 1), verify=False)
    assert _names(prune(tmp_path, 1)) == [1]


def test_one_that_cannot_be_removed_keeps_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if path.name == "step_00000002":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path)

    with monkeypatch.context() as patch, pytest.raises(FilesError, match="step_00000002"):
        patch.setattr(shutil, "rmtree", busy)
        prune(tmp_path, 1)
    assert not checkpoint_path(tmp_path, 1).exists() and checkpoint_path(tmp_path, 2).exists()
    open_checkpoint(checkpoint_path(tmp_path, 3), verify=True)
    assert _names(prune(tmp_path, 1)) == [2], "the next checkpoint tries again"


def test_checkpoints_that_cannot_be_listed_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mount that is stale: it ended with a traceback."""
    save(tmp_path, 1)

    def stale(path: Path) -> list[Path]:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", stale)
        for reads in (find_checkpoints, newest_complete, load_newest_good):
            with pytest.raises(CheckpointError, match=r"cannot be listed \(Stale file handle\)"):
                reads(tmp_path)
        assert newest_checkpoint(tmp_path) is None
        remove_unfinished(tmp_path)
        remove_superfluous(tmp_path)
    assert newest_complete(tmp_path) == 1


def test_what_a_life_has_completed_and_what_it_has_not_is_known_beside_a_newer_bad_one_of_an_earlier_life(
    tmp_path: Path,
) -> None:
    """The earlier life's newest checkpoint is damaged: the later one went back, and is not past that step yet."""
    earlier, later = Ballot(1, 3), Ballot(2, 1)
    save(tmp_path, 4, earlier)
    bad, _ = save(tmp_path, 9, earlier)
    flip(bad / MANIFEST, 40)
    assert newest_of_life(tmp_path, 2) == 0
    for step in (6, 7, 9):
        layout = small_layout()
        shards = write_shards(
            checkpoint_path(tmp_path, step), layout, state_of(layout, step), {1: whole(layout)}, step=step, ballot=later
        )
        if step == 6:
            write_manifest(checkpoint_path(tmp_path, 6), manifest_of(layout, shards, 6, ballot=later))
    assert (newest_of_life(tmp_path, 1), newest_of_life(tmp_path, 2)) == (4, 6)
    assert [shard.step for shard in unfinished_shards(tmp_path, 2, 6)] == [9, 7]
    assert unfinished_shards(tmp_path, 1, 9) == []
