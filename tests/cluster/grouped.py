"""A simulated cluster whose stages have made-up process groups, with the failures of real ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.conf.schema import GROUP
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker

# The chance that a group is complete, or a collective has ended, when a worker looks whether it is.
_MEETS = 0.5
_COMPLETES = 0.3


@dataclass(frozen=True)
class _Call:
    """A member's call of a collective: what is alike for all members, and its own memory.

    Args:
        sent, received: memory that is read, and written.
        copy: of what is sent, as it was at the call.
        sizes: elements to each member and from each; () for an all-gather, in which all get all that is sent.
    """

    alike: tuple[object, ...]
    sent: Tensor
    received: Tensor
    copy: Tensor
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def sent_to(self, place: int) -> Tensor:
        """The part for the member at this place, read as late as it may be."""
        assert self.copy.view(torch.uint8).equal(self.sent.view(torch.uint8)), "memory that is sent from stays as it is"
        return self.sent.split(self.sizes[0])[place] if self.sizes[0] else self.sent


@dataclass
class _Made:
    """One group, and the collectives that its members have called. Each member numbers its calls from 0.

    Args:
        met: members that have opened the group.
        calls: rank -> its calls.
        issued: of each call what has to be the same for all members.
    """

    members: tuple[int, ...]
    met: set[int] = field(default_factory=set)
    calls: dict[int, list[_Call]] = field(default_factory=dict)
    issued: list[tuple[object, ...]] = field(default_factory=list)

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
        """How many were gathered, exchanged, failed or refused, by this word."""


class MadeUpGroup:
    """A worker's end of its group."""

    def __init__(self, rank: int, hub: Hub, incarnation: int) -> None:
        self._rank = rank
        self._hub = hub
        self._incarnation = incarnation
        self._epoch = -1
        self._met = False
        self._fails = False
        self._works: list[MadeUpCollective] = []

    def enter_epoch(self, epoch: int, members: Sequence[int], rank: int) -> None:
        assert epoch > self._epoch and rank == self._rank and rank in members
        self._epoch = epoch
        self._met = False
        self._works = []
        self._fails = self._hub.draw.random() < self._hub.failing
        self._made = self._hub.made.setdefault((self._incarnation, epoch, tuple(members)), _Made(tuple(members)))
        self._made.met.add(rank)

    @property
    def ready(self) -> int | None:
        there = self._made.met == {*self._made.members} and not self._fails
        self._met = self._met or (there and self._hub.draw.random() < _MEETS)
        return self._epoch if self._met else None

    @property
    def failure(self) -> str | None:
        return "Timed out" if not self._met and self._fails else None

    def gather(self, share: Tensor, gathered: Tensor, what: str) -> MadeUpCollective:
        members = self._made.members
        assert gathered.numel() == len(members) * share.numel() > 0
        return self._begin("gathered", _Call(("gather", what, share.numel()), share, gathered, share.clone()))

    def exchange(
        self,
        sent: Tensor,
        received: Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        what: str,
    ) -> MadeUpCollective:
        assert (sum(sent_sizes), sum(received_sizes)) == (sent.numel(), received.numel())
        sizes = tuple(sent_sizes), tuple(received_sizes)
        return self._begin("exchanged", _Call(("exchange", what), sent, received, sent.clone(), sizes))

    def _begin(self, ends: str, call: _Call) -> MadeUpCollective:
        assert self._met
        if self._hub.draw.random() < self._hub.failing:
            self._hub.ended["refused"] += 1
            raise RuntimeError("Connection closed by peer")
        work = MadeUpCollective(self._hub, self._made, self._made.add(self._rank, call), self._rank, ends)
        self._works.append(work)
        return work

    def give_up(self) -> None:
        self._met = False
        self._fails = True

    @property
    def can_move(self) -> bool:
        """True if the oldest collective under way may end."""
        self._works = [work for work in self._works if not work.how]
        return bool(self._works) and self._works[0].may_end


class MadeUpCollective:
    """A collective on one member. It waits for those from whom something is to come, and for nobody else: as NCCL.

    What others have sent is read as late as possible: when the collective ends here.

    Args:
        ends: the word for its success (Hub.ended).
    """

    def __init__(self, hub: Hub, made: _Made, number: int, rank: int, ends: str) -> None:
        self._hub = hub
        self._made = made
        self._number = number
        self._rank = rank
        self._ends = ends
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
        return [rank for rank, size in zip(self._made.members, self._received_sizes, strict=True) if size]

    @property
    def _received_sizes(self) -> Sequence[int]:
        members = len(self._made.members)
        return self._call.sizes[1] or [len(self._call.received) // members] * members

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
                self.how = self._ends
            self._hub.ended[self.how] += 1
        return bool(self.how)

    def _receive(self) -> None:
        place = self._made.members.index(self._rank)
        parts = self._call.received.split(self._received_sizes)
        for rank, part in zip(self._made.members, parts, strict=True):
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

    collectives = GROUP

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
