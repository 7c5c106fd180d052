"""The clock of the controller's deadlines, which ticks drive: a pause of its process or machine is no time on it.

It reads no clock itself. All deadlines by which a worker is given up, or the state of a run that stops, are on this one
clock: the failure detector's, the standstill's, those of an adoption, of workers that were told to end, and of last
checkpoints.
"""

from __future__ import annotations


class TickClock:
    """Seconds since the run began, of which each tick counts as one period at most.

    So after a pause of the controller the messages that have come meanwhile are read before any deadline is over,
    however late the ticks come.

    Args:
        period: the most seconds that a tick counts as (timeouts.heartbeat).
        at: the time at which the run begins, in seconds of the controller's clock.
    """

    def __init__(self, period: float, at: float) -> None:
        self._period = period
        self._at = at
        self.now = 0.0
        """Seconds since the run began, without pauses."""

    def tick(self, to: float) -> None:
        """Everything that came before the time `to`, in seconds of the controller's clock, was handled.

        A time that is no later than the last one changes nothing: then nothing is known of the time since.
        """
        if to > self._at:
            self.now += min(to - self._at, self._period)
            self._at = to
