"""Costs that follow a change only if it lasts: a burst of noise neither moves work nor marks a worker as slow.

On a machine that is shared with others, a worker may take fifty times as long for a second. If steps are short, medians
over a few steps (profiler.py) do not remove this. So plans use numbers that follow a measurement only as far as all
measurements of some seconds agree. A burst does not change them, as one of these measurements is as before. A change
that lasts is followed in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.scheduling.cost_model import CostModel

_MOST_KEPT = 64
"""About as many measurements are kept, however long a difference has to last: each review looks at all of them."""

_FOLLOWED = ("forward_s", "backward_s", "weight_share")
"""The fields of LayerCost that follow what lasts."""


@dataclass(frozen=True)
class Measurement:
    """Costs that were measured at one time, or at several times shortly after each other.

    Args:
        began: the time in seconds at which the first of the measured steps began.
        since: the time at which they were first looked at.
        at: the time at which they were last looked at.
        least: the least of each measured number.
        greatest: the greatest of each measured number.
    """

    began: float
    since: float
    at: float
    least: CostModel
    greatest: CostModel

    def and_then(self, later: Measurement) -> Measurement:
        """This measurement and a later one, as one."""
        least = _of_each(min, self.least, later.least)
        greatest = _of_each(max, self.greatest, later.greatest)
        return Measurement(min(self.began, later.began), self.since, later.at, least, greatest)


@dataclass(frozen=True)
class LastingCosts:
    """The measured costs of the last seconds, and those to plan with. An immutable value: `observe` returns the next.

    A number to plan with stays as it is while it lies between the least and the greatest of its recent measurements;
    otherwise it becomes the nearest of the two. Until the measurements cover `seconds`, the seconds of layers follow
    the newest measurement, and the speeds of workers stay as they were.

    Args:
        seconds: how long a difference has to last, in seconds; with 0 every measurement counts at once.
        planned: the costs to plan with; at first those that are known before anything is measured.
        history: the measurements of the last `seconds`, oldest first, and the one before them. Those that come shortly
            after each other are one, which counts until all of them are too old.
    """

    seconds: float
    planned: CostModel
    history: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        assert self.seconds >= 0, self

    def observe(self, costs: CostModel, now: float, took: float = math.inf) -> LastingCosts:
        """The value after one more measurement.

        Args:
            costs: the measured costs.
            now: the time in seconds, by a monotonic clock.
            took: for how many seconds up to now the measured steps ran, pauses left out; inf: since the measurement
                before this one.
        """
        seen = [*self.history, Measurement(now - took, now, now, costs, costs)]
        if len(seen) > 1 and now - seen[-2].since < self.seconds / _MOST_KEPT:
            seen[-2:] = [seen[-2].and_then(seen[-1])]
        # The newest measurement that is too old to count is kept as well: it shows from when on the others cover the
        # time.
        first = max((i for i, each in enumerate(seen) if now - each.at >= self.seconds), default=0)
        found = replace(self, history=tuple(seen[first:]))
        if found.is_covered:
            return replace(found, planned=_followed(self.planned, costs, found._recent(now)))
        return replace(found, planned=replace(costs, speeds=self.planned.speeds))

    def _recent(self, now: float) -> list[CostModel]:
        """The costs that have to agree on a difference: together they cover the last `seconds`.

        After a validation, say, or while state is copied, nothing was measured for some time. Then the few steps since
        do not show that a difference has lasted, and the measurement before that time counts as well.
        """
        number = sum(now - each.at < self.seconds for each in self.history) or 1
        if now - self.history[-number].began < self.seconds:
            number += 1
        return [costs for each in self.history[-number:] for costs in (each.least, each.greatest)]

    @property
    def is_covered(self) -> bool:
        """True once the measurements cover `seconds`. Before that, no difference is known to last."""
        return bool(self.history) and self.history[-1].at - self.history[0].at >= self.seconds


def _followed(planned: CostModel, latest: CostModel, seen: Sequence[CostModel]) -> CostModel:
    """`latest` with the seconds and speeds of `planned`, moved as far as all costs in `seen` agree on."""
    layers = tuple(
        replace(
            layer,
            **{
                name: _clamped(getattr(planned.layers[i], name), [getattr(costs.layers[i], name) for costs in seen])
                for name in _FOLLOWED
            },
        )
        for i, layer in enumerate(latest.layers)
    )
    ranks = {rank for costs in (planned, *seen) for rank, _ in costs.speeds}
    speeds = {rank: _clamped(planned.speed(rank), [costs.speed(rank) for costs in seen]) for rank in sorted(ranks)}
    return replace(latest, layers=layers, speeds=tuple((rank, v) for rank, v in speeds.items() if v != 1.0))


def _of_each(chosen: Callable[[float, float], float], one: CostModel, other: CostModel) -> CostModel:
    """The costs with the chosen ones of two seconds and speeds each, such as the least."""
    layers = tuple(
        replace(mine, **{name: chosen(getattr(mine, name), getattr(theirs, name)) for name in _FOLLOWED})
        for mine, theirs in zip(one.layers, other.layers, strict=True)
    )
    ranks = sorted({rank for costs in (one, other) for rank, _ in costs.speeds})
    speeds = tuple((rank, chosen(one.speed(rank), other.speed(rank))) for rank in ranks)
    return replace(other, layers=layers, speeds=speeds)


def _clamped(value: float, seen: Sequence[float]) -> float:
    return min(max(value, min(seen)), max(seen))
