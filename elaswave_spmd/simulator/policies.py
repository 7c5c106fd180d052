"""The answers of elastic systems to lost or slow workers, on one cost model. Each policy says what is modelled of it.

All policies have the same layers, workers, links and seconds, the same time to detect a loss and to inform all workers,
and before the loss the same placement, with its mirrors. After the loss only our policy has mirrors, and only our
policy takes newcomers. The time of a step is that of `step_time.step_time`, unless a policy has an order of actions of
its own.

Backwards run in two parts in our steps, before a loss as well, and in the steps of `reroute`. All other steps have
whole backwards. Ratios of throughput are all relative to one and the same step before the loss, with whole backwards,
so that the ratios of two policies compare like their steps after the loss. The step after the loss is the one that a
policy ends with, when all moves are done.

The policies of other systems are modelled after their papers and not run: nothing here is a measurement of their code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment, step_time
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.simulator.changes import Change, remaining_share
from elaswave_spmd.simulator.engine import SHARED, execute
from elaswave_spmd.simulator.recompute import recompute_step
from elaswave_spmd.simulator.work import Work

MOST_ACTIONS = 1 << 20
"""The most actions of a step that is simulated as a whole. It is high, so that figures do not mix whole steps with
extrapolated parts."""

_MOMENTS = (0.2, 0.5, 0.8)  # moments of a loss within a step, over which its cost is averaged


@dataclass(frozen=True)
class Constants:
    """Times in seconds that are assumed, not computed. They are the same for all policies.

    Args:
        detect_s: the time until a loss is noticed and all workers know which ones are left.
        restart_s: the time of a restart of the whole job: scheduler, processes, communicators, loading the checkpoint.
        checkpoint_s: the time between two checkpoints, half of which is computed again after a restart.
    """

    detect_s: float = 1.0
    restart_s: float = 600.0
    checkpoint_s: float = 600.0


@dataclass(frozen=True)
class Case:
    """A healthy placement, and the change that happens to it.

    Args:
        placement: the placement before the change.
        costs: the costs on healthy workers.
        change: the workers that are lost, slow or new.
        remaining_steps: the number of steps over which a move has to pay.
        mirror_count: the number of mirrors of each page of sharded state.
        memory_limit: the bytes of memory of each worker.
        layout: the pages of the model; None for those of a model with such costs.
        constants: the times that are assumed.
    """

    placement: Placement
    costs: CostModel
    change: Change
    remaining_steps: int = 1000
    mirror_count: int = 1
    memory_limit: float = math.inf
    layout: ModelLayout | None = None
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        self.change.check(self.placement.mesh)

    @cached_property
    def healthy(self) -> Assignment:
        """The assignment before the change, with whole backwards."""
        return Assignment.of(self.placement)

    @cached_property
    def split(self) -> SplitBackward | None:
        """The layers whose backward our workers run in two parts: those that have a share of weight gradients."""
        return SplitBackward.of_costs(self.costs, self.rule, self.memory_limit)

    @cached_property
    def healthy_split(self) -> Assignment:
        """The assignment before the change, as our workers execute it."""
        return executed(self.healthy, self.split)

    @cached_property
    def rule(self) -> MemoryRule:
        """The specs and mirrors, which decide the bytes of a worker."""
        return MemoryRule(self.placement.shardings, self.mirror_count)

    @cached_property
    def after(self) -> CostModel:
        """The costs after the change."""
        return self.change.costs(self.costs)

    @cached_property
    def before_s(self) -> float:
        """Seconds of a step before the change, with whole backwards."""
        return self.seconds(self.healthy, self.costs)

    @cached_property
    def share(self) -> float:
        """The aggregate speed of the workers after the change, as a fraction of that before it."""
        return remaining_share(self.placement.mesh, self.costs, self.change)

    def seconds(self, assignment: Assignment, costs: CostModel, rule: MemoryRule | None = None) -> float:
        """Seconds of a step, simulated as a whole."""
        return step_time(assignment, costs, rule or self.rule, most_actions=MOST_ACTIONS).seconds

    def ratio(self, outcome: Outcome) -> float:
        """(throughput after / before) / (aggregate speed after / before)."""
        return outcome.throughput / (self.healthy.num_microbatches / self.before_s) / self.share


@dataclass(frozen=True)
class Outcome:
    """The result of a policy.

    Args:
        policy: its name.
        step_s: the seconds of a step after the change; inf if the run cannot go on.
        microbatches: the number of micro-batches of such a step.
        recovery_s: the seconds that the change costs once, besides slower steps: waiting, and work done again.
        note: one line for tables.
        decision: the decision of our planner; None for other systems.
    """

    policy: str
    step_s: float
    microbatches: int
    recovery_s: float
    note: str = ""
    decision: Decision | None = None

    @property
    def throughput(self) -> float:
        """Micro-batches per second."""
        return self.microbatches / self.step_s if self.microbatches else 0.0


class Policy(Protocol):
    """The answer of one system to a change."""

    @property
    def name(self) -> str:
        """A short name, for tables."""
        ...

    def answer(self, case: Case) -> Outcome:
        """Compute the result for a case."""
        ...


@dataclass(frozen=True)
class Ours:
    """This project: `plan_change`, with its axes to choose from.

    Modelled: backwards in two parts, within the limits that real runs have; micro-batches assigned by speed, layers and
    stages moved if that pays, and frequencies, all by `plan_change`, which real runs plan with; the step in which
    workers are lost, recomputed action by action; a restart from the checkpoint where the reshard plan finds that pages
    have lost all replicas. Not modelled: the reduction's share of what is recomputed, and the slower steps until layers
    have moved (`simulate_transition` has these). A run cannot go on if no partition fits in memory.

    Args:
        layers: layers may move.
        stages: workers may change their stage, and the number of stages may change.
        frequencies: the range of relative frequencies; None: they stay.
    """

    layers: bool = True
    stages: bool = True
    frequencies: FrequencyRange | None = None
    name: str = "ours"

    def answer(self, case: Case) -> Outcome:
        asked = PlanSettings(
            layout=case.layout,
            memory_limit=case.memory_limit,
            mirror_count=case.mirror_count,
            split=case.split,
            stage_counts=None if self.stages and self.layers else (),
            frequencies=self.frequencies,
            keeps_layers=not self.layers,
        )
        try:
            decision = plan_change(
                case.placement,
                case.after,
                case.remaining_steps if self.layers else 0,
                asked,
                stages=case.change.stages(case.placement.mesh),
                goal_s=case.before_s,
            )
        except PlanError as error:  # the case has been checked before, so only memory can be too small
            return Outcome(self.name, math.inf, 0, case.constants.detect_s, error.what)
        chosen = decision.last if self.layers else decision.now
        seconds = case.seconds(chosen.assignment, case.after)
        if decision.frequency is not None:  # the gain of the hints, on the lists or the bound that they were planned on
            seconds *= decision.frequency.makespan_s / decision.frequency.makespan_before_s
        recovery_s, constants = decision.pause_s, case.constants
        if (
            decision.now.move.from_checkpoint
        ):  # no replica is left of some page: everybody begins at the last checkpoint
            recovery_s += constants.detect_s + constants.restart_s + constants.checkpoint_s / 2
        elif case.change.gone:
            now_s = case.seconds(decision.now.assignment, case.after)
            recovery_s += constants.detect_s + mean_recompute_s(case.healthy_split, case.costs, case.change.gone, now_s)
        return Outcome(
            self.name, seconds, case.healthy.num_microbatches, recovery_s, "; ".join(decision.reasons), decision
        )


def mean_recompute_s(healthy: Assignment, costs: CostModel, gone: Collection[int], now_s: float) -> float:
    """Seconds that a loss costs its step, beyond what a step takes from then on; the mean over moments of the step.

    Args:
        now_s: seconds of a step that runs on the workers that are left from its start.
    """
    whole = execute(Work.from_assignment(healthy), costs, wires=SHARED)
    whole_s, found = whole.step_s, []
    for moment in _MOMENTS:
        step = recompute_step(healthy, costs, gone, moment * whole_s, whole)
        found.append(moment * whole_s if step is None else step.seconds - now_s)  # None: the step begins again
    return max(0.0, sum(found) / len(found))


@dataclass(frozen=True)
class DropReplica:
    """TorchFT, FT-HSDP: a lost worker's data-parallel replica (its column of the pipeline) pauses until it is whole.

    Modelled: replicas that are left go on with their micro-batches, so the global batch shrinks; the step under way is
    thrown away. A slow worker is waited for, or its replica dropped, whichever is faster. Not modelled: the optimizer's
    different batch, the healing of the replica, and memory.

    Raises:
        PlanError: stages of different sizes have no replicas.
    """

    name: str = "drop replica"

    def answer(self, case: Case) -> Outcome:
        columns = columns_of(case.healthy, self.name)
        gone = {column for column, ranks in enumerate(columns) if set(ranks) & set(case.change.gone)}
        slow = {column for column, ranks in enumerate(columns) if set(ranks) & {r for r, _ in case.change.slow}} - gone
        found = [
            _of_columns(self.name, case, [c for c in range(len(columns)) if c not in out])
            for out in (gone, gone | slow)
        ]
        return max(found, key=lambda outcome: outcome.throughput)


def _of_columns(name: str, case: Case, kept: Sequence[int]) -> Outcome:
    """The result if some columns of the healthy mesh go on, each with its own micro-batches."""
    old = case.healthy
    recovery_s = case.constants.detect_s + case.before_s / 2 if case.change.gone else 0.0
    counts = tuple(tuple(of_stage[c] for c in kept) for of_stage in old.microbatch_counts)
    if not kept or not sum(counts[0]):
        return Outcome(name, math.inf, 0, recovery_s, "no replica is whole")
    stages = tuple(tuple(members[c] for c in kept) for members in old.stages)
    left = Assignment(stages, old.layer_cuts, counts, old.microbatch_order)
    seconds = case.seconds(left, case.after, replace(case.rule, mirror_count=0))
    micro = f"{left.num_microbatches} of {old.num_microbatches} micro-batches a step"
    note = f"{len(kept)} of {len(old.stages[0])} replicas, {micro}"
    return Outcome(name, seconds, left.num_microbatches, recovery_s, note)


@dataclass(frozen=True)
class Restart:
    """The whole job starts again from its checkpoint, on as many whole replicas as the workers that are left make up.

    Modelled: any worker may take any place; micro-batches of a replica as before. Slow workers stay, or count as lost,
    whichever is faster. Not modelled: waiting for the scheduler or for repair, and memory.
    """

    name: str = "restart"

    def answer(self, case: Case) -> Outcome:
        old, constants = case.healthy, case.constants
        width = len(columns_of(old, self.name)[0])
        slow = {rank for rank, _ in case.change.slow}
        healthy = [r for members in old.stages for r in members if r not in slow and r not in case.change.gone]
        found = []
        for number in {len(healthy) // width, (len(healthy) + len(slow)) // width}:
            columns = [(healthy + sorted(slow))[c * width : (c + 1) * width] for c in range(number)]
            counts = old.microbatch_counts[0][:number]
            if not number or not sum(counts):
                continue
            stages = tuple(zip(*columns, strict=True))
            left = Assignment(stages, old.layer_cuts, (counts,) * width, old.microbatch_order)
            seconds = case.seconds(left, case.after, replace(case.rule, mirror_count=0))
            lost_s = constants.detect_s + constants.restart_s + constants.checkpoint_s / 2
            note = f"{number} replicas of {width}, from the checkpoint"
            found.append(Outcome(self.name, seconds, sum(counts), lost_s if case.change.gone else 0.0, note))
        if not found:
            return Outcome(self.name, math.inf, 0, constants.restart_s, "no replica is whole")
        return max(found, key=lambda outcome: outcome.throughput)


def columns_of(assignment: Assignment, policy: str) -> list[tuple[int, ...]]:
    """The data-parallel replicas: one worker of each stage.

    Raises:
        PlanError: stages differ in size or in their micro-batches.
    """
    if len({len(members) for members in assignment.stages}) > 1 or len(set(assignment.microbatch_counts)) > 1:
        raise PlanError(
            f"stages of {[len(members) for members in assignment.stages]} workers are no replicas",
            rule=f"policy {policy!r} has replicas: stages of equal size",
            fix="begin with a mesh like dp4_pp4",
        )
    return list(zip(*assignment.stages, strict=True))
