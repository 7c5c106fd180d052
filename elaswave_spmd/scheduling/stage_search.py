"""The search for another number of stages, or other workers in them, whose gain pays for its move.

The search evaluates thousands of candidates, far too many to make a reshard plan for each. Here a move is estimated: in
bytes that workers must receive, which takes as long as the busiest worker's share of them takes on its link. The choice
that the search ends with is planned page by page (`state_moves`) before it is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise, permutations

import numpy as np

from elaswave_spmd.errors import PlanError
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, MemoryRule
from elaswave_spmd.scheduling.equal_stages import once_each, with_equal_shared
from elaswave_spmd.scheduling.microbatch_assignment import balanced_counts, fastest, values_before
from elaswave_spmd.scheduling.partition import Partition, StageWorkers, partition
from elaswave_spmd.scheduling.pipeline import in_flight_limits
from elaswave_spmd.scheduling.split_backward import SplitBackward, executed
from elaswave_spmd.scheduling.step_time import (
    Assignment,
    bound,
    open_sums,
    stage_seconds,
    traffic_bytes,
    weights_seconds,
)

MOST_NUMBERS = 24
"""The most numbers of stages that are tried on a large mesh: those with the smallest lower bounds."""

MOST_PARTITIONED, PARTITIONED_WORKERS = 96, 256
"""On meshes of so many workers the layers are partitioned for so many numbers of stages, to order these, and bounds
know of parked workers."""

MOST_GROUPINGS = 64
"""The local search for a number of stages ends after this many groupings, of about a millisecond each."""

_BISECTIONS = 14  # halve the range of the bottleneck, to less than a thousandth of it

_NEAR = 1.15  # the local search makes a bound better by less than this, but for rare cases
_ALL_PAIRS = 5  # with more stages, workers are moved between neighbours only

Stages = tuple[tuple[int, ...], ...]
_Way = tuple[Stages, list[np.ndarray]]  # the workers of each stage that compute, and the micro-batches of each


@dataclass(frozen=True)
class MoveEstimate:
    """An estimate of moving state for a change of stages or cuts, by a closed form: no plan is made.

    Args:
        bytes: state that workers receive.
        seconds: seconds for which the busiest link is occupied.
    """

    bytes: float
    seconds: float


class MoveEstimates:
    """Estimates of moving layers to the stages of a new grouping of the workers.

    They count one copy of each page, evenly spread over its old stage. Without mirrors and losses that is what the
    reshard plan moves, to a page for each worker; mirrors that lie where layers go only make a plan cheaper. A property
    test in tests/unit/scheduling/test_state_moves.py holds the closed form to this, on random uneven meshes.

    Args:
        old_cuts: workers of old stage s have layers [old_cuts[s], old_cuts[s + 1]).
        was: per new stage, int64 [workers]: the old stage of each worker; -1 for newcomers.
    """

    def __init__(self, costs: CostModel, old_cuts: Sequence[int], was: Sequence[np.ndarray]) -> None:
        overlap = np.stack([np.bincount(of_stage + 1, minlength=len(old_cuts)) for of_stage in was])
        self._costs = costs
        self._state = np.array([layer.state_bytes for layer in costs.layers], np.float64)
        self._home = np.searchsorted(np.array(old_cuts), np.arange(len(costs.layers)), "right") - 1
        self._shared = overlap[:, 1:]  # [new stages, old stages]: workers that are in both
        self._size = overlap.sum(axis=1)
        self._old_size = np.maximum(self._shared.sum(axis=0), 1)

    def table(self, rule: MemoryRule) -> np.ndarray:
        """float64 [stages, layers]: bytes that a stage's workers receive if it gets a layer, for a sum over layers.

        Of sharded state, a worker keeps what it has of the layer, up to its new share. This is an upper bound: workers
        of a stage may be even over all of its layers without being even in each. Replicated state is sent as a whole to
        every worker that lacks it.
        """
        if not rule.state_is_sharded:
            copies = self._size[:, None] - self._shared
        else:
            kept = self._shared * np.minimum(1 / self._old_size[None, :], 1 / self._size[:, None])
            copies = np.maximum(1 - kept, 0.0)
        copies = np.where(copies < 1e-9, 0.0, copies)
        return copies[:, self._home] * self._state

    def to(self, cuts: Sequence[int], rule: MemoryRule) -> MoveEstimate:
        """The estimate for moving to these cuts, over all layers of each stage together."""
        moving = np.zeros(
            self._shared.shape
        )  # [new stages, old stages]: bytes of the layers that pass from one to the other
        np.add.at(moving, (np.repeat(np.arange(len(cuts) - 1), np.diff(cuts)), self._home), self._state)
        if rule.state_is_sharded:
            share = moving.sum(axis=1) / self._size
            kept = self._shared * np.minimum(moving / self._old_size, share[:, None])
            into, out = moving.sum(axis=1) - kept.sum(axis=1), moving.sum(axis=0) - kept.sum(axis=0)
        else:
            sent = moving * (self._size[:, None] - self._shared)
            into, out = sent.sum(axis=1), sent.sum(axis=0)
        total = float(self._state.sum())
        into, out = (np.where(part < 1e-9 * total, 0.0, part) for part in (into, out))
        busiest = max((into / self._size).max(), (out / self._old_size).max())
        seconds = busiest / self._costs.bandwidth + self._costs.latency_s if busiest else 0.0
        return MoveEstimate(float(into.sum()), float(seconds))


@dataclass(frozen=True)
class StageChoice:
    """A grouping of the workers into stages, with the layers of each.

    Args:
        stages: ranks of each stage.
        partitions: the layers of each stage; if there are two, the one with the smaller lower bound comes first.
        seconds: a lower bound of the step time with the first partition, links included.
        move: an estimate of moving there.
        reason: one line for the log.
    """

    stages: Stages
    partitions: tuple[Partition, ...]
    seconds: float
    move: MoveEstimate
    reason: str

    @property
    def partition(self) -> Partition:
        """The layers of each stage."""
        return self.partitions[0]

    def __str__(self) -> str:
        return f"{self.reason}\n  {self.partition}\n  {self.move.bytes:,.0f} B move, by estimate"


def old_stages_of(stages: Sequence[Sequence[int]], old_stages: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Per stage, int64 [workers]: the old stage of each worker; -1 for newcomers."""
    home = np.repeat(np.arange(len(old_stages)), [len(members) for members in old_stages])
    return values_before(stages, old_stages, home, -1)


