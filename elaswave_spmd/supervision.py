"""How the controller learns that a worker is gone, or hangs: what the kernel, the launcher and silence say.

All that is found becomes one kind of notice in the controller's mailbox. Which detector was first does not matter.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from dataclasses import dataclass

from elaswave_spmd.recovery.liveness import Liveness
from elaswave_spmd.recovery.messages import Heartbeat
from elaswave_spmd.recovery.timeouts import Timeouts
from elaswave_spmd.runtime import latch
from elaswave_spmd.runtime.launcher import Launcher
from elaswave_spmd.runtime.mailbox import Mailbox
from elaswave_spmd.runtime.zygote import Exited, Zygote


@dataclass(frozen=True)
class Loss:
    """A worker is gone, or is to be treated as gone. `at`: time.monotonic() when it was seen."""

    rank: int
    reason: str
    at: float
    exited: Exited | None = None


class Supervision:
    """Watches the workers' processes.

    Args:
        scratch: directory for the latches.
        mailbox: woken when a process ends.
    """

    def __init__(self, launcher: Launcher | Zygote, scratch: str, mailbox: Mailbox, timeouts: Timeouts) -> None:
        self._launcher, self._mailbox = launcher, mailbox
        self._liveness = Liveness(timeouts)
        self._ticked = time.monotonic()
        self._losses: list[Loss] = []
        self._lock = threading.Lock()
        self._board = latch.LatchBoard(scratch) if latch.available() else None
        self._watcher = latch.Watcher(self._board, self._died) if self._board is not None else None

    def seat(self, rank: int) -> tuple[str, int] | None:
        """What a new worker on this machine needs to hold its latch; None: there is none, its end is seen later."""
        if self._board is None:
            return None
        try:
            seat = self._board.seat(rank)
        except OSError:  # no room in the folder of the sockets
            return None
        return str(seat.path), seat.slot

    def watch(self, rank: int, latched: bool) -> None:
        """The worker listens: from now on its silence means something."""
        self._liveness.watch(rank)
        if latched and self._watcher is not None and not self._watcher.watch(rank):
            self._note(Loss(rank, "its process ended while it started", time.monotonic()))

    def forget(self, rank: int) -> None:
        """It is no member any more."""
        self._liveness.forget(rank)

    def end(self, rank: int) -> None:
        """Ends a worker for certain: a process that stands still, too."""
        self._launcher.signal(rank, signal.SIGKILL)

    def heartbeat(self, message: Heartbeat) -> None:
        self._liveness.heartbeat(message.rank, message.progress, message.waiting, message.action)

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
