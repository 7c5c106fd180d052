"""The interface of a listener, which hears of a run what its files and display get. The user's callbacks are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from elaswave_spmd.run_dir.display import RunInfo
from elaswave_spmd.run_dir.metrics import MetricsLine

CALLBACK = "callback"
"""The kind of events about callbacks."""
GENERATED, NOT_GENERATED = "generated", "not_generated"
"""The kinds of events about texts that the model generates."""

News: TypeAlias = Mapping[str, object]
"""The fields of an event. The field `event` is its kind, and may be left out for an event about a callback."""


class RunListener(Protocol):
    """An object that is told what a run writes and shows. Called by the controller's thread; must not wait or raise."""

    def started(self, info: RunInfo) -> None: ...
    def step(self, line: MetricsLine) -> None: ...
    def event(self, kind: str, at: float, text: str, fields: Mapping[str, object]) -> None: ...
    def validation(self, step: int, loss: float, num_microbatches: int, metrics: Mapping[str, float]) -> None: ...
    def finished(self, summary: Mapping[str, object]) -> None: ...
    def pop_news(self) -> Sequence[News]:
        """Return the fields of new events about the listener itself, and clear them. The run writes these events."""
        ...


class Listeners:
    """Several listeners as one. They are called in order."""

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
