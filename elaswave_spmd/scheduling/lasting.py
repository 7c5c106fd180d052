"""Costs that change only by what lasts: a burst of noise moves no work and names no worker.

On a machine that is shared with others a worker may take fifty times as long for a second. Medians over a few steps
(profiler.py) do not remove that where steps are short. So plans are made with numbers that follow a measurement only as
far as all measurements of some seconds agree: a burst leaves one of them as it was, what lasts comes through whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.scheduling.cost_model import CostModel


@dataclass(frozen=True)
class LastingCosts:
    """The measured costs of the last seconds, and those to plan with. An immutable value: `observe` returns the next.

    Each number to plan with stays as it is while it lies between the least and the greatest of its measurements, and is
    else the nearest of the two. Before the measurements cover the time, seconds of layers follow the newest one, and
    workers are as fast as was known before.

    Args:
        seconds: how long a difference has to last; 0: every measurement counts at once.
        history: (time in seconds, costs), oldest first: those of the last `seconds`, and the one before them.
        planned: the costs to plan with; at first those that are known before anything is measured.
    """

    seconds: float
    planned: CostModel
    history: tuple[tuple[float, CostModel], ...] = ()

    def __post_init__(self) -> None:
        assert self.seconds >= 0, self

    def observe(self, costs: CostModel, now: float) -> LastingCosts:
        """The value after one more measurement, at the time `now` of a clock that does not run back."""
        times = [*self.history, (now, costs)]
        # A measurement is of the time since the one before it. So the newest that is too old to count stays: it tells
        # that the time is covered.
        first = max((i for i, (at, _) in enumerate(times) if now - at >= self.seconds), default=0)
        found = replace(self, history=tuple(times[first:]))
        if found.is_covered:
            recent = [seen for at, seen in found.history if now - at < self.seconds] or [costs]
            return replace(found, planned=_followed(self.planned, costs, recent))
        return replace(found, planned=replace(costs, speeds=self.planned.speeds))

    @property
    def is_covered(self) -> bool:
        """True once the measurements cover the time: before, nothing is known to last."""
        return bool(self.history) and self.history[-1][0] - self.history[0][0] >= self.seconds


def _followed(planned: CostModel, latest: CostModel, seen: Sequence[CostModel]) -> CostModel:
    """`latest` with the seconds and speeds of `planned`, moved as far as all that was seen agrees."""
    followed = ("forward_s", "backward_s", "weight_share")
    layers = tuple(
        replace(
            layer,
            **{
                name: _clamped(getattr(planned.layers[i], name), [getattr(costs.layers[i], name) for costs in seen])
                for name in followed
            },
        )
        for i, layer in enumerate(latest.layers)
    )
    ranks = {rank for costs in (planned, *seen) for rank, _ in costs.speeds}
    speeds = {rank: _clamped(planned.speed(rank), [costs.speed(rank) for costs in seen]) for rank in sorted(ranks)}
    return replace(latest, layers=layers, speeds=tuple((rank, v) for rank, v in speeds.items() if v != 1.0))


def _clamped(value: float, seen: Sequence[float]) -> float:
    return min(max(value, min(seen)), max(seen))
