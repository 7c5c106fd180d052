"""The replica map: which workers hold each page of state, and how losses and learners that caught up change it.

A `ReplicaMap` lists the page ranges of each layer with their replicas. Changes of the mesh split page ranges, so that a
range that is named by a message under way is always a union of ranges of the present map. Ranges are joined again
(`joined`) only in a change that finds no message under way.

After a loss the map is derived from the one before (`promote`), never made anew. Every other change goes from the
present map to a target in two steps: `with_learners` adds, as learners, the workers that have to become replicas, and
`adopt` switches to the target when all of them have the state. `sharding.reshard` puts these steps together.

On a large mesh a loss concerns few layers. The maps before and after a change share the `LayerReplicas` objects of all
other layers, and with these objects the values that are cached in them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, islice, pairwise, takewhile
from math import comb
from operator import is_

import numpy as np
import numpy.typing as npt

from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout

PageRange = tuple[int, int, int]
"""(layer, first page, stop page)."""

ReplicaRow = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first, stop, primary, mirrors, learners)."""

_NONE: frozenset[int] = frozenset()
_FEW = 8
"""`LayerReplicas.rows` is cached if page ranges have at most this number of replicas. Rows of replicated state would
take too much memory: each of them names a whole stage."""


@dataclass(frozen=True)
class ReplicaSet:
    """Pages [first, stop) of one layer's state, and the workers that hold them.

    Args:
        layer: the number of the layer.
        first: the first page.
        stop: the page after the last one.
        primary: the replica that reduces the pages' gradients, publishes their parameters and sends their state to
            learners.
        replicas: the workers that have the state, the primary included. Page ranges share the set object, so that a
            stage of n workers with replicated state does not need memory for n sets of n workers.
        learners: workers that are sent every reduced gradient, like a mirror, but do not have the state yet.

    A replica or learner may belong to any stage.
    """

    layer: int
    first: int
    stop: int
    primary: int
    replicas: frozenset[int] = field(hash=False)
    learners: frozenset[int] = field(default=_NONE, hash=False)

    def __post_init__(self) -> None:
        assert self.primary in self.replicas and self.first < self.stop, self
        assert not self.learners or self.learners.isdisjoint(self.replicas), self

    @property
    def key(self) -> PageRange:
        """The page range."""
        return self.layer, self.first, self.stop

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.stop - self.first

    @property
    def mirrors(self) -> tuple[int, ...]:
        """The replicas other than the primary, ascending."""
        return tuple(sorted(self.replicas - {self.primary}))

    @property
    def receivers(self) -> tuple[int, ...]:
        """The workers to which the primary sends the reduced gradients of these pages: mirrors and learners."""
        return tuple(sorted((self.replicas | self.learners) - {self.primary}))

    def reaches(self, rank: int) -> bool:
        """True if a worker is a replica or a learner of these pages, so that it gets their reduced gradients."""
        return rank in self.replicas or rank in self.learners

    def __str__(self) -> str:
        mirrors = f" mirrors {list(self.mirrors)}" if len(self.replicas) > 1 else ""
        learners = f" learners {sorted(self.learners)}" if self.learners else ""
        return f"layer {self.layer} pages [{self.first}, {self.stop}): {self.primary}{mirrors}{learners}"


