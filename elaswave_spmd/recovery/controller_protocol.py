"""The controller's half of the step protocol: it decides membership, never the outcome of a step (protocol.md, S2).

A state machine without I/O and without a clock: facts and messages in, actions out. The controller's loop carries the
actions out (controller/loop.py); the simulated cluster and the benchmarks drive the same class.

There is one way to change the mesh epoch, for every event: Prepare to the living members, a StepReport from each,
Reconfigure to the members of the new epoch. An event in between begins it again with the next epoch number.
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
        mirror_count: mirrors of each page, besides its primary.
        mirror_scatter: number of workers that share the mirrors of one worker's pages; 0: chosen.
        min_workers: with fewer left, the state is saved and the run stops.
        compares_at: whether the replicas of a version are compared; the same function as the workers'
            (Job.compares_at). What a worker has published before that, and is lost, is not believed.
        early_stop: the rule by which the run ends before its last step; None: it does not.
        reads_masters: workers compute with their state, or send it, where it lies (Job.reads_masters).
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
        layout: the pages.
        steps: of the run.
        num_validation_microbatches: micro-batches of a validation.
        validates_at: whether the state after a step is validated; the same function as the workers' (Job.validates_at).
        mean_loss: of a validation: what is compared with others. A function of its argument alone.
        version: at which the run begins: the step of the checkpoint that it goes on from, or 0.
        began_at: the version at which its workers began; None: at this one. A controller that came back does not know.
        widest: members up to which each has a link to all others; None: on every mesh.
        tells_hosts: workers are told who else is on their host (`runtime.collectives=group`).
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
            split: the layers whose backward may be in two parts; None: there are none.
        """
        ...

    def limited(self, placement: Placement, split: SplitBackward) -> Assignment:
        """The assignment of a placement with the limits of its workers (`scheduling.split_backward`)."""
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
        after: as in Prepare.
        reports: rank -> its answer.
        late: learners that have reported since their answer that they have all of their state: of which version it is,
            that does not say.
    """

    epoch: int
    after: int
    reports: dict[int, StepReport] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)


@dataclass
class _Pending:
    """Events that have happened to members since the last Reconfigure, and take effect in the next one.

    A member is *lost* (it failed, and is dropped at once) or *leaves* (it was asked to, and waits until every page that
    it has is elsewhere too). Both are removed from the mesh.

    Args:
        lost, leaving: rank -> reason.
        newcomers: workers that are ready and no members yet, in the order in which they came.
        caught_up: learners that have reported that they have all of their state.
        damaged: rank -> page ranges whose content on this member is not what it had written.
        recovered: members that have given up state, or that have nothing of undecided steps any more, since their
            device failed and was brought back; or all, since nothing moves. They are sent everything again.
        relinked: ends of a link that is made again -> reason.
        is_suspect: two workers have computed different results of the step under way.
        repairs: replicas differ, or one is not what its worker had written. Those that are wrong are lost or damaged;
            what the others got from them is given up.
    """

    lost: dict[int, str] = field(default_factory=dict)
    leaving: dict[int, str] = field(default_factory=dict)
    newcomers: list[int] = field(default_factory=list)
    caught_up: set[int] = field(default_factory=set)
    damaged: dict[int, set[PageRange]] = field(default_factory=dict)
    recovered: set[int] = field(default_factory=set)
    relinked: dict[frozenset[int], str] = field(default_factory=dict)
    is_suspect: bool = False
    repairs: bool = False

    def after(self, leavers: Collection[int]) -> _Pending:
        """The events left for a later epoch: requests to leave, of members that have the only replica of a page."""
        return _Pending(leaving={rank: why for rank, why in self.leaving.items() if rank not in leavers})


@dataclass(frozen=True)
class _Standing:
    """The position of the old epoch's members in the step under way, by their StepReports.

    Args:
        version: the highest of any member. Members that are a step behind have voted for it, and complete it by the
            votes of the new epoch.
        partial_steps: rank -> what it has of step version + 1; None: nothing. What a member that is behind has of its
            own next step does not matter: that step is decided.
        all_at_version: all members are at the version.
        is_between_steps: all members are at the version and have nothing of the next step.
        attempts: the attempts that members are in.
        layers: rank -> layers [first, stop) of the stage that it is on, of those that say so.
        ahead: rank -> trained page ranges of which it has the state of the version after the version.
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
    """The workers that go and that come in the new epoch, and the state that is left.

    Args:
        replicas: the replica map of the old epoch with learners that have caught up as replicas, and without damaged
            replicas.
        without_replica: page ranges of which no replica is good.
        leaving: rank -> reason, of members that leave now.
        newcomers: workers that become members.
        removed: rank -> reason, of members that are lost or leave.
        is_unchanged: the members are those of the old epoch, and all of their state is good.
    """

    replicas: ReplicaMap
    without_replica: tuple[ReplicaSet, ...]
    leaving: Mapping[int, str]
    newcomers: Sequence[int]
    removed: Mapping[int, str]
    is_unchanged: bool


