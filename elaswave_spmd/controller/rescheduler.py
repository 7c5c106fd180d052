"""What the controller makes of measured times: micro-batches and layers go where they take least, while training goes
on.

Nothing here changes a bit: what is moved are micro-batches, layers and state, by planned changes of the mesh epoch.
When there is nothing to move, frequencies follow.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.errors import PlanError
from elaswave_spmd.recovery.actions import Effect
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Goal
from elaswave_spmd.recovery.messages import Measured
from elaswave_spmd.recovery.reconfiguration import Stages
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.profiler import LayerSample, ProfileSmoother
from elaswave_spmd.scheduling.rebalance import Decision, plan_change, redealt
from elaswave_spmd.scheduling.step_time import Assignment, step_time

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_MOST_DOUBLINGS = 6
_SHORT_STEP_S = 0.05
_TIMED_WORKERS = 32
_SLOW, _FAST = 0.8, 0.9  # a worker is said to be slow below the one, and not any more above the other


class Rescheduler:
    """Part of the controller, in its thread.

    Args:
        base: what is known of the layers before anything is measured.
        steps: of the run.
        evict_below: a worker of a smaller relative speed than this is drained, if `min_workers` stay; 0: none.
        perform: does what the protocol says.
        frequencies: those of the workers' devices; None: they stay as they are.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        base: CostModel,
        steps: int,
        protocol: ControllerProtocol,
        observer: RunObserver,
        perform: Callable[[Sequence[Effect]], None],
        *,
        mirror_count: int = 1,
        evict_below: float = 0.0,
        min_workers: int = 1,
        frequencies: Frequencies | None = None,
    ) -> None:
        self._settings, self._base, self._steps = settings, base, steps
        self._protocol, self._observer, self._perform = protocol, observer, perform
        self._mirror_count, self._evict_below, self._min_workers = mirror_count, evict_below, min_workers
        self._frequencies = frequencies or Frequencies(settings, observer)
        self._profile = ProfileSmoother(len(base.layers), window=settings.window)
        self._samples: defaultdict[int, list[LayerSample]] = defaultdict(list)
        self._links: dict[int, tuple[float, ...]] = {}  # rank -> latency in seconds, bytes per second
        self._observed = 0  # steps since the mesh was last changed
        self._epoch = protocol.placement.mesh.epoch
        self._asked: tuple[Goal, int] | None = None  # what the last looks asked for, and how many did
        self._members, self._changes = protocol.placement.mesh.members, 0  # made since members came or went
        self._planned: tuple[tuple[object, ...], Decision | None] | None = (
            None  # the last plan, and what it was made of
        )
        self._content = 0  # looks in a row that asked for nothing
        self._slow: set[int] = set()
        self._too_slow: defaultdict[int, int] = defaultdict(int)  # rank -> looks in a row
        if settings.microbatches:
            protocol.deal = self._deal

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        protocol: ControllerProtocol,
        observer: RunObserver,
        perform: Callable[[Sequence[Effect]], None],
        frequencies: Frequencies | None = None,
    ) -> Rescheduler:
        """That of a run."""
        settings, elastic = plan.settings, plan.settings.elastic
        following = (
            settings.schedule if elastic.enabled else replace(settings.schedule, microbatches=False, layers=False)
        )
        return cls(
            following,
            plan.costs,
            plan.job.steps,
            protocol,
            observer,
            perform,
            mirror_count=settings.mirror.count,
            evict_below=elastic.evict_slower_than,
            min_workers=elastic.min_workers,
            frequencies=frequencies,
        )

    @property
    def costs(self) -> CostModel:
        """As measured up to now; links as the middle worker measured its own, where settings do not say."""
        base = self._base
        if self._links:
            base = base.with_links(*map(statistics.median, zip(*self._links.values(), strict=True)))
        return self._profile.costs(base.with_links(self._settings.latency, self._settings.bandwidth))

    def measured(self, message: Measured) -> None:
        """A worker tells what its layers took in a step, and what they keep."""
        self._base = self._base.with_memory(message.memory)
        if message.link:
            self._links[message.rank] = message.link
        scale = self._frequencies.scale(message.rank, message.step)
        if scale is None:
            return
        for layer, forward_s, backward_s, forwards, backwards in message.rows:
            if forwards and backwards:
                sample = LayerSample(message.rank, layer, scale * forward_s / forwards, scale * backward_s / backwards)
                self._samples[message.step].append(sample)

    def committed(self, step: int) -> None:
        """A step is committed: everybody has told of the one before the last."""
        members = self._protocol.placement.mesh.members
        self._profile = self._profile.forget(self._profile.workers.keys() - set(members))
        for old in sorted(s for s in self._samples if s < step - 1):
            self._profile = self._profile.observe(s for s in self._samples.pop(old) if s.rank in members)
            self._observed += 1
        if sorted(members) != sorted(self._members):
            self._members, self._changes = members, 0
            self._links = {rank: link for rank, link in self._links.items() if rank in members}
        if self._epoch != self._protocol.placement.mesh.epoch:
            self._epoch, self._observed, self._asked, self._content = self._protocol.placement.mesh.epoch, 0, None, 0
        self._frequencies.committed(step)
        following = (
            self._settings.microbatches or self._settings.layers or self._evict_below or self._frequencies.active
        )
        if (
            following
            and self._observed >= self._settings.window
            and step % self._settings.every == 0
            and self._protocol.settled
        ):
            self._look(step)

    def save(self) -> None:
        """Writes what was measured to the run's directory, for `schedule.profile` and the planner."""
        if self._profile.layers:
            self._observer.run_dir.write_costs(self.costs.to_json())

    # ---- decisions

    def _look(self, step: int) -> None:
        costs = self.costs
        self.save()
        decision = self._plan(costs, max(0, self._steps - step))
        if decision is None:
            return
        if decision.before.seconds < _SHORT_STEP_S:  # what differs in it is noise, and nothing to gain
            return
        self._tell_of_slow(costs, step)
        if self._evicts(costs):
            return
        goal = self._goal(decision)
        if goal is None:
            self._asked, self._content = None, self._content + 1
            if self._content >= self._settings.patience:  # hints come last
                self._frequencies.hint(self._protocol.placement, costs, step)
            return
        self._content = 0
        times = self._asked[1] + 1 if self._asked is not None and _alike(self._asked[0], goal) else 1
        self._asked = goal, times
        # Each change has to be asked for twice as long as the one before: noise cannot drive micro-batches to and fro.
        if times >= self._settings.patience * 2 ** min(self._changes, _MOST_DOUBLINGS):
            self._asked, self._changes = None, self._changes + 1
            self._perform(self._protocol.rebalance(goal))

    def _plan(self, costs: CostModel, remaining_steps: int) -> Decision | None:
        """What would be best; None: nothing fits in memory, which is told once an epoch.

        Other groupings take up to a second to look at: once, as long as the mesh and the costs stay as they are.
        """
        stages = self._settings.layers and self._settings.stages
        seconds = tuple(round(math.log2(max(layer.seconds, 1e-9)) * 8) for layer in costs.layers)
        known = self._protocol.placement.mesh.epoch, costs.speeds, seconds
        if stages and self._planned is not None and self._planned[0] == known:
            return self._planned[1]
        try:
            decision = plan_change(
                self._protocol.placement,
                costs,
                remaining_steps,
                mirror_count=self._mirror_count,
                memory_limit=self._settings.memory_limit or math.inf,
                stage_counts=None if stages else (),
            )
        except PlanError as error:
            if self._planned is None or self._planned[0][0] != known[0]:
                mesh = self._protocol.placement.mesh
                self._observer.on_event("plan", ranks=[], mesh_epoch=mesh.epoch, reason=str(error), message=str(error))
            decision = None
        self._planned = known, decision
        return decision

    def _goal(self, decision: Decision) -> Goal | None:
        """Where to go: micro-batches first, which move no state; layers when that is done."""
        before, now, later = decision.before.seconds, decision.now, decision.later
        if self._settings.microbatches and now.time.seconds <= before * (1 - self._settings.min_gain):
            return self._goal_of(now.assignment, before, now.time.seconds, "micro-batches dealt by speed")
        if self._settings.layers and later is not None and later.time.seconds <= before * (1 - self._settings.min_gain):
            return self._goal_of(later.assignment, before, later.time.seconds, "layers by cost")
        return None

    def _goal_of(self, there: Assignment, before: float, after: float, what: str) -> Goal | None:
        here = self._protocol.placement
        why = f"{what}: {1e3 * before:.0f} to {1e3 * after:.0f} ms a step expected"
        goal = Goal(there.stages, there.layer_cuts, there.microbatch_counts, why)
        same = (here.mesh.stages, here.layer_cuts, here.microbatch_counts)
        return None if (goal.stages, goal.layer_cuts, goal.microbatch_counts) == same else goal

    def _deal(self, stages: Stages, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Micro-batches of each worker after members have come or gone: as `plan_change` would deal them, where layers
        stay.
        """
        costs, placement = self.costs, self._protocol.placement
        dealing, cuts = placement.dealing, placement.layer_cuts
        dealt = redealt(Assignment.of(placement), num_microbatches, stages, costs, placement.mesh.topology)
        found = [one.counts for one in dealt]
        large = sum(map(len, stages)) > _TIMED_WORKERS  # everybody waits for this: no lists of a large mesh are timed
        if len(found) == 1 or len(stages) != len(cuts) - 1 or large:
            return found[0]
        return min(found, key=lambda counts: step_time(Assignment(stages, cuts, counts, dealing), costs).seconds)

    # ---- slow workers

    def _tell_of_slow(self, costs: CostModel, step: int) -> None:
        for rank in self._protocol.placement.mesh.members:
            speed = costs.speed(rank)
            if rank not in self._slow and speed < _SLOW:
                self._slow.add(rank)
                why = f"worker {rank} is slow: its micro-batches take {1 / speed:.2f} times as long"
                self._say("slow", step, rank, speed, why)
            elif rank in self._slow and speed > _FAST:
                self._slow.discard(rank)
                self._say("recover", step, rank, speed, f"worker {rank} is as fast as the others again")

    def _say(self, kind: str, step: int, rank: int, speed: float, message: str) -> None:
        epoch, speed = self._protocol.placement.mesh.epoch, round(speed, 3)
        told = {"ranks": [rank], "mesh_epoch": epoch, "speed": speed, "reason": "measured times", "message": message}
        self._observer.on_event(kind, step=step, **told)

    def _evicts(self, costs: CostModel) -> bool:
        """Drains the slowest worker if it has been too slow for several looks."""
        members = self._protocol.placement.mesh.members
        for rank in members:
            self._too_slow[rank] = self._too_slow[rank] + 1 if costs.speed(rank) < self._evict_below else 0
        slowest = min(members, key=costs.speed)
        if len(members) <= self._min_workers or self._too_slow[slowest] < self._settings.patience:
            return False
        self._too_slow.clear()
        self._perform(self._protocol.drain(slowest, f"slower than elastic.evict_slower_than={self._evict_below:g}"))
        return True


def _alike(one: Goal, other: Goal) -> bool:
    """Whether two looks ask for the same kind of change, if not for the very same micro-batches."""
    return (one.stages, one.layer_cuts) == (other.stages, other.layer_cuts)
