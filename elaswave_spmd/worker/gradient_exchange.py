"""Reduced gradients through the process group of a stage (`runtime.collectives=group`), in place of links.

One all-to-all for each layer brings the reduced gradients of its pages, with the norms of the pages, from the primaries
in the stage to their mirrors in it. Mirrors in other stages, and learners, get theirs over links. When an exchange is
issued, and what happens if the group fails, is the same as for partial sums (sum_exchange.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from elaswave_spmd.sharding.layout import ALIGNMENT, LOSS, LayerLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet


@dataclass(frozen=True)
class ReducedPages:
    """The reduced gradient of a page range.

    Args:
        pages: the page range and its replicas.
        gradient: the reduced gradient of these pages, fp32, flat.
        norms: the norm value of each page, computed in fp32. Empty for the loss page, which has none.
    """

    pages: ReplicaSet
    gradient: Tensor
    norms: Sequence[float]


@dataclass(frozen=True)
class GradientExchange:
    """One all-to-all: reduced gradients of one layer, from all primaries in the stage to their mirrors in it.

    A member sends to another one the gradients of all its page ranges in page order, then the norms of all pages in the
    same order, then zeros. The zeros make the next member's gradients begin aligned, as gradients in a message do.

    Args:
        layer: the layer that the pages belong to.
        ranges: member -> the page ranges of which it is the primary and another member is a mirror, in page order.
    """

    message: ClassVar[str] = "ReducedGradient"
    """The kind of message that the exchange replaces."""

    layer: int
    ranges: Mapping[int, tuple[ReplicaSet, ...]]

    @classmethod
    def of(cls, layout: LayerLayout, found: Sequence[ReplicaSet], members: frozenset[int]) -> GradientExchange | None:
        """The exchange of a layer; None if no member has a reduced gradient for another one.

        Args:
            found: all page ranges of the layer.
            members: the members of the stage that computes the layer.
        """
        ranges: dict[int, tuple[ReplicaSet, ...]] = {}
        for pages in found:
            is_sent = any(rank != pages.primary and rank in members for rank in pages.replicas)
            if is_sent and pages.primary in members and not layout.is_frozen(pages.first):
                ranges[pages.primary] = (*ranges.get(pages.primary, ()), pages)
        return cls(layout.index, ranges) if ranges else None

    def sent_by(self, rank: int) -> tuple[ReplicaSet, ...]:
        """The page ranges whose reduced gradients a member sends."""
        return self.ranges.get(rank, ())

    def between(self, sender: int, receiver: int) -> tuple[ReplicaSet, ...]:
        """The page ranges whose reduced gradients go from one member to another one."""
        return tuple(pages for pages in self.sent_by(sender) if sender != receiver and receiver in pages.replicas)

    def size(self, layout: LayerLayout, sender: int, receiver: int) -> int:
        """The number of elements that one member sends to another one."""
        found = self.between(sender, receiver)
        norms = sum(_num_norms(layout, pages) for pages in found)
        return sum(layout.num_elements(pages.first, pages.stop) for pages in found) + norms + _fill(norms)

    def pack(
        self, sender: int, receivers: Sequence[int], reduced: Mapping[PageRange, ReducedPages]
    ) -> dict[int, list[Tensor]]:
        """The tensors that one member sends, by receiver. Receivers that get nothing are left out.

        Args:
            reduced: at least the reduced gradients of the page ranges that the sender sends.
        """
        parts, norms, sizes = dict[int, list[Tensor]](), list[float](), list[int]()
        for receiver in receivers:
            if not (found := [reduced[pages.key] for pages in self.between(sender, receiver)]):
                continue
            before = len(norms)
            norms += [norm for one in found for norm in one.norms]
            norms += [0.0] * _fill(len(norms) - before)
            sizes.append(len(norms) - before)
            parts[receiver] = [one.gradient for one in found]
        if parts:
            # One copy for all receivers, because each copy from the host to a device has to be waited for.
            place = next(iter(parts.values()))[0].device
            behind = torch.tensor(norms, dtype=torch.float32, device=place).split(sizes)
            for mine, rest in zip(parts.values(), behind, strict=True):
                mine.append(rest)
        return parts

    def unpack(self, layout: LayerLayout, receiver: int, came: Mapping[int, Tensor]) -> list[ReducedPages]:
        """The reduced gradients that other members have sent.

        They are slices of the received memory. Keeping them wastes little, as it contains nothing but them, their norms
        and padding.

        Args:
            came: sender -> what it has sent to the receiver: the tensors that `pack` made, one after the other, or only
                padding.
        """
        gradients, behind = list[tuple[ReplicaSet, Tensor]](), list[Tensor]()
        for sender, values in came.items():
            if not (ranges := self.between(sender, receiver)):
                continue
            sizes = [layout.num_elements(pages.first, pages.stop) for pages in ranges]
            *mine, rest = values.split([*sizes, len(values) - sum(sizes)])
            gradients += zip(ranges, mine, strict=True)
            behind.append(rest[: sum(_num_norms(layout, pages) for pages in ranges)])
        # `tolist` waits for the device. A primary waits in the same way when it computes the norms: votes contain them.
        norms = iter(torch.cat(behind).tolist() if behind else ())
        return [ReducedPages(p, value, [next(norms) for _ in range(_num_norms(layout, p))]) for p, value in gradients]


def mirrors_in(members: frozenset[int], pages: ReplicaSet) -> frozenset[int]:
    """The mirrors of a page range among the members of a stage."""
    return (pages.replicas & members) - {pages.primary}


def _num_norms(layout: LayerLayout, pages: ReplicaSet) -> int:
    return 0 if layout.block_of(pages.first).kind == LOSS else pages.num_pages


def _fill(norms: int) -> int:
    """The number of zeros that follow this many norms, so that what comes next is aligned."""
    return -norms % ALIGNMENT
