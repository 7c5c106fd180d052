"""How workers of a simulated cluster start, if that takes them time: in phases, in which they can be lost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from elaswave_spmd.conf.schema import ElasticSettings

PHASES = ("spawn", "import", "ready", "waiting")
"""The process is there; it imports; it is about to send Ready; it has sent Ready and waits for its place."""
START_KINDS = ("kill", "stop", "silent")
LATE_TURNS = 30_000
"""A stop of so many turns outlasts timeouts.start and timeouts.join."""


@dataclass(frozen=True)
class StartFault:
    """Something that happens once to a worker while it starts.

    Args:
        kind: kill, stop or silent, as in `Fault`.
        number: the worker, counted in the order in which workers are started in the whole run, restarts included.
        phase: when.
        turns: how long a stop lasts.
    """

    kind: str
    number: int
    phase: str
    turns: int = 400

    def __post_init__(self) -> None:
        assert self.kind in START_KINDS and self.phase in PHASES and self.number >= 0, self


@dataclass(frozen=True)
class Starting:
    """Workers take some turns to start, and are replaced by these settings.

    Args:
        elastic: replace, spares, replacements_per_minute.
    """

    faults: tuple[StartFault, ...] = ()
    elastic: ElasticSettings = field(default_factory=ElasticSettings)

    @classmethod
    def draw(cls, draw: random.Random, workers: int) -> Starting:
        """For a run of so many workers at first."""
        replace, spares = draw.random() < 0.5, draw.choice((0, 0, 1, 2))
        faults = tuple(_drawn(draw, workers, i) for i in range(draw.choice((1, 1, 2, 2, 3, workers))))
        per_minute = draw.choice((1, 2, 20))
        return cls(faults, ElasticSettings(replace=replace, spares=spares, replacements_per_minute=per_minute))


def _drawn(draw: random.Random, workers: int, earlier: int) -> StartFault:
    """Of the first workers, mostly; else of those that were started in place of others, or of a later life."""
    number = draw.randrange(workers) if draw.random() < 0.7 else workers + draw.randrange(earlier + 2)
    turns = draw.choice((1, 20, 400, LATE_TURNS))
    return StartFault(draw.choice(("kill", "kill", "kill", "stop", "silent")), number, draw.choice(PHASES), turns)


class Phases:
    """The phases that the workers of a run are in while they start, and the faults that are due in them."""

    def __init__(self, starting: Starting, seed: int) -> None:
        self._faults = list(starting.faults)
        self._random = random.Random(f"starting {seed}")
        self._number = 0  # of workers started
        self._left: dict[int, tuple[int, int, int]] = {}  # rank -> (number, turns that are left, all turns)

    def begin(self, rank: int) -> None:
        """A worker is started. It takes a few turns."""
        turns = self._random.randint(2, 20)
        self._left[rank] = self._number, turns, turns
        self._number += 1

    def clear(self) -> None:
        """No worker of before is left: the run begins again."""
        self._left.clear()

    def is_starting(self, rank: int) -> bool:
        return rank in self._left

    def turn(self, rank: int) -> tuple[str, StartFault | None]:
        """A turn of a worker that starts. Returns its phase, and a fault that is due, for which the turn is spent.

        Without a fault a worker in the phase "ready" sends Ready, and waits for its place.
        """
        number, left, turns = self._left[rank]
        phase = "spawn" if left == turns else "ready" if left == 1 else "import"
        if (fault := self._due(number, phase)) is not None:
            return phase, fault
        self._left[rank] = number, left - 1, turns
        if left == 1:
            del self._left[rank]
            return phase, self._due(number, "waiting")
        return phase, None

    def _due(self, number: int, phase: str) -> StartFault | None:
        fault = next((f for f in self._faults if (f.number, f.phase) == (number, phase)), None)
        if fault is not None:
            self._faults.remove(fault)
        return fault
