"""How much state a change of the mesh makes move, and the least that it could: pure functions of holder maps."""

from __future__ import annotations

from itertools import pairwise

from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import HolderMap, HolderRun, all_runs


def moved_elements(holders: HolderMap, layout: ModelLayout) -> int:
    """Elements of the pages that learners get, one kind of state, once for each learner. The loss page is no state.

    Promoting a mirror moves nothing.
    """
    return sum(_elements(run, layout) * len(run.learners) for run in all_runs(holders) if run.learners)


def least_elements(holders: HolderMap, target: Placement, layout: ModelLayout) -> int:
    """Lower bound for `moved_elements`, for any map that gives pages as many holders and primaries as even a share.

    The larger one of two: the holders that each page lacks by number, whoever they are; and what the members lack of
    their share as primaries.

    Args:
        holders: of the new mesh epoch, with learners.
        target: what they learn for; its holders are those on the same runs when all have caught up.
    """
    assert target.holders is not None
    missing = 0
    for layer, runs in holders.items():
        for now, then in zip(runs, target.holders[layer], strict=True):
            if len(then.holders) > len(now.holders):
                missing += _elements(now, layout) * (len(then.holders) - len(now.holders))
    return max(missing, _missing_shares(target, holders, layout))


def _missing_shares(target: Placement, holders: HolderMap, layout: ModelLayout) -> int:
    """A member is to be the primary of as many pages of its stage as the others, within one, and so to hold them.

    Which pages it would get is open; the last one of a block may be short. So it gets the smallest.
    """
    found = 0
    for members, (first, stop) in zip(target.mesh.stages, pairwise(target.layer_cuts), strict=True):
        blocks = [block for layer in range(first, stop) for block in layout.layers[layer].state_blocks]
        share = sum(block.num_pages for block in blocks) // len(members)
        last = sorted(b.stop - b.start - (b.num_pages - 1) * layout.page_size for b in blocks)
        held = dict.fromkeys(members, 0)
        for run in (run for layer in range(first, stop) for run in holders[layer] if not _is_loss(run, layout)):
            for rank in run.holders & held.keys():
                held[rank] += run.num_pages
        for missing in (share - num_pages for num_pages in held.values() if num_pages < share):
            found += sum(last[:missing]) + max(0, missing - len(last)) * layout.page_size
    return found


def _elements(run: HolderRun, layout: ModelLayout) -> int:
    if _is_loss(run, layout):
        return 0
    start, stop = layout.layers[run.layer].span(run.first, run.stop)
    return stop - start


def _is_loss(run: HolderRun, layout: ModelLayout) -> bool:
    return layout.layers[run.layer].block_of(run.first).kind == LOSS
