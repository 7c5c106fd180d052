"""The lines of the live view for terminals of all sizes, and the region of the screen in which they are drawn."""

from __future__ import annotations

import io
import math

import pyte
import pyte.modes
import pytest
from rich.console import Console
from rich.text import Text

from elaswave_spmd.run_dir.live_view import Progress, render
from elaswave_spmd.run_dir.loss_curve import LossCurve
from elaswave_spmd.run_dir.screen_region import ScreenRegion
from elaswave_spmd.run_dir.workers_now import (
    LEARNER,
    LOST,
    SLOW,
    SPARE,
    STARTING,
    STATES,
    TRAINING,
    WorkerNow,
    WorkersNow,
)

PROGRESS = Progress("gpt_tiny", 120, 400, 2.3123, 1.93e-3, 4, (100, 2.4011), 12345.0, "0:42")
FEW = WorkersNow(
    "dp2_pp2",
    1,
    (0, 3, 6),
    (
        WorkerNow(0, TRAINING, 0, 4, 1.0),
        WorkerNow(1, SLOW, 0, 2, 0.6),
        WorkerNow(2, LEARNER, 1, 6, 1.02),
        WorkerNow(3, LOST, 1),
        WorkerNow(4, SPARE),
    ),
)


def _curve(*losses: float) -> LossCurve:
    curve = LossCurve()
    for loss in losses or (5.5, 4.0, 3.0, 2.3123):
        curve.add(loss)
    return curve


def _lines(width: int, height: int, workers: WorkersNow | None = FEW, *, ascii_only: bool = False) -> list[str]:
    return [line.plain for line in render(PROGRESS, _curve(), workers, (width, height), ascii_only=ascii_only)]


def _many(stages: int, each: int) -> WorkersNow:
    workers = [WorkerNow(stage * each + i, TRAINING, stage, 4, 1.0) for stage in range(stages) for i in range(each)]
    workers[0] = WorkerNow(0, LOST, 0)
    return WorkersNow(f"dp{each}_pp{stages}", 0, tuple(range(stages + 1)), tuple(workers))


def test_a_grid_of_stages_and_workers_with_their_state_micro_batches_and_speed() -> None:
    lines = _lines(99, 29)
    assert "gpt_tiny on dp2_pp2, mesh epoch 1" in lines[0]
    assert " ".join(lines[1].split()) == "stage 0 layers 0-2 ● 0 training 4 mb 1.00x ◒ 1 slow 2 mb 0.60x"
    assert " ".join(lines[2].split()) == "stage 1 layers 3-5 ◐ 2 learner 6 mb 1.02x ✗ 3 lost"
    assert " ".join(lines[3].split()) == "beside the mesh ◇ 4 spare"
    assert lines[1].index("◒") == lines[2].index("✗"), "it is a grid"
    text = "\n".join(lines[4:])
    for part in (
        "step 120/400",
        "30 %",
        "0:42 left",
        "loss 2.3123",
        "validation loss 2.4011 (step 100)",
        "lr 1.93e-03",
    ):
        assert part in text
    for part in ("12,345 tokens/s", "4 workers", "loss 5.5000 █"):
        assert part in text


def test_a_narrow_terminal_has_a_list_by_stage() -> None:
    lines = _lines(30, 40)
    begin = lines.index("stage 0  layers 0-2")
    assert lines[begin + 1 : begin + 3] == ["  ● 0 training 4 mb 1.00x", "  ◒ 1 slow 2 mb 0.60x"]
    assert "stage 1  layers 3-5" in lines and "  ✗ 3 lost" in lines


def test_many_workers_are_counted_by_stage() -> None:
    lines = _lines(99, 29, _many(4, 129))
    assert lines[1:5] == ["stage 0: 128 training, 1 lost", *(f"stage {stage}: 129 training" for stage in (1, 2, 3))]


def test_many_stages_are_counted_together() -> None:
    lines = _lines(99, 15, _many(40, 100))
    shown = [line for line in lines if line.startswith("stage ")]
    rest = 40 - len(shown)
    assert f"{rest} more stages: {100 * rest:,} training" in lines


@pytest.mark.parametrize("width", [1, 7, 20, 40, 79, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 8, 23])
@pytest.mark.parametrize("workers", [None, FEW, _many(8, 128), _many(64, 1)], ids=["none", "few", "wide", "deep"])
def test_it_never_has_more_lines_than_there_is_room_for(width: int, height: int, workers: WorkersNow | None) -> None:
    lines = _lines(width, height, workers)
    assert 1 <= len(lines) <= height
    assert lines[0 if height < 4 else -1]


def test_the_smallest_terminal_has_the_step() -> None:
    assert _lines(20, 1) == ["step 120/400  30 %  0:42 left"]
    assert _lines(40, 2)[1] == "loss 2.3123"


