"""Devices that compute wrongly: one bit of one element, in each place where something is computed."""

from __future__ import annotations

import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.sum_checks import SumChecks
from tests.cluster import schedules
from tests.cluster.faults import RECEIVER, SENDER, Fault, MessageFault
from tests.cluster.processes import LostStateError
from tests.simulated.bits_cases import MirroredCluster, Run, expected, mirrored_placement, one_thread, outcome

RUN = Run(microbatches=5, steps=6)
PLACES = ("forward", "backward", "reduce", "sum", "norm", "apply")
SUMS = ("sum", "norm")
COMPUTED = SumChecks.computed


def miscompute(place: str, rank: int = 1, step: int = 3, count: int = 1) -> Fault:
    return Fault(step, "miscompute", rank, place, count)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("mesh", "zero", "rank"), [("dp2", 1, 1), ("pp2", 1, 1), ("dp2_pp2", 2, 2)])
@one_thread()
def test_where_nothing_checks_a_wrong_bit_changes_the_run(mesh: str, zero: int, rank: int, place: str) -> None:
    right, changed = expected(RUN), 0
    for count in range(1, 10):  # a bit may be of padding between parameters, or too small to be seen in what follows
        if changed == 2:
            break
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
    rate = 1.0 if zero % 2 == (dtype == "bf16") else 0.3
    assert outcome(MirroredCluster(run, mesh, zero, verify_rate=rate).run()) == expected(run)


@pytest.mark.parametrize("place", PLACES[:5])
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
    fault = miscompute(place, rank, count=zero)  # the first time that the worker is there, or the third
    cluster = MirroredCluster(RUN, mesh, zero, faults=[fault], verify_rate=1.0, seed=zero)
    found = cluster.run()
    assert outcome(found) == expected(RUN)
    if cluster.plan.num_injected:
        lost = [r for begun in found.epochs for r, kind in begun.kinds.items() if kind == "fail"]
        assert lost == [rank], found.epochs
        assert found.epochs[0].version == 2 and "computed wrongly in step 3" in found.epochs[0].reasons[rank]


@one_thread()
def test_sharded_parameters_that_were_dropped_twice_in_a_step_are_asked_for_twice() -> None:
    """In the second attempt of step 1 worker 1 drops its parameters, and is asked for a check after that.

    It had dropped them in the first attempt as well, which must not look as if they had been asked for since.
    """
    faults = (
        MessageFault("kill", "Applied", SENDER, False, 1, 20),
        MessageFault("kill", "Applied", SENDER, True, 2, 20),
        MessageFault("kill", "Activation", RECEIVER, True, 4, 400),
        Fault(1, "miscompute", 1, "reduce", 5),
        Fault(3, "miscompute", 0, "reduce", 4),
    )
    run = schedules.TinyRun(microbatches=3, steps=3)
    placed = {"mesh": "dp2_pp2", "zero": 3, "scatter": 1, "planned": False}
    ended = schedules.run(schedules.Schedule(501096, run, faults=faults, verify_rate=1.0, **placed))
    assert ended.failure == "", ended.detail


@pytest.mark.parametrize("place", PLACES[:5])
@pytest.mark.parametrize("mesh", ["dp3", "dp4"])
@one_thread()
def test_what_is_only_reported_in_step_after_step_keeps_nobody_waiting(mesh: str, place: str) -> None:
    faults = [miscompute(place, 1, step) for step in range(2, 7)]
    cluster = MirroredCluster(RUN, mesh, 1, faults=faults, verify_rate=1.0, action="report")
    assert len(cluster.run().losses) == RUN.steps and cluster.result.epochs == []
    found = [about for kind, about in cluster.events if kind == "corrupt"]
    assert {about["step"] for about in found} == {2, 3, 4, 5, 6} and all(about["ranks"] == [1] for about in found)


