"""Partial sums and reduced gradients through the process group of a stage (`runtime.collectives=group`).

If all votes for step t - 1 said that their senders have their groups, the sums of step t go to the primaries in their
own stage by one all-to-all for each layer (with sharded gradients for each layer and round, see `ExchangePlan`). The
group only copies: a primary adds what comes to the same tree as sums that come over links. The reduced gradients that
come of it go to the mirrors in the stage in the same way (gradient_exchange.py).

All members of a stage issue the same exchanges in the same order, which the placement fixes. What is complete too early
waits here, and no action waits for it. An exchange is issued only when the one `WINDOW` before it is complete on this
worker. So whoever has completed an exchange knows that every member has completed the one `WINDOW` before it, and only
what that one has brought is known to be everywhere. All else is sent over links if the group fails or a new mesh epoch
begins. Each member sends something to each other one, be it padding: NCCL waits for nobody from whom nothing is to
come.

The order cannot stand still. An exchange of sums waits for micro-batches of its senders. One of reduced gradients
waits for sums of these pages: for those that links bring from other stages (ties), and for exchanges, all of which come
before it. So each exchange waits for earlier ones alone, for micro-batches and for links, and no micro-batch and
nothing that goes over links waits for an exchange of its step. The first exchange that is not complete everywhere is
therefore issued by every member in the end, and is complete then; after it the next one is the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, maximal_nodes
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.gradient_exchange import GradientExchange, ReducedPages, mirrors_in
from elaswave_spmd.worker.gradient_routes import Route, routes

WINDOW = 2
"""Exchanges in progress at a time: one that is copied, and one that waits for the slowest member of the stage."""

LAG = 1
"""Exchanges of sums between the last one that brings sums of a layer and the exchange of its reduced gradients.

