"""The validation losses of a run so far, by step, including those of the run that it resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elaswave_spmd.run_dir.best import ranked
from elaswave_spmd.worker.spec import Job


class Validations:
    """The validation losses, their order, and whether they end the run early.

    Args:
        known: (step, number of micro-batches) -> loss as a hexadecimal float, of the validations of an earlier run.
        version: the version at which this run begins. Losses of later steps are ignored, as these are validated again.
    """

    def __init__(self, job: Job, known: Mapping[tuple[int, int], str], version: int) -> None:
        self._job = job
        # Losses over another number of micro-batches cannot be compared with those of this run.
        self._losses = {
            step: float.fromhex(loss)
            for (step, number), loss in known.items()
            if step <= version and number == job.num_validation_microbatches
        }

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a validation after `step`."""
        self._losses[step] = loss

    @property
    def newest(self) -> int:
        """The newest step whose loss is known; 0 if none is."""
        return max(self._losses, default=0)

    @property
    def ended_at(self) -> int | None:
        """The step after which the run ends early, by the losses so far; None if these do not end it."""
        rule, known = self._job.early_stop, self._of_this_run
        is_over = rule is not None and bool(known) and max(known) < self._job.steps and rule.is_over(known)
        return max(known) if is_over else None

    @property
    def _of_this_run(self) -> dict[int, float]:
        """The losses that decide about an early end: those of the steps that this run validates.

        The run that is resumed may have validated others: its last step, if it was shorter, or the steps of another
        `train.validate_every`. Without these, the decision is the same as in a run that was never resumed.
        """
        return {step: loss for step, loss in self._losses.items() if self._job.validates_at(step)}

    @property
    def ranked(self) -> tuple[int, ...]:
        """The validated steps, from the lowest loss to the highest; with equal losses the earlier one comes first."""
        return ranked(self._losses)

    def loss_at(self, step: int) -> float:
        """The loss of a validated step."""
        return self._losses[step]

    def early_stop(self) -> dict[str, Any]:
        """The fields of the event `early_stop`, and of summary.json: what was best, and for how long."""
        rule = self._job.early_stop
        assert rule is not None, "the run has no rule to end early"
        found = rule.progress(self._of_this_run)
        return {
            "best_step": found.best_step,
            "best_loss": found.best_loss if math.isfinite(found.best_loss) else None,
            "validations_since": found.since,
            "patience": rule.patience,
            "min_delta": rule.min_delta,
        }