class LayerReplicas(tuple[ReplicaSet, ...]):
    """The page ranges of one layer with their replicas, in page order. Properties that follow from them are cached.

    It compares equal to a plain tuple of the same page ranges. A `ReplicaMap` may also have plain tuples, which
    `ranges_of` turns into this class.
    """

    def __reduce__(self) -> tuple[type[LayerReplicas], tuple[tuple[ReplicaSet, ...]]]:
        return LayerReplicas, (tuple(self),)  # pickled without the cached properties

    @cached_property
    def sets(self) -> frozenset[frozenset[int]]:
        """The distinct sets of replicas of the page ranges."""
        return frozenset(pages.replicas for pages in self)

    @cached_property
    def keys(self) -> frozenset[PageRange]:
        """The page ranges, without their replicas."""
        return frozenset(pages.key for pages in self)

    @cached_property
    def joints(self) -> tuple[int, ...]:
        """Where page ranges could be joined, as far as their replicas are concerned, ascending.

        These are the first pages of ranges that have the same primary and replicas as the range before, and both of
        them no learners. A place at which a block begins cannot be a joint after all (`joined`).
        """
        return tuple(pages.first for before, pages in pairwise(self) if _have_the_same(before, pages))

    @cached_property
    def set_sizes(self) -> frozenset[int]:
        """The numbers of replicas that page ranges have."""
        return frozenset(map(len, self.sets))

    @cached_property
    def holders(self) -> frozenset[int]:
        """The workers that are a replica of any page range."""
        return _NONE.union(*self.sets)

    @cached_property
    def learners(self) -> frozenset[int]:
        """The workers that are a learner of any page range."""
        return _NONE.union(*{pages.learners for pages in self if pages.learners})

    @cached_property
    def primaries(self) -> frozenset[int]:
        """The workers that are the primary of any page range."""
        return frozenset(pages.primary for pages in self)

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """First page, number of pages and primary of each of the n page ranges: int64 [3, n]."""
        rows = [(pages.first, pages.stop - pages.first, pages.primary) for pages in self]
        return np.array(rows, np.int64).reshape(-1, 3).T

    @cached_property
    def primary_pages(self) -> Mapping[int, int]:
        """Worker -> the number of pages of which it is the primary; without workers that are the primary of none."""
        found = Counter[int]()
        for pages in self:
            found[pages.primary] += pages.stop - pages.first
        return found

    @cached_property
    def mirrored_pages(self) -> Mapping[int, int]:
        """Worker -> the number of pages of which it is a mirror; without workers that are a mirror of none."""
        found = Counter[int]()
        for pages in self:
            for rank in pages.replicas:
                if rank != pages.primary:
                    found[rank] += pages.stop - pages.first
        return found

    @cached_property
    def mirrors(self) -> Mapping[int, frozenset[int]]:
        """Primary -> the mirrors of its page ranges."""
        found: dict[int, frozenset[int]] = {}
        for pages in self:
            found[pages.primary] = found.get(pages.primary, _NONE) | pages.replicas
        return {primary: held - {primary} for primary, held in found.items()}

    @property
    def rows(self) -> tuple[ReplicaRow, ...]:
        """The page ranges as plain data."""
        return self._few_rows if max(self.set_sizes, default=0) <= _FEW else self._as_rows()

    @cached_property
    def _few_rows(self) -> tuple[ReplicaRow, ...]:
        return self._as_rows()

    def _as_rows(self) -> tuple[ReplicaRow, ...]:
        # Page ranges that share their replicas share the row's tuple of mirrors.
        mirrors: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}
        rows = []
        for pages in self:
            shared = pages.primary, pages.replicas
            if shared not in mirrors:
                mirrors[shared] = pages.mirrors
            learners = tuple(sorted(pages.learners)) if pages.learners else ()
            rows.append((pages.layer, pages.first, pages.stop, pages.primary, mirrors[shared], learners))
        return tuple(rows)

    def concerns(self, ranks: frozenset[int]) -> bool:
        """True if any of these workers is a replica or a learner here."""
        return not (ranks.isdisjoint(self.holders) and ranks.isdisjoint(self.learners))

    def replaced(self, found: Iterable[ReplicaSet]) -> LayerReplicas:
        """`found` as the page ranges of the layer. If they are the very same objects, this object itself.

        So maps go on sharing it, with its cached properties.
        """
        other = LayerReplicas(found)
        return self if len(self) == len(other) and all(map(is_, self, other)) else other


ReplicaMap = Mapping[int, tuple[ReplicaSet, ...]]
"""Layer -> its page ranges with their replicas, in page order."""


