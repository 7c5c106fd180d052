"""Plans of random clusters: a worker less is never faster, a worker more never slower; parked workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.monotone_plans import TOLERANCE, measure
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.microbatch_assignment import assign_microbatches, fastest, level_assignments
from elaswave_spmd.scheduling.pipeline import in_flight_limits
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change, reassign_microbatches
from elaswave_spmd.scheduling.step_time import EXACT, PART, Assignment, step_time
from elaswave_spmd.simulator import Change, healthy, llama
from elaswave_spmd.simulator.engine import FREE, execute
from elaswave_spmd.simulator.work import Work
from tests.unit.scheduling.planning_cases import costs_of, placed, stages_of

WAS_FASTER = (53, 63, 106, 142, 151, 218, 324, 489, 490, 1908)
"""Clusters whose planned step became up to 12 % faster when a worker was taken away, while the search was narrower."""

WAS_SLOWER = (211,)
"""Clusters whose planned step had become up to 10 % slower when a worker was added."""


@pytest.mark.parametrize("seed", (*range(4), *WAS_FASTER, *WAS_SLOWER))
def test_a_worker_less_is_never_faster_and_a_worker_more_never_slower(seed):
    found = measure(seed)
    assert found is not None
    assert found.gained_by_losing <= TOLERANCE and found.lost_by_adding <= 1e-9
    assert found.executed is None or abs(found.executed - 1) < 0.08


def test_a_fourth_loss_is_no_gain():
    """7B on dp24_pp4 without workers 12, 36 and 60 had a slower plan than without 84 as well."""
    costs = llama("7B", tokens=4096, flops=160e12)
    mesh = Mesh.initial(MeshShape.of(dp=24, pp=4))
    placement, seconds = healthy(mesh, costs, 192), []
    for gone in ((12, 36, 60), (12, 36, 60, 84)):
        change = Change(gone).check(mesh)
        last = plan_change(
            placement, change.costs(costs), 10_000, PlanSettings(stage_counts=()), stages=change.stages(mesh)
        ).last
        seconds.append(last.time.seconds)
        executed = execute(Work.from_assignment(last.assignment), costs, wires=FREE).step_s
        assert executed == pytest.approx(last.time.pipeline_s, rel=0.03)
    assert seconds[0] <= seconds[1]


def test_parked_workers_have_no_microbatches_and_keep_their_places():
    """Three stages of three and one of four: the fourth worker would only make all others wait for each other."""
    speeds = [np.ones(4), np.ones(3), np.array([1.0, 0.5, 1.0])]
    found = level_assignments(12, speeds)
    assert [each.counts[0] for each in found] == [(4, 4, 4, 0), (5, 2, 5, 0)]
    assert found[0].counts[1:] == ((4, 4, 4), (5, 2, 5)) and found[1].counts[1:] == ((5, 2, 5), (5, 2, 5))
    assert level_assignments(12, speeds[1:]) == []
    assert fastest(np.array([1.0, 0.5, 2.0, 1.0]), 2).tolist() == [0, 2], "the first of equal ones"


def test_workers_are_parked_where_that_is_faster_and_work_again_when_it_is_not():
    costs = costs_of([1.0] * 8)
    placement = placed([3, 5, 5, 5], 32, 8)
    parked = plan_change(placement, costs, 0, PlanSettings(stage_counts=())).now
    assert [counts.count(0) for counts in parked.assignment.microbatch_counts] == [0, 0, 0, 1]
    assert "1 workers without micro-batches" in str(parked.microbatches)
    for fewest_nodes in (True, False):
        speeds = [np.ones(size) for size in (3, 5, 5, 5)]
        counts = assign_microbatches(32, speeds, fewest_nodes=fewest_nodes).counts
        all_busy = Assignment(stages_of([3, 5, 5, 5]), parked.assignment.layer_cuts, counts)
        assert step_time(all_busy, costs).seconds > parked.time.seconds
    stages = placement.mesh.with_stages(parked.assignment.stages)
    settled = replace(placement, mesh=stages, microbatch_counts=parked.assignment.microbatch_counts)
    joined = plan_change(
        settled, costs, 0, PlanSettings(stage_counts=()), stages=((0, 1, 2, 18, 19), *placement.mesh.stages[1:])
    ).now
    assert joined.assignment.microbatch_counts == ((7, 7, 6, 6, 6),) * 4


def test_newcomers_need_not_get_any_microbatches():
    """Else all stages might be cut at other places, for a worker that helps none of them."""
    old = Assignment(stages_of([3, 2]), (0, 1, 2), ((3, 2, 1), (3, 3)))
    costs = costs_of([1.0, 1.0])
    joined = [each.counts for each in reassign_microbatches(old, 6, ((0, 9, 1, 2), (3, 4)), costs, 0.0)]
    assert joined[-1] == ((3, 0, 2, 1), (3, 3)) and joined.count(joined[-1]) == 1
    for stages in (((0, 1), (3, 4)), ((1, 0, 2), (3, 4)), ((0, 1, 2, 3, 4),)):
        assert ((3, 2, 1), (3, 3)) not in [each.counts for each in reassign_microbatches(old, 6, stages, costs, 0.0)]


@pytest.mark.parametrize("order", ["contiguous", "time-major"])
def test_a_part_of_a_large_step_stands_for_all_of_it(order):
    """Stages of 9, 8 and 8 workers with 576 micro-batches each; a tenth of the actions is simulated."""
    sizes = (9, 8, 8)
    counts = tuple(tuple(576 * (i + 1) // n - 576 * i // n for i in range(n)) for n in sizes)
    assignment = Assignment(stages_of(sizes), (0, 1, 2, 3), counts, order)
    costs = costs_of([1.0, 1.0, 1.0]).with_speeds({5: 0.8})
    whole, part = step_time(assignment, costs), step_time(assignment, costs, most_actions=1000)
    assert (whole.how, part.how) == (EXACT, PART)
    assert part.seconds == pytest.approx(whole.seconds, rel=0.08)


def test_parked_workers_take_no_memory_from_the_others():
    """Columns of workers need as much in flight as 1F1B, whoever is parked beside them; cluster 100 had not fitted."""
    even = in_flight_limits([3, 3], [[4, 4, 4], [4, 4, 4]])
    assert in_flight_limits([4, 3], [[4, 0, 4, 4], [4, 4, 4]]) == even == (2, 1)
    assert in_flight_limits([4, 3], [[3, 3, 3, 3], [4, 4, 4]]) != even
