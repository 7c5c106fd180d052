"""The time by which an agent has ended that leaves its run, whatever has become of its workers."""

from __future__ import annotations

import math
import time

_FAREWELL_S = 2.0
_RESERVE_S = 3.0  # of the deadline, for the end itself; or a fourth of it


class Deadline:
    """The deadline of one agent. There is none at first.

    Attributes:
        within_s: in which the agent had to end when it was set.
    """

    def __init__(self) -> None:
        self.within_s = 0.0
        self._end_by: float | None = None

    def bring_forward(self, within_s: float) -> bool:
        """The agent has to end within so many seconds from now. Returns False if it has less time already."""
        end_by = time.monotonic() + within_s
        if self._end_by is not None and self._end_by <= end_by:
            return False
        self._end_by, self.within_s = end_by, within_s
        return True

    @property
    def is_set(self) -> bool:
        return self._end_by is not None

    @property
    def late_from(self) -> float:
        """The time from which the deadline is so near that what is left has to end."""
        return math.inf if self._end_by is None else self._end_by - min(_RESERVE_S, self.within_s / 4)

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.late_from

    @property
    def farewell_s(self) -> float:
        """Seconds that a last message may take: its sending, or the wait for the answer. The deadline is kept."""
        if self._end_by is None:
            return _FAREWELL_S
        return max(0.0, min(_FAREWELL_S, (self._end_by - time.monotonic()) * 2 / 3))
