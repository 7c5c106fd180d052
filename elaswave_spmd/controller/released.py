"""Workers that have left and were told to end: one whose process does not end in time is killed.

A worker that has left is not a member any more, so the failure detector does not watch it (supervision.py). It still
writes its part of a checkpoint. Its machine is released only when its process has ended. Without this deadline, a
worker that hangs while it writes would keep the machine forever.

Everything here takes facts and returns actions, on the controller's thread.
"""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, Kill, Record
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.recovery.tick_clock import TickClock

KILLED = "killed"
"""The kind of the event about workers that were told to end, and did not."""


class ReleasedWorkers:
    """The workers that have been told to end.

    Args:
        clock: the clock of the deadlines.
        seconds: how long they may take (timeouts.shutdown).
    """

    def __init__(self, clock: TickClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._until: dict[int, tuple[float, int]] = {}  # rank -> when it is to have ended, its last step; in this order

    def let_go(self, rank: int, step: int) -> None:
        """A worker has been told to end.

        Args:
            step: the last one of which it may have to write state.
        """
        self._until[rank] = self._clock.now + self._seconds, step

    def ended(self, rank: int) -> None:
        """A worker's process has ended. Does nothing if the worker was not told to end."""
        self._until.pop(rank, None)

    def overdue(self) -> tuple[list[Action], int]:
        """End those that should have ended by now, each once. With every tick.

        Returns:
            The actions, and the last step of which the state of one of them will not be written any more; 0: of none.
        """
        ranks: list[int] = []
        for rank, (until, _) in self._until.items():
            if self._clock.now <= until:
                break
            ranks.append(rank)
        if not ranks:
            return [], 0
        step = max(self._until.pop(rank)[1] for rank in ranks)
        # Not all of them have left: after an adoption, a worker may be among them that was lost and has not ended.
        no_more, killed = ("are no members", "are killed") if len(ranks) > 1 else ("is no member", "is killed")
        late = f"did not end within {self._seconds:g} s (timeouts.shutdown)"
        what = f"{named_workers(ranks)} {no_more} any more, {late}, and {killed}"
        record = Record(KILLED, {"ranks": ranks, "seconds": self._seconds, "message": what})
        return [record, *(Kill(rank) for rank in ranks)], step
