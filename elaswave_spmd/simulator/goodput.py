"""Goodput over weeks of failures, for each policy: its useful steps divided by those of a fleet that never fails.

The time of a step depends only on the number of workers that are missing in each stage, not on which ones, so that a
million devices take seconds to compute. A step takes the lower bound `step_time.bound`, times the factor by which an
executed step of few replicas exceeds its bound. Ours and reroute run backwards in two parts after a loss. No step is
faster than a step of the whole fleet with whole backwards.

Not modelled: memory, traffic, links that break by themselves, failures that come together (such as those of a rack),
slow workers, a scheduler's queue, and that detection and restart take longer on more devices. Leaving these out favours
all policies, and most of all those that stop all workers. Also not modelled, in favour of ours: the steps until layers
have moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.partition import StageWorkers, partition
from elaswave_spmd.scheduling.pipeline import in_flight_limits, weight_limits
from elaswave_spmd.scheduling.step_time import bound, reduction_tail_s, stage_seconds
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.simulator.failures import Fleet, Outage

_RULE = MemoryRule(Shardings().with_zero(1))
"""The sharding, which decides what the reduction of gradients sends. State is sharded, as in `shapes.healthy`."""

Missing = tuple[int, ...]
"""The number of missing workers of each stage."""


@dataclass(frozen=True)
class Stalls:
    """The seconds without training. They are assumed, not computed, and the same for all policies that can go on.

    Args:
        regroup_s: the stall after a loss: detection, agreement and new groups.
        join_s: the stall when a worker joins.
        restart_s: the duration of a restart of the whole job.
        checkpoint_s: the duration of writing one checkpoint.
        recomputed_share: the fraction of a step that is computed again after a loss, if the rest of the step is kept.
    """

    regroup_s: float = 10.0
    join_s: float = 2.0
    restart_s: float = 600.0
    checkpoint_s: float = 5.0
    recomputed_share: float = 0.25


class Scale:
    """The duration of a step of a fleet, as a function of the number of workers that are missing in each stage."""

    def __init__(self, fleet: Fleet, costs: CostModel) -> None:
        self.fleet = fleet
        self._costs = costs
        self._num_microbatches = fleet.replicas * fleet.microbatches
        # (the most micro-batches of a worker of each stage, highest frequency) -> seconds of a step.
        self._known: dict[tuple[Missing, float], float] = {}
        self._cuts: dict[tuple[int, ...], tuple[int, ...]] = {}

    @cached_property
    def healthy_cuts(self) -> tuple[int, ...]:
        """The layer cuts when no worker is missing."""
        return self._partition((self.fleet.microbatches,) * self.fleet.stages)

    @cached_property
    def healthy_s(self) -> float:
        """The seconds of a step when no worker is missing, with whole backwards."""
        counts = self._counts((0,) * self.fleet.stages)
        assert counts is not None
        limits = in_flight_limits([self.fleet.replicas] * self.fleet.stages)
        return self._bound(self.healthy_cuts, counts, limits, 1.0, splits=False)

    def _partition(self, most: tuple[int, ...]) -> tuple[int, ...]:
        if most not in self._cuts:
            self._cuts[most] = partition(
                self._costs, [StageWorkers(1, float(microbatches), microbatches) for microbatches in most]
            ).cuts
        return self._cuts[most]

    def _counts(self, missing: Missing) -> list[np.ndarray] | None:
        """For each stage, the numbers of micro-batches that its workers have, largest first. None if a stage is empty.

        Micro-batches are shared evenly, so a stage has one such number, or two that differ by 1.
        """
        found = []
        for out in missing:
            left = self.fleet.replicas - out
            if left < 1:
                return None
            few, more = divmod(self._num_microbatches, left)
            found.append(np.array(([few + 1] if more else []) + [few]))
        return found

    def elastic_s(self, missing: Missing, highest: float = 1.0) -> float:
        """The seconds of a step whose micro-batches are assigned to the workers that are left; inf if a stage is empty.

        Layers stay where they were, or are cut for this loss, whichever is faster.

        Args:
            missing: the number of missing workers of each stage.
            highest: the relative frequency of workers with more micro-batches than before. A step does not become
                faster than with no worker missing.
        """
        counts = self._counts(missing)
        if counts is None:
            return math.inf
        key = tuple(int(of[0]) for of in counts), highest  # a stage is as slow as its busiest class
        if key not in self._known:
            limits = in_flight_limits([self.fleet.replicas - out for out in missing])
            # The cuts for this loss, and those of the whole fleet.
            every = {self._partition(key[0]), self._partition((self.fleet.microbatches,) * self.fleet.stages)}
            seconds = min(self._bound(cuts, counts, limits, highest) for cuts in every)
            self._known[key] = max(seconds, self.healthy_s)
        return self._known[key]

    def _bound(
        self,
        cuts: Sequence[int],
        counts: Sequence[np.ndarray],
        limits: Sequence[int],
        highest: float,
        *,
        splits: bool = True,
    ) -> float:
        forward, backward, delays = stage_seconds(cuts, self._costs)
        weights = np.diff(self._costs.prefix("weights_s")[np.array(cuts)])
        speeds = [np.where(of > self.fleet.microbatches, highest, 1.0) for of in counts]
        forward_s = [f / v for f, v in zip(forward, speeds, strict=True)]
        backward_s = [b / v for b, v in zip(backward, speeds, strict=True)]
        sizes = [self.fleet.replicas] * self.fleet.stages
        if not (splits and weights.any()):
            tail_s = reduction_tail_s(cuts, sizes, (), self._costs, _RULE)
            return bound(forward_s, backward_s, counts, delays, limits) + tail_s
        put_off = [most if late else 0 for most, late in zip(weight_limits(limits), weights, strict=True)]
        weights_s = [late * (most > 0) / v for late, most, v in zip(weights, put_off, speeds, strict=True)]
        tail_s = reduction_tail_s(cuts, sizes, put_off, self._costs, _RULE)
        return bound(forward_s, backward_s, counts, delays, limits, weights_s, put_off) + tail_s

    def rerouted_s(self, missing: Missing) -> float:
        """The seconds of a step with rerouted micro-batches, without moving layers; inf if a stage is empty.

        Work that is put off fills the bubbles of this step and the next, so only the work of the busiest stage counts.
        """
        counts = self._counts(missing)
        if counts is None:
            return math.inf
        forward, backward, _ = stage_seconds(self.healthy_cuts, self._costs)
        busiest = max(float((f + b) * of[0]) for f, b, of in zip(forward, backward, counts, strict=True))
        return max(self.healthy_s, busiest)


class Survivor(Protocol):
    """A policy over weeks of failures."""

    @property
    def name(self) -> str:
        """A short name, for tables."""
        ...

    def goodput(self, scale: Scale, events: Sequence[Outage], seconds: float, stalls: Stalls) -> float:
        """The goodput: the number of useful steps divided by that of a fleet that never fails.

        Args:
            scale: the durations of steps.
            events: the outages, in order of time.
            seconds: the whole time.
            stalls: the assumed durations of stalls.
        """
        ...


@dataclass(frozen=True)
class GoesOn:
    """Ours, and reroute (ReCycle): after a short stall, the workers that are left go on, with a slower step.

    Modelled: the duration of a step with the missing workers of each stage, the stall, and the part of the step that is
    computed again. That is half a step for reroute, which keeps nothing of the interrupted step.

    Args:
        name: the name in tables.
        reroute: True for reroute: micro-batches are rerouted, layers stay, backwards are split and the optimizer is
            staggered.
        highest: the relative frequency that workers with more micro-batches than before may be set to (ours).
        over_bound: the factor by which executed steps with workers missing exceed their lower bound, divided by this
            factor of the whole fleet.
    """

    name: str = "ours"
    reroute: bool = False
    highest: float = 1.0
    over_bound: float = 1.0

    def goodput(self, scale: Scale, events: Sequence[Outage], seconds: float, stalls: Stalls) -> float:
        missing = [0] * scale.fleet.stages
        again_s = (0.5 if self.reroute else stalls.recomputed_share) * scale.healthy_s
        meter = _Meter()
        for time, worker, out in events:
            if time >= seconds:
                break
            missing[worker % scale.fleet.stages] += 1 if out else -1
            now = tuple(missing)
            step_s = scale.rerouted_s(now) if self.reroute else scale.elastic_s(now, self.highest)
            step_s *= self.over_bound if any(now) else 1.0
            meter.event(time, scale.healthy_s / step_s, stalls.regroup_s + again_s if out else stalls.join_s)
        return meter.until(seconds) / seconds


@dataclass(frozen=True)
class Drops:
    """TorchFT: the replica of a lost worker stops until its place is filled; the others throw the step away.

    Args:
        name: the name in tables.
        regroups: True if workers of incomplete replicas make up whole ones again, as with a scheduler that starts new
            replicas. False if each replica waits for the place of its own worker to be filled.
        again_s: the seconds from a loss until the workers are regrouped.
    """

    name: str = "drop replica"
    regroups: bool = False
    again_s: float = 300.0

    def goodput(self, scale: Scale, events: Sequence[Outage], seconds: float, stalls: Stalls) -> float:
        fleet, meter = scale.fleet, _Meter()
        holes: dict[int, int] = {}  # replica -> the number of its empty places
        empty = 0  # the number of all empty places
        stopped = 0  # the number of replicas that have lost a worker and are not regrouped yet
        todo = sorted([*events, *self._regroupings(events)], key=lambda event: event.time)
        for time, worker, out in todo:
            if time >= seconds:
                break
            replica, stall_s = worker // fleet.stages, 0.0
            if worker < 0:  # an event of `_regroupings`
                stopped, stall_s = max(0, stopped - 1), stalls.join_s
            elif out:
                empty, stopped = empty + 1, stopped + self.regroups
                if not holes.get(replica) or self.regroups:
                    stall_s = stalls.regroup_s + scale.healthy_s / 2
                holes[replica] = holes.get(replica, 0) + 1
            else:
                empty, holes[replica] = empty - 1, holes[replica] - 1
                if not holes[replica]:
                    del holes[replica]
                    stall_s = stalls.join_s
            # After regrouping, the empty places are in as few replicas as possible. Replicas that have stopped and are
            # not regrouped yet count in addition.
            packed = -(-max(0, empty - stopped) // fleet.stages)
            gone = packed + stopped if self.regroups else len(holes)
            meter.event(time, max(0, fleet.replicas - gone) / fleet.replicas, stall_s)
        return meter.until(seconds) / seconds

    def _regroupings(self, events: Sequence[Outage]) -> list[Outage]:
        """Events at which workers are regrouped after a loss, with -1 in place of a worker."""
        return [Outage(e.time + self.again_s, -1, False) for e in events if e.out] if self.regroups else []


@dataclass(frozen=True)
class Restarts:
    """Every loss stops the whole job, which restarts from its checkpoint on as many whole replicas as possible.

    The interval between checkpoints is Young's, sqrt(2 x checkpoint x time between failures), and at least 60 s.
    """

    name: str = "restart"

    def goodput(self, scale: Scale, events: Sequence[Outage], seconds: float, stalls: Stalls) -> float:
        fleet, events = scale.fleet, [event for event in events if event.time < seconds]
        losses = sum(event.out for event in events)
        # Young's interval, at which checkpoints cost as much as the work that is lost.
        every = max(60.0, math.sqrt(2 * stalls.checkpoint_s * seconds / max(1, losses)))
        useful, up_at, rate, empty = 0.0, 0.0, 1.0, 0
        for time, _, out in events:
            empty += 1 if out else -1
            if out:
                # Only work up to the last checkpoint counts.
                useful += max(0.0, time - up_at) // (every + stalls.checkpoint_s) * every * rate
                up_at = time + stalls.restart_s
            if time < up_at:  # a worker that comes later is used from the next restart on
                rate = max(0, fleet.replicas - -(-empty // fleet.stages)) / fleet.replicas
        last = max(0.0, seconds - up_at) * every / (every + stalls.checkpoint_s)
        return (useful + last * rate) / seconds


class _Meter:
    """The integral of the rate over time, without the time of stalls."""

    def __init__(self) -> None:
        self._useful = 0.0
        self._at = 0.0
        self._rate = 1.0
        self._stands_until = 0.0

    def until(self, time: float) -> float:
        """The work that was done until a time, in seconds of a whole fleet. Times must not decrease between calls."""
        self._useful += max(0.0, time - max(self._at, self._stands_until)) * self._rate
        self._at = time
        return self._useful

    def event(self, time: float, rate: float, stall_s: float) -> None:
        """Sets the rate from this time on, and begins a stall. A stall in progress is not shortened."""
        self.until(time)
        self._rate = rate
        self._stands_until = max(self._stands_until, time + stall_s)
