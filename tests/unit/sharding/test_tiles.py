"""Tile maps: every replica set covers its array exactly once, whatever is uneven."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.sharding import P, TileMap
from elaswave_spmd.sharding.tiles import part_start
from tests.unit.sharding.sharding_strategies import array_shapes, specs, stage_sizes


@st.composite
def tile_maps(draw: st.DrawFn) -> TileMap:
    shape = draw(array_shapes)
    return TileMap(MeshShape.of_stages(draw(stage_sizes)), draw(specs(len(shape))), shape)


def tile_at(tiles: TileMap, stage: int, position: int = 0) -> tuple[slice, ...]:
    """The tile of one worker."""
    row = tiles.coordinates.tolist().index([stage, position])
    starts, stops = (bound[row].tolist() for bound in tiles.bounds)
    return tuple(map(slice, starts, stops))


@given(st.integers(0, 50), st.integers(1, 60))
def test_parts_are_even_and_contiguous(length: int, parts: int) -> None:
    starts = [part_start(length, parts, part) for part in range(parts + 1)]
    sizes = np.diff(starts)
    assert starts[0] == 0 and starts[-1] == length
    assert sorted(sizes, reverse=True) == list(sizes) and max(sizes) - min(sizes) <= 1
    assert part_start(length, parts, np.arange(parts + 1)).tolist() == starts


@given(st.integers(0, 50), st.integers(1, 12), st.data())
def test_longer_parts_go_on_at_any_part(length: int, parts: int, data: st.DataObject) -> None:
    longer_from = data.draw(st.integers(0, parts - 1))
    starts = part_start(length, parts, np.arange(parts + 1), longer_from)
    assert starts.tolist() == [part_start(length, parts, part, longer_from) for part in range(parts + 1)]
    longer = [(longer_from + i) % parts for i in range(length % parts)]
    assert np.diff(starts).tolist() == [length // parts + (part in longer) for part in range(parts)]
    tiles = TileMap(MeshShape.of(dp=parts), P("dp"), (length,), longer_from=longer_from)
    assert [bound[:, 0].tolist() for bound in tiles.bounds] == [starts[:-1].tolist(), starts[1:].tolist()]


@given(tile_maps())
def test_each_replica_set_covers_the_array_once(tiles: TileMap) -> None:
    sizes = tiles.mesh_shape.stage_sizes
    stage_sets = [range(len(sizes))] if "pp" in tiles.spec.axes else [[stage] for stage in range(len(sizes))]
    for stages, first in product(stage_sets, range(max(sizes))):
        held = np.zeros(tiles.shape, int)
        for stage in stages:
            positions = range(sizes[stage]) if "dp" in tiles.spec.axes else [min(first, sizes[stage] - 1)]
            for position in positions:
                held[tile_at(tiles, stage, position)] += 1
        assert (held == 1).all()


@given(stage_sizes, st.integers(0, 40))
def test_a_later_axis_cuts_what_an_earlier_one_left(sizes: list[int], length: int) -> None:
    shape = MeshShape.of_stages(sizes)
    coarse, fine = TileMap(shape, P("pp"), (length,)), TileMap(shape, P(("pp", "dp")), (length,))
    for stage, size in enumerate(sizes):
        (whole,) = tile_at(coarse, stage)
        parts = [tile_at(fine, stage, position)[0] for position in range(size)]
        assert [whole.start, *(part.stop for part in parts)] == [*(part.start for part in parts), whole.stop]


def test_the_example_of_the_module() -> None:
    shape = MeshShape.of_stages((3, 2))

    def rows(spec: P) -> list[tuple[int, int]]:
        starts, stops = TileMap(shape, spec, (12, 6)).bounds
        return list(zip(starts[:, 0].tolist(), (stops[:, 0] - 1).tolist(), strict=True))

    assert rows(P("pp")) == [(0, 5)] * 3 + [(6, 11)] * 2
    assert rows(P("dp")) == [(0, 3), (4, 7), (8, 11), (0, 5), (6, 11)]
    assert rows(P(("pp", "dp"))) == [(0, 1), (2, 3), (4, 5), (6, 8), (9, 11)]
    assert rows(P("pp", "dp")) == [(0, 5)] * 3 + [(6, 11)] * 2


def test_absent_axis_means_replicated() -> None:
    tiles = TileMap(MeshShape.parse("dp2"), P(("pp", "dp"), "tp"), (8, 3))
    assert tile_at(tiles, 0, 1) == (slice(4, 8), slice(0, 3))


def test_wrong_arrays() -> None:
    with pytest.raises(SpecError, match="negative length"):
        TileMap(MeshShape(), P(), (-1,))
    with pytest.raises(SpecError, match=r"embed\.weight"):
        TileMap(MeshShape.parse("tp2"), P("tp"), (7,), "embed.weight")


def test_large_maps_print_short() -> None:
    assert str(TileMap(MeshShape.parse("dp1000"), P("dp"), (7,))).endswith("... 988 more workers")
