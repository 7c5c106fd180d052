"""Every kind of event at every point of a step on every mesh: the bits of the undisturbed run.

A ZeRO level has half of the points of a mesh and kind, and the next level the other half.
"""

from __future__ import annotations

import random

import pytest

from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.worker.fault_points import OF_SPLIT_BACKWARDS, FaultPoint
from tests.cluster.faults import Fault
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", SIZES)
@one_thread()
def test_no_event_at_no_point_changes_a_bit(mesh: str, zero: int, kind: str) -> None:
    wanted = expected(RUN)
    points = [point for point in FaultPoint if point not in OF_SPLIT_BACKWARDS]
    for order, point in list(enumerate(points))[zero % 2 :: 2]:
        draw = random.Random(f"{mesh} {zero} {kind} {point.value}")
        fault = Fault(
            draw.randint(1, RUN.steps - 1), kind, draw.randrange(SIZES[mesh]), point.value, draw.randint(1, 2)
        )
        cluster = MirroredCluster(RUN, mesh, zero, seed=order, faults=[fault])
        assert outcome(cluster.run()) == wanted, fault


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
