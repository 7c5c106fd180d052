"""What the mesh becomes when workers go or come: pure functions of the mesh and the event."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from elaswave_spmd.scheduling.placement import even_counts
from elaswave_spmd.sharding.replicas import HolderMap, HolderRun, all_runs

Stages = tuple[tuple[int, ...], ...]


def deal_evenly(stages: Stages, num_units: int) -> tuple[tuple[int, ...], ...]:
    """The units of each worker, by stage, when all are equally fast."""
    return tuple(even_counts(num_units, len(members)) for members in stages)


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


def graduate(holders: HolderMap, learned: Collection[int]) -> HolderMap:
    """The map in which these learners, who have caught up, are holders. Primaries stay."""

    def after(layer: int) -> tuple[HolderRun, ...]:
        return tuple(
            replace(run, holders=run.holders | ready, learners=run.learners - ready)
            if (ready := run.learners & frozenset(learned))
            else run
            for run in holders[layer]
        )

    return {layer: after(layer) for layer in holders}


def disown(holders: HolderMap, rank: int, runs: Collection[tuple[int, int, int]]) -> tuple[HolderMap, list[HolderRun]]:
    """The map in which a worker does not hold these runs any more, and the runs that nobody else holds.

    Where it was the primary, a mirror becomes the primary.
    """

    def hit(run: HolderRun) -> bool:
        return any(run.layer == ly and first <= run.first and run.stop <= stop for ly, first, stop in runs)

    found: dict[int, tuple[HolderRun, ...]] = {}
    homeless: list[HolderRun] = []
    for layer, of_layer in holders.items():
        kept = []
        for run in of_layer:
            left = run.holders - {rank}
            if rank in run.holders and hit(run):
                if left:
                    run = replace(run, primary=min(left) if run.primary == rank else run.primary, holders=left)
                else:
                    homeless.append(run)
            kept.append(run)
        found[layer] = tuple(kept)
    return found, homeless


def dispensable(holders: HolderMap, gone: Collection[int], leaving: Iterable[int]) -> tuple[int, ...]:
    """Those of `leaving` who may go at once, without `gone`: every page that has a holder keeps one."""
    left = {run.holders.difference(gone) for run in all_runs(holders)} - {frozenset()}
    found = []
    for rank in leaving:
        without = {held - {rank} for held in left}
        if frozenset() not in without:
            found.append(rank)
            left = without
    return tuple(found)
