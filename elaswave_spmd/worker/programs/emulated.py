"""Layer programs of an emulated accelerator: they sleep for a configured time and return keyed numbers.

Processes, links, protocol, placement and bytes are real; only the arithmetic is replaced. So scheduling can be measured
with many more workers than there are cores. Times measured on it are times of an emulation, and reports call them so.

What a program returns is a function of the micro-batch, the layer, its input and the layer's parameters. So a
micro-batch that went to the wrong worker, was run twice, or was run with parameters of another version changes the bits
of the run, and the tests of equal bits hold on this device as well.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys
from elaswave_spmd.models import Batch, Loss, Objective
from elaswave_spmd.worker.activations import (
    Activation,
    graded,
    handed_on,
    leaf,
    map_tensors,
    num_bytes,
    tensors_of,
)
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.programs.eager import BegunBackward, SavedForward, StagePrograms, no_gradient

_PERIOD = 4099
"""The number of elements after which a keyed tensor repeats: a prime, so that rows of a tensor differ."""

_ROW_WORDS = 16
"""The number of 64-bit words in a row when parameters are hashed: 128 bytes, of which every buffer is a multiple."""

_GRADIENT_SCALE = 1e-3
"""About the size of a small model's gradients, so that the optimizer works in its usual range."""


@dataclass(frozen=True)
class EmulatedDevice:
    """The time that programs take on one worker.

    Args:
        forward_s: the seconds of the forward of one micro-batch through a layer of cost 1, at speed 1.
        backward_s: the same for the backward.
        layer_costs: the relative cost of each layer; () if all have cost 1.
        speed: step -> the speed of this worker now, relative to the configured one; 0.5 takes twice the time. It is
            called before every program, since DVFS may change it within a step.
        weight_share: the part of a backward's seconds that its weight gradients take if they are put off.
    """

    forward_s: float
    backward_s: float
    layer_costs: tuple[float, ...] = ()
    speed: Callable[[int], float] = lambda step: 1.0
    weight_share: float = 0.0

    def seconds(self, layer: int, step: int, *, backward: bool) -> float:
        """The time that a program of this layer takes now, in seconds."""
        cost = self.layer_costs[layer] if self.layer_costs else 1.0
        return (self.backward_s if backward else self.forward_s) * cost / self.speed(step)


@dataclass
class _Begun(BegunBackward):
    """The second part of a backward.

    Args:
        step: the step, on which the time of the second part depends; -1 if the second part takes no time.
    """

    step: int


