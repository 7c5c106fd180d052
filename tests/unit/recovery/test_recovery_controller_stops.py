"""The controller's half when too few workers are left, when a link is lost, and whom it waits for in vain."""

from __future__ import annotations

import pytest

from elaswave_spmd.recovery.actions import EpochBegun, ProtocolAction, RemoveMember, Save, Send, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.recovery.messages import (
    AT_ONCE,
    Applied,
    CaughtUp,
    Damaged,
    Finished,
    PartialStep,
    Ready,
    Reconfigure,
    StepReport,
    Stop,
    ValidationLoss,
)
from elaswave_spmd.sharding.replicas import from_rows
from tests.unit.recovery.controller_cases import STEPS, answer, prepares, reconfigures, replicas_of, started

TWO = Policy(mirror_count=1, min_workers=2)
HALF_DONE = PartialStep(5, assigned=(0, 1, 2), computed=(0,))


def commit(protocol: ControllerProtocol, step: int) -> None:
    for at in range(protocol.version + 1, step + 1):
        protocol.applied(Applied(at, protocol.placement.mesh.epoch, 0, 1.0, 1.0, True))


def saves(effects: list[ProtocolAction]) -> list[Save]:
    return [effect for effect in effects if isinstance(effect, Save)]


def begun(effects: list[ProtocolAction]) -> EpochBegun:
    (found,) = [effect for effect in effects if isinstance(effect, EpochBegun)]
    return found


# ---- too few


def test_with_too_few_left_the_newest_version_is_saved_and_nothing_is_computed() -> None:
    protocol = started(3, policy=TWO)
    commit(protocol, 4)
    protocol.lost(0, "killed")
    assert not saves(answer(protocol, 4)), "two are enough"
    effects = protocol.lost(1, "killed")
    assert {p.after for p in prepares(effects).values()} == {AT_ONCE}, "at that moment"
    effects = answer(protocol, 4, HALF_DONE)
    (save,) = saves(effects)
    assert save == Save(4, protocol.placement.mesh.epoch, "1 workers are left, elastic.min_workers is 2")
    place = reconfigures(effects)[2]
    assert place.save and (place.version, place.recovery_plan, place.stages) == (4, (), ((2,),))
    assert {row[3] for row in place.replicas} == {2} and not any(row[5] for row in place.replicas)
    assert begun(effects).kinds == {1: "fail"} and begun(effects).microbatches_redone == 0
    assert not any(isinstance(effect, Unrecoverable) for effect in effects)


def test_the_newest_version_is_that_of_any_member() -> None:
    """Whoever is behind has voted for it, and completes it with the others' votes."""
    protocol = started(3, policy=Policy(min_workers=3))
    protocol.lost(0, "killed")
    protocol.report_received(StepReport(1, 1, 6, ()))
    effects = protocol.report_received(StepReport(1, 2, 5, (PartialStep(6),)))
    assert saves(effects)[0].version == 6 and reconfigures(effects)[1].version == 6


def test_who_is_lost_while_the_others_save_begins_it_again() -> None:
    protocol = started(3, policy=Policy(min_workers=3))
    commit(protocol, 4)
    protocol.lost(0, "killed")
    first = saves(answer(protocol, 4))[0]
    protocol.lost(1, "killed too")
    effects = answer(protocol, 4)
    assert saves(effects) == [Save(4, first.epoch + 1, "1 workers are left, elastic.min_workers is 3")]
    assert reconfigures(effects)[2].save


def test_state_that_nobody_has_cannot_be_saved() -> None:
    protocol = started(policy=Policy(min_workers=3))
    commit(protocol, 4)
    protocol.lost(2, "killed")
    (end,) = answer(protocol, 4)
    assert isinstance(end, Unrecoverable) and end.lost


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    protocol = started(2, policy=TWO)
    protocol.lost(0, "killed")
    (end,) = answer(protocol, 0)
    assert isinstance(end, Unrecoverable) and not end.lost
    assert end.reason == "1 workers are left, elastic.min_workers is 2, and no step is applied yet"


def test_after_the_last_step_nothing_is_left_to_stop_for() -> None:
    protocol = started(2, policy=TWO)
    commit(protocol, STEPS)
    protocol.lost(0, "killed")
    effects = answer(protocol, STEPS)
    assert not saves(effects) and not reconfigures(effects)[1].save
    assert protocol.finished(Finished(1, protocol.placement.mesh.epoch, {}, {})), "the run is done"


