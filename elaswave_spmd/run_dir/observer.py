"""`RunObserver`: everything a run shows or writes about itself, behind seven calls of one thread."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np

from elaswave_spmd.errors import RunError, WorkerError, headline_of
from elaswave_spmd.run_dir.directory import RunDir
from elaswave_spmd.run_dir.display import Display, Pace, RunInfo, make_display
from elaswave_spmd.run_dir.json_lines import plain, writing
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.tensorboard import Board

_RECENT_EVENTS = 5


class RunObserver:
    """Composes the run's directory, the display and TensorBoard. Files first: what is shown has been written.

    Whatever writes raises FilesError when the run's files cannot be written. `last` is the last step's line, `pace` the
    speed over the last steps, `recent_events` the last few of `on_event`.

    Args:
        run_dir: open directory of the run; closed by `close`.
        display: default is a bar on a terminal, plain lines elsewhere.
        board: write TensorBoard files into the run's directory.
        now: seconds since 1970, for events.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        display: Display | None = None,
        board: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir = run_dir
        self._display = display if display is not None else make_display()
        with writing(run_dir.board_path):
            self._board = Board(run_dir.board_path, now) if board else None
        self._now = now
        self._finished = False
        self.last: MetricsLine | None = None
        self.pace = Pace(1)
        self._known: dict[int, MetricsLine] = {}
        self._known_validations: dict[int, str] = {}
        self._written, self._written_validations = 0, False
        self.recent_events: deque[dict[str, object]] = deque(maxlen=_RECENT_EVENTS)

    def expect(
        self, lines: Mapping[int, MetricsLine], validations: Mapping[int, str], *, first: int, same: bool
    ) -> None:
        """A resumed run comes to steps and validations that are known: they must be the same again, bit for bit.

        Args:
            lines: by step.
            validations: loss_hex by step.
            first: the first step to come.
            same: what is known is in this directory's files already; else only the lines before `first` are.
        """
        self._known = {step: line for step, line in lines.items() if step >= first}
        self._known_validations, self._written_validations = dict(validations), same
        self._written = max(lines, default=0) if same else first - 1

    def on_start(self, info: RunInfo) -> None:
        """The run is about to take its first step: event `start`, header, bar."""
        self.pace = Pace(info.total_steps)
        self.run_dir.write_event("start", self._now(), dataclasses.asdict(info))
        self._display.start(info)

    def on_step(self, line: MetricsLine) -> None:
        """A step has committed.

        Raises:
            RunError: it is known, and another one.
        """
        if (known := self._known.pop(line.step, None)) is not None:
            _compare(line.step, "loss", known.loss_hex, line.loss_hex)
            _compare(line.step, "gradient norm", known.grad_norm_hex, line.grad_norm_hex)
        if line.step > self._written:
            self.run_dir.write_metrics(line)
        self.last = line
        self.pace.add(line)
        if self._board is not None:
            with writing(self.run_dir.board_path):
                self._board.step(line)
        self._display.step(line)

    def on_event(self, kind: str, **fields: object) -> None:
        """Something happened to the run. A person reads the field `message`, or all fields where there is none."""
        text, now = event_text(kind, fields), self._now()
        self.run_dir.write_event(kind, now, fields)
        self.recent_events.append({"event": kind, "time": round(now, 6), "text": text})
        self._display.say(text)

    def on_validation(self, step: int, loss: float) -> None:
        """The validation loss after `step`: event `validation`, a line, a scalar."""
        loss = float(loss)
        if (known := self._known_validations.pop(step, None)) is not None:
            _compare(step, "validation loss", known, loss.hex())
            if self._written_validations:
                return
        self.run_dir.write_event("validation", self._now(), {"step": step, "loss": loss, "loss_hex": loss.hex()})
        if self._board is not None:
            with writing(self.run_dir.board_path):
                self._board.validation(step, loss)
        self._display.say(f"step {step}  validation loss {loss:.4f}")

    def on_finish(self, summary: Mapping[str, object], weights: Mapping[str, np.ndarray]) -> None:
        """The run is complete: weights.safetensors (float32 arrays by name), summary.json, event `finish`, a table."""
        try:
            self.run_dir.write_weights(weights)
        finally:  # the result is known, and small, even if there is no room for the weights
            self.run_dir.write_summary(summary)
        self.run_dir.write_event("finish", self._now(), {})
        self._finished = True
        self._display.finish({**summary, "run_dir": str(self.run_dir.path)})

    def on_stop(self, error: BaseException) -> None:
        """The run ends by an error: event `stop`, unless it had finished. Raises nothing: the error is what counts."""
        if not self._finished:
            with contextlib.suppress(Exception):
                report = {"report": error.report} if isinstance(error, WorkerError) else {}
                self.on_event("stop", message=headline_of(error), **report)

    def close(self) -> None:
        """Give the terminal back and close all files; closing again is allowed."""
        with contextlib.ExitStack() as stack:  # each one is closed, whatever becomes of the others
            stack.callback(self.run_dir.close)
            stack.callback(self._close_board)
            stack.callback(self._display.close)

    def _close_board(self) -> None:
        if self._board is not None:
            with writing(self.run_dir.board_path):
                self._board.close()

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.close()  # a disk that is full shows once more here; the first error is the one to tell


def _compare(step: int, what: str, known: str, found: str) -> None:
    if known != found:
        raise RunError(
            f"step {step} is not what it was before the run was resumed: {what} {found}, and {known} is written down. "
            "This machine computes other bits, or something of the run has changed that its checkpoints do not name"
        )


def event_text(kind: str, fields: Mapping[str, object]) -> str:
    """`fail: worker 3 lost`, or `fail: rank=3 step=12` where there is no message."""
    message = fields.get("message")
    shown = str(message) if message else " ".join(f"{name}={plain(value)}" for name, value in fields.items())
    return f"{kind}: {shown}" if shown else kind
