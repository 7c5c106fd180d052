"""What to do after an event, on all axes: dataflow at once, layers if it is worth their move, frequencies last.

A pure function of the placement, who is there now, and the costs: the same on any machine, and nothing is done here.
ElasWave plans dataflow, graph and frequency together; here each later axis starts from what the one before chose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.mesh import Topology
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, PowerModel, plan_frequencies
from elaswave_spmd.scheduling.microbatch_assignment import Dataflow, dealings, first_microbatches, host_numbers
from elaswave_spmd.scheduling.partition import StageWorkers, partition
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.stage_search import Groupings, Move, Moves, Stages, old_stages_of, stage_workers
from elaswave_spmd.scheduling.step_time import (
    CLASSES,
    EXACT,
    Assignment,
    StepTime,
    bound,
    memory_of,
    stage_seconds,
    step_time,
    timed_graph,
)

_POWER = PowerModel()

TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1)
"""Partitions looked at: the one that moves least among those whose bottleneck is so much above the optimum."""

_EXACT_ACTIONS, _EXACT_WORKERS = 1024, 32
"""Frequencies are chosen on the action lists up to this size; beyond it by class of workers, on the lower bound."""

_MOST_SHIFTS = 16


@dataclass(frozen=True)
class Hint:
    """Relative frequencies of workers that do alike, one for each of timing.CLASSES."""

    stage: int
    ranks: tuple[int, ...]
    frequencies: tuple[float, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {f:.3g}" for name, f in zip(CLASSES, self.frequencies, strict=True))
        who = f"worker {self.ranks[0]}" if len(self.ranks) == 1 else f"{len(self.ranks):,} workers"
        return f"stage {self.stage}, {who}: {shown}"


@dataclass(frozen=True)
class Variant:
    """An assignment, what its micro-batches come to, what a step of it takes, and what it takes to get there."""

    assignment: Assignment
    dataflow: Dataflow
    time: StepTime
    move: Move

    @property
    def key(self) -> tuple[Stages, tuple[int, ...]]:
        """What moves state: stages and cuts."""
        return self.assignment.stages, self.assignment.layer_cuts


@dataclass(frozen=True)
class Decision:
    """What to do after an event, and why.

    Args:
        before: a step as it was, with the costs as they are now.
        now: to run at once: the layers as they lie, where that is possible, and micro-batches dealt by speed.
        later: to run once its state has moved in the background; None: `now` is best.
        hints: frequencies for `later`, or else for `now`; empty where none are asked for.
        frequency: what the hints come to.
        remaining_steps: steps that the move had to pay for.
        reasons: one line each.
    """

    before: StepTime
    now: Variant
    later: Variant | None
    hints: tuple[Hint, ...]
    frequency: FrequencyPlan | None
    remaining_steps: int
    reasons: tuple[str, ...]

    @property
    def last(self) -> Variant:
        """What will run in the end."""
        return self.later or self.now

    def __str__(self) -> str:
        lines = [f"before: {self.before}", f"now: {self.now.time}", *_indented(self.now.assignment)]
        if self.later:
            lines += [f"later: {self.later.time}", f"  {self.later.move}", *_indented(self.later.assignment)]
        lines += [f"why: {reason}" for reason in self.reasons]
        lines += [f"hint: {hint}" for hint in self.hints[:16]]
        return "\n".join(lines)


def plan_change(
    placement: Placement,
    costs: CostModel,
    remaining_steps: int,
    *,
    stages: Sequence[Sequence[int]] | None = None,
    memory_limit: float = math.inf,
    mirror_count: int = 1,
    stage_counts: Collection[int] | None = None,
    frequencies: FrequencyRange | None = None,
    power: PowerModel = _POWER,
    goal_s: float | None = None,
) -> Decision:
    """The answer to an event.

    Args:
        placement: what runs; its layers say where state lies.
        costs: as measured; speeds of workers that are gone do not matter.
        remaining_steps: steps until the run ends, or until another event is likely.
        stages: who is there now, by stage (recovery.decide.next_stages); None: everybody of the placement.
        memory_limit: bytes of each worker.
        mirror_count: mirrors of each page of dealt state.
        stage_counts: numbers of stages that may be taken instead of the present one; None: any, () none.
        frequencies: what devices may be set to; None: no hints.
        goal_s: seconds of a step that no frequency is raised beyond, such as those before the event.

    Raises:
        PlanError: the costs are of another model, a stage is empty, or no partition fits in memory.
    """
    old = Assignment.of(placement)
    costs.check(old.layer_cuts[-1])
    if remaining_steps < 0:
        raise PlanError("a plan is for 0 or more remaining steps", got=remaining_steps, fix="give a larger train.steps")
    present = tuple(tuple(members) for members in (stages or old.stages))
    if not all(present):
        empty = [s for s, members in enumerate(present) if not members]
        raise PlanError("each stage has a worker", got=f"stages {empty} are empty", fix="give the stage up")
    rule = MemoryRule(placement.shardings.zero_level, mirror_count)
    planner = _Planner(old, costs, remaining_steps, rule, memory_limit, placement.mesh.topology)
    crew = planner.crew(present)
    now, reasons = planner.now(crew)
    later, why = planner.later(crew, now, stage_counts)
    reasons.append(why)
    hints: tuple[Hint, ...] = ()
    plan = None
    if frequencies is not None:
        plan, hints = frequency_hints((later or now).assignment, costs, frequencies, power, goal_s)
        reasons.append(str(plan))
    return Decision(step_time(old, costs, rule), now, later, hints, plan, remaining_steps, tuple(reasons))


def redealt(
    old: Assignment, num_microbatches: int, stages: Sequence[Sequence[int]], costs: CostModel, topology: Topology
) -> tuple[Dataflow, ...]:
    """Micro-batches by speed over workers of whom some had micro-batches before, in `old`; as dataflow.dealings."""
    speeds, hosts = [costs.speeds_of(members) for members in stages], host_numbers(stages, topology)
    starts = first_microbatches(stages, old.stages, old.microbatch_counts)
    return dealings(num_microbatches, speeds, dealing=old.dealing, hosts=hosts, starts=starts)


@dataclass(frozen=True)
class _Crew:
    """Workers grouped into stages, with all that does not depend on the layers' cuts."""

    stages: Stages
    rows: list[StageWorkers]
    moves: Moves
    dealings: tuple[Dataflow, ...]


