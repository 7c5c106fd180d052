"""The part of trackers that is the same for all services: which numbers and events of a run they are told."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.records import EndRecord, EventRecord, StartRecord, StepRecord, ValidationRecord
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.regular_files import read_regular
from elaswave_spmd.run_dir.atomic_write import make_private_folder, replacing
from elaswave_spmd.run_dir.directory import TRACKERS
from elaswave_spmd.run_dir.listener import GENERATED
from elaswave_spmd.run_dir.scalars import step_scalars, validation_scalars

PROJECT = "elaswave_spmd"
"""The project, or experiment, of runs that name none."""


class Tracker(Callback, ABC):
    """Base of the callbacks that bring a run to a tracking service.

    A subclass says how the service takes what there is: `open`, `log`, `tell` and `close`. They are called on the
    callback's own thread, so that a service that is slow or gone costs the run nothing. Nothing is opened before the
    first step is committed: a run that is refused leaves no trace there either.

    The service's own id of the run is kept in the run's directory. A run that is resumed in it goes on under this id;
    steps that are computed again are told again, with the same values.
    """

    SERVICE = ""
    """The name of the service, as in `run.trackers`."""

    def __init__(self) -> None:
        self._start: StartRecord | None = None
        self._is_open = False
        self._step = 0  # the last one that was told
        self._counts: Counter[str] = Counter()  # of events, by kind
        self._early: list[EventRecord] = []  # events before the first step

    # ---- what a subclass does

    @abstractmethod
    def open(self, start: StartRecord, known: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a run of the service, or go on with one.

        Args:
            known: what was returned when the run was opened the last time; empty: this is the first time.

        Returns:
            what the next command needs in order to go on with it, as plain JSON.
        """

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep numbers of a step; 0: from before the first one."""

    @abstractmethod
    def tell(self, step: int, name: str, text: str) -> None:
        """Keep a text under a name."""

    @abstractmethod
    def close(self, end: EndRecord) -> None:
        """Keep the summary, and end the service's run. Everything that was kept has reached the service afterwards."""

    # ---- what a run calls

    def on_start(self, start: StartRecord, /) -> None:
        # The object may have heard of another run before.
        self._start, self._is_open, self._step = start, False, 0
        self._counts.clear()
        self._early.clear()

    def on_step(self, step: StepRecord, /) -> None:
        self._open()
        self._step = step.step
        self.log(step.step, step_scalars(step))

    def on_event(self, event: EventRecord, /) -> None:
        if not self._is_open:
            self._early.append(event)
            return
        self._counts[event.kind] += 1
        self.log(self._step, {f"events/{event.kind}": self._counts[event.kind]})
        self.tell(self._step, "event", event.text)
        if event.kind == GENERATED:
            self.tell(self._step, GENERATED, str(event.fields["text"]))

    def on_validation(self, validation: ValidationRecord, /) -> None:
        self._open()
        self.log(validation.step, validation_scalars(validation.loss, validation.metrics))

    def on_end(self, end: EndRecord, /) -> None:
        if end.is_finished:  # one that was resumed at its last step has committed none
            self._open()
        if self._is_open:
            self.close(end)

    # ---- the service's run

    def _open(self) -> None:
        if self._is_open:
            return
        assert self._start is not None
        folder = self._start.run_dir / TRACKERS
        file = folder / f"{self.SERVICE}.json"
        known = json.loads(read_regular(file)) if file.exists() else {}
        kept = self.open(self._start, known)
        if not folder.exists():
            make_private_folder(folder)
        with replacing(file, durable=False) as scratch:
            scratch.write_text(json.dumps(kept) + "\n", encoding="utf-8")
        self._is_open = True
        early, self._early = self._early, []
        for event in early:
            self.on_event(event)


def import_library(library: str, setting: str, extra: str) -> ModuleType:
    """Import a service's library.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(library)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == library
        why = "is not installed" if is_missing else f"cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            f"{setting} needs {library}, which {why}",
            rule="a tracker needs the library of its service",
            where=setting,
            fix=f'pip install "elaswave-spmd[{extra}]"',
        ) from error
