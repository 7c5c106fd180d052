"""Every kind of event at every point of a step on every mesh: the bits of the undisturbed run.

On a mesh a ZeRO level has a third of the points, and the next two levels have the others; the next mesh begins with
another third. So over all meshes each level has all points.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.worker.fault_points import OF_SPLIT_BACKWARDS, FaultPoint
from tests.cluster.faults import Fault
from tests.cluster.processes import Worker
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)

RUN = Run(model="gpt", microbatches=5, steps=4)  # dropout 0.1, and no mesh deals 5 micro-batches evenly
SIZES = {"dp4": 4, "dp2_pp2": 4, "pp3": 3, "dp3_pp2": 6, "stages3-2": 5, "stages1-3": 4}
KINDS = ("kill", "stop", "term", "join", "replace")


class Passing(MirroredCluster):
    """Counts how often each worker passes each point of each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.passed = Counter[tuple[int, int, FaultPoint]]()  # (step, rank, point) -> times
        super().__init__(*arguments, **options)

    def _visit(self, worker: Worker, point: FaultPoint, step: int) -> None:
        self.passed[step, worker.rank, point] += 1
        super()._visit(worker, point, step)


@cache
@one_thread()
def passed(mesh: str, zero: int) -> Counter[tuple[int, int, FaultPoint]]:
    """How often workers pass the points of the run in which nothing happens."""
    cluster = Passing(RUN, mesh, zero)
    cluster.run()
    return cluster.passed


def points_of(mesh: str, zero: int) -> dict[int, FaultPoint]:
    """The points of a step at which something happens on this mesh with this ZeRO level, by their order in a step."""
    points = [point for point in FaultPoint if point not in OF_SPLIT_BACKWARDS]
    first = (zero + list(SIZES).index(mesh)) % 3
    return dict(list(enumerate(points))[first::3])


def drawn_fault(draw: random.Random, mesh: str, zero: int, kind: str, point: FaultPoint) -> Fault:
    """A fault at a passage of this point that there is: the first or the second one of a worker in a step."""
    times = passed(mesh, zero)
    able = sorted((step, rank) for step, rank, at in times if at is point and step < RUN.steps)
    step, rank = draw.choice(able)
    return Fault(step, kind, rank, point.value, draw.randint(1, min(2, times[step, rank, point])))


def test_each_zero_level_meets_each_point_and_so_does_each_mesh() -> None:
    cases = [(mesh, zero, point) for mesh in SIZES for zero in range(4) for point in points_of(mesh, zero).values()]
    points = set(FaultPoint) - set(OF_SPLIT_BACKWARDS)
    assert {(zero, point) for _, zero, point in cases} == {(zero, point) for zero in range(4) for point in points}
    assert {(mesh, point) for mesh, _, point in cases} == {(mesh, point) for mesh in SIZES for point in points}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", SIZES)
@one_thread()
def test_no_event_at_no_point_changes_a_bit(mesh: str, zero: int, kind: str) -> None:
    wanted = expected(RUN)
    for order, point in points_of(mesh, zero).items():
        draw = random.Random(f"{mesh} {zero} {kind} {point.value}")
        fault = drawn_fault(draw, mesh, zero, kind, point)
        cluster = MirroredCluster(RUN, mesh, zero, seed=order, faults=[fault])
        assert outcome(cluster.run()) == wanted, fault
        assert cluster.plan.num_injected == 1, f"the point is not passed: {fault}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", [mesh for mesh in SIZES if mesh != "dp4"])
@one_thread()
def test_no_event_within_a_split_backward_changes_a_bit(mesh: str, zero: int, kind: str) -> None:
    """On every stage that has them: the gradient of the input is made, and before the weight gradients."""
    wanted = expected(RUN)
    first = MeshShape.parse(mesh).stage_sizes[0]
    for order, point in enumerate(OF_SPLIT_BACKWARDS):
        draw = random.Random(f"{mesh} {zero} {kind} {point.value}")
        fault = Fault(draw.randint(1, RUN.steps - 1), kind, draw.randrange(first, SIZES[mesh]), point.value)
        cluster = MirroredCluster(RUN, mesh, zero, seed=order, faults=[fault])
        assert outcome(cluster.run()) == wanted, fault
        assert cluster.plan.num_injected == 1, f"the point is not passed: {fault}"
