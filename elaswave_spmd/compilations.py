"""What workers compile: everything before they are ready, and nothing afterwards. The controller's record of it."""

from __future__ import annotations

import time

from elaswave_spmd.controller.summary import RunRecord
from elaswave_spmd.recovery.messages import AnyMessage, Heartbeat, Measured, Ready
from elaswave_spmd.run_dir import RunObserver


class Compilations:
    """Writes the events `compile` and `recompile`, and the record's `compiled`.

    Args:
        record: of the run.
    """

    def __init__(self, observer: RunObserver, record: RunRecord) -> None:
        self._observer, self._compiled = observer, record.compiled
        self._ready: set[int] = set()
        self.got_further_at = 0.0
        """time.monotonic() when a worker that is not ready said last that it had compiled something."""

    def take(self, message: AnyMessage) -> None:
        """Looks at what a worker says; other messages than those that tell of programs are ignored."""
        match message:
            case Ready(rank=rank, compiled=programs):
                self._ready.add(rank)
                if programs:
                    self._compiled[rank] = [programs, 0]
                    text = f"worker {rank} is ready, with {programs} programs"
                    self._observer.on_event("compile", rank=rank, programs=programs, message=text)
            case Measured(rank=rank, step=step, compiled=programs):
                known = self._compiled.setdefault(rank, [0, 0]) if programs else [0, 0]
                if (more := programs - sum(known)) > 0:
                    known[1] += more
                    text = f"worker {rank} compiled {more} programs in step {step}: training waited for them"
                    self._observer.on_event("recompile", rank=rank, step=step, programs=more, message=text)
            case Heartbeat(waiting=False) if message.rank not in self._ready:
                self.got_further_at = time.monotonic()
