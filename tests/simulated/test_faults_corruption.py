"""A bit flips in somebody's optimizer state: found before it is used, and repaired from another copy."""

from __future__ import annotations

import pytest

from elaswave_spmd.recovery import messages as m
from tests.cluster.faults import Fault
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("mesh", "zero"), [("dp4", 1), ("dp2_pp2", 2), ("dp3", 0), ("pp2", 1), ("dp2", 3)])
@one_thread()
def test_a_flipped_bit_is_located_and_repaired(mesh: str, zero: int, rank: int, dtype: str) -> None:
    """The first run held by rank 0 is its own, by rank 1 mostly a mirror of it."""
    run = Run(microbatches=5, steps=6, dtype=dtype)
    cluster = MirroredCluster(run, mesh, zero, faults=[Fault(3, "corrupt", rank, "backward")], verify_every=1)
    assert outcome(cluster.run()) == expected(run)
    found = [message for message in cluster.heard if isinstance(message, m.Damaged)]
    assert [(d.rank, d.step) for d in found] == [(rank, 3)], "found once, by its replica, before the step is applied"