A primary has a reduced gradient when that one is complete and its sums are added. Right behind it the exchange of
gradients would keep the next sums waiting for that. With `LAG` = `WINDOW` - 1 that one is complete when its turn comes.
"""

_PADDING = 64  # elements that go to a member for which there is nothing: a multiple that keeps all others aligned

LayerSum = tuple[int, Node]
"""The sum of a tree node of one layer."""


@dataclass(frozen=True)
class SumExchange:
    """One all-to-all: sums of one layer, from each member of the stage to all primaries in it.

    Args:
        layer: of the gradients.
        nodes: member -> the tree nodes whose sums it sends.
    """

    message: ClassVar[str] = "PartialSum"
    """The kind of message that it stands for."""

    layer: int
    nodes: Mapping[int, tuple[Node, ...]]


Exchange = SumExchange | GradientExchange


@dataclass
class Given:
    """The sums and gradients that a worker has given to the exchanges of a step, less what is known to be everywhere.

    Args:
        sums: by tree node. Their buffers stay as they are meanwhile.
        gradients: by page range. Others keep them until the step is decided.
    """

    sums: dict[LayerSum, GradientBuffer] = field(default_factory=dict)
    gradients: dict[PageRange, ReducedPages] = field(default_factory=dict)


@dataclass(frozen=True)
class ExchangePlan:
    """The exchanges of a step that runs as it is placed: a pure function of the placement, alike on all members.

    Layers come in the order of a backward. Replicated gradients have one exchange for each layer, with all sums of it.
    Sharded ones have rounds (`_rounds`), in each of which a member sends about one sum of each layer, since it is to
    keep no more of them. The reduced gradients of a layer come `LAG` exchanges of sums after the last one with sums
    that they are made of: S(2), S(1), G(2), S(0), G(1), G(0), and where there are rounds, in the last one.

    Args:
        rank: this worker.
        members: of its stage, in the order of their ranks in the group.
        order: of the exchanges. Empty: nobody in the stage has anything to send to another.
        ways: layer -> primary in the stage -> the routes of the pages that it is sent.
        layout: of the model.
    """

    rank: int
    members: tuple[int, ...]
    order: tuple[Exchange, ...]
    ways: Mapping[int, Mapping[int, tuple[Route, ...]]]
    layout: ModelLayout

    @classmethod
    def of(cls, rank: int, layout: ModelLayout, placement: Placement, replica_map: ReplicaMap) -> ExchangePlan:
        """The exchanges of the worker's stage.

        Args:
            replica_map: of the stage's layers, and of those whose parameters they read.
        """
        stage = placement.mesh.stage_of(rank)
        members, layers = placement.mesh.stages[stage], placement.layers_of_stage(stage)
        ways = {layer: _by_primary(routes(layout, replica_map, layer), members) for layer in layers}
        mine = {m: placement.microbatches_of(m) for m in members}
        nodes = {m: maximal_nodes(mine[m], placement.num_microbatches) for m in members}
        rounds = _rounds(mine, nodes) if placement.shardings.grads.axes else [nodes]
        sums = [SumExchange(layer, found) for found in rounds for layer in reversed(layers)]
        sums = [exchange for exchange in sums if _has_any(exchange, ways[exchange.layer])]
        behind = _gradients_behind(sums, layers, layout, replica_map, frozenset(members))
        order: list[Exchange] = [*behind.get(-1, ())]
        for at, exchange in enumerate(sums):
            order += [exchange, *behind.get(at, ())]
        return cls(rank, members, tuple(order), ways, layout)

    def sizes(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """Elements that this worker sends to each member, and that it receives from each."""
        return (
            [self._size(exchange, self.rank, member) for member in self.members],
            [self._size(exchange, member, self.rank) for member in self.members],
        )

    def _size(self, exchange: Exchange, sender: int, receiver: int) -> int:
        if sender == receiver:
            return 0
        if isinstance(exchange, GradientExchange):
            return exchange.size(self.layout.layers[exchange.layer], sender, receiver) or _PADDING
        elements = sum(self._elements(route) for route in self.ways[exchange.layer].get(receiver, ()))
        return len(exchange.nodes[sender]) * elements or _PADDING

    def _elements(self, route: Route) -> int:
        start, stop = self.layout.layers[route.layer].gradient_span(route.first, route.stop)
        return stop - start

    def pack(self, exchange: Exchange, given: Given, place: torch.device) -> Tensor:
        """The values that this worker sends: a copy, so that sums may be given up while the library still reads it."""
        padding, parts = torch.zeros(_PADDING, dtype=torch.float32, device=place), list[Tensor]()
        others = [member for member in self.members if member != self.rank]
        if isinstance(exchange, GradientExchange):
            packed = exchange.pack(self.rank, others, given.gradients)
            return torch.cat([part for member in others for part in packed.get(member, (padding,))])
        for member in others:
            found = self.ways[exchange.layer].get(member, ())
            mine = [given.sums[exchange.layer, node] for node in exchange.nodes[self.rank]]
            parts += [buffer.pages(route.first, route.stop) for buffer in mine for route in found] or [padding]
        return torch.cat(parts)

    def parts(self, exchange: SumExchange, values: Tensor) -> list[tuple[Node, Route, Tensor]]:
        """The sums that have come, as (tree node, route, sum)."""
        found, at = [], 0
        for member in self.members:
            first = at
            for node in exchange.nodes[member] if member != self.rank else ():
                for route in self.ways[exchange.layer].get(self.rank, ()):
                    stop = at + self._elements(route)
                    found.append((node, route, values[at:stop]))
                    at = stop
            if member != self.rank and at == first:
                at += _PADDING
        assert at == len(values), (exchange, at, len(values))
        return found

    def gradients(self, exchange: GradientExchange, values: Tensor) -> list[ReducedPages]:
        """The reduced gradients that have come."""
        sizes = [self._size(exchange, member, self.rank) for member in self.members]
        came = dict(zip(self.members, values.split(sizes), strict=True))
        return exchange.unpack(self.layout.layers[exchange.layer], self.rank, came)


def _rounds(
    microbatches: Mapping[int, Sequence[int]], nodes: Mapping[int, Sequence[Node]]
) -> list[dict[int, tuple[Node, ...]]]:
    """Sums that are complete at about the same time, if all members begin and end their micro-batches together.

    So one that is given more micro-batches than others, since it is faster, need not keep its sums until these have as
    many. The member with the most nodes gives the times of the rounds; a round has the nodes of the others that
    are complete by then: none, one or several of a member.

    Args:
        microbatches: member -> what it computes, in this order.
        nodes: member -> its tree nodes, in the order in which they are complete.
    """
    ends = {
        member: [Fraction(bisect_left(microbatches[member], hi), len(microbatches[member])) for _, hi in found]
        for member, found in nodes.items()
    }
    times = max(ends.values(), key=len)
    rounds = [{member: tuple[Node, ...]() for member in nodes} for _ in times]
    for member, found in nodes.items():
        for node, end in zip(found, ends[member], strict=True):
            rounds[bisect_left(times, end)][member] += (node,)
    return rounds


def _by_primary(found: Sequence[Route], members: Sequence[int]) -> dict[int, tuple[Route, ...]]:
    return {m: mine for m in members if (mine := tuple(route for route in found if route.pages.primary == m))}


def _gradients_behind(
    sums: Sequence[SumExchange], layers: range, layout: ModelLayout, replica_map: ReplicaMap, members: frozenset[int]
) -> dict[int, list[GradientExchange]]:
    """Index of an exchange of sums -> the exchanges of reduced gradients that come right after it; -1: there is none.

    Args:
        sums: all exchanges of sums that are made.
        layers: of the stage.
    """
    behind, last = dict[int, list[GradientExchange]](), list[GradientExchange]()
    for layer in reversed(layers):
        exchange = GradientExchange.of(layout.layers[layer], replica_map[layer], members)
        if exchange is None:
            continue
        # Those of a tied parameter are made of sums of its readers as well. Links bring those of other stages.
        ranges = (pages for sent in exchange.ranges.values() for pages in sent)
        uses = {use for pages in ranges for use in layout.uses_of(layer, pages.first)}
        # A stage before this one has its last sums when the pipeline is empty, and so would all exchanges behind this.
        # One member alone may have computed all of a layer: then no exchange says when its gradient is complete.
        made_of = [] if min(uses) < layers.start else [at for at, one in enumerate(sums) if one.layer in uses]
        if made_of:
            behind.setdefault(min(made_of[-1] + LAG, len(sums) - 1), []).append(exchange)
        else:
            last.append(exchange)
    behind.setdefault(len(sums) - 1, []).extend(last)
    return behind


def _has_any(exchange: SumExchange, ways: Mapping[int, Sequence[Route]]) -> bool:
    """True if some member has a sum for another one."""
    return any(found and any(primary != member for primary in ways) for member, found in exchange.nodes.items())


class StageExchanges:
    """One worker's part in the exchanges of one step after another: what is issued next, and what may be missing yet.

    Without a plan, and for steps that not all members have agreed to exchange, it takes nothing: links serve.
    """

    def __init__(self) -> None:
        self.plan: ExchangePlan | None = None
        # What this worker gives to the plan's exchanges: its sums, and reduced gradients -> the mirrors that get them.
        self._exchanged: frozenset[LayerSum] = frozenset()
        self._mirrors: Mapping[PageRange, frozenset[int]] = {}
        self.step = 0
        """The step that goes through the group, if all members have agreed to it; else 0."""
        self._is_begun = False
        self._issued = 0  # exchanges of the step, in the order of the plan
        self._complete = 0
        self._given = Given()  # and may be missing somewhere yet
        # The same, after the group has failed or the epoch is over.
        self._returned: dict[LayerSum, GradientBuffer] = {}
        self._returned_gradients: list[tuple[ReducedPages, frozenset[int]]] = []

    def enter_epoch(self, plan: ExchangePlan) -> None:
        """Begin a new mesh epoch. What may be missing somewhere is to be taken back."""
        self.stop()
        self.plan = plan
        sums = (sent for sent in plan.order if isinstance(sent, SumExchange))
        self._exchanged = frozenset(layer_sum for sent in sums for layer_sum in _sums(plan, sent))
        gradients = (sent for sent in plan.order if isinstance(sent, GradientExchange))
        ranges = (pages for sent in gradients for pages in sent.sent_by(plan.rank))
        members = frozenset(plan.members)
        self._mirrors = {pages.key: mirrors_in(members, pages) for pages in ranges}

    def agree(self, step: int) -> None:
        """All votes for the step before had the mark: this one is exchanged, once this worker begins it."""
        assert not self._given.sums and not self._given.gradients, (step, self.step)
        self.step = step
        self._is_begun = False
        self._issued = self._complete = 0

    def begin(self, step: int) -> None:
        """This worker begins a step."""
        self._is_begun = step == self.step

    def takes(self, step: int, layer: int, node: Node) -> bool:
        """True if a sum of this worker goes through the group in a step, to primaries that `reaches` names."""
        return step == self.step and (layer, node) in self._exchanged

    def reaches(self, primary: int) -> bool:
        """True if another worker belongs to the group."""
        return self.plan is not None and primary != self.plan.rank and primary in self.plan.members

    def mirrors(self, step: int, pages: PageRange) -> frozenset[int]:
        """The mirrors to which the group brings a reduced gradient of this worker in a step."""
        return self._mirrors.get(pages, frozenset()) if step == self.step else frozenset()

    def add(self, layer: int, node: Node, buffer: GradientBuffer) -> None:
        """A sum of this worker is complete. Its buffer stays as it is until the sum is given up."""
        self._given.sums[layer, node] = buffer

    def add_gradient(self, reduced: ReducedPages) -> None:
        """A reduced gradient of this worker is complete, and has `mirrors`. It stays as it is until it is decided."""
        self._given.gradients[reduced.pages.key] = reduced

    def next(self) -> Exchange | None:
        """The exchange to issue now; None: what it sends is not complete here, or enough are in progress."""
        if self.plan is None or not self._is_begun or self._issued == len(self.plan.order):
            return None
        if self._issued - self._complete >= WINDOW:
            return None
        exchange = self.plan.order[self._issued]
        return exchange if self._has_all_of(exchange) else None

    def _has_all_of(self, exchange: Exchange) -> bool:
        """True if what this worker sends in an exchange is complete."""
        assert self.plan is not None
        if isinstance(exchange, GradientExchange):
            return all(pages.key in self._given.gradients for pages in exchange.sent_by(self.plan.rank))
        return all(layer_sum in self._given.sums for layer_sum in _sums(self.plan, exchange))

    @property
    def is_over(self) -> bool:
        """True if no exchange of a step that this worker has begun is to come or in progress."""
        return not self._is_begun or self.plan is None or self._complete == len(self.plan.order)

    def pack(self, exchange: Exchange, place: torch.device) -> Tensor:
        """The values that this worker sends in an exchange, which is issued now."""
        assert self.plan is not None
        self._issued += 1
        return self.plan.pack(exchange, self._given, place)

    def complete(self) -> list[LayerSum]:
        """The oldest exchange in progress is complete here. Returns own sums that are now known to be everywhere."""
        assert self.plan is not None and self._complete < self._issued
        self._complete += 1
        if (known := self._complete - WINDOW) <= 0:
            return []
        return self._known_everywhere(self.plan.order[known - 1])

    def _known_everywhere(self, exchange: Exchange) -> list[LayerSum]:
        """All members have completed an exchange: nothing of it is taken back. Returns own sums of it."""
        assert self.plan is not None
        if isinstance(exchange, GradientExchange):
            for pages in exchange.sent_by(self.plan.rank):
                del self._given.gradients[pages.key]
            return []
        for layer_sum in (found := _sums(self.plan, exchange)):
            del self._given.sums[layer_sum]
        return found

    def stop(self) -> None:
        """The group has failed, or its mesh epoch is over: what it may not have brought goes over links."""
        self._returned |= self._given.sums
        self._returned_gradients += [(one, self._mirrors[key]) for key, one in self._given.gradients.items()]
        self._given = Given()
        self.step = 0
        self._is_begun = False

    def take_back(self) -> dict[LayerSum, GradientBuffer]:
        """The sums that have to be sent over links, once."""
        returned, self._returned = self._returned, {}
        return returned

    def take_back_gradients(self) -> list[tuple[ReducedPages, frozenset[int]]]:
        """The reduced gradients that have to be sent over links, once, and the mirrors that may lack them."""
        returned, self._returned_gradients = self._returned_gradients, []
        return returned

    def forget(self) -> None:
        """The step is decided, or given up: nobody needs anything of it any more."""
        self._given = Given()
        self._returned = {}
        self._returned_gradients = []
        self.step = 0
        self._is_begun = False


def _sums(plan: ExchangePlan, exchange: SumExchange) -> list[LayerSum]:
    """The sums that a worker sends in an exchange."""
    return [(exchange.layer, node) for node in exchange.nodes[plan.rank]]
