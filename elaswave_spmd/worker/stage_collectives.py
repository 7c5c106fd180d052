"""The option `runtime.collectives=group`: a process group of a stage's workers carries tensors in place of links.

It carries the new parameters of a step, and the partial sums and reduced gradients of the next one (sum_exchange.py).
A group only copies, because sums are added in the order of the reduction tree. It is used for a step if all votes for
that step carried the extension GROUPED. Then either every worker of the stage applies the step in this epoch, or no
worker goes on in this epoch. So all of them issue the same collectives in the same order: the all-gathers of the step,
layer by layer (parameter_gather.py), then the exchanges of the next step in the order of its plan.

Received values lie in memory of their own until their collective is complete, since a collective that a dead peer has
left half done may still write to it. When a new epoch begins, all collectives in progress are given up. Pages that are
missing then are requested over links, and sums and reduced gradients that may be missing are sent over links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from elaswave_spmd.recovery.admission import LONGEST_TEXT
from elaswave_spmd.recovery.messages import GROUPED, GroupLost, Message, Publish
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap
from elaswave_spmd.worker.parameter_gather import ParameterGather
from elaswave_spmd.worker.sum_exchange import Exchange, ExchangePlan, StageExchanges


class CollectiveWork(Protocol):
    """A collective in progress: the part of c10d's `Work` that is used here."""

    def is_completed(self) -> bool:
        """True if the collective has ended, in success or failure. Does not wait."""
        ...

    def wait(self) -> object:
        """Make the received values visible to work that is queued on the device afterwards.

        Called once the collective has ended.

        Raises:
            RuntimeError: the collective failed.
        """
        ...


