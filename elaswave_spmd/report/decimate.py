"""Reducing the points of a curve so that it looks the same."""

from __future__ import annotations

import itertools

import numpy as np

MOST_POINTS = 4000
"""The most points of a curve on the page: more than a screen has columns."""


def kept_points(y: np.ndarray) -> np.ndarray:
    """Indices of the points that are shown: the lowest and the highest of each of MOST_POINTS / 2 equal parts.

    So no peak is lost. The first and the last point are always among them. Numbers that are not finite count as lowest.
    """
    if len(y) <= MOST_POINTS:
        return np.arange(len(y))
    low = np.where(np.isfinite(y), y, -np.inf)
    cuts = np.linspace(0, len(y), MOST_POINTS // 2, dtype=int)
    found = {0, len(y) - 1}
    for first, stop in itertools.pairwise(cuts):
        found |= {first + int(low[first:stop].argmin()), first + int(low[first:stop].argmax())}
    return np.array(sorted(found))
