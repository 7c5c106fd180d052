"""What the next mesh epoch is made of: pure functions of the placement before it and of what members have said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery.messages import Recompute, Reconfigure, StepHeld, StepReport
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replica_rebalance import refill
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet, all_runs, to_rows

# What the mesh becomes when workers go or come: pure functions of the mesh and the event.
Stages = tuple[tuple[int, ...], ...]


def deal_evenly(stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches of each worker, by stage, when all are equally fast."""
    return tuple(even_counts(num_microbatches, len(members)) for members in stages)


def next_stages(stages: Stages, gone: Collection[int], newcomers: Sequence[int], wanted: int) -> Stages:
    """The stages without some workers and with others.

    A stage that lost its last worker gets a newcomer, else a worker of the nearest stage that has two or more (its
    mirrors lie with its neighbours); when no stage has two, it is given up and its layers go to the others. Other
    newcomers open stages that were given up before, as long as there are fewer than `wanted`, and then go to the
    smallest stage.

    Returns: as few as no stage at all, when nobody is left.
    """
    lost = frozenset(gone)
    left = [[rank for rank in members if rank not in lost] for members in stages]
    free = list(newcomers)
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


def _donor(stages: Sequence[Sequence[int]], empty: int) -> int | None:
    """The nearest stage with two workers or more; of two, the larger one."""
    able = [s for s, members in enumerate(stages) if len(members) > 1]
    return min(able, key=lambda s: (abs(s - empty), -len(stages[s]), s), default=None)


def graduate(replicas: ReplicaMap, learned: Collection[int]) -> ReplicaMap:
    """The map in which these learners, who have caught up, are replicas. Primaries stay."""

    def after(layer: int) -> tuple[ReplicaSet, ...]:
        return tuple(
            replace(run, replicas=run.replicas | ready, learners=run.learners - ready)
            if (ready := run.learners & frozenset(learned))
            else run
            for run in replicas[layer]
        )

    return {layer: after(layer) for layer in replicas}


def disown(
    replicas: ReplicaMap, rank: int, runs: Collection[tuple[int, int, int]]
) -> tuple[ReplicaMap, list[ReplicaSet]]:
    """The map in which a worker does not hold these runs any more, and the runs that nobody else holds.

    Where it was the primary, a mirror becomes the primary.
    """

    def hit(run: ReplicaSet) -> bool:
        return any(run.layer == ly and first <= run.first and run.stop <= stop for ly, first, stop in runs)

    found: dict[int, tuple[ReplicaSet, ...]] = {}
    homeless: list[ReplicaSet] = []
    for layer, of_layer in replicas.items():
        kept = []
        for run in of_layer:
            left = run.replicas - {rank}
            if rank in run.replicas and hit(run):
                if left:
                    run = replace(run, primary=min(left) if run.primary == rank else run.primary, replicas=left)
                else:
                    homeless.append(run)
            kept.append(run)
        found[layer] = tuple(kept)
    return found, homeless


def dispensable(replicas: ReplicaMap, gone: Collection[int], leaving: Iterable[int]) -> tuple[int, ...]:
    """Those of `leaving` who may go at once, without `gone`: every page that has a replica keeps one."""
    left = {run.replicas.difference(gone) for run in all_runs(replicas)} - {frozenset()}
    found = []
    for rank in leaving:
        without = {held - {rank} for held in left}
        if frozenset() not in without:
            found.append(rank)
            left = without
    return tuple(found)


# How much state a change of the mesh makes move, and the least that it could: pure functions of replica maps.
def moved_elements(replicas: ReplicaMap, layout: ModelLayout) -> int:
    """Elements of the pages that learners get, one kind of state, once for each learner. The loss page is no state.

    Promoting a mirror moves nothing.
    """
    return sum(_elements(run, layout) * len(run.learners) for run in all_runs(replicas) if run.learners)


