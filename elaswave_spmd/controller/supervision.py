"""Supervision of workers that live: their heartbeats, and deadlines for them.

This finds workers that hang or are not ready in time, and a run in which nothing moves. The end of a process is noticed
elsewhere (the death watch, the fork server) and is the event WorkerEnded; it does not matter which detector is the
first, as a worker is lost only once (FailureHandler). A closed link is no loss by itself
(recovery/failure_detector.py, BrokenLinks).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.failure_detector import Liveness, Suspect
from elaswave_spmd.recovery.messages import Heartbeat
from elaswave_spmd.recovery.standstill import Standstill, StandstillDetector
from elaswave_spmd.recovery.tick_clock import TickClock

_BEATS = 3  # up to this many heartbeat periods after a fault, heartbeats that its worker had sent may still arrive


@dataclass(frozen=True)
class Sign:
    """The last that is known of a lost worker.

    Args:
        at: the time, in seconds of the controller's clock.
        is_death: True if it is the instant of its death; False if it is its last sign of life.
    """

    at: float
    is_death: bool


class Supervision:
    """The failure detector of a run, driven by the clock.

    Handling a heartbeat takes the same time for any number of workers. `tick` is called when `next_tick` has come,
    which is twice in a heartbeat period.

    Args:
        now: the time at which the run begins, in seconds of the controller's clock.
    """

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self.clock = TickClock(timeouts.heartbeat, now)
        """The clock of all deadlines of the run by which something is given up. This object drives it."""
        self._liveness = Liveness(timeouts, self.clock)
        self._movement = StandstillDetector(timeouts, self.clock)
        self._alive_at: dict[
            int, float
        ] = {}  # when a worker's last sign of life came; kept after its loss, for the log
        self._ticked = now

    @property
    def next_tick(self) -> float:
        """The time at which `tick` is due."""
        return self._ticked + self._timeouts.heartbeat / 2

    @property
    def has_overdue_leavers(self) -> bool:
        """True if the next tick may find that a worker which has asked to leave was not let go in time."""
        return self._liveness.has_overdue_leavers

    def expect(self, rank: int, *, joins: bool) -> None:
        """A worker has been started. Its timeout begins: timeouts.join if the run has begun, else timeouts.start."""
        self._liveness.expect(rank, self._timeouts.join if joins else self._timeouts.start)

    def watch(self, rank: int, now: float) -> None:
        """The worker is ready. Starts its heartbeat timeout."""
        self._liveness.watch(rank)
        self._movement.watch(rank)
        self._alive_at[rank] = now

    def forget(self, rank: int) -> None:
        """The worker is lost or has left: stop supervising it."""
        self._liveness.forget(rank)
        self._movement.forget(rank)

    def heartbeat(self, message: Heartbeat, now: float) -> None:
        """A worker has sent a heartbeat."""
        self._alive_at[message.rank] = now
        self._liveness.heartbeat(message.rank, message.progress, message.waiting, message.action)
        self._movement.heartbeat(message)

    def moved(self) -> None:
        """A worker has sent a message other than a heartbeat, or the controller sends one to members: no standstill."""
        self._movement.moved()

    def committed(self) -> None:
        """A step is committed."""
        self._movement.committed()

    def wants_to_leave(self, rank: int) -> None:
        """The worker has asked to leave (SIGTERM)."""
        self._liveness.wants_to_leave(rank)

    def tick(
        self, now: float, read_until: float, unanswered: tuple[int, Collection[int]], free_to_leave: Collection[int]
    ) -> tuple[list[Suspect], Standstill | None]:
        """Check all deadlines.

        Args:
            now: the time in seconds, by the controller's clock.
            read_until: as in `events.Tick`.
            unanswered: the epoch of the last Prepare, and the workers that could have answered it by now and have not.
            free_to_leave: workers that asked to leave and whose pages all have another replica; needed if
                `has_overdue_leavers`.

        Returns:
            The workers that are suspected to hang; and the standstill if nothing moves although no worker is suspected,
            else None.
        """
        self._liveness.expect_answers(*unanswered)
        self.postpone(now, read_until)
        suspects, standstill = self._liveness.tick(free_to_leave), self._movement.tick()
        return suspects, None if suspects else standstill

    def postpone(self, now: float, read_until: float) -> None:
        """Let the clock tick without checking the deadlines of workers: the next tick is due half a period later."""
        self._ticked = now
        # Not up to `now`: what workers have sent, and is not read yet, must not count as not sent.
        self.clock.tick(min(now, read_until))

    def last_sign(self, rank: int, faulted_at: float | None) -> Sign | None:
        """The instant of a worker's death, if fault injection wrote it down; else its last sign of life, if any.

        Args:
            faulted_at: the time at which a fault was injected into the worker, if one was.
        """
        alive_at = self._alive_at.get(rank)
        # A worker that sends heartbeats long after a fault (it was stopped, and continued) has survived it.
        late = _BEATS * self._timeouts.heartbeat
        if faulted_at is not None and (alive_at is None or alive_at < faulted_at + late):
            return Sign(faulted_at, is_death=True)
        return None if alive_at is None else Sign(alive_at, is_death=False)
