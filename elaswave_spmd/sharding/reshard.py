"""The reshard plan: what becomes of every page of optimizer state when the mesh, the specs or the replicas change.

A plan is a value, computed by one pure function from (the replicas that there are, the workers that are lost) and (the
new mesh and specs). Everything that moves state follows a plan: promotion after a loss, new mirrors, a newcomer's
share, layers that move to another stage, the reading of a checkpoint on another mesh. (To choose among thousands of
partitions, `scheduling.stage_search` has a closed form for the bytes of plans that are never made.)

For each page range a plan has some of these:

    promotion   the primary is lost; a mirror becomes the primary in place, without a byte being moved
    copy        the range's primary sends its state to a worker that is to become a replica (the learner of Raft, Ongaro
                and Ousterhout, 2014: it is sent reduced gradients from the start, and the state in the background)
    hand-over   when all copies are there, another replica becomes the primary, without a byte being moved
    drop        when all copies are there, a worker gives up its replica
    lost        no replica is left: only a checkpoint helps

So a plan takes two changes of the mesh epoch: `during` holds at once, and `after` when all copies are there.
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
"""Bytes of an element's fp32 master, which is all that a frozen element has."""


@dataclass(frozen=True)
class PageMove:
    """Pages of which something passes from one worker to another: the state (a copy), or the part of the primary."""

    pages: PageRange
    source: int
    destination: int


