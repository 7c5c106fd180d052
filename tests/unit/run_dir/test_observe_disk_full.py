"""A disk that fills up: one clear error, lines that stay whole, and no summary without the weights."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from elaswave_spmd.errors import FilesError, RunError
from elaswave_spmd.run_dir import PlainDisplay, RunDir, RunObserver, observer, read_events, save_weights
from elaswave_spmd.run_dir.json_lines import JsonLines, read_json_lines
from elaswave_spmd.run_dir.tensorboard import Board
from tests.descriptors import none_left
from tests.full_disk import room_for


def _observer(tmp_path: Path, *, board: bool = False) -> RunObserver:
    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="single")
    return RunObserver(run_dir, display=PlainDisplay(Console(file=io.StringIO())), board=board)


def test_a_line_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.append({"n": 1})
    with room_for(20), pytest.raises(FilesError) as caught:
        lines.append({"n": "x" * 100})
    assert str(caught.value) == f"the run's files cannot be written: {path} (File too large)"
    assert isinstance(caught.value, RunError)
    assert path.read_text() == '{"n": 1}\n'
    lines.append({"n": 3})
    assert read_json_lines(path) == [{"n": 1}, {"n": 3}]
    with room_for(20), contextlib.suppress(FilesError):
        lines.append({"n": "x" * 100})
    with room_for(20):
        lines.close()


def test_weights_report_a_full_disk_like_any_other_file(tmp_path: Path) -> None:
    with room_for(1000), pytest.raises(OSError, match="File too large"):
        save_weights(tmp_path / "w.safetensors", {"w": np.zeros(1000, np.float32)})
    with pytest.raises(OSError, match="No such file"):
        save_weights(tmp_path / "none" / "w.safetensors", {"w": np.zeros(1, np.float32)})


def test_without_room_for_the_weights_there_is_no_summary(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    with room_for(1000), pytest.raises(FilesError, match=r"weights\.safetensors") as caught, observer:
        try:
            observer.on_finish({"final_loss": 1.5}, {"w": np.zeros(1000, np.float32)})
        except FilesError as error:
            observer.on_stop(error)
            raise
    assert not (tmp_path / "run" / "summary.json").exists(), "the sign that the run has its result"
    assert [(e["event"], e["message"]) for e in read_events(tmp_path / "run")] == [("stop", str(caught.value))]
    assert not list((tmp_path / "run").glob("*weights*")) + list((tmp_path / "run").glob(".*"))


def test_without_room_for_the_averages_there_is_no_summary(tmp_path: Path) -> None:
    with room_for(1000), _observer(tmp_path) as run, pytest.raises(FilesError, match=r"weights_ema\.safetensors"):
        run.on_finish({}, {"w": np.zeros(1, np.float32)}, {"w": np.zeros(1000, np.float32)})
    assert (tmp_path / "run" / "weights.safetensors").exists() and not (tmp_path / "run" / "summary.json").exists()


def test_closing_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = Board.close

    def full(board: Board) -> None:
        close(board)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Board, "close", full)
    with pytest.raises(ValueError, match="the first error"), _observer(tmp_path, board=True):
        raise ValueError("the first error")


def test_closing_reports_that_the_tensorboard_file_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer.RunDir, "write_event", lambda *_: None)
    with room_for(200), pytest.raises(FilesError, match="tensorboard"), _observer(tmp_path, board=True) as run:
        for step in range(20):
            run.on_validation(step, 1.0, 2)


def test_a_board_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Board, "__init__", full)
    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="single")
    with pytest.raises(FilesError, match=r"tensorboard \(No space left on device\)"):
        RunObserver(run_dir)
    run_dir.discard()
    assert not run_dir.path.exists()


def test_a_stop_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    observer = _observer(tmp_path)
    with room_for(10):
        observer.on_stop(ValueError("the first error"))
    observer.on_stop(ValueError("first line\nsecond line"))
    observer.on_stop(KeyboardInterrupt())
    observer.on_stop(AssertionError())
    observer.on_stop(RunError("a run's own words"))
    observer.close()
    messages = [event["message"] for event in read_events(tmp_path / "run")]
    assert messages == ["ValueError: first line", "interrupted", "AssertionError", "a run's own words"]


def test_a_run_goes_on_without_the_costs_for_which_no_descriptor_or_room_is_left(tmp_path: Path) -> None:
    with _observer(tmp_path) as run:
        costs = run.run_dir.path / "costs.json"
        run.on_costs("1")
        for _ in range(2):
            with none_left():
                run.on_costs("2")
        with room_for(1):
            run.on_costs("3, and more than there is room for")
        assert costs.read_text() == "1\n" and not list(run.run_dir.path.glob(".*")), "it is as it was"
        run.on_costs("4")
        assert costs.read_text() == "4\n"
        with none_left():
            run.on_costs("5")
    events = read_events(tmp_path / "run")
    assert [(event["event"], event["reason"]) for event in events] == [("no_costs", "Too many open files")] * 2
    assert events[0]["message"] == "costs.json cannot be written, and stays as it was: Too many open files"
