"""Frequencies: never a longer step, never more energy than with everybody raised, always within the range."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, PowerModel, plan_frequencies
from elaswave_spmd.scheduling.step_time import ActionGraph, timed_graph
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of

RANGES = st.builds(FrequencyRange, st.floats(0.3, 1.0), st.floats(1.0, 1.5))
POWERS = st.builds(PowerModel, st.floats(0, 2), st.floats(0.1, 2))
WORK = st.lists(st.lists(st.floats(0, 10), min_size=2, max_size=2), min_size=1, max_size=6)


def holds(plan: FrequencyPlan, limits: FrequencyRange) -> None:
    """The guarantees of every plan."""
    table = np.array(plan.frequencies)
    assert 1.0 <= plan.raised_to <= limits.highest
    assert table.min() >= limits.lowest - 1e-12 and table.max() <= plan.raised_to
    assert plan.makespan_s <= plan.makespan_before_s
    assert plan.energy <= plan.energy_raised * (1 + 1e-12)
    assert "modelled energy" in str(plan)


@given(WORK, RANGES, POWERS, st.none() | st.floats(0.1, 30), st.data())
@settings(deadline=None)
def test_promises_hold_for_compute_alone(work, limits, power, goal_s, data):
    devices = data.draw(st.lists(st.integers(1, 5), min_size=len(work), max_size=len(work)))
    plan = plan_frequencies(work, limits, devices=devices, power=power, goal_s=goal_s)
    holds(plan, limits)
    busy, frequencies = np.array(work), np.array(plan.frequencies)
    assert plan.makespan_s == (busy / frequencies).sum(axis=1).max()
    target = busy.sum(axis=1).max() / plan.raised_to
    assert plan.makespan_s == pytest.approx(target)
    wanted = np.clip(busy.sum(axis=1) / target, limits.lowest, plan.raised_to) if target else np.full(len(work), 1.0)
    if target > 1e-6:
        assert frequencies == pytest.approx(np.stack([wanted, wanted], axis=1), rel=1e-6)
    joules = sum(
        n * (power.static * plan.makespan_s + power.dynamic * sum(f * f * t for f, t in zip(fs, ts, strict=True)))
        for n, fs, ts in zip(devices, plan.frequencies, work, strict=True)
    )
    assert plan.energy == pytest.approx(joules)


@given(WORK, RANGES, st.floats(0, 0.5))
@settings(deadline=None)
def test_a_margin_stays_above_what_the_schedule_allows(work, limits, margin):
    bare, kept = plan_frequencies(work, limits), plan_frequencies(work, replace(limits, margin=margin))
    holds(kept, limits)
    wanted = np.minimum(np.array(bare.frequencies) * (1 + margin), bare.raised_to)
    assert np.array(kept.frequencies) == pytest.approx(wanted)


@st.composite
def pipelines(draw) -> tuple[ActionGraph, np.ndarray, list[float]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    seconds = draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    costs: CostModel = costs_of(seconds, latency_s=draw(st.sampled_from([0.0, 0.2])))
    costs = costs.with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    return timed_graph(assigned(sizes, draw(st.integers(1, 8)), costs), costs)


@given(pipelines(), RANGES, POWERS, st.none() | st.floats(0.5, 1.2))
@settings(deadline=None, max_examples=50)
def test_promises_hold_on_action_lists(pipeline, limits, power, part):
    graph, seconds, delays = pipeline
    before_s = graph.makespan(seconds, delays)
    goal_s = None if part is None else part * before_s
    plan = plan_frequencies(
        graph.work(seconds),
        limits,
        makespan=lambda f: graph.makespan(seconds / f, delays),
        goal_s=goal_s,
        power=power,
    )
    holds(plan, limits)
    assert plan.makespan_before_s == before_s
    assert plan.makespan_s == graph.makespan(seconds / np.array(plan.frequencies), delays)
    assert plan.makespan_s <= graph.makespan(seconds / plan.raised_to, delays)
    if goal_s is not None and plan.raised_to < limits.highest:
        assert plan.makespan_s <= max(goal_s, before_s if before_s <= goal_s else 0)


def test_the_bottleneck_is_raised_and_the_others_are_lowered():
    plan = plan_frequencies([[4.0], [3.0], [0.5]], FrequencyRange(0.5, 1.25))
    assert plan.raised_to == 1.25 and plan.makespan_s == 3.2
    assert np.array(plan.frequencies).ravel() == pytest.approx([1.25, 3 / 3.2, 0.5])


def test_no_device_is_raised_beyond_the_goal():
    limits = FrequencyRange(0.5, 2.0)
    assert plan_frequencies([[4.0], [1.0]], limits, goal_s=5.0).raised_to == 1.0
    plan = plan_frequencies([[4.0], [1.0]], limits, goal_s=3.2)
    assert plan.raised_to == pytest.approx(1.25) and plan.makespan_s <= 3.2
    assert plan_frequencies([[4.0], [1.0]], limits, goal_s=1.0).raised_to == 2.0, "as near as the range allows"


def test_a_stage_with_little_to_do_is_lowered_where_the_pipeline_allows():
    """Two stages, the first with a third of the work: only its first forward and its last backward are hurried."""
    costs = costs_of([1.0, 3.0])
    graph, seconds, delays = timed_graph(assigned([1, 1], 8, costs), costs)
    work = graph.work(seconds)
    plan = plan_frequencies(work, FrequencyRange(0.4, 1.0), makespan=lambda f: graph.makespan(seconds / f, delays))
    first, last = plan.frequencies
    assert plan.makespan_s == plan.makespan_before_s and plan.energy < 0.95 * plan.energy_before
    assert min(first) < 0.6 and first[0] > 0.9 and first[3] > 0.9
    assert last == pytest.approx((1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (1.1, 1.2), (0.5, 0.9), (0.5, math.inf), (math.nan, 1.0)])
def test_bad_ranges_are_refused(lowest, highest):
    with pytest.raises(PlanError, match="lowest <= 1 <= highest"):
        FrequencyRange(lowest, highest)


@pytest.mark.parametrize(("static", "dynamic"), [(-1.0, 1.0), (0.0, 0.0), (math.inf, 1.0), (0.0, math.nan)])
def test_bad_power_models_are_refused(static, dynamic):
    with pytest.raises(PlanError, match="margin"):
        FrequencyRange(0.5, 1.0, -0.1)
    with pytest.raises(PlanError, match="power model"):
        PowerModel(static, dynamic)
