"""The lines of the live view of a run, for a terminal of any size, as a pure function of values.

The view has a grid of stages and workers if there is room for it; else one line for each worker; else one line for each
stage, with the number of its workers in each state. In a very small terminal it has only the step and the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

from elaswave_spmd.run_dir.loss_curve import LossCurve
from elaswave_spmd.run_dir.workers_now import (
    JOINING,
    LEARNER,
    LEAVING,
    LEFT,
    LOST,
    READY,
    SLOW,
    SPARE,
    STARTING,
    STATES,
    TRAINING,
    WorkerNow,
    WorkersNow,
)

# State -> (symbol, symbol in ASCII, style). The state is also shown as a word, so that colours are not needed.
_LOOKS = {
    TRAINING: ("●", "*", "green"),
    STARTING: ("◌", ".", "dim"),
    READY: ("◌", ".", ""),
    LEARNER: ("◐", "%", "cyan"),
    SLOW: ("◒", "~", "yellow"),
    LEAVING: ("◑", ">", "yellow"),
    JOINING: ("◔", "+", "cyan"),
    SPARE: ("◇", "o", "blue"),
    LEFT: ("○", "-", "dim"),
    LOST: ("✗", "x", "bold red"),
}
_GAP = 2  # cells between two columns
_LEAST_CURVE = 8  # cells; a shorter curve would show nothing


@dataclass(frozen=True)
class Progress:
    """The progress of a run, as far as it is known.

    Args:
        title: the name of the run, such as its model.
        step: the last committed step; 0 if there is none.
        total_steps: the number of the last step of the run.
        loss, lr, workers: those of the last committed step; None if there is none.
        validation: (step, loss) of the newest validation; None if there is none.
        tokens_per_second: the speed, in `unit` per second; 0 if it is not known.
        left: the time that is left, as text; "" if it is not known.
        unit: the unit of the speed, "tokens" or "samples".
    """

    title: str
    step: int
    total_steps: int
    loss: float | None = None
    lr: float | None = None
    workers: int | None = None
    validation: tuple[int, float] | None = None
    tokens_per_second: float = 0.0
    left: str = ""
    unit: str = "tokens"


def render(
    progress: Progress, curve: LossCurve, now: WorkersNow | None, size: tuple[int, int], *, ascii_only: bool = False
) -> list[Text]:
    """The lines of the view.

    Args:
        now: the workers; None if they are not shown, as after the end of a run.
        size: the most cells of a line, and the most lines.
        ascii_only: True if the terminal has only ASCII characters.
    """
    width, height = size
    status = _status(progress, width, ascii_only=ascii_only)
    if height < 4:
        return status[:height]
    status = status[: max(2, height // 4)]
    tail = [*_curve(curve, width, ascii_only=ascii_only), *status]
    if now is None:
        return tail
    room = height - len(tail) - 1
    head = _head(progress, now, width, ascii_only=ascii_only)
    return [head, *_workers(now, width, room, ascii_only=ascii_only), *tail] if room >= 1 else tail


# ---- the parts


def _head(progress: Progress, now: WorkersNow, width: int, *, ascii_only: bool) -> Text:
    """A rule with the names of model and mesh in it."""
    dash = "-" if ascii_only else "─"
    words = f"{progress.title} on {now.mesh}, mesh epoch {now.epoch}"
    words += ", changing" if now.is_changing else ""
    line = Text(f"{dash * 2} {words} ", style="bold")
    return line.append(dash * max(0, width - line.cell_len), style="dim")


def _curve(curve: LossCurve, width: int, *, ascii_only: bool) -> list[Text]:
    """The loss over all steps, between its first and its last value."""
    begin, end = f"loss {curve.first:.4f} ", f" {curve.last:.4f}"
    room = width - len(begin) - len(end)
    drawn = curve.line(room, ascii_only=ascii_only) if room >= _LEAST_CURVE else ""
    return [Text.assemble((begin, "dim"), (drawn, "cyan"), (end, "bold"))] if drawn else []


def _status(progress: Progress, width: int, *, ascii_only: bool) -> list[Text]:
    """A line with the step, a progress bar and the time left; then the figures, on as many lines as they need."""
    done = progress.step / progress.total_steps
    step, share = f"step {progress.step}/{progress.total_steps} ", f" {int(100 * done)} %"
    share += f"  {progress.left} left" if progress.left else ""
    room = min(60, width - len(step) - len(share))
    first = Text(step, style="bold")
    if room >= _LEAST_CURVE:
        full = int(room * done)
        one, other = ("=", "-") if ascii_only else ("━", "─")
        first.append(one * full, style="green").append(other * (room - full), style="dim")
    figures = [f"loss {progress.loss:.4f}"] if progress.loss is not None else ["no step yet"]
    if progress.validation is not None:
        figures.append(f"validation loss {progress.validation[1]:.4f} (step {progress.validation[0]})")
    figures += [f"lr {progress.lr:.2e}"] if progress.lr is not None else []
    figures += [f"{progress.tokens_per_second:,.0f} {progress.unit}/s"] if progress.tokens_per_second else []
    figures += [f"{progress.workers:,} worker{'s' * (progress.workers != 1)}"] if progress.workers is not None else []
    return [first.append(share), *map(Text, _wrapped(figures, width))]


def _wrapped(parts: Iterable[str], width: int) -> list[str]:
    """The parts on lines of at most `width` cells. A part that is longer has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + _GAP + len(part) <= width:
            lines[-1] += " " * _GAP + part
        else:
            lines.append(part)
    return lines


