"""The checks of sums on one worker: pages whose gradients it adds up as well, and what it sends to other checkers.

`recovery.sum_checks` says which these are. In a drawn layer every micro-batch's gradient has a buffer of its own until
it is added to others, and goes to the checkers page range by page range. A checker adds up all of them, and compares
with the reduced gradient that the primary sends it as a mirror. Its vote waits until they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, split
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.sum_checks import are_drawn, checker_of, drawn_ranges, sums_of
from elaswave_spmd.runtime.devices.sums import Term
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.context import WorkerHooks
from elaswave_spmd.worker.digests import Digester, with_one_nan
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.gradient_reduction import RangeReduction, first_page_of_use, uses_of
from elaswave_spmd.worker.gradient_routes import Route, routes
from elaswave_spmd.worker.page_norms import page_norm_values
from elaswave_spmd.worker.stage_boundary import Send
from elaswave_spmd.worker.sum_exchange import sums_of_hosts

Result = tuple[Tensor, bytes]
"""A reduced gradient, and the norm values of its pages."""


@dataclass
class _Check:
    """Page ranges whose gradient this worker adds up as well.

    Args:
        reduction: of the micro-batches that have come.
        added: its own result; `given`: that of the primary.
        is_settled: both were the same, or the controller has accepted them.
        has_agreed: both were the same.
    """

    pages: ReplicaSet
    reduction: RangeReduction
    added: Result | None = None
    given: Result | None = None
    is_settled: bool = False
    has_agreed: bool = False
    is_reported: bool = False


@dataclass
class _Again:
    """Page ranges whose gradient the controller has this worker add up once more."""

    pages: ReplicaSet
    request: m.AddAgain
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (use, micro-batch) ->


@dataclass
class _Step:
    """The checks of the step under way, as far as they concern this worker.

    Args:
        routes: layer -> the routes of its gradient that go to checkers.
        checks: by pages.
        keys: (use, first page, stop page in that layer's gradient buffer) -> pages.
    """

    number: int = 0
    epoch: int = 0
    routes: Mapping[int, Sequence[Route]] = field(default_factory=dict)
    checks: Mapping[PageRange, _Check] = field(default_factory=dict)
    keys: Mapping[PageRange, PageRange] = field(default_factory=dict)


class SumChecks:
    """The checks of one step after another, from configuration to configuration.

    Args:
        rank: of this worker.
        layout: the pages.
        draw: what is checked in each step.
        digester: on the worker's device.
        hooks: faults are injected by them.
        send: to other workers and the controller.
        collects: workers may add up sums of their host (`runtime.collectives=group`): these are told, too.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        draw: CheckDraw,
        digester: Digester,
        hooks: WorkerHooks,
        send: Send,
        *,
        collects: bool = False,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._draw = draw
        self._digester = digester
        self._hooks = hooks
        self._send = send
        self._collects = collects
        self._placement: Placement
        self._replica_map: ReplicaMap = {}
        self._layers: range = range(0)
        self._decided = 0
        self._step = _Step()
        self._leaves: dict[tuple[PageRange, int], tuple[Route, Tensor]] = {}  # own gradients that were sent, and
        self._sums: dict[tuple[PageRange, Node], tuple[Route, bytes]] = {}  # digests of own sums, and of the host's
        self._came: dict[tuple[int, m.Addend], Tensor] = {}  # (sender, message) -> of this step and later ones
        self._again: dict[PageRange, _Again] = {}
        self.num_made = 0
        """The page ranges that this worker has added up as checks."""

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap, version: int) -> None:
        """Take part in a newer configuration."""
        self._placement = placement
        self._replica_map = replica_map
        self._layers = placement.layers_of_stage(placement.mesh.stage_of(self._rank))
        self._decided = max(self._decided, version)

    def begin(self, step: int) -> None:
        """Begin a step, or another attempt of it, that runs as it is placed. `gradient` follows for what is here."""
        self._forget_sent()
        if not self._draw.rate:
            return
        mine = [
            pages
            for pages, checker in drawn_ranges(self._draw, step, self._layout, self._replica_map)
            if checker == self._rank
        ]
        # A worker that has nothing of its own to compute may have begun the step in an older mesh epoch, and added what
        # members of this one have sent since. They do not send it again.
        before = self._step.checks if step == self._step.number else {}
        checks = {pages.key: self._new_check(pages, before.get(pages.key)) for pages in mine}
        self._step = _Step(
            step,
            self._placement.mesh.epoch,
            {layer: self._drawn_routes(step, layer) for layer in self._layers},
            checks,
            {at: check.pages.key for check in checks.values() for at in self._places_of(check.pages)},
        )
        self._came = {key: payload for key, payload in self._came.items() if key[1].step >= step}
        for (sender, message), payload in list(self._came.items()):
            self._take(sender, message, payload)

    def _new_check(self, pages: ReplicaSet, before: _Check | None) -> _Check:
        """A check of pages with what came for it `before`, if the step was begun already. `gradient` follows."""
        if before is None:
            uses, device = uses_of(self._layout, pages), self._digester.device
            return _Check(pages, RangeReduction(uses, self._placement.num_microbatches, device))
        return _Check(
            pages, before.reduction, added=before.added, is_settled=before.is_settled, has_agreed=before.has_agreed
        )

    def _drawn_routes(self, step: int, layer: int) -> tuple[Route, ...]:
        """The routes of a layer's gradient to checked pages: its own, and those of parameters that it reads."""
        sources = {layer, *(block.source[0] for block in self._layout.layers[layer].reader_blocks if block.source)}
        drawn = {source for source in sources if are_drawn(self._draw, step, source)}
        found = routes(self._layout, self._replica_map, layer) if drawn else ()
        return tuple(route for route in found if route.pages.layer in drawn)

    @property
    def step(self) -> int:
        """The step that was begun last; 0 if it is not checked any more."""
        return self._step.number

    def forget(self) -> None:
        """Give up everything of the step under way, and of later ones: it is recovered, or begins anew."""
        self._step = _Step()
        self._forget_sent()
        self._came.clear()

    def decided(self, step: int) -> None:
        """The step is applied: nobody asks for its sums any more."""
        self._decided = step
        if step >= self._step.number:
            self._forget_sent()
        self._came = {key: payload for key, payload in self._came.items() if key[1].step > step}

    def _forget_sent(self) -> None:
        self._leaves.clear()
        self._sums.clear()
        self._again.clear()

    # ---- this worker's own micro-batches

    def looks_at(self, layer: int) -> bool:
        """True if sums of a layer's gradients are checked: each micro-batch's is to have a buffer of its own."""
        return bool(self._step.routes.get(layer))

    def computed(self, step: int, layer: int, microbatch: int, gradient: GradientBuffer) -> None:
        """A micro-batch's gradient is made, and not added to another one yet: it goes to the checkers."""
        if step != self._step.number or not self.looks_at(layer):
            return
        for route in self._step.routes[layer]:
            part = gradient.pages(route.first, route.stop).clone()
            self._leaves[(layer, route.first, route.stop), microbatch] = route, part
            self._give(checker_of(step, route.pages), m.Addend(step, layer, route.first, route.stop, microbatch), part)

    def summed(self, step: int, layer: int, node: Node, gradient: GradientBuffer) -> None:
        """A sum of this worker's micro-batches is complete, and is about to be sent to primaries."""
        if (wrong := self._hooks.computed(FaultPoint.SUM, step, gradient.flat)) is not gradient.flat:
            gradient.flat.copy_(wrong)
        if step == self._step.number and self.looks_at(layer):
            for route in self._step.routes[layer]:
                digest = self._digester.digest_of_sum(gradient.pages(route.first, route.stop))
                self._sums[(layer, route.first, route.stop), node] = route, digest
        self._hooks.on_point(FaultPoint.SUM, step)

    def collected(self, step: int, route: Route, node: Node, value: Tensor) -> Tensor:
        """A sum of this worker's host is complete, for a primary on another one. Returns what is sent to it."""
        value = self._hooks.computed(FaultPoint.SUM, step, value)
        if step == self._step.number and route in self._step.routes.get(route.layer, ()):
            self._sums[(route.layer, route.first, route.stop), node] = route, self._digester.digest_of_sum(value)
        return value

    def _give(self, receiver: int, message: m.Addend, part: Tensor) -> None:
        if receiver != self._rank:
            self._send(receiver, message, part)
            return
        self._came[self._rank, message] = part
        self._take(self._rank, message, part)

    # ---- checks of this worker

    @property
    def is_settled(self) -> bool:
        """True if all checks of this worker have agreed: it may vote."""
        return all(check.is_settled for check in self._step.checks.values())

    def draws(self, step: int, layer: int) -> bool:
        """True if the reduced gradients of a layer's own pages are checked in a step that runs as it is placed."""
        return are_drawn(self._draw, step, layer)

    def has_checked(self, step: int, pages: PageRange) -> bool:
        """True if this worker has added these pages up as well, and has got what their primary has."""
        check = self._step.checks.get(pages) if step == self._step.number else None
        return check is not None and check.has_agreed

    def received(self, sender: int, message: m.Addend, payload: Tensor) -> None:
        """File the gradient of another worker's micro-batch."""
        # Its attempt is the present one, and what is sent of it has the same name.
        if message.step > self._decided:
            message = m.Addend(*(getattr(message, name) for name in message.__struct_fields__[:-1]))
            self._came[sender, message] = payload
            self._take(sender, message, payload)

    def gradient(self, step: int, pages: PageRange, gradient: Tensor, norms: Sequence[float]) -> None:
        """The reduced gradient of held pages is here, from their primary or made as such."""
        check = self._step.checks.get(pages) if step == self._step.number else None
        if check is not None and check.given is None and not check.is_settled:
            check.given = gradient, _as_bytes(norms)
            self._judge(check)

    def accepted(self, message: m.SumAccepted) -> None:
        """The step goes on with what was added up, right or not."""
        check = self._step.checks.get((message.layer, message.first, message.stop))
        if message.step == self._step.number and check is not None:
            check.is_settled = True

    def _take(self, sender: int, message: m.Addend, payload: Tensor) -> None:
        """Add a micro-batch's gradient to what is checked, if it comes from the micro-batch's worker."""
        at, microbatch = (message.layer, message.first, message.stop), message.microbatch
        if message.step != self._step.number or sender != self._worker_of(message.layer, microbatch):
            return
        if message.again:
            for again in self._again.values():
                if at in self._places_of(again.pages):
                    again.gradients[message.layer, microbatch] = payload
                    self._add_again(again)
                    return
        elif (key := self._step.keys.get(at)) is not None and not (check := self._step.checks[key]).reduction.done:
            node = (microbatch, microbatch + 1)
            gradient = check.reduction.add(message.layer, [(node, Term(payload, owned=False))])
            del self._came[sender, message]
            if gradient is not None:
                self.num_made += 1
                check.added = self._result(check.pages, gradient)
                self._judge(check)

    def _worker_of(self, use: int, microbatch: int) -> int:
        return self._placement.worker_of_microbatch(self._placement.stage_of_layer(use), microbatch)

    def _places_of(self, pages: ReplicaSet) -> list[PageRange]:
        """The pages in the gradient buffers of the layers that have a part in them: two for a tied parameter."""
        firsts = ((use, first_page_of_use(self._layout, pages, use)) for use in uses_of(self._layout, pages))
        return [(use, first, first + pages.num_pages) for use, first in firsts]

    def _result(self, pages: ReplicaSet, gradient: Tensor) -> Result:
        gradient = self._hooks.computed(FaultPoint.NORM, self._step.number, gradient)
        is_loss = self._layout.layers[pages.layer].block_of(pages.first).kind == LOSS
        return gradient, b"" if is_loss else _as_bytes(page_norm_values(gradient, self._layout.page_size))

    def _judge(self, check: _Check) -> None:
        """Note whether both results are the same; tell the controller, once, if they are not."""
        if check.added is None or check.given is None or check.is_settled or check.is_reported:
            return
        added, given = check.added, check.given
        if added[1] == given[1] and _are_same(added[0], given[0]):
            check.is_settled, check.has_agreed, check.added, check.given = True, True, None, None
            return
        check.is_reported = True
        results = self._digested(given), self._digested(added)
        at = self._rank, self._step.epoch, self._step.number
        self._send(CONTROLLER, m.SumsDiffer(*at, *check.pages.key, check.pages.primary, *results))

    def _digested(self, result: Result) -> m.SumResult:
        gradient, norms = result
        return self._digester.digest_of_sum(gradient), norms

    # ---- once more

    def asked(self, message: m.AddAgain, own: tuple[Tensor, Sequence[float]] | None) -> None:
        """Results differ: tell what this worker had made, send its gradients, and add up all of them if it is asked.

        Args:
            own: the reduced gradient and its norms, if this worker is the primary of the pages.
        """
        key = message.layer, message.first, message.stop
        made = ((use, node, made) for ((use, _, _), node), made in self._sums.items())
        sums = [(use, *node, digest) for use, node, (route, digest) in made if route.pages.key == key]
        results = () if own is None else (self._digested((own[0], _as_bytes(own[1]))),)
        if sums or results:
            self._report(message, tuple(sorted(sums)), results, again=False)
        if self._rank in message.ranks:
            self._begin_again(message, key)
        for ((use, first, stop), microbatch), (route, part) in self._leaves.items():
            if route.pages.key == key:
                for rank in message.ranks:
                    self._give(rank, m.Addend(message.step, use, first, stop, microbatch, True), part)

    def _begin_again(self, message: m.AddAgain, key: PageRange) -> None:
        rows = self._placement.replica_map(self._layout)[message.layer]
        pages = next((pages for pages in rows if pages.key == key), None)
        if pages is not None:
            self._again[key] = _Again(pages, message)
            for (sender, came), payload in list(self._came.items()):
                if came.again:
                    self._take(sender, came, payload)

    def _add_again(self, again: _Again) -> None:
        """With the gradients of all micro-batches add them up, and report all sums on the way."""
        number, uses = self._placement.num_microbatches, uses_of(self._layout, again.pages)
        if len(again.gradients) < number * len(uses):
            return
        del self._again[again.pages.key]
        rows: list[m.SumRow] = []
        roots: list[Tensor] = []
        for use in uses:
            wanted = {node for _, node in sums_of(self._placement, use)}
            if self._collects:
                wanted |= sums_of_hosts(self._placement, use)
            leaves = [again.gradients[use, microbatch] for microbatch in range(number)]
            roots.append(self._sum(use, (0, number), leaves, wanted, rows))
        total = roots[0]
        for root in roots[1:]:
            total = total + root
        result = self._digested(self._result(again.pages, total))
        self._report(again.request, tuple(sorted(rows)), (result,), again=True)

    def _sum(self, use: int, node: Node, leaves: Sequence[Tensor], wanted: set[Node], rows: list[m.SumRow]) -> Tensor:
        lo, hi = node
        if hi - lo == 1:
            value = leaves[lo]
        else:
            halves = (lo, split(node)), (split(node), hi)
            left, right = (self._sum(use, half, leaves, wanted, rows) for half in halves)
            value = left + right
        if node in wanted:
            value = self._hooks.computed(FaultPoint.SUM, self._step.number, value)
            rows.append((use, lo, hi, self._digester.digest_of_sum(value)))
        return value

    def _report(
        self, request: m.AddAgain, sums: tuple[m.SumRow, ...], results: tuple[m.SumResult, ...], *, again: bool
    ) -> None:
        at = self._rank, request.epoch, request.step, request.layer, request.first, request.stop
        self._send(CONTROLLER, m.AddedUp(*at, again, sums, results))


def _are_same(one: Tensor, other: Tensor) -> bool:
    """True if two sums have the same bits, except for which NaN an element is. Nothing is copied if all are the same.

    Args:
        one: fp32 [elements]; `other` has as many.
    """
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return same or torch.equal(with_one_nan(one).view(torch.int32), with_one_nan(other).view(torch.int32))


def _as_bytes(norms: Sequence[float]) -> bytes:
    """Norms as in ReducedGradient; all numbers that are none have the same bytes."""
    values = np.array(norms, "<f4")
    values[np.isnan(values)] = np.nan
    return values.tobytes()
