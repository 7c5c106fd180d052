"""Pipeline actions as data: what each worker does in a step, in order, as `1F4` (stage 1, forward, micro-batch 4).

The lists come from one simulation of the placement under the 1F1B rule: a worker runs the backward of a micro-batch as
soon as it can, else a forward, with a bounded number of micro-batches in flight; of several the one whose turn it is. A
list that comes out of a finished simulation is free of deadlock by construction; `check` proves it again for any lists,
whoever made them.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.placement import CONTIGUOUS, Placement

FORWARD, BACKWARD = "F", "B"
_STEP = 1 << 24  # in micro-batches of which durations are whole numbers: ends are equal or not, without rounding
_BACKWARD = 2  # times as long as a forward
_MORE = 2
_PATTERN = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch through one stage."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        found = _PATTERN.fullmatch(text)
        if not found:
            raise PlanError("an action is <stage><F or B><micro-batch>", got=text, exists="for example 0F3, 2B11")
        return cls(int(found[1]), found[2], int(found[3]))

    def needs(self, num_stages: int) -> tuple[Action, ...]:
        """The actions whose results this one takes."""
        if self.kind == FORWARD:
            return (Action(self.stage - 1, FORWARD, self.microbatch),) if self.stage else ()
        own = Action(self.stage, FORWARD, self.microbatch)
        return (own, Action(self.stage + 1, BACKWARD, self.microbatch)) if self.stage < num_stages - 1 else (own,)


Schedule = Mapping[int, tuple[Action, ...]]


def in_flight_limits(
    stage_sizes: Sequence[int], microbatch_counts: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """Micro-batches that a worker of each stage may have between forward and backward: enough to keep all later stages
    busy.

    Where workers at one position of all stages share their micro-batches with nobody it is the 1F1B bound, the number
    of stages from this one to the last. Else it is one, the way of a micro-batch through the slowest workers of all
    later stages in micro-batches of this stage's fastest worker, and two more: micro-batches come from several workers
    there, in turns.

    Args:
        microbatch_counts: per stage, the micro-batches of each worker; None: dealt evenly.
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
    """Of one micro-batch on a worker that has so many of them.

    Micro-batches are dealt by speed and layers by workers, so all are taken to be busy for the same time. Then lists
    follow from who has how many micro-batches, and whoever knows a placement knows them.
    """
    return max(1, _STEP // max(1, microbatches))


def schedule(placement: Placement, *, limits: Sequence[int] | None = None) -> Schedule:
    """The actions of every worker for one step (rank -> list), the same for every step of the mesh epoch.

    `limits`: micro-batches in flight, by stage, if not those of this mesh.
    """
    if not limits:
        limits = in_flight_limits([len(members) for members in placement.mesh.stages], placement.microbatch_counts)
    return _simulate(placement, placement.mesh.members, range(placement.num_microbatches), limits)


def actions_of(placement: Placement, rank: int) -> tuple[Action, ...]:
    """One worker's entry of `schedule(placement)`.

    Only those are looked at with whom it shares micro-batches, or who share micro-batches with such. On an even mesh
    they are those at its position in all stages; after a loss in a large mesh, those of its block (scheduling.blocks).
    So the cost does not grow with the number of workers.
    """
    stages, counts = placement.mesh.stages, placement.microbatch_counts
    if len(set(counts)) == 1:
        position = placement.mesh.position_in_stage(rank)
        column = [members[position] for members in stages]
        return _simulate(placement, column, placement.microbatches_of(rank), in_flight_limits([1] * len(column)))[rank]
    microbatches = placement.microbatches_of(rank)
    if placement.dealing != CONTIGUOUS or not microbatches:
        return schedule(placement)[rank]
    found, positions = _neighbours(counts, microbatches[0], microbatches[-1] + 1)
    ranks = [rank for members, (a, b) in zip(stages, positions, strict=True) for rank in members[a:b]]
    return _simulate(placement, ranks, found, in_flight_limits([len(members) for members in stages], counts))[rank]


def _neighbours(
    microbatch_counts: Sequence[Sequence[int]], first: int, stop: int
) -> tuple[range, list[tuple[int, int]]]:
    """The micro-batches that are tied to micro-batches [first, stop) by workers who have some of both; by stage, who
    has them.

    Micro-batches are dealt contiguously: a stage's cuts are the sums of its counts. The micro-batches grow to both
    sides until they end at a cut of every stage.
    """
    cuts = [list(accumulate(counts, initial=0)) for counts in microbatch_counts]
    while True:
        first_now = min(of_stage[bisect_right(of_stage, first) - 1] for of_stage in cuts)
        stop_now = max(of_stage[bisect_left(of_stage, stop)] for of_stage in cuts)
        if (first_now, stop_now) == (first, stop):
            break
        first, stop = first_now, stop_now
    return range(first, stop), [(bisect_right(c, first) - 1, bisect_left(c, stop)) for c in cuts]


def _turns(placement: Placement, microbatches: Iterable[int]) -> dict[int, float]:
    """When each micro-batch's turn is, as a part of the step.

    Micro-batches that go the same way, over the same workers of all stages, are spread evenly over the step. So a
    worker that is fed by several takes of each in turn, and one that feeds several gives to each in turn, in proportion
    to what they have of it: nobody waits for the others to be served first.
    """
    ways: dict[tuple[int, ...], list[int]] = {}
    for microbatch in sorted(microbatches):
        way = tuple(placement.worker_of_microbatch(stage, microbatch) for stage in range(placement.num_stages))
        ways.setdefault(way, []).append(microbatch)
    return {microbatch: (2 * i + 1) / (2 * len(same)) for same in ways.values() for i, microbatch in enumerate(same)}


def _simulate(
    placement: Placement, ranks: Sequence[int], microbatches: Iterable[int], limits: Sequence[int]
) -> dict[int, tuple[Action, ...]]:
    """Runs the step in virtual time on these workers, who do these micro-batches on all stages; notes who did what."""
    last_stage = placement.num_stages - 1
    ready: dict[int, tuple[list[tuple[float, int]], list[tuple[float, int]]]] = {rank: ([], []) for rank in ranks}
    in_flight = dict.fromkeys(ranks, 0)
    busy: set[int] = set()
    plan: dict[int, list[Action]] = {rank: [] for rank in ranks}
    ends: list[tuple[int, int, Action]] = []
    turn = _turns(placement, microbatches)
    places = {rank: placement.mesh.coordinate(rank) for rank in ranks}
    duration = {rank: _duration(placement.microbatch_counts[stage][at]) for rank, (stage, at) in places.items()}

    def make_ready(action: Action) -> int:
        rank = placement.worker_of_microbatch(action.stage, action.microbatch)
        heapq.heappush(ready[rank][action.kind == BACKWARD], (turn[action.microbatch], action.microbatch))
        return rank

    def start(rank: int, now: int) -> None:
        stage, (forwards, backwards) = placement.mesh.stage_of(rank), ready[rank]
        if rank in busy:
            return
        if backwards:
            action, cost = Action(stage, BACKWARD, heapq.heappop(backwards)[1]), _BACKWARD * duration[rank]
        elif forwards and in_flight[rank] < limits[stage]:
            action, cost = Action(stage, FORWARD, heapq.heappop(forwards)[1]), duration[rank]
            in_flight[rank] += 1
        else:
            return
        busy.add(rank)
        plan[rank].append(action)
        heapq.heappush(ends, (now + cost, rank, action))

    def finish(rank: int, action: Action) -> int:
        """Returns the worker that has more to do now."""
        busy.discard(rank)
        if action.kind == FORWARD and action.stage < last_stage:
            return make_ready(Action(action.stage + 1, FORWARD, action.microbatch))
        if action.kind == FORWARD:
            return make_ready(Action(action.stage, BACKWARD, action.microbatch))
        in_flight[rank] -= 1
        return make_ready(Action(action.stage - 1, BACKWARD, action.microbatch)) if action.stage else rank

    for rank in {make_ready(Action(0, FORWARD, microbatch)) for microbatch in turn}:
        start(rank, 0)
    while ends:
        now, touched = ends[0][0], set()
        while ends and ends[0][0] == now:
            _, rank, action = heapq.heappop(ends)
            touched |= {rank, finish(rank, action)}
        for rank in sorted(touched):
            start(rank, now)
    return {rank: tuple(actions) for rank, actions in plan.items()}


def check(actions: Schedule, num_stages: int) -> None:
    """Proves that the lists can be run to the end whatever the timing: every wait is for something earlier.

    Raises:
        PlanError: an action twice, one that waits for something nobody does, or a circle of waits (named).
    """
    lists = {rank: list(todo) for rank, todo in actions.items()}
    everything = [a for todo in lists.values() for a in todo]
    if len(set(everything)) != len(everything):
        twice = next(a for a in everything if everything.count(a) > 1)
        raise PlanError("an action is done once", got=str(twice))
    done: set[Action] = set()
    at = dict.fromkeys(lists, 0)
    waiting: dict[Action, list[int]] = {}
    runnable = list(lists)
    while runnable:
        rank = runnable.pop()
        while at[rank] < len(lists[rank]):
            action = lists[rank][at[rank]]
            missing = next((n for n in action.needs(num_stages) if n not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done.add(action)
            at[rank] += 1
            runnable += waiting.pop(action, [])
    stuck = {rank: str(lists[rank][at[rank]]) for rank in lists if at[rank] < len(lists[rank])}
    if stuck:
        raise PlanError("the actions of a step can all be run", got=f"workers wait for ever at {stuck}")


def render(actions: Schedule) -> str:
    """One line per worker: `3: 1F0 1B0 1F2 1B2`."""
    return "\n".join(f"{rank}: " + " ".join(map(str, todo)) for rank, todo in sorted(actions.items()))


def parse(text: str) -> dict[int, tuple[Action, ...]]:
    """The inverse of `render`."""
    plan = {}
    for line in text.strip().splitlines():
        rank, _, todo = line.partition(":")
        plan[int(rank)] = tuple(Action.parse(word) for word in todo.split())
    return plan