def stage_workers(
    speeds: Sequence[np.ndarray],
    num_microbatches: int,
    memory_limit: float,
    split: SplitBackward | None = None,
    rule: MemoryRule = REPLICATED,
) -> tuple[list[StageWorkers], list[np.ndarray]]:
    """The arguments of `partition` for these stages, and per stage the balanced micro-batches of each worker.

    Args:
        speeds: per stage, float64 [workers].
        memory_limit: bytes of each worker.
        split: where backwards are in two parts, fewer micro-batches are in flight where memory is short
            (`SplitBackward.executed`): what has to fit is one.
        rule: the specs, which decide how many gradient sums a worker holds.
    """
    counts = once_each(lambda v: balanced_counts(num_microbatches, v), with_equal_shared(speeds))
    if split is None:
        limits = in_flight_limits([len(v) for v in speeds], once_each(np.ndarray.tolist, counts))
    else:
        limits = (1,) * len(speeds)
    rows = zip(speeds, counts, limits, open_sums(counts, rule), strict=True)
    found = [
        StageWorkers(len(v), float((c / v).max()), int(c.max()), limit, memory_limit, float(v.max()), held)
        for v, c, limit, held in rows
    ]
    return found, counts


def regroup(old: Sequence[int] | np.ndarray, old_cuts: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The sizes of `num_stages` contiguous groups of workers, which differ by one at most.

    Which groups are larger is chosen so that workers stay near their layers. Stage s of S new stages will have about
    the part [s/S, (s+1)/S) of the layers, so the choice maximizes the sum, over workers, of the overlap of this part
    with the layers that the worker has. Dynamic programming over (stage, larger groups so far).

    Args:
        old: int64 [workers]: the old stage of each worker, in the order in which they are grouped; -1 for newcomers.
        old_cuts: old stage s had layers [old_cuts[s], old_cuts[s + 1]).
    """
    was = np.asarray(old)
    base, extra = divmod(len(was), num_stages)
    assert base, (len(was), num_stages)
    if not extra:
        return (base,) * num_stages
    # Neighbours with the same old stage count as one piece, so the cost does not grow with the number of workers.
    turns = np.flatnonzero(np.diff(was)) + 1
    at = np.concatenate([[0], turns, [len(was)]])
    of_run = was[at[:-1]]
    edges = np.array(old_cuts) / old_cuts[-1]
    first = np.where(of_run >= 0, edges[of_run], 0.0)
    last = np.where(of_run >= 0, edges[np.minimum(of_run + 1, len(edges) - 1)], 0.0)
    best = np.full(extra + 1, -math.inf)
    best[0] = 0.0
    taken = np.zeros((num_stages, extra + 1), bool)
    for s in range(num_stages):
        common = np.minimum(last, (s + 1) / num_stages) - np.maximum(first, s / num_stages)
        gain = np.concatenate([[0.0], np.cumsum(np.maximum(common, 0.0) * np.diff(at))])
        start = s * base + np.arange(extra + 1)  # the first worker of group s, by the number of larger groups before it
        before = np.interp(start, at, gain)
        stay = best + np.interp(start + base, at, gain) - before
        more = np.concatenate([[-math.inf], (best + np.interp(start + base + 1, at, gain) - before)[:-1]])
        # Strictly more: of equal choices the earlier groups are the larger ones, on every machine.
        taken[s] = more > stay
        best = np.maximum(stay, more)
    sizes, left = [], extra
    for s in range(num_stages - 1, -1, -1):
        sizes.append(base + int(taken[s, left]))
        left -= int(taken[s, left])
    return tuple(reversed(sizes))


@dataclass(frozen=True)
class Groupings:
    """The search over groupings of the workers into stages. Workers keep their order.

    The best grouping has the smallest expected time until the end: (remaining steps x seconds of a step) + its move.

    Args:
        stages: the present workers, by stage. More stages than layers have to be regrouped.
        num_microbatches: micro-batches of a step.
        old_stages, old_cuts: the stages and cuts before, which say where state is.
        remaining_steps: steps until the run ends.
        memory_limit: bytes of each worker.
        split: the layers whose backward is in two parts; None: all backwards are whole.
    """

    costs: CostModel
    stages: Sequence[Sequence[int]]
    num_microbatches: int
    old_stages: Sequence[Sequence[int]]
    old_cuts: Sequence[int]
    remaining_steps: int
    rule: MemoryRule = REPLICATED
    memory_limit: float = math.inf
    split: SplitBackward | None = None
    _evaluated: dict[tuple[int, ...], StageChoice | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def best(self, stage_counts: Collection[int] | None = None) -> StageChoice:
        """The best of the present grouping and all even groupings, by lower bound.

        Tried are the present stages, with the present layers and with the best partition, and for each allowed number
        of stages the groups of `regroup`. Numbers of stages are left out if their lower bound is no better than what
        was found, or if they are not among the MOST_NUMBERS best. The present stages win ties, then the fewest stages.

        Args:
            stage_counts: numbers of stages to try, besides the present one; None: all.

        Raises:
            PlanError: no grouping fits in memory; the error is that of the present number of stages, or of the last.
        """
        best: StageChoice | None = None
        error: PlanError | None = None
        if len(self.stages) <= self.most:
            sizes = [len(members) for members in self.stages]
            try:
                # An infinite tolerance keeps the layers where they are, if they fit in memory.
                best = self.evaluate(sizes, "the stages as they are", math.inf)
                best = min(best, self.evaluate(sizes, "the stages as they are, other layers"), key=self.total)
            except PlanError as found:
                error = found
        for least, number in self.numbers(stage_counts):
            # Numbers come in the order of their lower bounds: from here on none can be better.
            if best is not None and least * self.remaining_steps >= self.total(best):
                break
            try:
                found = self.evaluate(self.evenly(number), f"{number} stages")
            except PlanError as lacks:
                error = error or lacks
                continue
            if best is None or self.total(found) < self.total(best):
                best = found
        if best is None:
            raise error or PlanError(f"no number of stages is allowed ({stage_counts})")
        return best

    def of_number(self, number: int, below: float = math.inf) -> list[StageChoice]:
        """Groupings into so many stages of any sizes, the best lower bound first; none, if nothing fits in memory.

        Local search, for small meshes: starting from the even and from the present grouping, and from the one with the
        least bottleneck, one worker is moved to another stage as long as that helps.

        Args:
            below: seconds until the end; where not even a start is near these there is no search.
        """
        known: dict[tuple[int, ...], StageChoice | None] = {}

        def total(sizes: tuple[int, ...]) -> float:
            found = known[sizes] = self._evaluate_once(sizes)
            return math.inf if found is None else self.total(found)

        starts = {self.evenly(number), self.balanced(number) or self.evenly(number)}
        if number == len(self.stages):
            starts.add(tuple(map(len, self.stages)))
        if number == 2 and below:  # few enough to look at all
            starts |= {(size, len(self.order) - size) for size in range(1, len(self.order))}
        for sizes in sorted(starts):
            while total(sizes) < _NEAR * below and len(known) < MOST_GROUPINGS:
                found = min(_one_moved(sizes), key=total, default=sizes)
                if total(found) >= total(sizes):
                    break
                sizes = found
        return sorted(filter(None, known.values()), key=self.total)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The workers in stage order."""
        return tuple(chain.from_iterable(self.stages))

    @cached_property
    def was(self) -> np.ndarray:
        """int64 [workers]: the old stage of each worker."""
        return np.concatenate(old_stages_of(self.stages, self.old_stages))

    @property
    def most(self) -> int:
        """The largest possible number of stages."""
        return min(len(self.costs.layers), len(self.order))

    def numbers(self, stage_counts: Collection[int] | None) -> list[tuple[float, int]]:
        """(least seconds of a step, number of stages) of the allowed numbers, the best first.

        On small meshes these are the seconds of the best partition among even and `balanced` stages, as far as there is
        one that fits in memory. `least_seconds` knows nothing of layers, which are cut between blocks: by it alone, the
        number that had been the best before a loss was none of those that were tried.
        """
        allowed = range(1, self.most + 1) if stage_counts is None else {n for n in stage_counts if 1 <= n <= self.most}
        found = sorted((self.least_seconds(number), number) for number in allowed)
        if len(self.order) > PARTITIONED_WORKERS:
            return found[:MOST_NUMBERS]
        return sorted((self._starting_seconds(number) or least, number) for least, number in found[:MOST_PARTITIONED])

    def _starting_seconds(self, number: int) -> float:
        """A lower bound for the starts of a search, with the best partition; 0 if their layers do not fit in memory."""
        found = self.of_number(number, 0.0)
        return found[0].seconds if found else 0.0

    def evenly(self, number: int) -> tuple[int, ...]:
        """The sizes of so many stages, as even as possible."""
        return regroup(self.was, self.old_cuts, number)

    def balanced(self, number: int) -> tuple[int, ...] | None:
        """The sizes of so many stages with the least bottleneck, if all workers were equally fast; None if none are.

        Layers are not to be divided: stages with a layer more than others get more workers. For a bound of the
        bottleneck every run of layers needs so many workers; dynamic programming finds the runs that need the fewest in
        all, and bisection the least bound for which there are enough.
        """
        workers, microbatches = len(self.order), self.num_microbatches
        total_s = np.concatenate([[0.0], np.cumsum([layer.seconds for layer in self.costs.layers])])
        spans = np.triu(total_s[None, :] - total_s[:, None])
        low, high = 0.0, float(spans[0, -1]) * microbatches
        best = _fewest_workers(spans, microbatches, high, number) if number <= min(workers, len(spans) - 1) else None
        if best is None or not high:
            return None
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2 if low else high / number
            sizes = _fewest_workers(spans, microbatches, middle, number)
            if sizes is not None and sum(sizes) <= workers:
                best, high = sizes, middle
            else:
                low = middle
        spare = workers - sum(best)
        return tuple(size + (s < spare % number) + spare // number for s, size in enumerate(best))

    @cached_property
    def speeds(self) -> np.ndarray:
        """float64 [workers]."""
        return self.costs.speeds_of(self.order)

    @cached_property
    def _speed_limits(self) -> tuple[float, float]:
        """The highest speed of a worker, and the sum of all."""
        return float(self.speeds.max()), float(self.speeds.sum())

    @cached_property
    def _layer_seconds(self) -> tuple[float, float, float]:
        """Seconds of one micro-batch at speed 1: of all layers, of the longest one, and those that may be put off."""
        each = [layer.seconds for layer in self.costs.layers]
        late_s = 0.0 if self.split is None else sum(layer.weights_s for layer in self.costs.layers)
        return sum(each), max(each), late_s

    def total(self, choice: StageChoice) -> float:
        """Expected seconds until the end of the run."""
        return choice.seconds * self.remaining_steps + choice.move.seconds

    def least_seconds(self, num_stages: int) -> float:
        """A lower bound of the step time with so many even stages.

        A stage of n workers has a load of at least ceil(micro-batches / n) / the highest speed, and all loads together
        at least that of all speeds. The compute of stage s starts and ends after a micro-batch has passed the stages
        before it, which takes P_s of its whole path, so the stage can have at most (bound - P_s) / load_s of the path.
        Summed over the stages, the whole path W is at most bound x (1 - product over stages of (1 - 1 / (load x highest
        speed))). Weight gradients that may be put off are left out of the path.
        """
        fastest, all_speeds = self._speed_limits
        microbatch_s, longest_s, late_s = self._layer_seconds
        microbatches = self.num_microbatches
        base, extra = divmod(len(self.order), num_stages)
        loads = [-(-microbatches // (base + 1)) / fastest] * extra + [-(-microbatches // base) / fastest] * (
            num_stages - extra
        )
        together = min(sum(1 / load for load in loads), all_speeds / microbatches)
        way = (microbatch_s - late_s) / fastest / (1 - math.prod(1 - 1 / (load * fastest) for load in loads))
        return max(microbatch_s / together, longest_s * min(loads), way)

    def _evaluate_once(self, sizes: tuple[int, ...]) -> StageChoice | None:
        """The choice with stages of these sizes and the best partition; None if the layers do not fit in memory."""
        if sizes not in self._evaluated:
            self._evaluated[sizes] = None
            with suppress(PlanError):
                self._evaluated[sizes] = self.evaluate(sizes, f"{len(sizes)} stages")
        return self._evaluated[sizes]

    def evaluate(self, sizes: Sequence[int], name: str, tolerance: float = 0.0) -> StageChoice:
        """The choice with stages of these sizes, partitioned within a tolerance.

        Without one, on meshes that are not too large, there are two partitions: by the bottleneck and by the whole
        pipeline.

        Raises:
            PlanError: the layers do not fit in memory.
        """
        parts = [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]
        speeds = [self.speeds[part] for part in parts]
        rows, counts = stage_workers(speeds, self.num_microbatches, self.memory_limit, self.split, self.rule)
        moves = MoveEstimates(self.costs, self.old_cuts, [self.was[part] for part in parts])
        table = moves.table(self.rule)
        both = tolerance == 0.0 and len(sizes) > 1 and len(self.order) <= PARTITIONED_WORKERS
        every = [
            partition(self.costs, rows, rule=self.rule, move_bytes=table, tolerance=tolerance, by_pipeline=by_pipeline)
            for by_pipeline in ((False, True) if both else (False,))
        ]
        stages = tuple(self.order[part] for part in parts)
        ways = self._ways(stages, speeds, counts)
        by_cuts = {each.cuts: each for each in every}
        bounds = {cuts: self._step_seconds(ways, cuts, [row.in_flight for row in rows]) for cuts in by_cuts}
        found = sorted(by_cuts.values(), key=lambda each: bounds[each.cuts])
        best = found[0].cuts
        shown = "-".join(map(str, sizes[:12])) + ("-..." if len(sizes) > 12 else "")
        reason = f"{name} (workers {shown}): {bounds[best]:.4g} s a step, {self.remaining_steps} steps left"
        return StageChoice(stages, tuple(found), bounds[best], moves.to(best, self.rule), reason)

    def _ways(self, stages: Stages, speeds: Sequence[np.ndarray], counts: list[np.ndarray]) -> list[_Way]:
        """The ways in which these stages may compute: all of their workers, and as many of each as the smallest has.

        Workers of larger stages may be parked, so that micro-batches of all stages are cut at the same places.
        """
        sizes = [len(members) for members in stages]
        if (level := min(sizes)) == max(sizes) or len(self.order) > PARTITIONED_WORKERS:
            return [(stages, counts)]
        active = tuple(tuple(members[i] for i in fastest(v, level)) for members, v in zip(stages, speeds, strict=True))
        even = [balanced_counts(self.num_microbatches, self.costs.speeds_of(members)) for members in active]
        return [(stages, counts), (active, even)]

    def _step_seconds(self, ways: Sequence[_Way], cuts: tuple[int, ...], in_flight: Sequence[int]) -> float:
        """A lower bound of the step time, links included.

        Args:
            ways: those in which the stages may compute, all of their workers first.
            in_flight: as for `_pipeline_seconds`.
        """
        pipeline_s = min(self._pipeline_seconds(active, cuts, counts, in_flight) for active, counts in ways)
        spans = zip(pairwise(cuts), ways[0][0], strict=True)
        sent = max(traffic_bytes(self.costs, self.rule, a, b, len(members), 1) for (a, b), members in spans)
        return max(pipeline_s, sent / self.costs.bandwidth)

    def _pipeline_seconds(
        self, stages: Stages, cuts: tuple[int, ...], counts: Sequence[np.ndarray], in_flight: Sequence[int]
    ) -> float:
        """A lower bound of the pipeline's seconds if these workers have so many micro-batches each.

        Args:
            in_flight: by stage, micro-batches in flight, where backwards are whole.
        """
        speeds = [self.costs.speeds_of(members) for members in stages]
        forward, backward, delays = stage_seconds(cuts, self.costs)
        forward_s = [f / v for f, v in zip(forward, speeds, strict=True)]
        backward_s = [b / v for b, v in zip(backward, speeds, strict=True)]
        if self.split is None:
            return bound(forward_s, backward_s, counts, delays, in_flight)
        balanced = tuple(tuple(of_stage.tolist()) for of_stage in counts)
        assignment = executed(Assignment(stages, cuts, balanced), self.split)
        weights_s = [w / v for w, v in zip(weights_seconds(assignment, self.costs), speeds, strict=True)]
        return bound(forward_s, backward_s, counts, delays, list(assignment.limits), weights_s, assignment.put_off)


def _fewest_workers(spans: np.ndarray, microbatches: int, most_s: float, number: int) -> tuple[int, ...] | None:
    """The sizes of so many stages that need the fewest workers, if none computes for longer; None if none are enough.

    Args:
        spans: float64 [layers + 1, layers + 1]: seconds of one micro-batch through layers [row, column), row < column.
        most_s: seconds that the busiest worker may compute.
    """
    runs = np.triu(np.ones_like(spans, bool), 1)
    share = np.floor(most_s * (1 + 1e-12) / np.where(spans > 0, spans, most_s / microbatches))
    needed = np.where(runs & (share >= 1), np.ceil(microbatches / np.clip(share, 1, microbatches)), np.inf)
    last = len(spans) - 1
    before = np.where(np.arange(last + 1) == 0, 0.0, np.inf)
    choices = []
    for _ in range(number):
        sums = before[:, None] + needed
        choices.append(sums.argmin(axis=0))
        before = sums.min(axis=0)
    if not math.isfinite(before[last]):
        return None
    sizes, stop = [], last
    for of_stage in reversed(choices):
        first = int(of_stage[stop])
        sizes.append(int(needed[first, stop]))
        stop = first
    return tuple(reversed(sizes))


def _one_moved(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sizes of stages that result from moving one worker to another stage; of many stages, to a neighbour."""
    return [
        tuple(size - (s == a) + (s == b) for s, size in enumerate(sizes))
        for a, b in permutations(range(len(sizes)), 2)
        if sizes[a] > 1 and (len(sizes) <= _ALL_PAIRS or abs(a - b) == 1)
    ]
