"""How many micro-batches' weight gradients a worker may put off, where backwards are in two parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from elaswave_spmd.scheduling.cost_model import CostModel, MemoryRule
from elaswave_spmd.scheduling.pipeline import weight_limits
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, memory_of


@dataclass(frozen=True)
class SplitBackward:
    """The layers whose backward may be in two parts, and the memory that there is for what is put off meanwhile.

    Args:
        layers: numbers of these layers.
        put_off_bytes: per layer of the model, what a micro-batch keeps of it from its backward to its weight gradients,
            if its stage puts these off. Of a layer that is not in `layers` these are the gradients themselves.
        costs: of the model's layers; their bytes count here.
        rule: sharding and mirrors.
        memory_limit: bytes that a worker has room for (`schedule.memory_limit`); infinite: as much as an even mesh
            needs (`weight_limits`).
    """

    layers: tuple[int, ...]
    put_off_bytes: tuple[int, ...]
    costs: CostModel
    rule: MemoryRule
    memory_limit: float = math.inf

    def limits(self, placement: Placement) -> tuple[int, ...]:
        """The most micro-batches that a worker of each stage may put off; 0: its backwards are whole. () if all are.

        With a `memory_limit` they are those that fit beside what a plan counts, which are the micro-batches in flight.
        """
        assignment = Assignment.of(placement)
        needed = memory_of(assignment, self.costs, self.rule) if self.memory_limit < math.inf else []
        found = list(weight_limits(assignment.limits))
        for stage, (first, stop) in enumerate(pairwise(assignment.layer_cuts)):
            if stage == 0 or not any(first <= layer < stop for layer in self.layers):
                found[stage] = 0
            elif needed:
                room = max(0.0, self.memory_limit - needed[stage])
                fitting = int(room // max(1, sum(self.put_off_bytes[first:stop])))
                found[stage] = min(fitting, max(assignment.microbatch_counts[stage]))
        return tuple(found) if any(found) else ()
