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
        self._until: dict[int, tuple[float, int]] = {}  # rank -> when it is to have ended, its last step; in this order

    def let_go(self, rank: int, now: float, step: int) -> None:
        """A worker has been told to end.

        Args:
            step: the last one of which it may have to write state.
        """
        self._until[rank] = now + self._seconds, step

    def ended(self, rank: int) -> None:
        """A process has ended. Workers that were not let go are ignored."""
        self._until.pop(rank, None)

    def overdue(self, now: float) -> tuple[list[Action], int]:
        """End those that should have ended by now, each once. With every tick.

        Returns:
            The actions, and the last step of which the state of one of them will not be written any more; 0: of none.
        """
        ranks: list[int] = []
        for rank, (until, _) in self._until.items():
            if now <= until:
                break
            ranks.append(rank)
        if not ranks:
            return [], 0
        step = max(self._until.pop(rank)[1] for rank in ranks)
        what = f"{named_workers(ranks)} left, did not end within {self._seconds:g} s (timeouts.shutdown), and "
        what += "are killed" if len(ranks) > 1 else "is killed"
        record = Record(KILLED, {"ranks": ranks, "seconds": self._seconds, "message": what})
        return [record, *(Kill(rank) for rank in ranks)], step
