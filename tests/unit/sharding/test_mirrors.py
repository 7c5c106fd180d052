"""In how many pieces a worker's pages of a layer are mirrored."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings, replica_placement
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, all_replica_sets
from tests.unit.sharding.test_replica_rebalance import Case, cases, check, layout_of


@given(cases(), st.integers(2, 6), st.booleans())
@settings(deadline=None, max_examples=150)
def test_mirrors_in_larger_pieces(case: Case, least_pages: int, joins: bool):
    assume(not case.replicated)

    def placed(case: Case) -> ReplicaMap:
        joined = least_pages if joins else 0
        return place_replicas(case.layout, case.sharding, least_pages=least_pages, least_joined=joined)

    coarse = placed(case)
    check(case, coarse)
    whole = {replica_set.key for replica_set in all_replica_sets(placed(replace(case, mirror_count=0)))}
    assert all(
        replica_set.num_pages >= least_pages or replica_set.key in whole for replica_set in all_replica_sets(coarse)
    )


@given(cases(), st.integers(1, 6), st.booleans())
@settings(deadline=None, max_examples=150)
def test_a_placement_without_replicas_has_those_of_a_new_mesh_stage_by_stage(
    case: Case, least_pages: int, by_groups: bool
):
    """Nobody sends them: the controller makes all of them, and a worker those of its stage."""
    counts = tuple((1,) + (0,) * (len(members) - 1) for members in case.stages)
    zero = Shardings().with_zero(0 if case.replicated else 2)
    placement = Placement(case.sharding.mesh, 1, case.cuts, counts, zero, by_groups=by_groups)
    with mock.patch.object(replica_placement, "_PIECE_ELEMENTS", 64 * least_pages):
        whole = placement.replica_map(case.layout)
        assert whole == placement.with_new_replicas(case.layout, 0, 0).replicas
        for stage in range(placement.num_stages):
            mine = placement.layers_of_stage(stage)
            assert placement.replica_map(case.layout, {stage}) == {layer: whole[layer] for layer in mine}
    if by_groups:
        assert whole == case.sharding.without_mirrors(case.layout), "each layer is cut by itself"


def test_larger_pieces_are_spread_over_layers():
    """Ranges of three pages, none of them cut: one peer after the other mirrors a worker's range, layer by layer."""
    mesh = Mesh.initial(MeshShape.of_stages([4]))
    case = Case(layout_of([12] * 6), mesh.stages, (0, 6), False, mesh.topology, 1, 0)
    peers = [
        replica_set.mirrors
        for replica_set in all_replica_sets(case.place(least_pages=3))
        if replica_set.primary == 0 and not case.is_loss(replica_set)
    ]
    assert len(peers) == 6 and set(peers) == {(1,), (2,), (3,)} and peers[:3] == peers[3:]
