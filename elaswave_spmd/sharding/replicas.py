"""Who holds which pages of state, as explicit data, and what happens to it: loss, catching up, adoption.

The runs of a layer are its *atoms*: while a run of training lasts they are split but never merged, so that ids in
flight stay meaningful. After a loss the map is derived from the one before (`promote`), never dealt anew. Every other
change goes from the map there is to a target (`scheduling.refill`) in two steps: `with_learners` adds who must catch
up, `adopt` makes the target valid when all have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

from elaswave_spmd.sharding.layout import ModelLayout, deal_pages

PageRange = tuple[int, int, int]
"""(layer, first page, stop page)."""

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReplicaSet:
    """Pages [first, stop) of one layer's state with the same replicas.

    Args:
        replicas: who has the state, the primary included. Runs share the set: a replicated stage costs no square.
        learners: who gets the entries like a mirror but has no state yet.

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
        return self.layer, self.first, self.stop

    @property
    def num_pages(self) -> int:
        return self.stop - self.first

    @property
    def mirrors(self) -> tuple[int, ...]:
        return tuple(sorted(self.replicas - {self.primary}))

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who gets the entries of these pages from the primary: mirrors and learners."""
        return tuple(sorted((self.replicas | self.learners) - {self.primary}))

    def reaches(self, rank: int) -> bool:
        """Whether a worker holds or learns these pages: whether it has their entries."""
        return rank in self.replicas or rank in self.learners

    def __str__(self) -> str:
        mirrors = f" mirrors {list(self.mirrors)}" if len(self.replicas) > 1 else ""
        learners = f" learners {sorted(self.learners)}" if self.learners else ""
        return f"layer {self.layer} pages [{self.first}, {self.stop}): {self.primary}{mirrors}{learners}"


ReplicaMap = Mapping[int, tuple[ReplicaSet, ...]]
"""Layer -> its runs in page order."""


def deal_primaries(
    layout: ModelLayout, layers: Sequence[int], members: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """(layer, first, stop, primary) of a stage's layers, in page order, when nothing has happened yet.

    A run lies in one block. The loss page goes to the last member.
    """
    pages = [layout.layers[layer].num_state_pages for layer in layers]
    for layer, cuts in zip(layers, deal_pages(pages, len(members)), strict=True):
        for block in layout.layers[layer].state_blocks:
            for position, primary in enumerate(members):
                first = max(cuts[position], block.first_page)
                stop = min(cuts[position + 1], block.first_page + block.num_pages)
                if first < stop:
                    yield layer, first, stop, primary
        loss = layout.layers[layer].loss_block
        if loss is not None:
            yield layer, loss.first_page, loss.first_page + 1, members[-1]


def all_runs(replicas: ReplicaMap) -> Iterator[ReplicaSet]:
    """All runs, by layer and page."""
    return (run for _, runs in sorted(replicas.items()) for run in runs)


def primary_pages(replicas: ReplicaMap) -> dict[int, int]:
    """Rank -> pages that it is primary of; ranks without any are left out."""
    found: Counter[int] = Counter()
    for run in all_runs(replicas):
        found[run.primary] += run.num_pages
    return dict(found)


def pages_held(replicas: ReplicaMap, rank: int) -> int:
    """Pages whose state a worker has, as primary or mirror."""
    return sum(run.num_pages for run in all_runs(replicas) if rank in run.replicas)


def promote(replicas: ReplicaMap, lost: Collection[int]) -> tuple[ReplicaMap, tuple[ReplicaSet, ...]]:
    """The map without the lost: where a primary is lost, one of the surviving replicas takes its place.

    Learners are not promoted: they have no state. Runs keep their keys. The new primaries are chosen so that the pages
    of the primaries, over all layers, are as even as whole runs allow; where few can choose, they choose first.

    Returns: the map, without the runs that no replica is left of; and those runs as they were.
    """
    gone = frozenset(lost)
    left: dict[frozenset[int], frozenset[int]] = {}  # runs share sets: each is worked out once
    kept: dict[int, list[ReplicaSet | None]] = {}
    orphans: list[tuple[int, int, ReplicaSet]] = []  # (layer, place in it, run)
    dead: list[ReplicaSet] = []
    for layer, runs in sorted(replicas.items()):
        found: list[ReplicaSet | None] = kept.setdefault(layer, [])
        for run in runs:
            if run.replicas not in left:
                left[run.replicas] = run.replicas if run.replicas.isdisjoint(gone) else run.replicas - gone
            holding, learning = left[run.replicas], run.learners - gone if run.learners else _NONE
            if not holding:
                dead.append(run)
            elif run.primary in gone:
                orphans.append((layer, len(found), run))
                found.append(None)
            elif holding is run.replicas and learning == run.learners:
                found.append(run)
            else:
                found.append(ReplicaSet(*run.key, run.primary, holding, learning))
    load = Counter({rank: 0 for some in left.values() for rank in some})
    for runs in kept.values():
        for run in runs:
            if run is not None:
                load[run.primary] += run.num_pages
    chosen = _choose_primaries([(run, left[run.replicas]) for _, _, run in orphans], load)
    for (layer, place, run), primary in zip(orphans, chosen, strict=True):
        kept[layer][place] = ReplicaSet(*run.key, primary, left[run.replicas], run.learners - gone)
    return {layer: tuple(run for run in runs if run) for layer, runs in kept.items()}, tuple(dead)


def _choose_primaries(runs: Sequence[tuple[ReplicaSet, frozenset[int]]], load: Counter[int]) -> list[int]:
    """A replica for each run, by load: greedily, then changed one at a time while that makes the loads more even."""
    order = sorted(range(len(runs)), key=lambda i: (len(runs[i][1]), -runs[i][0].num_pages, runs[i][0].key))
    chosen = [-1] * len(runs)
    changed = True
    while changed:
        changed = False
        for i in order:
            run, candidates = runs[i]
            best, now = min(candidates, key=lambda rank: (load[rank], rank)), chosen[i]
            if now < 0 or load[best] + run.num_pages < load[now]:
                if now >= 0:
                    load[now] -= run.num_pages
                load[best] += run.num_pages
                chosen[i], changed = best, True
    return chosen


def with_learners(current: ReplicaMap, target: ReplicaMap) -> ReplicaMap:
    """The current replicas on the target's atoms; who is to be a replica and is none yet becomes a learner."""
    assert current.keys() == target.keys(), (sorted(current), sorted(target))
    return {layer: tuple(_refined(current[layer], runs)) for layer, runs in sorted(target.items())}


