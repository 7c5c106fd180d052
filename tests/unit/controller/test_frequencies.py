"""The frequency axis of a run: paces come last, are told, are dropped with the mesh, and make no worker look slow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller import planning
from elaswave_spmd.controller.actions import Action, PlanChange, PlanFrequencies, Record
from elaswave_spmd.controller.dvfs import TRIAL_STEPS, Frequencies, PaceTrial, hold_seconds
from elaswave_spmd.controller.planning import Hinted, HintRequest, PlanThread, rounded_hints
from elaswave_spmd.controller.rescheduler import MeasuredCosts, ReschedulePolicy, Rescheduler
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.actions import Broadcast, Send
from elaswave_spmd.recovery.controller_protocol import Goal
from elaswave_spmd.recovery.messages import Measured
from elaswave_spmd.recovery.messages import Pace as PaceMessage
from elaswave_spmd.runtime.devices.dvfs import DeviceRange
from elaswave_spmd.scheduling import rebalance
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyRange, Pace
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, timed_graph
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of, placed
from tests.waiting import PATIENCE_S, eventually


class MadeUpGuard:
    """Notes its orders. `error`: what it answers to the next poll."""

    def __init__(self, devices: Mapping[str, DeviceRange] | None = None) -> None:
        self.devices: Mapping[str, DeviceRange] = devices or {f"gpu{i}": DeviceRange(1, 2, 3) for i in range(8)}
        self.orders: list[dict[str, list[int]]] = []
        self.error = ""
        self.closed = False

    def share(self, devices: Mapping[str, Sequence[int]]) -> None:
        self.orders.append({device: list(ranks) for device, ranks in devices.items()})

    def reset(self) -> None:
        self.orders.append({})

    def poll(self) -> str:
        return self.error

    def close(self) -> None:
        self.closed = True


class World:
    """A run whose workers report their times at the normal frequency. A layer takes 10 ms forward, 20 ms backward."""

    def __init__(self, sizes: Sequence[int], guard: MadeUpGuard | None = None, layers: int = 6, **fields: Any) -> None:
        self.placement: Placement = placed(sizes, 12, layers)
        self.protocol = SimpleNamespace(
            placement=self.placement,
            layout=None,
            split=None,
            settled=True,
            rebalance=self.rebalance,
            running=Assignment.of(self.placement),
        )
        self.goals: list[Goal] = []
        self.asked: list[HintRequest] = []
        self.answers = True  # hints are made at once
        self.events: list[dict[str, Any]] = []
        self.sent: dict[int, PaceMessage] = {}
        self.costs, self.speeds = [1.0] * layers, {}
        self.step, self.now = 0, 0.0
        self.step_s, self.paced_step_s = 1.0, 1.0
        still = {"microbatches": False, "layers": False, "every": 2, "window": 3, "f_margin": 0.0, "lasting": 0.0}
        chosen = ScheduleSettings(  # pyright: ignore[reportArgumentType]
            **{"frequency": "simulated", "f_change_ms": 0.0} | still | fields
        )
        self.frequencies = Frequencies(chosen, guard)
        self.measured = MeasuredCosts(chosen, costs_of([0.001] * layers), follows_speeds=chosen.microbatches)
        roster = Roster(self.placement.mesh.members)
        policy = ReschedulePolicy(chosen, 200)
        self.rescheduler = Rescheduler(policy, self.measured, cast(Any, self.protocol), self.frequencies, roster)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case PlanChange(request):
                    self.do(self.rescheduler.planned(request.answer()))
                case PlanFrequencies(request):
                    self.asked.append(request)
                    if self.answers:
                        self.do(self.rescheduler.hinted(request.answer(), self.now))
                case Record():
                    self.events.append({"event": action.kind, **action.fields})
                case Send(rank, PaceMessage() as message):
                    self.sent[rank] = message
                case Broadcast(ranks, PaceMessage() as message):
                    self.sent |= dict.fromkeys(ranks, message)

    def rebalance(self, goal: Goal) -> list[Any]:
        self.goals.append(goal)
        return []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            has_paces = any(message.order for message in self.sent.values())
            self.now += self.paced_step_s if has_paces else self.step_s
            self.do(self.rescheduler.committed(self.step, self.now))
            for rank in self.placement.mesh.members:
                microbatches = len(self.placement.microbatches_of(rank))
                slow = microbatches / self.speeds.get(rank, 1.0)
                layers = self.placement.layers_of_stage(self.placement.mesh.stage_of(rank))
                rows = (
                    (ly, 0.01 * slow * self.costs[ly], 0.02 * slow * self.costs[ly], microbatches, microbatches)
                    for ly in layers
                )
                self.rescheduler.report(Measured(rank, self.step, tuple(rows)))

    def hint(self, costs: CostModel, step: int, pids: Mapping[int, int | None] | None = None) -> None:
        """Hints for these costs are asked for, if they may be, and are made at once."""
        for action in self.frequencies.hint(self.placement, self.protocol.running, costs):
            assert isinstance(action, PlanFrequencies)
            self.do(self.frequencies.hinted(action.request.answer(), step, self.now, pids or {}, holds=True))

    @property
    def hints(self) -> list[dict[int, Any]]:
        """The paces of all events about frequencies; without any where they are normal again."""
        return [event["paces"] for event in self.events if event["event"] == "frequency"]

    @property
    def set_to(self) -> dict[int, tuple[float, ...]]:
        return {rank: message.frequencies for rank, message in self.sent.items()}


def uneven(guard: MadeUpGuard | None = None, **fields: Any) -> World:
    """Five workers: the first two have three micro-batches each, the others two."""
    return World([5], guard, **fields)


def test_who_would_wait_is_slowed_down_and_is_not_called_slow() -> None:
    world = uneven()
    world.train(40)
    assert world.set_to == {0: (1.0,), 1: (1.0,), 2: (0.67,), 3: (0.67,), 4: (0.67,)}
    assert world.sent[3].order == ((0, 8), (1, 8), (0, 9), (1, 9)) and world.sent[3].epoch == 0
    assert world.sent[3].hold_s == pytest.approx(0.09)
    (event,) = world.events
    assert (event["event"], event["ranks"]) == ("frequency", [2, 3, 4])
    assert event["paces"] == {rank: [[0, f]] for rank, (f,) in world.set_to.items()}
    assert event["modelled_energy"] < event["modelled_energy_before"]
    assert event["modelled_seconds"] <= event["modelled_seconds_before"] * (1 + 1e-9)
    assert "3 of 5 workers would wait" in event["why"] and "modelled energy" in event["message"]
    assert world.measured.costs.speed(3) == 1.0


def test_within_a_step_frequencies_change_where_the_pipeline_allows() -> None:
    world = World([1, 1, 1], layers=6)
    world.train(40)
    changes = {rank: len(message.starts) for rank, message in world.sent.items()}
    assert max(changes.values()) > 1 and all(number <= 8 for number in changes.values())
    assert len(world.sent[1].order) == 24
    fewer = World([1, 1, 1], layers=6, f_changes=0)
    fewer.train(40)
    assert all(message.starts == (0,) for message in fewer.sent.values())


def test_what_waits_for_nobody_is_left_alone() -> None:
    world = World([3])
    world.train(40)
    assert not world.sent and world.events == []


def test_hints_come_when_nothing_else_is_to_be_changed() -> None:
    world = World([2], microbatches=True)
    world.speeds[1] = 0.5
    world.train(40)
    assert world.goals and not world.sent


def test_training_goes_on_while_hints_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, in which nobody answered a loss."""
    may_go_on = threading.Event()

    def held(*asked: Any) -> Any:
        assert threading.current_thread().name == "planning" and may_go_on.wait(PATIENCE_S)
        return rounded_hints(*asked)

    monkeypatch.setattr(planning, "rounded_hints", held)
    world, woken = uneven(), list[str]()
    world.answers = False
    world.train(30)
    (request,) = world.asked
    thread = PlanThread(woken.append)
    thread.ask(request)
    world.train(10)
    assert thread.next_answer() is None and len(world.asked) == 1 and not world.sent
    may_go_on.set()
    eventually(lambda: bool(woken))
    answer = thread.next_answer()
    thread.close()
    assert isinstance(answer, Hinted)
    world.do(world.rescheduler.hinted(answer, world.now))
    assert sorted(world.sent) == [0, 1, 2, 3, 4] and world.events[-1]["step"] == 40


