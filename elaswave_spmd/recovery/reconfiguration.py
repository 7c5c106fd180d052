"""What the next mesh epoch is made of: pure functions of the placement before it and of what members have said."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery.decide import Stages, deal_evenly, disown, graduate
from elaswave_spmd.recovery.messages import Place, Status, StepHeld, Work
from elaswave_spmd.scheduling.partition import balance_layers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.redeal import redeal
from elaswave_spmd.sharding.layout import INTERLEAVED, ModelLayout
from elaswave_spmd.sharding.replica_rebalance import refill
from elaswave_spmd.sharding.replicas import HolderMap, HolderRun, RunKey, to_rows


@dataclass(frozen=True)
class Goal:
    """Where units, layers and workers are to be, of the members that there are: fields as in `Placement`. And why.

    `blocking`: training stands still while state is learned there.
    """

    stages: Stages
    layer_cuts: tuple[int, ...]
    unit_counts: tuple[tuple[int, ...], ...]
    why: str = ""
    blocking: bool = False


def next_placement(
    old: Placement,
    layout: ModelLayout,
    epoch: int,
    stages: Stages,
    domain_of: Callable[[int], Path | None],
    deal: Callable[[Stages, int], tuple[tuple[int, ...], ...]] = deal_evenly,
) -> Placement:
    """The placement on these stages, without holders.

    Layers stay where they are unless the number of stages changes, and units unless members have changed.

    Args:
        domain_of: the failure domains of a newcomer; None: those of all the others.
        deal: (stages, number of units) -> the units of each worker, by stage.
    """
    ranks = [rank for members in stages for rank in members if rank not in old.mesh.topology]
    domains = {rank: path for rank in ranks if (path := domain_of(rank)) is not None}
    mesh = replace(old.mesh.with_stages(stages, domains or None), epoch=epoch)
    cuts = old.layer_cuts
    if len(stages) != old.num_stages:
        costs = [max(1.0, float(layer.num_value_elements)) for layer in layout.layers]
        cuts = balance_layers(costs, [len(members) for members in stages])
    counts = old.unit_counts if stages == old.mesh.stages else deal(stages, old.num_units)
    return replace(old, mesh=mesh, layer_cuts=cuts, unit_counts=counts, holders=None)


def placement_at(goal: Goal | None, placement: Placement) -> Placement:
    """The same epoch with units, layers and workers where they are to be, without holders. No goal: as it is."""
    if goal is None:
        return placement
    mesh = placement.mesh if goal.stages == placement.mesh.stages else placement.mesh.with_stages(goal.stages)
    mesh = replace(mesh, epoch=placement.mesh.epoch)
    return replace(placement, mesh=mesh, layer_cuts=goal.layer_cuts, unit_counts=goal.unit_counts, holders=None)


def target_of(aim: Placement, current: HolderMap, layout: ModelLayout, mirror_count: int, scatter: int) -> HolderMap:
    """The holders to go to for a placement, from those that there are."""
    deal = refill if aim.page_layout == INTERLEAVED else partial(redeal, page_layout=aim.page_layout)
    return deal(
        current,
        layout,
        aim.mesh.stages,
        aim.layer_cuts,
        replicated=not aim.shardings.optim.axes,
        topology=aim.mesh.topology,
        mirror_count=mirror_count,
        scatter=scatter,
    )


def good_holders(
    holders: HolderMap, learned: Iterable[int], damaged: Mapping[int, Collection[RunKey]]
) -> tuple[HolderMap, list[HolderRun]]:
    """The map with those who have caught up and without damaged copies; and the runs of which no copy is good.

    Args:
        damaged: rank -> runs of which its copy is not what it had written.
    """
    found, alone = graduate(holders, set(learned)), []
    for rank, runs in damaged.items():
        found, lost = disown(found, rank, runs)
        alone += lost
    return found, alone


def place_message(
    placement: Placement,
    addresses: Mapping[int, str],
    version: int,
    work: tuple[Work, ...] | None,
    validate: int,
    *,
    saves: bool,
    pauses: bool,
    forgot: tuple[int, ...] = (),
) -> Place:
    """The PLACE of an epoch; arguments as its fields."""
    mesh = placement.mesh
    # Of the first epoch everybody has worked the holders out alone, but only we know of several failure domains.
    known = not mesh.epoch and len({path for _, path in mesh.topology.domains}) == 1
    rows = to_rows(placement.holders) if placement.holders is not None and not known else ()
    of_mesh = mesh.stages, placement.layer_cuts, placement.unit_counts, dict(addresses)
    return Place(mesh.epoch, *of_mesh, rows, version, work, validate, saves, pauses, forgot)


def of_step(status: Status, step: int) -> StepHeld | None:
    """What a worker said of a step; None: it has nothing of it."""
    return next((held for held in status.held if held.step == step), None)


def layers_of(placement: Placement, rank: int) -> tuple[int, int]:
    """The layers [first, stop) of a worker's stage."""
    layers = placement.layers_of_stage(placement.mesh.stage_of(rank))
    return layers.start, layers.stop


def redone(work: tuple[Work, ...] | None, held: Mapping[int, StepHeld | None]) -> int:
    """Lines of a salvage plan that are not what their worker was to do anyway."""
    normal = {(rank, u) for rank, h in held.items() if h is not None for u in set(h.assigned) - set(h.computed)}
    return sum((line.worker, line.unit) not in normal for line in work or ())


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
