"""The run's directory, its files, metrics lines and weights."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.errors import ConfigError, DataError, FilesError
from elaswave_spmd.run_dir import (
    MetricsLine,
    RunDir,
    directory,
    read_events,
    read_metrics,
    read_summary,
    save_weights,
    weights_sha256,
)
from elaswave_spmd.run_dir.directory import has_result
from elaswave_spmd.run_dir.json_lines import JsonLines, plain, read_json_lines

NOON = datetime(2026, 1, 2, 12, 0, 0)


def _line(step: int = 1, loss: float = 2.5, grad_norm: float = 1.0) -> MetricsLine:
    return MetricsLine.of(
        step=step, mesh_epoch=0, loss=loss, grad_norm=grad_norm, lr=1e-3, tokens=64, seconds=0.5, workers=2
    )


def _create(path: Path | str | None) -> RunDir:
    return RunDir.create(path, "seed: 1\n", model="gpt_tiny", mesh="dp2_pp2", now=lambda: NOON)


def _tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    run_dir = _create(tmp_path / "new" / "run")
    run_dir.write_metrics(_line(1))
    run_dir.write_event("fail", 12.5, {"rank": 3})
    run_dir.write_metrics(_line(2, loss=float("nan")))
    run_dir.write_summary({"final_loss_hex": "0x1p+0", "sizes": (1, 2), "bad": float("inf")})
    weights = {"b": np.ones((2, 3), np.float32), "a": np.zeros(4, np.float32)}
    run_dir.write_weights(weights)
    run_dir.close()
    run_dir.close()
    path = tmp_path / "new" / "run"
    assert _tree(path) == ["config.yaml", "events.jsonl", "metrics.jsonl", "summary.json", "weights.safetensors"]
    assert (path / "config.yaml").read_text() == f"format: {FORMAT_VERSION}\nseed: 1\n"
    first, second = read_metrics(path)
    assert first == _line(1)
    assert (second.step, second.loss_hex) == (2, "nan")
    assert json.loads((path / "metrics.jsonl").read_text().splitlines()[1])["loss"] is None
    assert read_events(path) == [{"event": "fail", "time": 12.5, "rank": 3}]
    assert read_summary(path) == {"final_loss_hex": "0x1p+0", "sizes": [1, 2], "bad": "inf"}
    assert weights_sha256(weights) == weights_sha256(load_file(path / "weights.safetensors"))


def test_lines_are_on_file_before_the_run_ends(tmp_path: Path) -> None:
    run_dir = _create(tmp_path / "run")
    run_dir.write_metrics(_line(1))
    assert len(read_metrics(tmp_path / "run")) == 1
    run_dir.close()


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "weights.safetensors"]
)
def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(ConfigError, match="holds another run") as caught:
        _create(tmp_path)
    assert caught.value.exists == name
    assert _tree(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "kept"


def test_a_path_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        _create(tmp_path / "\udcff" / "run")
    assert _tree(tmp_path) == []


def test_a_directory_with_other_files_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    _create(tmp_path).discard()
    assert _tree(tmp_path) == ["notes.md"]


def test_two_runs_that_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _create(tmp_path / "run")
    monkeypatch.setattr(directory, "_refuse_occupied", lambda folder: None)  # the second looked before the first wrote
    with pytest.raises(ConfigError, match="holds another run"):
        _create(tmp_path / "run")
    assert _tree(tmp_path / "run") == ["config.yaml", "events.jsonl", "metrics.jsonl"]
    first.close()


def test_the_names_of_a_new_run_survive_a_crash_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it flushes later is lost if its directory's own name is."""
    flushed, fsync = list[str](), os.fsync

    def note(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        flushed.append(str(path.relative_to(tmp_path)))
        assert path.is_dir() or path.read_text(), "its content is flushed, too"
        assert (tmp_path / "a" / "b" / "events.jsonl").exists() or not path.is_dir()
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with contextlib.closing(RunDir.create(tmp_path / "a" / "b", "seed: 1\n", model="m", mesh="s")):
        assert flushed == ["a/b/config.yaml", "a/b", "a", "."]
    flushed.clear()
    (tmp_path / "made").mkdir()
    (tmp_path / "a" / "b" / "events.jsonl").touch()
    with contextlib.closing(RunDir.create(tmp_path / "made", "seed: 1\n", model="m", mesh="s")):
        assert flushed == ["made/config.yaml", "made"]


@pytest.mark.parametrize("failing", ["config.yaml", "a"])
def test_a_directory_that_cannot_be_flushed_is_refused_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).name == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDir.create(tmp_path / "a", "seed: 1\n", model="m", mesh="s")
    assert not any(tmp_path.iterdir())