@pytest.mark.parametrize("change", ["epoch", "running", "unsettled", "a plan"])
def test_hints_that_come_when_something_else_has_changed_are_dropped_and_made_anew(change: str) -> None:
    world = uneven()
    world.answers = False
    world.train(30)
    settled, running = world.placement, world.protocol.running
    if change == "epoch":
        world.protocol.placement = replace(settled, mesh=replace(settled.mesh, epoch=settled.mesh.epoch + 1))
    elif change == "running":
        world.protocol.running = replace(running, in_flight=(7,))
    elif change == "unsettled":
        world.protocol.settled = False
    else:
        world.rescheduler._content = 0
    assert world.rescheduler.hinted(world.asked[0].answer(), world.now) == []
    world.protocol.placement, world.protocol.running, world.protocol.settled = settled, running, True
    world.answers = True
    world.train(20)
    assert len(world.asked) == 2 and len(world.sent) == 5


def test_hints_wait_for_some_looks_and_are_sent_once() -> None:
    world = uneven()
    world.train(7)
    assert not world.sent
    world.train(4)
    assert len(world.sent) == 5
    world.sent.clear()
    world.train(30)
    assert not world.sent


def test_a_slow_worker_is_raised_with_the_range() -> None:
    world = World([2], f_max=1.25)
    world.speeds[0] = 0.5
    world.train(40)
    assert world.set_to == {0: (1.25,), 1: (0.63,)}
    (event,) = [e for e in world.events if e["event"] == "frequency"]
    assert "1 are raised" in event["why"]
    assert [e["event"] for e in world.events if e["event"] in ("slow", "recover")] == ["slow"]


