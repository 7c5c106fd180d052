"""All callbacks of a run. They listen to it as its files and its display do, and live through its restarts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.queue import CAPACITY, END, STEP, Call, CallbackQueue
from elaswave_spmd.callbacks.records import (
    CheckpointRecord,
    EndRecord,
    EventRecord,
    StartRecord,
    StepRecord,
    ValidationRecord,
)
from elaswave_spmd.errors import headline_of
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.display import RunInfo
from elaswave_spmd.run_dir.json_lines import plain
from elaswave_spmd.run_dir.listener import CALLBACK, News

_NONE: Mapping[str, float] = MappingProxyType({})


class CallbackRunner:
    """Tells callbacks about a run (`run_dir.listener.RunListener`). All methods are for the controller's thread.

    One for a command, however often its run begins again: what was told is not told a second time.

    Args:
        settings: of the run, as in config.yaml.
        seconds: that callbacks have at the end until on_end has returned (`timeouts.callbacks`).
        capacity: calls that wait for a callback at most.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        settings: Mapping[str, object],
        seconds: float,
        capacity: int = CAPACITY,
    ) -> None:
        self._queues = [CallbackQueue(callback, capacity) for callback in callbacks]
        self._settings = settings
        self._seconds = seconds
        self._run_dir: Path | None = None  # once the run has begun
        self._step = 0  # the last one that was told, or that the run goes on from
        self._validated = 0
        self._summary: Mapping[str, object] | None = None
        self._has_ended = False
        self._is_cut_short = False

    # ---- what a RunListener hears

    def started(self, info: RunInfo) -> None:
        """The run begins to train, or begins again."""
        if self._run_dir is not None:
            return
        self._run_dir = Path(info.run_dir)
        self._step = info.first_step - 1  # what the run that is resumed has committed
        record = StartRecord(
            self._run_dir,
            info.model,
            info.mesh,
            info.sharding,
            info.params,
            info.total_steps,
            info.first_step,
            info.workers,
            MappingProxyType(dict(self._settings)),
        )
        self._put("on_start", record)

    def step(self, line: StepRecord) -> None:
        """A step is committed. One that was told before the run began again is not told twice."""
        if line.step > self._step:
            self._step = line.step
            self._put(STEP, line)

    def event(self, kind: str, at: float, text: str, fields: Mapping[str, object]) -> None:
        """Something has happened. What the run says about callbacks is not told to them."""
        if kind == CALLBACK:
            return
        if kind == "checkpoint" and self._run_dir is not None:
            step, num_bytes = fields["step"], fields["bytes"]
            assert isinstance(step, int) and isinstance(num_bytes, int), fields
            self._put("on_checkpoint", CheckpointRecord(step, checkpoint_path(self._run_dir, step), num_bytes))
            return
        if any(queue.hears("on_event") for queue in self._queues):
            known = plain(fields)
            assert isinstance(known, dict)
            self._put("on_event", EventRecord(kind, round(at, 6), text, MappingProxyType(known)))

    def validation(self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float] = _NONE) -> None:
        """The loss of a validation is known."""
        if step > self._validated:
            self._validated = step
            known = MappingProxyType(dict(metrics))
            self._put("on_validation", ValidationRecord(step, loss, loss.hex(), num_microbatches, known))

    def finished(self, summary: Mapping[str, object]) -> None:
        """The run has finished, with this summary.json."""
        self._summary = summary
        if isinstance(steps := summary.get("steps"), int):
            self._step = max(self._step, steps)  # a run that is resumed after its last step commits none

    def pop_news(self) -> Sequence[News]:
        """The fields of events about callbacks that the run has not written yet."""
        return [{"callback": queue.name, **fields} for queue in self._queues for fields in queue.pop_news()]

    # ---- the order of a run's lives

    def given_up(self, step: int) -> None:
        """The run goes back: what came after this step is told anew."""
        self._step, self._validated = min(self._step, step), min(self._validated, step)

    def end(self, error: BaseException | None) -> None:
        """The run has ended, by an error or (None) as a finished one. Waits until all callbacks have ended, bounded.

        Halfway to that, all that still waits for a callback is left out but on_end.
        """
        if self._has_ended or self._run_dir is None:
            return
        self._has_ended = True
        is_finished = error is None and self._summary is not None
        record = EndRecord(
            self._run_dir,
            is_finished,
            self._step,
            MappingProxyType(dict(self._summary or {}) if is_finished else {}),
            "" if error is None else headline_of(error),
        )
        for queue in self._queues:
            queue.end(Call(END, record))
        begin = time.monotonic()
        half, until = begin + self._seconds / 2, begin + self._seconds
        self._wait(half)
        for queue in self._queues:
            queue.hurry()
        self._wait(until)
        for queue in self._queues:
            queue.give_up()

    def stop_waiting(self, _: int = 0) -> None:
        """Do not wait for callbacks any more. May be called by the handler of a signal."""
        self._is_cut_short = True

    def _wait(self, until: float) -> None:
        for queue in self._queues:
            while not queue.wait(until) and time.monotonic() < until and not self._is_cut_short:
                pass

    def _put(self, method: str, record: object) -> None:
        for queue in self._queues:
            queue.put(Call(method, record))
