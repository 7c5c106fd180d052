"""Frequency hints (ElasWave's DVFS axis): raise the bottleneck, then lower all others as far as the step stays as fast.

Frequencies are relative to the device's normal one. The model, which every figure must name: an action of t seconds
takes t / f at frequency f. A device draws static + dynamic * f^3 watts while it computes and static watts while it
waits, so a step of M seconds takes M * static + the sum over actions of dynamic * f^2 * t joules. Hints change no bits
and no plan.

How far each action can be lowered is found on the whole schedule (`least_energy`), as by Perseus (Chung et al., SOSP
2024). A change of frequency takes time, so a device changes it a few times in a step only: its actions, in their order,
are cut into runs where that costs least, and the problem is solved again with these. What was a bubble has its run:
the forwards while the pipeline fills, weight gradients in gaps, backwards while it drains. A worker with such a pace
keeps to the planned order of its actions, since one that is late by being slow must not be overtaken by another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.action_graph import ActionGraph
from elaswave_spmd.scheduling.least_energy import slowdowns
from elaswave_spmd.scheduling.pipeline import PipelineAction

Makespan = Callable[[np.ndarray], float]
"""The seconds of a step for frequencies, float64 [rows]. It does not fall when a frequency falls."""

_HALVINGS = 32  # of an interval of frequencies, in a bisection
_ROUNDING = 1 + 1e-12  # keeps a frequency that is exactly enough from falling below by rounding
_MOST_GROUPS = 768  # actions that are slowed down each by itself, before they are put together in runs
_ALIKE = 0.01  # frequencies of runs that differ by less than this part are no reason for a change that takes time


@dataclass(frozen=True)
class FrequencyRange:
    """The relative frequencies that a device may be set to, from `lowest` to `highest`. They include 1, the normal one.

    Args:
        margin: lowered frequencies stay this part above what the schedule allows. Times vary from step to step, and
            without a margin every worker that is late delays the step.
        most_changes: the most times that a device changes its frequency in a step; below 2, each keeps one.
        change_s: seconds that a change takes, in which the device computes nothing.

    Raises:
        PlanError: not 0 < lowest <= 1 <= highest, or another number is below 0.
    """

    lowest: float = 1.0
    highest: float = 1.0
    margin: float = 0.0
    most_changes: int = 8
    change_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= 1 <= self.highest < float("inf"):
            raise PlanError(
                f"the frequency range is {self.lowest} to {self.highest}",
                rule="frequencies are relative to the normal one: 0 < lowest <= 1 <= highest",
                fix="for example 0.6 to 1.1",
            )
        if not 0 <= self.margin < float("inf"):
            raise PlanError(f"the margin of frequencies is {self.margin}", rule="it is a part, 0 or more", fix="0.05")
        if self.most_changes < 0 or not 0 <= self.change_s < float("inf"):
            raise PlanError(
                f"a frequency changes up to {self.most_changes} times a step, in {self.change_s} s each",
                rule="neither is below 0",
                fix="for example 8 times, in 0.005 s",
            )


@dataclass(frozen=True)
class PowerModel:
    """The power of one device in watts: `static` always, and dynamic * f^3 while it computes.

    Raises:
        PlanError: a number is below 0, or `dynamic` is 0.
    """

    static: float = 0.3
    dynamic: float = 0.7

    def __post_init__(self) -> None:
        if not (0 <= self.static < float("inf") and 0 < self.dynamic < float("inf")):
            raise PlanError(
                f"the power model has static {self.static}, dynamic {self.dynamic}",
                rule="static >= 0 and dynamic > 0",
                fix="give both in watts, or both as parts of the power at the normal frequency",
            )

    def energy(self, work: np.ndarray, frequencies: np.ndarray, num_devices: int, makespan_s: float) -> float:
        """The joules of a step.

        Args:
            work: float64 [n], seconds at frequency 1, of actions or of devices.
            frequencies: float64 [n].
            num_devices: all of them, as all draw static power.
            makespan_s: seconds of the step.
        """
        # Power is proportional to f^3 and time to 1/f, so the energy of an action is proportional to f^2.
        return float((frequencies**2 * work).sum() * self.dynamic + self.static * num_devices * makespan_s)


@dataclass(frozen=True)
class Pace:
    """The frequencies of a worker in a step: from the starts[i]-th of its actions on, frequencies[i].

    Raises:
        PlanError: the first start is not 0, or starts do not rise, or they are not as many as frequencies.
    """

    starts: tuple[int, ...] = (0,)
    frequencies: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if (
            self.starts[:1] != (0,)
            or len(self.starts) != len(self.frequencies)
            or any(b <= a for a, b in pairwise(self.starts))
        ):
            raise PlanError(
                f"a pace has starts {list(self.starts)} and frequencies {list(self.frequencies)}",
                rule="starts rise from 0, with a frequency each",
            )

    def at(self, action: int) -> float:
        """The frequency of a worker's action number so and so of a step."""
        return self.frequencies[bisect_right(self.starts, action) - 1]

    @property
    def changes(self) -> int:
        """The number of changes of frequency in a step, the change back to the first one included."""
        return len(self.starts) - 1 + (self.frequencies[0] != self.frequencies[-1])

    def __str__(self) -> str:
        first, *later = (f"{f:.3g}" for f in self.frequencies)
        return ", ".join([first, *(f"{f} from action {n}" for n, f in zip(self.starts[1:], later, strict=True))])


