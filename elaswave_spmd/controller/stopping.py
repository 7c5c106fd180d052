"""The end of a run that is saved: it was asked to end, or too few workers are left."""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, End, Record
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import StopRequested
from elaswave_spmd.controller.failures import FailureHandler, SaveEnded
from elaswave_spmd.controller.outcomes import RunStopped
from elaswave_spmd.errors import StoppedBySignal
from elaswave_spmd.recovery.actions import Save
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol


class Stopping:
    """The end of a run whose state is saved first: too few workers are left, or somebody wants the run to end.

    Args:
        seconds: how long the last checkpoint may take (timeouts.shutdown).
    """

    def __init__(
        self,
        protocol: ControllerProtocol,
        checkpoints: CheckpointCoordinator,
        failures: FailureHandler,
        seconds: float,
    ) -> None:
        self._protocol = protocol
        self._checkpoints = checkpoints
        self._failures = failures
        self._seconds = seconds
        self._signal = ""  # by which the run was asked to end
        self._is_asked_early = False  # while workers were adopted
        self._save: Save | None = None
        self._until = 0.0

    def requested(self, event: StopRequested) -> list[Action]:
        """Somebody asks the run to end: its step is finished, its state is saved. Asked twice, it ends at once."""
        protocol, name = self._protocol, event.signal
        if self._signal:
            what = f"the run stops at once, after a second signal ({name}); the step under way is not saved"
            return [End(RunStopped(StoppedBySignal(what)))]
        self._signal = name
        self._failures.stop_requested(name)
        if self._failures.is_ending:
            return []  # for another reason, within a second
        if not protocol.started:
            return [End(RunStopped(StoppedBySignal(f"the run was stopped by {name} while its workers started")))]
        actions = protocol.stop(f"it was asked to by {name}")
        is_done = protocol.version == protocol.steps
        then = "writes its result and ends" if is_done else "finishes its step, saves its state and ends"
        message = f"{name}: the run {then}; a second signal ends it at once"
        return [Record("signal", {"signal": name, "message": message}), *actions]

    def requested_early(self, event: StopRequested, within_s: float) -> list[Action]:
        """Somebody asks the run to end while workers are adopted. `requested` follows when it is known where they are.

        Args:
            within_s: seconds after which that is known.
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
        """A worker got SIGTERM in a run that does not survive its loss: the run is saved while the worker is there."""
        if not self._protocol.started:
            return []  # nobody is a member yet
        return [*self._protocol.stop(f"worker {rank} was asked to end by SIGTERM, and elastic.enabled is false")]

    def begin(self, save: Save, now: float) -> None:
        """The workers have been ordered to write their state; again if one more is lost meanwhile."""
        self._save = save
        self._until = now + self._seconds
        self._checkpoints.stop_and_save(save)

    def check(self, now: float) -> list[Action]:
        """The end of the run, if there is nothing to wait for any longer. After each tick and report of a shard."""
        if self._save is None or self._failures.is_ending:
            return []
        if self._checkpoints.newest >= self._save.version:
            return self._failures.end(SaveEnded(self._save), now)
        why = self._checkpoints.why_not(self._save.version)
        if not why and now > self._until:
            why = f"not within {self._seconds:g} s (timeouts.shutdown)"
        return self._failures.end(SaveEnded(self._save, why), now) if why else []
