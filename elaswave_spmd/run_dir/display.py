"""The display of a run for people: a live view on a terminal, plain lines everywhere else."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elaswave_spmd.conf.schema import AUTO, LIVE, PLAIN
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.output import mute_output
from elaswave_spmd.run_dir.captured_output import CapturedOutput
from elaswave_spmd.run_dir.faults import faults_text
from elaswave_spmd.run_dir.live_view import Progress, render
from elaswave_spmd.run_dir.loss_curve import LossCurve
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.patient_stream import end, patient
from elaswave_spmd.run_dir.screen_region import ScreenRegion, encodable
from elaswave_spmd.run_dir.workers_now import WorkersNow

TOKENS = "tokens"
LINE_SECONDS = 1.0  # the least number of seconds between two plain lines of steps
VIEW_SECONDS = 0.25  # the least number of seconds between two drawings of the live view
VIEW_SHARE = 0.005  # the live view takes at most this share of the time of the thread that draws it
_WINDOW_STEPS = 20  # the speed that is shown is the mean of this many steps

_NO_C1 = dict.fromkeys(range(0x80, 0xA0))  # 8-bit control characters, which some terminals take for commands
_LOSES, _CHANGES, _GAINS = "bold red", "bold yellow", "bold green"
_STYLES = {
    **dict.fromkeys(("fail", "corrupt", "corruption", "device", "skip", "standstill", "stop", "rollback"), _LOSES),
    **dict.fromkeys(
        ("early_stop", "killed", "leave", "link", "notice", "rebalance", "restart", "slow", "signal"), _CHANGES
    ),
    **dict.fromkeys(("join", "checkpoint", "recover", "recovered", "resume", "spare"), _GAINS),
}
"""Kind of event -> style of that word in the line of the event."""


@dataclass(frozen=True)
class RunInfo:
    """The facts that are known when a run starts.

    Args:
        model: the name of the model.
        mesh: the name of the first mesh's shape.
        sharding: the name of the shardings, or "".
        params: the number of parameters.
        total_steps: the number of the last step; the first one is step 1.
        workers: the number of workers of the first mesh.
        corpus: the name of the data, or "".
        run_dir: the path of the run's directory, or "".
        first_step: the first step to be computed; above 1 if the run is resumed.
        unsurvived: a line about the workers whose simultaneous loss would lose state, or "".
        stages, layer_cuts, microbatch_counts: the first placement, as in events of mesh epochs; empty if not known.
        unit: the unit in which the speed is shown, "tokens" or "samples".
        without_microbatches: a line about the workers that have no micro-batch, or "".

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
    unit: str = TOKENS
    without_microbatches: str = ""

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
    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None: ...
    def show_line(self, text: str) -> None:
        """Show one line. It is never left out, unlike lines of steps."""
        ...

    @property
    def wants_workers(self) -> bool:
        """True if the state of the workers would be shown now. Read after every event, so it must be cheap."""
        ...

    def show_workers(self, workers: WorkersNow) -> None: ...
    def finish(self, summary: Mapping[str, object]) -> None: ...
    def forget(self) -> None:
        """Drop the lines that wait to be shown, since nobody reads the display any more."""
        ...

    def close(self) -> None:
        """Restore the terminal; closing again is allowed."""
        ...


