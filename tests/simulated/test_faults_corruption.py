"""A bit flips in somebody's memory: found before anything counts that came of it, and repaired from another replica."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from tests.cluster.faults import RECEIVER, SENDER, AnyFault, Fault, MessageFault
from tests.cluster.processes import LostStateError
from tests.simulated.bits_cases import (
    MirroredCluster,
    Run,
    expected,
    one_thread,
    outcome,
)

PARAMETERS, OPTIMIZER = "flip", "corrupt"
KINDS = pytest.mark.parametrize("kind", [PARAMETERS, OPTIMIZER], ids=["parameters", "optimizer state"])


def run_of(dtype: str = "fp32") -> Run:
    return Run(microbatches=5, steps=6, dtype=dtype)


def damage_of(cluster: MirroredCluster) -> list[m.Damaged]:
    return [message for message in cluster.heard if isinstance(message, m.Damaged)]


def said(cluster: MirroredCluster, kind: str) -> list[dict[str, Any]]:
    return [dict(fields) for found, fields in cluster.events if found == kind]


@KINDS
@pytest.mark.parametrize(
    ("mesh", "zero", "dtype", "rank"),
    [
        ("dp4", 1, "fp32", 0),
        ("dp4", 1, "bf16", 1),
        ("dp2_pp2", 2, "fp32", 1),
        ("dp2_pp2", 2, "bf16", 0),
        ("dp3", 0, "fp32", 1),
        ("dp3", 0, "bf16", 0),
        ("pp2", 1, "fp32", 0),
        ("pp2", 1, "bf16", 1),
        ("dp2", 3, "fp32", 1),
        ("dp2", 3, "bf16", 0),
    ],
)
@one_thread()
def test_a_flipped_bit_is_located_and_repaired(mesh: str, zero: int, rank: int, dtype: str, kind: str) -> None:
    """The first run held by rank 0 is its own, by rank 1 mostly a mirror of it."""
    run = run_of(dtype)
    cluster = MirroredCluster(run, mesh, zero, faults=[Fault(3, kind, rank, "backward")], verify_every=1)
    assert outcome(cluster.run()) == expected(run)
    found = [(d.rank, d.step) for d in damage_of(cluster)]
    assert found == [(rank, 3)], "found once, by its replica, before the step is applied"
    (event,) = said(cluster, "corruption")
    assert (event["ranks"], event["step"]) == ([rank], 3)


@pytest.mark.parametrize(
    ("mesh", "zero", "rank", "point", "count"),
    [
        ("dp2", 0, 1, "forward", 1),
        ("dp2", 0, 0, "backward", 2),
        ("dp2", 0, 0, "reduce", 1),
        ("dp3", 1, 0, "forward", 2),
        ("dp3", 1, 1, "backward", 1),
        ("dp3", 1, 0, "reduce", 1),
        ("dp2_pp2", 2, 1, "forward", 2),
        ("dp2_pp2", 2, 0, "backward", 2),
        ("dp2_pp2", 2, 0, "reduce", 1),
    ],
)
@one_thread()
def test_no_step_counts_that_was_computed_from_damaged_parameters(
    mesh: str, zero: int, rank: int, point: str, count: int
) -> None:
    """In fp32 a worker computes with its state where it lies. So it looks before it votes, not only at the update."""
    run = Run(model="gpt_tied", microbatches=5, steps=4)
    faults = [Fault(2, PARAMETERS, rank, point, count)]
    cluster = MirroredCluster(run, mesh, zero, faults=faults, verify_every=1, seed=zero)
    assert outcome(cluster.run()) == expected(run)
    assert [(d.rank, d.step) for d in damage_of(cluster)] == [(rank, 2)]


@one_thread()
def test_parameters_that_flip_on_their_way_to_others_are_no_part_of_a_step() -> None:
    """With ZeRO-3 in fp32 they are sent from where the state lies: their primary looks at it before it votes."""
    faults = [MessageFault(PARAMETERS, "Publish", SENDER, True, 52)]
    cluster = MirroredCluster(run_of(), "dp4", 3, faults=faults, verify_every=1, seed=1, uneven=True)
    assert outcome(cluster.run()) == expected(run_of()) and cluster.plan.num_injected == 1


@KINDS
@pytest.mark.parametrize(("zero", "dtype"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "fp32")])
@one_thread()
def test_a_bit_that_flips_before_a_loss_is_not_taken_for_written(zero: int, dtype: str, kind: str) -> None:
    """Worker 1 is lost in the same step, with the mirror of some of worker 0's pages; a second mirror is left."""
    run, rank = run_of(dtype), 2 * (zero % 2)
    faults = [Fault(3, kind, rank, "forward"), Fault(3, "kill", 1, "backward", 1)]
    cluster = MirroredCluster(run, "dp4", zero, faults=faults, verify_every=1, policy=Policy(2), seed=zero)
    assert outcome(cluster.run()) == expected(run) and cluster.plan.num_injected == 2
    assert [found.rank for found in damage_of(cluster)] == [rank]


