"""Weeks of failures: traces by hand, goodput by hand, and what must hold whatever the trace is."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.step_time import Assignment, step_time
from elaswave_spmd.simulator.changes import Change
from elaswave_spmd.simulator.failures import FailureRate, Fleet, Outage, Repair, exponential, outages
from elaswave_spmd.simulator.goodput import Drops, GoesOn, Restarts, Scale, Stalls
from elaswave_spmd.simulator.policies import Case
from elaswave_spmd.simulator.reroute import Reroute
from elaswave_spmd.simulator.shapes import healthy
from tests.unit.scheduling.planning_cases import assigned, costs_of

FLEET = Fleet(64, island=8, stages=2, microbatches=4)  # 4 replicas of 2 workers
STALLS = Stalls(regroup_s=10, join_s=2, restart_s=100, checkpoint_s=5, recomputed_share=0.25)
OURS = GoesOn(), GoesOn("f", highest=1.2)
POLICIES = (*OURS, GoesOn("r", reroute=True), Drops(), Drops("g", regroups=True), Restarts())
COSTS = costs_of([3.0] * 4)


def events(failures, repair: Repair) -> list[Outage]:
    return outages(FLEET, failures, repair)


# ---- traces


def test_the_rate_is_that_of_llama_3():
    assert FailureRate().per_second * 16_384 * 54 * 86_400 == pytest.approx(419)
    fleet = Fleet(16_384)
    assert fleet.replicas == 128 and fleet.workers == 2048
    drawn = [len(exponential(fleet, FailureRate(), 54 * 86_400, seed)) for seed in range(20)]
    assert np.mean(drawn) == pytest.approx(419, rel=0.05)
    failures = exponential(fleet, FailureRate(), 54 * 86_400, 0)
    assert failures == sorted(failures) and failures == exponential(fleet, FailureRate(), 54 * 86_400, 0)
    assert all(0 <= time < 54 * 86_400 and 0 <= worker < 2048 for time, worker in failures)
    assert not exponential(fleet, FailureRate(count=0), 1e6, 0)


def test_a_machine_is_repaired_and_comes_back():
    found = events([(100.0, 3)], Repair(hours=1, swap_s=20))
    assert found == [Outage(100, 3, True), Outage(100 + 3600 + 20, 3, False)]


def test_spares_come_first_and_then_who_has_waited_longest():
    repair = Repair(hours=1, spares=1 / 8, swap_s=20)  # one spare
    found = events([(0.0, 1), (10.0, 2), (30.0, 5)], repair)
    assert found == [
        Outage(0, 1, True),
        Outage(10, 2, True),
        Outage(20, 1, False),
        Outage(30, 5, True),
        Outage(3620, 2, False),  # by the machine of 1
        Outage(3630, 5, False),  # by that of 2
    ]


def test_an_empty_place_cannot_fail():
    found = events([(0.0, 1), (10.0, 1), (4000.0, 1)], Repair(hours=1, swap_s=0))
    assert [event.out for event in found] == [True, False, True, False]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 7)), max_size=12), st.sampled_from([0, 0.125, 0.5]))
def test_places_are_emptied_and_filled_in_turn(failures, spares):
    found = events(failures, Repair(hours=2, spares=spares, swap_s=50))
    assert [event.time for event in found] == sorted(event.time for event in found)
    for worker in range(8):
        mine = [event.out for event in found if event.worker == worker]
        assert mine == [i % 2 == 0 for i in range(len(mine))] and len(mine) % 2 == 0


@pytest.mark.parametrize(
    "make, telling",
    [
        (lambda: events([(0.0, 8)], Repair()), "worker 8 cannot fail at 0 s"),
        (lambda: events([(-1.0, 0)], Repair()), "worker 0 cannot fail at -1 s"),
        (lambda: FailureRate(count=-1), "a failure rate"),
        (lambda: FailureRate(days=0), "a failure rate"),
        (lambda: Repair(hours=0), "repair takes time"),
        (lambda: Repair(spares=-0.1), "repair takes time"),
        (lambda: Fleet(128), "two replicas or more"),
        (lambda: Fleet(16, stages=0), "1 or more of each"),
    ],
)
def test_what_cannot_be_is_refused(make, telling):
    with pytest.raises(PlanError, match=telling):
        make()


# ---- seconds of a step


@pytest.mark.parametrize("missing", [(0, 0), (1, 0), (2, 1), (3, 3)])
def test_classes_stand_for_workers(missing):
    """The bound by classes is the bound of the mesh, worker by worker; layers may be cut anew."""
    scale = Scale(FLEET, COSTS)
    sizes = [4 - out for out in missing]
    cuts = [(0, cut, 4) for cut in (1, 2, 3)]
    found = [step_time(assigned(sizes, 16, COSTS, cuts=c), COSTS, most_actions=0).bound_s for c in cuts]
    assert min(found) * (1 - 1e-9) <= scale.elastic_s(missing) <= found[1] * (1 + 1e-9)
    assert scale.elastic_s(missing, 1.2) <= scale.elastic_s(missing)
    assert scale.elastic_s((4, 0)) == scale.rerouted_s((4, 0)) == math.inf


@given(st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=9)
def test_rerouting_by_classes_is_no_slower_than_in_virtual_time(first, second):
    """What is in its favour at scale: the classes' figure is what no order falls below."""
    missing = (first, second)
    if not sum(missing):
        return
    gone = tuple(stage * 4 + i for stage, out in enumerate(missing) for i in range(out))
    case = Case(healthy(Mesh.initial(MeshShape.of(dp=4, pp=2)), COSTS, 16), COSTS, Change(gone))
    assert Scale(FLEET, COSTS).rerouted_s(missing) <= Reroute().answer(case).step_s * (1 + 1e-9)


