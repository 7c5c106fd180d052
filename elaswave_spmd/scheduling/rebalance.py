"""The plan after an event: micro-batches at once, layers and stages if the gain pays for the move, frequencies last.

`plan_change` is a pure function of the placement, the workers that are present, and the costs. It gives the same result
on any machine and carries nothing out. The ElasWave paper plans micro-batches, layers and frequencies together. Here
they are planned one after another, each with the result of the one before.

A plan has up to two assignments. The one for `now` keeps the layers where they are if possible, so that training goes
on at once. The one for `later` is better, but needs state to be copied first, in the background.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    even_assignment,
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
"""Relative tolerances of the bottleneck. For each of them the search tries the partition that moves the fewest bytes
among those whose bottleneck exceeds the least possible one by at most this fraction."""

_EXACT_ACTIONS, _EXACT_WORKERS = 1024, 32
"""Up to these sizes, frequencies are chosen for single actions, in the order of their execution. Beyond them there is
one frequency for each class of equal workers, and the step time is taken to be the lower bound."""

_MOST_SHIFTS = 16  # rounds of `with_shifted_cuts`, each of which shifts cuts by one layer

# The size of a mesh, in workers, up to which some searches are affordable.
_SEARCHED_WORKERS = 64  # "small meshes": cuts are shifted by a layer, and workers are parked or left out
_FEW_WORKERS = 16  # if at most this many are left without the slowest worker, a second one is left out as well
_DO_NOT_FIT = "the layers where they are do not fit in memory any more"
_TIMED_WORKERS = 256  # even groupings into all numbers of stages are timed

# Limits of the search among groupings of the workers into other stages.
_UNEVEN = 1.1  # the best even stages seldom take more than this factor of what the best uneven ones take
_MOST_REGROUPED = 192  # groupings that are timed
_MOST_OF_A_NUMBER = 32  # groupings into one number of stages that are timed, on small meshes
_FEW_OF_A_NUMBER = 4  # the same on larger meshes
_MOST_SEARCHED = 6  # numbers of stages for which uneven stages are searched for, on larger meshes
_MOST_REFINED = 4  # groupings, the best of those timed, whose cuts are shifted afterwards

# Limits of the closer look at the best candidates.
_SETTLED_ACTIONS = 65_536  # actions of a step that are simulated to decide on a plan
_MOST_SETTLED = 12  # candidates whose steps are simulated to this length
_MOST_TUNED = 12  # candidates for which parked workers and other limits are tried

# Limits of the search for workers to park, for each candidate.
_MOST_CHOICES = 4096  # combinations that are listed
_MOST_SIMULATED = 48  # combinations that are simulated
_PARKED_ACTIONS = 32_768  # actions that are simulated, for all combinations together


@dataclass(frozen=True)
class Candidate:
    """An assignment that the search looks at, with its step time and an estimate of the move to it.

    Args:
        assignment: the assignment.
        microbatches: its micro-batches, with the figures by which they were assigned.
        time: its step time.
        estimate: the bytes and seconds of the move, by a closed form (no reshard plan is made).
        is_settled: True if its step was simulated to the greatest length that ever is (_SETTLED_ACTIONS).
    """

    assignment: Assignment
    microbatches: MicrobatchAssignment
    time: StepTime
    estimate: MoveEstimate
    is_settled: bool = False

    @property
    def key(self) -> tuple[Stages, tuple[int, ...]]:
        """The stages and cuts, which decide where state is. Candidates with equal keys move the same state."""
        return self.assignment.stages, self.assignment.layer_cuts

    def planned(self, move: Move) -> Variant:
        """This candidate with the figures of its reshard plan in place of the estimate."""
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
        before: the step time of the assignment before the event, with the present costs.
        now: the assignment to run at once. Layers stay where they are if possible, and micro-batches are assigned by
            speed. Its move makes lost replicas again, in the background if layers stay.
        later: the assignment to run once its state has been copied in the background; None if `now` is best.
        layers_stay: True if `now` keeps the layers where they were, so that training goes on without waiting for state.
        hints: frequencies for `later`, or for `now` if there is no `later`; empty if none were asked for.
        frequency: the step time and energy with the hints; None if none were asked for.
        remaining_steps: the number of steps over which a move had to pay.
        reasons: the reasons in words, one line each.
        lacks: the bytes that the fullest worker lacks for `last`; 0 if that fits in memory.
        overflows: the assignment before the event, as it runs, does not fit in memory, but `last` does.
    """

    before: StepTime
    now: Variant
    later: Variant | None
    layers_stay: bool
    hints: tuple[Hint, ...]
    frequency: FrequencyPlan | None
    remaining_steps: int
    reasons: tuple[str, ...]
    lacks: float = 0.0
    overflows: bool = False

    @property
    def last(self) -> Variant:
        """The assignment that will run in the end."""
        return self.later or self.now

    @property
    def pause_s(self) -> float:
        """Seconds until training goes on: 0 if layers stay. Otherwise training waits for all state of the move.

        This is an upper bound: in a run, a replica outside the stage may publish parameters before its state is copied.
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
    """What a run asks of each of its plans, whatever the event.

    Args:
        layout: the pages of the model; None for those of a model with the given costs (`layout_of_costs`).
        memory_limit: the bytes of memory that each worker has.
        state_limit: the most bytes of state that a plan may give a worker.
        mirror_count: the number of mirrors of each page of sharded state.
        split: the layers whose backward may run in two parts, from which the limits of a plan follow; None if all
            backwards run in one part.
        align: the fraction by which loads may exceed the least possible ones if fewer sums have to be sent then
            (`schedule.align`).
        stage_counts: the numbers of stages that may replace the present number; None for any, () for none.
        keeps_layers: True if no layer may move (`schedule.layers=false`): not even if layers do not fit in memory where
            they are. If stages are lost, their layers move all the same.
        follows_speeds: True if micro-batches are assigned by the speeds of workers; False if evenly, whatever these are
            (`schedule.microbatches=false`).
        min_gain: the share of a step that another placement of layers has to gain to be planned for later; a run, which
            judges its plans by `schedule.min_gain` itself, asks for 0.
        frequencies: the range of frequencies that devices can be set to; None if no hints are wanted.
    """

    layout: ModelLayout | None = None
    memory_limit: float = math.inf
    state_limit: float = math.inf
    mirror_count: int = 1
    split: SplitBackward | None = None
    align: float = 0.0
    stage_counts: Collection[int] | None = None
    keeps_layers: bool = False
    follows_speeds: bool = True
    min_gain: float = 0.0
    frequencies: FrequencyRange | None = None

    @property
    def regroups(self) -> bool:
        """True if plans may group the workers into other stages."""
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
    """Plan the answer to an event.

    Args:
        placement: the placement before the event. State is where its layers are.
        costs: the measured costs. Speeds of workers that are gone do not matter.
        remaining_steps: the number of steps until the run ends, or until another event is likely.
        settings: what the run asks of each plan.
        stages: the ranks of the workers that are present, by stage (recovery.reconfiguration.next_stages); None for all
            workers of the placement.
        running: the assignment of the placement with the limits that workers run with; None for the best limits.
        goal_s: a step time in seconds, for example that before the event: frequencies are raised only as far as it
            takes to reach this. None for no such goal.

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
    later, why = None, "layers stay (schedule.layers=false)"
    if not settings.keeps_layers:
        later, why = planner.later(grouping, at_once)
    before = planner.before(running)
    # Where a run would not even move micro-batches for so little, both gains together count.
    share = 1 - settings.min_gain
    is_made = present != old.stages or now.time.seconds <= before.seconds * share
    start_s = now.time.seconds if is_made else before.seconds
    if settings.min_gain and later is not None and why_anew != _DO_NOT_FIT and later.time.seconds > start_s * share:
        gain = 1 - later.time.seconds / start_s
        too_little = f"less than {settings.min_gain:.1%} with schedule.min_gain"
        later, why = None, f"layers stay: to move them would gain {gain:.1%} of a step, {too_little}"
    reasons = [_reason_for_now(now, why_anew, "by speed" if settings.follows_speeds else "evenly"), why]
    if lacks := planner.lacks((later or now).assignment):
        reasons.append(f"that does not fit in memory: the fullest worker lacks {lacks:,.0f} B")
    hints: tuple[Hint, ...] = ()
    plan = None
    if settings.frequencies is not None:
        plan, hints = frequency_hints((later or now).assignment, costs, settings.frequencies, goal_s)
        reasons.append(str(plan))
    overflows = not lacks and planner.lacks(running or executed(old, settings.split)) > 0
    return Decision(before, now, later, not why_anew, hints, plan, remaining_steps, tuple(reasons), lacks, overflows)


