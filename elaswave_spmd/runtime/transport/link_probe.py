"""What a link takes, measured on the link itself: latency and bandwidth, for what moves are expected to cost.

A worker sends its neighbour small and large messages in turn; the neighbour answers each with an empty one. Both sides
work in the thread that files what arrives, so nobody's training waits for it. The best of some tries counts: what is
beyond it is other traffic, or a thread that was computing.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elaswave_spmd.runtime.transport.mailbox import Envelope, Item

PROBE_BYTES = 1 << 20
TRIES = 5

_MARK = b"\xc1"  # begins no message of the protocol: MessagePack leaves it unused
_HEAD = struct.Struct("<cBI")  # mark, what it is, number
_ASK, _ANSWER = 0, 1


class LinkProbe:
    """One process's side. Give `tap` to its mailbox.

    Args:
        send: as Links.send.
        clock: seconds.
    """

    def __init__(
        self, send: Callable[[int, bytes, Sequence[Any]], bool], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._send, self._clock = send, clock
        self._lock = threading.Lock()  # of what is under way: `start` is called by another thread than `tap`
        self._peer, self._number, self._sent_at = -1, 0, 0.0
        self._small: list[float] = []
        self._large: list[float] = []

    def start(self, peer: int) -> None:
        """Begins to measure the link to `peer`, anew if another was being measured. Does not wait."""
        with self._lock:
            self._peer, self._small, self._large = peer, [], []
            self._ask()

    @property
    def found(self) -> tuple[float, float] | None:
        """(latency in seconds, bandwidth in bytes per second); None while it is being measured, or if it cannot be."""
        with self._lock:
            if len(self._large) < TRIES:
                return None
            small, large = min(self._small), min(self._large)
        # A clock that cannot tell them apart says that the link is at least as fast as it can tell.
        return small / 2, PROBE_BYTES / max(large - small, 1e-6)

    def tap(self, item: Item) -> bool:
        """Takes what is part of a measurement, and nothing else."""
        if not isinstance(item, Envelope) or not item.header.startswith(_MARK):
            return False
        _, kind, number = _HEAD.unpack(item.header)
        if kind == _ASK:
            self._send(item.sender, _HEAD.pack(_MARK, _ANSWER, number), ())
            return True
        now = self._clock()
        with self._lock:
            if item.sender == self._peer and number == self._number:
                (self._small if len(self._small) < TRIES else self._large).append(now - self._sent_at)
                if len(self._large) < TRIES:
                    self._ask()
        return True

    def _ask(self) -> None:
        self._number += 1
        payload = (bytes(PROBE_BYTES),) if len(self._small) == TRIES else ()
        self._sent_at = self._clock()
        self._send(self._peer, _HEAD.pack(_MARK, _ASK, self._number), payload)
