"""The least energy of a step: never longer, and no other slowdowns that are as fast take less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.scheduling.action_graph import ActionGraph
from elaswave_spmd.scheduling.least_energy import slowdowns
from elaswave_spmd.scheduling.step_time import timed_graph
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of


@st.composite
def graphs(draw) -> ActionGraph:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    seconds = draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    costs = costs_of(seconds, latency_s=draw(st.sampled_from([0.0, 0.2])))
    costs = costs.with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    return timed_graph(assigned(sizes, draw(st.integers(1, 8)), costs), costs)


def energy(graph: ActionGraph, slower: np.ndarray) -> float:
    return float((graph.seconds / slower**2).sum())


@given(graphs(), st.floats(1.0, 1.3), st.floats(1.0, 3.0), st.integers(1, 20), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_no_other_slowdowns_take_less_energy(graph, longer, slowest, number, seed):
    """The problem is convex: it is enough that no step from here toward a slowdown that is allowed saves anything."""
    random = np.random.default_rng(seed)
    groups = np.unique(random.integers(number, size=len(graph.order)), return_inverse=True)[1]
    most_s = longer * graph.makespan()
    found = slowdowns(graph, groups, most_s, slowest)
    assert found.min() >= 1 and found.max() <= slowest * (1 + 1e-9)
    assert graph.makespan(graph.seconds * found[groups]) <= most_s * (1 + 1e-9)
    least = energy(graph, found[groups])
    for _ in range(20):
        other = 1 + (slowest - 1) * random.random(len(found)) ** random.choice([0.2, 1, 5])
        scale = _most_that_fits(graph, groups, found, other, most_s)
        assert energy(graph, (found + scale * (other - found))[groups]) >= least * (1 - 2e-3)


def _most_that_fits(
    graph: ActionGraph, groups: np.ndarray, start: np.ndarray, other: np.ndarray, most_s: float
) -> float:
    """How far one may go from slowdowns that fit toward others."""
    good, bad = 0.0, 1.0
    for _ in range(20):
        middle = (good + bad) / 2
        fits = graph.makespan(graph.seconds * (start + middle * (other - start))[groups]) <= most_s
        good, bad = (middle, bad) if fits else (good, middle)
    return good


def test_one_worker_is_slowed_down_alike():
    """With nothing to wait for, equal slowdowns are best: energy is convex."""
    costs = costs_of([1.0, 3.0])
    graph = timed_graph(assigned([1], 4, costs), costs)
    found = slowdowns(graph, np.arange(len(graph.order)), 1.5 * graph.makespan(), 4.0)
    assert found == pytest.approx(np.full(len(found), 1.5), rel=1e-3)


def test_two_paths_that_share_an_action():
    """a, then b beside c: b and c take what a leaves. The least of 1/x^2 + 1/y^2 + 3/z^2 is found by hand.

    Path a-b has 2 s for two actions of 1 s, but c takes 3 s of 4 s with a: so x + 3z <= 6 binds, and y what is left.
    """
    graph = ActionGraph((0, 1, 2), (), (0, 1, 2), np.array([1.0, 1.0, 3.0]), (-1, 0, 0), (0.0, 0.0, 0.0))
    x, y, z = slowdowns(graph, np.arange(3), 6.0, 10.0)
    assert x + 3 * z == pytest.approx(6, rel=1e-4) and x + y == pytest.approx(6, rel=1e-4)
    best = min((1 / a**2 + 1 / (6 - a) ** 2 + 3 / ((6 - a) / 3) ** 2, a) for a in np.linspace(1, 3, 20_001))
    assert (1 / x**2 + 1 / y**2 + 3 / z**2) == pytest.approx(best[0], rel=1e-4) and x == pytest.approx(
        best[1], rel=1e-2
    )


def test_seconds_that_no_slowdown_stretches_are_kept_free():
    graph = ActionGraph((0,), (), (0, 0), np.array([1.0, 1.0]), (-1, -1), (0.0, 0.0))
    found = slowdowns(graph, np.array([0, 0]), 4.0, 4.0, np.array([0.0, 1.0]))
    assert found == pytest.approx([1.5], rel=1e-3)


def test_nothing_to_slow_down():
    graph = ActionGraph((0,), (), (), np.zeros(0), (), ())
    assert len(slowdowns(graph, np.zeros(0, np.int64), 1.0, 2.0)) == 0
    graph = ActionGraph((0,), (), (0,), np.ones(1), (-1,), (0.0,))
    assert slowdowns(graph, np.zeros(1, np.int64), 5.0, 1.0).tolist() == [1.0]
