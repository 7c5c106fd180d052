"""The listeners of a run that outlive its restarts: callbacks, and the process that generates texts.

They are made in the first life of a run, and end with the run, not with a life of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.named import load_callbacks, load_trackers
from elaswave_spmd.callbacks.runner import CallbackRunner
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.outcomes import Outcome, RestartFrom, RunFinished, RunStopped
from elaswave_spmd.controller.text_samples import TextSampler
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import FilesError
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.runtime.processes.stop_signals import StopSignals


@dataclass
class LifeEnd:
    """The end of a life; None: by an exception."""

    outcome: Outcome | None = None


class LastingListeners:
    """Everything that hears of a run beside its files and its display.

    Args:
        settings: that the run was started with.
        signals: one of them ends the waiting for a listener.
        given: callbacks, before those that the settings name.
    """

    def __init__(self, settings: Settings, signals: StopSignals, given: Sequence[Callback]) -> None:
        self._settings = settings
        self._signals = signals
        self._given = given
        self._callbacks: CallbackRunner | None = None
        self._texts: TextSampler | None = None

    @property
    def made(self) -> list[TextSampler | CallbackRunner]:
        """The listeners that there are by now."""
        return [listener for listener in (self._texts, self._callbacks) if listener is not None]

    def load_callbacks(self) -> None:
        """Make the callbacks and trackers that the settings name, in the first life.

        Raises:
            ConfigError: one of them cannot be made.
        """
        settings = self._settings
        if self._callbacks is not None:
            return
        named = [*load_callbacks(settings.run.callbacks), *load_trackers(settings.run.trackers)]
        if callbacks := [*self._given, *named]:
            self._callbacks = CallbackRunner(callbacks, settings.to_dict(), settings.timeouts.callbacks)

    def prepare_texts(self, data: PreparedData) -> None:
        """Check that texts can be generated, if the settings ask for them, in the first life.

        Raises:
            ConfigError: they cannot.
        """
        if self._settings.generate.prompt is None or self._texts is not None:
            return
        from elaswave_spmd.weights.generate import check_prompt  # imports torch

        check_prompt(self._settings, data)
        self._texts = TextSampler(self._settings.generate)

    def given_up(self, step: int) -> None:
        """What was committed after a step is given up."""
        for listener in self.made:
            listener.given_up(step)

    @contextlib.contextmanager
    def ending(self, observer: RunObserver) -> Iterator[LifeEnd]:
        """A `with` around a life, at whose end the listeners end too, unless the run begins again.

        The run's files are open still.
        """
        end = LifeEnd()
        try:
            yield end
        except BaseException as error:
            self.end(error)
            with contextlib.suppress(FilesError):
                observer.on_news()
            raise
        if not isinstance(end.outcome, RestartFrom):
            self._end_texts(is_finished=isinstance(end.outcome, RunFinished))
            observer.on_news()  # callbacks hear of the texts before they end
            self._end_callbacks(end.outcome.error if isinstance(end.outcome, RunStopped) else None)
        observer.on_news()

    def end(self, error: BaseException) -> None:
        """End all listeners after an exception. What has ended already stays as it is."""
        self._end_texts(is_finished=False)
        self._end_callbacks(error)

    def _end_texts(self, *, is_finished: bool) -> None:
        """End the generation of texts, after that of the result, with a bound. A signal ends the waiting."""
        texts = self._texts
        if texts is None:
            return
        with self._signals.passing_to(texts.stop_waiting):
            if is_finished:
                texts.wait(time.monotonic() + self._settings.timeouts.callbacks)
        texts.close()

    def _end_callbacks(self, error: BaseException | None) -> None:
        """Wait for the callbacks, with a bound. One more signal ends the waiting."""
        callbacks = self._callbacks
        if callbacks is None:
            return
        with self._signals.passing_to(callbacks.stop_waiting):
            if isinstance(error, KeyboardInterrupt):
                callbacks.stop_waiting()
            callbacks.end(error)