class Pace:
    """The speed over the last `_WINDOW_STEPS` steps, and the time that is left at this speed."""

    def __init__(self, total_steps: int, unit: str = TOKENS) -> None:
        self._total_steps = total_steps
        self.unit = unit
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
    """A display as lines of text: the first step, the last, every event, and one step per LINE_SECONDS."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._pace = Pace(1)
        self._total_steps = 1
        self._shown_at: float | None = None

    def start(self, info: RunInfo) -> None:
        self._total_steps = info.total_steps
        self._pace = Pace(info.total_steps, info.unit)
        self.show_line(str(info))
        if info.run_dir:
            self.show_line(f"run directory {info.run_dir}")
        if info.unsurvived:
            self.show_line(info.unsurvived)
        if info.without_microbatches:
            self.show_line(info.without_microbatches)

    def step(self, line: MetricsLine) -> None:
        self._pace.add(line)
        now = self._clock()
        # Steps of small models take milliseconds, so not every step gets a line; the first and the last one always do.
        due = self._shown_at is None or now - self._shown_at >= LINE_SECONDS
        if not due and line.step < self._total_steps:
            return
        self._shown_at = now
        speed = f"{self._pace.tokens_per_second:,.0f} {self._pace.unit}/s"
        self.show_line(
            f"step {line.step}/{self._total_steps}  loss {line.loss:.4f}  grad norm {line.grad_norm:.3g}  "
            f"lr {line.lr:.2e}  {speed}  {count(line.workers, 'worker')}  "
            f"{clock_text(self._pace.seconds_left)} left"
        )

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        self.show_line(validation_text(step, loss, metrics))

    @property
    def wants_workers(self) -> bool:
        return False

    def show_workers(self, workers: WorkersNow) -> None:
        pass

    def show_line(self, text: str) -> None:
        # soft_wrap keeps a line of a log one line, however long it is. No markup, as the text may come from a user, and
        # brackets in it are not commands for rich.
        text = encodable(text, self._console.file)
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def finish(self, summary: Mapping[str, object]) -> None:
        rows = summary_rows(summary, self._pace.unit)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.show_line(f"{name:<{width}}  {value}")

    def forget(self) -> None:
        pass

    def close(self) -> None:
        end(self._console.file)


class LiveDisplay:
    """A display as a view at the bottom of a terminal, which is drawn again and again. Events stay above it, in the
    scroll-back.

    The calling thread draws it, at most once in `VIEW_SECONDS`, and so rarely that drawing takes less than `VIEW_SHARE`
    of its time. Lines that come in between are shown with the next drawing. What this process and its workers print
    meanwhile is shown above the view, too.

    Args:
        console: the terminal.
        clock: returns seconds of a clock that never runs backwards.
        captured: the output of the workers; None if it is not captured.
        work: returns the seconds of processor time of the calling thread.
    """

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        captured: CapturedOutput | None = None,
        work: Callable[[], float] = time.thread_time,
    ) -> None:
        self._console = console
        self._clock = clock
        self._work = work
        self._captured = captured
        self._plain = PlainDisplay(console, clock)
        self._region = ScreenRegion(console)
        self._curve = LossCurve()
        self._pace = Pace(1)
        self._progress = Progress("", 0, 1)
        self._workers: WorkersNow | None = None
        self._above: deque[Text] = deque()  # lines to show above the view; any thread that prints adds to it
        self._due_at = 0.0  # the view is not drawn again before this time
        self._began = 0.0  # processor time at which the present drawing began
        self._stack = contextlib.ExitStack()
        self._is_open = False

    def start(self, info: RunInfo) -> None:
        self._plain.start(info)
        self._pace = Pace(info.total_steps, info.unit)
        self._progress = Progress(info.model, info.first_step - 1, info.total_steps, unit=info.unit)
        if info.stages:
            self._workers = WorkersNow.planned(info.mesh, info.stages, info.layer_cuts, info.microbatch_counts)
        # Only streams that go to the terminal are taken over; one that is redirected to a file stays as it is.
        if sys.stdout.isatty():
            out = self._stack.enter_context(_LinesAbove(self._above))
            self._stack.enter_context(contextlib.redirect_stdout(out))
        if sys.stderr.isatty():
            err = self._stack.enter_context(_LinesAbove(self._above))
            self._stack.enter_context(contextlib.redirect_stderr(err))
        self._is_open = True
        self._draw_if_due()

    def step(self, line: MetricsLine) -> None:
        self._pace.add(line)
        self._curve.add(line.loss)
        self._progress = replace(
            self._progress,
            step=line.step,
            loss=line.loss,
            lr=line.lr,
            workers=line.workers,
            tokens_per_second=self._pace.tokens_per_second,
            left=clock_text(self._pace.seconds_left),
        )

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        self._progress = replace(self._progress, validation=(step, loss))
        self.show_line(validation_text(step, loss, metrics))

    def show_line(self, text: str) -> None:
        if not self._is_open:
            self._plain.show_line(text)
            return
        kind, colon, _ = text.partition(":")
        shown = safe_text(text)
        if colon and kind in _STYLES:
            shown.stylize(_STYLES[kind], 0, len(kind))
        self._above.append(shown)
        self._draw_if_due()

    @property
    def wants_workers(self) -> bool:
        if not self._is_open or self._clock() < self._due_at:
            return False
        self._began = self._work()  # the caller now collects the workers' state, which counts as part of the drawing
        return True

    def show_workers(self, workers: WorkersNow) -> None:
        self._workers = workers
        self._draw()

    def finish(self, summary: Mapping[str, object]) -> None:
        self._leave()
        table = Table(show_header=False, title="finished", title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in summary_rows(summary, self._pace.unit):
            table.add_row(Text(name), Text(value))
        self._console.print(table)

    def forget(self) -> None:
        self._above.clear()
        if self._captured is not None:
            self._captured.lines()

    def close(self) -> None:
        self._leave()
        self._plain.close()

    def _leave(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._stack.close()
        self._take_captured(rest=True)
        # The workers are gone. The curve and the last step stay.
        self._region.leave(self._taken_above(), self._lines(None))

    def _draw_if_due(self) -> None:
        if self._clock() >= self._due_at:
            self._began = self._work()
            self._draw()

    def _draw(self) -> None:
        """Draw, and decide when to draw next."""
        try:
            if self._region.takes_output:
                self._take_captured()
                self._region.draw(self._taken_above(), self._lines(self._workers))
            elif self._captured is not None:
                self._captured.trim()
        except OSError:  # the terminal is closed
            self._is_open = False
            self._stack.close()
            raise
        spent = max(0.0, self._work() - self._began)
        self._due_at = self._clock() + max(VIEW_SECONDS, spent / VIEW_SHARE)

    def _lines(self, workers: WorkersNow | None) -> list[Text]:
        ascii_only = self._console.options.ascii_only
        return render(self._progress, self._curve, workers, self._region.size, ascii_only=ascii_only)

    def _taken_above(self) -> list[Text]:
        return [self._above.popleft() for _ in range(len(self._above))]

    def _take_captured(self, *, rest: bool = False) -> None:
        if self._captured is not None:
            self._above.extend(map(safe_text, self._captured.lines(rest=rest)))


_LONGEST_LINE = 1 << 16


class _LinesAbove(io.TextIOBase):
    """A stream whose lines are shown above a view. Any thread may print. A line is added as soon as it is complete."""

    def __init__(self, lines: deque[Text]) -> None:
        self._lines = lines
        self._rest = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if len(self._rest) > _LONGEST_LINE:  # progress bars never end their line
                lines, self._rest = [*lines, self._rest], ""
            self._lines.extend(map(safe_text, lines))
        return len(text)

    def close(self) -> None:
        if self._rest:
            self._lines.append(safe_text(self._rest))
            self._rest = ""
        super().close()


def safe_text(line: str) -> Text:
    """A line that a user's code or a worker printed, with its colours but without other commands to the terminal."""
    # A \r at the end may belong to the newline. After any other \r the line is overwritten from its beginning.
    text = Text.from_ansi(line.rstrip("\r").translate(_NO_C1))
    # Remove what rich does not recognise, such as a reset of the terminal or a sequence that is cut off.
    return Text(text.plain.replace("\x1b", "")) if "\x1b" in text.plain else text


