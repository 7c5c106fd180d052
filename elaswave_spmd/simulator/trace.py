"""Timelines of virtual time in the format that real runs write with `run.trace=true`: ui.perfetto.dev opens both.

Each worker is a process of the trace, with one row of actions and the bubbles between them. Events are lines over all
rows, and frequencies are counters of their workers. Times are virtual seconds here, and microseconds in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from elaswave_spmd.run_dir.trace import TraceEvent, counter_of, instant_of, names_of, slice_of, write_trace
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS
from elaswave_spmd.simulator.work import Span

_NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "weights"}
_EVENTS, _FIRST_WORKER = 1, 2  # process numbers, as in traces of real runs
_MICRO = 1e6


@dataclass
class Timeline:
    """Collects actions and events; `write` makes the file. Calls may come in any order of time.

    Args:
        title: the title of the file.
    """

    title: str
    _found: list[TraceEvent] = field(default_factory=list)
    _rows: dict[int, str] = field(default_factory=dict)

    def name_rows(self, stages: Sequence[Sequence[int]]) -> None:
        """Names the workers' rows by stage. A row that has a name keeps it."""
        for stage, members in enumerate(stages):
            for rank in members:
                self._rows.setdefault(rank, f"stage {stage}")

    def actions(self, spans: Sequence[Span], *, offset: float = 0.0) -> None:
        """Adds actions of workers, and bubbles for the gaps between the actions of a worker within a step.

        Args:
            offset: the seconds that are added to all times.
        """
        by_row: dict[tuple[int, int], list[Span]] = {}
        ends: dict[int, tuple[float, float]] = {}
        for span in spans:
            by_row.setdefault((span.step, span.worker), []).append(span)
            first, last = ends.get(span.step, (span.start, span.stop))
            ends[span.step] = min(first, span.start), max(last, span.stop)
        for (step, worker), mine in sorted(by_row.items()):
            self._rows.setdefault(worker, "")
            edges = [(ends[step][0], ends[step][0]), *sorted((s.start, s.stop) for s in mine), (ends[step][1],) * 2]
            gaps = ((before, after) for (_, before), (after, _) in pairwise(edges) if after - before > 1e-12)
            for start, stop in gaps:
                self._span(worker, "bubble", "bubble", offset + start, offset + stop, step=step)
            for span in mine:
                name = f"{_NAMES[span.action.kind]} {span.action}"
                details = {"step": step, "microbatch": span.action.microbatch, "stage": span.action.stage}
                self._span(worker, name, "action", offset + span.start, offset + span.stop, **details)

    def event(self, time: float, name: str, **details: object) -> None:
        """Adds an event at one moment."""
        self._found.append(instant_of((_EVENTS, 1), name, time * _MICRO, everywhere=True, **details))

    def frequency(self, time: float, worker: int, value: float) -> None:
        """Sets a worker's relative frequency from this time on."""
        self._rows.setdefault(worker, "")
        self._found.append(counter_of(worker + _FIRST_WORKER, "frequency", time * _MICRO, value))

    def _span(self, worker: int, name: str, kind: str, start: float, stop: float, **details: object) -> None:
        row = worker + _FIRST_WORKER, 1
        self._found.append(slice_of(row, name, kind, start * _MICRO, stop * _MICRO, **details))

    def events(self) -> Iterator[TraceEvent]:
        """The trace events: first the names of the rows, then all others by time."""
        yield from names_of(_EVENTS, self.title, {1: "events"})
        for worker, name in sorted(self._rows.items()):
            yield from names_of(worker + _FIRST_WORKER, f"worker {worker}", {1: name or "actions"})
        yield from sorted(self._found, key=lambda event: event["ts"])

    def write(self, path: Path) -> Path:
        """Writes the file. Returns its path.

        Raises:
            OSError: it cannot be written.
        """
        with path.open("w", encoding="utf-8") as file:
            write_trace(file, self.events(), title=self.title, modelled=True)
        return path
