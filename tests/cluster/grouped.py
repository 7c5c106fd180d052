"""A simulated cluster whose stages have made-up process groups, with the failures of real ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker

# The chance that a group is complete, or a collective has ended, when a worker looks whether it is.
_MEETS = 0.5
_COMPLETES = 0.3


@dataclass(frozen=True)
class _Call:
    """A member's call of a collective: what is alike for all members, and its own memory.

    Args:
        sent, received: memory of a broadcast's root and of its receivers; of an exchange each member has both.
        copy: of what is sent, as it was at the call.
        sizes: of an exchange, elements to each member and from each.
    """

    alike: tuple[object, ...]
    sent: Tensor | None
    received: Tensor | None
    copy: Tensor | None
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def sent_now(self) -> Tensor:
        """What is sent, read as late as it may be."""
        assert self.sent is not None and self.copy is not None
        assert self.copy.view(torch.uint8).equal(self.sent.view(torch.uint8)), "memory that is sent from stays as it is"
        return self.sent

    def sent_to(self, place: int) -> Tensor:
        """The part of an exchange for the member at this place."""
        return self.sent_now.split(self.sizes[0])[place]


@dataclass
class _Made:
    """One group, and the collectives that its members have called. Each member numbers its calls from 0.

    Args:
        waits_for_all: a root's broadcast ends only when all other members have called it too.
        met: members that have opened the group.
        calls: rank -> its calls.
        issued: of each call what has to be the same for all members.
        complete: numbers of the broadcasts that have ended at their roots, which may use that memory again.
    """

    members: tuple[int, ...]
    waits_for_all: bool
    met: set[int] = field(default_factory=set)
    calls: dict[int, list[_Call]] = field(default_factory=dict)
    issued: list[tuple[object, ...]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)

    def add(self, rank: int, call: _Call) -> int:
        """Returns the number of a member's call."""
        calls = self.calls.setdefault(rank, [])
        calls.append(call)
        if len(calls) > len(self.issued):
            self.issued.append(call.alike)
        assert self.issued[len(calls) - 1] == call.alike, "all members issue the same collectives in the same order"
        return len(calls) - 1

    def has_called(self, rank: int, number: int) -> bool:
        return len(self.calls.get(rank, ())) > number


class Hub:
    """All groups of a cluster.

    Args:
        lost: workers that have ended or are stopped; what they have sent may still arrive, or not.
        failing: how often a collective fails though nobody is lost.
    """

    def __init__(self, seed: int, lost: Sequence[int], failing: float) -> None:
        self.draw = random.Random(f"groups {seed}")
        self.lost = lost
        self.failing = failing
        self.made: dict[tuple[int, int, tuple[int, ...]], _Made] = {}  # by incarnation, mesh epoch and members
        self.ended: Counter[str] = Counter()
        """How many were received or sent (broadcasts), exchanged, failed or refused, by this word."""


class MadeUpGroup:
    """A worker's end of its group."""

    def __init__(self, rank: int, hub: Hub, incarnation: int) -> None:
        self._rank = rank
        self._hub = hub
        self._incarnation = incarnation
        self._epoch = -1
        self._met = False
        self._fails = False
        self._works: list[MadeUpBroadcast | MadeUpExchange] = []

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        assert epoch > self._epoch and rank == self._rank and rank in members
        self._epoch = epoch
        self._met = False
        self._works = []
        self._fails = self._hub.draw.random() < self._hub.failing
        made = _Made(tuple(members), self._hub.draw.random() < 0.5)
        self._made = self._hub.made.setdefault((self._incarnation, epoch, tuple(members)), made)
        self._made.met.add(rank)

    @property
    def ready(self) -> int | None:
        there = self._made.met == {*self._made.members} and not self._fails
        self._met = self._met or (there and self._hub.draw.random() < _MEETS)
        return self._epoch if self._met else None

    @property
    def failure(self) -> str | None:
        return "Timed out" if not self._met and self._fails else None

    def broadcast(self, values: Tensor, root: int) -> MadeUpBroadcast:
        assert root in self._made.members
        self._may_refuse()
        is_root = root == self._rank
        sent, received = (values, None) if is_root else (None, values)
        copy = values.clone() if is_root else None
        number = self._made.add(self._rank, _Call(("broadcast", root, values.numel()), sent, received, copy))
        work = MadeUpBroadcast(self._hub, self._made, number, root, self._rank)
        self._works.append(work)
        return work

    def exchange(
        self,
        sent: Tensor,
        received: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        what: str,
    ) -> MadeUpExchange:
        assert (sum(sent_sizes), sum(received_sizes)) == (sent.numel(), received.numel())
        self._may_refuse()
        sizes = tuple(sent_sizes), tuple(received_sizes)
        number = self._made.add(self._rank, _Call(("exchange", what), sent, received, sent.clone(), sizes))
        work = MadeUpExchange(self._hub, self._made, number, self._rank)
        self._works.append(work)
        return work

    def _may_refuse(self) -> None:
        assert self._met
        if self._hub.draw.random() < self._hub.failing:
            self._hub.ended["refused"] += 1
            raise RuntimeError("Connection closed by peer")

    def give_up(self) -> None:
        self._met = False
        self._fails = True

    @property
    def can_move(self) -> bool:
        """True if the oldest collective under way may end."""
        self._works = [work for work in self._works if not work.how]
        return bool(self._works) and self._works[0].may_end


