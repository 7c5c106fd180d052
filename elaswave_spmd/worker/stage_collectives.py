"""The option `runtime.collectives=group`: what goes through a process group of a stage's workers in place of links.

That is new parameters of a step, and partial sums and reduced gradients of the next one (sum_exchange.py). A group only
copies: sums have an order of their own. It is used for a step for which all votes carried the extension GROUPED. Then
every worker of the stage applies the step in this epoch, or no worker goes on in it, and all issue the same collectives
in the same order: broadcasts of the step by layer and page, then exchanges of the next step in the order of its plan.
Received values lie in memory of their own until the collective is complete, since one that a dead peer has left half
done may still write. A new epoch gives up everything that is under way: pages that are missing then are asked for over
links, and sums and reduced gradients that may be missing are sent over links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.recovery.messages import GROUPED, GroupLost, Message, Publish
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import LOSS, ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet
from elaswave_spmd.worker.sum_exchange import Exchange, ExchangePlan, StageExchanges


class CollectiveWork(Protocol):
    """A collective under way, as c10d has it."""

    def is_completed(self) -> bool:
        """True if it has ended, in success or failure; does not wait."""
        ...

    def wait(self) -> object:
        """Called once it has ended: raises RuntimeError if it failed. Work queued on the device afterwards sees the
        values."""
        ...


class StageGroup(Protocol):
    """The process group of one worker's stage, made anew for every epoch; until it is there, links are used."""

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """Begin to make the group of a newer epoch, and give up the one before. Returns at once.

        A single member has no group.
        """
        ...

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made, that is if all members have met; else None."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason for which the newest epoch's group could not be made, if any."""
        ...

    def broadcast(self, values: Tensor, root: int) -> CollectiveWork:
        """Begin a broadcast: worker `root` sends `values`, contiguous; the other members receive into theirs.

        The group keeps the memory as long as it may be written, whatever becomes of the work.

        Raises:
            RuntimeError: the library refuses, for example since it knows that a peer is gone.
        """
        ...

    def exchange(
        self,
        sent: Tensor,
        received: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        what: str,
    ) -> CollectiveWork:
        """Begin an all-to-all; sizes are in elements, by member. The group keeps the memory, as for a broadcast.

        Args:
            what: the kind of message that it stands for. It is told with what becomes of it.

        Raises:
            RuntimeError: as for a broadcast.
        """
        ...

    def give_up(self) -> None:
        """The group has failed: what is under way in it ends, and it is not used again.

        The caller refers to none of the group's collectives any more: whoever drops the last reference to a group waits
        for its destructor, and the training thread must not.
        """
        ...


@dataclass(frozen=True)
class _UnderWay:
    what: Publish | Exchange
    values: Tensor  # that are received, or sent
    work: CollectiveWork
    sent: bool


class NoCollectives:
    """The option is off: parameters go over links, nothing is ever under way, and votes carry nothing."""

    idle = True
    has_news = False
    serves = False
    epoch = -1

    def __init__(self) -> None:
        self.exchanges = StageExchanges()

    def bind(self, placement: Placement, replica_map: ReplicaMap) -> None: ...

    def check(self) -> None: ...

    def update_offer(self) -> None: ...

    def give_up(self) -> None: ...

    def begin_exchanges(self) -> None: ...

    def arrived(self) -> list[tuple[Publish | Exchange, Tensor]]:
        return []

    def reached(self, pages: PageRange) -> frozenset[int]:
        return frozenset()

    def broadcast(self, layer: int, version: int, payloads: dict[PageRange, Tensor]) -> None:
        raise AssertionError("no vote has offered a broadcast")


