"""The controller's half when workers go and come: Prepare to the living, a StepReport from each, Reconfigure to the
members.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elaswave_spmd.recovery.actions import Done, EpochBegun, ProtocolAction, RemoveMember, Send, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy, ProtocolSpec
from elaswave_spmd.recovery.messages import (
    AT_ONCE,
    Applied,
    CaughtUp,
    Damaged,
    Finished,
    PartialStep,
    Ready,
    StepReport,
    Stop,
    ValidationLoss,
)
from elaswave_spmd.recovery.reconfiguration import Goal
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, from_rows
from tests.unit.recovery.controller_cases import (
    LAYOUT,
    STEPS,
    answer,
    placement,
    prepares,
    reconfigures,
    replicas_of,
    started,
)


def commit(protocol: ControllerProtocol, step: int) -> None:
    for at in range(protocol.version + 1, step + 1):
        protocol.applied(Applied(at, protocol.placement.mesh.epoch, 0, 1.0, 1.0, True))


def begun(effects: list) -> EpochBegun:
    (found,) = [effect for effect in effects if isinstance(effect, EpochBegun)]
    return found


# ---- losses


def test_a_loss_is_answered_at_once() -> None:
    protocol = started()
    commit(protocol, 3)
    effects = protocol.lost(1, "killed")
    assert effects[0] == RemoveMember(1, lost=True) and protocol.members == (0, 2)
    assert {rank: (p.epoch, p.after) for rank, p in prepares(effects).items()} == {0: (1, AT_ONCE), 2: (1, AT_ONCE)}
    assert protocol.lost(1, "again") == [], "a worker is lost once"
    assert protocol.lost(77, "unknown") == []


def test_the_place_after_a_loss_says_everything() -> None:
    protocol = started()
    protocol.lost(1, "killed")
    effects = answer(protocol, 3)
    found = reconfigures(effects)
    assert sorted(found) == [0, 2] and found[0] == found[2]
    place = found[0]
    assert (place.epoch, place.stages, place.layer_cuts, place.microbatch_counts) == (
        1,
        ((0,), (2,)),
        (0, 1, 3),
        ((5,), (5,)),
    )
    assert place.addresses == {0: "at 0", 2: "at 2"} and (place.version, place.recovery_plan) == (3, None)
    replicas = from_rows(place.replicas)
    assert {run.primary for run in replicas[0]} == {0} and all(1 not in run.receivers for run in replicas[0])
    event = begun(effects)
    assert event.kinds == {1: "fail"} and event.reasons == {1: "killed"} and event.version == 3
    assert not protocol.changing and protocol.placement.mesh.epoch == 1


def test_the_highest_version_counts_and_what_was_begun_is_planned() -> None:
    protocol = started()
    protocol.lost(1, "killed")
    protocol.report_received(StepReport(1, 0, 3, (PartialStep(4, assigned=(0, 1, 2), computed=(0,)),)))
    effects = protocol.report_received(StepReport(1, 2, 4, (PartialStep(5),)))
    place = reconfigures(effects)[0]
    assert place.version == 4 and place.recovery_plan is not None, (
        "a worker behind has gradients of a step that is decided"
    )
    assert {(w.stage, w.microbatch) for w in place.recovery_plan} == {(s, u) for s in (0, 1) for u in range(5)}, (
        "all of step 5"
    )
    assert {w.worker for w in place.recovery_plan if w.stage == 0} == {0}


def test_microbatches_of_a_lost_worker_are_counted_as_redone_and_those_of_survivors_are_not() -> None:
    protocol = started()
    protocol.lost(1, "killed")
    protocol.report_received(StepReport(1, 0, 3, (PartialStep(4, assigned=(0, 1, 2)),)))
    effects = protocol.report_received(StepReport(1, 2, 3, (PartialStep(4, assigned=(0, 1, 2, 3, 4)),)))
    assert begun(effects).microbatches_redone == 2, "micro-batches 3 and 4 of stage 0"


def test_of_a_step_that_a_survivor_has_not_begun_only_microbatches_of_lost_workers_count_as_redone() -> None:
    protocol = started()
    protocol.lost(1, "killed")
    protocol.report_received(StepReport(1, 0, 3, ()))
    effects = protocol.report_received(StepReport(1, 2, 3, (PartialStep(4, assigned=(0, 1, 2, 3, 4)),)))
    assert begun(effects).microbatches_redone == 2, "micro-batches 3 and 4 of stage 0"


@pytest.mark.parametrize("overtaken", [False, True], ids=["reports from the new stage", "has not entered it"])
def test_saved_forwards_count_for_the_layers_that_their_worker_was_on(overtaken: bool) -> None:
    """A Reconfigure takes a worker to other layers, and is overtaken before the worker has entered its epoch."""
    first = placement(zero=1)
    first = replace(first, replicas=place_replicas(LAYOUT, first.state_sharding(2, 2)))
    protocol = ControllerProtocol(first, ProtocolSpec(LAYOUT, STEPS))
    for rank in first.mesh.members:
        protocol.ready(Ready(rank, f"at {rank}"))
    protocol.lost(2, "killed")
    effects: list[ProtocolAction] = []
    outputs = tuple((1, microbatch) for microbatch in range(5))
    begun_step = PartialStep(4, assigned=(0, 1, 2, 3, 4), forwarded=(3, 4), activations=outputs)
    for rank in (0, 1):
        effects = protocol.report_received(StepReport(1, rank, 3, (begun_step,), layers=(0, 1)))
    assert reconfigures(effects)[1].stages == ((0,), (1,)) and reconfigures(effects)[1].layer_cuts == (0, 1, 3)
    protocol.relink({frozenset({0, 1}): "the link was lost"})
    protocol.report_received(StepReport(protocol.last_epoch, 0, 3, (begun_step,), layers=(0, 1)))
    layers = (0, 1) if overtaken else (1, 3)
    effects = protocol.report_received(StepReport(protocol.last_epoch, 1, 3, (begun_step,), layers=layers))
    plan = reconfigures(effects)[1].recovery_plan
    assert plan is not None
    saved = {(line.stage, line.microbatch) for line in plan if not line.forward and line.backward}
    assert saved == {(0, 3), (0, 4)} | (set() if overtaken else {(1, 3), (1, 4)})


def test_answers_to_another_prepare_and_of_the_lost_are_void() -> None:
    protocol = started()
    assert protocol.report_received(StepReport(0, 0, 0)) == [], "nobody asked"
    protocol.lost(1, "killed")
    assert protocol.report_received(StepReport(0, 0, 0)) == [] and protocol.changing == (0, 2)
    assert protocol.report_received(StepReport(1, 1, 0)) == []
    assert protocol.report_received(StepReport(1, 0, 0)) == [] and protocol.changing == (2,)


def test_a_loss_while_the_mesh_changes_begins_again_with_the_next_number() -> None:
    protocol = started(3, 1)
    protocol.lost(1, "killed")
    protocol.report_received(StepReport(1, 0, 0))
    effects = protocol.lost(2, "killed too")
    assert {rank: p.epoch for rank, p in prepares(effects).items()} == {0: 2, 3: 2}
    assert protocol.changing == (0, 3), "whoever had answered answers again"
    assert protocol.report_received(StepReport(1, 3, 0)) == []
    effects = answer(protocol)
    assert reconfigures(effects)[0].stages == ((0,), (3,)) and begun(effects).kinds == {1: "fail", 2: "fail"}


def test_a_planned_change_does_not_make_a_loss_less_urgent() -> None:
    protocol = started()
    protocol.lost(1, "killed")
    assert {p.after for p in prepares(protocol.ready(Ready(3, "new"))).values()} == {AT_ONCE}
    protocol = started()
    commit(protocol, 3)
    protocol.ready(Ready(3, "new"))
    assert {p.after for p in prepares(protocol.lost(1, "killed")).values()} == {AT_ONCE}


def test_pages_without_a_replica_end_the_run() -> None:
    protocol = started()
    protocol.lost(2, "killed")
    effects = answer(protocol)
    (end,) = effects
    assert isinstance(end, Unrecoverable) and {run.layer for run in end.lost} == {1, 2}
    assert "all replicas" in end.reason and not reconfigures(effects)


def test_the_last_worker_ends_the_run() -> None:
    protocol = started(1)
    effects = protocol.lost(0, "killed")
    assert [e.reason for e in effects if isinstance(e, Unrecoverable)] == ["no worker is left"]


# ---- leaving and coming


def test_a_worker_that_leaves_does_so_between_two_steps() -> None:
    protocol = started()
    commit(protocol, 3)
    effects = protocol.drain(1, "asked to leave")
    assert {rank: p.after for rank, p in prepares(effects).items()} == {0: 4, 1: 4, 2: 4}, "the leaver answers too"
    assert protocol.drain(1, "again") == [] and protocol.drain(9, "no member") == []
    effects = answer(protocol, 4)
    assert sorted(reconfigures(effects)) == [0, 2] and effects[-2:] == [Send(1, Stop()), RemoveMember(1, lost=False)]
    assert begun(effects).kinds == {1: "leave"} and 1 not in protocol.addresses


def test_no_boundary_lies_behind_the_last_step() -> None:
    protocol = started(steps=3)
    commit(protocol, 3)
    assert {p.after for p in prepares(protocol.drain(1, "asked")).values()} == {3}


def test_a_worker_that_dies_while_it_leaves_is_a_loss() -> None:
    protocol = started()
    protocol.drain(1, "asked to leave")
    assert {p.after for p in prepares(protocol.lost(1, "killed")).values()} == {AT_ONCE}
    effects = answer(protocol)
    assert begun(effects).kinds == {1: "fail"} and Send(1, Stop()) not in effects


def test_a_newcomer_gets_its_place_between_two_steps() -> None:
    protocol = started()
    commit(protocol, 3)
    effects = protocol.ready(Ready(3, "at 3"))
    assert {rank: p.after for rank, p in prepares(effects).items()} == {0: 4, 1: 4, 2: 4}, "it has nothing to say yet"
    effects = answer(protocol, 4)
    place = reconfigures(effects)[3]
    assert place.stages == ((0, 1), (2, 3)) and place.addresses[3] == "at 3" and begun(effects).kinds == {3: "join"}
    replicas = from_rows(place.replicas)
    assert all(3 in run.learners and 3 not in run.replicas for run in (*replicas[1], *replicas[2])), (
        "it has no state yet"
    )
    assert begun(effects).num_copies == len(replicas[1]) + len(replicas[2])


def test_a_newcomer_that_dies_before_it_has_its_place_changes_nothing() -> None:
    protocol = started()
    protocol.ready(Ready(3, "at 3"))
    assert protocol.lost(3, "killed") == [RemoveMember(3, lost=True)]
    assert reconfigures(answer(protocol))[0].stages == ((0, 1), (2,))


def test_who_comes_or_leaves_before_the_mesh_is_decided_takes_part_and_nobody_is_asked_again() -> None:
    """500 newcomers of a large mesh become ready one after the other: each would stop the run once more."""
    protocol = started(3, 1)
    for rank in (4, 5, 6, 7):
        protocol.expect(rank, None)
    assert {p.epoch for p in prepares(protocol.ready(Ready(4, "at 4"))).values()} == {1}
    assert protocol.ready(Ready(5, "at 5")) == []
    protocol.report_received(StepReport(1, 1, 1))
    assert protocol.drain(1, "asked to leave") == [], "also whoever has answered"
    assert protocol.ready(Ready(6, "at 6")) == [] and protocol.ready(Ready(7, "at 7")) == []
    assert protocol.lost(7, "killed") == [RemoveMember(7, lost=True)]
    effects = answer(protocol, 1)
    assert protocol.placement.mesh.epoch == 1 and sorted(protocol.placement.mesh.members) == [0, 2, 3, 4, 5, 6]
    assert begun(effects).kinds == {1: "leave", 4: "join", 5: "join", 6: "join"} and Send(1, Stop()) in effects


def test_so_they_do_where_the_change_is_made_at_once_as_somebody_is_lost() -> None:
    protocol = started(3, 1)
    protocol.expect(4, None)
    protocol.lost(2, "killed")
    assert protocol.ready(Ready(4, "at 4")) == [] and protocol.drain(1, "asked to leave") == []
    assert begun(answer(protocol, 1)).kinds == {1: "leave", 2: "fail", 4: "join"}


def test_a_newcomer_that_was_started_after_the_prepare_begins_the_change_anew() -> None:
    """The journal has the next free rank with each Prepare: no member may have one that it does not have."""
    protocol = started()
    for rank in (3, 4):
        protocol.expect(rank, None)
        assert {p.epoch for p in prepares(protocol.ready(Ready(rank, f"at {rank}"))).values()} == {rank - 2}
    assert sorted(reconfigures(answer(protocol, 1))[0].addresses) == [0, 1, 2, 3, 4]


def test_a_newcomer_is_in_the_failure_domain_that_the_launcher_knows() -> None:
    protocol = started()
    protocol.expect(3, ("host 3",))
    protocol.ready(Ready(3, "at 3"))
    answer(protocol)
    assert protocol.placement.mesh.topology.path(3) == ("host 3",)


def test_learners_are_promoted_when_all_have_caught_up() -> None:
    protocol = started()
    protocol.ready(Ready(3, "at 3"))
    protocol.ready(Ready(4, "at 4"))
    answer(protocol, 1)
    assert {rank for run in replicas_of(protocol) for rank in run.learners} == {3, 4}
    epoch = protocol.placement.mesh.epoch
    assert protocol.caught_up(CaughtUp(3, epoch)) == []
    assert protocol.caught_up(CaughtUp(4, epoch - 1)) == [], "of an older epoch"
    effects = protocol.caught_up(CaughtUp(4, epoch))
    assert {p.after for p in prepares(effects).values()} == {protocol.version + 1}, "a planned change"
    effects = answer(protocol, 2)
    assert not any(run.learners for run in replicas_of(protocol)) and not begun(effects).kinds
    assert {3, 4} <= {rank for run in replicas_of(protocol) for rank in run.replicas}
    assert {3, 4} <= {run.primary for run in replicas_of(protocol)}, "and is the primary of its share"


def test_learners_are_looked_for_once_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of 10,000 workers may be learners, of ten times as many page ranges."""
    protocol = started()
    for rank in (3, 4, 5):
        protocol.ready(Ready(rank, f"at {rank}"))
    answer(protocol, 1)
    epoch, learners = protocol.placement.mesh.epoch, sorted(protocol.learners)
    assert len(learners) >= 3
    looks: list[ReplicaMap] = []
    of_now = protocol._replicas
    monkeypatch.setattr(protocol, "_replicas", lambda: looks.append(found := of_now()) or found)
    effects = [protocol.caught_up(CaughtUp(rank, epoch)) for rank in learners]
    assert [bool(prepares(some)) for some in effects] == [False] * (len(learners) - 1) + [True] and len(looks) == 1


def test_what_is_learned_while_the_mesh_changes_counts_in_the_next_epoch() -> None:
    protocol = started()
    protocol.ready(Ready(3, "at 3"))
    answer(protocol, 1)
    protocol.lost(1, "killed")
    assert protocol.caught_up(CaughtUp(3, protocol.placement.mesh.epoch)) == []


def test_a_learner_is_no_replica() -> None:
    """It is the only one of its stage that is left, but has no state."""
    protocol = started()
    protocol.ready(Ready(3, "at 3"))
    answer(protocol, 1)
    assert 3 in protocol.placement.mesh.stages[1]
    protocol.lost(2, "killed")
    (end,) = answer(protocol, 1)
    assert isinstance(end, Unrecoverable)


def test_mirrors_are_made_again_after_a_loss() -> None:
    protocol = started(4, zero=1, policy=Policy(mirror_count=1))
    assert all(len(run.replicas) == 1 for run in replicas_of(protocol)), "dealt without the assembly's mirrors"
    protocol.ready(Ready(4, "at 4"))
    answer(protocol, 1)
    for _ in range(2):  # learned, then promoted
        for rank in {rank for run in replicas_of(protocol) for rank in run.learners}:
            protocol.caught_up(CaughtUp(rank, protocol.placement.mesh.epoch))
        answer(protocol, 2)
    assert all(len(run.replicas) == 2 and not run.learners for run in replicas_of(protocol))
    effects = protocol.lost(0, "killed")
    assert prepares(effects) and not any(isinstance(e, Unrecoverable) for e in answer(protocol, 2))
    assert all(run.replicas | run.learners for run in replicas_of(protocol))
    assert all(len(run.replicas | run.learners) == 2 for run in replicas_of(protocol))


