"""A failure within a step: what is left of it after what the survivors have is kept, executed in virtual time.

Modelled: the lost worker's forwards and sums are gone, so that its micro-batches run through its stage again on its
peers, from activations and gradients that their senders kept; everything else stays; survivors run what is ready,
without limits on micro-batches in flight, as the executor does. Slightly too slow: an action that was under way when
the worker was lost begins again. Not modelled: sums of the lost worker that were complete and sent (fewer micro-batches
would run again), and messages that are sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, Action
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator.engine import FREE, Run, execute
from elaswave_spmd.simulator.work import Span, Work


@dataclass(frozen=True)
class RecomputedStep:
    """A step that a loss fell into; detection is not counted.

    Args:
        whole_s: what it takes undisturbed.
        kept: what was done before the loss, by whoever was lost too.
        rest: what was done after it; times count from the step's start.
        seconds: of all of it.
    """

    whole_s: float
    kept: tuple[Span, ...]
    rest: tuple[Span, ...]
    seconds: float


def recompute_step(
    assignment: Assignment, costs: CostModel, gone: Collection[int], at: float, undisturbed: Run | None = None
) -> RecomputedStep | None:
    """The step in which workers are lost at second `at`.

    Args:
        undisturbed: the step as it goes without that, if it is known.

    Returns: None where a stage lost all its workers: then nothing of the step is kept.
    """
    lost = frozenset(gone)
    stages = tuple(tuple(rank for rank in members if rank not in lost) for members in assignment.stages)
    if not all(stages):
        return None
    work = Work.of(assignment)
    whole = undisturbed or execute(work, costs, wires=FREE)
    kept = tuple(span for span in whole.spans if span.stop <= at)
    done = frozenset(span.action for span in kept if span.worker not in lost)
    owners = tuple(
        _reassign(stage, of_stage, members, done, costs)
        for stage, (of_stage, members) in enumerate(zip(work.owners, stages, strict=True))
    )
    limits = (assignment.num_microbatches,) * len(stages)
    left = replace(work, stages=stages, owners=owners, lists=None, done=done, limits=limits)
    if not any(left.left().values()):
        return RecomputedStep(whole.step_s, kept, (), max(at, whole.step_s))
    run = execute(left, costs, wires=FREE)
    rest = tuple(span._replace(start=at + span.start, stop=at + span.stop) for span in run.spans)
    return RecomputedStep(whole.step_s, kept, rest, at + run.step_s)


def _reassign(
    stage: int, owners: Sequence[int], members: Sequence[int], done: Collection[Action], costs: CostModel
) -> tuple[int, ...]:
    """Micro-batches of workers that are gone go to whoever of the stage has least left to do."""
    left = dict.fromkeys(members, 0.0)
    for microbatch, rank in enumerate(owners):
        if rank in left:
            left[rank] += sum(Action(stage, kind, microbatch) not in done for kind in (FORWARD, BACKWARD, BACKWARD))
    found = list(owners)
    for microbatch, rank in enumerate(owners):
        if rank not in left:
            found[microbatch] = min(members, key=lambda r: ((left[r] + 3) / costs.speed(r), r))
            left[found[microbatch]] += 3
    return tuple(found)
