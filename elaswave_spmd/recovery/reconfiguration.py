"""What the next mesh epoch looks like: pure functions of the placement before it and of what members have reported.

`ControllerProtocol._finish_change` calls them, once for each change, when all living members have sent a StepReport.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.mesh.mesh import Mesh, named_workers
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery.messages import PartialStep, Recompute, StepReport
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaRow, ReplicaSet, disown, graduate, to_rows
from elaswave_spmd.sharding.state_sharding import Stages

# ---- stages and placement, when workers leave or join


def assign_evenly(stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The number of micro-batches of each worker, by stage, if all workers are equally fast."""
    return tuple(even_counts(num_microbatches, len(members)) for members in stages)


def next_stages(stages: Stages, removed: Collection[int], newcomers: Sequence[int], wanted: int) -> Stages:
    """The stages of the next mesh: without the workers in `removed`, and with `newcomers`.

    A stage that lost its last worker gets a newcomer. If there is none, it gets a worker of the nearest stage that has
    two or more, as mirrors are kept on neighbouring stages. If no stage has two workers, the empty stage is given up,
    and its layers go to the others.

    The other newcomers open stages again that were given up before, until there are `wanted` stages. The rest of them
    go to the smallest stages. If there are still fewer stages than `wanted`, the largest ones give up a worker each.

    All other workers stay on their stage: a worker that changes its stage has none of the new stage's parameters.

    Args:
        stages: the ranks of each stage until now.
        removed: workers that are not members of the next mesh.
        newcomers: workers that become members.
        wanted: the number of stages that the run began with, or that the rescheduler has moved to since.

    Returns:
        The ranks of each stage; empty if no worker is left.
    """
    gone = frozenset(removed)
    left = [[rank for rank in members if rank not in gone] for members in stages]
    free = list(newcomers)
    # Empty stages come first: the pipeline cannot run without them. Only then do other stages get newcomers.
    for number, members in enumerate(left):
        if not members and free:
            members.append(free.pop(0))
        elif not members and (donor := _donor(left, number)) is not None:
            members.append(left[donor].pop())
    left = [members for members in left if members]
    for rank in free:
        if len(left) < wanted:
            left.append([rank])
        else:
            min(left, key=len).append(rank)
    while len(left) < wanted and max(map(len, left), default=0) > 1:
        left.append([max(left, key=len).pop()])
    return tuple(map(tuple, left))


def wanted_stages(stages: Stages, planned: int) -> int:
    """The number of stages that `next_stages` was last asked for, by the stages that it has made.

    It makes fewer than wanted only where no stage has two workers. So with more workers than stages these are as many
    as are wanted, also where the run was moved to another number on purpose. Otherwise some may have been given up, and
    the planned number is taken: where the run was moved to fewer stages, newcomers open others then.

    Args:
        planned: that the run began with.
    """
    num_workers = sum(map(len, stages))
    return len(stages) if num_workers > len(stages) else max(len(stages), planned)


def _donor(stages: Sequence[Sequence[int]], empty: int) -> int | None:
    """The nearest stage that has two workers or more; the larger one if two are equally near. None if none has two."""
    able = [s for s, members in enumerate(stages) if len(members) > 1]
    return min(able, key=lambda s: (abs(s - empty), -len(stages[s]), s), default=None)


@dataclass(frozen=True)
class Goal:
    """A placement of the present members that the rescheduler wants. The fields are as in `Placement`.

    Args:
        why: the reason for the move in words, for the log.
    """

    stages: Stages
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    why: str = ""


def next_placement(
    old: Placement,
    layout: ModelLayout,
    epoch: int,
    stages: Stages,
    domain_of: Callable[[int], Path | None],
    assign: Callable[[Stages, int], tuple[tuple[int, ...], ...]] = assign_evenly,
) -> Placement:
    """The placement on these stages, without a replica map.

    Layers stay where they are unless the number of stages changes, and micro-batches unless members have changed.

    Args:
        old: the placement until now.
        layout: the layers, with their work and their pages.
        epoch: the number of the new mesh epoch.
        stages: the ranks of each stage in the new mesh.
        domain_of: the failure domain of a newcomer; None if the run has only one.
        assign: (stages, number of micro-batches) -> the number of micro-batches of each worker, by stage.
    """
    ranks = [rank for members in stages for rank in members if rank not in old.mesh.topology]
    domains = {rank: path for rank in ranks if (path := domain_of(rank)) is not None}
    mesh = old.mesh.with_stages(stages, domains or None, epoch=epoch)
    # If layers stay, no state has to move before the step goes on. The rescheduler may move layers later.
    cuts = old.layer_cuts
    if len(stages) != old.num_stages:
        cuts = balance_layers(list(layout.work), [len(members) for members in stages])
    counts = old.microbatch_counts if stages == old.mesh.stages else assign(stages, old.num_microbatches)
    return replace(old, mesh=mesh, layer_cuts=cuts, microbatch_counts=counts, replicas=None)


