"""The reshard plan: what happens to every page of optimizer state when the mesh, the specs or the replicas change.

A plan is a value, computed by one pure function from (the present replicas, the workers that are lost) and (the new
mesh and specs). Everything that moves state follows a plan: promotion after a loss, new mirrors, a newcomer's share,
layers that move to another stage, the reading of a checkpoint on another mesh. (To choose among thousands of
partitions, `scheduling.stage_search` has a closed form for the bytes of plans that are never made.)

For each page range a plan has some of these:

    promotion   the primary is lost; a mirror becomes the primary in place, without a byte being moved
    copy        the range's primary sends its state to a learner, a worker that becomes a replica (the learner of Raft,
                Ongaro and Ousterhout, 2014: it gets reduced gradients from the start, and the state in the background)
    hand-over   when all copies are complete, another replica becomes the primary, without a byte being moved
    drop        when all copies are complete, a worker gives up its replica
    lost        no replica is left: only a checkpoint helps

So a plan takes two changes of the mesh epoch. The first one makes `during` the replica map, at once; the second one
makes it `after`, when all copies are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from elaswave_spmd.mesh.mesh import format_ints, shortened_workers
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replica_rebalance import rebalance_replicas
from elaswave_spmd.sharding.replicas import (
    PageRange,
    ReplicaMap,
    ReplicaSet,
    adopt,
    all_replica_sets,
    cut_at,
    promote,
    ranges_of,
    with_learners,
)
from elaswave_spmd.sharding.state_sharding import StateSharding

_SHOWN = 24

MASTER_BYTES = 4
"""Bytes of the fp32 master of one element. A frozen element has no other state."""


@dataclass(frozen=True)
class PageMove:
    """A page range whose state (a copy), or whose role of primary (a promotion, a hand-over), passes to another worker.

    Args:
        pages: the page range.
        source: the rank that sends the state, or was the primary.
        destination: the rank that receives the state, or becomes the primary.
    """

    pages: PageRange
    source: int
    destination: int


@dataclass(frozen=True)
class ReshardPlan:
    """How the state gets from the replicas before a change to those of the new mesh. Made by `plan_reshard`.

    Args:
        layout: the pages of each layer.
        before: the replica map before the change, lost workers included.
        gone: the workers that are lost, or leave at once.
        sharding: the mesh and specs that the plan leads to; None if the state stays where it is.
        during: the replica map from now on: primaries are promoted, and workers that are sent state are learners.
        after: the replica map when all copies are complete. It has the same page ranges as `during`.
        lost: the page ranges that have no replica left, as they were. They are in neither `during` nor `after`.
    """

    layout: ModelLayout = field(repr=False, hash=False, compare=False)
    before: ReplicaMap = field(repr=False, hash=False)
    gone: frozenset[int]
    sharding: StateSharding | None
    during: ReplicaMap = field(repr=False, hash=False)
    after: ReplicaMap = field(repr=False, hash=False)
    lost: tuple[ReplicaSet, ...] = ()

    @cached_property
    def promotions(self) -> tuple[PageMove, ...]:
        """The page ranges whose primary (`source`) is lost, each with the mirror (`destination`) that is promoted."""
        was = (
            {of_range.key: of_range for of_range in all_replica_sets(cut_at(self.before, self.during))}
            if self.gone
            else {}
        )
        return tuple(
            PageMove(now.key, was[now.key].primary, now.primary)
            for now in all_replica_sets(self.during)
            if now.key in was and was[now.key].primary in self.gone
        )

    @cached_property
    def copies(self) -> tuple[PageMove, ...]:
        """The copies of state from the primary of a page range to its learners, one for each range and learner."""
        layers = (ranges_of(self.during, layer) for layer in sorted(self.during))
        return tuple(move for ranges in layers if ranges.learners for move in copies(ranges))

    @cached_property
    def learners(self) -> frozenset[int]:
        """The workers that are sent state."""
        return frozenset(copy.destination for copy in self.copies)

    def copies_to(self, rank: int) -> tuple[PageRange, ...]:
        """The page ranges whose state one worker is sent, in order of layer and page."""
        return self._copies_by_destination.get(rank, ())

    @cached_property
    def _copies_by_destination(self) -> dict[int, tuple[PageRange, ...]]:
        found: dict[int, list[PageRange]] = defaultdict(list)
        for copy in self.copies:
            found[copy.destination].append(copy.pages)
        return {rank: tuple(ranges) for rank, ranges in found.items()}

    @cached_property
    def hand_overs(self) -> tuple[PageMove, ...]:
        """The page ranges that get another primary when all copies are complete."""
        pairs = self._changing
        return tuple(PageMove(now.key, now.primary, it.primary) for now, it in pairs if now.primary != it.primary)

    @cached_property
    def drops(self) -> tuple[tuple[PageRange, int], ...]:
        """(page range, rank) of each replica that is given up when all copies are complete."""
        return tuple((now.key, rank) for now, it in self._changing for rank in sorted(now.replicas - it.replicas))

    @property
    def _changing(self) -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
        """(during, after) of each page range, for the layers whose replicas change when all copies are complete."""
        for layer in sorted(self.during):
            if self.during[layer] is not self.after[layer]:
                yield from zip(self.during[layer], self.after[layer], strict=True)

    def elements(self, pages: PageRange) -> int:
        """The number of elements of a page range. The loss page has no state, and counts as 0."""
        layer, first, stop = pages
        of_layer = self.layout.layers[layer]
        if of_layer.block_of(first).kind == LOSS:
            return 0
        start, end = of_layer.span(first, stop)
        return end - start

    def is_frozen(self, pages: PageRange) -> bool:
        """True if a page range is not trained, so that it has no other state than the fp32 master."""
        return self.layout.layers[pages[0]].is_frozen(pages[1])

    @cached_property
    def moved_elements(self) -> int:
        """The number of elements that the copies move. All state of an element moves together."""
        return sum(self.elements(copy.pages) for copy in self.copies)

    def moved_bytes(self, element_bytes: int) -> int:
        """The bytes that the copies move.

        Args:
            element_bytes: bytes of all state of a trained element. A frozen element has the 4 bytes of its master.
        """
        return sum(self._num_bytes(copy.pages, element_bytes) for copy in self.copies)

    def least_bytes(self, element_bytes: int) -> int:
        """A lower bound for `moved_bytes`, as `least_elements` is one for `moved_elements`."""
        if self.sharding is None:
            return 0
        trained, frozen = self._least_of(self.sharding, frozen=False), self._least_of(self.sharding, frozen=True)
        return element_bytes * trained + min(element_bytes, MASTER_BYTES) * frozen

    def _num_bytes(self, pages: PageRange, element_bytes: int) -> int:
        each = min(element_bytes, MASTER_BYTES) if self.is_frozen(pages) else element_bytes
        return each * self.elements(pages)

    @cached_property
    def least_elements(self) -> int:
        """A lower bound for `moved_elements` of any plan with as many replicas of each page and as even primaries.

        It is the larger of two bounds: the replicas that single pages lack, and the pages that single members lack to
        have their share as primaries. Both are added up over trained and frozen pages, which are balanced separately.
        """
        if self.sharding is None:
            return 0
        return self._least_of(self.sharding, frozen=False) + self._least_of(self.sharding, frozen=True)

    def _least_of(self, sharding: StateSharding, *, frozen: bool) -> int:
        if frozen and not self.layout.frozen:
            return 0
        return max(self._missing_replicas(sharding, frozen), self._missing_shares(sharding, frozen))

    def _missing_replicas(self, sharding: StateSharding, frozen: bool) -> int:
        """A lower bound from single pages: elements of the replicas that pages lack, by number or within their stage.

        A page needs a primary in the stage of its layer. If the state is replicated, every member of that stage has to
        be a replica.
        """
        found = 0
        for stage, members in enumerate(sharding.stages):
            needed, those = len(members) if sharding.is_replicated else 1, frozenset(members)
            inside: dict[frozenset[int], int] = {}  # page ranges share their sets: each is counted once
            for layer in sharding.layers_of_stage(stage):
                ranges = ranges_of(self.during, layer)
                stays = ranges is self.after[layer] and not sharding.is_replicated
                if stays and ranges.primaries <= those:
                    continue
                for now, then in zip(ranges, self.after[layer], strict=True):
                    if self.is_frozen(now.key) != frozen:
                        continue
                    if now.replicas not in inside:
                        inside[now.replicas] = len(now.replicas & those)
                    lacking = max(len(then.replicas) - len(now.replicas), needed - inside[now.replicas])
                    found += self.elements(now.key) * max(0, lacking)
        return found

    def _missing_shares(self, sharding: StateSharding, frozen: bool) -> int:
        """A lower bound from single members: elements that they lack to be the primary of their share of pages.

        A member's share is as many pages of its stage as the others have, within one. It can be the primary only of
        pages of which it is a replica. Which pages it would get is not known here, so the shortest ones are counted
        first: the last page of a block may be shorter than the others.
        """
        found = 0
        for stage, members in enumerate(sharding.stages):
            layers = sharding.layers_of_stage(stage)
            blocks = [b for layer in layers for b in self.layout.layers[layer].state_blocks if b.frozen == frozen]
            share = sum(block.num_pages for block in blocks) // len(members)
            page_size = self.layout.page_size
            # The last pages of blocks, shortest first: no choice of pages could have fewer elements than these.
            last = sorted(block.stop - block.start - (block.num_pages - 1) * page_size for block in blocks)
            held = dict.fromkeys(members, 0)
            for layer in layers:
                of_layer = self.layout.layers[layer]
                kind = of_layer.frozen_pages if frozen else of_layer.trained_pages
                for pages in (pages for pages in self.during[layer] if pages.first in kind):
                    for rank in pages.replicas & held.keys():
                        held[rank] += pages.num_pages
            for missing in (share - num_pages for num_pages in held.values() if num_pages < share):
                found += sum(last[:missing]) + max(0, missing - len(last)) * page_size
        return found

    def advanced(self, current: ReplicaMap) -> ReshardPlan:
        """What remains of this plan.

        Args:
            current: the present replica map, in which learners that have all of their copies are replicas.
        """
        during = with_learners(current, self.after)
        return ReshardPlan(self.layout, current, frozenset(), self.sharding, during, self.after)

    def towards(self, sharding: StateSharding) -> ReshardPlan:
        """The plan that goes on from this one to a mesh and specs. In this one the state must stay where it is."""
        after = rebalance_replicas(self.after, self.layout, sharding)
        during = with_learners(self.after, after)
        return ReshardPlan(self.layout, self.before, self.gone, sharding, during, after)

    def adopted(self) -> ReplicaMap:
        """The replica map `after`, for use when no copy is missing any more."""
        return adopt(self.during, self.after)

    def text(self, element_bytes: int) -> str:
        """The plan in words, for a person to read.

        Args:
            element_bytes: bytes of all state of a trained element: 12 with AdamW (fp32 master and two moments).
        """
        gone = f"without {shortened_workers(sorted(self.gone))}" if self.gone else "no worker is lost"
        lines = [f"reshard plan, {gone}" + (f": {self.sharding}" if self.sharding else "")]
        lines += self._moves("promote", self.promotions, "in place of", reverse=True)
        lines += self._moves("copy", self.copies, "->", element_bytes=element_bytes)
        lines += self._moves("then hand over", self.hand_overs, "->")
        drops: dict[int, list[PageRange]] = defaultdict(list)
        for pages, rank in self.drops:
            drops[rank].append(pages)
        lines += _shortened([f"  then drop at {rank}: {_ranges(pages)}" for rank, pages in sorted(drops.items())])
        lines += [f"  lost: {_ranges([pages.key for pages in self.lost])}"] if self.lost else []
        moved, least = self.moved_bytes(element_bytes), self.least_bytes(element_bytes)
        total = f"{len(self.copies):,} copies, {moved:,} B (at least {least:,} B)"
        return "\n".join([*lines, f"  {len(self.promotions):,} promotions, {total}, {len(self.drops):,} drops"])

    def _moves(
        self, verb: str, moves: Iterable[PageMove], to: str, *, reverse: bool = False, element_bytes: int = 0
    ) -> list[str]:
        """One line for each pair of workers, with the page ranges that pass between them."""
        of_pair: dict[tuple[int, int], list[PageRange]] = defaultdict(list)
        for move in moves:
            of_pair[move.source, move.destination].append(move.pages)
        lines = []
        for (source, destination), ranges in sorted(of_pair.items()):
            first, second = (destination, source) if reverse else (source, destination)
            num_bytes = sum(self._num_bytes(pages, element_bytes) for pages in ranges)
            size = f", {num_bytes:,} B" if element_bytes else ""
            lines.append(f"  {verb} {first} {to} {second}{size}: {_ranges(ranges)}")
        return _shortened(lines)


def plan_reshard(
    layout: ModelLayout,
    before: ReplicaMap,
    *,
    lost: Collection[int] = (),
    to: StateSharding | ReplicaMap | None = None,
) -> ReshardPlan:
    """The plan from the present replicas to a mesh and specs.

    Primaries send the state; `promote` makes their numbers of pages as even as possible without splitting a page range.
    The plan has the fewest copies that give every page its replicas and every member of a stage its share of primaries
    (`rebalance_replicas`).

    Args:
        layout: the pages of each layer.
        before: the present replica map, of all layers. It may have lost workers, and learners.
        lost: the workers whose replicas are gone.
        to: the mesh and specs, for which the nearest replica map is found; or a replica map of the same pages; None if
            the state stays where it is.
    """
    gone = frozenset(lost)
    left, dead = promote(before, gone)
    stays = ReshardPlan(layout, before, gone, None, left, left, dead)
    # If page ranges have no replica left, nothing is planned: the caller goes back to a checkpoint, or gives up.
    if dead or to is None:
        return stays
    if isinstance(to, StateSharding):
        return stays.towards(to)
    after = cut_at(to, left)
    return ReshardPlan(layout, before, gone, None, with_learners(left, after), after)


def copies(replica_sets: Iterable[ReplicaSet]) -> Iterator[PageMove]:
    """The copies that these page ranges need: from the primary to each learner, in order of page and destination."""
    return (PageMove(it.key, it.primary, rank) for it in replica_sets for rank in sorted(it.learners))


def _ranges(ranges: Iterable[PageRange]) -> str:
    """Page ranges in words, adjacent ones together: "layer 0 pages 3-5 9; layer 2 pages 0-1"."""
    by_layer: dict[int, list[int]] = defaultdict(list)
    for layer, first, stop in sorted(ranges):
        by_layer[layer] += range(first, stop)
    words = [f"layer {layer} page{'s' * (len(pages) > 1)} {format_ints(pages)}" for layer, pages in by_layer.items()]
    return "; ".join(words[:_SHOWN]) + ("; ..." if len(words) > _SHOWN else "")


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  ... {len(lines) - _SHOWN:,} more lines"]
