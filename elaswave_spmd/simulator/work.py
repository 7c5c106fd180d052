"""The work of a step under any policy: a worker for each micro-batch, in a fixed order or as they become ready."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, PipelineAction, Schedule, schedule
from elaswave_spmd.scheduling.placement import workers_of_microbatches
from elaswave_spmd.scheduling.step_time import Assignment

WEIGHTS = "W"
"""The kind of the second half of a split backward: gradients of weights, for which no other action waits."""

KINDS = (BACKWARD, FORWARD, WEIGHTS)
"""The kinds of actions, in the order in which a worker that has a choice prefers them."""


class Span(NamedTuple):
    """An action that a worker ran from `start` to `stop`, in virtual seconds."""

    worker: int
    action: PipelineAction
    start: float
    stop: float
    step: int = 0


@dataclass(frozen=True)
class Work:
    """The work of one step, under any policy.

    Args:
        stages: ranks of each stage.
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        owners: per stage, the rank that runs each micro-batch.
        lists: rank -> its actions in order; None: a worker runs whatever is ready, a backward if there is one.
        limits: by stage, the most micro-batches that a worker without a list has in flight.
        turns: per micro-batch, its priority where several are ready, lowest first; () for the order of their numbers.
        weight_share: part of a backward that is put off until its worker has nothing else to do (decoupled backward:
            Tang et al., 2024; Gandhi et al., 2024). 0: backward is whole.
        done: actions whose results exist already.
    """

    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    lists: Schedule | None
    limits: tuple[int, ...]
    turns: tuple[int, ...] = ()
    weight_share: float = 0.0
    done: frozenset[PipelineAction] = frozenset()

    @classmethod
    def from_assignment(cls, assignment: Assignment) -> Work:
        """The step of an assignment, with the action lists that its workers would run."""
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
        """Rank -> the number of actions that it still has to run."""
        kinds = KINDS if self.weight_share else KINDS[:2]
        found = {rank: 0 for members in self.stages for rank in members}
        for stage, of_stage in enumerate(self.owners):
            for microbatch, rank in enumerate(of_stage):
                found[rank] += sum(PipelineAction(stage, kind, microbatch) not in self.done for kind in kinds)
        return found


def owners_of(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Per stage, the rank that runs each micro-batch."""
    pairs = zip(assignment.stages, assignment.microbatch_counts, strict=True)
    return tuple(workers_of_microbatches(members, counts, assignment.microbatch_order) for members, counts in pairs)


class Order(Protocol):
    """The order in which one worker runs its actions of a step."""

    def add_ready(self, action: PipelineAction) -> None:
        """All results that this action waits for have arrived."""
        ...

    def next_action(self) -> PipelineAction | None:
        """Remove and return the action to begin now; None: the worker has to wait."""
        ...


class ListOrder:
    """One action after the other, as listed: a worker waits for the next one even if a later one is ready."""

    def __init__(self, actions: Sequence[PipelineAction]) -> None:
        self._actions = actions
        self._at = 0
        self._ready: set[PipelineAction] = set()

    def add_ready(self, action: PipelineAction) -> None:
        self._ready.add(action)

    def next_action(self) -> PipelineAction | None:
        if self._at == len(self._actions) or self._actions[self._at] not in self._ready:
            return None
        self._at += 1
        return self._actions[self._at - 1]


class ReadyOrder:
    """The order of readiness: a backward, else a forward if few micro-batches are in flight, else gradients of weights.

    A micro-batch is in flight until its activations are not needed any more.

    Args:
        last: the kind of action after which a micro-batch's activations are freed.
    """

    def __init__(self, limit: int, turns: Sequence[int], last: str) -> None:
        self._limit = limit
        self._turns = turns
        self._last = last
        self._in_flight = 0
        self._ready: Mapping[str, list[tuple[int, int, PipelineAction]]] = {kind: [] for kind in KINDS}

    def add_ready(self, action: PipelineAction) -> None:
        turn = self._turns[action.microbatch] if self._turns else action.microbatch
        heapq.heappush(self._ready[action.kind], (turn, action.microbatch, action))

    def next_action(self) -> PipelineAction | None:
        for kind in KINDS:
            if self._ready[kind] and (kind != FORWARD or self._in_flight < self._limit):
                self._in_flight += (kind == FORWARD) - (kind == self._last)
                return heapq.heappop(self._ready[kind])[2]
        return None