def _refined(current: Sequence[ReplicaSet], target: Sequence[ReplicaSet]) -> Iterator[ReplicaSet]:
    place = 0
    for run in target:
        while current[place].stop <= run.first:
            place += 1
        now = current[place]
        assert now.first <= run.first and run.stop <= now.stop, f"atoms are never merged: {now} -> {run}"
        learners = _NONE if run.replicas is now.replicas else run.replicas - now.replicas
        if run.key == now.key and learners == now.learners:
            yield now
        else:
            yield ReplicaSet(*run.key, now.primary, now.replicas, learners)


def transfers(replicas: ReplicaMap) -> tuple[tuple[ReplicaSet, int, int], ...]:
    """(run, source, destination) for each learner, by layer, page and destination: the primary serves."""
    return tuple((run, run.primary, rank) for run in all_runs(replicas) for rank in sorted(run.learners))


def moved_bytes(moves: Iterable[tuple[ReplicaSet, int, int]], page_bytes: int) -> int:
    """Bytes of `transfers`, at `page_bytes` bytes of state per page."""
    return sum(run.num_pages for run, _, _ in moves) * page_bytes


def missing_bytes(current: ReplicaMap, target: ReplicaMap, page_bytes: int) -> int:
    """Lower bound for the bytes of any way from one map to the other: each copy that is not there yet, once."""
    return moved_bytes(transfers(with_learners(current, target)), page_bytes)


def adopt(learning: ReplicaMap, target: ReplicaMap) -> ReplicaMap:
    """The target, once all learners of `learning` have caught up: nobody in it may be without the state."""
    assert learning.keys() == target.keys(), (sorted(learning), sorted(target))
    for layer, runs in target.items():
        for now, run in zip(learning[layer], runs, strict=True):
            assert now.key == run.key, f"the atoms agree: {now}, {run}"
            assert run.replicas <= now.replicas or run.replicas <= now.replicas | now.learners, f"{now}, {run}"
    return target


def unsurvived(replicas: ReplicaMap, members: Collection[int], losses: int = 2) -> tuple[int, int]:
    """How many sets of `losses` workers lose some page if they are lost at once, and how many such sets there are.

    Counted on the distinct sets of replicas: exact, and cheap while at most a few of these are smaller than `losses`.
    """
    among = frozenset(members)
    distinct = {run.replicas for runs in replicas.values() for run in runs}
    small = {held for held in distinct if len(held) <= losses and held <= among}
    alone = {rank for held in small if len(held) == 1 for rank in held}
    rest = sorted(among - alone)  # whoever holds a page alone makes every set with it a bad one
    total, good_or_bad = comb(len(among), losses), comb(len(rest), losses)
    bad = set()
    for held in small:
        if held.isdisjoint(alone):
            others = [rank for rank in rest if rank not in held] if len(held) < losses else []
            bad |= {held.union(more) for more in combinations(others, losses - len(held))}
    return total - good_or_bad + len(bad), total


def unsurvived_pairs(replicas: ReplicaMap, members: Collection[int]) -> float:
    """The fraction of pairs of workers whose loss at the same instant loses some page; 0 where there is no pair."""
    bad, total = unsurvived(replicas, members)
    return bad / total if total else 0.0


def unsurvived_text(replicas: ReplicaMap, members: Collection[int], losses: int = 2) -> str:
    """One line: "2 of 6 pairs of simultaneous losses lose some page"."""
    bad, total = unsurvived(replicas, members, losses)
    words = {1: "single", 2: "pairs of simultaneous"}.get(losses, f"sets of {losses} simultaneous")
    return f"{bad:,} of {total:,} {words} losses lose some page"


ReplicaRow = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first, stop, primary, mirrors, learners)."""


def to_rows(replicas: ReplicaMap) -> tuple[ReplicaRow, ...]:
    """A map of whole layers as plain data, for messages."""
    mirrors: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}
    rows = []
    for run in all_runs(replicas):
        shared = run.primary, run.replicas
        if shared not in mirrors:
            mirrors[shared] = run.mirrors
        rows.append((*run.key, run.primary, mirrors[shared], tuple(sorted(run.learners))))
    return tuple(rows)


def from_rows(rows: Sequence[ReplicaRow]) -> ReplicaMap:
    """The inverse of `to_rows`. Layers without state get no runs; the last has some, the loss page."""
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
    return {layer: tuple(runs) for layer, runs in found.items()}
