"""The placement of optimizer state that is wanted: a mesh, the layers of its stages, a spec, a number of mirrors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout
from elaswave_spmd.sharding.replicas import LayerReplicas, PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.sharding.spec import P
from elaswave_spmd.sharding.tiles import TileMap

Stages = tuple[tuple[int, ...], ...]
"""Ranks of each stage."""

_PRIMARIES = P("dp")
"""The spec of the primaries, whatever the spec of the state: each page has one worker that reduces and publishes it."""


@dataclass(frozen=True)
class StateSharding:
    """A (mesh, specs) of optimizer state. With a page layout, it determines the workers that hold each page.

    The array that `spec` splits is the sequence of a layer's pages, and it is split over the workers of the layer's
    stage: P("dp") gives each worker a tile of the pages (ZeRO-1 and above), P(None) gives every worker all of them.
    Whatever the spec, the tiles of P("dp") are the *primaries*: one worker reduces and publishes each page.

    Args:
        mesh: the workers, by stage, and their failure domains.
        layer_cuts: stage s has layers [layer_cuts[s], layer_cuts[s + 1]).
        spec: the spec of the state, `Shardings.optim`.
        mirror_count: the number of mirrors of each page; fewer if the mesh has fewer other workers.
        scatter: the most workers over which the mirrors of one worker's pages are spread; 0 for the default (4, or
            `mirror_count` if that is more).
    """

    mesh: Mesh
    layer_cuts: tuple[int, ...]
    spec: P
    mirror_count: int = 0
    scatter: int = 0

    @property
    def stages(self) -> Stages:
        """Ranks of each stage."""
        return self.mesh.stages

    @property
    def is_replicated(self) -> bool:
        """True if the spec gives each worker of a stage all of its pages: it leaves out axis dp."""
        return not self.spec.splits_workers

    def layers_of_stage(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.layer_cuts[stage], self.layer_cuts[stage + 1])

    def primary_ranges(
        self, layout: ModelLayout, stage: int, only: Collection[int] | None = None, *, least_joined: int = 0
    ) -> Iterator[tuple[PageRange, int]]:
        """The page ranges of one stage of a new mesh, each with its primary, in page order.

        Every layer is cut over all workers of the stage, so that moving a layer between stages of n workers is n
        disjoint transfers (docs/design/state_and_gradients.md). With `least_joined`, neighbouring layers
        that are too small for this are cut together, as if they were one layer.

        If a layer's pages do not divide evenly, some workers get one page more. Layer after layer, other workers do, so
        that all workers of the stage have equally many pages, within one. Frozen pages are cut separately from trained
        ones: trained pages have gradients and an update, so their numbers should be even as well.

        A page range lies in one block. The loss page goes to the last worker of the stage.

        Args:
            layout: the pages of each layer.
            stage: the number of the stage.
            only: the workers whose page ranges are wanted; None for all.
            least_joined: layers are cut together until each worker's part of them has at least this number of pages; 0
                if each layer is cut by itself.
        """
        members, layers = self.stages[stage], [layout.layers[layer] for layer in self.layers_of_stage(stage)]
        places = [i for i, rank in enumerate(members) if only is None or rank in only]
        # The positions in the stage at which the next worker with one page more is: it goes on from layer to layer, so
        # that pages are even within one over the whole stage. Frozen pages go on where the trained pages of all layers
        # end.
        turn, frozen_turn = 0, sum(of_layer.num_trained_pages for of_layer in layers) % len(members)
        for group in _groups(layers, least_joined * len(members)):
            num_trained = sum(of_layer.num_trained_pages for of_layer in group)
            num_frozen = sum(of_layer.num_state_pages for of_layer in group) - num_trained
            tiles = _tiles(num_trained, len(members), turn)[:, places]
            frozen_tiles = _tiles(num_frozen, len(members), frozen_turn)[:, places]
            primaries = [members[place] for place in places]
            for of_layer in group:
                trained = of_layer.num_trained_pages
                yield from _cut(of_layer, range(trained), tiles, primaries)
                yield from _cut(of_layer, range(trained, of_layer.num_state_pages), frozen_tiles, primaries)
                tiles, frozen_tiles = tiles - trained, frozen_tiles - (of_layer.num_state_pages - trained)
                if of_layer.loss_block is not None and (only is None or members[-1] in only):
                    loss = of_layer.loss_block.first_page
                    yield (of_layer.index, loss, loss + 1), members[-1]
            turn, frozen_turn = (turn + num_trained) % len(members), (frozen_turn + num_frozen) % len(members)

    def without_mirrors(
        self, layout: ModelLayout, stages: Iterable[int] | None = None, *, least_joined: int = 0
    ) -> ReplicaMap:
        """The replica map of a new mesh by the spec alone, without the mirrors of `mirror_count`.

        Args:
            layout: the pages of each layer.
            stages: the stages whose layers are wanted; None for all.
            least_joined: as for `primary_ranges`.
        """
        found: dict[int, list[ReplicaSet]] = {}
        for stage in range(len(self.stages)) if stages is None else stages:
            everybody = frozenset(self.stages[stage])
            found |= {layer: [] for layer in self.layers_of_stage(stage)}
            for (layer, first, stop), primary in self.primary_ranges(layout, stage, least_joined=least_joined):
                replicas = everybody if self.is_replicated else frozenset((primary,))
                found[layer].append(ReplicaSet(layer, first, stop, primary, replicas))
        return {layer: LayerReplicas(of_layer) for layer, of_layer in found.items()}

    def __str__(self) -> str:
        layers = " | ".join(f"{a}-{b - 1}" for a, b in zip(self.layer_cuts, self.layer_cuts[1:], strict=False))
        mirrors = f"{self.mirror_count} mirror{'s' * (self.mirror_count != 1)}"
        return f"{self.mesh}; layers {layers}; state {self.spec}, {mirrors}"


def _groups(layers: Sequence[LayerLayout], least_joined: int) -> Iterator[Sequence[LayerLayout]]:
    """Neighbouring layers in groups of at least `least_joined` pages; pages that are left over go to the last group."""
    begin, left = 0, sum(of_layer.num_state_pages for of_layer in layers)
    num_pages = 0
    for end, of_layer in enumerate(layers, 1):
        num_pages, left = num_pages + of_layer.num_state_pages, left - of_layer.num_state_pages
        if end == len(layers) or (num_pages >= least_joined and left >= least_joined):
            yield layers[begin:end]
            begin, num_pages = end, 0


def _tiles(num_pages: int, num_workers: int, longer_from: int) -> np.ndarray:
    """The pages [first, stop) of each worker, int64 [2, num_workers].

    Args:
        longer_from: the first worker that gets one page more, if the pages do not divide evenly.
    """
    tiles = TileMap(MeshShape.of(dp=num_workers), _PRIMARIES, (num_pages,), longer_from=longer_from)
    return np.stack([bound[:, 0] for bound in tiles.bounds])


def _cut(
    layer: LayerLayout, pages: range, tiles: np.ndarray, primaries: Sequence[int]
) -> Iterator[tuple[PageRange, int]]:
    """State pages of a layer with their primaries, in page order.

    Args:
        layer: the layout of the layer.
        pages: all trained state pages of the layer, or all frozen ones.
        tiles: int64 [2, num_workers]: the pages [first, stop) of each worker, counted from the first page of `pages`.
            Where layers are cut together, they may lie before or after this layer's pages.
        primaries: the workers.
    """
    if not pages:
        return
    inside = (tiles[0] < len(pages)) & (tiles[1] > 0)
    starts, stops = (pages.start + tiles[:, inside].clip(0, len(pages))).tolist()
    primaries = [primary for primary, is_inside in zip(primaries, inside.tolist(), strict=True) if is_inside]
    for block in layer.state_blocks:
        end = block.first_page + block.num_pages
        for primary, start, stop in zip(primaries, starts, stops, strict=True):
            # A tile may span several blocks, but a page range lies in one: it is one slice of memory.
            if max(start, block.first_page) < min(stop, end):
                yield (layer.index, max(start, block.first_page), min(stop, end)), primary
