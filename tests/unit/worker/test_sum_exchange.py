"""Partial sums through the group of a stage: plans that fit together, the order, what may be given up, what returns."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import maximal_nodes
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.recovery.messages import PartialSum
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ALIGNMENT, LOSS, LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.gradient_exchange import GradientExchange, ReducedPages
from elaswave_spmd.worker.page_norms import page_norm_values
from elaswave_spmd.worker.sum_exchange import (
    WINDOW,
    Exchange,
    ExchangePlan,
    Given,
    StageExchanges,
    SumExchange,
    _elements,
    sums_of_hosts,
)
from tests.unit.runtime import runtime_cases
from tests.unit.runtime.runtime_cases import HOST, small_layout
from tests.unit.worker.test_gradient_reduction import Cluster, drawn_leaves, placements, wanted_entry


def placed(*args: Any) -> Placement:
    """A placement of a run whose stages exchange by groups: each layer is cut by itself."""
    return replace(runtime_cases.placed(*args), by_groups=True)


def norms_of(layout: ModelLayout, pages: ReplicaSet, gradient: Tensor) -> list[float]:
    """As a primary makes them."""
    is_loss = layout.layers[pages.layer].block_of(pages.first).kind == LOSS
    return [] if is_loss else page_norm_values(gradient, layout.page_size)


def on_hosts(draw: st.DrawFn, placement: Placement) -> Placement:
    """The same workers on up to three hosts."""
    host = {rank: (f"host{draw(st.integers(0, 2))}",) for rank in placement.mesh.members}
    return replace(placement, mesh=replace(placement.mesh, topology=Topology.of(host)))


@st.composite
def mirrored(draw: st.DrawFn, page_sizes: tuple[int, ...] = (64, 128)) -> tuple[ModelLayout, Placement]:
    """A placement with up to two mirrors of each page, in uneven ranges; some of them in other stages."""
    layout, placement = small_layout(draw(st.sampled_from(page_sizes))), on_hosts(draw, draw(placements()))
    sharding = placement.state_sharding(draw(st.integers(0, 2)), draw(st.integers(0, 3)))
    return layout, replace(placement, replicas=place_replicas(layout, sharding))


def plans_of(layout: ModelLayout, placement: Placement) -> dict[int, ExchangePlan]:
    replica_map = placement.replica_map(layout)
    return {rank: ExchangePlan.of(rank, layout, placement, replica_map) for rank in placement.mesh.members}


def sums_of(plan: ExchangePlan) -> list[SumExchange]:
    return [exchange for exchange in plan.order if isinstance(exchange, SumExchange)]


class ExchangingCluster(Cluster):
    """The reducers of all workers; what a stage exchanges ends on each member at its own time.

    Reduced gradients that no group brings are with their mirrors at once.

    Args:
        fails: workers that take no part any more after some exchanges, drawn; everybody goes on by links then.
    """

    def __init__(self, *args: Any, fails: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fails = fails
        self.by_group = 0
        self.step = 0
        self.mirrored: dict[tuple[int, PageRange, int], tuple[Tensor, list[float], bool]] = {}
        self.plans = plans_of(self.layout, self.placement)
        for rank, plan in self.plans.items():
            self.exchanges[rank].enter_epoch(plan)

    def run_step(self, step: int, leaves: dict[tuple[int, int], Tensor]) -> None:
        self.issued: defaultdict[int, list[tuple[Exchange, Tensor]]] = defaultdict(list)
        self.done: defaultdict[int, int] = defaultdict(int)
        self.left = self.draw.randrange(16) if self.fails else 1 << 30
        self.step = step
        for exchanges in self.exchanges.values():
            exchanges.agree(step)
        super().run_step(step, leaves)

    def exchange_some(self) -> bool:
        """Some members issue what they can, and take what is complete."""
        ranks = [*self.exchanges]
        for rank in self.draw.sample(ranks, self.draw.randint(1, len(ranks))):
            exchanges = self.exchanges[rank]
            while (exchange := exchanges.next()) is not None:
                self.issued[rank].append((exchange, exchanges.pack(exchange, HOST.place)))
            while self._is_complete(rank) and self.left > 0 and self.draw.random() < 0.7:
                self._complete(rank)
        if self.left <= 0:
            for rank, exchanges in self.exchanges.items():
                exchanges.stop()
                self.reducers[rank].send_returned()
                for reduced, mirrors in exchanges.take_back_gradients():
                    for mirror in mirrors:
                        self._mirror(mirror, self.step, reduced, by_group=False)
        return bool(self.flying) or not all(exchanges.is_over for exchanges in self.exchanges.values())

    def _compute(self, rank: int, step: int, microbatch: int, leaves: dict[tuple[int, int], Tensor]) -> None:
        super()._compute(rank, step, microbatch, leaves)
        self.exchange_some()

    def _is_complete(self, rank: int) -> bool:
        """True if the next exchange has come from all from whom something comes: a library waits for no others."""
        plan, number = self.exchanges[rank].plan, self.done[rank]
        if plan is None or not self.exchanges[rank].step or len(self.issued[rank]) <= number:
            return False
        _, received = plan.sizes(self.issued[rank][number][0])
        peers = [peer for peer, size in zip(plan.members, received, strict=True) if size]
        return all(len(self.issued[peer]) > number for peer in peers)

    def _complete(self, rank: int) -> None:
        plan, number = self.exchanges[rank].plan, self.done[rank]
        assert plan is not None
        at, parts = plan.members.index(rank), []
        for peer in plan.members:
            if peer != rank:
                exchange, values = self.issued[peer][number]
                sent, _ = self.plans[peer].sizes(exchange)
                parts.append(values.split(sent)[at])
        self.done[rank] += 1
        self.by_group += 1
        self.left -= 1
        for reduced in self.reducers[rank].exchanged(self.issued[rank][number][0], torch.cat(parts)):
            self._mirror(rank, self.step, reduced, by_group=True)

    def _gradient_done(self, step: int, run: ReplicaSet, entry: Tensor) -> None:
        super()._gradient_done(step, run, entry)
        reduced = ReducedPages(run, entry, norms_of(self.layout, run, entry))
        by_group = self.exchanges[run.primary].mirrors(step, run.key)
        if by_group:
            self.exchanges[run.primary].add_gradient(reduced)
        for mirror in {*run.mirrors} - by_group:
            self._mirror(mirror, step, reduced, by_group=False)

    def _mirror(self, mirror: int, step: int, reduced: ReducedPages, *, by_group: bool) -> None:
        found = reduced.gradient.clone(), [*reduced.norms], by_group
        self.mirrored.setdefault((step, reduced.pages.key, mirror), found)


@settings(deadline=None, max_examples=150)
@given(
    case=mirrored(),
    seed=st.integers(0, 2**32),
    in_place=st.booleans(),
    copies=st.booleans(),
    fails=st.booleans(),
)
def test_primaries_and_mirrors_have_the_gradient_of_the_tree_and_its_norms_also_when_the_group_fails(
    case: tuple[ModelLayout, Placement], seed: int, in_place: bool, copies: bool, fails: bool
) -> None:
    (layout, placement), generator = case, torch.Generator().manual_seed(seed)
    cluster = ExchangingCluster(layout, placement, random.Random(seed), in_place=in_place, copies=copies, fails=fails)
    runs = [run for of_layer in placement.replica_map(layout).values() for run in of_layer]
    for step in (1, 2, 3):  # buffers are used again
        leaves = drawn_leaves(layout, placement, generator)
        cluster.run_step(step, leaves)
        for run in runs:
            wanted = wanted_entry(layout, run, leaves, placement.num_microbatches)
            assert torch.equal(cluster.entries[step, run], wanted), (step, run)
            for mirror in run.mirrors:
                gradient, norms, by_group = cluster.mirrored[step, run.key, mirror]
                assert torch.equal(gradient, wanted) and norms == norms_of(layout, run, wanted), (step, run, mirror)
                assert fails or by_group == is_exchanged(placement, run, mirror), (step, run, mirror)
    assert len(cluster.entries) == 3 * len(runs)
    assert len(cluster.mirrored) == 3 * sum(len(run.mirrors) for run in runs)


@st.composite
def on_large_hosts(draw: st.DrawFn) -> tuple[ModelLayout, Placement]:
    """Up to nine workers of a stage on two or three hosts, with few micro-batches each, in any order of hosts."""
    size, number = draw(st.integers(4, 9)), draw(st.integers(4, 20))
    points = sorted(draw(st.lists(st.integers(0, number), min_size=size - 1, max_size=size - 1)))
    even = tuple(number // size + (at < number % size) for at in range(size))
    counts = tuple(b - a for a, b in zip([0, *points], [*points, number], strict=True))
    placement = placed((size,), (0, 3), (draw(st.sampled_from([even, counts])),), draw(st.integers(1, 3)))
    return small_layout(draw(st.sampled_from([64, 128]))), on_hosts(draw, placement)


@settings(deadline=None, max_examples=100)
@given(case=on_large_hosts(), seed=st.integers(0, 2**32), fails=st.booleans())
def test_sums_that_cross_between_hosts_once_are_those_of_the_tree(
    case: tuple[ModelLayout, Placement], seed: int, fails: bool
) -> None:
    (layout, placement), generator = case, torch.Generator().manual_seed(seed)
    cluster = ExchangingCluster(layout, placement, random.Random(seed), in_place=True, fails=fails)
    runs = [run for of_layer in placement.replica_map(layout).values() for run in of_layer]
    for step in (1, 2):
        leaves = drawn_leaves(layout, placement, generator)
        cluster.run_step(step, leaves)
        for run in runs:
            wanted = wanted_entry(layout, run, leaves, placement.num_microbatches)
            assert torch.equal(cluster.entries[step, run], wanted), (step, run)
        assert not any(sums for exchanges in cluster.exchanges.values() for sums in exchanges._given.collected.values())


def crossing(plans: dict[int, ExchangePlan], hosts: dict[int, str]) -> int:
    """Elements of sums that go from one host to another, without padding."""
    return sum(
        len(exchange.nodes[sender]) * sum(_elements(r, plan.layout) for r in plan.routes_between(exchange, sender, to))
        for sender, plan in plans.items()
        for exchange in sums_of(plan)
        for to in plan.members
        if hosts[sender] != hosts[to]
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_of_a_host_cross_to_another_one_once(zero: int) -> None:
    """Two hosts of four workers with two micro-batches each: a fourth of what goes from worker to worker."""
    layout, placement = small_layout(), placed((8,), (0, 3), ((2,) * 8,), zero)
    hosts = {rank: f"host{rank // 4}" for rank in range(8)}
    spread = replace(placement.mesh, topology=Topology.of({rank: (host,) for rank, host in hosts.items()}))
    direct, in_two = plans_of(layout, placement), plans_of(layout, replace(placement, mesh=spread))
    assert crossing(direct, hosts) == 4 * crossing(in_two, hosts) > 0
    # Two micro-batches of a worker are one sum where gradients are replicated, and two in as many rounds where not.
    assert [(exchange.layer, exchange.way.name) for exchange in sums_of(in_two[0])] == [
        (2, "WITHIN_HOSTS"),
        (1, "WITHIN_HOSTS"),
        (2, "BETWEEN_HOSTS"),
        (0, "WITHIN_HOSTS"),
        (1, "BETWEEN_HOSTS"),
        *([] if zero == 1 else [(2, "WITHIN_HOSTS"), (0, "BETWEEN_HOSTS"), (1, "WITHIN_HOSTS"), (2, "BETWEEN_HOSTS")]),
        *([] if zero == 1 else [(0, "WITHIN_HOSTS"), (1, "BETWEEN_HOSTS")]),
        (0, "BETWEEN_HOSTS"),
    ]
    wanted = {(0, 8), (8, 16)} if zero == 1 else {(0, 4), (4, 8), (8, 12), (12, 16)}
    assert sums_of_hosts(replace(placement, mesh=spread), 0) == wanted


def test_where_hosts_have_a_worker_each_sums_go_directly() -> None:
    layout, placement = small_layout(), placed((3,), (0, 3), ((2, 2, 2),), 2)
    spread = replace(placement.mesh, topology=Topology.of({rank: (f"host{rank}",) for rank in range(3)}))
    for mesh in (placement.mesh, spread):
        plan = plans_of(layout, replace(placement, mesh=mesh))[0]
        assert {exchange.way.name for exchange in sums_of(plan)} == {"DIRECT"}


def is_exchanged(placement: Placement, pages: ReplicaSet, mirror: int) -> bool:
    """True if primary and mirror belong to the stage that computes the layer."""
    members = placement.mesh.stages[placement.stage_of_layer(pages.layer)]
    return pages.primary in members and mirror in members


def test_nothing_that_the_group_brings_is_sent_over_links() -> None:
    layout, placement = small_layout(), placed((2, 2), (0, 2, 3), ((4, 4), (4, 4)), 2)
    cluster = ExchangingCluster(layout, placement, random.Random(0), in_place=True)
    by_links: list[tuple[int, PartialSum]] = []
    for reducer in cluster.reducers.values():
        reducer._send = lambda peer, message, payload: (  # pyright: ignore[reportAttributeAccessIssue]
            by_links.append((peer, message)),
            cluster.flying.append((peer, message, payload)),
        )
    cluster.run_step(1, {(n.index, u): torch.ones(n.num_gradient_elements) for n in layout.layers for u in range(8)})
    assert cluster.by_group == sum(len(plan.order) for plan in cluster.plans.values()) > 0
    # The last layer reads a parameter of the first one, which belongs to another stage.
    assert {(message.layer, peer in (0, 1)) for peer, message in by_links} == {(2, True)}


def kept_in_a_step(placement: Placement, pace: tuple[int, ...]) -> dict[int, int]:
    """How many layer sums each worker keeps at most in a sharded step.

    Args:
        pace: by worker, a micro-batch takes this many turns, and its backward comes in the last one.
    """
    layout = small_layout()
    cluster = ExchangingCluster(layout, placement, random.Random(0), in_place=True)
    cluster.issued, cluster.done, cluster.left = defaultdict(list), defaultdict(int), 1 << 30
    todo = {rank: [*placement.microbatches_of(rank)] for rank in cluster.reducers}
    for rank, reducer in cluster.reducers.items():
        cluster.exchanges[rank].agree(1)
        reducer.begin_step(1, todo[rank])
    kept = dict.fromkeys(todo, 0)
    turn = 0
    while any(todo.values()):
        turn += 1
        now = {rank: todo[rank].pop(0) for rank in todo if todo[rank] and turn % pace[rank] == 0}
        for layer in (2, 1, 0):
            for rank, microbatch in now.items():
                buffer, _ = cluster.reducers[rank].begin_microbatch(layer, microbatch)
                buffer.flat.fill_(1.0)
                cluster.reducers[rank].end_microbatch(1, layer, microbatch)
            for rank, reducer in cluster.reducers.items():
                kept[rank] = max(kept[rank], sum(map(len, reducer._kept.values())))
            for _ in range(20):
                cluster.exchange_some()
    assert all(exchanges.is_over for exchanges in cluster.exchanges.values())
    return kept


@pytest.mark.parametrize("mirrors", [0, 1])
@pytest.mark.parametrize(
    ("counts", "pace", "waiting"),
    [
        pytest.param((4, 4), (1, 1), (0, 0), id="equally fast"),
        # The slower one's last sum but one goes in the last round, in which the faster one has its next: three layers.
        pytest.param((8, 4), (1, 2), (0, 3), id="one twice as fast"),
    ],
)
def test_sharded_sums_are_given_up_on_the_way(
    counts: tuple[int, ...], pace: tuple[int, ...], waiting: tuple[int, ...], mirrors: int
) -> None:
    """A worker keeps the sum of the layer under way, those of two exchanges that are complete, and what has to wait.

    Exchanges of reduced gradients come between those of the last round, and keep no further sum.
    """
    placement = placed((2,), (0, 3), (counts,), 2)
    replicas = place_replicas(LAYOUT, placement.state_sharding(mirrors))
    kept = kept_in_a_step(replace(placement, replicas=replicas), pace)
    assert kept == {rank: WINDOW + 1 + number for rank, number in enumerate(waiting)}


def test_a_sum_whose_exchange_would_bring_nothing_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer learns, and is the primary of nothing: where only the survivor has sums, nothing is exchanged."""
    layout, placement = small_layout(), placed((2,), (0, 3), ((4, 2),), 2)
    alone = {
        layer: tuple(replace(pages, primary=0, replicas=frozenset({0}), learners=frozenset({1})) for pages in sets)
        for layer, sets in placement.replica_map(layout).items()
    }
    monkeypatch.setattr(Placement, "replica_map", lambda *_: alone)
    plan = plans_of(layout, placement)[0]
    assert all(exchange.nodes[1] for exchange in sums_of(plan)) and len(plan.order) == 2 * 3 < 3 * 4
    exchanges = StageExchanges()
    exchanges.enter_epoch(plan)
    exchanges.agree(1)
    sent = {node for exchange in sums_of(plan) for node in exchange.nodes[0]}
    nodes = maximal_nodes(placement.microbatches_of(0), 6)
    assert {node for node in nodes if exchanges.takes(1, 2, node)} == sent < {*nodes}