class PageIndex:
    """An index of disjoint page ranges, such as those of an older mesh epoch, by the pages that they contain."""

    def __init__(self, ranges: Iterable[PageRange]) -> None:
        self._known = frozenset(ranges)
        self._of_layer: dict[int, list[PageRange]] = {}
        for key in sorted(self._known):
            self._of_layer.setdefault(key[0], []).append(key)

    def covering(self, pages: PageRange) -> tuple[PageRange, ...]:
        """The page ranges that together contain `pages`, in page order; empty if some page of it is in none of them.

        One of them contains `pages` if it was split off since, and several together if they were joined since.
        """
        if pages in self._known:
            return (pages,)
        layer, first, stop = pages
        ranges = self._of_layer.get(layer, [])
        start = max(0, bisect_right(ranges, first, key=lambda key: key[1]) - 1)
        near = takewhile(lambda key: key[1] < stop, islice(ranges, start, None))
        found = tuple(key for key in near if first < key[2])
        num_pages = sum(min(key[2], stop) - max(key[1], first) for key in found)
        return found if num_pages == stop - first else ()


def ranges_of(replicas: ReplicaMap, layer: int) -> LayerReplicas:
    """The page ranges of a layer as `LayerReplicas`, which is the object in the map if it has this class already."""
    found = replicas[layer]
    return found if isinstance(found, LayerReplicas) else LayerReplicas(found)


def all_replica_sets(replicas: ReplicaMap) -> Iterator[ReplicaSet]:
    """All replica sets, by layer and page."""
    return (of_range for _, ranges in sorted(replicas.items()) for of_range in ranges)


def promote(replicas: ReplicaMap, lost: Collection[int]) -> tuple[ReplicaMap, tuple[ReplicaSet, ...]]:
    """The map without the lost workers. If a primary is lost, one of the remaining replicas becomes the primary.

    Learners are not promoted: they have no state. Page ranges stay as they are. The new primaries are chosen so that
    the numbers of pages of which workers are the primary, over all layers, are as even as possible without splitting a
    page range. Page ranges with few candidates choose first.

    Args:
        replicas: the map before the loss.
        lost: the workers that are lost.

    Returns:
        The map without the page ranges that have no replica left, and these page ranges as they were.
    """
    gone = frozenset(lost)
    layers = {layer: ranges_of(replicas, layer) for layer in sorted(replicas)}
    left: dict[frozenset[int], frozenset[int]] = {}  # set of replicas -> those of them that are left
    kept: dict[int, list[ReplicaSet | None]] = {}  # layer -> its new ranges, for layers that the loss concerns
    orphans: list[tuple[int, int, ReplicaSet]] = []  # (layer, index in the layer, page range) whose primary is lost
    dead: list[ReplicaSet] = []
    for layer in (layer for layer, ranges in layers.items() if ranges.concerns(gone)):
        found: list[ReplicaSet | None] = kept.setdefault(layer, [])
        for pages in layers[layer]:
            # Page ranges share sets, so the difference is computed once for each set. At 100,000 workers this matters.
            if pages.replicas not in left:
                left[pages.replicas] = pages.replicas if pages.replicas.isdisjoint(gone) else pages.replicas - gone
            holding, learning = left[pages.replicas], pages.learners - gone if pages.learners else _NONE
            if not holding:
                dead.append(pages)
            elif pages.primary in gone:
                orphans.append((layer, len(found), pages))
                found.append(None)
            elif holding is pages.replicas and learning == pages.learners:
                found.append(pages)
            else:
                found.append(ReplicaSet(*pages.key, pages.primary, holding, learning))
    # Promoted pages come on top of the pages of which survivors are the primary already, so these are counted first.
    candidates = _NONE.union(*(left[pages.replicas] for _, _, pages in orphans))
    load = {rank: sum(ranges.primary_pages.get(rank, 0) for ranges in layers.values()) for rank in candidates}
    chosen = _choose_primaries([(pages, left[pages.replicas]) for _, _, pages in orphans], load)
    for (layer, place, pages), primary in zip(orphans, chosen, strict=True):
        kept[layer][place] = ReplicaSet(*pages.key, primary, left[pages.replicas], pages.learners - gone)
    changed = {layer: LayerReplicas(pages for pages in found if pages) for layer, found in kept.items()}
    return layers | changed, tuple(dead)


