"""The peers of each worker in a mesh epoch: the members that it may send to, or hear from.

Up to `WIDEST` members everybody is a peer of everybody. On larger meshes a worker is told the addresses of its peers
alone, and has links to nobody else (docs/protocol.md, C16). They follow from what the controller knows when it begins
the epoch: the workers that a stage's gradients and parameters go to, the next worker of each micro-batch, the rounds of
votes, the replicas and learners of pages, and who may have something of a micro-batch that a recovery plan names.

Whoever sends to a worker may get an answer, so that peers are peers of each other. The set of a worker may have more
than it will talk to, and never less.

Of a recovery plan a worker is told the lines of those micro-batches alone that it has to do with: it has a line for one
of them, or may keep something of it, as it has run it in any mesh epoch of the step, or has reported it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from elaswave_spmd.recovery.messages import Recompute, Reconfigure, StepReport
from elaswave_spmd.recovery.vote_exchange import WIDEST, pairs_of
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ranges_of

Pairs = npt.NDArray[np.int64]
"""[n, 2] of ranks."""
Runners = npt.NDArray[np.int64]
"""[stage, micro-batch] -> worker."""
Keys = npt.NDArray[np.int64]
"""`rank << 32 | number`, ascending, each once: numbers of workers, of other workers or of micro-batches."""
Ends = npt.NDArray[np.int64]
"""Keys of two workers, with the lower rank in front: each pair once."""

_NOBODY: frozenset[int] = frozenset()
_NO_STAGE = -1
"""The stage of a worker that is no member any more."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The peers of all members of a mesh epoch.

    Args:
        shared: rank -> peers. Workers of a stage share the set object, so that a stage of 10,000 needs no memory for
            the square of its workers; the worker itself is in it.
        pairs: further peers of workers.
        microbatches: those of workers of whose lines in a recovery plan they are told; None: they are told all lines.
    """

    shared: Mapping[int, frozenset[int]]
    pairs: Ends
    microbatches: Keys | None = None

    @classmethod
    def among(cls, ranks: Collection[int]) -> Peers:
        """Everybody is a peer of everybody."""
        everybody = frozenset(ranks)
        return cls(dict.fromkeys(ranks, everybody), np.empty(0, np.int64))

    @cached_property
    def _keys(self) -> Keys:
        return _both_ways(self.pairs)

    def of(self, rank: int) -> frozenset[int]:
        """The peers of one member, and itself."""
        return self.shared[rank] | _others_of(self._keys, rank)

    def numbers(self) -> dict[int, int]:
        """Rank -> the number of its peers, without itself."""
        own = by_rank(self._keys)
        return {rank: len(peers) - 1 + len(own.get(rank, _NOBODY) - peers) for rank, peers in self.shared.items()}

    def since(self, before: Peers, ranks: Iterable[int]) -> Iterator[tuple[int, frozenset[int], frozenset[int]]]:
        """The peers that members have now and did not have before, or perhaps had in another way.

        Args:
            before: members that it does not have are told all of their peers.

        Yields:
            (rank, those that it shares with others, those of its own). Equal sets of the first kind are one object.
        """
        differences: dict[tuple[int, int], frozenset[int]] = {}  # sets are shared: each pair is worked out once
        fresh = by_rank(_both_ways(_without(self.pairs, before.pairs)))
        for rank in ranks:
            now, was = self.shared[rank], before.shared.get(rank, _NOBODY)
            if (key := (id(now), id(was))) not in differences:
                differences[key] = now - was
            own = fresh.get(rank, _NOBODY) if was else _others_of(self._keys, rank)
            yield rank, differences[key], own - now

    def not_in(self, after: Peers) -> dict[int, frozenset[int]]:
        """Rank -> peers that are none any more though both are members still, of those that have any."""
        found, members = dict[int, frozenset[int]](), frozenset(after.shared)
        differences: dict[tuple[int, int], frozenset[int]] = {}
        gone = by_rank(_both_ways(_without(self.pairs, after.pairs)))
        for rank, now in after.shared.items():
            was = self.shared.get(rank, _NOBODY)
            if (key := (id(was), id(now))) not in differences:
                differences[key] = (was - now) & members
            shared = differences[key] - _others_of(after._keys, rank) if differences[key] else _NOBODY
            if some := shared | ((gone.get(rank, _NOBODY) & members) - now):
                found[rank] = some
        return found

    def __or__(self, other: Peers) -> Peers:
        """The peers of the members of this epoch, and those that they have in another one."""
        unions: dict[tuple[int, int], frozenset[int]] = {}
        shared = {}
        for rank, peers in self.shared.items():
            others = other.shared.get(rank, peers)
            if (key := (id(peers), id(others))) not in unions:
                unions[key] = peers if others <= peers else peers | others
            shared[rank] = unions[key]
        return Peers(shared, _each_once(np.concatenate((self.pairs, other.pairs))))


@dataclass(frozen=True)
class Reached:
    """The members that one worker has links to, as the mesh changes.

    What it does in the mesh epoch that it has entered goes on until it enters another one, and so do the links for it.
    An epoch between the two may have been overtaken before this worker has entered it.

    Args:
        addressed: mesh epoch -> members whose addresses came with it, from the one on that was entered last.
    """

    addressed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def after(self, message: Reconfigure, entered: int) -> Reached:
        """The same when a Reconfigure has come, in the mesh epoch that was `entered` last; -1: in none."""
        kept = {epoch: ranks for epoch, ranks in self.addressed.items() if epoch >= entered}
        return Reached({**kept, message.epoch: frozenset(message.addresses)})

    @property
    def ranks(self) -> frozenset[int]:
        """The members, and those that have been some meanwhile."""
        return _NOBODY.union(*self.addressed.values())


def _each_once(keys: npt.NDArray[np.int64]) -> Keys:
    found = np.sort(keys)
    return found[np.diff(found, prepend=-1) != 0]


def _both_ways(pairs: Ends) -> Keys:
    """The two workers of each pair, each as the other one's."""
    return _each_once(np.concatenate((pairs, (pairs & 0xFFFFFFFF) << 32 | pairs >> 32)))


