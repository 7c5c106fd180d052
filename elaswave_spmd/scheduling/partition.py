"""The partition of layers into stages: contiguous ranges whose slowest stage is as fast as possible.

It is the "graph" axis of ElasWave. `balance_layers` makes the first placement, from rough costs; `partition` plans
changes, from measured costs, with memory limits and the bytes that would move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, MemoryRule
from elaswave_spmd.scheduling.equal_stages import once_each


def balance_layers(costs: Sequence[float], workers: Sequence[int]) -> tuple[int, ...]:
    """Cuts the layers into stages so that the largest cost(stage) / workers(stage) is smallest.

    Dynamic programming over (prefix, stage), O(layers^2 stages). Every stage gets a layer. Of several optimal
    partitions the one with the earliest cuts is returned, so that all workers compute the same one.

    Args:
        costs: cost of each layer, non-negative.
        workers: number of workers of each stage, which share its micro-batches.

    Returns:
        stages + 1 cuts; stage s has layers [cuts[s], cuts[s + 1]).
    """
    num_layers, num_stages = len(costs), len(workers)
    assert 1 <= num_stages <= num_layers, (num_layers, num_stages)
    total = [0.0, *accumulate(costs)]
    # best[j]: the smallest largest cost with the first j layers in the stages so far
    best = [0.0] + [float("inf")] * num_layers
    choices: list[list[int]] = []
    for stage, count in enumerate(workers):
        later = num_stages - stage - 1
        found, choice = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        # Each stage before and after this one needs a layer of its own.
        for stop in range(stage + 1, num_layers - later + 1):
            for start in range(stage, stop):
                slowest = max(best[start], (total[stop] - total[start]) / count)
                if slowest < found[stop]:
                    found[stop], choice[stop] = slowest, start
        best = found
        choices.append(choice)
    cuts = [num_layers]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return tuple(reversed(cuts))


@dataclass(frozen=True)
class StageWorkers:
    """The properties of a stage's workers that the partition depends on.

    Args:
        size: number of workers.
        load: micro-batches / speed of the slowest worker, with micro-batches as they will be assigned
            (microbatch_assignment.least_load).
        microbatches: the most micro-batches of a worker.
        in_flight: the most micro-batches that a worker has between forward and backward.
        memory_limit: bytes that each worker has.
        fastest: the speed of its fastest worker.
        sums: gradient sums that a worker holds at once (`step_time.open_sums`).
    """

    size: int
    load: float
    microbatches: int = 1
    in_flight: int = 1
    memory_limit: float = math.inf
    fastest: float = 1.0
    sums: int = 1

    @property
    def most_in_flight(self) -> int:
        """As `in_flight`, and no more than a worker has."""
        return min(self.microbatches, self.in_flight)


@dataclass(frozen=True)
class Partition:
    """A partition of the layers into stages, with the figures that it was chosen by.

    Args:
        cuts: stage s has layers [cuts[s], cuts[s + 1]).
        bottleneck_s: the largest of stage_s.
        stage_s: seconds that the slowest worker of each stage computes in a step.
        memory: bytes of a worker of each stage.
        moved_bytes: bytes that layers which change their stage have to move.
        optimum_s: the smallest possible bottleneck_s; with a tolerance, or by the whole pipeline, bottleneck_s may be
            larger.
    """

    cuts: tuple[int, ...]
    bottleneck_s: float
    stage_s: tuple[float, ...]
    memory: tuple[float, ...]
    moved_bytes: float
    optimum_s: float

    def __str__(self) -> str:
        slowest = self.stage_s.index(self.bottleneck_s)
        ranges = " | ".join(f"{a}..{b - 1}" for a, b in pairwise(self.cuts[:17]))
        more = f" | ... ({len(self.stage_s)} stages)" if len(self.cuts) > 17 else ""
        return (
            f"layers {ranges}{more}: stage {slowest} is slowest with {self.bottleneck_s:.4g} s "
            f"(least possible {self.optimum_s:.4g} s), {self.moved_bytes:,.0f} B move"
        )


def partition(
    costs: CostModel,
    stages: Sequence[StageWorkers],
    *,
    rule: MemoryRule = REPLICATED,
    move_bytes: np.ndarray | None = None,
    tolerance: float = 0.0,
    by_pipeline: bool = False,
) -> Partition:
    """The partition with the smallest bottleneck that fits in memory; of several, the one that moves the fewest bytes.

    Two dynamic programs over (prefix, stage), O(layers^2 stages) each: the first finds the smallest bottleneck, the
    second the fewest bytes among all partitions whose stages take no longer. The earliest cuts win ties.

    By the whole pipeline, a stage waits until the first micro-batch has passed the stages before it, and after its last
    one the stages behind it work on: it takes the way of one micro-batch through all stages, and beside that what it
    computes for its others. Where stages are equally fast that way is as long for all partitions, so that these others
    decide: few micro-batches a worker count for less than by the bottleneck, where the one of the way is among them.

    Args:
        stages: workers, speeds and memory of each stage.
        rule: the share of its stage's bytes that a worker has.
        move_bytes: float64 [stages, layers]: bytes that move if a layer is in a stage; None: nothing moves.
        tolerance: the bottleneck may exceed the smallest one by this part of it if fewer bytes move; inf: the
            bottleneck does not matter, and layers move only if they do not fit.
        by_pipeline: what is made small is the time of the pipeline, as far as the partition decides it, and not the
            bottleneck.

    Raises:
        PlanError: there are more stages than layers, or no partition fits in memory. The error then names the stage
            that lacks memory in the partition that lacks least, and what would fit.
    """
    num_layers, num_stages = len(costs.layers), len(stages)
    if not 1 <= num_stages <= num_layers:
        raise PlanError(
            f"{num_stages} stages for {num_layers} layers",
            rule="every stage has at least one layer",
            fix=f"plan for 1 to {num_layers} stages",
        )
    seconds, is_limited = _seconds(costs, [stage.load for stage in stages]), _is_limited(stages, rule)
    memory, size = _memory(costs, stages, rule) if is_limited else None, num_layers - num_stages + 1
    allowed = _allowed(seconds, memory, stages)
    optimum = least = _least(_reachable(allowed), size, np.maximum)[0]
    if optimum == math.inf:
        raise _no_room(costs, stages, rule)
    if by_pipeline:
        beside = _seconds(costs, [max(0.0, stage.load - 1 / stage.fastest) for stage in stages])
        allowed = _allowed(beside, memory, stages)
        least = _least(_reachable(allowed), size, np.maximum)[0]
    limit = least * (1.0 + tolerance)
    near = once_each(lambda table: (table <= limit) & (table < math.inf), allowed)
    moved = np.zeros((num_stages, num_layers)) if move_bytes is None else move_bytes
    num_bytes, cuts = _least(_moved_bytes(_reachable(near), moved), size, np.add)
    spans = list(enumerate(pairwise(cuts)))
    stage_s = tuple(float(seconds[s][span]) for s, span in spans)
    fill = tuple(_worker_bytes(costs, stages[s], rule, span) for s, span in spans)
    return Partition(cuts, max(stage_s), stage_s, fill, float(num_bytes), float(optimum))


def _seconds(costs: CostModel, loads: Sequence[float]) -> list[np.ndarray]:
    """Per load, float64[layers + 1, layers + 1]: seconds of a stage with layers [row, column); inf if it has none."""
    total = costs.prefix("forward_s") + costs.prefix("backward_s")
    microbatch, layers = total[None, :] - total[:, None], ~np.tri(len(total), dtype=bool)
    by_load = {load: np.where(layers, microbatch * load, math.inf) for load in set(loads)}
    return [by_load[load] for load in loads]


def _is_limited(stages: Sequence[StageWorkers], rule: MemoryRule) -> bool:
    """True if layers may not fit on some worker."""
    return rule.state_limit < math.inf or any(stage.memory_limit < math.inf for stage in stages)


def _memory(costs: CostModel, stages: Sequence[StageWorkers], rule: MemoryRule) -> list[np.ndarray]:
    """Per stage, float64[layers + 1, layers + 1]: bytes of one worker."""
    keys = [(stage.size, stage.microbatches, stage.most_in_flight, stage.sums) for stage in stages]
    names = "size", "microbatches", "in_flight", "sums"
    known = {key: rule.stage_bytes(costs, **dict(zip(names, key, strict=True))) for key in set(keys)}
    return [known[key] for key in keys]


def _worker_bytes(costs: CostModel, stage: StageWorkers, rule: MemoryRule, layers: tuple[int, int]) -> float:
    """The bytes of one worker of a stage with the layers [first, stop)."""
    counted = {"size": stage.size, "microbatches": stage.microbatches, "in_flight": stage.most_in_flight}
    return float(rule.worker_bytes(costs, *layers, **counted, sums=stage.sums))


def _allowed(
    seconds: Sequence[np.ndarray], memory: Sequence[np.ndarray] | None, stages: Sequence[StageWorkers]
) -> Sequence[np.ndarray]:
    """The seconds of each stage with layers [row, column); inf if they do not fit. Equal stages share one array.

    Args:
        memory: as returned by `_memory`; None: there is room for any layers.
    """
    if memory is None:
        return seconds
    found: dict[tuple[int, int, float], np.ndarray] = {}
    # By identity: `_seconds` and `_memory` give equal stages the same array, and comparing arrays would cost more.
    keys = [(id(t), id(m), stage.memory_limit) for t, m, stage in zip(seconds, memory, stages, strict=True)]
    for key, t, m in zip(keys, seconds, memory, strict=True):
        if key not in found:
            found[key] = np.where((m <= key[2]) & (m < math.inf), t, math.inf)
    return [found[key] for key in keys]


def _reachable(tables: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The part of each stage's table [first, stop) with the layers that it can have if every stage has at least one.

    Stage s begins with layer s at the earliest, and after it there is a layer for each later stage. With S stages and L
    layers, row i and column j of its part stand for the layers from s + i to before s + 1 + j, i and j up to L - S.
    """
    size = len(tables[0]) - len(tables)
    return [table[s : s + size, s + 1 : s + 1 + size] for s, table in enumerate(tables)]


