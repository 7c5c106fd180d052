"""The number of micro-batches whose weight gradients may be put off: as there is room for, none on the first stage."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling import Placement
from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, LayerCost, MemoryRule
from elaswave_spmd.scheduling.split_backward import MORE_IN_FLIGHT, MOST_TRIED, SplitBackward, best_limits, executed
from elaswave_spmd.scheduling.step_time import EXACT, PART, Assignment, memory_of, step_time
from elaswave_spmd.sharding import Shardings
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of

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


def put_off(split: SplitBackward, placement: Placement) -> tuple[int, ...]:
    return split.executed(Assignment.of(placement)).put_off


def test_without_a_memory_limit_each_stage_keeps_as_many_microbatches_as_the_first() -> None:
    assert put_off(split(), placed("pp4")) == (0, 1, 2, 3)
    assert put_off(split(), placed("dp2_pp2")) == (0, 1)


def test_nothing_is_put_off_where_nobody_waits_for_it() -> None:
    assert put_off(split(), placed("pp1")) == () and put_off(split(), placed("dp2")) == ()
    assert put_off(split(memory_limit=1e12), placed("pp1")) == ()


def test_a_stage_without_a_layer_that_is_split_puts_nothing_off() -> None:
    assert put_off(split(range(4, 6)), placed("pp4")) == (0, 0, 2, 0)
    assert put_off(split(range(2)), placed("pp4")) == ()
    assert put_off(split(range(4, 6), memory_limit=1e12), placed("pp4")) == (0, 0, 8, 0)


@pytest.mark.parametrize("extra, late", [(-1, 0), (0, 0), (119, 0), (120, 1), (250, 2), (1e9, 8)])
def test_what_is_put_off_fits_beside_what_a_plan_counts(extra: float, late: int) -> None:
    """The last stage has one micro-batch in flight; two layers keep 120 bytes of one whose gradients are put off."""
    placement = placed("pp4")
    counted = memory_of(Assignment.of(placement), COSTS, MemoryRule())
    limits = put_off(split(memory_limit=counted[3] + extra), placement)
    assert (limits or (0,) * 4)[3] == late


def test_a_limit_below_what_is_kept_anyway_makes_backwards_whole() -> None:
    assert put_off(split(memory_limit=1.0), placed("pp4")) == ()


def test_the_limits_of_an_assignment_are_those_of_its_placement() -> None:
    placement = placed("pp4")
    assert executed(Assignment.of(placement), split()).put_off == put_off(split(), placement) == (0, 1, 2, 3)
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


def test_without_a_memory_limit_other_shares_are_of_the_same_room() -> None:
    placed_ = Assignment.of(placed("pp4"))
    assert [(one.in_flight, one.put_off) for one in (split().executed(placed_, more) for more in (0, 1, -2, 9))] == [
        ((), (0, 1, 2, 3)),
        ((4, 4, 3, 2), (0, 0, 1, 2)),
        ((2, 1, 1, 1), (0, 3, 3, 3)),
        ((4, 4, 4, 4), ()),
    ]


def test_where_memory_is_short_fewer_micro_batches_are_in_flight() -> None:
    """The first stage has four in flight by rule, of which two layers keep 100 bytes each."""
    placement = Assignment.of(placed("pp4"))
    counted = memory_of(placement, COSTS, MemoryRule())
    found = split(memory_limit=counted[0] - 150).executed(placement)
    assert found.in_flight == (2, 2, 2, 1) and max(memory_of(found, COSTS, MemoryRule())) <= counted[0] - 150
    assert split(memory_limit=1.0).executed(placement).in_flight == (1, 1, 1, 1)


@st.composite
def _cases(draw) -> tuple[Assignment, SplitBackward, CostModel]:
    """Ragged assignments with and without a memory limit, of a model some of whose layers are split."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    seconds = draw(st.lists(st.floats(0.5, 3), min_size=len(sizes), max_size=8))
    costs = costs_of(seconds, activation_bytes=50, state_bytes=90, value_bytes=10, put_off_bytes=60)
    shares = draw(st.lists(st.sampled_from([0.0, 0.3, 0.5]), min_size=len(seconds), max_size=len(seconds)))
    layers = tuple(replace(layer, weight_share=share) for layer, share in zip(costs.layers, shares, strict=True))
    speeds = draw(st.dictionaries(st.integers(0, sum(sizes) - 1), SPEEDS))
    costs = replace(costs, layers=layers, speeds=tuple(speeds.items()))
    assignment = assigned(sizes, draw(st.integers(max(sizes), 12)), costs)
    limit = draw(st.sampled_from([math.inf, 500.0, 1000.0, 2000.0]))
    found = SplitBackward(
        tuple(i for i, share in enumerate(shares) if share), (60,) * len(seconds), costs, MemoryRule(), limit
    )
    return assignment, found, costs