@dataclass(frozen=True)
class _Planner:
    old: Assignment
    costs: CostModel
    remaining_steps: int
    rule: MemoryRule
    memory_limit: float
    topology: Topology

    def crew(self, stages: Stages) -> _Crew:
        """Micro-batches dealt by all aims, and by the first alone where that is another dealing."""
        speeds = [self.costs.speeds_of(members) for members in stages]
        rows, _ = stage_workers(speeds, self.old.num_microbatches, [self.memory_limit] * len(stages))
        moves = Moves(self.costs, self.old.layer_cuts, old_stages_of(stages, self.old.stages))
        return _Crew(
            stages, rows, moves, redealt(self.old, self.old.num_microbatches, stages, self.costs, self.topology)
        )

    def now(self, crew: _Crew) -> tuple[Variant, list[str]]:
        """What can run at once: the old layers on the stages that are there, if they fit in memory."""
        workers = sum(map(len, crew.stages))
        if len(crew.stages) == self.old.num_stages:
            kept = self.variant(crew, self.old.layer_cuts)
            if self.fits(kept):
                return kept, [f"micro-batches dealt by speed over {workers:,} workers, {kept.dataflow}; no state moves"]
            why = "the layers as they lie do not fit in memory any more"
        else:
            why = f"{len(crew.stages)} of {self.old.num_stages} stages are left"
        found = self.recut(crew, 0.0)
        return found, [f"{why}: layers are cut anew before going on ({found.move})"]

    def later(self, crew: _Crew, now: Variant, stage_counts: Collection[int] | None) -> tuple[Variant | None, str]:
        """Other cuts or another number of stages, if the gain over the remaining steps exceeds the move.

        A layer that must move now counts again if it moves later: from where it lies before the event.
        """
        variants = {found.key: found for found in (self.recut(crew, tolerance) for tolerance in TOLERANCES)}
        refined = self.refined(crew, min(variants.values(), key=self.total))
        variants[refined.key] = refined
        if stage_counts is None or stage_counts:
            for found in self.regrouped(crew, stage_counts):
                variants[found.key] = found
        variants.pop(now.key, None)
        if not variants:
            return None, "layers stay: no partition is better"
        exact = all(v.time.how == now.time.how for v in variants.values())
        best = min(variants.values(), key=lambda v: self.total(v, exact))
        gain = (_seconds(now, exact) - _seconds(best, exact)) * self.remaining_steps
        shown = (
            f"{_seconds(now, exact):.4g} -> {_seconds(best, exact):.4g} s a step gain {gain:.4g} s over "
            f"{self.remaining_steps} steps, the move takes {best.move.seconds:.4g} s"
        )
        if gain <= best.move.seconds:
            return None, f"layers stay: the best other plan does not pay for its move: {shown}"
        number = best.assignment.num_stages
        what = "layers move" if number == len(crew.stages) else f"{number} stages instead of {len(crew.stages)}"
        return best, f"{what}: {shown}"

    def regrouped(self, crew: _Crew, stage_counts: Collection[int] | None) -> list[Variant]:
        """Other groupings of the workers: of small meshes several, to be timed, and the best with finer cuts."""
        small = sum(map(len, crew.stages)) <= _EXACT_WORKERS
        old = self.old
        groupings = Groupings(
            self.costs,
            crew.stages,
            old.num_microbatches,
            old.stages,
            old.layer_cuts,
            self.remaining_steps,
            self.rule,
            self.memory_limit,
        )
        choices = groupings.good(stage_counts) if small else [groupings.best(stage_counts)]
        crews = {choice.stages: self.crew(choice.stages) for choice in choices if choice.stages != crew.stages}
        found = [self.variant(crews[c.stages], c.partition.cuts) for c in choices if c.stages in crews]
        if small and found:
            best = min(found, key=self.total)
            found.append(self.refined(crews[best.assignment.stages], best))
        return found

    def recut(self, crew: _Crew, tolerance: float) -> Variant:
        """The partition with the fewest bytes moved within a tolerance of the least bottleneck."""
        table = crew.moves.table(self.rule)
        found = partition(self.costs, crew.rows, rule=self.rule, move_bytes=table, tolerance=tolerance)
        return self.variant(crew, found.cuts)

    def refined(self, crew: _Crew, start: Variant) -> Variant:
        """Small meshes: cuts are shifted by a layer as long as that helps. The bottleneck says nothing of filling."""
        if start.time.how != EXACT or sum(map(len, crew.stages)) > _EXACT_WORKERS:
            return start
        best, last = start, None
        for _ in range(_MOST_SHIFTS):
            if best is last:
                break
            last, cuts = best, best.assignment.layer_cuts
            for i, step in product(range(1, len(cuts) - 1), (-1, 1)):
                if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                    found = self.variant(crew, (*cuts[:i], cuts[i] + step, *cuts[i + 1 :]))
                    if self.total(found) < self.total(best) and self.fits(found):
                        best = found
        return best

    def fits(self, variant: Variant) -> bool:
        """Whether no worker needs more memory than it has."""
        return max(memory_of(variant.assignment, self.costs, self.rule)) <= self.memory_limit

    def total(self, variant: Variant, exact: bool = True) -> float:
        """Seconds until the end, the move included."""
        return _seconds(variant, exact) * self.remaining_steps + variant.move.seconds

    def variant(self, crew: _Crew, cuts: Sequence[int]) -> Variant:
        """These cuts, with the micro-batches dealt by all aims, unless the pipeline takes longer with these than
        without.
        """
        found, move = [], crew.moves.of(cuts, self.rule)
        for dealt in crew.dealings:
            assignment = Assignment(crew.stages, tuple(cuts), dealt.counts, self.old.dealing)
            found.append(Variant(assignment, dealt, step_time(assignment, self.costs, self.rule), move))
        return min(found, key=lambda v: v.time.seconds)