def flip_at(moment: str, kind: str, members: int, later: int = 0) -> MessageFault:
    """A flip at a moment of the first change of the mesh, on the worker that comes to it after `later` others."""
    match moment:
        case "before the answer":
            return MessageFault(kind, "Prepare", RECEIVER, False, 1 + later)
        case "after the answer":
            return MessageFault(kind, "StepReport", SENDER, True, 1 + later)
        case "before the new epoch":  # the first Reconfigure is that of epoch 0
            return MessageFault(kind, "Reconfigure", RECEIVER, False, members + 1 + later)
    return MessageFault(kind, "Reconfigure", RECEIVER, True, members + 1 + later)


MOMENTS = ("before the answer", "after the answer", "before the new epoch", "in the new epoch")


@KINDS
@pytest.mark.parametrize(("zero", "moment"), [*product(range(4), MOMENTS)])
@one_thread()
def test_a_bit_that_flips_in_a_change_of_the_mesh_is_not_taken_for_written(zero: int, moment: str, kind: str) -> None:
    run = run_of("fp32" if (zero + MOMENTS.index(moment)) % 2 else "bf16")
    faults = [Fault(3, "kill", 1, "backward", 1), flip_at(moment, kind, 4, zero % 3)]
    cluster = MirroredCluster(run, "dp4", zero, faults=faults, verify_every=1, policy=Policy(2), seed=zero)
    assert outcome(cluster.run()) == expected(run) and cluster.plan.num_injected == 2
    assert len(damage_of(cluster)) == 1


@KINDS
@pytest.mark.parametrize(
    "flip",
    [
        Fault(3, "kill", 0, "forward"),
        MessageFault("kill", "Prepare", RECEIVER, False, 2),
        MessageFault("kill", "PageState", RECEIVER, True, 1),
        MessageFault("kill", "CaughtUp", SENDER, True, 1),
    ],
    ids=["in the step", "before the answer", "state comes", "state has come"],
)
@one_thread()
def test_a_bit_that_flips_while_a_worker_joins_is_not_taken_for_written(flip: Any, kind: str) -> None:
    """The newcomer learns what its primary had written, and its own memory is held to what came as well."""
    for zero in (1, 2):
        damage = type(flip)(**{**vars(flip), "kind": kind})
        faults: list[AnyFault] = [Fault(2, "join", 0, "forward"), damage]
        cluster = MirroredCluster(run_of(), "dp3", zero, faults=faults, verify_every=1, seed=zero)
        assert outcome(cluster.run()) == expected(run_of()) and cluster.plan.num_injected == 2


@KINDS
@pytest.mark.parametrize("moment", ["in the step", *MOMENTS])
@one_thread()
def test_where_the_only_other_replica_is_lost_the_run_says_so(moment: str, kind: str) -> None:
    """Of two workers one is lost, and the other one's memory fails. It goes back to a checkpoint if there is one."""
    run = run_of("bf16" if moment in MOMENTS[:2] else "fp32")
    flip = Fault(4, kind, 0, "forward") if moment == "in the step" else flip_at(moment, kind, 2)
    faults: list[AnyFault] = [flip, Fault(4, "kill", 1, "backward", 1)]
    cluster = MirroredCluster(run, "dp2", 1, faults=faults, verify_every=1)
    with pytest.raises(LostStateError, match="all replicas of 1 page ranges are lost"):
        cluster.run()
    (event,) = said(cluster, "corruption")
    assert event["ranks"] == [0] and "changed after they were written" in event["message"]
    cluster = MirroredCluster(run, "dp2", 1, faults=faults, verify_every=1, checkpoint_every=2)
    assert outcome(cluster.run()) == expected(run) and cluster.result.restarts == [2]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "flip",
    [
        *(MessageFault(PARAMETERS, "ReplicasAgree", RECEIVER, True, count) for count in (13, 16)),
        *(MessageFault(PARAMETERS, "Activation", SENDER, False, count) for count in (34, 35)),
    ],
    ids=lambda flip: f"{flip.message} {flip.count}",
)
@one_thread()
def test_no_validation_counts_that_was_computed_from_damaged_parameters(zero: int, flip: MessageFault) -> None:
    """A worker of the first stage looks at its state after the last stage has had its activations, and reported."""
    cluster = MirroredCluster(run_of(), "dp2_pp2", zero, faults=[flip], verify_every=1, seed=flip.count)
    assert outcome(cluster.run()) == expected(run_of()) and cluster.plan.num_injected == 1
    assert len(damage_of(cluster)) == 1


