"""The least seconds of a step over all ways to group workers, cut layers and assign whole micro-batches.

Workers of equal speed are alike. Two figures: `bound_s`, which no grouping and no order of actions falls below, and
`best_s`, the least that a simulated step of any grouping takes, found by looking at groupings in the order of their
bounds until none that is left can be better.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product

import numpy as np

from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, MemoryRule
from elaswave_spmd.scheduling.microbatch_assignment import candidate_assignments, least_load
from elaswave_spmd.scheduling.placement import CONTIGUOUS
from elaswave_spmd.scheduling.split_backward import SplitBackward, best_limits, executed
from elaswave_spmd.scheduling.step_time import Assignment, memory_of, open_sums, step_time

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """The least seconds of a step, and an assignment that reaches them.

    Args:
        bound_s: a lower bound for all groupings and all orders of their actions.
        best_s: the least seconds of the steps that were simulated.
        assignment: the assignment that takes best_s.
        proven: no step of any grouping takes less than best_s; False: the search was cut off.
        looked_at: number of groupings whose steps were simulated.
    """

    bound_s: float
    best_s: float
    assignment: Assignment
    proven: bool
    looked_at: int


def optimum(
    costs: CostModel,
    ranks: Sequence[int],
    num_microbatches: int,
    *,
    stage_counts: Collection[int] | None = None,
    rule: MemoryRule = REPLICATED,
    memory_limit: float = math.inf,
    microbatch_order: str = CONTIGUOUS,
    split: SplitBackward | None = None,
    most: int = 400,
) -> Optimum | None:
    """Search all groupings of these workers for the fastest step.

    Args:
        ranks: the workers. Workers of equal speed may stand for each other.
        stage_counts: numbers of stages that are allowed; None: any.
        split: the layers whose backward is in two parts; None: all backwards are whole.
        most: the most groupings whose lists are timed.

    Returns: None if no grouping fits in memory.
    """
    search = _Search(costs, tuple(ranks), num_microbatches, rule, memory_limit, microbatch_order, split)
    allowed = frozenset(range(1, min(len(ranks), len(costs.layers)) + 1) if stage_counts is None else stage_counts)
    best, timed, least = math.inf, [], math.inf
    for bound_s, stages in search.by_bound(allowed):
        least = min(least, bound_s)
        # Groupings come in the order of their bounds: from here on none can be better.
        if bound_s >= best or len(timed) == most:
            break
        timed.append(search.timed(stages))
        best = min(best, timed[-1][0])
    else:
        bound_s = math.inf
    if best == math.inf:
        return None
    best, chosen = search.limited(timed)
    return Optimum(least, best, chosen, bound_s >= best, len(timed))


_NEAR, _MOST_LIMITED = 1.25, 32  # groupings that take less than this part more than the best, and at most so many
Stage = tuple[int, int, Counts]
"""Layers [first, stop), and the number of workers of each class of speed."""


@dataclass(frozen=True)
class _Search:
    costs: CostModel
    ranks: tuple[int, ...]
    num_microbatches: int
    rule: MemoryRule
    memory_limit: float
    microbatch_order: str
    split: SplitBackward | None

    @cached_property
    def classes(self) -> list[tuple[float, list[int]]]:
        """(speed, ranks), the fastest first."""
        speeds: dict[float, list[int]] = {}
        for rank in self.ranks:
            speeds.setdefault(self.costs.speed(rank), []).append(rank)
        return sorted(speeds.items(), reverse=True)

    @cached_property
    def total(self) -> np.ndarray:
        return self.costs.prefix("forward_s") + self.costs.prefix("backward_s")

    @cached_property
    def way(self) -> np.ndarray:
        """Seconds in which nothing of a stage can be done, by its first layer: those of the layers before it.

        Their backwards come after it only if it puts nothing off: else it may end the step itself.
        """
        return self.total if self.split is None else self.costs.prefix("forward_s")

    def by_bound(self, allowed: frozenset[int]) -> Iterator[tuple[float, tuple[Stage, ...]]]:
        """All groupings into allowed numbers of stages, the least bound first (best-first search)."""
        whole = tuple(len(ranks) for _, ranks in self.classes)
        numbers = count()
        heap: list[tuple[float, int, float, tuple[Stage, ...], Counts]] = []
        most = max(allowed)
        heapq.heappush(heap, (self.rest(0, whole), next(numbers), 0.0, (), whole))
        while heap:
            bound_s, _, sofar, stages, left = heapq.heappop(heap)
            first = stages[-1][1] if stages else 0
            if first == len(self.costs.layers):
                yield bound_s, stages
                continue
            for stop, used in self.options(first, left):
                number, others = len(stages) + 1, tuple(a - b for a, b in zip(left, used, strict=True))
                ends = stop == len(self.costs.layers)
                # All layers must have a stage, and all workers a place, at the same moment.
                if (ends and (any(others) or number not in allowed)) or (not ends and number >= most):
                    continue
                this = max(sofar, self.stage_s(first, stop, used))
                after = max(this, 0.0 if ends else self.rest(stop, others))
                if after < math.inf:
                    item = after, next(numbers), this, (*stages, (first, stop, used)), others
                    heapq.heappush(heap, item)

    def options(self, first: int, left: Counts) -> Iterator[tuple[int, Counts]]:
        """(stop, workers of each class) of every possible next stage, which begins at layer `first`."""
        for used in product(*(range(n + 1) for n in left)):
            if any(used):
                last = used == left
                for stop in range(len(self.costs.layers) if last else first + 1, len(self.costs.layers) + 1):
                    yield stop, used

    def stage_s(self, first: int, stop: int, used: Counts) -> float:
        """A lower bound of a step with this stage: the way of the first micro-batch, and all its micro-batches."""
        if self.memory_limit < math.inf:
            is_last = stop == len(self.costs.layers)
            if self.memory(sum(used), is_last=is_last)[first, stop] > self.memory_limit:
                return math.inf
        fastest = self.classes[0][0]
        return float(self.way[first] / fastest + self.load(used) * (self.total[stop] - self.total[first]))

    @cached_property
    def _known(self) -> dict[tuple[int, Counts], float]:
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[int, bool], np.ndarray]:
        return {}

    def rest(self, first: int, left: Counts) -> float:
        """The least bound of layers [first, ...) on the workers that are left, in any number of stages."""
        key = first, left
        if key not in self._known:
            found = math.inf
            for stop, used in self.options(first, left):
                this = self.stage_s(first, stop, used)
                others = tuple(a - b for a, b in zip(left, used, strict=True))
                if stop == len(self.costs.layers):
                    found = found if any(others) else min(found, this)
                elif this < found and any(others):
                    found = min(found, max(this, self.rest(stop, others)))
            self._known[key] = found
        return self._known[key]

    @cached_property
    def _loads(self) -> dict[Counts, float]:
        return {}

    def load(self, used: Counts) -> float:
        """The least largest load of a stage with so many workers of each class."""
        if used not in self._loads:
            self._loads[used] = least_load(self.num_microbatches, self.speeds(used))
        return self._loads[used]

    def speeds(self, used: Counts) -> np.ndarray:
        """float64[workers] of a stage."""
        return np.repeat([speed for speed, _ in self.classes], used)

    def memory(self, size: int, *, is_last: bool) -> np.ndarray:
        """A lower bound of the bytes of the fullest worker of a stage, whatever the assignment of micro-batches.

        Args:
            size: the number of its workers.
            is_last: no stage comes after it.
        """
        if (key := (size, is_last)) not in self._tables:
            microbatches = -(-self.num_microbatches // size)
            # Where another stage comes after it, two micro-batches are in flight by the usual rule, of columns that are
            # left if workers are parked as well. With backwards in two parts, memory may leave room for one alone.
            in_flight = 1 if is_last or self.split is not None else 2
            # A range of 2^k - 1 micro-batches has k nodes of the tree at least, wherever it begins.
            sums = max(1, microbatches.bit_length() - 1)
            if self.rule.gradients_are_sharded:
                (sums,) = open_sums([np.array([self.num_microbatches])], self.rule)
            counted = {"size": size, "microbatches": microbatches, "in_flight": in_flight, "sums": sums}
            self._tables[key] = self.rule.stage_bytes(self.costs, **counted)
        return self._tables[key]

    def timed(self, stages: Sequence[Stage]) -> tuple[float, Assignment]:
        """The fastest assignment of a grouping, as executed, over the candidate assignments of
        micro-batches."""
        queues = [list(ranks) for _, ranks in self.classes]
        members = tuple(
            tuple(queue.pop(0) for queue, n in zip(queues, used, strict=True) for _ in range(n)) for *_, used in stages
        )
        cuts = (0, *(stop for _, stop, _ in stages))
        speeds = [self.costs.speeds_of(ranks) for ranks in members]
        found = []
        for candidate in candidate_assignments(self.num_microbatches, speeds, microbatch_order=self.microbatch_order):
            assignment = executed(Assignment(members, cuts, candidate.counts, self.microbatch_order), self.split)
            fits = max(memory_of(assignment, self.costs, self.rule)) <= self.memory_limit
            seconds = step_time(assignment, self.costs, self.rule).seconds if fits else math.inf
            found.append((seconds, assignment))
        return min(found, key=lambda pair: pair[0])

    def limited(self, timed: Sequence[tuple[float, Assignment]]) -> tuple[float, Assignment]:
        """The fastest of these, the best ones with the limits that a simulation prefers.

        Other limits gain a few per cent, and up to a fifth on few workers: only those that are near can be the fastest.
        """
        ranked = sorted(timed, key=lambda pair: pair[0])
        if self.split is None:
            return ranked[0]
        near = [assignment for seconds, assignment in ranked[:_MOST_LIMITED] if seconds < _NEAR * ranked[0][0]]
        found = []
        for assignment in near:
            by_rule = step_time(assignment, self.costs, self.rule)
            chosen, time = best_limits(assignment, by_rule, self.split, self.costs, self.rule)
            found.append((time.seconds, chosen))
        return min(found, key=lambda pair: pair[0])
