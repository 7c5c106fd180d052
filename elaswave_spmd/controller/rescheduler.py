"""Rescheduling by measured times: moves micro-batches and layers to where they take the least time, during training.

Micro-batches, layers and their state are moved by planned changes of the mesh epoch, which change no bit of the result.
When no move gains anything, device frequencies may be lowered instead (dvfs.py).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from elaswave_spmd.conf.schema import AUTO, XLA, ScheduleSettings, Settings
from elaswave_spmd.controller.actions import Action, PlanChange, Record, WriteCosts
from elaswave_spmd.controller.backward_trial import BackwardChoice
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.planning import Hinted, HintRequest, Planned, PlanRequest
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Goal
from elaswave_spmd.recovery.messages import Measured
from elaswave_spmd.recovery.reconfiguration import Stages, assign_evenly
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.lasting import LastingCosts
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.profiler import SLOWEST, LayerSample, ProfileSmoother
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, Variant, reassign_microbatches
from elaswave_spmd.scheduling.split_backward import SplitBackward, best_limits, executed, priced
from elaswave_spmd.scheduling.step_time import Assignment, MemoryTables, memory_of, state_limit, step_time

_MOST_DOUBLINGS = 6  # the number of reviews that must ask for a change doubles with each change, at most this often
_SHORT_STEP_S = 0.05  # seconds; nothing is moved for shorter steps, whose differences are noise (help of settings)
_TIMED_WORKERS = 32  # on larger meshes a change after a loss does not compare candidates by their step time
_TRIED_AFTER = 1000  # steps after which a slow worker without micro-batches is tried again; twice as many each time
_SLOW, _FAST = 0.8, 0.9  # relative speeds below which a worker is logged as slow, and above which as recovered


class MeasuredCosts:
    """The cost model of a run, as measured up to now. Assigns micro-batches by it when members have come or gone.

    Args:
        settings: the settings of the schedule.
        base: the costs of the layers by estimate or profile, before anything is measured.
        follows_speeds: True if faster workers get more micro-batches (schedule.microbatches); False if all get the
            same number.
        mirror_count: the number of mirrors of each page, which take memory.
    """

    def __init__(
        self, settings: ScheduleSettings, base: CostModel, *, follows_speeds: bool, mirror_count: int = 1
    ) -> None:
        self._settings = settings
        self._base = base
        self._follows_speeds = follows_speeds
        self._mirror_count = mirror_count
        self._profile = ProfileSmoother(len(base.layers), window=settings.window)
        self._samples: defaultdict[int, list[LayerSample]] = defaultdict(list)
        self._links: dict[int, tuple[float, ...]] = {}  # rank -> latency in seconds, bytes per second
        self._lasting = LastingCosts(settings.lasting, base)
        self._idle: dict[int, int] = {}  # rank of a slow member -> steps in a row of which it has measured nothing
        self._waits: dict[int, int] = {}  # rank of a member that was tried again -> steps until it is the next time
        self._trials: dict[int, int] = {}  # rank of a member that is being tried -> steps that it has measured since
        # When the last steps were committed, whose times the medians are of. Of the last one no times have come yet.
        self._committed_s: deque[float] = deque(maxlen=settings.window + 2)

    @property
    def is_measured(self) -> bool:
        """True once every layer has been measured."""
        return bool(self._profile.layers)

    @property
    def speeds(self) -> Mapping[int, float]:
        """Rank -> speed relative to the median worker, over the last steps."""
        return self._profile.reported

    @property
    def tried(self) -> Collection[int]:
        """The members whose speed was forgotten, as they were slow and had no micro-batch for long, until it is known
        whether they are slow still."""
        return self._trials.keys()

    @property
    def costs(self) -> CostModel:
        """The costs as measured up to now. Links are those of the median worker, unless the settings give them."""
        base = self._base
        if self._links:
            base = base.with_links(*map(statistics.median, zip(*self._links.values(), strict=True)))
        return self._profile.costs(base.with_links(self._settings.latency, self._settings.bandwidth))

    @property
    def lasting(self) -> CostModel:
        """The costs to plan with. With schedule.lasting, only differences that have lasted for some time count."""
        return self._lasting.planned if self._settings.lasting else self.costs

    def review(self, now: float) -> bool:
        """Take note of the costs as measured up to now. Returns True once it is known which differences last.

        Args:
            now: seconds of a clock that never runs back.
        """
        each = [after - before for before, after in pairwise(self._committed_s)]
        # A pause, as for a validation, is in the time of one of these steps, and so not in the median.
        took = len(each) * statistics.median_low(each) if each else math.inf
        self._lasting = self._lasting.observe(self.costs, now, took)
        return self._lasting.is_covered

    def measured(self, message: Measured) -> None:
        """A worker reports the times of its layers in a step (as at the normal frequency), and the memory they keep."""
        self._base = self._base.with_memory(message.memory)
        if message.link:
            self._links[message.rank] = message.link
        put_off = {layer: seconds / number for layer, seconds, number in message.weights if number}
        for layer, forward_s, backward_s, forwards, backwards in message.rows:
            if forwards and backwards:
                each = (forward_s / forwards, backward_s / backwards, put_off.get(layer, 0.0))
                self._samples[message.step].append(LayerSample(message.rank, layer, *each))

    def committed(self, step: int, members: Collection[int], now: float) -> int:
        """A step is committed, so every member has reported its times of the step before the last.

        Returns the number of steps whose measurements are complete now.
        """
        self._committed_s.append(now)
        members = frozenset(members)  # thousands of look-ups follow on a large mesh
        self._profile = self._profile.forget(self._profile.workers.keys() - members)
        complete = sorted(s for s in self._samples if s < step - 1)
        for old in complete:
            samples = [s for s in self._samples.pop(old) if s.rank in members]
            self._profile = self._profile.observe(samples)
            self._forget_idle(members, {s.rank for s in samples})
        return len(complete)

    def _forget_idle(self, members: Collection[int], measured: Collection[int]) -> None:
        """Forget the speed of workers that were parked for being slow a long time ago, so that a plan tries them.

        What has no micro-batch measures nothing, and would count as slow for the rest of the run. If it is slow still,
        it is parked again, and its next trial comes after twice as many steps. If it has worked for as long as the
        first wait, it is a worker like all others.

        Args:
            members: the members.
            measured: those that have measured something in this step.
        """
        speeds = {**dict(self._base.speeds), **self._profile.reported}
        idle = [rank for rank, speed in speeds.items() if speed < 1.0 and rank in members and rank not in measured]
        self._idle = {rank: self._idle.get(rank, 0) + 1 for rank in idle}
        trials = {rank: steps + (rank in measured) for rank, steps in self._trials.items()}
        self._trials = {rank: steps for rank, steps in trials.items() if rank not in idle and steps < _TRIED_AFTER}
        for rank in trials.keys() - self._trials.keys() - set(idle):
            del self._waits[rank]
        for rank, steps in self._idle.items():
            wait = self._waits.get(rank, _TRIED_AFTER)
            if steps >= wait:
                self._waits[rank], self._trials[rank] = 2 * wait, 0
                self._profile, self._base = self._profile.forget({rank}), self._base.without({rank})

    def members_changed(self, members: Collection[int]) -> None:
        """Members have come or gone."""
        self._links = {rank: link for rank, link in self._links.items() if rank in members}
        self._waits = {rank: steps for rank, steps in self._waits.items() if rank in members}
        self._trials = {rank: steps for rank, steps in self._trials.items() if rank in members}

    def assign(
        self, old: Placement, stages: Stages, num_microbatches: int, *, split: SplitBackward | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of each worker: as `plan_change` would assign them, where layers stay.

        Assignments that fit in memory come first, as in plans. What a new number of stages needs is not known here, as
        its layers are not cut yet.
        """
        if not self._follows_speeds:
            return assign_evenly(stages, num_microbatches)
        costs, order, cuts = priced(self.lasting, split), old.microbatch_order, old.layer_cuts
        found = reassign_microbatches(Assignment.of(old), num_microbatches, stages, costs, self._settings.align)
        candidates = (each.counts for each in found)
        if len(stages) != len(cuts) - 1:
            return next(candidates)
        # All members wait for this decision, and on a large mesh it takes long to make other candidates, and to compute
        # the step time of each.
        is_large = sum(map(len, stages)) > _TIMED_WORKERS
        by_counts = {
            counts: executed(Assignment(stages, cuts, counts, order), split)
            for counts in islice(candidates, 1 if is_large else None)
        }
        if self._settings.memory_limit is not None:
            # The one that needs the least memory may be none of these.
            even = assign_evenly(stages, num_microbatches)
            by_counts.setdefault(even, executed(Assignment(stages, cuts, even, order), split))
            rule, tables = MemoryRule(old.shardings, self._mirror_count), MemoryTables()
            needed = {counts: max(memory_of(each, costs, rule, tables)) for counts, each in by_counts.items()}
            fitting = {
                counts: each for counts, each in by_counts.items() if needed[counts] <= self._settings.memory_limit
            }
            by_counts = fitting or by_counts
        if is_large or len(by_counts) == 1:
            return next(iter(by_counts))
        return min(by_counts, key=lambda counts: step_time(by_counts[counts], costs).seconds)

    def limited(self, placement: Placement, split: SplitBackward) -> Assignment:
        """The placement with the limits of its workers.

        These are the limits that `plan_change` plans with, once it is known which of the measured differences last;
        until then those by rule.
        """
        by_rule = executed(Assignment.of(placement), split)
        if not (self.is_measured and self._lasting.is_covered):
            return by_rule
        costs = priced(self.lasting, split)
        return best_limits(by_rule, step_time(by_rule, costs, split.rule), split, costs, split.rule)[0]


