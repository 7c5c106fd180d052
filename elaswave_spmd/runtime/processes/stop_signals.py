"""The signals that ask a command to end: Ctrl-C, and what batch systems and closed terminals send.

A signal handler may interrupt anything, so its effect depends on what the command is doing. While the command starts,
the signal raises an exception. While it has something to save, the signal is an event for the thread that decides.
While it cleans up, the signal has no effect.
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

from elaswave_spmd.forks import call_in_forks
from elaswave_spmd.output import say_error

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAME_SIGNAL_S = 0.5
"""The same signal again within this number of seconds counts as one request. The reason is the command `timeout`, which
signals its command and then the command's group, so that the command gets the signal twice."""

_ALL = 1 << 30


class Signalled(KeyboardInterrupt):
    """A signal asked the command to end while it had nothing to save."""

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


def _described(handler: Any) -> str:
    """Returns a handler, as `signal.getsignal` has returned it, in the words of Python code."""
    if isinstance(handler, signal.Handlers):
        return f"signal.{handler.name}"
    name = getattr(handler, "__qualname__", "")
    return f"{getattr(handler, '__module__', '')}.{name}" if name else "one that is not Python's"


class StopSignals:
    """Handles the stop signals of this process from `__enter__` to `__exit__`. Ignored signals stay ignored.

    Outside of the context managers below, the first signal raises `Signalled` in the main thread. Later ones do
    nothing, so that the cleanup that the first one has begun is not interrupted.

    A signal that comes again within `SAME_SIGNAL_S` does not count.

    Args:
        numbers: the signals to handle; other signals keep their handlers.
        clock: returns the time in seconds.
    """

    def __init__(
        self, numbers: Collection[signal.Signals] = STOP_SIGNALS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._asked_for = numbers
        self._clock = clock
        self._numbers: list[int] = []
        self._counted: dict[int, float] = {}  # signal -> when it counted last
        self._pending: deque[int] = deque()  # signals that were not passed to a handler yet
        self._before: dict[int, Any] = {}
        self._ignored: set[int] = set()
        self._held = 0  # the number of signals, from the first one of this process, that raise nothing
        self._handler: Callable[[int], None] | None = None
        self._raised = False

    @property
    def first(self) -> int | None:
        """The number of the first signal that has come; None if none has."""
        return self._numbers[0] if self._numbers else None

    @property
    def num_came(self) -> int:
        """The number of signals that have come."""
        return len(self._numbers)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python has handlers in this thread only
            call_in_forks(self._give_back, self._asked_for)  # what code of the user forks ends by them
            for number in self._asked_for:
                # A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Both must stay ignored.
                if (found := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._came)
                elif found is not None:
                    self._ignored.add(number)
        return self

    def take_again(self) -> dict[int, str]:
        """Handle the signals again for which other code has set a handler since, such as a module that was imported.

        `__exit__` gives them back to that handler. What was ignored at first is ignored again.

        Returns:
            Signal -> the handler that it had, in words; without those that are ignored.
        """
        taken: dict[int, str] = {}
        if threading.current_thread() is not threading.main_thread():
            return taken
        ours = {**dict.fromkeys(self._before, self._came), **dict.fromkeys(self._ignored, signal.SIG_IGN)}
        for number, handler in ours.items():
            found = signal.getsignal(number)
            if found == handler:
                continue
            if number not in self._ignored:
                taken[number] = _described(found)
            if found is not None:
                self._before[number] = found
            signal.signal(number, handler)
        return taken

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextlib.contextmanager
    def as_events(self, handler: Callable[[int], None], count: int = 2) -> Iterator[None]:
        """A context that passes the first `count` signals to `handler`. One more raises `Signalled`.

        It does so since a user who signals so often has got no reaction.

        Args:
            handler: gets the number of the signal. It mostly runs inside Python's signal handler, so it must be short
                and must not block.
            count: the number of signals that raise nothing, counted from the first one that this process got.
        """
        with self._holding(count, handler):
            self._pass_on()  # signals that came while they were held
            yield

    @contextlib.contextmanager
    def passing_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """A context that passes all signals to `handler`, as `as_events` does, however many there are."""
        with self._holding(_ALL, handler):
            self._pass_on()
            yield

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A context in which the next signal raises `Signalled`, even inside one that passes signals on."""
        with self._holding(len(self._numbers), None):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context that no signal interrupts. `check` raises afterwards if one has come."""
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
            Signalled: a signal has come. It is raised only once in this process, here or from the signal handler.
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
        """Pass pending signals to the handler, each once, even if another signal interrupts this method."""
        with contextlib.suppress(IndexError):
            while self._handler is not None:
                self._handler(self._pending.popleft())

    def _raise(self) -> None:
        if not self._raised:
            self._raised = True
            raise Signalled(self._numbers[0])


def handle_again(*signals: StopSignals) -> None:
    """Handle those stop signals again that code of the user has taken, which was imported since, and say so on stderr.

    With `signal.signal(SIGINT, SIG_DFL)` in a module, Ctrl-C would end this process at once, with nothing saved.
    """
    for some in signals:
        for number, handler in some.take_again().items():
            say_error(
                f"{signal_name(number)}: a module that the run has imported has set a handler ({handler}), which is "
                "not called: by this signal the run saves its state, and stops, or the agent lets its workers leave"
            )