def test_a_new_mesh_epoch_begins_at_the_normal_frequencies() -> None:
    guard = MadeUpGuard()
    world = uneven(guard)
    world.train(20)
    assert guard.orders == [{f"gpu{rank}": [rank] for rank in range(5)}]
    world.do(world.rescheduler.begun(world.placement, world.step))
    assert guard.orders[-1] == {} and world.events[-1]["why"] == "the mesh has changed"
    assert world.events[-1]["ranks"] == [2, 3, 4] and world.events[-1]["paces"] == {}
    assert world.rescheduler.begun(world.placement, world.step) == [], "workers forget theirs by themselves"
    world.sent.clear()
    world.train(20)  # and when all is quiet again, hints come again
    assert len(world.sent) == 5 and len(guard.orders) == 3 and world.measured.costs.speed(4) == 1.0


def test_a_guard_that_fails_ends_the_axis_and_not_the_run() -> None:
    guard = MadeUpGuard()
    world = uneven(guard)
    world.train(20)
    guard.error = "no permission"
    world.train(20)
    event = world.events[-1]
    assert event["refused"] == "no permission" and "goes on" in event["message"] and event["ranks"] == [2, 3, 4]
    assert guard.closed and not world.frequencies.active
    assert world.set_to == dict.fromkeys(range(5), (1.0,)) and world.sent[4].order == ()


def test_hints_that_make_steps_longer_are_withdrawn_until_the_mesh_changes() -> None:
    world = uneven()
    world.paced_step_s = 1.5
    world.train(60)
    hints, withdrawn = world.events
    assert hints["ranks"] == withdrawn["ranks"] == [2, 3, 4] and withdrawn["paces"] == {}
    assert withdrawn["why"] == "steps took 1.50 times as long with hints as before them"
    assert hints["step"] + TRIAL_STEPS <= withdrawn["step"] <= hints["step"] + 2 * TRIAL_STEPS
    assert world.set_to == dict.fromkeys(range(5), (1.0,)) and world.sent[4].order == ()
    assert world.rescheduler.begun(world.placement, world.step) == [], "they are normal already"
    world.train(20)
    assert world.events[-1]["ranks"] == [2, 3, 4], "another mesh epoch has hints of its own"


