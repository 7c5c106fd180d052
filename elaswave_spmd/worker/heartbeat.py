"""A worker's heartbeats: a thread that tells the controller, every period, how far the training thread has come."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elaswave_spmd.recovery.messages import Heartbeat, encode
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links


@dataclass
class Progress:
    """How far the training thread has come. It alone writes, whenever it likes, without a lock.

    A heartbeat may catch it between two writes and tell a mixture; the next one, a period later, is right.
    """

    count: int = 0  # actions finished
    waiting: bool = False  # for a message
    action: str = ""  # what it does now, in words


class HeartbeatSender:
    """Sends a Heartbeat over the link to the controller, at once and then every `period` seconds.

    Ends when the link to the controller is closed. A stopped process sends none; one whose training thread hangs does,
    without progress.
    """

    def __init__(self, rank: int, links: Links, progress: Progress, period: float) -> None:
        self._rank, self._links, self._progress, self._period = rank, links, progress, period
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the links are closed. Idempotent."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        now = self._progress
        while True:
            beat = Heartbeat(self._rank, now.count, now.waiting, now.action)
            if not self._links.send(CONTROLLER, encode(beat)) or self._stopping.wait(self._period):
                return
