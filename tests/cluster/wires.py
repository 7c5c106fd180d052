"""The simulated cluster's links: lists of encoded messages, delivered per link in order, between links at random."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.generations import ControllerFence
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.worker.channel import Incoming, arrived, payload_dtype, tensor_of
from tests.cluster.faults import RECEIVER, AnyFault, Link, MessageFault


@dataclass(frozen=True)
class InFlight:
    """A message on its way, as a link has it: encoded, its payload still in the sender's memory.

    Args:
        first: encoded messages that belong to it, and come just before it.
    """

    sender: int
    header: bytes
    payload: Tensor | None
    first: tuple[bytes, ...] = ()

    def arrive(self, compute: torch.dtype, device: Device) -> Incoming:
        """The payload is read now, at the latest time a link may read it: overwriting it before shows as wrong bits."""
        message = m.decode(self.header)
        if self.payload is None:
            return Incoming(self.sender, message)
        data = device.to_host(self.payload).reshape(-1).view(torch.uint8).numpy().tobytes()
        payload = tensor_of(memoryview(data), payload_dtype(message, compute))
        return Incoming(self.sender, message, arrived(message, payload, device))


_OLD = -1000
"""Less the generation of a controller that has died: the sender of its links, as far as their order goes."""
PUT_OFF = "put off"
"""The time in which a worker has micro-batches left of which nothing but the weight gradients is to come, as a point
for `Lateness`."""


@dataclass(frozen=True)
class Lateness:
    """When the controller's messages arrive at a worker: in the middle of what it computes, if it computes.

    Links are slow and losses are noticed early, so that a step has not come to a halt when it is interrupted.

    Args:
        point: a FaultPoint by name, or PUT_OFF. They wait until their receiver has passed it: they come after the layer
            that it computes then.
        looks: or has looked so many times in vain; it may wait for a message, and pass no point.
        slow: share of the looks of a worker at which nothing arrives on a link.
        limits: seed of how many micro-batches workers keep, drawn for every mesh epoch; 0: as many as by rule.
        paces: seed of the paces that workers are sent in every mesh epoch (paces.py); 0: none are.
        tried: seed of other limits that workers are sent now and then, each at its own time (put_off.py); 0: none are.
    """

    point: str
    looks: int
    slow: float
    limits: int = 0
    paces: int = 0
    tried: int = 0


class Wires:
    """All links of a cluster.

    Args:
        compute: dtype of activations and published parameters.
        device: of all workers.
        draw: decides what arrives when.
        uneven: one link in ten is much slower than the others.
        late: when the controller's messages arrive; None: as any other.
    """

    def __init__(
        self,
        compute: torch.dtype,
        device: Device,
        draw: random.Random,
        *,
        uneven: bool,
        late: Lateness | None = None,
    ) -> None:
        self._compute, self._device, self._random, self._uneven = compute, device, draw, uneven
        self._late = late
        self._in_vain: Counter[int] = Counter()  # receiver -> looks for a message of the controller that is late
        self._passed: set[int] = set()  # receivers that have passed the point of `late` since they looked
        self.in_flight: dict[Link, deque[InFlight]] = {}
        self._first: dict[Link, tuple[bytes, ...]] = {}  # what the next message of a link has before it
        self._links: dict[int, list[Link]] = {}  # by receiver
        self._slow: dict[Link, bool] = {}
        self.fences: defaultdict[int, ControllerFence] = defaultdict(ControllerFence)  # of receivers
        self._frozen: dict[int, defaultdict[Link, int]] = {}  # of who stands still: how much of it is out, by link

    def has_some_for(self, peer: int) -> bool:
        """True if a message is on its way to `peer` from a worker that is not stopped."""
        return any(self.in_flight[ln] and self._is_out(ln) for ln in self._links.get(peer, ()))

    def _is_out(self, link: Link) -> bool:
        return link[0] not in self._frozen or self._frozen[link[0]][link] > 0

    def put(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        """Puts a message on its link."""
        self.put_encoded(sender, peer, m.encode(message), payload)

    def put_encoded(self, sender: int, peer: int, header: bytes, payload: Tensor | None) -> None:
        """Puts an encoded message on its link."""
        link = sender, peer
        if link not in self.in_flight:
            self.in_flight[link] = deque()
            insort(self._links.setdefault(peer, []), link)
        self.in_flight[link].append(InFlight(sender, header, payload, self._first.pop(link, ())))

    def put_first(self, sender: int, peer: int, header: bytes) -> None:
        """Puts an encoded message on its link that belongs to the next one: both arrive, or none."""
        self._first[sender, peer] = (*self._first.get((sender, peer), ()), header)

    def arrivals(self, peer: int) -> Iterator[Incoming]:
        """Takes some of the messages that are on their way to `peer`: of each link a first part, drawn."""
        links = [link for link in self._links.get(peer, ()) if self.in_flight[link]]
        for link in self._random.sample(links, len(links)):
            if self._is_late(link) or (self._uneven and self._waits(link)):
                continue
            queue, frozen = self.in_flight[link], self._frozen.get(link[0])
            at_once = self._late is not None and link[0] == CONTROLLER
            for _ in range(len(queue) if at_once else self._random.randint(0, len(queue))):
                if frozen is not None:
                    if not self._is_out(link):
                        break
                    frozen[link] -= 1
                passing = queue.popleft()
                incoming = passing.arrive(self._compute, self._device)
                for header in passing.first:
                    self.fences[peer].admitted(m.decode(header))
                if incoming.sender == CONTROLLER:
                    if (message := self.fences[peer].admitted(incoming.message)) is None:
                        continue
                    incoming = replace(incoming, message=message)
                yield incoming

        self._passed.discard(peer)

    def passed(self, rank: int, point: str) -> None:
        """A worker passes a point of a step: messages of the controller that wait for this are let through."""
        if self._late is not None and point == self._late.point:
            self._passed.add(rank)

    def _is_late(self, link: Link) -> bool:
        if self._late is None:
            return False
        if CONTROLLER not in link:
            return self._random.random() < self._late.slow
        peer = link[1]
        if peer == CONTROLLER:
            return False
        if peer not in self._passed and self._in_vain[peer] < self._late.looks:
            self._in_vain[peer] += 1
            return True
        self._in_vain[peer] = 0
        return False

    def _waits(self, link: Link) -> bool:
        if link not in self._slow:
            self._slow[link] = self._random.random() < 0.1
        return self._slow[link] and self._random.random() < 0.95

    def freeze(self, rank: int) -> None:
        """The process is stopped: nothing that it sends from now on arrives before `thaw`."""
        self._frozen[rank] = defaultdict(int, {ln: len(q) for ln, q in self.in_flight.items() if ln[0] == rank})

    def thaw(self, rank: int) -> None:
        del self._frozen[rank]

    def drop(self, link: Link, kept: float = 0.0) -> list[InFlight]:
        """The link is lost. Returns what was on it; a first part, this share of it, still arrives."""
        queue = self.in_flight.get(link, deque())
        lost = [queue.pop() for _ in range(len(queue) - int(kept * len(queue)))]
        return lost[::-1]

    def cut(self, rank: int, out: Link | None) -> None:
        """The process has ended. Of its messages each link still delivers a first part, drawn, and `out` all."""
        for (sender, peer), queue in self.in_flight.items():
            if sender == rank and (sender, peer) != out:
                keep = self._random.randint(0, len(queue))
                while len(queue) > keep:
                    queue.pop()
            if peer == rank:
                queue.clear()

    def controller_died(self, generation: int) -> None:
        """What this controller has sent to each worker still arrives in part, and then its links are closed.

        That comes on links of their own: nothing orders it with what the next controller sends.
        """
        self.cut(CONTROLLER, None)
        old = _OLD - generation
        for peer in [peer for sender, peer in self.in_flight if sender == CONTROLLER]:
            left = self.in_flight.pop((CONTROLLER, peer))
            left.append(InFlight(CONTROLLER, m.encode(m.LinkClosed(peer, CONTROLLER)), None))
            self.in_flight[old, peer] = left
            self._links[peer].remove((CONTROLLER, peer))
            insort(self._links[peer], (old, peer))


class Cluster(Protocol):
    """The part of the cluster that a worker's channel uses: messages, and the faults that happen at them."""

    def refused(self, rank: int, reason: str) -> None: ...

    def is_stranger(self, rank: int, peer: int) -> bool: ...

    def is_closed(self, rank: int, peer: int) -> bool: ...

    def deliver_some(self, rank: int) -> None: ...

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None: ...

    def at_message(self, rank: int, message: m.Message, side: str) -> None: ...

    def after_message(self, rank: int, message: m.Message, side: str) -> MessageFault | None: ...

    def inject(self, rank: int, fault: AnyFault) -> None: ...


