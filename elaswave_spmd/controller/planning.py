"""Plans of changes, and of frequencies, are made beside the controller's loop, which answers a lost worker meanwhile.

The loop answers within milliseconds. On some dozens of workers a plan takes seconds, as many groupings of the workers
are looked at; so do frequencies for single actions. A request has all that a plan depends on, so that the answer is the
same whenever and wherever it is made.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyPlan, FrequencyRange, Hint, Pace
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, frequency_hints, plan_change
from elaswave_spmd.scheduling.step_time import Assignment

_GRAIN = 0.01  # frequencies are rounded up to multiples of this


@dataclass(frozen=True)
class PlanRequest:
    """A request has what a plan is made of, as for `plan_change`.

    Args:
        key: requests with equal keys have answers that do not differ by anything that counts.
    """

    key: tuple[object, ...]
    placement: Placement
    costs: CostModel
    remaining_steps: int
    settings: PlanSettings
    running: Assignment

    def answer(self) -> Planned:
        """The plan. Takes up to seconds."""
        try:
            decision = plan_change(
                self.placement, self.costs, self.remaining_steps, self.settings, running=self.running
            )
        except PlanError as error:
            return Planned(self, None, str(error))
        return Planned(self, decision)


@dataclass(frozen=True)
class Planned:
    """The answer to a request, an event.

    Args:
        decision: None: nothing fits in memory, as `why_not` says.
    """

    request: PlanRequest
    decision: Decision | None
    why_not: str = ""


@dataclass(frozen=True)
class HintRequest:
    """A request has what frequency hints are made of.

    Args:
        placement: the placement.
        running: its assignment with the limits that workers run with.
        costs: the costs to plan with.
        limits: the range of frequencies.
    """

    placement: Placement
    running: Assignment
    costs: CostModel
    limits: FrequencyRange

    def answer(self) -> Hinted:
        """The hints. Takes up to seconds."""
        return Hinted(self, *rounded_hints(self.running, self.costs, self.limits))


@dataclass(frozen=True)
class Hinted:
    """The answer to a request, an event."""

    request: HintRequest
    plan: FrequencyPlan
    hints: tuple[Hint, ...]


def rounded_hints(
    assignment: Assignment, costs: CostModel, limits: FrequencyRange
) -> tuple[FrequencyPlan, tuple[Hint, ...]]:
    """The plan and the hints of `frequency_hints`, with frequencies rounded up."""
    plan, hints = frequency_hints(assignment, costs, limits)
    found = tuple(Hint(hint.stage, hint.ranks, _rounded(hint.pace, limits.highest), hint.order) for hint in hints)
    return plan, found


def _rounded(pace: Pace, highest: float) -> Pace:
    """The pace with its frequencies rounded up; runs with equal ones are one run."""
    up = [min(round(math.ceil(f / _GRAIN - 1e-6) * _GRAIN, 6), highest) for f in pace.frequencies]
    kept = [i for i, f in enumerate(up) if not i or f != up[i - 1]]
    return Pace(tuple(pace.starts[i] for i in kept), tuple(up[i] for i in kept))


class PlanThread:
    """The thread that plans, one request after another.

    Args:
        wake: ends the wait of the controller's thread, which then takes the answer. Called by the planning thread.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._requests: queue.SimpleQueue[PlanRequest | HintRequest | None] = queue.SimpleQueue()
        self._answers: deque[Planned | Hinted | BaseException] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, request: PlanRequest | HintRequest) -> None:
        """Plan this after what was asked for before. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer_all, name="planning", daemon=True)
            self._thread.start()
        self._requests.put(request)

    def next_answer(self) -> Planned | Hinted | None:
        """The oldest answer that was not taken yet.

        Raises:
            BaseException: what went wrong while it was made.
        """
        answer = self._answers.popleft() if self._answers else None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the thread when it has made the plan that it is at; nobody waits for that."""
        if self._thread is not None:
            self._requests.put(None)
            self._thread = None

    def _answer_all(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._answers.append(request.answer())
            except BaseException as error:  # of ours: the controller's thread raises it
                self._answers.append(error)
            self._wake("a plan is made")
