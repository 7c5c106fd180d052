"""Partial sums and reduced gradients through the process group of a stage (`runtime.collectives=group`).

If all votes for step t - 1 say that their senders have their groups, the partial sums of step t go to the primaries in
the same stage by one all-to-all for each layer (with sharded gradients, for each layer and round, see `ExchangePlan`).
The group only copies: a primary adds what it receives to the same tree as sums that come over links. The reduced
gradients go to the mirrors in the stage in the same way (gradient_exchange.py). docs/protocol.md has the rules, E1 to
E8.

If a stage is on several hosts, with several workers on each, the sums of a layer go in two exchanges if that brings
fewer values from host to host. The first one is within hosts: to primaries on the host, and to collectors, which add up
what their host has for a primary elsewhere (host_sums.py). The second one is between hosts, from collectors to
primaries. A worker keeps its own sums until the second exchange is known to be complete everywhere. So if the group
fails, every worker sends its own sums over links, and nothing of a collector is needed.

All members of a stage issue the same exchanges in the same order, which the placement fixes. Sums that are complete
before their turn wait here, and no action waits for them. An exchange is issued only when the one `WINDOW` places
before it is complete on this worker. So a worker that has completed an exchange knows that every member has completed
the one `WINDOW` places before it. Only the contents of that one are known to be everywhere; all others are sent over
links if the group fails or a new mesh epoch begins. For this to hold, each member must send something to each other
member, padding if it has nothing else: NCCL does not wait for a member that sends nothing.

The exchanges cannot block each other for ever. An exchange of sums waits for micro-batches of its senders. An exchange
of reduced gradients waits for sums of its pages: those come over links from other stages (ties), or by exchanges that
all come before it. So an exchange waits only for earlier exchanges, for micro-batches and for links, and no micro-batch
and nothing that goes over links waits for an exchange of its step. Therefore every member issues the first exchange
that is not complete everywhere in the end, and it becomes complete; then the same holds for the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, maximal_nodes
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.gradient_exchange import GradientExchange, ReducedPages, mirrors_in
from elaswave_spmd.worker.gradient_routes import Route, routes
from elaswave_spmd.worker.host_sums import Hosts, NodesByWorker

WINDOW = 2
"""The most exchanges in progress at a time: one that is being copied, and one that waits for the slowest member."""

LAG = 1
"""How many further exchanges of sums come between the last one with sums of a layer and its exchange of gradients.

