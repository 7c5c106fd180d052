"""Runs a system under a trace: starts it, kills and stops its workers by their process ids, and reads its lines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.elastic.contestants import System
from benchmarks.elastic.lines import Follower, Line, Read, Start, Step
from benchmarks.elastic.score import progress
from benchmarks.elastic.trace import HANG, Failure, Machines
from benchmarks.processes import Program, processes_with, program

ROOT = Path(__file__).parents[2]
HEALTH_CHECK_S = 20.0
"""A process that stands still is killed after so long, as by the health check of its machine."""
END_S = 30.0
"""What a system has to end by itself after the last step, and what its processes have to follow it."""
LAUNCH_S = 240.0
"""What a system has from its command to its first step."""
_LOOK_S = 0.02
_LAST_LINES_S = 1.0  # for all workers to write their lines of the last step


@dataclass(frozen=True)
class Struck:
    """A failure that the trace asked for, at a moment of CLOCK_MONOTONIC.

    Args:
        pids: the processes that it struck. Empty: the slot had no worker, or none would have been left: it is missed.
    """

    failure: Failure
    at: float
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Observed:
    """What was seen of a run.

    Args:
        launched, ended: CLOCK_MONOTONIC at the command, and after the last step or when the time was up.
        left: processes that were there `END_S` after the system's own command had ended, or was told to end.
        problem: why the run ended before its last step, in words; "" if it did not, or its time was up.
    """

    lines: tuple[Line, ...]
    struck: tuple[Struck, ...]
    launched: float
    ended: float
    left: int
    problem: str


@dataclass
class Slots:
    """Which process is in which slot. A worker that comes gets the lowest slot that is empty."""

    machines: Machines
    _pids: dict[int, int] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)

    def come(self, pid: int) -> None:
        """A worker trains from now on."""
        self._waiting.append(pid)

    def alive(self, living: set[int]) -> dict[int, int]:
        """The process of each slot that has a living one, after newcomers have got theirs."""
        self._pids = {slot: pid for slot, pid in self._pids.items() if pid in living}
        empty = [slot for slot in range(self.machines.workers) if slot not in self._pids]
        while empty and self._waiting:
            if (pid := self._waiting.pop(0)) in living:
                self._pids[empty.pop(0)] = pid
        return dict(self._pids)


def to_strike(failure: Failure, machines: Machines, alive: dict[int, int], stopped: set[int]) -> tuple[int, ...]:
    """The processes that a failure strikes. Empty if there are none, or no worker would be left that trains.

    Args:
        alive: the process of each slot that has one.
        stopped: processes that stand still already.
    """
    trains = {slot: pid for slot, pid in alive.items() if pid not in stopped}
    struck = [trains[slot] for slot in machines.struck(failure) if slot in trains]
    return tuple(struck) if len(struck) < len(trains) else ()


def observe(
    system: System,
    directory: Path,
    steps: int,
    trace: Sequence[Failure],
    machines: Machines,
    step_s: float,
    limit_s: float,
) -> Observed:
    """Runs the job of a directory under a trace, until it has ended or its time is up.

    Args:
        steps: of the job.
        step_s: a usual step of this system, for the part of a step in which a failure strikes.
        limit_s: from the first step on.
    """
    launched = time.monotonic()
    environment = {"PYTHONPATH": str(ROOT)}
    with program(system.command(str(directory)), directory / "program", environment) as run:
        match = _Match(run, Follower(directory), machines, steps, step_s, list(trace))
        match.play(launched, limit_s)
        ended = time.monotonic()
        left = match.end(ended)
    return Observed(tuple(match.lines), tuple(match.struck), launched, ended, left, match.problem)


@dataclass
class _Match:
    """A run that is observed.

    Args:
        todo: the failures that are still to come.
        stopped: processes that stand still, and since when.
    """

    run: Program
    follower: Follower
    machines: Machines
    steps: int
    step_s: float
    todo: list[Failure]
    lines: list[Line] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)
    problem: str = ""

    def play(self, launched: float, limit_s: float) -> None:
        """Looks and strikes until the last step, the end of the program, or the end of the time."""
        slots, reached = Slots(self.machines), list[tuple[float, int]]()
        while not reached or reached[-1][1] < self.steps:
            new = self.follower.new()
            self.lines += new
            for line in new:
                if isinstance(line, Start):
                    slots.come(line.pid)
            reached = progress(line for line in self.lines if isinstance(line, Step))
            now = time.monotonic()
            if now > (reached[0][0] + limit_s if reached else launched + LAUNCH_S):
                return
            if not new and self.run.process.poll() is not None:
                if not (late := self.follower.new()):
                    output = self.run.log.read_text(errors="replace")[-1500:]
                    self.problem = f"it ended with code {self.run.process.returncode} before its last step:\n{output}"
                    return
                self.lines += late
                continue
            self._check_health(now)
            if self.todo and _is_due(self.todo[0], reached, self.step_s, now):
                self._strike(self.todo.pop(0), slots.alive(set(processes_with(self.run.mark))))
            time.sleep(_LOOK_S)

    def _strike(self, failure: Failure, alive: dict[int, int]) -> None:
        pids, now = to_strike(failure, self.machines, alive, set(self.stopped)), time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if failure.kind == HANG else signal.SIGKILL)
            if failure.kind == HANG:
                self.stopped[pid] = now
        self.struck.append(Struck(failure, now, pids))

    def end(self, ended: float) -> int:
        """Waits for the end of the program, which gets a SIGTERM if it has not finished. Returns the processes left.

        Args:
            ended: when the last step was seen; lines of steps that are much later are not counted.
        """
        process, until = self.run.process, time.monotonic() + END_S
        if max((line.step for line in self.lines if isinstance(line, Step)), default=0) < self.steps:
            process.terminate()
        while time.monotonic() < until and (process.poll() is None or processes_with(self.run.mark)):
            self._check_health(time.monotonic())
            time.sleep(5 * _LOOK_S)
        self.lines += [
            line for line in self.follower.new() if isinstance(line, Read) or line.at <= ended + _LAST_LINES_S
        ]
        return len(processes_with(self.run.mark))

    def _check_health(self, now: float) -> None:
        """Kills the processes that have stood still for too long."""
        for pid, since in list(self.stopped.items()):
            if now > since + HEALTH_CHECK_S:
                del self.stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _is_due(failure: Failure, reached: Sequence[tuple[float, int]], step_s: float, now: float) -> bool:
    """True if the whole steps of its moment are reached, and the part of a step has passed since."""
    whole = int(failure.at)
    since = next((at for at, step in reached if step >= whole), None)
    return since is not None and now >= since + (failure.at - whole) * step_s
