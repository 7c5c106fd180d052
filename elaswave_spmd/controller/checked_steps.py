"""The step in which each worker's results were checked last. If it is found to be wrong, all later results may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import EpochBegun
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.scheduling.placement import Placement


class CheckedSteps:
    """For each worker, the last committed step in which its results of one kind were checked.

    Args:
        draw: the results that are checked in each step.
    """

    def __init__(self, draw: CheckDraw, protocol: ControllerProtocol) -> None:
        self._draw = draw
        self._protocol = protocol
        self._placements: dict[int, Placement] = {}  # mesh epoch -> placement, of the two newest epochs
        self._first = protocol.began_at  # the step at which the run begins
        self._unchecked: set[int] = set()  # steps whose checks were dropped
        self._by_rank: dict[int, int] = {}

    @property
    def by_rank(self) -> Mapping[int, int]:
        """Rank -> the last committed step in which it was checked."""
        return self._by_rank

    @property
    def trusted(self) -> int | None:
        """The last step up to which all members were checked; None if nothing is ever checked."""
        if not self._draw.rate:
            return None
        return min((self._by_rank.get(rank, self._first) for rank in self._protocol.members), default=self._first)

    def begun(self, begun: EpochBegun) -> None:
        """A mesh epoch begins. The checks of the step under way may have been dropped (`begun.checks_dropped`)."""
        if self._draw.rate:
            self._placements[begun.placement.mesh.epoch] = begun.placement
            if begun.checks_dropped:
                self._unchecked.add(begun.version + 1)
            for old in sorted(self._placements)[:-2]:
                del self._placements[old]

    def placement_of(self, applied: m.Applied) -> Placement | None:
        """The placement with which a committed step was computed and checked; None if it was not checked."""
        placement = self._placements.get(applied.epoch, self._protocol.placement)
        if not self._draw.rate or placement.mesh.epoch != applied.epoch or applied.step in self._unchecked:
            return None
        return placement

    def note(self, step: int, ranks: Iterable[int]) -> None:
        """These workers were checked in a committed step, and all checks have agreed."""
        self._by_rank.update((rank, step) for rank in ranks)
