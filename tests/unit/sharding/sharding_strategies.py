"""Random shapes, specs and meshes, ragged and uneven, for the tests of this folder."""

from __future__ import annotations

from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.sharding import P
from elaswave_spmd.sharding.layout import ModelLayout, Slot

array_shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
stage_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def regular_topology(num_workers: int, *, per_host: int = 8, hosts_per_rack: int = 16) -> Topology:
    """Ranks in order on hosts of `per_host` workers, hosts in racks of `hosts_per_rack`."""
    per_rack = per_host * hosts_per_rack
    return Topology.of({r: (f"rack{r // per_rack}", f"host{r // per_host}") for r in range(num_workers)})


def owned_slots(layout: ModelLayout) -> list[Slot]:
    """The parameters that are no reader of another one, by layer."""
    return [slot for layer in layout.layers for block in layer.state_blocks for slot in block.slots]


@st.composite
def specs(draw: st.DrawFn, num_dims: int) -> P:
    """A spec that puts pp and dp on any dims, or leaves them out."""
    dims = st.none() if not num_dims else st.one_of(st.none(), st.integers(0, num_dims - 1))
    entries: list[tuple[str, ...]] = [() for _ in range(num_dims)]
    for axis in ("pp", "dp"):
        dim = draw(dims)
        if dim is not None:
            entries[dim] += (axis,)
    return P(*entries)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh whose ranks lie anywhere in it."""
    sizes = draw(stage_sizes)
    ranks = iter(draw(st.permutations(range(sum(sizes)))))
    return Mesh(MeshShape.of_stages(sizes), tuple(tuple(next(ranks) for _ in range(size)) for size in sizes))


@st.composite
def successors(draw: st.DrawFn, mesh: Mesh) -> Mesh:
    """Another mesh of some members and some newcomers, anywhere in any stages."""
    sizes = draw(stage_sizes)
    pool = draw(st.permutations([*mesh.members, *range(100, 100 + sum(sizes))]))
    ranks = iter(pool)
    return mesh.with_stages([[next(ranks) for _ in range(size)] for size in sizes])