def first_placement(
    planned: Placement,
    layout: ModelLayout,
    starters: Collection[int],
    domain_of: Callable[[int], Path | None],
    assign: Callable[[Stages, int], tuple[tuple[int, ...], ...]],
    mirrors: tuple[int, int],
) -> Placement:
    """The placement of the first epoch on other workers than planned, as some were lost while they started.

    No state is lost with them, and none has to move: every worker makes the initial values itself, or reads what it
    needs from the checkpoint. So replicas are placed as on a new mesh.

    Args:
        planned: the placement that the run was planned with.
        layout: the layers, with their work and their pages.
        starters: the workers that are left, and those that were started in place of others.
        domain_of: as in `next_placement`.
        assign: as in `next_placement`.
        mirrors: (mirrors of each page, number of workers over which those of one worker's pages are spread, or 0 to let
            `sharding.replica_placement` choose).
    """
    removed = [rank for rank in planned.mesh.members if rank not in starters]
    newcomers = sorted(rank for rank in starters if rank not in planned.mesh)
    stages = next_stages(planned.mesh.stages, removed, newcomers, planned.num_stages)
    placement = next_placement(planned, layout, planned.mesh.epoch, stages, domain_of, assign)
    if planned.replicas is None:
        return placement
    return placement.with_new_replicas(layout, *mirrors)


def placement_at(goal: Goal | None, placement: Placement) -> Placement:
    """The placement with the micro-batches, layers and stages of the goal, in the same epoch and without a replica map.

    Without a goal, it is `placement` itself.
    """
    if goal is None:
        return placement
    mesh = placement.mesh if goal.stages == placement.mesh.stages else placement.mesh.with_stages(goal.stages)
    mesh = replace(mesh, epoch=placement.mesh.epoch)
    return replace(
        placement, mesh=mesh, layer_cuts=goal.layer_cuts, microbatch_counts=goal.microbatch_counts, replicas=None
    )


def good_replicas(
    replicas: ReplicaMap, caught_up: Collection[int], damaged: Mapping[int, Collection[PageRange]]
) -> tuple[ReplicaMap, tuple[ReplicaSet, ...]]:
    """The replica map in which learners that have caught up are replicas, and damaged replicas are left out.

    Args:
        replicas: the replica map of the old epoch.
        caught_up: the workers that have reported that they have the state of all pages that they learn.
        damaged: rank -> page ranges of which this worker's replica is wrong or was given up.

    Returns:
        The map, and the page ranges that have no good replica left.
    """
    found, alone = graduate(replicas, caught_up), ()
    for rank, ranges in damaged.items():
        found, lost = disown(found, rank, ranges)
        alone += lost
    return found, alone


def ahead_of_all(reports: Mapping[int, StepReport]) -> dict[int, tuple[PageRange, ...]]:
    """Rank -> the trained page ranges of which it has, as a learner, the state of the step after the highest version.

    The primary that had sent this state had applied that step, and is lost.
    """
    version = max(report.version for report in reports.values())
    return {rank: report.ahead for rank, report in reports.items() if report.version == version and report.ahead}


def ahead_everywhere(replicas: ReplicaMap, reports: Mapping[int, StepReport]) -> tuple[ReplicaSet, ...]:
    """The page ranges of which every replica that is left is one step ahead of the highest version of any member.

    All members that had applied that step are lost. The others may still complete it, but it cannot begin anew: the
    state that it was computed from is gone.

    Args:
        replicas: the replica map of the old epoch, in which learners that have caught up are replicas.
        reports: rank -> StepReport, of all living members.
    """
    ahead = ahead_of_all(reports)
    if not ahead:
        return ()

    def is_ahead(rank: int, pages: ReplicaSet) -> bool:
        inside = ((layer, a, b) for layer, a, b in ahead.get(rank, ()) if layer == pages.layer)
        return any(a <= pages.first and pages.stop <= b for _, a, b in inside)

    found = []
    for pages in (pages for some in replicas.values() for pages in some):
        living = [rank for rank in pages.replicas if rank in reports]
        if living and all(is_ahead(rank, pages) for rank in living):
            found.append(pages)
    return tuple(found)


