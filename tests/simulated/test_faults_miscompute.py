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


@pytest.mark.parametrize("mesh", ["single", "dp2", "dp3", "pp2", "dp2_pp2", "stages1-3"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@one_thread()
def test_checks_change_no_bit(mesh: str, zero: int, dtype: str) -> None:
    run = Run(model="gpt_tied", dtype=dtype, microbatches=5, steps=4)
    for rate in (1.0, 0.3):
        assert outcome(MirroredCluster(run, mesh, zero, verify_rate=rate).run()) == expected(run)


@pytest.mark.parametrize("place", PLACES[:3])
@pytest.mark.parametrize(
    ("mesh", "rank"), [("dp2", 0), ("dp2", 1), ("dp3", 1), ("dp4", 2), ("pp2", 1), ("dp2_pp2", 1), ("stages1-3", 3)]
)
@pytest.mark.parametrize("zero", [1, 3])
@one_thread()
def test_the_worker_that_computes_wrongly_is_found_in_the_same_step(
    mesh: str, rank: int, zero: int, place: str
) -> None:
    if place == "backward" and (mesh, rank) == ("dp2_pp2", 1):
        rank = 2  # the first stage has one layer, whose input has no gradient
    for count in (1, 3):
        fault = miscompute(place, rank, count=count)
        cluster = MirroredCluster(RUN, mesh, zero, faults=[fault], verify_rate=1.0, seed=count)
        found = cluster.run()
        assert outcome(found) == expected(RUN)
        if cluster.plan.num_injected:
            lost = [r for begun in found.epochs for r, kind in begun.kinds.items() if kind == "fail"]
            assert lost == [rank], found.epochs
            assert found.epochs[0].version == 2 and "computed wrongly in step 3" in found.epochs[0].reasons[rank]
