"""The elastic step, case by case. Read it beside docs/protocol.md: the tests follow its sections and rules in order.

Each test runs a tiny model for a few steps in the simulated cluster: the code of real workers and of the real
controller, in one process, with messages that arrive in an order drawn from a seed. It says what happens to the run,
what the workers then send to each other, and how the mesh changes. Whatever happens, `training(...).run(...)` compares
the losses, gradient norms, validation losses and weights of the run with those of an undisturbed run on one worker, bit
for bit, so that no test has to.

Words, in brief. Parameters, gradients and optimizer state are cut into pages. Each page has a *primary*, which updates
it, and *mirrors*, which hold the same state and apply the same updates; all of them are its replicas. A *learner* is to
become a replica: it gets the updates and does not have the state yet. A *mesh epoch* is a period in which the members,
and what they hold and compute, stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.controller_protocol import Policy
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import all_replica_sets
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import SENDER, AnyFault, Fault, MessageFault, ThenFault
from tests.cluster.grouped import GroupedCluster
from tests.cluster.processes import LostStateError
from tests.cluster.schedules import Outcome, Schedule, undisturbed
from tests.cluster.tiny import TRAIN, VALIDATION, TinyRun

Kind = TypeVar("Kind", bound=m.Message)
ORDERS = range(3)
"""Each case is run with so many orders of messages."""


# ---- the language of the cases


class RecordingCluster(SimulatedCluster):
    """A simulated cluster that keeps every message that a worker has sent, in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[Sent] = []
        super().__init__(*args, **kwargs)

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        self.sent.append(Sent(sender, peer, message))
        super().send(sender, peer, message, payload)


class RecordingGroupedCluster(RecordingCluster, GroupedCluster):
    """The same, where each stage has a process group."""


@dataclass(frozen=True)
class Sent:
    """One message of a worker."""

    sender: int
    receiver: int
    message: m.Message


@dataclass(frozen=True)
class Ended:
    """A run that has ended, with the undisturbed bits.

    Args:
        before: the placement of the first mesh epoch.
        changes: the later mesh epochs, in order.
        sent: all messages that workers sent, in order.
        restarts: the steps of the checkpoints from which the run began again.
    """

    before: Placement
    changes: list[EpochBegun]
    sent: list[Sent]
    restarts: list[int]

    def messages(self, kind: type[Kind]) -> list[Kind]:
        """All messages of one kind, in the order in which they were sent."""
        return [sent.message for sent in self.sent if isinstance(sent.message, kind)]

    def waits_for_the_step(self, change: EpochBegun) -> bool:
        """True if nothing was computed again for a planned change, or its Prepare came too late for that: some member
        had begun the step after the one that it names, and answered in the middle of it."""
        reports = [report for report in self.messages(m.StepReport) if report.epoch == change.placement.mesh.epoch]
        assert {report.version for report in reports} <= {change.version - 1, change.version}
        return change.microbatches_redone == 0 or any(report.partial_steps for report in reports)

    def first(self, kind: type[m.Message], step: int) -> int:
        """When the first message of a kind about a step was sent: an index of `sent`."""
        return self._times(kind, step)[0]

    def last(self, kind: type[m.Message], step: int) -> int:
        """When the last one was."""
        return self._times(kind, step)[-1]

    def _times(self, kind: type[m.Message], step: int) -> list[int]:
        messages = enumerate(sent.message for sent in self.sent)
        return [time for time, message in messages if isinstance(message, kind) and message.step == step]  # pyright: ignore


