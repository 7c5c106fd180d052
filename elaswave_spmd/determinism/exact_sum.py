"""Exactly rounded sums that can be sent in pieces.

`math.fsum` is free of order by definition: its result is the exact sum, rounded once. A worker sums the norm values of
its own pages and sends them as an *expansion*: a few doubles whose exact sum is the exact sum of all of them. The
fsum of the workers' expansions is then the fsum of all pages, whoever held which (Shewchuk, 1997, on expansions).
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def expansion(values: Iterable[float]) -> tuple[float, ...]:
    """Doubles, largest first, whose exact sum equals the exact sum of `values`. A non-finite sum is one value."""
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
        parts.append(part)
        rest.append(-part)


def exact_sum(expansions: Iterable[tuple[float, ...]]) -> float:
    """The exactly rounded sum of several expansions; nan when any of them is not finite."""
    values = [v for parts in expansions for v in parts]
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values)
    except OverflowError:
        return math.nan