# ---- validation and the end


@pytest.mark.parametrize(("reported", "again"), [((0,), 2), ((0, 1), None)])
def test_a_validation_that_was_not_complete_is_run_again(reported: tuple[int, ...], again: int | None) -> None:
    protocol = started(num_validation_microbatches=2, validates_at=lambda step: step % 2 == 0)
    commit(protocol, 2)
    protocol.validation(ValidationLoss(2, 0, 2, reported, (1.0,) * len(reported)))
    protocol.lost(1, "killed")
    assert reconfigures(answer(protocol, 2))[0].validate == again


def test_a_run_that_lost_a_worker_after_its_last_step_is_finished_by_the_others() -> None:
    protocol = started()
    commit(protocol, STEPS)
    for rank in (0, 2):
        protocol.finished(Finished(rank, 0, {}, {}))
    protocol.lost(1, "killed")
    answer(protocol, STEPS)
    assert protocol.finished(Finished(2, 0, {}, {})) == [], "of an older epoch: not all final pages are there"
    assert protocol.finished(Finished(2, 1, {}, {})) == []
    assert protocol.finished(Finished(0, 1, {}, {})) == [Done()]


def test_the_layout_of_these_cases_has_state_in_every_layer() -> None:
    assert all(layer.num_state_pages for layer in LAYOUT.layers)


