"""Who writes which pages of a durable checkpoint: a pure function of the holder map."""

from __future__ import annotations

from collections import Counter

from elaswave_spmd.scheduling.placement import RunKey
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import HolderMap, all_runs


def writers_of(holders: HolderMap, layout: ModelLayout) -> dict[RunKey, int]:
    """Run of state pages -> the worker that writes it: a mirror where there is one, else the primary.

    Pages are spread evenly: the largest runs first, each to whoever has the fewest pages so far. The loss page is no
    state. Whoever knows the map of a mesh epoch knows the writers, without a word.
    """
    loads: Counter[int] = Counter()
    found: dict[RunKey, int] = {}
    for run in sorted(all_runs(holders), key=lambda r: (-r.num_pages, r.key)):
        if layout.layers[run.layer].block_of(run.first).kind == LOSS:
            continue
        writer = min(run.mirrors or (run.primary,), key=lambda rank: (loads[rank], rank))
        loads[writer] += run.num_pages
        found[run.key] = writer
    return found