class StageGroup(Protocol):
    """The process group of one worker's stage. Each epoch has a new one; until it is made, links are used."""

    def enter_epoch(self, epoch: int, members: Sequence[int], rank: int) -> None:
        """Begin to make the group of a newer epoch, and give up the group before. Returns at once.

        No group is made for a single member.
        """
        ...

    @property
    def ready(self) -> int | None:
        """The newest epoch if its group is made, for which all members have to meet; else None."""
        ...

    @property
    def failure(self) -> str | None:
        """The reason why the newest epoch's group could not be made; None if it did not fail."""
        ...

    def gather(self, share: Tensor, gathered: Tensor, what: str) -> CollectiveWork:
        """Begin an all-gather: every member gets the shares of all members, in the order of members.

        The group keeps the memory as long as it may be read or written, even if the collective is given up.

        Args:
            share: the values of this member, contiguous and of the same size on all members. It is this member's slice
                of `gathered`.
            gathered: receives the shares; its size is that of a share times the number of members.
            what: the kind of message that the collective replaces, and the layer. An error names it.

        Raises:
            RuntimeError: the library refuses, for example because it knows that a peer is gone.
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
        """Begin an all-to-all. The group keeps the memory, as for an all-gather.

        Args:
            sent: the values for all members, flat, in the order of members.
            received: receives the values of all members, flat, in the same order.
            sent_sizes, received_sizes: by member, in elements.
            what: the kind of message that the collective replaces. An error names it.

        Raises:
            RuntimeError: as for an all-gather.
        """
        ...

    def give_up(self) -> None:
        """Give up a group that has failed: end what is in progress, and do not use the group again.

        The caller must not refer to any of the group's collectives any more. Whoever drops the last reference to a
        group waits for its destructor, which the training thread must not do.
        """
        ...


_What: TypeAlias = tuple[int, ParameterGather] | Exchange
"""A collective: an all-gather has the version of its parameters."""

_Arrived: TypeAlias = tuple[_What, Tensor]


@dataclass(frozen=True)
class _UnderWay:
    what: _What
    received: Tensor
    work: CollectiveWork


class NoCollectives:
    """Stands in for `StageCollectives` when the option is off: everything goes over links, and votes offer nothing."""

    is_off = True
    idle = True
    has_news = False
    serves = False
    epoch = -1

    def __init__(self) -> None:
        self.exchanges = StageExchanges()

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None: ...

    def check(self) -> None: ...

    def update_offer(self) -> None: ...

    def give_up(self) -> None: ...

    def begin_exchanges(self) -> None: ...

    def arrived(self) -> Iterator[tuple[Publish | Exchange, Tensor]]:
        return iter(())

    def reached(self, pages: PageRange) -> frozenset[int]:
        return frozenset()

    def gather(self, layer: int, version: int, payloads: Mapping[PageRange, Tensor]) -> None:
        raise AssertionError("no vote has offered a group")


class StageCollectives:
    """One worker's collectives in the group of its stage, from epoch to epoch.

    Args:
        rank: the rank of the worker.
        layout: the layers and pages of the model.
        place: the device of the parameters.
        dtype: the dtype in which parameters are sent.
        send: sends a message, perhaps with a payload, to another worker or the controller.
        group: the process group of the worker's stage.
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
        """The exchanges of sums and gradients. The reducer and the replica give them their values, and take back those
        that have to go over links after all."""
        self._under_way: deque[_UnderWay] = deque()
        self._gathers: dict[int, ParameterGather] = {}  # by layer
        self._keys: frozenset[PageRange] = frozenset()  # the page ranges that the gathers bring
        self._members: tuple[int, ...] = ()
        self.epoch = -1
        self._lost = False  # the group of this epoch has failed, or could not be made
        self._offer = ""  # the extension of this worker's next vote

    @property
    def is_off(self) -> bool:
        """False: the option is on, so there is a group, or will be one in a later epoch."""
        return False

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Begin a new epoch: give up all collectives in progress, and begin to make a group of the stage's members.

        Args:
            replica_map: the replicas of the layers of this worker's stage, at least.
        """
        self._under_way.clear()
        self.epoch = placement.mesh.epoch
        self._lost = False
        self._offer = ""
        stage = placement.mesh.stage_of(self._rank)
        members = placement.mesh.stages[stage]
        self._members = tuple(members)
        # Workers that drop their parameters after a step need the frozen ones again as well.
        with_frozen = bool(placement.shardings.params.axes)
        gathers = [
            ParameterGather.of(self._layout.layers[layer], replica_map[layer], members, with_frozen=with_frozen)
            for layer in placement.layers_of_stage(stage)
        ]
        self._gathers = {gather.layer: gather for gather in gathers if gather is not None}
        self._keys = frozenset(key for gather in self._gathers.values() for key in gather.keys)
        plan = ExchangePlan.of(self._rank, self._layout, placement, replica_map)
        self.exchanges.enter_epoch(plan)
        self._is_used = bool(self._gathers or plan.order)
        self._group.enter_epoch(self.epoch, members if self._is_used else (self._rank,), self._rank)

    def reached(self, pages: PageRange) -> frozenset[int]:
        """The workers that get the parameters of a page range through the group.

        All others get them over links, such as a worker of another stage that reads a tied parameter.
        """
        return frozenset(self._members) if pages in self._keys else frozenset()

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
        """True if this worker uses the group for a step that all votes offered it for. False if it has failed since."""
        return not self._lost

    @property
    def has_news(self) -> bool:
        """True if the oldest collective in progress has ended."""
        return bool(self._under_way) and self._under_way[0].work.is_completed()

    @property
    def idle(self) -> bool:
        """True if no collective is in progress. A worker does not vote for a step before that."""
        return not self._under_way

    def gather(self, layer: int, version: int, payloads: Mapping[PageRange, Tensor]) -> None:
        """Begin the all-gather of one layer, if it has one.

        Args:
            payloads: the values of the page ranges that this worker is the primary of, in the dtype in which they are
                sent.
        """
        gather = self._gathers.get(layer)
        if gather is None or self._lost:
            return
        if not gather.sent_by(self._rank).keys() <= payloads.keys():  # its state was given up as damaged
            self.lose("this worker has no state of pages that it is the primary of")
            return
        what, refused = f"{Publish.__name__}, layer {layer}", ""
        try:
            # Not the compute buffer: a collective that a dead peer leaves half done may write to it at any time.
            gathered = torch.empty(len(gather.members) * gather.share, dtype=self._dtype, device=self._place)
            share = gather.pack(self._rank, payloads, gathered)
            self._under_way.append(_UnderWay((version, gather), gathered, self._group.gather(share, gathered, what)))
        except RuntimeError as error:
            # A backend may refuse at once, when it knows that a peer is gone. Or the device has no memory for what
            # comes: then links serve, which bring it to the memory of the host.
            refused = str(error) or type(error).__name__
        if refused:  # outside of the handler: while an exception is handled, its traceback refers to the group
            self.lose(refused)

    def begin_exchanges(self) -> None:
        """Begin the exchanges whose turn it is, if everything that this worker sends in them is complete.

        Called after messages were handled.
        """
        while not self._lost and (exchange := self.exchanges.next()) is not None:
            assert self.exchanges.plan is not None
            sent_sizes, sizes = self.exchanges.plan.sizes(exchange)
            refused = ""
            try:
                sent = self.exchanges.pack(exchange, self._place)
                received = torch.empty(sum(sizes), dtype=torch.float32, device=self._place)
                work = self._group.exchange(sent, received, sent_sizes, sizes, exchange.message)
                self._under_way.append(_UnderWay(exchange, received, work))
                del work  # as in `arrived`
            except RuntimeError as error:  # as in `gather`
                refused = str(error) or type(error).__name__
            if refused:
                self.lose(refused)

    def arrived(self) -> Iterator[tuple[Publish | Exchange, Tensor]]:
        """The (what, values) of the collectives that have completed since the last call, in order.

        An all-gather gives one `Publish` for each page range. The memory of a collective is released when the caller
        asks for what follows. If a collective has failed, the group is given up in this call, before the first value.
        """
        done, failed = deque[_Arrived](), ""
        while self.has_news and not failed:
            try:
                self._under_way[0].work.wait()
            except RuntimeError as error:
                failed = str(error) or type(error).__name__
            else:
                # Without the collective: nothing may refer to one when the group is given up.
                done.append((self._under_way[0].what, self._under_way[0].received))
                self._under_way.popleft()
        if failed:
            self.lose(failed)
        return self._one_by_one(done)

    def _one_by_one(self, done: deque[_Arrived]) -> Iterator[tuple[Publish | Exchange, Tensor]]:
        while done:
            yield from self._values_of(*done.popleft())

    def _values_of(self, what: _What, received: Tensor) -> Iterator[tuple[Publish | Exchange, Tensor]]:
        if isinstance(what, tuple):
            version, gather = what
            for key, values in gather.unpack(self._rank, received):
                yield Publish(version, *key), values
        else:
            yield what, received

    def lose(self, reason: str) -> None:
        """Give up the group, which has failed here, and tell the controller and the other members of the stage.

        The members then give it up as well, for the rest of the epoch.
        """
        lost = GroupLost(self.epoch, self._rank, reason[:LONGEST_TEXT])  # receivers refuse a longer text
        for peer in (*sorted({*self._members} - {self._rank}), CONTROLLER) if not self._lost else ():
            self._send(peer, lost, None)
        self.give_up()

    def give_up(self) -> None:
        """Use links for the rest of the epoch."""
        self._under_way.clear()  # before the group is given up, see `StageGroup.give_up`
        self.exchanges.stop()
        if not self._lost and self._is_used:
            self._group.give_up()
        self._lost = True
