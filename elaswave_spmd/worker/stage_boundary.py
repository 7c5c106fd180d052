"""Activations and their gradients that cross from one stage to another: those received, and those sent.

A sender keeps what it sent until the step is decided. If the receiver is lost, the tensors are sent again to the worker
that takes over its micro-batches, and no forward or backward runs a second time to make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.activations import Activation, forms_sent, packed, unpacked

ACTIVATION, GRADIENT, VALIDATION = "activation", "gradient", "validation activation"

Crossing = m.Activation | m.ActivationGradient


class BoundaryKey(NamedTuple):
    """The id of a tensor, whichever worker sends it: `layer` is the consumer's first, or its last for a gradient."""

    kind: str
    step: int
    microbatch: int
    layer: int


class Send(Protocol):
    """Sends a message to a peer; never blocks."""

    def __call__(self, peer: int, message: m.Message, payload: Tensor | None = None, /) -> None: ...


class Boundaries:
    """The boundary tensors of one worker.

    Args:
        rank: of the worker.
        send: to the other workers.
        device: where the tensors lie, received ones too.
        first_trained: the first layer that has a backward; those before it have frozen parameters.
    """

    def __init__(self, rank: int, send: Send, device: Device, first_trained: int = 0) -> None:
        self._rank = rank
        self._send = send
        self._device = device
        self._first_trained = first_trained
        self._received: dict[BoundaryKey, Activation] = {}
        self._kept: dict[BoundaryKey, Activation] = {}
        self._used: dict[BoundaryKey, Activation] | None = None  # used since a StepReport; None: no change is under way
        self._shapes: dict[_Crossed, _Shapes] = {}

    def send(self, peer: int | None, message: Crossing, value: Activation) -> None:
        """Send an activation, or its gradient, to the micro-batch's worker on the other stage, and keep it.

        Args:
            peer: the worker; None: no worker needs it now, but after a loss one may.
            message: of the value (`message_of`).
        """
        key = _key(message)
        if key.kind != VALIDATION:  # a validation that is broken off is run again as a whole
            self._kept[key] = value
            if not self._stands_in(key):
                self._shapes[_crossed(key)] = _shapes(message)
        if peer == self._rank:  # it has changed its stage, and now needs what it had sent
            self._received[key] = value
        elif peer is not None:
            self._send(peer, message, packed(value))

    def has_other_shape(self, message: Crossing) -> bool:
        """True if a tensor cannot be right, since what this worker has sent of the micro-batch has another shape.

        The gradient of a micro-batch is like the activation that this worker has sent of it. Other micro-batches tell
        nothing: their samples may differ in shape, and where they do not a layer may still pack what is no padding. So
        an activation is held to nothing but the number of its elements (`recovery.admission`). Those of a validation
        are not compared: who gets them sends none back.
        """
        key = _key(message)
        if self._stands_in(key):
            return message.shape != (1,)
        return key.kind != VALIDATION and self._shapes.get(_crossed(key), _shapes(message)) != _shapes(message)

    def _stands_in(self, key: BoundaryKey) -> bool:
        """True for a gradient that no layer before the boundary needs: one zero crosses it (`eager.no_gradient`)."""
        return key.kind == GRADIENT and _boundary(key) <= self._first_trained

    def receive(self, message: Crossing, payload: Tensor, *, placed: bool = False) -> None:
        """File what was received, in memory that is aligned as if it had been made here.

        Args:
            placed: the payload lies in such memory already.
        """
        flat = payload if placed else self._device.from_host(payload)
        if message.forms:
            names = message.names if isinstance(message, m.Activation) else ()
            value = unpacked(flat, message.forms, names)
        else:
            value = flat.view(message.shape)
        self._received[_key(message)] = value

    def __contains__(self, key: BoundaryKey) -> bool:
        return key in self._received

    def arrived(self, kind: str, step: int, layer: int) -> Callable[[int], bool]:
        """A function of a micro-batch: True if its tensor of this kind has come."""
        return lambda microbatch: BoundaryKey(kind, step, microbatch, layer) in self._received

    def pop(self, key: BoundaryKey) -> Activation:
        """Return a received tensor, for an action that uses it up."""
        tensor = self._received.pop(key)
        if self._used is not None:
            self._used[key] = tensor
        return tensor

    def keep_all(self) -> None:
        """Keep received tensors that are used between a StepReport and the configuration after it.

        A peer that has entered the new configuration already may have sent such a tensor for the new plan, and does not
        send it again.
        """
        self._used = {} if self._used is None else self._used

    def restore_used(self) -> None:
        """Put the tensors back that were used since the StepReport: the plan may want them again."""
        self._received |= self._used or {}
        self._used = None

    def forget_validations(self) -> None:
        """Drop the tensors of validations: a mesh epoch is entered, in which a validation is run again as a whole.

        They are of its attempt in an older epoch. One of them may come of parameters that were damaged (H5).
        """
        for key in [key for key in self._received if key.kind == VALIDATION]:
            del self._received[key]

    def drop_all(self) -> None:
        """Drop all tensors: those received and those kept."""
        self._received.clear()
        self._kept.clear()
        self._used = None if self._used is None else {}

    def put_back(self, key: BoundaryKey, tensor: Activation) -> None:
        """Put a tensor back that was taken for an action which could not be finished."""
        self._received[key] = tensor

    def kept(self, kind: str, step: int) -> tuple[tuple[int, int], ...]:
        """(layer, micro-batch) of the tensors of this kind and step that are kept."""
        return tuple(sorted((key.layer, key.microbatch) for key in self._kept if (key.kind, key.step) == (kind, step)))

    def send_again(self, step: int, plan: Sequence[m.Recompute], placement: Placement) -> None:
        """Send the workers of a recovery plan the inputs of their lines that are kept here.

        All who keep an input send it, without asking: the receiver ignores duplicates.
        """
        for line in plan:
            layers = placement.layers_of_stage(line.stage)
            if line.forward:
                self._again(BoundaryKey(ACTIVATION, step, line.microbatch, layers.start), line.worker)
            if line.backward:
                self._again(BoundaryKey(GRADIENT, step, line.microbatch, layers.stop - 1), line.worker)

    def send_inputs_again(self, step: int, microbatch: int, layers: range, peers: Sequence[int]) -> None:
        """Send the inputs of a micro-batch on a stage of these layers again, those that are kept here."""
        for peer in peers:
            self._again(BoundaryKey(ACTIVATION, step, microbatch, layers.start), peer)
            self._again(BoundaryKey(GRADIENT, step, microbatch, layers.stop - 1), peer)

    def forget_beyond(self, version: int) -> None:
        """Drop everything of later steps than this one; validation tensors are of a version."""
        for table in (self._received, self._kept, self._used or {}):
            for key in [k for k in table if k.step > version]:
                del table[key]
        self._forget_shapes(lambda step: step > version)

    def _again(self, key: BoundaryKey, peer: int) -> None:
        tensor = self._kept.get(key)
        if tensor is None:
            return
        self.send(peer, message_of(key, tensor), tensor)

    def drop_decided(self, step: int) -> None:
        """The step is decided: no recovery needs its tensors. Validation tensors of older versions go too."""
        for table in (self._received, self._kept):
            for key in [k for k in table if k.step < step or (k.step == step and k.kind != VALIDATION)]:
                del table[key]
        self._forget_shapes(lambda other: other <= step)

    def _forget_shapes(self, is_over: Callable[[int], bool]) -> None:
        self._shapes = {crossed: shapes for crossed, shapes in self._shapes.items() if not is_over(crossed[0])}


