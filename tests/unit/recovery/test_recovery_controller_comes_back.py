"""A controller protocol that takes the place of another one, over made-up reports of its workers (A5 to A9)."""

from __future__ import annotations

from typing import Any

import pytest

from elaswave_spmd.recovery.actions import Broadcast, ProtocolAction, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Predecessor
from elaswave_spmd.recovery.messages import AT_ONCE, Applied, Prepare, Ready, Reconfigure, Validated
from elaswave_spmd.recovery.reconfiguration import next_stages, wanted_stages
from tests.unit.recovery.controller_cases import (
    STEPS,
    answer,
    make,
    messages,
    placement,
    prepares,
    reconfigures,
    started,
)

EPOCH = 4
MEMBERS = (0, 1, 2)


def newest(**fields: Any) -> Reconfigure:
    """The Reconfigure of the newest mesh epoch, as living workers have it."""
    (message,) = {id(m): m for m in reconfigures(first_epoch()).values()}.values()
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return Reconfigure(**{**values, "epoch": EPOCH, "version": 6, **fields})


def first_epoch() -> list[ProtocolAction]:
    protocol = make()
    return [action for rank in MEMBERS for action in protocol.ready(Ready(rank, f"at {rank}"))]


def applied(rank: int, step: int) -> Applied:
    return Applied(step, EPOCH, rank, 0.5, 0.25, True)


def back(
    *, written: int = 6, steps: dict[int, list[int]] | None = None, **options: Any
) -> tuple[ControllerProtocol, list[ProtocolAction], Predecessor]:
    """A protocol that has come back when so many lines are written; `steps`: those that workers report."""
    message = options.pop("reconfigure", newest())
    protocol = make(version=written, **options.pop("of_run", {}))
    for rank, some in (steps or {}).items():
        for step in some:
            protocol.applied(applied(rank, step))
    fields = {"placement": placement(), "versions": dict.fromkeys(MEMBERS, protocol.version), "last_epoch": 9}
    before = Predecessor(reconfigure=message, **{**fields, **options})
    return protocol, protocol.come_back(before), before


def test_the_mesh_changes_after_the_step_under_way_and_asks_for_reports() -> None:
    protocol, actions, before = back(steps={0: [7, 8], 1: [7]})
    assert actions == [] and protocol.version == 8 and protocol.started
    begun = protocol.begin_generation(before)
    assert prepares(begun) == dict.fromkeys(MEMBERS, Prepare(10, 9)), "above every epoch of the journal"
    assert protocol.addresses == {rank: f"at {rank}" for rank in MEMBERS}


