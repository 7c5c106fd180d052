"""The way of a layer's gradient: which worker is the primary of which of its pages."""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet


@dataclass(frozen=True)
class Route:
    """The way of one page range of a layer's gradient buffer.

    Args:
        first, stop: pages of the layer's gradient buffer.
        pages: the replica set that they are added to: the same pages, or for a tied parameter those of its source.
    """

    layer: int
    first: int
    stop: int
    pages: ReplicaSet


def routes(layout: ModelLayout, replica_map: ReplicaMap, layer: int) -> tuple[Route, ...]:
    """The routes of one layer's gradient pages. A tied parameter's pages go to the primary of its source."""
    own = layout.layers[layer]
    trained = (pages for pages in replica_map[layer] if not own.is_frozen(pages.first))
    found = [Route(layer, pages.first, pages.stop, pages) for pages in trained]
    for block in (block for block in own.reader_blocks if not block.frozen):
        assert block.source is not None
        owner, source = block.source
        shift = block.first_page - source
        inside = range(source, source + block.num_pages)
        found += [
            Route(layer, pages.first + shift, pages.stop + shift, pages)
            for pages in replica_map[owner]
            if pages.first in inside
        ]
    return tuple(found)