A primary has a reduced gradient once the last exchange with sums of it is complete and these are added. If the exchange
of gradients came right after that one, the next sums would have to wait until the gradients are there. With `LAG` =
`WINDOW` - 1, the last exchange with sums is complete when the turn of the gradients comes.
"""

_PADDING = 64  # elements sent to a member for which there is nothing; a multiple of 64 keeps all other parts aligned

LayerSum = tuple[int, Node]
"""The sum of a tree node of one layer."""


class Way(Enum):
    """The workers between which an exchange brings sums."""

    DIRECT = "direct"
    """From all members to all primaries."""
    WITHIN_HOSTS = "within hosts"
    """From all members to the primaries and collectors on their own host."""
    BETWEEN_HOSTS = "between hosts"
    """From collectors to primaries on other hosts: sums of what the collectors have got within their host."""


@dataclass(frozen=True)
class SumExchange:
    """One all-to-all that brings sums of one layer.

    Args:
        layer: the layer of the gradients.
        nodes: member -> the tree nodes whose sums it sends.
        own: member -> the tree nodes of its own micro-batches that are part of what is sent. They are the same as
            `nodes`, except in an exchange between hosts.
        way: the workers between which the exchange brings sums.
    """

    layer: int
    nodes: NodesByWorker
    own: NodesByWorker
    way: Way = Way.DIRECT

    @property
    def message(self) -> str:
        """The name of the message that the exchange replaces, and its way if there are two exchanges for a layer."""
        return "PartialSum" if self.way is Way.DIRECT else f"PartialSum {self.way.value}"


Exchange = SumExchange | GradientExchange


@dataclass
class Given:
    """The sums and gradients that a worker has given to the exchanges of a step and that may be missing somewhere.

    Args:
        sums: (layer, tree node) -> the sum. A buffer must not change as long as it is here.
        collected: layer -> (tree node, first page) -> the sum that this worker has added up for a primary on another
            host. It is dropped when it is sent.
        gradients: page range -> the reduced gradient. `StateReplica` keeps its memory until the step is decided.
    """

    sums: dict[LayerSum, GradientBuffer] = field(default_factory=dict)
    collected: dict[int, dict[tuple[Node, int], Tensor]] = field(default_factory=dict)
    gradients: dict[PageRange, ReducedPages] = field(default_factory=dict)

    def sum_of(self, exchange: SumExchange, node: Node, route: Route) -> Tensor:
        """The part of a sum that goes along a route in an exchange."""
        if exchange.way is Way.BETWEEN_HOSTS:
            return self.collected[exchange.layer][node, route.first]
        return self.sums[exchange.layer, node].pages(route.first, route.stop)


@dataclass(frozen=True)
class ExchangePlan:
    """The exchanges of a step that runs as placed: a pure function of the placement, and so the same on all members.

    Layers come in the order of a backward. Replicated gradients have one exchange for each layer, with all of its sums
    (S); or two, within hosts (W) and between hosts (B), of which the second comes `LAG` exchanges later: W(2), W(1),
    B(2), W(0), B(1). Sharded gradients have rounds (`_rounds`): in each round a member sends about one sum of each
    layer, so that it need not keep more of them. The exchange of a layer's reduced gradients (G) comes `LAG` exchanges
    of sums after the last exchange with sums of it: S(2), S(1), G(2), S(0), G(1), G(0). With rounds, that is in the
    last one.

    Args:
        rank: the rank of this worker.
        members: the members of its stage, in the order of their ranks in the group.
        order: the exchanges in the order in which they are issued. Empty if no member has anything to send to another.
        ways: layer -> primary in the stage -> the routes of the pages that are sent to it.
        hosts: which members share a host.
        layout: the layers and pages of the model.
    """

    rank: int
    members: tuple[int, ...]
    order: tuple[Exchange, ...]
    ways: Mapping[int, Mapping[int, tuple[Route, ...]]]
    hosts: Hosts
    layout: ModelLayout

    @classmethod
    def of(cls, rank: int, layout: ModelLayout, placement: Placement, replica_map: ReplicaMap) -> ExchangePlan:
        """The exchanges of the worker's stage.

        Args:
            layout: the layers and pages of the model.
            replica_map: the replicas of the stage's layers, and of the layers whose parameters these read.
        """
        stage = placement.mesh.stage_of(rank)
        members, layers = placement.mesh.stages[stage], placement.layers_of_stage(stage)
        ways = {layer: _by_primary(routes(layout, replica_map, layer), members) for layer in layers}
        hosts = Hosts.of(placement, stage)
        sums = _exchanges_of_sums(rounds_of(placement, stage), layers, ways, hosts, placement.num_microbatches)
        behind = _gradients_behind(sums, layers, layout, replica_map, frozenset(members))
        order: list[Exchange] = [*behind.get(-1, ())]
        for at, exchange in enumerate(sums):
            order += [exchange, *behind.get(at, ())]
        return cls(rank, members, tuple(order), ways, hosts, layout)

    def sizes(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        """(elements sent to each member, elements received from each member), both in the order of `members`."""
        return (
            [self._size(exchange, self.rank, member) for member in self.members],
            [self._size(exchange, member, self.rank) for member in self.members],
        )

    def _size(self, exchange: Exchange, sender: int, receiver: int) -> int:
        if sender == receiver:
            return 0
        if isinstance(exchange, GradientExchange):
            return exchange.size(self.layout.layers[exchange.layer], sender, receiver) or _PADDING
        elements = sum(_elements(route, self.layout) for route in self.routes_between(exchange, sender, receiver))
        return len(exchange.nodes[sender]) * elements or _PADDING

    def routes_between(self, exchange: SumExchange, sender: int, receiver: int) -> tuple[Route, ...]:
        """The routes of the pages whose sums go from one member to another one in an exchange."""
        ways = self.ways[exchange.layer]
        if exchange.way is Way.DIRECT:
            return ways.get(receiver, ())
        if exchange.way is Way.BETWEEN_HOSTS:
            is_collector = self.hosts.collector(sender, receiver) == sender
            return ways.get(receiver, ()) if is_collector and not self.hosts.share_one(sender, receiver) else ()
        if not self.hosts.share_one(sender, receiver):
            return ()
        return (*ways.get(receiver, ()), *self._collected_by(receiver).get(exchange.layer, ()))

    def collects(self, layer: int) -> tuple[Route, ...]:
        """The routes of the pages on other hosts for which this worker adds up what its host has."""
        return self._collected_by(self.rank).get(layer, ())

    def _collected_by(self, collector: int) -> Mapping[int, tuple[Route, ...]]:
        """Layer -> the routes of the pages on other hosts for which a worker adds up what its host has."""
        if collector not in self._collected:
            others = [m for m in self.members if not self.hosts.share_one(collector, m)]
            primaries = [m for m in others if self.hosts.collector(collector, m) == collector]
            self._collected[collector] = {
                layer: tuple(route for primary in primaries for route in ways.get(primary, ()))
                for layer, ways in self.ways.items()
            }
        return self._collected[collector]

    @cached_property
    def _collected(self) -> dict[int, Mapping[int, tuple[Route, ...]]]:
        return {}  # by collector, filled on first use

    def pack(self, exchange: Exchange, given: Given, place: torch.device) -> Tensor:
        """The values that this worker sends, fp32, flat, in the order of `members`.

        They are copied, so that the buffers of the sums may be reused while the library still reads the copy.
        """
        padding, parts = torch.zeros(_PADDING, dtype=torch.float32, device=place), list[Tensor]()
        others = [member for member in self.members if member != self.rank]
        if isinstance(exchange, GradientExchange):
            packed = exchange.pack(self.rank, others, given.gradients)
            return torch.cat([part for member in others for part in packed.get(member, (padding,))])
        for member in others:
            found = self.routes_between(exchange, self.rank, member)
            ids = [(node, route) for node in exchange.nodes[self.rank] for route in found]
            parts += [given.sum_of(exchange, node, route) for node, route in ids] or [padding]
        return torch.cat(parts)

    def parts(self, exchange: SumExchange, values: Tensor) -> list[tuple[Node, Route, Tensor]]:
        """The sums that this worker has received, as (tree node, route, sum). Each sum is a slice of `values`.

        They are of pages that this worker is the primary of, or whose sums it collects for another host.

        Args:
            values: what the exchange has received, fp32, flat, in the order of `members`.
        """
        found, at = [], 0
        for member in self.members:
            first = at
            for node in exchange.nodes[member] if member != self.rank else ():
                for route in self.routes_between(exchange, member, self.rank):
                    stop = at + _elements(route, self.layout)
                    found.append((node, route, values[at:stop]))
                    at = stop
            if member != self.rank and at == first:
                at += _PADDING
        assert at == len(values), (exchange, at, len(values))
        return found

    def gradients(self, exchange: GradientExchange, values: Tensor) -> list[ReducedPages]:
        """The reduced gradients that this worker has received in an exchange."""
        sizes = [self._size(exchange, member, self.rank) for member in self.members]
        came = dict(zip(self.members, values.split(sizes), strict=True))
        return exchange.unpack(self.layout.layers[exchange.layer], self.rank, came)


def rounds_of(placement: Placement, stage: int) -> list[dict[int, tuple[Node, ...]]]:
    """For each round: worker -> the tree nodes that it sends of each layer. Replicated gradients have one round."""
    mine = {rank: placement.microbatches_of(rank) for rank in placement.mesh.stages[stage]}
    nodes = {rank: maximal_nodes(found, placement.num_microbatches) for rank, found in mine.items()}
    return _rounds(mine, nodes) if placement.shardings.grads.axes else [nodes]


def sums_of_hosts(placement: Placement, layer: int) -> frozenset[Node]:
    """The tree nodes whose sums collectors may add up, for the gradients of one layer."""
    stage = placement.stage_of_layer(layer)
    hosts, number = Hosts.of(placement, stage), placement.num_microbatches
    made = (hosts.added_up(nodes, number) for nodes in rounds_of(placement, stage))
    return frozenset(node for found in made for nodes in found.values() for node in nodes)


def _rounds(
    microbatches: Mapping[int, Sequence[int]], nodes: Mapping[int, Sequence[Node]]
) -> list[dict[int, tuple[Node, ...]]]:
    """The sums of a layer by rounds: those of a round are complete at about the same time.

    This assumes that all members begin and end their micro-batches together. So a member that is given more of them, as
    it is faster, need not keep its sums until others have as many. The rounds end when the nodes of the member with the
    most nodes are complete. Of the other members a round has the nodes that are complete by then: none, one or several.

    Args:
        microbatches: member -> its micro-batches, in the order in which it computes them.
        nodes: member -> its tree nodes, in the order in which they are complete.
    """
    # For each node, the fraction of the member's micro-batches that are computed when the node is complete.
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
    """Index of an exchange of sums -> the exchanges of reduced gradients that come right after it.

    If there are no exchanges of sums, the index is -1.

    Args:
        sums: all exchanges of sums of the stage, in their order.
        layers: the layers of the stage.
        members: the members of the stage.
    """
    behind, last = dict[int, list[GradientExchange]](), list[GradientExchange]()
    for layer in reversed(layers):
        exchange = GradientExchange.of(layout.layers[layer], replica_map[layer], members)
        if exchange is None:
            continue
        # The gradient of a tied parameter is made of sums of the layers that read it as well.
        ranges = (pages for sent in exchange.ranges.values() for pages in sent)
        uses = {use for pages in ranges for use in layout.uses_of(layer, pages.first)}
        # The exchange comes last in two cases. If an earlier stage reads the parameter, its last sums come when the
        # pipeline is empty, and all exchanges after this one would wait until then. If one member has computed all of a
        # layer, no exchange of sums tells when the gradient is complete.
        made_of = [] if min(uses) < layers.start else [at for at, one in enumerate(sums) if one.layer in uses]
        if made_of:
            behind.setdefault(min(made_of[-1] + LAG, len(sums) - 1), []).append(exchange)
        else:
            last.append(exchange)
    behind.setdefault(len(sums) - 1, []).extend(last)
    return behind


def _has_any(nodes: NodesByWorker, ways: Mapping[int, Sequence[Route]]) -> bool:
    """True if some member has a sum for another one."""
    return any(found and any(primary != member for primary in ways) for member, found in nodes.items())


def _exchanges_of_sums(
    rounds: Sequence[NodesByWorker],
    layers: range,
    ways: Mapping[int, Mapping[int, tuple[Route, ...]]],
    hosts: Hosts,
    num_microbatches: int,
) -> list[SumExchange]:
    """The exchanges of sums in their order; two for a layer if fewer pages go from host to host then.

    The second of the two comes `LAG` exchanges later than it could, for the same reason as an exchange of gradients.
    """
    found, behind = list[SumExchange](), list[SumExchange]()
    for nodes in rounds:
        added_up = hosts.added_up(nodes, num_microbatches)
        # For each host, the number of sums that it sends to each primary elsewhere: one by one, and added up.
        single = [sum(len(nodes[rank]) for rank in members) for members in hosts.members]
        joined = [len(added_up[members[0]]) for members in hosts.members]
        for layer in reversed(layers):
            if not _has_any(nodes, ways[layer]):
                continue
            if _pages_between(joined, ways[layer], hosts) < _pages_between(single, ways[layer], hosts):
                found.append(SumExchange(layer, nodes, nodes, Way.WITHIN_HOSTS))
                behind.append(SumExchange(layer, added_up, nodes, Way.BETWEEN_HOSTS))
            else:
                found.append(SumExchange(layer, nodes, nodes))
            while len(behind) > LAG or (behind and found[-1].way is Way.DIRECT):
                found.append(behind.pop(0))
    return [*found, *behind]


def _pages_between(sums: Sequence[int], ways: Mapping[int, tuple[Route, ...]], hosts: Hosts) -> int:
    """The number of pages of one layer that go from host to host, each counted once for each sum.

    Args:
        sums: for each host the number of sums that it sends to every primary on another host.
    """
    pages_of = {primary: sum(route.stop - route.first for route in found) for primary, found in ways.items()}
    total = sum(pages_of.values())
    own = (sum(pages_of.get(rank, 0) for rank in members) for members in hosts.members)
    return sum(number * (total - pages) for number, pages in zip(sums, own, strict=True))


def _elements(route: Route, layout: ModelLayout) -> int:
    start, stop = layout.layers[route.layer].gradient_span(route.first, route.stop)
    return stop - start


class StageExchanges:
    """One worker's part in the exchanges of one step after another: which is issued next, and which sums and gradients
    may still be missing somewhere.

    Without a plan, and in steps that not all members have agreed to exchange, it takes nothing, and links are used.
    """

    def __init__(self) -> None:
        self.plan: ExchangePlan | None = None
        # What this worker gives to the plan's exchanges: its sums, and page ranges of reduced gradients -> the mirrors
        # that get them.
        self._exchanged: frozenset[LayerSum] = frozenset()
        self._mirrors: Mapping[PageRange, frozenset[int]] = {}
        self.step = 0
        """The step whose sums go through the group, as all members have agreed to; 0 if there is none."""
        self._is_begun = False  # this worker has begun the step
        self._issued = 0  # how many exchanges of the plan's order were issued in the step
        self._complete = 0  # how many of these are complete on this worker
        self._given = Given()
        # What was in `_given` when the group failed or the epoch ended, until it is taken back.
        self._returned: dict[LayerSum, GradientBuffer] = {}
        self._returned_gradients: list[tuple[ReducedPages, frozenset[int]]] = []

    def enter_epoch(self, plan: ExchangePlan) -> None:
        """Begin a new mesh epoch. The caller takes back what the older group may not have brought everywhere."""
        self.stop()
        self.plan = plan
        sums = (sent for sent in plan.order if isinstance(sent, SumExchange))
        self._exchanged = frozenset(layer_sum for sent in sums for layer_sum in _own_sums(plan, sent))
        gradients = (sent for sent in plan.order if isinstance(sent, GradientExchange))
        ranges = (pages for sent in gradients for pages in sent.sent_by(plan.rank))
        members = frozenset(plan.members)
        self._mirrors = {pages.key: mirrors_in(members, pages) for pages in ranges}

    def agree(self, step: int) -> None:
        """Note that a step goes through the group, as all members have offered it in their votes for the step before.

        docs/protocol.md, E1.
        """
        assert not self._given.sums and not self._given.gradients, (step, self.step)
        self.step = step
        self._is_begun = False
        self._issued = self._complete = 0

    def begin(self, step: int) -> None:
        """Note that this worker begins a step. If the step goes through the group, its exchanges may now be issued."""
        self._is_begun = step == self.step

    def takes(self, step: int, layer: int, node: Node) -> bool:
        """True if a sum of this worker goes through the group in a step, to all primaries that `reaches` accepts."""
        return step == self.step and (layer, node) in self._exchanged

    def reaches(self, primary: int) -> bool:
        """True if a primary is another worker of this stage, and so belongs to the group."""
        return self.plan is not None and primary != self.plan.rank and primary in self.plan.members

    def mirrors(self, step: int, pages: PageRange) -> frozenset[int]:
        """The mirrors to which the group brings a reduced gradient of this worker in a step."""
        return self._mirrors.get(pages, frozenset()) if step == self.step else frozenset()

    def add(self, layer: int, node: Node, buffer: GradientBuffer) -> None:
        """Give a complete sum of this worker to its exchange.

        The buffer must stay as it is until the sum is known to be everywhere (`complete`), is returned by `take_back`,
        or is dropped with its step (`forget`).
        """
        self._given.sums[layer, node] = buffer

    def add_gradient(self, reduced: ReducedPages) -> None:
        """Give a complete reduced gradient of this worker, which has `mirrors`, to its exchange. Its memory must stay
        as it is until the step is decided."""
        self._given.gradients[reduced.pages.key] = reduced

    def next(self) -> Exchange | None:
        """The exchange to issue now. None if what the next one sends is not complete here, if `WINDOW` exchanges are in
        progress, or if none is left."""
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
        if exchange.way is not Way.BETWEEN_HOSTS:
            return all(layer_sum in self._given.sums for layer_sum in _own_sums(self.plan, exchange))
        found, nodes = self._given.collected.get(exchange.layer, {}), exchange.nodes[self.plan.rank]
        return all((node, route.first) in found for route in self.plan.collects(exchange.layer) for node in nodes)

    def collect(self, exchange: SumExchange, route: Route, sums: Mapping[Node, Tensor]) -> None:
        """Store sums that this worker has added up for a primary on another host, after an exchange within hosts."""
        found = self._given.collected.setdefault(exchange.layer, {})
        found |= {(node, route.first): value for node, value in sums.items()}

    def own_sums(self, exchange: SumExchange, route: Route) -> list[tuple[Node, Tensor]]:
        """The parts along a route of the sums that this worker has given to an exchange within hosts."""
        assert self.plan is not None and exchange.way is Way.WITHIN_HOSTS
        return [(node, self._given.sum_of(exchange, node, route)) for node in exchange.nodes[self.plan.rank]]

    @property
    def is_over(self) -> bool:
        """True if no exchange of the present step is in progress or still to come, or if it has not begun here."""
        return not self._is_begun or self.plan is None or self._complete == len(self.plan.order)

    def pack(self, exchange: Exchange, place: torch.device) -> Tensor:
        """Return the values that this worker sends in an exchange, and count the exchange as issued."""
        assert self.plan is not None
        self._issued += 1
        values = self.plan.pack(exchange, self._given, place)
        if isinstance(exchange, SumExchange) and exchange.way is Way.BETWEEN_HOSTS:
            for route in self.plan.collects(exchange.layer):
                for node in exchange.nodes[self.plan.rank]:
                    del self._given.collected[exchange.layer][node, route.first]
        return values

    def complete(self) -> list[LayerSum]:
        """Count the oldest exchange in progress as complete here. Returns own sums now known to be everywhere (E3)."""
        assert self.plan is not None and self._complete < self._issued
        self._complete += 1
        # Every member has completed the exchange that comes `WINDOW` places before the one that is complete here now.
        if (known := self._complete - WINDOW) <= 0:
            return []
        return self._known_everywhere(self.plan.order[known - 1])

    def _known_everywhere(self, exchange: Exchange) -> list[LayerSum]:
        """Drop what is kept of an exchange that all members have completed, since nothing of it can be missing.

        Returns this worker's own sums in the exchange.
        """
        assert self.plan is not None
        if isinstance(exchange, GradientExchange):
            for pages in exchange.sent_by(self.plan.rank):
                del self._given.gradients[pages.key]
            return []
        if exchange.way is Way.WITHIN_HOSTS:  # primaries on other hosts get these sums by the second exchange
            return []
        for layer_sum in (found := _own_sums(self.plan, exchange)):
            del self._given.sums[layer_sum]
        return found

    def stop(self) -> None:
        """Stop using a group that has failed, or whose mesh epoch is over.

        What may be missing somewhere is set aside, and has to go over links (`take_back`, `take_back_gradients`).
        """
        self._returned |= self._given.sums
        self._returned_gradients += [(one, self._mirrors[key]) for key, one in self._given.gradients.items()]
        self._given = Given()
        self.step = 0
        self._is_begun = False

    def take_back(self) -> dict[LayerSum, GradientBuffer]:
        """Return the sums that have to be sent over links, and clear them."""
        returned, self._returned = self._returned, {}
        return returned

    def take_back_gradients(self) -> list[tuple[ReducedPages, frozenset[int]]]:
        """Return the reduced gradients that have to be sent over links, with the mirrors that may lack them, and clear
        them."""
        returned, self._returned_gradients = self._returned_gradients, []
        return returned

    def forget(self) -> None:
        """Drop everything of a step that is decided or given up."""
        self._given = Given()
        self._returned = {}
        self._returned_gradients = []
        self.step = 0
        self._is_begun = False


def _own_sums(plan: ExchangePlan, exchange: SumExchange) -> list[LayerSum]:
    """The sums of this worker's own micro-batches that an exchange brings; between hosts, by way of a collector."""
    return [(exchange.layer, node) for node in exchange.own[plan.rank]]
