"""The replica map of a new mesh: mirrors in other failure domains first, even loads, few peers for each worker.

The mirrors of one worker's pages lie on at most `width` peers, the same for all layers: the worker's *copyset*
(Cidon et al., 2013). Fewer peers mean fewer pairs of losses that lose a page; more peers share its pages more evenly
when it is lost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import pairwise

import numpy as np

from elaswave_spmd.mesh import Topology
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import LayerReplicas, PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.sharding.state_sharding import StateSharding

DEFAULT_SCATTER = 4

_PIECE_ELEMENTS = 1 << 16
"""Layers are cut over the workers of their stage, and the mirrors of a worker's pages are spread, in pieces of at least
this many elements (a border between layers may cut smaller ones). Each piece is at least one message in every step, and
for small models these messages would cost more than an even load gains."""


def least_pages(layout: ModelLayout) -> int:
    """The smallest number of pages in which a run cuts layers and spreads mirrors, for `place_replicas`."""
    return max(1, _PIECE_ELEMENTS // layout.page_size)


def copyset_width(scatter: int, mirror_count: int, num_peers: int) -> int:
    """The number of peers, of `num_peers`, that mirror one worker's pages; `scatter` 0 means the default."""
    return min(num_peers, max(scatter or DEFAULT_SCATTER, mirror_count)) if mirror_count else 0


def place_replicas(
    layout: ModelLayout, sharding: StateSharding, *, least_pages: int = 1, least_joined: int = 0
) -> ReplicaMap:
    """The replica map of a new mesh.

    Primaries are those of `StateSharding.primary_ranges`. If the state is replicated, every member of the stage is a
    replica. If it is sharded, each primary's range of a layer is cut in up to `scatter` pieces, which the peers in its
    copyset mirror in turn. Over all layers of a stage, the numbers of mirrored pages are as even as those of primaries.
    If a stage has too few members for `mirror_count` mirrors, members of the nearest stages take the rest.

    Args:
        layout: the pages of each layer.
        sharding: the mesh and specs.
        least_pages: page ranges are not cut in pieces of fewer pages, as each piece is a message in every step.
        least_joined: as for `StateSharding.primary_ranges`.
    """
    choice, placed = MirrorChoice(sharding), list[list[ReplicaSet]]()
    for stage in range(len(sharding.stages)):
        ranges = sharding.primary_ranges(layout, stage, least_joined=least_joined)
        placed.append(list(_in_pieces(ranges, _replica_sets(sharding, stage, choice), least_pages)))
    if any(len(members) <= choice.count for members in sharding.stages):
        for of_stage in placed:
            choice.count_mirrors(of_stage)
    found: dict[int, list[ReplicaSet]] = {layer: [] for layer in range(sharding.layer_cuts[-1])}
    for members, of_stage in zip(sharding.stages, placed, strict=True):
        for pages in of_stage:
            found[pages.layer].append(pages if len(members) > choice.count else choice.completed(pages))
    return {layer: LayerReplicas(of_layer) for layer, of_layer in found.items()}


def replicas_at(
    layout: ModelLayout,
    sharding: StateSharding,
    ranks: Collection[int],
    *,
    least_pages: int = 1,
    least_joined: int = 0,
) -> ReplicaMap:
    """The page ranges of `place_replicas`, layer by layer, that have one of these workers as a replica.

    If all mirrors are in the stage of their primary, this takes time only for such page ranges and the stages of these
    workers, not for the whole mesh.
    """
    choice, wanted = MirrorChoice(sharding), frozenset(ranks)
    if any(len(members) <= choice.count for members in sharding.stages):
        # Mirrors in other stages are chosen by the loads that all page ranges make.
        whole = place_replicas(layout, sharding, least_pages=least_pages, least_joined=least_joined)
        return {layer: tuple(it for it in of_layer if it.replicas & wanted) for layer, of_layer in whole.items()}
    found: dict[int, list[ReplicaSet]] = {layer: [] for layer in range(sharding.layer_cuts[-1])}
    for stage, members in enumerate(sharding.stages):
        if wanted.isdisjoint(members):
            continue
        sets = _replica_sets(sharding, stage, choice, wanted)
        ranges = sharding.primary_ranges(layout, stage, sets.keys(), least_joined=least_joined)
        for pages in _in_pieces(ranges, sets, least_pages, wanted):
            found[pages.layer].append(pages)
    return {layer: LayerReplicas(of_layer) for layer, of_layer in found.items()}


