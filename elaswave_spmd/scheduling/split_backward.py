"""The number of micro-batches that workers keep something of, where backwards are in two parts.

A worker keeps activations of micro-batches in flight, and operands of those whose weight gradients it has put off. More
of either fills bubbles, and both take room. By rule (`executed`) as many are in flight as `pipeline.in_flight_limits`
says, and what room is left is for what is put off; `best_limits` simulates steps with other shares of the room as well.
The controller tells workers these limits, and plans are judged with them.
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
"""Numbers of micro-batches in flight beyond those by rule that `best_limits` tries, the likeliest first."""

MOST_TRIED, MOST_WORKERS = 65_536, 256
"""`best_limits` simulates so many actions in all, on meshes of so many workers: a change of members waits for it."""


def priced(costs: CostModel, split: SplitBackward | None) -> CostModel:
    """The costs with the weight gradients of the layers that are split; None: no layer is."""
    return costs if split is None else split.priced(costs)


def executed(assignment: Assignment, split: SplitBackward | None) -> Assignment:
    """The assignment as it is executed by rule, with the limits of its workers; None: all backwards are whole."""
    return assignment if split is None else split.executed(assignment)


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
        keeps_whole: backwards are whole all the same, as to put anything off does not pay (`schedule.split_backward`).
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

    def executed(self, assignment: Assignment, more: int = 0) -> Assignment:
        """The assignment with the limits of its workers, with so many micro-batches in flight beyond the rule.

        Args:
            assignment: with any limits, which are not regarded.
            more: of every stage; fewer, if negative, but at least one.
        """
        in_flight, put_off = zip(*self._shared_out(assignment, more), strict=True)
        late = [
            most if stage and not self.keeps_whole and any(first <= layer < stop for layer in self.layers) else 0
            for stage, (most, (first, stop)) in enumerate(zip(put_off, pairwise(assignment.layer_cuts), strict=True))
        ]
        some = () if in_flight == assignment.usual_limits else in_flight
        return replace(assignment, put_off=tuple(late) if any(late) else (), in_flight=some)

    def needed(self, assignment: Assignment) -> list[float]:
        """The bytes that the fullest worker of each stage needs, with what it puts off."""
        bytes_s = memory_of(assignment, self.costs, self.rule, self._tables)
        put_off = assignment.put_off or (0,) * assignment.num_stages
        spans = pairwise(assignment.layer_cuts)
        each = zip(bytes_s, put_off, assignment.microbatch_counts, spans, strict=True)
        return [
            found + min(most, max(counts)) * sum(self.put_off_bytes[first:stop])
            for found, most, counts, (first, stop) in each
        ]

    def _shared_out(self, assignment: Assignment, more: int) -> Iterator[tuple[int, int]]:
        """Per stage, the most micro-batches in flight, and those for whose weight gradients there is room beside them.

        Without a memory limit every stage has room for as many as the one with the most in flight by rule
        (`pipeline.weight_limits`).
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
    """The assignment with those limits with which its step is the fastest, simulated, and its step time.

    Args:
        candidate: with the limits by rule, which win ties.
        time: of the candidate.
        split: the memory that there is. More of it is never used; where it is not limited, no more than the fullest
            worker needs by rule.
    """
    if sum(map(len, candidate.stages)) > MOST_WORKERS:
        return candidate, time
    best, seen = candidate, {candidate}
    tried = MOST_TRIED // (2 * candidate.num_stages * max(1, candidate.num_microbatches))
    if tried and time.how != EXACT:  # a part of a step reads as less than a whole one: all are simulated as wholes
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