def _without(keys: Keys, others: Keys) -> Keys:
    """The keys of the first array, ascending, that are not among the second."""
    if not len(others):
        return keys
    places = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    return keys[others[places] != keys]


def _others_of(keys: Keys, rank: int) -> frozenset[int]:
    first, stop = np.searchsorted(keys, (rank << 32, (rank + 1) << 32))
    return frozenset((keys[first:stop] & 0xFFFFFFFF).tolist())


def by_rank(keys: Keys) -> dict[int, frozenset[int]]:
    """Rank -> its numbers, of those that have any."""
    if not len(keys):
        return {}
    ranks = keys >> 32
    starts = np.flatnonzero(np.diff(ranks, prepend=-1))
    bounds, found = [*starts.tolist(), len(keys)], (keys & 0xFFFFFFFF).tolist()
    return {rank: frozenset(found[a:b]) for rank, (a, b) in zip(ranks[starts].tolist(), pairwise(bounds), strict=True)}


@dataclass(frozen=True)
class Ran:
    """The workers that have run each part of a step in one mesh epoch.

    Args:
        step: that was under way when the epoch ended.
        placement: of the epoch.
        plan: lines of that step, if the epoch began in the middle of it; else all of it has run as placed.
    """

    step: int
    placement: Placement
    plan: Sequence[Recompute] = ()

    @cached_property
    def runners(self) -> Runners:
        """The worker of each micro-batch on each stage."""
        return _runners(self.placement, _columns(self.plan))


@dataclass(frozen=True)
class Recovery:
    """The work that an epoch takes over from others, as far as it says who talks to whom.

    Args:
        ran: of the step under way, and of the one before it, which a member that is behind has to complete.
        plan: what is computed again of the step under way; None: no member has begun it. Of a step that begins anew it
            is empty: all of it runs as placed, and nothing that others have of it is used.
        reports: rank -> its StepReport.
        linked: pairs that need a link anyway: it is made again, or was missed.
    """

    ran: Sequence[Ran]
    plan: Sequence[Recompute] | None
    reports: Mapping[int, StepReport]
    linked: Collection[frozenset[int]] = ()

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """Stages, micro-batches and workers of the lines of the plan: [3, n]."""
        return _columns(self.plan or ())


