"""The policy of Oobleck (Jang et al., SOSP 2023): pipelines that lose workers go on with a shorter template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, MemoryRule
from elaswave_spmd.scheduling.partition import StageWorkers, partition
from elaswave_spmd.scheduling.step_time import Assignment, open_sums, step_time, traffic_bytes
from elaswave_spmd.simulator.policies import MOST_ACTIONS, Case, Outcome, columns_of


@dataclass(frozen=True)
class Templates:
    """Each replica is a pipeline of its own. If it loses workers, it goes on with a template for fewer workers.

    Modelled:

    - There are templates for half the healthy number of stages (rounded up) and more, if they fit in memory. Each has
      the best cuts for 1F1B on equal workers.
    - If a pipeline is too short for any template, its workers make up new pipelines, or go to the shortest others.
    - Micro-batches are assigned to pipelines so that the slowest pipeline is as fast as possible. The global batch
      stays the same.
    - A slow worker is waited for, or dropped, whichever is faster.
    - State is sharded over the pipelines as it is over replicas, without mirrors.
    - A recovery takes half a step if workers are lost, and the time in which the worker with the most new state gets it
      over its link.

    Not modelled: pipelines that wait for each other where they synchronise layer by layer.
    """

    name: str = "templates"

    def answer(self, case: Case) -> Outcome:
        columns = columns_of(case.healthy, self.name)
        gone = set(case.change.gone)
        slow = {rank for rank, _ in case.change.slow}
        found = [self._without(case, columns, lost) for lost in ([gone, gone | slow] if slow else [gone])]
        return min(found, key=lambda outcome: outcome.step_s)

    def _without(self, case: Case, columns: Sequence[Sequence[int]], lost: set[int]) -> Outcome:
        width = len(columns[0])
        left = [[rank for rank in column if rank not in lost] for column in columns]
        chains = _Chains(case, len(columns))
        # The shortest template has half the healthy number of stages, or is the shortest one that fits in memory.
        shortest = next((n for n in range(-(-width // 2), width + 1) if chains.cuts(n) is not None), width + 1)
        pipelines = _regrouped(left, shortest)
        if not pipelines:
            return Outcome(self.name, math.inf, 0, 0.0, "no pipeline is long enough")
        slowest = [min(case.after.speed(rank) for rank in ranks) for ranks in pipelines]
        sizes = [len(ranks) for ranks in pipelines]
        counts = chains.assign(sizes, slowest, case.healthy.num_microbatches)
        rows = list(zip(sizes, counts, slowest, strict=True))
        seconds = max(chains.seconds(size, microbatches) / speed for size, microbatches, speed in rows)
        cuts = [chains.cuts(size) or () for size in sizes]
        spans = [span for of_pipeline in cuts for span in pairwise(of_pipeline)]
        rule = replace(case.rule, mirror_count=0)
        sent = max(traffic_bytes(case.costs, rule, a, b, len(pipelines), 1) for a, b in spans)
        recovery_s = self._copying(case, pipelines, cuts) if lost else 0.0
        recovery_s += case.constants.detect_s + case.before_s / 2 if case.change.gone else 0.0
        note = f"pipelines of {sorted(sizes, reverse=True)[:8]} workers, micro-batches {list(counts)[:8]}"
        return Outcome(
            self.name, max(seconds, sent / case.costs.bandwidth), case.healthy.num_microbatches, recovery_s, note
        )

    def _copying(self, case: Case, pipelines: Sequence[Sequence[int]], cuts: Sequence[Sequence[int]]) -> float:
        """The seconds in which the worker with the most new state receives it."""
        old, total = case.healthy, case.costs.prefix("state_bytes")
        home = {rank: old.layer_cuts[s : s + 2] for s, members in enumerate(old.stages) for rank in members}
        most = 0
        for ranks, of_pipeline in zip(pipelines, cuts, strict=True):
            for rank, (first, stop) in zip(ranks, pairwise(of_pipeline), strict=False):
                a, b = home[rank]
                kept = max(0, int(total[min(b, stop)] - total[max(a, first)])) if max(a, first) < min(b, stop) else 0
                most = max(most, int(total[stop] - total[first]) - kept)
        return most / case.costs.bandwidth


def _regrouped(left: Sequence[Sequence[int]], shortest: int) -> list[list[int]]:
    """The pipelines that have a template.

    The workers of pipelines that are too short make up new ones. Those that remain go to the shortest pipelines.

    Args:
        left: the workers that are left of each pipeline.
        shortest: the number of workers of the shortest template.
    """
    pipelines = [list(ranks) for ranks in left if len(ranks) >= shortest]
    spare = [rank for ranks in left if len(ranks) < shortest for rank in ranks]
    while len(spare) >= shortest:
        pipelines.append([spare.pop() for _ in range(shortest)])
    for rank in spare if pipelines else ():
        min(pipelines, key=len).append(rank)
    return pipelines


class _Chains:
    """The templates: pipelines with one worker of speed 1 per stage. Their cuts and seconds are computed once each."""

    def __init__(self, case: Case, pipelines: int) -> None:
        self._microbatches = -(-case.healthy.num_microbatches // pipelines)
        self._limit = case.memory_limit
        self._costs = _shared(case.costs, replace(case.rule, mirror_count=0), pipelines)
        self._cuts: dict[int, tuple[int, ...] | None] = {}
        self._seconds: dict[tuple[int, int], float] = {}

    def cuts(self, size: int) -> tuple[int, ...] | None:
        """The cuts of the template for a number of workers. Workers beyond the number of layers are idle.

        Returns:
            The cuts. None if no cuts fit in memory.
        """
        number = min(size, len(self._costs.layers))
        if number not in self._cuts:
            (sums,) = open_sums([np.array([self._microbatches])], REPLICATED)
            rows = [StageWorkers(1, 1.0, self._microbatches, number - s, self._limit, sums=sums) for s in range(number)]
            try:
                self._cuts[number] = partition(self._costs, rows).cuts
            except PlanError:
                self._cuts[number] = None
        return self._cuts[number]

    def seconds(self, size: int, microbatches: int) -> float:
        """The seconds of a step of a pipeline with these numbers of workers and micro-batches."""
        if not microbatches:
            return 0.0
        if (size, microbatches) not in self._seconds:
            cuts = self.cuts(size)
            if cuts is None:
                return math.inf
            stages = tuple((rank,) for rank in range(len(cuts) - 1))
            chain = Assignment(stages, cuts, ((microbatches,),) * len(stages))
            self._seconds[size, microbatches] = step_time(chain, self._costs, most_actions=MOST_ACTIONS).pipeline_s
        return self._seconds[size, microbatches]

    def assign(self, sizes: Sequence[int], speeds: Sequence[float], num_microbatches: int) -> tuple[int, ...]:
        """The number of micro-batches of each pipeline. They are assigned one by one, to the pipeline that is fastest.

        Args:
            sizes: the number of workers of each pipeline.
            speeds: the speed of the slowest worker of each pipeline.
            num_microbatches: the number of micro-batches of the step.
        """
        counts = [0] * len(sizes)
        for _ in range(num_microbatches):
            after = [self.seconds(n, c + 1) / v for n, c, v in zip(sizes, counts, speeds, strict=True)]
            counts[after.index(min(after))] += 1
        return tuple(counts)


def _shared(costs: CostModel, rule: MemoryRule, pipelines: int) -> CostModel:
    """The costs of one pipeline, with its share of the state that is sharded over all. All workers have speed 1."""
    share = rule.state_share(pipelines)
    layers = tuple(replace(layer, state_bytes=math.ceil(layer.state_bytes * share)) for layer in costs.layers)
    return replace(costs, layers=layers, speeds=())
