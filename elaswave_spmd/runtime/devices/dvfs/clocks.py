"""The clock of a worker's device as the worker sees it: it sets a frequency, and knows which one is in force."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

_ANSWER_S = 10.0  # a guard that has ended is noticed at once; this is for a driver that hangs
_MOST_BYTES = 4096


class SimulatedClock:
    """The clock of an emulated device, whose programs read `frequency`.

    Args:
        change_s: seconds that a change takes, in which nothing is computed.
    """

    def __init__(self, change_s: float) -> None:
        self._change_s = change_s
        self.frequency = 1.0

    def set(self, frequency: float) -> float:
        """Change to a frequency, relative to the normal one. Returns the one in force, when the change is over."""
        self.frequency = frequency
        time.sleep(self._change_s)
        return frequency

    def now(self) -> float:
        """Seconds of time.monotonic()."""
        return time.monotonic()

    def close(self) -> None:
        """Nothing is left behind."""


class GuardedClock:
    """The clock of devices that the guard sets (`dvfs.guard`): that gets each request, and answers what it has set.

    Without an answer, as after the guard has ended or where the driver hangs, the frequency counts as the normal one,
    and the guard is not asked again.

    Args:
        path: socket of the guard.
        rank: of this worker.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self.frequency = 1.0
        self._path = path
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._own = Path(f"{path}.{rank}")
        self._own.unlink(missing_ok=True)
        self._socket.bind(str(self._own))
        self._socket.settimeout(_ANSWER_S)

    def set(self, frequency: float) -> float:
        """As `SimulatedClock.set`. A device that several workers use has the largest frequency of theirs."""
        if self._socket is not None:
            try:
                self._socket.sendto(json.dumps({"rank": self._rank, "frequency": frequency}).encode(), self._path)
                self.frequency = float(json.loads(self._socket.recv(_MOST_BYTES))["frequency"])
            except OSError:  # the guard has ended, which has put everything back
                self.close()
                self.frequency = 1.0
        return self.frequency

    def now(self) -> float:
        """Seconds of time.monotonic()."""
        return time.monotonic()

    def close(self) -> None:
        """Close the socket. May be called again."""
        if self._socket is not None:
            self._socket.close()
            self._own.unlink(missing_ok=True)
            self._socket = None
