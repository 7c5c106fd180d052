"""The replica map to go to as if the mesh were new, wherever state lies now: what `refill` is compared with.

With contiguous pages, as ZeRO implementations deal them, a layer that moves shifts every boundary of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elaswave_spmd.mesh import Topology
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replica_placement import Stages, place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet


def redeal(
    replicas: ReplicaMap,
    layout: ModelLayout,
    stages: Stages,
    layer_cuts: Sequence[int],
    *,
    replicated: bool,
    topology: Topology,
    mirror_count: int,
    scatter: int,
    page_layout: str,
) -> ReplicaMap:
    """The map of a new mesh, on the atoms of the map there is, split where the new one needs it. Without learners.

    A map that is one already stays as it is.

    Args:
        replicas: the map there is, of all layers.
        replicated, topology, mirror_count, scatter, page_layout: as for `place_replicas`.
    """
    dealt = place_replicas(
        layout,
        stages,
        layer_cuts,
        replicated=replicated,
        topology=topology,
        mirror_count=mirror_count,
        scatter=scatter,
        page_layout=page_layout,
    )
    return {layer: tuple(_on_atoms(runs, replicas[layer])) for layer, runs in dealt.items()}


def _on_atoms(dealt: Sequence[ReplicaSet], atoms: Sequence[ReplicaSet]) -> Iterator[ReplicaSet]:
    """The dealt runs, cut wherever an atom ends. Both are in page order and cover the same pages."""
    place = 0
    for run in dealt:
        first = run.first
        while first < run.stop:
            while atoms[place].stop <= first:
                place += 1
            stop = min(run.stop, atoms[place].stop)
            yield ReplicaSet(run.layer, first, stop, run.primary, run.replicas)
            first = stop
