"""How the controller learns that a worker is gone, or hangs: what the kernel, the launcher and silence say.

All that is found becomes one kind of notice in the controller's mailbox. Which detector was first does not matter.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.failure_detector import Liveness
from elaswave_spmd.recovery.messages import Heartbeat
from elaswave_spmd.runtime.processes import death_watch
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.transport.mailbox import Mailbox

_BEATS = 3  # heartbeats that may still be on their way when their sender is struck


@dataclass(frozen=True)
class Loss:
    """A worker is gone, or is to be treated as gone. `at`: time.monotonic() when it was seen."""

    rank: int
    reason: str
    at: float
    exited: Exited | None = None


@dataclass(frozen=True)
class Sign:
    """The last that is known of a worker that is lost, at time.monotonic() = `at`: its death, else a sign of life."""

    at: float
    is_death: bool


class Supervision:
    """Watches the workers' processes.

    Args:
        scratch: directory for the latches.
        mailbox: woken when a process ends.
        is_free: whether the run waits for nothing that a worker has, so that it may leave.
    """

    def __init__(
        self,
        launcher: Launcher | ForkServerClient,
        scratch: str,
        mailbox: Mailbox,
        timeouts: Timeouts,
        is_free: Callable[[int], bool],
    ) -> None:
        self._launcher, self._mailbox, self._timeouts = launcher, mailbox, timeouts
        self._liveness = Liveness(timeouts, is_free)
        self._alive_at: dict[int, float] = {}  # when a worker said last that it lives
        self._ticked = time.monotonic()
        self._losses: list[Loss] = []
        self._lock = threading.Lock()
        self._board = death_watch.RobustMutexTable(scratch) if death_watch.available() else None
        self._watcher = death_watch.Watcher(self._board, self._died) if self._board is not None else None

    def seat(self, rank: int) -> tuple[str, int] | None:
        """What a new worker on this machine needs to hold its latch; None: there is none, its end is seen later."""
        if self._board is None:
            return None
        try:
            seat = self._board.seat(rank)
        except OSError:  # no room in the folder of the sockets
            return None
        return str(seat.path), seat.slot

    def expect(self, rank: int) -> None:
        """A newcomer has been started: it is not waited for for ever."""
        self._liveness.expect(rank)

    def watch(self, rank: int, latched: bool) -> None:
        """The worker listens: from now on its silence means something."""
        self._liveness.watch(rank)
        self._alive_at[rank] = time.monotonic()
        if latched and self._watcher is not None and not self._watcher.watch(rank):
            self._note(Loss(rank, "its process ended while it started", time.monotonic()))

    def forget(self, rank: int) -> None:
        """It is no member any more."""
        self._liveness.forget(rank)

    def end(self, rank: int) -> None:
        """Ends a worker for certain: a process that stands still, too."""
        self._launcher.signal(rank, signal.SIGKILL)

    def heartbeat(self, message: Heartbeat) -> None:
        self._alive_at[message.rank] = time.monotonic()
        self._liveness.heartbeat(message.rank, message.progress, message.waiting, message.action)

    def wants_to_leave(self, rank: int) -> None:
        """The worker has asked to be let go."""
        self._liveness.wants_to_leave(rank)

    def wait_for(self, epoch: int, owing: Collection[int]) -> None:
        """Who could have answered the PREPARE of an epoch by now, and has not."""
        self._liveness.owe(epoch, owing)

    def last_sign(self, rank: int) -> Sign | None:
        """The instant of a worker's death, if a fault on purpose has written it down; else when it lived last."""
        alive_at = self._alive_at.get(rank)
        struck_at = self._board.struck_at(rank) if self._board is not None else None
        # Whoever lives on long after a fault (it stood still, and went on) has survived it.
        late = _BEATS * self._timeouts.heartbeat
        if struck_at is not None and (alive_at is None or alive_at < struck_at + late):
            return Sign(struck_at, is_death=True)
        return None if alive_at is None else Sign(alive_at, is_death=False)

    def losses(self) -> list[Loss]:
        """What was found since the last call; to be called at least once in a period of heartbeats."""
        now = time.monotonic()
        suspects = self._liveness.tick(now - self._ticked)
        self._ticked = now
        exits = self._launcher.poll() if select.select([self._launcher], [], [], 0)[0] else []
        with self._lock:
            found, self._losses = self._losses, []
        found += [Loss(e.rank, str(e), now, e) for e in exits]
        found += [Loss(s.rank, s.reason, now) for s in suspects]
        return found

    def close(self) -> None:
        """After the workers have ended."""
        if self._watcher is not None:
            self._watcher.close()
        if self._board is not None:
            self._board.close()

    def _died(self, rank: int) -> None:
        """In the watcher's thread, at the instant of the death."""
        self._note(Loss(rank, "its process ended", time.monotonic()))

    def _note(self, loss: Loss) -> None:
        with self._lock:
            self._losses.append(loss)
        self._mailbox.interrupt("a process ended")
