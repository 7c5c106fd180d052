"""The assignment of page ranges to the workers that write them into a durable checkpoint."""

from __future__ import annotations

from collections import Counter

from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, all_replica_sets


def assign_writers(replicas: ReplicaMap, layout: ModelLayout) -> dict[PageRange, int]:
    """Assign each range of state pages to the worker that writes it: one of its mirrors, or its primary if it has none.

    A pure function of the replica map, so every worker of a mesh epoch computes the same assignment, without a message.
    Pages are spread evenly: the largest page ranges first, each to the candidate with the fewest pages so far. The loss
    page is not state and is not written.
    """
    loads: Counter[int] = Counter()
    writers: dict[PageRange, int] = {}
    for pages in sorted(all_replica_sets(replicas), key=lambda it: (-it.num_pages, it.key)):
        if layout.layers[pages.layer].block_of(pages.first).kind == LOSS:
            continue
        writer = min(pages.mirrors or (pages.primary,), key=lambda rank: (loads[rank], rank))
        loads[writer] += pages.num_pages
        writers[pages.key] = writer
    return writers
