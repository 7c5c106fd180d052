"""The canonical reduction of gradients: partial sums go to primaries, which add them up to the reduced gradient.

Additions follow one binary tree over micro-batches (determinism.reduction_tree), whichever worker computes which
micro-batch; so the bits are the same on every mesh. A worker adds the gradients of its own micro-batches as far as the
tree allows. When a tree node cannot grow any more on this worker, its sum is cut by page ranges, and each part is sent
to the primary of its range. The primary adds until it has the root of the tree: the reduced gradient.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import itemgetter
from typing import Protocol

from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, Reduction, maximal_nodes, sibling
from elaswave_spmd.recovery.messages import PartialSum
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.devices.sums import Term, Terms
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer, GradientPool
from elaswave_spmd.worker.gradient_exchange import GradientExchange, ReducedPages
from elaswave_spmd.worker.gradient_routes import Route, routes
from elaswave_spmd.worker.sum_exchange import Exchange, ExchangePlan, LayerSum, StageExchanges, SumExchange, Way


class SumObserver(Protocol):
    """Sees the gradients and sums of a worker's own micro-batches before they are sent (`SumChecks`)."""

    def looks_at(self, layer: int) -> bool:
        """True if each micro-batch's gradient of a layer must have a buffer of its own, since `computed` reads it."""
        ...

    def computed(self, step: int, layer: int, microbatch: int, gradient: GradientBuffer) -> None:
        """Called when a micro-batch's gradient is in its buffer, before it is added to another one."""
        ...

    def summed(self, step: int, layer: int, node: Node, gradient: GradientBuffer) -> None:
        """Called when the sum of a tree node cannot grow any more on this worker, before it is sent."""
        ...

    def collected(self, step: int, route: Route, node: Node, value: Tensor) -> Tensor:
        """Called when this worker has added up a sum of its host for a primary on another host (E8).

        Returns:
            The values to send to that primary: `value`, unless a fault is injected.
        """
        ...


@dataclass(frozen=True)
class ReductionForm:
    """What all reductions of a run have in common on one worker.

    Args:
        num_microbatches: the number of micro-batches of a step, which are the leaves of the tree.
        sharded: gradients are sharded (ZeRO-2 and 3): a sum is sent as soon as it is complete, and its buffer is not
            kept for longer than an exchange may still need it.
        add_in_place: autograd may add a micro-batch's gradient straight into its sibling's buffer (fp32 compute).
        copies_payloads: the memory of a payload may be overwritten as soon as it is sent. If False, it must stay as it
            is until the step is decided.
    """

    num_microbatches: int
    sharded: bool
    add_in_place: bool
    copies_payloads: bool

    def __post_init__(self) -> None:
        assert self.num_microbatches >= 1, f"a step has {self.num_microbatches} micro-batches"


Send = Callable[[int, PartialSum, Tensor], None]
GradientDone = Callable[[int, ReplicaSet, Tensor], None]