class EmulatedPrograms(StagePrograms):
    """Layer programs of an emulated device; otherwise like `StagePrograms`.

    Outputs have the shape and dtype of the real layer's outputs. To know these, the real layer is run once for each
    shape of its input. Activation checkpointing is ignored. If a backward is in two parts, the first part computes all
    numbers, and each part takes its share of the time.

    Args:
        num_layers, loss, loss_scale, checkpointing, first_trained: as for `StagePrograms`.
        device: the time that each program takes.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        loss: Loss | Objective,
        loss_scale: float,
        checkpointing: bool,
        device: EmulatedDevice,
        first_trained: int = 0,
    ) -> None:
        super().__init__(
            num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing, first_trained=first_trained
        )
        self._device = device
        self._in_parts: frozenset[int] = frozenset()
        # Layer -> (its buffer, the buffer's `times_marked`, hash of its parameters).
        self._hashes: dict[int, tuple[ValueBuffer, int, bytes]] = {}
        # (layer, shapes of the input) -> the real layer's output for the first such input.
        self._forms: dict[tuple[int, tuple[tuple[int, ...], ...]], Activation] = {}

    def set_split_layers(self, layers: Collection[int]) -> None:
        self._in_parts = frozenset(layer for layer in layers if layer >= self._first_trained)

    @property
    def has_split_layers(self) -> bool:
        return bool(self._in_parts)

    def forward(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        # The deadline is computed first: making the numbers is part of the emulated time, not added to it.
        ends = time.monotonic() + self._device.seconds(layer, int(keys.step), backward=False)
        y = self._output(layer, microbatch, x, keys, batch)
        self._saved[layer, microbatch] = SavedForward(x, y, keys)
        self.memory.note(layer, num_bytes(x), num_bytes(y))
        if layer == self._last:
            assert isinstance(y, Tensor)
            self._losses[microbatch] = y
        _sleep_until(ends)
        return y

    def backward(
        self,
        layer: int,
        microbatch: int,
        dy: Activation | None,
        into: GradientBuffer,
        *,
        add: bool,
        batch: Any,
    ) -> Activation | None:
        saved = self._saved.pop((layer, microbatch))
        if layer < self._first_trained:
            return no_gradient(saved.x)
        ends = time.monotonic() + self._device.seconds(layer, int(saved.keys.step), backward=True)
        gradients, dx = self._made(layer, microbatch, dy, saved)
        self._put(into, gradients, self._losses.pop(microbatch) if layer == self._last else None, add=add)
        _sleep_until(ends)
        return dx

    def backward_input(self, layer: int, microbatch: int, dy: Activation | None, *, batch: Any) -> Activation | None:
        saved = self._saved.pop((layer, microbatch))
        if layer < self._first_trained:
            return no_gradient(saved.x)
        step = int(saved.keys.step)
        part = 1.0 - self._device.weight_share if layer in self._in_parts else 1.0
        ends = time.monotonic() + self._device.seconds(layer, step, backward=True) * part
        gradients, dx = self._made(layer, microbatch, dy, saved)
        loss = self._losses.pop(microbatch) if layer == self._last else None
        # If the layer is not split, the first part takes all of the time, and -1 says that none is left.
        self._begun[layer, microbatch] = _Begun([*gradients], None, loss, step if part < 1.0 else -1)
        _sleep_until(ends)
        return dx

    def backward_weights(self, layer: int, microbatch: int, into: GradientBuffer, *, add: bool) -> None:
        if layer < self._first_trained:
            return
        begun = self._begun.pop((layer, microbatch))
        assert isinstance(begun, _Begun)
        ends = time.monotonic()
        if begun.step >= 0:
            ends += self._device.seconds(layer, begun.step, backward=True) * self._device.weight_share
        self._put(into, begun.gradients, begun.loss, add=add)
        _sleep_until(ends)

    def _made(
        self, layer: int, microbatch: int, dy: Activation | None, saved: SavedForward
    ) -> tuple[list[Tensor], Activation | None]:
        """The gradients of the parameters and of the input. They are the same whether or not the backward is split."""
        # Keyed by the forward's output and the incoming gradient: if either is wrong, all gradients differ.
        assert saved.y is not None
        draw = _draw(b"backward", microbatch, layer, *tensors_of(saved.y), *(() if dy is None else tensors_of(dy)))
        shapes = [tuple(parameter.shape) for parameter in self._values[layer].trained]
        gradients = [_keyed(draw, shape, _GRADIENT_SCALE) for shape in shapes]
        if not self._passes_gradient(layer):
            return gradients, no_gradient(saved.x) if layer else None
        x = leaf(saved.x, passes_gradient=True)
        dx = tuple(_keyed(draw, tuple(one.shape), _GRADIENT_SCALE).to(one.dtype) for one in graded(x))
        if isinstance(x, Tensor):
            return gradients, dx[0] if dx else None
        return gradients, dx or (no_gradient(x) if layer else None)

    @staticmethod
    def _put(into: GradientBuffer, gradients: Sequence[Tensor | None], loss: Tensor | None, *, add: bool) -> None:
        if add:
            for view, gradient in zip(into.views, gradients, strict=True):
                assert gradient is not None
                view.add_(gradient)
        else:
            into.set(gradients)
        if loss is not None:
            into.add_loss(loss, add=add)

    def evaluate(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        ends = time.monotonic() + self._device.seconds(layer, int(keys.step), backward=False)
        y = self._output(layer, 0, x, keys, batch)
        _sleep_until(ends)
        return y

    def _output(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        """The keyed output of a layer; for the last layer a loss of about one nat per token, as a share of the mean.

        It never has a weight, and there are no metrics: what the model's own loss returns is not used.
        """
        form = self._form(layer, x, keys, batch)
        draw = _draw(b"forward" + self._hash_of(layer), microbatch, layer, *(t.contiguous() for t in tensors_of(x)))
        if layer == self._last:
            number = batch.tokens.numel() if isinstance(batch, Batch) else len(keys.sample_ids)
            return (_keyed(draw, (), 0.1) + 1.0) * (number * self._loss_scale)
        return map_tensors(lambda one: _number_like(one, draw), form)

    def _hash_of(self, layer: int) -> bytes:
        """A hash of the layer's parameters. It is computed again only after parameters were written."""
        values = self._values[layer]
        now = values, values.times_marked
        if values.version is None or self._hashes.get(layer, ())[:2] != now:
            self._hashes[layer] = *now, _digest(values.flat)
        return self._hashes[layer][2]

    def _form(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        """An output of the real layer: its shapes and dtypes, and which tensors of a tuple have a gradient."""
        key = layer, tuple(tuple(one.shape) for one in tensors_of(x))
        if key not in self._forms:
            given = leaf(x, passes_gradient=self._passes_gradient(layer))
            with torch.set_grad_enabled(layer >= self._first_trained):
                self._forms[key] = handed_on(self._call(layer, given, keys.again(), batch))
        return self._forms[key]


def _number_like(form: Tensor, draw: np.random.Generator) -> Tensor:
    """Keyed numbers in the form of an output. Integers are zeros, since they may be used as indices."""
    if not form.is_floating_point():
        return torch.zeros_like(form)
    return _keyed(draw, tuple(form.shape), 1.0).to(form.dtype).requires_grad_(form.requires_grad)


def _draw(kind: bytes, microbatch: int, layer: int, *tensors: Tensor) -> np.random.Generator:
    """A generator whose numbers are a function of all arguments. The tensors are contiguous and in host memory."""
    hashed = hashlib.blake2b(kind, digest_size=16, key=microbatch.to_bytes(8, "little") + layer.to_bytes(8, "little"))
    for tensor in tensors:
        hashed.update(_bytes_of(tensor))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashed.digest(), "little")))