def test_a_newcomer_that_is_ready_counts() -> None:
    protocol = started(2, policy=TWO)
    commit(protocol, 4)
    protocol.ready(Ready(2, "at 2"))
    protocol.lost(0, "killed")
    effects = answer(protocol, 4)
    assert not saves(effects) and reconfigures(effects)[2].stages == ((1, 2),)


def test_while_the_state_is_saved_nothing_else_changes() -> None:
    protocol = started(3, policy=Policy(min_workers=3))
    commit(protocol, 4)
    protocol.lost(0, "killed")
    epoch = saves(answer(protocol, 4))[0].epoch
    assert protocol.ready(Ready(3, "at 3")) == [] and protocol.drain(1, "asked to leave") == []
    assert protocol.caught_up(CaughtUp(1, epoch)) == [] and protocol.free_to_leave == ()
    protocol.lost(2, "killed")
    effects = answer(protocol, 4)
    assert saves(effects) and reconfigures(effects).keys() == {1}, "a newcomer has nothing to save"


def test_a_validation_is_left_to_whoever_goes_on() -> None:
    protocol = started(2, policy=TWO, num_validation_microbatches=2, validates_at=lambda step: step == 4)
    commit(protocol, 4)
    protocol.lost(0, "killed")
    assert reconfigures(answer(protocol, 4))[1].validate is None


def test_the_last_worker_that_leaves_saves_the_run_and_stays_for_it() -> None:
    protocol = started(1)
    commit(protocol, 4)
    effects = protocol.drain(0, "asked to leave")
    assert prepares(effects)[0].after == 5, "between two steps"
    effects = answer(protocol, 5)
    assert saves(effects)[0].reason == "worker 0 leaves, 0 stay, elastic.min_workers is 1"
    assert reconfigures(effects)[0].save and Send(0, Stop()) not in effects
    assert not any(isinstance(effect, EpochBegun | RemoveMember) for effect in effects)


def test_all_that_leave_at_once_save_the_run() -> None:
    protocol = started(3)
    commit(protocol, 4)
    for rank in (0, 1, 2):
        protocol.drain(rank, "asked to leave")
    effects = answer(protocol, 5)
    assert saves(effects)[0].reason == "workers 0, 1, 2 leave, 0 stay, elastic.min_workers is 1"
    assert reconfigures(effects).keys() == {0, 1, 2}


# ---- a link


def test_a_link_is_made_again_by_an_epoch_with_the_same_members() -> None:
    protocol = started(3, 1, policy=Policy(mirror_count=0))
    commit(protocol, 4)
    effects = protocol.relink({frozenset((0, 2)): "the link was lost"})
    assert {rank: p.after for rank, p in prepares(effects).items()} == dict.fromkeys((0, 1, 2, 3), AT_ONCE)
    effects = answer(protocol, 4, HALF_DONE)
    place = reconfigures(effects)[0]
    assert (place.epoch, place.stages) == (1, ((0, 1, 2), (3,))) and place.recovery_plan, (
        "what is under way is recovered"
    )
    assert begun(effects).kinds == {0: "link", 2: "link"} and begun(effects).reasons[2] == "the link was lost"
    assert not any(run.learners for run in replicas_of(protocol))
    protocol.relink({frozenset((1, 2)): "another"})
    assert begun(answer(protocol, 4)).kinds == {1: "link", 2: "link"}, "told once"


def test_a_link_that_ends_with_a_worker_is_not_made_again() -> None:
    protocol = started(3, 1)
    protocol.relink({frozenset((0, 1)): "the link was lost"})
    protocol.lost(1, "killed")
    assert begun(answer(protocol)).kinds == {1: "fail"}
    assert protocol.relink({frozenset((0, 1)): "late"}) == [] and not protocol.changing
    assert protocol.relink({frozenset((0, 77)): "no member"}) == []


# ---- whom it waits for


def test_after_a_loss_everybody_owes_an_answer_at_once() -> None:
    protocol = started(3)
    assert protocol.unanswered == (0, ())
    protocol.lost(0, "killed")
    assert protocol.unanswered == (1, (1, 2))
    protocol.report_received(StepReport(1, 1, 0))
    assert protocol.unanswered == (1, (2,))
    protocol.report_received(StepReport(1, 2, 0))
    assert protocol.unanswered[1] == ()


