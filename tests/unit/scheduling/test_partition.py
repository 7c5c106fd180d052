"""Layers over stages: the least bottleneck that fits, with the fewest bytes moved, against all partitions there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel, LayerCost
from elaswave_spmd.scheduling.partition import Partition, StageWorkers, balance_layers, partition
from tests.unit.scheduling.planning_cases import costs_of, rule_of

SMALL = st.integers(0, 20)
LAYERS = st.lists(
    st.builds(
        LayerCost, st.just("l"), SMALL, st.integers(1, 20), SMALL, SMALL, SMALL, st.integers(0, 9), st.integers(0, 9)
    ),
    min_size=1,
    max_size=6,
)
STAGE = st.builds(
    StageWorkers,
    st.integers(1, 4),
    st.sampled_from([1.0, 2.0, 2.5, 4.0]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.just(math.inf) | st.integers(20, 150).map(float),
    st.sampled_from([1.0, 2.0]),
)
RULES = st.builds(rule_of, st.integers(0, 3), st.integers(0, 2))


def all_cuts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def slowest(cuts, costs: CostModel, stages) -> float:
    return max(computed(cuts, costs, [stage.load for stage in stages]))


def computed(cuts, costs: CostModel, loads) -> list[float]:
    """By stage, the seconds of a micro-batch through its layers times this load."""
    total = costs.prefix("forward_s") + costs.prefix("backward_s")
    return [float(total[b] - total[a]) * load for (a, b), load in zip(pairwise(cuts), loads, strict=True)]


def fullest(cuts, costs, stages, rule) -> list[float]:
    """By how much each stage's workers lack room; below 0 where there is some left."""
    found = []
    for (a, b), stage in zip(pairwise(cuts), stages, strict=True):
        table = rule.stage_bytes(costs, size=stage.size, microbatches=stage.microbatches, in_flight=stage.in_flight)
        found.append(float(table[a, b]) - stage.memory_limit)
    return found


@given(LAYERS, st.lists(STAGE, min_size=1, max_size=4), RULES, st.sampled_from([0.0, 0.3]), st.booleans(), st.data())
@settings(deadline=None, max_examples=200)
def test_partition_is_optimal(layers, stages, rule, tolerance, by_pipeline, data):
    stages = stages[: len(layers)]
    costs = CostModel(tuple(layers), 1.0)
    shape = (len(stages), len(layers))
    moves = np.array(data.draw(st.lists(st.integers(0, 3), min_size=math.prod(shape), max_size=math.prod(shape))))
    moves = moves.reshape(shape)
    every = list(all_cuts(len(layers), len(stages)))
    fit = [cuts for cuts in every if max(fullest(cuts, costs, stages, rule)) <= 0]
    if not fit:
        with pytest.raises(PlanError, match="fits in its memory"):
            partition(costs, stages, rule=rule, move_bytes=moves, by_pipeline=by_pipeline)
        return

    def moved(cuts) -> int:
        return sum(int(moves[s, a:b].sum()) for s, (a, b) in enumerate(pairwise(cuts)))

    def minimized(cuts) -> float:
        if not by_pipeline:
            return slowest(cuts, costs, stages)
        return max(computed(cuts, costs, [max(0.0, stage.load - 1 / stage.fastest) for stage in stages]))

    found = partition(costs, stages, rule=rule, move_bytes=moves, tolerance=tolerance, by_pipeline=by_pipeline)
    best = min(map(minimized, fit))
    near = [cuts for cuts in fit if minimized(cuts) <= best * (1 + tolerance)]
    assert found.cuts in near and found.optimum_s == min(slowest(cuts, costs, stages) for cuts in fit)
    assert found.bottleneck_s == slowest(found.cuts, costs, stages) == max(found.stage_s)
    assert found.moved_bytes == moved(found.cuts) == min(map(moved, near))
    room = [m - stage.memory_limit for m, stage in zip(found.memory, stages, strict=True)]
    assert room == fullest(found.cuts, costs, stages, rule)
    assert "slowest" in str(found)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_without_memory_and_speeds_it_is_the_plain_balance(seconds, workers):
    workers = workers[: len(seconds)]
    costs = CostModel(tuple(LayerCost("l", s, 0) for s in seconds), 1.0)
    found = partition(costs, [StageWorkers(n, 1 / n) for n in workers])
    plain = balance_layers(seconds, workers)
    assert found.bottleneck_s == pytest.approx(slowest(plain, costs, [StageWorkers(n, 1 / n) for n in workers]))


