"""A simulated cluster whose workers have made-up pairs, with the failures of real ones.

What is drawn for pairs is drawn from a stream of its own: with them or without, all else is drawn alike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.stage_boundary import Crossing
from tests.cluster.faults import Link, MessageFault
from tests.cluster.grouped import GroupedCluster
from tests.cluster.processes import Worker

_COMPLETES = 0.4
"""The chance that a worker sees that a transfer has ended, when it looks."""
_PATIENCE = 300
"""Looks at a transfer after which it has taken too long."""
_LONG_PATIENCE = 3000


@dataclass
class _Way:
    """One direction of a pair, in one epoch.

    Args:
        met: its ends that have come.
        sent: (memory, what was in it), in the order of the calls.
        num_posted: calls of the receiver.
        fails: it cannot be made.
        waits: senders wait for their receivers, as with a payload that no buffer of the library takes.
    """

    fails: bool
    waits: bool = False
    met: set[int] = field(default_factory=set)
    sent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    num_posted: int = 0


class PairHub:
    """All pairs of a cluster.

    Args:
        lost: workers that have ended or are stopped; what they have sent may still arrive, or not.
        failing: how often a transfer fails though nobody is lost.
        losing: how often the message that belongs to a payload is lost, which no link does that goes on. So it is
            tried with boundary tensors alone: state has to come before the votes after it. Their payloads wait for
            the receiver then, so that somebody notices.
        meets: the chance that a worker sees that a pair is made, when it looks.
    """

    def __init__(self, seed: int, lost: Sequence[int], failing: float, losing: float, meets: float) -> None:
        self.draw = random.Random(f"pairs {seed}")
        self.lost, self.failing, self.losing, self.meets = lost, failing, losing, meets
        self.ways: dict[tuple[int, int, int, int], _Way] = {}  # by incarnation, mesh epoch, sender, receiver
        self.ended: Counter[str] = Counter()
        """How many were sent, received, failed, refused, lost their messages, or came out of order, by this word."""
        self.received: Counter[str] = Counter()  # transfers, by the kind of message
        self.lacking: set[tuple[int, int]] = set()
        """Receivers of lost messages: (incarnation, rank). Numbers that follow on a lost one are refused (P3)."""


class MadeUpPairs:
    """The pairs of one worker."""

    def __init__(self, rank: int, hub: PairHub, incarnation: int) -> None:
        self._rank, self._hub, self._incarnation = rank, hub, incarnation
        self._epoch = -1
        self._ways: dict[tuple[int, int], _Way] = {}
        self._seen: set[tuple[int, int]] = set()  # that are known to be made
        self._works: list[MadeUpTransfer] = []

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        assert epoch > self._epoch and rank == self._rank and rank not in {*receivers, *senders}
        self._epoch, self._works = epoch, []
        self._seen.clear()
        self._ways.clear()
        for way in sorted({(rank, peer) for peer in receivers} | {(peer, rank) for peer in senders}):
            key = self._incarnation, epoch, *way
            if key not in self._hub.ways:
                self._hub.ways[key] = _Way(self._hub.draw.random() < self._hub.failing)
            self._ways[way] = self._hub.ways[key]
            self._ways[way].met.add(rank)

    def sends_to(self, peer: int) -> bool:
        return self._is_made((self._rank, peer))

    def receives_from(self, peer: int) -> bool:
        return self._is_made((peer, self._rank))

    def _is_made(self, way: tuple[int, int]) -> bool:
        if way in self._seen:
            return True
        found = self._ways.get(way)
        if found is None or found.fails or found.met != {*way} or self._hub.draw.random() >= self._hub.meets:
            return False
        self._seen.add(way)
        return True

    def failure(self, peer: int) -> str:
        ways = [self._ways.get(way) for way in ((self._rank, peer), (peer, self._rank))]
        return "Timed out" if any(way is not None and way.fails for way in ways) else ""

    def send(self, peer: int, values: Tensor, what: str) -> MadeUpTransfer:
        way = self._begin((self._rank, peer), values)
        way.sent.append((values, values.clone()))
        return self._work(MadeUpTransfer(self._hub, way, len(way.sent) - 1, peer, None, what))

    def receive(self, peer: int, values: Tensor, what: str) -> MadeUpTransfer:
        way = self._begin((peer, self._rank), values)
        way.num_posted += 1
        return self._work(MadeUpTransfer(self._hub, way, way.num_posted - 1, peer, values, what))

    def _begin(self, way: tuple[int, int], values: Tensor) -> _Way:
        assert way in self._seen and values.dtype == torch.uint8 and values.dim() == 1 and values.numel()
        under_way = [work for work in self._works if work.way is self._ways[way] and not work.how]
        assert not under_way, "one transfer at a time in each direction"
        if self._hub.draw.random() < self._hub.failing:
            self._hub.ended["refused"] += 1
            raise RuntimeError("Connection closed by peer")
        return self._ways[way]

    def _work(self, work: MadeUpTransfer) -> MadeUpTransfer:
        self._works.append(work)
        return work

    def give_up(self, peer: int) -> None:
        for way in ((self._rank, peer), (peer, self._rank)):
            given_up = self._ways.pop(way, None)
            self._seen.discard(way)
            self._works = [work for work in self._works if work.way is not given_up]

    def can_move(self) -> bool:
        """True if something under way may end now, or may have taken too long at some time."""
        self._works = [work for work in self._works if not work.how]
        return bool(self._works) or any(not way.fails and way.met == {*ends} for ends, way in self._unseen())

    def _unseen(self) -> list[tuple[tuple[int, int], _Way]]:
        return [(ends, way) for ends, way in self._ways.items() if ends not in self._seen]


class MadeUpTransfer:
    """A transfer at one of its ends. What was sent is read as late as possible: when the transfer ends at the receiver.

    The n-th call of the receiver gets what the n-th call of the sender has given, whatever each of them thinks it is.

    Args:
        values: memory that is written; None at the sender.
    """

    def __init__(self, hub: PairHub, way: _Way, number: int, peer: int, values: Tensor | None, what: str) -> None:
        self.way, self.how = way, ""
        self._hub, self._number, self._peer, self._values, self._what = hub, number, peer, values, what
        self._fails = hub.draw.random() < hub.failing
        self._is_buffered = hub.draw.random() < 0.5  # a sender need not wait for its receiver
        self._arrives = hub.draw.random() < 0.5  # if the other end is lost
        self._hangs = hub.draw.random() < 0.5  # else
        self._looks, self._patience = 0, _LONG_PATIENCE if hub.draw.random() < 0.2 else _PATIENCE

    def _is_through(self) -> bool:
        if self._peer in self._hub.lost and not self._arrives:
            return False
        if self._values is None:
            return (self._is_buffered and not self.way.waits) or self.way.num_posted > self._number
        return len(self.way.sent) > self._number

    def is_completed(self) -> bool:
        if self.how:
            return True
        self._looks += 1
        through, gone = self._is_through(), self._peer in self._hub.lost and not self._hangs
        too_long = self._looks > self._patience
        if (self._fails or through or gone or too_long) and self._hub.draw.random() < _COMPLETES:
            self.how = "failed" if self._fails or not through else "sent" if self._values is None else "received"
            if self.how == "received":
                self._receive()
            self._hub.ended[self.how] += 1
        return bool(self.how)

    def _receive(self) -> None:
        sent, copy = self.way.sent[self._number]
        assert copy.equal(sent), "memory that is sent from stays as it is"
        assert self._values is not None and len(sent) == len(self._values), "a payload has the size that was announced"
        self._values.copy_(sent)
        self._hub.received[self._what] += 1

    def wait(self) -> None:
        assert self.how, "it is waited for when it has ended"
        if self.how == "failed":
            raise RuntimeError("Connection closed by peer")


class PairedCluster(GroupedCluster):
    """A cluster in which every stage has a group, and workers that have something for each other have pairs.

    Args:
        failing_pairs: `failing` of `PairHub`.
        losing, meets: as for `PairHub`; the others are those of `GroupedCluster`.
    """

    def __init__(
        self,
        *args: Any,
        failing_pairs: float = 0.01,
        losing: float = 0.01,
        meets: float = 0.5,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, seed=seed, **kwargs)
        self.pair_hub = PairHub(seed, self._absent, failing_pairs, losing, meets)
        self._pairs: dict[tuple[int, int], MadeUpPairs] = {}  # by incarnation of the controller, and rank

    def _make_controller(self, adoption: Adoption | None) -> None:
        super()._make_controller(adoption)
        self.controller._bounds = replace(self.controller._bounds, pairs=True)  # as with the setting

    def _pairs_of(self, rank: int) -> MadeUpPairs:
        incarnation = self._orders.incarnation
        return self._pairs.setdefault((incarnation, rank), MadeUpPairs(rank, self.pair_hub, incarnation))

    def _can_go(self, worker: Worker) -> bool:
        if super()._can_go(worker):
            return True
        direct = worker.executor.direct if worker.executor else None
        return direct is not None and not direct.idle and self._pairs_of(worker.rank).can_move()

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        if isinstance(_within(message), Crossing) and isinstance(message, m.PairSent):
            hub = self.pair_hub
            if hub.draw.random() < hub.losing:
                hub.ended["lost"] += 1
                hub.ways[self._orders.incarnation, message.epoch, sender, peer].waits = True
                hub.lacking.add((self._orders.incarnation, peer))
                return
        super().send(sender, peer, message, payload)

    def refused(self, rank: int, reason: str) -> None:
        """A worker has refused a message. One whose number is not the next is right to be, behind one that was lost."""
        hub = self.pair_hub
        if reason == admission.VALUE and (self._orders.incarnation, rank) in hub.lacking:
            hub.ended["out of order"] += 1
            return
        super().refused(rank, reason)

    def at_message(self, rank: int, message: m.Message, side: str, link: Link | None = None) -> None:
        super().at_message(rank, _within(message), side, link)

    def after_message(self, rank: int, message: m.Message, side: str) -> MessageFault | None:
        return super().after_message(rank, _within(message), side)


def _within(message: m.Message) -> m.Message:
    """The message whose payload a pair brings, at which faults happen as at others of its kind."""
    if isinstance(message, m.PairSent) and message.message and not message.resent:
        return m.decode(message.message)
    return message