def test_a_planned_change_is_owed_after_its_step_and_its_validation() -> None:
    protocol = started(2, num_validation_microbatches=2, validates_at=lambda step: step == 5)
    commit(protocol, 4)
    protocol.ready(Ready(2, "at 2"))
    assert protocol.unanswered == (1, ())
    commit(protocol, 5)
    assert protocol.unanswered == (1, ()), "the validation is under way"
    protocol.validation(ValidationLoss(5, 0, 0, (0, 1), (1.0, 1.0)))
    assert protocol.unanswered == (1, (0,)), "the other one has not said that it has applied the step"
    protocol.applied(Applied(5, 0, 1, 1.0, 1.0, True))
    assert protocol.unanswered == (1, (0, 1))


def test_a_loss_does_not_wait_for_a_validation() -> None:
    protocol = started(2, num_validation_microbatches=2, validates_at=lambda step: step == 5)
    commit(protocol, 5)
    protocol.lost(0, "killed")
    assert protocol.unanswered == (1, (1,))


@pytest.mark.parametrize(("zero", "free"), [(0, (1, 2)), (1, ())])
def test_who_is_to_leave_and_has_what_nobody_else_has_is_not_free(zero: int, free: tuple[int, ...]) -> None:
    """Replicated state; and sharded state without mirrors."""
    protocol = started(3, zero=zero, policy=Policy(mirror_count=0))
    assert protocol.free_to_leave == ()
    for rank in (1, 2):
        protocol.drain(rank, "asked to leave")
    assert protocol.free_to_leave == free


def test_two_that_have_the_only_copies_together_are_not_both_free() -> None:
    protocol = started(3, zero=1, policy=Policy(mirror_count=1))
    protocol.damaged(Damaged(0, 0, 1, ()))  # a change in which mirrors are made
    answer(protocol, 1)
    for _ in range(2):
        for rank in {rank for run in replicas_of(protocol) for rank in run.learners}:
            protocol.caught_up(CaughtUp(rank, protocol.placement.mesh.epoch))
        if protocol.changing:
            answer(protocol, 2)
    assert all(len(run.replicas) == 2 for run in replicas_of(protocol))
    for rank in (0, 1):
        protocol.drain(rank, "asked to leave")
    assert len(protocol.free_to_leave) == 1


def settle(protocol: ControllerProtocol) -> list[ProtocolAction]:
    """Answers and learners that catch up, until nothing is left to do; all effects."""
    effects: list[ProtocolAction] = []
    for _ in range(20):
        if protocol.changing:
            effects += answer(protocol, 1)
        for rank in sorted({rank for run in replicas_of(protocol) for rank in run.learners}):
            effects += protocol.caught_up(CaughtUp(rank, protocol.placement.mesh.epoch))
        if not protocol.changing:
            return effects
    raise AssertionError("it changes without end")


@pytest.mark.parametrize(("stages", "leavers"), [((3,), (0,)), ((3,), (0, 2)), ((1, 1), (0,)), ((2, 1), (2, 1))])
def test_who_is_to_leave_while_state_is_copied_leaves_once_its_pages_have_mirrors(
    stages: tuple[int, ...], leavers: tuple[int, ...]
) -> None:
    """Without mirrors it is the only replica of its pages in the plan that is under way."""
    protocol = started(*stages, zero=1, policy=Policy(mirror_count=0))
    newcomer = sum(stages)
    protocol.expect(newcomer, None)
    protocol.ready(Ready(newcomer, f"at {newcomer}"))
    answer(protocol, 1)
    assert protocol.learners, "a newcomer learns its share"
    for rank in leavers:
        protocol.drain(rank, "asked to leave")
        answer(protocol, 1)
    assert protocol.leaving == tuple(sorted(leavers)), "they have what nobody else has yet"
    effects = settle(protocol)
    assert protocol.settled and protocol.leaving == () and not set(leavers) & set(protocol.members)
    assert all(RemoveMember(rank, lost=False) in effects for rank in leavers)


def test_the_last_worker_that_is_to_leave_after_the_last_step_changes_nothing_for_ever() -> None:
    protocol = started(1, zero=1, steps=1, policy=Policy(mirror_count=0))
    commit(protocol, 1)
    protocol.drain(0, "asked to leave")
    settle(protocol)
    assert protocol.settled and protocol.leaving == (0,), "nobody can have its pages"


def test_the_rows_of_a_place_that_saves_name_every_page() -> None:
    protocol = started(3, policy=Policy(min_workers=3))
    commit(protocol, 4)
    before = {run.key for run in replicas_of(protocol)}
    protocol.lost(0, "killed")
    place: Reconfigure = reconfigures(answer(protocol, 4))[1]
    assert {run.key for runs in from_rows(place.replicas).values() for run in runs} == before
