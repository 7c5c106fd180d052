"""Costs to plan with: a burst of noise changes none of them, what lasts comes through whole."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.lasting import LastingCosts
from tests.unit.scheduling.planning_cases import costs_of

SECONDS = 10.0
BASE = costs_of([0.001] * 3)


def after(speeds: Sequence[float], *, every_s: float = 2.0, seconds: float = SECONDS) -> LastingCosts:
    """The value after measuring these speeds of worker 1, one after the other."""
    found = LastingCosts(seconds, BASE)
    for i, speed in enumerate(speeds):
        found = found.observe(BASE.with_speeds({1: speed}), i * every_s)
    return found


def test_a_burst_changes_nothing() -> None:
    speeds = [1.0] * 6 + [0.02] * 4 + [1.0] * 2
    for end in range(1, len(speeds) + 1):
        assert after(speeds[:end]).planned.speed(1) == 1.0


def test_what_lasts_comes_through_whole_and_so_does_its_end() -> None:
    slow = [1.0] * 6 + [0.5] * 5
    assert after(slow[:-1]).planned.speed(1) == 1.0, "8 seconds"
    assert after(slow).planned.speed(1) == 0.5
    assert after(slow + [1.0] * 4).planned.speed(1) == 0.5
    assert after(slow + [1.0] * 5).planned.speed(1) == 1.0


def test_of_an_unsteady_worker_the_least_difference_counts() -> None:
    assert after([1.0] * 6 + [0.02, 0.5, 0.7, 0.1, 0.6]).planned.speed(1) == 0.7


def test_nothing_is_known_before_the_time_is_covered() -> None:
    for count in range(6):
        found = after([0.5] * count)
        assert not found.is_covered and found.planned.speed(1) == 1.0
    assert after([0.5] * 6).is_covered and after([0.5] * 6).planned.speed(1) == 0.5


def test_speeds_that_are_known_before_anything_is_measured_hold_until_then() -> None:
    known = LastingCosts(SECONDS, BASE.with_speeds({1: 0.5}))
    found = known.observe(BASE, 0.0)
    assert found.planned.speed(1) == 0.5
    assert found.observe(BASE, SECONDS).planned.speed(1) == 1.0


def test_long_steps_need_no_more_measurements_than_two() -> None:
    assert after([1.0, 0.5], every_s=30.0).planned.speed(1) == 0.5


def test_steps_after_a_gap_do_not_decide_alone_until_they_have_lasted() -> None:
    found = after([1.0] * 6)  # until second 10
    for at in range(32, 42, 2):  # the first of these steps began at second 30
        assert found.planned.speed(1) == 1.0, at
        found = found.observe(BASE.with_speeds({1: 0.5}), float(at), took=2.0)
    assert found.planned.speed(1) == 0.5


def test_layers_follow_in_the_same_way() -> None:
    found = LastingCosts(SECONDS, BASE)
    slow = costs_of([0.001, 0.05, 0.001])
    for i, costs in enumerate([BASE] * 6 + [slow] * 4):
        found = found.observe(costs, 2.0 * i)
    assert found.planned.layers == BASE.layers
    assert found.observe(slow, 20.0).planned.layers == slow.layers


def test_a_long_time_keeps_few_measurements_and_forgets_none_that_differs() -> None:
    """Each review looks at all of them, while everybody waits for the controller."""
    found, slow = LastingCosts(640.0, BASE), costs_of([0.001, 0.05, 0.001]).with_speeds({1: 0.5})
    for at in range(1200):
        found = found.observe(BASE if at < 20 or at == 300 else slow, float(at))
        assert len(found.history) <= 66
        if at < 940:
            assert found.planned.speed(1) == 1.0, at
        if at > 950:
            assert (found.planned.speed(1), found.planned.layers) == (0.5, slow.layers), at


@pytest.mark.parametrize("speed", [0.02, 0.5, 2.0])
def test_without_a_time_every_measurement_counts_at_once(speed: float) -> None:
    assert after([1.0, speed], seconds=0.0).planned.speed(1) == speed


@given(st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.02, 3)), max_size=30), st.floats(0, 30))
def test_a_planned_speed_lies_within_what_was_measured_and_moves_only_if_all_agree(
    measured: list[tuple[float, float]], seconds: float
) -> None:
    found, now, seen = LastingCosts(seconds, BASE), 0.0, list[tuple[float, CostModel]]()
    for pause, speed in measured:
        now += pause
        seen.append((now, BASE.with_speeds({1: speed})))
        before, found = found.planned.speed(1), found.observe(seen[-1][1], now)
        older = [i for i, (at, _) in enumerate(seen) if now - at >= seconds]
        recent = [costs.speed(1) for at, costs in seen if now - at < seconds] or [speed]
        assert len(found.history) == len(seen) - (older[-1] if older else 0)
        planned = found.planned.speed(1)
        if not older or min(recent) <= before <= max(recent):
            assert planned == before
        else:
            assert planned == (min(recent) if before < min(recent) else max(recent))
