"""The times at which workers are lost and replaced. They are given, or drawn with a failure rate per device."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from elaswave_spmd.errors import PlanError

DAY = 86_400.0


@dataclass(frozen=True)
class FailureRate:
    """A failure rate: a number of interruptions (`count`) in a number of days on a number of devices.

    The defaults are the unexpected interruptions of the training of Llama 3 405B (Llama 3, 2024, table 5).

    Raises:
        PlanError: a number is negative or not finite, or the days or devices are 0.
    """

    count: float = 419
    days: float = 54
    devices: float = 16_384

    def __post_init__(self) -> None:
        if not (0 <= self.count < math.inf and 0 < self.days < math.inf and 0 < self.devices < math.inf):
            rule = "a failure rate is a number of failures in some days on some devices"
            raise PlanError(f"{self} is no failure rate", rule=rule, fix="count: 419, days: 54, devices: 16384")

    @property
    def per_second(self) -> float:
        """The number of interruptions of one device per second."""
        return self.count / (self.days * DAY * self.devices)


@dataclass(frozen=True)
class Fleet:
    """A mesh of many devices: replicas x stages workers of `island` devices each.

    Args:
        devices: the number of devices. Those that do not make up a whole replica are not used.
        island: the number of devices of one worker, which are lost together.
        stages: the number of stages of the pipeline.
        microbatches: the number of micro-batches of a worker in a step.

    Raises:
        PlanError: there are fewer devices than two replicas have, or another number is below 1.
    """

    devices: int
    island: int = 8
    stages: int = 16
    microbatches: int = 16

    def __post_init__(self) -> None:
        if min(self.island, self.stages, self.microbatches) < 1:
            raise PlanError(
                f"{self} has less than one of something", fix="islands, stages and micro-batches: 1 or more of each"
            )
        if self.replicas < 2:
            raise PlanError(
                f"{self.devices} devices are less than two replicas",
                rule="a fleet has two replicas or more",
                exists=f"{self.island * self.stages} devices in a replica",
                fix=f"at least {2 * self.island * self.stages} devices",
            )

    @property
    def replicas(self) -> int:
        """The number of replicas, which is the number of workers of each stage."""
        return self.devices // (self.island * self.stages)

    @property
    def workers(self) -> int:
        """The number of workers in use. Worker w belongs to stage w % stages and replica w // stages."""
        return self.replicas * self.stages


@dataclass(frozen=True)
class Repair:
    """The replacement of a lost worker.

    Args:
        hours: the hours until its machine is repaired.
        spares: the number of spare workers, as a fraction of the workers in use.
        swap_s: the seconds until a spare, or a repaired machine, is booted and has its state.

    Raises:
        PlanError: a number is negative or not finite, the repair takes no time, or `spares` is above 1.
    """

    hours: float = 24.0
    spares: float = 0.0
    swap_s: float = 300.0

    def __post_init__(self) -> None:
        if not (0 < self.hours < math.inf and 0 <= self.spares <= 1 and 0 <= self.swap_s < math.inf):
            raise PlanError(
                f"{self} cannot be",
                rule="repair takes time, and there are spares for none to all of the workers",
                fix="hours: 24, spares: 0.01, swap_s: 300",
            )


class Outage(NamedTuple):
    """A worker's place in the mesh becomes empty (`out`) or is filled again (not `out`), at a `time` in seconds."""

    time: float
    worker: int
    out: bool


Failures = Sequence[tuple[float, int]]
"""(time in seconds, worker) of each failure."""


def exponential(fleet: Fleet, rate: FailureRate, seconds: float, seed: int) -> Failures:
    """Failures with exponentially distributed times between them, at a constant rate that is the same for each device.

    Args:
        seconds: the duration in which failures are drawn.
    """
    draw = np.random.default_rng(seed)
    number = int(draw.poisson(rate.per_second * fleet.island * fleet.workers * seconds))
    times = np.sort(draw.random(number)) * seconds
    return list(zip(times.tolist(), draw.integers(0, fleet.workers, number).tolist(), strict=True))


def outages(fleet: Fleet, failures: Failures, repair: Repair) -> list[Outage]:
    """The times at which places in the mesh become empty and are filled again.

    A spare fills an empty place after `swap_s`. If there is no spare, the place waits for the next repaired machine. A
    failure of an empty place is ignored. Failures may be in any order.

    Raises:
        PlanError: a failure is of a worker that does not exist, or is before 0 s.
    """
    if wrong := next(((t, w) for t, w in failures if not (0 <= w < fleet.workers and t >= 0)), None):
        raise PlanError(
            f"worker {wrong[1]} cannot fail at {wrong[0]:g} s",
            rule="a failure is of a worker of the fleet, at 0 s or later",
            exists=f"workers 0 to {fleet.workers - 1}",
        )
    found: list[Outage] = []
    spares = round(repair.spares * fleet.workers)
    empty: set[int] = set()
    waiting: deque[int] = deque()
    events = [(time, 0, worker) for time, worker in failures]  # 0: failure, 1: repaired machine, 2: place filled
    heapq.heapify(events)
    while events:
        time, kind, worker = heapq.heappop(events)
        if kind == 2:
            empty.discard(worker)
            found.append(Outage(time, worker, False))
            continue
        if kind == 0:
            # If the place is empty, there is no machine that could fail.
            if worker in empty:
                continue
            empty.add(worker)
            found.append(Outage(time, worker, True))
            heapq.heappush(events, (time + repair.hours * 3600, 1, -1))
            waiting.append(worker)
        else:
            spares += 1
        # The place that became empty first gets the first free machine.
        if spares and waiting:
            spares -= 1
            heapq.heappush(events, (time + repair.swap_s, 2, waiting.popleft()))
    return found
