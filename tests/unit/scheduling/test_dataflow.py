"""Micro-batches over workers by speed: optimal in each aim, one after another, against all dealings there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.determinism.reduction_tree import maximal_nodes
from elaswave_spmd.mesh import Topology
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.scheduling import microbatch_assignment
from elaswave_spmd.scheduling.microbatch_assignment import (
    Before,
    caps_of,
    deal_by_speed,
    deal_stages,
    fewest_possible,
    host_numbers,
    least_load,
    num_nodes,
    owners,
    traffic,
)
from elaswave_spmd.scheduling.placement import deal_microbatches

SPEEDS = st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.7, 1.0, 1.0, 1.0, 1.3, 2.0]) | st.floats(0.05, 4), min_size=1)
DEALINGS = ("contiguous", "time-major")


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


def aims(counts, speeds, before, hosts) -> tuple:
    sent = traffic(counts, "contiguous", before, hosts) if before else (0, 0)
    return largest(counts, speeds), nodes_of(counts), *sent


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
@settings(deadline=None)
def test_nodes_of_a_run_are_those_of_the_tree(case):
    num_microbatches, *ends = case
    start, stop = sorted(ends)
    found = num_nodes(np.array([start]), np.array([stop]), num_microbatches)
    assert found.tolist() == [len(maximal_nodes(range(start, stop), num_microbatches))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from(DEALINGS))
def test_owners_are_those_of_the_placement(counts, dealing):
    assert tuple(owners(counts, dealing).tolist()) == deal_microbatches(range(len(counts)), counts, dealing)


@given(SPEEDS, st.integers(0, 9))
@settings(deadline=None)
def test_the_largest_load_is_the_least_possible(speeds, num_microbatches):
    speeds = speeds[:4]
    found = fewest_possible(num_microbatches, np.array(speeds))
    assert found.sum() == num_microbatches and (found >= 0).all()
    assert largest(found, speeds) == min(
        largest(counts, speeds) for counts in all_counts(num_microbatches, len(speeds))
    )
    assert least_load(num_microbatches, np.array(speeds)) == largest(found, speeds)


@given(SPEEDS, st.integers(1, 400))
@settings(deadline=None)
def test_nobody_could_give_a_microbatch_away(speeds, num_microbatches):
    """A load is least if moving any one micro-batch of the slowest worker makes another just as slow, or slower."""
    v = np.array(speeds)
    found = fewest_possible(num_microbatches, v)
    load = largest(found, speeds)
    assert (found.sum() == num_microbatches and ((found + 1) / v >= load).all()) or load == (found / v)[found > 0].max()
    slowest = int((found / v).argmax())
    others = np.delete((found + 1) / v, slowest)
    assert not len(others) or others.min() >= load
    caps = caps_of(load, v)
    assert (caps / v <= load).all() and ((caps + 1) / v > load).all() and (found <= caps).all()


@given(
    SPEEDS,
    st.integers(1, 9),
    st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_contiguous_dealing_is_optimal_in_each_aim(speeds, num_microbatches, shape, many_hosts, data):
    speeds = speeds[:4]
    before, hosts = None, ()
    if shape:
        num_microbatches = sum(shape)
        numbers = st.integers(0, 2)
        there = tuple(data.draw(st.lists(numbers, min_size=len(shape), max_size=len(shape)))) if many_hosts else ()
        hosts = tuple(data.draw(st.lists(numbers, min_size=len(speeds), max_size=len(speeds)))) if many_hosts else ()
        before = Before(tuple(shape), there)
    found = deal_by_speed(num_microbatches, speeds, before=before, hosts=hosts)
    best = min(aims(counts, speeds, before, hosts) for counts in all_counts(num_microbatches, len(speeds)))
    assert sum(found) == num_microbatches and aims(found, speeds, before, hosts) == best


@given(SPEEDS, st.integers(1, 60), st.sampled_from(DEALINGS))
@settings(deadline=None)
def test_no_aim_costs_the_first_one(speeds, num_microbatches, dealing):
    before = Before(even_counts(num_microbatches, len(speeds)))
    found = deal_by_speed(num_microbatches, speeds, dealing=dealing, before=before)
    assert sum(found) == num_microbatches
    assert largest(found, speeds) == least_load(num_microbatches, np.array(speeds))


def test_equal_workers_get_equal_microbatches():
    for dealing in DEALINGS:
        assert deal_by_speed(12, [1, 1, 1], dealing=dealing) == (4, 4, 4)
    assert deal_by_speed(12, [1, 1, 0.5], dealing="time-major") == (5, 5, 2)
    assert deal_by_speed(14, [1, 1, 0.5], dealing="time-major") == (6, 6, 2)
    assert deal_by_speed(7, [1, 1, 1], dealing="time-major") == even_counts(7, 3)
    assert deal_by_speed(4, [1, 1, 0.01]) == (2, 2, 0), "a worker that is too slow gets nothing"


def test_fewer_tree_nodes_are_preferred():
    """16 micro-batches over 3: cuts at 4 or 6 and 10 or 12 are at large nodes, 5 and 11 are not."""
    found = deal_by_speed(16, [1, 1, 1])
    assert max(found) == 6 and nodes_of(found) < nodes_of(even_counts(16, 3))
    assert deal_by_speed(16, [1, 1, 1], settle=False) == even_counts(16, 3)


def test_time_major_follows_the_stage_before_where_that_is_as_good():
    speeds, before = [1, 1, 1], Before((2, 3, 2))
    assert deal_by_speed(7, speeds, dealing="time-major", before=before) == (2, 3, 2)
    assert deal_by_speed(7, [1, 0.5, 1], dealing="time-major", before=before) == (3, 1, 3)


def test_microbatches_stay_on_their_host_where_they_can():
    """Two hosts with two workers each in both stages; 5 micro-batches over 4 workers: who has two is for the traffic
    to say.
    """
    before = Before((1, 1, 1, 2), (0, 0, 1, 1))
    found = deal_by_speed(5, [1, 1, 1, 1], before=before, hosts=(0, 0, 1, 1))
    assert traffic(found, "contiguous", before, (0, 0, 1, 1))[0] == 0
    crossed = traffic((2, 1, 1, 1), "contiguous", before, (0, 0, 1, 1))
    assert crossed == (1, 5)


def test_fewer_links_are_the_last_aim():
    """(3, 3, 2) has as few nodes; but the first two workers of the stage before would need a third link."""
    before = Before((1, 1, 6))
    found = deal_by_speed(8, [1, 1, 1], before=before)
    assert found == (2, 3, 3) and traffic(found, "contiguous", before) == (0, 4)
    assert nodes_of((3, 3, 2)) == nodes_of(found) and traffic((3, 3, 2), "contiguous", before) == (0, 5)
    assert deal_by_speed(8, [1, 1, 1]) == (3, 3, 2)


@pytest.mark.parametrize(("microbatches", "of", "speed"), [(3, 0.1, 0.7), (6, 0.1, 0.35), (3, 0.7, 0.7), (9, 0.1, 0.7)])
def test_rounding_lets_nobody_have_more_than_the_load(microbatches, of, speed):
    load, v = microbatches / of, np.array([speed])
    caps = caps_of(load, v)
    assert caps[0] / speed <= load < (caps[0] + 1) / speed


def test_too_many_ties_keep_the_first_aim(monkeypatch):
    settled = deal_by_speed(16, [1, 1, 1])
    monkeypatch.setattr(microbatch_assignment, "MOST_WORK", 3)
    plain = deal_by_speed(16, [1, 1, 1])
    assert plain == (6, 5, 5) != settled


@given(st.lists(SPEEDS.map(lambda v: v[:5]), min_size=1, max_size=4), st.integers(1, 24), st.sampled_from(DEALINGS))
@settings(deadline=None)
def test_stages_are_dealt_one_after_another(stages, num_microbatches, dealing):
    speeds = [np.array(v) for v in stages]
    found = deal_stages(num_microbatches, speeds, dealing=dealing)
    before, nodes, links = None, 0, 0
    for v, counts, load in zip(stages, found.counts, found.loads, strict=True):
        assert counts == deal_by_speed(num_microbatches, v, dealing=dealing, before=before)
        assert load == largest(counts, v)
        nodes += nodes_of(counts) if dealing == "contiguous" else num_microbatches
        links += traffic(counts, dealing, before)[1] if before else 0
        before = Before(counts)
    assert (found.nodes, found.links, found.crossing) == (nodes, links, 0)
    assert "tree nodes" in str(found)


def test_hosts_are_numbered_where_there_are_several():
    stages = ((0, 1), (2, 3))
    assert host_numbers(stages, Topology.single_host(range(4))) is None
    assert host_numbers(stages, Topology.regular(range(4), per_host=1)) == [(0, 1), (2, 3)]
    assert host_numbers(((0, 9),), Topology.single_host(range(4))) is None, "of a newcomer nothing is known"
    crossing = deal_stages(4, [np.ones(2)] * 2, hosts=[(0, 1), (1, 0)]).crossing
    assert crossing == 4


def test_speeds_are_above_0():
    with pytest.raises(AssertionError):
        fewest_possible(3, np.array([1.0, 0.0]))
