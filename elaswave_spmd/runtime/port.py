"""What the executor needs of the outside: send a message, take those that came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.links import CONTROLLER, Links
from elaswave_spmd.runtime.mailbox import ControllerGone, Envelope, Interrupted, Item, Mailbox, PeerClosed

_FP32 = (m.NodeSum, m.Entry, m.PageState, m.FinalPages)


@dataclass(frozen=True)
class Incoming:
    """A message that arrived. `payload` is flat, in the dtype that its kind implies."""

    sender: int
    message: m.AnyMessage
    payload: Tensor | None = None


class Port(Protocol):
    """The executor's only way out. Sending never blocks; what is sent must not change until the step is decided."""

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


class Stopped(Exception):  # noqa: N818  (an end, no error)
    """The controller told this worker to end, or is gone."""


class LinkPort:
    """A port over real links. Messages are encoded; payloads are sent from, and read where, they lie.

    Args:
        compute: dtype of activations and published parameters.
        early: messages that arrived before this port existed.
    """

    def __init__(self, links: Links, mailbox: Mailbox, compute: torch.dtype, early: Sequence[Envelope] = ()) -> None:
        self._links, self._mailbox, self._compute = links, mailbox, compute
        self._early: list[Item] = list(early)
        self.controller_gone: Callable[[], None] | None = None
        """Called, once, when the controller has died; None: then `take` raises Stopped."""

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        frames: Sequence[memoryview] = ()
        if payload is not None:
            frames = (memoryview(payload.detach().reshape(-1).view(torch.uint8).numpy()),)  # pyright: ignore[reportArgumentType]
        self._links.send(peer, m.encode(message), frames)

    def take(self) -> list[Incoming]:
        """Raises Stopped when the controller says so."""
        items, self._early = [*self._early, *self._mailbox.take_all()], []
        found = []
        for item in items:
            if isinstance(item, ControllerGone):
                if self.controller_gone is None:
                    raise Stopped
                self.controller_gone()
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
        return Incoming(envelope.sender, message, payload)
