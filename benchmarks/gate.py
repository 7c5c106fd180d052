"""Blocks of steps on command: the gate between a benchmark's driver and the workers of the systems it compares.

Every worker connects to the driver's socket and waits before its first step. The driver lets all workers of one system
run a number of steps and waits until each has reported that it is done; workers of the other system block in a read
meanwhile and take no processor time. Both systems are timed by the same clock in the same way: from the driver's first
"go" to the last worker's report.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_TIMEOUT_S = 300.0
_LOOK_S = 0.2


def peak_rss() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def anonymous(pid: int) -> int:
    """RssAnon of a process, in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


class Gate:
    """The worker's end of the gate. Make it before the worker has anything in memory but its imports.

    Args:
        path: the driver's socket.
        rank: this worker within its system.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._stream = self._socket.makefile("rwb")
        pid = os.getpid()
        self._send({"rank": rank, "pid": pid, "rss_at_entry": peak_rss(), "anon_at_entry": anonymous(pid)})
        self._left = 0

    def before_first(self) -> None:
        """Waits for the first block; call it before the first step."""
        self._wait()

    def after_step(self, loss: float, more: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Call it after each step, once its update has been applied. It waits at the end of a block.

        Args:
            loss: this worker's share of the step's loss, or the loss: the number that the driver compares.
            more: called at the end of a block for further plain data for the driver.
        """
        self._left -= 1
        if self._left == 0:
            self._send({"loss": loss, "peak_rss": peak_rss(), "processor": time.process_time(), "more": dict(more())})
            self._wait()

    def _wait(self) -> None:
        line = self._stream.readline()
        if not line:
            raise SystemExit("the benchmark's driver is gone")
        self._left = int(line)

    def _send(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()


@dataclass
class Member:
    """The driver's end of one worker."""

    rank: int
    pid: int
    rss_at_entry: int
    anon_at_entry: int
    stream: BinaryIO
    loss: float = 0.0
    peak_rss: int = 0
    processor: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def growth(self) -> int:
        """The peak of resident memory beyond the imports, in bytes."""
        return self.peak_rss - self.rss_at_entry


@dataclass
class Team:
    """The driver's end of one system: all its workers."""

    name: str
    directory: Path
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = str(self.directory / f"{self.name}.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(64)

    def gather(self, count: int, alive: Callable[[], bool]) -> None:
        """Waits until `count` workers have connected.

        Args:
            alive: returns True while the process that starts them runs.

        Raises:
            RuntimeError: they did not connect.
        """
        self._listener.settimeout(_LOOK_S)
        deadline = time.monotonic() + _TIMEOUT_S
        while len(self.members) < count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if alive() and time.monotonic() < deadline:
                    continue
                raise RuntimeError(f"{self.name}: {len(self.members)} of {count} workers came") from None
            connection.settimeout(_TIMEOUT_S)
            stream: Any = connection.makefile("rwb")
            hello = json.loads(stream.readline())
            self.members.append(Member(**hello, stream=stream))
        self.members.sort(key=lambda member: member.rank)

    def block(self, steps: int) -> float:
        """Lets all workers run `steps` steps. Returns the seconds until the last one is done.

        Raises:
            RuntimeError: a worker has ended.
        """
        began = time.perf_counter()
        self.go(steps)
        for member in self.members:
            line = member.stream.readline()
            if not line:
                raise RuntimeError(f"{self.name}: worker {member.rank} (pid {member.pid}) has ended")
            answer = json.loads(line)
            member.loss, member.peak_rss = answer["loss"], answer["peak_rss"]
            member.processor, member.more = answer["processor"], answer["more"]
        return time.perf_counter() - began

    def go(self, steps: int) -> None:
        """Lets all workers run `steps` steps, without waiting for them."""
        for member in self.members:
            member.stream.write(f"{steps}\n".encode())
            member.stream.flush()

    def close(self) -> None:
        for member in self.members:
            member.stream.close()
        self._listener.close()
