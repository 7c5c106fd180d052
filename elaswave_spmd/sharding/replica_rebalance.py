"""The target replica map after any change of members: even primaries, all mirrors again, and the fewest copies.

If a page lacks a mirror, a copy of it has to be made anyway, and the new replica may as well become the primary. So a
page with too few replicas can get any primary at no further cost, and any page can get another of its replicas as its
primary. Only as far as primaries cannot be made even by these two means, further copies are made. Their least number
follows from a maximum flow from the workers with too many pages to those with too few.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replica_placement import MirrorChoice
from elaswave_spmd.sharding.replicas import LayerReplicas, ReplicaMap, ReplicaSet, ranges_of
from elaswave_spmd.sharding.state_sharding import StateSharding

Alive = frozenset[int]
"""The replicas of a page range that are members of the new mesh, in any stage."""

Step = tuple[int, Alive | None, int]
"""One edge of an augmenting path, (from, replicas, to): pages with these replicas get worker `to` as their primary in
place of worker `from`. If the replicas are None, no page but a slot passes (see `_SLOT`)."""

_NOBODY, _ANYBODY = -1, -2
"""Nodes of the flow in place of a worker, for pages whose primary is not in their stage. _ANYBODY has the pages of
which any worker of the stage may become the primary at no cost, _NOBODY has the others."""

_SLOT = -3
"""If the pages do not divide evenly, some workers have a *slot*: the right to one page more than the floor. This node
of the flow lies between a worker that gives its slot away and the one that gets it."""


def rebalance_replicas(current: ReplicaMap, layout: ModelLayout, sharding: StateSharding) -> ReplicaMap:
    """The target map for a mesh and specs that needs the fewest copies from the present map. It has no learners.

    In the target, primaries are members of the layer's stage, and those of a stage have equally many trained pages,
    within one, and equally many frozen pages. Page ranges are split for this, but not joined. Each page has
    `mirror_count` mirrors, or as many as there are other workers, and keeps surviving mirrors first. If the state is
    replicated, all members of the stage are replicas. A map that has all of these properties already stays as it is.

    Args:
        current: the present map, of all layers. It may have workers that are leaving. It may also have learners, which
            are preferred if a new replica is needed.
        layout: the pages of each layer.
        sharding: the new mesh and specs.
    """
    stages = range(len(sharding.stages))
    layers_of = [sharding.layers_of_stage(stage) for stage in stages]
    pages_of = [sum(layout.layers[layer].num_state_pages for layer in layers) for layers in layers_of]
    choice = MirrorChoice(sharding, pages_of)
    same: dict[int, LayerReplicas] = {}  # layers of stages that stay as they are: nearly all of them
    found: dict[int, list[ReplicaSet]] = defaultdict(list)
    changed: list[tuple[ReplicaSet, Alive, int]] = []
    for stage, layers in zip(stages, layers_of, strict=True):
        whole = {layer: ranges_of(current, layer) for layer in layers}
        # If the state is replicated and the stage large enough, its members are the mirrors: none is chosen by load.
        counts = not sharding.is_replicated or len(sharding.stages[stage]) <= choice.count
        if _is_settled(whole, stage, choice, layout, sharding):
            same |= whole
            for ranges in whole.values() if counts else ():
                choice.count_layer(ranges)
            continue
        settled: list[ReplicaSet] = []
        for ranges in _trained_and_frozen([pages for layer in layers for pages in current[layer]], layout):
            balance = _Balance(stage, choice, layout, sharding)
            if balance.is_settled(ranges):
                settled += ranges
                continue
            balance.fill(ranges)
            balance.even_out()
            for pages, alive, primary in balance.assigned():
                if pages.primary == primary and not pages.learners and balance.is_complete(pages, alive):
                    settled.append(pages)
                else:
                    changed.append((pages, alive, primary))
        if counts:
            choice.count_mirrors(settled)
        for pages in settled:
            found[pages.layer].append(pages)
    # Mirrors are chosen only now that all stages are balanced, as stages that are too small have mirrors in others.
    for pages in _with_mirrors(changed, choice, sharding):
        found[pages.layer].append(pages)
    after = {layer: sorted(found[layer], key=lambda it: it.first) for stage in layers_of for layer in stage}
    return {
        layer: same[layer] if layer in same else ranges_of(current, layer).replaced(ranges)
        for layer, ranges in after.items()
    }


def _is_settled(
    layers: Mapping[int, LayerReplicas], stage: int, choice: MirrorChoice, layout: ModelLayout, sharding: StateSharding
) -> bool:
    """True if all page ranges of a stage may stay as they are. Uses only the cached properties of whole layers.

    `_Balance.is_settled` decides the same for the stage's trained pages, or its frozen ones, range by range.
    """
    members, ranges = frozenset(sharding.stages[stage]), layers.values()
    wanted = choice.num_replicas(stage)
    return (
        not any(of_layer.learners for of_layer in ranges)
        and all(of_layer.primaries <= members for of_layer in ranges)
        and all(of_layer.set_sizes <= {wanted} for of_layer in ranges)
        and all(of_layer.holders <= choice.stage_of.keys() for of_layer in ranges)
        and (not sharding.is_replicated or all(members <= held for of_layer in ranges for held in of_layer.sets))
        and _is_even(layers, sharding.stages[stage], layout)
    )


def _is_even(layers: Mapping[int, LayerReplicas], members: Sequence[int], layout: ModelLayout) -> bool:
    """True if all members are primaries of as many trained pages, within one, and of as many frozen ones."""
    pages = np.zeros((2, max(members) + 1), np.int64)  # trained and frozen, by rank
    for layer, ranges in layers.items():
        of_layer, (firsts, sizes, primaries) = layout.layers[layer], ranges.columns
        for of_kind, kind in zip(pages, (of_layer.trained_pages, of_layer.frozen_pages), strict=True):
            is_of_kind = (kind.start <= firsts) & (firsts < kind.stop)
            np.add.at(of_kind, primaries[is_of_kind], sizes[is_of_kind])
    loads = pages[:, members]
    return bool((loads.max(axis=1) - loads.min(axis=1) <= 1).all())


def _trained_and_frozen(ranges: Sequence[ReplicaSet], layout: ModelLayout) -> list[list[ReplicaSet]]:
    """The page ranges that are trained, the loss page among them, and those that are frozen, if there are any.

    Each kind is balanced by itself: a trained page has gradients, an update and optimizer state, a frozen one has not.
    """
    if not layout.frozen:
        return [list(ranges)]
    kinds: tuple[list[ReplicaSet], list[ReplicaSet]] = ([], [])
    for pages in ranges:
        kinds[layout.layers[pages.layer].is_frozen(pages.first)].append(pages)
    return [of_kind for of_kind in kinds if of_kind]


def _with_mirrors(
    changed: Iterable[tuple[ReplicaSet, Alive, int]], choice: MirrorChoice, sharding: StateSharding
) -> list[ReplicaSet]:
    """The page ranges with their new primaries and with mirrors.

    For all ranges, the mirrors that stay are decided before any new mirror is chosen, as new ones are chosen by load.
    """
    everybody = [choice.shared(frozenset(members)) for members in sharding.stages]
    outside: dict[tuple[int, Alive], Alive] = {}  # for replicated state: the replicas that are not in the stage
    begun = []
    for pages, alive, primary in sorted(changed, key=lambda one: one[0].key):
        if sharding.is_replicated:
            stage = choice.stage_of[primary]
            held = everybody[stage]
            if (stage, alive) not in outside:
                outside[stage, alive] = alive - held
            kept = outside[stage, alive]
        else:
            held = frozenset((primary,))
            kept = alive - held
        wanted = max(0, choice.count + 1 - len(held))
        if len(kept) > wanted:
            kept = frozenset(choice.ranked(kept, primary)[:wanted])
        if kept:
            choice.add(primary, kept, pages.num_pages)
            held = choice.shared(held | kept)
        begun.append(ReplicaSet(*pages.key, primary, held, pages.learners - held))
    return [choice.completed(pages) for pages in begun]


def _split(pages: ReplicaSet, num_pages: int) -> tuple[ReplicaSet, ReplicaSet | None]:
    """The first `num_pages` pages of a page range, and the rest, or None if there is no rest."""
    if num_pages >= pages.num_pages:
        return pages, None
    cut, same = pages.first + num_pages, (pages.primary, pages.replicas, pages.learners)
    return ReplicaSet(pages.layer, pages.first, cut, *same), ReplicaSet(pages.layer, cut, pages.stop, *same)


class _Balance:
    """Balances the primaries of one stage: `_floor` pages for each worker, and one more for workers with a slot.

    The `ReplicaSet` objects in here keep their old primary. The new one is the key under which `_at` has them.
    """

    def __init__(self, stage: int, choice: MirrorChoice, layout: ModelLayout, sharding: StateSharding) -> None:
        members = sharding.stages[stage]
        self._stage = stage
        self._members = members
        self._everybody = frozenset(members)
        self._choice = choice
        self._layout = layout
        self._replicated = sharding.is_replicated
        self._farthest = choice.farthest(stage)
        self._losses = {(ly.index, ly.loss_block.first_page) for ly in layout.layers if ly.loss_block}
        self._at: dict[int, dict[Alive, list[ReplicaSet]]] = {}
        self._size: dict[int, Counter[Alive]] = {}  # the number of pages in each list of _at
        self._load = dict.fromkeys(members, 0)
        self._loss: list[tuple[ReplicaSet, Alive, int]] = []  # the loss page, which does not count in the balance
        self._of_layer: dict[int, Counter[int]] = {}  # worker -> layer -> pages; made only for workers that need it
        self._even: dict[int, int] = {}  # layer -> a worker's share of its pages
        self._floor = 0
        self._free_slots = 0
        self._slots: set[int] = set()
        self._stuck: set[int] = set()
        self._complete: dict[Alive, bool] = {}
        self._least_distance = 0
        self._far: dict[Alive, list[int]] = {}

    def is_settled(self, ranges: Sequence[ReplicaSet]) -> bool:
        """True if all page ranges may stay as they are, as in most stages after a loss in another one."""
        workers, load = self._choice.stage_of.keys(), dict.fromkeys(self._members, 0)
        alive: dict[frozenset[int], bool] = {}  # page ranges share sets: each is looked at once
        for pages in ranges:
            held = pages.replicas
            if held not in alive:
                alive[held] = held <= workers
            if pages.learners or pages.primary not in load or not alive[held] or not self.is_complete(pages, held):
                return False
            if (pages.layer, pages.first) not in self._losses:
                load[pages.primary] += pages.stop - pages.first
        if max(load.values()) - min(load.values()) > 1:
            return False
        for held in alive:
            self._choice.shared(held)
        return True

    def fill(self, ranges: Sequence[ReplicaSet]) -> None:
        """Assign the page ranges to their present primaries, and give out slots to workers that are above the floor."""
        workers = frozenset(self._choice.stage_of)
        self._at = {rank: {} for rank in (_ANYBODY, _NOBODY, *self._members)}
        self._size = {rank: Counter() for rank in self._at}
        groups: defaultdict[tuple[int, frozenset[int]], list[ReplicaSet]] = defaultdict(list)
        of_layer: Counter[int] = Counter()
        for pages in ranges:
            if (pages.layer, pages.first) in self._losses:
                self._loss.append((pages, pages.replicas & workers, self._primary_of_loss(pages)))
                continue
            groups[pages.primary, pages.replicas].append(pages)
            of_layer[pages.layer] += pages.stop - pages.first
        for (primary, held), same in groups.items():
            alive = self._choice.shared(held if held <= workers else held & workers)
            away = _ANYBODY if self._is_free(alive) else _NOBODY
            self._put(primary if primary in self._load else away, alive, same)
        self._even = {layer: -(-num_pages // len(self._members)) for layer, num_pages in of_layer.items()}
        total = sum(of_layer.values())
        self._floor = total // len(self._members)
        self._free_slots = total % len(self._members)
        # Slots go first to workers that have more pages than the floor, so that one page less has to leave them.
        above = [rank for rank in self._members if self._load[rank] > self._floor]
        self._slots = set(sorted(above, key=lambda rank: -self._load[rank])[: self._free_slots])
        self._free_slots -= len(self._slots)

    def _primary_of_loss(self, pages: ReplicaSet) -> int:
        for ranks in ((pages.primary,), pages.replicas, pages.learners):
            if here := self._everybody.intersection(ranks):
                return min(here)
        return self._members[-1]

    def assigned(self) -> Iterator[tuple[ReplicaSet, Alive, int]]:
        """(page range, those of its replicas that are members, its new primary), for each page range."""
        yield from self._loss
        for rank in self._members:
            for alive, ranges in self._at[rank].items():
                yield from ((pages, alive, rank) for pages in ranges)

    def is_complete(self, pages: ReplicaSet, alive: Alive) -> bool:
        """True if a page range with its primary in this stage has exactly the replicas that it should have."""
        # Thousands of ranges share a set: the answer is kept by set.
        if alive not in self._complete:
            is_everybody = not self._replicated or self._everybody <= alive
            self._complete[alive] = len(alive) == self._choice.num_replicas(self._stage) and is_everybody
        return len(alive) == len(pages.replicas) and self._complete[alive]

    def even_out(self) -> None:
        """Hand pages over until every member has the floor, or one page more if it has a slot."""
        self._hand_to_learners()
        # First, pages that lack a copy go only to workers on other hosts than their replicas. The rest may go anywhere
        # in the stage.
        for least_distance in (1, 0) if self._farthest and not self._replicated else (0,):
            self._least_distance = least_distance
            self._stuck = set()
            for source in (_NOBODY, *self._members):
                while self._excess(source) and (path := self._search(source)):
                    self._go(path)
        # The excess that is left cannot be handed over without further copies, so these copies are made.
        takers = iter(self._members)
        taker = next(takers)
        for source in self._members:
            while excess := self._excess(source):
                while not self._room(taker):
                    taker = next(takers)
                self._hand_over(source, list(self._at[source]), taker, min(excess, self._room(taker)))
        self._assign_strays()

    def _is_free(self, alive: Alive) -> bool:
        """True if any member of the stage can become the primary without a copy beyond those needed anyway."""
        return self._replicated or len(alive) <= self._choice.count

    def _excess(self, rank: int) -> int:
        if rank < 0:
            return self._size[rank].total()
        return max(0, self._load[rank] - self._floor - (rank in self._slots))

    def _room(self, rank: int) -> int:
        return max(0, self._floor + (rank in self._slots or self._free_slots > 0) - self._load[rank])

    # ---- hand-overs that need no further copy: augmenting paths

    def _search(self, source: int) -> list[Step] | None:
        """The shortest path along which pages can change primaries, without a further copy, to a worker with room.

        This is an augmenting path of the maximum flow; None if there is none. The steps are in reverse order. Nodes
        that a failed search has reached cannot be on any later path, so they are not searched again.
        """
        came: dict[int, tuple[int, Alive | None]] = {}
        queue = deque((source,))
        while queue:
            rank = queue.popleft()
            for alive, to in self._next(rank):
                if to in came or to == source or to in self._stuck:
                    continue
                came[to] = rank, alive
                if to != _SLOT and self._room(to):
                    path: list[Step] = []
                    while to != source:
                        before, alive = came[to]
                        path.append((before, alive, to))
                        to = before
                    return path
                queue.append(to)
        self._stuck |= {source, *came}
        return None

    def _next(self, rank: int) -> Iterator[tuple[Alive | None, int]]:
        if rank == _SLOT:
            yield from ((None, other) for other in self._members if other in self._slots)
            return
        for alive, num_pages in self._size[rank].items():
            if num_pages and self._is_free(alive):
                yield from ((alive, other) for other in self._takers(alive))
        for alive, num_pages in self._size[rank].items():
            if num_pages:
                yield from ((alive, other) for other in sorted(alive & self._everybody) if other != rank)
        if rank >= 0 and rank not in self._slots:
            yield None, _SLOT

    def _takers(self, alive: Alive) -> Sequence[int]:
        """The workers that may become primary of pages that lack a copy: the farthest one with room, if any has room;
        else all that are far enough, through which a path may go on."""
        best, best_distance = _NOBODY, self._least_distance - 1
        for rank in self._members:
            if self._room(rank):
                distance = self._distance(rank, alive)
                if distance > best_distance:
                    best, best_distance = rank, distance
                if distance >= self._farthest:
                    break
        if best != _NOBODY:
            return (best,)
        assert self._least_distance, "as long as a worker has too many pages, another has too few"
        if alive not in self._far:
            self._far[alive] = [rank for rank in self._members if self._distance(rank, alive)]
        return self._far[alive]

    def _distance(self, rank: int, alive: Alive) -> int:
        return self._farthest if self._replicated or rank in alive else self._choice.distance(rank, alive)

    def _go(self, path: Sequence[Step]) -> None:
        """Hand pages over along a path of `_search`, which begins with its last step: as many as every step allows."""
        source, taker = path[-1][0], path[0][2]
        amount = self._excess(source)
        for rank, alive, to in path:
            if alive is not None:
                amount = min(amount, self._size[rank][alive])
            elif rank == _SLOT:
                self._slots.remove(to)
                amount = 1
            else:
                self._slots.add(rank)
        amount = min(amount, self._room(taker))
        for rank, alive, to in path:
            if alive is not None:
                self._hand_over(rank, [alive], to, amount)

    # ---- choosing the pages that are handed over

    def _put(self, rank: int, alive: Alive, ranges: Sequence[ReplicaSet]) -> None:
        self._at[rank].setdefault(alive, []).extend(ranges)
        num_pages = sum(pages.stop - pages.first for pages in ranges)
        self._size[rank][alive] += num_pages
        if rank >= 0:
            self._load[rank] += num_pages

    def _hand_over(self, source: int, which: Sequence[Alive], taker: int, amount: int) -> None:
        """Make `taker` the primary of `amount` pages of `source`, of those with the replicas in `which`.

        Pages of which the taker is a learner come first. Then the taker gets pages of the layers of which it has the
        least, so that each layer stays spread over all workers. A page range is split if only a part of it has to move,
        or if the taker would get far more than its share of the layer.
        """
        has, turns = self._pages_by_layer(taker), Counter[int]()
        queue = [(pages, alive) for alive in which for pages in self._at[source][alive]]
        order = []
        for place, (pages, _) in enumerate(queue):
            turns[pages.layer] += 1
            share = has[pages.layer] / self._even[pages.layer]
            order.append((taker not in pages.learners, turns[pages.layer], share, place))
        queue = [queue[place] for _, _, _, place in sorted(order)]
        for evenly in (True, False):
            rest = []
            for place, (pages, alive) in enumerate(queue):
                if not amount:
                    rest += queue[place:]
                    break
                num_pages, even = min(amount, pages.num_pages), self._even[pages.layer]
                if evenly and 4 * (has[pages.layer] + num_pages) > 5 * even:
                    num_pages = min(num_pages, max(0, even - has[pages.layer]))
                tail: ReplicaSet | None = pages
                if num_pages:
                    head, tail = _split(pages, num_pages)
                    self._book(source, alive, head, taker)
                    amount -= num_pages
                if tail:
                    rest.append((tail, alive))
            queue = rest
        for alive in which:
            self._at[source][alive] = []
        for pages, alive in queue:
            self._at[source][alive].append(pages)

    def _pages_by_layer(self, rank: int) -> Counter[int]:
        """Layer -> the number of the worker's pages. From the first call on, `_book` keeps it up to date."""
        if rank not in self._of_layer:
            self._of_layer[rank] = Counter()
            for ranges in self._at[rank].values():
                for pages in ranges:
                    self._of_layer[rank][pages.layer] += pages.num_pages
        return self._of_layer[rank]

    def _hand_to_learners(self) -> None:
        """Hand pages of workers with an excess to learners of these pages first, so that an earlier plan goes on."""
        for source in self._at:
            for alive, ranges in list(self._at[source].items()):
                if any(pages.learners for pages in ranges):
                    left = (self._without_learned(source, alive, pages) for pages in ranges)
                    self._at[source][alive] = [pages for pages in left if pages]

    def _without_learned(self, source: int, alive: Alive, pages: ReplicaSet) -> ReplicaSet | None:
        """Hand the first pages of a range to a learner, as many as the excess and its room allow; return the others."""
        for rank in sorted(pages.learners & self._everybody):
            if num_pages := min(self._excess(source), self._room(rank)):
                head, tail = _split(pages, num_pages)
                self._book(source, alive, head, rank)
                return tail
        return pages

    def _book(self, source: int, alive: Alive, pages: ReplicaSet, taker: int) -> None:
        """Assign a page range to its taker and update all counts. The caller takes it off the source's list."""
        self._put(taker, alive, (pages,))
        self._size[source][alive] -= pages.num_pages
        if source >= 0:
            self._load[source] -= pages.num_pages
        for rank, num_pages in ((taker, pages.num_pages), (source, -pages.num_pages)):
            if rank in self._of_layer:
                self._of_layer[rank][pages.layer] += num_pages
        if self._free_slots and self._load[taker] > self._floor and taker not in self._slots:
            self._slots.add(taker)
            self._free_slots -= 1

    def _assign_strays(self) -> None:
        """Assign the pages whose primary is not in the stage: each layer to members in proportion to their room."""
        for rank in self._members:
            if self._free_slots and rank not in self._slots:
                self._slots.add(rank)
                self._free_slots -= 1
        outside = [*self._at[_ANYBODY].items(), *self._at[_NOBODY].items()]
        strays = sorted(
            ((pages, alive) for alive, ranges in outside for pages in ranges), key=lambda stray: stray[0].key
        )
        for _, of_layer in groupby(strays, key=lambda stray: stray[0].layer):
            queue = deque(of_layer)
            left = sum(pages.num_pages for pages, _ in queue)
            rooms = sum(map(self._room, self._members))
            for rank in self._members:
                room = self._room(rank)
                share = -(-left * room // rooms) if room else 0
                left, rooms = left - share, rooms - room
                while share:
                    pages, alive = queue.popleft()
                    head, tail = _split(pages, share)
                    share -= head.num_pages
                    self._put(rank, alive, (head,))
                    if tail:
                        queue.appendleft((tail, alive))