def events_of(cluster: MirroredCluster, kind: str) -> list[str]:
    """The messages of all events of a kind that the run writes."""
    lines: list[str] = []
    cluster._trace = lines.append
    cluster.run()
    return [line.partition(f"EVENT {kind} ")[2] for line in lines if f"EVENT {kind} " in line]


@pytest.mark.parametrize("mesh", ["dp2", "dp3", "dp2_pp2", "stages1-3"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@one_thread()
def test_wrong_sums_of_a_tied_model_are_found_and_told(mesh: str, zero: int) -> None:
    run, told = Run(model="gpt_tied", microbatches=5, steps=4), 0
    for place, tensor in (("sum", "sum"), ("norm", "reduced gradient")):
        for rank in range(2):
            cluster = MirroredCluster(run, mesh, zero, faults=[miscompute(place, rank)], verify_rate=1.0, seed=rank)
            found = events_of(cluster, "corrupt")
            assert outcome(cluster.result) == expected(run)
            # A bit of one use's sum may be too small to be seen in that of both: then nothing is wrong.
            assert len(found) <= cluster.plan.num_injected
            for event in found:
                assert f"of the {tensor} of layer" in event and f"worker {rank} " in event
                told += 1
    assert told >= 2


def with_nan_of_its_own(self: SumChecks, step: int, layer: int, microbatch: int, gradient: GradientBuffer) -> None:
    """In place of `SumChecks.computed`: in step 3 each gradient is NaN, of each micro-batch with another payload."""
    if step == 3:
        size = self._layout.layers[layer].num_value_elements  # without the loss
        gradient.flat[:size].view(torch.int32).fill_(0x7FC00000 + microbatch)
    COMPUTED(self, step, layer, microbatch, gradient)


@pytest.mark.parametrize(
    ("mesh", "zero", "hosts"), [("dp2", 1, 1), ("dp3", 3, 2), ("pp2", 0, 1), ("dp2_pp2", 1, 2), ("stages1-3", 1, 1)]
)
@one_thread()
def test_nobody_is_blamed_for_gradients_that_are_not_finite(mesh: str, zero: int, hosts: int) -> None:
    """Which NaN the sum of two is depends on the order of the operands, and is no result. The step is skipped (S6)."""
    run = Run(model="gpt_tied", microbatches=4, steps=4)
    with mock.patch.object(SumChecks, "computed", with_nan_of_its_own):
        cluster = MirroredCluster(run, mesh, zero, verify_rate=1.0, hosts=hosts)
        found = outcome(cluster.run())
        wanted = outcome(MirroredCluster(run, "single", 0, verify_rate=1.0).run())
    assert not cluster.result.epochs and [kind for kind, _ in cluster.events if kind in ("corrupt", "mismatch")] == []
    assert [norm == "nan" for norm in found.norms] == [step == 3 for step in range(1, 5)] and found == wanted


def one_more(result: Tensor, draw: random.Random) -> Tensor:
    """A result that is always wrong in the same way."""
    wrong = result.detach().clone()
    wrong.view(-1)[0] += 1
    return wrong


@pytest.mark.parametrize("place", SUMS)
@pytest.mark.parametrize(("mesh", "found"), [("dp2", False), ("dp3", True), ("pp3", True), ("pp2", False)])
@one_thread()
def test_a_worker_that_repeats_its_wrong_sums_is_found_by_a_third(mesh: str, found: bool, place: str) -> None:
    """Every sum that worker 1 makes in step 3 is wrong in the same way. Two workers cannot tell which of them it is."""
    faults = [miscompute(place, 1, count=count) for count in range(1, 200)]
    cluster = MirroredCluster(RUN, mesh, 1, faults=faults, verify_rate=1.0)
    with mock.patch("tests.cluster.cluster.with_a_flipped_bit", one_more):
        if found:
            assert outcome(cluster.run()) == expected(RUN)
            assert [r for begun in cluster.result.epochs for r, kind in begun.kinds.items() if kind == "fail"] == [1]
        else:
            with pytest.raises(AssertionError, match="workers 0, 1 computed different results in step 3"):
                cluster.run()


@pytest.mark.parametrize("place", SUMS)
@one_thread()
def test_wrong_sums_are_only_reported(place: str) -> None:
    """With `verify.action=report` the checker votes all the same: nobody is lost, and the bits are others."""
    fault = miscompute(place, 1, count=3)
    cluster = MirroredCluster(RUN, "dp3", 1, faults=[fault], verify_rate=1.0, action="report")
    (event,) = events_of(cluster, "corrupt")
    assert "worker 1 " in event and not cluster.result.epochs
    if place == "sum":  # else it was worker 1's result as a checker, of which nothing is applied
        assert outcome(cluster.result) != expected(RUN)


@pytest.mark.parametrize("mesh", ["dp2", "pp2"])
@one_thread()
def test_pages_without_a_mirror_are_added_up_again_by_their_primary(mesh: str) -> None:
    fault, lines = miscompute("norm", 1, count=2), list[str]()
    cluster = MirroredCluster(RUN, mesh, 1, faults=[fault], verify_rate=1.0, policy=Policy(0))
    cluster._trace = lines.append
    with pytest.raises(LostStateError):  # nobody else has the state of the worker that is evicted
        cluster.run()
    assert any("EVENT mismatch worker 1, twice," in line for line in lines)
    assert any("EVENT corrupt worker 1 " in line for line in lines)


@pytest.mark.parametrize("seed", range(6))
@one_thread()
def test_below_rate_1_the_steps_that_may_be_wrong_are_told(seed: int) -> None:
    """Worker 1 computes its first micro-batch wrongly in every step from the third one on."""
    run = Run(microbatches=6, steps=14, seed=seed)
    faults = [miscompute("forward", 1, step) for step in range(3, 15)]
    cluster = MirroredCluster(run, "dp3", 1, faults=faults, verify_rate=0.15, seed=seed)
    draw, placement = CheckDraw(seed, 0.15), mirrored_placement(run, "dp3", 1)
    concerned = [
        step for step in range(1, 15) if any(1 in (p.owner, p.checker) for p in draw.pairs(step, 0, placement))
    ]
    first = next(s for s in range(3, 15) if any(p.microbatch == 2 for p in draw.pairs(s, 0, placement)))
    found = events_of(cluster, "corrupt")
    (reason,) = (begun.reasons[1] for begun in cluster.result.epochs if 1 in begun.reasons)
    step = int(reason.removeprefix("it computed wrongly in step "))
    assert step <= first, "the first pair that is wrong and checked ends it; as a checker it may be found before"
    checked = max((s for s in concerned if s < step), default=0)
    wanted = [] if checked + 1 >= step else [f"steps {checked + 1} to {step - 1}"]
    assert re.findall(r"steps \d+ to \d+", found[0]) == wanted


@pytest.mark.parametrize("seed", range(6))
@one_thread()
def test_a_rollback_is_to_a_checkpoint_from_before_the_steps_that_may_be_wrong(seed: int) -> None:
    """Worker 2 computes every micro-batch wrongly from the fifth step on."""
    run = Run(microbatches=6, steps=14, seed=seed)
    faults = [miscompute("forward", 2, step, count) for step in range(5, 15) for count in range(1, 30)]
    cluster = MirroredCluster(
        run, "dp3", 1, faults=faults, verify_rate=0.15, seed=seed, checkpoint_every=2, action="rollback"
    )
    found = outcome(cluster.run())
    said = {kind: [fields for of, fields in cluster.events if of == kind] for kind in ("corrupt", "rollback")}
    (event,), (back,) = said["corrupt"], said["rollback"]
    assert found == expected(run) and event["ranks"] == back["ranks"] == [2]
    unsure: Any = event["unsure_steps"]
    (restart,) = cluster.result.restarts
    assert restart < unsure[0], "worker 2 was not checked in the step before, with any of these seeds"
