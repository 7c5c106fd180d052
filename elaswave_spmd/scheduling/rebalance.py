"""The plan after an event: micro-batches at once, layers and stages if the gain pays for the move, frequencies last.

`plan_change` is a pure function of the placement, the workers that are present, and the costs. It gives the same result
on any machine and carries nothing out. ElasWave plans its three axes (micro-batches, layers, frequency) together; here
each later axis starts from what the one before chose.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.dvfs import (
    FrequencyPlan,
    FrequencyRange,
    Hint,
    plan_frequencies,
    plan_paces,
)
from elaswave_spmd.scheduling.microbatch_assignment import (
    Counts,
    MicrobatchAssignment,
    assign_by_speed,
    candidate_assignments,
    fastest,
    first_microbatches,
    with_parked,
)
from elaswave_spmd.scheduling.partition import StageWorkers, partition
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.split_backward import SplitBackward, best_limits, executed
from elaswave_spmd.scheduling.stage_search import (
    Groupings,
    MoveEstimate,
    MoveEstimates,
    StageChoice,
    Stages,
    old_stages_of,
    stage_workers,
)
from elaswave_spmd.scheduling.state_moves import Move, StateMoves, layout_of_costs
from elaswave_spmd.scheduling.step_time import (
    EXACT,
    MOST_ACTIONS,
    Assignment,
    MemoryTables,
    StepTime,
    bound,
    memory_of,
    stage_seconds,
    step_time,
    step_time_below,
    timed_graph,
    weights_seconds,
)
from elaswave_spmd.sharding.layout import ModelLayout

TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1)
"""For each of these the partition is tried that moves least among those whose bottleneck exceeds the optimum by at most
this part."""

_EXACT_ACTIONS, _EXACT_WORKERS = 1024, 32
"""Up to this size paces are chosen by the order of actions; beyond it one frequency by class of workers, on the lower
bound."""

_MOST_SHIFTS = 16  # of cuts, by one layer each

# Meshes up to these numbers of workers.
_SEARCHED_WORKERS = 64  # all is tried: cuts shifted by a layer, workers parked or left out
_FEW_WORKERS = 16  # where so few are left without the slowest, another one is left out as well
_TIMED_WORKERS = 256  # even groupings into all numbers of stages are timed

# Groupings of the workers into other stages.
_UNEVEN = 1.1  # the least that even stages take is seldom more than this part of what uneven ones take
_MOST_REGROUPED = 192  # groupings that are timed
_MOST_OF_A_NUMBER = 32  # of these, groupings into the same number of stages, on searched meshes
_FEW_OF_A_NUMBER = 4  # the same on larger ones
_MOST_SEARCHED = 6  # numbers of stages for which uneven stages are searched for, on meshes that are not searched
_MOST_REFINED = 4  # of the groupings that were timed, those whose cuts are shifted

# Candidates that are looked at more closely.
_SETTLED_ACTIONS = 65_536  # simulated of a step by which a plan is decided on
_MOST_SETTLED = 12  # candidates whose steps are simulated so far
_MOST_TUNED = 12  # candidates of which workers are parked, and limits varied, to see whether that is faster

# For each of these, workers that may be parked.
_MOST_CHOICES = 4096  # combinations that are listed
_MOST_SIMULATED = 48  # combinations that are simulated, at most
_PARKED_ACTIONS = 32_768  # actions that are simulated for all of them


@dataclass(frozen=True)
class Candidate:
    """An assignment that the search looks at, with its step time and an estimate of moving there.

    Args:
        is_settled: as much of its step was simulated as ever is.
    """

    assignment: Assignment
    microbatches: MicrobatchAssignment
    time: StepTime
    estimate: MoveEstimate
    is_settled: bool = False

    @property
    def key(self) -> tuple[Stages, tuple[int, ...]]:
        """The stages and cuts, which decide where state is. Candidates with equal keys move equal state."""
        return self.assignment.stages, self.assignment.layer_cuts

    def planned(self, move: Move) -> Variant:
        """This assignment with the figures of its reshard plan."""
        return Variant(self.assignment, self.microbatches, self.time, move)


@dataclass(frozen=True)
class Variant:
    """A planned assignment, with its step time and the figures of the reshard plan that leads there."""

    assignment: Assignment
    microbatches: MicrobatchAssignment
    time: StepTime
    move: Move


@dataclass(frozen=True)
class Decision:
    """The planned answer to an event, and its reasons.

    Args:
        before: the step time of the assignment before, with the present costs.
        now: the assignment to run at once: layers stay where they are if that is possible, and micro-batches are
            assigned by speed. Its move makes lost replicas again, in the background if layers stay.
        later: the assignment to run once its state has moved in the background; None: `now` is best.
        layers_stay: `now` has the layers where they were, so that training goes on without waiting for state.
        hints: frequencies for `later`, or else for `now`; empty if none were asked for.
        frequency: the step time and energy with the hints.
        remaining_steps: the number of steps over which a move had to pay.
        reasons: one line each.
    """

    before: StepTime
    now: Variant
    later: Variant | None
    layers_stay: bool
    hints: tuple[Hint, ...]
    frequency: FrequencyPlan | None
    remaining_steps: int
    reasons: tuple[str, ...]

    @property
    def last(self) -> Variant:
        """The assignment that will run in the end."""
        return self.later or self.now

    @property
    def pause_s(self) -> float:
        """Seconds until training goes on: layers that are cut anew at once wait for all of their state.

        This is an upper bound. In a run a replica outside the stage may publish parameters before its state is copied.
        """
        return 0.0 if self.layers_stay else self.now.move.seconds

    def __str__(self) -> str:
        lines = [f"before: {self.before}", f"now: {self.now.time}", *_indented(self.now.assignment)]
        if self.later:
            lines += [f"later: {self.later.time}", f"  {self.later.move}", *_indented(self.later.assignment)]
        lines += [f"why: {reason}" for reason in self.reasons]
        lines += [f"hint: {hint}" for hint in self.hints[:16]]
        return "\n".join(lines)


@dataclass(frozen=True)
class PlanSettings:
    """What a run asks of each of its plans, whatever has happened.

    Args:
        layout: the pages of the model; None: those of a model with such costs (`layout_of_costs`).
        memory_limit: bytes that each worker has.
        state_limit: the most bytes of state that the plan may give a worker.
        mirror_count: mirrors of each page of sharded state.
        split: the layers whose backward is in two parts, which says how much the workers of a plan put off; None: all
            backwards are whole.
        align: the share by which loads may exceed the least possible ones, for fewer sums to send (`schedule.align`).
        stage_counts: numbers of stages that may replace the present one; None: any; (): none.
        frequencies: the range that devices may be set to; None: no hints.
    """

    layout: ModelLayout | None = None
    memory_limit: float = math.inf
    state_limit: float = math.inf
    mirror_count: int = 1
    split: SplitBackward | None = None
    align: float = 0.0
    stage_counts: Collection[int] | None = None
    frequencies: FrequencyRange | None = None

    @property
    def regroups(self) -> bool:
        """True if workers may be grouped into other stages."""
        return self.stage_counts is None or bool(self.stage_counts)


_DEFAULT = PlanSettings()


def plan_change(
    placement: Placement,
    costs: CostModel,
    remaining_steps: int,
    settings: PlanSettings = _DEFAULT,
    *,
    stages: Sequence[Sequence[int]] | None = None,
    running: Assignment | None = None,
    goal_s: float | None = None,
) -> Decision:
    """Plans the answer to an event.

    Args:
        placement: the present placement. State is where its layers are.
        costs: the measured costs; speeds of workers that are gone do not matter.
        remaining_steps: steps until the run ends, or until another event is likely.
        stages: the workers that are present, by stage (recovery.reconfiguration.next_stages); None: all workers of the
            placement.
        running: the assignment of the placement with the limits that workers run with; None: with the best ones.
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
    rule = MemoryRule(placement.shardings, settings.mirror_count, settings.state_limit)
    sharding = placement.state_sharding(settings.mirror_count)
    layout = settings.layout or layout_of_costs(costs)
    moves = StateMoves(sharding, layout, costs, placement.replicas, placement.least_joined(layout))
    planner = _Planner(old, costs, remaining_steps, settings, rule, moves)
    grouping = planner.grouping_of(present)
    at_once, why_anew = planner.now(grouping)
    now = at_once.planned(moves.at_once(*at_once.key))
    later, why = planner.later(grouping, at_once)
    reasons = [_reason_for_now(now, why_anew), why]
    hints: tuple[Hint, ...] = ()
    plan = None
    if settings.frequencies is not None:
        plan, hints = frequency_hints((later or now).assignment, costs, settings.frequencies, goal_s)
        reasons.append(str(plan))
    before = planner.before(running)
    return Decision(before, now, later, not why_anew, hints, plan, remaining_steps, tuple(reasons))


