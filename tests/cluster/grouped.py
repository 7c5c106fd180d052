"""A simulated cluster whose stages publish through groups: made-up ones, with the failures that real ones have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker

_MEETS, _COMPLETES = 0.5, 0.3  # chances, at a look


@dataclass
class _Made:
    """One group: what its members have called, in the order of each."""

    members: tuple[int, ...]
    patient: bool  # a root's broadcast ends only when all others have called it
    met: set[int] = field(default_factory=set)
    calls: dict[int, list[Tensor]] = field(default_factory=dict)
    sent: dict[int, Tensor] = field(default_factory=dict)  # by number: the root's values when it called
    alike: list[tuple[int, int]] = field(default_factory=list)  # (root, elements) of each call
    complete: set[int] = field(default_factory=set)  # numbers that are so at their roots: whose memory is free then


class Hub:
    """All groups of a cluster.

    Args:
        lost: workers that are gone or stand still; of what they have called, anything may still arrive, or nothing.
        failing: how often a broadcast fails though nobody is lost.
    """

    def __init__(self, seed: int, lost: Sequence[int], failing: float) -> None:
        self.draw, self.lost, self.failing = random.Random(f"groups {seed}"), lost, failing
        self.made: dict[tuple[int, int, tuple[int, ...]], _Made] = {}  # by incarnation, mesh epoch and members
        self.ended: Counter[str] = Counter()
        """How broadcasts have ended: "received", "sent", "failed", or were "refused"."""


class MadeUpGroup:
    """A worker's end of its group."""

    def __init__(self, rank: int, hub: Hub, incarnation: int) -> None:
        self._rank, self._hub, self._incarnation = rank, hub, incarnation
        self._epoch, self._met, self._fails = -1, False, False
        self._works: list[MadeUpWork] = []

    def change(self, epoch: int, members: Sequence[int], rank: int) -> None:
        assert epoch > self._epoch and rank == self._rank and rank in members
        self._epoch, self._met, self._works = epoch, False, []
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
        if number == len(self._made.alike):
            self._made.alike.append(what)
        assert self._made.alike[number] == what, "all members issue the same broadcasts in the same order"
        work = MadeUpWork(self._hub, self._made, number, root, self._rank)
        self._works.append(work)
        return work

    def give_up(self) -> None:
        self._met, self._fails = False, True

    @property
    def can_move(self) -> bool:
        """Whether the oldest broadcast under way may end."""
        self._works = [work for work in self._works if not work.how]
        return bool(self._works) and self._works[0].may_end


class MadeUpWork:
    """A broadcast; the root's memory is read as late as can be: when it, or the receiver, completes."""

    def __init__(self, hub: Hub, made: _Made, number: int, root: int, rank: int) -> None:
        self._hub, self._made, self._number, self._root, self._rank = hub, made, number, root, rank
        self.how = ""
        self._fails = hub.draw.random() < hub.failing
        self._arrives: bool | None = None  # of a lost root's: drawn once
        self._hangs = hub.draw.random() < 0.5

    @property
    def may_end(self) -> bool:
        if self._root == self._rank and not self._fails:
            calls = self._made.calls
            return not self._made.patient or all(len(calls.get(r, ())) > self._number for r in self._made.members)
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
