"""A clock of virtual seconds, and the outgoing link of a worker."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.pipeline import SAME_S


class Clock:
    """A queue of calls in the order of virtual time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self.now = 0.0

    def at(self, time: float, do: Callable[..., None], *args: Any) -> None:
        """Schedules the call `do(*args)` at a time that has not passed."""
        heapq.heappush(self._heap, (time, next(self._numbers), do, args))

    def advance(self) -> bool:
        """Runs all calls of the next moment in the queue. Returns False when the queue is empty."""
        if not self._heap:
            return False
        self.now = self._heap[0][0]
        while self._heap and self._heap[0][0] <= self.now + SAME_S:
            _, _, do, args = heapq.heappop(self._heap)
            do(*args)
        return True


@dataclass
class _Message:
    left_s: float
    then: Callable[..., None]
    args: tuple[Any, ...]


class Link:
    """The outgoing link of one worker.

    Activations and their gradients go first. A bulk transfer (partial sums, reduced gradients, parameters) that is in
    progress is interrupted by them, and then goes on. It is so in a real run, where both have sockets of their own that
    share a wire.

    Args:
        shared: True if messages share one wire. False if every message has a wire for itself.
    """

    def __init__(self, clock: Clock, costs: CostModel, *, shared: bool) -> None:
        self._clock = clock
        self._shared = shared
        self._bandwidth = costs.bandwidth
        self._latency_s = costs.latency_s
        self._urgent: deque[_Message] = deque()
        self._bulk: deque[_Message] = deque()
        self._current: _Message | None = None
        self._is_urgent = False
        self._since = 0.0
        self._version = 0  # the number of the present transfer; calls of the clock for older ones are ignored
        self.busy_s = 0.0

    def send(self, num_bytes: float, then: Callable[..., None], *args: Any, urgent: bool = False) -> None:
        """Sends a message; `then(*args)` is called when it has arrived."""
        seconds = num_bytes / self._bandwidth
        # Counted at once, since the time for which the message waits does not change how long it uses the wire.
        self.busy_s += seconds
        if not self._shared:
            self._clock.at(self._clock.now + (self._latency_s + seconds), then, *args)
            return
        (self._urgent if urgent else self._bulk).append(_Message(seconds, then, args))
        if self._current is None:
            self._next()
        elif urgent and not self._is_urgent and (left_s := self._current.left_s + self._since - self._clock.now) > 0:
            # The bulk message is interrupted, and the rest of it is sent later.
            self._current.left_s = left_s
            self._bulk.appendleft(self._current)
            self._next()

    def _next(self) -> None:
        self._is_urgent = bool(self._urgent)
        self._current = (self._urgent or self._bulk).popleft()
        self._since = self._clock.now
        self._version += 1
        self._clock.at(self._since + max(0.0, self._current.left_s), self._sent, self._version)

    def _sent(self, version: int) -> None:
        if version != self._version or self._current is None:
            return  # an urgent message has interrupted it
        message = self._current
        self._current = None
        self._clock.at(self._clock.now + self._latency_s, message.then, *message.args)
        if self._urgent or self._bulk:
            self._next()
