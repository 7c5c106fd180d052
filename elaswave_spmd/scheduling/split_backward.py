"""Limits of workers that run backwards in two parts: micro-batches in flight, and weight gradients put off.

A worker keeps the activations of micro-batches in flight, and the operands of micro-batches whose weight gradients it
has put off. More of either fills more bubbles of the pipeline, and both take memory. By the usual rule (`executed`) the
number in flight is that of `pipeline.in_flight_limits`, and the rest of the memory is for weight gradients put off.
`best_limits` simulates steps with other divisions of the memory as well. The controller sends these limits to workers,
and plans are judged with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from elaswave_spmd.scheduling.cost_model import WEIGHT_SHARE, CostModel, MemoryRule
from elaswave_spmd.scheduling.step_time import (
    EXACT,
    REPLICATED,
    Assignment,
    MemoryTables,
    StepTime,
    memory_of,
    step_time,
    step_time_below,
)

MORE_IN_FLIGHT = (1, 2, -1, 4, -2, 6)
"""How many more micro-batches in flight than by the usual rule `best_limits` tries, the likeliest numbers first."""

MOST_TRIED, MOST_WORKERS = 65_536, 256
"""The most actions that `best_limits` simulates, and the most workers of a mesh for which it does. There are limits
because a change of members waits for it."""


def priced(costs: CostModel, split: SplitBackward | None) -> CostModel:
    """The costs with the seconds of weight gradients that may be put off. `split` is None if no layer is split."""
    return costs if split is None else split.priced(costs)


def executed(assignment: Assignment, split: SplitBackward | None) -> Assignment:
    """The assignment with the limits by the usual rule. `split` is None if all backwards run in one part."""
    return assignment if split is None else split.executed(assignment)


@dataclass(frozen=True)
class SplitBackward:
    """The layers whose backward may run in two parts, and the memory for what is kept between the two parts.

    Args:
        layers: the numbers of these layers.
        put_off_bytes: for each layer of the model, the bytes that a micro-batch keeps from the backward to its weight
            gradients, if the stage puts these off. For a layer that is not in `layers`, whose weight gradients are
            computed in the backward, they are the bytes of these gradients.
        costs: the costs of the model's layers, of which the bytes count here.
        rule: the specs and mirrors.
        memory_limit: the bytes that a worker has room for (`schedule.memory_limit`). If infinite, a worker may use as
            much as an even mesh needs (`weight_limits`).
        keeps_whole: True if backwards run in one part nevertheless, as putting weight gradients off does not pay
            (`schedule.split_backward`).
    """

    layers: tuple[int, ...]
    put_off_bytes: tuple[int, ...]
    costs: CostModel
    rule: MemoryRule
    memory_limit: float = math.inf
    keeps_whole: bool = False
    _tables: MemoryTables = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_costs(cls, costs: CostModel, rule: MemoryRule, memory_limit: float = math.inf) -> SplitBackward | None:
        """The value for the layers whose cost has a `weight_share`; None if there are none."""
        layers = tuple(i for i, layer in enumerate(costs.layers) if layer.weight_share)
        kept = tuple(layer.put_off_bytes for layer in costs.layers)
        return cls(layers, kept, costs, rule, memory_limit) if layers else None

    def priced(self, costs: CostModel) -> CostModel:
        """These costs, with a `weight_share` for the layers that are split and 0 for all others.

        A layer keeps its measured share. A layer that was not measured gets the median of the measured shares.
        """
        shares = {i: costs.layers[i].weight_share for i in self.layers}
        middle = median([share for share in shares.values() if share] or [WEIGHT_SHARE])
        layers = tuple(
            replace(layer, weight_share=shares.get(i, 0.0) or (middle if i in shares else 0.0), put_off_bytes=kept)
            for i, (layer, kept) in enumerate(zip(costs.layers, self.put_off_bytes, strict=True))
        )
        return replace(costs, layers=layers)

    def executed(self, assignment: Assignment, more: int = 0) -> Assignment:
        """The assignment with the limits by the usual rule, or with more or fewer micro-batches in flight.

        Args:
            assignment: the assignment. Limits that it has are replaced.
            more: the number of micro-batches in flight beyond the usual rule, on every stage. It may be negative, but
                at least one micro-batch is in flight.
        """
        in_flight, put_off = zip(*self._shared_out(assignment, more), strict=True)
        late = [
            most if stage and not self.keeps_whole and any(first <= layer < stop for layer in self.layers) else 0
            for stage, (most, (first, stop)) in enumerate(zip(put_off, pairwise(assignment.layer_cuts), strict=True))
        ]
        some = () if in_flight == assignment.usual_limits else in_flight
        return replace(assignment, put_off=tuple(late) if any(late) else (), in_flight=some)

    def needed(self, assignment: Assignment) -> list[float]:
        """The bytes that the fullest worker of each stage needs, including those for what it puts off."""
        bytes_s = memory_of(assignment, self.costs, self.rule, self._tables)
        put_off = assignment.put_off or (0,) * assignment.num_stages
        spans = pairwise(assignment.layer_cuts)
        each = zip(bytes_s, put_off, assignment.microbatch_counts, spans, strict=True)
        return [
            found + min(most, max(counts)) * sum(self.put_off_bytes[first:stop])
            for found, most, counts, (first, stop) in each
        ]

    def _shared_out(self, assignment: Assignment, more: int) -> Iterator[tuple[int, int]]:
        """For each stage: (micro-batches in flight, micro-batches of which weight gradients may be put off).

        The second number is what there is memory for besides the first. Without a memory limit, both together are the
        most micro-batches in flight of any stage by the usual rule (`pipeline.weight_limits`).
        """
        usual = assignment.usual_limits
        if self.memory_limit == math.inf:
            for own in usual:
                in_flight = max(1, min(own + more, max(usual)))
                yield in_flight, max(usual) - in_flight
            return
        one_each = replace(assignment, in_flight=(1,) * assignment.num_stages)
        needed = memory_of(one_each, self.costs, self.rule, self._tables)
        activations = self.costs.prefix("activation_bytes")
        for stage, (first, stop) in enumerate(pairwise(assignment.layer_cuts)):
            left = max(0.0, self.memory_limit - needed[stage])
            each = max(1.0, float(activations[stop] - activations[first]))
            in_flight = max(1, min(usual[stage] + more, 1 + int(left // each)))
            number = max(assignment.microbatch_counts[stage])
            left -= (min(in_flight, max(1, number)) - 1) * each
            yield in_flight, min(number, int(left // max(1, sum(self.put_off_bytes[first:stop]))))


def best_limits(
    candidate: Assignment,
    time: StepTime,
    split: SplitBackward,
    costs: CostModel,
    rule: MemoryRule = REPLICATED,
) -> tuple[Assignment, StepTime]:
    """The assignment with the limits that give the fastest simulated step, and its step time.

    Args:
        candidate: the assignment with the limits by the usual rule, which win ties.
        time: its step time.
        split: the layers that are split, and the memory. If memory is not limited, no worker may need more than the
            fullest one does by the usual rule.
        costs: the costs.
        rule: the specs and mirrors.
    """
    if sum(map(len, candidate.stages)) > MOST_WORKERS:
        return candidate, time
    best, seen = candidate, {candidate}
    tried = MOST_TRIED // (2 * candidate.num_stages * max(1, candidate.num_microbatches))
    # A time from a part of a step is mostly too short to be compared with that of a whole one. So the whole step of
    # every candidate is simulated here.
    if tried and time.how != EXACT:
        time, tried = step_time(candidate, costs, rule, most_actions=MOST_TRIED), tried - 1
    room = max(split.needed(candidate)) if split.memory_limit == math.inf else math.inf
    for more in MORE_IN_FLIGHT[:tried]:
        found = split.executed(candidate, more)
        if found in seen or max(split.needed(found)) > room:
            continue
        seen.add(found)
        faster = step_time_below(time.seconds, found, costs, rule, most_actions=MOST_TRIED)
        if faster is not None and faster.seconds < time.seconds:
            best, time = found, faster
    return best, time
