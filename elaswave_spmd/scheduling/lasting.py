"""Costs that follow a change only if it lasts: a burst of noise neither moves work nor marks a worker as slow.

On a machine that is shared with others, a worker may take fifty times as long for a second. If steps are short, medians
over a few steps (profiler.py) do not remove this. So plans use numbers that follow a measurement only as far as all
measurements of some seconds agree. A burst does not change them, as one of these measurements is as before. A change
that lasts is followed in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elaswave_spmd.scheduling.cost_model import CostModel


@dataclass(frozen=True)
class LastingCosts:
    """The measured costs of the last seconds, and those to plan with. An immutable value: `observe` returns the next.

    A number to plan with stays as it is while it lies between the least and the greatest of its recent measurements;
    otherwise it becomes the nearest of the two. Until the measurements cover `seconds`, the seconds of layers follow
    the newest measurement, and the speeds of workers stay as they were.

    Args:
        seconds: how long a difference has to last, in seconds; with 0 every measurement counts at once.
        planned: the costs to plan with; at first those that are known before anything is measured.
        history: (time in seconds, measured costs), oldest first: those of the last `seconds`, and the one before them.
    """

    seconds: float
    planned: CostModel
    history: tuple[tuple[float, CostModel], ...] = ()

    def __post_init__(self) -> None:
        assert self.seconds >= 0, self

    def observe(self, costs: CostModel, now: float) -> LastingCosts:
        """The value after one more measurement.

        Args:
            costs: the measured costs.
            now: the time in seconds, by a monotonic clock.
        """
        times = [*self.history, (now, costs)]
        # A measurement covers the time since the one before it. So the newest measurement that is too old to count is
        # kept as well: it shows from when on the others cover the time.
        first = max((i for i, (at, _) in enumerate(times) if now - at >= self.seconds), default=0)
        found = replace(self, history=tuple(times[first:]))
        if found.is_covered:
            recent = [seen for at, seen in found.history if now - at < self.seconds] or [costs]
            return replace(found, planned=_followed(self.planned, costs, recent))
        return replace(found, planned=replace(costs, speeds=self.planned.speeds))

    @property
    def is_covered(self) -> bool:
        """True once the measurements cover `seconds`. Before that, no difference is known to last."""
        return bool(self.history) and self.history[-1][0] - self.history[0][0] >= self.seconds


def _followed(planned: CostModel, latest: CostModel, seen: Sequence[CostModel]) -> CostModel:
    """`latest` with the seconds and speeds of `planned`, moved as far as all costs in `seen` agree on."""
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
