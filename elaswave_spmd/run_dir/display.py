"""The display of a run for people: a progress bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from elaswave_spmd.run_dir.faults import faults_text
from elaswave_spmd.run_dir.metrics import MetricsLine

LINE_SECONDS = 1.0  # at least this long between two plain lines of steps
BAR_SECONDS = 0.1  # at least this long between two redraws of the bar
_WINDOW_STEPS = 20  # steps that the shown speed is averaged over


@dataclass(frozen=True)
class RunInfo:
    """The facts that are known when a run starts.

    Args:
        params: number of parameters.
        total_steps: the last step, counted from step 1.
        workers: workers of the first mesh.
        corpus: name of the data, or "".
        run_dir: the run's directory, or "".
        first_step: the first step to be computed; above 1 if the run is resumed.
        unsurvived: a line about the workers whose simultaneous loss would lose state, or "".
        stages, layer_cuts, microbatch_counts: the first plan, as in events of mesh epochs; empty if it is not known.

    Raises:
        ValueError: counts out of range.
    """

    model: str
    mesh: str
    sharding: str
    params: int
    total_steps: int
    workers: int
    corpus: str = ""
    run_dir: str = ""
    first_step: int = 1
    unsurvived: str = ""
    stages: tuple[tuple[int, ...], ...] = ()
    layer_cuts: tuple[int, ...] = ()
    microbatch_counts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.total_steps < 1 or self.workers < 1 or self.first_step < 1 or self.params < 0:
            raise ValueError(f"run info out of range: {self}")

    def __str__(self) -> str:
        words = [f"{self.model} ({self.params:,} parameters)", f"mesh {self.mesh} of {count(self.workers, 'worker')}"]
        words += [f"sharding {self.sharding}"] if self.sharding else []
        words += [f"data {self.corpus}"] if self.corpus else []
        return ", ".join((*words, count(self.total_steps, "step")))


class Display(Protocol):
    """A display of a run while it trains. One thread calls it."""

    def start(self, info: RunInfo) -> None: ...
    def step(self, line: MetricsLine) -> None: ...
    def show_line(self, text: str) -> None:
        """Show one line. It is never left out, unlike lines of steps."""
        ...

    def finish(self, summary: Mapping[str, object]) -> None: ...
    def close(self) -> None:
        """Restore the terminal; closing again is allowed."""
        ...


class Pace:
    """The speed over the last steps, as tokens per second and seconds left."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._recent: deque[MetricsLine] = deque(maxlen=_WINDOW_STEPS)

    def add(self, line: MetricsLine) -> None:
        self._recent.append(line)

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(line.seconds for line in self._recent)
        return sum(line.tokens for line in self._recent) / seconds if seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        if not self._recent:
            return 0.0
        per_step = sum(line.seconds for line in self._recent) / len(self._recent)
        return per_step * max(0, self._total_steps - self._recent[-1].step)


class PlainDisplay:
    """A display as lines of text: the first step, the last, every event, and one step per `every` seconds."""

    def __init__(
        self, console: Console, clock: Callable[[], float] = time.monotonic, every: float = LINE_SECONDS
    ) -> None:
        self._console = console
        self._clock = clock
        self._every = every
        self._pace = Pace(1)
        self._total_steps = 1
        self._shown_at: float | None = None

    def start(self, info: RunInfo) -> None:
        self._total_steps = info.total_steps
        self._pace = Pace(info.total_steps)
        self.show_line(str(info))
        if info.run_dir:
            self.show_line(f"run directory {info.run_dir}")
        if info.unsurvived:
            self.show_line(info.unsurvived)

    def step(self, line: MetricsLine) -> None:
        self._pace.add(line)
        now = self._clock()
        # Small models take milliseconds per step: not every step has a line, but the first and the last have.
        due = self._shown_at is None or now - self._shown_at >= self._every
        if not due and line.step < self._total_steps:
            return
        self._shown_at = now
        self.show_line(
            f"step {line.step}/{self._total_steps}  loss {line.loss:.4f}  grad norm {line.grad_norm:.3g}  "
            f"lr {line.lr:.2e}  {self._pace.tokens_per_second:,.0f} tokens/s  {count(line.workers, 'worker')}  "
            f"{clock_text(self._pace.seconds_left)} left"
        )

    def show_line(self, text: str) -> None:
        # soft_wrap: a line of a log stays one line, however long it is. No markup: the text may come from a user, and
        # brackets in it are not meant for rich.
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finish(self, summary: Mapping[str, object]) -> None:
        rows = summary_rows(summary)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.show_line(f"{name:<{width}}  {value}")

    def close(self) -> None:
        pass


