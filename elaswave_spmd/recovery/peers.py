"""The peers of each worker in a mesh epoch: the members that it may send to, or hear from.

On meshes of up to `WIDEST` members, all members are peers of each other. On larger meshes a worker gets only the
addresses of its peers, and has links to no other members (docs/protocol.md, C16). The peers follow from what the
controller knows when it begins the epoch: the workers that a stage's gradients and parameters go to, the next worker of
each micro-batch, the rounds of votes, the replicas and learners of pages, and the workers that may have something of a
micro-batch in a recovery plan.

The relation is symmetric, since a worker that gets a message may have to answer. A worker may have more peers than it
will talk to, but never fewer.

On large meshes a worker also gets only the lines of a recovery plan that concern it. A micro-batch concerns a worker if
the worker has a line for it, or may keep something of it: because it has run it in any mesh epoch of the step, or has
reported something of it.
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
"""Pairs of ranks, int64 [n, 2]."""
Runners = npt.NDArray[np.int64]
"""The rank of the worker of each micro-batch on each stage, int64 [stages, micro-batches]."""
Keys = npt.NDArray[np.int64]
"""Pairs (rank, number) as `rank << 32 | number`, ascending and without duplicates. The number is the rank of another
worker, or a micro-batch."""
Ends = npt.NDArray[np.int64]
"""Keys of pairs of workers, in which the lower rank comes first: each pair once."""

_NOBODY: frozenset[int] = frozenset()
_NO_STAGE = -1
"""The number that stands for the stage of a worker that is not a member any more."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The peers of all members of a mesh epoch.

    Args:
        shared: rank -> peers, the worker itself included. Workers of a stage share the set object, so that a stage of
            10,000 workers does not need memory for 10,000 sets of that size.
        pairs: pairs of workers that are peers in addition.
        microbatches: (worker, micro-batch) for the lines of the recovery plan that each worker is sent; None if every
            worker is sent all lines.
    """

    shared: Mapping[int, frozenset[int]]
    pairs: Ends
    microbatches: Keys | None = None

    @classmethod
    def among(cls, ranks: Collection[int]) -> Peers:
        """The peers for a mesh in which all members are peers of each other."""
        everybody = frozenset(ranks)
        return cls(dict.fromkeys(ranks, everybody), np.empty(0, np.int64))

    @cached_property
    def _keys(self) -> Keys:
        return _both_ways(self.pairs)

    def of(self, rank: int) -> frozenset[int]:
        """The peers of one member, the member itself included."""
        return self.shared[rank] | _others_of(self._keys, rank)

    def numbers(self) -> dict[int, int]:
        """Rank -> the number of its peers, without the worker itself."""
        own = by_rank(self._keys)
        return {rank: len(peers) - 1 + len(own.get(rank, _NOBODY) - peers) for rank, peers in self.shared.items()}

    def since(self, before: Peers, ranks: Iterable[int]) -> Iterator[tuple[int, frozenset[int], frozenset[int]]]:
        """The peers that members have now and may not have had before.

        Peers that a member had before may be among the result if they were in `pairs` then and are in `shared` now.

        Args:
            before: the peers before. A member that is not in it gets all of its peers.
            ranks: the members.

        Yields:
            (rank, new peers from `shared`, new peers from `pairs`). Equal sets of the first kind are one object.
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
        """Rank -> its peers that are not peers any more `after`, though both are still members; without empty sets."""
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
        """The peers of this epoch's members, in this epoch or in the other one."""
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
    """The members that one worker has links to while the mesh changes.

    A worker needs the links of the epoch that it has entered last until it enters another one. Reconfigures of several
    later epochs may have come in between, as an epoch may be overtaken before this worker enters it.

    Args:
        addressed: mesh epoch -> the members whose addresses came with its Reconfigure, for the epoch entered last and
            all later ones.
    """

    addressed: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def after(self, message: Reconfigure, entered: int) -> Reached:
        """The value after a Reconfigure has come.

        Args:
            message: the Reconfigure.
            entered: the mesh epoch that the worker has entered last; -1 if none.
        """
        kept = {epoch: ranks for epoch, ranks in self.addressed.items() if epoch >= entered}
        return Reached({**kept, message.epoch: frozenset(message.addresses)})

    @property
    def ranks(self) -> frozenset[int]:
        """All members that the worker has links to, including members of epochs in between."""
        return _NOBODY.union(*self.addressed.values())


