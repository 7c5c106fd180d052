"""The controller's half: it decides membership, never the outcome of a step (protocol.md, rule 2).

A state machine without I/O: facts and messages in, effects out. There is one way to change the mesh epoch, for every
event: Prepare to the living members, a StepReport from each, Reconfigure to the members of the new epoch. An event in
between begins it again with the next epoch number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery import reconfiguration
from elaswave_spmd.recovery.actions import (
    Action,
    Broadcast,
    Committed,
    Done,
    EpochBegun,
    RemoveMember,
    Save,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.recovery.messages import (
    AT_ONCE,
    Applied,
    CaughtUp,
    Damaged,
    Finished,
    Message,
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
from elaswave_spmd.recovery.partial_step import recovery_plan
from elaswave_spmd.recovery.reconfiguration import Goal, Stages, assign_evenly, next_stages
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet, dispensable
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard


@dataclass(frozen=True)
class Policy:
    """How a run reacts. `mirror_count`, `mirror_scatter`: of replicas. Below `min_workers` it is saved and stops."""

    mirror_count: int = 1
    mirror_scatter: int = 0
    min_workers: int = 1


class MicrobatchAssigner(Protocol):
    """Decides how many micro-batches each worker gets when members have come or gone."""

    def assign(self, old: Placement, stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """The number of micro-batches of each worker of `stages`, by stage; `old`: the placement until now."""
        ...


class EvenAssigner:
    """The assignment for workers that are all equally fast."""

    def assign(self, old: Placement, stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        return assign_evenly(stages, num_microbatches)


@dataclass
class _Change:
    """A change of the epoch that is under way: from Prepare to Reconfigure."""

    epoch: int
    after: int
    reports: dict[int, StepReport] = field(default_factory=dict)


@dataclass(frozen=True)
class _Reported:
    """What the members have reported, taken together.

    Args:
        version: the last step that somebody has applied. Its state counts, and everybody has it or will get there.
        held: by rank, what a worker has of the step after it; None: nothing.
        is_clean: all are between the same two steps, so that there is nothing to finish.
    """

    version: int
    held: dict[int, PartialStep | None]
    is_clean: bool

    @classmethod
    def from_reports(cls, reports: Mapping[int, StepReport]) -> _Reported:
        """Put the reports together; there is at least one."""
        version = max(report.version for report in reports.values())
        held = {rank: reconfiguration.of_step(report, version + 1) for rank, report in reports.items()}
        is_clean = all(report.version == version for report in reports.values()) and not any(held.values())
        return cls(version, held, is_clean)


@dataclass(frozen=True)
class _NextMembers:
    """The members of a new epoch, by what has changed.

    Args:
        gone: rank -> reason, of workers that are lost or leave.
        leaving: rank -> reason, of those that leave.
        newcomers: ranks that join.
        replicas: the replicas that are good, of all workers that there were.
        are_the_same: nobody goes or comes, and no replica is damaged.
    """

    gone: dict[int, str]
    leaving: dict[int, str]
    newcomers: tuple[int, ...]
    replicas: ReplicaMap
    are_the_same: bool


@dataclass
class ControllerProtocol:
    """State of the controller over one run.

    Args:
        placement: of the first epoch.
        layout: the pages.
        steps: of the run.
        num_validation_microbatches: micro-batches of a validation.
        validates_at: whether the state after a step is validated; the same function as the workers' (Job.validates_at).
        assigner: says which worker gets how many micro-batches after a change of members.
    """

    placement: Placement
    layout: ModelLayout
    steps: int
    num_validation_microbatches: int = 0
    validates_at: Callable[[int], bool] = lambda _: False
    policy: Policy = field(default_factory=Policy)
    addresses: dict[int, str] = field(default_factory=dict)
    version: int = 0
    assigner: MicrobatchAssigner = field(default_factory=EvenAssigner)
    _domains: dict[int, Path | None] = field(default_factory=dict)  # of newcomers
    _started: bool = False
    _last_epoch: int = -1
    _reports: dict[int, Applied] = field(default_factory=dict)
    _applied: dict[int, int] = field(default_factory=dict)  # rank -> the step that it has applied last
    _validation: dict[int, dict[int, float]] = field(default_factory=dict)
    _validated: int = 0
    _change: _Change | None = None
    _lost: dict[int, str] = field(default_factory=dict)  # rank -> reason
    _leaving: dict[int, str] = field(default_factory=dict)
    _newcomers: list[int] = field(default_factory=list)
    _caught_up: set[int] = field(default_factory=set)
    _damaged: dict[int, set[PageRange]] = field(default_factory=dict)
    _recovered: set[int] = field(default_factory=set)  # members that have nothing of undecided steps any more
    _relinked: dict[frozenset[int], str] = field(default_factory=dict)  # ends of a link to be made again -> reason
    _saving: str = ""  # why the run is about to stop
    _finished: dict[int, int] = field(default_factory=dict)  # rank -> epoch
    _plan: ReshardPlan | None = None  # the reshard plan under way: until all of its copies are there
    _goal: Goal | None = None  # where to go when they have; given up when members come or go

    def __post_init__(self) -> None:
        self._last_epoch = self.placement.mesh.epoch
        self._wanted_stages = self.placement.num_stages

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the present epoch that are not known to be lost."""
        return tuple(rank for rank in self.placement.mesh.members if rank not in self._lost)

    @property
    def started(self) -> bool:
        """Whether the first mesh has its places."""
        return self._started

    @property
    def leaving(self) -> tuple[int, ...]:
        """Members that are to leave at the next boundary."""
        return tuple(sorted(self._leaving))

    @property
    def changing(self) -> tuple[int, ...]:
        """Members whose StepReport is waited for."""
        if self._change is None:
            return ()
        return tuple(rank for rank in self.members if rank not in self._change.reports)

    @property
    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """The epoch of the last Prepare, and the members that can answer it by now and have not.

        A planned change is answered by whoever has applied its step, after the validation.
        """
        change, validating = self._change, self.validates_at(self.version) and self._validated < self.version
        if change is None or (change.after != AT_ONCE and validating):
            return self._last_epoch, ()
        return self._last_epoch, tuple(r for r in self.changing if self._applied.get(r, 0) >= change.after)

    @property
    def free_to_leave(self) -> tuple[int, ...]:
        """Members that are to leave and have nothing that nobody else has. None once the run is about to stop."""
        if not self._leaving or self._saving:
            return ()
        return dispensable(self._replicas(), self._lost, sorted(self._leaving))

    @property
    def settled(self) -> bool:
        """No change of the epoch is under way or about to come, and every page has all its mirrors."""
        return self._change is None and self._plan is None

    # ---- events

    def expect(self, rank: int, domain: Path | None) -> None:
        """A newcomer has been started in this failure domain; None: in that of all the others."""
        self._domains[rank] = domain

    def ready(self, message: Ready) -> list[Action]:
        """A worker listens. When all of the first mesh do, they get their places; a later one is a newcomer."""
        self.addresses[message.rank] = message.address
        if self._started:
            self._newcomers.append(message.rank)
            return self._begin(after=self._next_boundary())
        members = self.placement.mesh.members
        if len(self.addresses) < len(members) or not set(members) <= self.addresses.keys():
            return []
        self._started = True
        return self._send_all(self._reconfigure_message(self.version, None))

    def lost(self, rank: int, reason: str) -> list[Action]:
        """A worker is gone for good. Known at once, and answered at once."""
        self.addresses.pop(rank, None)
        if rank in self._newcomers:
            self._newcomers.remove(rank)
            return [RemoveMember(rank, lost=True)]
        if rank not in self.placement.mesh or rank in self._lost or not self._started:
            return []
        self._lost[rank] = reason
        self._leaving.pop(rank, None)
        return [RemoveMember(rank, lost=True), *self._begin(after=AT_ONCE)]

    def drain(self, rank: int, reason: str) -> list[Action]:
        """A member is to leave: at the next boundary between two steps, so that nothing is computed again."""
        if rank not in self.members or rank in self._leaving:
            return []
        self._leaving[rank] = reason
        return self._begin(after=self._next_boundary())

    def relink(self, ends: frozenset[int], reason: str) -> list[Action]:
        """A link between two living members is gone, and perhaps what was on its way.

        With its place in the next epoch each makes it again, and sends what the other may lack.
        """
        if not ends <= set(self.members):
            return []
        self._relinked[ends] = reason
        return self._begin(after=AT_ONCE)

    def caught_up(self, message: CaughtUp) -> list[Action]:
        """A learner has caught up. When all have, they are promoted by a planned change."""
        if message.epoch != self.placement.mesh.epoch:
            return []
        self._caught_up.add(message.rank)
        if self._change is not None:
            return []
        learners = {r for runs in self._replicas().values() for run in runs for r in run.learners}
        return self._begin(after=self._next_boundary()) if learners <= self._caught_up else []

    def rebalance(self, goal: Goal) -> list[Action]:
        """Micro-batches, layers or workers are to be elsewhere, while training goes on.

        Micro-batches change at the next boundary. Where layers or workers change their stage, state is learned there
        first, and the change comes when all of it is. Ignored while anything else changes.
        """
        assert sorted(r for members in goal.stages for r in members) == sorted(self.placement.mesh.members), goal
        if not self._started or not self.settled or self._leaving or self._newcomers or self._lost:
            return []
        self._goal = goal
        return self._begin(after=self._next_boundary())

    def damaged(self, message: Damaged) -> list[Action]:
        """A member's copies of some runs are not what it had written: others take over, and it learns them again."""
        if message.rank not in self.members:
            return []
        self._damaged.setdefault(message.rank, set()).update(message.page_ranges)
        if message.reason:
            self._recovered.add(message.rank)
        return self._begin(after=AT_ONCE)

    def report_received(self, message: StepReport) -> list[Action]:
        """An answer to Prepare; one for another epoch is void (a mutant in tests/simulated breaks this rule)."""
        if self._change is None or message.epoch != self._change.epoch or not self._is_living_member(message.rank):
            return []
        self._change.reports[message.rank] = message
        # Only living members are in `reports`, and each loss begins the change again: to count them is enough.
        num_living = self.placement.mesh.num_workers - len(self._lost)
        return [] if len(self._change.reports) < num_living else self._finish_change()

    def _is_living_member(self, rank: int) -> bool:
        return rank in self.placement.mesh and rank not in self._lost

    def _next_boundary(self) -> int:
        return min(self.version + 1, self.steps)

    def _begin(self, after: int) -> list[Action]:
        """Prepare of the next epoch number. One that is under way is superseded, and stays as urgent as it was."""
        if self._saving and after != AT_ONCE:
            return []
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

    def _finish_change(self) -> list[Action]:
        """All members have reported: the new epoch begins with a Reconfigure to each of its members."""
        change = self._change
        assert change is not None
        reported = _Reported.from_reports(change.reports)
        stops = self._stops(reported.version)
        members, unreplicated = self._next_members(goes_on=not stops)
        plan = plan_reshard(self.layout, members.replicas, lost=members.gone)  # promotions alone: state stays in place
        if lost := (*unreplicated, *plan.lost):
            return [Unrecoverable(lost, f"all replicas of {len(lost)} page ranges are lost")]
        if stops and not reported.version:
            return [Unrecoverable((), f"{stops}, and no step is applied yet")]
        placement = self._next_placement(change.epoch, members)
        if stops or not members.are_the_same:
            self._goal = None  # it was made for other members
        why = self._goal.why if self._goal else ""
        if not stops:
            placement, plan = self._place_state(placement, members, is_clean=reported.is_clean)
        placement = replace(placement, replicas=plan.during)
        work = () if stops else self._work_left(reported, placement)
        kinds, reasons = reconfiguration.what_happens(self._lost, members.leaving, members.newcomers, self._relinked)
        num_redone = reconfiguration.redone(work, reported.held)
        begun = EpochBegun(placement, kinds, reasons, reported.version, num_redone, why, plan)
        actions = self._enter_epoch(placement, reported.version, work, stops)
        if stops:
            return [*actions, *([begun] if kinds else []), Save(reported.version, change.epoch, stops)]
        actions += [begun, *self._release(members.leaving)]
        if self._plan is not None and not plan.copies:  # all replicas are there, but primaries are not those wanted
            actions += self._begin(after=self._next_boundary())
        return actions

    def _next_members(self, *, goes_on: bool) -> tuple[_NextMembers, tuple[ReplicaSet, ...]]:
        """The members of the new epoch; and the page ranges whose replicas are all damaged.

        A worker that was asked to leave stays as long as it has pages that nobody else has. When the run stops, nobody
        joins or leaves any more: whoever is there saves its part.
        """
        caught_up = self._caught_up - self._lost.keys()
        replicas, unreplicated = reconfiguration.good_replicas(self._replicas(), caught_up, self._damaged)
        free = dispensable(replicas, self._lost, self._leaving if goes_on else ())
        leaving = {rank: self._leaving[rank] for rank in free}
        newcomers = tuple(self._newcomers) if goes_on else ()
        gone = {**self._lost, **leaving}
        are_the_same = not gone and not newcomers and not self._damaged
        return _NextMembers(gone, leaving, newcomers, replicas, are_the_same), unreplicated

    def _next_placement(self, epoch: int, members: _NextMembers) -> Placement:
        """The placement of the new epoch, without replicas."""
        old = self.placement
        stages = next_stages(old.mesh.stages, members.gone, members.newcomers, self._wanted_stages)
        assign = partial(self.assigner.assign, old)
        return reconfiguration.next_placement(old, self.layout, epoch, stages, self._domains.get, assign)

    def _place_state(
        self, placement: Placement, members: _NextMembers, *, is_clean: bool
    ) -> tuple[Placement, ReshardPlan]:
        """The placement that holds now, which is the goal's if its state is there; and the plan of the state."""
        # While a worker that was asked to leave has pages that nobody else has, they need another replica.
        someone_waits = len(members.leaving) < len(self._leaving)
        mirror_count = max(self.policy.mirror_count, int(someone_waits))
        aim = reconfiguration.placement_at(self._goal, placement)
        goes_on = is_clean and members.are_the_same
        plan = self._plan_state(aim, members.replicas, members.gone, mirror_count, goes_on=goes_on)
        if self._goal is not None and self._plan is None:  # no state has to be copied for it any more
            self._goal = None
            self._wanted_stages = aim.num_stages
            return aim, plan
        return placement, plan

    def _work_left(self, reported: _Reported, placement: Placement) -> tuple[Recompute, ...] | None:
        """What is left to compute of the step that the change interrupts; None if it interrupts none."""
        if reported.is_clean:
            return None
        old = self.placement
        old_layers = {rank: reconfiguration.layers_of(old, rank) for rank in old.mesh.members}
        return recovery_plan(reported.version + 1, placement, self.layout, reported.held, old_layers)

    def _enter_epoch(
        self, placement: Placement, version: int, work: tuple[Recompute, ...] | None, stops: str
    ) -> list[Action]:
        """The new epoch holds from here on: its Reconfigure is made, and what led to the change is forgotten."""
        self.placement = placement
        self._change = None
        self._newcomers = []
        self._saving = stops
        reconfigure = self._reconfigure_message(version, work)
        for table in (self._lost, self._caught_up, self._damaged, self._recovered, self._relinked):
            table.clear()
        return self._send_all(reconfigure)

    def _release(self, leaving: Collection[int]) -> list[Action]:
        """Lets workers go that are no members any more."""
        actions: list[Action] = []
        for rank in leaving:
            del self._leaving[rank]
            self.addresses.pop(rank, None)
            actions += [Send(rank, Stop()), RemoveMember(rank, lost=False)]
        return actions

    def _stops(self, version: int) -> str:
        """Why the run is to stop at a version; empty: it goes on. After the last step nobody is needed any more."""
        if version == self.steps:
            return ""
        staying = len(self.members) - len(self._leaving) + len(self._newcomers)
        return reconfiguration.too_few(staying, sorted(self._leaving), max(1, self.policy.min_workers)) or self._saving

    def _plan_state(
        self, aim: Placement, replicas: ReplicaMap, gone: Collection[int], mirror_count: int, *, goes_on: bool
    ) -> ReshardPlan:
        """The reshard plan of the new epoch: the rest of the one under way, or a new one.

        Args:
            goes_on: members are the same and all at one step. Only then may a plan be finished: primaries change hands
                between two steps.
        """
        if goes_on and self._plan is not None:
            plan = self._plan.advanced(replicas)
        else:
            sharding = aim.state_sharding(mirror_count, self.policy.mirror_scatter)
            plan = plan_reshard(self.layout, replicas, lost=gone, to=sharding)
        is_finished = not plan.copies and (goes_on or (plan.during == plan.after and self._goal is None))
        self._plan = None if is_finished else plan
        return replace(plan, during=plan.adopted()) if is_finished else plan

    def _reconfigure_message(self, version: int, work: tuple[Recompute, ...] | None) -> Reconfigure:
        again = version and not self._saving and self.validates_at(version) and self._validated < version
        validate = version if again else None
        recovered = tuple(sorted(self._recovered & {*self.placement.mesh.members}))
        return reconfiguration.reconfigure_message(
            self.placement, self.addresses, version, work, validate, saves=bool(self._saving), recovered=recovered
        )

    def _send_all(self, message: Message) -> list[Action]:
        return [Broadcast(self.placement.mesh.members, message)]

    # ---- reports

    def applied(self, message: Applied) -> list[Action]:
        """The first report of a step is its commit; later ones must agree with it bit for bit.

        Raises:
            RunError: two workers applied different steps under one number.
        """
        first = self._reports.setdefault(message.step, message)
        pairs = [(a.loss.hex(), a.grad_norm.hex()) for a in (first, message)]
        if pairs[0] != pairs[1]:
            raise RunError(
                f"workers {first.rank} and {message.rank} disagree about step {message.step}: "
                f"loss and gradient norm {pairs[0]} and {pairs[1]}"
            )
        self._applied[message.rank] = message.step
        for old in [s for s in self._reports if s < message.step - 2]:
            del self._reports[old]
        if message.step <= self.version:
            return []
        self.version = message.step
        return [Committed(message)]

    def validation(self, message: ValidationLoss) -> list[Action]:
        """When all micro-batches have been reported, training may go on."""
        if message.step <= self._validated:
            return []
        found = self._validation.setdefault(message.step, {})
        found.update(zip(message.microbatches, message.losses, strict=True))
        if len(found) < self.num_validation_microbatches:
            return []
        del self._validation[message.step]
        self._validated = message.step
        done = ValidationDone(message.step, math.fsum(found.values()))
        return [done, Broadcast(self.members, Validated(message.step))]

    def finished(self, message: Finished) -> list[Action]:
        """When all members of the present epoch have sent their final pages, and it is not about to change."""
        self._finished[message.rank] = message.epoch
        mesh = self.placement.mesh
        if self._change is not None or len(self._finished) < mesh.num_workers:
            return []
        if any(self._finished.get(rank) != mesh.epoch for rank in mesh.members):
            return []
        return [Done()]