@dataclass(frozen=True)
class ReschedulePolicy:
    """The settings of what a run may change by itself.

    Args:
        schedule: the settings of the schedule.
        steps: the number of the run's last step.
        mirror_count: the number of mirrors of each page.
        drain_below: a worker whose relative speed stays below this is asked to leave (elastic.evict_slower_than); 0 if
            none is.
        min_workers: no worker is asked to leave if there are no more than these.
        tries_backwards: True if a trial during the run decides whether weight gradients are put off.
        interrupted_every: the run validates, or writes a checkpoint, every so many steps; 0 for never. Such steps take
            longer, which a trial has to leave out.
    """

    schedule: ScheduleSettings
    steps: int
    mirror_count: int = 1
    drain_below: float = 0.0
    min_workers: int = 1
    tries_backwards: bool = False
    interrupted_every: tuple[int, ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings, steps: int) -> ReschedulePolicy:
        """Read the policy from the settings. In a run that is not elastic nothing moves."""
        schedule, elastic = settings.schedule, settings.elastic
        if not elastic.enabled:
            schedule = replace(schedule, microbatches=False, layers=False)
        # Compiled backwards are always the pair of programs (worker/programs/backward_pair.py).
        is_pair = settings.runtime.compile or settings.runtime.device == XLA
        return cls(
            schedule,
            steps,
            settings.mirror.count,
            elastic.evict_slower_than,
            elastic.min_workers,
            schedule.split_backward == AUTO and not is_pair,
            (settings.train.validate_every, settings.checkpoint.every),
        )