def _each_once(keys: npt.NDArray[np.int64]) -> Keys:
    found = np.sort(keys)
    return found[np.diff(found, prepend=-1) != 0]


def _both_ways(pairs: Ends) -> Keys:
    """The keys of each pair in both directions."""
    return _each_once(np.concatenate((pairs, (pairs & 0xFFFFFFFF) << 32 | pairs >> 32)))


def _without(keys: Keys, others: Keys) -> Keys:
    """The keys of the first array that are not in the second one. Both are ascending, and so is the result."""
    if not len(others):
        return keys
    places = np.minimum(np.searchsorted(others, keys), len(others) - 1)
    return keys[others[places] != keys]


def _others_of(keys: Keys, rank: int) -> frozenset[int]:
    first, stop = np.searchsorted(keys, (rank << 32, (rank + 1) << 32))
    return frozenset((keys[first:stop] & 0xFFFFFFFF).tolist())


def by_rank(keys: Keys) -> dict[int, frozenset[int]]:
    """Rank -> the numbers that `keys` has for it; without ranks that have none."""
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
        step: the step that was under way when the epoch ended.
        placement: the placement of the epoch.
        plan: the lines of the recovery plan of this step, if the epoch began in the middle of it; empty if it ran as
            placed.
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
    """The work that an epoch takes over from earlier ones, as far as it decides which workers send to each other.

    Args:
        ran: who has run what of the step under way, and of the one before, which members that are behind complete.
        plan: the recovery plan of the step under way; None if no member has begun it. It is empty for a step that
            begins anew, as that runs as placed and nothing that members have of it is used.
        reports: rank -> its StepReport.
        linked: pairs that get a link in any case: their link broke, or they had none when they wanted to send.
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
    """The peers of all members of a mesh epoch; None if all members are peers of each other.

    Args:
        placement: the placement of the epoch, with its replicas and learners.
        layout: the pages of each layer.
        num_validation_microbatches: the number of micro-batches of a validation.
        recovery: the work that the epoch takes over; None for the first epoch.
        checks: True if micro-batches and sums are checked: then any worker of a stage, and any replica, may check.
        widest: up to this number of members, all are peers of each other.
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
    # Pairs within a stage are in the shared sets already, and pairs with a worker that is no member are of no use.
    apart = (stages[0] != stages[1]) & (np.minimum(*stages) != _NO_STAGE)
    a, b = a[apart], b[apart]
    ends = _each_once(np.minimum(a, b) << 32 | np.maximum(a, b))
    microbatches = _microbatches(recovery) if recovery is not None and recovery.plan else None
    return Peers(_shared(placement, _related(placement, layout, checks=checks), guests), ends, microbatches)


# ---- stages: sums and reduced gradients to primaries, parameters from them


def _related(placement: Placement, layout: ModelLayout, *, checks: bool) -> list[set[int]]:
    """For each stage, the stages whose workers are all peers of its workers: itself, and those with tied parameters.

    With checks, the stages before and after are among them: any worker of a stage may be a checker, and then gets the
    inputs of a micro-batch from these stages.
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
    """For each stage, its *guests*: workers of other stages that are peers of all of its members.

    They are the primaries of the stage's pages, or with checks all replicas. In the middle of a step they are also the
    workers that may have sums of its layers, as they were in a stage with these layers in an earlier epoch.
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
    # There may be many guests, so those in the same stage that visit the same stages share their set of peers.
    unions: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
    for rank, visits in visited.items():
        if (key := (mesh.stage_of(rank), frozenset(visits))) not in unions:
            hosts = (*(stages[stage] for stage in visits), *(visitors[stage] for stage in visits))
            unions[key] = found[rank].union(*hosts)
        found[rank] = unions[key]
    return found


# ---- pairs


