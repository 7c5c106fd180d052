"""Partial-step recovery: which worker recomputes what of a step that was under way when the mesh changed.

`recovery_plan` is a pure function of the StepReports of the members and of the new placement. The controller calls it
once for each change of the mesh that finds a step under way.

**Covered.** A *contribution* is the gradient of one micro-batch u by one layer l. It goes into every page range r whose
gradient includes l: those of layer l itself, and those of parameters that l reads (ties). The contribution is *covered*
for r if, and only if,

1. a member that is a replica of r (not only a learner) under the new replica map reports the reduced gradient of r; or
2. a member, replica or not, reports a tree node with u, of use l, of r; or
3. a member that reports neither a tree nor a reduced gradient of r keeps a partial sum of layer l with u.

"Member" means a member of the new mesh. Reports name page ranges as older epochs cut them. "Of r" means of a range that
contains r, since ranges are only split while anything is under way. A range in a report may also be a part of r, if
ranges were joined since. Such a range does not count: its worker had nothing of the step when the ranges were joined,
and keeps no sums of its own.

In rule 3, a member with a tree of any use or with the reduced gradient is excluded, since it may have been the primary
of r. A primary's own sums of these pages are overwritten when it adds up its trees. A newly promoted primary reports
neither, so its own sums count. A mirror that has the reduced gradient is excluded as well, which costs anything only if
it is not a replica any more.

**What workers do for it.** A worker sends its StepReport between two layers, possibly in the middle of a micro-batch's
backward. From then until the next Reconfigure it drops nothing: neither sums nor boundary tensors, whether sent or
received and used. In the report, `page_sums` are the tree nodes of a primary, including its own sums that it has not
filed in its tree yet, and `layer_sums` are the partial sums of all other workers. A worker that hands page sums to
another primary goes on reporting them, or else does not report the layer sums that went into them. `forwarded` leaves
out micro-batches that are run only for the gradient of their input.

At Reconfigure all workers send what they have kept to where the new replica map and the plan need it: sums to primaries
(even if no line of the plan adds to them), reduced gradients to replicas, boundary tensors to the workers whose lines
take them. A primary passes on a reduced gradient that reaches it late. If a line has `forward` though the forward of
its micro-batch was reported, then the output of the stage is needed again.

**Recomputed.** A micro-batch that is not covered for some range and use of a stage is run there in full, by the member
that *claims* it: a member that regards it as its own, and whose stage has the same layers as before. Micro-batches that
no member claims are assigned evenly. The plan is complete: it also has the lines that a survivor would run anyway. So
workers that follow it, in any order, finish the step. A micro-batch may be assigned again to the worker that has
computed it already, if its sums were lost with a primary.

**Inputs.** Senders keep boundary tensors until the step is decided. So a tensor that no member reports as kept was lost
with its sender. A backward needs the gradient of its output. If no member keeps this, the next stage runs the
micro-batch too, but only for the gradient of its input unless more is missing there. Any forward, and any backward
without a saved forward, needs the activation from the stage before, which a member keeps or computes again.

**Put off.** A member may have done the backward of a micro-batch except for its weight gradients (`put_off`). If it
claims the micro-batch, only the weight gradients are left to compute there: the gradient of the output is not needed,
and the gradient of the input is kept. If another member claims it, or the member is lost, its forward and backward are
run again like any others that are missing.
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
"""Values of Recompute.backward; 0 is for none. With WEIGHTS_ONLY all but the weight gradients is done already."""


def recovery_plan(
    step: int,
    placement: Placement,
    layout: ModelLayout,
    partial_steps: Mapping[int, PartialStep | None],
    old_layers: Mapping[int, tuple[int, int]],
) -> tuple[Recompute, ...]:
    """The recovery plan of an interrupted step: everything that still has to be run of it, on the new mesh.

    Args:
        step: the step. `partial_steps` may report on no other one.
        placement: the placement of the new epoch. Its replica map says which worker needs which reduced gradient.
        layout: the pages of each layer.
        partial_steps: rank -> what this member has reported of the step. None, or no key, means that it has nothing.
            Ranks that are not members of the new mesh are ignored.
        old_layers: rank -> layers [first, stop) of the stage that the member was on when it reported.

    Returns:
        At most one line for each stage and micro-batch, in the order of stages and then of micro-batches. It is empty
        if everything is covered. If nothing was done and no worker is lost, it is the assignment of the placement. On a
        stage without parameters nothing has to be covered, so only what other stages need is run there.
    """
    reported = {rank: report for rank in placement.mesh.members if (report := partial_steps.get(rank)) is not None}
    assert all(report.step == step for report in reported.values()), (step, reported)
    survey = _Survey(placement, reported, old_layers)
    # Two passes over the stages. The first pass, from the first stage on, finds the backwards that are missing, and the
    # further backwards that they need on the next stage. The second pass, from the last stage on, finds the forwards
    # that these backwards need, on their stage and on the one before.
    levels = _backward_levels(survey, _missing_microbatches(placement, layout, reported))
    workers = [_assign(survey, stage, level, ()) for stage, level in enumerate(levels)]
    lines: deque[list[Recompute]] = deque()  # for each stage, its lines
    wanted: set[int] = set()  # micro-batches of which the next stage needs the output of this stage again
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
    """The recovery plan of a step that begins anew: all of it, as it is placed.

    Args:
        placement: the placement of the new epoch.
        all_at_version: True if all members have applied the step before. Then None is returned: members that get no
            plan run the step as it is placed.
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
        placement: the placement of the new epoch.
        reported: rank -> its report, for members that have something of the step.
        old_layers: as for `recovery_plan`.
    """

    placement: Placement
    reported: Mapping[int, PartialStep]
    old_layers: Mapping[int, tuple[int, int]]

    @cached_property
    def _keepers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, its members that have something of the step and whose layers are as before, by rank.

        What other members have run went through other layers than those of their new stage, so it is of no use there.
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
        """For each stage: micro-batch -> the members that claim it, lowest rank first."""
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
        """For each stage: micro-batch -> a member that claims it and has only its weight gradients left to compute."""
        found = []
        for keepers, claims in zip(self._keepers, self.claims, strict=True):
            able = [rank for rank in reversed(keepers) if self.reported[rank].put_off]
            found.append({u: rank for rank in able for u in self.reported[rank].put_off if rank in claims.get(u, ())})
        return tuple(found)

    @cached_property
    def _gradients(self) -> Mapping[int, set[int]]:
        """Layer -> micro-batches of which a member keeps the activation gradient that goes to this layer."""
        return _by_layer(at for report in self.reported.values() for at in report.gradients)

    @cached_property
    def _activations(self) -> Mapping[int, set[int]]:
        """Layer -> micro-batches of which a member keeps the activation that goes to this layer."""
        return _by_layer(at for report in self.reported.values() for at in report.activations)

    def without_gradient(self, stage: int, microbatches: Iterable[int]) -> list[int]:
        """Those of the micro-batches whose output gradient no member keeps. The last stage computes its own."""
        if stage == self.placement.num_stages - 1:
            return []
        kept = self._gradients.get(self.placement.layer_cuts[stage + 1] - 1, ())
        return [u for u in microbatches if u not in kept]

    def without_activation(self, stage: int, microbatches: Iterable[int]) -> set[int]:
        """Those of the micro-batches whose input for the stage no member keeps. The first stage reads the data."""
        if stage == 0:
            return set()
        return set(microbatches).difference(self._activations.get(self.placement.layer_cuts[stage], ()))


def _by_layer(places: Iterable[tuple[int, int]]) -> Mapping[int, set[int]]:
    """Layer -> its micro-batches, from pairs (layer, micro-batch)."""
    found: dict[int, set[int]] = defaultdict(set)
    for layer, microbatch in places:
        found[layer].add(microbatch)
    return found


# ---- what is missing


def _missing_microbatches(
    placement: Placement, layout: ModelLayout, reported: Mapping[int, PartialStep]
) -> list[list[int]]:
    """For each stage, ascending: the micro-batches that are not covered (see the module) for some range and use."""
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
            nobody = everything & ~everybody  # in no partial sum: only trees can have these micro-batches
            for pages in _ranges_of_use(layout, replica_map, layer):
                if missing == everything:
                    break
                key = pages.key
                if layer not in tied and key not in reports.special:
                    # The members that rule 3 excludes have all of their sums in their trees, so excluding them makes no
                    # difference here.
                    if nobody & ~missing:
                        missing |= nobody & ~in_trees.get(key, 0)
                    continue
                with_reduced = reports.with_reduced.get(key, frozenset[int]())
                if not pages.replicas.isdisjoint(with_reduced):
                    continue  # rule 1 of the module: a replica has the whole sum
                excluded = with_reduced | reports.with_tree.get(key, frozenset[int]())
                usable = everybody  # this holds for most ranges, so the set is computed anew only if it has to be
                if not local.keys().isdisjoint(excluded):
                    usable = _without(excluded, local, everybody, twice)
                missing |= everything & ~(usable | in_trees.get(key, 0))
        found.append(_microbatches_in(missing))
    return found


def _together(masks: Iterable[int]) -> tuple[int, int]:
    """(the micro-batches in at least one of these masks, those in two or more), as masks."""
    once = twice = 0
    for mask in masks:
        twice |= once & mask
        once |= mask
    return once, twice


def _without(excluded: Collection[int], local: Mapping[int, int], everybody: int, twice: int) -> int:
    """The micro-batches in the masks of all members that are not excluded.

    Nearly always, only one member has a micro-batch. Then the result follows without a look at the many other masks.

    Args:
        excluded: the members that are left out.
        local: member -> mask.
        everybody: the micro-batches of at least one member, as in `_together`.
        twice: the micro-batches of two or more members.
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
        reported: member -> its report.
        ranges: the page ranges of the new map.
        sums: layer -> member -> micro-batches in its partial sums of the layer; without members that have none.
        in_trees: use -> page range -> micro-batches in nodes of trees that members report.
        special: the page ranges for which rule 3 has to look at single members: those with a reduced gradient, those
            with a tree of another use, and those with a tree that lacks a partial sum of the same member.
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
        """Page range -> members that have a tree of it, for any use."""
        return self._members_by_range((rank, row[:3]) for rank, part in self.reported.items() for row in part.page_sums)

    def _members_by_range(self, rows: Iterable[tuple[int, PageRange]]) -> Mapping[PageRange, Set[int]]:
        found: dict[PageRange, set[int]] = defaultdict(set)
        for rank, pages in rows:
            for key in self.ranges.inside(*pages):
                found[key].add(rank)
        return found


