"""A worker's connection to the others: it sends messages, and receives those that have arrived.

`SocketChannel` is the one over real links. The simulated cluster has its own (tests/cluster/wires.py).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.generations import ControllerFence
from elaswave_spmd.runtime.devices import Device, HostCopy
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Interrupted, Item, Mailbox, PeerClosed

_FP32 = (m.PartialSum, m.ReducedGradient, m.Addend, m.PageState, m.FinalPages)
_ADDED = (m.PartialSum, m.ReducedGradient, m.Addend)


@dataclass(frozen=True)
class Incoming:
    """A message that has arrived; its payload, if it has one, is flat, in the dtype of `payload_dtype`.

    Args:
        placed: the payload lies at the device's place, in memory of its own that was allocated there.
    """

    sender: int
    message: m.AnyMessage
    payload: Tensor | None = None
    placed: bool = False


class Channel(Protocol):
    """A worker's only connection to other processes.

    Sending never blocks, and the memory that was sent from must not change until the step is decided, unless the
    channel says that it copies. A payload leaves from wherever it lies and arrives in host memory; sums, which are
    added to others, arrive at the device's `place`.
    """

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send to a worker, or to the controller. What is sent to one peer arrives in order, or not at all.

        A payload may have no elements: it arrives as such, and not as none.
        """
        ...

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        """Memory for a payload, fp32 [num_elements], that is yet to be written and will be sent to a peer, once.

        Sending it does not copy it: the peer reads it there. None where there is no such memory.
        """
        ...

    def reaches(self, peer: int) -> bool:
        """True if there is a link to a worker. One that is an epoch ahead may send something before there is."""
        ...

    def receive_all(self) -> list[Incoming]:
        """Everything that has arrived since the last call, in the order of arrival; never waits."""
        ...

    def reject(self, reason: str) -> None:
        """Count a message that was refused; the controller reports the numbers."""
        ...

    @property
    def rejected(self) -> Mapping[str, int]:
        """The messages and connections that were refused so far: reason -> number."""
        ...

    @property
    def copies_payloads(self) -> bool:
        """True if the memory that was sent from may change as soon as `send` has returned."""
        ...


class ForwardingChannel:
    """A channel that leaves all to another one: the base of those that do something more with what is sent.

    Args:
        channel: does the work.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`."""
        self._channel.send(peer, message, payload)

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        """Memory for a payload that is yet to be written; see `Channel.lend`."""
        return self._channel.lend(peer, num_elements)

    def reaches(self, peer: int) -> bool:
        """True if there is a link to a worker; see `Channel.reaches`."""
        return self._channel.reaches(peer)

    def receive_all(self) -> list[Incoming]:
        """Return the messages that have arrived; see `Channel.receive_all`."""
        return self._channel.receive_all()

    def reject(self, reason: str) -> None:
        """Count a message that was refused; see `Channel.reject`."""
        self._channel.reject(reason)

    @property
    def rejected(self) -> Mapping[str, int]:
        """The messages and connections that were refused so far; see `Channel.rejected`."""
        return self._channel.rejected

    @property
    def copies_payloads(self) -> bool:
        """True if what is sent is copied; see `Channel.copies_payloads`."""
        return self._channel.copies_payloads


def payload_dtype(message: m.Message, compute: torch.dtype) -> torch.dtype:
    """The dtype of a message's payload.

    It is fp32 for sums, gradients and state, bytes for tuples and for what a pair was to bring, and the compute dtype
    for everything else.
    """
    if isinstance(message, m.PairSent):
        return torch.uint8
    if isinstance(message, m.Activation | m.ActivationGradient) and message.forms:
        return torch.uint8
    return torch.float32 if isinstance(message, _FP32) else compute


def tensor_of(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """A received payload as a flat tensor that may be overwritten; copied only where the memory is read-only."""
    if not buffer.nbytes:  # `frombuffer` refuses it
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer, dtype=dtype)


