"""Routes of gradients: to which replica set, and so to which primary, each page of a layer's gradient goes."""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet


@dataclass(frozen=True)
class Route:
    """Where the gradient of one page range of a layer goes.

    Args:
        layer: the layer whose gradient it is.
        first, stop: the pages [first, stop) of the layer's gradient buffer.
        pages: the replica set that they are added to. It is of the same pages, or for a tied parameter of the pages of
            its source.
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