def _replica_sets(
    sharding: StateSharding, stage: int, choice: MirrorChoice, at: Set[int] | None = None
) -> Mapping[int, Sequence[frozenset[int]]]:
    """Primary -> the replica sets that its pieces get in turn. They have members of the primary's stage only.

    Args:
        at: only primaries that share a piece with one of these workers are needed; None for all.
    """
    members = sharding.stages[stage]
    if sharding.is_replicated:
        everybody = [frozenset(members)]
        # Replicated state is its own mirror: one shared set object for the whole stage.
        return {rank: everybody for rank in members}
    return _copyset_replicas(members, sharding.mesh.topology, choice.count, choice.width(stage), at)


def _in_pieces(
    ranges: Iterator[tuple[PageRange, int]],
    sets: Mapping[int, Sequence[frozenset[int]]],
    least_pages: int,
    at: Set[int] | None = None,
) -> Iterator[ReplicaSet]:
    """Cut each range in as many pieces as its primary has replica sets, or fewer if they would be too small.

    The replica sets of a primary take turns. If no range is too small, they do so page by page over all layers. Then
    mirrored pages come out as even as the pages of primaries, since the primaries of a stage have equally many pages,
    and the j-th mirrors of all copysets are a permutation of the stage.

    Args:
        ranges: (page range, its primary).
        sets: primary -> the replica sets of its pieces.
        least_pages: as for `place_replicas`.
        at: only pieces that have one of these workers as a replica are returned; None for all.
    """
    turns: Counter[int] = Counter()
    for (layer, first, stop), primary in ranges:
        own = sets[primary]
        turn, page = turns[primary], first
        large_enough = max(1, (stop - first) // least_pages)
        for size in even_counts(stop - first, min(len(own), stop - first, large_enough)):
            replicas = own[turn % len(own)]
            if at is None or not at.isdisjoint(replicas):
                yield ReplicaSet(layer, page, page + size, primary, replicas)
            turn, page = turn + 1, page + size
        turns[primary] += large_enough if large_enough < len(own) else stop - first


def _copyset_replicas(
    members: Sequence[int], topology: Topology, count: int, width: int, at: Set[int] | None = None
) -> dict[int, list[frozenset[int]]]:
    """Worker -> the replica sets of its pieces, within its stage: the worker itself and `count` of its peers, in turn.

    Args:
        members: the workers of the stage.
        topology: their failure domains.
        count: the number of mirrors of each page.
        width: the number of peers that mirror a worker's pages.
        at: workers that are not among these and have no peer among them may be left out, to save time; None for none.
    """
    if count >= len(members) - 1:
        everybody = [frozenset(members)] * max(1, width)
        return {rank: everybody for rank in members}
    if count == 0:
        return {rank: [frozenset((rank,))] for rank in members}
    # A narrower copyset on other hosts is better than a wide one that includes the worker's own host, or that has two
    # mirrors of a page on one host.
    far = _far_offsets(members, topology)
    width = min(width, len(far)) if len(far) >= count else width  # domains come before the width of the copyset
    offsets = _offsets(len(members), far, width)
    apart = far.start if count > 1 else 0  # workers at least this far from each other are on different hosts
    most = 1 + (len(far) - 1) // apart if apart and far else 0
    if most >= count and any(b - a < apart for a, b in pairwise(offsets)):
        width = min(width, most)
        offsets = [far[j * (len(far) - 1) // (width - 1)] for j in range(width)]
    ranks, peers = _ranks_and_peers(members, topology, offsets, spreads=count > 1)
    if at is not None:
        near = np.isin(ranks, list(at)) | np.isin(peers, list(at)).any(axis=1)
        ranks, peers = ranks[near], peers[near]
    return {
        rank: [frozenset((rank, *(own[(j + i) % width] for i in range(count)))) for j in range(width)]
        for rank, own in zip(ranks.tolist(), peers.tolist(), strict=True)
    }


def _far_offsets(members: Sequence[int], topology: Topology) -> range:
    """The offsets, among members in the order of their hosts, at which each member's peer is on another host."""
    largest = max(Counter(topology.paths(members)).values())
    return range(largest, len(members) - largest + 1)


def copysets(members: Sequence[int], topology: Topology, width: int) -> dict[int, tuple[int, ...]]:
    """Member -> `width` peers, far from it in the topology. The j-th peers of all members permute the stage.

    The members, in the order of their domains, form a circle. Each gets the peers that lie 1/(width + 1),
    2/(width + 1) ... of the circle ahead, or of the part of it in which every member's peer is on another host. If a
    peer could be farther away, two members exchange peers.
    """
    offsets = _offsets(len(members), _far_offsets(members, topology), width)
    ranks, peers = _ranks_and_peers(members, topology, offsets)
    return dict(zip(ranks.tolist(), map(tuple, peers.tolist()), strict=True))


def _offsets(num_members: int, far: range, width: int) -> list[int]:
    """How far ahead a member's peers are: spread over the circle, or over `far` if that is wide enough."""
    assert 0 < width < num_members, (width, num_members)
    if len(far) >= width:
        return [far[(2 * j + 1) * len(far) // (2 * width)] for j in range(width)]
    return [num_members * (j + 1) // (width + 1) for j in range(width)]


def _ranks_and_peers(
    members: Sequence[int], topology: Topology, offsets: Sequence[int], *, spreads: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """`copysets` as arrays: members in the order of their domains, and int64 [members, width]: the peers of each.

    Args:
        members: the workers of the stage.
        topology: their failure domains.
        offsets: how far ahead the peers are, before exchanges.
        spreads: True if no exchange may give a member two peers on one host.
    """
    by_domain = sorted(zip(topology.paths(members), members, strict=True))
    domains = _Domains([rank for _, rank in by_domain], topology)
    n, width = len(members), len(offsets)
    everybody = np.arange(n)
    places = np.stack([(everybody + offset) % n for offset in offsets])
    # With width n - 1 all others are peers, and there is nothing to exchange.
    for j in range(width if width < n - 1 else 0):
        peer, others = places[j], np.delete(places, j, axis=0)
        for a in np.flatnonzero(domains.distances(everybody, peer) < domains.farthest).tolist():
            now = domains.distances(everybody, peer)
            # Exchange peers with the member with which both together gain most distance. The j-th peers stay a
            # permutation of the stage, so loads stay even.
            gain = domains.distances(a, peer) + domains.distances(everybody, peer[a]) - now - now[a]
            # No member may become its own peer, or get the same peer twice.
            taken = (peer == a) | (everybody == peer[a]) | (others == peer[a]).any(axis=0)
            taken |= np.isin(peer, others[:, a])
            if spreads:
                taken |= (domains.distances(others, peer[a]) == 0).any(axis=0)
                taken |= (domains.distances(others[:, [a]], peer[None]) == 0).any(axis=0)
            b = int(np.argmax(np.where(taken, -1, gain)))
            if not taken[b] and gain[b] > 0:
                peer[a], peer[b] = peer[b], peer[a]
    ranks = np.array(domains.ranks)
    return ranks, ranks[places].T


class _Domains:
    """The topology distances of a stage's members as arrays. A *place* is an index into `ranks`."""

    def __init__(self, ranks: Sequence[int], topology: Topology) -> None:
        self.ranks = ranks
        paths = topology.paths(ranks)
        self._levels = []  # int[members] per level: equal numbers share this domain and all around it
        for level in range(len(paths[0])):
            prefixes = {path: path[: level + 1] for path in {*paths}}
            numbers = {prefix: i for i, prefix in enumerate(sorted({*prefixes.values()}))}
            number_of = {path: numbers[prefix] for path, prefix in prefixes.items()}
            self._levels.append(np.array([number_of[path] for path in paths]))
        self.farthest = len(self._levels) - sum(bool((level == level[0]).all()) for level in self._levels)

    def distances(self, a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
        """Topology.distance of the members in the places a and b."""
        return len(self._levels) - np.sum([level[a] == level[b] for level in self._levels], axis=0)


class MirrorChoice:
    """Chooses mirrors one by one. For this it counts how many pages each worker mirrors, and of which primaries.

    `count` is the number of mirrors of each page: `mirror_count`, or the number of other workers if that is less.

    Args:
        sharding: the mesh and specs.
        pages: the number of state pages of each stage, if mirrors inside the stages are to be chosen.
    """

    def __init__(self, sharding: StateSharding, pages: Sequence[int] = ()) -> None:
        self._stages = sharding.stages
        self._topology = sharding.mesh.topology
        self._scatter = sharding.scatter
        self._is_replicated = sharding.is_replicated
        self.stage_of = {rank: stage for stage, members in enumerate(self._stages) for rank in members}
        self.count = min(sharding.mirror_count, len(self.stage_of) - 1)
        self._shares = [-(-self.count * total // len(r)) for total, r in zip(pages, self._stages, strict=False)]
        self.mirrored: dict[int, int] = dict.fromkeys(self.stage_of, 0)
        self._layers: list[LayerReplicas] = []  # layers that stay as they are
        self._peers: defaultdict[int, set[int]] = defaultdict(set)  # primary -> its mirrors in all other layers
        self._by_load: dict[int, list[tuple[int, int]]] = {}  # stage -> (mirrored pages, rank), ascending
        self._sets: dict[frozenset[int], frozenset[int]] = {}
        self._spans: dict[int, int] = {}

    def num_replicas(self, stage: int) -> int:
        """The replicas that each page of a stage should have."""
        return max(self.count + 1, len(self._stages[stage]) if self._is_replicated else 0)

    def width(self, stage: int) -> int:
        """The size of a copyset. If the stage is too small for `count` mirrors, other stages' members are included."""
        inside = len(self._stages[stage]) - 1
        num_peers = inside if inside >= self.count else len(self.stage_of) - 1
        return copyset_width(self._scatter, self.count, num_peers)

    def count_layer(self, layer: LayerReplicas) -> None:
        """Counts the mirrors of a layer that stays as it is."""
        self._layers.append(layer)
        for rank, num_pages in layer.mirrored_pages.items():
            self.mirrored[rank] += num_pages

    def peers(self, primary: int) -> Set[int]:
        """The workers that mirror pages of a primary."""
        return self._peers[primary].union(*(layer.mirrors.get(primary, ()) for layer in self._layers))

    def count_mirrors(self, replica_sets: Sequence[ReplicaSet]) -> None:
        """Counts the mirrors of page ranges that stay as they are."""
        total: Counter[tuple[int, frozenset[int]]] = Counter()
        for pages in replica_sets:
            total[pages.primary, pages.replicas] += pages.num_pages
        for (primary, held), num_pages in total.items():
            self.add(primary, held, num_pages)

    def add(self, primary: int, held: Set[int], num_pages: int) -> None:
        """Counts `num_pages` pages of `primary` for each other worker in `held`."""
        peers = self._peers[primary]
        for rank in held:
            if rank == primary:
                continue
            order = self._by_load.get(self.stage_of[rank])
            if order is not None:
                del order[bisect_left(order, (self.mirrored[rank], rank))]
                insort(order, (self.mirrored[rank] + num_pages, rank))
            self.mirrored[rank] += num_pages
            peers.add(rank)

    def completed(self, pages: ReplicaSet) -> ReplicaSet:
        """The page range with mirrors added until it has `count`, its learners first. The result has no learners."""
        # Unchanged ranges are returned as they are, so that callers may compare by identity.
        if not pages.learners and len(pages.replicas) > self.count:
            return pages
        held = set(pages.replicas)
        while len(held) <= self.count:
            found = self._pick(pages, held)
            self.add(pages.primary, {found}, pages.num_pages)
            held.add(found)
        return ReplicaSet(*pages.key, pages.primary, self.shared(frozenset(held)))

    def ranked(self, held: Set[int], primary: int) -> list[int]:
        """The mirrors in the order in which to keep them: in the primary's stage, far away, below the share, in its
        copyset."""
        stage, peers = self.stage_of[primary], self.peers(primary)
        share = self._shares[stage]

        def key(rank: int) -> tuple[bool, int, bool, bool, int, int]:
            far, load = self._topology.distance(primary, rank), self.mirrored[rank]
            return self.stage_of[rank] != stage, -far, 8 * load >= 9 * share, rank not in peers, load, rank

        return sorted(held, key=key)

    def shared(self, held: frozenset[int]) -> frozenset[int]:
        """The one set object for these replicas, so that page ranges share it."""
        return self._sets.setdefault(held, held)

    def distance(self, rank: int, held: Set[int]) -> int:
        """The topology distance, in levels, between a worker and the nearest of the replicas in `held`."""
        return min(self._topology.distance(rank, other) for other in held)

    def _pick(self, pages: ReplicaSet, held: Set[int]) -> int:
        """Choose one more mirror: in the primary's stage while a worker is left there, else in the nearest stage."""
        stage = self.stage_of[pages.primary]
        gaps: defaultdict[int, list[int]] = defaultdict(list)
        for rank in pages.learners:
            if rank in self.stage_of and rank not in held:
                gaps[abs(self.stage_of[rank] - stage)].append(rank)
        if sum(self.stage_of[rank] == stage for rank in held) < len(self._stages[stage]):
            return self._least(gaps[0], held) if gaps[0] else self._pick_inside(stage, pages.primary, held)
        for gap in range(1, len(self._stages)):
            near = [s for s in (stage - gap, stage + gap) if 0 <= s < len(self._stages)]
            free = [rank for s in near for rank in self._stages[s] if rank not in held]
            peers = self.peers(pages.primary)
            if len(peers) >= self.width(stage):
                free = [rank for rank in free if rank in peers] or free
            if free:
                return self._least(gaps[gap] or free, held)
        raise AssertionError(f"no worker is left to mirror {pages}")

    def _least(self, ranks: Sequence[int], held: Set[int]) -> int:
        """The worker that mirrors least among those farthest from the replicas."""
        return min(ranks, key=lambda rank: (-self.distance(rank, held), self.mirrored[rank], rank))

    def _pick_inside(self, stage: int, primary: int, held: Set[int]) -> int:
        """Choose a mirror in the primary's stage.

        If the primary's copyset is full, a worker of it is taken while its load is near the stage's share (less than
        9/8 of it). Otherwise the worker with the least load is taken, but one on another host than the replicas is
        preferred while it mirrors less than twice the share.
        """
        farthest, share, peers = self.farthest(stage), self._shares[stage], self.peers(primary)
        if len(peers) >= self.width(stage):
            inside = [rank for rank in peers if rank not in held and self.stage_of[rank] == stage]
            able = [rank for rank in inside if 8 * self.mirrored[rank] < 9 * share]
            far = [rank for rank in able if self._topology.distance(primary, rank) == farthest]
            if found := [rank for rank in far if not farthest or self.distance(rank, held)]:
                return min(found, key=lambda rank: (self.mirrored[rank], rank))
        if stage not in self._by_load:
            self._by_load[stage] = sorted((self.mirrored[rank], rank) for rank in self._stages[stage])
        best, best_distance = -1, -1
        for load, rank in self._by_load[stage]:
            if rank in held:
                continue
            # The list is sorted by load: beyond the share, distance does not make up for an uneven load any more.
            if best_distance == farthest or (best >= 0 and load >= (share if best_distance else 2 * share)):
                break
            if (distance := self.distance(rank, held)) > best_distance:
                best, best_distance = rank, distance
        return best

    def farthest(self, stage: int) -> int:
        """The greatest distance in a stage: each member has another one that far away."""
        if stage not in self._spans:
            first, *others = self._stages[stage]
            self._spans[stage] = max((self._topology.distance(first, rank) for rank in others), default=0)
        return self._spans[stage]
