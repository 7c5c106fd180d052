"""The controller's half between changes of the mesh: the first epoch, contradicting reports, validations."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.actions import Broadcast, Committed, Done, ValidationDone
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.recovery.messages import (
    GROUPED,
    Applied,
    Finished,
    Ready,
    Reconfigure,
    StepReport,
    Validated,
    ValidationLoss,
)
from tests.unit.recovery.controller_cases import STEPS, make, messages, reconfigures, started


def applied(rank: int, step: int = 1, loss: float = 1.5, norm: float = 0.5) -> Applied:
    return Applied(step, 0, rank, loss, norm, True)


def test_the_place_comes_with_the_last_member_and_says_everything() -> None:
    protocol = make()
    assert protocol.ready(Ready(2, "c")) == [] and protocol.ready(Ready(0, "a")) == []
    assert protocol.ready(Ready(0, "a")) == [], "one member twice is one member"
    effects = protocol.ready(Ready(1, "b"))
    assert [rank for rank, _ in messages(effects)] == [0, 1, 2] and len(effects) == 1, "encoded once"
    assert reconfigures(effects)[0] == reconfigures(effects)[1] == reconfigures(effects)[2]
    assert reconfigures(effects)[0] == Reconfigure(
        0,
        ((0, 1), (2,)),
        (0, 1, 3),
        ((3, 2), (5,)),
        {0: "a", 1: "b", 2: "c"},
        (),
        version=0,
        recovery_plan=None,
        validate=None,
    )


def test_a_step_is_committed_once_at_its_first_report() -> None:
    protocol = started()
    first = applied(1)
    assert protocol.applied(first) == [Committed(first)] and protocol.version == 1
    assert protocol.applied(applied(0)) == [] and protocol.applied(applied(2)) == []
    second = applied(2, step=2, loss=1.25)
    assert protocol.applied(second) == [Committed(second)]
    assert protocol.applied(applied(0, step=2, loss=1.25)) == []


@pytest.mark.parametrize(
    "wrong", [applied(0, loss=math.nextafter(1.5, 2)), applied(0, norm=math.nextafter(0.5, 0)), applied(0, loss=-1.5)]
)
def test_workers_that_disagree_by_one_bit_end_the_run(wrong: Applied) -> None:
    protocol = started()
    protocol.applied(applied(2))
    with pytest.raises(RunError, match="workers 2 and 0 disagree about step 1"):
        protocol.applied(wrong)


@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        (applied(2), replace(applied(0), updated=False), "updated True and False"),
        (replace(applied(2), weight=3.0), applied(0), "weight 0x1.8000000000000p+1 and None"),
        (
            replace(applied(2), weight=3.0),
            replace(applied(0), weight=math.nextafter(3.0, 4)),
            "weight 0x1.8000000000000p+1 and 0x1.8000000000001p+1",
        ),
    ],
    ids=["updated", "a weight and none", "weights"],
)
def test_so_do_workers_of_which_one_has_updated_or_that_have_other_weights(
    first: Applied, other: Applied, difference: str
) -> None:
    protocol = started()
    protocol.applied(first)
    with pytest.raises(RunError) as error:
        protocol.applied(other)
    assert str(error.value) == f"workers 2 and 0 disagree about step 1: {difference}"


def test_who_completes_a_step_in_a_later_epoch_may_report_no_extension() -> None:
    """Some member has published the step by links, so nobody offers a group for it any more."""
    protocol = started()
    protocol.applied(replace(applied(2), extension=GROUPED))
    assert protocol.applied(replace(applied(0), epoch=1)) == []


def test_a_late_report_of_the_step_before_is_compared_too() -> None:
    protocol = started()
    protocol.applied(applied(1))
    protocol.applied(applied(1, step=2))
    with pytest.raises(RunError):
        protocol.applied(applied(0, loss=9.0))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_equal_values_that_are_not_finite_agree(value: float) -> None:
    protocol = started()
    first = both(applied(0), value)
    assert protocol.applied(first) == [Committed(first)]
    assert protocol.applied(both(applied(1), value)) == []


def both(message: Applied, value: float) -> Applied:
    return Applied(message.step, 0, message.rank, value, value, False)


def test_reports_are_forgotten_after_a_while() -> None:
    protocol = started()
    for step in range(1, 50):
        for rank in (0, 1, 2):
            protocol.applied(applied(rank, step))
    assert len(protocol._first_reports) <= 4


# ---- validations


def totals(effects: object) -> list[tuple[int, float]]:
    assert isinstance(effects, list)
    return [(effect.step, effect.total) for effect in effects if isinstance(effect, ValidationDone)]


def test_a_validation_is_the_exactly_rounded_sum_in_any_order() -> None:
    losses = [1e16, 1.0, 1.0, -1e16, 0.25]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        protocol = started(num_validation_microbatches=5)
        results = [protocol.validation(ValidationLoss(7, 0, 2, (u,), (losses[u],))) for u in order]
        assert results[:4] == [[]] * 4 and totals(results[4]) == [(7, 2.25)]
        assert results[4][1:] == [Broadcast((0, 1, 2), Validated(7))], "training may go on"


def test_validations_of_two_steps_do_not_mix() -> None:
    """Validation t + 1 is begun only after t is complete: late losses of an older one are void."""
    protocol = started(num_validation_microbatches=2)
    assert protocol.validation(ValidationLoss(1, 0, 1, (0,), (1.0,))) == []
    assert protocol.validation(ValidationLoss(1, 0, 1, (0,), (1.0,))) == [], (
        "the same micro-batch twice is one micro-batch"
    )
    assert totals(protocol.validation(ValidationLoss(1, 0, 2, (1,), (2.0,)))) == [(1, 3.0)]
    assert protocol.validation(ValidationLoss(2, 0, 1, (0,), (8.0,))) == []
    assert protocol.validation(ValidationLoss(1, 0, 1, (0, 1), (1.0, 2.0))) == [], "run again by those that came later"
    assert totals(protocol.validation(ValidationLoss(2, 0, 2, (1,), (4.0,)))) == [(2, 12.0)]
    assert not protocol._validation


def test_a_microbatch_that_is_validated_again_after_a_loss_counts_once() -> None:
    protocol = started(num_validation_microbatches=2)
    protocol.validation(ValidationLoss(1, 0, 0, (0,), (1.0,)))
    assert totals(protocol.validation(ValidationLoss(1, 0, 1, (0, 1), (1.0, 2.0)))) == [(1, 3.0)]


EACH_STEP = {"num_validation_microbatches": 1, "validates_at": lambda step: True}


def test_a_validation_that_ends_the_run_says_so_and_so_does_every_later_epoch() -> None:
    protocol = started(policy=Policy(early_stop=EarlyStop(1)), **EACH_STEP)
    protocol.applied(applied(0, 1))
    assert protocol.validation(ValidationLoss(1, 0, 2, (0,), (1.5,)))[1:] == [Broadcast((0, 1, 2), Validated(1))]
    for rank in (0, 1, 2):
        protocol.applied(applied(rank, 2))
    effects = protocol.validation(ValidationLoss(2, 0, 2, (0,), (2.5,)))
    assert effects == [ValidationDone(2, 2.5, True), Broadcast((0, 1, 2), Validated(2, True))]
    assert protocol.steps == 2
    assert protocol.stop("SIGTERM") == [], "after the last step nothing is stopped"
    prepare = protocol.lost(1, "killed")
    assert isinstance(prepare[-1], Broadcast)
    answers = [protocol.report_received(StepReport(1, rank, 2, ())) for rank in (0, 2)]
    assert [message.is_last for message in reconfigures(answers[-1]).values()] == [True, True]


def ends_after(protocol: ControllerProtocol, step: int, loss: float) -> bool:
    (done, _) = protocol.validation(ValidationLoss(step, 0, 2, (0,), (loss,)))
    assert isinstance(done, ValidationDone)
    return done.is_last


@pytest.mark.parametrize(("known", "is_last"), [({}, False), ({4: 2.0, 8: 2.5}, True), ({4: 2.0, 10: 2.5}, False)])
def test_validations_from_before_the_controller_began_count_as_its_own(known: dict[int, float], is_last: bool) -> None:
    """But those of steps that this run does not validate, as a shorter one has its last step, do not."""
    of_run = {"num_validation_microbatches": 1, "validates_at": lambda step: step % 4 == 0, "version": 10}
    protocol = started(policy=Policy(early_stop=EarlyStop(2)), validations=known, **of_run)
    assert ends_after(protocol, 12, 2.5) == is_last
    assert protocol.steps == (12 if is_last else STEPS)


def test_losses_are_compared_by_their_mean() -> None:
    rule = EarlyStop(1, min_delta=0.1)
    for microbatches, is_last in ((1, False), (10, True)):
        mean = {"mean_loss": lambda done, number=microbatches: done.total / number}
        protocol = started(policy=Policy(early_stop=rule), **EACH_STEP, **mean)
        assert not ends_after(protocol, 1, 3.0) and ends_after(protocol, 2, 2.5) == is_last


def test_the_last_step_is_no_early_end() -> None:
    protocol = started(policy=Policy(early_stop=EarlyStop(1)), validations={4: 1.0}, **EACH_STEP)
    assert not ends_after(protocol, STEPS, 2.0) and protocol.steps == STEPS


def test_members_that_validate_a_step_again_since_nobody_is_left_who_had_are_answered() -> None:
    protocol = started(num_validation_microbatches=1, policy=Policy(mirror_count=1))
    protocol.applied(applied(1, 1))
    protocol.validation(ValidationLoss(1, 0, 2, (0,), (1.0,)))
    assert protocol.validation(ValidationLoss(1, 0, 2, (0,), (1.0,))) == [], "late"
    protocol.lost(1, "killed")
    assert reconfigures(([protocol.report_received(StepReport(1, rank, 0, ())) for rank in (0, 2)])[-1])
    assert protocol.validation(ValidationLoss(1, 0, 2, (0,), (1.0,))) == [], "late: it has entered no newer epoch"
    assert protocol.validation(ValidationLoss(1, 1, 2, (0,), (1.0,))) == [Broadcast((0, 2), Validated(1))]


def test_a_validation_that_is_run_again_uses_nothing_of_the_attempt_before() -> None:
    """A worker may have computed that one from damaged parameters, which it has found since."""
    protocol = started(num_validation_microbatches=2, policy=Policy(mirror_count=1))
    protocol.applied(applied(0, 1))
    assert protocol.validation(ValidationLoss(1, 0, 2, (0,), (99.0,))) == []
    protocol.lost(1, "killed")
    assert reconfigures(([protocol.report_received(StepReport(1, rank, 1, ())) for rank in (0, 2)])[-1])
    assert protocol.validation(ValidationLoss(1, 1, 2, (1,), (2.0,))) == [], "micro-batch 0 is to come"
    assert protocol.validation(ValidationLoss(1, 0, 2, (0,), (99.0,))) == [], "late"
    assert totals(protocol.validation(ValidationLoss(1, 1, 2, (0,), (1.0,)))) == [(1, 3.0)]


@pytest.mark.parametrize("compares", [True, False])
def test_where_replicas_are_compared_all_members_have_looked_at_their_state_when_a_validation_is_complete(
    compares: bool,
) -> None:
    policy = Policy(mirror_count=1, compares_at=lambda version: compares)
    protocol = started(num_validation_microbatches=1, policy=policy)
    protocol.applied(applied(0, 1))
    done = protocol.validation(ValidationLoss(1, 0, 2, (0,), (1.0,)))
    if compares:
        assert done == protocol.validation(ValidationLoss(1, 0, 0, (), ())) == [], "worker 1 may have damaged state"
        done = protocol.validation(ValidationLoss(1, 0, 1, (), ()))
    assert totals(done) == [(1, 1.0)]


# ---- the end


def finished(rank: int, epoch: int = 0) -> Finished:
    return Finished(rank, epoch, {}, {})


def test_a_run_is_done_when_all_members_have_finished_in_the_present_epoch() -> None:
    protocol = started()
    assert protocol.finished(finished(0)) == [] and protocol.finished(finished(0)) == []
    assert protocol.finished(finished(2)) == []
    assert protocol.finished(finished(1)) == [Done()]


def test_nobody_is_done_while_the_mesh_changes() -> None:
    """The final pages of a lost primary are sent again, by others."""
    protocol = started()
    protocol.finished(finished(0))
    protocol.lost(1, "killed")
    assert protocol.finished(finished(2)) == []
