"""Frequency: raise the bottleneck, then lower everybody else as far as the step takes no longer (ElasWave, DVFS axis).

Frequencies are relative to the normal one. The model, which figures must name: an action of t seconds takes t / f at
frequency f; while it computes a device draws static + dynamic * f^3, while it waits static, so that a step of M seconds
takes M * static + the sum over actions of dynamic * f^2 * t joules. Hints change no bits and no plan.

What may be lowered is found on the whole schedule, per class of actions (timing.CLASSES), as Perseus does per action
(Chung et al., SOSP 2024): a stage with little to do can be slow in the steady part of a step, yet hurry while the
pipeline fills and drains. Where the schedule is not at hand, only each worker's own compute counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave_spmd.errors import PlanError

Makespan = Callable[[np.ndarray], float]
"""Seconds of a step, given float64[rows, classes] of frequencies. Grows when one of them falls."""

_HALVINGS = 8
_ROUNDING = 1 + 1e-12
MOST_ROWS = 64
"""So many rows, at most, are lowered one by one; more are lowered together."""


@dataclass(frozen=True)
class FrequencyRange:
    """Relative frequencies that a device may be set to; 1, the normal one, is among them.

    Args:
        margin: what is lowered stays this part above what the schedule would allow. Times vary from step to step, and a
            step in which nobody has time to spare waits for whoever is late.

    Raises:
        PlanError: not 0 < lowest <= 1 <= highest, or a margin below 0.
    """

    lowest: float = 1.0
    highest: float = 1.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= 1 <= self.highest < float("inf"):
            raise PlanError(
                "frequencies are relative to the normal one: 0 < lowest <= 1 <= highest",
                got=f"{self.lowest} to {self.highest}",
                where="frequency range",
                fix="for example 0.6 to 1.1",
            )
        if not 0 <= self.margin < float("inf"):
            raise PlanError("a margin is a part, 0 or more", got=self.margin, where="frequency range", fix="0.05")


@dataclass(frozen=True)
class PowerModel:
    """Watts of one device: static always, and dynamic * f^3 while it computes.

    Raises:
        PlanError: a number below 0, or dynamic 0.
    """

    static: float = 0.3
    dynamic: float = 0.7

    def __post_init__(self) -> None:
        if not (0 <= self.static < float("inf") and 0 < self.dynamic < float("inf")):
            raise PlanError(
                "a power model has static >= 0 and dynamic > 0",
                got=f"static {self.static}, dynamic {self.dynamic}",
                where="power model",
                fix="give both in watts, or both as parts of the power at the normal frequency",
            )

    def energy(self, work: np.ndarray, devices: np.ndarray, frequencies: np.ndarray, makespan_s: float) -> float:
        """Of a step. work: [rows, classes] seconds at frequency 1; devices: [rows]; frequencies: [rows, classes]."""
        dynamic = (frequencies**2 * work).sum(axis=1) * self.dynamic
        return float((devices * (dynamic + self.static * makespan_s)).sum())


@dataclass(frozen=True)
class FrequencyPlan:
    """Frequencies by row and class of actions, and what they come to.

    Args:
        frequencies: per row, one for each class.
        raised_to: what the bottleneck was raised to.
        makespan_before_s, energy_before: everybody at 1.
        energy_raised: everybody at raised_to.
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
    """Frequencies with which a step takes no longer than with everybody at the one that the bottleneck is raised to.

    First that frequency: the highest, or the least one with which a step reaches `goal_s`. Then all rows are lowered
    together towards what their own compute would allow, as far as the makespan stays, and then row by row, the ones
    with least to do first, and class by class. Ever lower frequencies are tried, none is kept that makes the step
    longer, so the makespan is never larger than before and the energy never larger than with all raised.

    Args:
        work: [rows, classes] seconds of a step at frequency 1; a row is a worker, or workers that do alike.
        devices: how many each row stands for; 1 each by default.
        makespan: of frequencies; None: the largest compute of a row.
        goal_s: do not raise anybody beyond what this needs.
    """
    seconds = np.asarray(work, np.float64)
    assert seconds.ndim == 2 and (seconds >= 0).all(), seconds
    many = np.ones(len(seconds)) if devices is None else np.asarray(devices, np.float64)

    def longest(frequencies: np.ndarray) -> float:
        return float((seconds / frequencies).sum(axis=1).max(initial=0.0))

    of = makespan or longest
    normal = np.ones_like(seconds)
    before_s = of(normal)
    raised = _raised(lambda f: of(normal * f), before_s, limits.highest, goal_s)
    target = of(normal * raised)
    needed = seconds.sum(axis=1) / target * _ROUNDING if target else np.ones(len(seconds))
    lowest = np.broadcast_to(np.clip(needed, limits.lowest, raised)[:, None], seconds.shape)
    found = _lowered(of, normal * raised, lowest, target, max(8, 4 * _HALVINGS if makespan is None else _HALVINGS))
    if makespan is not None and len(seconds) <= MOST_ROWS:
        found = _one_by_one(of, found, np.full_like(found, limits.lowest), seconds, target)
    found = np.minimum(found * (1 + limits.margin), raised)
    after_s = of(found)
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
    """The least frequency from 1 to the highest with which a step reaches the goal; the highest if none does."""
    if goal_s is not None and before_s <= goal_s:
        return 1.0
    if goal_s is None or at(highest) >= goal_s:
        return highest
    low, high = 1.0, highest
    for _ in range(4 * _HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle) <= goal_s else (middle, high)
    return high


def _lowered(of: Makespan, high: np.ndarray, low: np.ndarray, target: float, halvings: int) -> np.ndarray:
    """The way from `high` towards `low`, as far as the makespan stays."""
    if of(low) <= target:
        return low
    good, bad = 0.0, 1.0
    for _ in range(halvings):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if of(high + middle * (low - high)) <= target else (good, middle)
    return high + good * (low - high)


def _one_by_one(of: Makespan, start: np.ndarray, low: np.ndarray, work: np.ndarray, target: float) -> np.ndarray:
    """Each row as a whole, and then each of its classes: the one with most work first, of which lowering saves most."""
    found = start.copy()
    for row in np.argsort(work.sum(axis=1), kind="stable").tolist():
        if not work[row].any():
            found[row] = low[row]
            continue
        parts: list[slice | int] = [slice(None), *np.argsort(-work[row], kind="stable").tolist()]
        for part in parts:
            lower = found.copy()
            lower[row, part] = low[row, part]
            found = _lowered(of, found, lower, target, _HALVINGS)
    return found
