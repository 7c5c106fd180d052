"""Workers that have left and were told to end: one whose process does not end in time is killed.

A worker that has left is not a member any more, so the failure detector does not watch it (supervision.py). It still
writes its part of a checkpoint. Its machine is released only when its process has ended. Without this deadline, a
worker that hangs while it writes would keep the machine forever.

Everything here takes facts and returns actions, on the controller's thread.
"""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, Kill, Record
from elaswave_spmd.mesh.mesh import named_workers

KILLED = "killed"
"""The kind of the event about workers that were told to end, and did not."""


class ReleasedWorkers:
    """The workers that have been told to end.

    Args:
        seconds: how long they may take (timeouts.shutdown).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[int, float] = {}  # rank -> the time by which it has to end; the earliest comes first

    def let_go(self, rank: int, now: float) -> None:
        """A worker has been told to end."""
        self._until[rank] = now + self._seconds

    def ended(self, rank: int) -> None:
        """A worker's process has ended. Does nothing if the worker was not told to end."""
        self._until.pop(rank, None)

    def overdue(self, now: float) -> list[Action]:
        """Kill the workers whose time is up, each once. Called with every tick."""
        ranks: list[int] = []
        for rank, until in self._until.items():
            if now <= until:
                break
            ranks.append(rank)
        if not ranks:
            return []
        for rank in ranks:
            del self._until[rank]
        what = f"{named_workers(ranks)} left, did not end within {self._seconds:g} s (timeouts.shutdown), and "
        what += "are killed" if len(ranks) > 1 else "is killed"
        return [
            Record(KILLED, {"ranks": ranks, "seconds": self._seconds, "message": what}),
            *(Kill(rank) for rank in ranks),
        ]
