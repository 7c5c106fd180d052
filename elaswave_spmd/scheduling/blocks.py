"""Blocks of neighbours: units of a large mesh dealt so that a lost worker is felt by those beside it only.

A stage that lost one worker of 5,000 has units left over. Given to the first workers, they shift the units of everybody
between them and the gap: thousands of pipelines are tangled, and the order of one worker's actions follows from all of
them. Given to neighbours of the gap, they leave all other pipelines as they were. So the stages are cut into blocks at
the same places, and each block has the same units in all stages: what a worker does follows from its block.

The smallest largest load of each stage is kept exactly: units go to a block only as far as its workers in every stage
can take them within that load, and where that leaves units over, blocks are made larger, up to one for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

SMALLEST_BLOCK = 16
"""Workers of the smallest stage in a block, on average at least."""

_FEWEST_BLOCKS = 4  # a mesh of fewer is dealt as a whole


@dataclass(frozen=True)
class Block:
    """Neighbours in all stages, who share units with nobody else.

    Args:
        units: the first and the one after the last.
        parts: per stage, positions of its workers: the first and the one after the last.
    """

    units: tuple[int, int]
    parts: tuple[tuple[int, int], ...]


def first_units(
    stages: Sequence[Sequence[int]], old_stages: Sequence[Sequence[int]], old_counts: Sequence[Sequence[int]]
) -> list[np.ndarray]:
    """Per stage, int64[workers]: the first unit that each had before; of newcomers, that of the one to their left."""
    had: dict[int, int] = {}
    for members, counts in zip(old_stages, old_counts, strict=True):
        had |= dict(zip(members, accumulate(counts, initial=0), strict=False))
    return [np.maximum.accumulate(np.array([had.get(rank, 0) for rank in members], np.int64)) for members in stages]


def cut_blocks(
    num_units: int, caps: Sequence[np.ndarray], starts: Sequence[np.ndarray] | None = None
) -> tuple[Block, ...]:
    """The smallest blocks in which all units find a place; () where there are none.

    Args:
        caps: per stage, int64[workers]: the most units that each may have.
        starts: per stage, int64[workers]: about where the units of each are to begin, ascending; None: evenly.
    """
    if starts is None:
        starts = [np.arange(len(of_stage)) * num_units // len(of_stage) for of_stage in caps]
    sums = [np.concatenate([np.zeros(1, np.int64), np.cumsum(of_stage)]) for of_stage in caps]
    number = min(map(len, caps)) // SMALLEST_BLOCK
    while number >= _FEWEST_BLOCKS:
        bounds = np.arange(number + 1) * num_units // number
        cuts = [np.searchsorted(first, bounds) for first in starts]
        for cut, of_stage in zip(cuts, caps, strict=True):
            cut[0], cut[-1] = 0, len(of_stage)
        room = np.min([np.diff(total[cut]) for total, cut in zip(sums, cuts, strict=True)], axis=0)
        if all((np.diff(cut) > 0).all() for cut in cuts) and int(room.sum()) >= num_units:
            ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_shares(num_units, room))])
            return tuple(
                Block((int(ends[b]), int(ends[b + 1])), tuple((int(cut[b]), int(cut[b + 1])) for cut in cuts))
                for b in range(number)
            )
        number //= 2
    return ()


def _shares(num_units: int, room: np.ndarray) -> np.ndarray:
    """int64[blocks]: units of each, as evenly by their room as whole units allow, and within it."""
    total = int(room.sum())
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(room)])
    return np.diff(before * num_units // total)
