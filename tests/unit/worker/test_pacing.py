"""Paces within a step: the planned order is waited for a little, and frequencies change at their places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.scheduling.dvfs import Pace
from elaswave_spmd.worker.pacing import Action, Pacing, PlannedPace
from elaswave_spmd.worker.ready_order import KeptLimits, MicrobatchWork, is_ready


class MadeUpClock:
    """A clock whose time is set by hand. `steps`: the frequencies that the device has; ()  any."""

    def __init__(self, steps: tuple[float, ...] = ()) -> None:
        self.time = 0.0
        self.steps = steps
        self.set_to: list[float] = []

    def set(self, frequency: float) -> float:
        found = min([s for s in self.steps if s >= frequency], default=frequency)
        self.set_to.append(found)
        return found

    def now(self) -> float:
        return self.time


ORDER: tuple[Action, ...] = (("F", 0), ("F", 1), ("B", 0), ("W", 0), ("B", 1), ("W", 1))


NORMAL = Pace()


def pacing(clock: MadeUpClock | None, pace: Pace = NORMAL) -> Pacing:
    made = Pacing(clock)
    made.plan(PlannedPace(pace, ORDER, 2.0))
    made.begin_step()
    return made


def only(*ready: Action):
    return lambda action: action in ready


def test_the_planned_action_is_waited_for_but_not_for_ever() -> None:
    clock = MadeUpClock()
    made = pacing(clock)
    assert made.choose(0, only(("F", 0), ("F", 1))) == 0 and made.wakes_at is None
    made.begin_action(("F", 0))
    assert made.choose(7, only()) is None and made.wakes_at == 2.0, "another one is ready"
    clock.time = 1.5
    assert made.choose(7, only()) is None and made.wakes_at == 2.0
    assert made.choose(7, only(("F", 1))) == 1
    clock.time = 2.0
    assert made.choose(7, only()) == 7, "it has waited long enough"
    made.begin_action(("W", 7))
    assert made.wakes_at is None


def test_nothing_is_held_where_nothing_is_ready() -> None:
    made = pacing(MadeUpClock())
    assert made.choose(None, only()) is None and made.wakes_at is None


def test_what_was_overtaken_is_planned_still_and_what_overtook_it_no_more() -> None:
    clock = MadeUpClock()
    made = pacing(clock)
    for action in (("F", 1), ("F", 0), ("B", 1)):
        made.begin_action(action)
    assert made.choose(5, only(("B", 0))) == 0
    made.begin_action(("B", 0))
    assert made.choose(5, only(("W", 0))) == 0


def test_frequencies_change_at_their_places() -> None:
    clock = MadeUpClock()
    made = pacing(clock, Pace((0, 2, 4), (0.5, 1.0, 0.8)))
    seen = []
    for _ in range(2):
        made.begin_step()
        for action in ORDER:
            made.begin_action(action)
            seen.append(made.frequency)
    assert seen == [0.5, 0.5, 1.0, 1.0, 0.8, 0.8] * 2
    assert clock.set_to == [0.5, 1.0, 0.8] * 2, "each change is one"


def test_what_the_device_has_counts_not_what_was_asked_for() -> None:
    clock = MadeUpClock((0.6, 1.0))
    made = pacing(clock, Pace((0,), (0.5,)))
    made.begin_action(ORDER[0])
    made.begin_action(ORDER[1])
    assert made.frequency == 0.6 and clock.set_to == [0.6], "it is asked once"


def test_a_new_mesh_begins_at_the_normal_frequency_and_an_interrupted_step_has_no_pace() -> None:
    clock = MadeUpClock()
    made = pacing(clock, Pace((0,), (0.5,)))
    made.begin_action(ORDER[0])
    made.plan(None)
    assert made.choose(7, only()) == 7
    made.begin_action(("F", 7))
    assert made.frequency == 1.0 and clock.set_to == [0.5, 1.0]
    made.plan(PlannedPace(Pace((0,), (0.5,)), ORDER, 2.0))
    assert made.choose(7, only()) == 7, "from the next step on"
    made.begin_action(("B", 7))
    assert made.frequency == 1.0


def test_without_a_clock_nothing_is_held() -> None:
    made = pacing(None, Pace((0,), (0.5,)))
    assert made.choose(7, only()) == 7
    made.begin_action(("F", 7))
    assert made.frequency == 1.0


@given(st.permutations(ORDER), st.lists(st.booleans(), min_size=40, max_size=40))
def test_whatever_is_ready_every_action_begins_once(ready_order: list[Action], passes: list[bool]) -> None:
    """Actions become ready in any order; time passes or not: in the end all have run."""
    clock, waits = MadeUpClock(), iter(passes)
    made = pacing(clock)
    ran: list[Action] = []
    while len(ran) < len(ORDER):
        ready = [action for action in ready_order if action not in ran and _has_input(action, ran)]
        of = {microbatch: (kind, microbatch) for kind, microbatch in reversed(ready)}
        chosen = made.choose(ready[0][1], lambda action, ready=ready: action in ready)
        if chosen is None:
            clock.time += 3.0 if next(waits, True) else 0.0
            continue
        head = next((action for action in made._left if action in ready and action[1] == chosen), of[chosen])
        made.begin_action(head)
        ran.append(head)
    assert sorted(ran) == sorted(ORDER)


def _has_input(action: Action, ran: list[Action]) -> bool:
    kind, microbatch = action
    return kind == "F" or ({"B": "F", "W": "B"}[kind], microbatch) in ran


def test_a_message_is_a_planned_pace() -> None:
    message = m.Pace(3, (0, 2), (0.5, 1.0), ((0, 4), (1, 4), (2, 4)), 0.25)
    assert PlannedPace.of(message) == PlannedPace(Pace((0, 2), (0.5, 1.0)), (("F", 4), ("B", 4), ("W", 4)), 0.25)


@pytest.mark.parametrize(
    ("left", "ready"),
    [
        (None, ""),
        (MicrobatchWork(True, 2, False), "F"),
        (MicrobatchWork(False, 2, False), "B"),
        (MicrobatchWork(False, 1, False), "B"),
        (MicrobatchWork(False, 3, False), "W"),
        (MicrobatchWork(True, 0, False), "F"),
        (MicrobatchWork(False, 0, False), ""),
    ],
)
def test_which_action_of_a_micro_batch_is_next(left: MicrobatchWork | None, ready: str) -> None:
    work = {} if left is None else {4: left}
    yes, no, limits = (lambda _: True), (lambda _: False), KeptLimits(2, 2)
    assert "".join(kind for kind in "FBW" if is_ready(kind, 4, work, yes, yes, limits)) == ready
    without_input = ready.replace("F", "").replace("B", "")
    assert "".join(kind for kind in "FBW" if is_ready(kind, 4, work, no, no, limits)) == without_input


def test_a_planned_action_is_not_ready_beyond_the_limits() -> None:
    """Actions that have overtaken others may have used the room that was planned for it."""
    forward, in_flight, put_off = (
        MicrobatchWork(True, 2, False),
        MicrobatchWork(False, 2, False),
        MicrobatchWork(False, 3, False),
    )
    yes = lambda _: True  # noqa: E731
    work = {0: in_flight, 1: forward, 2: put_off, 3: MicrobatchWork(True, 0, False)}
    assert not is_ready("F", 1, work, yes, yes, KeptLimits(1, 2)) and is_ready("F", 1, work, yes, yes, KeptLimits(2, 2))
    assert is_ready("F", 3, work, yes, yes, KeptLimits(1, 2)), "another worker runs its backward"
    assert not is_ready("B", 0, work, yes, yes, KeptLimits(1, 1)) and is_ready("B", 0, work, yes, yes, KeptLimits(1, 2))
    assert is_ready("B", 0, {0: in_flight}, yes, yes, KeptLimits(1, 0)) and is_ready(
        "W", 2, work, yes, yes, KeptLimits(1, 0)
    )
