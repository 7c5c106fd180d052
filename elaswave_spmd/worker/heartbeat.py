"""A worker's heartbeats: a thread that reports the progress of the training thread to the controller at fixed times.

On many workers they come less often, so that the controller can hear all of them. Those of an agent's machine go to the
controller together, as long as the agent answers (runtime/processes/beat_relay.py).

The controller tells three cases apart by them: a dead process sends no heartbeat, a process whose
training thread hangs sends heartbeats without progress, and one that waits for another worker says so.
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

    count: int = 0  # actions finished
    waiting: bool = False  # for a message
    action: str = ""  # what the thread does now, in words
    num_workers: int = 1  # of the mesh


class HeartbeatSender:
    """Sends a `Heartbeat` to the controller: one at once, then one in each period.

    The thread starts with the constructor and ends when the link to the controller is closed, or by `stop`.

    Args:
        rank: this worker's.
        links: this worker's.
        progress: is read for each heartbeat.
        timeouts: have the period, which depends on the number of workers.
        relay: of the worker's agent, which sends them on; None: they go over the link to the controller.
        outlives_link: the thread goes on when the link is closed: another controller may take this worker over.
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
            # Looked at once it has waited for a period: in most steps never.
            is_sending = now.waiting and now.count == before and self._links.is_sending()
            before, rejected = now.count, tuple(self._links.rejected.items())
            beat = Heartbeat(self._rank, before, now.waiting, now.action, rejected, is_sending)
            period_s = self._timeouts.heartbeat_of(now.num_workers)
            is_linked = self._send(encode(beat), period_s)
            if not (is_linked or self._outlives_link) or self._stopping.wait(period_s):
                return

    def _send(self, beat: bytes, period_s: float) -> bool:
        """Send a heartbeat by the relay, or over the link where that does not answer. True if the link is open."""
        if self._relay is not None and self._link_works() and self._relay.send(beat, period_s):
            return True
        return self._links.send(CONTROLLER, beat)

    def _link_works(self) -> bool:
        """True if the link to the controller is open, and what was sent over it is acknowledged.

        Else nothing goes by the relay: a worker that the controller does not hear is to be found by its silence.
        """
        links = self._links
        return links.reaches(CONTROLLER) and links.unacknowledged_s(CONTROLLER) < self._timeouts.suspect / 2