def _runners(placement: Placement, columns: npt.NDArray[np.int64]) -> Runners:
    """The worker of each micro-batch on each stage: by the plan (as `_columns`) if it has a line, else as placed."""
    found = np.array([placement.workers_of_microbatches(stage) for stage in range(placement.num_stages)], np.int64)
    stages, microbatches, workers = columns
    found[stages, microbatches] = workers
    return found


def _turns(placement: Placement, num_validation_microbatches: int) -> Runners:
    """The worker of each micro-batch of a validation on each stage."""
    numbers = np.arange(num_validation_microbatches)
    return np.array([np.array(members, np.int64)[numbers % len(members)] for members in placement.mesh.stages])


def _crossings(runners: Runners) -> Pairs:
    """The pairs of workers that run a micro-batch on neighbouring stages."""
    return np.stack((runners[:-1], runners[1:]), axis=-1).reshape(-1, 2)


def _mirrors(placement: Placement, replica_map: ReplicaMap) -> Iterator[tuple[int, int]]:
    """(primary, rank) for each replica and learner of its pages that is not in its stage."""
    stage_of = {rank: stage for stage, members in enumerate(placement.mesh.stages) for rank in members}
    own = [frozenset(members) for members in placement.mesh.stages]
    elsewhere: dict[tuple[int, int], tuple[int, ...]] = {}  # page ranges share sets: each is looked through once
    for layer in replica_map:
        ranges, members = ranges_of(replica_map, layer), own[placement.stage_of_layer(layer)]
        if ranges.holders <= members and ranges.learners <= members:
            continue  # the usual case: no replica is in another stage
        for pages in ranges:
            stage = stage_of[pages.primary]
            for ranks in (pages.replicas, pages.learners) if pages.learners else (pages.replicas,):
                if (key := (id(ranks), stage)) not in elsewhere:
                    elsewhere[key] = tuple(rank for rank in ranks if stage_of.get(rank) != stage)
                for rank in elsewhere[key]:
                    yield pages.primary, rank


def _hands(placement: Placement, recovery: Recovery) -> Pairs:
    """The pairs of workers between which boundary tensors of a recovery plan go.

    These are the worker of each line with the workers that its outputs go to, and with those that may have its inputs.
    The latter have run the micro-batch in any epoch of the step, on the stage that ended where the line's stage begins
    or on the one that began where it ends: they keep the tensors that they had sent.
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
    """(worker that keeps a boundary tensor by its StepReport, worker of the micro-batch on the stage that needs it)."""
    parts = [(rank, part) for rank, report in reports.items() for part in report.partial_steps]
    # An activation goes into the stage that begins at this layer, a gradient into the one that ends before it.
    rows = [(rank, layer, u, 0) for rank, part in parts for layer, u in part.activations]
    rows += [(rank, layer + 1, u, 1) for rank, part in parts for layer, u in part.gradients]
    table = np.array(rows, np.int64).reshape(-1, 4)
    ranks, layers, microbatches, back = table[np.isin(table[:, 1], cuts[1:-1])].T
    return np.stack((ranks, runners[np.searchsorted(cuts, layers) - back, microbatches]), axis=1)


def _microbatches(recovery: Recovery) -> Keys:
    """The micro-batches that concern each worker: it has a line for them, or may keep something of them."""
    _, microbatches, workers = recovery.columns
    found = [workers << 32 | microbatches]
    found += [(ran.runners << 32 | np.arange(ran.runners.shape[1])).ravel() for ran in recovery.ran]
    parts = [(rank, part) for rank, report in recovery.reports.items() for part in report.partial_steps]
    kept = [rank << 32 | u for rank, part in parts for _, u in (*part.activations, *part.gradients)]
    return _each_once(np.concatenate([*found, np.array(kept, np.int64)]))


def _columns(plan: Sequence[Recompute]) -> npt.NDArray[np.int64]:
    """The stages, micro-batches and workers of the lines of a plan: int64 [3, n]."""
    numbers = chain.from_iterable((line.stage, line.microbatch, line.worker) for line in plan)
    return np.fromiter(numbers, np.int64, 3 * len(plan)).reshape(-1, 3).T


def _as_pairs(pairs: Iterable[Sequence[int]]) -> Pairs:
    return np.array([*pairs], np.int64).reshape(-1, 2)