def _seconds(variant: Variant, exact: bool) -> float:
    """Of a step; where not all were timed in the same way, by the lower bound."""
    return variant.time.seconds if exact else max(variant.time.bound_s, variant.time.traffic_s)


def _indented(assignment: Assignment) -> list[str]:
    lines = [f"  {line}" for line in str(assignment).splitlines()]
    return lines if len(lines) <= 16 else [*lines[:16], f"  ... {len(lines) - 16} more stages"]


def frequency_hints(
    assignment: Assignment,
    costs: CostModel,
    limits: FrequencyRange,
    power: PowerModel,
    goal_s: float | None = None,
) -> tuple[FrequencyPlan, tuple[Hint, ...]]:
    """Frequencies of all workers: on the action lists of small meshes, by class of workers on large ones."""
    num_workers = sum(map(len, assignment.stages))
    if num_workers <= _EXACT_WORKERS and 2 * assignment.num_stages * assignment.num_microbatches <= _EXACT_ACTIONS:
        graph, seconds, delays = timed_graph(assignment, costs)
        work = graph.work(seconds)
        plan = plan_frequencies(
            work, limits, makespan=lambda f: graph.makespan(seconds / f, delays), goal_s=goal_s, power=power
        )
        stage_of = {rank: s for s, members in enumerate(assignment.stages) for rank in members}
        rows = zip(graph.ranks, plan.frequencies, strict=True)
        return plan, tuple(Hint(stage_of[rank], (rank,), of_rank) for rank, of_rank in rows)
    return _hints_by_class(assignment, costs, limits, power, goal_s)


