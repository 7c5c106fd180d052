"""A worker's heartbeats: a thread that reports the progress of the training thread to the controller at fixed times.

With many workers heartbeats are less frequent, so that the controller can handle all of them. On an agent's machine the
agent sends those of all workers in one message, as long as it answers (runtime/processes/beat_relay.py).

By heartbeats the controller tells three cases apart: a dead process sends none, a process whose training thread hangs
sends heartbeats without progress, and a process that waits for another worker says so.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.messages import Heartbeat, encode
from elaswave_spmd.runtime.processes.beat_relay import RelayClient
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links


@dataclass
class Progress:
    """The progress of the training thread. Only that thread writes it, at any time and without a lock.

    A heartbeat may read it between two writes and report a mixture. The next one, a period later, is right.
    """

    count: int = 0  # the number of fault points passed and layers evaluated so far
    waiting: bool = False  # the thread waits for a message
    action: str = ""  # what the thread does now, in words
    num_workers: int = 1  # the number of workers of the mesh, which the period depends on


class HeartbeatSender:
    """Sends a `Heartbeat` to the controller: one at once, then one in each period.

    The thread starts with the constructor and ends when the link to the controller is closed, or by `stop`.

    Args:
        rank: the rank of this worker.
        links: the links of this worker.
        progress: the progress of the training thread, read for each heartbeat.
        timeouts: has the period in seconds, which depends on the number of workers.
        relay: sends heartbeats by way of the worker's agent; None: they go over the link to the controller.
        outlives_link: keep the thread when the link is closed, since another controller may adopt this worker.
    """

    def __init__(
        self,
        rank: int,
        links: Links,
        progress: Progress,
        timeouts: Timeouts,
        relay: RelayClient | None = None,
        *,
        outlives_link: bool = False,
    ) -> None:
        self._rank = rank
        self._links = links
        self._progress = progress
        self._timeouts = timeouts
        self._relay = relay
        self._outlives_link = outlives_link
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; to be called before the links are closed. Calling it again does nothing."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        now, before = self._progress, -1
        while True:
            # The links are asked only if the training thread has waited for a whole period without progress, which does
            # not happen in most steps.
            is_sending = now.waiting and now.count == before and self._links.is_sending()
            before, rejected = now.count, tuple(self._links.rejected.items())
            beat = Heartbeat(self._rank, before, now.waiting, now.action, rejected, is_sending)
            period_s = self._timeouts.heartbeat_of(now.num_workers)
            is_linked = self._send(encode(beat), period_s)
            if not (is_linked or self._outlives_link) or self._stopping.wait(period_s):
                return

    def _send(self, beat: bytes, period_s: float) -> bool:
        """Send a heartbeat by the relay, or over the link if the relay does not answer. True if the link is open."""
        if self._relay is not None and self._link_works() and self._relay.send(beat, period_s):
            return True
        return self._links.send(CONTROLLER, beat)

    def _link_works(self) -> bool:
        """True if the link to the controller is open and acknowledges what is sent over it.

        If not, the relay is not used: a worker whose messages do not reach the controller must be found by its silence,
        which heartbeats by way of the agent would hide.
        """
        links = self._links
        return links.reaches(CONTROLLER) and links.unacknowledged_s(CONTROLLER) < self._timeouts.suspect / 2
