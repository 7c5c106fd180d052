"""Every page of a checkpoint has one writer, a mirror where there is one, and the work is spread evenly."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.run_dir.checkpoint_writers import assign_writers
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap, ReplicaSet, all_replica_sets
from tests.unit.run_dir.checkpoint_cases import cuts, layouts, small_layout


@st.composite
def replica_maps(draw: st.DrawFn) -> tuple[ModelLayout, ReplicaMap]:
    """Any replicas and learners, on workers that need not be of the layer's stage."""
    layout = draw(layouts())
    workers = st.integers(0, 5)
    found: dict[int, list[ReplicaSet]] = {layer.index: [] for layer in layout.layers}
    for layer, first, stop in draw(cuts(layout)):
        replicas = draw(st.frozensets(workers, min_size=1, max_size=4))
        learners = draw(st.frozensets(workers, max_size=2)) - replicas
        primary = draw(st.sampled_from(sorted(replicas)))
        found[layer].append(ReplicaSet(layer, first, stop, primary, replicas, learners))
    last = layout.layers[-1]
    if last.loss_block is not None:
        page = last.loss_block.first_page
        found[last.index].append(ReplicaSet(last.index, page, page + 1, 0, frozenset({0, 1})))
    return layout, {layer: tuple(runs) for layer, runs in found.items()}


@given(replica_maps())
def test_every_state_page_has_one_writer_that_is_a_replica(case: tuple[ModelLayout, ReplicaMap]) -> None:
    layout, replicas = case
    writers = assign_writers(replicas, layout)
    state = [r for r in all_replica_sets(replicas) if layout.layers[r.layer].block_of(r.first).kind != LOSS]
    assert writers.keys() == {run.key for run in state}
    assert sum(stop - first for _, first, stop in writers) == sum(layer.num_state_pages for layer in layout.layers)
    for run in state:
        assert writers[run.key] in run.replicas
        assert writers[run.key] != run.primary or len(run.replicas) == 1


def test_the_loss_page_is_not_written() -> None:
    layout = small_layout()
    last = layout.layers[-1]
    assert last.loss_block is not None
    page = last.loss_block.first_page
    replicas = {last.index: (ReplicaSet(last.index, page, page + 1, 0, frozenset({0})),)}
    assert assign_writers(replicas, layout) == {}


def test_equal_runs_are_spread_evenly() -> None:
    layout = small_layout()
    everybody = frozenset(range(4))
    runs = tuple(ReplicaSet(0, page, page + 1, 0, everybody) for page in range(layout.layers[0].num_state_pages))
    loads = Counter(assign_writers({0: runs}, layout).values())
    assert loads.keys() == {1, 2, 3} and max(loads.values()) - min(loads.values()) <= 1
