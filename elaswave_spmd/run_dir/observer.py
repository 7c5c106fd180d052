"""One object for everything that a run shows or writes about itself: files, display, TensorBoard, and a listener."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np

from elaswave_spmd.errors import RunError, UserError, WorkerError, headline_of
from elaswave_spmd.run_dir.atomic_write import writing
from elaswave_spmd.run_dir.directory import WEIGHTS_EMA, RunDir
from elaswave_spmd.run_dir.display import TOKENS, Display, LastingDisplay, Pace, RunInfo, make_display
from elaswave_spmd.run_dir.faults import FaultCount
from elaswave_spmd.run_dir.json_lines import plain
from elaswave_spmd.run_dir.listener import CALLBACK, GENERATED, RunListener
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.tensorboard import Board
from elaswave_spmd.run_dir.workers_now import WorkersNow

_RECENT_EVENTS = 5


class RunObserver:
    """The run's directory, its display and its TensorBoard files. Files are written first, then the display is updated.

    Called by the controller's thread. Methods that write raise FilesError when the run's files cannot be written.

    Args:
        run_dir: the open directory of the run; closed by `close`.
        display: the display. The default is the live view on a terminal, and plain lines elsewhere.
        board: True to write TensorBoard files into the run's directory.
        now: returns the seconds since 1970, for events.
        listener: is told everything as well; None for no listener.
        faults: the counts that this life of the run adds to; None to count from zero.

    Attributes:
        last: the line of the last committed step, or None.
        pace: the speed over the last steps.
        faults: the faults and changes of workers so far.
        recent_events: the last few events of `on_event`, for `ctl status`.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        display: Display | None = None,
        board: bool = True,
        now: Callable[[], float] = time.time,
        listener: RunListener | None = None,
        faults: FaultCount | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._display = LastingDisplay(display if display is not None else make_display())
        with writing(run_dir.board_path):
            self._board = Board(run_dir.board_path, now) if board else None
        self._now = now
        self._listener = listener
        self._finished = False
        self.last: MetricsLine | None = None
        self.pace = Pace(1)
        self.faults = faults if faults is not None else FaultCount()
        self._known: dict[int, MetricsLine] = {}
        self._known_validations: dict[tuple[int, int], str] = {}
        self._written = 0  # the last step whose line is in this directory already
        self._validations_are_written = False  # the known validations are in this directory already
        self._why_no_costs = ""  # why costs.json could not be written the last time
        self.recent_events: deque[dict[str, object]] = deque(maxlen=_RECENT_EVENTS)

    def expect(
        self,
        lines: Mapping[int, MetricsLine],
        validations: Mapping[tuple[int, int], str],
        *,
        first: int,
        same: bool,
    ) -> None:
        """Remember the steps and validations that a resumed run will repeat: they must come out equal, bit for bit.

        A checkpoint is older than the last step of the run that it was taken from, so the steps between the two are
        computed a second time.

        Args:
            lines: step -> its line in metrics.jsonl.
            validations: (step, number of micro-batches) -> `loss_hex` of the validation. If the resumed run validates
                on another number of micro-batches (train.validate_microbatches), its losses are not compared.
            first: the first step that is computed again.
            same: True if the run goes on in the directory that it began in, so that all lines are in its files already.
                Otherwise only the lines before `first` are.
        """
        self._known = {step: line for step, line in lines.items() if step >= first}
        self._known_validations = dict(validations)
        self._validations_are_written = same
        self._written = max(lines, default=0) if same else first - 1

    def on_start(self, info: RunInfo) -> None:
        """Report that the first step begins: event `start`, and the head of the display."""
        self.pace = Pace(info.total_steps, info.unit)
        fields = dataclasses.asdict(info)
        if info.unit == TOKENS:
            del fields["unit"]
        if not info.without_microbatches:
            del fields["without_microbatches"]
        self.run_dir.write_event("start", self._now(), fields)
        self._display.start(info)
        if self._listener is not None:
            self._listener.started(info)

    def on_step(self, line: MetricsLine) -> None:
        """Report a committed step.

        Raises:
            RunError: the run is resumed, and the step has other bits than the first time.
        """
        # Compared as hexadecimal text, which is exact.
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
        if self._listener is not None:
            self._listener.step(line)

    def on_event(self, kind: str, **fields: object) -> None:
        """Report an event. The display shows the field `message`, or all fields if there is none."""
        text, now = event_text(kind, fields), self._now()
        self.run_dir.write_event(kind, now, fields)
        scalars = self.faults.add(kind, fields)
        if scalars and self._board is not None:
            with writing(self.run_dir.board_path):
                self._board.faults(self.last.step if self.last is not None else 0, scalars)
        if kind == GENERATED and self._board is not None:
            step, generated = fields["step"], fields["text"]
            assert isinstance(step, int), fields
            with writing(self.run_dir.board_path):
                self._board.text(step, str(generated))
        self.recent_events.append({"event": kind, "time": round(now, 6), "text": text})
        self._display.show_line(text)
        if self._listener is not None:
            self._listener.event(kind, now, text, fields)

    def on_news(self) -> None:
        """Report the events about the listener itself, which it may not write."""
        if self._listener is not None:
            for news in self._listener.pop_news():
                fields = dict(news)
                self.on_event(str(fields.pop("event", CALLBACK)), **fields)

    def on_validation(
        self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Report the validation loss after `step`: event `validation`, a line of the display, scalars.

        Args:
            num_microbatches: the number of micro-batches that the loss is the mean over. They are the first ones of the
                held-out split.
            metrics: the metrics of the model, by name, over the same micro-batches.

        Raises:
            RunError: the run is resumed, and the loss has other bits than the first time.
        """
        loss = float(loss)
        if self._listener is not None:
            self._listener.validation(step, loss, num_microbatches, metrics or {})
        if (known := self._known_validations.pop((step, num_microbatches), None)) is not None:
            _compare(step, "validation loss", known, loss.hex())
            if self._validations_are_written:
                return
        fields = {"step": step, "loss": loss, "loss_hex": loss.hex(), "microbatches": num_microbatches}
        if metrics:
            fields["metrics"] = dict(metrics)
        self.run_dir.write_event("validation", self._now(), fields)
        if self._board is not None:
            with writing(self.run_dir.board_path):
                self._board.validation(step, loss, metrics or {})
        self._display.validation(step, loss, metrics)

    def on_costs(self, text: str) -> None:
        """Write costs.json. If that fails the run goes on: event `no_costs`, once until the file is written again."""
        why = self.run_dir.write_costs(text)
        if why and not self._why_no_costs:
            message = f"costs.json cannot be written, and stays as it was: {why}"
            self.on_event("no_costs", reason=why, message=message)
        self._why_no_costs = why

    @property
    def wants_workers(self) -> bool:
        """True if the display would show the state of the workers now. Cheap enough to be read after every event."""
        return self._display.wants_workers

    def on_workers(self, workers: WorkersNow) -> None:
        """Show the state of the workers. It is not written to any file."""
        self._display.show_workers(workers)

    def on_finish(
        self,
        summary: Mapping[str, object],
        weights: Mapping[str, np.ndarray],
        averages: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Report the end of the last step, and write weights.safetensors and then summary.json.

        The summary is the sign that a run has its result, both for a supervisor and for `train.resume`. If the weights
        cannot be written, there is no summary, and the run can be resumed from its newest checkpoint.

        Args:
            summary: the fields of summary.json.
            weights: float32 arrays by parameter name.
            averages: the averages of the parameters in the same form, for weights_ema.safetensors; None if there are
                none.
        """
        self.run_dir.write_weights(weights)
        if averages is not None:
            self.run_dir.write_weights(averages, WEIGHTS_EMA)
        self.run_dir.write_summary(summary)
        self.run_dir.write_event("finish", self._now(), {})
        self._finished = True
        self._display.finish({**summary, "run_dir": str(self.run_dir.path)})
        if self._listener is not None:
            self._listener.finished(summary)

    def on_stop(self, error: BaseException) -> None:
        """Report that an error ends the run: event `stop`, unless the run had finished.

        A UserError is only written to the files, since the command itself shows all of it. This method raises nothing,
        so that a full disk does not hide the error that ended the run.
        """
        if not self._finished:
            with contextlib.suppress(Exception):
                if isinstance(error, UserError):
                    self.run_dir.write_event("stop", self._now(), {"message": headline_of(error)})
                    return
                report = {"report": error.report} if isinstance(error, WorkerError) else {}
                self.on_event("stop", message=headline_of(error), **report)

    def close(self) -> None:
        """Restore the terminal and close all files; closing again is allowed."""
        with contextlib.ExitStack() as stack:  # each is closed even if closing another one fails
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
            self.close()  # a full disk raises here once more; the first error is the one to report


def _compare(step: int, what: str, known: str, found: str) -> None:
    """Compare a value of a repeated step with the value of the first time; both are hexadecimal floats."""
    if known != found:
        raise RunError(
            f"the {what} of step {step} is {found}, and was {known} before the run was resumed. This machine computes "
            "other bits than the one before, or a file has changed that the run reads: its model, its dataset"
        )


def event_text(kind: str, fields: Mapping[str, object]) -> str:
    """The line that is shown for an event: `fail: worker 3 lost`, or `fail: rank=3 step=12` without a message."""
    message = fields.get("message")
    shown = str(message) if message else " ".join(f"{name}={plain(value)}" for name, value in fields.items())
    return f"{kind}: {shown}" if shown else kind
