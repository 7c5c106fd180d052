"""The steps at which the results of each worker were checked last: if it is wrong, all since then may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.scheduling.placement import Placement


class CheckedSteps:
    """The last committed step in which one kind of results of each worker was checked.

    Args:
        draw: what is checked in each step.
    """

    def __init__(self, draw: CheckDraw, protocol: ControllerProtocol) -> None:
        self._draw = draw
        self._protocol = protocol
        self._placements: dict[int, Placement] = {}  # of the newest mesh epochs
        self._first = protocol.began_at  # the step at which the run begins
        self._unchecked: set[int] = set()  # steps whose checks were dropped
        self._by_rank: dict[int, int] = {}

    @property
    def by_rank(self) -> Mapping[int, int]:
        """Rank -> the last committed step in which it was checked."""
        return self._by_rank

    @property
    def trusted(self) -> int | None:
        """The last step up to which all members were checked; None: nothing is ever checked."""
        if not self._draw.rate:
            return None
        return min((self._by_rank.get(rank, self._first) for rank in self._protocol.members), default=self._first)

    def begun(self, begun: EpochBegun) -> None:
        """A mesh epoch begins, perhaps without the checks of the step under way."""
        if self._draw.rate:
            self._placements[begun.placement.mesh.epoch] = begun.placement
            if begun.checks_dropped:
                self._unchecked.add(begun.version + 1)
            for old in sorted(self._placements)[:-2]:
                del self._placements[old]

    def placement_of(self, applied: m.Applied) -> Placement | None:
        """The placement on which a committed step was computed and checked; None: it was not checked."""
        placement = self._placements.get(applied.epoch, self._protocol.placement)
        if not self._draw.rate or placement.mesh.epoch != applied.epoch or applied.step in self._unchecked:
            return None
        return placement

    def note(self, step: int, ranks: Iterable[int]) -> None:
        """These workers were checked in a committed step, and all checks have agreed."""
        self._by_rank.update((rank, step) for rank in ranks)
