"""Reshard plans: each element a destination lacks arrives exactly once, and nothing else moves."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sharding_strategies import array_shapes, meshes, specs, successors

from elaswave_spmd.errors import LayoutError, MeshError, SpecError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding import P, ReshardPlan, plan_pages, plan_reshard
from elaswave_spmd.sharding import reshard as reshard_module


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    shape, mesh = draw(array_shapes), draw(meshes())
    dst = (draw(successors(mesh)), draw(specs(len(shape))))
    return plan_reshard(shape, draw(st.sampled_from([1, 2, 4])), src=(mesh, draw(specs(len(shape)))), dst=dst)


def mesh(name: str) -> Mesh:
    return Mesh.initial(MeshShape.parse(name))


def execute(plan: ReshardPlan) -> None:
    """Run the plan on real arrays and check every worker's new tile."""
    whole = np.arange(np.prod(plan.shape, dtype=int)).reshape(plan.shape)
    bound = 0
    new = {rank: np.full(plan.shape, -1) for rank in plan.dst.mesh.members}
    for rank in plan.dst.mesh.members:
        if (kept := plan.local_copy(rank)) is not None:
            assert kept.src == kept.dst == rank and kept.bytes == whole[kept.slices].size * plan.itemsize
            new[rank][kept.slices] = whole[kept.slices]
        needed = np.zeros(plan.shape, bool)
        needed[plan.dst.tile_of(rank, plan.shape)] = True
        if rank in plan.src.mesh:
            needed[plan.src.tile_of(rank, plan.shape)] = False
        bound += int(needed.sum()) * plan.itemsize
    moved = 0
    for transfer in plan:
        assert transfer.src != transfer.dst
        held = np.full(plan.shape, -1)
        tile = plan.src.tile_of(transfer.src, plan.shape)
        held[tile] = whole[tile]
        sent = held[transfer.slices]
        assert (sent >= 0).all(), "sent what its source does not hold"
        assert (new[transfer.dst][transfer.slices] == -1).all(), "arrived twice, or was there"
        new[transfer.dst][transfer.slices] = sent
        assert 0 < transfer.bytes == sent.size * plan.itemsize
        moved += transfer.bytes
    for rank in plan.dst.mesh.members:
        tile = plan.dst.tile_of(rank, plan.shape)
        assert (new[rank][tile] == whole[tile]).all()
        assert (new[rank] >= 0).sum() == whole[tile].size
    assert moved == plan.bytes == plan.lower_bound == bound


@given(plans())
def test_each_missing_element_arrives_once(plan: ReshardPlan) -> None:
    execute(plan)


