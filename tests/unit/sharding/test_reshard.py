"""Reshard plans, executed on numbers: every worker ends with exactly its pages, for the fewest bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.sharding import P, ReshardPlan, StateSharding, plan_reshard
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_replica_sets
from tests.unit.sharding.replica_counts import copied_pages
from tests.unit.sharding.test_replica_rebalance import Case, arbitrary_maps, cases, fewest_copies, layout_of

Held = dict[int, set[tuple[int, int]]]
"""Rank -> the (layer, page) pairs whose state it has."""


def held_in(replicas: ReplicaMap, without: frozenset[int] = frozenset()) -> Held:
    found: Held = {}
    for pages in all_replica_sets(replicas):
        for rank in pages.replicas - without:
            found.setdefault(rank, set()).update((pages.layer, page) for page in range(pages.first, pages.stop))
    return found


def execute(plan: ReshardPlan) -> Held:
    """Carries a plan out, page by page; returns what every worker has at the end."""
    held = held_in(plan.before, plan.gone)
    primary = {
        (it.layer, page): it.primary for it in all_replica_sets(plan.before) for page in range(it.first, it.stop)
    }
    for move in plan.promotions:
        layer, first, stop = move.pages
        for page in range(first, stop):
            assert primary[layer, page] == move.source and move.source in plan.gone
            assert (layer, page) in held[move.destination], "promoted without state"
            primary[layer, page] = move.destination
    for copy in plan.copies:
        layer, first, stop = copy.pages
        for page in range(first, stop):
            assert primary[layer, page] == copy.source and (layer, page) in held[copy.source], "sent without state"
            target = held.setdefault(copy.destination, set())
            assert (layer, page) not in target, "arrived twice, or was there"
            target.add((layer, page))
    for move in plan.hand_overs:
        layer, first, stop = move.pages
        for page in range(first, stop):
            assert primary[layer, page] == move.source and (layer, page) in held[move.destination]
            primary[layer, page] = move.destination
    for (layer, first, stop), rank in plan.drops:
        for page in range(first, stop):
            held[rank].remove((layer, page))
    after = {(it.layer, page): it.primary for it in all_replica_sets(plan.after) for page in range(it.first, it.stop)}
    lost = {(it.layer, page) for it in plan.lost for page in range(it.first, it.stop)}
    assert after == {page: rank for page, rank in primary.items() if page not in lost}
    return {rank: pages for rank, pages in held.items() if pages}


@given(cases(), cases(), st.data())
@settings(deadline=None, max_examples=150)
def test_a_plan_leads_to_its_target(before: Case, after: Case, data: st.DataObject) -> None:
    """From any mesh, ragged, with workers lost, to any other mesh, cuts and spec: for the same model."""
    layers = len(before.layout.layers)
    stages = after.stages[: min(len(after.stages), layers)]
    cuts = (0, *range(layers - len(stages) + 1, layers + 1))
    after = replace(after, layout=before.layout, stages=stages, cuts=cuts)
    replicas = before.place()
    lost = data.draw(st.sets(st.sampled_from(before.workers), max_size=2))
    stages = tuple(tuple(rank for rank in members if rank not in lost) or (39,) for members in after.stages)
    after = replace(after, stages=tuple((s + 30,) if m == (39,) else m for s, m in enumerate(stages)))
    plan = plan_reshard(before.layout, replicas, lost=lost, to=after.sharding)
    assert plan == plan_reshard(before.layout, replicas, lost=sorted(lost), to=after.sharding)
    assert hash(plan) == hash(plan_reshard(before.layout, replicas, lost=lost, to=after.sharding))
    if plan.lost:
        assert len(lost) > before.mirrors and not plan.copies
        assert all(pages.replicas <= lost for pages in plan.lost)
        return
    assert execute(plan) == held_in(plan.after)
    assert not any(rank in lost for pages in all_replica_sets(plan.after) for rank in pages.replicas)
    assert plan.least_elements <= plan.moved_elements
    assert plan.text(12).endswith("drops")


@given(arbitrary_maps())
@settings(deadline=None, max_examples=200)
def test_no_plan_makes_fewer_copies(drawn: tuple[Case, ReplicaMap]) -> None:
    case, replicas = drawn
    plan = plan_reshard(case.layout, replicas, to=case.sharding)
    assert execute(plan) == held_in(plan.after)
    assert copied_pages(plan) == fewest_copies(case, replicas)


@given(cases(), cases())
@settings(deadline=None, max_examples=100)
def test_a_given_map_of_other_ranges_is_reached(before: Case, after: Case) -> None:
    """As a checkpoint is read: its shards stand in for workers, numbered below zero, and everything is copied."""
    layers = len(before.layout.layers)
    stages = after.stages[: min(len(after.stages), layers)]
    after = replace(after, layout=before.layout, stages=stages, cuts=(0, *range(layers - len(stages) + 1, layers + 1)))
    shards = {
        layer: tuple(ReplicaSet(*it.key, -1 - it.primary, frozenset((-1 - it.primary,))) for it in of_layer)
        for layer, of_layer in before.place().items()
    }
    target = after.place()
    plan = plan_reshard(before.layout, shards, to=target)
    assert execute(plan) == held_in(target)
    assert copied_pages(plan) == sum(it.num_pages * len(it.replicas) for it in all_replica_sets(target))


@given(cases(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_loss_alone_promotes_in_place(case: Case, data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(case.workers), max_size=case.mirrors))
    plan = plan_reshard(case.layout, case.place(), lost=lost)
    assert (plan.lost, plan.copies, plan.hand_overs, plan.drops, plan.moved_elements) == ((), (), (), (), 0)
    assert execute(plan) == held_in(plan.after) == held_in(case.place(), frozenset(lost))
    orphans = [it for it in all_replica_sets(case.place()) if it.primary in lost]
    assert [(move.pages, move.source) for move in plan.promotions] == [(it.key, it.primary) for it in orphans]


def test_nothing_moves_when_nothing_changes() -> None:
    sharding = StateSharding(Mesh.initial(MeshShape.of_stages((3, 2))), (0, 2, 3), P("dp"), mirror_count=1)
    layout = layout_of([7, 5, 9])
    plan = plan_reshard(layout, place_replicas(layout, sharding), to=sharding)
    assert (plan.promotions, plan.copies, plan.hand_overs, plan.drops) == ((), (), (), ())
    assert plan.during == plan.after == plan.before


def test_senders_share_the_load() -> None:
    """Eight workers, of whom one is lost: the copies of its pages come from all the others, almost evenly."""
    mesh = Mesh.initial(MeshShape.of(dp=8))
    sharding = StateSharding(mesh, (0, 5), P("dp"), mirror_count=1)
    layout = layout_of([100] * 5)
    left = replace(sharding, mesh=mesh.with_stages([[0, 1, 2, 3, 4, 6, 7]]))
    plan = plan_reshard(layout, place_replicas(layout, sharding), lost={5}, to=left)
    sent = Counter({rank: 0 for rank in left.mesh.members})
    for copy in plan.copies:
        sent[copy.source] += copy.pages[2] - copy.pages[1]
    assert plan.moved_elements == plan.least_elements and max(sent.values()) < 2 * sum(sent.values()) / 7, sent


def test_a_plan_that_is_under_way_goes_on() -> None:
    """The second half of the workers has its copies: the rest of the plan is the copies of the first half."""
    mesh = Mesh.initial(MeshShape.of(dp=3))
    sharding = StateSharding(mesh, (0, 1), P("dp"), mirror_count=1)
    layout = layout_of([9])
    joined = replace(sharding, mesh=mesh.with_stages([[0, 1, 2, 3]]), mirror_count=2)
    plan = plan_reshard(layout, place_replicas(layout, sharding), to=joined)
    arrived = {
        layer: tuple(
            ReplicaSet(*it.key, it.primary, it.replicas | (it.learners & {3}), it.learners - {3}) for it in of_layer
        )
        for layer, of_layer in plan.during.items()
    }
    rest = plan.advanced(arrived)
    assert rest.after == plan.after
    assert rest.copies == tuple(copy for copy in plan.copies if copy.destination != 3) != ()


def test_a_plan_prints() -> None:
    mesh = Mesh.initial(MeshShape.of(dp=3))
    sharding = StateSharding(mesh, (0, 2), P("dp"), mirror_count=1)
    layout = layout_of([6, 3])
    plan = plan_reshard(
        layout, place_replicas(layout, sharding), lost={1}, to=replace(sharding, mesh=mesh.with_stages([[0, 2]]))
    )
    assert plan.text(12).splitlines() == [
        'reshard plan, without worker 1: mesh dp2, epoch 1, 2 workers: 0 2; layers 0-1; state P("dp"), 1 mirror',
        "  promote 0 in place of 1: layer 0 page 3",
        "  promote 2 in place of 1: layer 0 page 2; layer 1 page 1",
        "  copy 0 -> 2, 2,304 B: layer 0 pages 0 3; layer 1 page 0",
        "  copy 2 -> 0, 2,304 B: layer 0 pages 2 5; layer 1 pages 1 3",
        "  3 promotions, 7 copies, 4,608 B (at least 4,608 B), 0 drops",
    ]
    joined = plan_reshard(
        layout, place_replicas(layout, sharding), to=replace(sharding, mesh=mesh.with_stages([[0, 2, 1, 3]]))
    )
    assert joined.text(12).splitlines()[1:] == [
        "  copy 1 -> 3, 768 B: layer 1 page 1",
        "  copy 2 -> 3, 768 B: layer 0 page 4",
        "  then hand over 1 -> 3: layer 1 page 1",
        "  then hand over 2 -> 3: layer 0 page 4",
        "  then drop at 1: layer 1 page 1",
        "  then drop at 2: layer 0 page 4",
        "  0 promotions, 2 copies, 1,536 B (at least 1,536 B), 2 drops",
    ]
