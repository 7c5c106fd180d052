"""Fault injection: real signals to real processes, at named points of named steps (the `chaos` group)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

from elaswave_spmd.conf.schema import ANY, ChaosEvent, ChaosSettings
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.state import HeldState

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LOSSES = ("kill", "stop", "exit", "raise")


class ChaosError(Exception):
    """The exception that `kind: raise` injects."""


class FaultInjector:
    """The faults that one worker injects into itself. Each event happens once, at the first attempt of its step.

    The ranks meant by `any`, and the events of `chaos=random`, are drawn from (chaos.seed, step) when a worker first
    comes to a step: all workers draw the same. A newcomer leaves the step that it joins in alone. A join is requested
    from the controller.

    Args:
        rank: of this worker.
        settings: the `chaos` group.
        links: to the controller.
        before_loss: called before a fault that ends the worker, so that the time of the death can be measured.
        version: of the run when the worker joined it, or that it was resumed at.
    """

    def __init__(
        self, rank: int, settings: ChaosSettings, links: Links, before_loss: Callable[[], None], version: int
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._links = links
        self._before_loss = before_loss
        self._due: list[tuple[int, ChaosEvent]] = []  # (rank, event) of the present step
        self._newest = version + 1 if version else 0

    def visit(self, point: FaultPoint, step: int, members: tuple[int, ...], state: HeldState) -> None:
        """Called at every point that a step passes: events that are due here happen."""
        if not (self._settings.events or self._settings.random):
            return
        if step > self._newest:
            self._newest = step
            self._due = self._events_of_step(step, members)
        for rank, event in [d for d in self._due if d[0] == self._rank and d[1].point in (point.value, ANY)]:
            self._due.remove((rank, event))
            self._inject(event, state)

    def _events_of_step(self, step: int, members: tuple[int, ...]) -> list[tuple[int, ChaosEvent]]:
        draw = random.Random(f"{self._settings.seed} {step}")
        # Drawn anew from (seed, step) by every worker: they agree without a message, whichever of them are left.
        events = [e for e in self._settings.events if e.step == step]
        if self._settings.random:
            events += self._drawn(draw, step, members)
        return [(rank, e) for e in events for rank in (e.ranks if e.ranks is not None else (draw.choice(members),))]

    def _drawn(self, draw: random.Random, step: int, members: tuple[int, ...]) -> list[ChaosEvent]:
        if draw.random() >= self._settings.rate:
            return []
        kind = draw.choice(("kill", "stop", "term", "join") if len(members) > 2 else ("join",))
        return [ChaosEvent(step, kind, draw.choice(members), draw.choice([p.value for p in FaultPoint]))]

    def _inject(self, event: ChaosEvent, state: HeldState) -> None:
        # Real signals, to this very process: nothing in the product knows that the fault is injected.
        if event.kind in _LOSSES:
            self._before_loss()
        if event.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[event.kind])
        elif event.kind == "exit":
            os._exit(3)
        elif event.kind == "raise":
            raise ChaosError(f"chaos: an exception in step {event.step} at {event.point}")
        elif event.kind == "join":
            self._links.send(CONTROLLER, m.encode(m.SpawnRequest(self._rank, 1)))
        elif event.kind == "corrupt":
            state.flip_a_bit()
