"""Small costs, meshes and assignments that the tests of planning share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches
from elaswave_spmd.scheduling.pipeline import PipelineAction
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding import Shardings

SPEEDS = st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.0, 1.0, 1.25])


def costs_of(seconds: Sequence[float], *, bandwidth: float = 1e9, latency_s: float = 0.0, **sizes: int) -> CostModel:
    """A third of each layer's seconds is its forward; `sizes` are the same for all."""
    layers = tuple(LayerCost(f"l{i}", s / 3, s * 2 / 3, **sizes) for i, s in enumerate(seconds))
    return CostModel(layers, bandwidth, latency_s)


def stages_of(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks 0, 1, ..., stage by stage."""
    return tuple(tuple(range(a, b)) for a, b in pairwise(accumulate(sizes, initial=0)))


def actions(text: str) -> tuple[PipelineAction, ...]:
    """The actions that are written "0F3 2B11", with stages of one digit."""
    return tuple(PipelineAction(int(word[0]), word[1], int(word[2:])) for word in text.split())


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    return tuple(s * num_layers // num_stages for s in range(num_stages + 1))


def assigned(
    sizes: Sequence[int],
    num_microbatches: int,
    costs: CostModel,
    microbatch_order: str = "contiguous",
    cuts: Sequence[int] = (),
) -> Assignment:
    """An assignment with these stages and micro-batches by speed."""
    stages = stages_of(sizes)
    counts = assign_microbatches(
        num_microbatches, [costs.speeds_of(members) for members in stages], microbatch_order=microbatch_order
    ).counts
    return Assignment(stages, tuple(cuts) or even_cuts(len(costs.layers), len(sizes)), counts, microbatch_order)


def split_at_random(draw, assignment: Assignment, costs: CostModel) -> tuple[Assignment, CostModel]:
    """The assignment as it is, or with backwards in two parts on some stages, and layers that are split or not."""
    if draw(st.booleans()):
        return assignment, costs
    number, stages = len(costs.layers), assignment.num_stages
    shares = draw(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=number, max_size=number))
    layers = tuple(replace(layer, weight_share=share) for layer, share in zip(costs.layers, shares, strict=True))
    put_off = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    return replace(assignment, put_off=tuple(put_off)), replace(costs, layers=layers)


def microbatch_s(costs: CostModel, first: int, stop: int, rank: int) -> float:
    """Seconds of one micro-batch's forward and backward through layers [first, stop) on a worker."""
    return sum(costs.stage_s(first, stop)) / costs.speed(rank)


def rule_of(zero: int, mirror_count: int = 1) -> MemoryRule:
    """The rule with the specs of a ZeRO level."""
    return MemoryRule(Shardings().with_zero(zero), mirror_count)


def placed(sizes: Sequence[int], num_microbatches: int, num_layers: int, zero: int = 1) -> Placement:
    """A placement with even cuts, and micro-batches assigned to equal workers."""
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    counts = assign_microbatches(num_microbatches, [np.ones(size) for size in sizes]).counts
    return Placement(mesh, num_microbatches, even_cuts(num_layers, len(sizes)), counts, Shardings().with_zero(zero))
