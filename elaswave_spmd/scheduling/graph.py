"""Layers over stages: the contiguous partition whose slowest stage is fastest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance_layers(costs: Sequence[float], workers: Sequence[int]) -> tuple[int, ...]:
    """Cuts layers over stages so that the largest cost(stage) / workers(stage) is least. Every stage gets a layer.

    Dynamic programming over (prefix, stage), O(layers^2 stages). Among optimal partitions the one with the earliest
    cuts is taken, so that the result is a function of its arguments.

    Args:
        costs: cost of each layer, non-negative.
        workers: workers of each stage; a stage's units are dealt over them.

    Returns: stages + 1 cuts; stage s has layers [cuts[s], cuts[s + 1]).
    """
    num_layers, num_stages = len(costs), len(workers)
    assert 1 <= num_stages <= num_layers, (num_layers, num_stages)
    total = [0.0, *accumulate(costs)]
    best = [0.0] + [float("inf")] * num_layers  # best[j]: the first j layers over the stages so far
    choices: list[list[int]] = []
    for stage, count in enumerate(workers):
        later = num_stages - stage - 1
        found, choice = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
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