def _moved_bytes(near: Sequence[np.ndarray], moved: np.ndarray) -> Iterator[np.ndarray]:
    """Per stage, the bytes that move to its workers with the layers [row, column) of `_reachable`; inf if not `near`.

    Bytes add up over the layers of a stage, so a range costs the difference of two prefix sums.
    """
    for s, (is_near, of_stage) in enumerate(zip(near, moved, strict=True)):
        size, total = len(is_near), np.concatenate([[0.0], np.cumsum(of_stage)])
        yield np.where(is_near, total[None, s + 1 : s + 1 + size] - total[s : s + size, None], math.inf)


def _least(tables: Iterable[np.ndarray], size: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least `join` over all stages of the layers that each has, and the earliest cuts that reach it.

    Args:
        tables: per stage, [size, size]: what it takes with the layers [row, column) of `_reachable`.
    """
    numbers = np.arange(size)
    best = np.where(numbers == 0, 0.0, math.inf)  # the first stage begins with the first layer
    choices: list[np.ndarray] = []
    for table in tables:
        found = join(best[:, None], table)
        # argmin takes the first of equal values, so all machines choose the earliest cuts.
        choice = found.argmin(axis=0)
        best = found[choice, numbers]
        choices.append(choice)
    at = size - 1
    cuts = [at + len(choices)]
    for s in range(len(choices) - 1, -1, -1):
        at = int(choices[s][at])
        cuts.append(s + at)
    return best[-1], tuple(reversed(cuts))


def _no_room(costs: CostModel, stages: Sequence[StageWorkers], rule: MemoryRule) -> PlanError:
    """The error that describes the partition which exceeds its memory least."""
    if rule.state_limit < math.inf:
        return PlanError(
            f"no partition into {len(stages)} stages leaves each worker at most {rule.state_limit:,.0f} B of state",
            rule="a plan makes the state of one worker at most twice the even share on the mesh at the start",
            exists=f"{len(costs.layers)} layers, {sum(s.size for s in stages)} workers",
            fix="schedule.memory_limit=BYTES, what a worker has room for",
        )
    layers = ~np.tri(len(costs.layers) + 1, dtype=bool)
    memory = _memory(costs, stages, rule)
    lacking = [np.where(layers, m - s.memory_limit, math.inf) for m, s in zip(memory, stages, strict=True)]
    size = len(costs.layers) - len(stages) + 1
    excess, cuts = _least(_reachable([np.maximum(table, 0.0) for table in lacking]), size, np.maximum)
    stage = max(range(len(stages)), key=lambda s: lacking[s][cuts[s], cuts[s + 1]])
    first, stop, limit = cuts[stage], cuts[stage + 1], stages[stage].memory_limit
    needed = limit + excess
    return PlanError(
        f"stage {stage} lacks {excess:,.0f} B: layers {first}..{stop - 1} take {needed:,.0f} B on each of its "
        f"{stages[stage].size} workers, which have {limit:,.0f} B",
        rule="each worker's part of its stage fits in its memory "
        f"(of all partitions into {len(stages)} stages, this one lacks least)",
        exists=f"{len(costs.layers)} layers, {sum(s.size for s in stages)} workers",
        fix=f"it fits with {excess:,.0f} B more for each worker; or use more stages, more workers or a higher ZeRO "
        "level, or smaller micro-batches",
    )
