"""The page ranges and replicas that a mesh and a spec ask for, read off tile maps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding import P, StateSharding, TileMap
from elaswave_spmd.sharding.replicas import all_replica_sets
from tests.unit.sharding.test_replica_rebalance import layout_of

PAGES = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(PAGES, st.integers(1, 9))
def test_every_layer_is_cut_evenly_over_the_stage_and_so_is_the_stage(pages: list[int], workers: int) -> None:
    mesh = Mesh.initial(MeshShape.of(dp=workers))
    layout = layout_of(pages)
    load = [0] * workers
    covered: list[list[int]] = [[] for _ in pages]
    for (layer, first, stop), primary in StateSharding(mesh, (0, len(pages)), P("dp")).primary_ranges(layout, 0):
        block = layout.layers[layer].block_of(first)
        assert stop <= block.pages.stop
        if block.kind == "state":
            load[primary] += stop - first
            covered[layer] += range(first, stop)
            assert stop - first in (pages[layer] // workers, -(-pages[layer] // workers))
        else:
            assert primary == workers - 1, "the loss page is the last worker's"
    assert covered == [list(range(count)) for count in pages]
    assert sum(load) == sum(pages) and max(load) - min(load) <= 1


def state_ranges(pages: list[int], workers: int, least_joined: int) -> list[tuple[int, int, int, int]]:
    """(layer, first page, end, primary) of a stage's state pages, in page order."""
    mesh, layout = Mesh.initial(MeshShape.of(dp=workers)), layout_of(pages)
    sharding = StateSharding(mesh, (0, len(pages)), P("dp"))
    ranges = sharding.primary_ranges(layout, 0, least_joined=least_joined)
    return [(*key, primary) for key, primary in ranges if layout.layers[key[0]].block_of(key[1]).kind == "state"]


@given(PAGES, st.integers(2, 9), st.integers(2, 12))
def test_small_layers_are_cut_together_in_parts_that_are_large_enough(
    pages: list[int], workers: int, least_joined: int
) -> None:
    ranges = state_ranges(pages, workers, least_joined)
    load, parts = [0] * workers, list[list[int]]()
    for _, first, stop, primary in ranges:
        load[primary] += stop - first
        if parts and parts[-1][0] == primary:
            parts[-1][1] += stop - first  # it goes on in the next layer
        else:
            parts.append([primary, stop - first])
    assert [(layer, page) for layer, a, b, _ in ranges for page in range(a, b)] == [
        (layer, page) for layer, count in enumerate(pages) for page in range(count)
    ]
    assert max(load) - min(load) <= 1
    if sum(pages) >= least_joined * workers:
        assert all(size >= least_joined for _, size in parts)
    else:
        assert len(parts) <= workers, "they are one group"


def test_layers_that_are_large_enough_are_cut_by_themselves() -> None:
    """What is left behind the last group goes with it."""
    alone, together = [(0, 0, 3, 0), (0, 3, 6, 1)], [(1, 0, 4, 0), (2, 0, 4, 0), (2, 4, 9, 1), (3, 0, 2, 1)]
    assert state_ranges([6, 4, 9, 2], 2, 3) == alone + together
    assert state_ranges([6, 6], 2, 3) == state_ranges([6, 6], 2, 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 9), st.booleans())
def test_replicas_are_the_coordinates_whose_tile_has_the_page(sizes: list[int], count: int, replicated: bool) -> None:
    """On ragged stages, for the first layer of each stage; later layers are cut alike, from another position on."""
    mesh = Mesh.initial(MeshShape.of_stages(sizes))
    spec = P(None) if replicated else P("dp")
    sharding = StateSharding(mesh, tuple(range(len(sizes) + 1)), spec)
    layout = layout_of([count] * len(sizes))
    starts, stops = (bound[:, 0].tolist() for bound in TileMap(mesh.shape, spec, (count,)).bounds)
    for pages in all_replica_sets(sharding.without_mirrors(layout)):
        if layout.layers[pages.layer].block_of(pages.first).kind == "state":
            members = mesh.stages[pages.layer]
            for page in range(pages.first, pages.stop):
                bounds = zip(mesh.members, starts, stops, strict=True)
                assert pages.replicas == {r for r, start, stop in bounds if r in members and start <= page < stop}


def test_the_sharding_prints() -> None:
    sharding = StateSharding(Mesh.initial(MeshShape.parse("dp2_pp2")), (0, 2, 3), P("dp"), mirror_count=1)
    assert str(sharding) == 'mesh dp2_pp2, epoch 0, 4 workers: 0 1 | 2 3; layers 0-1 | 2-2; state P("dp"), 1 mirror'
