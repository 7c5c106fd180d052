"""State that has outlived all workers that had applied its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import ProtocolAction, Unrecoverable
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy, ProtocolSpec
from elaswave_spmd.recovery.messages import PartialStep, Ready, StepReport
from elaswave_spmd.recovery.reconfiguration import ahead_everywhere
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet
from tests.unit.recovery.controller_cases import LAYOUT, STEPS, placement, reconfigures, replicas_of


def test_state_that_is_a_step_ahead_of_everybody_on_all_of_its_replicas() -> None:
    """Whoever had applied the step is lost, and with one attempt of it the state before it."""
    pages = {0: (ReplicaSet(0, 0, 2, 1, frozenset({1, 2})), ReplicaSet(0, 2, 5, 2, frozenset({2, 3})))}

    def found(*reports: m.StepReport) -> list[tuple[int, int, int]]:
        return [pages.key for pages in ahead_everywhere(pages, {report.rank: report for report in reports})]

    one = m.StepReport(4, 1, 6, ahead=((0, 0, 2),))
    two = m.StepReport(4, 2, 6, ahead=((0, 0, 5),))
    assert found(m.StepReport(4, 1, 6), m.StepReport(4, 2, 6), m.StepReport(4, 3, 6)) == []
    assert found(one, m.StepReport(4, 2, 6)) == [], "worker 2 has the version of all"
    assert found(one, m.StepReport(4, 2, 6, ahead=((0, 0, 1),))) == [], "of page 1"
    assert found(one, two) == [(0, 0, 2), (0, 2, 5)], "worker 3 is lost"
    assert found(one, two, m.StepReport(4, 3, 6)) == [(0, 0, 2)]
    assert found(one, two, m.StepReport(4, 3, 7)) == [], "worker 3 has applied the step: the others complete it"


def mirrored(policy: Policy, checks: CheckDraw) -> ControllerProtocol:
    """Four workers that have begun, with the policy's mirrors of each page."""
    planned = placement(4, zero=1)
    planned = replace(planned, replicas=place_replicas(LAYOUT, planned.state_sharding(policy.mirror_count, 0)))
    protocol = ControllerProtocol(planned, ProtocolSpec(LAYOUT, STEPS), policy, checks=checks)
    for rank in range(4):
        protocol.ready(Ready(rank, f"at {rank}"))
    return protocol


def holders(actions: Sequence[ProtocolAction], pages: PageRange) -> set[int]:
    """The replicas of pages that the Reconfigure of some actions names."""
    layer, first, stop = pages
    rows = next(iter(reconfigures(actions).values())).replicas
    within = (row for row in rows if row[0] == layer and row[1] <= first and stop <= row[2])
    return {rank for row in within for rank in (row[3], *row[4])}


@pytest.mark.parametrize("why", ["saved", "anew", "compared", "in part"])
@pytest.mark.parametrize("alone", [False, True])
def test_state_that_is_ahead_of_what_is_saved_or_begins_anew_is_given_up(why: str, alone: bool) -> None:
    """Worker 1 has learned it from a primary that is lost since: it is a step ahead of all who are left."""
    least = 4 if why == "saved" else 1
    policy = Policy(mirror_count=1, min_workers=least, compares_at=lambda _: why == "compared")
    protocol = mirrored(policy, CheckDraw(0, float(why == "anew")))
    protocol.agreed = 6  # nobody doubts the state before the step, but it is compared anew in each mesh epoch
    found = [pages for pages in replicas_of(protocol) if pages.replicas >= {1} and not pages.learners]
    pages = next(pages for pages in found if len(pages.replicas) == 2)
    (other,) = pages.replicas - {1}
    lost = other if alone else next(rank for rank in (0, 2, 3) if rank != other)
    protocol.lost(lost, "killed")
    actions: list[ProtocolAction] = []
    for rank in {0, 1, 2, 3} - {lost}:
        ahead = (pages.key,) if rank == 1 else ()
        actions = protocol.report_received(StepReport(1, rank, 6, (PartialStep(7),), ahead=ahead))
    if why == "in part":
        assert holders(actions, pages.key) >= {1}, "the others complete the step"
    elif alone:
        (end,) = actions
        assert isinstance(end, Unrecoverable) and [gone.key for gone in end.lost] == [pages.key]
        assert ("nothing can be saved" if why == "saved" else "begin anew") in end.reason
    else:
        assert holders(actions, pages.key) == {other}


@pytest.mark.parametrize("is_compared", [False, True])
def test_state_that_came_after_the_report_is_not_compared_as_that_of_a_replica(is_compared: bool) -> None:
    """It may be of the step after the version, whose replicas the new epoch compares once more: one would miss."""
    policy = Policy(mirror_count=2, compares_at=lambda _: is_compared)
    protocol = mirrored(policy, CheckDraw(0, 0.0))
    protocol.agreed = 6
    protocol.lost(3, "killed")
    for rank in (0, 1, 2):
        protocol.report_received(StepReport(1, rank, 6, (PartialStep(7),)))
    pages = next(pages for pages in replicas_of(protocol) if pages.learners)
    (learner,), (lost, other) = pages.learners, pages.replicas
    protocol.lost(lost, "killed")
    protocol.report_received(StepReport(2, learner, 6, (PartialStep(7),)))
    protocol.caught_up(m.CaughtUp(learner, 1))
    actions = protocol.report_received(StepReport(2, other, 6, (PartialStep(7),)))
    assert holders(actions, pages.key) == ({other} if is_compared else {other, learner})
