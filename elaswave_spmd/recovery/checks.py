"""Checks of micro-batches by a second worker: which are drawn, who checks them, and who is wrong if results differ.

Bits do not depend on who computes (docs/design.md), so any other worker of a stage can compute a micro-batch again and
compare. Everything here is a pure function: all workers and the controller come to the same pairs and the same verdict
without a message.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave_spmd.determinism.rng import CHECKS, MASK32, fold, root, words
from elaswave_spmd.recovery.messages import DigestRow
from elaswave_spmd.scheduling.placement import Placement

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"
DIGEST_COLUMNS, DIGEST_BYTES = 64, 8
"""A digest has so many columns of so many bytes: element i of a tensor goes into column i modulo their number."""


@dataclass(frozen=True)
class Pair:
    """A micro-batch on a stage that a second worker computes as well.

    Args:
        owner: the worker whose micro-batch it is.
        checker: the worker that computes it a second time; the owner itself if it is alone in its stage.
    """

    stage: int
    microbatch: int
    owner: int
    checker: int


@dataclass(frozen=True)
class CheckDraw:
    """The pairs that are checked in each step.

    Args:
        seed: of the run.
        rate: the probability of each pair; 0: nothing is checked.
    """

    seed: int
    rate: float = 0.0

    def pairs(self, step: int, stage: int, placement: Placement) -> tuple[Pair, ...]:
        """The pairs of one stage, by micro-batch. The worker with the least to do gets the next check."""
        drawn, key = self._drawn(step, stage, placement.num_microbatches)
        if not drawn:
            return ()
        members = placement.mesh.stages[stage]
        staff = zip(members, placement.microbatch_counts[stage], strict=True)
        # Among equals the first differs from step to step, so that every worker checks at a low rate as well.
        first = key % len(members)
        load = [(count, (at - first) % len(members), rank) for at, (rank, count) in enumerate(staff)]
        heapq.heapify(load)
        found = []
        for microbatch in drawn:
            owner = placement.worker_of_microbatch(stage, microbatch)
            own = heapq.heappop(load) if load[0][2] == owner and len(load) > 1 else None
            least, place, checker = load[0]
            heapq.heapreplace(load, (least + 1, place, checker))
            if own is not None:
                heapq.heappush(load, own)
            found.append(Pair(stage, microbatch, owner, checker))
        return tuple(sorted(found, key=lambda pair: pair.microbatch))

    def num_pairs(self, step: int, placement: Placement) -> int:
        """The number of pairs of a step that are checked."""
        number = placement.num_microbatches
        return sum(len(self._drawn(step, stage, number)[0]) for stage in range(placement.num_stages))

    def _drawn(self, step: int, stage: int, num_microbatches: int) -> tuple[list[int], int]:
        """The micro-batches of a stage that are drawn, in a drawn order, and one more word."""
        if self.rate <= 0:
            return [], 0
        key = fold(root(self.seed), step & MASK32, step >> 32, stage, CHECKS)
        drawn = words(key, 0, num_microbatches + 1).astype(np.uint64)
        below = np.uint64(round(self.rate * (1 << 32)))
        # In the order of their words: neighbours have one worker, and who comes last may find all others busy.
        chosen = np.flatnonzero(drawn[:-1] < below)
        return chosen[np.argsort(drawn[chosen], kind="stable")].tolist(), int(drawn[-1])


def begins_anew(rate: float, *, is_begun: bool, is_suspect: bool) -> bool:
    """True if a step that a change of the mesh meets begins anew, in another attempt.

    Below rate 1 that is so only if somebody is known to have computed wrongly: what was computed may have been added
    and passed on. Otherwise the step is recovered in part, and its checks that are not complete are dropped. At rate 1,
    where nothing unchecked may be committed, the step begins anew.

    Args:
        is_begun: somebody has computed something of it, or may have.
        is_suspect: two workers have computed different results.
    """
    return is_begun and rate > 0 and (is_suspect or rate >= 1)


# ---- a difference


@dataclass(frozen=True)
class Difference:
    """The first tensor, in the order in which a micro-batch is computed, in which two results differ.

    Args:
        kind: OUTPUT, INPUT_GRADIENT or WEIGHT_GRADIENT.
        elements: number of elements that differ; of many, at least so many.
    """

    layer: int
    kind: str
    elements: int

    def __str__(self) -> str:
        return f"{self.kind} of layer {self.layer}, {self.elements} element{'s' * (self.elements != 1)}"


def first_difference(one: Sequence[DigestRow], other: Sequence[DigestRow]) -> Difference | None:
    """The first difference between two results of a micro-batch; None if they are equal."""
    for (layer, kind, a), (_, _, b) in zip(_computed(one), _computed(other), strict=True):
        if a != b:
            columns = range(0, max(len(a), len(b)), DIGEST_BYTES)
            return Difference(
                layer, kind, sum(a[at : at + DIGEST_BYTES] != b[at : at + DIGEST_BYTES] for at in columns)
            )
    return None


def _computed(rows: Sequence[DigestRow]) -> Iterator[tuple[int, str, bytes]]:
    """The digests in the order in which their tensors are computed."""
    for layer, output, *_ in rows:
        yield layer, OUTPUT, output
    for layer, _, of_input, of_weights in reversed(rows):
        yield layer, WEIGHT_GRADIENT, of_weights
        yield layer, INPUT_GRADIENT, of_input


def judges(pair: Pair, members: Collection[int], asked: Collection[int] = ()) -> tuple[int, ...]:
    """The workers that compute a pair once more: a third one, as long as there is one; else both of the two again.

    Nobody if it was one worker that differed from itself, which is wrong whoever is right, and if all have been asked.

    Args:
        members: of the pair's stage.
        asked: workers that were asked before, whose results did not tell who is wrong.
    """
    if pair.owner == pair.checker or pair.owner in asked:
        return ()
    others = [rank for rank in sorted(members) if rank not in (pair.owner, pair.checker, *asked)]
    return (others[pair.microbatch % len(others)],) if others else (pair.owner, pair.checker)


def verdict(
    pair: Pair, first: Mapping[int, tuple[DigestRow, ...]], again: Mapping[int, tuple[DigestRow, ...]]
) -> tuple[int, ...]:
    """The workers that have computed wrongly; nobody if nothing tells who.

    A result that two workers have made, each for itself, is the right one: all others are wrong, also a third worker
    that was asked. Else each of the two is wrong whose second result is another than its first: bits are a function of
    the input.

    Args:
        first: rank -> its result of the pair, of the owner and the checker.
        again: rank -> its result, of the `judges` so far.
    """
    if pair.owner == pair.checker:
        return (pair.owner,)
    results = {**again, **first}  # one of each worker: the first
    numbers = Counter(results.values())
    if (right := next((result for result, number in numbers.items() if number > 1), None)) is not None:
        return tuple(rank for rank, result in sorted(results.items()) if result != right)
    return tuple(rank for rank in sorted(first) if rank in again and again[rank] != first[rank])
