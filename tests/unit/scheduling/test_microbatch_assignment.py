"""Micro-batches by speed: optimal in both aims, one after the other, compared with all possible assignments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.determinism.reduction_tree import max_open_nodes, maximal_nodes
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling import microbatch_assignment
from elaswave_spmd.scheduling.microbatch_assignment import (
    assign_by_speed,
    assign_microbatches,
    balanced_counts,
    count_tree_nodes,
    least_load,
    max_counts,
    most_open_sums,
)

SPEEDS = st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.7, 1.0, 1.0, 1.0, 1.3, 2.0]) | st.floats(0.05, 4), min_size=1)
ORDERS = ("contiguous", "time-major")


def all_counts(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in all_counts(total - first, parts - 1):
            yield (first, *rest)


def largest(counts: Sequence[int] | np.ndarray, speeds: Sequence[float]) -> float:
    return float((np.array(counts) / np.array(speeds)).max())


def nodes_of(counts: Sequence[int]) -> int:
    """Open tree nodes of all workers, worked out on the tree itself."""
    total, start, found = sum(counts), 0, 0
    for count in counts:
        found += len(maximal_nodes(range(start, start + count), total))
        start += count
    return found


def aims(counts: Sequence[int], speeds: Sequence[float]) -> tuple[float, int]:
    return largest(counts, speeds), nodes_of(counts)


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
@settings(deadline=None)
def test_nodes_of_a_range_are_those_of_the_tree(case):
    num_microbatches, *ends = case
    start, stop = sorted(ends)
    found = count_tree_nodes(np.array([start]), np.array([stop]), num_microbatches)
    assert found.tolist() == [len(maximal_nodes(range(start, stop), num_microbatches))]


@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 8, 13, 24, 33, 64])
def test_open_sums_of_a_range_are_those_of_the_tree(num_microbatches):
    ranges = [(a, b) for a in range(num_microbatches + 1) for b in range(a, num_microbatches + 1)]
    starts, stops = np.array(ranges).T
    found = most_open_sums(starts, stops, num_microbatches)
    assert found.tolist() == [max_open_nodes(range(a, b), num_microbatches) for a, b in ranges]


@given(SPEEDS, st.integers(0, 9))
@settings(deadline=None)
def test_the_largest_load_is_the_least_possible(speeds, num_microbatches):
    speeds = speeds[:4]
    found = balanced_counts(num_microbatches, np.array(speeds))
    assert found.sum() == num_microbatches and (found >= 0).all()
    assert largest(found, speeds) == min(
        largest(counts, speeds) for counts in all_counts(num_microbatches, len(speeds))
    )
    assert least_load(num_microbatches, np.array(speeds)) == largest(found, speeds)


@given(SPEEDS, st.integers(1, 400))
@settings(deadline=None)
def test_no_worker_could_give_a_microbatch_away(speeds, num_microbatches):
    """A load is least if moving any one micro-batch of the slowest worker makes another just as slow, or slower."""
    v = np.array(speeds)
    found = balanced_counts(num_microbatches, v)
    load = largest(found, speeds)
    assert (found.sum() == num_microbatches and ((found + 1) / v >= load).all()) or load == (found / v)[found > 0].max()
    slowest = int((found / v).argmax())
    others = np.delete((found + 1) / v, slowest)
    assert not len(others) or others.min() >= load
    caps = max_counts(load, v)
    assert (caps / v <= load).all() and ((caps + 1) / v > load).all() and (found <= caps).all()


@given(SPEEDS, st.integers(1, 9))
@settings(deadline=None, max_examples=150)
def test_the_contiguous_assignment_is_optimal_in_each_aim(speeds, num_microbatches):
    speeds = speeds[:4]
    found = assign_by_speed(num_microbatches, speeds)
    best = min(aims(counts, speeds) for counts in all_counts(num_microbatches, len(speeds)))
    assert sum(found) == num_microbatches and aims(found, speeds) == best


@given(SPEEDS, st.integers(1, 60), st.sampled_from(ORDERS))
@settings(deadline=None)
def test_the_second_aim_does_not_cost_the_first(speeds, num_microbatches, microbatch_order):
    found = assign_by_speed(num_microbatches, speeds, microbatch_order=microbatch_order)
    assert sum(found) == num_microbatches
    assert largest(found, speeds) == least_load(num_microbatches, np.array(speeds))


@given(SPEEDS, st.integers(1, 9), st.sampled_from([0.0, 0.05, 0.3, 1.0]))
@settings(deadline=None, max_examples=150)
def test_aligned_cuts_are_the_best_that_the_load_allows(speeds, num_microbatches, align):
    speeds = speeds[:4]
    found = assign_by_speed(num_microbatches, speeds, align=align)
    load = least_load(num_microbatches, np.array(speeds)) * (1 + align)
    allowed = [counts for counts in all_counts(num_microbatches, len(speeds)) if largest(counts, speeds) <= load]
    assert sum(found) == num_microbatches and found in allowed
    assert nodes_of(found) == min(map(nodes_of, allowed))


@given(st.integers(0, 70), st.integers(1, 40), st.integers(0, 30), st.integers(1, 5), st.sampled_from([0.05, 0.3]))
@settings(deadline=None)
def test_a_part_of_the_tree_is_cut_at_the_borders_of_the_whole(before, number, after, workers, align):
    of_tree, v = before + number + after, np.ones(workers)
    found = assign_by_speed(number, v, align=align, block=(before, of_tree))
    alone = assign_by_speed(number, v, align=align)

    def nodes(counts: Sequence[int]) -> int:
        stops = before + np.cumsum(counts)
        return int(count_tree_nodes(stops - counts, stops, of_tree).sum())

    assert sum(found) == number and largest(found, v.tolist()) <= least_load(number, v) * (1 + align)
    assert nodes(found) <= nodes(alone)


def test_equal_workers_get_equal_microbatches():
    for microbatch_order in ORDERS:
        assert assign_by_speed(12, [1, 1, 1], microbatch_order=microbatch_order) == (4, 4, 4)
    assert assign_by_speed(12, [1, 1, 0.5], microbatch_order="time-major") == (5, 5, 2)
    assert assign_by_speed(14, [1, 1, 0.5], microbatch_order="time-major") == (6, 6, 2)
    assert assign_by_speed(7, [1, 1, 1], microbatch_order="time-major") == even_counts(7, 3)
    assert assign_by_speed(4, [1, 1, 0.01]) == (2, 2, 0), "a worker that is too slow gets nothing"


def test_fewer_tree_nodes_are_preferred():
    """16 micro-batches over 3: cuts at 4 or 6 and 10 or 12 are at large nodes, 5 and 11 are not."""
    found = assign_by_speed(16, [1, 1, 1])
    assert max(found) == 6 and nodes_of(found) < nodes_of(even_counts(16, 3))
    assert assign_by_speed(16, [1, 1, 1], fewest_nodes=False) == even_counts(16, 3)


@pytest.mark.parametrize(
    ("microbatches", "divisor", "speed"), [(3, 0.1, 0.7), (6, 0.1, 0.35), (3, 0.7, 0.7), (9, 0.1, 0.7)]
)
def test_rounding_does_not_exceed_the_load(microbatches, divisor, speed):
    load, v = microbatches / divisor, np.array([speed])
    caps = max_counts(load, v)
    assert caps[0] / speed <= load < (caps[0] + 1) / speed


def test_too_many_ties_keep_the_first_aim(monkeypatch):
    settled = assign_by_speed(16, [1, 1, 1])
    monkeypatch.setattr(microbatch_assignment, "MOST_WORK", 3)
    plain = assign_by_speed(16, [1, 1, 1])
    assert plain == (6, 5, 5) != settled


@given(st.lists(SPEEDS.map(lambda v: v[:5]), min_size=1, max_size=4), st.integers(1, 24), st.sampled_from(ORDERS))
@settings(deadline=None)
def test_each_stage_is_assigned_by_itself(stages, num_microbatches, microbatch_order):
    speeds = [np.array(v) for v in stages]
    found = assign_microbatches(num_microbatches, speeds, microbatch_order=microbatch_order)
    nodes = 0
    for v, counts, load in zip(stages, found.counts, found.loads, strict=True):
        assert counts == assign_by_speed(num_microbatches, v, microbatch_order=microbatch_order)
        assert load == largest(counts, v)
        nodes += nodes_of(counts) if microbatch_order == "contiguous" else num_microbatches
    assert found.num_tree_nodes == nodes
    assert "tree nodes" in str(found)


def test_speeds_are_above_0():
    with pytest.raises(AssertionError):
        balanced_counts(3, np.array([1.0, 0.0]))