def frame_of(payload: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, where they lie."""
    return memoryview(payload.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def arrived(message: m.AnyMessage, payload: Tensor, device: Device) -> Tensor:
    """A payload where a worker wants it: sums at the device's place, others in host memory until they are used."""
    return device.to_place(payload) if isinstance(message, _ADDED) else payload


class WorkerStopped(Exception):  # noqa: N818  (the regular end of a worker, not an error)
    """The controller told this worker to end, or is gone and there is nothing left to complete."""


class SocketChannel:
    """A channel over real links. Messages are encoded; payloads are sent from the memory that they lie in.

    Where the device has pinned copies, a payload is copied to host memory while the device goes on computing. It leaves
    when it is there, and everything that is sent to the same peer after it leaves after it.

    Args:
        links: to the peers.
        mailbox: what the links have received.
        compute: dtype of activations and published parameters.
        device: of the payloads.
        early: messages that arrived before this channel was made.
        fence: that has had the Reconfigure which came before this channel was made; None: none has come.
        has_agent: the life pipe is that of an agent, whose end is final: no other one takes its place.
        timeouts: of the run, for a worker without a controller whose step takes longer than it may live; None: it may
            live for ever.
    """

    def __init__(
        self,
        links: Links,
        mailbox: Mailbox,
        compute: torch.dtype,
        device: Device,
        early: Sequence[Envelope] = (),
        fence: ControllerFence | None = None,
        *,
        has_agent: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        self._links = links
        self._mailbox = mailbox
        self._compute = compute
        self._device = device
        self._early: list[Item] = list(early)
        self._fence = fence or ControllerFence()
        self._leaves = False
        self._has_agent = has_agent
        self._timeouts = timeouts
        self._saves_at = math.inf  # once the controller is gone: then the step under way is given up
        self.is_abandoned = False
        """The agent is gone: nobody adopts this worker any more."""
        self._copies = device.kind.capabilities.pinned_copies
        self._leaving: dict[int, deque[tuple[bytes, HostCopy | None]]] = {}

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        header = m.encode(message)
        # While a payload to this peer is being copied, whatever follows it waits too: messages arrive in order.
        if peer in self._leaving or (self._copies and payload is not None):
            copy = None if payload is None else self._device.copy_to_host(payload)
            self._leaving.setdefault(peer, deque()).append((header, copy))
        else:
            frames = () if payload is None else (frame_of(self._device.to_host(payload)),)
            self._links.send(peer, header, frames)

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        if not self.copies_payloads or self._device.place.type != "cpu":
            return None  # it is sent from where it lies, or copied to host memory first
        lent = self._links.lend(peer, torch.float32.itemsize * num_elements)
        return None if lent is None else torch.from_numpy(lent).view(torch.float32)

    def is_copying(self) -> bool:
        """Send what has been copied to host memory. Returns True if copies are still under way; never waits."""
        for peer, queue in list(self._leaving.items()):
            while queue and (queue[0][1] is None or queue[0][1].done()):
                header, copy = queue.popleft()
                self._links.send(peer, header, () if copy is None else (frame_of(copy.wait()),))
            if not queue:
                del self._leaving[peer]
        return bool(self._leaving)

    def reaches(self, peer: int) -> bool:
        return self._links.reaches(peer)

    def receive_all(self) -> list[Incoming]:
        """Everything that has arrived. The end of the link to the controller is a LinkClosed(peer=CONTROLLER).

        Raises:
            WorkerStopped: the controller says so, or has been gone for so long that the step under way is given up.
        """
        if self._leaving:
            self.is_copying()
        items = self._mailbox.take_all()
        if self._early:
            items, self._early = [*self._early, *items], []
        found: list[Incoming] = []
        closed: list[PeerClosed] = []
        for item in items:
            if isinstance(item, ControllerLost) and (self._has_agent or not self._fence.was_adopted):
                self.is_abandoned = self._has_agent
                self._controller_lost()
                found.append(Incoming(self._links.me, m.LinkClosed(self._links.me, CONTROLLER)))
            if isinstance(item, Interrupted):  # by the handler of SIGTERM
                self._leaves = True
                self.send(CONTROLLER, m.Leaving(self._links.me))
            if item == PeerClosed(CONTROLLER) and CONTROLLER in self._links.peers:
                continue  # the link to a controller of the past
            if item == PeerClosed(CONTROLLER):
                self._controller_lost()
            if isinstance(item, PeerClosed):
                closed += [item] if item.peer != CONTROLLER else []
                found.append(Incoming(self._links.me, m.LinkClosed(self._links.me, item.peer, item.was_linked)))
            if isinstance(item, Envelope) and (incoming := self._decode(item)) is not None:
                if isinstance(incoming.message, m.Stop):
                    raise WorkerStopped
                if isinstance(
                    adopt := incoming.message, m.Adopt
                ):  # at once: what follows may be the end of the old link
                    self._links.drop(CONTROLLER)
                    self._links.connect(CONTROLLER, adopt.address)
                    self._saves_at = math.inf
                found.append(incoming)
        if closed:
            self._report_closed(closed)
        if not found and time.monotonic() >= self._saves_at:
            raise WorkerStopped
        return found

    def _report_closed(self, closed: Sequence[PeerClosed]) -> None:
        """Tell the controller of closed links. It finds out whether the peers are lost, or the links alone.

        Those that were found closed at once are one message: if a rack is lost, each survivor loses many links.
        """
        me, ended = self._links.me, [item.peer for item in closed if item.was_linked]
        if len(ended) > 1:
            self.send(CONTROLLER, m.LinksClosed(me, tuple(dict.fromkeys(ended))))
        for item in closed:
            if len(ended) == 1 or not item.was_linked:
                self.send(CONTROLLER, m.LinkClosed(me, item.peer, item.was_linked))

    def _controller_lost(self) -> None:
        """Note the time at which the step under way is given up, if it takes so long: the state before it is saved."""
        if self._timeouts is not None:
            seconds = self._timeouts.orphans_step(is_abandoned=self.is_abandoned)
            self._saves_at = min(self._saves_at, time.monotonic() + seconds)

    def link_facts(self, members: Iterable[int]) -> m.Adopted:
        """The facts of this worker's links for a controller that has come back; the rest is the executor's."""
        me, (epoch, data) = self._links.me, self._fence.unpacker.last
        closed = tuple(sorted({*members} - {*self._links.peers, me}))
        return m.Adopted(me, self._fence.generation, 0, epoch, data, closed=closed, leaves=self._leaves)

    def reject(self, reason: str) -> None:
        self._links.reject(reason)

    @property
    def rejected(self) -> Mapping[str, int]:
        return self._links.rejected

    @property
    def copies_payloads(self) -> bool:
        return self._links.copies_payloads and not self._copies

    def _decode(self, envelope: Envelope) -> Incoming | None:
        """The message with its payload as a tensor; None if it is none, or not for this worker, which is counted."""
        message = decoded(envelope, self._links, self._fence)
        if message is None or not envelope.payloads:
            return None if message is None else Incoming(envelope.sender, message)
        dtype, first = payload_dtype(message, self._compute), envelope.payloads[0]
        if len(envelope.payloads) > 1 or first.nbytes % dtype.itemsize:
            self.reject(admission.SIZE)
            return None
        payload = tensor_of(first, dtype)
        return Incoming(envelope.sender, message, arrived(message, payload, self._device))


def elements_in(envelope: Envelope, message: m.AnyMessage, compute: torch.dtype) -> int | None:
    """The elements of an envelope's payload, of the dtype that the message has; None: it came without one."""
    if not envelope.payloads:
        return None
    return sum(payload.nbytes for payload in envelope.payloads) // payload_dtype(message, compute).itemsize


def decoded(envelope: Envelope, links: Links, fence: ControllerFence) -> m.AnyMessage | None:
    """The message in an envelope that came to a worker; None if it is none, or not for a worker, which is counted.

    Of a controller of the past nothing is heard, nor counted: what it had sent may come late.

    Raises:
        RunError: it is a change to another Reconfigure than the last one.
    """
    try:
        message = m.decode(envelope.header)
    except msgspec.MsgspecError:
        links.reject(admission.UNREADABLE)
        return None
    if why := admission.not_for_workers(message, envelope.sender, me=links.me, controller=CONTROLLER):
        links.reject(why)
        return None
    if envelope.sender != CONTROLLER:
        return message
    try:
        return fence.admitted(message)
    except msgspec.MsgspecError:
        links.reject(admission.UNREADABLE)
        return None
