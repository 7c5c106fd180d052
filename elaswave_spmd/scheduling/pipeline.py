"""The order of a step's actions: the rules by which workers choose, and the lists that they give in one simulated step.

The rule is that of 1F1B (Narayanan et al., 2019): a worker runs a backward as soon as one is ready, else a forward,
with a bounded number of micro-batches in flight (`in_flight_limits`); of several ready ones it takes the one whose turn
it is (`turns`). Workers follow it while they run (`worker.ready_order`). `schedule` follows it in modelled time, for
plans: the actions of each worker, in order, such as `1F4` (stage 1, forward, 4). `check` proves that lists can be run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.placement import Placement

FORWARD, BACKWARD = "F", "B"
_STEP = 1 << 24  # duration of a worker's step; whole numbers, so that two ends are equal or not without rounding
_BACKWARD = 2  # times as long as a forward
_MORE = 2  # micro-batches in flight beyond the estimate, where they come from several workers in turn


@dataclass(frozen=True)
class PipelineAction:
    """Forward or backward of one micro-batch through one stage."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def needs(self, num_stages: int) -> tuple[PipelineAction, ...]:
        """The actions whose results this one needs."""
        if self.kind == FORWARD:
            return (PipelineAction(self.stage - 1, FORWARD, self.microbatch),) if self.stage else ()
        own = PipelineAction(self.stage, FORWARD, self.microbatch)
        if self.stage == num_stages - 1:
            return (own,)
        return own, PipelineAction(self.stage + 1, BACKWARD, self.microbatch)


Schedule = Mapping[int, tuple[PipelineAction, ...]]


