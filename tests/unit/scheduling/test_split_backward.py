"""The number of micro-batches whose weight gradients may be put off: as there is room for, none on the first stage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling import Placement
from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment, memory_of
from elaswave_spmd.sharding import Shardings

COSTS = CostModel(
    tuple(
        LayerCost(f"block{i}", 1.0, 2.0, state_bytes=900, value_bytes=100, gradient_bytes=200, activation_bytes=50)
        for i in range(8)
    ),
    1e9,
)


def placed(shape: str, num_microbatches: int = 8) -> Placement:
    mesh = Mesh.initial(MeshShape.parse(shape))
    counts = tuple((num_microbatches // len(members),) * len(members) for members in mesh.stages)
    per_stage = 8 // len(mesh.stages)
    return Placement(mesh, num_microbatches, tuple(range(0, 9, per_stage)), counts, Shardings())


def split(layers: range = range(8), memory_limit: float = math.inf) -> SplitBackward:
    return SplitBackward(tuple(layers), (60,) * 8, COSTS, MemoryRule(), memory_limit)


def test_without_a_memory_limit_each_stage_keeps_as_many_microbatches_as_the_first() -> None:
    assert split().limits(placed("pp4")) == (0, 1, 2, 3)
    assert split().limits(placed("dp2_pp2")) == (0, 1)


def test_nothing_is_put_off_where_nobody_waits_for_it() -> None:
    assert split().limits(placed("pp1")) == () and split().limits(placed("dp2")) == ()
    assert split(memory_limit=1e12).limits(placed("pp1")) == ()


def test_a_stage_without_a_layer_that_is_split_puts_nothing_off() -> None:
    assert split(range(4, 6)).limits(placed("pp4")) == (0, 0, 2, 0)
    assert split(range(2)).limits(placed("pp4")) == ()
    assert split(range(4, 6), memory_limit=1e12).limits(placed("pp4")) == (0, 0, 8, 0)


@pytest.mark.parametrize("extra, put_off", [(-1, 0), (0, 0), (119, 0), (120, 1), (250, 2), (1e9, 8)])
def test_what_is_put_off_fits_beside_what_a_plan_counts(extra: float, put_off: int) -> None:
    """The last stage has one micro-batch in flight; two layers keep 120 bytes of one whose gradients are put off."""
    placement = placed("pp4")
    counted = memory_of(Assignment.of(placement), COSTS, MemoryRule())
    limits = split(memory_limit=counted[3] + extra).limits(placement)
    assert (limits or (0,) * 4)[3] == put_off


def test_a_limit_below_what_is_kept_anyway_makes_backwards_whole() -> None:
    assert split(memory_limit=1.0).limits(placed("pp4")) == ()


def test_the_limits_of_an_assignment_are_those_of_its_placement() -> None:
    placement = placed("pp4")
    assert executed(Assignment.of(placement), split()).put_off == split().limits(placement) == (0, 1, 2, 3)
    assert executed(Assignment.of(placement), split(range(2))).put_off == ()


def test_layers_that_were_not_measured_have_the_share_of_those_that_were() -> None:
    """Those that are not split have none, whatever was measured of them."""
    measured = {2: 0.3, 3: 0.4, 4: 0.5, 7: 0.01}
    layers = tuple(replace(layer, weight_share=measured.get(i, 0.0)) for i, layer in enumerate(COSTS.layers))
    priced = split(range(1, 6)).priced(replace(COSTS, layers=layers))
    assert [layer.weight_share for layer in priced.layers] == [0.0, 0.4, 0.3, 0.4, 0.5, 0.4, 0.0, 0.0]
    assert {layer.put_off_bytes for layer in priced.layers} == {60}
    assert {layer.weight_share for layer in split().priced(COSTS).layers} == {WEIGHT_SHARE}


def test_what_costs_say_of_a_split_is_read_from_them() -> None:
    priced = split(range(1, 6), 1e6).priced(COSTS)
    assert SplitBackward.of_costs(priced, MemoryRule(), 1e6) == replace(split(range(1, 6), 1e6), costs=priced)
    assert SplitBackward.of_costs(COSTS, MemoryRule()) is None
