"""The frequencies of a worker's device within a step, and the order of actions that they were planned for.

Frequencies are planned by the place of an action in the worker's order (`scheduling.dvfs.Pace`). A slow action that is
overtaken makes the step longer, so while there is a pace the worker waits for the planned action a little, though
another one is ready. It does not wait for ever: whatever is ready runs then, as without a pace, so that a step can
always be completed (`worker.ready_order`). No bit depends on either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from elaswave_spmd.recovery.messages import Pace as PaceMessage
from elaswave_spmd.scheduling.dvfs import Pace
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS

Action = tuple[str, int]
"""(kind of `scheduling.pipeline`, micro-batch)."""

KINDS = (FORWARD, BACKWARD, WEIGHTS)
"""The kinds of actions by their numbers in messages."""


class DeviceClock(Protocol):
    """The clock of a worker's device, and the time."""

    def set(self, frequency: float) -> float:
        """Change to a frequency, relative to the normal one. Returns the one in force, when the change is over."""
        ...

    def now(self) -> float:
        """Seconds of a clock that never runs back."""
        ...


@dataclass(frozen=True)
class PlannedPace:
    """The pace that the controller wants of this worker in every step of a mesh epoch.

    Args:
        order: its actions; (): whatever is ready.
        hold_s: the longest wait for the next of these while another action is ready.
    """

    pace: Pace
    order: tuple[Action, ...]
    hold_s: float

    @classmethod
    def of(cls, message: PaceMessage) -> PlannedPace:
        """The content of the controller's message."""
        order = tuple((KINDS[kind], microbatch) for kind, microbatch in message.order)
        return cls(Pace(message.starts, message.frequencies), order, message.hold_s)


class Pacing:
    """Keeps one worker to its pace, step after step.

    Args:
        clock: of its device; None: frequencies are never set, and `choose` takes what is ready.
    """

    def __init__(self, clock: DeviceClock | None) -> None:
        self._clock = clock
        self._planned: PlannedPace | None = None
        self._left: deque[Action] = deque()  # of the order, in this step
        self._number = 0  # actions that have begun in this step
        self._holds_until: float | None = None
        self._in_step = False
        self._wanted = 1.0
        self.frequency = 1.0
        """Of the device now. Times that are measured are multiplied by it before they are reported."""

    @property
    def wakes_at(self) -> float | None:
        """The time (`DeviceClock.now`) until which the worker waits for its planned action; None: it does not."""
        return self._holds_until

    def plan(self, planned: PlannedPace | None) -> None:
        """Keep to this from the next step on; None: to nothing, from now on, since the mesh changes."""
        self._planned = planned
        if planned is None:
            self._in_step = False
            self._holds_until = None

    def begin_step(self) -> None:
        """A step begins, from its start."""
        self._in_step = self._planned is not None and self._clock is not None
        self._number, self._holds_until = 0, None
        self._left = deque(self._planned.order if self._planned is not None else ())

    def choose(self, ready: int | None, is_ready: Callable[[Action], bool]) -> int | None:
        """The micro-batch whose next action is to begin now; None: wait.

        Args:
            ready: what would run without a pace; None: nothing is ready.
            is_ready: whether an action is next of its micro-batch, and has its input.
        """
        if not self._in_step or not self._left:
            return ready
        assert self._clock is not None and self._planned is not None
        if is_ready(self._left[0]):
            return self._left[0][1]
        if ready is None:
            self._holds_until = None
            return None
        now = self._clock.now()
        if self._holds_until is None:
            self._holds_until = now + self._planned.hold_s
        return ready if now >= self._holds_until else None

    def begin_action(self, action: Action) -> None:
        """An action begins: the device changes its frequency, if that is planned here."""
        self._holds_until = None
        wanted = 1.0
        if self._in_step:
            assert self._planned is not None
            wanted = self._planned.pace.at(self._number)
            if self._left and self._left[0] == action:
                self._left.popleft()
            elif action in self._left:  # it has overtaken others
                self._left.remove(action)
        self._number += 1
        if wanted != self._wanted and self._clock is not None:
            self._wanted = wanted
            self.frequency = self._clock.set(wanted)
