"""The signals that ask a command to end: Ctrl-C, and what batch systems and closed terminals send.

A handler may interrupt anything, so what it does is decided by where the command is: while it starts, the signal is an
exception; while it has something to save, an event for the thread that decides; while it clears up, nothing.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from elaswave_spmd.forks import set_up_forks

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_SIGNAL_S = 0.5
"""Within so many seconds the same signal again is one request: `timeout` signals its command, and then its group."""

_ALL = 1 << 30


class Signalled(KeyboardInterrupt):
    """A signal asked the command to end where it had nothing to save."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted by {signal_name(number)}")

    @property
    def exit_code(self) -> int:
        """The code with which a shell reports a program that the signal has ended."""
        return 128 + self.number


def signal_name(number: int) -> str:
    """A signal's name, such as SIGINT."""
    return signal.Signals(number).name


class StopSignals:
    """The stop signals of this process from `__enter__` to `__exit__`. Signals that it ignores stay ignored.

    Without `as_events` or `held` the first signal raises `Signalled` in the main thread, and later ones do nothing:
    what the first one has begun to clear up is cleared up.

    A signal that comes again within `SAME_SIGNAL_S` is taken for the one before.

    Args:
        numbers: the signals; others do what they did.
        clock: the time in seconds.
    """

    def __init__(
        self, numbers: Collection[signal.Signals] = STOP_SIGNALS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._asked_for = numbers
        self._clock = clock
        self._numbers: list[int] = []
        self._counted: dict[int, float] = {}  # when each signal has counted the last time
        self._pending: deque[int] = deque()  # signals that no handler has got yet
        self._before: dict[int, Any] = {}
        self._held = 0  # signals that raise nothing here
        self._handler: Callable[[int], None] | None = None
        self._raised = False

    @property
    def first(self) -> int | None:
        """The number of the first signal that has come; None: none has."""
        return self._numbers[0] if self._numbers else None

    @property
    def num_came(self) -> int:
        """The number of signals that have come."""
        return len(self._numbers)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python has handlers in this thread only
            set_up_forks(self._give_back, self._asked_for)  # what code of the user forks ends by them
            for number in self._asked_for:
                # A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP: so it stays.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def as_events(self, handler: Callable[[int], None], count: int = 2) -> Iterator[None]:
        """A `with` that passes the first signals to `handler`. One more raises, as nothing seems to answer them.

        Args:
            handler: gets a signal's number. It mostly runs inside Python's signal handler, so it must be short and must
                not block.
            count: signals, counted from the first that came, that raise nothing.
        """
        with self._holding(count, handler):
            self._pass_on()  # also what has come while signals were held
            yield

    @contextlib.contextmanager
    def passing_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """A `with` that passes all signals to `handler`, as `as_events` does, and that none of them interrupts."""
        with self._holding(_ALL, handler):
            self._pass_on()
            yield

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A `with` that the next signal interrupts, also inside a `with` that passes signals on."""
        with self._holding(len(self._numbers), None):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A `with` that no signal interrupts. `check` afterwards raises what has come."""
        with self._holding(_ALL, None):
            yield

    @contextlib.contextmanager
    def _holding(self, count: int, handler: Callable[[int], None] | None) -> Iterator[None]:
        before = self._held, self._handler
        self._held, self._handler = count, handler
        try:
            yield
        finally:
            self._held, self._handler = before

    def check(self) -> None:
        """Raise the first signal that has come, if one has.

        Raises:
            Signalled: once; the one that raises later is the caller that has something to clear up.
        """
        if self._numbers:
            self._raise()

    def _came(self, number: int, _: FrameType | None) -> None:
        now = self._clock()
        if now - self._counted.get(number, -math.inf) < SAME_SIGNAL_S:
            return
        self._counted[number] = now
        self._numbers.append(number)
        self._pending.append(number)
        if len(self._numbers) > self._held:
            self._raise()
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass pending signals to the handler, each once, also where another signal interrupts this method."""
        with contextlib.suppress(IndexError):
            while self._handler is not None:
                self._handler(self._pending.popleft())

    def _raise(self) -> None:
        if not self._raised:
            self._raised = True
            raise Signalled(self._numbers[0])
