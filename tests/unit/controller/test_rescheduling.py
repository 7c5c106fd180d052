"""The rescheduler's decisions by measured times, with a made-up protocol: goals, drains and events, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from elaswave_spmd.conf.schema import ScheduleSettings
from elaswave_spmd.controller import rescheduler
from elaswave_spmd.controller.actions import Action, PlanChange, Record, WriteCosts
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.planning import Planned, PlanRequest
from elaswave_spmd.controller.rescheduler import MeasuredCosts, ReschedulePolicy, Rescheduler
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.recovery.controller_protocol import Goal
from elaswave_spmd.recovery.messages import Measured
from elaswave_spmd.scheduling import microbatch_assignment
from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.rebalance import PlanSettings, plan_change
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed, priced
from elaswave_spmd.scheduling.step_time import Assignment, step_time
from tests.unit.scheduling.planning_cases import costs_of, placed

MICROBATCHES, LAYERS = 12, 6


class World:
    """A run of 100 steps, of a second each. `speeds`: rank -> how fast it is; a layer takes 10 ms forward and 20 ms
    backward. What is measured counts at once, unless `lasting` is given.
    """

    def __init__(
        self, sizes: Sequence[int], *, drain_below: float = 0.0, min_workers: int = 1, **settings: Any
    ) -> None:
        self.placement: Placement = placed(sizes, MICROBATCHES, LAYERS)
        self.protocol = SimpleNamespace(
            placement=self.placement,
            layout=None,
            split=None,
            settled=True,
            rebalance=self.rebalance,
            drain=self.drain,
            running=Assignment.of(self.placement),
        )
        self.asked: list[PlanRequest] = []
        self.answered: list[Planned] = []
        self.answers = True
        self.goals: list[Goal] = []
        self.drained: list[int] = []
        self.events: list[tuple[str, list[int]]] = []
        self.speeds: dict[int, float] = {}
        self.costs = [1.0] * LAYERS
        self.step = 0
        self.paused_s = 0.0  # in which no step was run
        self.saved = ""
        schedule = ScheduleSettings(**{"lasting": 0.0, **settings})
        policy = ReschedulePolicy(schedule, 100, drain_below=drain_below, min_workers=min_workers)
        self.measured = MeasuredCosts(schedule, costs_of([0.001] * LAYERS), follows_speeds=schedule.microbatches)
        self.rescheduler = Rescheduler(
            policy, self.measured, cast(Any, self.protocol), Frequencies(schedule), Roster(self.placement.mesh.members)
        )

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case PlanChange(request):
                    self.asked.append(request)
                    if self.answers:
                        self.answered.append(request.answer())
                        self.do(self.rescheduler.planned(self.answered[-1]))
                case Record(kind, fields):
                    self.events.append((kind, cast(list[int], fields["ranks"])))
                case WriteCosts(text):
                    self.saved = text

    def rebalance(self, goal: Goal) -> list[Any]:
        self.goals.append(goal)
        return []

    def apply(self, goal: Goal) -> None:
        """The micro-batches of the goal are those of the next mesh epoch."""
        mesh = replace(self.placement.mesh, epoch=self.placement.mesh.epoch + 1)
        self.placement = replace(self.placement, mesh=mesh, microbatch_counts=goal.microbatch_counts)
        self.protocol.placement, self.protocol.running = self.placement, Assignment.of(self.placement)

    def drain(self, rank: int, reason: str) -> list[Any]:
        self.drained.append(rank)
        return []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.do(self.rescheduler.committed(self.step, self.step + self.paused_s))
            for rank in self.placement.mesh.members:
                microbatches = len(self.placement.microbatches_of(rank))
                rows = []
                for layer in self.placement.layers_of_stage(self.placement.mesh.stage_of(rank)):
                    seconds = microbatches * self.costs[layer] / self.speeds.get(rank, 1.0)
                    rows.append((layer, 0.01 * seconds, 0.02 * seconds, microbatches, microbatches))
                # A quarter of the backward is put off, of micro-batches that are in two parts.
                weights = tuple((layer, backward_s / 4, number) for layer, _, backward_s, _, number in rows)
                late = weights if self.protocol.split is not None and rank not in self.placement.mesh.stages[0] else ()
                self.rescheduler.report(Measured(rank, self.step, tuple(rows), weights=late))


def test_equal_workers_and_layers_stay_as_they_are() -> None:
    world = World([2, 2])
    world.train(40)
    assert (world.goals, world.events) == ([], [])
    layer = world.measured.costs.layers[3]
    assert (layer.forward_s, layer.backward_s) == (pytest.approx(0.01), pytest.approx(0.02))
    assert '"speeds"' in world.saved


def test_a_slow_worker_gets_fewer_microbatches_and_is_told_of_once() -> None:
    world = World([3])
    world.train(10)
    world.speeds[1] = 0.5
    world.train(30)
    counts = world.goals[0].microbatch_counts[0]
    assert (
        sum(counts) == MICROBATCHES
        and counts[1] < counts[0]
        and "micro-batches assigned by speed" in world.goals[0].why
    )
    assert world.goals[0].layer_cuts == (0, LAYERS)
    assert world.events == [("slow", [1])]
    world.speeds.clear()
    world.train(20)
    assert world.events == [("slow", [1]), ("recover", [1])]


def test_a_worker_that_is_slow_for_a_while_now_and_then_is_neither_shown_nor_acted_upon() -> None:
    world = World([3], lasting=30.0)
    for turn in range(12):
        world.speeds = {turn % 3: 0.02}
        world.train(15)  # long enough for the medians, and for three decisions in a row
    assert (world.goals, world.events) == ([], [])


def parked() -> World:
    """Worker 1 of four has no micro-batch, as it was slow."""
    world = World([4])
    world.speeds = {1: 0.1}
    world.train(30)
    assert world.goals[0].microbatch_counts == ((4, 0, 4, 4),)
    world.apply(world.goals[0])
    world.goals.clear()
    return world


def test_a_worker_that_was_parked_for_being_slow_is_tried_again_after_a_thousand_steps() -> None:
    """It had measured nothing any more, and so counted as slow for the rest of the run."""
    world = parked()
    world.speeds.clear()
    world.train(950)
    assert world.goals == [] and world.events == [("slow", [1])]
    world.train(300)
    assert world.goals[0].microbatch_counts == ((3, 3, 3, 3),) and world.events == [("slow", [1]), ("recover", [1])]
    world.apply(world.goals.pop())
    assert list(world.measured.tried) == [1]
    world.train(1020)
    assert not world.measured.tried, "from now on it is a worker like all others"


def test_trials_of_a_worker_that_stays_slow_are_short_and_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescheduler, "_TRIED_AFTER", 50)
    world, at = parked(), list[int]()
    for _ in range(1200):
        world.train(1)
        if world.goals:
            at.append(world.step)
            world.apply(world.goals.pop())
    trials = list(zip(at[::2], at[1::2], strict=False))
    assert len(trials) == 4 and all(end - begun <= 25 for begun, end in trials)
    waits = [begun - end for (_, end), (begun, _) in pairwise(trials)]
    assert all(2 * one - 30 <= two <= 2 * one + 30 for one, two in pairwise(waits))
    assert world.events == [("slow", [1])] + [("recover", [1]), ("slow", [1])] * 4


@pytest.mark.parametrize("before", [58, 59, 60, 61, 62])
def test_a_few_slow_steps_after_a_pause_are_neither_shown_nor_acted_upon(before: int) -> None:
    """The pause was taken for time that was measured, so that these steps alone decided."""
    world = World([3], lasting=30.0, drain_below=0.5)
    world.train(before)
    world.paused_s = 40.0
    world.speeds = {1: 0.3}
    world.train(3)
    world.speeds.clear()
    world.train(60)
    assert (world.goals, world.events, world.drained) == ([], [], [])
    world.speeds = {1: 0.3}
    world.train(60)
    assert ("slow", [1]) in world.events and world.drained, "what lasts is acted upon"


def test_slowness_that_lasts_is_shown_and_acted_upon() -> None:
    world = World([3], lasting=30.0)
    world.train(20)
    world.speeds[1] = 0.5
    world.train(25)
    assert (world.goals, world.events) == ([], [])
    world.train(35)
    assert world.events == [("slow", [1])] and world.goals[0].microbatch_counts[0][1] < MICROBATCHES // 3
    assert world.measured.assign(world.placement, ((0, 1),), 12) == ((8, 4),)


def test_after_a_loss_microbatches_are_assigned_by_what_lasts() -> None:
    world = World([3], lasting=30.0)
    world.train(60)
    world.speeds[1] = 0.1
    world.train(20)
    assert world.measured.costs.speed(1) < 0.2
    assert world.measured.assign(world.placement, ((0, 1),), 12) == ((6, 6),)


def test_a_plan_gives_no_worker_more_than_twice_the_even_share_of_state() -> None:
    def cuts(**settings: Any) -> list[tuple[int, ...]]:
        world = World([1, 1, 1], microbatches=False, patience=1, **settings)
        base = world.measured._base
        sized = tuple(replace(layer, state_bytes=1000 * (i >= 3)) for i, layer in enumerate(base.layers))
        world.measured._base = replace(base, layers=sized)
        world.train(12)
        world.speeds = {2: 20.0}
        world.train(40)
        return [goal.layer_cuts for goal in world.goals[:1]]

    assert cuts(memory_limit=1e9) == [(0, 1, 2, 6)], "three of three layers with state for the fastest"
    assert cuts() == [], "with two of them, twice the even share, no other cut is faster"


def test_one_odd_step_changes_nothing() -> None:
    world = World([3])
    world.train(12)
    world.speeds[2] = 0.1
    world.train(1)
    world.speeds.clear()
    world.train(30)
    assert (world.goals, world.events) == ([], [])


def test_layers_follow_their_costs() -> None:
    world = World([1, 1], microbatches=False)
    world.costs[5] = 4.0
    world.train(40)
    assert world.goals[0].layer_cuts[1] > LAYERS // 2 and "layers by cost" in world.goals[0].why


def test_where_microbatches_do_not_follow_speeds_layers_move_without_them() -> None:
    """The plan that moved layers had micro-batches by speed, too."""
    world = World([2, 2], microbatches=False)
    world.costs[5], world.speeds[3] = 4.0, 0.5
    world.train(40)
    goal = world.goals[0]
    assert goal.layer_cuts[1] > LAYERS // 2 and goal.microbatch_counts == world.placement.microbatch_counts


def test_what_is_switched_off_does_not_happen() -> None:
    world = World([2, 1], microbatches=False, layers=False)
    world.speeds[0], world.costs[5] = 0.3, 5.0
    world.train(40)
    assert world.goals == [] and world.measured.assign(world.placement, ((0, 1), (2,)), 12) == ((6, 6), (12,))


def test_noise_drives_nothing_to_and_fro() -> None:
    world = World([3])
    for turn in range(40):
        world.speeds = {turn % 3: 0.5}
        world.train(12)
    assert 1 <= len(world.goals) <= 6


def test_nothing_is_asked_while_the_mesh_changes() -> None:
    world = World([3])
    world.speeds[1], world.protocol.settled = 0.5, False
    world.train(40)
    assert world.goals == []


def test_who_stays_too_slow_is_let_go() -> None:
    world = World([3], drain_below=0.4)
    world.train(10)
    world.speeds[2] = 0.3
    world.train(7)
    assert world.drained == []
    world.train(20)
    assert world.drained[0] == 2 and set(world.drained) == {2}


@pytest.mark.parametrize("sizes", [[1], [3]])
def test_nobody_is_let_go_that_the_run_needs(sizes: list[int]) -> None:
    world = World(sizes, drain_below=0.9, min_workers=sum(sizes))
    world.speeds[0] = 0.1
    world.train(60)
    assert world.drained == []


def test_microbatches_are_dealt_by_speed_after_a_change_of_members() -> None:
    world = World([4])
    world.speeds[3] = 0.5
    world.train(12)
    assert world.measured.assign(world.placement, ((0, 1, 3),), 10) == ((4, 4, 2),)


@pytest.mark.parametrize("gain", [0.5, 0.9])
def test_a_gain_below_the_least_is_none(gain: float) -> None:
    world = World([4], min_gain=gain)
    world.speeds[3] = 0.7
    world.train(40)
    assert world.goals == []


def test_a_memory_limit_that_nothing_fits_in_is_told_once_and_ends_nothing() -> None:
    world = World([2, 1], memory_limit=1.0)
    base = replace(world.measured._base.layers[0], state_bytes=1000)
    world.measured._base = replace(world.measured._base, layers=(base,) * LAYERS)
    world.train(30)
    assert [kind for kind, _ in world.events] == ["plan"] and not world.goals


def heavy_end(world: World) -> World:
    """The last three layers take twice as many bytes as the first three."""
    base = world.measured._base
    sized = tuple(replace(layer, value_bytes=100 if i < 3 else 200) for i, layer in enumerate(base.layers))
    world.measured._base = replace(base, layers=sized)
    return world


@pytest.mark.parametrize("microbatches", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["long steps", "short steps"])
def test_layers_that_do_not_fit_where_they_are_are_moved_whatever_that_gains(microbatches: bool, scale: float) -> None:
    world = heavy_end(World([2, 2], memory_limit=550.0, microbatches=microbatches))
    world.costs = [scale] * LAYERS
    world.train(30)
    goal = world.goals[0]
    assert goal.layer_cuts == (0, 4, 6) and "layers to where they fit in memory" in goal.why
    assert world.answered[0].decision is not None and world.events == []
    assert world.answered[0].decision.now.time.seconds > world.answered[0].decision.before.seconds


@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["long steps", "short steps"])
@pytest.mark.parametrize("limit", [200.0, 300.0])
def test_microbatches_that_do_not_fit_where_they_are_are_moved_whatever_that_costs(limit: float, scale: float) -> None:
    """A worker with 8 micro-batches holds three sums of gradients at once, one with 4 of them two."""
    world = World([3], memory_limit=limit, layers=False)
    base = world.measured._base
    sized = tuple(replace(layer, gradient_bytes=0 if i else 100) for i, layer in enumerate(base.layers))
    world.measured._base = replace(base, layers=sized)
    world.placement = world.protocol.placement = replace(world.placement, microbatch_counts=((8, 2, 2),))
    world.protocol.running = Assignment.of(world.placement)
    world.costs = [scale] * LAYERS
    world.speeds = {1: 0.25, 2: 0.25}  # that is the fastest
    world.train(30)
    assert "plan" not in [kind for kind, _ in world.events]
    if limit == 300.0:
        assert world.goals == []
        return
    goal = world.goals[0]
    assert goal.microbatch_counts == ((4, 4, 4),) and "micro-batches to where they fit in memory" in goal.why


@pytest.mark.parametrize(("others", "least", "enough"), [(1, 200.0, 300.0), (31, 300.0, 500.0)])
def test_a_change_of_members_leaves_microbatches_where_they_fit(others: int, least: float, enough: float) -> None:
    """A loss in one stage had undone in another what was planned for its memory, also on a large mesh."""

    def assigned(memory_limit: float) -> tuple[int, ...]:
        world = World([3, others + 1], memory_limit=memory_limit, layers=False)
        base = world.measured._base
        sized = tuple(replace(layer, gradient_bytes=0 if i else 100) for i, layer in enumerate(base.layers))
        world.measured._base = replace(base, layers=sized)
        world.speeds = {1: 0.25, 2: 0.25}
        world.train(12)
        left = ((0, 1, 2), tuple(range(3, 3 + others)))
        return world.measured.assign(world.placement, left, MICROBATCHES)[0]

    assert (assigned(least), assigned(enough), assigned(1.0)) == ((4, 4, 4), (8, 2, 2), (8, 2, 2))


def test_layers_that_may_not_move_stay_and_it_is_told_once_that_they_do_not_fit() -> None:
    world = heavy_end(World([2, 2], memory_limit=550.0, layers=False))
    world.train(30)
    assert world.goals == [] and world.events == [("plan", [])]
    world.speeds = {1: 0.3}
    world.train(30)
    assert world.goals[0].layer_cuts == (0, 3, 6) and "micro-batches assigned by speed" in world.goals[0].why
    assert world.events == [("plan", []), ("slow", [1])]
    roomy = heavy_end(World([2, 2], memory_limit=600.0, layers=False))
    roomy.train(30)
    assert roomy.goals == [] and roomy.events == []


def test_other_groupings_are_looked_at_once_while_nothing_changes() -> None:
    world = World([2, 2], stages=True, min_gain=0.9)
    world.train(40)
    assert [request.settings.regroups for request in world.asked] == [True]
    world.speeds = {1: 0.5}
    world.train(40)
    assert 1 < len(world.asked) < 5


def test_one_plan_is_made_at_a_time_and_training_goes_on_meanwhile() -> None:
    world = World([3])
    world.speeds[1], world.answers = 0.5, False
    world.train(40)
    assert len(world.asked) == 1 and not world.goals
    world.do(world.rescheduler.planned(world.asked[0].answer()))
    world.answers = True
    world.train(20)
    assert world.goals and world.goals[0].microbatch_counts[0][1] < world.goals[0].microbatch_counts[0][0]


@pytest.mark.parametrize("change", ["epoch", "running", "unsettled"])
def test_a_plan_that_comes_when_the_mesh_has_changed_is_dropped_and_made_anew(change: str) -> None:
    world = World([3])
    world.speeds[1], world.answers = 0.5, False
    world.train(40)
    settled = world.placement
    if change == "epoch":
        world.protocol.placement = replace(settled, mesh=replace(settled.mesh, epoch=settled.mesh.epoch + 1))
    elif change == "running":
        world.protocol.running = replace(world.protocol.running, in_flight=(7,))
    else:
        world.protocol.settled = False
    assert world.rescheduler.planned(world.asked[0].answer()) == [] and world.events == []
    world.protocol.settled = world.answers = True
    world.train(60)
    assert len(world.asked) > 1 and world.goals


@pytest.mark.parametrize("sizes", [[3, 4, 4], [2, 3], [30, 31]])
def test_microbatches_after_a_loss_are_dealt_to_the_end(sizes: list[int]) -> None:
    world = World(sizes)
    world.train(10)
    counts = world.measured.assign(world.placement, world.placement.mesh.stages, 64)
    assert [len(of_stage) for of_stage in counts] == sizes and all(sum(of_stage) == 64 for of_stage in counts)
    assert all(max(of_stage) - min(of_stage) <= max(1, 64 // len(of_stage)) for of_stage in counts)


@pytest.mark.parametrize(("sizes", "made"), [([16, 15], "several"), ([17, 16], "one")])
def test_on_a_large_mesh_no_assignment_is_made_that_nobody_looks_at(sizes: list[int], made: str) -> None:
    """Each takes up to seconds there, and all members wait."""
    world = World(sizes)
    world.speeds[1] = 0.5
    world.train(10)
    with mock.patch.object(
        microbatch_assignment, "assign_microbatches", wraps=microbatch_assignment.assign_microbatches
    ) as assign:
        world.measured.assign(world.placement, world.placement.mesh.stages, 64)
    assert (assign.call_count == 1) == (made == "one")


def test_links_are_as_the_middle_worker_measured_its_own() -> None:
    world = World([2, 2])
    before = world.measured.costs
    for rank, bandwidth in enumerate((1e9, 9e9, 2e9, 3e9)):
        world.rescheduler.report(Measured(rank, 1, (), link=(1e-5 * (rank + 1), bandwidth)))
    costs = world.measured.costs
    assert (costs.latency_s, costs.bandwidth) == (pytest.approx(2.5e-5), pytest.approx(2.5e9))
    assert costs.layers == before.layers


def test_links_that_settings_name_are_not_measured_ones() -> None:
    world = World([2], bandwidth=5e6, latency=0.25)
    world.rescheduler.report(Measured(0, 1, (), link=(1e-5, 1e9)))
    assert (world.measured.costs.latency_s, world.measured.costs.bandwidth) == (0.25, 5e6)


def test_plans_are_judged_with_what_workers_put_off() -> None:
    """The share of weight gradients is measured where there are any, and saved for the next run."""
    world = World([2, 2])
    every = tuple(range(LAYERS))
    split = SplitBackward(every, (100,) * LAYERS, costs_of([1.0] * LAYERS), MemoryRule())
    world.protocol.split, world.protocol.running = split, executed(Assignment.of(world.placement), split)
    world.train(20)
    costs, decision = world.answered[-1].request.costs, world.answered[-1].decision
    assert decision is not None
    assert [layer.weight_share for layer in costs.layers] == [pytest.approx(0.25)] * LAYERS
    assert decision.now.assignment.put_off == (0, 1)
    whole = plan_change(world.placement, costs, 80)
    assert decision.before.seconds < whole.before.seconds and whole.now.assignment.put_off == ()
    assert SplitBackward.of_costs(CostModel.from_json(world.saved), MemoryRule()) is not None
    counts = world.measured.assign(world.placement, ((0, 1), (2,)), MICROBATCHES, split=world.protocol.split)
    assert counts == ((6, 6), (12,))


def test_limits_are_by_rule_until_costs_are_measured_and_then_those_of_plans() -> None:
    """Where a forward takes half as long as a message, one more micro-batch in flight fills the wait for gradients."""
    world = World([1, 1, 1, 1], latency=0.02)
    every, costs = tuple(range(LAYERS)), costs_of([1.0] * LAYERS, activation_bytes=10, value_bytes=1)
    split = SplitBackward(every, (10,) * LAYERS, costs, MemoryRule(), 1e6)
    by_rule = executed(Assignment.of(world.placement), split)
    assert by_rule.in_flight == () and world.measured.limited(world.placement, split) == by_rule
    world.protocol.split = split
    world.train(10)
    found = world.measured.limited(world.placement, split)
    assert max(found.in_flight) > max(by_rule.limits)
    known = priced(world.measured.costs, split)
    assert step_time(found, known).seconds < step_time(by_rule, known).seconds
    rule = MemoryRule(world.placement.shardings)
    assert plan_change(world.placement, known, 0, PlanSettings(split=split)).before == step_time(found, known, rule)


def test_limits_are_by_rule_as_long_as_nothing_is_known_to_last() -> None:
    """Until then costs are made up: with these, other limits than those by rule would take a fifth more."""
    world = World([1, 1, 1, 1], latency=0.02, lasting=10.0)
    every, costs = tuple(range(LAYERS)), costs_of([1.0] * LAYERS, activation_bytes=10, value_bytes=1)
    split = SplitBackward(every, (10,) * LAYERS, costs, MemoryRule(), 1e6)
    by_rule = executed(Assignment.of(world.placement), split)
    world.protocol.split, world.protocol.running = split, by_rule
    world.train(8)
    assert world.measured.is_measured and world.measured.limited(world.placement, split) == by_rule
    world.train(12)
    assert world.measured.limited(world.placement, split) != by_rule
    unreviewed = World([1, 1, 1, 1], latency=0.02, microbatches=False, layers=False)
    unreviewed.protocol.split, unreviewed.protocol.running = split, by_rule
    unreviewed.train(20)
    assert unreviewed.measured.is_measured and unreviewed.measured.limited(world.placement, split) == by_rule


def test_other_limits_are_a_change_that_has_to_gain_enough() -> None:
    world = World([1, 1, 1, 1], latency=0.02, min_gain=0.01)
    every, costs = tuple(range(LAYERS)), costs_of([1.0] * LAYERS, activation_bytes=10, value_bytes=1)
    split = SplitBackward(every, (10,) * LAYERS, costs, MemoryRule(), 1e6)
    world.protocol.split, world.protocol.running = split, executed(Assignment.of(world.placement), split)
    world.train(20)
    goal = world.goals[0]
    same = world.placement.mesh.stages, world.placement.layer_cuts, world.placement.microbatch_counts
    assert (goal.stages, goal.layer_cuts, goal.microbatch_counts) == same and "other limits in flight" in goal.why
    world.protocol.running = world.measured.limited(world.placement, split)  # as the protocol sends them
    world.goals.clear()
    world.train(60)
    assert not world.goals
