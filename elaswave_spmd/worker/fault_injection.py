"""Fault injection: real signals to real processes, at named points of named steps (the `chaos` group)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import torch
from torch import Tensor

from elaswave_spmd.conf.schema import ANY, MISCOMPUTE, ChaosEvent, ChaosSettings
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.worker.fault_points import DRAWN, FaultPoint
from elaswave_spmd.worker.state import HeldState

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LOSSES = ("kill", "stop", "exit", "raise")


class ChaosError(Exception):
    """The exception that `kind: raise` injects."""


def with_a_flipped_bit(result: Tensor, draw: random.Random) -> Tensor:
    """A copy of a tensor in which one bit of one element is another, as a device that computes wrongly may give it.

    It is one of the upper half of the element's bits: a lower one may be rounded away before anything comes of it.
    """
    wrong = result.detach().clone()
    bits = 8 * wrong.element_size()
    at, bit = draw.randrange(wrong.numel()), draw.randrange(bits // 2, bits)
    integers = wrong.view({16: torch.int16, 32: torch.int32}[bits])
    integers.view(-1)[at] ^= 1 << bit if bit < bits - 1 else -(1 << bit)  # the last one is the sign
    return wrong


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
        self._wrong: list[tuple[int, ChaosEvent]] = []  # the same of results that are to be wrong
        self._newest = version + 1 if version else 0

    def visit(self, point: FaultPoint, step: int, members: tuple[int, ...], state: HeldState) -> None:
        """Called at every point that a step passes: events that are due here happen."""
        self._come_to(step, members)
        for rank, event in [d for d in self._due if d[0] == self._rank and d[1].point in (point.value, ANY)]:
            self._due.remove((rank, event))
            self._inject(event, step, state)

    def computed(self, point: FaultPoint, step: int, members: tuple[int, ...], result: Tensor) -> Tensor:
        """The result that the worker goes on with in place of its device's at a point: mostly the same."""
        if not self._settings.events or not result.numel():
            return result
        self._come_to(step, members)
        for rank, event in [w for w in self._wrong if w[0] == self._rank and w[1].point == point.value]:
            self._wrong.remove((rank, event))
            result = with_a_flipped_bit(result, random.Random(f"{self._settings.seed} {step} {rank} {point.value}"))
        return result

    def _come_to(self, step: int, members: tuple[int, ...]) -> None:
        """Draw the events of a step, when the worker first comes to it."""
        if step > self._newest:
            self._newest = step
            self._due = self._events_of_step(step, members)
            self._wrong = self._wrong_in_step(step, members)

    def _wrong_in_step(self, step: int, members: tuple[int, ...]) -> list[tuple[int, ChaosEvent]]:
        draw = random.Random(f"{MISCOMPUTE} {self._settings.seed} {step}")
        found = []
        for event in self._settings.events:
            if event.kind == MISCOMPUTE and event.step <= step:
                happens = draw.random() < event.rate if event.rate else event.step == step
                ranks = event.ranks if event.ranks is not None else (draw.choice(members),)
                found += [(rank, event) for rank in ranks if happens]
        return found

    def _events_of_step(self, step: int, members: tuple[int, ...]) -> list[tuple[int, ChaosEvent]]:
        draw = random.Random(f"{self._settings.seed} {step}")
        # Drawn anew from (seed, step) by every worker: they agree without a message, whichever of them are left.
        events = [e for e in self._settings.events if e.step == step and e.kind != MISCOMPUTE]
        if self._settings.random:
            events += self._drawn(draw, step, members)
        return [(rank, e) for e in events for rank in (e.ranks if e.ranks is not None else (draw.choice(members),))]

    def _drawn(self, draw: random.Random, step: int, members: tuple[int, ...]) -> list[ChaosEvent]:
        if draw.random() >= self._settings.rate:
            return []
        kind = draw.choice(("kill", "stop", "term", "join") if len(members) > 2 else ("join",))
        return [ChaosEvent(step, kind, draw.choice(members), draw.choice([p.value for p in DRAWN]))]

    def _inject(self, event: ChaosEvent, step: int, state: HeldState) -> None:
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
            state.flip_a_bit(draw=random.Random(f"corrupt {self._settings.seed} {step} {self._rank}"))
