"""A simulated cluster whose stages publish through made-up process groups, with the failures of real ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker

# The chance that a group is complete, or a broadcast has ended, when a worker looks whether it is.
_MEETS = 0.5
_COMPLETES = 0.3


@dataclass
class _Made:
    """One group, and the broadcasts that its members have called. Each member numbers its calls from 0.

    Args:
        waits_for_all: a root's broadcast ends only when all other members have called it too.
        met: members that have opened the group.
        calls: rank -> the tensors of its calls.
        sent: number of a call -> the values of the root at the time of its call.
        issued: (root, elements) of each call, which has to be the same for all members.
        complete: numbers of the calls that have ended at their roots, which may use that memory again.
    """

    members: tuple[int, ...]
    waits_for_all: bool
    met: set[int] = field(default_factory=set)
    calls: dict[int, list[Tensor]] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)
    issued: list[tuple[int, int]] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)


class Hub:
    """All groups of a cluster.

    Args:
        lost: workers that have ended or are stopped; a broadcast that they have called may still arrive, or not.
        failing: how often a broadcast fails though nobody is lost.
    """

    def __init__(self, seed: int, lost: Sequence[int], failing: float) -> None:
        self.draw = random.Random(f"groups {seed}")
        self.lost = lost
        self.failing = failing
        self.made: dict[tuple[int, int, tuple[int, ...]], _Made] = {}  # by incarnation, mesh epoch and members
        self.ended: Counter[str] = Counter()
        """How broadcasts have ended: "received", "sent", "failed", or were "refused"."""


class MadeUpGroup:
    """A worker's end of its group."""

    def __init__(self, rank: int, hub: Hub, incarnation: int) -> None:
        self._rank = rank
        self._hub = hub
        self._incarnation = incarnation
        self._epoch = -1
        self._met = False
        self._fails = False
        self._works: list[MadeUpWork] = []

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

    def broadcast(self, values: Tensor, root: int) -> MadeUpWork:
        assert self._met and root in self._made.members
        if self._hub.draw.random() < self._hub.failing:
            self._hub.ended["refused"] += 1
            raise RuntimeError("Connection closed by peer")
        calls = self._made.calls.setdefault(self._rank, [])
        number, what = len(calls), (root, values.numel())
        calls.append(values)
        if root == self._rank:
            self._made.sent[number] = values.clone()
        if number == len(self._made.issued):
            self._made.issued.append(what)
        assert self._made.issued[number] == what, "all members issue the same broadcasts in the same order"
        work = MadeUpWork(self._hub, self._made, number, root, self._rank)
        self._works.append(work)
        return work

    def give_up(self) -> None:
        self._met = False
        self._fails = True

    @property
    def can_move(self) -> bool:
        """True if the oldest broadcast under way may end."""
        self._works = [work for work in self._works if not work.how]
        return bool(self._works) and self._works[0].may_end


class MadeUpWork:
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
            calls = self._made.calls
            return not self._made.waits_for_all or all(len(calls.get(r, ())) > self._number for r in self._made.members)
        if self._fails:
            return True
        if len(self._made.calls.get(self._root, ())) <= self._number:
            return self._root in self._hub.lost and not self._hangs
        if self._root in self._hub.lost:
            if self._arrives is None:
                self._arrives = self._hub.draw.random() < 0.5
            return self._arrives or not self._hangs
        return True

    def is_completed(self) -> bool:
        if not self.how and self.may_end and self._hub.draw.random() < _COMPLETES:
            sent = self._made.sent.get(self._number)
            if self._fails or (self._root != self._rank and (sent is None or self._arrives is False)):
                self.how = "failed"
            elif self._root == self._rank:
                self.how = "sent"
                self._made.complete.add(self._number)
            else:
                self._receive(sent)
                self.how = "received"
            self._hub.ended[self.how] += 1
        return bool(self.how)

    def _receive(self, sent: Tensor | None) -> None:
        now = self._made.calls[self._root][self._number]
        free = self._number in self._made.complete
        assert sent is not None and (free or sent.equal(now)), "a root leaves its memory alone until it is complete"
        self._made.calls[self._rank][self._number].copy_(sent)

    def wait(self) -> None:
        assert self.how, "it is waited for when it has ended"
        if self.how == "failed":
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
