"""One worker's part of a step that was under way when the mesh changed.

The controller makes the recovery plan for all workers (`recovery.partial_step`). The functions here compute what one
worker still has to do by that plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elaswave_spmd.recovery.messages import Recompute
from elaswave_spmd.recovery.partial_step import FULL, WEIGHTS_ONLY
from elaswave_spmd.worker.ready_order import MicrobatchWork


@dataclass(frozen=True)
class RecoveryPlan:
    """The controller's plan for an interrupted step: at most one line per stage and micro-batch.

    On a large mesh it has only the lines of micro-batches that this worker has to do with (C15, recovery/peers.py).
    """

    step: int
    lines: tuple[Recompute, ...]

    def lines_of(self, rank: int) -> list[Recompute]:
        """The lines of one worker."""
        return [line for line in self.lines if line.worker == rank]

    def worker_of(self, stage: int, microbatch: int) -> int | None:
        """The worker that runs a micro-batch through a stage; None if the plan has no line for it here."""
        return next((ln.worker for ln in self.lines if (ln.stage, ln.microbatch) == (stage, microbatch)), None)


@dataclass
class StepUnderWay:
    """The step that a worker has begun.

    Args:
        number: the step.
        assigned: the micro-batches that the worker regards as its own.
        begun_with: the micro-batches that the worker began the step with. Their gradients are added up here, as far as
            the reduction tree allows.
        alone: no gradient is added to others here: the reducer still has sums of this step over the layers of another
            stage, which this worker was on before.
        computed: the micro-batches whose backward is done.
        reported: the micro-batches that were in `computed` when the last StepReport was sent; and the one that was in
            the middle of its backward then, if sums of it may have been sent and given up. The recovery plan is made
            with these.
        summed: the micro-batches whose gradients were added to others here.
    """

    number: int
    assigned: set[int]
    begun_with: frozenset[int] = frozenset()
    alone: bool = False
    computed: set[int] = field(default_factory=set)
    reported: frozenset[int] = frozenset()
    summed: set[int] = field(default_factory=set)

    def note(self, microbatch: int, *, alone: bool) -> None:
        """A micro-batch's backward is done."""
        self.computed.add(microbatch)
        if not alone:
            self.summed.add(microbatch)


def remaining_of_new_step(lines: Sequence[Recompute]) -> dict[int, MicrobatchWork]:
    """Micro-batch -> what this worker has to do of a step that it has not begun: all its lines of the plan."""
    return {line.microbatch: MicrobatchWork(line.forward, line.backward, alone=False) for line in lines}


def remaining_of_begun_step(
    lines: Sequence[Recompute], step: StepUnderWay, forwarded: Collection[int], put_off: Collection[int] = ()
) -> dict[int, MicrobatchWork]:
    """Micro-batch -> what this worker has to do of a step that it has begun.

    That is the worker's lines of the plan, less what it has done since its StepReport. If a micro-batch was computed
    before the StepReport and has a line all the same, it has to be computed again: its sums were lost with a primary.

    Args:
        lines: the plan's lines for this worker.
        step: the step that the worker has begun. It is changed: it has what the worker regards as its own from now on.
        forwarded: the micro-batches with a saved forward.
        put_off: the micro-batches of which only the weight gradients are left. The gradient of their input is kept, so
            that a line leaves no more than the weight gradients to compute.
    """
    remaining: dict[int, MicrobatchWork] = {}
    for line in lines:
        if line.microbatch in step.computed - step.reported:
            continue  # computed after the StepReport, and its sums are kept
        # The reducer was told at the begin of the step which micro-batches it gets (`begun_with`), and sends a sum when
        # these are complete. A micro-batch that it does not expect would never be sent, and one that it has had already
        # would be added twice. So the gradient of such a micro-batch is sent by itself.
        alone = step.alone or line.microbatch not in step.begun_with or line.microbatch in step.summed
        if line.microbatch in put_off:
            left = MicrobatchWork(False, WEIGHTS_ONLY if line.backward in (FULL, WEIGHTS_ONLY) else 0, alone)
        else:
            assert line.backward != WEIGHTS_ONLY, line
            left = MicrobatchWork(line.forward and line.microbatch not in forwarded, line.backward, alone)
        if left.backward in (FULL, WEIGHTS_ONLY):
            step.assigned.add(line.microbatch)
            step.computed.discard(line.microbatch)
        if left.forward or left.backward:
            remaining[line.microbatch] = left
    return remaining
