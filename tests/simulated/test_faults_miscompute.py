"""Devices that compute wrongly: one bit of one element, in each place where something is computed."""

from __future__ import annotations

import pytest

from tests.cluster.faults import Fault
from tests.simulated.bits_cases import MirroredCluster, Run, expected, one_thread, outcome

RUN = Run(microbatches=5, steps=6)
PLACES = ("forward", "backward", "reduce", "norm", "apply")


def miscompute(place: str, rank: int = 1, step: int = 3, count: int = 1) -> Fault:
    return Fault(step, "miscompute", rank, place, count)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("mesh", "zero", "rank"), [("dp2", 1, 1), ("pp2", 1, 1), ("dp2_pp2", 2, 2)])
@one_thread()
def test_where_nothing_checks_a_wrong_bit_changes_the_run(mesh: str, zero: int, rank: int, place: str) -> None:
    right, changed = expected(RUN), 0
    for count in range(1, 10):  # a bit may be of padding between parameters, or too small to be seen in what follows
        cluster = MirroredCluster(RUN, mesh, zero, faults=[miscompute(place, rank, count=count)])
        found = outcome(cluster.run())
        assert found == right or cluster.plan.num_injected == 1  # not every place is passed so often
        assert found.losses[:2] == right.losses[:2] and found.norms[:2] == right.norms[:2]
        changed += found != right
    assert changed
