"""The interface of a listener to a run, beside its files and its display: its user's callbacks are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from elaswave_spmd.run_dir.display import RunInfo
from elaswave_spmd.run_dir.metrics import MetricsLine

CALLBACK = "callback"
"""The kind of the events about callbacks."""
GENERATED, NOT_GENERATED = "generated", "not_generated"
"""The kinds of the events about texts that the model generates."""

News: TypeAlias = Mapping[str, object]
"""The fields of an event. `event` is its kind; without it the event is about a callback."""


class RunListener(Protocol):
    """Hears what a run writes and shows, on the controller's thread. Its methods neither wait nor raise."""

    def started(self, info: RunInfo) -> None: ...
    def step(self, line: MetricsLine) -> None: ...
    def event(self, kind: str, at: float, text: str, fields: Mapping[str, object]) -> None: ...
    def validation(self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float]) -> None: ...
    def finished(self, summary: Mapping[str, object]) -> None: ...
    def pop_news(self) -> Sequence[News]:
        """The fields of events about the listener itself, which only the run may write."""
        ...


class Listeners:
    """Several listeners as one, in order."""

    def __init__(self, listeners: Sequence[RunListener]) -> None:
        self._listeners = listeners

    def started(self, info: RunInfo) -> None:
        for listener in self._listeners:
            listener.started(info)

    def step(self, line: MetricsLine) -> None:
        for listener in self._listeners:
            listener.step(line)

    def event(self, kind: str, at: float, text: str, fields: Mapping[str, object]) -> None:
        for listener in self._listeners:
            listener.event(kind, at, text, fields)

    def validation(self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float]) -> None:
        for listener in self._listeners:
            listener.validation(step, loss, num_microbatches, metrics)

    def finished(self, summary: Mapping[str, object]) -> None:
        for listener in self._listeners:
            listener.finished(summary)

    def pop_news(self) -> Sequence[News]:
        return [news for listener in self._listeners for news in listener.pop_news()]
