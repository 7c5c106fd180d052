"""The base class of a user's callbacks."""

from __future__ import annotations

from elaswave_spmd.callbacks.records import (
    CheckpointRecord,
    EndRecord,
    EventRecord,
    StartRecord,
    StepRecord,
    ValidationRecord,
)


class Callback:
    """Code that hears of a run while it goes on, in the process of its controller.

        class Loss(Callback):
            def on_step(self, step):
                print(step.step, step.loss)

    Override what you need. The methods of one callback are called one after another, in the order in which things
    happen, on a thread of its own. A run does not wait for it: what has happened meanwhile waits in a queue of 1,000
    calls. When that is full, steps are left out, and the run says how many; `on_end` is never left out. A callback that
    raises is shown, and is not called any more. At the end of a run its callbacks have `timeouts.callbacks` seconds
    until `on_end` has returned.

    Nothing that a callback does has an effect on what is trained.
    """

    @property
    def name(self) -> str:
        """The name under which the run speaks of it."""
        return type(self).__name__

    def on_start(self, start: StartRecord, /) -> None:
        """The run is about to train. Called once, also if the run begins again after a loss of state."""

    def on_step(self, step: StepRecord, /) -> None:
        """A step is committed. The record is the step's line of metrics.jsonl.

        Every step comes once and in order, also if the run begins again at a checkpoint and computes some of them once
        more; but for steps that the run has given up since they may be wrong (event `rollback`).
        """

    def on_event(self, event: EventRecord, /) -> None:
        """Something has happened: a worker was lost, has joined, ... Validations and checkpoints do not come here."""

    def on_validation(self, validation: ValidationRecord, /) -> None:
        """The loss on the held-out split is known."""

    def on_checkpoint(self, checkpoint: CheckpointRecord, /) -> None:
        """A checkpoint is on the disk."""

    def on_end(self, end: EndRecord, /) -> None:
        """The run has ended: it has finished, has stopped or has failed, and nothing else is going to be called.

        Called once for every on_start, also if a worker has refused the run before its first step. A run that is
        refused before any worker starts calls nothing.
        """
