"""The display, TensorBoard, and the observer that drives everything."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir import (
    LiveDisplay,
    MetricsLine,
    PlainDisplay,
    RunDir,
    RunInfo,
    RunObserver,
    make_display,
    read_events,
    read_metrics,
    read_summary,
)
from elaswave_spmd.run_dir import display as module
from elaswave_spmd.run_dir.captured_output import CapturedOutput
from elaswave_spmd.run_dir.display import (
    Display,
    LastingDisplay,
    clock_text,
    count,
    safe_text,
    summary_rows,
)
from elaswave_spmd.run_dir.faults import FaultCount, faults_text
from elaswave_spmd.run_dir.observer import event_text
from elaswave_spmd.run_dir.screen_region import ScreenRegion
from elaswave_spmd.run_dir.workers_now import LOST, TRAINING, WorkerNow, WorkersNow


class _Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _line(step: int, *, loss: float = 2.5, seconds: float = 0.5, workers: int = 2) -> MetricsLine:
    return MetricsLine.of(
        step=step, mesh_epoch=0, loss=loss, grad_norm=1.5, lr=1e-3, tokens=64, seconds=seconds, workers=workers
    )


def _info(total_steps: int) -> RunInfo:
    return RunInfo("gpt_tiny", "dp2", "zero1", 1234567, total_steps, 2, corpus="stdlib", run_dir="runs/[a]")


def _text_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=80), out


def _terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}), out


def test_plain_lines_show_the_first_step_the_last_and_one_per_second() -> None:
    console, out = _text_console()
    clock = _Clock()
    display = PlainDisplay(console, clock)
    display.start(_info(50))
    for step in range(1, 51):
        display.step(_line(step))
        clock.seconds += 0.125
    shown = [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step")]
    assert shown == ["1/50", "9/50", "17/50", "25/50", "33/50", "41/50", "49/50", "50/50"]


def test_a_plain_line_is_one_line_with_its_figures() -> None:
    console, out = _text_console()
    display = PlainDisplay(console, _Clock())
    display.start(_info(100))
    display.step(_line(1))
    header, run_dir, line = out.getvalue().splitlines()
    assert header == "gpt_tiny (1,234,567 parameters), mesh dp2 of 2 workers, sharding zero1, data stdlib, 100 steps"
    assert run_dir == "run directory runs/[a]"
    assert line == "step 1/100  loss 2.5000  grad norm 1.5  lr 1.00e-03  128 tokens/s  2 workers  0:50 left"


def test_the_losses_that_are_not_survived_have_a_line() -> None:
    console, out = _text_console()
    PlainDisplay(console, _Clock()).start(dataclasses.replace(_info(9), unsurvived="2 of 6 [pairs]"))
    assert out.getvalue().splitlines()[-1] == "2 of 6 [pairs]"


def test_workers_without_a_micro_batch_have_a_line_and_a_field(tmp_path: Path) -> None:
    console, out = _text_console()
    info = dataclasses.replace(_info(9), without_microbatches="worker 2 has none: [why]")
    PlainDisplay(console, _Clock()).start(info)
    assert out.getvalue().splitlines()[-1] == "worker 2 has none: [why]"
    for name, told in (("some", info), ("none", _info(9))):
        run_dir = RunDir.create(tmp_path / name, "seed: 1\n", model="m", mesh="dp2")
        with RunObserver(run_dir, display=PlainDisplay(console), board=False) as observer:
            observer.on_start(told)
        event = next(iter(read_events(run_dir.path)))
        assert event.get("without_microbatches", "") == told.without_microbatches
        assert ("without_microbatches" in event) == (name == "some")


def test_steps_of_no_time_and_a_loss_that_is_nan() -> None:
    console, out = _text_console()
    display = PlainDisplay(console, _Clock())
    display.start(_info(1))
    display.step(_line(1, loss=float("nan"), seconds=0.0))
    assert "loss nan" in out.getvalue()
    assert "0 tokens/s" in out.getvalue()


def _live(console: Console, clock: _Clock, work: Callable[[], float] | None = None) -> LiveDisplay:
    return LiveDisplay(console, clock, work=work if work is not None else lambda: 0.0)


WORKERS = WorkersNow("dp2", 3, (0, 4), (WorkerNow(0, TRAINING, 0, 4, 1.0), WorkerNow(1, LOST, 0)))


def test_the_view_is_drawn_four_times_a_second_and_at_the_end() -> None:
    console, out = _terminal()
    clock = _Clock()
    display = _live(console, clock)
    display.start(_info(100))
    asked = 0
    for step in range(1, 101):
        display.step(_line(step))
        for _ in range(10):  # events of a run
            if display.wants_workers:
                asked += 1
                display.show_workers(WORKERS)
        clock.seconds += 0.01
    assert asked == 3, "the first drawing is that of the start; 1 s has three more"
    display.show_line("fail: worker 1 lost")
    display.finish({"validation_loss": 1.9})
    display.close()
    text = out.getvalue()
    assert text.count("loss 2.5000  ") == asked + 1 + 1, "and one for the event, and one at the end"
    for part in ("100/100", "128 tokens/s", "2 workers", "0:00 left", "fail: worker 1 lost", "1.9000", "mesh epoch 3"):
        assert part in text


def test_the_terminal_is_never_changed_so_that_nothing_has_to_be_put_back() -> None:
    console, out = _terminal()
    display = _live(console, _Clock())
    display.start(_info(3))
    display.show_workers(WORKERS)
    display.close()
    assert set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", out.getvalue())) <= {"A", "J", "K", "m"}


def test_drawing_takes_a_small_share_of_the_time_however_long_it_takes() -> None:
    console, _ = _terminal()
    clock, work = _Clock(), _Clock()
    display = _live(console, clock, work)
    display.start(_info(3))
    drawings, seconds = 0, 1000
    for _ in range(seconds * 100):
        if display.wants_workers:
            work.seconds += 0.1  # a mesh of so many workers
            display.show_workers(WORKERS)
            drawings += 1
        clock.seconds += 0.01
    assert 0.1 * drawings <= module.VIEW_SHARE * seconds + 0.1 and drawings > 10


def test_lines_between_two_drawings_wait_for_the_next_and_keep_their_order() -> None:
    console, out = _terminal()
    clock = _Clock()
    display = _live(console, clock)
    display.start(_info(3))
    for number in range(1000):
        display.show_line(f"event {number}")
    written = len(out.getvalue())
    clock.seconds += 0.3
    display.show_workers(WORKERS)
    shown = re.findall(r"event (\d+)", out.getvalue()[written:])
    assert shown == [str(number) for number in range(1000)]
    display.show_line("the last one")
    display.close()
    assert out.getvalue().index("the last one") > out.getvalue().index("event 999")


def test_what_is_printed_meanwhile_goes_above_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = _terminal()
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    display = _live(console, _Clock())
    display.start(_info(3))
    print("a warning\x1b[2Jthat clears the screen")
    print("an unfinished line", file=sys.stderr, end="")
    display.close()
    assert "a warningthat clears the screen\n" in out.getvalue() and "an unfinished line\n" in out.getvalue()
    assert stream.getvalue() == "" and sys.stdout is stream and sys.stderr is stream


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\x1bcb", "acb"),
        ("\x1b[3", "[3"),
        ("\x9b2Jx", "2Jx"),
        ("10%\r20%", "20%"),
        ("dos\r", "dos"),
    ],
)
def test_what_others_print_never_commands_the_terminal(printed: str, shown: str) -> None:
    assert safe_text(printed).plain == shown


@pytest.mark.parametrize("live", [True, False])
def test_a_character_that_the_output_cannot_write_ends_no_run(live: bool) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="latin-1", write_through=True) as out:
        console = Console(file=out, width=80, force_terminal=live, legacy_windows=False)
        display = _live(console, _Clock()) if live else PlainDisplay(console)
        display.start(_info(3))
        display.show_line("generated: \ufffd na\xefve \udcff")
        display.close()
        assert b"generated: ? na\xefve ?" in raw.getvalue()


def test_a_stream_that_is_no_terminal_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    console, _ = _terminal()
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    display = _live(console, _Clock())
    display.start(_info(3))
    print("into the file", file=sys.stderr)
    display.close()
    assert stream.getvalue() == "into the file\n"


def test_a_terminal_that_closes_gives_the_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mute_output", lambda: None)
    console, out = _terminal()
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    display = LastingDisplay(_live(console, clock := _Clock()))
    display.start(_info(3))
    assert sys.stderr is not stream
    out.write = _unwritable  # type: ignore[method-assign]
    clock.seconds += 1
    assert display.wants_workers
    display.show_workers(WORKERS)
    assert sys.stderr is stream and not display.wants_workers
    display.close()


def _unwritable(text: str) -> int:
    raise OSError(5, "Input/output error")


def test_the_view_starts_no_thread() -> None:
    console, _ = _terminal()
    before = {*threading.enumerate()}  # one of another test may end meanwhile
    display = _live(console, _Clock())
    display.start(_info(3))
    display.step(_line(1))
    display.show_workers(WORKERS)
    assert not {*threading.enumerate()} - before
    display.close()


class _Unread:
    """A display whose reader has left."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.calls = 0

    def _fail(self, *_: object) -> None:
        self.calls += 1
        raise self._error

    wants_workers = True
    start = step = validation = show_line = show_workers = finish = close = _fail

    def forget(self) -> None:
        self.forgotten = True


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), SystemExit(1)])
def test_a_reader_that_leaves_ends_no_run(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    muted: list[int] = []
    monkeypatch.setattr(module, "mute_output", lambda: muted.append(1))
    unread = _Unread(error)
    display = LastingDisplay(cast(Display, unread))
    display.show_line("a line")
    display.start(_info(3))
    display.step(_line(1))
    display.finish({})
    display.close()
    assert unread.calls == 1 and muted == [1], "it is tried once"
    assert unread.forgotten


def test_what_workers_print_is_dropped_when_nobody_looks_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fill the disk: workers go on printing."""
    monkeypatch.setattr(module, "mute_output", lambda: None)
    console, out = _terminal()
    captured = CapturedOutput()
    display = LastingDisplay(LiveDisplay(console, clock := _Clock(), captured, work=lambda: 0.0))
    display.start(_info(3))
    out.write = _unwritable  # type: ignore[method-assign]
    clock.seconds += 1
    display.show_line("a line")
    os.write(captured.fileno(), b"of a worker\n")
    display.step(_line(1))
    assert captured.lines() == []
    display.close()
    captured.close()


def test_what_workers_print_while_the_terminal_is_stopped_takes_no_more_room_than_the_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after Ctrl-S, for as long as nobody looks."""
    console, out = _terminal()
    captured = CapturedOutput()
    display = LiveDisplay(console, clock := _Clock(), captured, work=lambda: 0.0)
    display.start(_info(3))
    monkeypatch.setattr(ScreenRegion, "takes_output", False)
    for n in range(32):
        os.write(captured.fileno(), f"line {n}\n".encode() * (1 << 17))
        clock.seconds += 1
        assert display.wants_workers
        display.show_workers(WORKERS)
    assert captured.waiting <= 4 << 20 and "line" not in out.getvalue()
    monkeypatch.undo()
    display.close()
    lines = out.getvalue().splitlines()
    assert any("lines of workers are left out" in line for line in lines)
    assert not any("line 0" in line for line in lines) and any("line 31" in line for line in lines)
    captured.close()


def test_no_terminal_no_view() -> None:
    console, out = _text_console()
    display = make_display(console)
    display.start(_info(3))
    display.finish({"a": 1})
    assert isinstance(display, PlainDisplay)
    assert "\x1b" not in out.getvalue()


def test_a_terminal_has_the_view_unless_lines_are_wanted() -> None:
    console, _ = _terminal()
    assert isinstance(make_display(console), LiveDisplay)
    assert isinstance(make_display(console, choice="live"), LiveDisplay)
    assert isinstance(make_display(console, choice="plain"), PlainDisplay)


def test_a_terminal_without_a_cursor_has_lines_and_refuses_the_view() -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_display(dumb), PlainDisplay)
    with pytest.raises(ConfigError, match=r"run\.display=live cannot be shown"):
        make_display(dumb, choice="live")


