"""New parameters through the process group of a stage (`runtime.collectives=group`), in place of links.

One all-gather for each layer brings the new values of its pages from their primaries in the stage to all members. Links
are still used for workers of other stages that read a tied parameter, and for primaries that belong to other stages.
stage_collectives.py describes when an all-gather is issued, and what happens if the group fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from elaswave_spmd.sharding.layout import LOSS, LayerLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet


@dataclass(frozen=True)
class ParameterGather:
    """One all-gather: new values of one layer, from all primaries in the stage to all of its members.

    The library requires that all members send a share of the same size. A member's share is the values of all its page
    ranges in page order, then zeros up to the size of the largest share. Pages are distributed evenly, so a layer with
    many pages has hardly any padding.

    Args:
        layer: the layer whose values are gathered.
        members: the members of the stage, in the order of their ranks in the group.
        ranges: member -> page range -> number of elements, in page order. A member has the page ranges of which it is
            the primary, and of which some member has no replica.
    """

    layer: int
    members: tuple[int, ...]
    ranges: Mapping[int, Mapping[PageRange, int]]

    @classmethod
    def of(
        cls, layout: LayerLayout, found: Sequence[ReplicaSet], members: Sequence[int], *, with_frozen: bool
    ) -> ParameterGather | None:
        """The all-gather of a layer; None if there is nothing that a member of the stage has to get from another one.

        Args:
            found: all page ranges of the layer.
            members: the members of the stage that computes the layer, in the order of their ranks in the group.
            with_frozen: True if frozen pages are published in every step. Otherwise they are published only before the
                first step, over links.
        """
        ranges, everybody = dict[int, dict[PageRange, int]](), frozenset(members)
        for pages in found:
            block = layout.block_of(pages.first)
            is_published = block.kind != LOSS and (with_frozen or not block.frozen)
            if is_published and pages.primary in everybody and not everybody <= pages.replicas:
                ranges.setdefault(pages.primary, {})[pages.key] = layout.num_elements(pages.first, pages.stop)
        return cls(layout.index, tuple(members), ranges) if ranges else None

    @property
    def keys(self) -> frozenset[PageRange]:
        """The page ranges that are gathered."""
        return frozenset(key for ranges in self.ranges.values() for key in ranges)

    @cached_property
    def share(self) -> int:
        """The number of elements that each member sends."""
        return max(sum(ranges.values()) for ranges in self.ranges.values())

    def sent_by(self, rank: int) -> Mapping[PageRange, int]:
        """The page ranges whose values a member sends, with their numbers of elements."""
        return self.ranges.get(rank, {})

    def pack(self, rank: int, values: Mapping[PageRange, Tensor], gathered: Tensor) -> Tensor:
        """Copy a member's share to its place in the result, and return that slice. No other memory is needed.

        Args:
            values: the values of at least the page ranges in the member's share.
            gathered: the memory of the result, with room for a share of each member.
        """
        share = gathered.chunk(len(self.members))[self.members.index(rank)]
        *parts, padding = share.split(self._sizes(rank))
        for part, key in zip(parts, self.sent_by(rank), strict=True):
            part.copy_(values[key])
        padding.zero_()
        return share

    def unpack(self, rank: int, gathered: Tensor) -> list[tuple[PageRange, Tensor]]:
        """The values that other members have sent, as slices of `gathered`.

        Args:
            rank: the rank of the member that has received them.
        """
        found = list[tuple[PageRange, Tensor]]()
        for member, share in zip(self.members, gathered.chunk(len(self.members)), strict=True):
            if member != rank:
                *parts, _ = share.split(self._sizes(member))
                found += zip(self.sent_by(member), parts, strict=True)
        return found

    def _sizes(self, member: int) -> list[int]:
        """The number of elements of each part of a member's share: its page ranges, and then the padding."""
        sizes = list(self.sent_by(member).values())
        return [*sizes, self.share - sum(sizes)]
