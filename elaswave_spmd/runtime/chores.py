"""What a worker does while it waits: copies that nobody has to wait for, in small pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

CHORE_ELEMENTS = 1 << 18
"""Elements of fp32 that one piece copies: about a millisecond for the host, for which a message may have to wait."""


class Chores:
    """Jobs in turn, each an iterator that does one piece whenever it is asked for its next item.

    Whoever is about to change what a job reads, or needs what it makes, calls `finish` first. The training thread does
    all of it, so a job sees what any other part of that thread would see between two messages.
    """

    def __init__(self) -> None:
        self._jobs: deque[Iterator[None]] = deque()

    def __bool__(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._jobs)

    def add(self, job: Iterator[None]) -> None:
        self._jobs.append(job)

    def do_one(self) -> bool:
        """One piece of the oldest job. Returns whether there was any."""
        if not self._jobs:
            return False
        job = self._jobs[0]
        if next(job, job) is job:
            self._jobs.popleft()
        return True

    def finish(self) -> None:
        """All that is left."""
        while self:
            self.do_one()

    def give_up(self) -> None:
        """Leaves the rest undone."""
        self._jobs.clear()
