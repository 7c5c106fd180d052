"""Blocks of neighbours on large meshes: loads are the smallest there are, and far from a loss all stays as it is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.scheduling.microbatch_assignment import (
    SMALLEST_BLOCK,
    assign_by_speed,
    assign_microbatches,
    candidate_assignments,
    cut_blocks,
    first_microbatches,
    least_load,
    max_counts,
)
from elaswave_spmd.scheduling.pipeline import turns
from tests.unit.scheduling.planning_cases import assigned, costs_of


def caps(num_microbatches: int, speeds: list[np.ndarray]) -> list[np.ndarray]:
    return [max_counts(least_load(num_microbatches, v), v) for v in speeds]


@st.composite
def large_stages(draw) -> tuple[int, list[np.ndarray]]:
    """Stages of 64 to 200 workers that have lost some, a few of them slow, and the micro-batches of a step."""
    size, seed = draw(st.integers(64, 200)), draw(st.integers(0, 10**6))
    draws = random.Random(seed)
    speeds = []
    for _ in range(draw(st.integers(1, 4))):
        v = np.ones(size - draw(st.sampled_from([0, 0, 1, 2, 9])))
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            v[draws.randrange(len(v))] = draws.choice([0.5, 0.9, 1.2])
        speeds.append(v)
    return draw(st.integers(1, 20)) * size + draw(st.integers(0, 3)), speeds


@given(large_stages())
@settings(deadline=None, max_examples=60)
def test_blocks_lie_side_by_side_and_have_room(case):
    num_microbatches, speeds = case
    of_stages = caps(num_microbatches, speeds)
    blocks = cut_blocks(num_microbatches, of_stages)
    if not blocks:
        return
    assert blocks[0].microbatches[0] == 0 and blocks[-1].microbatches[1] == num_microbatches
    for left, right in pairwise(blocks):
        assert left.microbatches[1] == right.microbatches[0]
        assert [b for _, b in left.parts] == [a for a, _ in right.parts]
    for block in blocks:
        for cap, (a, b) in zip(of_stages, block.parts, strict=True):
            assert b - a >= SMALLEST_BLOCK - 1
            assert int(cap[a:b].sum()) >= block.microbatches[1] - block.microbatches[0]
    assert [b for _, b in blocks[-1].parts] == [len(v) for v in speeds]


@given(large_stages())
@settings(deadline=None, max_examples=60)
def test_the_largest_load_of_each_stage_is_the_smallest_there_is(case):
    num_microbatches, speeds = case
    found = assign_microbatches(num_microbatches, speeds)
    for v, counts, load in zip(speeds, found.counts, found.loads, strict=True):
        assert sum(counts) == num_microbatches and len(counts) == len(v) and min(counts) >= 0
        assert load == pytest.approx(least_load(num_microbatches, v), rel=1e-12)


@pytest.mark.parametrize("lost", [3, 64, 131, 198])
def test_a_loss_is_felt_beside_it_only(lost):
    """One of 200 is gone, with 16 micro-batches each: its 16 micro-batches are one more for 16 neighbours, wherever it
    was.
    """
    stages = [tuple(range(s * 200, (s + 1) * 200)) for s in range(3)]
    old = [(16,) * 200] * 3
    left = [stages[0], tuple(rank for rank in stages[1] if rank != 200 + lost), stages[2]]
    starts = first_microbatches(left, stages, old)
    counts = assign_microbatches(200 * 16, [np.ones(len(members)) for members in left], starts=starts).counts
    assert counts[0] == counts[2] == (16,) * 200
    others = [left[1][i] - 200 for i, microbatches in enumerate(counts[1]) if microbatches != 16]
    assert len(others) == 16 and all(abs(position - lost) <= 2 * SMALLEST_BLOCK for position in others)
    begins = dict(zip(left[1], np.cumsum([0, *counts[1]]).tolist(), strict=False))
    same = [position for position in range(200) if begins.get(200 + position) == 16 * position]
    assert len(same) >= 200 - 2 * SMALLEST_BLOCK, "most have the micro-batches that they had"


@pytest.mark.parametrize("lost", [0, 70, 199])
def test_a_large_mesh_without_a_worker_sends_fewer_sums_for_more_load(lost: int) -> None:
    """Each worker had an aligned block of 64, which is one sum. Blocks are cut at any place, and lie where they do."""
    v, number = np.ones(199), 200 * 64
    starts = [np.delete(np.arange(200) * 64, lost)]
    plain = assign_microbatches(number, [v], starts=starts)
    aligned = assign_microbatches(number, [v], starts=starts, align=0.05)
    assert sum(aligned.counts[0]) == number
    assert max(aligned.loads) <= 1.05 * least_load(number, v) and aligned.num_tree_nodes < plain.num_tree_nodes
    assert aligned in candidate_assignments(number, [v], starts=starts, align=0.05)
    assert aligned not in candidate_assignments(number, [v], starts=starts)


def test_newcomers_begin_where_the_one_to_their_left_does():
    starts = first_microbatches([(5, 9, 6), (7,)], [(5, 6), (7,)], [(3, 4), (7,)])
    assert [found.tolist() for found in starts] == [[0, 0, 3], [0]]


def test_small_meshes_are_assigned_as_a_whole():
    v = np.ones(60)
    assert cut_blocks(600, caps(600, [v, v[:-1]])) == ()
    assert assign_microbatches(600, [v]).counts == (assign_by_speed(600, v),)


def test_blocks_grow_until_there_is_room():
    """Four of one place are gone: with one micro-batch more each, its neighbours alone could not take all of their
    micro-batches.
    """
    microbatches = 16 * 512
    columns = np.arange(512)
    left = np.delete(columns, [200, 201, 202, 203])
    for gone, most in ((columns, 32), (left, 7)):
        found = cut_blocks(
            microbatches, caps(microbatches, [np.ones(512), np.ones(len(gone))]), [16 * columns, 16 * gone]
        )
        assert 0 < len(found) <= most
    assert len(cut_blocks(microbatches, caps(microbatches, [np.ones(512)]))) == 32


@pytest.mark.parametrize("sizes", [(96, 95, 96), (80, 78, 80, 79)])
@pytest.mark.parametrize("microbatch_order", ["contiguous", "time-major"])
def test_one_workers_turns_follow_from_its_own_microbatches(sizes, microbatch_order):
    microbatches = 4 * sizes[0]
    costs = costs_of([1.0] * len(sizes))
    placement = assigned(sizes, microbatches, costs, microbatch_order).placement()
    whole = turns(placement, range(microbatches))
    for rank in range(0, sum(sizes), 13):
        mine = placement.microbatches_of(rank)
        assert turns(placement, mine) == {microbatch: whole[microbatch] for microbatch in mine}
