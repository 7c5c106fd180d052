"""A failure within a step: the survivors keep what they have, and the rest of the step is executed in virtual time.

Modelled: the lost worker's forwards and partial sums are gone. So its micro-batches run through its stage again on its
peers, from activations and gradients that their senders have kept: forward, backward, and weight gradients, whether or
not it had put them off. All other results stay, and survivors still have the weight gradients to run that they have put
off. Survivors run whatever is ready, within the limits of the new assignment.

The result is slightly too slow, because actions that were in progress when the worker was lost begin again. Not
modelled: partial sums that the lost worker had completed and sent, with which fewer micro-batches would run again, and
the messages that are sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction, in_flight_limits
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator.engine import SHARED, Run, execute
from elaswave_spmd.simulator.work import Span, Work


@dataclass(frozen=True)
class RecomputedStep:
    """A step in which workers were lost. The time of detecting the loss is not included.

    Args:
        whole_s: the seconds of the undisturbed step.
        kept: the actions that were finished before the loss, including those of lost workers.
        rest: the actions after the loss. Their times count from the start of the step.
        seconds: the duration of the whole step.
    """

    whole_s: float
    kept: tuple[Span, ...]
    rest: tuple[Span, ...]
    seconds: float


def recompute_step(
    assignment: Assignment, costs: CostModel, gone: Collection[int], at: float, undisturbed: Run | None = None
) -> RecomputedStep | None:
    """The step in which workers are lost, executed in virtual time.

    Args:
        gone: the ranks of the lost workers.
        at: the seconds from the start of the step until the loss.
        undisturbed: the same step without the loss, if it has been executed already.

    Returns:
        The step. None if a stage has lost all its workers, so that nothing of the step is kept.
    """
    lost = frozenset(gone)
    stages = tuple(tuple(rank for rank in members if rank not in lost) for members in assignment.stages)
    if not all(stages):
        return None
    work = Work.from_assignment(assignment)
    whole = undisturbed or execute(work, costs, wires=SHARED)
    kept = tuple(span for span in whole.spans if span.stop <= at)
    done = frozenset(span.action for span in kept if span.worker not in lost)
    owners = tuple(
        _reassign(stage, of_stage, members, done, costs, splits=work.splits(stage))
        for stage, (of_stage, members) in enumerate(zip(work.owners, stages, strict=True))
    )
    counts = [[of_stage.count(rank) for rank in members] for of_stage, members in zip(owners, stages, strict=True)]
    limits = in_flight_limits([len(members) for members in stages], counts)
    left = replace(work, stages=stages, owners=owners, done=done, limits=limits, turns=())
    if not any(left.left().values()):
        return RecomputedStep(whole.step_s, kept, (), max(at, whole.step_s))
    run = execute(left, costs, wires=SHARED)
    rest = tuple(span._replace(start=at + span.start, stop=at + span.stop) for span in run.spans)
    return RecomputedStep(whole.step_s, kept, rest, at + run.step_s)


def _reassign(
    stage: int,
    owners: Sequence[int],
    members: Sequence[int],
    done: Collection[PipelineAction],
    costs: CostModel,
    *,
    splits: bool,
) -> tuple[int, ...]:
    """The workers of a stage's micro-batches. Those of lost workers go to the members with the least left to run."""
    left, kinds = dict.fromkeys(members, 0.0), (FORWARD, BACKWARD, WEIGHTS if splits else BACKWARD)
    # In units of a forward. A whole backward counts as two, and so do its two parts together.
    for microbatch, rank in enumerate(owners):
        if rank in left:
            left[rank] += sum(PipelineAction(stage, kind, microbatch) not in done for kind in kinds)
    found = list(owners)
    for microbatch, rank in enumerate(owners):
        if rank not in left:
            found[microbatch] = min(members, key=lambda r: ((left[r] + 3) / costs.speed(r), r))
            left[found[microbatch]] += 3  # a forward, and a backward that takes twice as long
    return tuple(found)