class GradientReducer:
    """The reduction of one step after another on one worker, through all configurations.

    Replicated gradients: a worker keeps its own sums until their step is decided, so that they can be sent again to a
    new primary. Sharded gradients: a sum is given up when it has been sent over links, or when all members of the stage
    are known to have completed the exchange that brought it, since keeping all of them would take a full-size buffer
    per micro-batch. A micro-batch whose sum is lost with a primary is then computed again.

    Args:
        rank: the rank of this worker.
        layout: the layers and pages of the model.
        device: the device that the sums lie on, and that received payloads are copied to.
        form: what does not change during the run.
        send: called with (primary, message, fp32 payload); `form` says from when on the payload may be overwritten.
        gradient_done: called with (step, pages, gradient) when the reduced gradient of a range of pages that this
            worker is the primary of is complete: fp32 [elements]. The step may be one that this worker has not begun.
        exchanges: the exchanges that take sums through the group of the stage in place of `send`; None without a group.
        observer: sees the sums that are made here; None if they are not checked.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        device: Device,
        form: ReductionForm,
        *,
        send: Send,
        gradient_done: GradientDone,
        exchanges: StageExchanges | None = None,
        observer: SumObserver | None = None,
    ) -> None:
        self.rank = rank
        self._layout = layout
        self._device = device
        self._form = form
        self._send = send
        self._gradient_done = gradient_done
        self._exchanges = exchanges or StageExchanges()
        self._observer = observer
        self._pools: dict[int, GradientPool] = {}
        self._layers: frozenset[int] = frozenset()  # the layers that this worker computes
        self._routes: dict[int, tuple[Route, ...]] = {}  # layer -> which of its pages go to which primary
        self._primary: list[ReplicaSet] = []  # the trained page ranges that this worker is the primary of
        # The first two are set by `enter_epoch`, the third by `begin_microbatch`, before anything reads them.
        self._uses: dict[PageRange, tuple[int, ...]]  # range of `_primary` -> the layers whose gradients it adds up
        self._ranges_by_use: dict[int, list[tuple[int, ReplicaSet]]]
        self._leaf_alone: GradientBuffer  # the gradient of a micro-batch that is not added to others here
        # Step -> the reductions of the ranges in `_primary`. There may be several steps, as other workers may be ahead.
        self._steps: dict[int, dict[PageRange, RangeReduction]] = {}
        self._early: dict[PartialSum, Tensor] = {}  # sums of pages that this worker is not the primary of (yet)
        self._final: frozenset[Node] = frozenset()  # the largest tree nodes that this worker can complete alone
        # Layer -> the sums that still grow here.
        self._local: dict[int, tuple[Reduction, dict[Node, GradientBuffer]]] = {}
        # Layer -> the sums that were sent, and are kept in case their pages get another primary.
        self._kept: dict[int, list[tuple[Node, GradientBuffer]]] = {}
        self._keeps_all = False  # True from a StepReport to the next configuration: no sum is given up
        self.applied_step = 0
        """The step that was applied last. Tree nodes of this step or an earlier one are ignored."""
        self._sum_bytes = 0  # bytes of the sums that `num_bytes` counts for sharded gradients, now and at the peak
        self._peak_sum_bytes = 0

    def enter_epoch(
        self, replica_map: ReplicaMap, layers: Iterable[int], current: int, unsure: Collection[int] = ()
    ) -> None:
        """Take part in a newer configuration: send the sums of pages that have another primary now.

        Args:
            replica_map: the replicas of all layers that concern this worker's layers and held pages. Its page ranges
                are those of the older configuration, parts of them, or, if nothing of a step is under way, several of
                them joined.
            layers: the layers that this worker computes.
            current: the step under way.
            unsure: peers that may have missed what they were sent: they get all of it again.
        """
        self._layers = frozenset(layers)
        for pool in self._pools.values():  # views by page range: otherwise each change of the mesh would leave some
            pool.forget_views()
        old_routes, self._routes = self._routes, {}
        for layer in {*self._layers, *self._kept, *self._local} & replica_map.keys():
            self._routes[layer] = routes(self._layout, replica_map, layer)
        self._primary = [
            pages
            for layer, sets in replica_map.items()
            for pages in sets
            if pages.primary == self.rank and not self._layout.layers[layer].is_frozen(pages.first)
        ]
        self._uses = {pages.key: uses_of(self._layout, pages) for pages in self._primary}
        self._ranges_by_use = _by_use(self._layout, self._primary)
        handed_over = self._split_reductions(replica_map)
        # Sums that the group of the older epoch may not have brought. It may have had other members, so they are sent
        # to all primaries.
        missing = self._exchanges.take_back()
        for layer, kept in self._kept.items():
            before = sorted((route.first, route.stop, route.pages.primary) for route in old_routes.get(layer, ()))
            for route in self._routes.get(layer, ()):
                was = _primary_at(before, route.first, route.stop)
                if was == self.rank:  # this worker was the primary: this part of its sums went into its own trees
                    continue
                again = was != route.pages.primary or route.pages.primary in unsure
                for node, buffer in kept:
                    if again or (layer, node) in missing:
                        self._emit_part(current, route, node, buffer, mine=False)
        for use in handed_over:
            self._kept.pop(use, None)  # the part of these sums that was this primary's is in the trees that were sent
        early, self._early = self._early, {}
        for message, payload in early.items():
            self.node_received(message, payload)
        self._keeps_all = False  # all sums that the StepReport named are now where the new configuration needs them

    def keep_all(self) -> None:
        """Give up no sum until the next `enter_epoch`: a StepReport has named the sums that are here."""
        self._keeps_all = True

    def _split_reductions(self, replica_map: ReplicaMap) -> set[int]:
        """Cut this primary's reductions as page ranges were cut, and send the parts that have another primary now.

        Returns:
            The layers whose sums went into trees that were sent.
        """
        handed_over: set[int] = set()
        by_layer = {layer: list(ranges) for layer, ranges in replica_map.items()}
        for step, reductions in self._steps.items():
            for key, reduction in list(reductions.items()):
                parts = [r for r in by_layer.get(key[0], ()) if key[1] <= r.first and r.stop <= key[2]]
                if [r.key for r in parts if r.primary == self.rank] == [key]:
                    continue
                del reductions[key]
                whole_start, _ = self._layout.layers[key[0]].span(key[1], key[2])
                for pages in parts:
                    start, stop = self._layout.layers[pages.layer].span(pages.first, pages.stop)
                    part = reduction.part(start - whole_start, stop - whole_start)
                    if pages.primary == self.rank:
                        reductions[pages.key] = part
                    else:
                        self._send_reduction(step, pages, part)
                        handed_over.update(uses_of(self._layout, pages))
        return handed_over

    def _send_reduction(self, step: int, pages: ReplicaSet, reduction: RangeReduction) -> None:
        for use, node, value in reduction.sums():
            first = first_page_of_use(self._layout, pages, use)
            message = PartialSum(step, use, first, first + pages.stop - pages.first, *node)
            self._send(pages.primary, message, value)

    # ---- this worker's own micro-batches

    def begin_step(self, step: int, microbatches: Iterable[int]) -> None:
        """Begin a step, in which this worker adds up these micro-batches as far as the tree allows.

        Called again in the middle of a step that is recovered, with the micro-batches that were added up so far and
        those that are still to come. A sum that was to be added to a micro-batch which another worker computes now is
        sent as it is.
        """
        self._exchanges.begin(step)
        self._final = frozenset(maximal_nodes(microbatches, self._form.num_microbatches))
        for layer, (_, buffers) in self._local.items():
            for node in [n for n in buffers if not self._grows(n)]:
                self._emit(step, layer, node, buffers.pop(node))

    def _grows(self, node: Node) -> bool:
        """True if this worker will add further micro-batches to the sum of this node."""
        return node not in self._final and any(f[0] <= node[0] and node[1] <= f[1] for f in self._final)

    @property
    def has_sums(self) -> bool:
        """True if anything of the step under way was added up or kept here."""
        return bool(self._local or self._kept)

    def begin_microbatch(
        self, layer: int, microbatch: int, *, alone: bool = False, own_leaf: bool = False
    ) -> tuple[GradientBuffer, bool]:
        """The buffer for a micro-batch's gradient of a layer, and whether to add to it (True) or to overwrite it.

        Autograd adds straight into the buffer of the sibling in the tree where that gives the same bits, which saves a
        buffer and a pass over it.

        Args:
            alone: do not add this micro-batch to others here, as it was another worker's or is computed again.
            own_leaf: keep its gradient apart until `end_microbatch`, since the caller makes digests of it.
        """
        if (pool := self._pools.get(layer)) is None:
            pool = self._pools[layer] = GradientPool(self._layout.layers[layer], self._device.place)
        leaf = (microbatch, microbatch + 1)
        if alone:
            self._leaf_alone = pool.acquire()
            return self._leaf_alone, False
        if layer not in self._local:
            self._local[layer] = Reduction(self._form.num_microbatches), {}
        _, buffers = self._local[layer]
        # In fp32 compute, autograd's += into the sibling's buffer is the very addition that the tree would make.
        own_leaf = own_leaf or (self._observer is not None and self._observer.looks_at(layer))
        other: GradientBuffer | None = None
        if self._form.add_in_place and leaf not in self._final and not own_leaf:
            half = sibling(leaf, self._form.num_microbatches)
            other = None if half is None else buffers.get(half)
        buffer = buffers[leaf] = other or pool.acquire()
        # A pooled buffer should be zero between its parameters, where nothing is written. If this worker has added
        # wrongly before, it may not be; and what is compared with others includes these elements.
        if own_leaf:
            buffer.flat.zero_()
        return buffer, other is not None

    def end_microbatch(self, step: int, layer: int, microbatch: int, *, alone: bool = False) -> None:
        """The micro-batch's gradient is in its buffer: add what the tree allows, and send nodes that are complete."""
        node = (microbatch, microbatch + 1)
        buffers = self._local[layer][1] if not alone else {node: self._leaf_alone}
        if self._observer is not None:
            self._observer.computed(step, layer, microbatch, buffers[node])
        if alone:
            self._complete(step, layer, node, self._leaf_alone)
            return
        reduction, buffers = self._local[layer]
        added = reduction.add(node)
        assert added is not None, f"micro-batch {microbatch} of layer {layer} was computed twice in step {step}"
        for merge in added.merges:
            left, right = buffers.pop(merge.left), buffers.pop(merge.right)
            if left is not right:  # otherwise autograd has added them already (begin_microbatch)
                left.flat.add_(right.flat)
                self._pools[layer].release(right)
            buffers[merge.into] = left
            node = merge.into
        if node in self._final:
            self._complete(step, layer, node, buffers.pop(node))

    def _complete(self, step: int, layer: int, node: Node, buffer: GradientBuffer) -> None:
        """Show a sum that cannot grow any more on this worker to the observer, and send it."""
        if self._observer is not None:
            self._observer.summed(step, layer, node, buffer)
        self._emit(step, layer, node, buffer)

    def drop_microbatch(self, layer: int) -> None:
        """Drop the weight gradient of a micro-batch that was run only for the gradient of its input."""
        self._pools[layer].release(self._leaf_alone)

    def _emit(self, step: int, layer: int, node: Node, buffer: GradientBuffer) -> None:
        """Send a node that is complete on this worker to the primaries of its pages, or leave it to an exchange.

        An exchange takes only the parts for other members of the stage. The part for this worker itself and those for
        primaries in other stages do not go through it.
        """
        exchanged = self._exchanges.takes(step, layer, node)
        gives_up = self._form.sharded and not self._keeps_all and not exchanged
        if not gives_up:  # if the micro-batch was computed again, its sum replaces the older one of the same node
            kept = self._kept.get(layer, [])
            self._kept[layer] = [*(one for one in kept if one[0] != node), (node, buffer)]
        for route in self._routes[layer]:
            if not (exchanged and self._exchanges.reaches(route.pages.primary)):
                self._emit_part(step, route, node, buffer, mine=True)
        if exchanged:
            self._exchanges.add(layer, node, buffer)
            if self._form.sharded:
                self._count(4 * buffer.flat.numel())
        if gives_up:
            self._give_up(layer, buffer, self._routes[layer])

    def _give_up(self, layer: int, buffer: GradientBuffer, sent: Sequence[Route]) -> None:
        """Give up a sum that is not needed here any more.

        Args:
            sent: the routes of its parts that were sent over links from this memory, and may still be on their way.
        """
        stays = [route.pages.primary for route in self._routes[layer]] == [self.rank]
        if not stays and (self._form.copies_payloads or not sent):
            self._pools[layer].release(buffer)
        else:
            # The memory is freed when nothing refers to it any more: until then messages on their way, and this
            # worker's own trees, do. It must not be used again before.
            self._pools[layer].remove(buffer)

    def _count(self, num_bytes: int) -> None:
        self._sum_bytes += num_bytes
        self._peak_sum_bytes = max(self._peak_sum_bytes, self._sum_bytes)

    def _emit_part(self, step: int, route: Route, node: Node, buffer: GradientBuffer, *, mine: bool) -> None:
        """Send one page range's part of a node to its primary, or add it to this worker's own trees.

        Args:
            mine: if this worker is the primary, the tree may overwrite the part. False: the sum was sent before and
                is kept.
        """
        part = buffer.pages(route.first, route.stop)
        if route.pages.primary != self.rank:
            self._send(route.pages.primary, PartialSum(step, route.layer, route.first, route.stop, *node), part)
            return
        if mine and self._form.sharded and len(self._routes[route.layer]) > 1:
            part = part.clone()  # a slice would keep the whole layer's buffer alive after the other parts are sent
        self._add(step, route.pages, route.layer, [(node, Term(part, owned=mine))])

    # ---- the nodes of all workers, at the primary

    def node_received(self, message: PartialSum, payload: Tensor) -> None:
        """Add a node's sum that another worker has sent. Ignored if its step is decided already.

        The sum may be cut as page ranges were in an older configuration: then it is for a union of ranges of this one.
        Or its sender has entered a newer configuration first: then this worker may not be the primary of these pages
        yet, or they may be one range there and several here. So unless a message is for exactly one range of this
        primary, the parts that fit are added, and the whole is kept for the next configuration.
        """
        if message.step <= self.applied_step:
            return
        layout = self._layout.layers[message.layer]
        ranges = [(a, a + pages.stop - pages.first, pages) for a, pages in self._ranges_by_use.get(message.layer, ())]
        inside = [(a, b, pages) for a, b, pages in ranges if message.first <= a and b <= message.stop]
        if [(a, b) for a, b, _ in inside] != [(message.first, message.stop)]:
            self._early[message] = payload  # kept whole: the parts that are used now are ignored the second time
        start, _ = layout.span(message.first, message.stop)
        for a, b, pages in inside:
            first, stop = layout.span(a, b)
            whole = (a, b) == (message.first, message.stop)
            part = payload if whole else payload[first - start : stop - start]
            self._add(message.step, pages, message.layer, [((message.lo, message.hi), Term(part, owned=False))])

    def _add(self, step: int, pages: ReplicaSet, use: int, nodes: Sequence[tuple[Node, Term]]) -> None:
        reductions = self._steps.setdefault(step, {})
        if pages.key not in reductions:
            reductions[pages.key] = RangeReduction(self._uses[pages.key], self._form.num_microbatches, self._device)
        reduction = reductions[pages.key]
        if reduction.done:
            return
        before = reduction.num_bytes
        gradient = reduction.add(use, nodes)
        self._count((reduction.num_bytes if gradient is None else 4 * gradient.numel()) - before)
        if gradient is not None:
            self._gradient_done(step, pages, gradient)

    # ---- what comes through the group of the stage

    def exchanged(self, exchange: Exchange, values: Tensor) -> list[ReducedPages]:
        """An exchange is complete here: add the sums that have come, and give up own sums that all members now have.

        Args:
            values: what the members have sent to this worker, fp32, in the order of their ranks in the group.

        Returns:
            The reduced gradients that have come; none for an exchange of sums.
        """
        plan, step = self._exchanges.plan, self._exchanges.step
        # The group has failed since. No member may count this exchange as complete here, so links bring its contents.
        if not step:
            return []
        assert plan is not None and step == self.applied_step + 1, (step, self.applied_step)
        for layer_sum in self._exchanges.complete():
            self._known_everywhere(layer_sum)
        if isinstance(exchange, GradientExchange):
            return plan.gradients(exchange, values)
        came: dict[Route, list[tuple[Node, Term]]] = {}
        for node, route, part in plan.parts(exchange, values):
            came.setdefault(route, []).append((node, Term(part, owned=False)))
        for route, nodes in came.items():
            if route.pages.primary == self.rank:
                self._add(step, route.pages, route.layer, nodes)
        if exchange.way is Way.WITHIN_HOSTS:
            self._collect(step, plan, exchange, came)
        reductions = self._steps.get(step, {})
        # A sum that still waits for others is copied: as a slice it would keep the memory of the whole exchange alive.
        for route, nodes in came.items():
            if (reduction := reductions.get(route.pages.key)) is not None:
                for node, _ in nodes:
                    reduction.own(route.layer, node)
        return []

    def _collect(
        self, step: int, plan: ExchangePlan, exchange: SumExchange, came: Mapping[Route, list[tuple[Node, Term]]]
    ) -> None:
        """Add up the sums of this worker's host for primaries on other hosts, as far as the tree allows (E8)."""
        for route in plan.collects(exchange.layer):
            own = self._exchanges.own_sums(exchange, route)
            nodes = [*((node, Term(value, owned=False)) for node, value in own), *came.get(route, ())]
            tree = Tree(self._device, Reduction(self._form.num_microbatches))
            tree.add(nodes)
            passed = {node for node, _ in nodes} & tree.sums.keys()
            for node in passed:  # as slices they would keep the memory of the whole exchange alive
                tree.own(node)
            sums = {node: term.values for node, term in tree.sums.items()}
            # Only sums that are added here are this worker's. Its maker answers for a sum that just passes through.
            if self._observer is not None:
                made = [node for node in sums if node not in passed]
                sums |= {node: self._observer.collected(step, route, node, sums[node]) for node in made}
            self._exchanges.collect(exchange, route, sums)

    def _known_everywhere(self, layer_sum: LayerSum) -> None:
        """All members have completed the exchange of this sum: give it up.

        It is kept all the same if gradients are replicated, or if a StepReport has named it.
        """
        layer, node = layer_sum
        if not self._form.sharded or self._keeps_all:
            return
        kept = self._kept[layer]
        (at,) = (i for i, (other, _) in enumerate(kept) if other == node)
        _, buffer = kept.pop(at)
        self._sum_bytes -= 4 * buffer.flat.numel()
        by_link = [r for r in self._routes[layer] if r.pages.primary != self.rank]
        self._give_up(layer, buffer, [r for r in by_link if not self._exchanges.reaches(r.pages.primary)])

    def send_returned(self) -> None:
        """The group has failed within the mesh epoch: send the sums that it may not have brought over links (E4)."""
        step = self.applied_step + 1
        for (layer, node), buffer in self._exchanges.take_back().items():
            for route in self._routes[layer]:
                if self._exchanges.reaches(route.pages.primary):
                    self._emit_part(step, route, node, buffer, mine=False)

    def gradient_known(self, step: int, pages: PageRange) -> None:
        """The reduced gradient of this primary's pages has come from a mirror: no node of its tree is needed now."""
        if pages in self._uses:
            reduction = self._steps.setdefault(step, {}).setdefault(
                pages, RangeReduction(self._uses[pages], self._form.num_microbatches, self._device)
            )
            reduction.finish()

    def step_decided(self, step: int) -> None:
        """The step is decided and applied here. All buffers may be used again: by its vote every member has said that
        it has received what it needs of the step (S5)."""
        self.applied_step = step
        self._exchanges.forget()
        self._steps.pop(step, None)
        self._early = {message: payload for message, payload in self._early.items() if message.step > step}
        self._sum_bytes = sum(reduction.num_bytes for later in self._steps.values() for reduction in later.values())
        self._local.clear()
        self._kept.clear()
        # The buffers of layers that have moved to another stage go now. Until now sums of them might have had to be
        # sent again.
        self._pools = {layer: pool for layer, pool in self._pools.items() if layer in self._layers}
        for pool in self._pools.values():
            pool.release_all()

    def drop_undecided(self) -> None:
        """Drop everything of undecided steps: the sums of this worker and those of other workers."""
        for table in (self._local, self._kept, self._steps):
            table.clear()
        self._exchanges.forget()
        self._early = {}
        self._final = frozenset()
        self._sum_bytes = 0
        self._pools.clear()  # messages under way may refer to its buffers, and their memory may be bad

    # ---- reports

    @property
    def gives_up(self) -> bool:
        """True if sums are given up once they are sent: gradients are sharded."""
        return self._form.sharded

    def layer_sums(self) -> dict[int, tuple[Node, ...]]:
        """Layer -> the tree nodes of the step under way whose sums are kept here, each of the whole layer."""
        # A recovery may have given a micro-batch again to the worker that had computed it. Then its sum is here twice,
        # and is named once.
        found: dict[int, set[Node]] = {layer: {node for node, _ in kept} for layer, kept in self._kept.items()}
        for layer, (_, buffers) in self._local.items():
            found.setdefault(layer, set()).update(buffers)
        return {layer: tuple(sorted(nodes)) for layer, nodes in found.items() if nodes}

    def page_sums(self, step: int, *, current: bool) -> tuple[tuple[int, int, int, int, tuple[Node, ...]], ...]:
        """(layer, first, stop, use, nodes) of the unfinished trees at this primary.

        Args:
            current: the step is the one under way. Then this worker's own open sums, which are not in the trees yet,
                count as well.
        """
        found = []
        for pages in self._primary:
            reduction = self._steps.get(step, {}).get(pages.key)
            if reduction is not None and reduction.done:
                continue
            for use in self._uses[pages.key]:
                nodes = set(reduction.nodes_of(use)) if reduction is not None else set[Node]()
                if current and use in self._local:
                    nodes.update(self._local[use][1])  # a lost worker may have sent the same node: it is named once
                if nodes:
                    found.append((*pages.key, use, tuple(sorted(nodes))))
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients kept within a step, at the peak.

        Replicated gradients: the full-size buffers of all open nodes. Sharded gradients: the sums of this worker's own
        pages, and whole layer sums that were given to the group and may still be missing somewhere. Not counted are one
        layer's buffer at a time, on its way from the layer's backward to the primaries, and the sums of up to two
        layers that are collected on a host for other hosts.
        """
        return self._peak_sum_bytes if self._form.sharded else sum(pool.num_bytes for pool in self._pools.values())


def first_page_of_use(layout: ModelLayout, pages: ReplicaSet, use: int) -> int:
    """The page at which a page range begins in the gradient buffer of `use`, a layer that owns or reads it."""
    if use == pages.layer:
        return pages.first
    block = layout.layers[pages.layer].block_of(pages.first)
    reader = next(b for layer, b in layout.readers[pages.layer, block.first_page] if layer == use)
    return pages.first - block.first_page + reader.first_page


def _by_use(layout: ModelLayout, ranges: Iterable[ReplicaSet]) -> dict[int, list[tuple[int, ReplicaSet]]]:
    """Layer -> (first page in that layer, page range) of the ranges to which gradients of the layer are added."""
    found: dict[int, list[tuple[int, ReplicaSet]]] = {}
    for pages in ranges:
        for use in uses_of(layout, pages):
            found.setdefault(use, []).append((first_page_of_use(layout, pages, use), pages))
    return {use: sorted(starts, key=lambda start: start[0]) for use, starts in found.items()}


def _primary_at(before: Sequence[tuple[int, int, int]], first: int, stop: int) -> int | None:
    """The primary of the older page range that pages [first, stop) were part of; None if they were part of none.

    Args:
        before: (first, stop, primary) of all older page ranges of the layer, ascending.
    """
    at = bisect_right(before, first, key=itemgetter(0)) - 1
    return before[at][2] if at >= 0 and stop <= before[at][1] else None


def uses_of(layout: ModelLayout, pages: ReplicaSet) -> tuple[int, ...]:
    """The layers whose gradients add up to the reduced gradient of a page range, in layer order: two for a tie."""
    return layout.uses_of(pages.layer, pages.first)


@dataclass
class Tree:
    """One reduction tree at a primary: the nodes that it has, and their sums.

    Args:
        device: the device that the sums lie on, which makes the additions.
        reduction: which nodes are here, and which additions they allow.
        sums: node -> its sum, fp32 [elements]. A sum that is not `owned` lies in memory that others still read: it must
            not be overwritten.
    """

    device: Device
    reduction: Reduction
    sums: dict[Node, Term] = field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        """Elements of all sums."""
        return sum(term.values.numel() for term in self.sums.values())

    def add(self, nodes: Iterable[tuple[Node, Term]]) -> None:
        """Add the sums of nodes, and do the additions that they allow. Nodes that are covered already are ignored."""
        asked: dict[Node, Terms] = {}  # additions are collected first, so that the device can make several at once
        for node, term in nodes:
            added = self.reduction.add(node)
            if added is None:
                continue
            for old in added.superseded:
                self._take(old, asked)
            asked[node] = term
            for merge in added.merges:
                asked[merge.into] = self._take(merge.left, asked), self._take(merge.right, asked)
        for node, terms in asked.items():
            is_one = isinstance(terms, Term)
            self.sums[node] = terms if is_one else Term(self.device.add_up(terms), owned=True)

    def _take(self, node: Node, asked: dict[Node, Terms]) -> Terms:
        return asked.pop(node) if node in asked else self.sums.pop(node)

    def own(self, node: Node) -> None:
        """Copy a node's sum to memory of its own, if it lies in memory of others."""
        if node in self.sums and not self.sums[node].owned:
            self.sums[node] = Term(self.sums[node].values.clone(), owned=True)


