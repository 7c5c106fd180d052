"""Faults on purpose: real signals to real processes, at named points of named steps (the `chaos` group)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from elaswave_spmd.conf.schema import ANY, ChaosEvent, ChaosSettings
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.worker.fault_points import FaultPoint

if TYPE_CHECKING:
    from elaswave_spmd.worker.step import Executor

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LOSSES = ("kill", "stop", "exit", "raise")


class ChaosError(Exception):
    """The exception of `kind: raise`."""


class Chaos:
    """What one worker does to itself. Each event strikes once, at the first attempt of its step.

    Whom `any` means, and the events of `chaos=random`, are drawn from (chaos.seed, step) when a worker first comes to a
    step: all draw the same. A newcomer leaves the step that it comes into alone. For a join the controller is asked.
    """

    def __init__(self, rank: int, settings: ChaosSettings, links: Links) -> None:
        self._rank, self._settings, self._links = rank, settings, links
        self.strikes: Callable[[], None] = lambda: None
        """Called before a fault that costs the worker."""
        self._due: list[tuple[int, ChaosEvent]] = []  # (rank, event) of the present step
        self._newest = 0
        self._executor: Executor | None = None

    def attach(self, executor: Executor, version: int) -> None:
        """From now on; the worker came when the run was at `version`."""
        self._executor = executor
        self._newest = version + 1 if version else 0

    def visit(self, point: FaultPoint, step: int) -> None:
        """Called at every point; what is due here strikes."""
        settings = self._settings
        if not (settings.events or settings.random) or self._executor is None:
            return
        if step > self._newest:
            self._newest = step
            self._due = self._of_step(step, self._executor.placement.mesh.members)
        for rank, event in [d for d in self._due if d[0] == self._rank and d[1].point in (point.value, ANY)]:
            self._due.remove((rank, event))
            self._strike(event)

    def _of_step(self, step: int, members: tuple[int, ...]) -> list[tuple[int, ChaosEvent]]:
        draw = random.Random(f"{self._settings.seed} {step}")
        events = [e for e in self._settings.events if e.step == step]
        if self._settings.random:
            events += self._drawn(draw, step, members)
        return [(rank, e) for e in events for rank in (e.ranks if e.ranks is not None else (draw.choice(members),))]

    def _drawn(self, draw: random.Random, step: int, members: tuple[int, ...]) -> list[ChaosEvent]:
        if draw.random() >= self._settings.rate:
            return []
        kind = draw.choice(("kill", "stop", "term", "join") if len(members) > 2 else ("join",))
        return [ChaosEvent(step, kind, draw.choice(members), draw.choice([p.value for p in FaultPoint]))]

    def _strike(self, event: ChaosEvent) -> None:
        if event.kind in _LOSSES:
            self.strikes()
        if event.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[event.kind])
        elif event.kind == "exit":
            os._exit(3)
        elif event.kind == "raise":
            raise ChaosError(f"chaos: an exception in step {event.step} at {event.point}")
        elif event.kind == "join":
            self._links.send(CONTROLLER, m.encode(m.Wanted(self._rank, 1)))
        elif event.kind == "corrupt":
            assert self._executor is not None
            self._executor.replica.state.flip_a_bit()
