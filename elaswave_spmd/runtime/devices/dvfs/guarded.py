"""The controller's end of the guard: orders out, answers in, nothing waits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, DeviceRange
from elaswave_spmd.runtime.processes.import_path import interpreter_environment

_READY_S = 60.0
_END_S = 10.0


@dataclass(frozen=True)
class Answer:
    """What the guard says to an order: the frequencies that were set (none: all were put back), or why it could not."""

    frequencies: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class GuardedFrequencies:
    """Has a guard set frequencies. Make one by `start`; `close` puts all back.

    Args:
        devices: what the backend has; empty: any name will do.
    """

    def __init__(self, process: subprocess.Popen[bytes], devices: Mapping[str, DeviceRange]) -> None:
        self._process, self.devices = process, devices
        self._buffer = b""
        self._closed = False

    @classmethod
    def start(cls, backend: str, where: str = "", timeout_s: float = _READY_S) -> GuardedFrequencies:
        """Starts the guard, and waits until it says which devices there are.

        Raises:
            ConfigError: the backend cannot work here.
            RunError: no answer.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "elaswave_spmd.runtime.devices.dvfs.guard", backend, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=interpreter_environment(),
            start_new_session=True,  # what a terminal sends to the job's group is not for the guard
        )
        made = cls(process, {})
        try:
            first = made._line(timeout_s)
            if "error" in first:
                raise ConfigError(**({"where": f"{SETTING}={backend}"} | first["error"]))
            made.devices = {
                name: DeviceRange(**(fields | {"cpus": tuple(fields["cpus"])}))
                for name, fields in first["ready"].items()
            }
        except BaseException:
            made.close()
            raise
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    def set(self, frequencies: Mapping[str, float]) -> None:
        """Orders frequencies by device; the answer comes by `poll`."""
        self._send({"set": dict(frequencies)})

    def reset(self) -> None:
        """Orders that all are put back; the answer comes by `poll`."""
        self._send({"reset": True})

    def poll(self, timeout_s: float = 0.0) -> Answer | None:
        """The next answer, if there is one."""
        try:
            found = self._line(timeout_s) if self._waits(timeout_s) else None
        except RunError as error:
            return Answer(error=str(error))
        if found is None:
            return None
        if "error" in found:
            error = found["error"]
            fix = f"; {error['fix']}" if "fix" in error else ""
            return Answer(error=f"{error['what']}{fix}")
        return Answer(found.get("set", {}))

    def close(self) -> None:
        """Ends the guard, which puts everything back first. May be called again."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # a driver that hangs
            self._process.wait()
        self._process.stdout.close()

    def _send(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: `poll` says so
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _waits(self, timeout_s: float) -> bool:
        assert self._process.stdout is not None
        return b"\n" in self._buffer or bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def _line(self, timeout_s: float) -> dict[str, Any]:
        """The next line; waits for it.

        Raises:
            RunError: the guard has ended, or says nothing.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + max(timeout_s, 1.0)
        while b"\n" not in self._buffer:
            if not self._waits(max(0.0, deadline - time.monotonic())):
                raise RunError(f"the guard of the frequencies (pid {self.pid}) does not answer")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise RunError(f"the guard of the frequencies (pid {self.pid}) has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
