"""Checks of micro-batches by a second worker: which are drawn, who checks them, and who is wrong if results differ.

Bits do not depend on who computes (docs/design.md), so any other worker of a stage can compute a micro-batch again and
compare. Everything here is a pure function: all workers and the controller come to the same pairs without a message.
The rules are V1 to V6 of docs/protocol.md.
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
"""A digest has 64 columns of 8 bytes: element i of a tensor goes into column i modulo 64. So the number of columns that
differ is a lower bound of the number of elements that do."""


@dataclass(frozen=True)
class Pair:
    """A micro-batch on a stage that a second worker computes as well.

    Args:
        stage: the number of the stage.
        microbatch: the number of the micro-batch.
        owner: the worker to which the placement gives the micro-batch.
        checker: the worker that computes it a second time; the owner itself if it is alone in its stage.
    """

    stage: int
    microbatch: int
    owner: int
    checker: int


@dataclass(frozen=True)
class CheckDraw:
    """Draws the pairs that are checked in each step.

    Args:
        seed: the seed of the run.
        rate: the probability with which a pair is drawn; 0 if nothing is checked.
    """

    seed: int
    rate: float = 0.0

    def pairs(self, step: int, stage: int, placement: Placement) -> tuple[Pair, ...]:
        """The drawn pairs of one stage, in the order of micro-batches.

        Each check goes to the worker that has the fewest micro-batches and checks, other than the pair's owner.
        """
        drawn, key = self._drawn(step, stage, placement.num_microbatches)
        if not drawn:
            return ()
        members = placement.mesh.stages[stage]
        staff = zip(members, placement.microbatch_counts[stage], strict=True)
        # Among workers with equal load, a drawn one comes first. Otherwise, at a low rate, the same workers would check
        # in every step.
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
        """The number of pairs that are checked in a step, on all stages."""
        number = placement.num_microbatches
        return sum(len(self._drawn(step, stage, number)[0]) for stage in range(placement.num_stages))

    def _drawn(self, step: int, stage: int, num_microbatches: int) -> tuple[list[int], int]:
        """The micro-batches of a stage that are drawn, in random order, and one more random 32-bit word."""
        if self.rate <= 0:
            return [], 0
        key = fold(root(self.seed), step & MASK32, step >> 32, stage, CHECKS)
        drawn = words(key, 0, num_microbatches + 1).astype(np.uint64)
        below = np.uint64(round(self.rate * (1 << 32)))
        # Sorted by their random words, not by number: neighbouring micro-batches belong to the same worker, and the
        # worker whose micro-batches always come last would find all other workers busy with checks.
        chosen = np.flatnonzero(drawn[:-1] < below)
        return chosen[np.argsort(drawn[chosen], kind="stable")].tolist(), int(drawn[-1])


def begins_anew(rate: float, *, is_begun: bool, results_differ: bool) -> bool:
    """True if the step during which the mesh changes has to begin anew, in another attempt.

    It has to if two results differ, as a wrong value may have been added to sums and passed on. At rate 1 it always
    has to, as nothing unchecked may be committed. Otherwise the step is recovered in part, and those of its checks that
    are not complete are dropped.

    Args:
        rate: the probability with which a pair is checked.
        is_begun: True if a worker has, or may have, computed something of the step.
        results_differ: True if two workers have computed different results in it.
    """
    return is_begun and rate > 0 and (results_differ or rate >= 1)


# ---- a difference


@dataclass(frozen=True)
class Difference:
    """The first tensor, in the order in which a micro-batch is computed, in which two results differ.

    Args:
        layer: the number of the layer.
        kind: OUTPUT, INPUT_GRADIENT or WEIGHT_GRADIENT.
        elements: a lower bound of the number of elements that differ, which is exact if they are few.
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
    """The workers that compute a pair once more: a third worker while there is one; else the owner and the checker.

    No worker if the owner is its own checker, as it is wrong in any case, and if all have been asked already.

    Args:
        pair: the pair whose two results differ.
        members: the workers of the pair's stage.
        asked: the workers that were asked before and whose results did not show who is wrong.
    """
    if pair.owner == pair.checker or pair.owner in asked:
        return ()
    others = [rank for rank in sorted(members) if rank not in (pair.owner, pair.checker, *asked)]
    return (others[pair.microbatch % len(others)],) if others else (pair.owner, pair.checker)


def verdict(
    pair: Pair, first: Mapping[int, tuple[DigestRow, ...]], again: Mapping[int, tuple[DigestRow, ...]]
) -> tuple[int, ...]:
    """The workers that have computed wrongly; empty if the results do not show which.

    A result at which two workers have arrived independently is right: all workers with another result are wrong, a
    third worker that was asked included. If there is none, the owner or the checker is wrong if its second result
    differs from its first, as a right result is a function of the input.

    Args:
        pair: the pair whose two results differ.
        first: rank -> its first result, for the owner and the checker.
        again: rank -> its result, for each worker among the `judges` so far.
    """
    if pair.owner == pair.checker:
        return (pair.owner,)
    results = {**again, **first}  # one result of each worker: of owner and checker the first
    numbers = Counter(results.values())
    if (right := next((result for result, number in numbers.items() if number > 1), None)) is not None:
        return tuple(rank for rank, result in sorted(results.items()) if result != right)
    return tuple(rank for rank in sorted(first) if rank in again and again[rank] != first[rank])