def _reason_for_now(now: Variant, why_anew: str, how: str) -> str:
    if why_anew:
        return f"{why_anew}: layers are cut anew before going on ({now.move})"
    workers = sum(map(len, now.assignment.stages))
    return f"micro-batches assigned {how} to {workers:,} workers, {now.microbatches}; no layer moves"


def reassign_microbatches(
    old: Assignment, num_microbatches: int, stages: Sequence[Sequence[int]], costs: CostModel, align: float
) -> Iterator[MicrobatchAssignment]:
    """The candidate assignments of micro-batches to the workers of these stages, each made when it is asked for.

    Args:
        old: the assignment before, in which some of these workers had micro-batches.
        num_microbatches: the number of micro-batches to assign.
        stages: the ranks of each stage.
        costs: the speeds of workers.
        align: as in `PlanSettings`.
    """
    speeds = [costs.speeds_of(members) for members in stages]
    starts = first_microbatches(stages, old.stages, old.microbatch_counts)
    seen: set[tuple[Counts, ...]] = set()
    for each in candidate_assignments(
        num_microbatches, speeds, microbatch_order=old.microbatch_order, starts=starts, align=align
    ):
        seen.add(each.counts)
        yield each
    if num_microbatches == old.num_microbatches and (kept := _kept_places(stages, old.stages)) is not None:
        # One more candidate gives newcomers no micro-batches. Otherwise a step could take longer with one worker more.
        as_before = with_parked(old.microbatch_counts, kept, speeds, old.microbatch_order)
        if as_before.counts not in seen:
            yield as_before


