"""Partial sums through the process group of a stage (`runtime.collectives=group`), in place of links.

If all votes for step t - 1 said that their senders have their groups, the sums of step t go to the primaries in their
own stage by one all-to-all for each layer (with sharded gradients for each layer and round, see `ExchangePlan`). The
group only copies: a primary adds what comes to the same tree as sums that come over links.

All members of a stage issue the same exchanges in the same order, which the placement fixes. What is complete too early
waits here, and no action waits for it. An exchange is issued only when the one `WINDOW` before it is complete on this
worker. So whoever has completed an exchange knows that every member has completed the one `WINDOW` before it, and only
the sums of that one may be given up. All others are sent over links if the group fails or a new mesh epoch begins. Each
member sends something to each other one, be it padding: NCCL waits for nobody from whom nothing is to come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, maximal_nodes
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.gradient_routes import Route, routes

WINDOW = 2
"""Exchanges in progress at a time: one that is copied, and one that waits for the slowest member of the stage."""

_PADDING = 64  # elements that go to a member for which there is no sum: a multiple that keeps all others aligned

LayerSum = tuple[int, Node]
"""The sum of a tree node of one layer."""


@dataclass(frozen=True)
class SumExchange:
    """One all-to-all: sums of one layer, from each member of the stage to all primaries in it.

    Args:
        layer: of the gradients.
        nodes: member -> the tree nodes whose sums it sends.
    """

    layer: int
    nodes: Mapping[int, tuple[Node, ...]]


@dataclass(frozen=True)
class ExchangePlan:
    """The exchanges of a step that runs as it is placed: a pure function of the placement, alike on all members.

    Layers come in the order of a backward. Replicated gradients have one exchange for each layer, with all sums of it.
    Sharded ones have rounds (`_rounds`), in each of which a member sends about one sum of each layer, since it is to
    keep no more of them.

    Args:
        rank: this worker.
        members: of its stage, in the order of their ranks in the group.
        order: of the exchanges. Empty: nobody in the stage has anything to send to another.
        ways: layer -> primary in the stage -> the routes of the pages that it is sent.
        layout: of the model.
    """

    rank: int
    members: tuple[int, ...]
    order: tuple[SumExchange, ...]
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
        order = (SumExchange(layer, sums) for sums in rounds for layer in reversed(layers))
        found = tuple(one for one in order if _has_any(one, ways[one.layer]))
        return cls(rank, members, found, ways, layout)

    def sizes(self, exchange: SumExchange) -> tuple[list[int], list[int]]:
        """Elements that this worker sends to each member, and that it receives from each."""
        return (
            [self._size(exchange, self.rank, member) for member in self.members],
            [self._size(exchange, member, self.rank) for member in self.members],
        )

    def _size(self, exchange: SumExchange, sender: int, receiver: int) -> int:
        if sender == receiver:
            return 0
        elements = sum(self._elements(route) for route in self.ways[exchange.layer].get(receiver, ()))
        return len(exchange.nodes[sender]) * elements or _PADDING

    def _elements(self, route: Route) -> int:
        start, stop = self.layout.layers[route.layer].gradient_span(route.first, route.stop)
        return stop - start

    def pack(self, exchange: SumExchange, sums: Mapping[LayerSum, GradientBuffer], place: torch.device) -> Tensor:
        """What this worker sends: a copy, so that sums may be given up while the library still reads it."""
        padding, parts = torch.zeros(_PADDING, dtype=torch.float32, device=place), list[Tensor]()
        for member in self.members:
            if member == self.rank:
                continue
            found = self.ways[exchange.layer].get(member, ())
            mine = [sums[exchange.layer, node] for node in exchange.nodes[self.rank]]
            parts += [buffer.pages(route.first, route.stop) for buffer in mine for route in found] or [padding]
        return torch.cat(parts)

    def parts(self, exchange: SumExchange, values: Tensor) -> list[tuple[Node, Route, Tensor]]:
        """What has come, as (tree node, route, sum)."""
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


def _has_any(exchange: SumExchange, ways: Mapping[int, Sequence[Route]]) -> bool:
    """True if some member has a sum for another one."""
    return any(found and any(primary != member for primary in ways) for member, found in exchange.nodes.items())


class SumExchanges:
    """One worker's part in the exchanges of one step after another: what is issued next, and what may be missing yet.

    Without a plan, and for steps that not all members have agreed to exchange, it takes nothing: links serve.
    """

    def __init__(self) -> None:
        self.plan: ExchangePlan | None = None
        self._exchanged: frozenset[LayerSum] = frozenset()  # the sums that this worker gives to the plan's exchanges
        self.step = 0
        """The step whose sums go through the group, if all members have agreed to it; else 0."""
        self._is_begun = False
        self._issued = 0  # exchanges of the step, in the order of the plan
        self._complete = 0
        self._sums: dict[LayerSum, GradientBuffer] = {}  # that were given to `add`, and may be missing somewhere yet
        self._returned: dict[LayerSum, GradientBuffer] = {}  # the same, after the group has failed or the epoch is over

    def bind(self, plan: ExchangePlan) -> None:
        """Begin a new mesh epoch. Sums that may be missing somewhere are for `take_back`."""
        self.stop()
        self.plan = plan
        self._exchanged = frozenset((one.layer, node) for one in plan.order for node in self._mine(one))

    def agree(self, step: int) -> None:
        """All votes for the step before had the mark: this one is exchanged, once this worker begins it."""
        assert not self._sums, (step, self.step)
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

    def add(self, layer: int, node: Node, buffer: GradientBuffer) -> None:
        """A sum of this worker is complete. Its buffer stays as it is until the sum is given up."""
        self._sums[layer, node] = buffer

    def next(self) -> SumExchange | None:
        """The exchange to issue now; None: its sums are not complete here, or enough are in progress."""
        if self.plan is None or not self._is_begun or self._issued == len(self.plan.order):
            return None
        if self._issued - self._complete >= WINDOW:
            return None
        exchange = self.plan.order[self._issued]
        return exchange if all((exchange.layer, node) in self._sums for node in self._mine(exchange)) else None

    @property
    def is_over(self) -> bool:
        """True if no exchange of a step that this worker has begun is to come or in progress."""
        return not self._is_begun or self.plan is None or self._complete == len(self.plan.order)

    def pack(self, exchange: SumExchange, place: torch.device) -> Tensor:
        """What this worker sends in an exchange, which is issued now."""
        assert self.plan is not None
        self._issued += 1
        return self.plan.pack(exchange, self._sums, place)

    def complete(self) -> list[LayerSum]:
        """The oldest exchange in progress is complete here. Returns own sums that are now known to be everywhere."""
        assert self.plan is not None and self._complete < self._issued
        self._complete += 1
        if (known := self._complete - WINDOW) <= 0:
            return []
        exchange = self.plan.order[known - 1]
        found = [(exchange.layer, node) for node in self._mine(exchange)]
        for one in found:
            self._sums.pop(one, None)
        return found

    def _mine(self, exchange: SumExchange) -> tuple[Node, ...]:
        assert self.plan is not None
        return exchange.nodes[self.plan.rank]

    def stop(self) -> None:
        """The group has failed, or its mesh epoch is over: what it may not have brought goes over links."""
        self._returned |= self._sums
        self._sums = {}
        self.step = 0
        self._is_begun = False

    def take_back(self) -> dict[LayerSum, GradientBuffer]:
        """The sums that have to be sent over links, once."""
        returned, self._returned = self._returned, {}
        return returned

    def forget(self) -> None:
        """The step is decided, or given up: nobody needs its sums any more."""
        self._sums = {}
        self._returned = {}
        self.step = 0
        self._is_begun = False
