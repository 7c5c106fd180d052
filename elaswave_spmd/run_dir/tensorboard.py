"""TensorBoard scalars, written by the calling thread and without torch."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from elaswave_spmd.run_dir.atomic_write import make_private_folder, open_private
from elaswave_spmd.run_dir.metrics import MetricsLine
from elaswave_spmd.run_dir.scalars import step_scalars, validation_scalars

FLUSH_SECONDS = 2.0


class Board:
    """A TensorBoard event file with the loss, gradient norm, learning rate, speed and workers of every step.

    tensorboard's own EventFileWriter is not used, since it writes from a thread of its own: the controller forks worker
    processes, and a fork of a process with threads may inherit a lock that no thread will ever release.

    Args:
        folder: the folder of the event file; it is made if it is missing.
        now: returns the seconds since 1970.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        with contextlib.suppress(FileExistsError):
            make_private_folder(folder)
        self._now = now
        self._flushed = start = now()
        name = f"events.out.tfevents.{int(start):010d}.{socket.gethostname()}.{os.getpid()}"
        fd = open_private(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._file = open(fd, "wb")  # noqa: SIM115 - open as long as the run
        self._records: Any = RecordWriter(self._file)
        event = _message(event_pb2, "Event")(wall_time=start, file_version="brain.Event:2")
        self._records.write(event.SerializeToString())
        self._file.flush()

    def step(self, line: MetricsLine) -> None:
        """Write the scalars of one committed step."""
        self._write(line.step, step_scalars(line))

    def validation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Write the validation after `step`."""
        self._write(step, validation_scalars(loss, metrics))

    def faults(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the counts of faults: `fail` becomes `faults/fail`.

        Args:
            step: the last committed step, or 0.
            scalars: the counts by name.
        """
        self._write(step, {f"faults/{name}": value for name, value in scalars.items()})

    def text(self, step: int, text: str) -> None:
        """Write a text that the model has generated after `step`."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._record(step, text_pb("generated", text))

    def close(self) -> None:
        """Flush and close; closing again is allowed."""
        self._file.close()

    def _write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto import summary_pb2

        summary = _message(summary_pb2, "Summary")
        scalars = [summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._record(step, summary(value=scalars))

    def _record(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        now = self._now()
        event = _message(event_pb2, "Event")(wall_time=now, step=step, summary=summary)
        self._records.write(event.SerializeToString())
        # TensorBoard reads the file while the run goes on; flushing at every step would cost a small model time.
        if now - self._flushed >= FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now


def _message(module: ModuleType, name: str) -> Any:
    """A protobuf message class by name. Such classes are made at import, so type checkers do not know them."""
    return getattr(module, name)