class LastingDisplay:
    """A display whose reader may go away, so that a closed terminal or pipe does not end the run.

    From then on nothing is shown, and all other output of this process and of its workers is dropped as well. The run's
    files still get everything.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._is_read = True

    def start(self, info: RunInfo) -> None:
        with self._while_read():
            if self._is_read:
                self._display.start(info)

    def step(self, line: MetricsLine) -> None:
        with self._while_read():
            if self._is_read:
                self._display.step(line)
            else:
                self._display.forget()  # workers still print: their captured output must not fill the memory

    def show_line(self, text: str) -> None:
        with self._while_read():
            if self._is_read:
                self._display.show_line(text)

    def validation(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        with self._while_read():
            if self._is_read:
                self._display.validation(step, loss, metrics)

    @property
    def wants_workers(self) -> bool:
        return self._is_read and self._display.wants_workers

    def show_workers(self, workers: WorkersNow) -> None:
        with self._while_read():
            if self._is_read:
                self._display.show_workers(workers)

    def finish(self, summary: Mapping[str, object]) -> None:
        with self._while_read():
            if self._is_read:
                self._display.finish(summary)

    def close(self) -> None:
        with self._while_read():
            if self._is_read:
                self._display.close()

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit):  # rich raises SystemExit for a broken pipe
            self._is_read = False
            mute_output()


def shows_live(choice: str, console: Console | None = None) -> bool:
    """True if a run is shown by the live view.

    Args:
        choice: the setting run.display.
        console: the console; None for the standard output.

    Raises:
        ConfigError: the live view is requested, and the console is not a terminal that can show it.
    """
    # With FORCE_COLOR rich takes any output for a terminal. Colours are fine there, but a moving cursor is not.
    is_screen = sys.stdout.isatty() if console is None else True
    console = console if console is not None else Console()
    can = is_screen and console.is_terminal and not console.is_dumb_terminal
    if choice == LIVE and not can:
        raise ConfigError(
            "run.display=live cannot be shown: "
            + ("the terminal has no cursor (TERM)" if is_screen else "the output is no terminal"),
            rule="the live view is drawn at the bottom of a terminal",
            where="run.display=live",
            fix="run.display=auto, which prints lines here",
        )
    return can and choice != PLAIN


def make_display(
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    choice: str = AUTO,
    captured: CapturedOutput | None = None,
) -> Display:
    """Choose the display.

    Args:
        console: the console; None for the standard output.
        clock: returns seconds of a clock that never runs backwards.
        choice: the setting run.display. `auto` is the live view if the console is a terminal with a cursor, else lines.
        captured: the output of the workers, which the live view shows; None if it is not captured.

    Raises:
        ConfigError: as `shows_live`.
    """
    is_live = shows_live(choice, console)
    # The present sys.stdout, kept by the console: the live view replaces sys.stdout later.
    console = console if console is not None else Console(file=patient(sys.stdout))
    if console.is_jupyter:
        # Plain text on stdout: in a notebook rich would make an output of its own for every line, and there is no
        # cursor.
        console = Console(file=sys.stdout, force_jupyter=False, force_terminal=False)
    return LiveDisplay(console, clock, captured) if is_live else PlainDisplay(console, clock)


def validation_text(step: int, loss: float, metrics: Mapping[str, float] | None = None) -> str:
    """The line of a validation."""
    others = "".join(f"  {name} {value:.4f}" for name, value in (metrics or {}).items())
    return f"step {step}  validation loss {loss:.4f}{others}"


def summary_rows(summary: Mapping[str, object], unit: str = TOKENS) -> list[tuple[str, str]]:
    """The rows (name, value) of the final table, in the summary's order. Of nested values only the corpus and the
    faults have rows.

    Args:
        unit: the unit of the speed, "tokens" or "samples".
    """
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        if name == "corpus" and isinstance(value, Mapping):
            size = value.get("bytes")
            value = f"{value.get('name')}" + (f" ({size:,} bytes)" if isinstance(size, int) and size else "")
        if name == "faults" and isinstance(value, Mapping):
            value = faults_text(value)
        if isinstance(value, bool) or value is None or isinstance(value, str):
            shown = "-" if value is None else str(value)
        elif isinstance(value, int):
            shown = f"{value:,}"
        elif isinstance(value, float):
            # Four digits after the point would be too many for a speed.
            is_large = abs(value) >= (100 if name == "tokens_per_second" else 1000)
            shown = f"{value:,.0f}" if is_large else f"{value:.4f}"
        else:
            continue
        rows.append((f"{unit} per second" if name == "tokens_per_second" else name.replace("_", " "), shown))
    return rows


def clock_text(seconds: float) -> str:
    """A duration as `0:07`, `12:30` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `2 workers`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
