"""Small costs, meshes and assignments that the tests of planning share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.microbatch_assignment import deal_stages
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding import Shardings

SPEEDS = st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.0, 1.0, 1.25])


def costs_of(seconds: Sequence[float], *, bandwidth: float = 1e9, latency_s: float = 0.0, **sizes: int) -> CostModel:
    """A third of each layer's seconds is its forward; `sizes` are the same for all."""
    layers = tuple(LayerCost(f"l{i}", s / 3, s * 2 / 3, **sizes) for i, s in enumerate(seconds))
    return CostModel(layers, bandwidth, latency_s)


def stages_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks 0, 1, ..., dealt stage by stage."""
    return tuple(tuple(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0)))


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(s * num_layers // num_stages for s in range(num_stages + 1))


def dealt(
    sizes: Sequence[int], num_microbatches: int, costs: CostModel, dealing: str = "contiguous", cuts: Sequence[int] = ()
) -> Assignment:
    """Micro-batches dealt by speed over these stages."""
    stages = stages_of(sizes)
    counts = deal_stages(num_microbatches, [costs.speeds_of(members) for members in stages], dealing=dealing).counts
    return Assignment(stages, tuple(cuts) or even_cuts(len(costs.layers), len(sizes)), counts, dealing)


def placed(sizes: Sequence[int], num_microbatches: int, num_layers: int, zero: int = 1) -> Placement:
    """A placement with even cuts and micro-batches dealt to equal workers."""
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    counts = deal_stages(num_microbatches, [np.ones(size) for size in sizes]).counts
    return Placement(mesh, num_microbatches, even_cuts(num_layers, len(sizes)), counts, Shardings().with_zero(zero))
