"""Partial-step recovery: which worker recomputes what of a step that was under way when the mesh changed.

`recovery_plan` is a pure function of the StepReports of the members and of the new placement. The controller calls it
once for each change of the mesh that finds a step under way.

**Covered.** A contribution is the gradient of one micro-batch u by one layer l. It goes into every page range r whose
gradient includes l: those of layer l itself, and those of parameters that l reads (ties). It is covered for r if, and
only if,

1. a member that is a replica of r (no learner) under the new replica map reports the reduced gradient of r; or
2. a member, replica or not, reports a tree node with u, of use l, of r; or
3. a member that reports neither a tree nor a reduced gradient of r keeps a partial sum of layer l with u.

Members are those of the new mesh. Reports name page ranges of older epochs: "of r" means of a range that contains r,
since ranges are split while anything is under way. A name from before ranges were joined may be of a part of r alone:
that does not count. Whoever reports by such names had nothing of the step then, and keeps no sums of its own. In 3 a
tree of any use, or a reduced gradient, excludes the member: it may have been the primary of r, whose own sums of these
pages are overwritten as its trees are added up. A newly promoted primary reports neither, and uses its own sums. A
mirror that has the reduced gradient is excluded without need only if it is no replica any more.

**What workers do for it.** A StepReport is given between two layers, which may be in the middle of a micro-batch's
backward. From then until the next Reconfigure nothing is dropped: sums, boundary tensors sent, those received and used.
The report's `page_sums` are the tree nodes of a primary, its own sums that it has not filed yet among them; its
`layer_sums` are the partial sums of the others. A worker that hands page sums to another primary goes on reporting
them, or reports no layer sum that went into them. `forwarded` leaves out micro-batches that are run for their input's
gradient only. At Reconfigure all workers send what they have kept to where the new replica map and the plan want it:
sums to primaries, including those that no line completes, reduced gradients to replicas, boundary tensors to the
workers whose lines take them. A primary passes on a reduced gradient that reaches it late. `forward` in the line of a
micro-batch whose forward was reported means that its output is needed again.

**Recomputed.** A micro-batch that is not covered for some range and use of a stage is run there in full, by the member
that claims it: one that regards it as its own, and whose stage has the layers that it had. Micro-batches that no member
claims are assigned evenly. The plan also names what a survivor would do anyway, so that it is complete: whoever follows
it, in any order, finishes the step. A micro-batch may come again to the worker that has computed it, if its sums were
lost with a primary.

**Inputs.** Senders keep boundary tensors until the step is decided, so whatever no member reports as kept was lost
with its sender. A backward needs the gradient of its output. If no member keeps it, the next stage runs the
micro-batch too, for its input's gradient only if nothing else of it is missing there. A backward without a saved
forward, and any forward, needs the activation from the stage before: kept by a member, or computed again.

**Put off.** A member may have done the backward of a micro-batch but for its weight gradients (`put_off`). If it claims
the micro-batch, that is all that is left of it there: no gradient of the output is needed, and the gradient of the
input is kept. Otherwise, and if the member is lost, forward and backward are run again like any that are missing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain, islice, takewhile
from operator import or_

from elaswave_spmd.determinism.reduction_tree import Node
from elaswave_spmd.recovery.messages import PartialStep, Recompute
from elaswave_spmd.scheduling.placement import Placement, workers_of_microbatches
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import LayerReplicas, PageRange, ReplicaMap, ReplicaSet, ranges_of

INPUT_GRADIENT, FULL, WEIGHTS_ONLY = 1, 2, 3
"""Values of Recompute.backward; 0 is none. WEIGHTS_ONLY: the backward is done but for the weight gradients."""


def recovery_plan(
    step: int,
    placement: Placement,
    layout: ModelLayout,
    partial_steps: Mapping[int, PartialStep | None],
    old_layers: Mapping[int, tuple[int, int]],
) -> tuple[Recompute, ...]:
    """The recovery plan of an interrupted step: everything of it that is still to run, on the new mesh.

    Args:
        step: the step, the only one that `partial_steps` may report on.
        placement: of the new epoch; its replica map says which worker needs which reduced gradient.
        layout: the pages.
        partial_steps: rank -> what that member reported of the step; None, or no key: it has nothing. Ranks that are no
            members of the new mesh are ignored.
        old_layers: rank -> layers [first, stop) of the stage that it was on when it reported.

    Returns:
        At most one line per stage and micro-batch, in that order; empty if everything is covered. If nothing was done
        and no worker is lost, it is the assignment of the placement. A stage without parameters has nothing to cover:
        only what other stages need of it is run.
    """
    reported = {rank: report for rank in placement.mesh.members if (report := partial_steps.get(rank)) is not None}
    assert all(report.step == step for report in reported.values()), (step, reported)
    survey = _Survey(placement, reported, old_layers)
    # Two passes over the stages. From the first to the last: which backwards are missing, and which further ones they
    # need of the next stage. From the last to the first: which forwards these need of the stage before.
    levels = _backward_levels(survey, _missing_microbatches(placement, layout, reported))
    workers = [_assign(survey, stage, level, ()) for stage, level in enumerate(levels)]
    lines: deque[list[Recompute]] = deque()  # by stage
    wanted: set[int] = set()  # micro-batches whose output of this stage the next stage needs again
    for stage in reversed(range(placement.num_stages)):
        level, worker = levels[stage], workers[stage]
        worker |= _assign(survey, stage, wanted - level.keys(), worker.values())
        found = []
        for u, rank in sorted(worker.items()):
            backward = level.get(u, 0)
            saved = backward == WEIGHTS_ONLY or u in survey.forwards[rank]
            found.append(Recompute(stage, u, rank, u in wanted or not saved, backward))
        lines.appendleft(found)
        wanted = survey.without_activation(stage, (line.microbatch for line in found if line.forward))
    assert not wanted, "the first stage takes data, not activations"
    return tuple(chain.from_iterable(lines))


def whole_step(placement: Placement, all_at_version: bool) -> tuple[Recompute, ...] | None:
    """The plan of a step that begins anew on a placement: all of it, as it is placed.

    Args:
        all_at_version: all members are at the version before: then no plan is needed, and it runs as placed.
    """
    if all_at_version:
        return None
    return tuple(
        Recompute(stage, microbatch, placement.worker_of_microbatch(stage, microbatch), True, FULL)
        for stage in range(placement.num_stages)
        for microbatch in range(placement.num_microbatches)
    )


@dataclass(frozen=True)
class _Survey:
    """The reports of all members, by stage and micro-batch of the new placement.

    Args:
        reported: rank -> its report, of members that have something of the step.
        old_layers: as for `recovery_plan`.
    """

    placement: Placement
    reported: Mapping[int, PartialStep]
    old_layers: Mapping[int, tuple[int, int]]

    @cached_property
    def _keepers(self) -> tuple[tuple[int, ...], ...]:
        """Per stage the members that have something of the step and kept their layers, lowest rank first.

        A micro-batch that went through other layers than those of the new stage is of no use to it.
        """
        found = []
        for stage, members in enumerate(self.placement.mesh.stages):
            layers = self.placement.layers_of_stage(stage)
            same, before = (layers.start, layers.stop), self.old_layers
            found.append(tuple(rank for rank in sorted(self.reported.keys() & members) if before.get(rank) == same))
        return tuple(found)

    @cached_property
    def forwards(self) -> Mapping[int, Collection[int]]:
        """Member -> the micro-batches of which it has a saved forward through all layers of its stage."""
        found: dict[int, Collection[int]] = {rank: () for rank in self.placement.mesh.members}
        for rank in chain.from_iterable(self._keepers):
            if forwarded := self.reported[rank].forwarded:
                found[rank] = frozenset(forwarded)
        return found

    @cached_property
    def claims(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """Per stage: micro-batch -> the members that claim it, lowest rank first."""
        found = []
        for keepers in self._keepers:
            claims: dict[int, tuple[int, ...]] = {}
            for rank in keepers:
                for microbatch in self.reported[rank].assigned:
                    claims[microbatch] = (*claims.get(microbatch, ()), rank)
            found.append(claims)
        return tuple(found)

    @cached_property
    def put_off(self) -> tuple[Mapping[int, int], ...]:
        """Per stage: micro-batch -> a member that claims it and has nothing left of it but its weight gradients."""
        found = []
        for keepers, claims in zip(self._keepers, self.claims, strict=True):
            able = [rank for rank in reversed(keepers) if self.reported[rank].put_off]
            found.append({u: rank for rank in able for u in self.reported[rank].put_off if rank in claims.get(u, ())})
        return tuple(found)

    @cached_property
    def _gradients(self) -> Mapping[int, set[int]]:
        """Layer -> micro-batches of which somebody keeps the gradient that goes there."""
        return _by_layer(at for report in self.reported.values() for at in report.gradients)

    @cached_property
    def _activations(self) -> Mapping[int, set[int]]:
        """Layer -> micro-batches of which somebody keeps the activation that goes there."""
        return _by_layer(at for report in self.reported.values() for at in report.activations)

    def without_gradient(self, stage: int, microbatches: Iterable[int]) -> list[int]:
        """The micro-batches whose backward on the stage lacks its output gradient; the last stage makes its own."""
        if stage == self.placement.num_stages - 1:
            return []
        kept = self._gradients.get(self.placement.layer_cuts[stage + 1] - 1, ())
        return [u for u in microbatches if u not in kept]

    def without_activation(self, stage: int, microbatches: Iterable[int]) -> set[int]:
        """The micro-batches whose forward on the stage does not find its input; the first stage has the data."""
        if stage == 0:
            return set()
        return set(microbatches).difference(self._activations.get(self.placement.layer_cuts[stage], ()))


def _by_layer(places: Iterable[tuple[int, int]]) -> Mapping[int, set[int]]:
    """Layer -> micro-batches, of pairs of them."""
    found: dict[int, set[int]] = defaultdict(set)
    for layer, microbatch in places:
        found[layer].add(microbatch)
    return found


# ---- what is missing


def _missing_microbatches(
    placement: Placement, layout: ModelLayout, reported: Mapping[int, PartialStep]
) -> list[list[int]]:
    """Per stage the micro-batches that are not covered (see the module) for some page range and use, ascending."""
    replica_map = placement.replica_map(layout)
    reports = _Reports.of(replica_map, reported)
    tied = {layer for (owner, _), readers in layout.readers.items() for layer in (owner, *(at for at, _ in readers))}
    everything = (1 << placement.num_microbatches) - 1
    found = []
    for stage in range(placement.num_stages):
        missing = 0
        for layer in placement.layers_of_stage(stage):
            local, in_trees = reports.sums.get(layer, {}), reports.in_trees.get(layer, {})
            everybody, twice = _together(local.values())
            nobody = everything & ~everybody  # micro-batches that trees alone can have
            for pages in _ranges_of_use(layout, replica_map, layer):
                if missing == everything:
                    break
                key = pages.key
                if layer not in tied and key not in reports.special:
                    # Whoever is excluded has all of its sums in its tree: so it makes no difference.
                    if nobody & ~missing:
                        missing |= nobody & ~in_trees.get(key, 0)
                    continue
                with_reduced = reports.with_reduced.get(key, frozenset[int]())
                if not pages.replicas.isdisjoint(with_reduced):
                    continue  # rule 1 of the module: a replica has the whole sum
                excluded = with_reduced | reports.with_tree.get(key, frozenset[int]())
                usable = everybody  # the same for most ranges, so it is not computed again for each
                if not local.keys().isdisjoint(excluded):
                    usable = _without(excluded, local, everybody, twice)
                missing |= everything & ~(usable | in_trees.get(key, 0))
        found.append(_microbatches_in(missing))
    return found


def _together(masks: Iterable[int]) -> tuple[int, int]:
    """The micro-batches of any of these masks, and those of two or more."""
    once = twice = 0
    for mask in masks:
        twice |= once & mask
        once |= mask
    return once, twice


def _without(excluded: Collection[int], local: Mapping[int, int], everybody: int, twice: int) -> int:
    """The micro-batches in the masks of all but the excluded.

    Nearly always only one member has a micro-batch, so that the masks of the many others need not be looked at.

    Args:
        local: member -> mask.
        everybody, twice: the micro-batches of any member, and of two or more.
    """
    theirs = 0
    for rank in excluded:
        theirs |= local.get(rank, 0)
    if theirs & twice:
        return reduce(or_, (mask for rank, mask in local.items() if rank not in excluded), 0)
    return everybody & ~theirs


def _ranges_of_use(layout: ModelLayout, replica_map: ReplicaMap, layer: int) -> Iterator[ReplicaSet]:
    """The page ranges whose gradient includes that of a layer: its own, and those of parameters that it reads.

    Frozen pages have no gradient, so nothing of them can be missing.
    """
    own = layout.layers[layer]
    yield from (pages for pages in replica_map[layer] if not (layout.frozen and own.is_frozen(pages.first)))
    for block in (block for block in own.reader_blocks if not block.frozen):
        assert block.source is not None
        owner, first = block.source
        yield from (pages for pages in replica_map[owner] if first <= pages.first < first + block.num_pages)


@dataclass(frozen=True)
class _Reports:
    """The sums and reduced gradients that members report, by layer and by page range of the new map.

    Sets of micro-batches are bit masks: a step of a large job has thousands of micro-batches and ranges.

    Args:
        sums: layer -> member -> micro-batches in its partial sums of the layer, of those that have any.
        in_trees: use -> page range -> micro-batches in nodes of trees.
        special: the page ranges with a reduced gradient, or with a tree that lacks a sum of its member of the layer.
    """

    reported: Mapping[int, PartialStep]
    ranges: _Ranges
    sums: Mapping[int, Mapping[int, int]]
    in_trees: Mapping[int, Mapping[PageRange, int]]
    special: Set[PageRange]

    @classmethod
    def of(cls, replica_map: ReplicaMap, reported: Mapping[int, PartialStep]) -> _Reports:
        sums: dict[int, dict[int, int]] = defaultdict(dict)
        in_trees: dict[int, dict[PageRange, int]] = defaultdict(dict)
        ranges, special, mask_of = _Ranges(replica_map), set[PageRange](), _Masks()
        for rank, report in reported.items():
            for layer, tree_nodes in report.layer_sums.items():
                if tree_nodes:
                    sums[layer][rank] = mask_of[tree_nodes]
            for layer, first, stop, use, tree_nodes in report.page_sums:
                mask, trees, inside = mask_of[tree_nodes], in_trees[use], ranges.inside(layer, first, stop)
                for key in inside:
                    trees[key] = trees.get(key, 0) | mask
                if use != layer or sums[use].get(rank, 0) & ~mask:
                    special.update(inside)
            for pages in report.reduced:
                special.update(ranges.inside(*pages))
        return cls(reported, ranges, sums, in_trees, special)

    @cached_property
    def with_reduced(self) -> Mapping[PageRange, Set[int]]:
        """Page range -> members that have its reduced gradient."""
        return self._members_by_range((rank, pages) for rank, part in self.reported.items() for pages in part.reduced)

    @cached_property
    def with_tree(self) -> Mapping[PageRange, Set[int]]:
        """Page range -> members that have a tree of it, of any use."""
        return self._members_by_range((rank, row[:3]) for rank, part in self.reported.items() for row in part.page_sums)

    def _members_by_range(self, rows: Iterable[tuple[int, PageRange]]) -> Mapping[PageRange, Set[int]]:
        found: dict[PageRange, set[int]] = defaultdict(set)
        for rank, pages in rows:
            for key in self.ranges.inside(*pages):
                found[key].add(rank)
        return found


class _Masks(dict[tuple[Node, ...], int]):
    """Tree nodes -> their micro-batches as bits. Members report the same nodes of all their layers."""

    def __missing__(self, tree_nodes: tuple[Node, ...]) -> int:
        mask = 0
        for lo, hi in tree_nodes:
            mask |= ((1 << (hi - lo)) - 1) << lo
        self[tree_nodes] = mask
        return mask


@dataclass(frozen=True)
class _Ranges:
    """The page ranges of a map, by those of older epochs, which reports name: they may be others since."""

    replica_map: ReplicaMap

    @cached_property
    def of_layers(self) -> Mapping[int, LayerReplicas]:
        """The page ranges of each layer, with what is known about them."""
        return {layer: ranges_of(self.replica_map, layer) for layer in self.replica_map}

    def inside(self, layer: int, first: int, stop: int) -> Sequence[PageRange]:
        """The page ranges, in page order, that lie within pages [first, stop) of a layer."""
        ranges, key = self.of_layers[layer], (layer, first, stop)
        if key in ranges.keys:
            return (key,)
        start = bisect_left(ranges, first, key=lambda pages: pages.first)
        return [pages.key for pages in takewhile(lambda pages: pages.stop <= stop, islice(ranges, start, None))]


def _microbatches_in(mask: int) -> list[int]:
    return [microbatch for microbatch, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


# ---- which worker runs it


def _backward_levels(survey: _Survey, missing: Sequence[Iterable[int]]) -> list[dict[int, int]]:
    """Per stage: micro-batch -> FULL if its contribution is missing, INPUT_GRADIENT if only the stage before needs it.

    In the order of stages: a backward whose output gradient is not kept anywhere needs a backward of the same
    micro-batch on the next stage.
    """
    levels: list[dict[int, int]] = []
    needed: Iterable[int] = ()  # micro-batches whose input gradient of this stage the stage before needs
    for stage, microbatches in enumerate(missing):
        level: dict[int, int] = dict.fromkeys(needed, INPUT_GRADIENT)
        for u in microbatches:
            level[u] = WEIGHTS_ONLY if u in survey.put_off[stage] and u not in level else FULL  # FULL gives both
        levels.append(level)
        needed = survey.without_gradient(stage, (u for u, of in level.items() if of != WEIGHTS_ONLY))
    return levels


def _assign(survey: _Survey, stage: int, microbatches: Collection[int], busy: Iterable[int]) -> dict[int, int]:
    """Assign micro-batches of a stage to workers: each to its first claimer, the others so that all get as many lines.

    Unclaimed micro-batches are assigned in the placement's order, so that neighbours in the tree stay together where it
    is contiguous. Hosts do not count here.

    Args:
        busy: a rank for each line that the stage has already.
    """
    members, claims = survey.placement.mesh.stages[stage], survey.claims[stage]
    found = {microbatch: claims[microbatch][0] for microbatch in microbatches if microbatch in claims}
    found |= {microbatch: rank for microbatch, rank in survey.put_off[stage].items() if microbatch in found}
    rest = sorted(set(microbatches) - found.keys())
    num_lines = dict.fromkeys(members, 0)
    for rank in (*busy, *found.values()):
        num_lines[rank] += 1
    counts = _fill(list(num_lines.values()), len(rest))
    return found | dict(
        zip(rest, workers_of_microbatches(members, counts, survey.placement.microbatch_order), strict=True)
    )


def _fill(loads: Sequence[int], more: int) -> list[int]:
    """Distribute `more` items: one after another to the position of the smallest load, ties by position.

    Returns:
        The number of items that each position gets.
    """
    counts = [0] * len(loads)
    heap = [(load, position) for position, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(more):
        load, position = heap[0]
        counts[position] += 1
        heapq.heapreplace(heap, (load + 1, position))
    return counts