def peers_of(
    placement: Placement,
    layout: ModelLayout,
    *,
    num_validation_microbatches: int = 0,
    recovery: Recovery | None = None,
    checks: bool = False,
    widest: int = WIDEST,
) -> Peers | None:
    """The peers of all members of a mesh epoch; None: everybody is a peer of everybody.

    Args:
        placement: of the epoch, with its replicas and learners.
        num_validation_microbatches: micro-batches of a validation.
        recovery: what other epochs have left; None: it is the first one.
        checks: micro-batches and sums are checked, by anybody of a stage and by any replica.
        widest: members up to which everybody is a peer of everybody.
    """
    mesh = placement.mesh
    if mesh.num_workers <= widest:
        return None
    replica_map = placement.replica_map(layout)
    guests = _stage_guests(placement, replica_map, recovery, checks=checks)
    pairs = [pairs_of(mesh.members, widest, mesh.shape.stage_sizes), _crossings(_runners(placement, _columns(())))]
    pairs += [_crossings(_turns(placement, num_validation_microbatches))]
    pairs += [_as_pairs(_mirrors(placement, replica_map))]
    if recovery is not None:
        pairs += [_hands(placement, recovery), _as_pairs(tuple(ends) for ends in recovery.linked)]
    a, b = np.ascontiguousarray(np.concatenate(pairs).T)
    stage_of = np.full(int(max(a.max(initial=0), b.max(initial=0), *mesh.members)) + 1, _NO_STAGE)
    for stage, members in enumerate(mesh.stages):
        stage_of[[*members]] = stage
    stages = stage_of[a], stage_of[b]
    apart = (stages[0] != stages[1]) & (np.minimum(*stages) != _NO_STAGE)  # within a stage they are shared
    a, b = a[apart], b[apart]
    ends = _each_once(np.minimum(a, b) << 32 | np.maximum(a, b))
    microbatches = _microbatches(recovery) if recovery is not None and recovery.plan else None
    return Peers(_shared(placement, _related(placement, layout, checks=checks), guests), ends, microbatches)


# ---- stages: sums and reduced gradients to primaries, parameters from them


def _related(placement: Placement, layout: ModelLayout, *, checks: bool) -> list[set[int]]:
    """Per stage: itself, and the stages that read a parameter of it, or own one that it reads.

    With checks the stages before and after as well: any worker of a stage may be sent the inputs of a micro-batch.
    """
    number, reach = placement.num_stages, int(checks)
    found = [{*range(max(0, stage - reach), min(number, stage + reach + 1))} for stage in range(number)]
    for (owner, _), readers in layout.readers.items():
        for reader, _ in readers:
            stages = placement.stage_of_layer(owner), placement.stage_of_layer(reader)
            for a, b in (stages, stages[::-1]):
                found[a].add(b)
    return found


def _stage_guests(
    placement: Placement, replica_map: ReplicaMap, recovery: Recovery | None, *, checks: bool
) -> list[set[int]]:
    """Per stage the workers of others that have to do with all of its members.

    They are primaries of its pages, or with checks all replicas; and in the middle of a step those that have sums of
    its layers, as they have come from there.
    """
    own = [frozenset(members) for members in placement.mesh.stages]
    found: list[set[int]] = [set() for _ in own]
    for stage, (members, guests) in enumerate(zip(own, found, strict=True)):
        for layer in placement.layers_of_stage(stage):
            ranges = ranges_of(replica_map, layer)
            guests.update((ranges.holders if checks else ranges.primaries) - members)
    everybody = _NOBODY.union(*own)
    for ran in recovery.ran if recovery is not None and recovery.plan is not None else ():
        for stage, ranks in enumerate(ran.placement.mesh.stages):
            layers = ran.placement.layers_of_stage(stage)
            for now in {placement.stage_of_layer(layer) for layer in layers}:
                found[now].update(everybody.intersection(ranks) - own[now])
    return found


def _shared(placement: Placement, related: Sequence[set[int]], guests: Sequence[set[int]]) -> dict[int, frozenset[int]]:
    mesh, stages = placement.mesh, placement.mesh.stages
    visitors = [frozenset().union(*(guests[near] for near in around)) for around in related]
    found: dict[int, frozenset[int]] = {}
    for members, around, others in zip(stages, related, visitors, strict=True):
        found |= dict.fromkeys(members, others.union(*(stages[near] for near in around)))
    visited: dict[int, set[int]] = defaultdict(set)  # guest -> stages
    for stage, others in enumerate(visitors):
        for rank in others:
            visited[rank].add(stage)
    unions: dict[tuple[int, frozenset[int]], frozenset[int]] = {}  # guests may be many: those of a kind share their set
    for rank, visits in visited.items():
        if (key := (mesh.stage_of(rank), frozenset(visits))) not in unions:
            hosts = (*(stages[stage] for stage in visits), *(visitors[stage] for stage in visits))
            unions[key] = found[rank].union(*hosts)
        found[rank] = unions[key]
    return found


# ---- pairs


def _runners(placement: Placement, columns: npt.NDArray[np.int64]) -> Runners:
    """The worker of each micro-batch on each stage: by the lines of a plan, in columns, and else as placed."""
    found = np.array([placement.workers_of_microbatches(stage) for stage in range(placement.num_stages)], np.int64)
    stages, microbatches, workers = columns
    found[stages, microbatches] = workers
    return found