def test_missing_lines_are_committed_in_order_and_once() -> None:
    protocol = make(version=6)
    found = [protocol.applied(applied(rank, step)) for step in (6, 7, 8) for rank in MEMBERS]
    assert [len(actions) for actions in found] == [0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_a_reconfigure_that_was_being_sent_is_sent_to_the_rest() -> None:
    _, actions, before = back(lacking=(1, 2))
    assert actions == [Broadcast((1, 2), before.reconfigure)]


@pytest.mark.parametrize(
    ("prepared", "after"), [(Prepare(8, 6), 6), (Prepare(8, AT_ONCE), AT_ONCE), (Prepare(4, 2), 7)]
)
def test_it_is_no_less_urgent_than_the_change_that_was_under_way(prepared: Prepare, after: int) -> None:
    """Members that have answered the old Prepare begin no step. One whose Reconfigure came is over."""
    protocol, _, before = back(prepared=prepared)
    assert {prepare.after for prepare in prepares(protocol.begin_generation(before)).values()} == {after}


def test_so_it_is_if_a_wish_to_leave_comes_first() -> None:
    protocol, _, before = back(prepared=Prepare(8, 6))
    leave = protocol.drain(1, "asked to leave")
    assert {prepare.after for prepare in prepares(leave).values()} == {6}
    assert protocol.begin_generation(before) == [], "one has begun"


def test_a_loss_meanwhile_is_the_first_change() -> None:
    protocol, _, before = back(versions={0: 6, 1: 6})
    lost = protocol.lost(2, "its process ended")
    assert prepares(lost) == dict.fromkeys((0, 1), Prepare(10, AT_ONCE))
    assert protocol.begin_generation(before) == []


OF_RUN = {"num_validation_microbatches": 3, "validates_at": lambda step: step % 3 == 0}


def test_a_validation_that_is_not_written_down_is_run_again_at_once() -> None:
    protocol, actions, before = back(of_run=OF_RUN, validated=3)
    assert actions == []
    assert {prepare.after for prepare in prepares(protocol.begin_generation(before)).values()} == {AT_ONCE}


def test_so_it_is_where_a_wish_to_leave_has_begun_a_change_that_waits_for_the_validation() -> None:
    """Members have sent their losses to the controller that died: they wait, and answer no planned change meanwhile."""
    protocol, _, before = back(of_run=OF_RUN, prepared=Prepare(8, 6), validated=0)
    assert {prepare.after for prepare in prepares(protocol.drain(1, "asked to leave")).values()} == {6}
    assert {prepare.after for prepare in prepares(protocol.begin_generation(before)).values()} == {AT_ONCE}
    protocol, _, before = back(of_run=OF_RUN, validated=0)
    protocol.lost(1, "killed")
    assert protocol.begin_generation(before) == [], "a loss is as urgent"


def test_one_that_is_written_down_is_answered_again() -> None:
    protocol, actions, before = back(of_run=OF_RUN, validated=6)
    assert messages(actions) == [(rank, Validated(6)) for rank in MEMBERS]
    assert {prepare.after for prepare in prepares(protocol.begin_generation(before)).values()} == {7}


def test_a_run_that_was_about_to_end_early_ends_there() -> None:
    protocol, actions, _ = back(of_run=OF_RUN, validated=6, ended_at=6)
    assert protocol.steps == 6 and messages(actions)[0][1] == Validated(6, True)
    protocol, _, _ = back(reconfigure=newest(is_last=True))
    assert protocol.steps == 6 < STEPS


def test_a_run_that_was_about_to_stop_stops() -> None:
    protocol, _, before = back(reconfigure=newest(save=True))
    assert protocol.stops
    assert {prepare.after for prepare in prepares(protocol.begin_generation(before)).values()} == {AT_ONCE}


def test_results_that_differ_begin_another_attempt() -> None:
    protocol, _, _ = back()
    assert {prepare.after for prepare in prepares(protocol.attempt_again()).values()} == {AT_ONCE}
    assert protocol.attempt_again() == [], "another worker says the same"


def test_a_controller_that_never_died_knows_the_begin_of_its_run() -> None:
    assert started().began_at == 0 and make(version=5).began_at == 5 and make(version=5, began_at=0).began_at == 0


def test_stages_that_the_run_was_moved_to_stay() -> None:
    """A run of two stages was moved to one on purpose: its next change opens no second one again."""
    protocol, _, before = back(placement=placement(3))
    begun = protocol.begin_generation(before)
    assert prepares(begun).keys() == set(MEMBERS)
    found = reconfigures(answer(protocol, version=7))
    assert {message.stages for message in found.values()} == {((0, 1, 2),)}


def test_stages_that_were_given_up_are_opened_again() -> None:
    """All that is known of a mesh without a stage of two workers is that it may have lost some."""
    assert wanted_stages(((0,), (1,)), 3) == 3 == wanted_stages(((0, 3), (1,), (2,)), 2)
    assert wanted_stages(((0, 3), (1,)), 3) == 2
    assert wanted_stages(((0,), (1,), (2,)), 2) == 3
    for stages, removed, wanted in (
        (((0, 1), (2, 3)), (), 2),
        (((0, 1), (2,)), (2,), 3),
        (((0,), (1,), (2,)), (1,), 3),
    ):
        made = next_stages(stages, removed, (), wanted)
        assert wanted_stages(made, wanted) == wanted, (stages, removed)


@pytest.mark.parametrize("caught_up", [(3,), ()])
def test_state_that_a_learner_had_told_the_controller_before_of_is_not_lost(caught_up: tuple[int, ...]) -> None:
    """Worker 2 is the only replica of stage 1 but for a learner, which has caught up, and dies with the controller."""
    died = started()
    died.ready(Ready(3, "at 3"))
    reconfigure = reconfigures(answer(died, 1))[0]
    assert 3 in died.placement.mesh.stages[1]
    protocol, _, before = back(
        written=1,
        reconfigure=reconfigure,
        placement=died.placement,
        versions=dict.fromkeys((0, 1, 3), 1),
        caught_up=caught_up,
    )
    protocol.lost(2, "its process ended")
    effects = answer(protocol, 1)
    assert any(isinstance(effect, Unrecoverable) for effect in effects) == (not caught_up)
    assert protocol.begin_generation(before) == []
