"""The search over numbers of stages: the least time until the end, moves included, of all groupings evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling import stage_search as stages_module
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.scheduling.stage_search import Groupings, MoveEstimates, StageChoice, old_stages_of, regroup
from tests.unit.scheduling.planning_cases import SPEEDS, costs_of, even_cuts, rule_of, stages_of


def best_of(*args: Any, stage_counts: Collection[int] | None = None, **more: Any) -> StageChoice:
    return Groupings(*args, **more).best(stage_counts)


@st.composite
def crews(draw) -> tuple[list[list[int]], tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(stages after some went and some came, stages before, cuts before)."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    old = stages_of(sizes)
    left = [[rank for rank in members if draw(st.sampled_from([True, True, True, False]))] for members in old]
    fresh = itertools.count(sum(sizes))
    for members in left:
        while not members or draw(st.sampled_from([False, False, False, True])):
            members.append(next(fresh))
    num_layers = draw(st.integers(len(sizes), 6))
    inner = (
        draw(st.sets(st.integers(1, num_layers - 1), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
        if (num_layers > 1)
        else set()
    )
    return left, old, (0, *sorted(inner), num_layers)


@given(crews(), st.integers(0, 3), st.integers(0, 2), st.data())
@settings(deadline=None)
def test_moves_count_what_workers_lack(crew, zero, mirrors, data):
    """Against shares held by name: of a sharded layer each of n workers has 1/n, and keeps it up to its new share."""
    stages, old, cuts = crew
    state = [data.draw(st.integers(0, 100)) for _ in range(cuts[-1])]
    costs = CostModel(tuple(LayerCost("l", 1, 1, state_bytes=size) for size in state), 10.0)
    rule = rule_of(zero, mirrors)
    table = MoveEstimates(costs, cuts, old_stages_of(stages, old)).table(rule)
    here = {rank for members in stages for rank in members}
    for layer, size in enumerate(state):
        home = next(s for s, (a, b) in enumerate(pairwise(cuts)) if a <= layer < b)
        alive = set(old[home]) & here
        for s, members in enumerate(stages):
            both = alive & set(members)
            if zero == 0:
                wanted = size * (len(members) - len(both))
            else:
                wanted = size * (1 - len(both) * min(1 / len(members), 1 / max(1, len(alive))))
            assert table[s, layer] == pytest.approx(wanted)
    same = MoveEstimates(costs, cuts, old_stages_of(old, old)).to(cuts, rule)
    assert (same.bytes, same.seconds) == (0, 0)


def test_a_move_takes_as_long_as_the_busiest_link():
    costs = costs_of([1, 1, 1, 1], state_bytes=120, bandwidth=10.0, latency_s=0.5)
    stages = stages_of([2, 3])
    moves = MoveEstimates(costs, (0, 2, 4), old_stages_of(stages, stages))
    move = moves.to((0, 1, 4), rule_of(1))  # layer 1: two workers give 60 B each, three get 40 B each
    assert (move.bytes, move.seconds) == (120, 6.5)
    assert moves.to((0, 1, 4), rule_of(0)).bytes == 360, "replicated state goes to each of the three"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 5), st.data())
@settings(deadline=None)
def test_regrouping_keeps_workers_near_their_layers(sizes, num_stages, data):
    old = [s for s, size in enumerate(sizes) for _ in range(size)]
    old = [-1 if data.draw(st.integers(0, 9)) == 0 else s for s in old]
    num_layers = data.draw(st.integers(len(sizes), 8))
    cuts = even_cuts(num_layers, len(sizes))
    if num_stages > len(old):
        return
    found = regroup(old, cuts, num_stages)

    def near(groups) -> float:
        ends, total = list(accumulate(groups, initial=0)), 0.0
        for s, (a, b) in enumerate(pairwise(ends)):
            for home in old[a:b]:
                if home >= 0:
                    low, high = cuts[home] / num_layers, cuts[home + 1] / num_layers
                    total += max(0.0, min(high, (s + 1) / num_stages) - max(low, s / num_stages))
        return total

    base, extra = divmod(len(old), num_stages)
    groups = [
        tuple(base + (s in more) for s in range(num_stages))
        for more in itertools.combinations(range(num_stages), extra)
    ]
    assert found in groups and near(found) == pytest.approx(max(map(near, groups)))


def test_regrouping_keeps_even_stages():
    assert regroup([0, 0, 1, 1, 2], (0, 2, 4, 6), 2) == (3, 2)
    assert regroup([0, 1, 2, 2, 2], (0, 2, 4, 6), 2) == (2, 3)
    assert regroup([0, 0, 1, 1], (0, 3, 6), 2) == (2, 2)


@given(crews(), st.integers(1, 12), st.integers(0, 50), st.sampled_from([0, 1, 3]), st.data())
@settings(deadline=None, max_examples=60)
def test_the_choice_is_the_best_of_all_groupings_evaluated(crew, num_microbatches, remaining, zero, data):
    present, old, cuts = crew
    order = tuple(rank for members in present for rank in members)
    sizes = st.integers(0, 30)
    layers = tuple(
        LayerCost("l", data.draw(st.integers(1, 9)), 1, data.draw(sizes), data.draw(sizes), data.draw(sizes))
        for _ in range(cuts[-1])
    )
    costs = CostModel(layers, data.draw(st.sampled_from([0.5, 5.0, 500.0])))
    costs = costs.with_speeds({rank: data.draw(SPEEDS) for rank in order})
    rule, limit = rule_of(zero), data.draw(st.sampled_from([math.inf, math.inf, 60.0, 120.0]))
    was = np.concatenate(old_stages_of(present, old))
    search = Groupings(costs, present, num_microbatches, old, cuts, remaining, rule, limit)
    totals = []
    as_they_are = [len(members) for members in present]
    cases = [(as_they_are, math.inf), (as_they_are, 0.0)]
    cases += [(regroup(was, cuts, n), 0.0) for n in range(1, len(order) + 1)]
    for groups, tolerance in cases:
        if len(groups) <= len(layers):
            try:
                choice = search.evaluate(groups, "any", tolerance)
            except PlanError:
                continue
            totals.append(search.total(choice))
            if max(groups) - min(groups) <= 1:
                assert search.least_seconds(len(groups)) <= choice.seconds * (1 + 1e-9)
    more = {"old_stages": old, "old_cuts": cuts, "remaining_steps": remaining, "rule": rule, "memory_limit": limit}
    if not totals:
        with pytest.raises(PlanError, match="fits in its memory"):
            best_of(costs, present, num_microbatches, **more)
        return
    found = best_of(costs, present, num_microbatches, **more)
    assert found.seconds * remaining + found.move.seconds == pytest.approx(min(totals))
    assert tuple(rank for members in found.stages for rank in members) == order
    assert len(found.partition.cuts) == len(found.stages) + 1 and "s a step" in str(found)


def five_of_six(bandwidth: float, remaining: int, **more):
    """pp3 with two workers in each stage has lost one; six layers of 1 s, 12 micro-batches."""
    costs = costs_of([1.0] * 6, bandwidth=bandwidth, state_bytes=1000)
    present, old = ((0, 1), (2, 3), (4,)), ((0, 1), (2, 3), (4, 5))
    more = {"old_stages": old, "old_cuts": (0, 2, 4, 6), "remaining_steps": remaining, "rule": rule_of(1), **more}
    return best_of(costs, present, 12, **more)


def test_three_stages_of_five_workers_become_two_if_that_pays():
    memory = {"memory_limit": 4000.0}  # of six layers of 1,000 B no worker has room for all, mirrors included
    kept = five_of_six(1e6, 1000, stage_counts=(), **memory)
    found = five_of_six(1e6, 1000, stage_counts=(2, 3), **memory)
    assert [len(members) for members in found.stages] == [3, 2] and found.seconds < kept.seconds
    slow = five_of_six(1.0, 10, stage_counts=(2, 3), **memory)
    assert slow.stages == ((0, 1), (2, 3), (4,)) and slow.reason.startswith("the stages as they are (")
    assert (slow.partition.cuts, slow.move.bytes) == ((0, 2, 4, 6), 0)
    assert five_of_six(1e6, 0, stage_counts=(2, 3), **memory).move.bytes == 0


@pytest.mark.parametrize("large", [False, True])
def test_only_so_many_numbers_are_evaluated(monkeypatch, large: bool):
    monkeypatch.setattr(stages_module, "MOST_NUMBERS" if large else "MOST_PARTITIONED", 0)
    monkeypatch.setattr(stages_module, "PARTITIONED_WORKERS", 4 if large else 5)
    assert five_of_six(1e6, 1000).stages == ((0, 1), (2, 3), (4,))


def test_numbers_of_stages_are_ordered_by_where_layers_can_be_cut():
    """Of 34 layers on 92 workers many numbers of stages have a lower bound below that of 4, but not by their layers."""
    blocks = (LayerCost("embed", 0.0, 0.0), *[LayerCost("block", 1.0, 2.0, weight_share=0.5)] * 32)
    costs = CostModel((*blocks, LayerCost("head", 0.6, 1.2, weight_share=0.5)), 1e9)
    stages, split = stages_of([24, 24, 22, 22]), SplitBackward.of_costs(costs, rule_of(1))
    groupings = Groupings(costs, stages, 384, stages, (0, 9, 17, 25, 34), remaining_steps=1000, split=split)
    by_bound = sorted((groupings.least_seconds(number), number) for number in range(1, 35))
    assert 4 not in [number for _, number in by_bound[: stages_module.MOST_NUMBERS]]
    found = groupings.numbers(None)
    assert found == sorted(found) and {number for _, number in found} == set(range(1, 35))
    assert 4 in [number for _, number in found[:12]]


@given(st.data())
def test_balanced_stages_have_the_least_bottleneck_of_all_sizes_and_cuts(data: st.DataObject):
    """By enumeration, for equally fast workers."""
    seconds = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.7]), min_size=1, max_size=5))
    seconds[data.draw(st.integers(0, len(seconds) - 1))] = 1.3
    workers, microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    number = data.draw(st.integers(1, 6))
    present = (tuple(range(workers)),)
    groupings = Groupings(costs_of(seconds), present, microbatches, present, (0, len(seconds)), 1)
    found = groupings.balanced(number)
    if number > min(workers, len(seconds)):
        assert found is None
        return
    assert found is not None and len(found) == number and sum(found) == workers and min(found) >= 1

    def bottleneck(sizes: Sequence[int], cuts: Sequence[int]) -> float:
        spans = [sum(seconds[a:b]) for a, b in pairwise(cuts)]
        return max(-(-microbatches // size) * span for size, span in zip(sizes, spans, strict=True))

    all_cuts = [(0, *some, len(seconds)) for some in combinations(range(1, len(seconds)), number - 1)]
    all_sizes = [
        tuple(b - a for a, b in pairwise((0, *some, workers))) for some in combinations(range(1, workers), number - 1)
    ]
    least = min(bottleneck(sizes, cuts) for sizes in all_sizes for cuts in all_cuts)
    assert min(bottleneck(found, cuts) for cuts in all_cuts) <= least * 1.001


def test_nothing_to_choose_from_is_refused():
    costs = costs_of([1.0])
    with pytest.raises(PlanError, match="number of stages"):
        best_of(costs, ((0,), (1,)), 4, old_stages=((0,), (1,)), old_cuts=(0, 1, 1), remaining_steps=1, stage_counts=())


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_good_groupings_are_no_worse_than_even_ones(data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    it = iter(range(sum(sizes)))
    present = tuple(tuple(next(it) for _ in range(size)) for size in sizes)
    num_layers = data.draw(st.integers(len(sizes), 7))
    cuts = tuple(round(i * num_layers / len(sizes)) for i in range(len(sizes) + 1))
    costs = costs_of(data.draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=num_layers, max_size=num_layers)))
    costs = costs.with_speeds({rank: data.draw(st.sampled_from([1.0, 1.0, 0.5])) for rank in range(sum(sizes))})
    microbatches = data.draw(st.integers(1, 12))
    more = {"old_stages": present, "old_cuts": cuts, "remaining_steps": 1000, "rule": rule_of(1)}
    groupings = Groupings(costs, present, microbatches, **more)
    found = []
    for _, number in groupings.numbers(None):
        choices = groupings.of_number(number)
        total = [choice.seconds * 1000 + choice.move.seconds for choice in choices]
        assert total == sorted(total) and len({choice.stages for choice in choices}) == len(choices)
        assert all(len(choice.stages) == number for choice in choices)
        assert len(groupings.of_number(number, 0.0)) <= 3, "nothing near: the starts alone"
        found += choices
    for choice in found:
        assert tuple(rank for members in choice.stages for rank in members) == tuple(range(sum(sizes)))
        assert all(choice.stages)
    even = best_of(costs, present, microbatches, **more)
    kept = even.stages == present  # perhaps with other layers: groupings are evaluated with the best ones
    least = min(choice.seconds * 1000 + choice.move.seconds for choice in found)
    assert kept or least <= even.seconds * 1000 + even.move.seconds + 1e-9


def test_workers_go_where_layers_are_many():
    """Eight layers on seven workers: no even grouping has a step as short as four and three of them."""
    costs = costs_of([1.0] * 8, bandwidth=1e6)
    present = ((0, 1, 2, 3), (4, 5, 6))
    groupings = Groupings(costs, present, 28, old_stages=present, old_cuts=(0, 4, 8), remaining_steps=1000)
    every = [choice for number in (1, 2, 3) for choice in groupings.of_number(number)]
    best, even = min(every, key=groupings.total), groupings.best()
    assert best.seconds <= even.seconds