def least_elements(replicas: ReplicaMap, target: Placement, layout: ModelLayout) -> int:
    """Lower bound for `moved_elements`, for any map that gives pages as many replicas and primaries as even a share.

    The larger one of two: the replicas that each page lacks by number, whoever they are; and what the members lack of
    their share as primaries.

    Args:
        replicas: of the new mesh epoch, with learners.
        target: what they learn for; its replicas are those on the same runs when all have caught up.
    """
    assert target.replicas is not None
    missing = 0
    for layer, runs in replicas.items():
        for now, then in zip(runs, target.replicas[layer], strict=True):
            if len(then.replicas) > len(now.replicas):
                missing += _elements(now, layout) * (len(then.replicas) - len(now.replicas))
    return max(missing, _missing_shares(target, replicas, layout))


def _missing_shares(target: Placement, replicas: ReplicaMap, layout: ModelLayout) -> int:
    """A member is to be the primary of as many pages of its stage as the others, within one, and so to hold them.

    Which pages it would get is open; the last one of a block may be short. So it gets the smallest.
    """
    found = 0
    for members, (first, stop) in zip(target.mesh.stages, pairwise(target.layer_cuts), strict=True):
        blocks = [block for layer in range(first, stop) for block in layout.layers[layer].state_blocks]
        share = sum(block.num_pages for block in blocks) // len(members)
        last = sorted(b.stop - b.start - (b.num_pages - 1) * layout.page_size for b in blocks)
        held = dict.fromkeys(members, 0)
        for run in (run for layer in range(first, stop) for run in replicas[layer] if not _is_loss(run, layout)):
            for rank in run.replicas & held.keys():
                held[rank] += run.num_pages
        for missing in (share - num_pages for num_pages in held.values() if num_pages < share):
            found += sum(last[:missing]) + max(0, missing - len(last)) * layout.page_size
    return found


def _elements(run: ReplicaSet, layout: ModelLayout) -> int:
    if _is_loss(run, layout):
        return 0
    start, stop = layout.layers[run.layer].span(run.first, run.stop)
    return stop - start


def _is_loss(run: ReplicaSet, layout: ModelLayout) -> bool:
    return layout.layers[run.layer].block_of(run.first).kind == LOSS