@dataclass(frozen=True)
class Training:
    """A run that is described: its mesh, how state is sharded, its events. Methods return it with one more event."""

    mesh: str
    zero: int
    mirrors: int
    steps: int
    events: tuple[AnyFault, ...] = ()

    def worker(self, rank: int, is_: str, *, step: int, at: str, turns: int = 400) -> Training:
        """A worker is killed, stopped, ... at a point of a step (tests.cluster.faults.Fault)."""
        return self._with(Fault(step, is_, rank, at, turns=turns))

    def whoever_sends(self, message: str, is_: str, *, number: int, after: bool) -> Training:
        """The sender of the `number`-th message of a kind is killed, ... before or after it is on its way."""
        return self._with(MessageFault(is_, message, SENDER, after, number))

    def then(self, event: str, *, to: str = "any", settled: bool = False, turns_later: int = 20) -> Training:
        """Something happens after the events before; `settled`: when every page has all its replicas again."""
        return self._with(ThenFault(event, to, turns_later, settled))

    def _with(self, event: AnyFault) -> Training:
        return replace(self, events=(*self.events, event))

    def run(
        self,
        order: int,
        *,
        min_workers: int = 1,
        verify_every: int = 0,
        checkpoint_every: int = 0,
        overflows: bool = False,
        cluster: type = RecordingCluster,
    ) -> Ended:
        """Runs it, with messages in this order.

        Raises:
            AssertionError: other bits than those of an undisturbed run on one worker, or not all events happened.
            LostStateError: the run had to stop.
        """
        run = TinyRun(steps=self.steps, microbatches=5, overflows=overflows)  # 5 micro-batches: uneven on every mesh
        schedule = Schedule(order, run, self.mesh, self.zero, self.mirrors, faults=self.events)
        simulated = cluster(
            replace(run.job(), verify_every=verify_every),
            schedule.placement,
            run.description,
            run.make_model,
            TRAIN,
            VALIDATION,
            seed=order,
            faults=self.events,
            policy=Policy(mirror_count=self.mirrors, min_workers=min_workers),
            checkpoint_every=checkpoint_every,
        )
        trained = simulated.run()
        assert Outcome.of(trained) == undisturbed(run)
        assert simulated.plan.num_injected == len(self.events)
        return Ended(schedule.placement, trained.epochs, simulated.sent, trained.restarts)


def training(mesh: str, *, zero: int = 1, mirrors: int = 1, steps: int = 4) -> Training:
    """A run on a mesh such as "dp3" or "dp2_pp2", in which nothing happens yet. Of 4 steps it validates 2 and 4."""
    return Training(mesh, zero, mirrors, steps)


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> int:
    """The order of messages."""
    return request.param


# ---- the step


def test_an_undisturbed_step(order: int) -> None:
    """Gradients are summed, every member votes, and with all votes every member updates and reports."""
    run = training("dp3").run(order)
    assert run.changes == []
    # In this order: parts of the canonical sum go to the primaries, reduced gradients to the mirrors, votes to all.
    assert run.first(m.PartialSum, 2) < run.first(m.ReducedGradient, 2) < run.first(m.Vote, 2) < run.first(m.Applied, 2)
    assert len(run.messages(m.Vote)) == 4 * 3 * 2, "in each of 4 steps, from each of 3 workers to the 2 others"
    assert len(run.messages(m.Applied)) == 4 * 3, "each worker reports each step to the controller"


def test_a_step_through_two_stages(order: int) -> None:
    """Micro-batches go forward and backward through the pipeline. Stages of one worker have no gradient to sum."""
    run = training("pp2").run(order)
    assert {(sent.sender, sent.receiver) for sent in run.sent if isinstance(sent.message, m.Activation)} == {(0, 1)}
    back = [sent for sent in run.sent if isinstance(sent.message, m.ActivationGradient)]
    assert {(sent.sender, sent.receiver) for sent in back} == {(1, 0)} and len(back) == 4 * 5
    assert not run.messages(m.PartialSum)
    assert run.messages(m.ReducedGradient), "the other stage mirrors the pages, and needs their updates"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_zero_level_has_the_same_bits(zero: int, order: int) -> None:
    """How state is sharded decides what is sent, and never what is computed."""
    run = training("dp3", zero=zero).run(order)
    publishes = zero > 0  # who updates a page sends the parameters to those who compute with them and hold no replica
    assert bool(run.messages(m.Publish)) == publishes


def test_s1_s2_nobody_updates_before_everybody_has_voted(order: int) -> None:
    """A vote says: I have done my part of the step, and hold all reduced gradients that my pages need."""
    run = training("dp3").run(order)
    for step in range(1, 5):
        members_voted = {
            sent.sender for sent in run.sent[: run.first(m.Applied, step)] if is_vote_for(sent.message, step)
        }
        assert members_voted == {0, 1, 2}