@dataclass(frozen=True)
class ReshardPlan:
    """The way of the state from the replicas there were to those of a new mesh. Made by `plan_reshard`.

    Args:
        layout: the pages.
        before: the replicas that there were, lost workers included.
        gone: the workers that are lost, or leave at once.
        sharding: the mesh and specs that the plan leads to; None: the state stays where it is.
        during: the replicas that hold from now on: primaries promoted, workers that are sent state as learners.
        after: the replicas that hold when all copies are there.
        lost: the page ranges without a replica, as they were; they are in neither map.
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
        """Page ranges of a lost primary (`source`) and the mirror that takes its place."""
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
        """State that the primary of a page range sends, one copy for each worker that gets it."""
        layers = (ranges_of(self.during, layer) for layer in sorted(self.during))
        return tuple(move for ranges in layers if ranges.learners for move in copies(ranges))

    @cached_property
    def learners(self) -> frozenset[int]:
        """The workers that are sent state."""
        return frozenset(copy.destination for copy in self.copies)

    def copies_to(self, rank: int) -> tuple[PageRange, ...]:
        """The page ranges whose state one worker is sent, in page order."""
        return self._copies_by_destination.get(rank, ())

    @cached_property
    def _copies_by_destination(self) -> dict[int, tuple[PageRange, ...]]:
        found: dict[int, list[PageRange]] = defaultdict(list)
        for copy in self.copies:
            found[copy.destination].append(copy.pages)
        return {rank: tuple(ranges) for rank, ranges in found.items()}

    @cached_property
    def hand_overs(self) -> tuple[PageMove, ...]:
        """Page ranges that have another primary once all copies are there."""
        pairs = self._changing
        return tuple(PageMove(now.key, now.primary, it.primary) for now, it in pairs if now.primary != it.primary)

    @cached_property
    def drops(self) -> tuple[tuple[PageRange, int], ...]:
        """(page range, rank) of replicas that are given up once all copies are there."""
        return tuple((now.key, rank) for now, it in self._changing for rank in sorted(now.replicas - it.replicas))

    @property
    def _changing(self) -> Iterator[tuple[ReplicaSet, ReplicaSet]]:
        """The page ranges of layers that have other replicas when all copies are there: now, and then."""
        for layer in sorted(self.during):
            if self.during[layer] is not self.after[layer]:
                yield from zip(self.during[layer], self.after[layer], strict=True)

    def elements(self, pages: PageRange) -> int:
        """Elements of one kind of state in a page range. The loss page is no state and has none."""
        layer, first, stop = pages
        of_layer = self.layout.layers[layer]
        if of_layer.block_of(first).kind == LOSS:
            return 0
        start, end = of_layer.span(first, stop)
        return end - start

    def is_frozen(self, pages: PageRange) -> bool:
        """True if a page range has a master alone: it is not trained."""
        return self.layout.layers[pages[0]].is_frozen(pages[1])

    @cached_property
    def moved_elements(self) -> int:
        """Elements of one kind of state that the copies move."""
        return sum(self.elements(copy.pages) for copy in self.copies)

    def moved_bytes(self, element_bytes: int) -> int:
        """Bytes that the copies move; a trained element has `element_bytes`, and a frozen one its master's four."""
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
        """A lower bound for `moved_elements` of any plan to as many replicas of each page, with primaries as even.

        The larger one of two: the replicas that pages lack, each looked at alone; and what the members lack of their
        share as primaries. Trained pages and frozen ones are spread evenly each by themselves.
        """
        if self.sharding is None:
            return 0
        return self._least_of(self.sharding, frozen=False) + self._least_of(self.sharding, frozen=True)

    def _least_of(self, sharding: StateSharding, *, frozen: bool) -> int:
        if frozen and not self.layout.frozen:
            return 0
        return max(self._missing_replicas(sharding, frozen), self._missing_shares(sharding, frozen))

    def _missing_replicas(self, sharding: StateSharding, frozen: bool) -> int:
        """Elements that some worker must get: replicas that a page lacks by number, or in the stage of its layer.

        A page needs a primary in its stage, and of replicated state every member of the stage is a replica.
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
        """Elements that members must get to be primaries of as many pages of their stage as the others, within one.

        A primary is a replica. Which pages a member would get is open, and the last page of a block may be short: so
        those are counted first.
        """
        found = 0
        for stage, members in enumerate(sharding.stages):
            layers = sharding.layers_of_stage(stage)
            blocks = [b for layer in layers for b in self.layout.layers[layer].state_blocks if b.frozen == frozen]
            share = sum(block.num_pages for block in blocks) // len(members)
            page_size = self.layout.page_size
            # Short last pages first: then no choice of pages could have fewer elements, and the bound holds.
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
        """The rest of this plan, when `current` are the replicas: workers that have got their copies are among them."""
        during = with_learners(current, self.after)
        return ReshardPlan(self.layout, current, frozenset(), self.sharding, during, self.after)

    def towards(self, sharding: StateSharding) -> ReshardPlan:
        """The plan to a mesh and specs, when this is the one in which the state stays where it is."""
        after = rebalance_replicas(self.after, self.layout, sharding)
        during = with_learners(self.after, after)
        return ReshardPlan(self.layout, self.before, self.gone, sharding, during, after)

    def adopted(self) -> ReplicaMap:
        """`after`, when no copy is missing any more."""
        return adopt(self.during, self.after)

    def text(self, element_bytes: int) -> str:
        """The plan for a person.

        Args:
            element_bytes: bytes of all kinds of state of one element: 12 with AdamW (fp32 master and two moments).
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
        """One line for each pair of workers."""
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
    """The plan from the replicas that there are to a mesh and specs.

    Primaries send the state, and `promote` makes their loads as even as whole page ranges allow. The fewest copies are
    made that give every page its replicas and every member of a stage its share of primaries (`rebalance_replicas`).

    Args:
        before: the replicas that there are, of all layers; they may name lost workers and learners.
        lost: workers whose replicas are gone.
        to: a mesh and specs, to which the nearest replica map is found; or a replica map itself, of the same pages;
            None: the state stays where it is.
    """
    gone = frozenset(lost)
    left, dead = promote(before, gone)
    stays = ReshardPlan(layout, before, gone, None, left, left, dead)
    # Without a replica there is nothing to plan: the caller goes back to a checkpoint, or gives up.
    if dead or to is None:
        return stays
    if isinstance(to, StateSharding):
        return stays.towards(to)
    after = cut_at(to, left)
    return ReshardPlan(layout, before, gone, None, with_learners(left, after), after)


def copies(replica_sets: Iterable[ReplicaSet]) -> Iterator[PageMove]:
    """The copies of state that these page ranges need: from the primary to each learner, by page and destination."""
    return (PageMove(it.key, it.primary, rank) for it in replica_sets for rank in sorted(it.learners))


def _ranges(ranges: Iterable[PageRange]) -> str:
    """Page ranges with those that touch joined: "layer 0 pages 3-5 9, layer 2 pages 0-1"."""
    by_layer: dict[int, list[int]] = defaultdict(list)
    for layer, first, stop in sorted(ranges):
        by_layer[layer] += range(first, stop)
    words = [f"layer {layer} page{'s' * (len(pages) > 1)} {format_ints(pages)}" for layer, pages in by_layer.items()]
    return "; ".join(words[:_SHOWN]) + ("; ..." if len(words) > _SHOWN else "")


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  ... {len(lines) - _SHOWN:,} more lines"]
