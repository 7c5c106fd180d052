"""Numbers of a replica map, for the tests of this folder."""

from __future__ import annotations

from collections import Counter

from elaswave_spmd.sharding.replicas import ReplicaMap, all_replica_sets
from elaswave_spmd.sharding.reshard import ReshardPlan


def primary_pages(replicas: ReplicaMap) -> dict[int, int]:
    """Rank -> pages that it is the primary of; ranks without any are left out."""
    found: Counter[int] = Counter()
    for pages in all_replica_sets(replicas):
        found[pages.primary] += pages.num_pages
    return dict(found)


def pages_held(replicas: ReplicaMap, rank: int) -> int:
    """Pages whose state a worker has, as primary or mirror."""
    return sum(pages.num_pages for pages in all_replica_sets(replicas) if rank in pages.replicas)


def copied_pages(plan: ReshardPlan) -> int:
    """Pages of state that a plan copies, the loss page included."""
    return sum(stop - first for _, first, stop in (copy.pages for copy in plan.copies))