class BarDisplay:
    """A display as a progress bar, redrawn by the calling thread; events scroll above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._plain = PlainDisplay(console, clock)
        self._pace = Pace(1)
        self._total_steps = 1
        self._drawn_at: float | None = None
        self._bar: Progress | None = None

    def start(self, info: RunInfo) -> None:
        self._plain.start(info)
        self._total_steps = info.total_steps
        self._pace = Pace(info.total_steps)
        # auto_refresh would start a thread, and the controller must have only one when it forks workers.
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            auto_refresh=False,
            redirect_stderr=sys.stderr.isatty(),  # otherwise stderr goes to a file, and must stay there
        )
        bar.add_task("train", total=info.total_steps, completed=info.first_step - 1, figures="starting")
        bar.start()
        self._bar = bar

    def step(self, line: MetricsLine) -> None:
        self._pace.add(line)
        now = self._clock()
        due = self._drawn_at is None or now - self._drawn_at >= BAR_SECONDS
        if self._bar is None or (not due and line.step < self._total_steps):
            return
        self._drawn_at = now
        figures = (
            f"loss {line.loss:.4f}  {self._pace.tokens_per_second:,.0f} tokens/s  "
            f"{count(line.workers, 'worker')}  {clock_text(self._pace.seconds_left)} left"
        )
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=line.step, figures=figures, refresh=True)

    def show_line(self, text: str) -> None:
        self._plain.show_line(text)

    def finish(self, summary: Mapping[str, object]) -> None:
        self.close()
        table = Table(show_header=False, title="finished", title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in summary_rows(summary):
            table.add_row(Text(name), Text(value))
        self._console.print(table)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LastingDisplay:
    """A display whose readers may leave: a closed terminal, or a pipe that is read no more, ends no run.

    From then on nothing is shown, and what else this process prints goes nowhere. The run's files have everything.
    """

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def start(self, info: RunInfo) -> None:
        with self._while_read():
            if self._display is not None:
                self._display.start(info)

    def step(self, line: MetricsLine) -> None:
        with self._while_read():
            if self._display is not None:
                self._display.step(line)

    def show_line(self, text: str) -> None:
        with self._while_read():
            if self._display is not None:
                self._display.show_line(text)

    def finish(self, summary: Mapping[str, object]) -> None:
        with self._while_read():
            if self._display is not None:
                self._display.finish(summary)

    def close(self) -> None:
        with self._while_read():
            if self._display is not None:
                self._display.close()

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # rich answers a broken pipe by the end of the program
            self._display = None
            mute_output()


def mute_output() -> None:
    """Have the standard output take everything: the interpreter flushes it once more at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def make_display(console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> Display:
    """Choose the display: a bar if the console (default: stdout) is a terminal with a cursor, else plain lines."""
    console = console if console is not None else Console()
    fancy = console.is_terminal and not console.is_dumb_terminal
    return BarDisplay(console, clock) if fancy else PlainDisplay(console, clock)


def summary_rows(summary: Mapping[str, object]) -> list[tuple[str, str]]:
    """The rows of the final table, in the summary's order. Of nested values it has the corpus and the faults."""
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        if name == "corpus" and isinstance(value, Mapping):
            size = value.get("bytes")
            value = f"{value.get('name')}" + (f" ({size:,} bytes)" if isinstance(size, int) else "")
        if name == "faults" and isinstance(value, Mapping):
            value = faults_text(value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            shown = "-" if value is None else str(value)
        elif isinstance(value, int):
            shown = f"{value:,}"
        elif isinstance(value, float):
            shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
        else:
            continue
        rows.append((name.replace("_", " "), shown))
    return rows


def clock_text(seconds: float) -> str:
    """A duration as `0:07`, `12:30` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 workers`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