def in_flight_limits(
    stage_sizes: Sequence[int], microbatch_counts: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """The most micro-batches that a worker of each stage may have between forward and backward.

    They are enough to keep all later stages busy. If the workers at one position of all stages share their
    micro-batches with nobody, that is the bound of 1F1B: the number of stages from this one to the last. Else it is 1,
    plus the time that a micro-batch takes through the slowest workers of all later stages, measured in micro-batches of
    this stage's fastest worker, plus 2, because later workers get micro-batches from several workers in turn.

    Args:
        microbatch_counts: per stage, the number of micro-batches of each worker; None: evenly assigned.
    """
    if microbatch_counts is None:
        longest = shortest = list(stage_sizes)
        ragged = len(set(stage_sizes)) > 1
    else:
        occurring = [set(counts) for counts in microbatch_counts]
        longest = [_duration(min(some - {0})) for some in occurring]
        shortest = [_duration(max(some)) for some in occurring]
        ragged = len({tuple(counts) for counts in microbatch_counts}) > 1
    if not ragged:
        return tuple(range(len(stage_sizes), 0, -1))
    return tuple(1 + -(-sum(longest[s + 1 :]) // own) + _MORE for s, own in enumerate(shortest))


def _duration(microbatches: int) -> int:
    """The modelled duration of one micro-batch on a worker that has this many of them.

    Micro-batches are assigned by speed, so all workers are assumed to be busy equally long. The lists then follow from
    the counts of the placement alone, without measured times, and all workers compute the same lists.
    """
    return max(1, _STEP // max(1, microbatches))


def schedule(placement: Placement, *, limits: Sequence[int] | None = None) -> Schedule:
    """The actions of every worker in a step: rank -> list. They are the same in every step of the mesh epoch.

    Args:
        limits: per stage, the most micro-batches in flight; None: `in_flight_limits` of this mesh.
    """
    if not limits:
        limits = in_flight_limits([len(members) for members in placement.mesh.stages], placement.microbatch_counts)
    return _simulate(placement, placement.mesh.members, range(placement.num_microbatches), limits)


def turns(placement: Placement, microbatches: Iterable[int]) -> dict[int, float]:
    """The turn of each micro-batch: micro-batch -> part of the step, from 0 to 1.

    Micro-batches that take the same path, over the same workers of all stages, are spread evenly over the step. A
    worker that gets micro-batches from several workers then takes from each in turn, and one that sends to several
    serves each in turn, in proportion to their shares. So no worker waits until another one has been served completely.

    Args:
        microbatches: all of a step, or all that one worker has: no others take the same path as these.
    """
    ways: dict[tuple[int, ...], list[int]] = {}
    for microbatch in sorted(microbatches):
        way = tuple(placement.worker_of_microbatch(stage, microbatch) for stage in range(placement.num_stages))
        ways.setdefault(way, []).append(microbatch)
    return {microbatch: (2 * i + 1) / (2 * len(same)) for same in ways.values() for i, microbatch in enumerate(same)}


def _simulate(
    placement: Placement, ranks: Sequence[int], microbatches: Iterable[int], limits: Sequence[int]
) -> dict[int, tuple[PipelineAction, ...]]:
    """Simulates the step on these workers, which do these micro-batches on all stages; returns what each one did."""
    last_stage = placement.num_stages - 1
    ready: dict[int, tuple[list[tuple[float, int]], list[tuple[float, int]]]] = {rank: ([], []) for rank in ranks}
    in_flight = dict.fromkeys(ranks, 0)
    busy: set[int] = set()
    plan: dict[int, list[PipelineAction]] = {rank: [] for rank in ranks}
    ends: list[tuple[int, int, PipelineAction]] = []
    turn = turns(placement, microbatches)
    places = {rank: placement.mesh.coordinate(rank) for rank in ranks}
    duration = {rank: _duration(placement.microbatch_counts[stage][at]) for rank, (stage, at) in places.items()}

    def make_ready(action: PipelineAction) -> int:
        rank = placement.worker_of_microbatch(action.stage, action.microbatch)
        heapq.heappush(ready[rank][action.kind == BACKWARD], (turn[action.microbatch], action.microbatch))
        return rank

    def start(rank: int, now: int) -> None:
        stage, (forwards, backwards) = placement.mesh.stage_of(rank), ready[rank]
        if rank in busy:
            return
        # Backward first, as in 1F1B: it frees the activations of a micro-batch.
        if backwards:
            action, cost = PipelineAction(stage, BACKWARD, heapq.heappop(backwards)[1]), _BACKWARD * duration[rank]
        elif forwards and in_flight[rank] < limits[stage]:
            action, cost = PipelineAction(stage, FORWARD, heapq.heappop(forwards)[1]), duration[rank]
            in_flight[rank] += 1
        else:
            return
        busy.add(rank)
        plan[rank].append(action)
        heapq.heappush(ends, (now + cost, rank, action))

    def finish(rank: int, action: PipelineAction) -> int:
        """Returns the worker that may have an action to start now."""
        busy.discard(rank)
        if action.kind == FORWARD and action.stage < last_stage:
            return make_ready(PipelineAction(action.stage + 1, FORWARD, action.microbatch))
        if action.kind == FORWARD:
            return make_ready(PipelineAction(action.stage, BACKWARD, action.microbatch))
        in_flight[rank] -= 1
        return make_ready(PipelineAction(action.stage - 1, BACKWARD, action.microbatch)) if action.stage else rank

    for rank in {make_ready(PipelineAction(0, FORWARD, microbatch)) for microbatch in turn}:
        start(rank, 0)
    while ends:
        now, touched = ends[0][0], set()
        # All actions that end at one time are finished before any starts, so that the lists do not depend on the
        # order of equal times.
        while ends and ends[0][0] == now:
            _, rank, action = heapq.heappop(ends)
            touched |= {rank, finish(rank, action)}
        for rank in sorted(touched):
            start(rank, now)
    return {rank: tuple(actions) for rank, actions in plan.items()}


def check(actions: Schedule, num_stages: int) -> None:
    """Proves that the lists can be run to the end with any timing: no action waits for itself in a circle.

    Raises:
        PlanError: an action comes twice, waits for an action that nobody does, or is part of a circle of waits.
    """
    lists = {rank: list(todo) for rank, todo in actions.items()}
    everything = [a for todo in lists.values() for a in todo]
    if len(set(everything)) != len(everything):
        twice = next(a for a in everything if everything.count(a) > 1)
        raise PlanError(f"action {twice} comes twice", rule="each action of a step is done once")
    done: set[PipelineAction] = set()
    at = dict.fromkeys(lists, 0)
    waiting: dict[PipelineAction, list[int]] = {}
    runnable = list(lists)
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            # The first missing result is enough: the worker is looked at again when it is there.
            missing = next((n for n in action.needs(num_stages) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            at[rank] += 1
            runnable += waiting.pop(action, [])
    stuck = {rank: str(lists[rank][at[rank]]) for rank in lists if at[rank] < len(lists[rank])}
    if stuck:
        raise PlanError(f"workers wait for ever at {stuck}", rule="the actions of a step can all be run")