@pytest.mark.parametrize("paced_step_s", [0.7, 1.0, 1.04])
def test_hints_stay_where_steps_take_as_long_as_before(paced_step_s: float) -> None:
    world = uneven()
    world.paced_step_s = paced_step_s
    world.train(80)
    (event,) = world.events
    assert event["paces"]


def test_steps_that_get_longer_later_withdraw_no_hints() -> None:
    """Something else makes them longer: the hints were judged when they were new."""
    world = uneven()
    world.train(40)
    world.paced_step_s = 2.0
    world.train(40)
    (event,) = world.events
    assert event["paces"]


@pytest.mark.parametrize(("longer", "stays"), [(1.0, True), (1.5, False)])
def test_other_hints_are_judged_by_the_steps_just_before_them(longer: float, stays: bool) -> None:
    world = uneven()
    world.train(40)
    world.paced_step_s = 2.0
    world.train(20)
    world.speeds[1] = 0.6  # asks for other hints
    world.train(5)
    while len(world.hints) == 1:
        world.train(1)
    world.paced_step_s *= longer
    world.train(40)
    assert len(world.hints) >= 2 and bool(world.hints[-1]) == stays


def test_a_few_long_steps_withdraw_no_hints() -> None:
    world = uneven()
    world.train(12)
    for long in (3.0, 1.0, 1.0, 2.0) * 10:
        world.paced_step_s = long if world.step % 3 == 0 else 1.0
        world.train(1)
    (event,) = world.events
    assert event["paces"]


def test_without_the_option_nothing_happens() -> None:
    world = uneven(frequency="none")
    world.train(20)
    assert world.rescheduler.begun(world.placement, 3) == []
    world.frequencies.close()
    assert world.events == [] and not world.sent and not world.frequencies.active


def test_processors_are_shared_by_the_workers_that_may_run_on_them() -> None:
    mine = sorted(os.sched_getaffinity(0))
    elsewhere = max(mine) + 1
    devices = {"policy0": DeviceRange(1, 2, 3, (mine[0],)), "policy1": DeviceRange(1, 2, 3, (elsewhere,))}
    guard = MadeUpGuard(devices)
    world = uneven(guard)
    costs = costs_of([0.03] * 6)
    run_steps(world)
    world.hint(costs, 5, dict.fromkeys(range(5), os.getpid()))
    assert guard.orders == [{"policy0": [0, 1, 2, 3, 4]}], "no policy of others"
    guard.orders.clear()
    world.frequencies.begun(world.placement, 7)
    run_steps(world)
    world.hint(costs, 8)
    everybody = [0, 1, 2, 3, 4]
    assert guard.orders == [{}, {"policy0": everybody, "policy1": everybody}], "unknown where they run: anywhere"


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Assignment, CostModel]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    seconds = draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    costs = costs_of(seconds).with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    return assigned(sizes, draw(st.integers(1, 8)), costs), costs


@pytest.mark.parametrize("exact", [True, False], ids=["by worker", "by class"])
@given(pipelines(), st.floats(0.3, 1.0), st.floats(1.0, 1.4), st.integers(0, 8))
@settings(deadline=None, max_examples=60)
def test_rounded_paces_keep_the_makespan(
    exact: bool, case: tuple[Assignment, CostModel], low: float, high: float, changes: int
) -> None:
    assignment, costs = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalance, "_EXACT_ACTIONS", 1000 if exact else 0)
        plan, hints = rounded_hints(assignment, costs, FrequencyRange(low, high, 0.0, changes))
    paces = {rank: hint.pace for hint in hints for rank in hint.ranks}
    assert sorted(paces) == sorted(rank for members in assignment.stages for rank in members)
    assert all(low * (1 - 1e-9) <= f <= high for pace in paces.values() for f in pace.frequencies)
    assert all(pace.changes <= changes for pace in paces.values())
    if exact:
        graph = timed_graph(assignment, costs)
        seconds = graph.seconds.copy()
        for rank, todo in zip(graph.ranks, graph.lists, strict=True):
            seconds[list(todo)] /= [paces[rank].at(n) for n in range(len(todo))]
        assert graph.makespan(np.array(seconds)) <= plan.makespan_s * (1 + 1e-9)