def _digest(flat: Tensor) -> bytes:
    """A hash of a flat value buffer.

    It hashes the sums over rows and over columns of 64-bit words, since hashing all bytes would take milliseconds. The
    sums are torch's, not numpy's: a storage with a numpy view cannot be resized any more, and sharded parameters are
    freed by resizing it (`ValueBuffer.drop`).
    """
    hashed = hashlib.blake2b(digest_size=16)
    words = flat.detach().view(torch.int64).view(-1, _ROW_WORDS)
    for sums in (words.sum(0), words.sum(1)):
        hashed.update(_bytes_of(sums))
    return hashed.digest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _keyed(draw: np.random.Generator, shape: tuple[int, ...], scale: float) -> Tensor:
    """A tensor of fp32 numbers in [-scale, scale).

    They repeat after `_PERIOD` numbers, so that a large tensor costs no more than a copy. The emulation must not take
    longer than the emulated device.
    """
    size = math.prod(shape)
    numbers = (draw.random(min(size, _PERIOD), dtype=np.float32) * 2 - 1) * np.float32(scale)
    return torch.from_numpy(np.resize(numbers, size).reshape(shape))


def _sleep_until(ends: float) -> None:
    """Sleeps until a time of time.monotonic(); returns at once if it has passed."""
    if (left := ends - time.monotonic()) > 0:
        time.sleep(left)
