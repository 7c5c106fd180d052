"""Meshes: members at coordinates, epochs, and what may not be."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import MeshError
from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from tests.unit.sharding.sharding_strategies import regular_topology

stage_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def mesh_of(*sizes: int) -> Mesh:
    return Mesh.initial(MeshShape.of_stages(sizes))


def test_initial_ranks_are_stage_major() -> None:
    mesh = Mesh.initial(MeshShape.parse("dp2_pp2"))
    assert mesh.stages == ((0, 1), (2, 3))
    assert mesh.epoch == 0
    assert str(mesh) == "mesh dp2_pp2, epoch 0, 4 workers: 0 1 | 2 3"
    assert str(mesh_of(5, 3)) == "mesh stages5-3, epoch 0, 8 workers: 0-4 | 5-7"


@given(stage_sizes)
def test_coordinates_are_the_inverse_of_stages(sizes: list[int]) -> None:
    mesh = mesh_of(*sizes)
    assert mesh.members == tuple(range(sum(sizes)))
    for rank in mesh.members:
        assert mesh.stages[mesh.stage_of(rank)][mesh.coordinate(rank)[1]] == rank


def test_a_loss_makes_stages_ragged_and_a_newcomer_mends_them() -> None:
    mesh = Mesh.initial(MeshShape.parse("dp2_pp2_tp4"))
    ragged = mesh.with_stages([(0,), (2, 3)])
    assert ragged.shape == MeshShape.of_stages((1, 2), tp=4)
    mended = ragged.with_stages([(0, 4), (2, 3)])
    assert mended.shape == mesh.shape == MeshShape.parse("dp2_pp2_tp4")
    assert (mended.stages, mended.epoch) == (((0, 4), (2, 3)), 2)


def test_strangers_are_refused() -> None:
    mesh = mesh_of(2, 2)
    assert 3 in mesh and 4 not in mesh
    for ask in (mesh.stage_of, mesh.coordinate):
        with pytest.raises(MeshError, match=r"(?s)rank 4.*epoch 0.*ranks 0-3"):
            ask(4)


@pytest.mark.parametrize("stages", [((0, 1), (1, 2)), ((0, 0), (1, 2)), ((-1, 0), (1, 2)), ((0, 1), (2,)), ((0, 1),)])
def test_members_that_contradict_the_shape_are_refused(stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(MeshError):
        Mesh(MeshShape.parse("dp2_pp2"), stages)


def test_meshes_are_values() -> None:
    mesh = mesh_of(3, 2)
    assert mesh == mesh_of(3, 2)
    assert len({mesh, mesh_of(3, 2), mesh.with_stages([(1, 2), (3, 4)])}) == 2
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh


def test_large_meshes_print_short() -> None:
    mesh = mesh_of(9, *[10] * 199)
    assert len(str(mesh)) < 500


def test_topology_distances() -> None:
    topology = regular_topology(64, per_host=8, hosts_per_rack=2)
    assert topology.path(17) == ("rack1", "host2")
    assert [topology.distance(0, rank) for rank in (0, 7, 8, 16)] == [0, 0, 1, 2]
    same_names = Topology.of({0: ("a", "host0"), 1: ("b", "host0")})
    assert same_names.distance(0, 1) == 2


def test_topology_of_newcomers() -> None:
    assert mesh_of(2).with_stages([(0, 1, 7)]).topology.distance(0, 7) == 0
    mesh = Mesh.initial(MeshShape.parse("dp16"), regular_topology(16))
    more = [(*range(16), 16)]
    with pytest.raises(MeshError, match=r"(?s)rank 16.*2 domains.*domains=\{16"):
        mesh.with_stages(more)
    joined = mesh.with_stages(more, {16: ("rack0", "host9")})
    assert joined.topology.distance(0, 16) == 1
    assert joined.with_stages(mesh.stages).topology is joined.topology


def test_topology_is_complete_and_even() -> None:
    with pytest.raises(MeshError, match="rank 1"):
        Mesh.initial(MeshShape.parse("dp2"), Topology.single_host([0]))
    with pytest.raises(MeshError, match="same depth"):
        Topology.of({0: ("rack", "host"), 1: ("host",)})
    with pytest.raises(MeshError, match="one path"):
        Topology(((0, ("a",)), (0, ("b",))))