def test_a_worker_waits_as_long_as_a_mean_action() -> None:
    costs = costs_of([3.0, 6.0]).with_speeds({1: 0.5})
    assert hold_seconds(assigned([1, 1], 4, costs), costs) == {0: 1.5, 1: 6.0}


def run_steps(world: World) -> None:
    """More steps than hints are compared with, or judged by, all equally long."""
    for _ in range(2 * TRIAL_STEPS):
        world.now += 1.0
        world.do(world.frequencies.committed(world.placement, world.step, world.now))


def test_paces_that_are_alike_are_left_alone() -> None:
    world = uneven()
    run_steps(world)
    for step, speed in enumerate((1.0, 1.01, 1.2)):
        world.hint(costs_of([0.03] * 6).with_speeds({2: speed}), step)
        run_steps(world)
    assert [event["step"] for event in world.events] == [0, 2]
    assert Pace(world.sent[2].starts, world.sent[2].frequencies) == Pace((0,), (0.56,))


def test_hints_that_are_judged_stay_as_they_are() -> None:
    world = uneven()
    run_steps(world)
    for step, speed in enumerate((1.0, 1.2, 1.4)):
        world.hint(costs_of([0.03] * 6).with_speeds({2: speed}), step)
    assert [event["step"] for event in world.events] == [0]
    run_steps(world)
    world.hint(costs_of([0.03] * 6).with_speeds({2: 1.4}), 3)
    assert [event["step"] for event in world.events] == [0, 3]


def test_hints_wait_until_it_is_known_whether_weight_gradients_are_put_off() -> None:
    """Else steps with and without hints would be compared that are run in different ways."""
    world = uneven()
    trial = SimpleNamespace(is_trying=True, committed=lambda step, now: [])
    world.rescheduler._backwards = cast(Any, trial)
    world.train(60)
    assert not world.sent
    trial.is_trying = False
    world.train(12)
    assert world.sent


@pytest.mark.parametrize("late_s", [0.0, 0.003])
def test_steps_that_were_run_before_an_order_and_came_after_it_are_not_looked_at(late_s: float) -> None:
    """They come at once when the controller has done something else meanwhile. Each seemed to have taken no time."""
    trial, now, found = PaceTrial(), 0.0, []
    for _ in range(2 * TRIAL_STEPS):
        now += 1.0
        trial.committed(now, has_paces=False)
    now += 12.0
    trial.ordered(now)
    for seconds in [late_s] * 12 + [1.5] * 2 * TRIAL_STEPS:
        now += seconds
        found.append(trial.committed(now, has_paces=True))
    assert [times for times in found if times is not None] == [pytest.approx(1.5)]


def test_hints_are_compared_with_no_step_of_the_trial_of_backwards() -> None:
    """The last of those steps are run in the way that is given up, and may take longer."""
    world = uneven()
    trial = SimpleNamespace(is_trying=True, committed=lambda step, now: [])
    world.rescheduler._backwards = cast(Any, trial)
    world.step_s, world.paced_step_s = 1.08, 1.12
    world.train(40)
    trial.is_trying, world.step_s = False, 1.0
    world.train(60)
    assert [bool(paces) for paces in world.hints] == [True, False]
    assert "1.12 times as long" in world.events[-1]["why"]


def test_orders_that_are_each_a_little_too_slow_are_not_kept_one_after_the_other() -> None:
    trial, now, found = PaceTrial(), 0.0, []
    for order, seconds in enumerate((1.0, 1.04, 1.04 * 1.04)):
        if order:
            trial.ordered(now)
        for _ in range(2 * TRIAL_STEPS):
            now += seconds
            found.append(trial.committed(now, has_paces=order > 0))
    assert [times for times in found if times is not None] == [pytest.approx(1.04 * 1.04)]
    assert trial.failed