class _Masks(dict[tuple[Node, ...], int]):
    """Tree nodes -> their micro-batches as bits. A cache, as a member reports the same nodes for all of its layers."""

    def __missing__(self, tree_nodes: tuple[Node, ...]) -> int:
        mask = 0
        for lo, hi in tree_nodes:
            mask |= ((1 << (hi - lo)) - 1) << lo
        self[tree_nodes] = mask
        return mask


@dataclass(frozen=True)
class _Ranges:
    """Finds the page ranges of the new map by those that reports name, which may be cut as in an older epoch."""

    replica_map: ReplicaMap

    @cached_property
    def of_layers(self) -> Mapping[int, LayerReplicas]:
        """Layer -> its page ranges, as `LayerReplicas`."""
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
    """For each stage: micro-batch -> how much of its backward has to be run.

    FULL or WEIGHTS_ONLY if its contribution is missing, INPUT_GRADIENT if only the stage before needs it. Stages are
    handled from the first to the last: a backward whose output gradient no member keeps needs a backward of the same
    micro-batch on the next stage.
    """
    levels: list[dict[int, int]] = []
    needed: Iterable[int] = ()  # micro-batches whose input gradient of this stage the stage before needs
    for stage, microbatches in enumerate(missing):
        level: dict[int, int] = dict.fromkeys(needed, INPUT_GRADIENT)
        for u in microbatches:
            # If the stage before needs the input gradient as well (`u in level`), a full backward computes both.
            level[u] = WEIGHTS_ONLY if u in survey.put_off[stage] and u not in level else FULL
        levels.append(level)
        needed = survey.without_gradient(stage, (u for u, of in level.items() if of != WEIGHTS_ONLY))
    return levels


def _assign(survey: _Survey, stage: int, microbatches: Collection[int], busy: Iterable[int]) -> dict[int, int]:
    """Assign micro-batches of a stage to workers: each to the first member that claims it, if there is one.

    The others are assigned so that all members get equally many lines, as far as possible. This is done in the order of
    the placement, so that in contiguous order neighbours in the tree stay together. Blocks for hosts are not made here.

    Args:
        survey: the reports.
        stage: the stage.
        microbatches: the micro-batches to assign.
        busy: for each line that the stage has already, the rank of its worker.
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
    """Distribute `more` items, one after another, each to the position with the smallest load; ties go to the first.

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