def test_a_round_has_the_sums_that_are_complete_at_about_the_same_time() -> None:
    placement = placed((2,), (0, 3), ((8, 4),), 2)
    (plan, _) = plans_of(small_layout(), placement).values()
    mine = [placement.microbatches_of(rank) for rank in (0, 1)]
    assert mine == [(0, 2, 4, 6, 8, 9, 10, 11), (1, 3, 5, 7)]
    rounds = [dict(exchange.nodes) for exchange in sums_of(plan) if exchange.layer == 2]
    assert rounds == [
        {0: ((0, 1),), 1: ()},
        {0: ((2, 3),), 1: ((1, 2),)},
        {0: ((4, 5),), 1: ()},
        {0: ((6, 7),), 1: ((3, 4),)},
        {0: ((8, 12),), 1: ((5, 6), (7, 8))},
    ]


@settings(deadline=None, max_examples=100)
@given(case=mirrored((64, 128, 4096)))
def test_all_members_of_a_stage_plan_the_same_exchanges(case: tuple[ModelLayout, Placement]) -> None:
    layout, placement = case
    plans = plans_of(layout, placement)
    for members in placement.mesh.stages:
        order = plans[members[0]].order
        assert all(plans[rank].order == order for rank in members)
        for exchange in order:
            sizes = {rank: plans[rank].sizes(exchange) for rank in members}
            for a, sender in enumerate(members):
                for b, receiver in enumerate(members):
                    assert sizes[sender][0][b] == sizes[receiver][1][a]
                    # NCCL waits only for those from whom something comes; sums may be given up since all have come.
                    assert (sizes[sender][0][b] > 0) == (a != b)


