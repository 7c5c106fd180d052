"""Checks of sums: which reduced gradients a second worker adds up as well, and who is wrong if the results differ.

In each step some layers are drawn. Then every worker sends the gradient of each of its micro-batches to the checkers of
the layer's pages, which add all of them up in the order of the canonical tree. So both the sums that workers make of
their own micro-batches and the sums of primaries are checked. All of this is a function of the placement, so no message
announces it. The rules are V7 and V8 of docs/protocol.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elaswave_spmd.determinism.reduction_tree import maximal_nodes
from elaswave_spmd.determinism.rng import MASK32, SUM_CHECKS, fold, root
from elaswave_spmd.recovery.checks import DIGEST_BYTES, CheckDraw
from elaswave_spmd.recovery.messages import SumResult, SumRow
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet

SUM, REDUCED_GRADIENT, NORM = "sum", "reduced gradient", "norm"
_NORM_BYTES = 4


def are_drawn(draw: CheckDraw, step: int, layer: int) -> bool:
    """True if the reduced gradients of a layer's own pages are checked in a step."""
    if draw.rate <= 0:
        return False
    word, _ = fold(root(draw.seed), step & MASK32, step >> 32, layer, SUM_CHECKS)
    return word < round(draw.rate * (1 << 32))


def checker_of(step: int, pages: ReplicaSet) -> int:
    """The worker that adds up the gradient of these pages a second time: a mirror, which gets the first result anyway.

    If there is no mirror, it is the primary itself, which then finds only faults that do not repeat.
    """
    mirrors = pages.mirrors
    return mirrors[(step + pages.layer + pages.first) % len(mirrors)] if mirrors else pages.primary


def drawn_ranges(
    draw: CheckDraw, step: int, layout: ModelLayout, replica_map: ReplicaMap
) -> Iterator[tuple[ReplicaSet, int]]:
    """(page range, checker) for all page ranges whose reduced gradient is checked in a step."""
    for layer, ranges in sorted(replica_map.items()):
        if are_drawn(draw, step, layer):
            trained = (pages for pages in ranges if not layout.layers[layer].is_frozen(pages.first))
            yield from ((pages, checker_of(step, pages)) for pages in trained)