def _reason_for_now(now: Variant, why_anew: str) -> str:
    if why_anew:
        return f"{why_anew}: layers are cut anew before going on ({now.move})"
    workers = sum(map(len, now.assignment.stages))
    return f"micro-batches assigned by speed to {workers:,} workers, {now.microbatches}; no layer moves"


def reassign_microbatches(
    old: Assignment, num_microbatches: int, stages: Sequence[Sequence[int]], costs: CostModel, align: float
) -> tuple[MicrobatchAssignment, ...]:
    """The candidate assignments of micro-batches to these stages, some of whose workers had micro-batches in `old`.

    Args:
        align: as in `PlanSettings`.
    """
    speeds = [costs.speeds_of(members) for members in stages]
    starts = first_microbatches(stages, old.stages, old.microbatch_counts)
    found = candidate_assignments(
        num_microbatches, speeds, microbatch_order=old.microbatch_order, starts=starts, align=align
    )
    if num_microbatches == old.num_microbatches and (kept := _kept_places(stages, old.stages)) is not None:
        # Newcomers need not get any: else a step could take longer with one worker more.
        as_before = with_parked(old.microbatch_counts, kept, speeds, old.microbatch_order)
        found = tuple({each.counts: each for each in (*found, as_before)}.values())
    return found


def _kept_places(stages: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
    """Per stage, int64: where in it the workers are that it had; None if one is gone, or they are in another order."""
    if len(stages) != len(old) or any(len(mine) < len(were) for mine, were in zip(stages, old, strict=True)):
        return None
    found: list[np.ndarray] = []
    for mine, were in zip(stages, old, strict=True):
        known = set(were)
        at = [i for i, rank in enumerate(mine) if rank in known]
        if [mine[i] for i in at] != [*were]:
            return None
        found.append(np.array(at, np.int64))
    return found


@dataclass(frozen=True)
class _Grouping:
    """Workers grouped into stages, with everything that does not depend on how layers are cut.

    Args:
        timed: the candidates that were looked at, by their cuts: searches come to the same cuts in several ways.
    """

    stages: Stages
    rows: list[StageWorkers]
    estimates: MoveEstimates
    candidates: tuple[MicrobatchAssignment, ...]
    timed: dict[tuple[int, ...], Candidate] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class _Planner:
    """The search for the best assignment after an event. All methods are pure."""

    old: Assignment
    costs: CostModel
    remaining_steps: int
    settings: PlanSettings
    rule: MemoryRule
    moves: StateMoves
    tables: MemoryTables = field(default_factory=dict)

    def before(self, running: Assignment | None) -> StepTime:
        """The step time until now, simulated as far as those of plans are.

        Args:
            running: as in `plan_change`.
        """
        small = sum(map(len, self.old.stages)) <= _TIMED_WORKERS
        most = _SETTLED_ACTIONS if small else MOST_ACTIONS
        by_rule = executed(self.old, self.settings.split) if running is None else running
        time = step_time(by_rule, self.costs, self.rule, most_actions=most)
        return time if running is not None else self.with_best_limits(by_rule, time)[1]

    def grouping_of(self, stages: Stages) -> _Grouping:
        """These stages with their micro-batches assigned."""
        speeds = [self.costs.speeds_of(members) for members in stages]
        rows, _ = stage_workers(speeds, self.old.num_microbatches, self.settings.memory_limit, self.settings.split)
        estimates = MoveEstimates(self.costs, self.old.layer_cuts, old_stages_of(stages, self.old.stages))
        candidates = reassign_microbatches(self.old, self.old.num_microbatches, stages, self.costs, self.settings.align)
        return _Grouping(stages, rows, estimates, candidates)

    def now(self, grouping: _Grouping) -> tuple[Candidate, str]:
        """The candidate that can run at once: the old layers on the present stages, if they fit in memory.

        Returns: the candidate, and why layers are cut anew for it; empty if they stay.
        """
        if len(grouping.stages) == self.old.num_stages:
            kept = self.settled_candidate(grouping, self.old.layer_cuts)
            if self.fits(kept):
                return self.tune(grouping, kept), ""
            why = "the layers where they are do not fit in memory any more"
        else:
            why = f"{len(grouping.stages)} of {self.old.num_stages} stages are left"
        return self.tune(grouping, self.recut(grouping, 0.0)), why

    def later(self, grouping: _Grouping, now: Candidate) -> tuple[Variant | None, str]:
        """The variant with other cuts or another number of stages whose gain over the remaining steps exceeds its move.

        The search ranks candidates by estimates, which count moves from where layers were before the event. The
        candidate that it ends with is accepted by its reshard plan, which begins where the plan of `now` ends.

        Returns: None and the reason if there is none.
        """
        candidates: dict[object, Candidate] = {}
        with suppress(PlanError):  # what runs now may be the only one that fits in memory
            candidates = {found.key: found for found in (self.recut(grouping, tolerance) for tolerance in TOLERANCES)}
            if sum(map(len, grouping.stages)) <= _TIMED_WORKERS:
                found = self.recut(grouping, 0.0, by_pipeline=True)
                candidates[found.key] = found
            refined = self.with_shifted_cuts(grouping, min(candidates.values(), key=self.total))
            candidates[refined.key] = refined
        by_key = dict.fromkeys(candidates, grouping)
        if self.settings.regroups:
            least = min(self.total(found) for found in (now, *candidates.values()))
            others = self.regrouped(grouping, least)
            others += self.without_slowest(grouping, least)
            for theirs, found in others:
                known = candidates.get(found.key)
                if known is None or self.total(found) < self.total(known):
                    candidates[found.key], by_key[found.key] = found, theirs
        for found in sorted(candidates.values(), key=self.total)[:_MOST_TUNED]:
            candidates[found.key] = self.tune(by_key[found.key], found)
        # What runs now is no change. Its time is compared with the best of the others below.
        candidates.pop(now.key, None)
        if not candidates:
            return None, "layers stay: no partition is better"
        best = self.best_settled(candidates.values())
        now_s, best_s = now.time.seconds, best.time.seconds
        gain = (now_s - best_s) * self.remaining_steps
        # On a large mesh a plan takes seconds, and no move is shorter than the latency of a link.
        worth_planning = gain > self.costs.latency_s
        move = self.moves.afterwards(now.key, best.key) if worth_planning else None
        move_s = best.estimate.seconds if move is None else move.seconds
        shown = (
            f"{now_s:.4g} -> {best_s:.4g} s a step gain {gain:.4g} s over {self.remaining_steps} steps, the move takes "
            f"{move_s:.4g} s"
        )
        if move is None or gain <= move.seconds:
            return None, f"layers stay: the best other plan does not pay for its move: {shown}"
        number = best.assignment.num_stages
        what = "layers move" if number == len(grouping.stages) else f"{number} stages instead of {len(grouping.stages)}"
        return best.planned(move), f"{what}: {shown}"

    def regrouped(self, grouping: _Grouping, total: float) -> list[tuple[_Grouping, Candidate]]:
        """Other groupings of the workers into stages.

        On small meshes several of each number of stages are timed, and the best are refined; on larger ones even
        groupings are timed, and on the largest only the one with the best lower bound.

        Args:
            total: seconds until the end that the best candidate so far takes.
        """
        old, stage_counts = self.old, self.settings.stage_counts
        groupings = Groupings(
            self.costs,
            grouping.stages,
            old.num_microbatches,
            old.stages,
            old.layer_cuts,
            self.remaining_steps,
            self.rule,
            self.settings.memory_limit,
            self.settings.split,
        )
        found: list[tuple[_Grouping, Candidate]] = []

        def look_at(choice: StageChoice) -> None:
            theirs = self.grouping_of(choice.stages)
            each = [self.candidate(theirs, one.cuts) for one in choice.partitions]
            found.append((theirs, min(each, key=self.total)))

        num_workers = sum(map(len, grouping.stages))
        small = num_workers <= _SEARCHED_WORKERS
        if num_workers > _TIMED_WORKERS:
            choice = groupings.best(stage_counts)
            if choice.stages != grouping.stages:
                look_at(choice)
            return found
        # Even stages of every number come first: what the best of them takes ends the search among uneven ones early.
        # Those, or other cuts than those with the least bottleneck, may take less than a lower bound of others.
        seen = {grouping.stages}
        numbers = groupings.numbers(stage_counts)
        for room, searches in ((1.0, False), (_UNEVEN, True)):
            for even_s, number in numbers if small or not searches else numbers[:_MOST_SEARCHED]:
                # All groupings into two stages are few, and may take far less than even ones.
                least = even_s if not searches else 0.0 if number == 2 else groupings.least_seconds(number)
                if least * self.remaining_steps >= room * total:
                    continue
                if len(found) >= _MOST_REGROUPED:
                    break
                choices = groupings.of_number(number, total if searches else 0.0)
                for choice in choices[: _MOST_OF_A_NUMBER if small else _FEW_OF_A_NUMBER]:
                    # Their lower bounds come in ascending order: from some one on none can be better.
                    if groupings.total(choice) >= room * total:
                        break
                    if choice.stages not in seen:
                        seen.add(choice.stages)
                        look_at(choice)
                        total = min(total, self.total(found[-1][1]))
        if small:
            # The least bottleneck is not always the shortest step: the best may be one with other cuts.
            found.sort(key=lambda each: self.total(each[1]))
            found += [(theirs, self.with_shifted_cuts(theirs, start)) for theirs, start in found[:_MOST_REFINED]]
        return found

    def without_slowest(self, grouping: _Grouping, total: float) -> list[tuple[_Grouping, Candidate]]:
        """On small meshes, groupings of all workers but the slowest, which is parked in any stage; also of all but two.

        So a plan is seldom faster when a worker is lost: what would be planned then is among these. Where it is parked
        matters, as it gets the reduced gradients of its stage.

        Args:
            total: as for `regrouped`.
        """
        left, idle = grouping.stages, list[int]()
        found: list[tuple[_Grouping, Candidate]] = []
        for most in (_SEARCHED_WORKERS, _FEW_WORKERS):
            if not 2 < sum(map(len, left)) <= most or (slowest := self.slowest_of(left)) is None:
                break
            idle.append(slowest)
            left = tuple(tuple(rank for rank in members if rank != slowest) for members in left)
            best = self.best_of(self.grouping_of(left), total)
            found += [
                self.with_idle_workers(one, idle, home) for _, one in best for home in range(len(one.assignment.stages))
            ]
        return found

    def slowest_of(self, stages: Stages) -> int | None:
        """The slowest worker of the stages that are not empty without it; of equal ones one of the largest stage."""
        able = [
            (self.costs.speed(rank), -len(members), -rank) for members in stages if len(members) > 1 for rank in members
        ]
        return -min(able)[2] if able else None

    def best_of(self, grouping: _Grouping, total: float) -> list[tuple[_Grouping, Candidate]]:
        """The best groupings of these workers alone, as far as they might be better than `total`, or than none."""
        found: list[tuple[_Grouping, Candidate]] = []
        with suppress(PlanError):  # fewer workers have room for less
            found.append((grouping, self.recut(grouping, 0.0)))
            total = max(total, self.total(found[0][1]))
        found = [*self.regrouped(grouping, total), *found]
        return sorted(found, key=lambda each: self.total(each[1]))[:_MOST_REFINED]

    def with_idle_workers(self, found: Candidate, idle: Sequence[int], home: int) -> tuple[_Grouping, Candidate]:
        """The same candidate with some workers more, in one of its stages, which have no micro-batches."""
        stages, order = found.assignment.stages, found.assignment.microbatch_order
        theirs = self.grouping_of(
            tuple((*members, *idle) if s == home else members for s, members in enumerate(stages))
        )
        speeds = [self.costs.speeds_of(members) for members in theirs.stages]
        active = [np.arange(len(members)) for members in stages]
        counts = with_parked(found.assignment.microbatch_counts, active, speeds, order)
        estimate = theirs.estimates.to(found.assignment.layer_cuts, self.rule)
        best = self.fastest(theirs, found.assignment.layer_cuts, estimate, [counts], None)
        assert best is not None, "the first candidate has a time"
        return theirs, best

    def recut(self, grouping: _Grouping, tolerance: float, by_pipeline: bool = False) -> Candidate:
        """The partition that moves the fewest bytes within a tolerance of the least bottleneck, or least pipeline."""
        found = partition(
            self.costs,
            grouping.rows,
            rule=self.rule,
            move_bytes=grouping.estimates.table(self.rule),
            tolerance=tolerance,
            by_pipeline=by_pipeline,
        )
        return self.candidate(grouping, found.cuts)

    def with_shifted_cuts(self, grouping: _Grouping, start: Candidate) -> Candidate:
        """On small meshes, shifts cuts by one layer as long as the step gets faster.

        The partition minimizes the bottleneck, which does not include the time to fill the pipeline.
        """
        if start.time.how != EXACT or sum(map(len, grouping.stages)) > _SEARCHED_WORKERS:
            return start
        best, last = start, None
        for _ in range(_MOST_SHIFTS):
            if best is last:
                break
            last, cuts = best, best.assignment.layer_cuts
            for i, step in product(range(1, len(cuts) - 1), (-1, 1)):
                if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                    found = self.candidate(grouping, (*cuts[:i], cuts[i] + step, *cuts[i + 1 :]))
                    if self.total(found) < self.total(best) and self.fits(found):
                        best = found
        return best

    def fits(self, candidate: Candidate) -> bool:
        """True if no worker needs more memory than it has."""
        return self.has_room(candidate.assignment)

    def has_room(self, assignment: Assignment) -> bool:
        """True if no worker needs more memory than it has for this."""
        needed = max(memory_of(assignment, self.costs, self.rule, self.tables))
        return needed <= self.settings.memory_limit and needed < math.inf

    def total(self, candidate: Candidate) -> float:
        """Seconds until the end, the move included."""
        return candidate.time.seconds * self.remaining_steps + candidate.estimate.seconds

    def candidate(self, grouping: _Grouping, cuts: Sequence[int]) -> Candidate:
        """These cuts, with the candidate assignment of micro-batches whose step is fastest.

        Of those that fit in memory, if any does: a worker beside parked ones has more micro-batches.
        """
        key = tuple(cuts)
        if key not in grouping.timed:
            estimate = grouping.estimates.to(cuts, self.rule)
            best = self.fastest(grouping, cuts, estimate, grouping.candidates, None)
            assert best is not None, "the first candidate has a time"
            grouping.timed[key] = best
        return grouping.timed[key]

    def settled_candidate(self, grouping: _Grouping, cuts: Sequence[int]) -> Candidate:
        """The same as `candidate`, also where only parts of steps were simulated: then the best is settled."""
        best = self.candidate(grouping, cuts)
        if not self.is_unsettled(best):
            return best
        each = [self.fastest(grouping, cuts, best.estimate, [one], None) for one in grouping.candidates]
        fits = self.fits(best)
        return self.best_settled([found for found in each if found is not None and self.fits(found) == fits])

    def best_settled(self, candidates: Collection[Candidate]) -> Candidate:
        """The best of these, by the steps of the best ones as a whole.

        A part of a step mostly takes less than its share of it: by parts alone, a plan was left for one that took 5 %
        longer.
        """
        heap = [(self.total(found), number, found) for number, found in enumerate(candidates)]
        heapq.heapify(heap)
        for _ in range(_MOST_SETTLED):
            _, number, found = heap[0]
            if not self.is_unsettled(found):
                break
            time = step_time(found.assignment, self.costs, self.rule, most_actions=_SETTLED_ACTIONS)
            found = replace(found, time=time, is_settled=True)
            heapq.heapreplace(heap, (self.total(found), number, found))
        return heap[0][2]

    def is_unsettled(self, candidate: Candidate) -> bool:
        """True if more of the step can be simulated: of a large mesh it takes too long."""
        small = sum(map(len, candidate.assignment.stages)) <= _TIMED_WORKERS
        return candidate.time.how != EXACT and small and not candidate.is_settled

    def fastest(
        self,
        grouping: _Grouping,
        cuts: Sequence[int],
        estimate: MoveEstimate,
        choices: Iterable[MicrobatchAssignment],
        best: Candidate | None,
    ) -> Candidate | None:
        """The fastest of these and `best`, the first of equal ones. Those that cannot be it are not simulated."""
        best_fits = best is not None and self.fits(best)
        for microbatches in choices:
            order = self.old.microbatch_order
            assignment = executed(
                Assignment(grouping.stages, tuple(cuts), microbatches.counts, order), self.settings.split
            )
            fits = self.has_room(assignment)
            if best_fits and not fits:
                continue
            below = math.inf if best is None or fits > best_fits else best.time.seconds
            time = step_time_below(below, assignment, self.costs, self.rule)
            if time is not None and time.seconds < below:
                best, best_fits = Candidate(assignment, microbatches, time, estimate), fits
        return best

    def tune(self, grouping: _Grouping, start: Candidate) -> Candidate:
        """The same stages and layers, with workers parked and other limits where that is faster."""
        found = self.with_parked_workers(grouping, start)
        assignment, time = self.with_best_limits(found.assignment, found.time)
        return replace(found, assignment=assignment, time=time)

    def with_best_limits(self, assignment: Assignment, time: StepTime) -> tuple[Assignment, StepTime]:
        """The assignment with the limits that the controller would send, and its step time.

        Args:
            time: of the assignment with the limits by rule.
        """
        if self.settings.split is None:
            return assignment, time
        return best_limits(assignment, time, self.settings.split, self.costs, self.rule)

    def with_parked_workers(self, grouping: _Grouping, start: Candidate) -> Candidate:
        """On small meshes, the same layers with some workers of any stages parked, if that is faster.

        Fewer workers are never faster in themselves. But the micro-batches of their stages may then be cut at places
        that suit the other stages better.
        """
        if start.time.how != EXACT or sum(map(len, grouping.stages)) > _SEARCHED_WORKERS:
            return start
        actions = 2 * start.assignment.num_stages * start.assignment.num_microbatches
        choices = parked_assignments(grouping, start, self.costs)
        best = self.fastest(
            grouping, start.assignment.layer_cuts, start.estimate, choices[: max(1, _PARKED_ACTIONS // actions)], start
        )
        return best or start


def parked_assignments(grouping: _Grouping, start: Candidate, costs: CostModel) -> list[MicrobatchAssignment]:
    """Assignments to some of the workers that may take less than `start`, those with the least raggedness first.

    The slowest workers of a stage are parked. A stage uses no fewer workers than it takes to compute everything in less
    time than `start` takes.
    """
    number, order = start.assignment.num_microbatches, start.assignment.microbatch_order
    speeds = [costs.speeds_of(members) for members in grouping.stages]
    spans = [sum(costs.stage_s(a, b)) for a, b in pairwise(start.assignment.layer_cuts)]
    # Before and after its part, a micro-batch passes the other stages, at best on their fastest workers.
    path = [each / v.max() for each, v in zip(spans, speeds, strict=True)]
    options: list[list[tuple[np.ndarray, Counts]]] = []
    for s, v in enumerate(speeds):
        some: list[tuple[np.ndarray, Counts]] = []
        for size in range(len(v), 0, -1):
            at = fastest(v, size)
            counts = assign_by_speed(number, v[at], microbatch_order=order)
            if max(c / each for c, each in zip(counts, v[at], strict=True)) * spans[s] + sum(path[:s]) >= (
                start.time.seconds
            ):
                break
            some.append((at, counts))
        options.append(some or [(np.arange(len(v)), start.assignment.microbatch_counts[s])])
    found = []
    for chosen in islice(product(*options), _MOST_CHOICES):
        ragged = len({counts for _, counts in chosen})
        idle = sum(len(v) - len(at) for v, (at, _) in zip(speeds, chosen, strict=True))
        found.append((ragged, idle, len(found), chosen))
    found.sort(key=lambda each: each[:3])
    return [
        with_parked([counts for _, counts in chosen], [at for at, _ in chosen], speeds, order)
        for *_, chosen in found[:_MOST_SIMULATED]
    ]


def _indented(assignment: Assignment) -> list[str]:
    lines = [f"  {line}" for line in str(assignment).splitlines()]
    return lines if len(lines) <= 16 else [*lines[:16], f"  ... {len(lines) - 16} more stages"]


def frequency_hints(
    assignment: Assignment, costs: CostModel, limits: FrequencyRange, goal_s: float | None = None
) -> tuple[FrequencyPlan, tuple[Hint, ...]]:
    """The frequencies of all workers: by the order of actions on small meshes, by class of workers on large ones."""
    num_workers = sum(map(len, assignment.stages))
    if num_workers <= _EXACT_WORKERS and 2 * assignment.num_stages * assignment.num_microbatches <= _EXACT_ACTIONS:
        graph = timed_graph(assignment, costs)
        plan = plan_paces(graph, limits, goal_s=goal_s)
        stage_of = {rank: s for s, members in enumerate(assignment.stages) for rank in members}
        rows = zip(graph.ranks, plan.paces, graph.lists, strict=True)
        return plan, tuple(
            Hint(stage_of[rank], (rank,), pace, tuple(graph.order[action] for action in todo))
            for rank, pace, todo in rows
        )
    return _hints_by_class(assignment, costs, limits, goal_s)


def _hints_by_class(
    assignment: Assignment, costs: CostModel, limits: FrequencyRange, goal_s: float | None
) -> tuple[FrequencyPlan, tuple[Hint, ...]]:
    """Frequencies where workers of a stage with equal speeds and counts are one row, and the makespan is the bound."""
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    weights = weights_seconds(assignment, costs)
    forward_s, backward_s, weights_s, counts, groups = [], [], [], [], []
    for s, members in enumerate(assignment.stages):
        of_stage, v = assignment.counts[s], costs.speeds_of(members)
        order = np.lexsort((v, of_stage))
        alike = np.stack([of_stage[order], v[order]], axis=1)
        starts = np.flatnonzero((np.diff(alike, axis=0, prepend=-1.0) != 0).any(axis=1))
        groups += [(s, part) for part in np.split(np.array(members)[order], starts[1:])]
        rows = alike[starts]
        counts.append(rows[:, 0])
        forward_s.append(forward[s] / rows[:, 1])
        backward_s.append(backward[s] / rows[:, 1])
        weights_s.append(weights[s] / rows[:, 1])
    ends = np.cumsum([len(of_stage) for of_stage in counts])[:-1]
    work = np.concatenate(counts) * (np.concatenate(forward_s) + np.concatenate(backward_s))

    def makespan(frequencies: np.ndarray) -> float:
        by_stage = np.split(frequencies, ends)
        f, b, w = (
            [a / b for a, b in zip(of_kind, by_stage, strict=True)] for of_kind in (forward_s, backward_s, weights_s)
        )
        return bound(f, b, counts, delays, assignment.limits, w, assignment.put_off)

    devices = [len(ranks) for _, ranks in groups]
    plan = plan_frequencies(work, limits, devices=devices, makespan=makespan, goal_s=goal_s)
    rows = zip(groups, plan.paces, strict=True)
    return plan, tuple(Hint(s, tuple(ranks.tolist()), pace) for (s, ranks), pace in rows)