def _choose_primaries(orphans: Sequence[tuple[ReplicaSet, frozenset[int]]], load: dict[int, int]) -> list[int]:
    """Choose a primary for each page range: greedily by load, then changing single choices while loads get more even.

    Args:
        orphans: (page range, its remaining replicas), of page ranges whose primary is lost.
        load: rank -> pages of which it is the primary already. It is updated with the choices.
    """
    order = sorted(range(len(orphans)), key=lambda i: (len(orphans[i][1]), -orphans[i][0].num_pages, orphans[i][0].key))
    chosen = [-1] * len(orphans)
    changed = True
    # The loop ends: each change moves pages to a worker whose load stays below what the other one's load was.
    while changed:
        changed = False
        for i in order:
            pages, candidates = orphans[i]
            best, now = min(candidates, key=lambda rank: (load[rank], rank)), chosen[i]
            if now < 0 or load[best] + pages.num_pages < load[now]:
                if now >= 0:
                    load[now] -= pages.num_pages
                load[best] += pages.num_pages
                chosen[i], changed = best, True
    return chosen


def cut_at(replicas: ReplicaMap, cuts: ReplicaMap) -> ReplicaMap:
    """The same replicas, with every page range cut where a page range of `cuts` ends. Both cover the same pages."""
    layers = {layer: ranges_of(replicas, layer) for layer in replicas}
    return {layer: ranges.replaced(_cut_layer(ranges, cuts[layer])) for layer, ranges in layers.items()}


def _cut_layer(ranges: Sequence[ReplicaSet], cuts: Sequence[ReplicaSet]) -> Iterator[ReplicaSet]:
    place = 0
    for pages in ranges:
        first = pages.first
        while first < pages.stop:
            while cuts[place].stop <= first:
                place += 1
            stop = min(pages.stop, cuts[place].stop)
            if (first, stop) == (pages.first, pages.stop):
                yield pages
            else:
                yield ReplicaSet(pages.layer, first, stop, pages.primary, pages.replicas, pages.learners)
            first = stop


def joined(replicas: ReplicaMap, layout: ModelLayout) -> ReplicaMap:
    """The same map, with neighbouring page ranges joined if they lie in one block and have the same replicas.

    Ranges with learners are not joined. Without this function, each loss would leave more page ranges, and every step
    sends messages for each of them.
    """
    layers = {layer: ranges_of(replicas, layer) for layer in replicas}
    return {layer: _joined_layer(ranges, layout.layers[layer]) for layer, ranges in layers.items()}


def _joined_layer(ranges: LayerReplicas, layout: LayerLayout) -> LayerReplicas:
    # A page range must not have pages of two blocks, which may have different readers, or be trained and frozen.
    joints = set(ranges.joints).difference(block.first_page for block in layout.blocks)
    if not joints:
        return ranges
    found: list[ReplicaSet] = []
    for pages in ranges:
        if pages.first in joints:
            before = found.pop()
            pages = ReplicaSet(pages.layer, before.first, pages.stop, before.primary, before.replicas)
        found.append(pages)
    return LayerReplicas(found)


def _have_the_same(before: ReplicaSet, pages: ReplicaSet) -> bool:
    """True if two page ranges have the same primary and replicas, and no learners."""
    if before.primary != pages.primary or before.learners or pages.learners:
        return False
    return before.replicas is pages.replicas or before.replicas == pages.replicas


def with_learners(current: ReplicaMap, target: ReplicaMap) -> ReplicaMap:
    """The current map, cut into the target's page ranges, with learners: the target's replicas that are none yet."""
    assert current.keys() == target.keys(), (sorted(current), sorted(target))
    return {layer: _layer_with_learners(ranges_of(current, layer), target[layer]) for layer in sorted(target)}


