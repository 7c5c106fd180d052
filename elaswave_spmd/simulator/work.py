"""The work of a step under any policy: a worker for each micro-batch, and the order in which workers choose."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction, turns_of_ways
from elaswave_spmd.scheduling.placement import workers_of_microbatches
from elaswave_spmd.scheduling.step_time import Assignment

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
        limits: by stage, the most micro-batches that a worker has in flight.
        turns: per micro-batch, its priority where several are ready, lowest first; () for the order of their numbers.
        weight_share: part of a backward that is put off until its worker has nothing else to do (decoupled backward:
            Tang et al., 2024; Gandhi et al., 2024). 0: backward is whole.
        done: actions whose results exist already.
    """

    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    turns: tuple[float, ...] = ()
    weight_share: float = 0.0
    done: frozenset[PipelineAction] = frozenset()

    @classmethod
    def from_assignment(cls, assignment: Assignment) -> Work:
        """The step of an assignment, as its workers execute it."""
        owners = owners_of(assignment)
        turn = turns_of_ways(dict(enumerate(zip(*owners, strict=True))))
        order = tuple(turn[u] for u in range(assignment.num_microbatches))
        return cls(assignment.stages, assignment.layer_cuts, owners, assignment.limits, order)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return len(self.owners[0])

    def left(self, *kinds: str) -> dict[int, int]:
        """Rank -> the number of actions that it still has to run, of these kinds; of all, if none is named."""
        kinds = kinds or (KINDS if self.weight_share else KINDS[:2])
        found = {rank: 0 for members in self.stages for rank in members}
        for stage, of_stage in enumerate(self.owners):
            for microbatch, rank in enumerate(of_stage):
                found[rank] += sum(PipelineAction(stage, kind, microbatch) not in self.done for kind in kinds)
        return found


def owners_of(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """Per stage, the rank that runs each micro-batch."""
    pairs = zip(assignment.stages, assignment.microbatch_counts, strict=True)
    return tuple(workers_of_microbatches(members, counts, assignment.microbatch_order) for members, counts in pairs)


class ReadyOrder:
    """The order of readiness: a backward, else a forward if few micro-batches are in flight, else gradients of weights.

    A micro-batch is in flight until its activations are not needed any more.

    Args:
        last: the kind of action after which a micro-batch's activations are freed.
    """

    def __init__(self, limit: int, turns: Sequence[float], last: str) -> None:
        self._limit = limit
        self._turns = turns
        self._last = last
        self._in_flight = 0
        self._ready: Mapping[str, list[tuple[float, int, PipelineAction]]] = {kind: [] for kind in KINDS}

    def add_ready(self, action: PipelineAction) -> None:
        """All results that this action waits for have arrived."""
        turn = self._turns[action.microbatch] if self._turns else action.microbatch
        heapq.heappush(self._ready[action.kind], (turn, action.microbatch, action))

    def next_action(self) -> PipelineAction | None:
        """Removes and returns the action to begin now; None: the worker has to wait."""
        for kind in KINDS:
            if self._ready[kind] and (kind != FORWARD or self._in_flight < self._limit):
                self._in_flight += (kind == FORWARD) - (kind == self._last)
                return heapq.heappop(self._ready[kind])[2]
        return None