@dataclass(frozen=True)
class Hint:
    """The pace of workers with equal work.

    Args:
        order: the actions of the worker in the order that its pace is for; (): whatever is ready, at one frequency.
    """

    stage: int
    ranks: tuple[int, ...]
    pace: Pace
    order: tuple[PipelineAction, ...] = ()

    def __str__(self) -> str:
        who = f"worker {self.ranks[0]}" if len(self.ranks) == 1 else f"{len(self.ranks):,} workers"
        return f"stage {self.stage}, {who}: {self.pace}"


@dataclass(frozen=True)
class FrequencyPlan:
    """The paces by row, with the resulting step time and energy.

    Args:
        paces: per row, which is a worker, or workers with equal work.
        raised_to: the frequency of the bottleneck.
        makespan_before_s, energy_before: with all devices at 1.
        energy_raised: with all devices at raised_to.
        makespan_s, energy: with these frequencies.
    """

    paces: tuple[Pace, ...]
    raised_to: float
    makespan_before_s: float
    makespan_s: float
    energy_before: float
    energy_raised: float
    energy: float

    def __str__(self) -> str:
        every = [frequency for pace in self.paces for frequency in pace.frequencies]
        return (
            f"frequencies {min(every):.3g} to {max(every):.3g} (bottleneck at {self.raised_to:.3g}): makespan "
            f"{self.makespan_before_s:.4g} -> {self.makespan_s:.4g} s, modelled energy {self.energy_before:.4g} -> "
            f"{self.energy:.4g} J (everybody at {self.raised_to:.3g}: {self.energy_raised:.4g} J)"
        )


def plan_paces(
    graph: ActionGraph, limits: FrequencyRange, *, goal_s: float | None = None, power: PowerModel = PowerModel()
) -> FrequencyPlan:
    """Paces with which a step is as fast as with all devices at the frequency that the bottleneck is raised to.

    That frequency comes first: the highest, or the least one that reaches `goal_s`. Then actions are lowered as far as
    the makespan stays (`least_energy`).

    Args:
        graph: of the actions in the order that workers keep to; a row of it is a row of the plan.
        goal_s: a step time; frequencies are raised only as far as it takes to reach this.
    """
    before_s = graph.makespan()
    raised = _raised(lambda f: graph.makespan(graph.seconds / f), before_s, limits.highest, goal_s)
    fastest = replace(graph, seconds=graph.seconds / raised)
    groups, slower = _slowed_down(fastest, limits, raised / limits.lowest)
    # Steps vary, so lowered frequencies keep a margin; see docs/design/frequencies.md.
    frequencies = np.clip(raised / slower * (1 + limits.margin), limits.lowest, raised)[groups]
    changes_s = _change_seconds(graph, groups, limits.change_s)
    after_s = graph.makespan(graph.seconds / frequencies + changes_s)
    normal, number = np.ones(len(graph.rows)), len(graph.ranks)
    return FrequencyPlan(
        paces=tuple(_pace(groups[list(todo)], frequencies[list(todo)], limits.lowest) for todo in graph.lists),
        raised_to=raised,
        makespan_before_s=before_s,
        makespan_s=after_s,
        energy_before=power.energy(graph.seconds, normal, number, before_s),
        energy_raised=power.energy(graph.seconds, normal * raised, number, fastest.makespan()),
        energy=power.energy(graph.seconds, frequencies, number, after_s),
    )