def test_sharded_gradients_go_in_rounds_of_one_sum_and_replicated_ones_at_once() -> None:
    layout = small_layout()
    for zero, rounds in ((1, 1), (2, 3)):
        placement = placed((2,), (0, 3), ((3, 2),), zero)
        (plan, _) = plans_of(layout, placement).values()
        assert [exchange.layer for exchange in plan.order] == [2, 1, 0] * rounds
        assert len(sums_of(plan)[0].nodes[0]) == (1 if zero == 2 else 2)


# ---- one worker's part

PLACEMENT = placed((2,), (0, 3), ((4, 4),), 2)
LAYOUT = small_layout()


def begun(step: int = 1) -> StageExchanges:
    exchanges = StageExchanges()
    exchanges.enter_epoch(plans_of(LAYOUT, PLACEMENT)[0])
    exchanges.agree(step)
    exchanges.begin(step)
    return exchanges


def add(exchanges: StageExchanges, layer: int, microbatch: int) -> None:
    buffer = GradientBuffer(LAYOUT.layers[layer], HOST.place)
    exchanges.add(layer, (microbatch, microbatch + 1), buffer)


def issue_all(exchanges: StageExchanges) -> list[int]:
    """Issues what can be issued; returns the layers."""
    found = []
    while (exchange := exchanges.next()) is not None:
        exchanges.pack(exchange, HOST.place)
        found.append(exchange.layer)
    return found


