"""What one worker has to do of a step that was under way when the mesh changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from elaswave_spmd.recovery.messages import Recompute
from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT

INPUT_ONLY = INPUT_GRADIENT


@dataclass
class RemainingWork:
    """What is left of a micro-batch. `alone`: its gradient is not added to others here, but sent by itself."""

    forward: bool
    backward: int
    alone: bool


@dataclass
class StepUnderWay:
    """The step that a worker has begun.

    Args:
        assigned: micro-batches that it regards as its own; `first`: those that it began the step with, to be added up
        here. alone: no micro-batch is added to others here: sums of another stage's layers are in the way.
        computed: micro-batches whose backward is done.
        reported: those of `computed` when STATUS was last given.
        summed: those that were added up here.
    """

    number: int
    assigned: set[int]
    first: frozenset[int] = frozenset()
    alone: bool = False
    computed: set[int] = field(default_factory=set)
    reported: frozenset[int] = frozenset()
    summed: set[int] = field(default_factory=set)


def todo_anew(lines: Sequence[Recompute]) -> dict[int, RemainingWork]:
    """Of a step that this worker has not begun: its lines of the plan."""
    return {line.microbatch: RemainingWork(line.forward, line.backward, alone=False) for line in lines}


def todo_left(lines: Sequence[Recompute], step: StepUnderWay, forwarded: Collection[int]) -> dict[int, RemainingWork]:
    """Of a step that this worker has begun: its lines of the plan, less what it has done since it gave its STATUS.

    Micro-batches that it had computed then, and that stand in the plan, have to be computed again: their sums went with
    a primary. Notes in `step` what it regards as its own from now on.
    """
    todo: dict[int, RemainingWork] = {}
    for line in lines:
        if line.microbatch in step.computed - step.reported:
            continue  # done since, and kept
        alone = step.alone or line.microbatch not in step.first or line.microbatch in step.summed
        left = RemainingWork(line.forward and line.microbatch not in forwarded, line.backward, alone)
        if left.backward == FULL:
            step.assigned.add(line.microbatch)
            step.computed.discard(line.microbatch)
        if left.forward or left.backward:
            todo[line.microbatch] = left
    return todo


def next_ready(
    todo: Mapping[int, RemainingWork], has_activation: Callable[[int], bool], has_gradient: Callable[[int], bool]
) -> int | None:
    """A micro-batch whose next action has its input: a backward if there is one, the lowest micro-batch first."""
    can_go = None
    for microbatch, left in sorted(todo.items()):
        if not left.forward and has_gradient(microbatch):
            return microbatch
        if left.forward and can_go is None and has_activation(microbatch):
            can_go = microbatch
    return can_go
