"""One worker's part of a step that was under way when the mesh changed.

The plan for all workers is made by the controller (`recovery.partial_step`).
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

    On a large mesh it has the lines of those micro-batches alone that the worker has to do with (recovery/peers.py).
    """

    step: int
    lines: tuple[Recompute, ...]

    def lines_of(self, rank: int) -> list[Recompute]:
        """The lines of one worker."""
        return [line for line in self.lines if line.worker == rank]

    def worker_of(self, stage: int, microbatch: int) -> int | None:
        """The worker that runs a micro-batch through a stage; None if no worker has to any more."""
        return next((ln.worker for ln in self.lines if (ln.stage, ln.microbatch) == (stage, microbatch)), None)


@dataclass
class StepUnderWay:
    """The step that a worker has begun.

    Args:
        number: of the step.
        assigned: micro-batches that the worker regards as its own.
        begun_with: the micro-batches that it began the step with: their gradients are added up here, as far as the tree
            allows.
        alone: no micro-batch is added to others here. Sums of the layers of another stage are in the way.
        computed: micro-batches whose backward is done.
        reported: the micro-batches in `computed` when the last StepReport was sent, and one in the middle of its
            backward if sums of it have left already: the recovery plan counts with them.
        summed: micro-batches whose gradients were added up here.
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

    Its lines of the plan, less what it has done since it gave its StepReport. Micro-batches that it had computed by
    then, and that stand in the plan, have to be computed again: their sums were lost with a primary.

    Args:
        lines: of this worker.
        step: notes here what the worker regards as its own from now on.
        forwarded: micro-batches with a saved forward.
        put_off: micro-batches of which nothing but the weight gradients is left. Their input's gradient is kept, so
            that of a line no more than this is to do.
    """
    remaining: dict[int, MicrobatchWork] = {}
    for line in lines:
        if line.microbatch in step.computed - step.reported:
            continue  # done since, and kept
        # The reduction was told which micro-batches it will get (`first`), and sends a sum when these are complete. One
        # that it does not expect, or has had, would be added twice or never sent: its gradient goes by itself.
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