def _turns(placement: Placement, num_validation_microbatches: int) -> Runners:
    """The worker of each micro-batch of a validation on each stage."""
    numbers = np.arange(num_validation_microbatches)
    return np.array([np.array(members, np.int64)[numbers % len(members)] for members in placement.mesh.stages])


def _crossings(runners: Runners) -> Pairs:
    """The two workers of each micro-batch on neighbouring stages."""
    return np.stack((runners[:-1], runners[1:]), axis=-1).reshape(-1, 2)


def _mirrors(placement: Placement, replica_map: ReplicaMap) -> Iterator[tuple[int, int]]:
    """A primary with each replica and learner of its pages that is not in its stage."""
    stage_of = {rank: stage for stage, members in enumerate(placement.mesh.stages) for rank in members}
    own = [frozenset(members) for members in placement.mesh.stages]
    elsewhere: dict[tuple[int, int], tuple[int, ...]] = {}  # page ranges share sets: each is looked through once
    for layer in replica_map:
        ranges, members = ranges_of(replica_map, layer), own[placement.stage_of_layer(layer)]
        if ranges.holders <= members and ranges.learners <= members:
            continue  # nearly always
        for pages in ranges:
            stage = stage_of[pages.primary]
            for ranks in (pages.replicas, pages.learners) if pages.learners else (pages.replicas,):
                if (key := (id(ranks), stage)) not in elsewhere:
                    elsewhere[key] = tuple(rank for rank in ranks if stage_of.get(rank) != stage)
                for rank in elsewhere[key]:
                    yield pages.primary, rank


def _hands(placement: Placement, recovery: Recovery) -> Pairs:
    """The worker of each line of a plan, with those that its outputs go to, and those that may have its inputs.

    Who has run the micro-batch keeps what it had sent: in any epoch of the step, on the stage that ended where the
    line's begins, or on the one that began where it ends.
    """
    cuts = placement.layer_cuts
    if not recovery.plan:
        return _as_pairs(())
    runners, (stages, microbatches, workers) = _runners(placement, recovery.columns), recovery.columns
    found = [_crossings(runners), _reported(cuts, runners, recovery.reports)]
    before, after = np.maximum(np.array(cuts[:-1]) - 1, 0), np.minimum(cuts[1:], cuts[-1] - 1)
    for ran in recovery.ran:
        had = ran.runners
        for layers in (before, after):
            there = np.searchsorted(ran.placement.layer_cuts, layers, side="right") - 1  # their stages in that epoch
            found.append(np.stack((workers, had[there[stages], microbatches]), axis=1))
    return np.concatenate(found)


def _reported(cuts: Sequence[int], runners: Runners, reports: Mapping[int, StepReport]) -> Pairs:
    """Pairs: who keeps a tensor by its StepReport, with the worker of the micro-batch on the stage that takes it."""
    parts = [(rank, part) for rank, report in reports.items() for part in report.partial_steps]
    # An activation goes into the stage that begins at this layer, a gradient into the one that ends before it.
    rows = [(rank, layer, u, 0) for rank, part in parts for layer, u in part.activations]
    rows += [(rank, layer + 1, u, 1) for rank, part in parts for layer, u in part.gradients]
    table = np.array(rows, np.int64).reshape(-1, 4)
    ranks, layers, microbatches, back = table[np.isin(table[:, 1], cuts[1:-1])].T
    return np.stack((ranks, runners[np.searchsorted(cuts, layers) - back, microbatches]), axis=1)


def _microbatches(recovery: Recovery) -> Keys:
    """The micro-batches that workers have to do with: by a line of the plan, or as they may keep something of them."""
    _, microbatches, workers = recovery.columns
    found = [workers << 32 | microbatches]
    found += [(ran.runners << 32 | np.arange(ran.runners.shape[1])).ravel() for ran in recovery.ran]
    parts = [(rank, part) for rank, report in recovery.reports.items() for part in report.partial_steps]
    kept = [rank << 32 | u for rank, part in parts for _, u in (*part.activations, *part.gradients)]
    return _each_once(np.concatenate([*found, np.array(kept, np.int64)]))


def _columns(plan: Sequence[Recompute]) -> npt.NDArray[np.int64]:
    """Stages, micro-batches and workers of lines: [3, n]."""
    numbers = chain.from_iterable((line.stage, line.microbatch, line.worker) for line in plan)
    return np.fromiter(numbers, np.int64, 3 * len(plan)).reshape(-1, 3).T


def _as_pairs(pairs: Iterable[Sequence[int]]) -> Pairs:
    return np.array([*pairs], np.int64).reshape(-1, 2)
