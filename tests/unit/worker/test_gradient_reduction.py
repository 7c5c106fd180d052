"""Several workers' reducers give the sums of the tree, whoever has which micro-batch and whatever arrives when."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import split
from elaswave_spmd.recovery.messages import PartialSum
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.gradient_reduction import GradientReducer, ReductionForm, first_page_of_use, uses_of
from elaswave_spmd.worker.sum_exchange import StageExchanges
from tests.unit.runtime.runtime_cases import HOST, placed, small_layout


class Cluster:
    """The reducers of all workers; messages wait in `flying` until they are delivered in an order drawn by `draw`."""

    def __init__(
        self, layout: ModelLayout, placement: Placement, draw: random.Random, *, in_place: bool, copies: bool = False
    ) -> None:
        self.copies = copies
        self.layout, self.placement, self.draw = layout, placement, draw
        self.flying: list[tuple[int, PartialSum, Tensor]] = []
        self.entries: dict[tuple[int, ReplicaSet], Tensor] = {}
        runs = placement.replica_map(layout)
        self.exchanges = {rank: StageExchanges() for rank in placement.mesh.members}
        form = ReductionForm(
            placement.num_microbatches,
            sharded=bool(placement.shardings.grads.axes),
            add_in_place=in_place,
            copies_payloads=copies,
        )
        self.reducers = {
            rank: GradientReducer(
                rank,
                layout,
                HOST,
                form,
                send=self._send,
                gradient_done=self._gradient_done,
                exchanges=self.exchanges[rank],
            )
            for rank in placement.mesh.members
        }
        for rank, reducer in self.reducers.items():
            reducer.enter_epoch(runs, placement.layers_of_stage(placement.mesh.stage_of(rank)), 1)

    def _send(self, peer: int, message: PartialSum, payload: Tensor) -> None:
        self.flying.append((peer, message, payload.clone() if self.copies else payload))

    def _gradient_done(self, step: int, run: ReplicaSet, entry: Tensor) -> None:
        assert (step, run) not in self.entries, "a reduced gradient is completed once"
        self.entries[step, run] = entry.clone()

    def run_step(self, step: int, leaves: dict[tuple[int, int], Tensor]) -> None:
        """All micro-batches of a step, in any order, interleaved with deliveries, some of them twice."""
        p = self.placement
        todo = {rank: list(p.microbatches_of(rank)) for rank in p.mesh.members}
        for rank, reducer in self.reducers.items():
            reducer.begin_step(step, p.microbatches_of(rank))
        for microbatches in todo.values():
            self.draw.shuffle(microbatches)
        while any(todo.values()) or self.flying or self.exchange_some():
            ready = [rank for rank, microbatches in todo.items() if microbatches]
            if ready and (not self.flying or self.draw.random() < 0.5):
                rank = self.draw.choice(ready)
                self._compute(rank, step, todo[rank].pop(), leaves)
            elif self.flying:
                at = self.draw.randrange(len(self.flying))
                peer, message, payload = self.flying[at]
                if self.draw.random() < 0.8:  # else it stays, and is delivered once more
                    self.flying.pop(at)
                self.reducers[peer].node_received(message, payload.clone())
        for reducer in self.reducers.values():
            reducer.step_decided(step)

    def exchange_some(self) -> bool:
        """Lets groups of stages go on, if there are any; False if nothing is left to do."""
        return False

    def _compute(self, rank: int, step: int, microbatch: int, leaves: dict[tuple[int, int], Tensor]) -> None:
        reducer = self.reducers[rank]
        for layer in reversed(self.placement.layers_of_stage(self.placement.mesh.stage_of(rank))):
            buffer, add = reducer.begin_microbatch(layer, microbatch)
            (buffer.flat.add_ if add else buffer.flat.copy_)(leaves[layer, microbatch])
            reducer.end_microbatch(step, layer, microbatch)


def tree_sum(leaves: Sequence[Tensor], lo: int, hi: int) -> Tensor:
    if hi - lo == 1:
        return leaves[lo]
    middle = split((lo, hi))
    return tree_sum(leaves, lo, middle) + tree_sum(leaves, middle, hi)


def wanted_entry(
    layout: ModelLayout, run: ReplicaSet, leaves: dict[tuple[int, int], Tensor], microbatches: int
) -> Tensor:
    """Every use of the pages in a tree of its own, added in layer order."""
    block = layout.layers[run.layer].block_of(run.first)
    readers = dict(layout.readers.get((run.layer, block.first_page), ())) if block.kind != LOSS else {}
    total: Tensor | None = None
    for layer in uses_of(layout, run):
        shift = readers[layer].first_page - block.first_page if layer in readers else 0
        start, stop = layout.layers[layer].span(run.first + shift, run.stop + shift)
        root = tree_sum([leaves[layer, microbatch][start:stop] for microbatch in range(microbatches)], 0, microbatches)
        total = root if total is None else total + root
    assert total is not None
    return total


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    stages = draw(st.sampled_from([(1,), (2,), (3,), (4,), (1, 1), (2, 1), (1, 3), (2, 2, 1)]))
    cuts = draw(st.sampled_from({1: [(0, 3)], 2: [(0, 1, 3), (0, 2, 3)], 3: [(0, 1, 2, 3)]}[len(stages)]))
    microbatches = draw(st.integers(1, 9))
    counts = []
    for size in stages:
        points = sorted(draw(st.lists(st.integers(0, microbatches), min_size=size - 1, max_size=size - 1)))
        counts.append(tuple(b - a for a, b in zip([0, *points], [*points, microbatches], strict=True)))
    return placed(stages, cuts, tuple(counts), draw(st.integers(0, 3)))


def drawn_leaves(
    layout: ModelLayout, placement: Placement, generator: torch.Generator
) -> dict[tuple[int, int], Tensor]:
    """(layer, micro-batch) -> its gradient, drawn."""
    return {
        (layer.index, microbatch): torch.randn(layer.num_gradient_elements, generator=generator)
        for layer in layout.layers
        for microbatch in range(placement.num_microbatches)
    }


@settings(deadline=None, max_examples=150)
@given(
    placement=placements(),
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([64, 128, 4096]),
    in_place=st.booleans(),
    copies=st.booleans(),
)
def test_every_entry_is_the_tree_whatever_arrives_when(
    placement: Placement, seed: int, page_size: int, in_place: bool, copies: bool
) -> None:
    layout, generator = small_layout(page_size), torch.Generator().manual_seed(seed)
    cluster = Cluster(layout, placement, random.Random(seed), in_place=in_place, copies=copies)
    runs = [run for of_layer in placement.replica_map(layout).values() for run in of_layer]
    for step in (1, 2, 3):  # buffers are used again
        leaves = drawn_leaves(layout, placement, generator)
        cluster.run_step(step, leaves)
        for run in runs:
            wanted = wanted_entry(layout, run, leaves, placement.num_microbatches)
            assert torch.equal(cluster.entries[step, run], wanted), (step, run)
    assert len(cluster.entries) == 3 * len(runs)


def test_nodes_of_a_decided_step_are_ignored() -> None:
    layout, placement = small_layout(), placed((2,), (0, 3), ((1, 1),), 1)
    cluster = Cluster(layout, placement, random.Random(0), in_place=False)
    leaves = {(layer.index, u): torch.ones(layer.num_gradient_elements) for layer in layout.layers for u in range(2)}
    cluster.run_step(1, leaves)
    before = len(cluster.entries)
    run = next(r for runs in placement.replica_map(layout).values() for r in runs if r.primary == 1)
    start, stop = layout.layers[run.layer].span(run.first, run.stop)
    cluster.reducers[1].node_received(PartialSum(1, run.layer, run.first, run.stop, 0, 2), torch.ones(stop - start))
    assert len(cluster.entries) == before


def test_a_gradient_that_is_checked_has_nothing_of_a_wrong_sum_between_its_parameters() -> None:
    """A backward writes the gradients of parameters alone: what else is in a buffer stays, and would be compared."""
    layout, placement = small_layout(), placed((2,), (0, 3), ((1, 1),), 1)
    cluster = Cluster(layout, placement, random.Random(0), in_place=False)
    leaves = {(layer.index, u): torch.ones(layer.num_gradient_elements) for layer in layout.layers for u in range(2)}
    cluster.run_step(1, leaves)  # wrong ones: padding has values as well
    cluster.reducers[0].begin_step(2, placement.microbatches_of(0))
    buffer, add = cluster.reducers[0].begin_microbatch(0, placement.microbatches_of(0)[0], own_leaf=True)
    assert not add and not buffer.flat.any()


def test_a_worker_without_microbatches_may_complete_an_entry_of_a_step_that_it_has_not_begun() -> None:
    layout, placement = small_layout(), placed((2,), (0, 3), ((1, 0),), 1)
    cluster = Cluster(layout, placement, random.Random(0), in_place=False)
    cluster.run_step(7, {(layer.index, 0): torch.ones(layer.num_gradient_elements) for layer in layout.layers})
    assert {step for step, _ in cluster.entries} == {7} and any(run.primary == 1 for _, run in cluster.entries)


def test_a_node_of_a_range_that_is_joined_in_the_next_mesh_epoch_counts_there() -> None:
    """Its sender has entered that epoch first. Until this worker does, it may have the same pages in several ranges."""
    layout, placement = small_layout(), placed((2,), (0, 3), ((2, 0),), 1)
    cluster = Cluster(layout, placement, random.Random(0), in_place=False)
    reducer, joined = cluster.reducers[1], placement.replica_map(layout)
    whole = max((r for runs in joined.values() for r in runs if r.primary == 1), key=lambda run: run.num_pages)
    middle = whole.first + 1
    parts = [
        ReplicaSet(whole.layer, *ends, 1, whole.replicas) for ends in ((whole.first, middle), (middle, whole.stop))
    ]
    runs = sorted([*(run for run in joined[whole.layer] if run != whole), *parts], key=lambda run: run.first)
    reducer.enter_epoch({**joined, whole.layer: tuple(runs)}, range(3), 1)
    start, stop = layout.layers[whole.layer].span(whole.first, whole.stop)
    values = [torch.randn(stop - start) for _ in range(2)]
    for microbatch in range(2):
        if microbatch == 1:
            reducer.enter_epoch(joined, range(3), 1)
        for use in uses_of(layout, whole):
            first = first_page_of_use(layout, whole, use)
            message = PartialSum(1, use, first, first + whole.num_pages, microbatch, microbatch + 1)
            reducer.node_received(message, values[microbatch])
    assert list(cluster.entries) == [(1, whole)]
    assert torch.equal(cluster.entries[1, whole], values[0] + values[1])


def test_a_sum_that_is_in_the_tree_and_here_is_reported_once() -> None:
    """A lost worker had sent it, and its micro-batch was computed here again, for pages whose primary was lost as well.

    A report that names a sum twice is refused, and its worker would be taken for silent.
    """
    layout, placement = small_layout(), placed((2,), (0, 3), ((3, 1),), 1)
    cluster = Cluster(layout, placement, random.Random(0), in_place=False)
    reducer, runs = cluster.reducers[0], placement.replica_map(layout)
    own = [run for run in runs[1] if run.primary == 0]
    for run in own:
        start, stop = layout.layers[1].span(run.first, run.stop)
        reducer.node_received(PartialSum(1, 1, run.first, run.stop, 1, 2), torch.ones(stop - start))
    reducer.begin_step(1, range(4))
    for microbatch in (1, 3):
        buffer, _ = reducer.begin_microbatch(1, microbatch)
        buffer.flat.fill_(1.0)
        reducer.end_microbatch(1, 1, microbatch)
    rows = reducer.page_sums(1, current=True)
    assert [row for row in rows if row[0] == 1] == [(*run.key, 1, ((1, 2), (3, 4))) for run in own] and own
    assert reducer.layer_sums() == {1: ((1, 2), (3, 4))}


def test_a_layer_that_has_gone_to_another_stage_leaves_no_buffers() -> None:
    layout = small_layout()
    before, after = (placed((1, 1), cuts, ((2,), (2,)), 0) for cuts in ((0, 2, 3), (0, 1, 3)))
    cluster = Cluster(layout, before, random.Random(0), in_place=False)
    leaves = drawn_leaves(layout, before, torch.Generator().manual_seed(0))
    cluster.run_step(1, leaves)
    first = cluster.reducers[0]
    of_two = first.num_bytes
    for rank, reducer in cluster.reducers.items():
        reducer.enter_epoch(after.replica_map(layout), after.layers_of_stage(rank), 2)
    assert first.num_bytes == of_two, "sums of the step before may be sent again until one is decided"
    cluster.placement = after
    cluster.run_step(2, drawn_leaves(layout, after, torch.Generator().manual_seed(1)))
    alone = Cluster(layout, after, random.Random(0), in_place=False)
    alone.run_step(1, leaves)
    assert 0 < first.num_bytes == alone.reducers[0].num_bytes < of_two