class RangeReduction:
    """The trees of one page range at its primary: one per use of the parameters (two for a tie), in layer order.

    Args:
        uses: the layers whose gradients are added up.
        num_microbatches: the number of micro-batches of a step.
        device: the device that all sums lie on.
    """

    def __init__(self, uses: Sequence[int], num_microbatches: int, device: Device) -> None:
        self._trees = {use: Tree(device, Reduction(num_microbatches)) for use in sorted(uses)}
        self._root = (0, num_microbatches)
        self._device = device
        self.done = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums held."""
        return sum(4 * tree.num_elements for tree in self._trees.values())

    def add(self, use: int, nodes: Iterable[tuple[Node, Term]]) -> Tensor | None:
        """Add sums of nodes. Returns the reduced gradient when every use's tree has its root; None before and after."""
        self._trees[use].add(nodes)
        if self.done or not all(tree.reduction.done for tree in self._trees.values()):
            return None
        self.done = True
        roots: list[Terms] = [tree.sums.pop(self._root) for tree in self._trees.values()]
        self._trees.clear()
        return self._device.add_up(reduce(lambda left, right: (left, right), roots))

    def finish(self) -> None:
        """Drop all sums: the reduced gradient has come in another way."""
        self.done = True
        self._trees.clear()

    def own(self, use: int, node: Node) -> None:
        """Copy a node's sum to memory of its own, unless the node has been added to others already."""
        if use in self._trees:
            self._trees[use].own(node)

    def nodes_of(self, use: int) -> tuple[Node, ...]:
        """The nodes of one use's tree."""
        return tuple(self._trees[use].sums) if use in self._trees else ()

    def sums(self) -> Iterator[tuple[int, Node, Tensor]]:
        """(use, node, sum) of all sums held."""
        for use, tree in self._trees.items():
            for node, term in tree.sums.items():
                yield use, node, term.values

    def part(self, start: int, stop: int) -> RangeReduction:
        """The trees of elements [start, stop) alone, as slices of the same memory."""
        found = RangeReduction(tuple(self._trees), self._root[1], self._device)
        found.done = self.done
        for use, tree in self._trees.items():
            sums = {node: Term(term.values[start:stop], term.owned) for node, term in tree.sums.items()}
            found._trees[use] = Tree(self._device, Reduction(self._root[1], set(tree.reduction.held)), sums)
        return found
