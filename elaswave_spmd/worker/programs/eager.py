"""The layer programs of one worker: each layer runs forward and backward by itself, on one micro-batch.

A layer's input is cut off from the graph before it, so a micro-batch's layer is a program of fixed shapes with the same
bits wherever it runs, and its gradient can leave as soon as it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.spec import Job

Loss = Callable[[Tensor, Batch], Tensor]


class Batches(Protocol):
    """A split of a dataset, by sample id."""

    def __len__(self) -> int: ...

    def batch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets): int64 [samples, seq_len] each."""
        ...


class ProgramArgs(TypedDict):
    """What all kinds of `StagePrograms` are made of."""

    num_layers: int
    loss: Loss
    loss_scale: float
    checkpointing: bool


def program_args(job: Job, layout: ModelLayout, loss: Loss) -> ProgramArgs:
    """For the layers of a run. `loss`: (last layer's output, batch) -> token-sum loss, fp32 scalar."""
    scale = 1.0 / job.tokens_per_step
    return {"num_layers": len(layout.layers), "loss": loss, "loss_scale": scale, "checkpointing": job.checkpointing}


@dataclass
class Saved:
    """What the backward of a layer needs: its input, and its output with the graph (none when checkpointing)."""

    x: Tensor
    y: Tensor | None
    keys: Keys


class StagePrograms:
    """Forward and backward of a worker's layers.

    Args:
        num_layers: of the model; the loss comes after the last one.
        loss: token-sum loss of the last layer's output.
        loss_scale: 1 / tokens of the global batch.
        checkpointing: keep inputs only.
    """

    def __init__(self, num_layers: int, *, loss: Loss, loss_scale: float, checkpointing: bool) -> None:
        self._modules: Mapping[int, nn.Module] = {}
        self._values: Mapping[int, ValueBuffer] = {}
        self._loss, self._loss_scale, self._checkpointing = loss, loss_scale, checkpointing
        self._last = num_layers - 1
        self._saved: dict[tuple[int, int], Saved] = {}
        self._losses: dict[int, Tensor] = {}
        self.memory = LayerMemory()

    @property
    def num_compiled(self) -> int:
        """Programs that this worker has compiled so far."""
        return 0

    def dropped(self, layer: int) -> None:
        """The layer's parameters are not needed before their next version: a copy of them may go."""

    def bind(self, modules: Mapping[int, nn.Module], values: Mapping[int, ValueBuffer]) -> None:
        """The layers to run from now on; what was saved for others is given up.

        Args:
            modules: layer number -> module, bound to its value buffer.
        """
        if modules.keys() != self._modules.keys():
            self.discard_all()
        self._modules, self._values = modules, values
        self._training = [m for module in modules.values() for m in module.modules() if m.training]

    @property
    def forwarded(self) -> frozenset[int]:
        """Micro-batches that have been run forward through all layers, and not yet backward."""
        return frozenset(microbatch for layer, microbatch in self._saved if layer == max(self._modules))

    def discard_all(self) -> None:
        """Gives up what was saved of any micro-batch."""
        self._saved.clear()
        self._losses.clear()

    def discard(self, microbatch: int) -> None:
        """Gives up what was saved of a micro-batch."""
        for key in [k for k in self._saved if k[1] == microbatch]:
            del self._saved[key]
        self._losses.pop(microbatch, None)

    def forward(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        """Runs a layer, keeping what its backward needs. Returns its output, detached.

        Args:
            x: the micro-batch's token ids [B, T] for layer 0, else the output of the layer before.
            batch: needed by the last layer only, for the loss.
        """
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        run = partial(self._run_saving, layer, microbatch, x, keys, batch)
        y = run() if layer in self.memory else self.memory.weigh(layer, x, self._values[layer].flat, run)
        return y.detach()

    def _run_saving(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        if self._checkpointing:
            with torch.no_grad():
                y = self._run(layer, microbatch, x, keys, batch)
            self._saved[layer, microbatch] = Saved(x, None, keys)
        else:
            y = self._run(layer, microbatch, x, keys, batch)
            self._saved[layer, microbatch] = Saved(x, y, keys)
        return y

    def backward(
        self, layer: int, microbatch: int, dy: Tensor | None, into: GradientBuffer, *, add: bool, batch: Batch | None
    ) -> Tensor | None:
        """Makes the micro-batch's gradient of the layer, in `into`; returns the gradient by the layer's input.

        Args:
            dy: gradient by the output; None for the last layer, whose output is the loss.
            add: add to what is in `into` (fp32 compute only), instead of overwriting it.
        """
        saved = self._saved.pop((layer, microbatch))
        y = saved.y if saved.y is not None else self._run(layer, microbatch, saved.x, saved.keys.again(), batch)
        parameters = self._values[layer].parameters
        if add:
            for parameter, view in zip(parameters, into.views, strict=True):
                parameter.grad = view
        if y.requires_grad:  # a layer without parameters may turn tokens into features
            torch.autograd.backward(y, dy)
        if not add:
            into.set([parameter.grad for parameter in parameters])
        for parameter, view in zip(parameters, into.views, strict=True):
            # Autograd adds in place; a gradient tensor of its own would silently miss the buffer.
            assert not add or parameter.grad is view
            parameter.grad = None
        if layer == self._last:
            loss = self._losses.pop(microbatch)
            into.loss.copy_(into.loss + loss if add else loss)
        if saved.x.requires_grad and saved.x.grad is None:
            return torch.zeros_like(saved.x)
        return saved.x.grad

    def evaluate(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        """Runs a layer for validation: no graph. The last layer gives the micro-batch's token-sum loss."""
        with torch.no_grad():
            return self._call(layer, x, keys, batch)

    def _run(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        y = self._call(layer, x, keys, batch)
        if layer == self._last:
            y = y * self._loss_scale
            self._losses[microbatch] = y.detach()
        return y

    def _call(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        """The layer's output, or the loss of the last one, in the one form that it has on every mesh.

        An output is contiguous and in the compute dtype whether or not a stage ends behind the layer: else the next
        layer would see other strides, or another dtype, on another mesh.
        """
        y = self._compute(layer, x, keys, batch)
        if layer == self._last:
            return checked_loss(y)
        return checked_output(y, self._values[layer].flat.dtype, self._values[layer].layout.name)

    def _compute(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        """The layer as the model has it, with the loss of the last one."""
        y = self._modules[layer](x, keys)
        if layer < self._last:
            return y
        assert batch is not None
        return self._loss(y, batch)

    def set_training(self, training: bool) -> None:
        """Switches what was in training mode at the start: not what a model itself put into evaluation mode."""
        for module in self._training:
            module.training = training


def checked_loss(loss: Tensor) -> Tensor:
    """A micro-batch's loss, fp32.

    Raises:
        ModelError: it is not one number.
    """
    if loss.ndim:
        raise ModelError(
            "a loss is one number, the sum over tokens",
            got=f"shape {tuple(loss.shape)}",
            where="loss(output, batch)",
            fix="end it with .sum()",
        )
    return loss.float()


def checked_output(y: object, dtype: torch.dtype, name: str) -> Tensor:
    """What layer `name` gives the next one: contiguous, and of the compute dtype.

    Raises:
        ModelError: it is not one floating-point tensor.
    """
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise ModelError(
            "a layer returns one floating-point tensor",
            got=f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__,
            where=f"layer {name}",
            fix="return the tensor that the next layer takes; make features of integers in the layer itself",
        )
    return y.to(dtype).contiguous()
