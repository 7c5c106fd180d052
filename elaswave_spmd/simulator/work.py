"""What there is to do in a step, for any policy: whose micro-batches, in a fixed order or as they become ready."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, Action, Schedule, schedule
from elaswave_spmd.scheduling.placement import workers_of_microbatches
from elaswave_spmd.scheduling.step_time import Assignment

WEIGHTS = "W"
"""The part of a backward that nobody waits for, gradients of weights, where backward is split in two."""

KINDS = (BACKWARD, FORWARD, WEIGHTS)
"""What a worker that has a choice does first."""


class Span(NamedTuple):
    """A worker did an action from `start` to `stop`, in virtual seconds."""

    worker: int
    action: Action
    start: float
    stop: float
    step: int = 0


@dataclass(frozen=True)
class Work:
    """A step of any policy.

    Args:
        stages: ranks of each stage.
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        owners: per stage, the rank that runs each micro-batch.
        lists: rank -> actions in their order; None: a worker takes what is ready, a backward if there is one.
        limits: micro-batches in flight of a worker, by stage, where nothing is listed.
        turns: per micro-batch, which are taken first where several are ready; () for the order of their numbers.
        weight_share: part of a backward that is put off until its worker has nothing else to do (decoupled backward:
            Tang et al., 2024; Gandhi et al., 2024). 0: backward is whole.
        done: actions whose results are there already.
    """

    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    lists: Schedule | None
    limits: tuple[int, ...]
    turns: tuple[int, ...] = ()
    weight_share: float = 0.0
    done: frozenset[Action] = frozenset()

    @classmethod
    def of(cls, assignment: Assignment) -> Work:
        """The step of an assignment, in the order that its workers have."""
        owners = owners_of(assignment)
        lists = schedule(assignment.placement())
        return cls(assignment.stages, assignment.layer_cuts, owners, lists, assignment.limits)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return len(self.owners[0])

    def left(self) -> dict[int, int]:
        """Rank -> how many actions it has to do."""
        kinds = KINDS if self.weight_share else KINDS[:2]
        found = {rank: 0 for members in self.stages for rank in members}
        for stage, of_stage in enumerate(self.owners):
            for microbatch, rank in enumerate(of_stage):
                found[rank] += sum(Action(stage, kind, microbatch) not in self.done for kind in kinds)
        return found


def owners_of(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Per stage, the rank that runs each micro-batch."""
    pairs = zip(assignment.stages, assignment.microbatch_counts, strict=True)
    return tuple(workers_of_microbatches(members, counts, assignment.microbatch_order) for members, counts in pairs)


class Order(Protocol):
    """Which of a worker's actions is next."""

    def add(self, action: Action) -> None:
        """What this action waits for is there."""
        ...

    def take(self) -> Action | None:
        """The action to begin now; None: wait."""
        ...


class ListOrder:
    """One action after the other, as listed."""

    def __init__(self, todo: Sequence[Action]) -> None:
        self._todo, self._at = todo, 0
        self._ready: set[Action] = set()

    def add(self, action: Action) -> None:
        self._ready.add(action)

    def take(self) -> Action | None:
        if self._at == len(self._todo) or self._todo[self._at] not in self._ready:
            return None
        self._at += 1
        return self._todo[self._at - 1]


class ReadyOrder:
    """What is ready: a backward, else a forward if not too many micro-batches are in flight, else gradients of weights.

    A micro-batch is in flight until its activations are not needed any more.
    """

    def __init__(self, limit: int, turns: Sequence[int], last: str) -> None:
        self._limit, self._turns, self._in_flight, self._last = limit, turns, 0, last
        self._ready: Mapping[str, list[tuple[int, int, Action]]] = {kind: [] for kind in KINDS}

    def add(self, action: Action) -> None:
        turn = self._turns[action.microbatch] if self._turns else action.microbatch
        heapq.heappush(self._ready[action.kind], (turn, action.microbatch, action))

    def take(self) -> Action | None:
        for kind in KINDS:
            if self._ready[kind] and (kind != FORWARD or self._in_flight < self._limit):
                self._in_flight += (kind == FORWARD) - (kind == self._last)
                return heapq.heappop(self._ready[kind])[2]
        return None