@given(_cases(), st.integers(-3, 8))
def test_what_is_kept_fits_where_one_micro_batch_does(case, more: int) -> None:
    assignment, split, costs = case
    found = split.executed(assignment, more)
    assert min(found.limits) >= 1 and split.executed(found, more) == found
    assert split.executed(assignment, 0) == executed(found, split)
    if split.memory_limit == math.inf:
        kept = [a + b for a, b in zip(found.limits, found.put_off or (0,) * found.num_stages, strict=True)]
        assert max(kept) <= max(assignment.usual_limits)
        return
    fewest = memory_of(replace(assignment, in_flight=(1,) * assignment.num_stages), costs, split.rule)
    needed = memory_of(found, costs, split.rule)
    for stage, late in enumerate(found.put_off or (0,) * found.num_stages):
        first, stop = found.layer_cuts[stage : stage + 2]
        assert needed[stage] + late * 60 * (stop - first) <= max(split.memory_limit, fewest[stage])


@given(_cases())
def test_the_best_limits_are_never_slower_than_those_by_rule(case) -> None:
    assignment, split, costs = case
    by_rule = split.executed(assignment)
    time = step_time(by_rule, costs)
    best, best_time = best_limits(by_rule, time, split, costs)
    assert best_time == step_time(best, costs) and best_time.seconds <= time.seconds
    assert best == by_rule or best_time.seconds < time.seconds
    assert best in {by_rule, *(split.executed(assignment, more) for more in MORE_IN_FLIGHT)}


def test_one_more_in_flight_is_faster_where_there_is_room() -> None:
    """Seven micro-batches over four stages: the last may begin its next forward before a gradient has come back."""
    costs = split().priced(COSTS)
    by_rule = split(memory_limit=1e6).executed(Assignment.of(placed("pp4")))
    uneven = replace(costs, latency_s=0.4)
    time = step_time(by_rule, uneven)
    best, faster = best_limits(by_rule, time, split(memory_limit=1e6), uneven)
    assert best.in_flight and faster.seconds < time.seconds


def test_other_limits_take_no_more_room_than_those_by_rule() -> None:
    """One in flight in place of one that is put off takes more room where a layer keeps more until its backward."""
    heavy = replace(COSTS.layers[-1], activation_bytes=4000)
    costs = CostModel((*COSTS.layers[:-1], heavy), 1e9, latency_s=4.0)
    some = SplitBackward(tuple(range(8)), (60,) * 7 + (1000,), costs, MemoryRule())
    by_rule = some.executed(Assignment.of(placed("pp4")))
    time = step_time(by_rule, some.priced(costs))
    assert any(
        step_time(some.executed(by_rule, more), some.priced(costs)).seconds < time.seconds for more in MORE_IN_FLIGHT
    )
    best, _ = best_limits(by_rule, time, some, some.priced(costs))
    assert max(some.needed(best)) <= max(some.needed(by_rule))
    assert some.needed(by_rule)[3] == memory_of(by_rule, costs, MemoryRule())[3] + 3 * 1060


def test_limits_are_compared_by_whole_steps() -> None:
    """Where only a part of the step was simulated, the candidate is simulated as a whole first, and so are others."""
    number = 384
    counts = ((number,),) * 4
    candidate = split().executed(replace(Assignment.of(placed("pp4")), microbatch_counts=counts))
    costs = replace(split().priced(COSTS), latency_s=0.4)
    part = step_time(candidate, costs, most_actions=100)
    assert part.how == PART
    best, time = best_limits(candidate, part, split(), costs)
    assert time == step_time(best, costs, most_actions=MOST_TRIED) and time.how == EXACT
    assert time.seconds <= step_time(candidate, costs, most_actions=MOST_TRIED).seconds