def _layer_with_learners(now: LayerReplicas, target: tuple[ReplicaSet, ...]) -> LayerReplicas:
    return now if target is now and not now.learners else now.replaced(_refined(now, target))


def _refined(current: Sequence[ReplicaSet], target: Sequence[ReplicaSet]) -> Iterator[ReplicaSet]:
    place = 0
    for goal in target:
        while current[place].stop <= goal.first:
            place += 1
        now = current[place]
        # A range that a message under way names must stay a union of present ranges (see the module docstring), so the
        # target may split ranges but not join them.
        assert now.first <= goal.first and goal.stop <= now.stop, f"page ranges are not joined here: {now} -> {goal}"
        learners = _NONE if goal.replicas is now.replicas else goal.replicas - now.replicas
        if goal.key == now.key and learners == now.learners:
            yield now
        else:
            yield ReplicaSet(*goal.key, now.primary, now.replicas, learners)


def adopt(learning: ReplicaMap, target: ReplicaMap) -> ReplicaMap:
    """The target map, for use once all learners of `learning` have the state.

    Asserts that every replica of the target is a replica or a learner in `learning`, so that none would lack state.
    """
    assert learning.keys() == target.keys(), (sorted(learning), sorted(target))
    for layer, ranges in target.items():
        if ranges is learning[layer]:
            continue
        for now, goal in zip(learning[layer], ranges, strict=True):
            assert now.key == goal.key, f"the page ranges agree: {now}, {goal}"
            assert goal.replicas <= now.replicas or goal.replicas <= now.replicas | now.learners, f"{now}, {goal}"
    return target


def graduate(replicas: ReplicaMap, caught_up: Collection[int]) -> ReplicaMap:
    """The map in which these workers are replicas of all pages of which they were learners. Primaries stay."""
    ready = frozenset(caught_up)

    def after(pages: ReplicaSet) -> ReplicaSet:
        if pages.learners.isdisjoint(ready):
            return pages
        now = pages.learners & ready
        return ReplicaSet(*pages.key, pages.primary, pages.replicas | now, pages.learners - now)

    layers = {layer: ranges_of(replicas, layer) for layer in replicas}
    changed = {
        layer: LayerReplicas(map(after, ranges))
        for layer, ranges in layers.items()
        if not ranges.learners.isdisjoint(ready)
    }
    return layers | changed


def disown(
    replicas: ReplicaMap, rank: int, damaged: Collection[PageRange]
) -> tuple[ReplicaMap, tuple[ReplicaSet, ...]]:
    """The map in which one worker is not a replica of damaged pages any more. If it was their primary, a mirror is.

    Args:
        replicas: the map until now.
        rank: the worker.
        damaged: page ranges, which may be cut as in another mesh epoch. The worker gives up every page range of the map
            that has a damaged page, as a whole.

    Returns:
        The map, and the page ranges that have no other replica, which stay in the map as they were.
    """
    alone: list[ReplicaSet] = []

    def after(pages: ReplicaSet) -> ReplicaSet:
        hit = any(pages.layer == layer and a < pages.stop and pages.first < b for layer, a, b in damaged)
        if rank not in pages.replicas or not hit:
            return pages
        left = pages.replicas - {rank}
        if not left:
            alone.append(pages)
            return pages
        primary = min(left) if pages.primary == rank else pages.primary
        return ReplicaSet(*pages.key, primary, left, pages.learners)

    layers = {layer: ranges_of(replicas, layer) for layer in replicas}
    return {layer: ranges.replaced(map(after, ranges)) for layer, ranges in layers.items()}, tuple(alone)


