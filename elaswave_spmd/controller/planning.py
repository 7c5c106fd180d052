"""Plans of changes are made beside the controller's loop, which answers a lost worker within milliseconds meanwhile.

On some dozens of workers a plan takes seconds, as many groupings of the workers are looked at. A request has all that a
plan depends on, so that the answer is the same whenever and wherever it is made.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import Decision, PlanSettings, plan_change
from elaswave_spmd.scheduling.step_time import Assignment


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


class PlanThread:
    """The thread that plans, one request after another.

    Args:
        wake: ends the wait of the controller's thread, which then takes the answer. Called by the planning thread.
    """

    def __init__(self, wake: Callable[[str], None]) -> None:
        self._wake = wake
        self._requests: queue.SimpleQueue[PlanRequest | None] = queue.SimpleQueue()
        self._answers: deque[Planned | BaseException] = deque()
        self._thread: threading.Thread | None = None

    def ask(self, request: PlanRequest) -> None:
        """Plan this after what was asked for before. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer_all, name="planning", daemon=True)
            self._thread.start()
        self._requests.put(request)

    def next_answer(self) -> Planned | None:
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
