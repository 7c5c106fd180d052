"""Boundary tensors: activations, and gradients of activations, that go from one stage to the next.

A sender keeps what it has sent until the step is decided. If the receiver is lost, the tensors are sent again to the
worker that takes over its micro-batches, so that no forward or backward runs a second time to make them.
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
    """The id of a boundary tensor, whichever worker sends it.

    Attributes:
        kind: ACTIVATION, GRADIENT or VALIDATION.
        step: the step; for VALIDATION the version that is validated.
        microbatch: the number of the micro-batch.
        layer: the first layer of the stage that receives the tensor; for a GRADIENT, the last layer of that stage.
    """

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
        rank: the rank of the worker.
        send: sends a message to another worker.
        device: the device of the tensors; received payloads are copied to it.
        first_trained: the first layer that has a backward. All parameters of the layers before it are frozen.
    """

    def __init__(self, rank: int, send: Send, device: Device, first_trained: int = 0) -> None:
        self._rank = rank
        self._send = send
        self._device = device
        self._first_trained = first_trained
        self._received: dict[BoundaryKey, Activation] = {}
        self._kept: dict[BoundaryKey, Activation] = {}
        # The received tensors that were used since a StepReport; None if no change of the mesh is in progress.
        self._used: dict[BoundaryKey, Activation] | None = None
        self._shapes: dict[_Crossed, _Shapes] = {}  # the shapes of what this worker has sent

    def send(self, peer: int | None, message: Crossing, value: Activation) -> None:
        """Send an activation, or its gradient, to the micro-batch's worker on the other stage, and keep it.

        Args:
            peer: the receiver; None if no worker needs the tensor now. Then it is only kept, since a worker may need it
                after a loss.
            message: the message for the value (`message_of`).
            value: the tensor or tensors, contiguous. They must stay as they are until the step is decided.
        """
        key = _key(message)
        if key.kind != VALIDATION:  # a validation that is interrupted is run again as a whole: nothing is sent again
            self._kept[key] = value
            if not self._stands_in(key):
                self._shapes[_crossed(key)] = _shapes(message)
        if peer == self._rank:  # this worker has changed its stage, and now needs what it made on the older stage
            self._received[key] = value
        elif peer is not None:
            self._send(peer, message, packed(value))

    def has_other_shape(self, message: Crossing) -> bool:
        """True if a received tensor has another shape than this worker has sent across the same boundary.

        The gradient of an activation has the shape of the activation of the same micro-batch, which this worker has
        sent. Other micro-batches say nothing about shapes: their samples may differ in shape, and even if they do not,
        a layer may remove padding. So of an activation only the number of elements is checked (`recovery.admission`).
        Activations of a validation are not compared, as no gradient comes back for them.
        """
        key = _key(message)
        if self._stands_in(key):
            return message.shape != (1,)
        return key.kind != VALIDATION and self._shapes.get(_crossed(key), _shapes(message)) != _shapes(message)

    def _stands_in(self, key: BoundaryKey) -> bool:
        """True for a gradient that no layer before the boundary needs: one zero is sent (`eager.no_gradient`)."""
        return key.kind == GRADIENT and _boundary(key) <= self._first_trained

    def receive(self, message: Crossing, payload: Tensor, *, placed: bool = False) -> None:
        """Store a received tensor, in device memory that is aligned as if the tensor had been made here.

        Args:
            payload: flat, in the dtype of the message.
            placed: True if the payload lies in such memory already.
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
        """Return a function that tells for a micro-batch whether its tensor of this kind is here."""
        return lambda microbatch: BoundaryKey(kind, step, microbatch, layer) in self._received

    def pop(self, key: BoundaryKey) -> Activation:
        """Remove a received tensor and return it, for an action that uses it."""
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
        """Put back the tensors that were used since the StepReport: the recovery plan may need them again."""
        self._received |= self._used or {}
        self._used = None

    def forget_validations(self) -> None:
        """Drop the tensors of validations. Called when a new mesh epoch is entered, in which a validation is run again.

        They belong to the older epoch's attempt, and may have been computed from damaged parameters (H5).
        """
        for key in [key for key in self._received if key.kind == VALIDATION]:
            del self._received[key]

    def drop_all(self) -> None:
        """Drop all tensors, received ones and kept ones."""
        self._received.clear()
        self._kept.clear()
        self._used = None if self._used is None else {}

    def put_back(self, key: BoundaryKey, tensor: Activation) -> None:
        """Put a received tensor back: the action that took it was not finished, or another action needs it."""
        self._received[key] = tensor

    def kept(self, kind: str, step: int) -> tuple[tuple[int, int], ...]:
        """(layer, micro-batch) of the tensors of this kind and step that are kept."""
        return tuple(sorted((key.layer, key.microbatch) for key in self._kept if (key.kind, key.step) == (kind, step)))

    def send_again(self, step: int, plan: Sequence[m.Recompute], placement: Placement) -> None:
        """Send the workers of a recovery plan the inputs of their lines, as far as they are kept here.

        Every worker that keeps an input sends it, without being asked: the receiver ignores duplicates.
        """
        for line in plan:
            layers = placement.layers_of_stage(line.stage)
            if line.forward:
                self._again(BoundaryKey(ACTIVATION, step, line.microbatch, layers.start), line.worker)
            if line.backward:
                self._again(BoundaryKey(GRADIENT, step, line.microbatch, layers.stop - 1), line.worker)

    def send_inputs_again(self, step: int, microbatch: int, layers: range, peers: Sequence[int]) -> None:
        """Send peers the inputs of a micro-batch on the stage with these layers again, as far as they are kept here."""
        for peer in peers:
            self._again(BoundaryKey(ACTIVATION, step, microbatch, layers.start), peer)
            self._again(BoundaryKey(GRADIENT, step, microbatch, layers.stop - 1), peer)

    def forget_beyond(self, version: int) -> None:
        """Drop everything of steps after `version`. A validation tensor has its version as its step."""
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
        """Drop the tensors of a decided step, which no recovery needs, and validation tensors of older versions.

        Validation tensors of version `step` stay: that validation may still be to come.
        """
        for table in (self._received, self._kept):
            for key in [k for k in table if k.step < step or (k.step == step and k.kind != VALIDATION)]:
                del table[key]
        self._forget_shapes(lambda other: other <= step)

    def _forget_shapes(self, is_over: Callable[[int], bool]) -> None:
        self._shapes = {crossed: shapes for crossed, shapes in self._shapes.items() if not is_over(crossed[0])}


_Crossed = tuple[int, int, int]
"""(step, micro-batch, boundary): the id that an activation and its gradient have in common."""

_Shapes = tuple[tuple[int, ...], ...]
"""The shapes of those tensors of an activation that have a gradient, which are the shapes of the gradient."""


def _shapes(message: Crossing) -> _Shapes:
    if not message.forms:
        return (message.shape,)
    is_gradient = isinstance(message, m.ActivationGradient)
    # If none of the tensors has a gradient, one zero comes back (`eager.no_gradient`).
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
    """The number of the boundary that a tensor crosses: the first layer after it, for both directions."""
    return key.layer + 1 if key.kind == GRADIENT else key.layer
