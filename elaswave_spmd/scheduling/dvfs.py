"""Frequency hints (ElasWave's DVFS axis): raise the bottleneck, then lower all others as far as the step stays as fast.

Frequencies are relative to the device's normal one. The model, which every figure must name: an action of t seconds
takes t / f at frequency f. A device draws static + dynamic * f^3 watts while it computes and static watts while it
waits, so a step of M seconds takes M * static + the sum over actions of dynamic * f^2 * t joules. Hints change no bits
and no plan.

How far a frequency can be lowered is found on the whole schedule, per class of actions (step_time.CLASSES), as Perseus
does per action (Chung et al., SOSP 2024). A stage with little work can be slow in the steady part of a step but must be
fast while the pipeline fills and drains. Without a schedule, only each worker's own compute counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave_spmd.errors import PlanError

Makespan = Callable[[np.ndarray], float]
"""The seconds of a step for frequencies, float64 [rows, classes]. It does not fall when a frequency falls."""

_HALVINGS = 8  # of an interval of frequencies, in a bisection
_ROUNDING = 1 + 1e-12  # keeps a frequency that is exactly enough from falling below by rounding
MOST_ROWS = 64
"""Up to this many rows are lowered one by one; more are lowered together only."""


@dataclass(frozen=True)
class FrequencyRange:
    """The relative frequencies that a device may be set to, from `lowest` to `highest`. They include 1, the normal one.

    Args:
        margin: lowered frequencies stay this part above what the schedule allows. Times vary from step to step, and
            without a margin every worker that is late delays the step.

    Raises:
        PlanError: not 0 < lowest <= 1 <= highest, or a margin below 0.
    """

    lowest: float = 1.0
    highest: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= 1 <= self.highest < float("inf"):
            raise PlanError(
                f"the frequency range is {self.lowest} to {self.highest}",
                rule="frequencies are relative to the normal one: 0 < lowest <= 1 <= highest",
                fix="for example 0.6 to 1.1",
            )
        if not 0 <= self.margin < float("inf"):
            raise PlanError(f"the margin of frequencies is {self.margin}", rule="it is a part, 0 or more", fix="0.05")


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

    def energy(self, work: np.ndarray, devices: np.ndarray, frequencies: np.ndarray, makespan_s: float) -> float:
        """The joules of a step.

        Args:
            work: float64 [rows, classes], seconds at frequency 1.
            devices: float64 [rows], the number of devices that each row stands for.
            frequencies: float64 [rows, classes].
            makespan_s: seconds of the step.
        """
        # Power is proportional to f^3 and time to 1/f, so the energy of an action is proportional to f^2.
        dynamic = (frequencies**2 * work).sum(axis=1) * self.dynamic
        return float((devices * (dynamic + self.static * makespan_s)).sum())


@dataclass(frozen=True)
class FrequencyPlan:
    """Frequencies by row and class of actions, with the resulting step time and energy.

    Args:
        frequencies: per row, one for each class.
        raised_to: the frequency of the bottleneck.
        makespan_before_s, energy_before: with all devices at 1.
        energy_raised: with all devices at raised_to.
        makespan_s, energy: with these frequencies.
    """

    frequencies: tuple[tuple[float, ...], ...]
    raised_to: float
    makespan_before_s: float
    makespan_s: float
    energy_before: float
    energy_raised: float
    energy: float

    def __str__(self) -> str:
        table = np.array(self.frequencies)
        return (
            f"frequencies {table.min():.3g} to {table.max():.3g} (bottleneck at {self.raised_to:.3g}): makespan "
            f"{self.makespan_before_s:.4g} -> {self.makespan_s:.4g} s, modelled energy {self.energy_before:.4g} -> "
            f"{self.energy:.4g} J (everybody at {self.raised_to:.3g}: {self.energy_raised:.4g} J)"
        )


def plan_frequencies(
    work: Sequence[Sequence[float]] | np.ndarray,
    limits: FrequencyRange,
    *,
    devices: Sequence[int] | None = None,
    makespan: Makespan | None = None,
    goal_s: float | None = None,
    power: PowerModel = PowerModel(),
) -> FrequencyPlan:
    """Frequencies with which a step is as fast as with all devices at the frequency that the bottleneck is raised to.

    That frequency comes first: the highest, or the least one that reaches `goal_s`. Then all rows are lowered together
    toward what their own compute allows, as far as the makespan stays; then each row, those with the least work first,
    and each of its classes. A frequency that makes the step longer is never kept, so the makespan is never longer than
    before and the energy never more than with all devices raised.

    Args:
        work: float64 [rows, classes], seconds of a step at frequency 1. A row is one worker, or workers with equal
        work.
        devices: the number of devices that each row stands for; None: 1 each.
        makespan: the step time of frequencies; None: the longest compute of a row.
        goal_s: a step time; frequencies are raised only as far as it takes to reach this.
    """
    seconds = np.asarray(work, np.float64)
    assert seconds.ndim == 2 and (seconds >= 0).all(), seconds
    # A row may stand for many equal devices: it is planned once and counted that often in the energy.
    many = np.ones(len(seconds)) if devices is None else np.asarray(devices, np.float64)

    def longest(frequencies: np.ndarray) -> float:
        return float((seconds / frequencies).sum(axis=1).max(initial=0.0))

    makespan_of = makespan or longest
    normal = np.ones_like(seconds)
    before_s = makespan_of(normal)
    raised = _raised(lambda f: makespan_of(normal * f), before_s, limits.highest, goal_s)
    target = makespan_of(normal * raised)
    # A row that computes less than the step takes could do with this frequency, if it never had to wait for others.
    needed = seconds.sum(axis=1) / target * _ROUNDING if target else np.ones(len(seconds))
    lowest = np.broadcast_to(np.clip(needed, limits.lowest, raised)[:, None], seconds.shape)
    found = _lowered(
        makespan_of, normal * raised, lowest, target, max(8, 4 * _HALVINGS if makespan is None else _HALVINGS)
    )
    if makespan is not None and len(seconds) <= MOST_ROWS:
        found = _one_by_one(makespan_of, found, np.full_like(found, limits.lowest), seconds, target)
    # Steps vary, so lowered frequencies keep a margin; see design.md, "Frequency hints keep a margin".
    found = np.minimum(found * (1 + limits.margin), raised)
    after_s = makespan_of(found)
    return FrequencyPlan(
        frequencies=tuple(map(tuple, found.tolist())),
        raised_to=raised,
        makespan_before_s=before_s,
        makespan_s=after_s,
        energy_before=power.energy(seconds, many, normal, before_s),
        energy_raised=power.energy(seconds, many, normal * raised, target),
        energy=power.energy(seconds, many, found, after_s),
    )


def _raised(at: Callable[[float], float], before_s: float, highest: float, goal_s: float | None) -> float:
    """The least frequency from 1 to `highest` with which a step reaches the goal; `highest` if none does."""
    if goal_s is not None and before_s <= goal_s:
        return 1.0
    if goal_s is None or at(highest) >= goal_s:
        return highest
    low, high = 1.0, highest
    for _ in range(4 * _HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) <= goal_s else (middle, high)
    return high


def _lowered(makespan_of: Makespan, high: np.ndarray, low: np.ndarray, target: float, halvings: int) -> np.ndarray:
    """Goes from `high` toward `low` as far as the makespan stays within `target` (bisection)."""
    if makespan_of(low) <= target:
        return low
    good, bad = 0.0, 1.0
    for _ in range(halvings):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if makespan_of(high + middle * (low - high)) <= target else (good, middle)
    return high + good * (low - high)


def _one_by_one(
    makespan_of: Makespan, start: np.ndarray, low: np.ndarray, work: np.ndarray, target: float
) -> np.ndarray:
    """Lowers each row as a whole, then each of its classes: those with the most work first, which saves the most."""
    found = start.copy()
    for row in np.argsort(work.sum(axis=1), kind="stable").tolist():
        # A device without work may be as slow as it can be.
        if not work[row].any():
            found[row] = low[row]
            continue
        parts: list[slice | int] = [slice(None), *np.argsort(-work[row], kind="stable").tolist()]
        for part in parts:
            lower = found.copy()
            lower[row, part] = low[row, part]
            found = _lowered(makespan_of, found, lower, target, _HALVINGS)
    return found
