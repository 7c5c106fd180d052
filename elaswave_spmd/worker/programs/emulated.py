"""The emulated accelerator: layer programs that take a configured time and return keyed numbers.

Processes, links, protocol, placement and bytes are real; only arithmetic is replaced. So scheduling can be measured
with many more workers than there are cores. What is timed on it is a figure of an emulation, and called so.

What a program returns is a function of what it was given: the micro-batch, the layer, a hash of its input and of the
layer's parameters. A micro-batch that is sent astray, run twice, or run with parameters of another version changes
bits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys
from elaswave_spmd.models import Batch
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.programs.eager import Loss, Saved, StagePrograms

_PERIOD = 4099  # a prime: no two rows of a tensor are alike
_ROW_WORDS = 16  # 128 bytes, of which any buffer of pages is a multiple
_GRADIENT_SCALE = 1e-3  # about what a small model's gradients are: the optimizer stays in its usual range


@dataclass(frozen=True)
class EmulatedDevice:
    """How long programs take on one worker.

    Args:
        forward_s, backward_s: seconds of one micro-batch through a layer of cost 1, at speed 1.
        layer_costs: relative cost of each layer; () for 1 each.
        speed: of the step -> how fast this worker is at the moment, 1 being as configured. Asked before every program.
    """

    forward_s: float
    backward_s: float
    layer_costs: tuple[float, ...] = ()
    speed: Callable[[int], float] = lambda step: 1.0

    def seconds(self, layer: int, step: int, *, backward: bool) -> float:
        """What a program takes now."""
        cost = self.layer_costs[layer] if self.layer_costs else 1.0
        return (self.backward_s if backward else self.forward_s) * cost / self.speed(step)


class EmulatedPrograms(StagePrograms):
    """Layer programs of an emulated device; for the rest as `StagePrograms`.

    A layer's output has the shape that the layer itself gives: it is run once for each shape of input.
    """

    def __init__(
        self, num_layers: int, *, loss: Loss, loss_scale: float, checkpointing: bool, device: EmulatedDevice
    ) -> None:
        super().__init__(num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing)
        self._device = device
        self._hashes: dict[int, tuple[ValueBuffer, int | None, bytes]] = {}
        self._forms: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], torch.dtype]] = {}

    def forward(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        ends = time.monotonic() + self._device.seconds(layer, int(keys.step), backward=False)
        y = self._output(layer, microbatch, x, keys, batch)
        self._saved[layer, microbatch] = Saved(x, y, keys)
        self.memory.note(layer, x.nbytes, y.nbytes)
        if layer == self._last:
            self._losses[microbatch] = y
        _sleep_until(ends)
        return y

    def backward(
        self, layer: int, microbatch: int, dy: Tensor | None, into: GradientBuffer, *, add: bool, batch: Batch | None
    ) -> Tensor | None:
        saved = self._saved.pop((layer, microbatch))
        ends = time.monotonic() + self._device.seconds(layer, int(saved.keys.step), backward=True)
        # By the output that the forward had, and the gradient that came: whoever has other ones gets other bits.
        assert saved.y is not None
        draw = _draw(b"backward", microbatch, layer, saved.y, *(() if dy is None else (dy,)))
        gradients = [_keyed(draw, tuple(view.shape), _GRADIENT_SCALE) for view in into.views]
        if add:
            for view, gradient in zip(into.views, gradients, strict=True):
                view.add_(gradient)
        else:
            into.set(gradients)
        if layer == self._last:
            loss = self._losses.pop(microbatch)
            into.loss.copy_(into.loss + loss if add else loss)
        dx = None
        if saved.x.is_floating_point():
            dx = _keyed(draw, tuple(saved.x.shape), _GRADIENT_SCALE).to(saved.x.dtype)
        _sleep_until(ends)
        return dx

    def evaluate(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        ends = time.monotonic() + self._device.seconds(layer, int(keys.step), backward=False)
        y = self._output(layer, 0, x, keys, batch)
        _sleep_until(ends)
        return y

    def _output(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        shape, dtype = self._form(layer, x, keys, batch)
        draw = _draw(b"forward" + self._hash_of(layer), microbatch, layer, x.contiguous())
        if layer == self._last:  # a loss of one nat a token, more or less, as a share of the batch's mean
            assert batch is not None
            return (_keyed(draw, (), 0.1) + 1.0) * (batch.tokens.numel() * self._loss_scale)
        return _keyed(draw, shape, 1.0).to(dtype)

    def _hash_of(self, layer: int) -> bytes:
        """Of the layer's parameters: taken once for each version of them."""
        values = self._values[layer]
        if values.version is None or self._hashes.get(layer, (None, -1, b""))[:2] != (values, values.version):
            self._hashes[layer] = values, values.version, _digest(values.flat)
        return self._hashes[layer][2]

    def _form(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> tuple[tuple[int, ...], torch.dtype]:
        key = layer, tuple(x.shape)
        if key not in self._forms:
            with torch.no_grad():
                y = self._call(layer, x, keys.again(), batch)
            self._forms[key] = tuple(y.shape), y.dtype
        return self._forms[key]


def _draw(kind: bytes, microbatch: int, layer: int, *tensors: Tensor) -> np.random.Generator:
    """Random numbers that are a function of all of this."""
    found = hashlib.blake2b(kind, digest_size=16, key=microbatch.to_bytes(8, "little") + layer.to_bytes(8, "little"))
    for tensor in tensors:
        found.update(_bytes_of(tensor))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(found.digest(), "little")))


def _digest(flat: Tensor) -> bytes:
    """A hash of a buffer: of sums over its rows and over its columns, as a hash of all of it would take milliseconds.

    Not by numpy: memory that it has seen can never be given back, as sharded parameters are.
    """
    found = hashlib.blake2b(digest_size=16)
    words = flat.detach().view(torch.int64).view(-1, _ROW_WORDS)
    for sums in (words.sum(0), words.sum(1)):
        found.update(_bytes_of(sums))
    return found.digest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _keyed(draw: np.random.Generator, shape: tuple[int, ...], scale: float) -> Tensor:
    """fp32 numbers in [-scale, scale), which repeat after _PERIOD of them: large tensors cost no more than a copy."""
    size = math.prod(shape)
    found = (draw.random(min(size, _PERIOD), dtype=np.float32) * 2 - 1) * np.float32(scale)
    return torch.from_numpy(np.resize(found, size).reshape(shape))


def _sleep_until(ends: float) -> None:
    if (left := ends - time.monotonic()) > 0:
        time.sleep(left)
