"""Attempts of a step: when a change of the mesh begins one, and what a worker does with messages of others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.recovery.messages import PartialStep, Recompute, Reconfigure, StepReport
from elaswave_spmd.recovery.partial_step import FULL
from elaswave_spmd.worker.attempts import AttemptChannel, Attempts
from elaswave_spmd.worker.channel import Incoming
from tests.unit.recovery.controller_cases import answer, prepares, reconfigures, started

HELD = PartialStep(4, assigned=(0, 1, 2), computed=(0,))


def after_a_loss(rate: float, *held: PartialStep, suspect: bool = False) -> Reconfigure:
    protocol = started(checks=CheckDraw(0, rate))
    if suspect:
        protocol.note_difference()
    protocol.lost(1, "killed")
    return reconfigures(answer(protocol, 3, *held))[0]


@pytest.mark.parametrize("rate", [0.01, 0.4, 0.99])
def test_a_loss_below_rate_1_is_recovered_in_part_as_without_checks(rate: float) -> None:
    assert after_a_loss(rate, HELD) == after_a_loss(0.0, HELD)
    assert after_a_loss(rate, HELD).recovery_plan


@pytest.mark.parametrize(("rate", "suspect"), [(1.0, False), (0.01, True), (1.0, True)])
def test_a_step_that_may_be_wrong_begins_anew(rate: float, suspect: bool) -> None:
    place = after_a_loss(rate, HELD, suspect=suspect)
    assert (place.attempt, place.recovery_plan, place.version) == (place.epoch, None, 3)


def test_the_attempt_lasts_until_the_next_one() -> None:
    protocol = started(2, 2, checks=CheckDraw(0, 0.5))
    protocol.note_difference()
    protocol.lost(1, "it computed wrongly")
    assert reconfigures(answer(protocol, 3, HELD))[0].attempt == 1
    protocol.lost(3, "killed")
    place = reconfigures(answer(protocol, 5, PartialStep(6, assigned=(0, 1))))[0]
    assert (place.epoch, place.attempt) == (2, 1) and place.recovery_plan, "nobody is suspected in this epoch"


def test_members_that_are_a_step_apart_get_the_whole_step_as_a_plan() -> None:
    """A member that is behind completes the step that is decided; the next one begins anew, as it is placed."""
    protocol = started(checks=CheckDraw(0, 1.0))
    protocol.lost(1, "killed")
    protocol.report_received(StepReport(1, 0, 3, ()))
    place = reconfigures(protocol.report_received(StepReport(1, 2, 4, (PartialStep(5, assigned=(0,)),))))[0]
    assert (place.version, place.attempt) == (4, 1) and place.recovery_plan is not None
    assert place.recovery_plan == tuple(
        Recompute(stage, u, worker, True, FULL) for stage, worker in ((0, 0), (1, 2)) for u in range(5)
    )


def test_planned_changes_and_checks_disturb_each_other_not_at_all() -> None:
    protocol = started(2, 2, checks=CheckDraw(0, 1.0))
    protocol.drain(1, "asked to leave")
    assert reconfigures(answer(protocol, 1))[0].attempt == 0


# ---- at a worker


class Port:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, peer: int, message: m.Message, payload: Any = None) -> None:
        self.sent.append(message)


def incoming(step: int, attempt: int) -> Incoming:
    return Incoming(2, m.PartialSum(step, 0, 0, 1, 0, 1, attempt), torch.zeros(1))


def test_of_an_older_attempt_only_what_is_decided_is_taken() -> None:
    attempts = Attempts()
    assert attempts.admits(incoming(8, 0)) and attempts.admits(incoming(9, 0))
    attempts.begin(3, version=8)
    assert attempts.enter_epoch(3) == []
    assert [attempts.admits(incoming(step, 0)) for step in (8, 9, 10)] == [True, False, False]
    assert [attempts.admits(incoming(step, 3)) for step in (8, 9, 10)] == [True, True, True]


def test_of_a_later_attempt_it_is_kept_once_until_that_begins() -> None:
    attempts, early = Attempts(), incoming(9, 3)
    assert not attempts.admits(early) and not attempts.admits(incoming(9, 3))
    attempts.begin(3, version=8)
    (found,) = attempts.enter_epoch(3)
    attempts.begin(5, version=8)
    assert found.message == early.message and attempts.enter_epoch(5) == []


def of_validation(epoch: int, microbatch: int = 1) -> Incoming:
    return Incoming(2, m.Activation(8, microbatch, 1, (1,), True, epoch), torch.zeros(1))


def test_every_mesh_epoch_begins_another_attempt_of_a_validation() -> None:
    """Also in an attempt of steps that began at the version which is validated, where what is decided is right."""
    attempts, port = Attempts(), Port()
    channel: Any = AttemptChannel(port, attempts)  # type: ignore[arg-type]
    attempts.begin(3, version=8)
    attempts.enter_epoch(3)
    assert attempts.admits(of_validation(3)) and not attempts.admits(of_validation(2))
    early = of_validation(5)
    assert not attempts.admits(early) and not attempts.admits(of_validation(4, microbatch=2))
    found = attempts.enter_epoch(5)
    assert [attempts.admits(one) for one in found] == [True, False] and found[0] is early
    channel.send(1, m.Activation(8, 1, 1, (1,), True))
    channel.send(1, m.Activation(9, 1, 1, (1,)))
    assert [message.attempt for message in port.sent] == [5, 3]


def test_a_peer_cannot_fill_a_worker_with_messages_of_attempts_to_come() -> None:
    """A member is authenticated, and may send what it likes: of each id the newest is kept, whatever is in it."""
    attempts, sent = Attempts(), ()
    for number in range(1, 200):
        sent = (
            m.CheckDigests(9, 1, ((0, number.to_bytes(8, "little"), b"", b""),), attempt=number),
            m.ReducedGradient(9, 0, 0, 1, number.to_bytes(4, "little"), attempt=number),
            m.Activation(9, 1, 1, (number, 2), attempt=number),
        )
        assert not any(attempts.admits(Incoming(2, message)) for message in sent)
    attempts.begin(199, version=8)
    assert tuple(incoming.message for incoming in attempts.enter_epoch(199)) == sent


def test_messages_that_are_not_computed_have_no_attempt() -> None:
    attempts = Attempts()
    attempts.begin(3, version=8)
    for message in (m.Publish(9, 0, 0, 1), m.Vote(9, 3, 1, ()), m.PageState(9, 0, 0, 1, b"")):
        assert attempts.admits(Incoming(2, message))


def test_what_came_of_a_wrong_replica_is_dropped_and_what_comes_early_of_the_next_repair_is_kept() -> None:
    attempts = Attempts()
    kinds = m.Publish(8, 0, 0, 1), m.PageState(8, 0, 0, 1, b""), m.Need(8, 0, 0, 1)
    later = [msgspec.structs.replace(message, attempt=3) for message in kinds]
    assert not any(attempts.admits(Incoming(2, message)) for message in later)
    attempts.begin(3, version=8, repair=3)
    assert [found.message for found in attempts.enter_epoch(3)] == later
    assert not any(attempts.admits(Incoming(2, message)) for message in kinds)
    assert all(attempts.admits(Incoming(2, message)) for message in later)
    attempts.begin(5, version=9, repair=3)
    assert all(attempts.admits(Incoming(2, message)) for message in later), "an attempt without a repair"


def test_a_member_that_has_not_entered_an_attempt_begins_another_one() -> None:
    """Member 2 was in no epoch since the attempt began: what it reports was given up by all others."""
    protocol = started(2, 2, checks=CheckDraw(0, 0.5))
    protocol.note_difference()
    protocol.lost(1, "it computed wrongly")
    assert reconfigures(answer(protocol, 3, HELD))[0].attempt == 1
    protocol.lost(3, "killed")
    protocol.report_received(StepReport(2, 0, 3, (), 1))
    place = reconfigures(protocol.report_received(StepReport(2, 2, 3, (HELD,), 0)))[0]
    assert (place.epoch, place.attempt, place.recovery_plan) == (2, 2, None)


def test_a_repair_lasts_until_the_next_one() -> None:
    """A member that never entered the epoch of a repair makes it up in the next one."""
    protocol = started(2, 2)
    protocol.repair({1: [(0, 0, 1)]})
    place = reconfigures(answer(protocol, 3, HELD))[0]
    assert (place.attempt, place.repair, place.recovery_plan) == (1, 1, None)
    protocol.lost(3, "killed")
    place = reconfigures(answer(protocol, 3, HELD))[0]
    assert (place.epoch, place.attempt, place.repair) == (2, 1, 1) and place.recovery_plan


@pytest.mark.parametrize(("agreed", "repair"), [(2, 1), (3, 0)])
def test_a_loss_before_the_comparison_is_a_repair(agreed: int, repair: int) -> None:
    protocol = started(2, 2, policy=Policy(compares_at=lambda version: True))
    protocol.agreed = agreed
    protocol.lost(1, "killed")
    place = reconfigures(answer(protocol, 3, HELD))[0]
    assert (place.attempt, place.repair) == (repair, repair)


@pytest.mark.parametrize(("reads", "agreed", "anew"), [(True, 3, True), (False, 3, False), (True, 2, True)])
def test_a_loss_where_state_is_computed_with_where_it_lies(reads: bool, agreed: int, anew: bool) -> None:
    """The lost worker may have computed from damaged parameters: without a repair, as it has sent none of these."""
    protocol = started(2, 2, policy=Policy(compares_at=lambda version: True, reads_masters=reads))
    protocol.agreed = agreed
    protocol.lost(1, "killed")
    place = reconfigures(answer(protocol, 3, HELD))[0]
    assert (place.attempt, place.repair) == (int(anew), int(agreed < 3))


@pytest.mark.parametrize("in_a_change", [False, True])
def test_state_that_is_not_what_was_written_begins_a_repair(in_a_change: bool) -> None:
    """Reported before the StepReport, or when the new epoch is entered; the step begins anew, whoever has them."""
    protocol = started(4)
    if in_a_change:
        protocol.relink({frozenset({2, 3}): "their link is lost"})
    effects = protocol.damaged(m.Damaged(1, 0, 4, ((0, 0, 1),)))
    assert {prepare.after for prepare in prepares(effects).values()} == {m.AT_ONCE}
    epoch = 1 + in_a_change
    place = reconfigures(answer(protocol, 3, HELD))[0]
    assert (place.epoch, place.attempt, place.repair, place.recovery_plan) == (epoch, epoch, epoch, None)
    protocol.damaged(m.Damaged(1, epoch, 4, ((0, 0, 1),), "UCE ERROR"))
    assert reconfigures(answer(protocol, 3, HELD))[0].repair == epoch, "a device that has failed has sent nothing wrong"


def test_what_is_sent_carries_the_attempt_and_without_one_nothing() -> None:
    port, attempts = Port(), Attempts()
    channel: Any = AttemptChannel(port, attempts)  # type: ignore[arg-type]
    message = m.PartialSum(9, 0, 0, 1, 0, 1)
    channel.send(1, message)
    assert port.sent.pop() is message
    attempts.begin(3, version=8)
    channel.send(1, message)
    channel.send(1, m.Need(9, 0, 0, 1))
    assert port.sent == [m.PartialSum(9, 0, 0, 1, 0, 1, 3), m.Need(9, 0, 0, 1)]