def _kept_places(stages: Sequence[Sequence[int]], old: Sequence[Sequence[int]]) -> list[np.ndarray] | None:
    """For each stage, int64: the positions of the workers that it had in `old`.

    Returns None if one of these workers is gone, or if they are in another order now.
    """
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
    """Workers grouped into stages, with everything that does not depend on the cuts of layers.

    Args:
        stages: the ranks of each stage.
        rows: what `partition` has to know about the workers of each stage.
        estimates: estimates of the moves to all cuts.
        candidates: the assignments of micro-batches to try.
        timed: cuts -> the candidate, as a cache: the searches come to the same cuts in several ways.
    """

    stages: Stages
    rows: list[StageWorkers]
    estimates: MoveEstimates
    candidates: tuple[MicrobatchAssignment, ...]
    timed: dict[tuple[int, ...], Candidate] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class _Planner:
    """The search for the best assignment after an event. Methods change nothing but the caches (`tables`, `timed`)."""

    old: Assignment
    costs: CostModel
    remaining_steps: int
    settings: PlanSettings
    rule: MemoryRule
    moves: StateMoves
    tables: MemoryTables = field(default_factory=dict)

    def before(self, running: Assignment | None) -> StepTime:
        """The step time of the assignment before the event, simulated to the same length as the steps of plans.

        Args:
            running: as in `plan_change`.
        """
        small = sum(map(len, self.old.stages)) <= _TIMED_WORKERS
        most = _SETTLED_ACTIONS if small else MOST_ACTIONS
        by_rule = executed(self.old, self.settings.split) if running is None else running
        time = step_time(by_rule, self.costs, self.rule, most_actions=most)
        return time if running is not None else self.with_best_limits(by_rule, time)[1]

    def grouping_of(self, stages: Stages) -> _Grouping:
        """The grouping for these stages, with the candidate assignments of micro-batches."""
        speeds = [self.costs.speeds_of(members) for members in stages]
        rows, _ = stage_workers(
            speeds, self.old.num_microbatches, self.settings.memory_limit, self.settings.split, self.rule
        )
        estimates = MoveEstimates(self.costs, self.old.layer_cuts, old_stages_of(stages, self.old.stages))
        number, order = self.old.num_microbatches, self.old.microbatch_order
        candidates: list[MicrobatchAssignment] = []
        if self.settings.follows_speeds:
            candidates += reassign_microbatches(self.old, number, stages, self.costs, self.settings.align)
        # The one that needs the least memory may be none of these.
        if not candidates or self.settings.memory_limit < math.inf:
            even = even_assignment(number, speeds, microbatch_order=order)
            if all(even.counts != each.counts for each in candidates):
                candidates.append(even)
        return _Grouping(stages, rows, estimates, tuple(candidates))

    def now(self, grouping: _Grouping) -> tuple[Candidate, str]:
        """The candidate that can run at once: the old cuts of layers on the present stages, if that fits in memory.

        If layers may not move, the old cuts stay even if that does not fit.

        Returns:
            The candidate, and why it has other cuts, in words; empty if it has the old ones.
        """
        if len(grouping.stages) == self.old.num_stages:
            kept = self.settled_candidate(grouping, self.old.layer_cuts)
            if self.settings.keeps_layers or self.fits(kept):
                return self.tune(grouping, kept), ""
            why = _DO_NOT_FIT
        else:
            why = f"{len(grouping.stages)} of {self.old.num_stages} stages are left"
        return self.tune(grouping, self.recut(grouping, 0.0)), why

    def later(self, grouping: _Grouping, now: Candidate) -> tuple[Variant | None, str]:
        """The best variant with other cuts or other stages, if its gain over the remaining steps pays for its move.

        The search ranks candidates by estimates of their moves, which begin where layers were before the event. The
        best candidate is then accepted or not by its real reshard plan, which begins where the plan of `now` ends.

        Returns:
            The variant, or None if there is none, and the reason in words.
        """
        candidates: dict[object, Candidate] = {}
        with suppress(PlanError):  # the assignment of `now` may be the only one that fits in memory
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
        # A candidate with the stages and cuts of `now` is no change. `now` is compared with the best of the rest below.
        candidates.pop(now.key, None)
        if not candidates:
            return None, "layers stay: no partition is better"
        best = self.best_settled(candidates.values())
        now_s, best_s = now.time.seconds, best.time.seconds
        gain = (now_s - best_s) * self.remaining_steps
        # On a large mesh it takes seconds to make a reshard plan. None is made if the gain could not pay for any move:
        # every move takes at least the latency of a link.
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
        """Other groupings of the workers into stages, each with its best candidate.

        On small meshes, several groupings into each number of stages are timed, and the cuts of the best are refined.
        On larger meshes, even groupings and a few others are timed. On meshes of more than _TIMED_WORKERS, only the
        grouping with the best lower bound is.

        Args:
            grouping: the present grouping, which is not among the results.
            total: the seconds until the end of the run with the best candidate so far, as in `total`.
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
        # The first pass times even stages of every number. The best time among them ends the second pass, among uneven
        # stages, early. The second pass has some tolerance (`room`).
        seen = {grouping.stages}
        numbers = groupings.numbers(stage_counts)
        for room, searches in ((1.0, False), (_UNEVEN, True)):
            for even_s, number in numbers if small or not searches else numbers[:_MOST_SEARCHED]:
                # For two stages the search is not cut short: there are few such groupings, and uneven ones may take far
                # less time than even ones.
                least = even_s if not searches else 0.0 if number == 2 else groupings.least_seconds(number)
                if least * self.remaining_steps >= room * total:
                    continue
                if len(found) >= _MOST_REGROUPED:
                    break
                choices = groupings.of_number(number, total if searches else 0.0)
                for choice in choices[: _MOST_OF_A_NUMBER if small else _FEW_OF_A_NUMBER]:
                    # Choices are in the order of their lower bounds: if this one cannot be better, no later one can.
                    if groupings.total(choice) >= room * total:
                        break
                    if choice.stages not in seen:
                        seen.add(choice.stages)
                        look_at(choice)
                        total = min(total, self.total(found[-1][1]))
        if small:
            # The cuts with the least bottleneck do not always give the shortest step, so others are tried as well.
            found.sort(key=lambda each: self.total(each[1]))
            found += [(theirs, self.with_shifted_cuts(theirs, start)) for theirs, start in found[:_MOST_REFINED]]
        return found

    def without_slowest(self, grouping: _Grouping, total: float) -> list[tuple[_Grouping, Candidate]]:
        """On small meshes: groupings of all workers but the slowest one, and on the smallest of all but two.

        The workers that are left out are *parked*: they are members of a stage, without micro-batches. Each stage is
        tried for them, as the choice matters: they get the reduced gradients of their stage. With these candidates a
        step is seldom slower than it would be if the slowest worker were lost: the plan for that case is among them.

        Args:
            grouping: the present grouping.
            total: as for `regrouped`.
        """
        left, idle = grouping.stages, list[int]()
        found: list[tuple[_Grouping, Candidate]] = []
        if not self.settings.follows_speeds:
            return found
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
        """The slowest worker that is not alone in its stage; of equally slow ones, one of the largest stage."""
        able = [
            (self.costs.speed(rank), -len(members), -rank) for members in stages if len(members) > 1 for rank in members
        ]
        return -min(able)[2] if able else None

    def best_of(self, grouping: _Grouping, total: float) -> list[tuple[_Grouping, Candidate]]:
        """The best groupings of these workers alone, with their candidates, best first; at most _MOST_REFINED."""
        found: list[tuple[_Grouping, Candidate]] = []
        with suppress(PlanError):  # with fewer workers, the model may not fit in memory
            found.append((grouping, self.recut(grouping, 0.0)))
            total = max(total, self.total(found[0][1]))
        found = [*self.regrouped(grouping, total), *found]
        return sorted(found, key=lambda each: self.total(each[1]))[:_MOST_REFINED]

    def with_idle_workers(self, found: Candidate, idle: Sequence[int], home: int) -> tuple[_Grouping, Candidate]:
        """The candidate with the workers in `idle` added to stage `home`, without micro-batches."""
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
        """The candidate whose cuts move the fewest bytes within a tolerance of the optimum.

        Args:
            grouping: the stages.
            tolerance: the fraction by which the optimum may be exceeded.
            by_pipeline: what is minimized: True for the time of the pipeline, False for the bottleneck.
        """
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
        """On small meshes, the candidate after shifting cuts by one layer for as long as the total gets less.

        `partition` minimizes the bottleneck, which does not include the time to fill the pipeline.
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
        if self.settings.memory_limit == self.rule.state_limit == math.inf:
            return True
        needed = max(memory_of(assignment, self.costs, self.rule, self.tables))
        return needed <= self.settings.memory_limit and needed < math.inf

    def lacks(self, assignment: Assignment) -> float:
        """The bytes that the fullest worker lacks for this; 0 if it has enough."""
        if self.settings.memory_limit == math.inf:
            return 0.0
        needed = max(memory_of(assignment, self.costs, self.rule, self.tables))
        return needed - self.settings.memory_limit if needed > self.settings.memory_limit else 0.0

    def total(self, candidate: Candidate) -> float:
        """The seconds until the end of the run: all remaining steps, and the estimated move."""
        return candidate.time.seconds * self.remaining_steps + candidate.estimate.seconds

    def candidate(self, grouping: _Grouping, cuts: Sequence[int]) -> Candidate:
        """The candidate for these cuts: with the assignment of micro-batches whose step is fastest.

        Assignments that fit in memory come first. Some may not fit: if workers of a stage are parked, the others have
        more micro-batches.
        """
        key = tuple(cuts)
        if key not in grouping.timed:
            estimate = grouping.estimates.to(cuts, self.rule)
            best = self.fastest(grouping, cuts, estimate, grouping.candidates, None)
            assert best is not None, "the first candidate has a time"
            grouping.timed[key] = best
        return grouping.timed[key]

    def settled_candidate(self, grouping: _Grouping, cuts: Sequence[int]) -> Candidate:
        """Like `candidate`, but if only parts of steps were simulated, the best is found by `best_settled`."""
        best = self.candidate(grouping, cuts)
        if not self.is_unsettled(best):
            return best
        each = [self.fastest(grouping, cuts, best.estimate, [one], None) for one in grouping.candidates]
        fits = self.fits(best)
        return self.best_settled([found for found in each if found is not None and self.fits(found) == fits])

    def best_settled(self, candidates: Collection[Candidate]) -> Candidate:
        """The best of these candidates, after simulating the steps of the best ones to a greater length.

        The time extrapolated from a part of a step is mostly too short. Deciding by such times alone has once replaced
        a plan by one that took 5 % longer.
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
        """True if more of the candidate's step can still be simulated. On a large mesh this would take too long."""
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
        """The fastest candidate with one of these choices of micro-batches, or `best` if none is faster.

        Candidates that fit in memory come first. A candidate that cannot be faster by its lower bound is not simulated.

        Args:
            grouping: the stages.
            cuts: the cuts of layers.
            estimate: the estimate of the move to these cuts.
            choices: the assignments of micro-batches to try, in order; of equally fast ones the first is taken.
            best: the best candidate so far; None if there is none.
        """
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
        """The candidate with the same stages and layers, but with parked workers and other limits if that is faster."""
        found = self.with_parked_workers(grouping, start)
        assignment, time = self.with_best_limits(found.assignment, found.time)
        return replace(found, assignment=assignment, time=time)

    def with_best_limits(self, assignment: Assignment, time: StepTime) -> tuple[Assignment, StepTime]:
        """The assignment with the limits that the controller would send, and its step time.

        Args:
            assignment: the assignment with the limits that follow from the rule (`executed`).
            time: its step time.
        """
        if self.settings.split is None:
            return assignment, time
        return best_limits(assignment, time, self.settings.split, self.costs, self.rule)

    def with_parked_workers(self, grouping: _Grouping, start: Candidate) -> Candidate:
        """On small meshes, the candidate with the same layers and some workers parked, if that is faster.

        Fewer workers alone are never faster. But the boundaries between the micro-batches of the remaining ones may fit
        those of the other stages better.
        """
        is_large = start.time.how != EXACT or sum(map(len, grouping.stages)) > _SEARCHED_WORKERS
        if is_large or not self.settings.follows_speeds:
            return start
        actions = 2 * start.assignment.num_stages * start.assignment.num_microbatches
        choices = parked_assignments(grouping, start, self.costs)
        best = self.fastest(
            grouping, start.assignment.layer_cuts, start.estimate, choices[: max(1, _PARKED_ACTIONS // actions)], start
        )
        return best or start


def parked_assignments(grouping: _Grouping, start: Candidate, costs: CostModel) -> list[MicrobatchAssignment]:
    """Assignments in which some workers are parked and which may take less time than `start`.

    In each stage the slowest workers are parked. A stage uses no fewer workers than it needs to compute everything in
    less time than a step of `start` takes. Assignments with the fewest different counts among stages come first, then
    those with the fewest parked workers.
    """
    number, order = start.assignment.num_microbatches, start.assignment.microbatch_order
    speeds = [costs.speeds_of(members) for members in grouping.stages]
    spans = [sum(costs.stage_s(a, b)) for a, b in pairwise(start.assignment.layer_cuts)]
    # The time in which a micro-batch passes each stage, forward and backward, on the stage's fastest worker.
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
    """Frequencies for all workers: for single actions on small meshes, for classes of equal workers on large ones.

    Args:
        assignment: the assignment.
        costs: the costs.
        limits: the range of frequencies.
        goal_s: as in `plan_change`.
    """
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
    """Frequencies for classes of workers, with the lower bound `bound` as the step time.

    Workers of a stage with equal speeds and numbers of micro-batches are one class, and one row of the arrays here.
    """
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
