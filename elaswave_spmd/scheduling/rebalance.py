"""The plan after an event: micro-batches at once, layers and stages if the gain pays for the move, frequencies last.

`plan_change` is a pure function of the placement, the workers that are present, and the costs. It gives the same result
on any machine and carries nothing out. ElasWave plans its three axes (micro-batches, layers, frequency) together; here
each later axis starts from what the one before chose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, PowerModel, plan_frequencies
from elaswave_spmd.scheduling.microbatch_assignment import (
    MicrobatchAssignment,
    candidate_assignments,
    first_microbatches,
)
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
"""For each of these the partition is tried that moves least among those whose bottleneck exceeds the optimum by at most
this part."""

_EXACT_ACTIONS, _EXACT_WORKERS = 1024, 32
"""Up to this size frequencies are chosen on the action lists; beyond it by class of workers, on the lower bound."""

_MOST_SHIFTS = 16


@dataclass(frozen=True)
class Hint:
    """The relative frequencies of workers with equal work, one for each of step_time.CLASSES."""

    stage: int
    ranks: tuple[int, ...]
    frequencies: tuple[float, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {f:.3g}" for name, f in zip(CLASSES, self.frequencies, strict=True))
        who = f"worker {self.ranks[0]}" if len(self.ranks) == 1 else f"{len(self.ranks):,} workers"
        return f"stage {self.stage}, {who}: {shown}"


@dataclass(frozen=True)
class Variant:
    """A possible assignment with its step time and the cost of moving there."""

    assignment: Assignment
    microbatches: MicrobatchAssignment
    time: StepTime
    move: Move

    @property
    def key(self) -> tuple[Stages, tuple[int, ...]]:
        """The stages and cuts, which decide where state is. Variants with equal keys move equal state."""
        return self.assignment.stages, self.assignment.layer_cuts


@dataclass(frozen=True)
class Decision:
    """The planned answer to an event, and its reasons.

    Args:
        before: the step time of the assignment before, with the present costs.
        now: the assignment to run at once: layers stay where they are if that is possible, and micro-batches are
            assigned by speed.
        later: the assignment to run once its state has moved in the background; None: `now` is best.
        hints: frequencies for `later`, or else for `now`; empty if none were asked for.
        frequency: the step time and energy with the hints.
        remaining_steps: the number of steps over which a move had to pay.
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
        """The assignment that will run in the end."""
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
    """Plans the answer to an event.

    Args:
        placement: the present placement. State is where its layers are.
        costs: as measured; speeds of workers that are gone do not matter.
        remaining_steps: steps until the run ends, or until another event is likely.
        stages: the workers that are present, by stage (recovery.reconfiguration.next_stages); None: all workers of the
            placement.
        memory_limit: bytes that each worker has.
        mirror_count: mirrors of each page of sharded state.
        stage_counts: numbers of stages that may replace the present one; None: any; (): none.
        frequencies: the range that devices may be set to; None: no hints.
        goal_s: a step time; frequencies are raised only as far as it takes to reach this, for example the step time
            before the event.

    Raises:
        PlanError: the costs belong to another model, a stage is empty, or no partition fits in memory.
    """
    old = Assignment.of(placement)
    costs.check(old.layer_cuts[-1])
    if remaining_steps < 0:
        raise PlanError(
            f"{remaining_steps} steps remain", rule="a plan is for 0 or more", fix="give a larger train.steps"
        )
    present = tuple(tuple(members) for members in (stages or old.stages))
    if not all(present):
        empty = [s for s, members in enumerate(present) if not members]
        raise PlanError(f"stages {empty} are empty", rule="each stage has a worker", fix="plan without these stages")
    rule = MemoryRule(placement.shardings.zero_level, mirror_count)
    planner = _Planner(old, costs, remaining_steps, rule, memory_limit)
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


def reassign_microbatches(
    old: Assignment, num_microbatches: int, stages: Sequence[Sequence[int]], costs: CostModel
) -> tuple[MicrobatchAssignment, ...]:
    """The candidate assignments of micro-batches to these stages, some of whose workers had micro-batches in `old`."""
    speeds = [costs.speeds_of(members) for members in stages]
    starts = first_microbatches(stages, old.stages, old.microbatch_counts)
    return candidate_assignments(num_microbatches, speeds, microbatch_order=old.microbatch_order, starts=starts)


