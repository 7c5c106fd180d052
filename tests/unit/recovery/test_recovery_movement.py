"""How much state a change moves, against what is on the map, and a lower bound that is one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.recovery.reconfiguration import least_elements, moved_elements, next_placement, next_stages
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replica_rebalance import refill
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_runs, promote, with_learners
from tests.unit.recovery.controller_cases import LAYOUT, placement

PAGE = 64


def layout_of(*sizes: int) -> ModelLayout:
    """A layer for each number of elements; pages of 128, so that some last pages are short."""
    uses = [LayerUse(f"l{i}", (ParameterInfo(f"l{i}.w", (size,)),)) for i, size in enumerate(sizes)]
    return lay_out(uses, page_size=2 * PAGE)


def dealt(layout: ModelLayout, stages: tuple[int, ...], cuts: tuple[int, ...], zero: int, mirrors: int) -> Placement:
    shardings = Shardings().with_zero(zero)
    mesh = Mesh.initial(MeshShape.of_stages(stages))
    replicas = place_replicas(
        layout,
        mesh.stages,
        cuts,
        replicated=not shardings.optim.axes,
        topology=mesh.topology,
        mirror_count=mirrors,
        scatter=0,
    )
    microbatches = max(stages)
    counts = tuple((microbatches - size + 1, *(1,) * (size - 1)) for size in stages)
    return Placement(mesh, microbatches, cuts, counts, shardings, replicas=replicas)


def test_what_learners_get_is_counted_once_for_each_and_the_loss_page_never() -> None:
    layout = layout_of(300, 64)  # pages of 128, 128 and 64 elements (300 is rounded up to 320); one of 64; the loss
    loss = layout.layers[1].loss_block
    assert loss is not None
    one, two = frozenset((0,)), frozenset((1, 2))
    replicas: ReplicaMap = {
        0: (ReplicaSet(0, 0, 1, 0, one), ReplicaSet(0, 1, 3, 0, one, two)),
        1: (ReplicaSet(1, 0, 1, 0, one), ReplicaSet(1, loss.first_page, loss.first_page + 1, 0, one, two)),
    }
    assert moved_elements(replicas, layout) == 2 * (128 + 64)


def test_a_map_without_learners_moves_nothing() -> None:
    found = placement(2, 1)
    assert moved_elements(found.replica_map(LAYOUT), LAYOUT) == 0


def test_a_newcomer_is_to_have_its_share_though_no_replica_is_missing() -> None:
    """Without mirrors, two workers of four pages each become three: the third one has at least two of the eight."""
    layout = layout_of(8 * 128)
    before = dealt(layout, (2,), (0, 1), zero=1, mirrors=0)
    after = next_placement(before, layout, 1, ((0, 1, 2),), lambda _: None)
    target = target_of(before.replica_map(layout), after, layout, 0)
    found = replace(after, replicas=with_learners(before.replica_map(layout), target))
    there = replace(after, replicas=target)
    assert found.replicas is not None
    assert least_elements(found.replicas, there, layout) == 2 * 128 == moved_elements(found.replicas, layout)


def test_a_lost_mirror_is_copied_once_and_that_is_the_least() -> None:
    layout = layout_of(1024, 512)
    before = dealt(layout, (4,), (0, 2), zero=1, mirrors=1)
    replicas, homeless = promote(before.replica_map(layout), {1})
    after = next_placement(before, layout, 1, ((0, 2, 3),), lambda _: None)
    target = target_of(replicas, after, layout, 1)
    found = replace(after, replicas=with_learners(replicas, target))
    there = replace(after, replicas=target)
    alone = sum(run.num_pages for run in all_runs(replicas) if len(run.replicas) == 1)
    assert not homeless and found.replicas is not None and alone
    assert least_elements(found.replicas, there, layout) >= 128 * (alone - 1), "the loss page may be among them"
    assert moved_elements(found.replicas, layout) == least_elements(found.replicas, there, layout)


def target_of(replicas: ReplicaMap, after: Placement, layout: ModelLayout, mirrors: int) -> ReplicaMap:
    return refill(
        replicas,
        layout,
        after.mesh.stages,
        after.layer_cuts,
        replicated=not after.shardings.optim.axes,
        topology=after.mesh.topology,
        mirror_count=mirrors,
        scatter=0,
    )


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
    replicas, homeless = promote(before.replica_map(layout), gone)
    if homeless or not now:
        return
    after = next_placement(before, layout, 1, now, lambda _: None)
    target = target_of(replicas, after, layout, mirrors)
    found = replace(after, replicas=with_learners(replicas, target))
    there = replace(after, replicas=target)
    assert found.replicas is not None
    moved, least = moved_elements(found.replicas, layout), least_elements(found.replicas, there, layout)
    missing = {
        (run.layer, page, rank)
        for then, run in zip(all_runs(target), all_runs(found.replicas), strict=True)
        for page in range(run.first, run.stop)
        for rank in then.replicas - run.replicas
        if layout.layers[run.layer].block_of(page).kind == "state"
    }
    spans = [layout.layers[layer].span(page, page + 1) for layer, page, _ in missing]
    assert moved == sum(stop - start for start, stop in spans)
    assert 0 <= least <= moved


def test_domains_are_those_of_the_launcher() -> None:
    found = placement(2, 1)
    after = next_placement(found, LAYOUT, 1, ((0, 1), (2, 9)), lambda rank: (f"host {rank}",))
    assert after.mesh.topology.path(9) == ("host 9",) and isinstance(after.mesh.topology, Topology)
    assert (after.mesh.epoch, after.layer_cuts, after.microbatch_counts) == (1, found.layer_cuts, ((3, 2), (3, 2)))