class MadeUpBroadcast:
    """A broadcast on one member. The memory of the root is read as late as possible: when either of the two ends."""

    def __init__(self, hub: Hub, made: _Made, number: int, root: int, rank: int) -> None:
        self._hub = hub
        self._made = made
        self._number = number
        self._root = root
        self._rank = rank
        self.how = ""  # how it has ended (Hub.ended)
        self._fails = hub.draw.random() < hub.failing
        self._arrives: bool | None = None  # the broadcast of a lost root: drawn once
        self._hangs = hub.draw.random() < 0.5

    @property
    def may_end(self) -> bool:
        if self._root == self._rank and not self._fails:
            return not self._made.waits_for_all or all(
                self._made.has_called(r, self._number) for r in self._made.members
            )
        if self._fails:
            return True
        if not self._made.has_called(self._root, self._number):
            return self._root in self._hub.lost and not self._hangs
        if self._root in self._hub.lost:
            if self._arrives is None:
                self._arrives = self._hub.draw.random() < 0.5
            return self._arrives or not self._hangs
        return True

    def is_completed(self) -> bool:
        if not self.how and self.may_end and self._hub.draw.random() < _COMPLETES:
            there = self._made.has_called(self._root, self._number)
            if self._fails or (self._root != self._rank and (not there or self._arrives is False)):
                self.how = "failed"
            elif self._root == self._rank:
                self.how = "sent"
                self._made.complete.add(self._number)
            else:
                self._receive()
                self.how = "received"
            self._hub.ended[self.how] += 1
        return bool(self.how)

    def _receive(self) -> None:
        root, mine = (self._made.calls[rank][self._number] for rank in (self._root, self._rank))
        assert root.copy is not None and mine.received is not None
        # A root leaves its memory alone until it is complete.
        mine.received.copy_(root.copy if self._number in self._made.complete else root.sent_now)

    def wait(self) -> None:
        _fail_if(self.how)


class MadeUpExchange:
    """An exchange on one member. It waits for those from whom something is to come, and for nobody else: as NCCL."""

    def __init__(self, hub: Hub, made: _Made, number: int, rank: int) -> None:
        self._hub = hub
        self._made = made
        self._number = number
        self._rank = rank
        self.how = ""  # how it has ended (Hub.ended)
        self._fails = hub.draw.random() < hub.failing
        self._arrives: dict[int, bool] = {}  # what lost members have sent: drawn once
        self._hangs = hub.draw.random() < 0.5

    @property
    def _call(self) -> _Call:
        return self._made.calls[self._rank][self._number]

    def _comes_from(self, rank: int) -> bool:
        """True if what a member sends can arrive."""
        if not self._made.has_called(rank, self._number):
            return False
        if rank not in self._hub.lost:
            return True
        return self._arrives.setdefault(rank, self._hub.draw.random() < 0.5)

    @property
    def _awaited(self) -> list[int]:
        return [rank for rank, size in zip(self._made.members, self._call.sizes[1], strict=True) if size]

    @property
    def may_end(self) -> bool:
        missing = [rank for rank in self._awaited if not self._comes_from(rank)]
        return self._fails or not missing or (not self._hangs and any(rank in self._hub.lost for rank in missing))

    def is_completed(self) -> bool:
        if not self.how and self.may_end and self._hub.draw.random() < _COMPLETES:
            if self._fails or not all(map(self._comes_from, self._awaited)):
                self.how = "failed"
            else:
                self._receive()
                self.how = "exchanged"
            self._hub.ended[self.how] += 1
        return bool(self.how)

    def _receive(self) -> None:
        place = self._made.members.index(self._rank)
        assert self._call.received is not None
        for rank, part in zip(self._made.members, self._call.received.split(self._call.sizes[1]), strict=True):
            if rank in self._awaited:
                part.copy_(self._made.calls[rank][self._number].sent_to(place))

    def wait(self) -> None:
        _fail_if(self.how)


def _fail_if(how: str) -> None:
    assert how, "it is waited for when it has ended"
    if how == "failed":
        raise RuntimeError("Connection closed by peer")


class GroupedCluster(SimulatedCluster):
    """A cluster in which every stage has a group.

    Args:
        failing: as for `Hub`; the others are those of `SimulatedCluster`.
    """

    def __init__(self, *args: Any, failing: float = 0.01, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, seed=seed, **kwargs)
        self.hub = Hub(seed, self._absent, failing)
        self._groups: dict[tuple[int, int], MadeUpGroup] = {}  # by incarnation of the controller, and rank

    def _group_of(self, rank: int) -> MadeUpGroup:
        incarnation = self._orders.incarnation
        return self._groups.setdefault((incarnation, rank), MadeUpGroup(rank, self.hub, incarnation))

    def _can_go(self, worker: Worker) -> bool:
        if super()._can_go(worker):
            return True
        grouped = worker.executor.replica.parameters.grouped if worker.executor else None
        return grouped is not None and not grouped.idle and self._group_of(worker.rank).can_move