@dataclass(frozen=True)
class Predecessor:
    """The facts that a controller that came back has of the one before it, from the journal and the living workers.

    Args:
        placement: of the newest mesh epoch, as its Reconfigure has it.
        reconfigure: that message.
        versions: of the members that live.
        lacking: members that live, and to which that message has not come.
        prepared: the Prepare that was journaled last; None: the mesh has never been about to change.
        last_epoch: no mesh epoch up to this one is used again.
        validated: the newest step whose validation is complete.
        ended_at: the step after which the run ends early; None: it does not, by what is validated.
    """

    placement: Placement
    reconfigure: Reconfigure
    versions: Mapping[int, int]
    lacking: tuple[int, ...] = ()
    prepared: Prepare | None = None
    last_epoch: int = 0
    validated: int = 0
    ended_at: int | None = None


class ControllerProtocol:
    """State of the controller's half over one run.

    Every method is called by the controller's thread. Those under "events" and "reports" take what has happened, and
    return the actions to be carried out, in order.

    Args:
        placement: of the first epoch.
        spec: the facts about the run.
        policy: how the run reacts to losses.
        assigner: decides which worker gets how many micro-batches after a change of members.
        checks: which micro-batches are checked; None: none.
        split: the layers whose backward may be in two parts; None: none, or workers find out (`layers_tried`).
        validations: step -> mean loss, of the validations that are known when this controller begins: those of the run
            that it resumes, and those before it came back.
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
        """The workers of this life of the run have computed nothing before this version."""
        self.placement = placement
        self.layout = spec.layout
        self.steps = spec.steps
        """The last step of the run: as planned, until a validation ends it early."""
        self._ends_early = False
        self._entered_at = version  # the highest version of any member when the present epoch began
        self.version = version
        self.addresses: dict[int, str] = {}
        """Rank -> address, of every worker that is ready and not lost: members, and newcomers."""
        self.split = split
        """The layers whose backward may be in two parts; None: there are none, or nobody has tried them yet."""
        self.running = Assignment.of(placement)
        """The placement with the limits that workers were told last."""
        self._policy = policy or Policy()
        self._assigner = assigner or EvenAssigner()
        self._checks = checks or CheckDraw(0)
        self.widest = spec.widest
        """Members up to which each has a link to all others; None: always."""
        self.peers: Peers | None = None
        """The members that each has links to in the present epoch; None: all others."""
        # Who has run what of the step under way, or of the one before, in mesh epochs that are over; and the step and
        # the plan that the present one began with.
        self._ran: tuple[Ran, ...] = ()
        self._planned: tuple[int, tuple[Recompute, ...]] = (0, ())
        self._missed: set[frozenset[int]] = set()  # pairs of members that had no link when one of them wanted it
        self._attempt = 0  # of the steps to come: the mesh epoch that began it, or 0
        self.agreed = version
        """The newest version at which all replicas were found to be the same; at first, that of the begin."""
        self._repair = 0  # the newest attempt that began since replicas differed
        self._started = False
        self._starters = set(placement.mesh.members)  # workers that the first mesh waits for
        self._lost_at_start: dict[int, str] = {}  # rank -> reason
        # Epochs and changes of them. The last epoch number may be that of a change which another one has overtaken.
        self._last_epoch = placement.mesh.epoch
        self._wanted_stages = placement.num_stages
        self._change: _Change | None = None
        self._pending = _Pending()
        self._behind: set[int] | None = None  # learners that have not caught up; None: not worked out in this epoch
        self._domains: dict[int, Path | None] = {}  # of newcomers
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
        self._validated_in = 0  # the mesh epoch in which it was
        self._finished: dict[int, int] = {}  # rank -> the epoch in which it has sent its final pages

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
        """Workers that the first mesh waits for."""
        return () if self._started else tuple(sorted(self._starters - self.addresses.keys()))

    @property
    def stops(self) -> bool:
        """True once the run is about to stop with its state saved: nobody joins it any more."""
        return bool(self._saving or self._stop_wanted)

    @property
    def is_saving(self) -> bool:
        """True once the workers have been sent the Reconfigure by which they write their state and end."""
        return bool(self._saving)

    @property
    def last_epoch(self) -> int:
        """The newest mesh epoch of which a Prepare was sent, or that of the first mesh."""
        return self._last_epoch

    @property
    def leaving(self) -> tuple[int, ...]:
        """Members that leave at the next boundary between steps, or as soon as their pages are elsewhere."""
        return tuple(sorted(self._pending.leaving))

    @property
    def joining(self) -> tuple[int, ...]:
        """Newcomers that are ready, and come into the mesh with its next change."""
        return tuple(self._pending.newcomers)

    @property
    def learners(self) -> frozenset[int]:
        """Members that are being sent state: their copies of some pages are not complete."""
        return self._reshard.learners if self._reshard is not None else frozenset()

    @property
    def changing(self) -> tuple[int, ...]:
        """Members whose StepReport is waited for."""
        if self._change is None:
            return ()
        return tuple(rank for rank in self.members if rank not in self._change.reports)

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """The epoch of the last Prepare, and the members that can answer it by now and have not.

        For the failure detector. A Prepare of a planned change can be answered by a member that has applied the step
        after which the change is to come, and not before the validation of the newest step is complete. Until then
        silence proves nothing.
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
        """Members that have asked to leave, and whose pages all have another replica.

        None once the run is about to stop: then every member is needed to write its part of the checkpoint.
        """
        if not self._pending.leaving or self._saving or self._stop_wanted:
            return ()
        return dispensable(self._replicas(), self._pending.lost, sorted(self._pending.leaving))

    @property
    def settled(self) -> bool:
        """No change of the epoch is under way or about to come, and every page has all its mirrors."""
        return self._change is None and self._reshard is None

    # ---- events

    def expect(self, rank: int, domain: Path | None) -> None:
        """A newcomer has been started in this failure domain; None: in that of all the others."""
        self._domains[rank] = domain

    def ready(self, message: Ready) -> list[ProtocolAction]:
        """A worker is ready. When all of the first mesh are, they are sent a Reconfigure; a later one is a newcomer."""
        self.addresses[message.rank] = message.address
        if not self._started:
            self._starters.add(message.rank)  # also one that was not waited for: it has come in time
            return self._start_if_complete()
        self._pending.newcomers.append(message.rank)
        return self._begin(after=self._next_boundary())

    def lost(
        self, rank: int, reason: str, *, spare: Ready | None = None, replacement: int | None = None
    ) -> list[ProtocolAction]:
        """A worker is lost for good. The mesh changes at once: the others may be waiting for it in this very step.

        Losses of workers that are no members, or of the same worker again, change nothing.

        Args:
            spare: a worker that is ready and takes its place in the same change.
            replacement: before the first epoch: a worker that is being started in its place. The first mesh waits for
                it. Later it is a newcomer like any other, and its Ready begins a change.
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
            return [*removed, *(self._begin(after=self._next_boundary()) if spare is not None else [])]
        self._pending.lost[rank] = reason
        self._pending.leaving.pop(rank, None)
        return [RemoveMember(rank, lost=True), *self._begin(after=AT_ONCE)]

    # ---- the first mesh

    def _lost_at_the_start(self, rank: int, reason: str, replacement: int | None) -> list[ProtocolAction]:
        """A worker is lost before the first epoch. No state is lost with it: each worker begins with the same state."""
        if rank not in self._starters:
            return []
        self._starters.remove(rank)
        self._lost_at_start[rank] = reason
        if replacement is not None:
            self._starters.add(replacement)
        return [RemoveMember(rank, lost=True), *self._start_if_complete()]

    def _start_if_complete(self) -> list[ProtocolAction]:
        """The first epoch, once everybody whom it waits for is ready; the end, if these are too few."""
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
        """Stand where the controller before this one stood, once all steps that workers had applied are reported.

        What it was sending when it died is sent to the end: so every living member has been sent the same Reconfigures.
        """
        newest = before.reconfigure
        self._started = True
        self.placement = before.placement
        self._wanted_stages = reconfiguration.wanted_stages(before.placement.mesh.stages, self._wanted_stages)
        self.running = Assignment.of(before.placement)
        self.addresses = {rank: newest.addresses[rank] for rank in before.versions}
        self._last_epoch = max(before.last_epoch, newest.epoch)
        self._entered_at = newest.version
        self._attempt, self._repair = newest.attempt, newest.repair
        self._saving = "the run was about to stop when its controller died" if newest.save else ""
        self._applied.update(before.versions)
        self._validated, self._validated_in = before.validated, newest.epoch
        if (ended_at := newest.version if newest.is_last else before.ended_at) is not None:
            self.steps, self._ends_early = ended_at, True
        if before.prepared is not None and before.prepared.epoch > newest.epoch:
            # A change was under way. Members may have answered, and wait: what begins now is at least as urgent.
            self._change = _Change(before.prepared.epoch, before.prepared.after)
        again = [Broadcast(before.lacking, newest)] if before.lacking else []
        # Whoever waits at a validated version may not have been told.
        is_validated = self.version > 0 and self._spec.validates_at(self.version) and not self.is_validating
        return [*again, *([self._validated_message(self.version)] if is_validated else [])]

    def attempt_again(self) -> list[ProtocolAction]:
        """Two results of the step under way differ, and what was found out about them died with a controller."""
        if self._pending.is_suspect:
            return []
        self._pending.is_suspect = True
        return self._begin(after=AT_ONCE)

    def begin_generation(self, before: Predecessor) -> list[ProtocolAction]:
        """The mesh epoch with which a controller that came back begins, unless a loss or a wish to leave has begun one.

        After the step under way, so that nothing is computed again; but at once where members may wait for what only
        the controller before knew: there a change that a wish to leave has begun would be waited for in vain.
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
        return self._begin(after=self._next_boundary())

    def stop(self, reason: str, *, at_once: bool = False) -> list[ProtocolAction]:
        """Somebody wants the run to stop: after the step under way, with its state saved, as if workers were too few.

        During a validation that is the step which is validated. After the last step nothing is stopped: what is left is
        to collect the weights. A loss in the meantime takes precedence: then the run stops where the loss has met it.

        Args:
            at_once: where everybody is, as after a loss: the step under way cannot be completed, or the validation. If
                that is the one after the last step, there is no result, and the run is stopped then, too.
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
        """True if state of the run would be lost with this member."""
        return rank not in dispensable(self._replicas(), self._pending.lost, [rank])

    def relink(self, ends: frozenset[int], reason: str) -> list[ProtocolAction]:
        """A link between two living members is lost, and perhaps what was on its way.

        Both open it again when they enter the next epoch, and send what the other may lack. So this is handled as a
        loss in which nobody is lost.
        """
        if not self._started or not ends <= set(self.members):
            return []
        self._pending.relinked[ends] = reason
        return self._begin(after=AT_ONCE)

    def send_again(self) -> list[ProtocolAction]:
        """All members wait, and nothing comes, though nobody is lost and no link is.

        Everything that one of them has sent another may be what is missing: so each is named as one that has lost what
        it was sent, and this is handled as a loss in which nobody is lost.
        """
        self._pending.recovered.update(self.members)
        return self._begin(after=AT_ONCE)

    def missed(self, ends: frozenset[int]) -> None:
        """A member had something for another one that it has no link to. From the next epoch on they have one."""
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
        """Micro-batches, layers or workers are to be moved, while training goes on.

        Micro-batches change at the next boundary. Where layers or workers change their stage, state is copied there
        first, and the change comes when all copies are made. Ignored while anything else changes: the rescheduler asks
        again by itself.
        """
        assert sorted(r for members in goal.stages for r in members) == sorted(self.placement.mesh.members), goal
        pending = self._pending
        if not self._started or not self.settled or pending.leaving or pending.newcomers or pending.lost:
            return []
        self._goal = goal
        return self._begin(after=self._next_boundary())

    def suspect(self) -> None:
        """Two workers have computed different results: the step under way does not outlast this mesh epoch."""
        self._pending.is_suspect = True

    def trust(self) -> None:
        """The step goes on with what was computed of it, right or not."""
        self._pending.is_suspect = False

    def repair(self, wrong: Mapping[int, Collection[PageRange]]) -> list[ProtocolAction]:
        """Replicas differ: these are wrong, and their workers learn the pages anew. Of none: `lost` follows.

        Whatever came from a wrong replica at this version is given up with the step under way: the new epoch begins
        another attempt of it, with parameters of the others.
        """
        self._pending.repairs = True
        for rank, ranges in wrong.items():
            self._pending.damaged.setdefault(rank, set()).update(ranges)
        return self._begin(after=AT_ONCE) if wrong else []

    def damaged(self, message: Damaged) -> list[ProtocolAction]:
        """A member has given up its state of some pages: other replicas take over, and it is sent the state again.

        If it was not what that member had written, what it has computed from it and sent is given up as well (H5).
        """
        if not self._started or message.rank not in self.members:
            return []
        self._pending.repairs |= bool(message.page_ranges) and not message.reason
        self._pending.damaged.setdefault(message.rank, set()).update(message.page_ranges)
        self._pending.recovered.add(message.rank)
        return self._begin(after=AT_ONCE)

    def report_received(self, message: StepReport) -> list[ProtocolAction]:
        """An answer to Prepare; one for another epoch is void (a mutant in tests/simulated breaks this rule).

        A report of an older epoch is out of date: its sender has gone on since, and may have applied a step.
        """
        if self._change is None or message.epoch != self._change.epoch or not self._is_living_member(message.rank):
            return []
        self._change.reports[message.rank] = message
        # Only living members are in `reports`, and each loss begins the change again: to count them is enough.
        num_living = self.placement.mesh.num_workers - len(self._pending.lost)
        return [] if len(self._change.reports) < num_living else self._finish_change()

    def _is_living_member(self, rank: int) -> bool:
        return rank in self.placement.mesh and rank not in self._pending.lost

    def _next_boundary(self) -> int:
        """The step after which a planned change is made: the one under way, or the last."""
        return min(self.version + 1, self.steps)

    def _begin(self, after: int) -> list[ProtocolAction]:
        """Prepare of the next epoch number.

        A change that is under way is overtaken: its epoch is never entered, and its reports are void. The new one is at
        least as urgent. Otherwise a planned change could delay the recovery from a loss until a step is applied which
        cannot be applied without that recovery.
        """
        if self._saving and after != AT_ONCE:
            return []  # the run is about to stop: only a loss changes anything
        if self._change is not None:
            after = min(after, self._change.after)
        self._last_epoch += 1
        self._change = _Change(self._last_epoch, after)
        if not self.members:
            return [Unrecoverable((), "no worker is left")]
        return [Broadcast(self.members, Prepare(self._last_epoch, after))]

    # ---- the new epoch

    def _replicas(self) -> ReplicaMap:
        return self.placement.replica_map(self.layout)

    def _finish_change(self) -> list[ProtocolAction]:
        """All living members have answered: decide the new epoch, and send each of its members a Reconfigure.

        In this order: who is a member, whether all state is still there, where everything runs, which state is copied,
        and what of the step under way is computed again.
        """
        assert self._change is not None
        epoch, standing = self._change.epoch, _Standing.from_reports(self._change.reports)
        stops = self._why_stop(standing.version)
        # If members are lost, nobody left may have anything of a step; but what was sent may still arrive.
        is_begun = not standing.is_between_steps or bool(self._pending.lost)
        is_in_doubt = self._is_in_doubt(standing.version)
        anew = is_in_doubt or self._begins_anew(standing, is_begun)
        # What is saved, and a step that begins anew, need the state of the version: that after it is given up.
        ahead = standing.ahead if stops or anew else {}
        if stops or anew:
            self._pending.caught_up -= self._change.late
        if ahead and (after := self._ahead_everywhere(standing.version)):
            what = "nothing can be saved" if stops else "it cannot begin anew"
            what = f"all workers that had applied step {standing.version + 1} are lost, and {what}: of {len(after)}"
            return [Unrecoverable(after, f"{what} page ranges nothing but the state after it is left")]
        membership = self._next_membership(standing.version, ahead, joins=not stops)
        # Promotions alone move no state: they say whether every page has a replica left.
        promoted = plan_reshard(self.layout, membership.replicas, lost=membership.removed)
        if lost := (*membership.without_replica, *promoted.lost):
            return [Unrecoverable(lost, f"all replicas of {len(lost)} page ranges are lost")]
        if stops and not standing.version:
            return [Unrecoverable((), f"{stops}, and no step is applied yet")]
        placement = self._next_placement(epoch, membership)
        if anew:
            self._attempt = epoch
        if is_in_doubt:
            self._repair = epoch
        kinds, reasons = reconfiguration.membership_changes(
            self._pending.lost, membership.leaving, membership.newcomers, self._pending.relinked
        )
        if stops or not membership.is_unchanged:
            self._goal = None  # it was planned for other members
        why = self._goal.why if self._goal else ""
        if stops:
            placement, plan, recovery = replace(placement, replicas=promoted.during), promoted, ()
        else:
            placement, plan = self._with_state(placement, membership, standing, promoted)
            of_all = standing.all_at_version
            recovery = whole_step(placement, of_all) if anew else self._recovery_plan(placement, standing)
        if anew:
            num_redone = sum(len(part.computed) for part in standing.partial_steps.values() if part is not None)
        else:
            num_redone = reconfiguration.num_recomputed(recovery, standing.partial_steps, self.placement)
        goes_on = is_begun and not anew and not stops
        dropped = self._num_checks(standing.version + 1) if goes_on else 0  # those of it that are not complete
        begun = EpochBegun(placement, kinds, reasons, standing.version, num_redone, why, plan, dropped)
        reconfigure = self._enter(placement, standing.version, recovery, membership.leaving, stops, anew=anew)
        if stops:
            return [reconfigure, *([begun] if kinds else []), Save(standing.version, epoch, stops)]
        actions = [reconfigure, begun, *self._release(membership.leaving)]
        if self._reshard is not None and not plan.copies:
            # All replicas are there, but primaries are not those wanted: they change hands between two steps.
            actions += self._begin(after=self._next_boundary())
        return actions

    def _begins_anew(self, standing: _Standing, is_begun: bool) -> bool:
        """True if what was computed of the step under way is given up, and the step begins anew (V5)."""
        # A member that never entered the epoch in which an attempt began has what is given up, and reports it.
        is_behind_attempt = bool(standing.attempts - {self._attempt}) and self._attempt > 0
        # What the lost have computed may come of damage that they had not found yet: they look before they vote (H4).
        is_unsound = self._policy.reads_masters and self._policy.compares_at(standing.version)
        if is_unsound and is_begun and self._pending.lost:
            return True
        return is_behind_attempt or begins_anew(
            self._checks.rate, is_begun=is_begun, is_suspect=self._pending.is_suspect
        )

    def _num_checks(self, step: int) -> int:
        """The checks of a step as it is placed: of micro-batches, and of sums."""
        of_sums = sum(1 for _ in drawn_ranges(self._checks, step, self.layout, self._replicas()))
        return self._checks.num_pairs(step, self.placement) + of_sums

    def _is_in_doubt(self, version: int) -> bool:
        """True if members may have parameters or state of this version that came from a wrong replica."""
        # A member that is lost before replicas were compared may have published what would have been found.
        uncompared = self._policy.compares_at(version) and self.agreed < version
        return self._pending.repairs or (uncompared and bool(self._pending.lost))

    def _why_stop(self, version: int) -> str:
        """Why the run stops at a version; empty: it goes on. After the last step nobody is needed any more."""
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
            version: the highest of any member.
            ahead: rank -> page ranges of which it has state of the version after that, and gives it up.
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
        """The learners that have the state by now; what was learned while replicas differed may be a wrong one's."""
        return set() if self._is_in_doubt(version) else self._pending.caught_up - self._pending.lost.keys()

    def _ahead_everywhere(self, version: int) -> tuple[ReplicaSet, ...]:
        """The page ranges of which all that is left is the state after the version of all members."""
        assert self._change is not None
        good, _ = reconfiguration.good_replicas(self._replicas(), self._caught_up(version), self._pending.damaged)
        return reconfiguration.ahead_everywhere(good, self._change.reports)

    def _next_placement(self, epoch: int, membership: _Membership) -> Placement:
        """The placement on the new members, without replicas, before anything moves on purpose."""
        old = self.placement
        stages = next_stages(old.mesh.stages, membership.removed, membership.newcomers, self._wanted_stages)
        assign = partial(self._assigner.assign, old, split=self.split)
        return reconfiguration.next_placement(old, self.layout, epoch, stages, self._domains.get, assign)

    def _with_state(
        self, placement: Placement, membership: _Membership, standing: _Standing, promoted: ReshardPlan
    ) -> tuple[Placement, ReshardPlan]:
        """The placement with its replicas, and the plan that leads to them.

        If a move is under way, state is copied to where the move leads; the placement itself changes only when that is
        done.
        """
        goes_on = standing.is_between_steps and membership.is_unchanged
        # A member that has asked to leave and has the only replica of a page leaves when the page has another one.
        stays_for_its_pages = len(membership.leaving) < len(self._pending.leaving)
        mirror_count = max(self._policy.mirror_count, int(stays_for_its_pages))
        aim = reconfiguration.placement_at(self._goal, placement)
        plan = self._plan_state(aim, membership, mirror_count, promoted, goes_on=goes_on)
        if self._goal is not None and self._reshard is None:  # no state has to be copied for it any more
            placement = aim
            self._goal = None
            self._wanted_stages = aim.num_stages
        return replace(placement, replicas=plan.during), plan

    def _plan_state(
        self, aim: Placement, membership: _Membership, mirror_count: int, promoted: ReshardPlan, *, goes_on: bool
    ) -> ReshardPlan:
        """The reshard plan of the new epoch: the rest of the one under way, or a new one.

        Args:
            promoted: the plan in which state stays where it is.
            goes_on: members are the same and all at one step. Only then may a plan be finished: primaries change hands
                between two steps.
        """
        if goes_on and self._reshard is not None:
            plan = self._reshard.advanced(membership.replicas)
        else:
            plan = promoted.towards(aim.state_sharding(mirror_count, self._policy.mirror_scatter))
        is_finished = not plan.copies and (goes_on or (plan.during == plan.after and self._goal is None))
        self._reshard = None if is_finished else plan
        if not is_finished:
            return plan
        # With nothing of a step under way, no message needs the page ranges of before by their names (C18).
        after = joined(plan.adopted(), self.layout) if goes_on else plan.adopted()
        return replace(plan, during=after, after=after)

    def _recovery_plan(self, placement: Placement, standing: _Standing) -> tuple[Recompute, ...] | None:
        """The plan for what is left of the step under way; None if no member has begun it."""
        if standing.is_between_steps:
            return None
        # Who reports need not have entered the present epoch, in which its stage may have other layers (C3).
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
        """The new epoch is the present one from now on: what was pending has taken effect. Returns its Reconfigure."""
        assert self._change is not None
        (planned, lines), step = self._planned, version + 1
        now = Ran(step, self.placement, lines if planned == step else ())
        ran = (*(before for before in self._ran if before.step >= version), now)
        plan = () if anew and recovery else recovery  # all of it is as placed, and what others have of it is given up
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
        """The peers in the present epoch, which are noted. `left`: by the epoch before; None: it is the first one."""
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
        """Let workers end that have left the mesh."""
        actions: list[ProtocolAction] = []
        for rank in leaving:
            self.addresses.pop(rank, None)
            actions += [Send(rank, Stop()), RemoveMember(rank, lost=False)]
        return actions

    def _reconfigure_message(
        self, version: int, recovery: tuple[Recompute, ...] | None, *, as_planned: bool = False
    ) -> Reconfigure:
        # A validation whose losses are not all here is run again: its workers, or their losses, may be gone.
        again = version and not self._saving and self._spec.validates_at(version) and self._validated < version
        validate = version if again else None
        recovered = tuple(sorted(self._pending.recovered & {*self.placement.mesh.members}))
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
            recovered=recovered,
            attempt=self._attempt,
            repair=self._repair,
            split_layers=split_layers,
            put_off=placed.put_off,
            in_flight=placed.in_flight,
            is_last=self._is_early_end(version),
            hosts=reconfiguration.hosts_of(mesh) if self._spec.tells_hosts else (),
        )

    def layers_tried(self, split: SplitBackward | None) -> None:
        """A worker has tried which layers can have their backward in two parts: it counts in epochs that begin now.

        The first result decides. What others find is the same, or `limit` has decided about it since.
        """
        assert self.split is None, "decided already"
        self.split = split

    def limit(self, split: SplitBackward, limited: Assignment) -> Broadcast:
        """Members run with other limits from their next step on, which moves nothing: no bit depends on limits.

        Args:
            split: as it holds from now on, in later epochs as well.
            limited: the present placement, with the limits.
        """
        self.split, self.running = split, limited
        return self.try_limits(limited)

    def try_limits(self, limited: Assignment) -> Broadcast:
        """Do what `limit` does, for a while: plans regard other limits no more than the next epoch does."""
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
        # Members are at most two steps apart, so no report of an older step is to come.
        for old in [s for s in self._first_reports if s < message.step - 2]:
            del self._first_reports[old]
        if message.step <= self.version:
            return []
        self.version = message.step
        return [Committed(message)]

    def validation(self, message: ValidationLoss) -> list[ProtocolAction]:
        """Collect the losses of a validation. With those of all micro-batches it is complete, and training goes on.

        Where replicas are compared, all members have reported then: so each has found its state to be as it had written
        it after it had sent its last activation (H5). What was computed in an older epoch counts for nothing, as it may
        come of damage that was found since.

        The sum is exactly rounded (math.fsum), so it does not depend on which worker reports first. It is decided here,
        before any member may begin another step, whether the run ends by it.
        """
        if message.epoch != self.placement.mesh.epoch:
            return []
        if message.step <= self._validated:
            # Usually late. But if all members are lost that had applied the step, the others apply it in a later epoch,
            # and validate it again: they wait for this answer.
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
        """True if the run ends after a validated step, before its last one, by the losses so far."""
        rule = self._policy.early_stop
        if rule is None or step >= self._spec.steps:
            return False
        # A run that was made longer has validated its last step as well, and one whose `train.validate_every` was
        # another one has other steps: the run from the start has none of these.
        return rule.is_over({at: loss for at, loss in self._losses.items() if self._spec.validates_at(at)})

    def _validated_message(self, step: int) -> Broadcast:
        return Broadcast(self.members, Validated(step, self._is_early_end(step)))

    def _is_early_end(self, step: int) -> bool:
        return self._ends_early and step == self.steps

    def finished(self, message: Finished) -> list[ProtocolAction]:
        """A member has sent its final pages. When all of the present epoch have, and it is not about to change: Done.

        Pages sent in an older epoch do not count: their sender may not have been the primary of all that it is now.
        """
        self._finished[message.rank] = max(message.epoch, self._finished.get(message.rank, message.epoch))
        mesh = self.placement.mesh
        if self._change is not None or len(self._finished) < mesh.num_workers:
            return []
        if any(self._finished.get(rank) != mesh.epoch for rank in mesh.members):
            return []
        return [Done()]


_Results: TypeAlias = tuple[tuple[str, str], bool, str | None]
"""Of a step: loss and gradient norm in hex digits, whether state was updated, and the weight of the loss likewise."""


def _results_of(report: Applied) -> _Results:
    """The results that all members must report alike: equal bits, not equal up to a tolerance.

    Not the extension: a member that completes the step in a later mesh epoch votes without one.
    """
    weight = None if report.weight is None else report.weight.hex()
    return (report.loss.hex(), report.grad_norm.hex()), report.updated, weight


def _differences(first: _Results, other: _Results) -> str:
    """The results that differ, in words."""
    names = ("loss and gradient norm", "updated", "weight")
    pairs = zip(names, first, other, strict=True)
    return ", ".join(f"{name} {one} and {another}" for name, one, another in pairs if one != another)