def test_colours_that_are_forced_make_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_terminal, "so rich says"
    assert isinstance(make_display(), PlainDisplay)


def test_without_colours_the_view_says_the_same() -> None:
    out = io.StringIO()
    environment = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    display = _live(Console(file=out, width=100, force_terminal=True, _environ=environment), _Clock())
    display.start(_info(3))
    display.show_line("fail: worker 1 lost")
    display.show_workers(WORKERS)
    display.close()
    styles = {number for some in re.findall(r"\x1b\[([0-9;]*)m", out.getvalue()) for number in some.split(";")}
    assert styles <= {"", "0", "1", "2"}, "bold and dim are no colours"
    assert "0 training 4 mb 1.00x" in out.getvalue() and "1 lost" in out.getvalue()


def test_summary_rows() -> None:
    corpus = {"name": "stdlib", "sha256": "0", "bytes": 12000}
    summary = {
        "loss": 1.23456,
        "tokens_per_second": 54321.9,
        "params": 10000,
        "corpus": corpus,
        "none": None,
        "sizes": [1],
    }
    assert summary_rows(summary) == [
        ("loss", "1.2346"),
        ("tokens per second", "54,322"),
        ("params", "10,000"),
        ("corpus", "stdlib (12,000 bytes)"),
        ("none", "-"),
    ]
    assert summary_rows({"tokens_per_second": 12.0}, "samples") == [("samples per second", "12.0000")]


