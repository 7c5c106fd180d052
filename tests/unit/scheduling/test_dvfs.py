"""Frequencies: never a longer step, never more energy than with everybody raised, always within the range."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling import dvfs
from elaswave_spmd.scheduling.action_graph import ActionGraph
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel
from elaswave_spmd.scheduling.dvfs import (
    FrequencyPlan,
    FrequencyRange,
    Pace,
    PowerModel,
    plan_frequencies,
    plan_paces,
)
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import timed_graph
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of

RANGES = st.builds(FrequencyRange, st.floats(0.3, 1.0), st.floats(1.0, 1.5))
POWERS = st.builds(PowerModel, st.floats(0, 2), st.floats(0.1, 2))
WORK = st.lists(st.floats(0, 10), min_size=1, max_size=6)


def holds(plan: FrequencyPlan, limits: FrequencyRange) -> None:
    """The guarantees of every plan."""
    table = np.array([frequency for pace in plan.paces for frequency in pace.frequencies])
    assert 1.0 <= plan.raised_to <= limits.highest
    assert table.min() >= limits.lowest * (1 - 1e-9) and table.max() <= plan.raised_to
    assert plan.makespan_s <= plan.makespan_before_s * (1 + 1e-9)
    assert plan.energy <= plan.energy_raised * (1 + 1e-9)
    assert "modelled energy" in str(plan)


@given(WORK, RANGES, POWERS, st.none() | st.floats(0.1, 30), st.data())
@settings(deadline=None)
def test_promises_hold_for_compute_alone(work, limits, power, goal_s, data):
    devices = data.draw(st.lists(st.integers(1, 5), min_size=len(work), max_size=len(work)))
    plan = plan_frequencies(work, limits, devices=devices, power=power, goal_s=goal_s)
    holds(plan, limits)
    busy, frequencies = np.array(work), single(plan)
    assert plan.makespan_s == (busy / frequencies).max()
    target = busy.max() / plan.raised_to
    assert plan.makespan_s == pytest.approx(target)
    if target > 1e-6:
        assert frequencies == pytest.approx(np.clip(busy / target, limits.lowest, plan.raised_to), rel=1e-6)
    joules = sum(
        n * (power.static * plan.makespan_s + power.dynamic * f * f * t)
        for n, f, t in zip(devices, frequencies, work, strict=True)
    )
    assert plan.energy == pytest.approx(joules)


def single(plan: FrequencyPlan) -> np.ndarray:
    """The frequency of each row, which has one."""
    assert all(pace.starts == (0,) and pace.changes == 0 for pace in plan.paces)
    return np.array([pace.frequencies[0] for pace in plan.paces])


@given(WORK, RANGES, st.floats(0, 0.5))
@settings(deadline=None)
def test_a_margin_stays_above_what_the_schedule_allows(work, limits, margin):
    bare, kept = plan_frequencies(work, limits), plan_frequencies(work, replace(limits, margin=margin))
    holds(kept, limits)
    assert single(kept) == pytest.approx(np.minimum(single(bare) * (1 + margin), bare.raised_to))


@st.composite
def pipelines(draw) -> ActionGraph:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    seconds = draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    costs: CostModel = costs_of(seconds, latency_s=draw(st.sampled_from([0.0, 0.2])))
    costs = costs.with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    split = replace(costs, layers=tuple(replace(layer, weight_share=0.5) for layer in costs.layers))
    assignment = assigned(sizes, draw(st.integers(1, 8)), costs)
    in_parts = SplitBackward.of_costs(split, REPLICATED)
    return timed_graph(executed(assignment, in_parts), split) if draw(st.booleans()) else timed_graph(assignment, costs)


def at_paces(graph: ActionGraph, plan: FrequencyPlan, change_s: float) -> np.ndarray:
    """The seconds of each action with the paces of a plan."""
    found = np.zeros(len(graph.order))
    for pace, todo in zip(plan.paces, graph.lists, strict=True):
        for number, action in enumerate(todo):
            found[action] = graph.seconds[action] / pace.at(number) + change_s * (number in pace.starts[1:])
    return found


@given(
    pipelines(), RANGES, POWERS, st.none() | st.floats(0.5, 1.2), st.integers(0, 9), st.sampled_from([0.0, 0.1, 3.0])
)
@settings(deadline=None, max_examples=100)
def test_promises_hold_on_action_lists(graph, limits, power, part, changes, change_s):
    limits = replace(limits, most_changes=changes, change_s=change_s)
    before_s = graph.makespan()
    goal_s = None if part is None else part * before_s
    plan = plan_paces(graph, limits, goal_s=goal_s, power=power)
    assert plan.makespan_before_s == before_s
    assert plan.makespan_s == pytest.approx(graph.makespan(at_paces(graph, plan, change_s)), rel=1e-9)
    assert plan.makespan_s <= graph.makespan(graph.seconds / plan.raised_to) * (1 + 1e-9)
    assert all(pace.changes <= max(0, changes) for pace in plan.paces)
    holds(plan, limits)
    if goal_s is not None and plan.raised_to < limits.highest:
        assert plan.makespan_s <= max(goal_s, before_s if before_s <= goal_s else 0) * (1 + 1e-9)


@given(pipelines(), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_more_changes_save_no_less_and_time_that_they_take_no_more(graph, changes):
    limits = FrequencyRange(0.5, 1.0)
    by_worker, few, each = (
        plan_paces(graph, replace(limits, most_changes=most)).energy for most in (0, 2 * changes, 1000)
    )
    slow = plan_paces(graph, replace(limits, most_changes=1000, change_s=0.3)).energy
    assert each <= few * (1 + 2e-3) and each <= by_worker * (1 + 2e-3) and each <= slow * (1 + 2e-3)


def test_runs_end_where_that_costs_least():
    """One worker's actions at slowdowns 1 1 1 3 3 1: three runs are exact, and with two the last action is alone."""
    seconds, each = np.ones(6), np.array([1.0, 1, 1, 3, 3, 1])
    assert dvfs._best_ends(seconds, each, 3) == [3, 5, 6] == dvfs._best_ends(seconds, each, 6)
    assert dvfs._best_ends(seconds, each, 2) == [3, 6] and dvfs._best_ends(seconds, each, 1) == [6]


