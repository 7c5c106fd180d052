"""What a run does between its result and its end: nothing of it makes a finished run one that has failed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import CheckpointSettings, Settings, Timeouts
from elaswave_spmd.controller import startup
from elaswave_spmd.controller.startup import _Lives
from elaswave_spmd.errors import FilesError
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.runtime.processes.stop_signals import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as signals, signals.held():
        yield signals


class Observer:
    """It notes events; with a full disk it cannot."""

    def __init__(self) -> None:
        self.last = SimpleNamespace(step=40)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.is_disk_full = False

    def on_event(self, kind: str, **fields: object) -> None:
        if self.is_disk_full:
            raise FilesError("events.jsonl", OSError(28, "No space left on device"))
        self.events.append((kind, fields))


def remove_worse(signals: StopSignals, observer: Observer, shutdown: float = 300.0) -> None:
    settings = Settings(checkpoint=CheckpointSettings(keep_best=1), timeouts=Timeouts(shutdown=shutdown))
    _Lives(settings, signals)._remove_worse(Path("no run"), cast(RunObserver, observer))


def test_a_worse_checkpoint_that_cannot_be_removed_is_told_of(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune(*_: object, **__: object) -> None:
        raise FilesError("step_00000004", OSError(39, "Directory not empty"))

    monkeypatch.setattr(startup, "prune", prune)
    observer = Observer()
    remove_worse(signals, observer)
    ((kind, fields),) = observer.events
    assert (kind, fields["step"]) == ("checkpoint_kept", 40)
    assert "step_00000004 (Directory not empty)" in fields["message"]
    observer.is_disk_full = True
    remove_worse(signals, observer)
    assert len(observer.events) == 1, "a finished run has its result, whatever it cannot say any more"


def test_a_signal_or_a_deadline_ends_the_removal_of_worse_checkpoints(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[bool] = []

    def prune(*_: object, is_over: Callable[[], bool]) -> None:
        over.append(is_over())
        signal.raise_signal(signal.SIGTERM)
        over.append(is_over())

    monkeypatch.setattr(startup, "prune", prune)
    remove_worse(signals, Observer())
    assert over == [False, True]
    over.clear()
    monkeypatch.setattr(startup, "prune", lambda *_, is_over: over.append(is_over()))
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=iter([100.0, 110.0]).__next__))
    remove_worse(StopSignals(), Observer(), shutdown=10.0)
    assert over == [True]