def test_by_the_pipeline_a_stage_of_many_workers_has_more_layers():
    """Two workers have sixteen micro-batches each, seventeen have two: these wait for longer than they compute."""
    costs, stages = costs_of([1] * 19), [StageWorkers(17, 2.0, 2), StageWorkers(2, 16.0, 16)]
    by_bottleneck, by_pipeline = partition(costs, stages), partition(costs, stages, by_pipeline=True)
    assert by_bottleneck.cuts == (0, 17, 19) and by_bottleneck.bottleneck_s == pytest.approx(34)
    assert by_pipeline.cuts == (0, 18, 19) and by_pipeline.bottleneck_s == pytest.approx(36)
    assert by_pipeline.optimum_s == by_bottleneck.optimum_s


def test_layers_that_stay_cost_nothing():
    """Five equal layers over two stages: 2 + 3 or 3 + 2 are equally good; the one there is stays."""
    costs, stages = costs_of([1] * 5, state_bytes=10), [StageWorkers(1, 1.0)] * 2
    assert partition(costs, stages).cuts == (0, 2, 5)
    for old in ((0, 2, 5), (0, 3, 5)):
        found = partition(costs, stages, move_bytes=bytes_beyond(old))
        assert found == Partition(old, 3.0, *partition_parts(old), 0.0, 3.0)
    assert partition(costs, stages, move_bytes=bytes_beyond((0, 1, 5))).moved_bytes == 10
    assert partition(costs, stages, move_bytes=bytes_beyond((0, 4, 5)), tolerance=0.5).moved_bytes == 0


def bytes_beyond(old_cuts) -> np.ndarray:
    """[stages, layers]: a layer costs nothing in the stage that it is in, and 10 B in any other one."""
    found = np.full((len(old_cuts) - 1, old_cuts[-1]), 10.0)
    for stage, (first, stop) in enumerate(pairwise(old_cuts)):
        found[stage, first:stop] = 0.0
    return found


def partition_parts(cuts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    lengths = [float(b - a) for a, b in pairwise(cuts)]
    return tuple(lengths), tuple(10 * length for length in lengths)


def test_no_room_says_which_stage_by_how_much_and_what_fits():
    costs = costs_of([1, 1, 1, 1, 1], state_bytes=100)

    def stages(limit: float) -> list[StageWorkers]:
        return [StageWorkers(1, 1.0, 4, 2, limit), StageWorkers(3, 0.4, 2, 1, limit)]

    with pytest.raises(PlanError) as error:
        partition(costs, stages(250.0))
    text = str(error.value)
    assert "stage 1 lacks 50 B" in text and "layers 2..4 take 300 B" in text and "50 B more" in text
    assert max(partition(costs, stages(300.0)).memory) == 300
    with pytest.raises(PlanError):
        partition(costs, stages(299.0))
    sharded = partition(costs, stages(270.0), rule=rule_of(1, 1))
    assert sharded.cuts == (0, 1, 5), "sharded over three workers with one mirror, a layer takes two thirds"
    assert partition(costs, stages(266.0), rule=rule_of(1, 1)).cuts == (0, 2, 5)


@given(LAYERS, st.lists(STAGE, min_size=1, max_size=3), RULES)
@settings(deadline=None)
def test_what_is_said_to_fit_fits(layers, stages, rule):
    costs, stages = CostModel(tuple(layers), 1.0), stages[: len(layers)]
    try:
        partition(costs, stages, rule=rule)
    except PlanError as error:
        lacks = min(max(fullest(cuts, costs, stages, rule)) for cuts in all_cuts(len(layers), len(stages)))
        assert f"lacks {lacks:,.0f} B" in str(error)
        more = [
            StageWorkers(s.size, s.load, s.microbatches, s.in_flight, s.memory_limit + lacks + 1e-6) for s in stages
        ]
        partition(costs, more, rule=rule)


def test_more_stages_than_layers_is_refused():
    with pytest.raises(PlanError, match="at least one layer"):
        partition(costs_of([1, 1]), [StageWorkers(1, 1.0)] * 3)
