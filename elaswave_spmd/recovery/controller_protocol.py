"""The controller's half: it decides membership, never the outcome of a step (protocol.md, rule 2).

A state machine without I/O: facts and messages in, effects out. There is one way to change the mesh epoch, for every
event: PREPARE to the living members, a STATUS from each, PLACE to the members of the new epoch. An event in between
begins it again with the next epoch number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elaswave_spmd.errors import RunError
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery.decide import Stages, deal_evenly, disown, dispensable, graduate, next_stages
from elaswave_spmd.recovery.effects import (
    Committed,
    Done,
    Effect,
    EpochBegun,
    Evict,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.recovery.messages import (
    Applied,
    Damaged,
    Finished,
    Learned,
    Message,
    Place,
    Prepare,
    Ready,
    Status,
    StepHeld,
    Stop,
    Validated,
    ValidationLoss,
    Work,
)
from elaswave_spmd.recovery.salvage import salvage_plan
from elaswave_spmd.scheduling.graph import balance_layers
from elaswave_spmd.scheduling.holders import HolderMap, RunKey, adopt, promote, to_rows, with_learners
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.refill import refill
from elaswave_spmd.sharding.pages import ModelLayout


@dataclass(frozen=True)
class Policy:
    """How a run reacts. `mirror_count`, `mirror_scatter`: of holders. Below `min_workers` it cannot go on."""

    mirror_count: int = 1
    mirror_scatter: int = 0
    min_workers: int = 1


@dataclass(frozen=True)
class Goal:
    """Where units, layers and workers are to be, of the members that there are: fields as in `Placement`. And why."""

    stages: Stages
    layer_cuts: tuple[int, ...]
    unit_counts: tuple[tuple[int, ...], ...]
    why: str = ""


@dataclass
class _Change:
    """A change of the epoch that is under way: from PREPARE to PLACE."""

    epoch: int
    after: int
    statuses: dict[int, Status] = field(default_factory=dict)


@dataclass
class ControllerProtocol:
    """State of the controller over one run.

    Args:
        placement: of the first epoch.
        layout: the pages.
        steps: of the run.
        num_validation_units, validates_at: of validations.
        domain_of: the failure domains of a newcomer; None: those of all the others.
        deal: (stages, number of units) -> the units of each worker, by stage, after a change of members.
    """

    placement: Placement
    layout: ModelLayout
    steps: int
    num_validation_units: int = 0
    validates_at: Callable[[int], bool] = lambda _: False
    policy: Policy = field(default_factory=Policy)
    addresses: dict[int, str] = field(default_factory=dict)
    version: int = 0
    domain_of: Callable[[int], Path | None] = lambda _: None
    deal: Callable[[Stages, int], tuple[tuple[int, ...], ...]] = deal_evenly
    _started: bool = False
    _last_epoch: int = -1
    _reports: dict[int, Applied] = field(default_factory=dict)
    _validation: dict[int, dict[int, float]] = field(default_factory=dict)
    _validated: int = 0
    _change: _Change | None = None
    _gone: dict[int, str] = field(default_factory=dict)  # rank -> reason
    _leaving: dict[int, str] = field(default_factory=dict)
    _newcomers: list[int] = field(default_factory=list)
    _learned: set[int] = field(default_factory=set)
    _damaged: dict[int, set[RunKey]] = field(default_factory=dict)
    _finished: dict[int, int] = field(default_factory=dict)  # rank -> epoch
    _target: HolderMap | None = None  # what the learners of this epoch learn for
    _goal: Goal | None = None  # where to go when they have; given up when members come or go

    def __post_init__(self) -> None:
        self._last_epoch = self.placement.mesh.epoch
        self._wanted_stages = self.placement.num_stages

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the present epoch that are not known to be lost."""
        return tuple(rank for rank in self.placement.mesh.members if rank not in self._gone)

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
        """Members whose STATUS is waited for."""
        if self._change is None:
            return ()
        return tuple(rank for rank in self.members if rank not in self._change.statuses)

    @property
    def settled(self) -> bool:
        """No change of the epoch is under way or about to come, and every page has all its mirrors."""
        return self._change is None and self._target is None

    # ---- events

    def ready(self, message: Ready) -> list[Effect]:
        """A worker listens. When all of the first mesh do, they get their places; a later one is a newcomer."""
        self.addresses[message.rank] = message.address
        if self._started:
            self._newcomers.append(message.rank)
            return self._begin(after=self._next_boundary())
        if not set(self.placement.mesh.members) <= self.addresses.keys():
            return []
        self._started = True
        return self._send_all(self._place_message(self.version, None))

    def lost(self, rank: int, reason: str) -> list[Effect]:
        """A worker is gone for good. Known at once, and answered at once."""
        self.addresses.pop(rank, None)
        if rank in self._newcomers:
            self._newcomers.remove(rank)
            return [Evict(rank, lost=True)]
        if rank not in self.placement.mesh or rank in self._gone or not self._started:
            return []
        self._gone[rank] = reason
        self._leaving.pop(rank, None)
        return [Evict(rank, lost=True), *self._begin(after=-1)]

    def drain(self, rank: int, reason: str) -> list[Effect]:
        """A member is to leave: at the next boundary between two steps, so that nothing is computed again."""
        if rank not in self.members or rank in self._leaving:
            return []
        self._leaving[rank] = reason
        staying, least = len(self.members) - len(self._leaving), self.policy.min_workers
        if staying < max(1, least):
            return [Unrecoverable((), f"worker {rank} leaves, {staying} stay, elastic.min_workers is {least}")]
        return self._begin(after=self._next_boundary())

    def learned(self, message: Learned) -> list[Effect]:
        """A learner has caught up. When all have, they are promoted by a planned change."""
        if message.epoch != self.placement.mesh.epoch:
            return []
        self._learned.add(message.rank)
        if self._change is not None:
            return []
        learners = {r for runs in self._holders().values() for run in runs for r in run.learners}
        return self._begin(after=self._next_boundary()) if learners <= self._learned else []

    def rebalance(self, goal: Goal) -> list[Effect]:
        """Units, layers or workers are to be elsewhere, while training goes on.

        Units change at the next boundary. Where layers or workers change their stage, state is learned there first, and
        the change comes when all of it is. Ignored while anything else changes.
        """
        assert sorted(r for members in goal.stages for r in members) == sorted(self.placement.mesh.members), goal
        if not self._started or not self.settled or self._leaving or self._newcomers or self._gone:
            return []
        self._goal = goal
        return self._begin(after=self._next_boundary())

    def damaged(self, message: Damaged) -> list[Effect]:
        """A member's copies of some runs are not what it had written: others take over, and it learns them again."""
        if message.rank not in self.members:
            return []
        self._damaged.setdefault(message.rank, set()).update(message.runs)
        return self._begin(after=-1)

    def status(self, message: Status) -> list[Effect]:
        """An answer to PREPARE; one for another epoch is void [m]."""
        if self._change is None or message.epoch != self._change.epoch or message.rank not in self.members:
            return []
        self._change.statuses[message.rank] = message
        return [] if self.changing else self._finish_change()

    def _next_boundary(self) -> int:
        return min(self.version + 1, self.steps)

    def _begin(self, after: int) -> list[Effect]:
        """PREPARE of the next epoch number. One that is under way is superseded, and stays as urgent as it was."""
        if self._change is not None:
            after = min(after, self._change.after)
        self._last_epoch += 1
        self._change = _Change(self._last_epoch, after)
        if not self.members:
            return [Unrecoverable((), "no worker is left")]
        if len(self.members) < self.policy.min_workers:
            left, least = len(self.members), self.policy.min_workers
            return [Unrecoverable((), f"{left} workers are left, elastic.min_workers is {least}")]
        return [Send(rank, Prepare(self._last_epoch, after)) for rank in self.members]

    # ---- the new epoch

    def _holders(self) -> HolderMap:
        return self.placement.holder_runs(self.layout)

    def _finish_change(self) -> list[Effect]:
        change = self._change
        assert change is not None
        old = self.placement
        version = max(s.version for s in change.statuses.values())
        held = {rank: _of_step(status, version + 1) for rank, status in change.statuses.items()}
        clean = all(s.version == version for s in change.statuses.values()) and not any(held.values())
        holders, alone = graduate(self._holders(), self._learned - self._gone.keys()), []
        for rank, runs in self._damaged.items():
            holders, lost = disown(holders, rank, runs)
            alone += lost
        leaving = {rank: self._leaving[rank] for rank in dispensable(holders, self._gone, self._leaving)}
        gone = {**self._gone, **leaving}
        holders, homeless = promote(holders, gone)
        if homeless := (*alone, *homeless):
            return [Unrecoverable(homeless, f"all holders of {len(homeless)} runs of pages are lost")]
        stages = next_stages(old.mesh.stages, gone, self._newcomers, self._wanted_stages)
        placement = self._placement_of(change.epoch, stages)
        same_members = not gone and not self._newcomers and not self._damaged
        self._goal = self._goal if same_members else None
        why = self._goal.why if self._goal else ""
        # Who was asked to leave and has pages that nobody else has goes when they have another holder.
        copies = max(self.policy.mirror_count, int(len(leaving) < len(self._leaving)))
        holders, learners = self._share_out(placement, holders, copies, adoptable=clean and same_members)
        self.placement = placement = replace(self._at_goal(placement), holders=holders)
        work = None
        if not clean:
            old_layers = {r: _bounds(old, r) for r in old.mesh.members}
            work = salvage_plan(version + 1, placement, self.layout, held, old_layers)
        kinds = {**dict.fromkeys(self._gone, "fail"), **dict.fromkeys(leaving, "leave")}
        kinds |= dict.fromkeys(self._newcomers, "join")
        begun = EpochBegun(placement, kinds, gone, version, _redone(work, held), learners, why)
        self._change, self._newcomers = None, []
        for table in (self._gone, self._learned, self._damaged):
            table.clear()
        effects: list[Effect] = [*self._send_all(self._place_message(version, work)), begun]
        for rank in leaving:
            del self._leaving[rank]
            self.addresses.pop(rank, None)
            effects += [Send(rank, Stop()), Evict(rank, lost=False)]
        if not learners and self._target is not None:  # state is where it is to be, but not who is the primary of it
            effects += self._begin(after=self._next_boundary())
        return effects

    def _placement_of(self, epoch: int, stages: tuple[tuple[int, ...], ...]) -> Placement:
        old = self.placement
        ranks = [rank for members in stages for rank in members if rank not in old.mesh.topology]
        domains = {rank: path for rank in ranks if (path := self.domain_of(rank)) is not None}
        mesh = replace(old.mesh.with_stages(stages, domains or None), epoch=epoch)
        cuts = old.layer_cuts
        if len(stages) != old.num_stages:
            costs = [max(1.0, float(layer.num_value_elements)) for layer in self.layout.layers]
            cuts = balance_layers(costs, [len(members) for members in stages])
        counts = old.unit_counts if stages == old.mesh.stages else self.deal(stages, old.num_units)
        return replace(old, mesh=mesh, layer_cuts=cuts, unit_counts=counts, holders=None)

    def _at_goal(self, placement: Placement) -> Placement:
        """The placement, or where it was to go if nothing has to be learned for that any more."""
        goal = self._goal
        if goal is None or self._target is not None:
            return placement
        self._goal, self._wanted_stages = None, len(goal.stages)
        mesh = placement.mesh if goal.stages == placement.mesh.stages else placement.mesh.with_stages(goal.stages)
        mesh = replace(mesh, epoch=placement.mesh.epoch)
        return replace(placement, mesh=mesh, layer_cuts=goal.layer_cuts, unit_counts=goal.unit_counts, holders=None)

    def _share_out(
        self, placement: Placement, current: HolderMap, copies: int, *, adoptable: bool
    ) -> tuple[HolderMap, int]:
        """Who holds what in the new epoch, with so many mirrors, and how many copies are being made."""
        target, goal = self._target if adoptable else None, self._goal
        if target is None:
            target = refill(
                current,
                self.layout,
                goal.stages if goal else placement.mesh.stages,
                goal.layer_cuts if goal else placement.layer_cuts,
                replicated=not placement.shardings.optim.axes,
                topology=placement.mesh.topology,
                mirror_count=copies,
                scatter=self.policy.mirror_scatter,
            )
        found = with_learners(current, target)
        learners = sum(len(run.learners) for runs in found.values() for run in runs)
        settled = not learners and (adoptable or (found == target and goal is None))
        self._target = None if settled else target
        return (adopt(found, target), 0) if settled else (found, learners)

    def _place_message(self, version: int, work: tuple[Work, ...] | None) -> Place:
        p = self.placement
        validate = version if version and self.validates_at(version) and self._validated < version else -1
        # Of the first epoch everybody has worked the holders out alone, but only we know of several failure domains.
        known = not p.mesh.epoch and len({path for _, path in p.mesh.topology.domains}) == 1
        rows = to_rows(p.holders) if p.holders is not None and not known else ()
        cuts, counts = p.layer_cuts, p.unit_counts
        return Place(p.mesh.epoch, p.mesh.stages, cuts, counts, dict(self.addresses), rows, version, work, validate)

    def _send_all(self, message: Message) -> list[Effect]:
        return [Send(rank, message) for rank in self.placement.mesh.members]

    # ---- reports

    def applied(self, message: Applied) -> list[Effect]:
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
        for old in [s for s in self._reports if s < message.step - 2]:
            del self._reports[old]
        if message.step <= self.version:
            return []
        self.version = message.step
        return [Committed(message)]

    def validation(self, message: ValidationLoss) -> list[Effect]:
        """When all units have been reported, training may go on."""
        if message.step <= self._validated:
            return []
        found = self._validation.setdefault(message.step, {})
        found.update(zip(message.units, message.losses, strict=True))
        if len(found) < self.num_validation_units:
            return []
        del self._validation[message.step]
        self._validated = message.step
        done = ValidationDone(message.step, math.fsum(found.values()))
        return [done, *(Send(rank, Validated(message.step)) for rank in self.members)]

    def finished(self, message: Finished) -> list[Effect]:
        """When all members of the present epoch have sent their final pages, and it is not about to change."""
        self._finished[message.rank] = message.epoch
        epoch = self.placement.mesh.epoch
        if self._change is not None or any(self._finished.get(r) != epoch for r in self.placement.mesh.members):
            return []
        return [Done()]


def _of_step(status: Status, step: int) -> StepHeld | None:
    return next((held for held in status.held if held.step == step), None)


def _bounds(placement: Placement, rank: int) -> tuple[int, int]:
    layers = placement.layers_of_stage(placement.mesh.stage_of(rank))
    return layers.start, layers.stop


def _redone(work: tuple[Work, ...] | None, held: Mapping[int, StepHeld | None]) -> int:
    """Lines of a salvage plan that are not what their worker was to do anyway."""
    normal = {(rank, u) for rank, h in held.items() if h is not None for u in set(h.assigned) - set(h.computed)}
    return sum((line.worker, line.unit) not in normal for line in work or ())
