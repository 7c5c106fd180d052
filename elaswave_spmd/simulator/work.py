"""The work of a step under any policy: which worker runs each micro-batch, and the order in which it runs actions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS, PipelineAction, turns_of_ways
from elaswave_spmd.scheduling.placement import workers_of_microbatches
from elaswave_spmd.scheduling.step_time import Assignment

KINDS = (BACKWARD, FORWARD, WEIGHTS)
"""The kinds of actions, in the order in which a worker that has a choice prefers them."""


class Span(NamedTuple):
    """An action that a worker (a rank) ran from `start` to `stop`, in virtual seconds."""

    worker: int
    action: PipelineAction
    start: float
    stop: float
    step: int = 0


@dataclass(frozen=True)
class Work:
    """The work of one step, under any policy.

    Args:
        stages: the ranks of each stage.
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        owners: for each stage, the rank that runs each micro-batch.
        limits: for each stage, the most micro-batches that a worker has in flight.
        turns: for each micro-batch its priority if several are ready, lowest first; () for the order of their numbers.
        weight_share: the fraction of every backward that is put off until its worker has nothing else to do, with
            activations kept until then (decoupled backward: Tang et al., 2024; Gandhi et al., 2024). 0 for none.
        put_off: for each stage, the most micro-batches whose weight gradients a worker puts off, as our workers do.
            Such micro-batches are not in flight any more, and the seconds of their weight gradients are those of the
            cost model. () if backwards are whole.
        done: the actions whose results exist already.
    """

    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    turns: tuple[float, ...] = ()
    weight_share: float = 0.0
    put_off: tuple[int, ...] = ()
    done: frozenset[PipelineAction] = frozenset()

    @classmethod
    def from_assignment(cls, assignment: Assignment) -> Work:
        """The step of an assignment, as its workers execute it."""
        owners = owners_of(assignment)
        turn = turns_of_ways(dict(enumerate(zip(*owners, strict=True))))
        order = tuple(turn[u] for u in range(assignment.num_microbatches))
        put_off = assignment.put_off
        return cls(assignment.stages, assignment.layer_cuts, owners, assignment.limits, order, put_off=put_off)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return len(self.owners[0])

    def splits(self, stage: int) -> bool:
        """True if the backwards of a stage are in two parts."""
        return bool(self.weight_share or (self.put_off and self.put_off[stage]))

    def kinds(self, stage: int) -> tuple[str, ...]:
        """The kinds of actions of a stage. Weight gradients are a kind of their own if backwards are in two parts."""
        return KINDS if self.splits(stage) else KINDS[:2]

    def left(self, *kinds: str) -> dict[int, int]:
        """Rank -> the number of actions of these kinds that it still has to run. Without kinds, of all kinds."""
        found = {rank: 0 for members in self.stages for rank in members}
        for stage, of_stage in enumerate(self.owners):
            wanted = kinds or self.kinds(stage)
            for microbatch, rank in enumerate(of_stage):
                found[rank] += sum(PipelineAction(stage, kind, microbatch) not in self.done for kind in wanted)
        return found

    def in_flight(self, stage: int, rank: int) -> int:
        """The number of micro-batches of which a worker has the forward and not the backward when the work begins."""
        mine = [u for u, owner in enumerate(self.owners[stage]) if owner == rank] if self.done else []
        return sum(
            PipelineAction(stage, FORWARD, u) in self.done and PipelineAction(stage, BACKWARD, u) not in self.done
            for u in mine
        )


def owners_of(assignment: Assignment) -> tuple[tuple[int, ...], ...]:
    """For each stage, the rank that runs each micro-batch."""
    pairs = zip(assignment.stages, assignment.microbatch_counts, strict=True)
    return tuple(workers_of_microbatches(members, counts, assignment.microbatch_order) for members, counts in pairs)


class ReadyOrder:
    """Chooses the ready action that a worker runs next.

    It chooses a backward; else a forward, if not too many micro-batches are in flight; else weight gradients. A
    micro-batch is in flight as long as its activations are needed. Weight gradients come before a backward if no more
    of them may be put off.

    Args:
        limit: the most micro-batches in flight.
        turns: as for `Work`.
        last: the kind of action after which a micro-batch is not in flight any more.
        put_off: the most micro-batches whose weight gradients are put off.
        in_flight: the number of micro-batches that are in flight at the beginning.
    """

    def __init__(
        self, limit: int, turns: Sequence[float], last: str, put_off: float = math.inf, in_flight: int = 0
    ) -> None:
        self._limit = limit
        self._turns = turns
        self._last = last
        self._put_off = put_off
        self._in_flight = in_flight
        self._ready: Mapping[str, list[tuple[float, int, PipelineAction]]] = {kind: [] for kind in KINDS}

    def add_ready(self, action: PipelineAction) -> None:
        """Adds an action whose inputs have all arrived."""
        turn = self._turns[action.microbatch] if self._turns else action.microbatch
        heapq.heappush(self._ready[action.kind], (turn, action.microbatch, action))

    def next_action(self, planned: PipelineAction | None = None) -> PipelineAction | None:
        """Removes and returns the action to begin now. None if the worker has to wait.

        Args:
            planned: the only action that may begin now; None if any may.
        """
        if planned is not None:
            ready = self._ready[planned.kind]
            at = next((i for i, (*_, action) in enumerate(ready) if action == planned), None)
            if at is None:
                return None
            ready[at] = ready[-1]
            ready.pop()
            heapq.heapify(ready)
            self._in_flight += (planned.kind == FORWARD) - (planned.kind == self._last)
            return planned
        # If no more weight gradients may be put off, some are run before the next backward.
        is_full = len(self._ready[WEIGHTS]) >= self._put_off and self._ready[BACKWARD]
        for kind in (WEIGHTS,) if is_full and self._ready[WEIGHTS] else KINDS:
            if self._ready[kind] and (kind != FORWARD or self._in_flight < self._limit):
                self._in_flight += (kind == FORWARD) - (kind == self._last)
                return heapq.heappop(self._ready[kind])[2]
        return None
