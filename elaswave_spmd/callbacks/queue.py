"""One callback of a run: the thread that calls it, and the bounded queue of calls between the run and that thread."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.errors import headline_of, place_in_user_code

CAPACITY = 1000
"""Calls that wait for one callback at most. `on_end` has a place of its own."""
_POLL_S = 0.02  # between two looks at a thread that is waited for

STEP, END = "on_step", "on_end"


@dataclass(frozen=True)
class Call:
    """A call that a callback is to get: the method's name, and its argument."""

    method: str
    record: object


class CallbackQueue:
    """Calls one callback on a thread of its own, which lives as long as the process at most.

    `put`, `end` and `wait` are for the thread of the run, and only `wait` waits. What is to be written down about the
    callback is collected by `pop_news`, since only the run's thread may write.

    Args:
        capacity: calls that wait at most.
    """

    def __init__(self, callback: Callback, capacity: int = CAPACITY) -> None:
        self.name = callback.name
        self._callback = callback
        self._capacity = capacity
        self._changed = threading.Condition()  # guards all that follows; held for moments only
        self._calls: deque[Call] = deque()
        self._last: Call | None = None  # the call of on_end
        self._left_out: Counter[str] = Counter()  # by method, since the queue became full
        self._is_over = False  # nothing is called any more
        self._news: deque[Mapping[str, object]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_over(self) -> bool:
        """True once nothing is going to be called any more: on_end has returned, or the callback has raised."""
        return self._is_over

    def hears(self, method: str) -> bool:
        """True if the callback has a method of its own of this name, of its class or set on the object."""
        if callable(getattr(self._callback, "__dict__", {}).get(method)):
            return True
        return getattr(type(self._callback), method) is not getattr(Callback, method)

    def put(self, call: Call) -> None:
        """Have the callback called, after what waits already. If the queue is full a step is left out."""
        if not self.hears(call.method):
            return
        with self._changed:
            if self._is_over:
                return
            self._start()
            if len(self._calls) >= self._capacity:
                if not self._left_out:
                    text = f"{self.name} is behind: {self._capacity:,} calls wait for it, and steps are left out"
                    self._news.append({"state": "behind", "waiting": self._capacity, "message": text})
                if not self._leave_out_for(call):
                    return
            self._calls.append(call)
            self._changed.notify()

    def _leave_out_for(self, call: Call) -> bool:
        """Leave out the oldest step that waits, or the new call if that is a step or no step waits.

        Returns:
            True if there is a place for the new call.
        """
        oldest = None
        if call.method != STEP:
            oldest = next((place for place, waiting in enumerate(self._calls) if waiting.method == STEP), None)
        if oldest is None:
            self._left_out[call.method] += 1
            return False
        del self._calls[oldest]
        self._left_out[STEP] += 1
        return True

    def end(self, call: Call) -> None:
        """Have on_end called, when nothing else waits. Nothing is put afterwards."""
        with self._changed:
            if self._is_over or self._last is not None:
                return
            self._start()
            self._last = call
            self._changed.notify()

    def hurry(self) -> None:
        """Leave out all that waits but on_end: time is running out."""
        with self._changed:
            self._left_out.update(call.method for call in self._calls)
            self._calls.clear()

    def wait(self, until: float) -> bool:
        """Wait for the end of the callback up to a time of `time.monotonic`. Returns False if that came first."""
        # In short turns, so that the handler of a signal can bring the time forward (CallbackRunner.stop_waiting).
        left = until - time.monotonic()
        if self._thread is not None and not self._is_over and left > 0:
            self._thread.join(min(left, _POLL_S))
        return self._thread is None or self._is_over or not self._thread.is_alive()

    def give_up(self) -> None:
        """The callback was waited for in vain: what it does now is its last call, and may never return."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            waiting = len(self._calls)
            self._calls.clear()
            self._tell_left_out()
            text = f"{self.name} has not ended in time (timeouts.callbacks), and is not waited for any more"
            self._news.append({"state": "unfinished", "waiting": waiting, "message": text})

    def pop_news(self) -> list[Mapping[str, object]]:
        """The events about this callback since the last call; fields without its name."""
        return [self._news.popleft() for _ in range(len(self._news))]

    # ---- the thread

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a callback that hangs must not keep the command from ending.
            self._thread = threading.Thread(target=self._call_all, name=f"callback {self.name}", daemon=True)
            self._thread.start()

    def _call_all(self) -> None:
        while (call := self._next()) is not None:
            try:
                getattr(self._callback, call.method)(call.record)
            except BaseException as error:  # a callback's sys.exit() as well: the run goes on
                self._failed(call, error)
                return
            if call.method == END:
                with self._changed:
                    self._tell_left_out()
                    self._is_over = True
                return

    def _next(self) -> Call | None:
        """Waits for the next call. None: there is none to come."""
        with self._changed:
            if self._left_out and len(self._calls) <= self._capacity // 2:
                self._tell_left_out()
            while not self._is_over and not self._calls and self._last is None:
                self._changed.wait()
            if self._is_over:
                return None
            return self._calls.popleft() if self._calls else self._last

    def _tell_left_out(self) -> None:
        if self._left_out:
            left_out = dict(self._left_out)
            self._left_out.clear()
            text = ", ".join(f"{number:,} calls of {method}" for method, number in left_out.items())
            message = f"{self.name} was behind: {text} were left out"
            self._news.append({"state": "left_out", "left_out": left_out, "message": message})

    def _failed(self, call: Call, error: BaseException) -> None:
        """The callback has raised: it is not called any more."""
        place = place_in_user_code(error)
        text = f"{self.name}.{call.method} raised {headline_of(error)}" + (f" ({place})" if place else "")
        fields: dict[str, object] = {
            "state": "failed",
            "method": call.method,
            "error": headline_of(error),
            "report": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            "message": f"{text}; it is not called any more",
        }
        with self._changed:
            if not self._is_over:
                self._calls.clear()
                self._tell_left_out()
                self._news.append(fields)
                self._is_over = True
