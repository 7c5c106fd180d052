"""How tests wait for what other threads and processes do: for a condition, and never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable

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