def test_default_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        run_dir = _create(None)
        names.append(run_dir.path.relative_to(tmp_path).as_posix())
        run_dir.close()
    base = "runs/gpt_tiny-dp2_pp2-20260102_120000"
    assert names == [base, f"{base}_2", f"{base}_3"]
    odd = RunDir.create(None, "", model="my/../file", mesh=" ", now=lambda: NOON)
    assert odd.path.name == "my_.._file-run-20260102_120000"
    odd.close()


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        _create(f"{tmp_path}/file{below}")
    assert caught.value.where == "run.dir"
    assert _tree(tmp_path) == ["file"]


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir= is empty"):
        _create(" ")


@pytest.mark.parametrize("failing", ["config", "metrics", "events"])
def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    real = JsonLines.__init__

    def full(self: JsonLines, path: Path) -> None:
        if failing in path.name:
            raise OSError(28, "No space left on device")
        real(self, path)

    def no_text(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonLines, "__init__", full)
    if failing == "config":
        monkeypatch.setattr(Path, "write_text", no_text)
    with pytest.raises(ConfigError, match="No space left"):
        _create(tmp_path / "a" / "b")
    assert _tree(tmp_path) == []


def test_lines_and_events_are_on_the_disk_before_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a summary a run has finished: nobody would compute its last steps again after a crash of the machine."""
    run_dir, order = _create(tmp_path / "run"), list[str]()
    run_dir.write_metrics(_line(7))
    fsync = os.fsync

    def sync(fd: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        assert [line.step for line in read_metrics(run_dir.path)] == [7]
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    run_dir.write_summary({})
    run_dir.close()
    assert order == ["metrics.jsonl", "events.jsonl", ".summary.json.tmp", "run"]


def test_discard_removes_what_was_made_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run_dir = _create(tmp_path / "runs" / "deep" / "run")
    run_dir.write_metrics(_line())
    run_dir.board_path.mkdir()
    (run_dir.board_path / "events.out").write_text("x")
    run_dir.write_summary({})
    for name in ("trace.json", "trace-0.jsonl"):
        (run_dir.path / name).touch()
    run_dir.discard()
    assert _tree(tmp_path) == ["runs"]


@pytest.mark.parametrize("name", ["trace.json", "trace-12.jsonl"])
def test_a_directory_with_the_timeline_of_another_run_is_refused_and_keeps_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]")
    with pytest.raises(ConfigError, match="holds another run") as caught:
        _create(tmp_path)
    assert caught.value.exists == name and _tree(tmp_path) == [name]


def test_files_of_the_user_that_are_no_timeline_of_ours_stay(tmp_path: Path) -> None:
    names = ["trace-.jsonl", "trace-1a.jsonl", "trace-gpu.jsonl"]
    for name in names:
        (tmp_path / name).touch()
    _create(tmp_path).discard()
    assert _tree(tmp_path) == names


def test_a_failed_summary_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = _create(tmp_path / "run")
    run_dir.write_summary({"steps": 1})

    def broken(*args: object) -> None:
        raise OSError(5, "I/O error")

    monkeypatch.setattr(directory.os, "replace", broken)
    with pytest.raises(FilesError, match=r"summary\.json \(I/O error\)"):
        run_dir.write_summary({"steps": 2})
    assert read_summary(tmp_path / "run") == {"steps": 1}
    assert not [name for name in _tree(tmp_path / "run") if "tmp" in name]
    run_dir.close()


@pytest.mark.parametrize(("number", "refused"), [(errno.EACCES, True), (errno.EROFS, True), (errno.ENOSPC, False)])
def test_a_directory_in_which_no_file_can_be_made_is_refused_where_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, refused: bool
) -> None:
    """It would train, write its lines, and have no place for its weights. (Root may write where modes forbid it.)"""
    _create(tmp_path / "run").close()

    def fail(**_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(ConfigError, match="cannot be written") if refused else contextlib.nullcontext():
        RunDir.reopen(tmp_path / "run").close()


def test_a_run_that_goes_on_leaves_nothing_of_the_look_at_its_directory(tmp_path: Path) -> None:
    _create(tmp_path / "run").close()
    RunDir.reopen(tmp_path / "run").close()
    assert _tree(tmp_path / "run") == ["config.yaml", "events.jsonl", "metrics.jsonl"]


def test_events_keep_their_own_names(tmp_path: Path) -> None:
    run_dir = _create(tmp_path / "run")
    with pytest.raises(ValueError, match="cannot be called"):
        run_dir.write_event("fail", 0.0, {"time": 1})
    run_dir.close()


@given(st.integers(0, 60))
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "a.jsonl"
    whole = b'{"n": 1}\n{"n": "\xc3\xa9"}\n{"n": 3}\n'
    path.write_bytes(whole[: min(kept, len(whole))])
    before = read_json_lines(path)
    assert len(before) == whole[: min(kept, len(whole))].count(b"\n")
    lines = JsonLines(path)
    lines.append({"n": "next"})
    lines.close()
    assert read_json_lines(path) == [*before, {"n": "next"}]


NO_VALUES = {
    "deep": b"[" * 200_000,
    "deep but whole": b'{"a": ' * 150 + b"1" + b"}" * 150,
    "nan": b'{"a": NaN}',
    "minus infinity": b'{"a": -Infinity}',
    "large": b'{"a": 1e999}',
    "many digits": b'{"a": 1' + b"0" * 400 + b"}",
    "thousands of digits": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("text", NO_VALUES.values(), ids=NO_VALUES)
def test_what_no_run_writes_is_no_value_though_python_reads_it(tmp_path: Path, text: bytes) -> None:
    for name, read in (("events.jsonl", read_events), ("metrics.jsonl", read_metrics), ("summary.json", read_summary)):
        (tmp_path / name).write_bytes(text + b"\n")
        with pytest.raises(DataError, match=r"line 1 is not JSON|cannot read .*summary\.json"):
            read(tmp_path)


@pytest.mark.parametrize(
    "odd",
    [
        {"loss_hex": "0x1p99999"},
        {"grad_norm_hex": "0x1p99999"},
        {"step": 2**63},
        {"step": 1.5},
        {"workers": True},
        {"lr": "fast"},
        {"seconds": None},
        {"data_seconds": []},
    ],
    ids=str,
)
def test_an_odd_metrics_line_is_named(tmp_path: Path, odd: dict[str, object]) -> None:
    whole, wrong = _line().to_dict(), _line().to_dict() | odd
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(whole)}\n{json.dumps(wrong)}\n")
    with pytest.raises(DataError, match=r"is not a line of metrics\.jsonl") as caught:
        read_metrics(tmp_path)
    assert caught.value.where == f"{tmp_path / 'metrics.jsonl'}, line 2" and caught.value.where in caught.value.what


@pytest.mark.parametrize(
    "odd",
    [
        {"time": 1.0},
        {"event": 3, "time": 1.0},
        {"event": "fail", "time": "now"},
        {"event": "rollback", "time": 1.0, "step": "x"},
        {"event": "validation", "time": 1.0, "microbatches": 2, "loss_hex": "0x1p+0"},
        {"event": "validation", "time": 1.0, "step": 1, "microbatches": 2, "loss_hex": "0x1p99999"},
        {"event": "model_check", "time": 1.0, "layers": [{"layer": 1}]},
        {"event": "corrupt", "time": 1.0, "step": 1, "ballot": [1]},
        {"event": "mismatch", "time": 1.0, "step": 1, "ballot": [1, -1]},
        {"event": "checkpoint_lost", "time": 1.0, "ballot": [1, 0]},
    ],
    ids=str,
)
def test_an_event_by_which_no_run_can_go_on_is_named(tmp_path: Path, odd: dict[str, object]) -> None:
    (tmp_path / "events.jsonl").write_text(f'{{"event": "start", "time": 1}}\n{json.dumps(odd)}\n')
    with pytest.raises(DataError, match=r"events\.jsonl, line 2 is not an event"):
        read_events(tmp_path)


@pytest.mark.parametrize("content", [b"nonsense\n{}\n", b"[1]\n", b"\xff\n"])
def test_a_malformed_line_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"{}\n" + content)
    with pytest.raises(DataError) as caught:
        read_json_lines(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl, line 2 is not " in caught.value.what


def test_missing_files_are_data_errors(tmp_path: Path) -> None:
    for read in (read_metrics, read_events, read_summary):
        with pytest.raises(DataError, match=r"^cannot read .*\.jsonl? \(No such file or directory\)"):
            read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: \{\} is not a line of metrics\.jsonl"):
        read_metrics(tmp_path)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_metrics_keep_every_bit(loss: float, grad_norm: float) -> None:
    line = _line(loss=loss, grad_norm=grad_norm)
    again = MetricsLine.from_dict(json.loads(json.dumps(line.to_dict(), allow_nan=False)))
    assert again == line
    assert float.fromhex(again.loss_hex) == loss


@pytest.mark.parametrize(
    "change",
    [{"step": 0}, {"tokens": 0}, {"workers": 0}, {"seconds": -1.0}, {"seconds": float("nan")}, {"loss_hex": "0x1p+0"}],
)
def test_metrics_are_checked(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="metrics"):
        MetricsLine(**{**_line().to_dict(), **change})  # type: ignore[arg-type]


def test_plain_values() -> None:
    assert plain({1: (np.float32(0.5), np.int64(2)), "s": {"b", "a"}, "p": Path("x"), "t": True, "n": None}) == {
        "1": [0.5, 2],
        "s": ["a", "b"],
        "p": "x",
        "t": True,
        "n": None,
    }
    assert plain([float("nan"), np.float64("-inf")]) == ["nan", "-inf"]


def test_weights_sha256_is_as_documented() -> None:
    weights = {
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array([-0.0], np.float32),
        "é": np.zeros((0, 3), "f4"),
    }
    expected = hashlib.sha256(
        b"a" + weights["a"].tobytes() + b"b.weight" + weights["b.weight"].tobytes() + "é".encode()
    ).hexdigest()
    assert weights_sha256(weights) == expected
    assert weights_sha256(dict(reversed(weights.items()))) == expected


def test_weights_of_any_layout(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    weights = {"t": base.T, "s": base[::2, ::3], "scalar": np.array(2.0, np.float32), "big": base.astype(">f4")}
    save_weights(tmp_path / "w.safetensors", weights)
    loaded = load_file(tmp_path / "w.safetensors")
    for name, array in weights.items():
        assert loaded[name].shape == array.shape
        np.testing.assert_array_equal(loaded[name], array)
    assert weights_sha256(loaded) == weights_sha256(weights)


def test_weights_are_float32() -> None:
    with pytest.raises(TypeError, match="b is float64"):
        weights_sha256({"b": np.zeros(2)})


def test_the_room_imports_no_torch() -> None:
    code = "import sys, elaswave_spmd.run_dir; print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("has_finished", [False, True])
def test_weights_without_a_summary_go_when_the_run_is_opened_again(tmp_path: Path, has_finished: bool) -> None:
    run_dir = _create(tmp_path / "run")
    for name in ("weights.safetensors", "weights_ema.safetensors"):
        run_dir.write_weights({"w": np.zeros(2, np.float32)}, name)
    if has_finished:
        run_dir.write_summary({})
    run_dir.close()
    assert has_result(run_dir.path) == has_finished
    RunDir.reopen(run_dir.path).close()
    left = [name for name in _tree(run_dir.path) if name.startswith("weights")]
    assert left == (["weights.safetensors", "weights_ema.safetensors"] if has_finished else [])
