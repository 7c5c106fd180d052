"""The frequency axis of a run: hints come last, are told, are taken back, and never make a worker look slow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller.dvfs import Frequencies, modelled_energy, shared, worker_frequencies
from elaswave_spmd.controller.events import Action, Record
from elaswave_spmd.controller.rescheduler import MeasuredCosts, ReschedulePolicy, Rescheduler
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.controller_protocol import Goal
from elaswave_spmd.recovery.messages import Measured
from elaswave_spmd.runtime.devices.dvfs import Answer, DeviceRange
from elaswave_spmd.scheduling import rebalance
from elaswave_spmd.scheduling.cost_model import CostModel
from elaswave_spmd.scheduling.dvfs import FrequencyRange
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, timed_graph
from tests.unit.scheduling.planning_cases import SPEEDS, assigned, costs_of, placed


class MadeUpGuard:
    """Answers an order when it is polled; `steps`: frequencies that it has, `error`: why it has none."""

    def __init__(self, devices: Mapping[str, DeviceRange] | None = None, steps: Sequence[float] = ()) -> None:
        self.devices: Mapping[str, DeviceRange] = devices or {}
        self.steps, self.error = steps, ""
        self.orders: list[dict[str, float]] = []
        self.set_to: dict[str, float] = {}
        self.closed = False
        self.quiet = False
        self._answers: deque[Answer] = deque()

    def set(self, frequencies: Mapping[str, float]) -> None:
        self.orders.append(dict(frequencies))
        self.set_to = {d: min([s for s in self.steps if s >= f], default=f) for d, f in frequencies.items()}
        self._answers.append(Answer(self.set_to, self.error))

    def reset(self) -> None:
        self.orders.append({})
        self.set_to = {}
        self._answers.append(Answer(error=self.error))

    def poll(self) -> Answer | None:
        return self._answers.popleft() if self._answers and not self.quiet else None

    def close(self) -> None:
        self.closed = True


class World:
    """A run whose devices are as fast as the guard has set them. A layer takes 10 ms forward and 20 ms backward."""

    def __init__(self, sizes: Sequence[int], guard: MadeUpGuard | None, layers: int = 6, **fields: Any) -> None:
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
        self.events: list[dict[str, Any]] = []
        self.costs, self.speeds = [1.0] * layers, {}
        self.guard, self.step = guard, 0
        still = {"microbatches": False, "layers": False, "every": 2, "window": 3, "f_margin": 0.0, "lasting": 0.0}
        chosen = ScheduleSettings(**still | fields)  # pyright: ignore[reportArgumentType]
        self.frequencies = Frequencies(chosen, guard)
        self.measured = MeasuredCosts(chosen, costs_of([0.001] * layers), follows_speeds=chosen.microbatches)
        roster = Roster(self.placement.mesh.members)
        policy = ReschedulePolicy(chosen, 200)
        self.rescheduler = Rescheduler(policy, self.measured, cast(Any, self.protocol), self.frequencies, roster)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Record):
                self.events.append({"event": action.kind, **action.fields})

    def rebalance(self, goal: Goal) -> list[Any]:
        self.goals.append(goal)
        return []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.do(self.rescheduler.committed(self.step, float(self.step)))
            for rank in self.placement.mesh.members:
                microbatches = len(self.placement.microbatches_of(rank))
                frequency = self.guard.set_to.get(str(rank), 1.0) if self.guard else 1.0
                slow = microbatches / self.speeds.get(rank, 1.0) / frequency
                layers = self.placement.layers_of_stage(self.placement.mesh.stage_of(rank))
                rows = (
                    (ly, 0.01 * slow * self.costs[ly], 0.02 * slow * self.costs[ly], microbatches, microbatches)
                    for ly in layers
                )
                self.rescheduler.report(Measured(rank, self.step, tuple(rows)))


def uneven(guard: MadeUpGuard | None = None) -> World:
    """Five workers: the first two have three micro-batches each, the others two."""
    return World([5], guard or MadeUpGuard())


def test_who_would_wait_is_slowed_down_and_is_not_called_slow() -> None:
    world = uneven()
    world.train(40)
    assert world.guard is not None
    assert world.guard.orders == [{"0": 1.0, "1": 1.0, "2": 0.67, "3": 0.67, "4": 0.67}]
    (event,) = world.events
    assert (event["event"], event["ranks"]) == ("frequency", [2, 3, 4])
    assert event["before"] == dict.fromkeys(range(5), 1.0)
    assert event["frequencies"] == {0: 1.0, 1: 1.0, 2: 0.67, 3: 0.67, 4: 0.67}
    assert event["modelled_energy"] < event["modelled_energy_before"]
    assert event["modelled_seconds"] <= event["modelled_seconds_before"] * (1 + 1e-9)
    assert "3 of 5 workers would wait" in event["why"] and "modelled energy" in event["message"]
    costs = world.measured.costs
    assert costs.speed(3) == 1.0 and costs.layers[4].forward_s == pytest.approx(0.01)


def test_what_waits_for_nobody_is_left_alone() -> None:
    world = World([3], MadeUpGuard())
    world.train(40)
    assert world.guard is not None and world.guard.orders == [] and world.events == []


def test_hints_come_when_nothing_else_is_to_be_changed() -> None:
    world = World([2], MadeUpGuard(), microbatches=True)
    world.speeds[1] = 0.5
    world.train(40)
    assert world.guard is not None and world.goals and not world.guard.orders


def test_hints_wait_for_some_looks() -> None:
    world = uneven()
    world.train(7)
    assert world.guard is not None and world.guard.orders == []
    world.train(4)
    assert len(world.guard.orders) == 1


def test_a_slow_worker_is_raised_with_the_range() -> None:
    world = World([2], MadeUpGuard(), f_max=1.25)
    world.speeds[0] = 0.5
    world.train(40)
    (event,) = [e for e in world.events if e["event"] == "frequency"]
    assert event["frequencies"] == {0: 1.25, 1: 0.63}
    assert "1 are raised" in event["why"]
    assert [e["event"] for e in world.events if e["event"] in ("slow", "recover")] == ["slow"]


def test_a_new_mesh_epoch_begins_at_the_normal_frequencies() -> None:
    world = uneven()
    world.train(20)
    assert world.guard is not None and world.guard.set_to["4"] == 0.67
    world.frequencies.begun(world.placement, world.step, {})
    assert world.guard.orders[-1] == {} and world.guard.set_to == {}
    world.frequencies.begun(world.placement, world.step, {})
    assert len(world.guard.orders) == 2
    world.train(1)
    assert (
        world.events[-1]["frequencies"] == dict.fromkeys(range(5), 1.0)
        and world.events[-1]["why"] == "the mesh has changed"
    )
    world.train(20)  # and when all is quiet again, hints come again
    assert len(world.guard.orders) == 3 and world.measured.costs.speed(4) == 1.0


def test_steps_in_which_a_frequency_changed_count_for_nothing() -> None:
    world = uneven()
    frequencies, guard = world.frequencies, world.guard
    assert guard is not None and [frequencies.scale(3, step) for step in (1, 9)] == [1.0, 1.0]
    guard.quiet = True
    frequencies.hint(world.placement, world.protocol.running, costs_of([0.03] * 6), 10, {})
    assert [frequencies.scale(3, step) for step in (10, 11, 99)] == [1.0, None, None]
    assert frequencies.scale(0, 11) == 1.0  # it stays as it is
    guard.quiet = False
    world.do(frequencies.committed(11))
    assert [frequencies.scale(3, step) for step in (10, 11, 13, 14)] == [1.0, None, None, 0.67]
    frequencies.begun(world.placement, 12, {})  # before the last change is over
    world.do(frequencies.committed(13))
    assert [frequencies.scale(3, step) for step in (10, 11, 15, 16)] == [1.0, None, None, 1.0]


def test_what_the_device_has_counts_not_what_was_asked_for() -> None:
    world = uneven(MadeUpGuard(steps=(0.9, 1.0)))
    world.train(40)
    assert world.events[0]["frequencies"][4] == 0.9 and world.frequencies.scale(4, 40) == 0.9
    assert world.measured.costs.speed(4) == 1.0


def test_a_guard_that_fails_ends_the_axis_and_not_the_run() -> None:
    world = uneven()
    assert world.guard is not None
    world.guard.error = "no permission"
    world.train(10)
    world.guard.set_to = {}
    world.train(30)
    (event,) = world.events
    assert event["refused"] == "no permission" and "goes on" in event["message"] and event["ranks"] == []
    assert world.guard.closed and not world.frequencies.active and len(world.guard.orders) == 1
    assert world.frequencies.scale(4, world.step) == 1.0 and world.measured.costs.speed(4) == 1.0


def test_without_a_guard_nothing_happens() -> None:
    world = World([5], None)
    world.train(20)
    world.frequencies.begun(world.placement, 3, {})
    world.frequencies.close()
    assert world.events == [] and not world.frequencies.active


def test_processors_of_a_worker_have_the_largest_frequency_of_their_workers() -> None:
    mine = sorted(os.sched_getaffinity(0))
    elsewhere = max(mine) + 1
    devices = {"policy0": DeviceRange(1, 2, 3, (mine[0],)), "policy1": DeviceRange(1, 2, 3, (elsewhere,))}
    guard = MadeUpGuard(devices)
    world = uneven(guard)
    pids = dict.fromkeys(range(5), os.getpid())
    costs = costs_of([0.03] * 6)
    world.frequencies.hint(world.placement, world.protocol.running, costs, 5, pids)
    assert guard.orders == [{"policy0": 1.0}]  # shared by all, and no policy of others
    world.do(world.frequencies.committed(6))
    assert world.events[-1]["frequencies"] == dict.fromkeys(range(5), 1.0)
    guard.orders.clear()
    world.frequencies.begun(world.placement, 7, {})
    world.frequencies.hint(world.placement, world.protocol.running, costs, 8, {})
    assert guard.orders == [{"policy0": 1.0, "policy1": 1.0}]  # unknown where they run: anywhere


def test_accelerators_go_to_workers_in_turn() -> None:
    guard = MadeUpGuard({name: DeviceRange(1, 2, 2) for name in "abc"})
    world = uneven(guard)
    world.frequencies.hint(world.placement, world.protocol.running, costs_of([0.03] * 6), 5, {})
    assert guard.orders == [{"a": 1.0, "b": 1.0, "c": 0.67}]  # the first two run a worker with three micro-batches each


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Assignment, CostModel]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    seconds = draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    costs = costs_of(seconds).with_speeds({rank: draw(SPEEDS) for rank in range(sum(sizes))})
    return assigned(sizes, draw(st.integers(1, 8)), costs), costs


@pytest.mark.parametrize("exact", [True, False], ids=["by worker", "by class"])
@given(pipelines(), st.floats(0.3, 1.0), st.floats(1.0, 1.4))
@settings(deadline=None, max_examples=60)
def test_one_frequency_for_each_worker_keeps_the_makespan(
    exact: bool, case: tuple[Assignment, CostModel], low: float, high: float
) -> None:
    assignment, costs = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebalance, "_EXACT_ACTIONS", 1000 if exact else 0)
        plan, wanted = worker_frequencies(assignment, costs, FrequencyRange(low, high))
    assert sorted(wanted) == sorted(rank for members in assignment.stages for rank in members)
    assert all(low - 1e-9 <= f <= high for f in wanted.values())
    graph = timed_graph(assignment, costs)
    of = np.array([wanted[graph.ranks[row]] for row in graph.rows])
    if exact:
        assert graph.makespan(graph.seconds / of) <= plan.makespan_s * (1 + 1e-9)
    normal = modelled_energy(assignment, costs, {}, plan.makespan_before_s)
    assert normal == pytest.approx(plan.energy_before)
    found = modelled_energy(assignment, costs, wanted, plan.makespan_s)
    assert plan.energy * (1 - 1e-9) <= found
    if high == 1.0:
        assert found <= normal * (1 + 1e-9)


@given(st.dictionaries(st.integers(0, 9), st.tuples(st.floats(0.1, 2), st.sets(st.sampled_from("abcd"))), min_size=1))
def test_a_shared_device_is_fast_enough_for_all(of: dict[int, tuple[float, set[str]]]) -> None:
    devices = {rank: tuple(sorted(names)) for rank, (_, names) in of.items()}
    found = shared({rank: f for rank, (f, _) in of.items()}, devices)
    assert set(found) == {name for names in devices.values() for name in names}
    assert found == {name: max(f for f, names in of.values() if name in names) for name in found}
