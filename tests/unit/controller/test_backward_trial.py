"""Whether weight gradients are put off: the trial's decision by made-up times, and what workers are told meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller.actions import Action, Record
from elaswave_spmd.controller.backward_trial import BLOCK, ORDER, SPLIT_BACKWARD, BackwardChoice, BackwardTrial
from elaswave_spmd.controller.rescheduler import ReschedulePolicy
from elaswave_spmd.recovery.actions import Broadcast
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, EvenAssigner, ProtocolSpec
from elaswave_spmd.recovery.messages import Limits
from elaswave_spmd.scheduling.cost_model import MemoryRule
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import Assignment
from tests.unit.scheduling.planning_cases import costs_of, placed

LAYERS, MICROBATCHES = 6, 12
ENOUGH = 2 * len(ORDER) * BLOCK
"""Steps in which a trial comes to its end."""


class World:
    """A run whose steps take `put_off_s` or `whole_s`, by the limits that its workers were told last."""

    def __init__(
        self,
        sizes: Sequence[int] = (1, 1, 1),
        *,
        tries: bool = True,
        interrupted_every: Sequence[int] = (),
        memory_limit: float = float("inf"),
    ) -> None:
        every, costs = tuple(range(LAYERS)), costs_of([1.0] * LAYERS, activation_bytes=10)
        self.split = SplitBackward(every, (10,) * LAYERS, costs, MemoryRule(), memory_limit)
        spec = ProtocolSpec(None, 10_000)  # type: ignore[arg-type]
        self.protocol = ControllerProtocol(placed(sizes, MICROBATCHES, LAYERS), spec, split=self.split)
        self.protocol.running = executed(Assignment.of(self.protocol.placement), self.split)
        self.choice = BackwardChoice(self.protocol, EvenAssigner(), tries=tries, interrupted_every=interrupted_every)
        self.put_off_s, self.whole_s = 1.0, 1.0
        self.noise: Callable[[int], float] = lambda step: 1.0
        self.step, self.now = 0, 0.0
        self.put_off = self.protocol.running.put_off
        self.orders: list[Limits] = []
        self.found: list[dict[str, Any]] = []

    def train(self, steps: int = ENOUGH) -> None:
        for _ in range(steps):
            self.step += 1
            self.now += (self.put_off_s if any(self.put_off) else self.whole_s) * self.noise(self.step)
            self.do(self.choice.committed(self.step, self.now))

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Broadcast(_, Limits() as message):
                    self.orders.append(message)
                    self.put_off = message.put_off
                case Record(kind, fields):
                    assert kind == SPLIT_BACKWARD
                    self.found.append(dict(fields))

    def new_mesh(self, sizes: Sequence[int]) -> None:
        self.protocol.placement = placed(sizes, MICROBATCHES, LAYERS)
        self.protocol.running = executed(Assignment.of(self.protocol.placement), self.protocol.split)
        self.put_off = self.protocol.running.put_off
        self.choice.begun()


@pytest.mark.parametrize(
    ("put_off_s", "kept"), [(0.95, "put off"), (0.985, "put off"), (0.995, "whole"), (1.05, "whole")]
)
def test_the_whole_backward_is_kept_where_putting_off_gains_too_little(put_off_s: float, kept: str) -> None:
    world = World()
    world.put_off_s = put_off_s
    world.train()
    (found,) = world.found
    assert found["kept"] == kept and found["times"] == pytest.approx(put_off_s)
    assert found["seconds_put_off"] == pytest.approx(put_off_s) and found["seconds_whole"] == pytest.approx(1.0)
    assert bool(any(world.put_off)) == (kept == "put off") == bool(world.protocol.running.put_off)
    assert world.protocol.split is not None and world.protocol.split.keeps_whole == (kept == "whole")
    orders = len(world.orders)
    world.train()
    assert len(world.orders) == orders and len(world.found) == 1, "once"


@pytest.mark.parametrize("put_off_s", [0.97, 1.03])
@pytest.mark.parametrize(
    "noise",
    [
        lambda step: 1 + 0.003 * step,
        lambda step: 1 - 0.003 * step,
        lambda step: (1 + 0.0003 * step) * (3.0 if 17 <= step < 25 else 1.0),
        lambda step: 0.4 if 42 <= step < 50 else 1.0,
        lambda step: 50.0 if step % 4 == 0 else 1.0,
    ],
    ids=["slower and slower", "faster and faster", "a slow block", "a fast while", "every fourth step"],
)
def test_neither_a_drift_nor_odd_steps_decide_it(put_off_s: float, noise: Callable[[int], float]) -> None:
    world = World()
    world.put_off_s, world.noise = put_off_s, noise
    world.train()
    (found,) = world.found
    assert found["kept"] == ("put off" if put_off_s < 1 else "whole")
    assert found["times"] == pytest.approx(put_off_s, abs=0.01)


def test_either_way_has_as_many_steps_and_comes_first_as_often() -> None:
    assert 2 * sum(ORDER) == len(ORDER) and not ORDER[0]
    pairs = list(zip(ORDER[::2], ORDER[1::2], strict=True))
    assert all(one != two for one, two in pairs) and 2 * sum(one for one, _ in pairs) == len(pairs)
    trial = BackwardTrial(left_out=0)
    changes = [trial.add(1.0) for _ in range(len(ORDER) * BLOCK)]
    assert not trial.is_complete, "steps after a change do not count"
    assert sum(changes) < sum(one != two for one, two in pairwise(ORDER)) + 1


def test_a_short_run_is_told_nothing() -> None:
    world = World()
    world.train(4 + BLOCK)
    assert world.orders == [] and world.found == [] and world.choice.is_trying


@pytest.mark.parametrize("how", ["one stage", "no split", "no room", "forced"])
def test_where_there_is_nothing_to_try_nobody_is_told_anything(how: str) -> None:
    world = World(
        (3,) if how == "one stage" else (1, 1, 1),
        tries=how != "forced",
        memory_limit=1.0 if how == "no room" else float("inf"),
    )
    if how == "no split":
        world.protocol.split = None
    world.train()
    assert world.orders == [] and world.found == [] and not world.choice.is_trying


def test_steps_in_which_something_else_takes_time_do_not_count() -> None:
    world = World(interrupted_every=(0, 5))
    world.put_off_s = 0.9
    world.noise = lambda step: 9.0 if (step - 1) % 5 == 0 else 1.0
    world.train()
    (found,) = world.found
    assert (found["seconds_put_off"], found["seconds_whole"]) == (pytest.approx(0.9), pytest.approx(1.0))
    always = World(interrupted_every=(1,))
    always.train(3 * ENOUGH)
    assert always.orders == [] and not always.choice.is_trying, "no step would count"


def test_a_mesh_that_is_not_settled_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(ControllerProtocol, "settled", False)
    world.train()
    assert world.orders == []


def test_a_new_mesh_is_tried_anew_beginning_with_what_was_found() -> None:
    world = World()
    world.put_off_s = 1.1
    world.train()
    world.new_mesh((1, 1, 1))
    assert not any(world.put_off), "the Reconfigure has whole backwards"
    world.train()
    assert len(world.found) == 1, "other micro-batches, layers or limits: what was found holds"
    world.put_off_s = 0.9
    world.new_mesh((1, 2))
    told = len(world.orders)
    world.train()
    assert [found["kept"] for found in world.found] == ["whole", "put off"]
    assert any(world.orders[told].put_off) and world.orders[told].split_layers == tuple(range(LAYERS))
    assert any(world.put_off) and world.orders[-1].put_off == world.protocol.running.put_off


def test_a_trial_that_is_cut_off_begins_anew_with_the_limits_of_the_epoch() -> None:
    world = World()
    world.put_off_s = 1.1
    world.train(30)
    assert world.orders and not world.found
    world.new_mesh((1, 1, 1))
    assert any(world.put_off)
    told = len(world.orders)
    world.train(4 + BLOCK)
    assert len(world.orders) == told
    world.train()
    assert [found["kept"] for found in world.found] == ["whole"]


def test_plans_and_limits_are_those_of_whole_backwards_where_these_are_kept() -> None:
    world = World((2, 1, 1))
    whole = replace(world.split, keeps_whole=True)
    assignment = Assignment.of(world.protocol.placement)
    assert executed(assignment, world.split).put_off and executed(assignment, whole).put_off == ()
    assert executed(assignment, whole) == executed(assignment, None)
    narrow = replace(whole, memory_limit=45.0)
    assert narrow.executed(assignment).in_flight, "the memory limit holds for whole backwards as well"


@pytest.mark.parametrize(
    ("fields", "tries"),
    [
        ({}, True),
        ({"schedule": {"split_backward": "always"}}, False),
        ({"schedule": {"split_backward": "never"}}, False),
        ({"runtime": {"compile": True}}, False),
        ({"runtime": {"device": "emulated"}}, True),
    ],
)
def test_it_is_tried_where_a_whole_backward_can_be_faster(fields: dict[str, Any], tries: bool) -> None:
    policy = ReschedulePolicy.from_settings(Settings.from_dict(fields), 10)
    assert policy.tries_backwards == tries