def is_vote_for(message: m.Message, step: int) -> bool:
    return isinstance(message, m.Vote) and message.step == step


def test_s3_to_s5_parameters_follow_the_decision(order: int) -> None:
    """Parameters of a version are sent only after that step is decided, and no micro-batch computes with older ones.

    That nobody did is shown by the bits: the simulated links read a payload as late as a real link may, so that memory
    that is overwritten too early, or a micro-batch that runs too early, changes a loss.
    """
    run = training("dp3", zero=3).run(order)
    for step in range(1, 4):
        voted = {sent.sender for sent in run.sent[: run.first(m.Publish, step)] if is_vote_for(sent.message, step)}
        assert voted == {0, 1, 2}


def test_s6_a_step_without_a_finite_gradient_is_skipped(order: int) -> None:
    """The step counts and changes no state, and all workers see it alike: also one that is killed in its course."""
    run = training("dp3", steps=8).worker(1, "kill", step=2, at="norm").run(order, overflows=True)
    skipped = {report.step for report in run.messages(m.Applied) if not report.updated}
    assert 0 < len(skipped) < 8
    assert all(report.updated == (report.step not in skipped) for report in run.messages(m.Applied))


def test_s7_validation_holds_the_next_step_back(order: int) -> None:
    """Nobody begins step 3 before the controller has all validation losses at version 2: later, the parameters of
    version 2 would be gone, and a loss that died with its worker could not be computed again."""
    run = training("dp3").run(order)
    assert run.last(m.ValidationLoss, 2) < run.first(m.PartialSum, 3)


def test_a_stage_may_publish_through_a_process_group(order: int) -> None:
    """Votes say whether their senders have the group. With the mark on all votes no parameter is sent by links."""
    run = training("dp3").run(order, cluster=RecordingGroupedCluster)
    by_links = training("dp3").run(order)
    assert len(run.messages(m.Publish)) < len(by_links.messages(m.Publish))


# ---- a change of the mesh epoch: the death of a worker


def test_killed_before_its_vote(order: int) -> None:
    """The step is not decided: the others do the lost worker's micro-batches, and then commit the same step."""
    run = training("dp3").worker(1, "kill", step=2, at="backward").run(order)
    loss = run.changes[0]
    assert (loss.kinds, loss.version) == ({1: "fail"}, 1), "the newest version of any member is that of step 1"
    assert loss.microbatches_redone == run.before.microbatch_counts[0][1]
    assert [report.epoch for report in run.messages(m.StepReport)][:2] == [1, 1], "each survivor reported what it has"


def test_killed_after_its_vote(order: int) -> None:
    """All votes for step 2 were sent, so that some survivor may have updated. Then nobody may do otherwise.

    There is no message for "roll forward": in the new epoch all votes are sent again, and whoever is behind completes
    the step by the normal rule.
    """
    run = training("dp3").whoever_sends("Vote", "kill", number=12, after=True).run(order)  # 6 votes a step
    loss = run.changes[0]
    assert loss.version in (1, 2)
    again = [vote for vote in run.messages(m.Vote) if vote.epoch == 1]
    assert min(vote.step for vote in again) <= loss.version + 1
    reports = [report.rank for report in run.messages(m.Applied) if report.step == 2]
    assert len(reports) == len({*reports}), "nobody applies a step twice"


@pytest.mark.parametrize("point", ["apply", "publish"])
def test_killed_while_it_updates(point: str, order: int) -> None:
    """What it had updated, and nobody else had heard of, is updated by its mirrors from the same reduced gradients."""
    run = training("dp3", zero=3).worker(1, "kill", step=2, at=point).run(order)
    assert run.changes[0].kinds == {1: "fail"}
    assert run.messages(m.Need), "parameters that it would have sent are asked for"


