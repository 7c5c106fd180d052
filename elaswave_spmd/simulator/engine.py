"""The virtual-time engine with costs: it executes a step's actions and messages in virtual seconds.

A worker runs whatever is ready, as real workers do. With free wires, and without a reduction, times are those of
`pipeline.execute`. Beyond that the engine models messages that share a worker's wire, the reduction message by message,
votes, the publication of parameters and its overlap with the next step, split backwards, and steps that overlap by
stages.

Not modelled: the wire of the receiver, switches, and compute that is slowed down by links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.dvfs import Hint
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction
from elaswave_spmd.scheduling.placement import CONTIGUOUS
from elaswave_spmd.simulator.links import Clock, Link
from elaswave_spmd.simulator.sums import Sums
from elaswave_spmd.simulator.work import ReadyOrder, Span, Work


@dataclass(frozen=True)
class Wires:
    """A model of links, and of the time that a worker needs besides running layers.

    Args:
        shared: True if the messages of a worker share its wire. False if each has a wire for itself.
        action_s: the seconds that each action takes besides its layers.
        apply_s: the seconds between the votes and the next step.
    """

    shared: bool = True
    action_s: float = 0.0
    apply_s: float = 0.0


SHARED = Wires()

FREE = Wires(shared=False)
"""The model of `step_time.step_time`: messages never wait for each other."""


@dataclass(frozen=True)
class Run:
    """Some steps that were executed in virtual time.

    Args:
        seconds: the duration of each step, from one commit to the next.
        spans: each action with its worker and its times.
        link_s: rank -> the seconds for which its wire was in use.
    """

    seconds: tuple[float, ...]
    spans: tuple[Span, ...]
    link_s: Mapping[int, float]

    @property
    def step_s(self) -> float:
        """The seconds of the last step. If it is not the only one, the publication of the step before is part of it."""
        return self.seconds[-1]


def execute(
    work: Work,
    costs: CostModel,
    *,
    wires: Wires = SHARED,
    rule: MemoryRule | None = None,
    microbatch_order: str = CONTIGUOUS,
    steps: int = 1,
    by_stage: bool = False,
    hints: Sequence[Hint] = (),
    change_s: float = 0.0,
) -> Run:
    """Executes steps in virtual time.

    Args:
        work: the work of each step.
        costs: the times and sizes of the layers, the speeds of workers, and the links.
        wires: the model of links.
        rule: the shardings and the number of mirrors, with which the reduction, its mirrors, one round of votes and the
            publication are executed. If it is None, a step is over when its last action is.
        microbatch_order: `Placement.microbatch_order`, which decides what a worker adds up before it sends it.
        steps: the number of steps.
        by_stage: True if a worker begins the next step when all workers of its stage have finished this one (staggered
            optimizer: Gandhi et al., 2024), and not when all workers have. Only without `rule`.
        hints: the frequencies of workers, and the order of their actions. Workers without a hint run at frequency 1.
        change_s: the seconds that a change of frequency takes.
    """
    assert steps >= 1 and not (by_stage and rule), (steps, by_stage, rule)
    engine = _Engine(work, costs, wires, rule, microbatch_order, steps, by_stage)
    for hint in hints:
        engine.keep_to(hint, change_s)
    return engine.run()


class _Worker:
    """The state of one worker: its step, the actions that it may begin, and whether it is busy."""

    def __init__(self, rank: int, stage: int, speed: float) -> None:
        self.rank = rank
        self.stage = stage
        self.speed = speed
        self.busy = False
        self.step = -1
        self.left = 0
        self.orders: dict[int, ReadyOrder] = {}
        self.begun = 0  # the number of actions of this step that were begun
        self.hint: Hint | None = None
        self.change_s = 0.0

    @property
    def planned(self) -> PipelineAction | None:
        """The action that its hint plans next. None if it runs whatever is ready."""
        return self.hint.order[self.begun] if self.hint is not None and self.hint.order else None

    def next_speed(self) -> tuple[float, float]:
        """(speed of the action that the worker begins now, seconds of a change of its frequency before the action)."""
        number, self.begun = self.begun, self.begun + 1
        if self.hint is None:
            return self.speed, 0.0
        pace = self.hint.pace
        changes = number > 0 and pace.at(number) != pace.at(number - 1)
        return self.speed * pace.at(number), self.change_s if changes else 0.0


class _Engine:
    """One run of the engine. Events are callbacks of the clock; after each time, workers that may begin are started."""

    def __init__(
        self,
        work: Work,
        costs: CostModel,
        wires: Wires,
        rule: MemoryRule | None,
        microbatch_order: str,
        steps: int,
        by_stage: bool,
    ) -> None:
        self._work = work
        self._costs = costs
        self._wires = wires
        self._steps = steps
        self._by_stage = by_stage
        self._clock = Clock()
        self._workers = {
            rank: _Worker(rank, s, costs.speed(rank)) for s, members in enumerate(work.stages) for rank in members
        }
        self._links = {rank: Link(self._clock, costs, shared=wires.shared) for rank in self._workers}
        self._sums = None
        if rule is not None:
            self._sums = Sums(work, costs, rule, microbatch_order, self._links, self._clock, self._part_finished)
        # Every step has the same work, so it is counted once.
        self._left_of = work.left()
        self._missing: dict[tuple[int, PipelineAction], int] = {}  # (step, action) -> results that it waits for
        self._parts_left: dict[tuple[int, int], int] = {}  # (step, group) -> parts that are not finished
        self._groups_left: dict[int, int] = {}  # step -> groups that are not finished
        self._available: dict[int, float] = {}  # layer -> time at which its stage has its parameters
        self._ends: list[float] = []  # the time at which each step committed
        self._spans: list[Span] = []
        self._touched: set[int] = set()  # the workers that may be able to begin an action now
        self._layer_s = {
            kind: [getattr(layer, name) for layer in costs.layers]
            for kind, name in ((FORWARD, "forward_s"), (BACKWARD, "backward_s"), (WEIGHTS, "weights_s"))
        }
        if work.weight_share:
            self._layer_s[WEIGHTS] = [work.weight_share * layer.backward_s for layer in costs.layers]
        self._stage_s = [costs.stage_s(*work.layer_cuts[s : s + 2]) for s in range(work.num_stages)]
        self._weights_s = [self._put_off_s(s) for s in range(work.num_stages)]

    def keep_to(self, hint: Hint, change_s: float) -> None:
        """Makes the workers of a hint keep to its frequencies and to its order of actions."""
        for rank in hint.ranks:
            self._workers[rank].hint, self._workers[rank].change_s = hint, change_s

    def run(self) -> Run:
        for worker in self._workers.values():
            self._begin(worker, 0)
        self._start_touched()
        while self._clock.advance():
            self._start_touched()
        assert len(self._ends) == self._steps, "the work of a step can be done"
        seconds = tuple(b - a for a, b in zip((0.0, *self._ends[:-1]), self._ends, strict=True))
        return Run(seconds, tuple(self._spans), {rank: link.busy_s for rank, link in self._links.items()})

    # ---- steps

    def _order(self, worker: _Worker, step: int) -> ReadyOrder:
        """The order of a worker's actions in a step; made on first use, with the actions that wait for nothing."""
        if step not in worker.orders:
            work = self._work
            stage = worker.stage
            put_off = work.put_off[stage] if work.put_off else math.inf
            last = WEIGHTS if work.weight_share else BACKWARD
            in_flight = work.in_flight(stage, worker.rank)
            order = ReadyOrder(work.limits[stage], work.turns, last, put_off, in_flight)
            worker.orders[step] = order
            for microbatch, rank in enumerate(work.owners[stage]):
                if rank == worker.rank:
                    for kind in work.kinds(stage):
                        action = PipelineAction(worker.stage, kind, microbatch)
                        if action not in work.done and not self._waits(step, action):
                            order.add_ready(action)
        return worker.orders[step]

    def _waits(self, step: int, action: PipelineAction) -> int:
        """The number of results that an action still waits for."""
        if (step, action) not in self._missing:
            needed = action.needs(self._work.num_stages)
            self._missing[step, action] = sum(other not in self._work.done for other in needed)
        return self._missing[step, action]

    def _begin(self, worker: _Worker, step: int) -> None:
        worker.step = step
        worker.left = self._left_of[worker.rank]
        worker.begun = 0
        # The order of a step may be made before the worker begins the step (`_result`), so orders are kept by step.
        # This one is dropped when the next step begins.
        worker.orders.pop(step - 1, None)
        self._order(worker, step)
        self._touched.add(worker.rank)
        if not worker.left:
            self._worker_finished(worker, step)

    def _worker_finished(self, worker: _Worker, step: int) -> None:
        self._part_finished(step, worker.stage if self._by_stage else 0)

    def _part_finished(self, step: int, group: int = 0) -> None:
        """Notes that one part of a step is finished: a worker's actions, or the reduction of all gradients."""
        key = step, group
        if key not in self._parts_left:
            # Each worker is a part, and the reduction is one more. With `by_stage` a group is a stage.
            whole = len(self._work.stages[group]) if self._by_stage else len(self._workers)
            self._parts_left[key] = whole + (self._sums is not None)
        self._parts_left[key] -= 1
        if self._parts_left[key]:
            return
        # Votes are one message from each worker to each other one. They take one latency; their bytes do not count.
        votes = self._costs.latency_s if self._sums is not None and len(self._workers) > 1 else 0.0
        self._clock.at(self._clock.now + votes, self._group_finished, step, group)

    def _group_finished(self, step: int, group: int) -> None:
        groups = self._groups_left.get(step, self._work.num_stages if self._by_stage else 1) - 1
        self._groups_left[step] = groups
        if not groups:
            self._ends.append(self._clock.now)
        if step + 1 < self._steps:
            self._clock.at(self._clock.now + self._wires.apply_s, self._next_step, step + 1, group)

    def _next_step(self, step: int, group: int) -> None:
        if self._sums is not None:
            self._available = self._sums.publish()
        for worker in self._workers.values():
            if not self._by_stage or worker.stage == group:
                self._begin(worker, step)

    # ---- actions

    def _start_touched(self) -> None:
        # In the order of ranks, so that a run is the same on every machine.
        for rank in sorted(self._touched):
            worker = self._workers[rank]
            if (
                not worker.busy
                and worker.left
                and (action := self._order(worker, worker.step).next_action(worker.planned)) is not None
            ):
                self._start(worker, action)
        self._touched.clear()

    def _start(self, worker: _Worker, action: PipelineAction) -> None:
        now, layers = self._clock.now, range(*self._work.layer_cuts[action.stage : action.stage + 2])
        speed, changing_s = worker.next_speed()
        now += changing_s
        if action.kind == FORWARD:
            stop = now
            # Parameters of the step before may not have arrived yet. Each layer starts when its own are there.
            if any(self._available.get(layer, 0.0) > now for layer in layers):
                for layer in layers:
                    stop = max(stop, self._available.get(layer, 0.0)) + self._layer_s[FORWARD][layer] / speed
            else:
                stop += self._stage_s[action.stage][0] / speed
        else:
            # A split backward: the gradients of inputs first, those of weights when nothing else is ready.
            late_s = self._weights_s[action.stage]
            seconds = late_s if action.kind == WEIGHTS else self._stage_s[action.stage][1] - late_s
            stop = now + seconds / speed
            makes_gradients = action.kind == WEIGHTS or not self._work.splits(action.stage)
            if makes_gradients and self._sums is not None:
                self._report_gradients(worker, action, now, speed)
        stop += self._wires.action_s
        worker.busy = True
        self._spans.append(Span(worker.rank, action, now, stop, worker.step))
        self._clock.at(stop, self._finish, worker, worker.step, action)

    def _put_off_s(self, stage: int) -> float:
        """The seconds of one micro-batch's weight gradients at speed 1; 0 if the stage does not put them off."""
        work = self._work
        if work.weight_share:
            return work.weight_share * self._stage_s[stage][1]
        if not work.splits(stage):
            return 0.0
        return sum(self._layer_s[WEIGHTS][layer] for layer in range(*work.layer_cuts[stage : stage + 2]))

    def _report_gradients(self, worker: _Worker, action: PipelineAction, now: float, speed: float) -> None:
        """Tells the reduction when the gradients of each layer will be there.

        Called when a whole backward begins, or the weight gradients that were put off.
        """
        assert self._sums is not None
        ends, time = [], now
        for layer in reversed(range(*self._work.layer_cuts[action.stage : action.stage + 2])):
            time += self._layer_s[action.kind][layer] / speed
            ends.append((layer, time))
        self._sums.gradients_begin(worker.step, worker.rank, action.stage, action.microbatch, ends)

    def _finish(self, worker: _Worker, step: int, action: PipelineAction) -> None:
        worker.busy = False
        worker.left -= 1
        self._touched.add(worker.rank)
        stage, microbatch = action.stage, action.microbatch
        if action.kind == FORWARD:
            self._result(step, PipelineAction(stage, BACKWARD, microbatch))
            self._send(worker, step, PipelineAction(stage + 1, FORWARD, microbatch), boundary=stage)
        elif action.kind == BACKWARD:
            if self._work.splits(stage):
                self._result(step, PipelineAction(stage, WEIGHTS, microbatch))
            self._send(worker, step, PipelineAction(stage - 1, BACKWARD, microbatch), boundary=stage - 1)
        if not worker.left:
            self._worker_finished(worker, step)

    def _send(self, worker: _Worker, step: int, to: PipelineAction, *, boundary: int) -> None:
        """Sends a micro-batch's tensor across a stage boundary, if there is an action `to` that needs it."""
        if 0 <= to.stage < self._work.num_stages and to not in self._work.done:
            num_bytes = self._costs.layers[self._work.layer_cuts[boundary + 1] - 1].boundary_bytes
            self._links[worker.rank].send(num_bytes, self._result, step, to, urgent=True)

    def _result(self, step: int, to: PipelineAction) -> None:
        """Notes that one of the results that an action waits for has arrived at its worker."""
        if to in self._work.done:
            return
        rank = self._work.owners[to.stage][to.microbatch]
        left = self._waits(step, to) - 1
        self._missing[step, to] = left
        if not left:
            # If the order does not exist yet, it is made now and finds the action ready. It must not be added twice.
            worker = self._workers[rank]
            if step in worker.orders:
                worker.orders[step].add_ready(to)
            else:
                self._order(worker, step)
            self._touched.add(rank)
