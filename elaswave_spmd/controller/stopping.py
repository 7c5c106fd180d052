"""The end of a run whose state is saved first, because it was asked to end or too few workers are left."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, End, Record
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import StopRequested
from elaswave_spmd.controller.failures import FailureHandler, SaveEnded
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.errors import StoppedBySignal
from elaswave_spmd.recovery.actions import Save
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.tick_clock import TickClock


class Stopping:
    """Stops a run after its state was saved. All methods are called by the controller's thread.

    Args:
        clock: the clock of the deadline.
        seconds: how long the last checkpoint may take (timeouts.shutdown).
    """

    def __init__(
        self,
        protocol: ControllerProtocol,
        checkpoints: CheckpointCoordinator,
        failures: FailureHandler,
        clock: TickClock,
        seconds: float,
    ) -> None:
        self._protocol = protocol
        self._checkpoints = checkpoints
        self._failures = failures
        self._clock = clock
        self._seconds = seconds
        self._signal = ""  # the name of the signal by which the run was asked to end
        self._is_asked_early = False  # True if the run was asked to end while workers were being adopted
        self._save: Save | None = None  # the newest order to save the state
        self._until = 0.0  # the time of `clock` until which the checkpoint is waited for

    def requested(self, event: StopRequested) -> list[Action]:
        """A signal asks the run to end: it finishes its step, saves its state and ends; or at once, by a second one."""
        protocol, name = self._protocol, event.signal
        if self._signal:
            what = f"the run stops at once, after a second signal ({name}); the step under way is not saved"
            return [End(RunStopped(StoppedBySignal(what)))]
        self._signal = name
        self._failures.stop_requested(name)
        if self._failures.is_ending:
            return []  # it ends already, for another reason, within a second
        if not protocol.started:
            return [End(RunStopped(StoppedBySignal(f"the run was stopped by {name} while its workers started")))]
        actions = protocol.stop(f"it was asked to by {name}")
        is_done = protocol.version == protocol.steps
        then = "writes its result and ends" if is_done else "finishes its step, saves its state and ends"
        message = f"{name}: the run {then}; a second signal ends it at once"
        return [Record("signal", {"signal": name, "message": message}), *actions]

    def requested_early(self, event: StopRequested, within_s: float) -> list[Action]:
        """A signal asks the run to end while workers are adopted. `requested` is called after the adoption.

        Args:
            within_s: the longest time in seconds that the adoption may take.
        """
        name = event.signal
        if self._is_asked_early:
            what = f"the run stops at once, after a second signal ({name}); what its workers have is not saved"
            return [End(RunStopped(StoppedBySignal(what)))]
        self._is_asked_early = True
        message = (
            f"{name}: the run saves its state and ends once its workers are adopted, which takes {within_s:g} s at "
            "most; a second signal ends it at once, without what was done since its newest checkpoint"
        )
        return [Record("signal", {"signal": name, "message": message})]

    def left_alone(self, rank: int) -> list[Action]:
        """A worker got SIGTERM in a run that does not survive its loss: stop and save while the worker still lives."""
        if not self._protocol.started:
            return []  # there are no members yet, and nothing to save
        return [*self._protocol.stop(f"worker {rank} was asked to end by SIGTERM, and elastic.enabled is false")]

    def begin(self, save: Save) -> None:
        """The workers have been ordered to write their state. Called again if one more worker is lost meanwhile."""
        self._save = save
        self._until = self._clock.now + self._seconds
        self._checkpoints.stop_and_save(save)

    def check(self, now: float) -> list[Action]:
        """The actions that end the run, if its checkpoint is complete, has failed, or has taken too long.

        Called with each tick and after each report about a checkpoint.
        """
        if self._save is None or self._failures.is_ending:
            return []
        if self._checkpoints.newest >= self._save.version:
            return self._failures.end(SaveEnded(self._save), now)
        why = self._checkpoints.why_not(self._save.version)
        if not why and self._clock.now > self._until:
            why = f"not within {self._seconds:g} s (timeouts.shutdown)"
        return self._failures.end(SaveEnded(self._save, why), now) if why else []