class SimulatedChannel:
    """One worker's channel."""

    def __init__(self, rank: int, cluster: Cluster) -> None:
        self._rank, self._cluster = rank, cluster
        self.inbox: deque[Incoming] = deque()
        self.then: MessageFault | None = None  # happens when the message received last has been handled

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        if payload is not None and self.copies_payloads:
            payload = payload.clone()
        self._cluster.send(self._rank, peer, message, payload)

    @property
    def copies_payloads(self) -> bool:
        return bool(self._rank % 2)  # some do, and some do not

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        return torch.empty(num_elements) if self.copies_payloads and peer % 2 else None

    def reaches(self, peer: int) -> bool:
        return not self._cluster.is_stranger(self._rank, peer) and not self._cluster.is_closed(self._rank, peer)

    def receive_all(self) -> list[Incoming]:
        self._cluster.deliver_some(self._rank)
        found = []
        while self.then is None and self.inbox:
            found.append(self.receive_one(0))
        if not found and self.then is not None:
            then, self.then = self.then, None
            self._cluster.inject(self._rank, then)
        return found

    def reject(self, reason: str) -> None:
        self._cluster.refused(self._rank, reason)

    @property
    def rejected(self) -> dict[str, int]:
        return {}  # the cluster counts what all of its workers refuse

    def receive_one(self, place: int) -> Incoming:
        """Takes a message out of the inbox, with the faults that happen to its receiver before and after it."""
        message = self.inbox[place].message
        self._cluster.at_message(self._rank, message, RECEIVER)
        taken = self.inbox[place]
        del self.inbox[place]
        self.then = self._cluster.after_message(self._rank, message, RECEIVER)
        return taken
