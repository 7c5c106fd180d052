"""Latency and bandwidth of a link, measured on the link itself; the scheduler estimates from them what moves cost.

A worker sends its neighbour small messages, then large ones; the neighbour answers each with an empty one. Both sides
work in the event-loop thread, so no training thread waits. The fastest of several tries counts: the rest of a longer
try is other traffic, or a thread that was computing.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elaswave_spmd.runtime.transport.mailbox import Envelope, Item

PROBE_BYTES = 1 << 20
"""Size of a large message."""

TRIES = 5
"""Messages of each size."""

MARK = b"\xc1"
"""Begins every message of a measurement, and none of the protocol: MessagePack leaves it unused."""
_HEADER = struct.Struct("<cBI")  # mark, kind, number
_PROBE, _ANSWER = 0, 1


class LinkProbe:
    """One process's side of the measurement. Its `tap` belongs into the process's mailbox.

    Args:
        send: as `Links.send`.
        clock: seconds.
    """

    def __init__(
        self, send: Callable[[int, bytes, Sequence[Any]], bool], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()  # guards the rest: `start` is called by another thread than `tap`
        self._peer = -1
        self._number = 0
        self._sent_at = 0.0
        self._small_s: list[float] = []  # round trips of small messages
        self._large_s: list[float] = []

    def start(self, peer: int) -> None:
        """Begin to measure the link to `peer`; a measurement of another link is given up. Does not wait."""
        with self._lock:
            self._peer = peer
            self._small_s = []
            self._large_s = []
            self._send_probe()

    @property
    def result(self) -> tuple[float, float] | None:
        """(latency in seconds, bandwidth in bytes per second); None before the measurement is complete."""
        with self._lock:
            if len(self._large_s) < TRIES:
                return None
            small, large = min(self._small_s), min(self._large_s)
        # A large message takes the latency as well, so the bandwidth follows from the difference of the two. If the
        # clock is too coarse to tell them apart, the result is a lower bound of the bandwidth.
        return small / 2, PROBE_BYTES / max(large - small, 1e-6)

    def tap(self, item: Item) -> bool:
        """Handle a message of a measurement; True if it was one. Called by the mailbox in the event-loop thread."""
        if not isinstance(item, Envelope) or not item.header.startswith(MARK):
            return False
        if len(item.header) != _HEADER.size:
            return False  # none of ours, nor of the protocol
        _, kind, number = _HEADER.unpack(item.header)
        if kind == _PROBE:
            self._send(item.sender, _HEADER.pack(MARK, _ANSWER, number), ())
            return True
        now = self._clock()
        with self._lock:
            # An answer with another number belongs to a measurement that was replaced by a newer one.
            if item.sender == self._peer and number == self._number:
                (self._small_s if len(self._small_s) < TRIES else self._large_s).append(now - self._sent_at)
                if len(self._large_s) < TRIES:
                    self._send_probe()
        return True

    def _send_probe(self) -> None:
        self._number += 1
        payload = (bytes(PROBE_BYTES),) if len(self._small_s) == TRIES else ()
        self._sent_at = self._clock()
        self._send(self._peer, _HEADER.pack(MARK, _PROBE, self._number), payload)
