"""The bytes of reshard plans after changes of the mesh, against what is on the maps, and a lower bound that is one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.recovery.reconfiguration import next_placement, next_stages
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_replica_sets
from elaswave_spmd.sharding.reshard import ReshardPlan, plan_reshard
from tests.unit.recovery.controller_cases import LAYOUT, placement

PAGE = 64


def layout_of(*sizes: int) -> ModelLayout:
    """A layer for each number of elements; pages of 128, so that some last pages are short."""
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (size,)),)) for i, size in enumerate(sizes)]
    return lay_out(uses, page_size=2 * PAGE)


def dealt(layout: ModelLayout, stages: tuple[int, ...], cuts: tuple[int, ...], zero: int, mirrors: int) -> Placement:
    shardings = Shardings().with_zero(zero)
    mesh = Mesh.initial(MeshShape.of_stages(stages))
    microbatches = max(stages)
    counts = tuple((microbatches - size + 1, *(1,) * (size - 1)) for size in stages)
    found = Placement(mesh, microbatches, cuts, counts, shardings)
    return replace(found, replicas=place_replicas(layout, found.state_sharding(mirrors)))


def plan_of(before: Placement, after: Placement, layout: ModelLayout, mirrors: int, lost: set[int]) -> ReshardPlan:
    return plan_reshard(layout, before.replica_map(layout), lost=lost, to=after.state_sharding(mirrors))


def test_every_copy_of_state_is_counted_and_the_loss_page_never() -> None:
    layout = layout_of(300, 64)  # pages of 128, 128 and 64 elements (300 is rounded up to 320); one of 64; the loss
    loss = layout.layers[1].loss_block
    assert loss is not None
    one, more = frozenset((0,)), frozenset((0, 1, 2))
    ranges = [(0, 0, 1), (0, 1, 3), (1, 0, 1), (1, loss.first_page, loss.first_page + 1)]
    before: ReplicaMap = {layer: tuple(ReplicaSet(*it, 0, one) for it in ranges if it[0] == layer) for layer in (0, 1)}
    copied = {(0, 1, 3), ranges[3]}
    after: ReplicaMap = {
        layer: tuple(ReplicaSet(*it, 0, more if it in copied else one) for it in ranges if it[0] == layer)
        for layer in (0, 1)
    }
    plan = plan_reshard(layout, before, to=after)
    assert plan.moved_elements == 2 * (128 + 64) and len(plan.copies) == 4


def test_a_map_without_learners_moves_nothing() -> None:
    assert plan_reshard(LAYOUT, placement(2, 1).replica_map(LAYOUT)).moved_elements == 0


def test_a_newcomer_is_to_have_its_share_though_no_replica_is_missing() -> None:
    """Without mirrors, two workers of four pages each become three: the third one has at least two of the eight."""
    layout = layout_of(8 * 128)
    before = dealt(layout, (2,), (0, 1), zero=1, mirrors=0)
    after = next_placement(before, layout, 1, ((0, 1, 2),), lambda _: None)
    plan = plan_of(before, after, layout, 0, set())
    assert plan.least_elements == 2 * 128 == plan.moved_elements


def test_a_lost_mirror_is_copied_once_and_that_is_the_least() -> None:
    layout = layout_of(1024, 512)
    before = dealt(layout, (4,), (0, 2), zero=1, mirrors=1)
    after = next_placement(before, layout, 1, ((0, 2, 3),), lambda _: None)
    plan = plan_of(before, after, layout, 1, {1})
    alone = sum(pages.num_pages for pages in all_replica_sets(plan.during) if len(pages.replicas) == 1)
    assert not plan.lost and alone
    assert plan.least_elements >= 128 * (alone - 1), "the loss page may be among them"
    assert plan.moved_elements == plan.least_elements


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 12).map(lambda n: 64 * n), min_size=2, max_size=4),
    stages=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    zero=st.sampled_from([0, 1, 3]),
    mirrors=st.integers(0, 2),
    lost=st.sets(st.integers(0, 7), max_size=2),
    newcomers=st.integers(0, 3),
)
def test_the_bound_is_one_and_both_are_those_of_the_map(
    sizes: list[int], stages: list[int], zero: int, mirrors: int, lost: set[int], newcomers: int
) -> None:
    layout = layout_of(*sizes)
    cuts = (0, len(sizes)) if len(stages) == 1 else (0, 1, len(sizes))
    before = dealt(layout, tuple(stages), cuts, zero, mirrors)
    gone = lost & set(before.mesh.members)
    ranks = range(100, 100 + newcomers)
    now = next_stages(before.mesh.stages, gone, ranks, len(stages))
    left = plan_reshard(layout, before.replica_map(layout), lost=gone)
    if left.lost or not now:
        return
    after = next_placement(before, layout, 1, now, lambda _: None)
    plan = plan_of(before, after, layout, mirrors, gone)
    missing = {
        (pages.layer, page, rank)
        for then, pages in zip(all_replica_sets(plan.after), all_replica_sets(plan.during), strict=True)
        for page in range(pages.first, pages.stop)
        for rank in then.replicas - pages.replicas
        if layout.layers[pages.layer].block_of(page).kind == "state"
    }
    spans = [layout.layers[layer].span(page, page + 1) for layer, page, _ in missing]
    assert plan.moved_elements == sum(stop - start for start, stop in spans)
    assert 0 <= plan.least_elements <= plan.moved_elements


def test_domains_are_those_of_the_launcher() -> None:
    found = placement(2, 1)
    after = next_placement(found, LAYOUT, 1, ((0, 1), (2, 9)), lambda rank: (f"host {rank}",))
    assert after.mesh.topology.path(9) == ("host 9",) and isinstance(after.mesh.topology, Topology)
    assert (after.mesh.epoch, after.layer_cuts, after.microbatch_counts) == (1, found.layer_cuts, ((3, 2), (3, 2)))
