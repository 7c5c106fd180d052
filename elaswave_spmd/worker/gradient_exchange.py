"""Reduced gradients through the process group of a stage (`runtime.collectives=group`), in place of links.

One all-to-all for each layer brings the reduced gradients of its pages, with the norms of the pages, from the primaries
in the stage to their mirrors in it. Mirrors in other stages and learners are sent theirs over links. When an exchange
is issued, and what becomes of it if the group fails, is the same as for partial sums: sum_exchange.py.
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
        gradient: fp32.
        norms: the norm value of each page, in fp32; none for the loss page.
    """

    pages: ReplicaSet
    gradient: Tensor
    norms: Sequence[float]


@dataclass(frozen=True)
class GradientExchange:
    """One all-to-all: reduced gradients of one layer, from all primaries in the stage to their mirrors in it.

    What a member sends to another one is the gradients of all its page ranges in page order, then the norms of all
    pages in the same order, then zeros: the next member's gradients begin aligned, as those in a message do.

    Args:
        layer: whose state pages they are of.
        ranges: member -> the page ranges that it is the primary of and another member is a mirror of, in page order.
    """

    message: ClassVar[str] = "ReducedGradient"
    """The kind of message that it stands for."""

    layer: int
    ranges: Mapping[int, tuple[ReplicaSet, ...]]

    @classmethod
    def of(cls, layout: LayerLayout, found: Sequence[ReplicaSet], members: frozenset[int]) -> GradientExchange | None:
        """The exchange of a layer; None if no member has a reduced gradient for another one.

        Args:
            found: all page ranges of the layer.
            members: of the stage that computes the layer.
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
        """Elements that go from one member to another one."""
        found = self.between(sender, receiver)
        norms = sum(_num_norms(layout, pages) for pages in found)
        return sum(layout.num_elements(pages.first, pages.stop) for pages in found) + norms + _fill(norms)

    def pack(
        self, sender: int, receivers: Sequence[int], reduced: Mapping[PageRange, ReducedPages]
    ) -> dict[int, list[Tensor]]:
        """The parts that go from one member to others, by receiver; receivers that get nothing are left out."""
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
            # At once for all receivers: on a device each copy from the host is waited for.
            place = next(iter(parts.values()))[0].device
            behind = torch.tensor(norms, dtype=torch.float32, device=place).split(sizes)
            for mine, rest in zip(parts.values(), behind, strict=True):
                mine.append(rest)
        return parts

    def unpack(self, layout: LayerLayout, receiver: int, came: Mapping[int, Tensor]) -> list[ReducedPages]:
        """The parts that have come from other members, in the memory in which they came: there is nothing else in it.

        Args:
            came: sender -> what `pack` has made for the receiver, one part behind the other, or padding.
        """
        gradients, behind = list[tuple[ReplicaSet, Tensor]](), list[Tensor]()
        for sender, values in came.items():
            if not (ranges := self.between(sender, receiver)):
                continue
            sizes = [layout.num_elements(pages.first, pages.stop) for pages in ranges]
            *mine, rest = values.split([*sizes, len(values) - sum(sizes)])
            gradients += zip(ranges, mine, strict=True)
            behind.append(rest[: sum(_num_norms(layout, pages) for pages in ranges)])
        # Waits for the device, as a primary does that makes the norms: they are voted with.
        norms = iter(torch.cat(behind).tolist() if behind else ())
        return [ReducedPages(p, value, [next(norms) for _ in range(_num_norms(layout, p))]) for p, value in gradients]


def mirrors_in(members: frozenset[int], pages: ReplicaSet) -> frozenset[int]:
    """The mirrors of a page range among the members of a stage."""
    return (pages.replicas & members) - {pages.primary}


def _num_norms(layout: LayerLayout, pages: ReplicaSet) -> int:
    return 0 if layout.block_of(pages.first).kind == LOSS else pages.num_pages


def _fill(norms: int) -> int:
    """The number of zeros that come behind so many norms."""
    return -norms % ALIGNMENT