def test_a_terminal_without_unicode_has_ascii() -> None:
    assert all(line.isascii() for line in _lines(99, 29, ascii_only=True))
    assert "x 3 lost" in "\n".join(_lines(99, 29, ascii_only=True))


def test_before_the_first_step_workers_are_starting() -> None:
    workers = WorkersNow.planned("dp2_pp2", ((0, 1), (2, 3)), (0, 3, 6), ((4, 4), (4, 4)))
    lines = [line.plain for line in render(Progress("m", 0, 9), LossCurve(), workers, (99, 29))]
    assert lines[1].count(STARTING) == 2 and "no step yet" in lines[-1] and "step 0/9" in lines[-2]


def test_every_state_has_a_look_and_others_are_refused() -> None:
    workers = tuple(WorkerNow(rank, state, 0) for rank, state in enumerate(STATES))
    text = "\n".join(_lines(99, 29, WorkersNow("dp1", 0, (0, 1), workers)))
    assert all(f"{rank} {state}" in text for rank, state in enumerate(STATES))
    with pytest.raises(ValueError, match="no known state"):
        WorkerNow(0, "asleep")


# ---- the curve


def test_the_curve_goes_from_high_to_low() -> None:
    assert _curve(8, 7, 6, 5, 4, 3, 2, 1).line(20) == "█▇▆▅▄▃▂▁"
    assert _curve(2, 2, 2).line(20) == "▁▁▁"
    assert LossCurve().line(20) == ""


def test_a_loss_that_is_not_finite_leaves_a_gap() -> None:
    assert _curve(8, math.nan, 1).line(3) == "█?▁"
    assert _curve(math.inf).line(3) == "?"


def test_the_curve_of_a_long_run_spans_all_of_it_in_bounded_memory() -> None:
    curve = _curve(*(100_000.0 - step for step in range(100_000)))
    line = curve.line(50)
    assert len(line) == 50 and line[0] == "█" and line[-1] == "▁" and list(line) == sorted(line, reverse=True)
    assert (curve.first, curve.last) == (100_000.0, 1.0)
    assert len(curve._points) <= 512


# ---- the region


class _Screen:
    """A terminal of a size, with a region at its bottom."""

    def __init__(self, columns: int = 20, rows: int = 6) -> None:
        self.out = io.StringIO()
        self.screen = pyte.HistoryScreen(columns, rows, history=100)
        self.screen.set_mode(pyte.modes.LNM)  # the kernel's terminal makes \r\n of \n
        self.stream = pyte.Stream(self.screen)
        self.console = Console(file=self.out, width=columns, height=rows, force_terminal=True, _environ={})
        self.region = ScreenRegion(self.console)

    def draw(self, above: list[str], lines: list[str], *, last: bool = False) -> None:
        draw = self.region.leave if last else self.region.draw
        draw([Text(line) for line in above], [Text(line) for line in lines])
        self.stream.feed(self.out.getvalue())
        self.out.seek(0)
        self.out.truncate()

    @property
    def lines(self) -> list[str]:
        top = ["".join(line[x].data for x in range(self.screen.columns)).rstrip() for line in self.screen.history.top]
        return [line for line in [*top, *(line.rstrip() for line in self.screen.display)] if line]


def test_what_is_printed_above_stays_and_the_region_is_there_once() -> None:
    screen = _Screen()
    for number in range(20):
        screen.draw([f"event {number}"] * (number % 2), ["a", f"b {number}", "c"])
    events = [f"event {number}" for number in range(1, 20, 2)]
    assert screen.lines == [*events, "a", "b 19", "c"]


def test_lines_above_may_be_longer_than_the_screen_is_wide_and_others_are_cut() -> None:
    screen = _Screen()
    screen.draw(["x" * 20, "y" * 45], ["z" * 50])
    screen.draw([], ["z" * 50])
    assert screen.lines == ["x" * 20, "y" * 20, "y" * 20, "y" * 5, "z" * 19]


def test_the_region_may_shrink_and_grow() -> None:
    screen = _Screen()
    for number in (4, 1, 5, 2):
        screen.draw([], [f"line {i}" for i in range(number)])
    assert screen.lines == ["line 0", "line 1"]


def test_after_leaving_the_cursor_is_below_the_region() -> None:
    screen = _Screen()
    screen.draw([], ["a", "b"])
    screen.draw(["event"], ["a"], last=True)
    assert screen.lines == ["event", "a"] and (screen.screen.cursor.y, screen.screen.cursor.x) == (2, 0)


def test_a_window_that_becomes_narrower_wraps_what_was_drawn() -> None:
    """The region goes up by as many rows as its lines take then."""
    screen = _Screen(columns=20)
    screen.draw([], ["a" * 19, "b" * 5])
    screen.console.width = 10
    screen.region.draw([], [Text("c")])
    assert screen.out.getvalue().startswith("\r\x1b[2A")