# ---- moves


def test_a_move_is_made_once_its_learners_have_the_state() -> None:
    protocol = started(zero=1)
    commit(protocol, 3)
    goal = Goal(((0, 1), (2,)), (0, 2, 3), protocol.placement.microbatch_counts, "a test")
    assert {p.after for p in prepares(protocol.rebalance(goal)).values()} == {4}
    effects = answer(protocol, 4)
    assert all(place.layer_cuts == (0, 1, 3) for place in reconfigures(effects).values()), "training goes on as it was"
    learners = {rank for run in replicas_of(protocol) for rank in run.learners}
    assert learners and not prepares(effects)
    for rank in learners:
        commit(protocol, 4)
        effects = protocol.caught_up(CaughtUp(rank, protocol.placement.mesh.epoch))
    assert {p.after for p in prepares(effects).values()} == {5}, "the next step was begun"
    assert all(place.layer_cuts == (0, 2, 3) for place in reconfigures(answer(protocol, 5)).values())


def test_a_loss_is_answered_at_once_while_a_move_waits_for_its_learners() -> None:
    protocol = started(zero=1)
    protocol.rebalance(Goal(((0, 1), (2,)), (0, 2, 3), protocol.placement.microbatch_counts))
    answer(protocol, 1)
    assert {p.after for p in prepares(protocol.lost(1, "killed")).values()} == {AT_ONCE}