def test_a_pace():
    pace = Pace((0, 2, 5), (0.5, 1.0, 0.8))
    assert [pace.at(n) for n in range(7)] == [0.5, 0.5, 1, 1, 1, 0.8, 0.8]
    assert pace.changes == 3 and Pace().changes == 0 and Pace((0, 1, 4), (1.0, 0.5, 1.0)).changes == 2
    assert str(pace) == "0.5, 1 from action 2, 0.8 from action 5"
    for starts, frequencies in (((1,), (1.0,)), ((0, 0), (1.0, 1.0)), ((0,), ()), ((), ())):
        with pytest.raises(PlanError, match="starts rise from 0"):
            Pace(starts, frequencies)


def test_the_bottleneck_is_raised_and_the_others_are_lowered():
    plan = plan_frequencies([4.0, 3.0, 0.5], FrequencyRange(0.5, 1.25))
    assert plan.raised_to == 1.25 and plan.makespan_s == 3.2
    assert single(plan) == pytest.approx([1.25, 3 / 3.2, 0.5])


def test_no_device_is_raised_beyond_the_goal():
    limits = FrequencyRange(0.5, 2.0)
    assert plan_frequencies([4.0, 1.0], limits, goal_s=5.0).raised_to == 1.0
    plan = plan_frequencies([4.0, 1.0], limits, goal_s=3.2)
    assert plan.raised_to == pytest.approx(1.25) and plan.makespan_s <= 3.2
    assert plan_frequencies([4.0, 1.0], limits, goal_s=1.0).raised_to == 2.0, "as near as the range allows"


def test_a_stage_with_little_to_do_is_lowered_where_the_pipeline_allows():
    """Two stages, the first with a third of the work: only its first forward and its last backward are hurried."""
    costs = costs_of([1.0, 3.0])
    plan = plan_paces(timed_graph(assigned([1, 1], 8, costs), costs), FrequencyRange(0.4, 1.0))
    first, last = plan.paces
    assert plan.makespan_s == pytest.approx(plan.makespan_before_s) and plan.energy < 0.93 * plan.energy_before
    assert first.at(0) > 0.99 and first.at(15) > 0.99 and max(first.at(n) for n in range(2, 13)) < 0.6
    assert last.frequencies == (1.0,) or min(last.frequencies) > 0.99


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (1.1, 1.2), (0.5, 0.9), (0.5, math.inf), (math.nan, 1.0)])
def test_bad_ranges_are_refused(lowest, highest):
    with pytest.raises(PlanError, match="lowest <= 1 <= highest"):
        FrequencyRange(lowest, highest)


@pytest.mark.parametrize(("static", "dynamic"), [(-1.0, 1.0), (0.0, 0.0), (math.inf, 1.0), (0.0, math.nan)])
def test_bad_power_models_are_refused(static, dynamic):
    with pytest.raises(PlanError, match="margin"):
        FrequencyRange(0.5, 1.0, -0.1)
    for name in ("most_changes", "change_s"):
        with pytest.raises(PlanError, match="times a step"):
            FrequencyRange(0.5, 1.0, **{name: -1})
    with pytest.raises(PlanError, match="power model"):
        PowerModel(static, dynamic)