def test_c4_a_mirror_of_a_lost_primary_is_promoted(order: int) -> None:
    """The new primary held the page all along: nothing is moved before the step goes on."""
    run = training("dp3").worker(1, "kill", step=2, at="norm").run(order)
    before, after = replicas_by_page(run.before), replicas_by_page(run.changes[0].placement)
    lost = {page for page, held in before.items() if held.primary == 1}
    assert lost
    for page in lost:
        assert after[page].primary in before[page].mirrors


def replicas_by_page(placement: Placement) -> dict[tuple[int, int], Any]:
    """(layer, page) -> its replicas."""
    assert placement.replicas is not None
    held = all_replica_sets(placement.replicas)
    return {(pages.layer, page): pages for pages in held for page in range(pages.first, pages.stop)}


def test_c5_the_only_worker_of_a_stage_is_lost(order: int) -> None:
    """A worker of the nearest stage that has two takes its layers; the state comes from mirrors in other stages."""
    run = training("stages1-3").worker(0, "kill", step=2, at="forward").run(order)
    assert [len(stage) for stage in run.changes[0].placement.mesh.stages] == [1, 2]


def test_c5_no_stage_has_a_worker_to_spare(order: int) -> None:
    """The layers go to the neighbouring stages, and there is one stage less."""
    run = training("pp3").worker(1, "kill", step=2, at="forward").run(order)
    assert run.changes[0].placement.mesh.stages == ((0,), (2,))
    assert run.changes[0].placement.layer_cuts[-1] == run.before.layer_cuts[-1], "every layer is in a stage"


@pytest.mark.parametrize("zero", [1, 2])
def test_c6_only_what_is_missing_is_computed_again(zero: int, order: int) -> None:
    """All micro-batches of step 2 are computed, and some of the sums have reached their primaries, when a worker dies.

    Survivors that keep their sums (ZeRO-0 and 1) send them again to the new primaries; sharded gradients (ZeRO-2 and 3)
    keep no sum that was sent, so that the micro-batches of survivors may be computed again too.
    """
    run = training("dp3", zero=zero).whoever_sends("Vote", "kill", number=7, after=False).run(order)  # 6 votes a step
    loss = run.changes[0]
    (lost,) = loss.kinds
    its_own, all_of_them = run.before.microbatch_counts[0][lost], 5
    assert loss.version == 1 and loss.microbatches_redone <= (its_own if zero == 1 else all_of_them)


def test_c9_learners_catch_up_while_training_goes_on(order: int) -> None:
    """After a loss each page lacks a replica. Learners get the state from primaries; one more epoch makes them mirrors.

    No vote waits for state: learners get the updates of each step as mirrors do.
    """
    run = training("dp3", steps=6).worker(1, "kill", step=2, at="norm").run(order)
    loss, caught_up = run.changes
    assert loss.num_copies > 0 and run.messages(m.PageState) and run.messages(m.CaughtUp)
    assert (caught_up.kinds, caught_up.num_copies) == ({}, 0)
    held = replicas_by_page(caught_up.placement).values()
    assert all(len(pages.replicas) == 2 and not pages.learners for pages in held)
    assert caught_up.version > loss.version, "steps were committed meanwhile"


def test_c10_too_few_workers_are_left(order: int) -> None:
    """Below elastic.min_workers the run saves its newest version and stops; resuming from it loses nothing."""
    run = training("dp3").worker(1, "kill", step=2, at="backward")
    with pytest.raises(LostStateError, match="2 workers are left"):
        run.run(order, min_workers=3)


@pytest.mark.parametrize("message", ["PartialSum", "ReducedGradient", "Vote"])
def test_c11_a_link_is_lost_and_both_ends_live(message: str, order: int) -> None:
    """Nobody knows what has arrived. The link is made again by a change of the mesh in which nobody is lost, and what
    the receiver may lack is sent again; receivers ignore what they have already."""
    run = training("dp3").whoever_sends(message, "unlink", number=3, after=False).run(order)
    (change,) = run.changes
    assert set(change.kinds.values()) == {"link"} and len(change.kinds) == 2
    assert (change.placement.mesh.num_workers, change.num_copies) == (3, 0)
    (closed,) = run.messages(m.LinkClosed)
    assert {closed.rank, closed.peer} == change.kinds.keys()


