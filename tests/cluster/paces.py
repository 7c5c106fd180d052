"""Paces that are drawn for every worker and mesh epoch: with any of them the bits are the same, and all goes on."""

from __future__ import annotations

import random
from collections.abc import Callable

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.scheduling.placement import CONTIGUOUS, workers_of_microbatches

_LONGEST_TURNS = 200  # for which a worker holds a planned action


class TurnClock:
    """The clock of a simulated worker's device: turns of its cluster are its seconds.

    Args:
        turn: returns the number of the turn.
    """

    def __init__(self, turn: Callable[[], int]) -> None:
        self._turn = turn
        self.changes = 0

    def set(self, frequency: float) -> float:
        """Counts a change."""
        self.changes += 1
        return frequency

    def now(self) -> float:
        """The number of the turn."""
        return float(self._turn())


def drawn_pace(seed: int, rank: int, message: m.Reconfigure) -> m.Pace:
    """A pace for a worker of a new mesh epoch, with an order of about its actions: some are others', or missing."""
    draw = random.Random(f"pace {seed} {rank} {message.epoch}")
    stage = next(s for s, members in enumerate(message.stages) if rank in members)
    counts = message.microbatch_counts[stage]
    owners = workers_of_microbatches(message.stages[stage], counts, CONTIGUOUS)
    mine = [u for u, owner in enumerate(owners) if owner == rank or draw.random() < 0.1]
    left = [[(kind, u) for kind in range(2 + draw.randint(0, 1))] for u in mine]
    order: list[tuple[int, int]] = []
    while any(left):
        order.append(draw.choice([actions for actions in left if actions]).pop(0))
    starts = (0, *sorted(draw.sample(range(1, 20), draw.randint(0, 3))))
    frequencies = tuple(draw.choice((0.5, 0.75, 1.0, 1.2)) for _ in starts)
    return m.Pace(message.epoch, starts, frequencies, tuple(order), float(draw.randint(0, _LONGEST_TURNS)))
