"""The number of micro-batches whose weight gradients a worker may put off, where backwards are in two parts.

The controller tells workers these limits, and plans are judged with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, MemoryRule
from elaswave_spmd.scheduling.pipeline import weight_limits
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.scheduling.step_time import Assignment, MemoryTables, memory_of


def priced(costs: CostModel, split: SplitBackward | None) -> CostModel:
    """The costs with the weight gradients of the layers that are split; None: no layer is."""
    return costs if split is None else split.priced(costs)


def executed(assignment: Assignment, split: SplitBackward | None) -> Assignment:
    """The assignment as it is executed, with what its workers may put off; None: all backwards are whole."""
    return assignment if split is None else replace(assignment, put_off=split.limits_of(assignment))


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
    _tables: MemoryTables = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_costs(cls, costs: CostModel, rule: MemoryRule, memory_limit: float = math.inf) -> SplitBackward | None:
        """The layers that have a `weight_share`, with the bytes that the costs have; None if there are none."""
        layers = tuple(i for i, layer in enumerate(costs.layers) if layer.weight_share)
        kept = tuple(layer.put_off_bytes for layer in costs.layers)
        return cls(layers, kept, costs, rule, memory_limit) if layers else None

    def priced(self, costs: CostModel) -> CostModel:
        """These costs with a `weight_share` of the layers that are split, and of no others.

        Of layers that were measured it is theirs, of others the median of these.
        """
        shares = {i: costs.layers[i].weight_share for i in self.layers}
        middle = median([share for share in shares.values() if share] or [WEIGHT_SHARE])
        layers = tuple(
            replace(layer, weight_share=shares.get(i, 0.0) or (middle if i in shares else 0.0), put_off_bytes=kept)
            for i, (layer, kept) in enumerate(zip(costs.layers, self.put_off_bytes, strict=True))
        )
        return replace(costs, layers=layers)

    def limits(self, placement: Placement) -> tuple[int, ...]:
        """As `limits_of`, of a placement."""
        return self.limits_of(Assignment.of(placement))

    def limits_of(self, assignment: Assignment) -> tuple[int, ...]:
        """The most micro-batches that a worker of each stage may put off; 0: its backwards are whole. () if all are.

        With a `memory_limit` they are those that fit beside what a plan counts, which are the micro-batches in flight.
        """
        needed = memory_of(assignment, self.costs, self.rule, self._tables) if self.memory_limit < math.inf else []
        found = list(weight_limits(assignment.limits))
        for stage, (first, stop) in enumerate(pairwise(assignment.layer_cuts)):
            if stage == 0 or not any(first <= layer < stop for layer in self.layers):
                found[stage] = 0
            elif needed:
                room = max(0.0, self.memory_limit - needed[stage])
                fitting = int(room // max(1, sum(self.put_off_bytes[first:stop])))
                found[stage] = min(fitting, max(assignment.microbatch_counts[stage]))
        return tuple(found) if any(found) else ()