# ---- workers


def _workers(now: WorkersNow, width: int, room: int, *, ascii_only: bool) -> list[Text]:
    """The workers in at most `room` lines: the first of the forms that fits."""
    groups = [(f"stage {stage}", _layers(now, stage), now.of_stage(stage)) for stage in range(now.num_stages)]
    if beside := now.of_stage(None):
        groups.append(("beside the mesh", "", beside))
    # Checked before any layout, so that a view of thousands of workers does not cost more than one of ten.
    if len(now.workers) <= room * max(1, width // 8):
        for form in (_grid, _list):
            lines = form(groups, width, ascii_only=ascii_only)
            if len(lines) <= room and all(line.cell_len <= width for line in lines):
                return lines
    return _counts(groups, room)


_Group = tuple[str, str, tuple[WorkerNow, ...]]
"""The name of a stage, its layers in words, and its workers."""


def _layers(now: WorkersNow, stage: int) -> str:
    first, last = now.layer_cuts[stage], now.layer_cuts[stage + 1] - 1
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _grid(groups: Sequence[_Group], width: int, *, ascii_only: bool) -> list[Text]:
    """A row for each stage, on several lines if it is too long for one."""
    label = max(len(f"{name}  {layers}".rstrip()) for name, layers, _ in groups)
    cells = [[_cell(worker, ascii_only=ascii_only) for worker in workers] for _, _, workers in groups]
    widest = max((cell.cell_len for row in cells for cell in row), default=1)
    columns = (width - label) // (widest + _GAP)
    if columns < 1:
        return [Text(" " * (width + 1))]  # it does not fit
    lines = []
    for (name, layers, _), row in zip(groups, cells, strict=True):
        for first in range(0, max(1, len(row)), columns):
            line = Text.assemble((name, "bold"), (f"  {layers}", "dim")) if first == 0 else Text()
            line.append(" " * (label - line.cell_len))
            for cell in row[first : first + columns]:
                line.append(" " * _GAP).append_text(cell).append(" " * (widest - cell.cell_len))
            line.rstrip()
            lines.append(line)
    return lines


def _list(groups: Sequence[_Group], width: int, *, ascii_only: bool) -> list[Text]:
    """A line for each stage and one for each of its workers, for terminals that are narrow and high."""
    lines = []
    for name, layers, workers in groups:
        lines.append(Text.assemble((name, "bold"), (f"  {layers}" if layers else "", "dim")))
        lines += [Text(" " * _GAP).append_text(_cell(worker, ascii_only=ascii_only)) for worker in workers]
    return lines


def _cell(worker: WorkerNow, *, ascii_only: bool) -> Text:
    """The text for one worker: rank, state, number of micro-batches, and speed."""
    symbol, plain, style = _LOOKS[worker.state]
    cell = Text.assemble((plain if ascii_only else symbol, style), f" {worker.rank} ", (worker.state, style))
    if worker.stage is not None and not worker.is_gone:
        cell.append(f" {worker.microbatches} mb")
        if worker.speed is not None:
            cell.append(f" {worker.speed:.2f}x")
    return cell


def _counts(groups: Sequence[_Group], room: int) -> list[Text]:
    """A line for each stage, such as "stage 3: 128 training, 1 lost". Stages without room share the last line."""
    shown = groups if len(groups) <= room else groups[: room - 1]
    lines = [_counted(f"{name}: ", workers) for name, _, workers in shown]
    if rest := groups[len(shown) :]:
        name = f"{len(rest)} more stages: " if shown else f"{len(rest)} stages: "
        lines.append(_counted(name, [worker for _, _, workers in rest for worker in workers]))
    return lines


def _counted(name: str, workers: Iterable[WorkerNow]) -> Text:
    counts = Counter(worker.state for worker in workers)
    line = Text(name, style="bold")
    for i, state in enumerate(state for state in STATES if counts[state]):
        line.append(", " if i else "", style="not bold")
        line.append(f"{counts[state]:,} {state}", style=f"not bold {_LOOKS[state][2]}")
    return line if counts else line.append("no worker", style="not bold")
