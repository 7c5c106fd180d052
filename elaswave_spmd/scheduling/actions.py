"""Pipeline actions as data: what each worker does in a step, in order, as `1F4` (stage 1, forward, unit 4).

The lists come from one simulation of the placement under the 1F1B rule: a worker runs the backward of a unit as soon
as it can, else a forward, with a bounded number of units in flight. A list that comes out of a finished simulation
is free of deadlock by construction; `check` proves it again for any lists, whoever made them.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.placement import Placement

FORWARD, BACKWARD = "F", "B"
_PATTERN = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True)
class Action:
    """Forward or backward of one unit through one stage."""

    stage: int
    kind: str
    unit: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}"

    @classmethod
    def parse(cls, text: str) -> Action:
        found = _PATTERN.fullmatch(text)
        if not found:
            raise PlanError("an action is <stage><F or B><unit>", got=text, exists="for example 0F3, 2B11")
        return cls(int(found[1]), found[2], int(found[3]))

    def needs(self, num_stages: int) -> tuple[Action, ...]:
        """The actions whose results this one takes."""
        if self.kind == FORWARD:
            return (Action(self.stage - 1, FORWARD, self.unit),) if self.stage else ()
        own = Action(self.stage, FORWARD, self.unit)
        return (own, Action(self.stage + 1, BACKWARD, self.unit)) if self.stage < num_stages - 1 else (own,)


Schedule = Mapping[int, tuple[Action, ...]]


def in_flight_limits(stage_sizes: Sequence[int]) -> tuple[int, ...]:
    """Units that a worker of each stage may have between forward and backward: enough to keep all later stages busy.

    On an even mesh it is the 1F1B bound, the number of stages from this one to the last. On a ragged one one
    more: units come from several workers there, not one after the other.
    """
    more = len(set(stage_sizes)) > 1
    return tuple(-(-sum(stage_sizes[s:]) // size) + more for s, size in enumerate(stage_sizes))


def schedule(
    placement: Placement,
    *,
    forward_cost: float = 1.0,
    backward_cost: float = 2.0,
    limits: Sequence[int] | None = None,
) -> Schedule:
    """The actions of every worker for one step (rank -> list), the same for every step of the mesh epoch.

    Costs are relative durations of one unit on one stage; they order actions, never results. `limits`: units in flight,
    by stage, if not those of this mesh.
    """
    limits = limits or in_flight_limits([len(members) for members in placement.mesh.stages])
    return _simulate(
        placement, placement.mesh.members, range(placement.num_units), limits, (forward_cost, backward_cost)
    )


def actions_of(placement: Placement, rank: int) -> tuple[Action, ...]:
    """One worker's entry of `schedule(placement)`.

    On an even mesh the workers at one position of all stages share their units with nobody: then only those are looked
    at, and the cost does not grow with the number of workers.
    """
    if len(set(placement.unit_counts)) > 1:
        return schedule(placement)[rank]
    position = placement.mesh.position_in_stage(rank)
    column = [members[position] for members in placement.mesh.stages]
    limits = in_flight_limits([1] * len(column))
    return _simulate(placement, column, placement.units_of(rank), limits, (1.0, 2.0))[rank]


def _simulate(
    placement: Placement, ranks: Sequence[int], units: Iterable[int], limits: Sequence[int], costs: tuple[float, float]
) -> dict[int, tuple[Action, ...]]:
    """Runs the step in virtual time on these workers, who do these units on all stages; notes who did what."""
    last_stage = placement.num_stages - 1
    ready: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {rank: ([], []) for rank in ranks}
    in_flight = dict.fromkeys(ranks, 0)
    busy: set[int] = set()
    plan: dict[int, list[Action]] = {rank: [] for rank in ranks}
    ends: list[tuple[float, int, Action]] = []

    # A worker that is fed by several takes a unit of each in turn: else all but one of them would wait for it.
    fed, turn = Counter[int](), {}
    for unit in sorted(units):
        feeder = placement.worker_of_unit(0, unit)
        turn[unit] = fed[feeder]
        fed[feeder] += 1

    def make_ready(action: Action) -> int:
        rank = placement.worker_of_unit(action.stage, action.unit)
        heapq.heappush(ready[rank][action.kind == BACKWARD], (turn[action.unit], action.unit))
        return rank

    def start(rank: int, now: float) -> None:
        stage, (forwards, backwards) = placement.mesh.stage_of(rank), ready[rank]
        if rank in busy:
            return
        if backwards:
            action, cost = Action(stage, BACKWARD, heapq.heappop(backwards)[1]), costs[1]
        elif forwards and in_flight[rank] < limits[stage]:
            action, cost = Action(stage, FORWARD, heapq.heappop(forwards)[1]), costs[0]
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
            return make_ready(Action(action.stage + 1, FORWARD, action.unit))
        if action.kind == FORWARD:
            return make_ready(Action(action.stage, BACKWARD, action.unit))
        in_flight[rank] -= 1
        return make_ready(Action(action.stage - 1, BACKWARD, action.unit)) if action.stage else rank

    for rank in {make_ready(Action(0, FORWARD, unit)) for unit in turn}:
        start(rank, 0.0)
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