def test_words() -> None:
    assert [clock_text(s) for s in (0.4, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
    assert [count(1, "worker"), count(2000, "worker")] == ["1 worker", "2,000 workers"]
    assert event_text("fail", {"rank": 3, "step": 12}) == "fail: rank=3 step=12"
    assert event_text("fail", {"rank": 3, "message": "worker 3 lost"}) == "fail: worker 3 lost"
    assert event_text("stop", {}) == "stop"


@pytest.mark.parametrize("change", [{"total_steps": 0}, {"workers": 0}, {"first_step": 0}, {"params": -1}])
def test_run_info_is_checked(change: dict[str, int]) -> None:
    fields = {"model": "m", "mesh": "single", "sharding": "", "params": 1, "total_steps": 1, "workers": 1}
    with pytest.raises(ValueError, match="out of range"):
        RunInfo(**{**fields, **change})  # type: ignore[arg-type]


def test_the_observer_writes_shows_and_plots(tmp_path: Path) -> None:
    console, out = _text_console()
    before = {*threading.enumerate()}  # one of another test may end meanwhile
    run_dir = RunDir.create(tmp_path / "run", "seed: 1\n", model="m", mesh="single")
    with RunObserver(run_dir, display=PlainDisplay(console), now=lambda: 100.0) as observer:
        assert not {*threading.enumerate()} - before
        observer.on_start(_info(2))
        observer.on_step(_line(1, loss=3.0))
        observer.on_event("fail", rank=1, message="worker 1 lost [bold]")
        observer.on_step(_line(2, loss=2.0, workers=1))
        observer.on_validation(2, np.float32(1.75), 3)  # type: ignore[arg-type]
        observer.on_finish({"validation_loss": 1.75}, {"w": np.ones(2, np.float32)})
        observer.on_stop(OSError("the terminal is closed"))  # it has finished: no event
    observer.close()
    assert [line.step for line in read_metrics(run_dir.path)] == [1, 2]
    events = read_events(run_dir.path)
    assert [event["event"] for event in events] == ["start", "fail", "validation", "finish"]
    assert events[0]["total_steps"] == 2
    assert events[1] == {"event": "fail", "time": 100.0, "rank": 1, "message": "worker 1 lost [bold]"}
    assert float.fromhex(events[2]["loss_hex"]) == 1.75
    assert read_summary(run_dir.path) == {"validation_loss": 1.75}
    assert (run_dir.path / "weights.safetensors").exists()
    for part in ("fail: worker 1 lost [bold]", "step 2  validation loss 1.7500", "validation loss  1.7500"):
        assert part in out.getvalue()
    assert _scalars(run_dir.board_path) == {
        "train/loss": [(1, 3.0), (2, 2.0)],
        "train/grad_norm": [(1, 1.5), (2, 1.5)],
        "train/lr": [(1, pytest.approx(1e-3)), (2, pytest.approx(1e-3))],
        "speed/seconds": [(1, 0.5), (2, 0.5)],
        "speed/tokens_per_second": [(1, 128.0), (2, 128.0)],
        "mesh/workers": [(1, 2.0), (2, 1.0)],
        "faults/fail": [(1, 1.0)],
        "validation/loss": [(2, 1.75)],
    }


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loaded = EventAccumulator(str(folder))
    loaded.Reload()
    return {tag: [(e.step, e.value) for e in loaded.Scalars(tag)] for tag in loaded.Tags()["scalars"]}


def test_faults_are_counted_by_their_workers() -> None:
    faults = FaultCount()
    assert faults_text(faults.summary()) == "none"
    assert faults.add("fail", {"ranks": [1, 2]}) == {"fail": 2}
    assert faults.add("fail", {"ranks": (3,)}) == {"fail": 3}
    assert faults.add("link", {"ranks": [0, 1]}) == {"link": 1}
    assert faults.add("recovered", {"penalty_ms": 1500.0}) == {"penalty_ms": 1500.0}
    assert faults.add("recovered", {"penalty_ms": -500.0}) == {"penalty_ms": -500.0}
    assert faults.add("validation", {"step": 1}) == {}
    assert FaultCount().add("restart", {"ranks": [0, 1]}) == {"restart": 1, "fail": 2}, "no `fail` has told of them"
    assert FaultCount().add("restart", {"ranks": []}) == FaultCount().add("restart", {}) == {"restart": 1}
    summary = faults.summary()
    assert (summary["fail"], summary["link"], summary["join"], summary["penalty_seconds"]) == (3, 1, 0, 1.5)
    assert faults_text(summary) == "3 fail, 1 link, 1.50 s beyond work"
    assert ("faults", "3 fail, 1 link, 1.50 s beyond work") in summary_rows({"faults": summary})


def test_a_run_that_begins_again_goes_on_counting(tmp_path: Path) -> None:
    """Each life has an observer of its own."""
    faults, console = FaultCount(), _text_console()[0]
    lives = [RunDir.create(tmp_path / name, "", model="m", mesh="single") for name in ("first", "second")]
    with RunObserver(lives[0], display=PlainDisplay(console), faults=faults) as observer:
        observer.on_event("fail", ranks=[1])
        observer.on_event("restart", step=4, lost_after=7)
    with RunObserver(lives[1], display=PlainDisplay(console), faults=faults) as observer:
        observer.on_event("fail", ranks=[2])
        assert faults_text(observer.faults.summary()) == "2 fail, 1 restart"
    assert _scalars(lives[1].board_path)["faults/fail"] == [(0, 2.0)]
    with RunObserver(RunDir.create(tmp_path / "other", "", model="m", mesh="single"), board=False) as observer:
        assert faults_text(observer.faults.summary()) == "none"


def test_without_a_board(tmp_path: Path) -> None:
    console, _ = _text_console()
    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="single")
    with RunObserver(run_dir, display=PlainDisplay(console), board=False) as observer:
        observer.on_step(_line(1))
    assert not run_dir.board_path.exists()


def test_closing_reaches_everything(tmp_path: Path) -> None:
    class Broken(PlainDisplay):
        def close(self) -> None:
            raise RuntimeError("broken")

    run_dir = RunDir.create(tmp_path / "run", "", model="m", mesh="single")
    observer = RunObserver(run_dir, display=Broken(_text_console()[0]))
    with pytest.raises(RuntimeError, match="broken"):
        observer.close()
    with pytest.raises(ValueError, match="closed"):
        run_dir.write_metrics(_line(1))