def _slowed_down(graph: ActionGraph, limits: FrequencyRange, slowest: float) -> tuple[np.ndarray, np.ndarray]:
    """The runs of actions with one frequency each, int64 [actions], and their slowdowns, float64 [runs]."""
    most_s, rows = graph.makespan(), np.array(graph.rows, np.int64)
    if limits.most_changes < 2:
        return rows, slowdowns(graph, rows, most_s, slowest)
    fine = _runs_of_equal_length(graph, _MOST_GROUPS)
    each = slowdowns(graph, fine, most_s, slowest)[fine]
    best, least = (rows, np.ones(len(graph.ranks))), float(graph.seconds.sum())
    # Where a change takes time, fewer of them may save more.
    for most in (limits.most_changes, limits.most_changes // 2, 1) if limits.change_s else (limits.most_changes,):
        groups = _affordable(graph, _runs(graph, each, most), each, limits.change_s)
        fixed = _change_seconds(graph, groups, limits.change_s)
        found = slowdowns(graph, groups, most_s, slowest, fixed)
        if (energy := float((graph.seconds / found[groups] ** 2).sum())) < least:
            best, least = (groups, found), energy
    return best


def _runs_of_equal_length(graph: ActionGraph, most: int) -> np.ndarray:
    """Groups of consecutive actions of a worker, at most about so many in all: int64 [actions]."""
    together = -(-len(graph.rows) // most)
    found, number = np.zeros(len(graph.rows), np.int64), 0
    for todo in graph.lists:
        for first in range(0, len(todo), together):
            found[list(todo[first : first + together])] = number
            number += 1
    return found


def _runs(graph: ActionGraph, each: np.ndarray, most: int) -> np.ndarray:
    """Groups of consecutive actions, at most so many of each worker, that differ least within: int64 [actions].

    Least is the sum over actions of seconds times the squared difference from the mean slowdown of their run (dynamic
    programming over the places where runs end).

    Args:
        each: float64 [actions], the slowdown of each action by itself.
    """
    found, number = np.zeros(len(graph.rows), np.int64), 0
    for todo in graph.lists:
        actions = np.array(todo, np.int64)
        ends = _best_ends(graph.seconds[actions], each[actions], min(most, len(todo)))
        for first, stop in pairwise([0, *ends]):
            found[actions[first:stop]] = number
            number += 1
    return found


def _best_ends(seconds: np.ndarray, each: np.ndarray, most: int) -> list[int]:
    """The ends of at most so many runs that differ least within, for one worker (see `_runs`)."""
    size = len(seconds)
    if not size:
        return []
    sums = [np.concatenate([[0.0], np.cumsum(values)]) for values in (seconds, seconds * each, seconds * each**2)]
    first, stop = np.meshgrid(np.arange(size + 1), np.arange(size + 1), indexing="ij")
    total, mean, square = (of[stop] - of[first] for of in sums)
    cost = np.where(stop > first, square - mean**2 / np.maximum(total, 1e-300), np.inf)
    least, came_from = cost[0], []
    for _ in range(most - 1):
        with_one_more = least[:, None] + cost
        with_one_more = np.where(with_one_more < least[None, :] * (1 - 1e-9) - 1e-12, with_one_more, np.inf)
        came_from.append(np.where(np.isfinite(with_one_more.min(axis=0)), with_one_more.argmin(axis=0), -1))
        least = np.minimum(least, with_one_more.min(axis=0))
    ends, at = [size], size
    for step in reversed(came_from):
        if step[at] > 0:
            at = int(step[at])
            ends.append(at)
    return ends[::-1]


def _affordable(graph: ActionGraph, groups: np.ndarray, each: np.ndarray, change_s: float) -> np.ndarray:
    """These runs without changes for which there is no time: those that would make the step longer by themselves.

    Of the changes on a path that is too long, the one goes between the runs that differ least.
    """
    if not change_s:
        return groups
    found, most_s = groups.copy(), graph.makespan() * _ROUNDING
    means = np.bincount(groups, graph.seconds * each) / np.maximum(np.bincount(groups, graph.seconds), 1e-300)
    for a, b in ((a, b) for todo in graph.lists for a, b in pairwise(todo)):
        if found[a] != found[b] and abs(means[groups[a]] - means[groups[b]]) < _ALIKE * means[groups[a]]:
            found[found == found[b]] = found[a]
    while True:
        fixed = _change_seconds(graph, found, change_s)
        paths = graph.longest_paths(graph.seconds + fixed)
        worst = int(paths.through.argmax())
        if paths.through[worst] <= most_s:
            return found
        changes = [action for action in paths.path(worst)[0] if fixed[action]]
        gone = min(changes, key=lambda action: abs(each[action] - each[graph.before[action]]))
        found[found == found[gone]] = found[graph.before[gone]]


def _change_seconds(graph: ActionGraph, groups: np.ndarray, change_s: float) -> np.ndarray:
    """float64 [actions]: the seconds of a change before each action with which a run begins within a step."""
    found = np.zeros(len(graph.rows))
    for todo in graph.lists:
        for a, b in pairwise(todo):
            found[b] = change_s if groups[a] != groups[b] else 0.0
    return found


def _pace(groups: np.ndarray, frequencies: np.ndarray, lowest: float) -> Pace:
    """The pace of one worker, by the runs and frequencies of its actions in their order."""
    if not len(groups):
        return Pace((0,), (lowest,))  # a device without work may be as slow as it can be
    starts = (0, *(np.flatnonzero(np.diff(groups)) + 1).tolist())
    return Pace(starts, tuple(frequencies[list(starts)].tolist()))


def plan_frequencies(
    work: Sequence[float] | np.ndarray,
    limits: FrequencyRange,
    *,
    devices: Sequence[int] | None = None,
    makespan: Makespan | None = None,
    goal_s: float | None = None,
    power: PowerModel = PowerModel(),
) -> FrequencyPlan:
    """One frequency for each row, as `plan_paces`, where the step time is known of frequencies only.

    All rows are lowered together toward what their own compute allows, as far as the makespan stays.

    Args:
        work: float64 [rows], seconds of a step at frequency 1. A row is one worker, or workers with equal work.
        devices: the number of devices that each row stands for; None: 1 each.
        makespan: the step time of frequencies; None: the longest compute of a row.
        goal_s: a step time; frequencies are raised only as far as it takes to reach this.
    """
    seconds = np.asarray(work, np.float64)
    assert seconds.ndim == 1 and (seconds >= 0).all(), seconds
    # A row may stand for many equal devices: it is planned once and counted that often in the energy.
    many = np.ones(len(seconds)) if devices is None else np.asarray(devices, np.float64)

    def longest(frequencies: np.ndarray) -> float:
        return float((seconds / frequencies).max(initial=0.0))

    makespan_of = makespan or longest
    normal = np.ones_like(seconds)
    before_s = makespan_of(normal)
    raised = _raised(lambda f: makespan_of(normal * f), before_s, limits.highest, goal_s)
    target = makespan_of(normal * raised)
    # A row that computes less than the step takes could do with this frequency, if it never had to wait for others.
    needed = seconds / target * _ROUNDING if target else np.ones(len(seconds))
    found = _lowered(makespan_of, normal * raised, np.clip(needed, limits.lowest, raised), target)
    found = np.minimum(found * (1 + limits.margin), raised)
    after_s, number = makespan_of(found), int(many.sum())
    return FrequencyPlan(
        paces=tuple(Pace((0,), (f,)) for f in found.tolist()),
        raised_to=raised,
        makespan_before_s=before_s,
        makespan_s=after_s,
        energy_before=power.energy(many * seconds, normal, number, before_s),
        energy_raised=power.energy(many * seconds, normal * raised, number, target),
        energy=power.energy(many * seconds, found, number, after_s),
    )


def _raised(at: Callable[[float], float], before_s: float, highest: float, goal_s: float | None) -> float:
    """The least frequency from 1 to `highest` with which a step reaches the goal; `highest` if none does."""
    if goal_s is not None and before_s <= goal_s:
        return 1.0
    if goal_s is None or at(highest) >= goal_s:
        return highest
    low, high = 1.0, highest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) <= goal_s else (middle, high)
    return high


def _lowered(makespan_of: Makespan, high: np.ndarray, low: np.ndarray, target: float) -> np.ndarray:
    """Goes from `high` toward `low` as far as the makespan stays within `target` (bisection)."""
    if makespan_of(low) <= target:
        return low
    good, bad = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if makespan_of(high + middle * (low - high)) <= target else (good, middle)
    return high + good * (low - high)