def dispensable(replicas: ReplicaMap, gone: Collection[int], leaving: Iterable[int]) -> tuple[int, ...]:
    """The workers in `leaving` that can be removed now without removing the last replica of any page.

    They are considered in the order of `leaving`: a worker that can be removed counts as gone for those after it.

    Args:
        replicas: the replica map.
        gone: workers that are lost, and count as removed already.
        leaving: workers that want to leave.
    """
    order = dict.fromkeys(leaving)
    if not order:
        return ()
    away = frozenset(gone)
    remaining: list[int] = []  # for each set of replicas, the number of them that are not gone
    sets_of: dict[int, list[int]] = {rank: [] for rank in order}  # worker -> indices in `remaining` of its sets
    for held in _different_sets(replicas):
        if not (left := held - away):  # the pages of this set are lost already, whoever leaves
            continue
        for rank in left & order.keys():
            sets_of[rank].append(len(remaining))
        remaining.append(len(left))
    found: list[int] = []
    for rank, sets in sets_of.items():
        if all(remaining[held] > 1 for held in sets):
            found.append(rank)
            for held in sets:
                remaining[held] -= 1
    return tuple(found)


def _different_sets(replicas: ReplicaMap) -> Set[frozenset[int]]:
    """The distinct sets of replicas that page ranges have."""
    return {held for layer in replicas for held in ranges_of(replicas, layer).sets}


def unsurvived(replicas: ReplicaMap, members: Collection[int], losses: int = 2) -> tuple[int, int]:
    """Count the sets of `losses` workers whose simultaneous loss would lose all replicas of some page.

    The count is exact. It is cheap as long as only a few distinct sets of replicas have fewer workers than `losses`.

    Returns:
        (number of such sets, number of all sets of `losses` members).
    """
    among = frozenset(members)
    distinct = _different_sets(replicas)
    # Pages with more than `losses` replicas survive any such loss.
    small = {held for held in distinct if len(held) <= losses and held <= among}
    # If a worker is the only replica of a page, every set with this worker is fatal. These sets are counted together:
    # all sets, less those that have no such worker.
    alone = {rank for held in small if len(held) == 1 for rank in held}
    rest = sorted(among - alone)
    total, good_or_bad = comb(len(among), losses), comb(len(rest), losses)
    bad = set()
    for held in small:
        if held.isdisjoint(alone):
            others = [rank for rank in rest if rank not in held] if len(held) < losses else []
            bad |= {held.union(more) for more in combinations(others, losses - len(held))}
    return total - good_or_bad + len(bad), total


def unsurvived_text(replicas: ReplicaMap, members: Collection[int], losses: int = 2) -> str:
    """`unsurvived` as one line: "2 of 6 pairs of simultaneous losses lose some page"."""
    bad, total = unsurvived(replicas, members, losses)
    words = {1: "single", 2: "pairs of simultaneous"}.get(losses, f"sets of {losses} simultaneous")
    return f"{bad:,} of {total:,} {words} losses lose some page"


def to_rows(replicas: ReplicaMap) -> tuple[ReplicaRow, ...]:
    """A map as plain data, for messages."""
    return tuple(chain.from_iterable(ranges_of(replicas, layer).rows for layer in sorted(replicas)))


def from_rows(rows: Sequence[ReplicaRow]) -> ReplicaMap:
    """The inverse of `to_rows`.

    The layers of the map are 0 to that of the last row. A layer without state has no row, and an empty tuple in the
    map. The last layer always has a row, as it has the loss page.
    """
    sets: dict[tuple[int, ...], frozenset[int]] = {}
    equal: dict[frozenset[int], frozenset[int]] = {}
    found: dict[int, list[ReplicaSet]] = {layer: [] for layer in range(rows[-1][0] + 1)} if rows else {}
    for layer, first, stop, primary, mirrors, learners in rows:
        shared = primary, *mirrors
        if shared not in sets:
            held = frozenset(shared)
            sets[shared] = equal.setdefault(held, held)
        if learners not in sets:
            sets[learners] = frozenset(learners)
        found[layer].append(ReplicaSet(layer, first, stop, primary, sets[shared], sets[learners]))
    return {layer: LayerReplicas(ranges) for layer, ranges in found.items()}