@dataclass(frozen=True)
class Goal:
    """Where micro-batches, layers and workers are to be, of the members that there are: fields as in `Placement`. And
    why.
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
    deal: Callable[[Stages, int], tuple[tuple[int, ...], ...]] = deal_evenly,
) -> Placement:
    """The placement on these stages, without replicas.

    Layers stay where they are unless the number of stages changes, and micro-batches unless members have changed.

    Args:
        domain_of: the failure domains of a newcomer; None: those of all the others.
        deal: (stages, number of micro-batches) -> the micro-batches of each worker, by stage.
    """
    ranks = [rank for members in stages for rank in members if rank not in old.mesh.topology]
    domains = {rank: path for rank in ranks if (path := domain_of(rank)) is not None}
    mesh = replace(old.mesh.with_stages(stages, domains or None), epoch=epoch)
    cuts = old.layer_cuts
    if len(stages) != old.num_stages:
        costs = [max(1.0, float(layer.num_value_elements)) for layer in layout.layers]
        cuts = balance_layers(costs, [len(members) for members in stages])
    counts = old.microbatch_counts if stages == old.mesh.stages else deal(stages, old.num_microbatches)
    return replace(old, mesh=mesh, layer_cuts=cuts, microbatch_counts=counts, replicas=None)


def placement_at(goal: Goal | None, placement: Placement) -> Placement:
    """The same epoch with micro-batches, layers and workers where they are to be, without replicas. No goal: as it
    is.
    """
    if goal is None:
        return placement
    mesh = placement.mesh if goal.stages == placement.mesh.stages else placement.mesh.with_stages(goal.stages)
    mesh = replace(mesh, epoch=placement.mesh.epoch)
    return replace(
        placement, mesh=mesh, layer_cuts=goal.layer_cuts, microbatch_counts=goal.microbatch_counts, replicas=None
    )


def target_of(aim: Placement, current: ReplicaMap, layout: ModelLayout, mirror_count: int, scatter: int) -> ReplicaMap:
    """The replicas to go to for a placement, from those that there are."""
    return refill(
        current,
        layout,
        aim.mesh.stages,
        aim.layer_cuts,
        replicated=not aim.shardings.optim.axes,
        topology=aim.mesh.topology,
        mirror_count=mirror_count,
        scatter=scatter,
    )


def good_replicas(
    replicas: ReplicaMap, learned: Iterable[int], damaged: Mapping[int, Collection[PageRange]]
) -> tuple[ReplicaMap, list[ReplicaSet]]:
    """The map with those who have caught up and without damaged copies; and the runs of which no copy is good.

    Args:
        damaged: rank -> runs of which its copy is not what it had written.
    """
    found, alone = graduate(replicas, set(learned)), []
    for rank, runs in damaged.items():
        found, lost = disown(found, rank, runs)
        alone += lost
    return found, alone


def place_message(
    placement: Placement,
    addresses: Mapping[int, str],
    version: int,
    work: tuple[Recompute, ...] | None,
    validate: int,
    *,
    saves: bool,
    forgot: tuple[int, ...] = (),
) -> Reconfigure:
    """The PLACE of an epoch; arguments as its fields."""
    mesh = placement.mesh
    # Of the first epoch everybody has worked the replicas out alone, but only we know of several failure domains.
    known = not mesh.epoch and len({path for _, path in mesh.topology.domains}) == 1
    rows = to_rows(placement.replicas) if placement.replicas is not None and not known else ()
    of_mesh = mesh.stages, placement.layer_cuts, placement.microbatch_counts, dict(addresses)
    return Reconfigure(mesh.epoch, *of_mesh, rows, version, work, validate, saves, forgot)


def of_step(status: StepReport, step: int) -> StepHeld | None:
    """What a worker said of a step; None: it has nothing of it."""
    return next((held for held in status.held if held.step == step), None)


def layers_of(placement: Placement, rank: int) -> tuple[int, int]:
    """The layers [first, stop) of a worker's stage."""
    layers = placement.layers_of_stage(placement.mesh.stage_of(rank))
    return layers.start, layers.stop


def redone(work: tuple[Recompute, ...] | None, held: Mapping[int, StepHeld | None]) -> int:
    """Lines of a salvage plan that are not what their worker was to do anyway."""
    normal = {(rank, u) for rank, h in held.items() if h is not None for u in set(h.assigned) - set(h.computed)}
    return sum((line.worker, line.microbatch) not in normal for line in work or ())


def what_happens(
    gone: Mapping[int, str],
    leaving: Mapping[int, str],
    newcomers: Iterable[int],
    relinked: Mapping[frozenset[int], str],
) -> tuple[dict[int, str], dict[int, str]]:
    """Of each worker to which something happens in the new epoch: what ("fail", "leave", "join" or "link"), and why.

    Args:
        gone, leaving: rank -> reason.
        relinked: ends of links that are made again -> reason.
    """
    again = {pair: why for pair, why in relinked.items() if gone.keys().isdisjoint(pair)}
    ends = {rank: why for pair, why in again.items() for rank in pair}
    kinds = dict.fromkeys(ends, "link") | dict.fromkeys(gone, "fail") | dict.fromkeys(leaving, "leave")
    return kinds | dict.fromkeys(newcomers, "join"), {**ends, **gone, **leaving}


def too_few(num_staying: int, leaving: list[int], least: int) -> str:
    """Why a run stops when so many members stay, in words; empty: they are enough."""
    if num_staying >= least:
        return ""
    who = f"worker{'s' * (len(leaving) > 1)} {', '.join(map(str, leaving))} leave{'s' * (len(leaving) == 1)}, "
    stay = f"{who}{num_staying} stay" if leaving else f"{num_staying} workers are left"
    return f"{stay}, elastic.min_workers is {least}"