def sums_of(placement: Placement, use: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """(worker, tree node) for the sums that workers make of the gradients of their own micro-batches, for one layer.

    Args:
        placement: the placement.
        use: the layer whose gradients are added up.
    """
    stage, number = placement.stage_of_layer(use), placement.num_microbatches
    for rank in placement.mesh.stages[stage]:
        for node in maximal_nodes(placement.microbatches_of(rank), number):
            yield rank, node


def adders_of(placement: Placement, uses: Iterable[int]) -> frozenset[int]:
    """The workers that make sums of the gradients of their own micro-batches, for any of these layers."""
    found: set[int] = set()
    for stage in {placement.stage_of_layer(use) for use in uses}:
        counts = zip(placement.mesh.stages[stage], placement.microbatch_counts[stage], strict=True)
        found.update(rank for rank, count in counts if count)
    return frozenset(found)


# ---- a difference


@dataclass(frozen=True, order=True)
class Item:
    """A result that several workers may have made.

    Args:
        kind: SUM, REDUCED_GRADIENT or NORM.
        use: for a sum, the layer whose gradients are added up. For a tied parameter there are sums of two layers.
        lo: for a sum, its first micro-batch.
        hi: for a sum, the micro-batch after its last one.
    """

    kind: str
    use: int = -1
    lo: int = 0
    hi: int = 0

    def contains(self, other: Item) -> bool:
        """True if `other` is a sum that is a part of this one."""
        same = self.kind == other.kind == SUM and self.use == other.use
        return same and self.lo <= other.lo and other.hi <= self.hi and self != other


@dataclass(frozen=True)
class Claim:
    """A result that a worker has made in the step, before anything was made again.

    Args:
        rank: the worker.
        item: what it is the result of.
        value: the digest, or the norms.
    """

    rank: int
    item: Item
    value: bytes


@dataclass(frozen=True)
class Finding:
    """The first difference between workers, in the order in which results are made.

    Args:
        item: the result in which they differ.
        elements: a lower bound of the number of elements that differ, which is exact if they are few.
        wrong: the workers that have computed wrongly; empty if the results do not show which.
        disputed: all workers that may have computed wrongly.
    """

    item: Item
    elements: int
    wrong: tuple[int, ...]
    disputed: tuple[int, ...]


def items_of_sums(rows: Sequence[SumRow]) -> dict[Item, bytes]:
    """The items of a worker's report of its sums."""
    return {Item(SUM, use, lo, hi): digest for use, lo, hi, digest in rows}


def items_of_result(result: SumResult) -> dict[Item, bytes]:
    """The items of a worker's report of a reduced gradient."""
    gradient, norms = result
    return {Item(REDUCED_GRADIENT): gradient, Item(NORM): norms}


def num_different(kind: str, one: bytes, other: bytes) -> int:
    """The number of elements that differ, as far as their digests, or norms, tell them apart."""
    width = _NORM_BYTES if kind == NORM else DIGEST_BYTES
    return sum(one[at : at + width] != other[at : at + width] for at in range(0, max(len(one), len(other)), width))


def first_different(owned: SumResult, checked: SumResult) -> tuple[str, int] | None:
    """(kind, number of elements) in which two results differ first; None if they are equal."""
    for kind, one, other in zip((REDUCED_GRADIENT, NORM), owned, checked, strict=True):
        if one != other:
            return kind, num_different(kind, one, other)
    return None


def find_wrong(claims: Iterable[Claim], again: Mapping[int, Mapping[Item, bytes]]) -> Finding | None:
    """Find the workers that have computed wrongly, as far as results show it; None if nothing differs.

    A worker is wrong if its second result differs from its first, or if its result differs from those of most of the
    others. Sums are looked at first, those of fewer micro-batches before others: a worker that has correctly added a
    wrong sum of another one is not wrong.

    Args:
        claims: the results that were made in the step, by all workers that had a part in it.
        again: rank -> its results, for the workers that have made all of them again, from the same gradients.
    """
    claimed: dict[Item, list[Claim]] = {}
    for claim in claims:
        claimed.setdefault(claim.item, []).append(claim)
    for kind in (SUM, REDUCED_GRADIENT, NORM):
        found: list[Finding] = []
        for item in sorted((item for item in claimed if item.kind == kind), key=lambda one: (one.hi - one.lo, one)):
            if not any(item.contains(earlier.item) for earlier in found):
                finding = _find_in(item, claimed[item], again)
                found += [] if finding is None else [finding]
        if found:
            wrong = tuple(sorted({rank for finding in found for rank in finding.wrong}))
            first = next((finding for finding in found if finding.wrong), found[0])
            return Finding(first.item, first.elements, wrong, first.disputed)
    return None


def _find_in(item: Item, claims: Sequence[Claim], again: Mapping[int, Mapping[Item, bytes]]) -> Finding | None:
    second = {rank: results[item] for rank, results in again.items() if item in results}
    for claim in claims:
        if claim.rank in second and second[claim.rank] != claim.value:
            contradicted = {c.rank for c in claims if c.rank in second and second[c.rank] != c.value}
            elements = num_different(item.kind, claim.value, second[claim.rank])
            return Finding(item, elements, tuple(sorted(contradicted)), tuple(sorted(contradicted)))
    opinions = {**second, **{claim.rank: claim.value for claim in claims}}
    (most, votes), *others = Counter(opinions.values()).most_common()
    if not others:
        return None
    elements = num_different(item.kind, most, others[0][0])
    if votes > len(opinions) - votes:
        wrong = tuple(sorted(rank for rank, value in opinions.items() if value != most))
        return Finding(item, elements, wrong, wrong)
    return Finding(item, elements, (), tuple(sorted(opinions)))