@given(plans(), st.integers(1, 5))
def test_every_view_of_a_plan_is_the_same_plan(plan: ReshardPlan, chunk: int) -> None:
    everything = list(plan)
    assert len(everything) == plan.num_transfers
    ranks = {*plan.src.mesh.members, *plan.dst.mesh.members}
    assert Counter(everything) == Counter(t for rank in ranks for t in plan.incoming(rank))
    assert Counter(everything) == Counter(t for rank in ranks for t in plan.outgoing(rank))
    assert all(t.dst == rank for rank in ranks for t in plan.incoming(rank))
    assert all(t.src == rank for rank in ranks for t in plan.outgoing(rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard_module, "_CHUNK", chunk)
        fresh = plan_reshard(plan.shape, plan.itemsize, src=plan.src, dst=plan.dst)
        assert list(fresh) == everything and fresh.bytes == plan.bytes
        assert fresh == plan and hash(fresh) == hash(plan)


@given(meshes(), st.integers(0, 30), st.data())
def test_nothing_moves_when_nothing_changes(mesh: Mesh, length: int, data: st.DataObject) -> None:
    spec = data.draw(specs(1))
    plan = plan_reshard((length,), 4, src=(mesh, spec), dst=(mesh, spec))
    assert (plan.num_transfers, plan.bytes, list(plan)) == (0, 0, [])


def test_losing_a_replica_moves_nothing() -> None:
    before = mesh("dp4_pp2")
    plan = plan_reshard((100,), 4, src=(before, P("pp")), dst=(before.without({1, 6}), P("pp")))
    assert plan.bytes == 0


def test_newcomers_read_from_all_replicas_in_turn() -> None:
    before = mesh("dp3_pp2")
    after = before.with_members(0, range(100, 106)).with_members(1, range(106, 112))
    loads = Counter(t.src for t in plan_reshard((60,), 4, src=(before, P(None)), dst=(after, P(None))))
    assert sorted(loads.values()) == [2] * 6
    loads = Counter(t.src for t in plan_reshard((60,), 4, src=(before, P("pp")), dst=(after, P("pp"))))
    assert sorted(loads.values()) == [2] * 6
    ragged = Mesh.initial(MeshShape.of_stages((3, 2)))
    after = ragged.with_members(0, range(100, 112)).with_members(1, range(112, 124))
    loads = Counter(t.src for t in plan_reshard((60,), 4, src=(ragged, P("pp")), dst=(after, P("pp"))))
    assert [loads[rank] for rank in ragged.members] == [4, 4, 4, 6, 6]


def test_members_read_within_their_old_stage() -> None:
    before = mesh("dp2_pp2")
    for transfer in plan_reshard((60,), 4, src=(before, P("dp")), dst=(before, P(None))):
        assert before.stage_of(transfer.src) == before.stage_of(transfer.dst)


def test_plan_prints() -> None:
    before = mesh("dp3")
    plan = plan_reshard((12, 2), 4, src=(before, P("dp")), dst=(before.without({1}), P("dp")), array="w")
    assert str(plan).splitlines() == [
        'reshard w (12, 2) x 4 B: P("dp") on dp3 -> P("dp") on dp2',
        "  2 transfers, 32 B (lower bound 32 B)",
        "  1 -> 0  w[4:6, 0:2]  16 B",
        "  1 -> 2  w[6:8, 0:2]  16 B",
    ]
    gather = plan_reshard((12,), 4, src=(mesh("dp12"), P("dp")), dst=(mesh("dp12"), P(None)))
    assert str(gather).endswith("... 124 more")


def test_wrong_plans() -> None:
    here = mesh("dp2")
    with pytest.raises(SpecError, match="at most one entry per dim"):
        plan_reshard((4,), 4, src=(here, P("dp")), dst=(here, P(None, "dp")))
    with pytest.raises(SpecError, match="at least 1 byte"):
        plan_reshard((4,), 0, src=(here, P("dp")), dst=(here, P()))
    with pytest.raises(MeshError, match="rank 9"):
        plan_reshard((4,), 4, src=(here, P("dp")), dst=(here, P())).incoming(9)


@given(st.integers(0, 40), st.data())
def test_pages_move_once(pages: int, data: st.DataObject) -> None:
    src, dst = (data.draw(arrays(np.int32, pages, elements=st.integers(0, 3))) for _ in range(2))
    plan = plan_pages(src, dst, 256)
    owner = src.copy()
    for transfer in plan.transfers:
        (run,) = transfer.slices
        assert (owner[run] == transfer.src).all() and (src[run] == transfer.src).all()
        owner[run] = transfer.dst
        assert transfer.bytes == (run.stop - run.start) * 256
    assert (owner == dst).all()
    assert plan.bytes == (src != dst).sum() * 256 == sum(t.bytes for t in plan.transfers)
    more = Counter(dst.tolist()) - Counter(src.tolist())
    assert plan.lower_bound == more.total() * 256 <= plan.bytes
    ranks = range(4)
    assert sum(len(plan.incoming(r)) for r in ranks) == sum(len(plan.outgoing(r)) for r in ranks) == len(plan.transfers)
    assert plan == plan_pages(src, dst, 256) and hash(plan) == hash(plan_pages(src, dst, 256))


def test_runs_of_pages_are_one_transfer() -> None:
    plan = plan_pages(np.array([0, 0, 0, 1, 1]), np.array([2, 2, 0, 2, 2]), 10)
    assert str(plan).splitlines() == [
        "5 pages: 2 transfers, 40 B (lower bound 40 B)",
        "  0 -> 2  pages[0:2]  20 B",
        "  1 -> 2  pages[3:5]  20 B",
    ]


@pytest.mark.parametrize(("src", "dst", "size"), [([0], [0, 1], 4), ([0.5], [1.0], 4), ([-1], [0], 4), ([0], [0], 0)])
def test_wrong_owner_maps(src: list, dst: list, size: int) -> None:
    with pytest.raises(LayoutError, match="Owner maps"):
        plan_pages(np.array(src), np.array(dst), size)
