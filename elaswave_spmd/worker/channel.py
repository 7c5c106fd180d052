"""What the executor needs of the outside: send a message, take those that came."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device, HostCopy
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import ControllerGone, Envelope, Interrupted, Item, Mailbox, PeerClosed

_FP32 = (m.PartialSum, m.ReducedGradient, m.PageState, m.FinalPages)


@dataclass(frozen=True)
class Incoming:
    """A message that arrived. `payload` is flat, in the dtype that its kind implies."""

    sender: int
    message: m.AnyMessage
    payload: Tensor | None = None


class Channel(Protocol):
    """The executor's only way out. Sending never blocks; what is sent must not change until the step is decided.

    A payload leaves from wherever it lies, and arrives in host memory; sums, which are added to others as they come, at
    the device's `place`.
    """

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None: ...

    def take(self) -> list[Incoming]:
        """Everything that has arrived since the last call, in order of arrival; never waits."""
        ...


def payload_dtype(message: m.Message, compute: torch.dtype) -> torch.dtype:
    """Reduced gradients and masters travel in fp32; activations and published parameters in the compute dtype."""
    return torch.float32 if isinstance(message, _FP32) else compute


def tensor_of(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """A received payload as a flat tensor that may be overwritten, without a copy where the link gave such memory."""
    return torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer, dtype=dtype)


def frame_of(payload: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, where they lie."""
    return memoryview(payload.reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def arrived(message: m.AnyMessage, payload: Tensor, device: Device) -> Tensor:
    """A payload in host memory, where a worker wants it: what is not a sum is copied from there to its place later."""
    return device.to_place(payload) if isinstance(message, (m.PartialSum, m.ReducedGradient)) else payload


class Stopped(Exception):  # noqa: N818  (an end, no error)
    """The controller told this worker to end, or is gone."""


class SocketChannel:
    """A port over real links. Messages are encoded; payloads are sent from, and read where, they lie.

    Payloads of a device with pinned copies are copied to host memory while it goes on computing. They leave when they
    are there, and what is sent to the same peer after them leaves after them: links deliver in order.

    Args:
        compute: dtype of activations and published parameters.
        device: of the payloads.
        early: messages that arrived before this port existed.
    """

    def __init__(
        self, links: Links, mailbox: Mailbox, compute: torch.dtype, device: Device, early: Sequence[Envelope] = ()
    ) -> None:
        self._links, self._mailbox, self._compute, self._device = links, mailbox, compute, device
        self._early: list[Item] = list(early)
        self._copies = device.kind.capabilities.pinned_copies
        self._leaving: dict[int, deque[tuple[bytes, HostCopy | None]]] = {}

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        header = m.encode(message)
        if peer in self._leaving or (self._copies and payload is not None):
            copy = None if payload is None else self._device.copy_to_host(payload)
            self._leaving.setdefault(peer, deque()).append((header, copy))
        else:
            frames = () if payload is None else (frame_of(self._device.to_host(payload)),)
            self._links.send(peer, header, frames, lend=isinstance(message, m.PageState))  # a copy made to be taught

    def is_copying(self) -> bool:
        """Sends what lies in host memory by now. Returns whether copies are still under way; never waits."""
        for peer, queue in list(self._leaving.items()):
            while queue and (queue[0][1] is None or queue[0][1].done()):
                header, copy = queue.popleft()
                self._links.send(peer, header, () if copy is None else (frame_of(copy.wait()),))
            if not queue:
                del self._leaving[peer]
        return bool(self._leaving)

    def take(self) -> list[Incoming]:
        """Everything that has arrived. The end of the link to the controller is a LinkClosed(peer=CONTROLLER).

        Raises:
            Stopped: the controller says so.
        """
        if self._leaving:
            self.is_copying()
        items, self._early = [*self._early, *self._mailbox.take_all()], []
        found = []
        for item in items:
            if isinstance(item, ControllerGone):
                found.append(Incoming(self._links.me, m.LinkClosed(self._links.me, CONTROLLER)))
            if isinstance(item, Interrupted):
                self.send(CONTROLLER, m.Leaving(self._links.me))
            if isinstance(item, PeerClosed):
                closed = m.LinkClosed(self._links.me, item.peer)
                self.send(CONTROLLER, closed)
                found.append(Incoming(self._links.me, closed))
            if isinstance(item, Envelope):
                incoming = self._decode(item)
                if isinstance(incoming.message, m.Stop):
                    raise Stopped
                found.append(incoming)
        return found

    def _decode(self, envelope: Envelope) -> Incoming:
        message = m.decode(envelope.header)
        payload = None
        if envelope.payloads:
            payload = tensor_of(envelope.payloads[0], payload_dtype(message, self._compute))
            payload = arrived(message, payload, self._device)
        return Incoming(envelope.sender, message, payload)
