"""Decisions after events: micro-batches at once, layers or another number of stages if that pays, frequencies last."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches, least_load
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, frequency_hints, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.state_moves import layout_of_costs
from elaswave_spmd.scheduling.step_time import EXACT, Assignment, memory_of, state_of, step_time
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of, placed, rule_of, stages_of

UNIT = 64 * 12
"""Bytes of a page of `layout_of_costs(costs, 64)`."""


def without(stages, *lost: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rank for rank in members if rank not in lost) for members in stages)


def sound(decision: Decision, costs: CostModel, num_microbatches: int, num_layers: int) -> None:
    """Every variant runs every layer and micro-batch once, with the least load there is, or faster with more."""
    for variant in filter(None, (decision.now, decision.later)):
        found = variant.assignment
        assert found.layer_cuts[0] == 0 and found.layer_cuts[-1] == num_layers
        assert all(a < b for a, b in zip(found.layer_cuts, found.layer_cuts[1:], strict=False))
        for members, counts in zip(found.stages, found.microbatch_counts, strict=True):
            assert sum(counts) == num_microbatches and len(counts) == len(members)
        speeds = [costs.speeds_of(members) for members in found.stages]
        pairs = list(zip(found.microbatch_counts, speeds, strict=True))
        if any((np.array(c) / v).max() != least_load(num_microbatches, v) for c, v in pairs):
            even = assign_microbatches(num_microbatches, speeds, microbatch_order=found.microbatch_order).counts
            least = Assignment(found.stages, found.layer_cuts, even, found.microbatch_order)
            assert variant.time.pipeline_s < step_time(least, costs).pipeline_s
    assert all(reason in str(decision) for reason in decision.reasons)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 500), st.data())
@settings(deadline=None, max_examples=60)
def test_later_is_taken_exactly_if_its_gain_exceeds_its_move(sizes, zero, remaining, data):
    layers = data.draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=6))
    costs = costs_of(layers, bandwidth=data.draw(st.sampled_from([1.0, 100.0, 1e6])), state_bytes=1000)
    costs = costs.with_speeds({rank: data.draw(SPEEDS) for rank in range(sum(sizes))})
    placement = placed(sizes, 6, len(layers), zero)
    lost = [m[0] for m in placement.mesh.stages if len(m) > 1 and data.draw(st.booleans())]
    present = without(placement.mesh.stages, *lost)
    decision = plan_change(placement, costs, remaining, stages=present)
    speeds = [costs.speeds_of(members) for members in present]
    for fewest_nodes in (True, False):
        counts = assign_microbatches(
            6, speeds, microbatch_order=placement.microbatch_order, fewest_nodes=fewest_nodes
        ).counts
        other = Assignment(present, placement.layer_cuts, counts, placement.microbatch_order)
        assert decision.now.time.seconds <= step_time(other, costs, rule_of(zero)).seconds
    sound(decision, costs, 6, len(layers))
    assert decision.now.assignment.layer_cuts == placement.layer_cuts
    assert decision.layers_stay and decision.pause_s == 0, "replicas are made again in the background"
    if decision.later:
        gain = (decision.now.time.seconds - decision.later.time.seconds) * remaining
        assert gain > decision.later.move.seconds and decision.last is decision.later
    assert decision.remaining_steps == remaining and decision.last.time.seconds <= decision.now.time.seconds
    assert plan_change(placement, costs, remaining, stages=present) == decision


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4, 4, 4), (4, 3, 3, 4), (8, 7), (8, 8, 7, 8)])
@pytest.mark.parametrize("per_worker", [4, 8])
def test_fewer_tree_nodes_never_cost_time(sizes, per_worker):
    """Loads are equal, but the pipeline may wait longer with one assignment than with the other."""
    num_microbatches, num_layers = max(sizes) * per_worker, 2 * len(sizes)
    costs = costs_of([1.0] * num_layers)
    decision = plan_change(placed(sizes, num_microbatches, num_layers), costs, 0, PlanSettings(stage_counts=()))
    speeds = [np.ones(size) for size in sizes]
    times = []
    for fewest_nodes in (True, False):
        counts = assign_microbatches(num_microbatches, speeds, fewest_nodes=fewest_nodes).counts
        found = Assignment(stages_of(sizes), decision.now.assignment.layer_cuts, counts)
        times.append(step_time(found, costs).seconds)
    assert decision.now.time.seconds <= min(times)


def test_without_remaining_steps_nothing_moves():
    placement = placed([4, 4], 16, 8)
    decision = plan_change(placement, costs_of([1.0] * 8), 0, stages=without(placement.mesh.stages, 5))
    assert decision.later is None and "layers stay" in decision.reasons[1]
    assert sorted(decision.now.assignment.microbatch_counts[1]) != [4, 4, 4, 4]


def best_cut(decision: Decision, costs: CostModel, num_layers: int) -> float:
    """Least seconds of a step of two stages, over all cuts."""
    last = decision.last.assignment
    cuts = [(0, cut, num_layers) for cut in range(1, num_layers)]
    return min(
        step_time(Assignment(last.stages, c, last.microbatch_counts, last.microbatch_order), costs).seconds
        for c in cuts
    )


def test_layers_move_where_the_gain_pays():
    """8 + 8 layers over 4 + 4 workers, two of the second stage lost: a step is shortest with 12 + 4 layers."""
    placement = placed([4, 4], 16, 16, zero=2)
    present = without(placement.mesh.stages, 4, 5)
    costs = costs_of([1.0] * 16, bandwidth=1e3 * UNIT, state_bytes=1000 * UNIT)
    decision = plan_change(
        placement, costs, 100, PlanSettings(layout=layout_of_costs(costs, 64), stage_counts=()), stages=present
    )
    assert decision.later and decision.later.assignment.layer_cuts[1] in (11, 12)
    assert decision.later.time.seconds == pytest.approx(best_cut(decision, costs, 16))
    # One copy of each page goes over, to its new primary. The other replica stays where it is, as the mirror.
    assert decision.later.move.bytes == 1000 * UNIT * (decision.later.assignment.layer_cuts[1] - 8)
    assert decision.reasons[1].startswith("layers move") and decision.now.time.seconds > 64
    slow_links = costs_of([1.0] * 16, bandwidth=0.1 * UNIT, state_bytes=1000 * UNIT)
    layout = layout_of_costs(slow_links, 64)
    stays = plan_change(placement, slow_links, 10, PlanSettings(layout=layout, stage_counts=()), stages=present)
    assert stays.later is None and "does not pay for its move" in stays.reasons[1]
    alone = plan_change(
        placement, slow_links, 10, PlanSettings(layout=layout, stage_counts=()), stages=((0, 1, 2, 3), (7,))
    )
    assert alone.later and alone.later.move.bytes == 0, "a worker that is alone has its mirrors where its layers go"


@pytest.mark.parametrize("size", [2, 20])
def test_fewer_bytes_are_moved_where_that_is_nearly_as_good(size):
    """The second layer to leave the slow stage gains much less than the first, and takes as long to move.

    Layers are large enough for each to be cut over all workers of its stage: 1,024 pages of 64 elements for each.
    """
    placement = placed([size, size], 32 * size, 40)
    costs = costs_of([1.0] * 40, bandwidth=20.48 * UNIT, state_bytes=1024 * size * UNIT)
    costs = costs.with_speeds(dict.fromkeys(placement.mesh.stages[1], 0.85))
    layout = layout_of_costs(costs, 64)
    few = plan_change(placement, costs, 2, PlanSettings(layout=layout, stage_counts=()))
    many = plan_change(placement, costs, 10_000, PlanSettings(layout=layout, stage_counts=()))
    assert few.later and many.later and few.later.move.bytes < many.later.move.bytes
    assert few.later.time.seconds > many.later.time.seconds


def test_the_pipeline_s_filling_counts():
    """Of 4 micro-batches, half of a step is filling: a last stage with less to do is better than equal stages."""
    placement = placed([2, 2], 4, 40)
    costs = costs_of([1.0] * 40, bandwidth=1e6, state_bytes=1000).with_speeds({2: 0.85, 3: 0.85})
    decision = plan_change(placement, costs, 10_000, PlanSettings(stage_counts=()))
    assert decision.last.time.seconds == pytest.approx(best_cut(decision, costs, 40))
    room = costs_of([1.0] * 40, bandwidth=1e6, state_bytes=1000).with_speeds({2: 0.85, 3: 0.85})
    limited = plan_change(placement, room, 10_000, PlanSettings(stage_counts=(), memory_limit=23_500.0)).last.assignment
    assert limited.layer_cuts[1] == 23 < decision.last.assignment.layer_cuts[1], "with mirrors all of it lies on both"
    even = Assignment(placement.mesh.stages, (0, 22, 40), decision.last.assignment.microbatch_counts)
    assert decision.last.time.bottleneck_s > 1.02 * step_time(even, costs).bottleneck_s


def test_a_slow_worker_gets_fewer_microbatches():
    placement = placed([4, 4], 32, 8)
    costs = costs_of([1.0] * 8).with_speeds({5: 0.5})
    decision = plan_change(placement, costs, 10, PlanSettings(stage_counts=()))
    counts = dict(zip(placement.mesh.stages[1], decision.now.assignment.microbatch_counts[1], strict=True))
    assert counts[5] <= 5 and max(counts.values()) == 10
    assert decision.before.bottleneck_s == pytest.approx(8 * 4 / 0.5)
    assert decision.now.time.bottleneck_s == pytest.approx(10 * 4)


def test_three_stages_of_five_workers_become_two():
    placement = placed([2, 2, 2], 12, 6, zero=2)
    costs = costs_of([1.0] * 6, bandwidth=1e6, state_bytes=1000)
    present = without(placement.mesh.stages, 5)
    decision = plan_change(placement, costs, 1000, PlanSettings(stage_counts=(2,), memory_limit=5000.0), stages=present)
    assert decision.later and decision.later.assignment.stages in (((0, 1, 2), (3, 4)), ((0, 1, 2, 3), (4,)))
    assert decision.reasons[1].startswith("2 stages instead of 3")
    kept = plan_change(placement, costs, 1000, PlanSettings(stage_counts=()), stages=present)
    assert kept.last.assignment.stages == present


def test_a_stage_that_was_given_up_has_its_layers_cut_anew():
    placement = placed([1, 1, 1], 4, 6)
    costs = costs_of([1.0] * 6, state_bytes=100)
    decision = plan_change(placement, costs, 100, PlanSettings(stage_counts=()), stages=((0,), (2,)))
    # With one mirror, the two that are left come to hold everything. Worker 1 held its layers and both others' mirrors.
    assert decision.now.assignment.layer_cuts == (0, 3, 6) and decision.now.move.bytes == 600
    assert not decision.layers_stay and decision.pause_s == decision.now.move.seconds > 0
    assert decision.reasons[0].startswith("2 of 3 stages are left")


def test_layers_that_do_not_fit_any_more_are_moved_before_going_on():
    placement = placed([3, 3], 6, 6)
    costs = costs_of([1.0] * 6, state_bytes=300)
    present = without(placement.mesh.stages, 3, 4)  # with its mirrors' room, one worker has 300 B of a layer, not 200
    fits = plan_change(placement, costs, 10, PlanSettings(memory_limit=900.0, stage_counts=()), stages=present)
    assert fits.now.assignment.layer_cuts == (0, 3, 6)
    decision = plan_change(placement, costs, 10, PlanSettings(memory_limit=800.0, stage_counts=()), stages=present)
    assert decision.now.assignment.layer_cuts == (0, 4, 6) and "do not fit in memory" in decision.reasons[0]
    assert max(memory_of(decision.now.assignment, costs, rule_of(1))) <= 800
    with pytest.raises(PlanError, match=r"stage \d lacks"):
        plan_change(placement, costs, 10, PlanSettings(memory_limit=500.0), stages=present)


def test_a_plan_leaves_room_for_all_sums_of_gradients():
    """A worker with 8 micro-batches holds three gradients at once."""
    placement = placed([2, 2], 16, 6)
    layers = tuple(replace(layer, gradient_bytes=100 * (i > 1)) for i, layer in enumerate(costs_of([1.0] * 6).layers))
    costs = CostModel(layers, 1e9)
    for limit, cuts in ((900.0, (0, 3, 6)), (899.0, (0, 4, 6))):
        asked = PlanSettings(memory_limit=limit, stage_counts=())
        assert plan_change(placement, costs, 10, asked).now.assignment.layer_cuts == cuts


@pytest.mark.parametrize("memory_limit", [370.0, 421.0, 600.0, 2000.0])
def test_where_only_fewer_in_flight_fit_there_is_a_plan(memory_limit):
    """A slow worker gets fewer micro-batches, the others more; by rule more would be in flight than have room."""
    costs = costs_of(
        [3.0] * 8, state_bytes=30, value_bytes=10, gradient_bytes=10, activation_bytes=25, put_off_bytes=25
    )
    costs = replace(costs, layers=tuple(replace(layer, weight_share=0.5) for layer in costs.layers))
    placement = placed([2, 2, 2, 2], 16, 8)
    split = SplitBackward.of_costs(costs, rule_of(1), memory_limit)
    slow = costs.with_speeds({5: 0.5})
    decision = plan_change(placement, slow, 100, PlanSettings(memory_limit=memory_limit, split=split, stage_counts=()))
    for variant in filter(None, (decision.now, decision.later)):
        assert max(memory_of(variant.assignment, costs, rule_of(1))) <= memory_limit


def test_the_step_until_now_is_that_of_the_limits_that_workers_have():
    costs = costs_of([3.0] * 8, latency_s=0.5)
    costs = replace(costs, layers=tuple(replace(layer, weight_share=0.5) for layer in costs.layers))
    placement = placed([1, 1, 1, 1], 7, 8)
    split = SplitBackward.of_costs(costs, rule_of(1), 1e9)
    running = executed(Assignment.of(placement), split)
    told = plan_change(placement, costs, 100, PlanSettings(split=split, stage_counts=()), running=running)
    assert told.before.seconds == step_time(running, costs, rule_of(1)).seconds
    assert (
        plan_change(placement, costs, 100, PlanSettings(split=split, stage_counts=())).before.seconds
        <= told.before.seconds
    )


def test_a_worker_alone_in_its_stage_is_not_left_out():
    """The slowest is alone in the first stage; of the others one may idle, so that losing it makes nothing faster."""
    costs = costs_of([1.0] * 4).with_speeds({0: 0.25, 2: 0.5})
    placement = placed([1, 3], 5, 4)
    decision = plan_change(placement, costs, 1000, PlanSettings(stage_counts=None))
    fewer = plan_change(
        placement, costs, 1000, PlanSettings(stage_counts=None), stages=without(placement.mesh.stages, 2)
    )
    assert decision.last.time.seconds <= fewer.last.time.seconds * 1.005


def test_newcomers_without_a_known_host_are_assigned_microbatches():
    placement = placed([2, 2], 8, 4)
    decision = plan_change(
        placement, costs_of([1.0] * 4), 10, PlanSettings(stage_counts=()), stages=((0, 1, 9), (2, 3))
    )
    assert len(decision.now.assignment.microbatch_counts[0]) == 3 and decision.pause_s == 0


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.data())
@settings(deadline=None, max_examples=40)
def test_hints_by_worker_and_by_class_keep_what_is_promised(sizes, many, data):
    costs = costs_of([1.0] * len(sizes)).with_speeds({r: data.draw(SPEEDS) for r in range(sum(sizes))})
    copies = 40 if many else 1  # beyond some 30 workers hints are by class
    assignment = assigned([size * copies for size in sizes], 6 * copies, costs)
    plan, hints = frequency_hints(assignment, costs, FrequencyRange(0.5, 1.2))
    assert plan.makespan_s <= plan.makespan_before_s * (1 + 1e-9) and plan.energy <= plan.energy_raised * (1 + 1e-12)
    found = sorted(rank for hint in hints for rank in hint.ranks)
    assert found == sorted(rank for members in assignment.stages for rank in members)
    stage_of = {rank: s for s, members in enumerate(assignment.stages) for rank in members}
    for hint in hints:
        assert {stage_of[rank] for rank in hint.ranks} == {hint.stage}
        assert all(0.5 - 1e-9 <= f <= 1.2 for f in hint.pace.frequencies)
        assert not many or (hint.order == () and hint.pace.starts == (0,)), "by class each has one frequency"
    if many:
        assert len(hints) < len(found)
        before = step_time(assignment, costs, most_actions=0).bound_s
        assert plan.makespan_before_s == pytest.approx(before)


def test_hints_are_for_what_runs_in_the_end():
    placement = placed([4, 4], 16, 8)
    present = without(placement.mesh.stages, 5)
    decision = plan_change(
        placement,
        costs_of([1.0] * 8),
        10,
        PlanSettings(stage_counts=(), frequencies=FrequencyRange(0.5, 1.0)),
        stages=present,
    )
    assert decision.frequency and decision.frequency.energy < decision.frequency.energy_before
    assert {rank for hint in decision.hints for rank in hint.ranks} == {0, 1, 2, 3, 4, 6, 7}
    assert "hint: stage 0, worker 0: " in str(decision) and str(decision.frequency) in decision.reasons
    assert plan_change(placement, costs_of([1.0] * 8), 10).hints == ()


def test_large_meshes_are_planned_by_class():
    placement = placed([500, 500], 2000, 8)
    present = without(placement.mesh.stages, 700)
    decision = plan_change(
        placement,
        costs_of([1.0] * 8),
        10,
        PlanSettings(stage_counts=(), frequencies=FrequencyRange(0.5, 1.0)),
        stages=present,
    )
    assert decision.now.time.how == EXACT and len(decision.hints) <= 6
    assert sum(len(hint.ranks) for hint in decision.hints) == 999
    assert "500 of them" in str(decision)


def test_bad_input_is_refused():
    placement = placed([2, 2], 4, 4)
    with pytest.raises(PlanError, match="5 layers"):
        plan_change(placement, costs_of([1.0] * 5), 10)
    with pytest.raises(PlanError, match="steps remain"):
        plan_change(placement, costs_of([1.0] * 4), -1)
    with pytest.raises(PlanError, match=r"stages \[1\] are empty"):
        plan_change(placement, costs_of([1.0] * 4), 10, stages=((0, 1), ()))
    with pytest.raises(PlanError, match="at least one layer"):
        plan_change(
            placement, costs_of([1.0] * 4), 10, PlanSettings(stage_counts=()), stages=tuple((r,) for r in range(5))
        )


def test_assignments_of_placements():
    placement = placed([2, 1], 4, 3, zero=2)
    found = Assignment.of(placement)
    assert (found.stages, found.layer_cuts, found.microbatch_counts) == (stages_of([2, 1]), (0, 1, 3), ((2, 2), (4,)))
    assert found.microbatch_order == "time-major" and found.placement().microbatch_order == "time-major"
    assert math.isclose(step_time(found, costs_of([1, 1, 1])).bottleneck_s, 8)


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.lists(st.tuples(st.floats(0.001, 0.01), st.integers(1, 50)), min_size=8, max_size=8),
    st.lists(SPEEDS, min_size=12, max_size=12),
    st.integers(0, 3),
    st.floats(1.0, 3.0),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_no_plan_gives_a_worker_more_state_than_the_limit(sizes, layers, speeds, zero, part, regroups) -> None:
    """The limit is at least what the present placement gives somebody: then there is always a plan."""
    old = placed(sizes, 12, len(layers), zero)
    base = costs_of([seconds for seconds, _ in layers])
    sized = tuple(replace(layer, state_bytes=1000 * n) for layer, (_, n) in zip(base.layers, layers, strict=True))
    costs = replace(base, layers=sized).with_speeds(dict(enumerate(speeds[: sum(sizes)])))
    rule = rule_of(zero)
    limit = part * max(state_of(Assignment.of(old), costs, rule))
    found = plan_change(old, costs, 10_000, PlanSettings(state_limit=limit, stage_counts=None if regroups else ()))
    for variant in filter(None, (found.now, found.later)):
        assert max(state_of(variant.assignment, costs, rule)) <= limit * (1 + 1e-9)


def test_a_limit_of_state_below_what_there_is_names_the_setting_that_lifts_it() -> None:
    old, costs = placed([1, 1], 4, 4), costs_of([0.01] * 4, state_bytes=1000)
    with pytest.raises(PlanError, match="at most 1,500 B of state") as caught:
        plan_change(old, costs, 100, PlanSettings(state_limit=1500, stage_counts=()))
    assert "schedule.memory_limit" in caught.value.fix