@pytest.mark.parametrize("at", ["forward", "backward", "reduce"])
def test_c12_a_device_fails_and_is_reset(at: str, order: int) -> None:
    """The worker has lost its part of the step, but not its state. It reports that, answers the Prepare without its own
    work, and the others send it everything again: the same step goes on with the same members."""
    run = training("dp3").worker(1, "device", step=2, at=at).run(order)
    (change,) = run.changes
    (damaged,) = run.messages(m.Damaged)
    assert (damaged.rank, damaged.step, damaged.page_ranges) == (1, 2, ()) and damaged.reason
    assert (change.kinds, change.placement.mesh.num_workers, change.num_copies) == ({}, 3, 0)
    (answer,) = [report for report in run.messages(m.StepReport) if (report.rank, report.epoch) == (1, 1)]
    # It may report what the others have sent it since then, and nothing that it has computed.
    assert not any(it.assigned or it.computed or it.layer_sums for it in answer.partial_steps)


# ---- more than one loss


def test_two_losses_at_once_that_the_mirrors_cover(order: int) -> None:
    """With two mirrors for each page, any two workers may be lost at the same moment."""
    run = training("dp4", mirrors=2).worker(0, "kill", step=2, at="backward").worker(1, "kill", step=2, at="backward")
    assert sorted(rank for change in run.run(order).changes for rank in change.kinds) == [0, 1]


def test_two_losses_at_once_beyond_the_mirrors(order: int) -> None:
    """Both replicas of some page are gone: only a checkpoint has its state, and the run says so."""
    run = training("dp3").worker(1, "kill", step=2, at="backward").worker(2, "kill", step=2, at="backward")
    with pytest.raises(LostStateError, match="Unrecoverable"):
        run.run(order)


def test_all_replicas_of_a_page_are_lost_before_the_first_step(order: int) -> None:
    """Nothing is lost that cannot be made again: the run begins anew with the worker that is left."""
    run = training("dp3").worker(1, "kill", step=1, at="backward").worker(2, "kill", step=1, at="backward")
    ended = run.run(order)
    assert ended.restarts == [0]
    assert {report.rank for report in ended.messages(m.Applied) if report.step == 2} == {0}


def test_all_replicas_of_a_page_are_lost_and_a_checkpoint_has_it(order: int) -> None:
    """The run begins again with the workers that are left, at the newest checkpoint: here that of step 4. The steps
    after it are computed again, with the bits that they had."""
    run = training("dp4", steps=8).worker(1, "kill", step=6, at="backward").worker(2, "kill", step=6, at="backward")
    ended = run.worker(3, "kill", step=6, at="backward").run(order, checkpoint_every=2)
    assert ended.restarts == [4]
    assert len({report.rank for report in ended.messages(m.Applied) if report.step == 8}) < 4


def test_one_loss_after_the_other_down_to_one_worker(order: int) -> None:
    """One mirror is enough if it is made again each time. `settled`: every page has its replicas again."""
    run = training("dp3", steps=12).then("kill", settled=True).then("kill", settled=True).run(order)
    assert run.changes[-1].placement.mesh.num_workers == 1
    assert [len(change.kinds) for change in run.changes if change.kinds] == [1, 1]


def test_a_mirror_is_lost_while_it_is_promoted(order: int) -> None:
    """An event before the new configuration is sent begins the change again, with the next epoch number."""
    run = training("dp4", mirrors=2, steps=6).worker(0, "kill", step=2, at="norm").then("kill", to="mirror")
    ended = run.run(order)
    lost = {rank for change in ended.changes for rank, kind in change.kinds.items() if kind == "fail"}
    assert 0 in lost and len(lost) == 2


# ---- a worker that is not dead


def test_a_stopped_worker_that_comes_back(order: int) -> None:
    """Silence counts as a loss. When the worker wakes up it belongs to no epoch: its votes count nowhere, and its
    reduced gradients and sums are the same bits that the others have computed meanwhile."""
    run = training("dp3").worker(1, "stop", step=2, at="backward", turns=60).run(order)
    assert run.changes[0].kinds == {1: "fail"} and "no heartbeat for" in run.changes[0].reasons[1]
    assert all(1 not in change.placement.mesh.members for change in run.changes)