MINE = PLACEMENT.microbatches_of(0)


def test_exchanges_wait_for_their_turn_and_for_those_in_progress() -> None:
    exchanges = begun()
    add(exchanges, 0, MINE[0])
    add(exchanges, 1, MINE[0])
    assert issue_all(exchanges) == [], "the last layer comes first"
    add(exchanges, 2, MINE[0])
    assert issue_all(exchanges) == [2, 1] and WINDOW == 2
    exchanges.complete()
    assert issue_all(exchanges) == [0]


def test_a_sum_is_given_up_when_all_are_known_to_have_it() -> None:
    exchanges = begun()
    for layer in (2, 1, 0):
        add(exchanges, layer, MINE[0])
    known: list[Collection[Any]] = []
    for _ in range(3):
        issue_all(exchanges)
        known.append(exchanges.complete())
    assert known == [[], [], [(2, (MINE[0], MINE[0] + 1))]]
    exchanges.stop()
    assert {layer for layer, _ in exchanges.take_back()} == {1, 0}, "of these it is not known"
    assert exchanges.take_back() == {} and issue_all(exchanges) == []


@pytest.mark.parametrize("how", ["not agreed", "not begun", "another step", "no group any more", "decided"])
def test_without_an_agreement_links_serve(how: str) -> None:
    exchanges = StageExchanges()
    exchanges.enter_epoch(plans_of(LAYOUT, PLACEMENT)[0])
    if how != "not agreed":
        exchanges.agree(2 if how == "another step" else 1)
    if how != "not begun":
        exchanges.begin(1)
    if how == "no group any more":
        exchanges.stop()
    if how == "decided":
        exchanges.forget()
    assert exchanges.takes(1, 2, (MINE[0], MINE[0] + 1)) == (how == "not begun")
    assert issue_all(exchanges) == [] and exchanges.is_over


