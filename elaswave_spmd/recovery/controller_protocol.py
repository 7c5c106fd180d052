"""The controller's half of the step protocol: it decides membership, never the outcome of a step (protocol.md, S2).

`ControllerProtocol` is a state machine without I/O and without a clock: facts and messages go in, actions come out. The
controller's loop carries the actions out (controller/loop.py); the simulated cluster and the benchmarks drive the same
class.

There is one way to change the mesh epoch, whatever the event: Prepare goes to the living members, each answers with a
StepReport, and Reconfigure goes to the members of the new epoch. An event before the Reconfigure begins this again,
with the next epoch number, unless it is a join or a leave that can still take part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery import reconfiguration
from elaswave_spmd.recovery.actions import (
    Broadcast,
    Committed,
    Done,
    EpochBegun,
    ProtocolAction,
    RemoveMember,
    Save,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.recovery.checks import CheckDraw, begins_anew
from elaswave_spmd.recovery.early_stop import EarlyStop
from elaswave_spmd.recovery.messages import (
    AT_ONCE,
    Applied,
    CaughtUp,
    Damaged,
    Finished,
    Limits,
    PartialStep,
    Prepare,
    Ready,
    Recompute,
    Reconfigure,
    StepReport,
    Stop,
    Validated,
    ValidationLoss,
)
from elaswave_spmd.recovery.partial_step import recovery_plan, whole_step
from elaswave_spmd.recovery.peers import Peers, Ran, Recovery, peers_of
from elaswave_spmd.recovery.reconfiguration import Goal, Stages, assign_evenly, next_stages
from elaswave_spmd.recovery.sum_checks import drawn_ranges
from elaswave_spmd.recovery.validation import Scores, scores_of, validation_done
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet, dispensable, joined
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard


@dataclass(frozen=True)
class Policy:
    """The settings of how a run reacts to losses.

    Args:
        mirror_count: the number of mirrors of each page, besides its primary.
        mirror_scatter: the number of workers over which the mirrors of one worker's pages are spread; 0 lets
            `sharding.replica_placement` choose.
        min_workers: if fewer workers are left, the state is saved and the run stops.
        compares_at: True for the versions at which replicas are compared; the same function as the workers'
            (Job.compares_at). What a worker publishes at such a version is not trusted if the worker is lost before
            the comparison is complete (H4).
        early_stop: the rule that may end the run before its last step; None if there is none.
        reads_masters: True if workers compute with their fp32 master parameters, or send them, directly from the memory
            of the state, without a copy (Job.reads_masters). Damage to that memory then affects what they compute.
    """

    mirror_count: int = 1
    mirror_scatter: int = 0
    min_workers: int = 1
    compares_at: Callable[[int], bool] = lambda _: False
    early_stop: EarlyStop | None = None
    reads_masters: bool = False


@dataclass(frozen=True)
class ProtocolSpec:
    """The facts about a run that its controller's protocol works with. None of them changes.

    Args:
        layout: the pages of each layer.
        steps: the number of the run's last step.
        num_validation_microbatches: the number of micro-batches of a validation.
        validates_at: True for the steps after which the state is validated; the same function as the workers'
            (Job.validates_at).
        mean_loss: the mean loss of a complete validation, which early stopping compares. It must be a pure function.
        version: the version at which this controller begins: for a run that goes on from a checkpoint its step, else 0.
        began_at: the version at which the workers began; None if that is `version`. A controller that came back to
            running workers does not know it, and gives 0.
        widest: up to this number of members, each has a link to every other; None: on meshes of any size.
        tells_hosts: True if Reconfigure tells workers which members share a host (`runtime.collectives=group`).
    """

    layout: ModelLayout
    steps: int
    num_validation_microbatches: int = 0
    validates_at: Callable[[int], bool] = lambda _: False
    mean_loss: Callable[[ValidationDone], float] = lambda done: done.total
    version: int = 0
    began_at: int | None = None
    widest: int | None = None
    tells_hosts: bool = False

    def __post_init__(self) -> None:
        assert self.steps >= 1 and self.num_validation_microbatches >= 0, self
        assert self.version >= 0 and (self.began_at is None or 0 <= self.began_at <= self.version), self
        assert self.widest is None or self.widest >= 2, self


class MicrobatchAssigner(Protocol):
    """Decides how many micro-batches each worker gets when members have come or gone."""

    def assign(
        self, old: Placement, stages: Stages, num_microbatches: int, *, split: SplitBackward | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """The number of micro-batches of each worker of `stages`, by stage.

        Args:
            old: the placement until now.
            stages: the ranks of each stage of the new mesh.
            num_microbatches: the number of micro-batches of a global batch.
            split: the layers whose backward may run in two parts, the gradient of the input first and the weight
                gradients later; None if there are none.
        """
        ...

    def limited(self, placement: Placement, split: SplitBackward) -> Assignment:
        """The assignment of a placement with the limits of its workers: how many micro-batches a worker may have in
        flight, and of how many it may put off the weight gradients (`scheduling.split_backward`)."""
        ...


class EvenAssigner:
    """The assignment for workers that are all equally fast."""

    def assign(
        self, old: Placement, stages: Stages, num_microbatches: int, *, split: SplitBackward | None = None
    ) -> tuple[tuple[int, ...], ...]:
        return assign_evenly(stages, num_microbatches)

    def limited(self, placement: Placement, split: SplitBackward) -> Assignment:
        return executed(Assignment.of(placement), split)


@dataclass
class _Change:
    """A change of the mesh epoch that is under way: Prepare was sent, and StepReports are coming in.

    Args:
        epoch: the number of the epoch that is prepared.
        after: as in Prepare.
        num_ranks: when it began, the ranks below this one had been given to workers; 0 if its Prepare is that of a
            controller before this one.
        reports: rank -> its StepReport.
        late: learners whose CaughtUp arrived after their StepReport. CaughtUp does not say of which version the state
            is, so these learners cannot count as replicas if the state of just this version is needed.
    """

    epoch: int
    after: int
    num_ranks: int = 0
    reports: dict[int, StepReport] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)


@dataclass
class _Pending:
    """Events that have happened to members since the last Reconfigure, and take effect in the next one.

    A member is *lost* (it failed, and is dropped at once) or *leaves* (it asked to, or was asked to, and stays until
    each of its pages has another replica). Both are removed from the mesh.

    Args:
        lost: rank -> reason.
        leaving: rank -> reason.
        newcomers: workers that are ready and not members yet, in the order in which they became ready.
        caught_up: learners that have reported that they have all of their state.
        damaged: rank -> page ranges of which this member's replica is wrong or was given up.
        resend_to: members to which the others send again whatever they had sent before. These are members that have
            given up state; members that have lost everything about undecided steps, as their device failed and was
            reset; or, after a standstill, all members.
        relinked: the two ends of a link that broke and is opened again -> reason.
        results_differ: two workers have computed different results in the step under way.
        repairs: a replica was found to be wrong: replicas differ, or the memory of one has changed by itself. Its
            worker is in `lost` or `damaged`, and whatever other members got from that replica is given up.
    """

    lost: dict[int, str] = field(default_factory=dict)
    leaving: dict[int, str] = field(default_factory=dict)
    newcomers: list[int] = field(default_factory=list)
    caught_up: set[int] = field(default_factory=set)
    damaged: dict[int, set[PageRange]] = field(default_factory=dict)
    resend_to: set[int] = field(default_factory=set)
    relinked: dict[frozenset[int], str] = field(default_factory=dict)
    results_differ: bool = False
    repairs: bool = False

    def after(self, leavers: Collection[int]) -> _Pending:
        """The events left for a later epoch: requests to leave of members that still have the only replica of a page.

        Args:
            leavers: the members that leave in this epoch.
        """
        return _Pending(leaving={rank: why for rank, why in self.leaving.items() if rank not in leavers})


@dataclass(frozen=True)
class _Standing:
    """How far the old epoch's members have come with the step under way, by their StepReports.

    Args:
        version: the highest version of any member. A member that is one step behind has voted for that step, and
            completes it with the votes of the new epoch.
        partial_steps: rank -> what the member has of step version + 1; None if nothing. What a member that is behind
            has of step `version` does not matter here: that step is decided.
        all_at_version: True if all members are at `version`.
        is_between_steps: True if all members are at `version` and have nothing of the next step.
        attempts: the attempts in which the members compute; more than one if some missed an epoch.
        layers: rank -> layers [first, stop) of the member's stage, for the members whose report says so.
        ahead: rank -> trained page ranges of which this learner has the state of `version` + 1 already, sent by a
            primary that had applied that step and is lost.
    """

    version: int
    partial_steps: Mapping[int, PartialStep | None]
    all_at_version: bool
    is_between_steps: bool
    attempts: frozenset[int] = frozenset()
    layers: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    ahead: Mapping[int, tuple[PageRange, ...]] = field(default_factory=dict)

    @classmethod
    def from_reports(cls, reports: Mapping[int, StepReport]) -> _Standing:
        version = max(report.version for report in reports.values())
        parts = {rank: reconfiguration.partial_step_of(report, version + 1) for rank, report in reports.items()}
        all_at = all(report.version == version for report in reports.values())
        attempts = frozenset(report.attempt for report in reports.values())
        layers = {rank: (report.layers[0], report.layers[1]) for rank, report in reports.items() if report.layers}
        ahead = reconfiguration.ahead_of_all(reports)
        return cls(version, parts, all_at, all_at and not any(parts.values()), attempts, layers, ahead)


@dataclass(frozen=True)
class _Membership:
    """The workers that leave or join with the new epoch, and the state that is left.

    Args:
        replicas: the replica map of the old epoch, in which learners that have caught up are replicas, and damaged
            replicas are left out.
        without_replica: page ranges that have no good replica left.
        leaving: rank -> reason, of members that leave now.
        newcomers: workers that become members now.
        removed: rank -> reason, of members that are lost or leave now.
        is_unchanged: True if the members are those of the old epoch, and none of them has given up state.
    """

    replicas: ReplicaMap
    without_replica: tuple[ReplicaSet, ...]
    leaving: Mapping[int, str]
    newcomers: Sequence[int]
    removed: Mapping[int, str]
    is_unchanged: bool


@dataclass(frozen=True)
class _Outlook:
    """What becomes of the run and of the step under way.

    Args:
        stops: why the run stops at the members' version, in words; empty if it goes on.
        is_begun: True if the step under way may have been begun by anybody.
        is_in_doubt: True if members may have parameters or state that came from a wrong replica.
        anew: True if what was computed of the step under way is given up, and the step begins anew.
    """

    stops: str
    is_begun: bool
    is_in_doubt: bool
    anew: bool


@dataclass(frozen=True)
class Predecessor:
    """What a controller that came back knows of the one before it, from the journal and the living workers.

    Args:
        placement: the placement of the newest mesh epoch, as its Reconfigure has it.
        reconfigure: the Reconfigure of the newest mesh epoch.
        versions: rank -> version, of the members that live.
        lacking: members that live and have not received `reconfigure`.
        caught_up: members that live and have the state of all pages that they learn in that mesh epoch.
        prepared: the last Prepare in the journal; None if the mesh has never been about to change.
        last_epoch: the highest epoch number that may have been used; new epochs get higher ones.
        validated: the newest step whose validation is complete.
        ended_at: the step after which the run ends early; None if no validation so far ends it.
    """

    placement: Placement
    reconfigure: Reconfigure
    versions: Mapping[int, int]
    lacking: tuple[int, ...] = ()
    caught_up: tuple[int, ...] = ()
    prepared: Prepare | None = None
    last_epoch: int = 0
    validated: int = 0
    ended_at: int | None = None


class ControllerProtocol:
    """The controller's half of the step protocol over one run.

    Every method is called by the controller's thread. The methods under "events" and "reports" take what has happened,
    and return the actions that the caller must carry out, in order.

    Args:
        placement: the placement of the first epoch.
        spec: the facts about the run.
        policy: how the run reacts to losses; None for the defaults.
        assigner: decides how many micro-batches each worker gets after a change of members; None for `EvenAssigner`.
        checks: decides which micro-batches are checked by a second worker; None if none are.
        split: the layers whose backward may run in two parts; None if there are none, or if workers are still to find
            out (`layers_tried`).
        validations: step -> mean loss, of validations from before this controller: those of the run that it resumes,
            and those of the controller that it replaces.
    """

    def __init__(
        self,
        placement: Placement,
        spec: ProtocolSpec,
        policy: Policy | None = None,
        assigner: MicrobatchAssigner | None = None,
        checks: CheckDraw | None = None,
        split: SplitBackward | None = None,
        validations: Mapping[int, float] | None = None,
    ) -> None:
        self._spec, version = spec, spec.version
        self.began_at = version if spec.began_at is None else spec.began_at
        """The version at which the workers began: they have computed no step up to it."""
        self.placement = placement
        self.layout = spec.layout
        self.steps = spec.steps
        """The last step of the run: the planned one, or the one after which a validation has ended the run early."""
        self._ends_early = False
        self._entered_at = version  # the highest version of any member when the present epoch began
        self.version = version
        self.addresses: dict[int, str] = {}
        """Rank -> address, of every worker that is ready and not lost: members and newcomers."""
        self.split = split
        """The layers whose backward may run in two parts; None if there are none, or if no worker has tried it yet."""
        self.running = Assignment.of(placement)
        """The placement with the limits that workers were sent last."""
        self._policy = policy or Policy()
        self._assigner = assigner or EvenAssigner()
        self._checks = checks or CheckDraw(0)
        self.widest = spec.widest
        """Up to this number of members, each has a link to every other; None: on meshes of any size."""
        self.peers: Peers | None = None
        """The members that each member has links to in the present epoch; None if it has links to all others."""
        # Peers of the next epoch follow from who may keep tensors of the step under way, or of the one before. So these
        # two record who has run what of it: in epochs that are over; and in the present one, as (step, its recovery
        # plan).
        self._ran: tuple[Ran, ...] = ()
        self._planned: tuple[int, tuple[Recompute, ...]] = (0, ())
        self._missed: set[frozenset[int]] = set()  # pairs of members that had no link when one of them wanted it
        self._attempt = 0  # the attempt of the steps to come: the number of the mesh epoch that began it, or 0
        self.agreed = version
        """The newest version at which all replicas were found to be equal; at first, the version at the begin: replicas
        are read from a checkpoint. A controller that came back has no comparisons (Settings.held_by_controller)."""
        self._repair = 0  # the newest attempt that began because a replica was wrong, or may have been; 0: none did
        self._started = False
        self._starters = set(placement.mesh.members)  # workers that the first mesh waits for
        self._lost_at_start: dict[int, str] = {}  # rank -> reason
        # The newest epoch number of which a Prepare was sent. Its epoch may never be entered, if another event comes
        # before the Reconfigure.
        self._last_epoch = placement.mesh.epoch
        self._wanted_stages = placement.num_stages
        self._change: _Change | None = None
        self._pending = _Pending()
        self._behind: set[int] | None = None  # learners that have not caught up; None: not worked out in this epoch
        self._domains: dict[int, Path | None] = {}  # of newcomers
        self._num_ranks = 1 + max(placement.mesh.members)  # ranks below it have been given to workers
        self._saving = ""  # why the run is about to stop
        self._stop_wanted = ""  # why somebody wants it to stop
        self._stops_last = False  # also after the last step, whose validation cannot be completed
        # State that moves. The plan stays until all of its copies are there; the goal, until then or until members come
        # or go.
        self._reshard: ReshardPlan | None = None
        self._goal: Goal | None = None
        # What workers have reported of steps.
        self._first_reports: dict[int, tuple[int, _Results]] = {}  # step -> the first worker that has reported it
        self._applied: dict[int, int] = {}  # rank -> the step that it has applied last
        # Of the validation under way, in the present epoch: what was reported, and by whom.
        self._validation: dict[int, dict[int, Scores]] = {}  # step -> micro-batch -> loss and metrics
        self._have_validated: set[int] = set()
        self._losses = dict(validations or {})  # step -> mean loss, of all validations so far
        self._validated = 0  # the newest step whose validation is complete
        self._validated_in = 0  # the mesh epoch in which that validation was completed
        self._finished: dict[int, int] = {}  # rank -> the epoch in which this worker sent its final pages

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the present epoch (before the first: the planned ones) that are not known to be lost."""
        lost = self._pending.lost if self._started else self._lost_at_start
        return tuple(rank for rank in self.placement.mesh.members if rank not in lost)

    @property
    def started(self) -> bool:
        """True once the workers of the first mesh have been sent their first Reconfigure."""
        return self._started

    @property
    def not_ready(self) -> tuple[int, ...]:
        """Workers that the first mesh still waits for."""
        return () if self._started else tuple(sorted(self._starters - self.addresses.keys()))

    @property
    def stops(self) -> bool:
        """True once the run is about to stop with its state saved: no worker joins any more."""
        return bool(self._saving or self._stop_wanted)

    @property
    def is_saving(self) -> bool:
        """True once the workers have been sent the Reconfigure by which they write their state and end."""
        return bool(self._saving)

    @property
    def last_epoch(self) -> int:
        """The newest mesh epoch for which a Prepare was sent; before the first change, the epoch of the first mesh."""
        return self._last_epoch

    @property
    def leaving(self) -> tuple[int, ...]:
        """Members that leave at the next boundary between steps at which all of their pages have another replica."""
        return tuple(sorted(self._pending.leaving))

    @property
    def joining(self) -> tuple[int, ...]:
        """Newcomers that are ready, and become members with the next change of the mesh."""
        return tuple(self._pending.newcomers)

    @property
    def learners(self) -> frozenset[int]:
        """Members that are being sent state: their copies of some pages are not complete."""
        return self._reshard.learners if self._reshard is not None else frozenset()

    @property
    def changing(self) -> tuple[int, ...]:
        """Members that have not yet answered the Prepare of the change under way."""
        if self._change is None:
            return ()
        return tuple(rank for rank in self.members if rank not in self._change.reports)

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """The epoch of the last Prepare, and the members that could have answered it by now but have not.

        The failure detector takes the silence of these members for a loss. A member can answer the Prepare of a planned
        change only once it has applied the step `after`, and not while a validation of the newest step is incomplete.
        Until then its silence proves nothing, and it is not listed.
        """
        change = self._change
        if change is None or (change.after != AT_ONCE and self.is_validating):
            return self._last_epoch, ()
        return self._last_epoch, tuple(r for r in self.changing if self._applied.get(r, 0) >= change.after)

    @property
    def is_validating(self) -> bool:
        """True while a validation of the newest step is not complete: nobody begins the next step (S7)."""
        return self.version > 0 and self._spec.validates_at(self.version) and self._validated < self.version

    @property
    def free_to_leave(self) -> tuple[int, ...]:
        """Members that are to leave, and whose pages all have another replica.

        Empty once the run is about to stop: then every member is needed to write its part of the checkpoint.
        """
        if not self._pending.leaving or self._saving or self._stop_wanted:
            return ()
        return dispensable(self._replicas(), self._pending.lost, sorted(self._pending.leaving))

    @property
    def settled(self) -> bool:
        """True if no change of the epoch is under way, and no state has to be copied: each page has all its mirrors."""
        return self._change is None and self._reshard is None

    # ---- events

    def expect(self, rank: int, domain: Path | None) -> None:
        """A newcomer was started in this failure domain; None if the run has only one."""
        self._domains[rank] = domain
        self._num_ranks = max(self._num_ranks, 1 + rank)

    def ready(self, message: Ready) -> list[ProtocolAction]:
        """A worker is ready.

        Before the first epoch: when all workers of the first mesh are ready, they are sent a Reconfigure. Later: the
        worker is a newcomer, and joins at the next boundary between steps.
        """
        self.addresses[message.rank] = message.address
        if not self._started:
            self._starters.add(message.rank)  # a worker that the first mesh did not wait for may still join it
            return self._start_if_complete()
        self._pending.newcomers.append(message.rank)
        return self._take_part(message.rank)

    def lost(
        self, rank: int, reason: str, *, spare: Ready | None = None, replacement: int | None = None
    ) -> list[ProtocolAction]:
        """A worker is lost for good. The mesh changes at once: other members may be waiting for it in this very step.

        The loss of a newcomer only takes it off the list. The loss of a worker that is unknown, or was reported lost
        already, changes nothing.

        Args:
            rank: the worker that is lost.
            reason: what happened to it, in words.
            spare: a worker that is ready, and becomes a member in the same change.
            replacement: before the first epoch: a worker that is being started in place of the lost one. The first mesh
                waits for it. Later a replacement is a newcomer like any other, and its Ready begins a change.
        """
        self.addresses.pop(rank, None)
        if not self._started:
            return self._lost_at_the_start(rank, reason, replacement)
        if spare is not None:
            self.addresses[spare.rank] = spare.address
            self._pending.newcomers.append(spare.rank)
        if rank not in self.placement.mesh or rank in self._pending.lost:
            removed = [RemoveMember(rank, lost=True)] if rank in self._pending.newcomers else []
            self._pending.newcomers = [newcomer for newcomer in self._pending.newcomers if newcomer != rank]
            return [*removed, *(self._take_part(spare.rank) if spare is not None else [])]
        self._pending.lost[rank] = reason
        self._pending.leaving.pop(rank, None)
        return [RemoveMember(rank, lost=True), *self._begin(after=AT_ONCE)]

    # ---- the first mesh

    def _lost_at_the_start(self, rank: int, reason: str, replacement: int | None) -> list[ProtocolAction]:
        """A worker is lost before the first epoch. No state is lost, as every worker can make the initial state."""
        if rank not in self._starters:
            return []
        self._starters.remove(rank)
        self._lost_at_start[rank] = reason
        if replacement is not None:
            self._starters.add(replacement)
        return [RemoveMember(rank, lost=True), *self._start_if_complete()]

    def _start_if_complete(self) -> list[ProtocolAction]:
        """Begin the first epoch if all workers that it waits for are ready. End the run if too few of them are left."""
        starters = self._starters
        if len(starters) < (least := max(1, self._policy.min_workers)):
            who = "; ".join(f"worker {rank}: {reason}" for rank, reason in sorted(self._lost_at_start.items()))
            left = reconfiguration.why_too_few(len(starters), [], least)
            return [Unrecoverable((), f"{left}, as {len(self._lost_at_start)} were lost while workers started ({who})")]
        if not starters <= self.addresses.keys():
            return []
        self._started = True
        as_planned = starters == set(self.placement.mesh.members)
        if not as_planned:
            self.placement = reconfiguration.first_placement(
                self.placement,
                self.layout,
                starters,
                self._domains.get,
                partial(self._assigner.assign, self.placement, split=self.split),
                (self._policy.mirror_count, self._policy.mirror_scatter),
            )
        message = self._reconfigure_message(self.version, None, as_planned=as_planned)
        return [Broadcast(self.placement.mesh.members, message, self._peers_after(None))]

    # ---- a controller that came back

    def come_back(self, before: Predecessor) -> list[ProtocolAction]:
        """Take over the position of the controller that died. Called once all steps that workers applied are reported.

        A Reconfigure that it had sent to some members only is sent to the rest, so that all living members have been
        sent the same Reconfigures.
        """
        newest = before.reconfigure
        self._started = True
        self.placement = before.placement
        self._num_ranks = max(self._num_ranks, 1 + max(before.placement.mesh.members))
        self._wanted_stages = reconfiguration.wanted_stages(before.placement.mesh.stages, self._wanted_stages)
        self.running = Assignment.of(before.placement)
        self.addresses = {rank: newest.addresses[rank] for rank in before.versions}
        self._last_epoch = max(before.last_epoch, newest.epoch)
        self._entered_at = newest.version
        self._attempt, self._repair = newest.attempt, newest.repair
        self._saving = "the run was about to stop when its controller died" if newest.save else ""
        self._applied.update(before.versions)
        # They count as replicas in the next change, whose Prepare they answer with this state.
        self._pending.caught_up.update(before.caught_up)
        self._validated, self._validated_in = before.validated, newest.epoch
        if (ended_at := newest.version if newest.is_last else before.ended_at) is not None:
            self.steps, self._ends_early = ended_at, True
        if before.prepared is not None and before.prepared.epoch > newest.epoch:
            # A change was under way. Members may have answered its Prepare, and then wait for a Reconfigure. `_begin`
            # makes the next change at least as urgent as the one noted here.
            self._change = _Change(before.prepared.epoch, before.prepared.after)
        again = [Broadcast(before.lacking, newest)] if before.lacking else []
        # Members that wait at a validated version may not have received the Validated message.
        is_validated = self.version > 0 and self._spec.validates_at(self.version) and not self.is_validating
        return [*again, *([self._validated_message(self.version)] if is_validated else [])]

    def attempt_again(self) -> list[ProtocolAction]:
        """Begin another attempt of the step under way, two results of which differ.

        Called after a controller came back: what the one before had found out about the two results is lost with it.
        """
        if self._pending.results_differ:
            return []
        self._pending.results_differ = True
        return self._begin(after=AT_ONCE)

    def begin_generation(self, before: Predecessor) -> list[ProtocolAction]:
        """Begin the first mesh epoch of a controller that came back, unless a loss or a leave has begun one already.

        The change comes after the step under way, so that nothing is computed again. It comes at once if members may
        wait for something that only the controller before knew: during a validation, and when the run is about to stop.
        Then a planned change that a leave has begun is made urgent, as its Prepare could never be answered.
        """
        at_once = self.is_validating or bool(self._saving)
        has_begun = self._last_epoch > max(before.last_epoch, before.reconfigure.epoch)
        if has_begun and not (at_once and self._change is not None and self._change.after != AT_ONCE):
            return []
        return self._begin(AT_ONCE if at_once else self._next_boundary())

    # ---- events, from the first epoch on

    def drain(self, rank: int, reason: str) -> list[ProtocolAction]:
        """A member is asked to leave: at the next boundary between two steps, so that nothing is computed again."""
        if rank not in self.members or rank in self._pending.leaving or not self._started:
            return []
        self._pending.leaving[rank] = reason
        return self._take_part(rank)

    def stop(self, reason: str, *, at_once: bool = False) -> list[ProtocolAction]:
        """Stop the run after the step under way and save its state, as if too few workers were left (C10).

        During a validation the run stops after the step that is validated. After the last step nothing is stopped, as
        all that remains is to collect the weights. If a worker is lost before the stop, the run stops at once, at the
        version that it has then.

        Args:
            reason: why, in words.
            at_once: do not wait for the step or validation under way, as it cannot be completed. If the validation
                after the last step cannot be completed, the run has no result, so it is stopped even then.
        """
        assert self._started, "before the first step there is nothing to save"
        stops_last = at_once and self.is_validating
        is_done = self.version == self.steps and not stops_last
        if self._saving or is_done or (self._stop_wanted and not at_once):
            return []
        self._stop_wanted = self._stop_wanted or reason
        self._stops_last |= stops_last
        if at_once:
            return self._begin(after=AT_ONCE)
        return self._begin(after=self.version if self.is_validating else self._next_boundary())

    def holds_alone(self, rank: int) -> bool:
        """True if this member is the only replica of some page: its loss would be a loss of state."""
        return rank not in dispensable(self._replicas(), self._pending.lost, [rank])

    def relink(self, links: Mapping[frozenset[int], str]) -> list[ProtocolAction]:
        """Links between living members broke, and messages that were on their way may be lost.

        Both ends open the link again when they enter the next epoch, and send each other what may be missing. So this
        is handled as a loss in which no worker is lost (C11).

        Args:
            links: the two ends of each -> why it is opened again. One of which an end is no member is ignored.
        """
        members = set(self.members)
        broken = {ends: reason for ends, reason in links.items() if ends <= members}
        if not self._started or not broken:
            return []
        self._pending.relinked |= broken
        return self._begin(after=AT_ONCE)

    def send_again(self) -> list[ProtocolAction]:
        """All members wait for messages and none comes, though no worker is lost and no link is broken.

        Any message between two of them may be the one that is missing. So all members are listed in `resend_to`, to be
        sent everything again, and this is handled as a loss in which no worker is lost.
        """
        self._pending.resend_to.update(self.members)
        return self._begin(after=AT_ONCE)

    def missed(self, ends: frozenset[int]) -> None:
        """A member had a message for another member that it has no link to. From the next epoch on they have a link."""
        self._missed.add(ends)

    def caught_up(self, message: CaughtUp) -> list[ProtocolAction]:
        """A learner has all of its state. When all have, they become replicas by a planned change."""
        if not self._started or message.epoch != self.placement.mesh.epoch:
            return []
        self._pending.caught_up.add(message.rank)
        if self._change is not None:
            if message.rank in self._change.reports:
                self._change.late.add(message.rank)
            return []  # the change under way makes replicas of those that have caught up by then
        if self._behind is None:  # once: all of a large mesh may be learners, of very many page ranges
            learners = {rank for sets in self._replicas().values() for pages in sets for rank in pages.learners}
            self._behind = learners - self._pending.caught_up
        self._behind.discard(message.rank)
        return [] if self._behind else self._begin(after=self._next_boundary())

    def rebalance(self, goal: Goal) -> list[ProtocolAction]:
        """Move micro-batches, layers or workers to where `goal` has them, while training goes on.

        If only micro-batches move, they do at the next boundary between steps. If layers or workers change their stage,
        their state is copied first, and the placement changes once all copies are complete. The call is ignored while
        anything else changes: the rescheduler asks again by itself.
        """
        assert sorted(r for members in goal.stages for r in members) == sorted(self.placement.mesh.members), goal
        pending = self._pending
        if not self._started or not self.settled or pending.leaving or pending.newcomers or pending.lost:
            return []
        self._goal = goal
        return self._begin(after=self._next_boundary())

    def note_difference(self) -> None:
        """Two workers have computed different results: the next mesh epoch begins another attempt of the step."""
        self._pending.results_differ = True

    def accept_results(self) -> None:
        """Withdraw `note_difference`: the step goes on with what was computed, right or not.

        That is so with `verify.action=report`.
        """
        self._pending.results_differ = False

    def repair(self, wrong: Mapping[int, Collection[PageRange]]) -> list[ProtocolAction]:
        """Replicas were compared and differ. The workers of the wrong ones become learners of these pages.

        Whatever came from a wrong replica at this version is given up with the step under way: the new epoch begins
        another attempt of the step, with parameters published by the other replicas.

        Args:
            wrong: rank -> page ranges of which its replica is wrong. If empty, no change begins here: the caller evicts
                the wrong workers by `lost`.
        """
        self._pending.repairs = True
        for rank, ranges in wrong.items():
            self._pending.damaged.setdefault(rank, set()).update(ranges)
        return self._begin(after=AT_ONCE) if wrong else []

    def damaged(self, message: Damaged) -> list[ProtocolAction]:
        """A member has given up its state of some pages: other replicas take over, and it learns the pages anew.

        If the reason is that its memory did not contain what it had written, then whatever it has computed from that
        state and sent is given up as well (H5). If its device failed instead (`message.reason`), it is not.
        """
        if not self._started or message.rank not in self.members:
            return []
        self._pending.repairs |= bool(message.page_ranges) and not message.reason
        self._pending.damaged.setdefault(message.rank, set()).update(message.page_ranges)
        self._pending.resend_to.add(message.rank)
        return self._begin(after=AT_ONCE)

    def report_received(self, message: StepReport) -> list[ProtocolAction]:
        """Count an answer to Prepare. Answers for other epochs are void (a mutant in tests/simulated breaks this rule).

        A report for an older epoch is out of date: its sender has gone on since, and may have applied a step.
        """
        if self._change is None or message.epoch != self._change.epoch or not self._is_living_member(message.rank):
            return []
        self._change.reports[message.rank] = message
        # Comparing numbers is enough: only living members are in `reports`, and each loss begins with empty `reports`.
        num_living = self.placement.mesh.num_workers - len(self._pending.lost)
        return [] if len(self._change.reports) < num_living else self._finish_change()

    def _is_living_member(self, rank: int) -> bool:
        return rank in self.placement.mesh and rank not in self._pending.lost

    def _next_boundary(self) -> int:
        """The step after which a planned change is made: the step under way, or the last step of the run."""
        return min(self.version + 1, self.steps)

    def _begin(self, after: int) -> list[ProtocolAction]:
        """Begin a change of the mesh: send Prepare with the next epoch number.

        If a change is under way, the new one replaces it: the old one's epoch is never entered, and its reports are
        void. The new change is at least as urgent as the old one. Otherwise a planned change could make the recovery
        from a loss wait for a step that cannot be applied without this recovery.

        Args:
            after: as in Prepare: a step, or AT_ONCE, which is less than any step and so the more urgent.
        """
        if self._saving and after != AT_ONCE:
            return []  # the run is about to stop: only a loss changes anything
        if self._change is not None:
            after = min(after, self._change.after)
        self._last_epoch += 1
        self._change = _Change(self._last_epoch, after, self._num_ranks)
        if not (members := self.members):
            return [Unrecoverable((), "no worker is left")]
        return [Broadcast(members, Prepare(self._last_epoch, after))]

    def _take_part(self, rank: int) -> list[ProtocolAction]:
        """A newcomer or a leaver takes part in the change under way; if there is none, a planned one begins.

        The change under way needs no other Prepare. Its answers say what members have, which does not depend on who
        comes or leaves, and this is decided when all of them are here. If a hundred newcomers each began it anew, no
        step would be made until the last of them is ready. A newcomer that was started after the Prepare begins it anew
        all the same: no member may have a rank that is not in the journal yet (A7).
        """
        if self._change is not None and rank < self._change.num_ranks:
            return []
        return self._begin(after=self._next_boundary())

    # ---- the new epoch

    def _replicas(self) -> ReplicaMap:
        return self.placement.replica_map(self.layout)

    def _finish_change(self) -> list[ProtocolAction]:
        """All living members have answered: decide the new epoch, and send each of its members a Reconfigure.

        In this order:

        1. Does the run stop at this version, and does the step under way begin anew? Both need the state of `version`
           itself, so learners that are ahead of it give theirs up.
        2. Who is a member, and is all state still there? If not: Unrecoverable.
        3. Where everything runs; the numbers of attempt and repair; whether a goal still holds.
        4. Which state is copied, and what of the step is computed again (nothing if the run stops).
        5. The epoch is entered, which drops the pending events: counts for the log come before.
        """
        assert self._change is not None
        epoch, standing = self._change.epoch, _Standing.from_reports(self._change.reports)
        # 1. Those of whose state the version is not known (`late`) do not become replicas then; nor do they if the
        # replicas of the version are compared once more (H1).
        outlook = self._outlook(standing)
        stops, anew = outlook.stops, outlook.anew
        ahead = standing.ahead if stops or anew else {}
        if stops or anew or self._policy.compares_at(standing.version):
            self._pending.caught_up -= self._change.late
        # 2. The plan of promotions alone moves no state. It shows whether every page has a replica left.
        membership = self._next_membership(standing.version, ahead, joins=not stops)
        promoted = plan_reshard(self.layout, membership.replicas, lost=membership.removed)
        if (end := self._unrecoverable(standing, outlook, (*membership.without_replica, *promoted.lost))) is not None:
            return [end]
        # 3. The goal was planned for the members of before.
        placement = self._next_placement(epoch, membership)
        self._attempt = epoch if anew else self._attempt
        self._repair = epoch if outlook.is_in_doubt else self._repair
        if stops or not membership.is_unchanged:
            self._goal = None
        why = self._goal.why if self._goal else ""
        # 4. A goal whose copies are all there is reached here.
        if stops:
            placement, plan, recovery = replace(placement, replicas=promoted.during), promoted, ()
        else:
            placement, plan = self._with_state(placement, membership, standing, promoted)
            of_all = standing.all_at_version
            recovery = whole_step(placement, of_all) if anew else self._recovery_plan(placement, standing)
        # 5. The log is told of the events that are dropped here.
        begun = self._begun(placement, standing, outlook, membership, plan, recovery, why)
        reconfigure = self._enter(placement, standing.version, recovery, membership.leaving, stops, anew=anew)
        if stops:
            return [reconfigure, *([begun] if begun.kinds else []), Save(standing.version, epoch, stops)]
        return [reconfigure, begun, *self._release(membership.leaving), *self._hand_over_primaries(plan)]

    def _outlook(self, standing: _Standing) -> _Outlook:
        """Decide whether the run stops, and whether the step under way begins anew."""
        # If members are lost, the step counts as begun even if no living member has anything of it: messages that a
        # lost member had sent may still arrive.
        is_begun = not standing.is_between_steps or bool(self._pending.lost)
        is_in_doubt = self._is_in_doubt(standing.version)
        anew = is_in_doubt or self._begins_anew(standing, is_begun)
        return _Outlook(self._why_stop(standing.version), is_begun, is_in_doubt, anew)

    def _unrecoverable(
        self, standing: _Standing, outlook: _Outlook, lost: tuple[ReplicaSet, ...]
    ) -> Unrecoverable | None:
        """Why the run cannot go on, or be saved, with the state that is left; None if it can.

        Args:
            lost: the page ranges without a replica of the state that is needed.
        """
        needs_version = outlook.stops or outlook.anew
        if needs_version and standing.ahead and (after := self._ahead_everywhere(standing.version)):
            what = "nothing can be saved" if outlook.stops else "it cannot begin anew"
            what = f"all workers that had applied step {standing.version + 1} are lost, and {what}: of {len(after)}"
            return Unrecoverable(after, f"{what} page ranges nothing but the state after it is left")
        if lost:
            return Unrecoverable(lost, f"all replicas of {len(lost)} page ranges are lost")
        if outlook.stops and not standing.version:
            return Unrecoverable((), f"{outlook.stops}, and no step is applied yet")
        return None

    def _begun(
        self,
        placement: Placement,
        standing: _Standing,
        outlook: _Outlook,
        membership: _Membership,
        plan: ReshardPlan,
        recovery: tuple[Recompute, ...] | None,
        why: str,
    ) -> EpochBegun:
        """What the log is told of the new epoch. The present epoch is still the old one, with its pending events."""
        kinds, reasons = reconfiguration.membership_changes(
            self._pending.lost, membership.leaving, membership.newcomers, self._pending.relinked
        )
        if outlook.anew:
            num_redone = sum(len(part.computed) for part in standing.partial_steps.values() if part is not None)
        else:
            num_redone = reconfiguration.num_recomputed(recovery, standing.partial_steps, self.placement)
        goes_on = outlook.is_begun and not outlook.anew and not outlook.stops
        # A partial-step recovery drops the step's checks that are not complete (V6).
        dropped = self._num_checks(standing.version + 1) if goes_on else 0
        return EpochBegun(placement, kinds, reasons, standing.version, num_redone, why, plan, dropped)

    def _hand_over_primaries(self, plan: ReshardPlan) -> list[ProtocolAction]:
        """Begin one more change, if all replicas are there, but not all primaries where the target wants them.

        Primaries are handed over between two steps.
        """
        return self._begin(after=self._next_boundary()) if self._reshard is not None and not plan.copies else []

    def _begins_anew(self, standing: _Standing, is_begun: bool) -> bool:
        """True if what was computed of the step under way is given up, and the step begins anew (V5)."""
        # A member that never entered the epoch in which the present attempt began still has, and reports, what all
        # others have given up.
        is_behind_attempt = bool(standing.attempts - {self._attempt}) and self._attempt > 0
        # A lost member may have computed with damaged state without knowing: members check their state only before they
        # vote (H4).
        is_unsound = self._policy.reads_masters and self._policy.compares_at(standing.version)
        if is_unsound and is_begun and self._pending.lost:
            return True
        # The new epoch compares the replicas of this version once more (H1), of which nobody may have the next one's.
        if standing.ahead and self._policy.compares_at(standing.version):
            return True
        return is_behind_attempt or begins_anew(
            self._checks.rate, is_begun=is_begun, results_differ=self._pending.results_differ
        )

    def _num_checks(self, step: int) -> int:
        """The number of checks of a step by the present placement: of micro-batches and of sums."""
        of_sums = sum(1 for _ in drawn_ranges(self._checks, step, self.layout, self._replicas()))
        return self._checks.num_pairs(step, self.placement) + of_sums

    def _is_in_doubt(self, version: int) -> bool:
        """True if members may have parameters or state of this version that came from a wrong replica (H3, H4)."""
        # A member that is lost before its replicas were compared may have published parameters of a wrong replica.
        uncompared = self._policy.compares_at(version) and self.agreed < version
        return self._pending.repairs or (uncompared and bool(self._pending.lost))

    def _why_stop(self, version: int) -> str:
        """Why the run stops at a version, in words; empty if it goes on.

        After the last step it does not stop for lack of workers: no more steps have to be computed.
        """
        if version == self.steps and not self._stops_last:
            return ""
        if self._stop_wanted:
            return self._stop_wanted
        pending = self._pending
        staying = len(self.members) - len(pending.leaving) + len(pending.newcomers)
        least = max(1, self._policy.min_workers)
        return reconfiguration.why_too_few(staying, sorted(pending.leaving), least) or self._saving

    def _next_membership(self, version: int, ahead: Mapping[int, Collection[PageRange]], *, joins: bool) -> _Membership:
        """Decide which members go and which newcomers come.

        Args:
            version: the highest version of any member.
            ahead: rank -> page ranges of which this worker has the state of `version` + 1, which it has to give up.
            joins: False if the run stops: then no worker joins, and none leaves before it has written its state.
        """
        pending = self._pending
        given_up = {rank: {*pending.damaged.get(rank, ()), *ahead.get(rank, ())} for rank in {*pending.damaged, *ahead}}
        replicas, without = reconfiguration.good_replicas(self._replicas(), self._caught_up(version), given_up)
        free = dispensable(replicas, pending.lost, pending.leaving if joins else ())
        leaving = {rank: pending.leaving[rank] for rank in free}
        newcomers = pending.newcomers if joins else []
        removed = {**pending.lost, **leaving}
        is_unchanged = not removed and not newcomers and not given_up
        return _Membership(replicas, without, leaving, newcomers, removed, is_unchanged)

    def _caught_up(self, version: int) -> set[int]:
        """The living learners that have all of their state. None if that may have come from a wrong replica."""
        return set() if self._is_in_doubt(version) else self._pending.caught_up - self._pending.lost.keys()

    def _ahead_everywhere(self, version: int) -> tuple[ReplicaSet, ...]:
        """The page ranges of which no replica has the state of `version`, but only that of `version` + 1.

        This happens when all members that had applied `version` + 1 are lost after they had sent state to learners.
        """
        assert self._change is not None
        good, _ = reconfiguration.good_replicas(self._replicas(), self._caught_up(version), self._pending.damaged)
        return reconfiguration.ahead_everywhere(good, self._change.reports)

    def _next_placement(self, epoch: int, membership: _Membership) -> Placement:
        """The placement on the new members, still without its replica map, and before any move that a goal asks for."""
        old = self.placement
        stages = next_stages(old.mesh.stages, membership.removed, membership.newcomers, self._wanted_stages)
        assign = partial(self._assigner.assign, old, split=self.split)
        return reconfiguration.next_placement(old, self.layout, epoch, stages, self._domains.get, assign)

    def _with_state(
        self, placement: Placement, membership: _Membership, standing: _Standing, promoted: ReshardPlan
    ) -> tuple[Placement, ReshardPlan]:
        """The placement with its replica map, and the reshard plan that leads to it.

        While a goal is pursued, state is copied to where the goal wants it; the placement itself becomes that of the
        goal only when all copies are complete.
        """
        goes_on = standing.is_between_steps and membership.is_unchanged
        # A member that wants to leave but is the only replica of a page has to stay until the page has another replica.
        # With `mirror_count` 0 no other would ever be made, so every page gets one mirror for as long as it stays.
        stays_for_its_pages = len(membership.leaving) < len(self._pending.leaving)
        mirror_count = max(self._policy.mirror_count, int(stays_for_its_pages))
        aim = reconfiguration.placement_at(self._goal, placement)
        plan = self._plan_state(aim, membership, mirror_count, promoted, goes_on=goes_on)
        if self._goal is not None and self._reshard is None:  # all copies for the goal are complete
            placement = aim
            self._goal = None
            self._wanted_stages = aim.num_stages
        return replace(placement, replicas=plan.during), plan

    def _plan_state(
        self, aim: Placement, membership: _Membership, mirror_count: int, promoted: ReshardPlan, *, goes_on: bool
    ) -> ReshardPlan:
        """The reshard plan of the new epoch: what remains of the plan under way, or a new one.

        Args:
            aim: the placement whose state the plan leads to.
            membership: the members and the replicas that are left.
            mirror_count: the number of mirrors of each page in the target.
            promoted: the plan of promotions alone, in which all state stays where it is.
            goes_on: True if the members are the same and all of them are between the same two steps. Only then may a
                plan with primaries to hand over be finished.
        """
        if goes_on and self._reshard is not None and not self._strands_a_leaver(self._reshard.after):
            plan = self._reshard.advanced(membership.replicas)
        else:
            plan = promoted.towards(aim.state_sharding(mirror_count, self._policy.mirror_scatter))
        is_finished = not plan.copies and (goes_on or (plan.during == plan.after and self._goal is None))
        self._reshard = None if is_finished else plan
        if not is_finished:
            return plan
        # Between two steps, no message is under way that names page ranges as they were cut before. So they may be
        # joined (C18).
        after = joined(plan.adopted(), self.layout) if goes_on else plan.adopted()
        return replace(plan, during=after, after=after)

    def _strands_a_leaver(self, target: ReplicaMap) -> bool:
        """True if a member that is to leave could not leave with these replicas, as it is the only one of some page.

        So it is where no page has a mirror and it was asked to leave after the plan under way was made.
        """
        return any(not dispensable(target, (), [rank]) for rank in self._pending.leaving)

    def _recovery_plan(self, placement: Placement, standing: _Standing) -> tuple[Recompute, ...] | None:
        """The recovery plan for what is left of the step under way; None if no member has begun the step."""
        if standing.is_between_steps:
            return None
        # A member may report without having entered the present epoch, in which its stage may have other layers (C3).
        old_layers = {**reconfiguration.layers_of_workers(self.placement), **standing.layers}
        return recovery_plan(standing.version + 1, placement, self.layout, standing.partial_steps, old_layers)

    def _enter(
        self,
        placement: Placement,
        version: int,
        recovery: tuple[Recompute, ...] | None,
        leaving: Collection[int],
        saving: str,
        *,
        anew: bool,
    ) -> Broadcast:
        """Make the new epoch the present one, and drop the pending events, which take effect in it.

        Returns:
            The Reconfigure, to be sent to all members of the new epoch.
        """
        assert self._change is not None
        (planned, lines), step = self._planned, version + 1
        now = Ran(step, self.placement, lines if planned == step else ())
        ran = (*(before for before in self._ran if before.step >= version), now)
        # A step that begins anew runs as placed, and nothing that members have of it is used: it needs no more links.
        plan = () if anew and recovery else recovery
        self._ran, self._planned = () if recovery is None else ran, (step, plan or ())
        self._missed = {ends for ends in self._missed if all(rank in placement.mesh for rank in ends)}
        left = Recovery(ran, plan, self._change.reports, (*self._pending.relinked, *self._missed))
        self.placement = placement
        self._validation.clear()  # it is run again as a whole, if it is not complete
        self._have_validated.clear()
        self._entered_at = version
        self._change = None
        self._saving = saving
        message = self._reconfigure_message(version, recovery)
        self._pending = self._pending.after(leaving)
        self._behind = None
        return Broadcast(placement.mesh.members, message, self._peers_after(left))

    def _peers_after(self, left: Recovery | None) -> Peers | None:
        """Work out, note and return the peers in the present epoch; None if all members have links to all others.

        Args:
            left: the work that the epoch takes over from the one before; None for the first epoch.
        """
        number, checks = self._spec.num_validation_microbatches, self._checks.rate > 0
        self.peers = None
        if self.widest is not None:
            self.peers = peers_of(
                self.placement,
                self.layout,
                num_validation_microbatches=number,
                recovery=left,
                checks=checks,
                widest=self.widest,
            )
        return self.peers

    def _release(self, leaving: Collection[int]) -> list[ProtocolAction]:
        """Send Stop to workers that have left the mesh, so that they end."""
        actions: list[ProtocolAction] = []
        for rank in leaving:
            self.addresses.pop(rank, None)
            actions += [Send(rank, Stop()), RemoveMember(rank, lost=False)]
        return actions

    def _reconfigure_message(
        self, version: int, recovery: tuple[Recompute, ...] | None, *, as_planned: bool = False
    ) -> Reconfigure:
        # A validation whose losses are not all here is run again: workers that took part in it, or messages with their
        # losses, may be lost.
        again = version and not self._saving and self._spec.validates_at(version) and self._validated < version
        validate = version if again else None
        resend_to = tuple(sorted(self._pending.resend_to & {*self.placement.mesh.members}))
        placed, split_layers = Assignment.of(self.placement), ()
        if self.split is not None:
            placed = self._assigner.limited(self.placement, self.split)
            split_layers = self.split.layers if placed.put_off else ()
        self.running = placed
        placement, mesh = self.placement, self.placement.mesh
        return Reconfigure(
            epoch=mesh.epoch,
            stages=mesh.stages,
            layer_cuts=placement.layer_cuts,
            microbatch_counts=placement.microbatch_counts,
            addresses=dict(self.addresses),
            replicas=reconfiguration.replica_rows(placement, as_planned=as_planned),
            version=version,
            recovery_plan=recovery,
            validate=validate,
            save=bool(self._saving),
            resend_to=resend_to,
            attempt=self._attempt,
            repair=self._repair,
            split_layers=split_layers,
            put_off=placed.put_off,
            in_flight=placed.in_flight,
            is_last=self._is_early_end(version),
            hosts=reconfiguration.hosts_of(mesh) if self._spec.tells_hosts else (),
        )

    def layers_tried(self, split: SplitBackward | None) -> None:
        """A worker has tried which layers can run their backward in two parts. Takes effect in epochs that begin later.

        Called once, with the first result: other workers find the same, or `limit` has replaced it since.
        """
        assert self.split is None, "decided already"
        self.split = split

    def limit(self, split: SplitBackward, limited: Assignment) -> Broadcast:
        """Make members run with other limits from their next step on. This needs no mesh epoch: no bit depends on them.

        Args:
            split: the layers whose backward may run in two parts from now on, in later epochs as well.
            limited: the present placement with the new limits.
        """
        self.split, self.running = split, limited
        return self.try_limits(limited)

    def try_limits(self, limited: Assignment) -> Broadcast:
        """Make members run with other limits on trial: neither plans nor the next mesh epoch take them into account.

        Args:
            limited: the present placement with the limits to try.
        """
        assert self.split is not None
        layers = self.split.layers if limited.put_off else ()
        mesh = self.placement.mesh
        return Broadcast(mesh.members, Limits(mesh.epoch, layers, limited.put_off, limited.in_flight))

    # ---- reports

    def applied(self, message: Applied) -> list[ProtocolAction]:
        """The first report of a step is its commit; later ones must agree with it bit for bit.

        Raises:
            RunError: two workers applied different steps under one number.
        """
        found = _results_of(message)
        rank, first = self._first_reports.setdefault(message.step, (message.rank, found))
        if first != found:
            raise RunError(
                f"workers {rank} and {message.rank} disagree about step {message.step}: {_differences(first, found)}"
            )
        self._applied[message.rank] = message.step
        # Members are at most two steps apart, so no report of an older step can still come.
        for old in [s for s in self._first_reports if s < message.step - 2]:
            del self._first_reports[old]
        if message.step <= self.version:
            return []
        self.version = message.step
        return [Committed(message)]

    def validation(self, message: ValidationLoss) -> list[ProtocolAction]:
        """Collect the losses of a validation. Once those of all micro-batches are here, training goes on.

        Where replicas are compared, all members have reported then: so each has found its state to be as it had written
        it after it had sent its last activation (H5). What was computed in an older epoch counts for nothing, as it may
        come of damage that was found since.

        The sum is exactly rounded (math.fsum), so it does not depend on which worker reports first. It is decided here,
        before any member may begin another step, whether the run ends by it.
        """
        if message.epoch != self.placement.mesh.epoch:
            return []
        if message.step <= self._validated:
            # Usually this is a duplicate that arrives late. But if all members that had applied the step are lost, the
            # others apply it in a later epoch and validate it again, and wait for this answer (S7).
            is_again = self._entered_at < message.step and self.placement.mesh.epoch > self._validated_in
            return [self._validated_message(message.step)] if is_again else []
        found = self._validation.setdefault(message.step, {})
        found.update(scores_of(message))
        self._have_validated.add(message.rank)
        if len(found) < self._spec.num_validation_microbatches:
            return []
        if self._policy.compares_at(0) and not self._have_validated.issuperset(self.placement.mesh.members):
            return []
        self._validation.clear()
        self._have_validated.clear()
        self._validated, self._validated_in = message.step, self.placement.mesh.epoch
        done = validation_done(message.step, found)
        self._losses[message.step] = self._spec.mean_loss(done)
        if self._ends_after(message.step):
            self.steps, self._ends_early = message.step, True
        done = replace(done, is_last=self._is_early_end(message.step))
        return [done, self._validated_message(message.step)]

    def _ends_after(self, step: int) -> bool:
        """True if the early-stop rule ends the run after this validated step, before its planned last step."""
        rule = self._policy.early_stop
        if rule is None or step >= self._spec.steps:
            return False
        # The rule sees only the steps that this run's settings validate. A run that was resumed may know losses of
        # others: its earlier life may have had another `train.validate_every`, or a smaller last step, which is always
        # validated. An undisturbed run with the present settings would not have them, and must end at the same step.
        return rule.is_over({at: loss for at, loss in self._losses.items() if self._spec.validates_at(at)})

    def _validated_message(self, step: int) -> Broadcast:
        return Broadcast(self.members, Validated(step, self._is_early_end(step)))

    def _is_early_end(self, step: int) -> bool:
        return self._ends_early and step == self.steps

    def finished(self, message: Finished) -> list[ProtocolAction]:
        """A member has sent its final pages. When all members of the present epoch have, the run is done.

        While a change is under way, it is not done: members may still be lost. Pages sent in an older epoch do not
        count: since then, their sender may have become the primary of further pages.
        """
        self._finished[message.rank] = max(message.epoch, self._finished.get(message.rank, message.epoch))
        mesh = self.placement.mesh
        if self._change is not None or len(self._finished) < mesh.num_workers:
            return []
        if any(self._finished.get(rank) != mesh.epoch for rank in mesh.members):
            return []
        return [Done()]


_Results: TypeAlias = tuple[tuple[str, str], bool, str | None]
"""Results of a step: loss and gradient norm in hex digits, whether state was updated, and the loss's weight in hex."""


def _results_of(report: Applied) -> _Results:
    """The results of a step on which all reports must agree bit for bit, not up to a tolerance.

    The extension is not among them: a member that completes the step in a later mesh epoch votes without one.
    """
    weight = None if report.weight is None else report.weight.hex()
    return (report.loss.hex(), report.grad_norm.hex()), report.updated, weight


def _differences(first: _Results, other: _Results) -> str:
    """The results that differ, in words."""
    names = ("loss and gradient norm", "updated", "weight")
    pairs = zip(names, first, other, strict=True)
    return ", ".join(f"{name} {one} and {another}" for name, one, another in pairs if one != another)