def test_a_living_worker_is_taken_for_lost(order: int) -> None:
    """Its heartbeats do not arrive, and nor does the signal that should end it. It goes on in an epoch that is over:
    alone, it can decide nothing."""
    run = training("dp3").worker(1, "silent", step=2, at="backward", turns=1).run(order)
    assert run.changes[0].kinds == {1: "fail"} and "no heartbeat for" in run.changes[0].reasons[1]
    assert all(1 not in change.placement.mesh.members for change in run.changes)


def test_the_controller_stands_still(order: int) -> None:
    """Steps are decided by votes among workers: without the controller they go on until they need it."""
    pause = Fault(1, "pause", 0, "forward", turns=200)
    run = Training("dp3", 1, 1, 4, (pause,)).worker(1, "kill", step=2, at="backward").run(order)
    assert run.changes[0].kinds == {1: "fail"}


# ---- planned changes: between two steps, so that nothing is computed again (unless the Prepare comes too late)


def test_a_worker_joins(order: int) -> None:
    """The newcomer gets micro-batches at once, and pages as soon as it has their state."""
    run = training("dp2", steps=8).then("join").run(order)
    joined, *_, caught_up = run.changes
    assert joined.kinds == {2: "join"} and run.waits_for_the_step(joined)
    assert joined.placement.microbatch_counts[0][2] > 0
    assert any(pages.primary == 2 for pages in replicas_by_page(caught_up.placement).values())


def test_a_worker_leaves(order: int) -> None:
    """It ends the step that it is in, answers, and goes when every page has another replica."""
    run = training("dp3", steps=6).worker(1, "term", step=2, at="forward").run(order)
    left = run.changes[0]
    assert left.kinds == {1: "leave"} and run.waits_for_the_step(left)
    assert left.version >= 2, "the step in which it was asked is complete"


def test_a_lost_worker_is_replaced(order: int) -> None:
    """A loss and a join: the mesh is as large as before."""
    run = training("dp3", steps=10).worker(1, "replace", step=2, at="backward").run(order)
    assert {kind for change in run.changes for kind in change.kinds.values()} == {"fail", "join"}
    assert run.changes[-1].placement.mesh.num_workers == 3


def test_layers_and_micro_batches_move(order: int) -> None:
    """State is copied while training goes on: whoever gets a layer learns it first, and computes it in the next epoch.

    The goal is drawn: other stages, other cuts between layers, other numbers of micro-batches for the workers.
    """
    run = training("dp2_pp2", steps=10).then("rebalance", settled=True).then("rebalance", settled=True).run(order)
    assert all(change.kinds == {} and run.waits_for_the_step(change) for change in run.changes)
    placements = {
        (p.mesh.stages, p.layer_cuts, p.microbatch_counts) for p in (change.placement for change in run.changes)
    }
    assert len(placements) > 1


# ---- what is wrong with a link or with memory


def test_damage_is_found_before_it_is_used(order: int) -> None:
    """A bit of a worker's optimizer state flips. With `verify_every` it compares its state with the hash of what it
    had written, gives the page up, and learns it again from another replica."""
    run = training("dp3", steps=6).worker(1, "corrupt", step=3, at="backward").run(order, verify_every=1)
    (damaged,) = run.messages(m.Damaged)
    assert (damaged.rank, damaged.step, len(damaged.page_ranges)) == (1, 3, 1)
    repaired = [sent for sent in run.sent if isinstance(sent.message, m.PageState)]
    assert repaired and all(sent.receiver == 1 for sent in repaired)


def test_every_report_of_a_step_is_compared(order: int) -> None:
    """The controller compares what workers report of a step bit for bit; a difference would end the run."""
    run = training("dp3").run(order)
    for step in range(1, 5):
        reports = {(r.loss.hex(), r.grad_norm.hex()) for r in run.messages(m.Applied) if r.step == step}
        assert len(reports) == 1
    assert all(sent.receiver == CONTROLLER for sent in run.sent if isinstance(sent.message, m.Applied))
