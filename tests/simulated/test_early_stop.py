"""A run that ends early ends after the same step on every mesh and through every fault, with that step's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.recovery.messages import ValidationLoss
from elaswave_spmd.worker.spec import Job
from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault
from tests.simulated.bits_cases import (
    TOKENS,
    MirroredCluster,
    Outcome,
    Run,
    one_thread,
    outcome,
    placement_of,
    simulate,
)


@dataclass(frozen=True)
class Early(Run):
    """A run that ends early, as an improvement of its validation loss has to be a large one."""

    steps: int = 20
    validations: int = 3  # micro-batches of a validation

    def job(self) -> Job:
        rule = EarlyStop(patience=3, min_delta=0.1)
        job = replace(super().job(), num_validation_microbatches=self.validations)
        return replace(job, validate_every=2, early_stop=rule)


RUN = Early()


@cache
def undisturbed(run: Early) -> Outcome:
    return outcome(simulate(run, placement_of(run, "single", 0)))


def disturbed(
    mesh: str, zero: int, faults: Sequence[AnyFault], seed: int, *, run: Early = RUN, mirrors: int = 1, every: int = 0
) -> MirroredCluster:
    cluster = MirroredCluster(
        run, mesh, zero, seed=seed, faults=faults, policy=Policy(mirror_count=mirrors), checkpoint_every=every
    )
    assert outcome(cluster.run()) == undisturbed(run)
    return cluster


LAST = 8
"""The step after which the run ends."""


@one_thread()
def test_a_run_ends_early_with_the_weights_of_a_run_of_so_many_steps() -> None:
    found = undisturbed(RUN)
    shorter = outcome(simulate(Run(steps=LAST), placement_of(RUN, "single", 0)))
    assert len(found.losses) == LAST and [step for step, _ in found.validation] == [2, 4, 6, 8]
    assert found.losses == shorter.losses and found.weights == shorter.weights
    losses = [float.fromhex(loss) / (3 * TOKENS) for _, loss in found.validation]
    assert losses[0] - 0.1 <= min(losses[1:]), "the three after the first are no improvement"


@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp2", 0), ("dp3", 1), ("pp3", 2), ("dp2_pp2", 2), ("stages3-2", 3), ("stages1-3", 1)]
)
@one_thread()
def test_it_ends_after_the_same_step_on_every_mesh(mesh: str, zero: int) -> None:
    assert outcome(simulate(RUN, placement_of(RUN, mesh, zero), order=zero)) == undisturbed(RUN)


@pytest.mark.parametrize("kind", ["kill", "term", "join"])
@pytest.mark.parametrize(("mesh", "zero"), [("dp3", 0), ("dp2_pp2", 2), ("stages3-2", 3)])
@one_thread()
def test_losses_leaves_and_joins_in_the_last_step_do_not_change_it(mesh: str, zero: int, kind: str) -> None:
    for seed, point in enumerate(("backward", "apply", "publish")):
        disturbed(mesh, zero, [Fault(LAST, kind, seed, point)], seed)


@pytest.mark.parametrize("message", ["ValidationLoss", "Applied", "Vote", "FinalPages", "Finished"])
@pytest.mark.parametrize("after", [False, True])
@one_thread()
def test_losses_around_the_decision_do_not_change_it(message: str, after: bool) -> None:
    """Also of a worker that has sent its validation losses, or the final weights, and of one that has not."""
    # Counted over the whole run: two losses of a validation, four reports and twelve votes of a step.
    counts = {"ValidationLoss": 7, "Applied": 29, "Vote": 90, "FinalPages": 2, "Finished": 1}
    for seed in range(2):
        fault = MessageFault("kill", message, SENDER, after, counts[message] + seed)
        disturbed("dp2_pp2", 2, [fault], seed)


@one_thread()
def test_a_newcomer_that_comes_after_the_decision_begins_no_step() -> None:
    for seed in range(4):
        cluster = disturbed("dp3", 1, [MessageFault("replace", "FinalPages", SENDER, True, 1 + seed)], seed)
        assert all(step <= LAST for step in cluster._applied.values())


@one_thread()
def test_a_worker_that_is_left_behind_by_all_others_ends_as_they_would_have() -> None:
    """The only worker that had applied the step and validated it is lost: the other one does both again."""
    run = Early(validations=1)
    again = 0
    for seed in range(6):
        fault = MessageFault("kill", "ValidationLoss", SENDER, True, 4)
        cluster = disturbed("dp2", 0, [fault], seed, run=run)
        losses = [message for message in cluster.heard if isinstance(message, ValidationLoss)]
        again += len([loss for loss in losses if loss.losses and loss.rank == 1])
    assert again, "in no order of messages was the other worker behind"


@one_thread()
def test_a_run_that_begins_again_at_a_checkpoint_knows_the_validations_before() -> None:
    restarts = 0
    for seed in range(3):
        cluster = disturbed("dp2", 1, [Fault(7, "kill", 0, "backward")], seed, mirrors=0, every=5)
        restarts += cluster.result.restarts == [5]
    assert restarts == 3
