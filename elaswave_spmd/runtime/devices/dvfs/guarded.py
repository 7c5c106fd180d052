"""The controller's end of the guard: it sends orders and polls for errors, and never waits in between."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.forks import call_in_forks, drop_input
from elaswave_spmd.output import say_error
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.runtime.devices.dvfs.base import SETTING, DeviceRange
from elaswave_spmd.runtime.processes.import_path import interpreter_environment

_READY_S = 60.0
_END_S = 10.0  # until the guard has ended by the end of its input
_TERM_S = 10.0  # and after SIGTERM


class GuardedFrequencies:
    """Frequencies that the guard sets for this process. Make one by `start`; `close` restores all of them.

    Args:
        process: the guard.

    Attributes:
        devices: device -> range of its clock.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.devices: Mapping[str, DeviceRange] = {}
        self._buffer = b""
        self._closed = False
        call_in_forks(self._let_go)

    @classmethod
    def start(cls, backend: str, path: str, where: str = "", timeout_s: float = _READY_S) -> GuardedFrequencies:
        """Start the guard, and wait until it has named the devices.

        Args:
            path: the socket to which workers send their requests.

        Raises:
            ConfigError: the backend cannot work on this machine.
            RunError: the guard does not answer.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "elaswave_spmd.runtime.devices.dvfs.guard", backend, path, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=interpreter_environment(),
            start_new_session=True,  # a terminal's Ctrl-C reaches the job's process group, which ends before the guard
        )
        made = cls(process)
        try:
            first = made._read_line(timeout_s)
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

    def share(self, devices: Mapping[str, Sequence[int]]) -> None:
        """Order which workers use which device. All begin at the normal frequency."""
        self._send({"share": {device: [*ranks] for device, ranks in devices.items()}})

    def reset(self) -> None:
        """Order that all frequencies are restored."""
        self._send({"reset": True})

    def poll(self, timeout_s: float = 0.0) -> str:
        """The next error: why an order or a request has failed, or the guard has ended; "" if there is none.

        Args:
            timeout_s: seconds to wait for one.
        """
        try:
            found = self._read_line(timeout_s) if self._has_output(timeout_s) else None
        except RunError as error:
            return str(error)
        if found is None:
            return ""
        error = found["error"]
        fix = f"; {error['fix']}" if "fix" in error else ""
        return f"{error['what']}{fix}"

    def close(self) -> None:
        """End the guard, which restores everything first. May be called again."""
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if not self._ends_within(_END_S):  # another process has the input open, so its end does not come
            self._process.terminate()
        if not self._ends_within(_TERM_S):  # it hangs in a call of the driver
            self._process.kill()
            self._process.wait()
            devices = ", ".join(self.devices) or "devices"
            say_error(
                f"frequencies may not be restored: the process that sets them (pid {self.pid}) was killed, as it had "
                f"not ended after {_END_S + _TERM_S:.0f} s; set the limits of {devices} again by hand"
            )
        self._process.stdout.close()

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _let_go(self) -> None:
        """Close the guard's input in a process that is forked from this one: its end tells that this one has ended."""
        drop_input(self._process)

    def _send(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard has died; `poll` reports it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _has_output(self, timeout_s: float) -> bool:
        """True if the guard has written something, or has ended, within `timeout_s` seconds."""
        assert self._process.stdout is not None
        return b"\n" in self._buffer or is_any_ready([self._process.stdout], timeout_s=timeout_s)

    def _read_line(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next line of the guard, for `timeout_s` seconds but at least for one.

        Raises:
            RunError: the guard has ended, or does not answer.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + max(timeout_s, 1.0)
        while b"\n" not in self._buffer:
            if not self._has_output(max(0.0, deadline - time.monotonic())):
                raise RunError(f"the process that sets frequencies (pid {self.pid}) does not answer")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise RunError(f"the process that sets frequencies (pid {self.pid}) has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)
