"""The loss of all steps so far as one line of characters, in bounded memory."""

from __future__ import annotations

import math

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.,-=*%#"
_MOST_POINTS = 512


class LossCurve:
    """The losses of a run. If there are too many, neighbours are averaged, so that the curve still spans the run."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []  # (sum, number) of the finite losses of `_steps_per_point` steps
        self._steps_per_point = 1
        self._steps_in_last = 0
        self.first = math.nan
        self.last = math.nan

    def add(self, loss: float) -> None:
        """Add the loss of the next step. A loss that is not finite leaves a gap."""
        if math.isnan(self.first):
            self.first = loss
        self.last = loss
        value = (loss, 1) if math.isfinite(loss) else (0.0, 0)
        if self._points and self._steps_in_last < self._steps_per_point:
            self._points[-1] = _sum(self._points[-1], value)
            self._steps_in_last += 1
            return
        if len(self._points) == _MOST_POINTS:
            self._points = [_sum(*self._points[i : i + 2]) for i in range(0, _MOST_POINTS, 2)]
            self._steps_per_point *= 2
        self._points.append(value)
        self._steps_in_last = 1

    def line(self, width: int, *, ascii_only: bool = False) -> str:
        """The curve as at most `width` characters, scaled from the least to the greatest value.

        A part of the run without a finite loss is shown as "?".
        """
        values = self._means(width)
        known = [value for value in values if value is not None]
        if not known:
            return "?" * len(values)
        levels = _ASCII if ascii_only else _BLOCKS
        low, high = min(known), max(known)
        scale = (len(levels) - 1) / (high - low) if high > low else 0.0
        return "".join("?" if value is None else levels[round((value - low) * scale)] for value in values)

    def _means(self, width: int) -> list[float | None]:
        """The means of at most `width` ranges of steps of about the same length; None for one without a finite loss."""
        number = len(self._points)
        size = max(1, min(width, number))
        found: list[float | None] = []
        for i in range(size if number and width > 0 else 0):
            total, count = 0.0, 0
            for value, some in self._points[i * number // size : (i + 1) * number // size]:
                total, count = total + value, count + some
            found.append(total / count if count else None)
        return found


def _sum(one: tuple[float, int], other: tuple[float, int] = (0.0, 0)) -> tuple[float, int]:
    return one[0] + other[0], one[1] + other[1]