def test_a_worker_without_microbatches_issues_them_too_once_it_begins_the_step() -> None:
    exchanges = StageExchanges()
    exchanges.enter_epoch(plans_of(LAYOUT, placed((2,), (0, 3), ((0, 4),), 1))[0])
    exchanges.agree(1)
    assert issue_all(exchanges) == [], "the run may have ended with the step before"
    exchanges.begin(1)
    assert issue_all(exchanges) == [2, 1] and not exchanges.is_over


def test_a_new_epoch_returns_what_may_be_missing() -> None:
    exchanges = begun()
    add(exchanges, 2, MINE[0])
    issue_all(exchanges)
    exchanges.enter_epoch(plans_of(LAYOUT, PLACEMENT)[0])
    assert [*exchanges.take_back()] == [(2, (MINE[0], MINE[0] + 1))]


# ---- reduced gradients

REPLICATED = placed((2,), (0, 3), ((4, 4),), 0)
"""Each worker is the primary of some pages, and a mirror of those of the other one."""


def order_of(placement: Placement, rank: int = 0, *, layout: ModelLayout = LAYOUT) -> list[tuple[str, int]]:
    return [(one.message[0], one.layer) for one in plans_of(layout, placement)[rank].order]


def test_gradients_come_one_exchange_of_sums_after_the_last_sums_that_they_are_made_of() -> None:
    sums, gradients = ("P", 2), ("R", 2)
    assert order_of(REPLICATED) == [sums, ("P", 1), gradients, ("P", 0), ("R", 1), ("R", 0)]
    sharded = placed((2,), (0, 3), ((2, 2),), 2)
    sharded = replace(sharded, replicas=place_replicas(LAYOUT, sharded.state_sharding(1)))
    before = [("P", layer) for _ in range(len(order_of(sharded)) // 3 - 2) for layer in (2, 1, 0)]
    assert before and order_of(sharded) == [*before, *order_of(REPLICATED)], "in the last round"


def weights_of(name: str) -> LayerUse:
    return LayerUse(name, (ParameterInfo(f"{name}.weight", (9, 33)),))


def test_a_layer_without_parameters_does_not_shorten_the_lag() -> None:
    layout = lay_out([weights_of("a"), LayerUse("relu", ()), weights_of("b")], page_size=128)
    assert order_of(REPLICATED, layout=layout) == [("P", 2), ("P", 0), ("R", 2), ("R", 0)]


def test_a_layer_that_one_member_computes_alone_comes_last() -> None:
    alone = placed((2,), (0, 3), ((8, 0),), 0)
    layout = lay_out([weights_of("a"), weights_of("b"), weights_of("c")], page_size=128)
    order = order_of(alone, layout=layout)
    assert [layer for kind, layer in order if kind == "R"] == [2, 1, 0]
    assert order_of(alone, 1, layout=layout) == order


def test_what_an_earlier_stage_reads_holds_up_nothing() -> None:
    """Its sums are there when the pipeline is empty."""
    embed = LayerUse("embed", (), (("embed.weight", "c.weight"),))
    layout = lay_out([embed, weights_of("b"), weights_of("c")], page_size=128)
    tied = placed((1, 2), (0, 1, 3), ((8,), (4, 4)), 0)
    assert order_of(tied, 1, layout=layout) == [("P", 2), ("P", 1), ("R", 1), ("R", 2)]


def test_a_tied_parameter_waits_for_the_sums_of_its_reader() -> None:
    """The reader belongs to the same stage and comes first in a backward; its sums have a place of their own."""
    for stages, cuts, counts in (((2,), (0, 3), ((4, 4),)), ((2, 1), (0, 2, 3), ((4, 4), (8,)))):
        order = order_of(placed(stages, cuts, counts, 0))
        uses = [at for at, (kind, layer) in enumerate(order) if kind == "P" and layer in LAYOUT.uses_of(0, 0)]
        assert order.index(("R", 0)) > max(uses)


def test_pages_without_a_mirror_in_the_stage_are_not_exchanged() -> None:
    alone = placed((1, 1), (0, 2, 3), ((4,), (4,)), 0)
    alone = replace(alone, replicas=place_replicas(LAYOUT, alone.state_sharding(1)))
    assert {kind for rank in (0, 1) for kind, _ in order_of(alone, rank)} == set()
    assert {kind for kind, _ in order_of(placed((3,), (0, 3), ((2, 2, 2),), 2))} == {"P"}


def begun_replicated() -> tuple[StageExchanges, dict[int, list[ReducedPages]]]:
    """A step of worker 1 with all of its sums, and by layer the reduced gradients that it is the primary of."""
    exchanges = StageExchanges()
    plan = plans_of(LAYOUT, REPLICATED)[1]
    exchanges.enter_epoch(plan)
    exchanges.agree(1)
    exchanges.begin(1)
    for exchange in sums_of(plan):
        for node in exchange.nodes[1]:
            exchanges.add(exchange.layer, node, GradientBuffer(LAYOUT.layers[exchange.layer], HOST.place))
    generator, found = torch.Generator().manual_seed(0), dict[int, list[ReducedPages]]()
    for layer, sets in REPLICATED.replica_map(LAYOUT).items():
        mine = [pages for pages in sets if pages.primary == 1]
        assert mine and all(exchanges.mirrors(1, pages.key) == {0} for pages in mine)
        assert not any(exchanges.mirrors(2, pages.key) for pages in mine), "of another step nothing is agreed"
        found[layer] = [random_gradient(LAYOUT, pages, generator) for pages in mine]
    return exchanges, found


def test_gradients_wait_until_all_of_their_layer_are_reduced_and_hold_up_what_is_behind_them() -> None:
    exchanges, reduced = begun_replicated()
    assert issue_all(exchanges) == [2, 1]
    exchanges.complete()
    exchanges.complete()
    for one in reduced[2]:
        assert issue_all(exchanges) == []
        exchanges.add_gradient(one)
    assert issue_all(exchanges) == [2, 0]


@pytest.mark.parametrize(("complete", "known"), [(3, ()), (4, ()), (5, (2,)), (6, (2,))])
def test_gradients_are_taken_back_until_all_are_known_to_have_them(complete: int, known: tuple[int, ...]) -> None:
    exchanges, reduced = begun_replicated()
    for one in (one for of_layer in reduced.values() for one in of_layer):
        exchanges.add_gradient(one)
    for _ in range(complete):  # S(2), S(1), G(2), S(0), G(1), G(0)
        issue_all(exchanges)
        exchanges.complete()
    exchanges.stop()
    returned = exchanges.take_back_gradients()
    left = [one for layer, of_layer in reduced.items() if layer not in known for one in of_layer]
    assert [one for one, _ in returned] == left
    assert all(mirrors == {0} for _, mirrors in returned) and exchanges.take_back_gradients() == []


@settings(deadline=None, max_examples=100)
@given(case=mirrored((64, 128, 4096)), seed=st.integers(0, 2**32))
def test_what_is_packed_is_unpacked(case: tuple[ModelLayout, Placement], seed: int) -> None:
    """Each mirror in the stage gets each of its gradients once, bit for bit, with its norms, and aligned."""
    layout, placement = case
    generator = torch.Generator().manual_seed(seed)
    plans, came = plans_of(layout, placement), set[tuple[PageRange, int]]()
    for members in placement.mesh.stages:
        exchanges = [one for one in plans[members[0]].order if isinstance(one, GradientExchange)]
        for exchange in exchanges:
            reduced = {
                pages.key: random_gradient(layout, pages, generator)
                for pages in placement.replica_map(layout)[exchange.layer]
            }
            sent = {rank: plans[rank].pack(exchange, Given(gradients=reduced), HOST.place) for rank in members}
            for at, rank in enumerate(members):
                parts = [sent[peer].split(plans[peer].sizes(exchange)[0])[at] for peer in members]
                for one in plans[rank].gradients(exchange, torch.cat(parts)):
                    wanted = reduced[one.pages.key]
                    assert torch.equal(one.gradient, wanted.gradient) and one.norms == wanted.norms
                    assert one.pages.primary != rank and rank in one.pages.mirrors
                    assert one.gradient.storage_offset() % ALIGNMENT == 0
                    assert (one.pages.key, rank) not in came
                    came.add((one.pages.key, rank))
    pairs = ((p, mirror) for sets in placement.replica_map(layout).values() for p in sets for mirror in p.mirrors)
    assert came == {(pages.key, mirror) for pages, mirror in pairs if is_exchanged(placement, pages, mirror)}


def random_gradient(layout: ModelLayout, pages: ReplicaSet, generator: torch.Generator) -> ReducedPages:
    start, stop = layout.layers[pages.layer].span(pages.first, pages.stop)
    gradient = torch.randn(stop - start, generator=generator)
    return ReducedPages(pages, gradient, norms_of(layout, pages, gradient))
