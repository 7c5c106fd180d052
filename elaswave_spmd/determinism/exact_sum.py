"""Exactly rounded sums whose parts are computed on different workers. Used for the gradient norm.

`math.fsum` returns the exact sum rounded once, so its result does not depend on the order of the terms. A worker cannot
send its own fsum, which has been rounded already. It sends an *expansion* instead: a few doubles whose exact sum equals
the exact sum of its norm values. The fsum of all workers' expansions then equals the fsum of the values of all pages,
no matter which worker held which page (Shewchuk, 1997, "Adaptive precision floating-point arithmetic").
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def expansion(values: Iterable[float]) -> tuple[float, ...]:
    """Doubles, largest first, whose exact sum equals the exact sum of `values`.

    If a value or the sum is not finite, or the sum is too large for a double, one value that is not finite is returned.
    """
    rest = list(values)
    parts: list[float] = []
    while True:
        try:
            part = math.fsum(rest)
        except (OverflowError, ValueError):  # inf - inf, or a sum beyond the largest double
            return (math.nan,)
        if part == 0.0:
            return tuple(parts)
        if not math.isfinite(part):
            return (part,)
        # The exact sum of the terms and of minus the rounded sum is what fsum rounded away. The next round finds it.
        parts.append(part)
        rest.append(-part)


def exact_sum(expansions: Iterable[tuple[float, ...]]) -> float:
    """The exactly rounded sum of several expansions; nan if one of them is not finite, or the sum is too large."""
    values = [v for parts in expansions for v in parts]
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan
