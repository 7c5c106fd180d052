"""How tests wait for what other threads and processes do: for a condition, and never for a length of time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 300.0
"""When a test stops waiting. It is below pytest's own limit, so that the test can say what it waited for, and far above
what anything takes: a machine with 25 busy processes on two cores is ten times slower than a quiet one."""


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Waits until the condition holds.

    Raises:
        AssertionError: the time is up.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition does not hold after {seconds:.0f} s"
        time.sleep(0.005)


@contextmanager
def others_run_while_this_thread_waits() -> Iterator[None]:
    """A `with` in which another Python thread runs only while this one waits in a call, never between two of its lines.

    So a thread that is woken just before such a call acts when the call waits, and neither before it nor after it.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(2 * PATIENCE_S)  # for so long the interpreter lock is not taken from who does not give it up
    try:
        yield
    finally:
        sys.setswitchinterval(before)