def replica_rows(placement: Placement, *, as_planned: bool) -> tuple[ReplicaRow, ...]:
    """The field `replicas` of an epoch's Reconfigure; empty if every worker can compute the map from the settings.

    Args:
        placement: the placement of the epoch.
        as_planned: True if it is the first epoch, on the workers that it was planned for.
    """
    # In the planned first epoch every worker computes the same replica map from the settings, so that the map need not
    # be sent to each of a thousand workers. The exceptions are what only the controller knows: failure domains, over
    # which mirrors are spread, and workers that were lost while they started.
    known = as_planned and len({path for _, path in placement.mesh.topology.domains}) == 1
    return to_rows(placement.replicas) if placement.replicas is not None and not known else ()


def hosts_of(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """For each stage, the number of each member's host; () if all members are on one host."""
    hosts = mesh.topology.by_host(mesh.members)
    numbers = {rank: number for number, members in enumerate(hosts) for rank in members}
    return tuple(tuple(numbers[rank] for rank in members) for members in mesh.stages) if len(hosts) > 1 else ()


def partial_step_of(report: StepReport, step: int) -> PartialStep | None:
    """The part of a worker's report that is about this step; None if the worker has nothing of it."""
    for part in report.partial_steps:
        if part.step == step:
            return part
    return None


def layers_of_workers(placement: Placement) -> dict[int, tuple[int, int]]:
    """Rank -> the layers [first, stop) of its stage, of all members."""
    found: dict[int, tuple[int, int]] = {}
    for stage, members in enumerate(placement.mesh.stages):
        layers = placement.layers_of_stage(stage)
        found |= dict.fromkeys(members, (layers.start, layers.stop))
    return found


def num_recomputed(plan: tuple[Recompute, ...] | None, held: Mapping[int, PartialStep | None], old: Placement) -> int:
    """The number of lines of a recovery plan that the worker of the line would not have run without the change.

    Args:
        plan: the recovery plan; None if the step was not begun.
        held: rank -> what each member of the old epoch has of the step; None if it has not begun it.
        old: the placement of the old epoch.
    """
    to_do: dict[int, frozenset[int]] = {}
    for rank in {line.worker for line in plan or ()} & held.keys():
        part = held[rank]
        own = old.microbatches_of(rank) if part is None else part.assigned
        to_do[rank] = frozenset(own).difference(() if part is None else part.computed)
    return sum(line.microbatch not in to_do.get(line.worker, ()) for line in plan or ())


def membership_changes(
    lost: Mapping[int, str],
    leaving: Mapping[int, str],
    newcomers: Iterable[int],
    relinked: Mapping[frozenset[int], str],
) -> tuple[dict[int, str], dict[int, str]]:
    """Summarize a change of members for the log.

    Args:
        lost: rank -> reason.
        leaving: rank -> reason.
        newcomers: workers that become members.
        relinked: the two ends of a link that is opened again -> reason.

    Returns:
        rank -> "fail", "leave", "join" or "link", of each worker that the change is about; and rank -> reason.
    """
    # A link to a lost worker broke because of the loss, so only the loss is logged.
    again = {pair: why for pair, why in relinked.items() if lost.keys().isdisjoint(pair)}
    ends = {rank: why for pair, why in again.items() for rank in pair}
    kinds = dict.fromkeys(ends, "link") | dict.fromkeys(lost, "fail") | dict.fromkeys(leaving, "leave")
    return kinds | dict.fromkeys(newcomers, "join"), {**ends, **lost, **leaving}


def why_too_few(num_staying: int, leaving: list[int], least: int) -> str:
    """Why a run cannot go on with `num_staying` members, in words; empty if they are at least `least`.

    Args:
        num_staying: the number of members that stay.
        leaving: the ranks of members that leave, which the words mention.
        least: `elastic.min_workers`, or 1 if that is less.
    """
    if num_staying >= least:
        return ""
    who = f"{named_workers(leaving)} leave{'s' * (len(leaving) == 1)}, "
    stay = f"{who}{num_staying} stay" if leaving else f"{num_staying} workers are left"
    return f"{stay}, elastic.min_workers is {least}"
