"""The time at which the gradients of a simulated step are reduced, message by message.

A worker sends its sum of a tree node layer by layer, as soon as the gradients of the node's last micro-batch are
there; when all sums of a layer have arrived, its primaries send the reduced gradient to the mirrors. What a worker
sends leaves it in the order in which it was ready. The simulator's engine does the same by events; here it is a few
operations on arrays, since plans are judged by it thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from elaswave_spmd.determinism.reduction_tree import maximal_nodes
from elaswave_spmd.scheduling.cost_model import CostModel


@dataclass(frozen=True)
class StageGradients:
    """The times at which the workers of a stage have made their gradients.

    Args:
        layers: (first, stop): the layers of the stage.
        size: workers of the stage; of equal ones some may stand for all in `nodes_s`.
        mirrors: the workers to which a primary sends its reduced gradients.
        splits: gradients of weights are made by an action of their own.
        nodes_s: by worker, the time at which each of its tree nodes is complete.
        speeds: float64 [workers].
    """

    layers: tuple[int, int]
    size: int
    mirrors: int
    splits: bool
    nodes_s: tuple[tuple[float, ...], ...]
    speeds: np.ndarray


@lru_cache(maxsize=4096)
def node_stops(first: int, stop: int, num_microbatches: int) -> tuple[tuple[int, int], ...]:
    """The tree nodes that add up to the micro-batches from `first` to before `stop`, as (first, stop)."""
    return tuple(maximal_nodes(range(first, stop), num_microbatches))


def reduced_at(stage: StageGradients, costs: CostModel) -> float:
    """The time at which all replicas of a stage's pages have the reduced gradients; -inf if nobody makes any."""
    each = [sorted(of_worker) for of_worker in stage.nodes_s if of_worker]
    if not each:
        return -np.inf
    first, stop = stage.layers
    layers = costs.layers[first:stop][::-1]
    takes = np.array([layer.weights_s if stage.splits else layer.backward_s for layer in layers])
    gradient_s = np.array([layer.gradient_bytes for layer in layers]) / costs.bandwidth / stage.size
    # A node's layers are ready one after another, the last one when the action ends.
    before_end = takes.sum() - np.cumsum(takes)
    speeds = stage.speeds[[bool(of_worker) for of_worker in stage.nodes_s]]
    most = max(map(len, each))
    padded = np.array([[of_worker[0]] * (most - len(of_worker)) + of_worker for of_worker in each])
    is_node = np.array([[False] * (most - len(of_worker)) + [True] * len(of_worker) for of_worker in each])
    ready = padded[:, :, None] - before_end / speeds[:, None, None]
    sums_s = np.where(is_node[:, :, None], gradient_s * (stage.size - 1), 0.0)
    latency_s = costs.latency_s if stage.size > 1 else 0.0
    workers, size = len(each), most * len(layers)
    ready, sums_s = ready.reshape(workers, size), sums_s.reshape(workers, size)
    left = _leave(ready, sums_s)
    if not stage.mirrors:
        return float(left.max()) + latency_s
    reduced_s = np.broadcast_to(gradient_s * stage.mirrors, (workers, len(layers)))
    takes_s = np.concatenate([sums_s, reduced_s], axis=1)
    known = None
    # A reduced gradient may delay the sum of another layer, which then is known later. The first one that is known is
    # right at once, with it the second one, and so on: mostly the first or second round is the last.
    for _ in range(len(layers) + 1):
        was, known = known, left[:, :size].reshape(workers, most, len(layers)).max(axis=(0, 1)) + latency_s
        if was is not None and np.array_equal(was, known):
            break
        left = _leave(np.concatenate([ready, np.broadcast_to(known, reduced_s.shape)], axis=1), takes_s)
    return float(left.max()) + costs.latency_s


def _leave(ready: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The times at which each worker's messages have left, one after another as ready: float64 [workers, messages].

    Args:
        ready, seconds: float64 [workers, messages]: when each is ready, and for how long it uses the link.
    """
    order = np.argsort(ready, axis=1, kind="stable")
    takes = np.take_along_axis(seconds, order, 1)
    through = np.cumsum(takes, axis=1)
    # A message begins when the last of those before it, all of which are ready, has left, or when it is ready itself.
    ends = through + np.maximum.accumulate(np.take_along_axis(ready, order, 1) - (through - takes), axis=1)
    found = np.empty_like(ends)
    np.put_along_axis(found, order, ends, 1)
    return found


def nodes_of(made_s: Sequence[float], first: int, counts: Sequence[int], number: int) -> list[tuple[float, ...]]:
    """By worker, when its tree nodes are complete, of contiguous micro-batches.

    Args:
        made_s: when the gradients of each micro-batch are there, from the first worker's first micro-batch on.
        first: the number of that micro-batch.
        counts: micro-batches of each worker.
        number: micro-batches of the step.
    """
    found, at = [], first
    for count in counts:
        nodes = node_stops(at, at + count, number)
        found.append(tuple(max(made_s[a - first : b - first]) for a, b in nodes))
        at += count
    return found
