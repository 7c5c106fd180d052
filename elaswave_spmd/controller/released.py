"""Workers that were let go, until their processes have ended: one that hangs over its last checkpoint is killed.

Who has left is no member any more, and no deadline of the living holds for it (supervision.py). It still writes what
waits for its disk. Its machine is not let go before it has ended, so without an end it would keep that for ever.

Decides on the controller's thread, from facts.
"""

from __future__ import annotations

from elaswave_spmd.controller.actions import Action, Kill, Record
from elaswave_spmd.mesh.mesh import named_workers

KILLED = "killed"
"""The event of workers that were let go and did not end."""


class ReleasedWorkers:
    """The workers that have been told to end.

    Args:
        seconds: that they have for it (timeouts.shutdown).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: dict[int, float] = {}  # rank -> when it is to have ended; in this order

    def let_go(self, rank: int, now: float) -> None:
        """A worker has been told to end."""
        self._until[rank] = now + self._seconds

    def ended(self, rank: int) -> None:
        """A process has ended. Workers that were not let go are ignored."""
        self._until.pop(rank, None)

    def overdue(self, now: float) -> list[Action]:
        """End those that should have ended by now, each once. With every tick."""
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
