"""In how many pieces a worker's pages of a layer are mirrored."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding.replicas import all_runs
from tests.unit.sharding.test_replica_rebalance import Case, cases, check, layout_of


@given(cases(), st.integers(2, 6))
@settings(deadline=None, max_examples=100)
def test_dealt_in_larger_atoms(case: Case, least_pages: int):
    assume(not case.replicated)
    coarse = case.deal(least_pages=least_pages)
    check(case, coarse)
    whole = {run.key for run in all_runs(replace(case, mirror_count=0).deal())}
    assert all(run.num_pages >= least_pages or run.key in whole for run in all_runs(coarse))


def test_larger_atoms_are_spread_over_layers():
    """Runs of three pages, none of them cut: one peer after the other mirrors a worker's run, layer by layer."""
    mesh = Mesh.initial(MeshShape.of_stages([4]))
    case = Case(layout_of([12] * 6), mesh.stages, (0, 6), False, mesh.topology, 1, 0)
    peers = [run.mirrors for run in all_runs(case.deal(least_pages=3)) if run.primary == 0 and not case.is_loss(run)]
    assert len(peers) == 6 and set(peers) == {(1,), (2,), (3,)} and peers[:3] == peers[3:]
