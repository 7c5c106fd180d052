"""Tensors that cross from one stage to another: those that came, and those that were sent.

A sender keeps what it sent until the step is decided: when the receiver is lost, the worker that takes its
micro-batches over gets them again, and nobody has to run forward or backward a second time to make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.scheduling.placement import Placement

ACTIVATION, GRADIENT, VALIDATION = "activation", "gradient", "validation activation"

Crossing = m.Activation | m.ActivationGradient


class BoundaryKey(NamedTuple):
    """Names a tensor that crosses, whoever sends it: `layer` is the consumer's first, or last for a gradient."""

    kind: str
    step: int
    microbatch: int
    layer: int


class Send(Protocol):
    def __call__(self, peer: int, message: m.Message, payload: Tensor | None = None, /) -> None: ...


class Boundaries:
    """The boundary tensors of one worker. What was sent is kept until its step is decided.

    Args:
        device: where they lie, those that came too.
    """

    def __init__(self, rank: int, send: Send, device: Device) -> None:
        self._rank, self._send, self._device = rank, send, device
        self._received: dict[BoundaryKey, Tensor] = {}
        self._kept: dict[BoundaryKey, Tensor] = {}
        self._used: dict[BoundaryKey, Tensor] | None = None  # what was taken since STATUS

    def send(self, peer: int | None, message: Crossing, tensor: Tensor) -> None:
        """To the micro-batch's worker on the next stage; None: nobody needs it now, but somebody may later."""
        key = _key(message)
        if key.kind != VALIDATION:
            self._kept[key] = tensor
        if peer == self._rank:
            self._received[key] = tensor
        elif peer is not None:
            self._send(peer, message, tensor)

    def receive(self, message: Crossing, payload: Tensor) -> None:
        """Files what came, in memory aligned as if it had been made here."""
        self._received[_key(message)] = self._device.from_host(payload.view(message.shape))

    def __contains__(self, key: BoundaryKey) -> bool:
        return key in self._received

    def arrived(self, kind: str, step: int, layer: int) -> Callable[[int], bool]:
        """A function of a micro-batch: True if its tensor of this kind has come."""
        return lambda microbatch: BoundaryKey(kind, step, microbatch, layer) in self._received

    def pop(self, key: BoundaryKey) -> Tensor:
        tensor = self._received.pop(key)
        if self._used is not None:
            self._used[key] = tensor
        return tensor

    def hold(self) -> None:
        """From a STATUS to the PLACE after it, what is taken is not lost.

        A peer that has its PLACE already may have sent it for the new plan, and does not send it again.
        """
        self._used = {} if self._used is None else self._used

    def let_go(self) -> None:
        """The PLACE is here: what was taken meanwhile is there again."""
        self._received |= self._used or {}
        self._used = None

    def forget_all(self) -> None:
        """Nothing of what came or was sent is to be used any more."""
        self._received.clear()
        self._kept.clear()
        self._used = None if self._used is None else {}

    def put_back(self, key: BoundaryKey, tensor: Tensor) -> None:
        """What was taken for an action that could not be finished."""
        self._received[key] = tensor

    def kept(self, kind: str, step: int) -> tuple[tuple[int, int], ...]:
        """(layer, micro-batch) of what is kept."""
        return tuple(sorted((key.layer, key.microbatch) for key in self._kept if (key.kind, key.step) == (kind, step)))

    def send_again(self, step: int, work: Sequence[m.Recompute], placement: Placement) -> None:
        """Gives the workers of a salvage plan what is kept here of their inputs."""
        for line in work:
            layers = placement.layers_of_stage(line.stage)
            if line.forward:
                self._again(BoundaryKey(ACTIVATION, step, line.microbatch, layers.start), line.worker)
            if line.backward:
                self._again(BoundaryKey(GRADIENT, step, line.microbatch, layers.stop - 1), line.worker)

    def _again(self, key: BoundaryKey, peer: int) -> None:
        tensor = self._kept.get(key)
        if tensor is None:
            return
        make: Callable[..., Crossing] = m.Activation if key.kind == ACTIVATION else m.ActivationGradient
        self.send(peer, make(key.step, key.microbatch, key.layer, tuple(tensor.shape)), tensor)

    def forget(self, step: int) -> None:
        """The step is decided: nobody can ask for its tensors again. Validation tensors of older versions go too."""
        for table in (self._received, self._kept):
            for key in [k for k in table if k.step < step or (k.step == step and k.kind != VALIDATION)]:
                del table[key]


def _key(message: Crossing) -> BoundaryKey:
    if isinstance(message, m.ActivationGradient):
        return BoundaryKey(GRADIENT, message.step, message.microbatch, message.layer)
    kind = VALIDATION if message.validation else ACTIVATION
    return BoundaryKey(kind, message.step, message.microbatch, message.layer)
