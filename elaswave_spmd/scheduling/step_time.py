"""The expected time of a step of an assignment, under a cost model.

Workers run any action that is ready (`worker.ready_order`), so a step is simulated as they would execute it, by
`pipeline.execute` with the seconds of each worker. This takes time, so on large meshes less is simulated. Workers are
divided into *pieces*, groups of workers that share micro-batches with no other worker, and of equal pieces only one is
simulated. If even that has too many actions, only the pieces with the most to compute are simulated, or a section of
one piece. `StepTime.how` says whether all of the step was simulated.

The reduction of gradients overlaps with compute. It counts in two ways: the whole step takes at least as long as its
bytes occupy the busiest link (a roofline), and the part of the reduction after the last backward comes on top
(`reduction_time`, or `reduction_tail_s` if only parts of a step are simulated). Activations and their gradients leave a
worker one after another. Not modelled here are partial sums that wait for activations on the same link, and the
optimizer update. The simulator's engine models these.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice, pairwise

import numpy as np

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.action_graph import ActionGraph
from elaswave_spmd.scheduling.cost_model import REPLICATED, CostModel, MemoryRule
from elaswave_spmd.scheduling.equal_stages import once_each
from elaswave_spmd.scheduling.microbatch_assignment import count_tree_nodes, most_open_sums
from elaswave_spmd.scheduling.pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Schedule,
    execute,
    in_flight_limits,
    schedule,
    turns_of_ways,
)
from elaswave_spmd.scheduling.placement import CONTIGUOUS, TIME_MAJOR, Placement, workers_of_microbatches
from elaswave_spmd.scheduling.reduction_time import StageGradients, nodes_of, reduced_at
from elaswave_spmd.sharding import P, Shardings

MOST_ACTIONS = 8192
"""The most actions that are simulated by default, as more would make planning slow. A split backward counts as one."""

_MOST_PIECES = 256
"""If there are more pieces, only the first of equal ones is listed, so only its tree nodes count in the reduction."""

_KEY_BYTES = 16  # the bytes of a worker's number of micro-batches and its speed, both float64

EXACT, PART, ESTIMATE = "executed order", "executed order of a part", "lower bound"


@dataclass(frozen=True)
class Assignment:
    """The part of a placement that decides its step time: which workers run which layers for how many micro-batches.

    Args:
        stages: the ranks of each stage.
        layer_cuts: stage s runs layers [layer_cuts[s], layer_cuts[s + 1]).
        microbatch_counts: for each stage, the number of micro-batches of each worker.
        microbatch_order: as `Placement.microbatch_order`.
        put_off: for each stage, the most micro-batches of which a worker puts off the weight gradients
            (`scheduling.split_backward`); () if all backwards run in one part.
        in_flight: for each stage, the most micro-batches that a worker has between forward and backward; () for the
            numbers of `pipeline.in_flight_limits`.
    """

    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    microbatch_order: str = CONTIGUOUS
    put_off: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> Assignment:
        """The assignment of a placement, with whole backwards."""
        return cls(placement.mesh.stages, placement.layer_cuts, placement.microbatch_counts, placement.microbatch_order)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return sum(self.microbatch_counts[0])

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def limits(self) -> tuple[int, ...]:
        """The most micro-batches that a worker of each stage has in flight."""
        return self.in_flight or self.usual_limits

    @cached_property
    def usual_limits(self) -> tuple[int, ...]:
        """The limits in flight that follow from the micro-batches alone (`pipeline.in_flight_limits`)."""
        return in_flight_limits([len(members) for members in self.stages], self.microbatch_counts)

    @cached_property
    def counts(self) -> list[np.ndarray]:
        """`microbatch_counts` as int64 [workers] for each stage. Stages that share a tuple share an array, too."""
        return once_each(np.array, self.microbatch_counts)

    def placement(self) -> Placement:
        """A placement with these stages, cuts and counts, on one host, for `pipeline.schedule`."""
        mesh = Mesh(MeshShape.of_stages(map(len, self.stages)), self.stages)
        # The only spec that matters here is that of the gradients, as it decides the order of micro-batches.
        is_time_major = self.microbatch_order == TIME_MAJOR
        shardings = Shardings(grads=P("dp"), optim=P("dp")) if is_time_major else Shardings()
        return Placement(mesh, self.num_microbatches, self.layer_cuts, self.microbatch_counts, shardings)

    def __str__(self) -> str:
        lines = []
        for s, (members, counts) in enumerate(zip(self.stages, self.microbatch_counts, strict=True)):
            shown = (
                f"{list(members)}, micro-batches {list(counts)}" if len(members) <= 16 else f"{len(members):,} of them"
            )
            lines.append(f"stage {s}: layers {self.layer_cuts[s]}..{self.layer_cuts[s + 1] - 1}, workers {shown}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StepTime:
    """The expected seconds of a step.

    Args:
        seconds: the larger of pipeline_s + tail_s and traffic_s.
        pipeline_s: the time until the last action ends, computed as `how` says.
        bottleneck_s: the longest compute of a worker: micro-batches * seconds of its stage / speed.
        bound_s: a lower bound for every order of the actions: the bottleneck, and the filling and draining of the
            pipeline around it (`bound`).
        tail_s: seconds for which the reduction goes on after the last backward.
        traffic_s: seconds for which reduction and publication occupy the busiest link.
        worker: the rank with the longest compute.
        how: EXACT, PART if not all actions were simulated, or ESTIMATE if none were.
    """

    seconds: float
    pipeline_s: float
    bottleneck_s: float
    bound_s: float
    tail_s: float
    traffic_s: float
    worker: int
    how: str

    def __str__(self) -> str:
        return (
            f"{self.seconds:.4g} s a step ({self.how} {self.pipeline_s:.4g} s, then {self.tail_s:.4g} s of reduction; "
            f"worker {self.worker} computes {self.bottleneck_s:.4g} s, links {self.traffic_s:.4g} s)"
        )


def stage_seconds(cuts: Sequence[int], costs: CostModel) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """(forward, backward, delays), all in seconds.

    The first two are float64 [stages]: the forward and the backward of one micro-batch at speed 1. The third has the
    time of a message from each stage but the last to the next one.
    """
    at = np.array(cuts)
    forward, backward = np.diff(costs.prefix("forward_s")[at]), np.diff(costs.prefix("backward_s")[at])
    return forward, backward, [costs.message_s(cut - 1) for cut in cuts[1:-1]]


def weights_seconds(assignment: Assignment, costs: CostModel) -> np.ndarray:
    """For each stage, the seconds at speed 1 of the weight gradients that may be put off, of one micro-batch.

    They are 0 for a stage that puts nothing off. Layers that are not split do not count: they compute their weight
    gradients in the first part of the backward.
    """
    if not assignment.put_off:
        return np.zeros(assignment.num_stages)
    return np.where(assignment.put_off, np.diff(costs.prefix("weights_s")[np.array(assignment.layer_cuts)]), 0.0)


def bound(
    forward_s: Sequence[np.ndarray],
    backward_s: Sequence[np.ndarray],
    counts: Sequence[np.ndarray],
    delays: Sequence[float],
    limits: Sequence[int],
    weights_s: Sequence[np.ndarray] | None = None,
    put_off: Sequence[int] = (),
) -> float:
    """A lower bound in seconds for every order of a step's actions.

    For each worker it adds up three parts: the time until a first micro-batch has passed the earlier stages, on the
    fastest worker of each; the time that the worker is busy; and the time until its last micro-batch has passed the
    earlier stages backward. A worker is busy for at least as long as it computes all of its micro-batches. It is also
    busy at least until its first micro-batch is back from the later stages and the rest is computed, as meanwhile it
    can compute only as many forwards as may be in flight. Weight gradients that are put off may come after the last
    backward, and no other stage waits for them.

    Args:
        forward_s: for each stage, float64 [workers]: seconds of the forward of one micro-batch.
        backward_s: the same for the backward, with its weight gradients.
        counts: for each stage, int64 [workers]: the number of micro-batches.
        delays: seconds of a message over each boundary between stages.
        limits: for each stage, the most micro-batches that a worker has in flight.
        weights_s: for each stage, float64 [workers]: the seconds of `backward_s` that may be put off; None if none may.
        put_off: for each stage, the most micro-batches of which a worker puts these off.
    """
    late = weights_s if weights_s is not None and put_off else [np.zeros(1)] * len(counts)
    most = put_off or [0] * len(counts)
    gaps = np.array([*delays, 0.0])
    there = np.concatenate([[0.0], np.cumsum(np.array([f.min() for f in forward_s]) + gaps)])
    inputs_s = [(b - w).min() for b, w in zip(backward_s, late, strict=True)]
    back = np.concatenate([[0.0], np.cumsum(np.array(inputs_s) + gaps)])
    total = worst = float(there[-1] + back[-1])
    for s, (f, b, microbatches) in enumerate(zip(forward_s, backward_s, counts, strict=True)):
        # The time from this stage to the last one and back, on the fastest worker of each.
        later = total - there[s + 1] - back[s + 1] + 2 * gaps[s]
        # During this time a worker can compute at most as many forwards as may be in flight. So the forwards beyond
        # this number, and all backwards, come after it.
        queued = f + later + microbatches * b + np.maximum(microbatches - limits[s], 0) * f
        busy = np.where(microbatches > 0, np.maximum(microbatches * (f + b), queued), 0.0)
        until_last_backward = (busy - np.minimum(microbatches, most[s]) * late[s]).max()
        worst = max(worst, float(there[s] + busy.max()), float(there[s] + back[s] + until_last_backward))
    return worst


def step_time(
    assignment: Assignment,
    costs: CostModel,
    rule: MemoryRule = REPLICATED,
    *,
    most_actions: int = MOST_ACTIONS,
) -> StepTime:
    """The expected time of a step.

    Args:
        assignment: the assignment that the step runs by.
        costs: the seconds and bytes of layers, the speeds of workers, the links.
        rule: the specs and mirrors, which decide the bytes of reduction and publication.
        most_actions: the most actions that are simulated; with 0 none is, and `bound` is the estimate.
    """
    found = step_time_below(math.inf, assignment, costs, rule, most_actions=most_actions)
    assert found is not None
    return found


def step_time_below(
    seconds: float,
    assignment: Assignment,
    costs: CostModel,
    rule: MemoryRule = REPLICATED,
    *,
    most_actions: int = MOST_ACTIONS,
) -> StepTime | None:
    """The expected time of a step; None if it cannot be less than `seconds` by the lower bound.

    In the second case nothing is simulated. The other arguments are those of `step_time`.
    """
    cuts = assignment.layer_cuts
    speeds = [costs.speeds_of(members) for members in assignment.stages]
    counts = assignment.counts
    forward, backward, delays = stage_seconds(cuts, costs)
    forward_s = [f / v for f, v in zip(forward, speeds, strict=True)]
    backward_s = [b / v for b, v in zip(backward, speeds, strict=True)]
    weights_s = [w / v for w, v in zip(weights_seconds(assignment, costs), speeds, strict=True)]
    compute = [(f + b) * c for f, b, c in zip(forward_s, backward_s, counts, strict=True)]
    slowest = int(np.argmax([of_stage.max() for of_stage in compute]))
    position = int(compute[slowest].argmax())
    bound_s = bound(forward_s, backward_s, counts, delays, assignment.limits, weights_s, assignment.put_off)
    tail_s = reduction_tail_s(cuts, [len(members) for members in assignment.stages], assignment.put_off, costs, rule)
    traffic_s = _traffic_s(assignment, costs, rule)
    if max(bound_s + tail_s, traffic_s) >= seconds:
        return None
    pipeline_s, how = 0.0, ESTIMATE
    if most_actions:
        pipeline_s, how, executed_tail_s = _simulated(assignment, costs, rule, speeds, most_actions)
        tail_s = executed_tail_s if how == EXACT else tail_s
    if how != EXACT:
        pipeline_s = max(pipeline_s, bound_s)
    return StepTime(
        seconds=max(pipeline_s + tail_s, traffic_s),
        pipeline_s=pipeline_s,
        bottleneck_s=float(compute[slowest][position]),
        bound_s=bound_s,
        tail_s=tail_s,
        traffic_s=traffic_s,
        worker=assignment.stages[slowest][position],
        how=how,
    )


MemoryTables = dict[tuple[int, int, int, int], np.ndarray]
"""(workers of a stage, most micro-batches of one of them, limit in flight, most gradient sums) -> the table of
`MemoryRule.stage_bytes`."""


def open_sums(counts: Sequence[np.ndarray], rule: MemoryRule) -> list[int]:
    """For each stage, the most gradient sums that a worker holds at once, each of `MemoryRule.gradient_share`.

    A worker adds up its micro-batches as far as the reduction tree allows. It holds a sum for each node that is open,
    and keeps those that it has sent until the step is decided. It takes turns between micro-batches that go different
    ways through the stages, and those of one way come in ascending order. So this is an upper bound: the sums of each
    way by itself. If gradients are sharded, each worker adds up its part of the gradients of all micro-batches; then it
    is an estimate, as those of a slow worker may come late.

    Args:
        counts: for each stage, int64 [workers]: the number of micro-batches.
        rule: the specs.
    """
    num_microbatches = int(counts[0].sum())
    if rule.gradients_are_sharded:
        every = np.array([num_microbatches])
        return [int(most_open_sums(np.zeros(1, np.int64), every, num_microbatches)[0])] * len(counts)
    ends = once_each(np.cumsum, counts)
    # A stable sort takes next to no time for what is a few ascending runs. Cuts that come twice bound nothing.
    cuts = np.sort(np.concatenate([[0], *{id(of_stage): of_stage for of_stage in ends}.values()]), kind="stable")
    each = most_open_sums(cuts[:-1], cuts[1:], num_microbatches)

    def of_fullest(of_stage: np.ndarray) -> int:
        number = len(of_stage)
        sums = np.bincount(np.searchsorted(of_stage, cuts[:-1], "right"), each, minlength=number)[:number]
        # In whatever order: of two neighbours whose sum is a node only one sum is held.
        return int(np.minimum(sums, np.diff(of_stage, prepend=0) // 2 + 1).max())

    return once_each(of_fullest, ends)


def memory_of(
    assignment: Assignment, costs: CostModel, rule: MemoryRule, known: MemoryTables | None = None
) -> list[float]:
    """The bytes that the fullest worker of each stage needs.

    Args:
        assignment: the assignment.
        costs: the bytes of layers.
        rule: the specs and mirrors.
        known: tables from earlier calls with the same costs and rule, to which this call adds its own.
    """
    found = []
    tables = {} if known is None else known
    sums = open_sums(assignment.counts, rule)
    for s, microbatches in enumerate(once_each(max, assignment.microbatch_counts)):
        key = size, _, in_flight, _ = len(assignment.stages[s]), microbatches, assignment.limits[s], sums[s]
        if key not in tables:
            tables[key] = rule.stage_bytes(
                costs, size=size, microbatches=microbatches, in_flight=in_flight, sums=sums[s]
            )
        found.append(float(tables[key][assignment.layer_cuts[s], assignment.layer_cuts[s + 1]]))
    return found


def state_of(assignment: Assignment, costs: CostModel, rule: MemoryRule) -> list[float]:
    """The bytes of state that each worker of each stage has, mirrors included."""
    spans = zip(pairwise(assignment.layer_cuts), assignment.stages, strict=True)
    prefix = costs.prefix("state_bytes")
    return [float(rule.state_share(len(members)) * (prefix[stop] - prefix[first])) for (first, stop), members in spans]


def state_limit(started: Assignment, present: Assignment, costs: CostModel, rule: MemoryRule) -> float:
    """The most bytes of state that a plan may give to one worker; without it a plan could overload one's memory.

    It is twice the mean of the workers on the mesh that the run was started with, or the most that some worker has at
    present if that is more.

    Args:
        started: the assignment that the run was started with.
        present: that of the mesh at present.
        costs: the bytes of layers.
        rule: the specs and mirrors.
    """
    sizes = [len(members) for members in started.stages]
    even = sum(map(operator.mul, sizes, state_of(started, costs, rule))) / sum(sizes)
    return max(2 * even, *state_of(present, costs, rule))


def traffic_bytes(costs: CostModel, rule: MemoryRule, first: int, stop: int, size: int, nodes: int) -> float:
    """The bytes that the busiest worker of a stage sends in a step.

    It sends the sums of its tree nodes to the primaries, its reduced gradients to mirrors, and its published
    parameters.

    Args:
        costs: the bytes of layers.
        rule: the specs and mirrors.
        first: the first layer of the stage.
        stop: the layer after its last one.
        size: the number of workers of the stage.
        nodes: the number of tree nodes of which this worker sends the sum.
    """
    gradient, value = (
        float(costs.prefix(name)[stop] - costs.prefix(name)[first]) for name in ("gradient_bytes", "value_bytes")
    )
    # New parameters are sent to the workers that are no replicas of the pages. With replicated state there are none.
    published = value * (size - 1) / size if rule.state_is_sharded else 0.0
    return _reduced_bytes(gradient, rule, size, nodes) + published


def _traffic_s(assignment: Assignment, costs: CostModel, rule: MemoryRule) -> float:
    """Seconds for which reduction and publication occupy the busiest link of all stages."""

    def most_nodes(counts: np.ndarray) -> int:
        if assignment.microbatch_order != CONTIGUOUS:
            return int(counts.max())
        stops = np.cumsum(counts)
        return int(count_tree_nodes(stops - counts, stops, assignment.num_microbatches).max())

    nodes, spans = once_each(most_nodes, assignment.counts), pairwise(assignment.layer_cuts)
    sent = [
        traffic_bytes(costs, rule, first, stop, len(members), most)
        for (first, stop), members, most in zip(spans, assignment.stages, nodes, strict=True)
    ]
    return max(sent) / costs.bandwidth


def reduction_tail_s(
    cuts: Sequence[int], sizes: Sequence[int], put_off: Sequence[int], costs: CostModel, rule: MemoryRule
) -> float:
    """Seconds for which gradients are reduced after the last backward of a step.

    The gradients of a layer leave the worker when the layer's last backward ends. The first layer of a stage is the
    last one, and then the gradients of others may still be on the link. After that, the partial sum, the reduced
    gradient and the vote each take one more message. Stages after the first end their last backward earlier, by the
    time that the last activation gradient takes from there to the first stage.

    Args:
        cuts: stage s runs layers [cuts[s], cuts[s + 1]).
        sizes: the number of workers of each stage.
        put_off: as `Assignment.put_off`.
        costs: the seconds and bytes of layers, and the links.
        rule: the specs and mirrors.
    """
    if sum(sizes) == 1:
        return 0.0
    found = back_s = 0.0
    for stage, (size, (first, stop)) in enumerate(zip(sizes, pairwise(cuts), strict=True)):
        layers, splits = costs.layers[first:stop], bool(put_off and put_off[stage])
        last_s = [layer.weights_s if splits else layer.backward_s for layer in layers]
        ends_s = link_s = -sum(last_s)
        for layer, seconds in zip(reversed(layers), reversed(last_s), strict=True):
            ends_s += seconds
            link_s = max(link_s, ends_s) + _reduced_bytes(layer.gradient_bytes, rule, size) / costs.bandwidth
        messages = 3 if size > 1 else 1  # a partial sum, a reduced gradient, a vote; a worker alone sends only the vote
        found = max(found, link_s + messages * costs.latency_s - back_s)
        back_s += sum(layer.backward_s - (layer.weights_s if splits else 0.0) for layer in layers)
    return found


def _reduced_bytes(gradient_bytes: float, rule: MemoryRule, size: int, nodes: int = 1) -> float:
    """The bytes that a worker sends to reduce a stage's gradients: sums of tree nodes, and results to mirrors.

    With replicated state, all other workers of the stage are mirrors.
    """
    mirrors = rule.mirror_count if rule.state_is_sharded else size - 1
    return (nodes * (size - 1) + mirrors) * gradient_bytes / size


def _simulated(
    assignment: Assignment, costs: CostModel, rule: MemoryRule, speeds: Sequence[np.ndarray], most_actions: int
) -> tuple[float, str, float]:
    """(seconds until the last action ends, EXACT or PART, seconds for which the reduction then goes on if EXACT)."""
    counts, every = assignment.counts, _pieces(assignment, speeds)
    pieces: dict[object, list[slice]] = {}
    for key, piece in every:
        pieces.setdefault(key, piece)
    sizes = [2 * assignment.num_stages * int(counts[0][piece[0]].sum()) for piece in pieces.values()]
    if sum(sizes) <= most_actions:
        run = {key: _piece_s(assignment, costs, piece) for key, piece in pieces.items()}
        end_s = max(seconds for seconds, _ in run.values())
        made = [(piece, run[key][1]) for key, piece in every]
        return end_s, EXACT, _tail_s(assignment, costs, rule, speeds, made, end_s)
    layer_s = [sum(costs.stage_s(a, b)) for a, b in pairwise(assignment.layer_cuts)]
    busy = [c * each / v for c, each, v in zip(counts, layer_s, speeds, strict=True)]
    longest = [max(float(b[where].max()) for b, where in zip(busy, piece, strict=True)) for piece in pieces.values()]
    found, left = 0.0, most_actions
    for _, size, piece in sorted(zip(longest, sizes, pieces.values(), strict=True), key=lambda of: of[0], reverse=True):
        if size <= left:
            found = max(found, _piece_s(assignment, costs, piece)[0])
        elif left == most_actions:  # nothing is simulated yet, and this piece is too large by itself
            found = _section_s(assignment, costs, piece, busy, left)
        left -= size
        if left <= 0:
            break
    return found, PART, 0.0


def _tail_s(
    assignment: Assignment,
    costs: CostModel,
    rule: MemoryRule,
    speeds: Sequence[np.ndarray],
    made: Sequence[tuple[list[slice], tuple[Sequence[float], ...]]],
    end_s: float,
) -> float:
    """Seconds from the last action until all workers have all votes.

    Args:
        assignment: the assignment.
        costs: the links, and the bytes of layers.
        rule: the specs and mirrors.
        speeds: for each stage, float64 [workers].
        made: (piece, times). The times are, for each stage, when the gradient of each of the piece's micro-batches is
            computed.
        end_s: when the last action ends.
    """
    if sum(map(len, assignment.stages)) == 1:
        return 0.0
    number, found = assignment.num_microbatches, end_s
    for s, counts in enumerate(assignment.microbatch_counts):
        nodes: list[tuple[float, ...]] = []
        for piece, made_s in made:
            of_piece = counts[piece[s]]
            if assignment.microbatch_order == CONTIGUOUS:
                first = int(assignment.counts[s][: piece[s].start].sum())
                nodes += nodes_of(made_s[s], first, of_piece, number)
            else:
                owners = workers_of_microbatches(range(len(of_piece)), of_piece, TIME_MAJOR)
                by_worker: list[list[float]] = [[] for _ in of_piece]
                for worker, time in zip(owners, made_s[s], strict=True):
                    by_worker[worker].append(time)
                nodes += map(tuple, by_worker)
        span = assignment.layer_cuts[s], assignment.layer_cuts[s + 1]
        splits = bool(assignment.put_off and assignment.put_off[s])
        which = np.concatenate([speeds[s][piece[s]] for piece, _ in made])
        mirrors = rule.mirrors(len(counts), sum(map(len, assignment.stages)))
        stage = StageGradients(span, len(counts), mirrors, splits, tuple(nodes), which)
        found = max(found, reduced_at(stage, costs))
    return found + costs.latency_s - end_s


def _pieces(assignment: Assignment, speeds: Sequence[np.ndarray]) -> list[tuple[object, list[slice]]]:
    """The pieces of an assignment: (key, positions by stage). Workers of a piece share micro-batches with no others.

    Equal pieces have equal keys. If there are more than _MOST_PIECES, only the first of equal pieces is listed.
    """
    ranges = _ranges_of_pieces(assignment)
    # For each stage, float64 [workers, 2]. Workers with equal rows are equal. Stages with equal arrays are equal, and
    # have equal ranges as well.
    workers = [np.stack(each, axis=1) for each in zip(assignment.counts, speeds, strict=True)]
    kinds = {of_stage.tobytes(): s for s, of_stage in enumerate(workers)}
    lists_all = len(ranges[0]) <= _MOST_PIECES
    some = [(ranges[s], workers[s]) for s in kinds.values()]
    listed = np.arange(len(ranges[0])) if lists_all else np.flatnonzero(_differ_from_last(some))
    found: list[tuple[object, list[slice]]] = []
    seen: set[object] = set()
    for number, *spans in zip(listed.tolist(), *(of_kind[listed].tolist() for of_kind, _ in some), strict=True):
        key = tuple(kind[_KEY_BYTES * a : _KEY_BYTES * b] for kind, (a, b) in zip(kinds, spans, strict=True))
        if lists_all or key not in seen:
            seen.add(key)
            found.append((key, [slice(*of_stage[number].tolist()) for of_stage in ranges]))
    return found


def _ranges_of_pieces(assignment: Assignment) -> list[np.ndarray]:
    """Per stage, int64 [pieces, 2]: the position of the first worker of each piece (`_pieces`), and after its last."""
    counts = assignment.counts
    # If counts are equal in all stages, the workers at one position have the same micro-batches in all stages: a piece.
    if all(of_stage == assignment.microbatch_counts[0] for of_stage in assignment.microbatch_counts[1:]):
        busy = np.flatnonzero(counts[0])
        return [np.stack([busy, busy + 1], axis=1)] * len(counts)
    if assignment.microbatch_order != CONTIGUOUS:
        return [np.array([[0, len(of_stage)]]) for of_stage in counts]
    ends = once_each(np.cumsum, counts)
    # If all stages cut their micro-batches at the same number, no worker has micro-batches on both sides of the cut.
    common = ends[0][np.diff(ends[0], prepend=-1) > 0]
    for of_stage in ends[1:]:
        common = common[of_stage[np.searchsorted(of_stage, common)] == common]

    def ranges_of(of_stage: np.ndarray) -> np.ndarray:
        stops = np.searchsorted(of_stage, common, "right")
        ranges = np.stack([np.concatenate([[0], stops[:-1]]), stops], axis=1)
        return ranges[common > 0]  # without the workers at the front, if none of them has micro-batches

    return once_each(ranges_of, ends)


def _differ_from_last(stages: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """bool [pieces]: False if a piece has one worker in each stage, and they equal those of the piece before.

    On a large mesh this holds for nearly all pieces, of which there may be 100,000.

    Args:
        stages: for each stage, the ranges of pieces, int64 [pieces, 2], and the rows of workers, float64 [workers, 2],
            as in `_pieces`.
    """
    found = np.zeros(len(stages[0][0]), bool)
    found[0] = True
    for ranges, workers in stages:
        first, stop = ranges.T
        is_large = stop - first > 1
        found[1:] |= is_large[1:] | is_large[:-1] | (workers[first[1:]] != workers[first[:-1]]).any(axis=1)
    return found


def _piece_s(
    assignment: Assignment, costs: CostModel, piece: Sequence[slice]
) -> tuple[float, tuple[Sequence[float], ...]]:
    """Simulate one piece: seconds until its last action ends, and for each stage when its gradients are computed."""
    counts = tuple(of_stage[where] for of_stage, where in zip(assignment.microbatch_counts, piece, strict=True))
    return _counts_s(assignment, costs, piece, counts)


def _section_s(
    assignment: Assignment, costs: CostModel, piece: Sequence[slice], busy: Sequence[np.ndarray], most_actions: int
) -> float:
    """An estimate of the seconds until a piece's last action ends, by a simulation of some of its micro-batches only.

    If micro-batches are contiguous, a section around the worker with the most to compute is simulated. This worker and
    its neighbours have all of their micro-batches in the section, while workers at the ends of it have fewer. In
    time-major order every worker has its share of any section, so the first micro-batches are simulated. Half of them
    are simulated as well, and the difference between the two times is extrapolated to all micro-batches.

    Args:
        assignment: the assignment.
        costs: the costs.
        piece: the positions of its workers, by stage.
        busy: for each stage, the seconds that each worker computes.
        most_actions: the most actions of a simulation.
    """
    counts = [np.array(of_stage[where]) for of_stage, where in zip(assignment.microbatch_counts, piece, strict=True)]
    number, length = int(counts[0].sum()), max(1, most_actions // (2 * assignment.num_stages))
    if assignment.microbatch_order == CONTIGUOUS:
        s = max(range(len(piece)), key=lambda s: float(busy[s][piece[s]].max()))
        position = int(busy[s][piece[s]].argmax())
        middle = int(counts[s][:position].sum()) + int(counts[s][position]) // 2
        first = min(max(0, middle - length // 2), number - length)
        return _counts_s(assignment, costs, piece, _within(counts, first, first + length))[0]
    half = max(1, length // 2)
    part_s, half_s = (
        _counts_s(assignment, costs, piece, _first_turns(counts, some))[0] for some in (max(length, half + 1), half)
    )
    return part_s + max(0.0, part_s - half_s) * (number - length) / max(1, length - half)


def _within(counts: Sequence[np.ndarray], first: int, stop: int) -> tuple[tuple[int, ...], ...]:
    """For each stage, how many of the micro-batches [first, stop) each worker has, in contiguous order."""
    ends = [np.cumsum(of_stage) for of_stage in counts]
    found = [
        np.clip(end, first, stop) - np.clip(end - of_stage, first, stop)
        for end, of_stage in zip(ends, counts, strict=True)
    ]
    return tuple(tuple(of_stage.tolist()) for of_stage in found)


def _first_turns(counts: Sequence[np.ndarray], number: int) -> tuple[tuple[int, ...], ...]:
    """For each stage, how many of the first `number` micro-batches each worker has, in time-major order."""
    found = []
    for of_stage in counts:
        owners = workers_of_microbatches(range(len(of_stage)), of_stage.tolist(), TIME_MAJOR)[:number]
        found.append(tuple(np.bincount(owners, minlength=len(of_stage)).tolist()))
    return tuple(found)


def _counts_s(
    assignment: Assignment, costs: CostModel, piece: Sequence[slice], counts: tuple[tuple[int, ...], ...]
) -> tuple[float, tuple[Sequence[float], ...]]:
    """Simulate the workers of a piece with these numbers of micro-batches. Returns the same as `_piece_s`."""
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    members = [of_stage[where] for of_stage, where in zip(assignment.stages, piece, strict=True)]
    speeds = costs.speeds_of([rank for of_stage in members for rank in of_stage])
    stage = np.repeat(np.arange(len(members)), [len(of_stage) for of_stage in members])
    kinds = (forward, backward, weights_seconds(assignment, costs))
    forward_s, backward_s, weights_s = (tuple((seconds[stage] / speeds).tolist()) for seconds in kinds)
    late = (weights_s, assignment.put_off) if assignment.put_off else ((), ())
    order, limits = assignment.microbatch_order, assignment.limits
    links_s = tuple(costs.link_s(cut - 1) for cut in assignment.layer_cuts[1:-1])
    return _executed_s(counts, order, limits, forward_s, backward_s, tuple(delays), links_s, *late)


@lru_cache(maxsize=1024)
def _executed_s(
    counts: tuple[tuple[int, ...], ...],
    microbatch_order: str,
    limits: tuple[int, ...],
    forward_s: tuple[float, ...],
    backward_s: tuple[float, ...],
    delays: tuple[float, ...],
    links_s: tuple[float, ...],
    weights_s: tuple[float, ...],
    put_off: tuple[int, ...],
) -> tuple[float, tuple[memoryview[float], ...]]:
    owners, order = _owners(counts, microbatch_order)
    run = execute(owners, order, limits, forward_s, backward_s, delays, weights_s, put_off, links_s)
    # Read-only float64. As objects, the times of 1,024 steps of 65,536 actions would take a gigabyte.
    return run.seconds, tuple(memoryview(array("d", each).tobytes()).cast("d") for each in run.made_s)


@lru_cache(maxsize=64)
def _owners(
    counts: tuple[tuple[int, ...], ...], microbatch_order: str
) -> tuple[tuple[tuple[int, ...], ...], dict[int, float]]:
    """(for each stage the worker of each micro-batch, the turns of micro-batches).

    Workers are numbered through all stages.
    """
    rows = iter(range(sum(map(len, counts))))
    owners = tuple(
        workers_of_microbatches(tuple(islice(rows, len(of_stage))), of_stage, microbatch_order) for of_stage in counts
    )
    return owners, turns_of_ways(dict(enumerate(zip(*owners, strict=True))))


def executed_lists(assignment: Assignment, costs: CostModel) -> Schedule:
    """The actions of every worker, in the order in which it executes them under these costs.

    Frequencies are planned with this order. Unlike in `step_time`, no message waits for another one on a link: so it is
    in `timed_graph` as well.
    """
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    forward_s, backward_s, weights_s = (
        {
            rank: float(seconds[s] / speed)
            for s, members in enumerate(assignment.stages)
            for rank, speed in zip(members, costs.speeds_of(members).tolist(), strict=True)
        }
        for seconds in (forward, backward, weights_seconds(assignment, costs))
    )
    of_kind = forward_s, backward_s, weights_s
    limits, put_off = assignment.limits, assignment.put_off
    return schedule(assignment.placement(), limits=limits, put_off=put_off, seconds=of_kind, delays=delays)


def timed_graph(assignment: Assignment, costs: CostModel) -> ActionGraph:
    """The graph of `executed_lists`, with the seconds of each action."""
    forward, backward, delays = stage_seconds(assignment.layer_cuts, costs)
    weights = weights_seconds(assignment, costs)
    by_kind = {FORWARD: forward, BACKWARD: backward - weights, WEIGHTS: weights}
    lists = executed_lists(assignment, costs)
    speeds = dict(zip(lists, costs.speeds_of(tuple(lists)).tolist(), strict=True))
    seconds = {
        rank: [float(by_kind[action.kind][action.stage]) / speeds[rank] for action in todo]
        for rank, todo in lists.items()
    }
    return ActionGraph.of(lists, seconds, delays)
