"""The content of the next mesh epoch: pure functions of the placement before it and of what members have reported.

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

# ---- stages, when workers go or come


def assign_evenly(stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each worker, by stage, when all are equally fast."""
    return tuple(even_counts(num_microbatches, len(members)) for members in stages)


def next_stages(stages: Stages, removed: Collection[int], newcomers: Sequence[int], wanted: int) -> Stages:
    """The stages without some workers and with others.

    A stage that lost its last worker gets a newcomer, else a worker of the nearest stage that has two or more (its
    mirrors lie with its neighbours); when no stage has two, it is given up and its layers go to the others. Other
    newcomers open stages that were given up before, as long as there are fewer than `wanted`, and then go to the
    smallest stage.

    All other workers stay on the stage that they are on: a worker that changes its stage has none of its parameters.

    Args:
        wanted: number of stages that the run began with, or was moved to on purpose.

    Returns:
        The stages; none at all if no worker is left.
    """
    gone = frozenset(removed)
    left = [[rank for rank in members if rank not in gone] for members in stages]
    free = list(newcomers)
    # Empty stages first: without a worker the pipeline has a hole. Only then are others made larger.
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
    as are wanted, also where the run was moved to another number on purpose. Otherwise some may have been given up.

    Args:
        planned: that the run began with.
    """
    num_workers = sum(map(len, stages))
    return len(stages) if num_workers > len(stages) else max(len(stages), planned)


def _donor(stages: Sequence[Sequence[int]], empty: int) -> int | None:
    """The nearest stage with two workers or more; of two, the larger one."""
    able = [s for s, members in enumerate(stages) if len(members) > 1]
    return min(able, key=lambda s: (abs(s - empty), -len(stages[s]), s), default=None)


@dataclass(frozen=True)
class Goal:
    """An aim of the rescheduler: micro-batches, layers and workers of the present members, fields as in `Placement`.

    Args:
        why: the reason in words, for the log.
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
    """The placement on these stages, without replicas.

    Layers stay where they are unless the number of stages changes, and micro-batches unless members have changed.

    Args:
        domain_of: the failure domains of a newcomer; None: those of all the others.
        assign: (stages, number of micro-batches) -> the micro-batches of each worker, by stage.
    """
    ranks = [rank for members in stages for rank in members if rank not in old.mesh.topology]
    domains = {rank: path for rank in ranks if (path := domain_of(rank)) is not None}
    mesh = old.mesh.with_stages(stages, domains or None, epoch=epoch)
    # Layers that stay need no state to be moved before the step goes on. The rescheduler improves on it later.
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
    """The placement of the first epoch on other workers than planned: some were lost while they started.

    No state is lost with them, and none has to move: every worker begins with the initial values, or reads what it
    needs from the checkpoint. So replicas are placed as on a new mesh.

    Args:
        starters: the workers that are left, and those that were started in place of others.
        domain_of, assign: as in `next_placement`.
        mirrors: mirrors of each page, and the workers that share those of one (0: chosen).
    """
    removed = [rank for rank in planned.mesh.members if rank not in starters]
    newcomers = sorted(rank for rank in starters if rank not in planned.mesh)
    stages = next_stages(planned.mesh.stages, removed, newcomers, planned.num_stages)
    placement = next_placement(planned, layout, planned.mesh.epoch, stages, domain_of, assign)
    if planned.replicas is None:
        return placement
    return placement.with_new_replicas(layout, *mirrors)


def placement_at(goal: Goal | None, placement: Placement) -> Placement:
    """The same epoch with micro-batches, layers and workers as the goal has them, without replicas.

    Without a goal the placement itself.
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
    """The map with the learners that have the state by now as replicas and without damaged replicas.

    Args:
        caught_up: the workers that have reported that they have the state.
        damaged: rank -> page ranges of which its replica is not what it had written.

    Returns:
        The map; and the page ranges of which no replica is good.
    """
    found, alone = graduate(replicas, caught_up), ()
    for rank, ranges in damaged.items():
        found, lost = disown(found, rank, ranges)
        alone += lost
    return found, alone


def ahead_of_all(reports: Mapping[int, StepReport]) -> dict[int, tuple[PageRange, ...]]:
    """Rank -> the trained page ranges of which it has the state of the version after the highest of any member."""
    version = max(report.version for report in reports.values())
    return {rank: report.ahead for rank, report in reports.items() if report.version == version and report.ahead}


def ahead_everywhere(replicas: ReplicaMap, reports: Mapping[int, StepReport]) -> tuple[ReplicaSet, ...]:
    """The page ranges whose state is a step ahead of all members on each replica that is left.

    Whoever had applied that step is lost. The others may still complete it, but it cannot begin anew: the state that it
    was computed from is gone.

    Args:
        replicas: of the old epoch, with learners that have the state by now as replicas.
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
    """The replicas of an epoch as its Reconfigure has them; empty: each worker makes them as for a mesh without losses.

    Args:
        as_planned: it is the first epoch, on the workers that it was planned for.
    """
    # In the planned first epoch every worker computes the same replica map from the settings, so that it need not be
    # sent to each of a thousand workers; but only the controller knows several failure domains, in which mirrors are
    # spread, and who was lost while workers started.
    known = as_planned and len({path for _, path in placement.mesh.topology.domains}) == 1
    return to_rows(placement.replicas) if placement.replicas is not None and not known else ()


def hosts_of(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Per stage, the number of each member's host; () if all are on one."""
    hosts = mesh.topology.by_host(mesh.members)
    numbers = {rank: number for number, members in enumerate(hosts) for rank in members}
    return tuple(tuple(numbers[rank] for rank in members) for members in mesh.stages) if len(hosts) > 1 else ()


def partial_step_of(report: StepReport, step: int) -> PartialStep | None:
    """The part of a worker's report that is about this step; None: the worker has nothing of it."""
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
    """Number of lines of a recovery plan that their worker would not have run without the change.

    Args:
        held: rank -> what each member of the old epoch has of the step; None: nothing, as it has not begun it.
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
        lost, leaving: rank -> reason.
        relinked: ends of links that are made again -> reason.

    Returns:
        rank -> "fail", "leave", "join" or "link", of each worker that the change is about; and rank -> reason.
    """
    # A link to a worker that is lost ended with that worker: the loss is what is logged.
    again = {pair: why for pair, why in relinked.items() if lost.keys().isdisjoint(pair)}
    ends = {rank: why for pair, why in again.items() for rank in pair}
    kinds = dict.fromkeys(ends, "link") | dict.fromkeys(lost, "fail") | dict.fromkeys(leaving, "leave")
    return kinds | dict.fromkeys(newcomers, "join"), {**ends, **lost, **leaving}


def why_too_few(num_staying: int, leaving: list[int], least: int) -> str:
    """The reason for which a run stops when so many members stay, in words; empty if they are enough."""
    if num_staying >= least:
        return ""
    who = f"{named_workers(leaving)} leave{'s' * (len(leaving) == 1)}, "
    stay = f"{who}{num_staying} stay" if leaving else f"{num_staying} workers are left"
    return f"{stay}, elastic.min_workers is {least}"