# ---- devices that failed and came back


@pytest.mark.parametrize("runs", [(), "all"])
def test_a_worker_that_lost_what_it_had_is_named_in_the_next_place_alone(runs: object) -> None:
    protocol = started(3)
    commit(protocol, 3)
    own = tuple(run.key for run in replicas_of(protocol) if run.primary == 1)
    effects = protocol.damaged(Damaged(1, 0, 4, own if runs == "all" else (), "UCE ERROR"))
    assert {p.after for p in prepares(effects).values()} == {AT_ONCE} and len(prepares(effects)) == 3
    found = reconfigures(answer(protocol, 3))
    assert {place.resend_to for place in found.values()} == {(1,)}
    if runs == "all":
        assert not any(1 in run.replicas for run in replicas_of(protocol) if run.key in own)
    protocol.lost(2, "killed")
    assert {place.resend_to for place in reconfigures(answer(protocol, 3)).values()} == {()}


def test_who_forgot_and_is_lost_before_the_place_is_not_named() -> None:
    protocol = started(3)
    protocol.damaged(Damaged(1, 0, 1, (), "FORCE STOP"))
    protocol.lost(1, "killed")
    assert {place.resend_to for place in reconfigures(answer(protocol)).values()} == {()}


def test_who_gave_up_damaged_state_is_named_as_well() -> None:
    """It may have learned that state, and be to learn it again from a worker that has sent it."""
    protocol = started(3)
    protocol.damaged(Damaged(1, 0, 1, ()))
    assert {place.resend_to for place in reconfigures(answer(protocol)).values()} == {(1,)}