def test_the_healthy_step_is_that_of_the_mesh():
    assignment = Assignment.of(healthy(Mesh.initial(MeshShape.of(dp=4, pp=2)), COSTS, 16))
    assert Scale(FLEET, COSTS).healthy_s == pytest.approx(step_time(assignment, COSTS).seconds) == 30


# ---- goodput by hand


def test_one_loss_by_hand():
    """Worker 3 (stage 1) from 1000 s to 4900 s of 10,000 s; a step takes 30 s."""
    trace = events([(1000.0, 3)], Repair(hours=1, swap_s=300))
    scale = Scale(FLEET, COSTS)

    def useful(rate: float, stall: float) -> float:
        return (1000 + (3900 - stall) * rate + 5100 - 2) / 10_000

    found = [policy.goodput(scale, trace, 10_000, STALLS) for policy in POLICIES]
    rate = 30 / scale.elastic_s((0, 1))
    assert found[0] == pytest.approx(useful(rate, 10 + 7.5))
    assert found[1] == pytest.approx(useful(30 / scale.elastic_s((0, 1), 1.2), 10 + 7.5))
    assert found[2] == pytest.approx(useful(30 / max(30, 6 * 6), 10 + 15)), "6 micro-batches of 6 s on somebody"
    assert found[3] == pytest.approx(useful(0.75, 10 + 15))
    assert found[4] == pytest.approx((1000 + 275 * 0.75 + (3600 - 2) * 0.75 + 5100 - 2) / 10_000)
    every = math.sqrt(2 * 5 * 10_000)  # one loss; between two checkpoints
    whole = 1000 // (every + 5) * every
    assert found[5] == pytest.approx((whole + 8900 * every / (every + 5) * 0.75) / 10_000)


def test_idle_workers_of_broken_replicas_may_make_up_a_whole_one():
    """Two losses in two replicas, at different stages: one replica can be made of what they have left."""
    trace = events([(1000.0, 0), (1000.0, 3)], Repair(hours=10, swap_s=300))
    waits, regroups = (p.goodput(Scale(FLEET, COSTS), trace, 5000, STALLS) for p in (Drops(), Drops(regroups=True)))
    assert waits == pytest.approx((1000 + (4000 - 25) * 0.5) / 5000)
    assert regroups > waits


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 7)), max_size=20), st.sampled_from([0, 0.25]))
@settings(max_examples=60)
def test_goodput_is_a_part_of_the_time(failures, spares):
    trace = events(failures, Repair(hours=3, spares=spares, swap_s=100))
    for policy in POLICIES:
        found = policy.goodput(Scale(FLEET, COSTS), trace, 1.2e5, STALLS)
        assert 0 <= found <= 1 + 1e-9
        if not failures:
            assert found == pytest.approx(1.0, abs=0.03), "checkpoints cost a restarting job a little"


def test_goodput_falls_with_the_rate_of_failures():
    fleet, seconds = Fleet(2048, stages=4), 10 * 86_400.0
    scale = Scale(fleet, costs_of([3.0] * 8))
    for repair in (Repair(), Repair(spares=0.02)):
        found = []
        for factor in (0, 1, 8, 64):
            rate = FailureRate(419 * factor)
            draws = [outages(fleet, exponential(fleet, rate, seconds, seed), repair) for seed in range(3)]
            found.append([np.mean([p.goodput(scale, d, seconds, STALLS) for d in draws]) for p in POLICIES])
        for by_rate in zip(*found, strict=True):
            assert all(a > b for a, b in pairwise(by_rate)), by_rate


def test_steps_with_workers_missing_may_be_slower_than_their_bound():
    trace = events([(1000.0, 3)], Repair(hours=1, swap_s=300))
    scale = Scale(FLEET, COSTS)
    plain, slower = (GoesOn(over_bound=f).goodput(scale, trace, 10_000, STALLS) for f in (1.0, 1.25))
    lost = (3900 - 17.5) * 30 / scale.elastic_s((0, 1)) * (1 - 1 / 1.25)
    assert plain - slower == pytest.approx(lost / 10_000)
    whole = GoesOn(over_bound=1.25).goodput(scale, [], 10_000, STALLS)
    assert whole == pytest.approx(1.0), "nobody is missing"


@given(st.lists(st.integers(0, 3), min_size=2, max_size=2), st.sampled_from([1.0, 1.1]))
def test_no_fleet_is_faster_than_a_whole_one(missing, highest):
    scale = Scale(FLEET, COSTS)
    assert scale.elastic_s(tuple(missing), highest) >= scale.healthy_s * (1 - 1e-9)


def test_regrouped_replicas_have_their_holes_in_as_few_as_can_be():
    """Three losses in three replicas, one after the other: once regrouped, two replicas of two workers are missing."""
    trace = events([(1000.0, 0), (2000.0, 3), (3000.0, 4)], Repair(hours=10, swap_s=0))
    found = Drops(regroups=True, again_s=300).goodput(Scale(FLEET, COSTS), trace, 5000, STALLS)
    first = (1000 - 25 - 2) * 0.75  # one replica is missing, before and after its others are regrouped
    second = (300 - 25) * 0.5 + (700 - 2) * 0.75  # its replica as well, until what is left of both makes up one
    third = (2000 - 25 - 2) * 0.5
    assert found == pytest.approx((1000 + first + second + third) / 5000)