_Crossed = tuple[int, int, int]
"""(step, micro-batch, boundary): what crosses it in both directions."""

_Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors that have a gradient."""


def _shapes(message: Crossing) -> _Shapes:
    if not message.forms:
        return (message.shape,)
    is_gradient = isinstance(message, m.ActivationGradient)
    # One zero comes back where nothing has a gradient (`eager.no_gradient`).
    return tuple(form.shape for form in message.forms if is_gradient or form.graded) or ((1,),)


def message_of(key: BoundaryKey, value: Activation) -> Crossing:
    """The message with which an activation, or its gradient, is sent."""
    forms, names = forms_sent(value)
    shape = tuple(value.shape) if isinstance(value, Tensor) else (m.packed_bytes(forms),)
    if key.kind == GRADIENT:
        return m.ActivationGradient(key.step, key.microbatch, key.layer, shape, forms=forms)
    return m.Activation(key.step, key.microbatch, key.layer, shape, key.kind == VALIDATION, forms=forms, names=names)


def _key(message: Crossing) -> BoundaryKey:
    if isinstance(message, m.ActivationGradient):
        return BoundaryKey(GRADIENT, message.step, message.microbatch, message.layer)
    kind = VALIDATION if message.validation else ACTIVATION
    return BoundaryKey(kind, message.step, message.microbatch, message.layer)


def _crossed(key: BoundaryKey) -> _Crossed:
    return key.step, key.microbatch, _boundary(key)


def _boundary(key: BoundaryKey) -> int:
    """The first layer behind the boundary that a tensor crosses, in either direction."""
    return key.layer + 1 if key.kind == GRADIENT else key.layer
