"""Shards: any tool reads them, they are written in one pass and whole or not at all, and prove themselves."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from elaswave_spmd.errors import CheckpointError, FilesError
from elaswave_spmd.run_dir.atomic_write import replacing
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path, find_shards, read_shard, shard_name, write_shard
from elaswave_spmd.run_dir.journal import Ballot
from tests.unit.run_dir.checkpoint_cases import BALLOT, flip

RUNS = {
    (0, 2, 4): {"master": np.arange(128, dtype=np.float32), "exp_avg": -np.arange(128, dtype=np.float32)},
    (1, 0, 1): {"master": np.full(64, 0.5, np.float32), "exp_avg": np.full(64, np.nan, np.float32)},
}


def _write(run_dir: Path, rank: int = 3) -> Path:
    directory = checkpoint_path(run_dir, 20)
    return directory / write_shard(directory, 20, BALLOT, rank, RUNS, run="r1").name


def test_a_shard_is_a_safetensors_file_that_names_its_run_and_worker(tmp_path: Path) -> None:
    info = write_shard(checkpoint_path(tmp_path, 20), 20, Ballot(2, 17), 3, RUNS, run='a "run"')
    path = tmp_path / "checkpoints/step_00000020/shard_3_2-17.safetensors"
    assert info.name == path.name == shard_name(3, Ballot(2, 17))
    assert (info.num_bytes, info.pages) == (path.stat().st_size, ((0, 2, 4), (1, 0, 1)))
    zeroed = path.read_bytes().replace(info.sha256.encode(), b"0" * 64, 1)
    assert hashlib.sha256(zeroed).hexdigest() == info.sha256
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {
            "sha256": info.sha256,
            "run": 'a "run"',
            "step": "20",
            "incarnation": "2",
            "epoch": "17",
            "rank": "3",
        }
        assert sorted(file.keys()) == ["0.2.4.exp_avg", "0.2.4.master", "1.0.1.exp_avg", "1.0.1.master"]
        assert file.get_slice("0.2.4.master")[100:103].tolist() == [100, 101, 102]
        np.testing.assert_array_equal(file.get_tensor("1.0.1.exp_avg"), RUNS[1, 0, 1]["exp_avg"])
    shard = read_shard(path)
    shard.verify()
    assert shard.info == info
    assert {offset % 64 for offset, _ in shard.arrays.values()} == {0}


def test_a_worker_without_pages_writes_an_empty_shard(tmp_path: Path) -> None:
    directory = checkpoint_path(tmp_path, 1)
    info = write_shard(directory, 1, BALLOT, 0, {}, run="r1")
    shard = read_shard(directory / info.name)
    shard.verify()
    assert shard.info == info and info.pages == ()


def test_strided_arrays_are_written_as_they_read(tmp_path: Path) -> None:
    values = np.arange(256, dtype=np.float32)[::2]
    directory = checkpoint_path(tmp_path, 1)
    info = write_shard(directory, 1, BALLOT, 0, {(0, 0, 2): {"master": values}}, run="r1")
    found = np.zeros(64, np.float32)
    read_shard(directory / info.name).read_into(found, (0, 0, 2), "master", 60)
    assert found.tolist() == values[60:124].tolist()


def test_writing_and_verifying_make_no_second_copy(tmp_path: Path) -> None:
    arrays = {(0, 0, 512): {"master": np.ones(2**22, np.float32), "exp_avg": np.ones(2**22, np.float32)}}
    directory = checkpoint_path(tmp_path, 1)
    tracemalloc.start()
    try:
        info = write_shard(directory, 1, BALLOT, 0, arrays, run="r1")
        read_shard(directory / info.name).verify()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert info.num_bytes > 2**25 and peak < 2**23


@pytest.mark.parametrize(
    "wrong",
    [
        {(0, 0, 1): {"master": np.zeros(64)}},
        {(0, 0, 1): {"master": np.zeros((8, 8), np.float32)}},
        {(0, 0, 1): {"master": np.zeros(0, np.float32)}},
        {(0, 0, 1): {"master": np.zeros(64, np.float32), "exp_avg": np.zeros(65, np.float32)}},
        {(0, 0, 1): {"master": np.zeros(64, np.float32)}, (0, 1, 2): {"exp_avg": np.zeros(64, np.float32)}},
    ],
)
def test_state_of_a_wrong_form_fails_an_assertion(tmp_path: Path, wrong) -> None:
    with pytest.raises(AssertionError):
        write_shard(checkpoint_path(tmp_path, 1), 1, BALLOT, 0, wrong, run="r1")
    assert not list(tmp_path.iterdir())


@settings(deadline=None)
@given(st.data())
def test_no_flipped_bit_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = _write(tmp_path_factory.mktemp("run"))
    info = read_shard(path).info
    flip(path, data.draw(st.integers(0, info.num_bytes - 1)), data.draw(st.integers(0, 7)))
    with pytest.raises(CheckpointError) as caught:
        read_shard(path).verify()
    assert path.name in caught.value.what


@settings(deadline=None)
@given(st.data())
def test_no_cut_and_no_growth_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = _write(tmp_path_factory.mktemp("run"))
    size = path.stat().st_size
    os.truncate(path, data.draw(st.integers(0, size + 100).filter(lambda n: n != size)))
    with pytest.raises(CheckpointError, match=r"^shard_3_1-3\.safetensors is torn or damaged"):
        read_shard(path)


def test_a_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path)
    shard = read_shard(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="has become shorter"):
        shard.read_into(np.zeros(64, np.float32), (1, 0, 1), "master", 0)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"^shard_3_1-3\.safetensors is missing$"):
        shard.read_into(np.zeros(64, np.float32), (1, 0, 1), "master", 0)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(FilesError, match="File too large"):
            _write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(checkpoint_path(tmp_path, 20).iterdir())
    assert read_shard(_write(tmp_path)).info.rank == 3


def test_a_run_directory_that_was_removed_is_not_created_again(tmp_path: Path) -> None:
    with pytest.raises(FilesError, match="No such file"):
        _write(tmp_path / "gone")
    assert not list(tmp_path.iterdir())


def test_data_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_replace(source: Path, target: Path) -> None:
        done.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with replacing(tmp_path / "b", durable=False) as scratch:
        scratch.write_bytes(b"content")
    assert done == ["rename b"]
    done.clear()
    with replacing(tmp_path / "a", durable=True) as scratch:
        scratch.write_bytes(b"content")
    assert done == ["fsync .a.tmp", "rename a", f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("kind", ["symlink", "hard link", "file", "pipe"])
def test_what_lies_at_the_name_of_the_scratch_file_is_replaced_and_never_written_to(tmp_path: Path, kind: str) -> None:
    """In a directory of many users it may be a link to a file of ours; or what a process that was killed has left."""
    (tmp_path / "mine").write_text("precious")
    scratch = tmp_path / ".a.tmp"
    match kind:
        case "symlink":
            scratch.symlink_to("mine")
        case "hard link":
            scratch.hardlink_to(tmp_path / "mine")
        case "file":
            scratch.write_text("half a fi")
        case _:
            os.mkfifo(scratch)
    with replacing(tmp_path / "a", durable=False) as file:
        file.write_text("new")
    assert (tmp_path / "a").read_text() == "new" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "mine").read_text() == "precious" and not os.path.lexists(scratch)


_DIES_BEFORE_RENAME = """
import os, sys
from pathlib import Path
import numpy as np
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path, write_shard
from elaswave_spmd.run_dir.journal import Ballot
os.replace = lambda *_: os._exit(9)
directory = checkpoint_path(sys.argv[1], 20)
write_shard(directory, 20, Ballot(1, 3), 4, {(0, 0, 1): {"master": np.zeros(64, np.float32)}}, run="r1")
"""


def test_find_shards_separates_good_from_torn_and_ignores_unfinished(tmp_path: Path) -> None:
    good, torn, flipped = (_write(tmp_path, rank) for rank in (1, 2, 3))
    assert subprocess.run([sys.executable, "-c", _DIES_BEFORE_RENAME, str(tmp_path)], timeout=100).returncode == 9
    os.truncate(torn, 900)
    flip(flipped, flipped.stat().st_size - 1)
    assert len(list(good.parent.iterdir())) == 4
    found, bad = find_shards(good.parent)
    assert [(info.rank, info.pages) for info in found] == [(1, tuple(RUNS))]
    assert [path for path, _ in bad] == [torn, flipped]
    assert bad[1][1].what == f"{flipped.name} does not match its sha256"


def test_checkpoints_need_no_torch() -> None:
    code = "import sys, elaswave_spmd.run_dir.checkpoints; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "False\n", done.stderr