class Rescheduler:
    """Decides from measured times what is moved. Called by the controller's thread; plans are made by another one.

    Args:
        measured: the measured costs. This object keeps them up to date.
        frequencies: controls the frequencies of the workers' devices.
        roster: the process ids of the workers, by which their devices are found.
    """

    def __init__(
        self,
        policy: ReschedulePolicy,
        measured: MeasuredCosts,
        protocol: ControllerProtocol,
        frequencies: Frequencies,
        roster: Roster,
    ) -> None:
        self._policy = policy
        self._settings = policy.schedule
        self._measured = measured
        self._protocol = protocol
        self._frequencies = frequencies
        self._backwards = BackwardChoice(
            protocol, measured, tries=policy.tries_backwards, interrupted_every=policy.interrupted_every
        )
        self._roster = roster
        self._observed = 0  # steps with complete measurements since the mesh epoch began
        self._epoch = protocol.placement.mesh.epoch
        self._asked: tuple[Goal, int] | None = None  # the goal of the last reviews, and how many had it in a row
        self._members = protocol.placement.mesh.members
        self._changes = 0  # the number of changes that this has made since members last came or went
        self._step = 0  # the last one that is committed
        self._planned: Planned | None = None  # the last plan
        self._is_planning = False
        self._reviewed = 0  # the step of the last review
        self._told_of_memory = -1  # the mesh epoch in which it was recorded that layers which may not move do not fit
        self._content = 0  # the number of reviews in a row that found nothing to move
        self._slow: set[int] = set()
        self._too_slow: defaultdict[int, int] = defaultdict(int)  # rank -> reviews in a row that found it too slow
        self._started = protocol.placement
        self._rule = MemoryRule(protocol.placement.shardings, policy.mirror_count)

    @property
    def slow(self) -> Collection[int]:
        """The members that are slow, by the differences of their measured times that last."""
        return self._slow

    @property
    def speeds(self) -> Mapping[int, float]:
        """Rank -> speed relative to the median worker, as measured over the last steps; only of those measured."""
        return self._measured.speeds

    def report(self, message: Measured) -> None:
        """A worker reports what its layers took in a step, and what they keep."""
        self._measured.measured(message)

    def begun(self, placement: Placement, version: int) -> list[Action]:
        """A mesh epoch begins."""
        self._backwards.begun()
        return self._frequencies.begun(placement, version)

    def committed(self, step: int, now: float) -> list[Action]:
        """A step is committed. Every `schedule.every` steps, review whether a move would gain something.

        Args:
            now: seconds of a clock that never runs back.
        """
        self._step = step
        mesh = self._protocol.placement.mesh
        self._observed += self._measured.committed(step, mesh.members, now)
        if sorted(mesh.members) != sorted(self._members):
            self._members = mesh.members
            self._changes = 0
            self._measured.members_changed(mesh.members)
        if self._epoch != mesh.epoch:
            self._epoch = mesh.epoch
            self._observed = 0
            self._asked = None
            self._content = 0
        actions = self._frequencies.committed(self._protocol.placement, step, now)
        if self._backwards.is_trying:  # before it decides: its last block may be run in the way that is given up
            self._frequencies.leave_out()
        actions += self._backwards.committed(step, now)
        settings = self._settings
        follows = settings.microbatches or settings.layers or self._policy.drain_below or self._frequencies.active
        is_due = self._observed >= settings.window and step % settings.every == 0
        return [*actions, *self._review(step, now)] if follows and is_due and self._protocol.settled else actions

    # ---- decisions

    def _review(self, step: int, now: float) -> list[Action]:
        is_known = self._measured.review(now)
        actions: list[Action] = []
        split = self._protocol.split
        if self._measured.is_measured:
            actions.append(WriteCosts(priced(self._measured.costs, split).to_json()))
        if not is_known:
            return actions
        costs = priced(self._measured.lasting, split)
        self._reviewed = step
        request = self._request(costs, max(0, self._policy.steps - step))
        known = self._planned
        # With `regroups` a plan also tries other numbers of workers per stage, which takes seconds on up to 256
        # workers. So a plan is used again as long as the mesh and the costs, rounded, stay the same.
        if known is not None and request.settings.regroups and known.request.key == request.key:
            return [*actions, *self._judge(known.decision, costs)]
        if not self._is_planning:
            self._is_planning = True
            actions.append(PlanChange(request))
        return actions

    def planned(self, event: Planned) -> list[Action]:
        """A plan is ready. It is dropped if the mesh has changed meanwhile, or is about to."""
        self._is_planning = False
        if not self._is_current(event.request):
            return []
        epoch = self._protocol.placement.mesh.epoch
        last, self._planned = self._planned, event
        if event.decision is not None:
            return self._judge(event.decision, event.request.costs)
        if last is not None and last.request.placement.mesh.epoch == epoch:
            return []  # that nothing fits was recorded in this mesh epoch already
        return [Record("plan", {"ranks": [], "mesh_epoch": epoch, "reason": event.why_not, "message": event.why_not})]

    def hinted(self, event: Hinted, now: float) -> list[Action]:
        """Frequency hints are ready. They are dropped as a plan is, or if something else is to be changed now.

        Args:
            now: seconds of a clock that never runs back.
        """
        is_quiet = self._content >= self._settings.patience and not self._backwards.is_trying
        holds = is_quiet and self._is_current(event.request)
        return self._frequencies.hinted(event, self._step, now, self._roster.pids, holds=holds)

    def _is_current(self, asked: PlanRequest | HintRequest) -> bool:
        """True if the mesh is as it was when this was asked for, and does not change."""
        epoch, running = self._protocol.placement.mesh.epoch, self._protocol.running
        return self._protocol.settled and (epoch, running) == (asked.placement.mesh.epoch, asked.running)

    def _judge(self, decision: Decision | None, costs: CostModel) -> list[Action]:
        """Decide what follows from a plan at one review.

        Args:
            decision: None if no placement fits in memory.
        """
        if decision is None:
            return []
        step, actions = self._reviewed, self._short_of_memory(decision)
        if decision.before.seconds >= _SHORT_STEP_S:
            actions += self._name_slow(costs, step)
            if drained := self._drain_slowest(costs):
                return [*actions, *drained]
        elif decision.layers_stay and not decision.overflows:
            return actions
        goal = self._goal(decision)
        if goal is None:
            self._asked = None
            self._content += 1
            # Frequencies come last: only when nothing has moved for a while, and not during another trial.
            if self._content >= self._settings.patience and not self._backwards.is_trying:
                actions += self._frequencies.hint(self._protocol.placement, self._protocol.running, costs)
            return actions
        self._content = 0
        times = self._asked[1] + 1 if self._asked is not None and _alike(self._asked[0], goal) else 1
        self._asked = goal, times
        # Each change must be asked for by twice as many reviews in a row as the one before, so that noise does not move
        # micro-batches back and forth. But trials of parked workers become rare by themselves, and are to end soon.
        is_trial = not self._parked_by(goal).isdisjoint(self._measured.tried)
        if times >= self._settings.patience * 2 ** (0 if is_trial else min(self._changes, _MOST_DOUBLINGS)):
            self._asked = None
            self._changes += not is_trial
            actions += self._protocol.rebalance(goal)
        return actions

    def _parked_by(self, goal: Goal) -> set[int]:
        """The workers that have micro-batches either at present or by the goal, but not both."""
        here = self._protocol.placement
        return _parked(here.mesh.stages, here.microbatch_counts) ^ _parked(goal.stages, goal.microbatch_counts)

    def _request(self, costs: CostModel, remaining_steps: int) -> PlanRequest:
        protocol, settings = self._protocol, self._settings
        seconds = tuple(round(math.log2(max(layer.seconds, 1e-9)) * 8) for layer in costs.layers)
        shares = tuple(round(layer.weight_share * 8) for layer in costs.layers)
        return PlanRequest(
            (protocol.placement.mesh.epoch, costs.speeds, seconds, shares, protocol.running),
            protocol.placement,
            costs,
            remaining_steps,
            PlanSettings(
                layout=protocol.layout,
                memory_limit=settings.memory_limit or math.inf,
                state_limit=self._state_limit(costs),
                mirror_count=self._policy.mirror_count,
                split=protocol.split,
                align=settings.align,
                stage_counts=None if settings.layers and settings.stages else (),
                keeps_layers=not settings.layers,
                follows_speeds=settings.microbatches,
            ),
            protocol.running,
        )

    def _state_limit(self, costs: CostModel) -> float:
        """The most bytes of state that a plan may give to one worker (`state_limit`).

        With schedule.memory_limit there is no such limit, as that setting says what fits.
        """
        if self._settings.memory_limit is not None:
            return math.inf
        started, present = Assignment.of(self._started), Assignment.of(self._protocol.placement)
        return state_limit(started, present, costs, self._rule)

    def _goal(self, decision: Decision) -> Goal | None:
        """The next move, if one gains enough; else None.

        Micro-batches come first, as they move no state; layers are moved when micro-batches gain nothing more.
        If layers or micro-batches do not fit in memory where they are, they move to where they do, whatever that gains.
        If nothing that was found fits, they move for a gain alone.
        """
        now, later, last, settings = decision.now, decision.later, decision.last, self._settings
        before = decision.before.seconds
        enough = before * (1 - settings.min_gain)
        if not decision.layers_stay and decision.lacks:
            return self._goal_of(last, before, "layers by cost") if last.time.seconds <= enough else None
        if not decision.layers_stay or (decision.overflows and (later is not None or settings.microbatches)):
            what = "micro-batches" if decision.layers_stay and later is None else "layers"
            return self._goal_of(last, before, f"{what} to where they fit in memory")
        if settings.microbatches and now.time.seconds <= enough:
            return self._goal_of(now, before, "micro-batches assigned by speed")
        if settings.layers and later is not None and later.time.seconds <= enough:
            return self._goal_of(later, before, "layers by cost")
        return None

    def _short_of_memory(self, decision: Decision) -> list[Action]:
        """Record, once in each mesh epoch, that no plan was found that fits in memory."""
        epoch = self._protocol.placement.mesh.epoch
        if not decision.lacks or self._told_of_memory == epoch:
            return []
        self._told_of_memory = epoch
        stay = "the best plan that was found does not fit" if self._settings.layers else "no layer may move"
        why = f"the fullest worker lacks {decision.lacks:,.0f} B of schedule.memory_limit, and {stay}"
        return [Record("plan", {"ranks": [], "mesh_epoch": epoch, "reason": why, "message": why})]

    def _goal_of(self, plan: Variant, before: float, what: str) -> Goal | None:
        there, here = plan.assignment, self._protocol.placement
        if (there.stages, there.layer_cuts, there.microbatch_counts) == (
            here.mesh.stages,
            here.layer_cuts,
            here.microbatch_counts,
        ):
            running = self._protocol.running
            if (there.limits, there.put_off) == (running.limits, running.put_off):
                return None
            what = "other limits in flight"
        why = f"{what}: {1e3 * before:.0f} to {1e3 * plan.time.seconds:.0f} ms a step expected"
        return Goal(there.stages, there.layer_cuts, there.microbatch_counts, why)

    # ---- slow workers

    def _name_slow(self, costs: CostModel, step: int) -> list[Action]:
        actions: list[Action] = []
        epoch = self._protocol.placement.mesh.epoch
        for rank in self._protocol.placement.mesh.members:
            speed = costs.speed(rank)
            if rank not in self._slow and speed < _SLOW:
                self._slow.add(rank)
                kind, why = "slow", f"worker {rank} is slow: its micro-batches take {_times_as_long(speed)}"
            elif rank in self._slow and speed > _FAST:
                self._slow.discard(rank)
                kind, why = "recover", f"worker {rank} is as fast as the others again"
            else:
                continue
            known = "measured times"
            if rank in self._measured.tried and rank not in self._measured.speeds:
                known, why = "not measured for long", f"worker {rank} had no work for long: it is tried again"
            about = {"ranks": [rank], "mesh_epoch": epoch, "speed": round(speed, 3), "reason": known}
            actions.append(Record(kind, {"step": step, **about, "message": why}))
        return actions

    def _drain_slowest(self, costs: CostModel) -> list[Action]:
        """Ask the slowest worker to leave if it was too slow in several reviews in a row, and enough others stay."""
        members, drain_below = self._protocol.placement.mesh.members, self._policy.drain_below
        for rank in members:
            self._too_slow[rank] = self._too_slow[rank] + 1 if costs.speed(rank) < drain_below else 0
        slowest = min(members, key=costs.speed)
        if len(members) <= self._policy.min_workers or self._too_slow[slowest] < self._settings.patience:
            return []
        self._too_slow.clear()
        return [*self._protocol.drain(slowest, f"slower than elastic.evict_slower_than={drain_below:g}")]


def _times_as_long(speed: float) -> str:
    # The smoother's speeds are multiples of its grain, and never less than one.
    return f"{1 / speed:.2f} times as long" if speed > SLOWEST else f"{1 / SLOWEST:.0f} times as long, or more"


def _parked(stages: Stages, counts: Sequence[Sequence[int]]) -> set[int]:
    """The workers that have no micro-batch."""
    each = zip(stages, counts, strict=True)
    return {rank for members, of_stage in each for rank, n in zip(members, of_stage, strict=True) if not n}


def _alike(one: Goal, other: Goal) -> bool:
    """True if two goals have the same stages and layers; their numbers of micro-batches may differ."""
    return (one.stages, one.layer_cuts) == (other.stages, other.layer_cuts)