@dataclass(frozen=True)
class _Crew:
    """Workers grouped into stages, with everything that does not depend on how layers are cut."""

    stages: Stages
    rows: list[StageWorkers]
    moves: Moves
    candidates: tuple[MicrobatchAssignment, ...]


@dataclass(frozen=True)
class _Planner:
    """The search for the best assignment after an event. All methods are pure."""

    old: Assignment
    costs: CostModel
    remaining_steps: int
    rule: MemoryRule
    memory_limit: float

    def crew(self, stages: Stages) -> _Crew:
        """These stages with their micro-batches assigned."""
        speeds = [self.costs.speeds_of(members) for members in stages]
        rows, _ = stage_workers(speeds, self.old.num_microbatches, [self.memory_limit] * len(stages))
        moves = Moves(self.costs, self.old.layer_cuts, old_stages_of(stages, self.old.stages))
        candidates = reassign_microbatches(self.old, self.old.num_microbatches, stages, self.costs)
        return _Crew(stages, rows, moves, candidates)

    def now(self, crew: _Crew) -> tuple[Variant, list[str]]:
        """The variant that can run at once: the old layers on the present stages, if they fit in memory."""
        workers = sum(map(len, crew.stages))
        if len(crew.stages) == self.old.num_stages:
            kept = self.variant(crew, self.old.layer_cuts)
            if self.fits(kept):
                return kept, [
                    f"micro-batches assigned by speed to {workers:,} workers, {kept.microbatches}; no state moves"
                ]
            why = "the layers where they are do not fit in memory any more"
        else:
            why = f"{len(crew.stages)} of {self.old.num_stages} stages are left"
        found = self.recut(crew, 0.0)
        return found, [f"{why}: layers are cut anew before going on ({found.move})"]

    def later(self, crew: _Crew, now: Variant, stage_counts: Collection[int] | None) -> tuple[Variant | None, str]:
        """The variant with other cuts or another number of stages whose gain over the remaining steps exceeds its move.

        Returns None and the reason if there is none. Moves are counted from where layers are before the event, so a
        layer that must move now counts again if it moves later.
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
        """Other groupings of the workers into stages. On small meshes several are timed, and the best is refined."""
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
        """The partition that moves the fewest bytes within a tolerance of the least bottleneck."""
        table = crew.moves.table(self.rule)
        found = partition(self.costs, crew.rows, rule=self.rule, move_bytes=table, tolerance=tolerance)
        return self.variant(crew, found.cuts)

    def refined(self, crew: _Crew, start: Variant) -> Variant:
        """On small meshes, shifts cuts by one layer as long as the step gets faster.

        The partition minimizes the bottleneck, which does not include the time to fill the pipeline.
        """
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
        """True if no worker needs more memory than it has."""
        return max(memory_of(variant.assignment, self.costs, self.rule)) <= self.memory_limit

    def total(self, variant: Variant, exact: bool = True) -> float:
        """Seconds until the end, the move included."""
        return _seconds(variant, exact) * self.remaining_steps + variant.move.seconds

    def variant(self, crew: _Crew, cuts: Sequence[int]) -> Variant:
        """These cuts, with the candidate assignment of micro-batches whose step is fastest."""
        found, move = [], crew.moves.move_to(cuts, self.rule)
        for candidate in crew.candidates:
            assignment = Assignment(crew.stages, tuple(cuts), candidate.counts, self.old.microbatch_order)
            found.append(Variant(assignment, candidate, step_time(assignment, self.costs, self.rule), move))
        return min(found, key=lambda v: v.time.seconds)


def _seconds(variant: Variant, exact: bool) -> float:
    """Seconds of a step; by the lower bound if the variants were not all timed in the same way."""
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
    """The frequencies of all workers: by the action lists on small meshes, by class of workers on large ones."""
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
    """Frequencies where workers of a stage with equal speeds and counts are one row, and the makespan is the bound."""
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
