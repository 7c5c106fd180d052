"""Checks of sums at workers, without a cluster: what is sent, what is compared, what is told when it differs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, maximal_nodes, split
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.sum_checks import REDUCED_GRADIENT, drawn_ranges, first_different, sums_of
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.layout import LOSS, STATE
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.context import WorkerHooks
from elaswave_spmd.worker.digests import Digester
from elaswave_spmd.worker.gradient_reduction import first_page_of_use
from elaswave_spmd.worker.page_norms import page_norm_values
from elaswave_spmd.worker.sum_checks import SumChecks
from tests.cluster.tiny import TinyRun

STEP = 4
ALL = 10_000  # messages
RUN = TinyRun(tied=True, microbatches=5)
LAYOUT = RUN.description.layout


def uneven(layer: int, members: tuple[int, ...]) -> Iterator[ReplicaSet]:
    """Pages of the second layer apart, those of others together, each with a primary and a mirror of its own."""
    places = itertools.cycle(range(3))
    for block in LAYOUT.layers[layer].blocks:
        if block.kind in (STATE, LOSS):
            stop = block.first_page + block.num_pages
            for first in range(block.first_page, stop) if layer == 1 else (block.first_page,):
                at = next(places)
                held = frozenset({members[at], members[(at + 1) % 3]})
                yield ReplicaSet(layer, first, first + 1 if layer == 1 else stop, members[at], held)


def placed(mesh: str) -> Placement:
    found = place(Mesh.initial(MeshShape.parse(mesh)), LAYOUT, RUN.shardings, RUN.microbatches)
    replicas = {layer: tuple(uneven(layer, found.mesh.members)) for layer in range(len(LAYOUT.layers))}
    return replace(found, replicas=replicas)


@dataclass
class Workers:
    """The checks of all workers, the messages on their way, and what the controller is told."""

    placement: Placement
    rate: float = 1.0
    sent: deque[tuple[int, int, m.Message, Tensor | None]] = field(default_factory=deque)
    told: list[m.Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        digester = Digester(HostDevice(device_of("cpu")))
        draw = CheckDraw(3, self.rate)
        self.leaves: dict[tuple[int, int], GradientBuffer] = {}
        self.checks: dict[int, SumChecks] = {}
        for rank in self.placement.mesh.members:

            def send(peer: int, message: m.Message, payload: Tensor | None = None, rank: int = rank) -> None:
                self.sent.append((rank, peer, message, payload))

            checks = self.checks[rank] = SumChecks(rank, LAYOUT, draw, digester, WorkerHooks(), send)
            checks.enter_epoch(self.placement, self.placement.replica_map(LAYOUT), STEP - 1)
            checks.begin(STEP)

    def compute(self, deliver: int = ALL, *, nan: bool = False) -> None:
        """All workers compute their micro-batches, and send their sums. So many messages arrive.

        Args:
            nan: the first element of each gradient is not a number.
        """
        torch.manual_seed(1)
        for layer in range(len(LAYOUT.layers)):
            for microbatch in range(RUN.microbatches):
                buffer = self.leaves[layer, microbatch] = GradientBuffer(LAYOUT.layers[layer], torch.device("cpu"))
                buffer.flat.normal_()
                if nan:
                    buffer.flat[:1] = torch.nan
                rank = self.placement.worker_of_microbatch(self.placement.stage_of_layer(layer), microbatch)
                self.checks[rank].computed(STEP, layer, microbatch, buffer)
            for rank, node in sums_of(self.placement, layer):
                buffer = GradientBuffer(LAYOUT.layers[layer], torch.device("cpu"))
                buffer.flat.copy_(self.sum(layer, node))
                self.checks[rank].summed(STEP, layer, node, buffer)
        self.deliver(deliver)

    def sum(self, layer: int, node: Node) -> Tensor:
        lo, hi = node
        if hi - lo == 1:
            return self.leaves[layer, lo].flat
        return self.sum(layer, (lo, split(node))) + self.sum(layer, (split(node), hi))

    def reduced(self, pages: ReplicaSet) -> Tensor:
        """The reduced gradient of pages: over both uses of a tied parameter."""
        found = None
        for use in LAYOUT.uses_of(pages.layer, pages.first):
            first = first_page_of_use(LAYOUT, pages, use)
            start, stop = LAYOUT.layers[use].gradient_span(first, first + pages.num_pages)
            part = self.sum(use, (0, RUN.microbatches))[start:stop]
            found = part if found is None else found + part
        assert found is not None
        return found

    def norms(self, pages: ReplicaSet, gradient: Tensor) -> list[float]:
        is_loss = LAYOUT.layers[pages.layer].block_of(pages.first).kind == LOSS
        return [] if is_loss else page_norm_values(gradient, LAYOUT.page_size)

    def deliver(self, number: int = ALL) -> None:
        while self.sent and number > 0:
            number -= 1
            sender, peer, message, payload = self.sent.popleft()
            if peer == CONTROLLER:
                self.told.append(message)
            else:
                assert isinstance(message, m.Addend) and payload is not None
                self.checks[peer].received(sender, message, payload)

    def give_all(self, wrong: PageRange | None = None, *, other_nan: bool = False) -> list[ReplicaSet]:
        """All primaries send their reduced gradients, one of them with another bit.

        Args:
            other_nan: each NaN of theirs has the other sign.
        """
        found = []
        for pages, checker in drawn_ranges(CheckDraw(3, self.rate), STEP, LAYOUT, self.placement.replica_map(LAYOUT)):
            gradient = self.reduced(pages).clone()
            norms = self.norms(pages, gradient)
            if pages.key == wrong:
                gradient.view(torch.int32)[-1] ^= 1
            if other_nan:
                gradient.view(torch.int32)[gradient.isnan()] ^= -(2**31)
            self.checks[checker].gradient(STEP, pages.key, gradient, norms)
            found.append(pages)
        self.deliver()
        return found


@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2", "pp3"])
def test_all_checks_of_uneven_pages_agree_in_the_order_of_the_tree(mesh: str) -> None:
    workers = Workers(placed(mesh))
    assert not all(checks.is_settled for checks in workers.checks.values())
    workers.compute()
    ranges = workers.give_all()
    assert all(checks.is_settled for checks in workers.checks.values()) and not workers.told
    assert sum(checks.num_made for checks in workers.checks.values()) == len(ranges)
    assert any(len(LAYOUT.uses_of(pages.layer, pages.first)) == 2 for pages in ranges)
    assert {pages.num_pages for pages in ranges} == {1, 2}


@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2", "pp3"])
def test_which_nan_a_sum_is_does_not_count(mesh: str) -> None:
    """Of NaN + NaN the sign and the payload depend on the order of the operands, which is not the same everywhere."""
    workers = Workers(placed(mesh))
    workers.compute(nan=True)
    ranges = workers.give_all(other_nan=True)
    assert any(workers.reduced(pages).isnan().any() for pages in ranges)
    assert all(checks.is_settled for checks in workers.checks.values()) and not workers.told


def test_beside_a_nan_one_bit_is_told_and_nothing_else_differs() -> None:
    workers = Workers(placed("dp3"))
    workers.compute(nan=True)
    pages = next(pages for pages in workers.placement.replica_map(LAYOUT)[1] if pages.first == 0)
    assert workers.reduced(pages).isnan()[0] and pages.num_pages == 1
    workers.give_all(wrong=pages.key, other_nan=True)
    (told,) = workers.told
    assert isinstance(told, m.SumsDiffer) and (told.layer, told.first, told.stop) == pages.key
    assert first_different(told.owned, told.checked) == (REDUCED_GRADIENT, 1)


@pytest.mark.parametrize("mesh", ["dp3", "pp3"])
def test_one_bit_is_told_and_all_sums_are_made_again(mesh: str) -> None:
    workers = Workers(placed(mesh))
    workers.compute()
    pages = workers.placement.replica_map(LAYOUT)[1][0]
    workers.give_all(wrong=pages.key)
    (told,) = workers.told
    assert isinstance(told, m.SumsDiffer) and (told.layer, told.first, told.stop) == pages.key
    assert told.owner == pages.primary and told.owned[0] != told.checked[0] and told.owned[1] == told.checked[1]
    assert not workers.checks[told.rank].is_settled
    workers.told.clear()
    request = m.AddAgain(0, STEP, *pages.key, (0, 2))
    for rank, checks in workers.checks.items():
        right = workers.reduced(pages)
        checks.asked(request, (right, workers.norms(pages, right)) if rank == pages.primary else None)
    workers.deliver()
    answers = [message for message in workers.told if isinstance(message, m.AddedUp)]
    again = {message.rank: message for message in answers if message.again}
    assert set(again) == {0, 2} and again[0].sums == again[2].sums and again[0].results == again[2].results
    assert again[0].results == (told.checked,)
    first = [row for message in answers if not message.again for row in message.sums]
    assert sorted(first) == sorted(again[0].sums), "what they had made is what is made again"
    nodes = {(rank, node) for rank, node in sums_of(workers.placement, 1)}
    assert {(row[1], row[2]) for row in first} == {node for _, node in nodes}
    workers.checks[told.rank].accepted(m.SumAccepted(0, STEP, *pages.key))
    assert workers.checks[told.rank].is_settled


def test_gradients_of_others_than_the_worker_of_a_microbatch_do_not_count() -> None:
    workers = Workers(placed("dp3"))
    pages, checker = next(iter(drawn_ranges(CheckDraw(3, 1.0), STEP, LAYOUT, workers.placement.replica_map(LAYOUT))))
    first = first_page_of_use(LAYOUT, pages, pages.layer)
    start, stop = LAYOUT.layers[pages.layer].gradient_span(first, first + pages.num_pages)
    stage = workers.placement.stage_of_layer(pages.layer)
    owner = workers.placement.worker_of_microbatch(stage, 0)
    other = next(rank for rank in (0, 1, 2) if rank not in (owner, checker))
    addend = m.Addend(STEP, pages.layer, first, first + pages.num_pages, 0)
    workers.checks[checker].received(other, addend, torch.full((stop - start,), 7.0))
    workers.compute()
    workers.give_all()
    assert all(checks.is_settled for checks in workers.checks.values()) and not workers.told


def test_what_comes_before_its_step_is_kept_and_what_is_given_up_counts_no_more() -> None:
    workers = Workers(placed("dp3"))
    for checks in workers.checks.values():
        checks.forget()
    assert all(checks.is_settled and not checks.looks_at(0) for checks in workers.checks.values())
    late = workers.checks[0]
    for rank in (1, 2):
        workers.checks[rank].begin(STEP)
    workers.compute()  # worker 0 has not begun the step, and sends nothing
    late.begin(STEP)
    buffers = [(layer, u) for layer, u in workers.leaves if workers.placement.worker_of_microbatch(0, u) == 0]
    for layer, u in buffers:
        late.computed(STEP, layer, u, workers.leaves[layer, u])
    workers.deliver()
    workers.give_all()
    assert all(checks.is_settled for checks in workers.checks.values()) and not workers.told


@pytest.mark.parametrize(("came", "agreed"), [(0, False), (7, False), (ALL, False), (ALL, True)])
def test_what_came_before_a_newer_mesh_epoch_counts_in_it(came: int, agreed: bool) -> None:
    """A worker may begin a step, and enter a newer epoch of it after the others, which do not send again."""
    workers = Workers(placed("dp3"))
    workers.compute(deliver=came)
    if agreed:
        workers.deliver()
        workers.give_all()
    mesh = workers.placement.mesh
    workers.placement = replace(workers.placement, mesh=replace(mesh, epoch=mesh.epoch + 1))
    for late in workers.checks.values():
        late.enter_epoch(workers.placement, workers.placement.replica_map(LAYOUT), STEP - 1)
        late.begin(STEP)
    assert agreed == all(late.is_settled for late in workers.checks.values())
    workers.deliver()
    workers.give_all()
    assert all(late.is_settled for late in workers.checks.values()) and not workers.told


def test_at_rate_0_nothing_is_sent() -> None:
    workers = Workers(placed("dp3"), rate=0.0)
    workers.compute()
    assert not workers.sent and not workers.told
    assert all(checks.is_settled and not checks.looks_at(1) for checks in workers.checks.values())
    assert maximal_nodes(range(5), 5) == ((0, 5),)