@one_thread()
def test_who_is_lost_may_have_computed_from_damaged_parameters() -> None:
    """Its memory fails, and then it does, before it has told: what it has sent of the step is given up."""
    for zero, point, count in ((0, "norm", 1), (1, "norm", 1), (2, "reduce", 3), (2, "backward", 2)):
        faults = [Fault(3, PARAMETERS, 1, "forward"), Fault(3, "kill", 1, point, count)]
        cluster = MirroredCluster(run_of(), "dp3", zero, faults=faults, verify_every=1, seed=zero)
        assert outcome(cluster.run()) == expected(run_of()) and cluster.plan.num_injected == 2, (zero, point)


@pytest.mark.parametrize("zero", [1, 3])
@one_thread()
def test_parameters_that_are_damaged_are_not_given_to_who_asks_for_them(zero: int) -> None:
    for count in (1, 2, 5):
        faults: list[AnyFault] = [
            Fault(3, "replace", 2, "backward"),
            MessageFault(PARAMETERS, "Need", RECEIVER, False, count),
        ]
        cluster = MirroredCluster(run_of(), "dp3", zero, faults=faults, verify_every=1, policy=Policy(2), seed=count)
        assert outcome(cluster.run()) == expected(run_of())
        assert cluster.plan.num_injected == 2 and len(damage_of(cluster)) == 1, count


class Remembering(MirroredCluster):
    """Asserts that no state is sent which is not what its sender had written when it reported the hashes of it."""

    num_sent = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._written: dict[tuple[int, int, tuple[int, int, int]], Tensor] = {}  # (worker, version, pages) -> state
        super().__init__(*arguments, **options)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        executor = self._workers[sender].executor
        if isinstance(message, m.Fingerprints) and executor is not None:
            for part in executor.replica.state:
                rows = [part.master, *part.optimizer_state.values()]
                self._written.setdefault((sender, part.version, part.pages.key), torch.cat(rows))
        if isinstance(message, m.PageState) and payload is not None:
            pages = message.layer, message.first, message.stop
            if (known := self._written.get((sender, message.step, pages))) is not None:
                assert torch.equal(payload.view(torch.int32), known.view(torch.int32)), (sender, message)
                self.num_sent += 1
        super().send(sender, peer, message, payload)


@KINDS
@one_thread()
def test_state_that_is_damaged_is_not_sent(kind: str) -> None:
    """Worker 1 is lost, others learn what they had with it, and a bit flips before that is copied."""
    num_sent = 0
    for count in (16, 19, 21):
        faults: list[AnyFault] = [
            Fault(4, "kill", 1, "backward", 1),
            MessageFault(kind, "ReplicasAgree", RECEIVER, True, count),
        ]
        cluster = Remembering(run_of(), "dp4", 1, faults=faults, verify_every=1, seed=1)
        try:
            assert outcome(cluster.run()) == expected(run_of())
        except LostStateError as lost:
            assert said(cluster, "corruption"), lost
        num_sent += cluster.num_sent
    assert num_sent


@KINDS
@one_thread()
def test_nothing_is_held_to_what_was_written_with_comparisons_off(kind: str) -> None:
    cluster = MirroredCluster(run_of(), "dp3", 1, faults=[Fault(3, kind, 0, "forward")])
    cluster.run()
    assert damage_of(cluster) == [] and said(cluster, "corruption") == []