class StageCollectives:
    """One worker's collectives in the group of its stage, from epoch to epoch.

    Args:
        rank: of the worker.
        layout: of the model.
        place: where parameters lie.
        dtype: in which they travel.
        send: to another worker or the controller.
        group: of the worker's stage.
    """

    def __init__(
        self,
        rank: int,
        layout: ModelLayout,
        place: torch.device,
        dtype: torch.dtype,
        send: Callable[[int, Message, Tensor | None], None],
        group: StageGroup,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._place = place
        self._dtype = dtype
        self._send = send
        self._group = group
        self.exchanges = StageExchanges()
        """Filled by reducer and replica, which take from it what links have to bring after all."""
        self._under_way: deque[_UnderWay] = deque()
        self._ranges: dict[int, tuple[ReplicaSet, ...]] = {}  # layer -> page ranges that are broadcast, in page order
        self._keys: frozenset[PageRange] = frozenset()
        self._members: frozenset[int] = frozenset()
        self.epoch = -1
        self._lost = False
        self._offer = ""

    def bind(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Begin a new epoch: what is under way is given up, and a group of the stage's members is made.

        Args:
            replica_map: of the layers of this worker's stage, at least.
        """
        self._under_way.clear()
        self.epoch = placement.mesh.epoch
        self._lost = False
        self._offer = ""
        stage = placement.mesh.stage_of(self._rank)
        members = placement.mesh.stages[stage]
        self._members = frozenset(members)
        self._drops_params = bool(placement.shardings.params.axes)
        layers = placement.layers_of_stage(stage)
        ranges = {layer: tuple(filter(self._is_broadcast, replica_map[layer])) for layer in layers}
        self._ranges = {layer: found for layer, found in ranges.items() if found}
        self._keys = frozenset(pages.key for found in self._ranges.values() for pages in found)
        plan = ExchangePlan.of(self._rank, self._layout, placement, replica_map)
        self.exchanges.bind(plan)
        self._is_used = bool(self._ranges or plan.order)
        self._group.change(self.epoch, members if self._is_used else (self._rank,), self._rank)

    def _is_broadcast(self, pages: ReplicaSet) -> bool:
        """True if the range's primary is in this stage and some member has no replica. All members agree on that."""
        block = self._layout.layers[pages.layer].block_of(pages.first)
        # Frozen pages are published before the first step alone, unless they are dropped in every step.
        if block.kind == LOSS or (block.frozen and not self._drops_params):
            return False
        return pages.primary in self._members and not self._members <= pages.replicas

    def reached(self, pages: PageRange) -> frozenset[int]:
        """The workers that get a page range through the group; a reader of a tie may belong to another stage."""
        return self._members if pages in self._keys else frozenset()

    @property
    def ready(self) -> bool:
        """True if this worker can use the group in this epoch, or its stage has no use for one."""
        if self._lost:
            return False
        return not self._is_used or self._group.ready == self.epoch

    def check(self) -> None:
        """Give up a group that could not be made."""
        if self._is_used and not self._lost and self._group.failure is not None:
            self.lose(self._group.failure)

    def update_offer(self) -> None:
        """Note whether the next vote offers the group. Called when messages have been handled."""
        self._offer = GROUPED if self.ready else ""

    def offered(self) -> str:
        """The extension of this worker's next vote (recovery.worker_protocol.VoteExtension)."""
        return self._offer

    @property
    def serves(self) -> bool:
        """True if the group is used here for a step for which all offered it; False if it has failed since."""
        return not self._lost

    @property
    def has_news(self) -> bool:
        """True if the oldest collective under way has ended."""
        return bool(self._under_way) and self._under_way[0].work.is_completed()

    @property
    def idle(self) -> bool:
        """True if nothing is under way. A vote says so: roots overwrite what they have sent once all have voted."""
        return not self._under_way

    def broadcast(self, layer: int, version: int, payloads: dict[PageRange, Tensor]) -> None:
        """Begin the broadcasts of one layer.

        Args:
            payloads: values, in the dtype they travel in, of the page ranges that this worker is the primary of.
        """
        for pages in self._ranges.get(layer, ()):
            if self._lost:
                return
            values, sent = payloads.get(pages.key), pages.primary == self._rank
            if not sent:
                # Not the compute buffer: a broadcast that a dead peer leaves half done may write to it at any time.
                first, stop = self._layout.layers[layer].span(pages.first, pages.stop)
                values = torch.empty(stop - first, dtype=self._dtype, device=self._place)
            if values is None:  # given up as damaged: the others must not take the next range for this one
                self.lose("this worker has no state of pages that it is the primary of")
                return
            refused = ""
            try:
                publish = Publish(version, *pages.key)
                self._under_way.append(_UnderWay(publish, values, self._group.broadcast(values, pages.primary), sent))
            except RuntimeError as error:  # a backend may refuse at once, when it knows that a peer is gone
                refused = str(error) or type(error).__name__
            if refused:  # outside of the handler: while an exception is handled, its traceback refers to the group
                self.lose(refused)
                return

    def begin_exchanges(self) -> None:
        """Begin the exchanges whose turn it is, if what is sent is complete here. Called when messages were handled."""
        while not self._lost and (exchange := self.exchanges.next()) is not None:
            assert self.exchanges.plan is not None
            sent_sizes, sizes = self.exchanges.plan.sizes(exchange)
            sent = self.exchanges.pack(exchange, self._place)
            received = torch.empty(sum(sizes), dtype=torch.float32, device=self._place)
            refused = ""
            try:
                work = self._group.exchange(sent, received, sent_sizes, sizes, exchange.message)
                self._under_way.append(_UnderWay(exchange, received, work, sent=False))
                del work  # as in `arrived`
            except RuntimeError as error:  # as for a broadcast
                refused = str(error) or type(error).__name__
            if refused:
                self.lose(refused)

    def arrived(self) -> list[tuple[Publish | Exchange, Tensor]]:
        """(what, values) of the collectives that are complete since the last call, in order; not what was sent only."""
        found = []
        failed = ""
        while self.has_news and not failed:
            try:
                self._under_way[0].work.wait()
            except RuntimeError as error:
                failed = str(error) or type(error).__name__
            else:
                done = self._under_way.popleft()
                if not done.sent:
                    found.append((done.what, done.values))
                del done  # nothing here refers to a collective when the group is given up
        if failed:
            self.lose(failed)
        return found

    def lose(self, reason: str) -> None:
        """The group has failed here: all other members of the stage give it up too, for the rest of the epoch."""
        for peer in (*sorted(self._members - {self._rank}), CONTROLLER) if not self._lost else ():
            self._send(peer, GroupLost(self.epoch, self._rank, reason), None)
        self.give_up()

    def give_up(self) -> None:
        """Use links for the rest of the epoch."""
        self._under_way.clear()  # first: the last reference to a collective must not be dropped here
        self.exchanges.stop()
        if not self._lost and self._is_used:
            self._group.give_up()
        self._lost = True
