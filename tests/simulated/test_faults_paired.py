"""Workers have pairs: the same bits, whoever is lost and whatever fails in the middle of what goes through them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import Policy
from tests.cluster.faults import RECEIVER, SENDER, AnyFault, Fault, MessageFault
from tests.cluster.paired import PairedCluster
from tests.cluster.schedules import Schedule, run_many
from tests.simulated.bits_cases import MirroredCluster, Run, expected, one_thread, outcome

CHUNK = 30
FEW = 8  # of each further kind
MESHES = ["pp2", "dp2_pp2", "dp3_pp2", "stages3-2", "stages1-3", "pp3"]


class Paired(PairedCluster, MirroredCluster):
    """The workers of a run, and the boundary tensors and states that came over links with their payload, by step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.by_link: Counter[tuple[str, int]] = Counter()
        self.again = Counter[str]()  # of what pairs had not brought: sent with its payload, or given up
        super().__init__(*args, **kwargs)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if isinstance(message, m.Activation | m.ActivationGradient | m.PageState):
            self.by_link[type(message).__name__, message.step] += 1
        if isinstance(message, m.PairSent) and message.resent:
            kind = type(m.decode(message.message)).__name__ if message.message else "given up"
            self.again[kind] += 1
            assert (payload is not None) == (kind != "given up")
        super().send(sender, peer, message, payload)


def train(run: Run, mesh: str, zero: int, *faults: AnyFault, **how: Any) -> Paired:
    quiet: dict[str, Any] = {"failing": 0.0, "failing_pairs": 0.0, "losing": 0.0, "meets": 1.0}
    cluster = Paired(run, mesh, zero, faults=faults, **(quiet | how))
    assert outcome(cluster.run()) == expected(run)
    return cluster


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("mesh", MESHES)
@one_thread()
def test_boundary_tensors_go_through_pairs(mesh: str, zero: int) -> None:
    cluster = train(Run(microbatches=5, steps=4), mesh, zero, seed=zero)
    ended, received = cluster.pair_hub.ended, cluster.pair_hub.received
    assert received["Activation"] > 0 and received["ActivationGradient"] > 0 and not ended["failed"] + ended["refused"]
    assert ended["sent"] == ended["received"] and not cluster.again and not cluster.result.epochs
    validation = 3 * (cluster.first_mesh.shape.num_stages - 1)
    assert cluster.by_link["Activation", 4] == validation, "a validation goes over links"
    assert cluster.by_link["ActivationGradient", 4] == 0 < cluster.by_link["ActivationGradient", 1]


@pytest.mark.parametrize("model", ["gpt_tied", "llama_tied", "inf", "mlp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@one_thread()
def test_models_and_dtypes(model: str, dtype: str) -> None:
    cluster = train(Run(model=model, dtype=dtype, microbatches=5, steps=6), "dp2_pp2", 2)
    assert cluster.pair_hub.received["Activation"] > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
@one_thread()
def test_new_mirrors_get_their_state_through_pairs(zero: int) -> None:
    """After a loss every page of the lost worker has a new mirror, whose state its primary sends."""
    cluster = train(Run(microbatches=5, steps=8), "dp4", zero, Fault(2, "kill", 1, "backward"), seed=zero)
    assert cluster.pair_hub.received["PageState"] > 0 and len(cluster.result.epochs) == 2, "lost, and mirrored again"


@pytest.mark.parametrize("seed", range(6))
@one_thread()
def test_links_take_over_from_pairs_that_fail(seed: int) -> None:
    run = Run(microbatches=5, steps=8)
    cluster = train(run, "dp2_pp2", seed % 4, failing_pairs=0.05, losing=0.05, seed=seed, uneven=bool(seed % 2))
    ended = cluster.pair_hub.ended
    assert ended["failed"] + ended["refused"] + ended["lost"] > 0 and not cluster.result.epochs, "in the same epoch"


@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("side", [SENDER, RECEIVER])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("message", ["Activation", "ActivationGradient"])
@one_thread()
def test_a_worker_is_lost_in_the_middle_of_a_boundary_tensor(message: str, after: bool, side: str, kind: str) -> None:
    """Between the message on the link and the payload of the pair, or when that is about to come."""
    fault = MessageFault(kind, message, side, after, 20, turns=400)
    cluster = train(Run(microbatches=6, steps=6), "dp3_pp2", 1, fault)
    assert cluster.plan.num_injected == 1 and cluster.pair_hub.received[message] > 0


@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize("side", [SENDER, RECEIVER])
@pytest.mark.parametrize("after", [False, True])
@one_thread()
def test_a_worker_is_lost_in_the_middle_of_a_state_transfer(after: bool, side: str, kind: str) -> None:
    faults = Fault(2, "kill", 1, "backward"), MessageFault(kind, "PageState", side, after, 2, turns=400)
    cluster = train(Run(microbatches=6, steps=8), "dp4", 1, *faults, policy=Policy(mirror_count=2))
    assert cluster.plan.num_injected == 2


@one_thread()
def test_a_change_that_loses_nobody_is_in_the_middle_of_transfers() -> None:
    """A link is lost: what pairs have not brought is said not to come, and the plan has it sent again."""
    again = Counter[str]()
    for seed in range(4):
        fault = MessageFault("unlink", "ActivationGradient", SENDER, False, 32)
        cluster = train(Run(microbatches=8, steps=6), "dp3_pp2", 1, fault, seed=seed)
        assert cluster.result.epochs
        again += cluster.again
    assert again["given up"]


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("first", range(0, 2 * CHUNK, CHUNK))
def test_no_schedule_of_faults_changes_a_bit_or_gets_stuck(first: int, moving: bool) -> None:
    tally = run_many(range(first, first + CHUNK), moving=moving, paired=True)
    assert tally.failures == {}
    assert tally.injected > CHUNK and tally.ends["bits"] > CHUNK // 2, "faults did happen, and runs came to their ends"


@pytest.mark.parametrize("kind", ["miscompute", "flips", "late", "votes", "peers", "silent"])
def test_no_schedule_of_faults_with_pairs_and_something_else_changes_a_bit(kind: str) -> None:
    """Nor is anything refused, but for what follows on a message that was lost."""
    tally = run_many(range(FEW), paired=True, **{kind: True})
    assert tally.failures == {}
    assert tally.injected > FEW // 2 and tally.ends["bits"] > FEW // 2


@one_thread()
def test_a_message_that_is_refused_for_no_loss_is_counted() -> None:
    """Messages that were lost explain numbers out of order at their receivers, and nothing else."""
    cluster = train(Run(microbatches=5, steps=8), "dp2_pp2", 1, losing=0.05, seed=1)
    assert cluster.pair_hub.ended["lost"] and cluster.pair_hub.ended["out of order"] and not cluster.rejected
    ((_, rank), *_) = cluster.pair_hub.lacking
    cluster.refused(rank, admission.SIZE)
    assert cluster.rejected == {admission.SIZE: 1}


def test_with_pairs_a_schedule_is_drawn_as_without() -> None:
    """Recorded outcomes and seeds of mutants stay what they are."""
    for seed in range(50):
        drawn, paired = Schedule.draw(seed, grouped=True), Schedule.draw(seed, paired=True)
        assert paired.paired and str(paired) == str(drawn).replace("paired=False", "paired=True")