def _hints_by_class(
    assignment: Assignment, costs: CostModel, limits: FrequencyRange, power: PowerModel, goal_s: float | None
) -> tuple[FrequencyPlan, tuple[Hint, ...]]:
    """Workers of a stage with equal speed and equally many micro-batches are one row; the makespan is the lower
    bound.
    """
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    forward_s, backward_s, counts, groups = [], [], [], []
    for s, members in enumerate(assignment.stages):
        kinds = np.stack([assignment.microbatch_counts[s], costs.speeds_of(members)], axis=1)
        alike, which = np.unique(kinds, axis=0, return_inverse=True)
        order, ranks = np.argsort(which.ravel(), kind="stable"), np.array(members)
        sizes = np.bincount(which.ravel())
        groups += [(s, part) for part in np.split(ranks[order], np.cumsum(sizes)[:-1])]
        counts.append(alike[:, 0])
        forward_s.append(forward[s] / alike[:, 1])
        backward_s.append(backward[s] / alike[:, 1])
    ends = np.cumsum([len(of_stage) for of_stage in counts])[:-1]
    work = np.zeros((len(groups), len(CLASSES)))
    work[:, 1] = np.concatenate(counts) * np.concatenate(forward_s)
    work[:, 2] = np.concatenate(counts) * np.concatenate(backward_s)

    def makespan(frequencies: np.ndarray) -> float:
        f = [a / b for a, b in zip(forward_s, np.split(frequencies[:, 1], ends), strict=True)]
        b = [a / b for a, b in zip(backward_s, np.split(frequencies[:, 2], ends), strict=True)]
        return bound(f, b, counts, delays, assignment.limits)

    devices = [len(ranks) for _, ranks in groups]
    plan = plan_frequencies(work, limits, devices=devices, makespan=makespan, goal_s=goal_s, power=power)
    rows = zip(groups, plan.frequencies, strict=True)
    return plan, tuple(Hint(s, tuple(ranks.tolist()), of_row) for (s, ranks), of_row in rows)
