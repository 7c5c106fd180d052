"""Small meshes and changes that the tests of the simulator share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.simulator.changes import Change
from elaswave_spmd.simulator.policies import Case
from elaswave_spmd.simulator.shapes import healthy
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of, split_at_random


@st.composite
def assignments(draw) -> tuple[Assignment, CostModel]:
    """Ragged stages, uneven layers and speeds, both orders of micro-batches, links that take time; backwards that are
    whole, or in two parts on some stages."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    # Of numbers that are added without rounding: what happens at one time does so in every step.
    seconds = draw(st.lists(st.integers(1, 27), min_size=len(sizes), max_size=len(sizes) + 3))
    costs = costs_of(
        [3 * each / 16 for each in seconds],
        bandwidth=128.0,
        latency_s=draw(st.sampled_from([0.0, 0.0, 0.25])),
        boundary_bytes=draw(st.integers(0, 80)),
        gradient_bytes=draw(st.integers(0, 60)),
        value_bytes=draw(st.integers(0, 60)),
    )
    costs = costs.with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    order = draw(st.sampled_from(["contiguous", "time-major"]))
    return split_at_random(draw, assigned(sizes, draw(st.integers(1, 12)), costs, order), costs)


def case_of(
    mesh: str,
    microbatches: int,
    event: str,
    seconds: Sequence[float] = (3.0,) * 8,
    *,
    steps: int = 10_000,
    **sizes: int,
) -> Case:
    """A change of a mesh whose links are fast."""
    costs = costs_of(seconds, bandwidth=1e12, **sizes)
    placement = healthy(Mesh.initial(MeshShape.parse(mesh)), costs, microbatches)
    return Case(placement, costs, Change.parse(event), remaining_steps=steps)
