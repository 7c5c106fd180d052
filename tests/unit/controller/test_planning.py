"""The thread that plans beside the controller's loop."""

from __future__ import annotations

import threading

import pytest

from elaswave_spmd.controller.planning import Planned, PlanRequest, PlanThread
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.step_time import Assignment
from tests.unit.scheduling.planning_cases import costs_of, placed
from tests.waiting import PATIENCE_S, eventually


class Broken(PlanRequest):
    """A request whose answer fails."""

    def answer(self) -> Planned:
        raise AssertionError("of ours")


def request(kind: type[PlanRequest] = PlanRequest, steps: int = 100, memory_limit: float = 1e12) -> PlanRequest:
    placement = placed([2, 1], 8, 4)
    running = Assignment.of(placement)
    return kind((steps,), placement, costs_of([1.0] * 4), steps, PlanSettings(memory_limit=memory_limit), running)


def test_a_request_has_the_answer_of_the_planner_or_says_why_there_is_none() -> None:
    asked = request()
    found = asked.answer()
    wanted = plan_change(asked.placement, asked.costs, 100, PlanSettings(memory_limit=1e12), running=asked.running)
    assert found.request is asked and found.decision is not None and str(found.decision) == str(wanted)
    nothing = request(memory_limit=-1.0).answer()
    assert nothing.decision is None and "memory" in nothing.why_not


def test_asking_never_waits_and_answers_come_in_order_with_a_wake_up_each() -> None:
    may_go_on = threading.Event()

    class Held(PlanRequest):
        """A request whose answer waits until the test lets it go on."""

        def answer(self) -> Planned:
            may_go_on.wait(PATIENCE_S)
            return super().answer()

    woken: list[str] = []
    thread = PlanThread(woken.append)
    thread.ask(request(Held))
    thread.ask(request(steps=50))
    assert thread.next_answer() is None and not woken
    may_go_on.set()
    eventually(lambda: len(woken) == 2)
    answers = [thread.next_answer(), thread.next_answer()]
    assert [answer.request.remaining_steps for answer in answers if isinstance(answer, Planned)] == [100, 50]
    assert thread.next_answer() is None
    thread.close()
    eventually(lambda: all(other.name != "planning" for other in threading.enumerate()))


def test_a_defect_of_the_planner_ends_the_controller_not_the_thread() -> None:
    woken: list[str] = []
    thread = PlanThread(woken.append)
    thread.ask(request(Broken))
    thread.ask(request())
    eventually(lambda: len(woken) == 2)
    with pytest.raises(AssertionError, match="of ours"):
        thread.next_answer()
    assert thread.next_answer() is not None
    thread.close()
