"""Layer programs made by torch.compile: each layer forward, backward and evaluation, compiled before the first step.

A layer is traced as a function of tensors alone (parameters, input, keys), so layers that are alike share one program,
and no step, unit or change of the mesh needs another one. Every worker compiles the programs of all layers: which of
them it runs changes while a run goes on.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from elaswave_spmd.errors import ConfigError, ModelError
from elaswave_spmd.keyed import Keys
from elaswave_spmd.models import Batch
from elaswave_spmd.runtime.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.runtime.layer_memory import LayerMemory
from elaswave_spmd.runtime.stage import Loss, StagePrograms
from elaswave_spmd.sharding.pages import ModelLayout

_KINDS = 3
"""Forms in which a layer is traced: to be trained, to be evaluated, and without a graph when checkpointing."""


class CompiledPrograms(StagePrograms):
    """As `StagePrograms`, with layers compiled by inductor. Call `compile` before anything else, once.

    Args:
        threads: intra-op threads of this worker.
    """

    def __init__(
        self, num_layers: int, *, loss: Loss, loss_scale: float, checkpointing: bool, threads: int
    ) -> None:
        super().__init__(num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing)
        _configure(threads, num_layers)
        # Of all layers: a graph break would leave parts between programs that run as they are written.
        self._run_layer: Callable[..., Tensor] = torch.compile(_run_layer, fullgraph=True, dynamic=False)
        self._run_last: Callable[..., Tensor] = torch.compile(_run_last, fullgraph=True, dynamic=False)
        self._counter = _Counter()
        self._before = 0

    @property
    def compiled(self) -> tuple[int, int]:
        return self._before, self._counter.number - self._before

    def compile(
        self, modules: Sequence[nn.Module], layout: ModelLayout, tokens_BT: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Compiles the programs of all layers, by running each on zeros in every way that a step or validation does.

        Args:
            modules: every layer, first to last; parameters may be on the meta device.
            layout: of the model.
            tokens_BT: shape of a unit.
            dtype: of parameters and activations.

        Raises:
            ModelError: a layer that cannot be compiled as one graph.
        """
        tokens = torch.zeros(tokens_BT, dtype=torch.int64)
        batch, keys, x = Batch(tokens, tokens), Keys.make(0, 0, [0] * tokens_BT[0], 0), tokens
        for layer, module in zip(layout.layers, modules, strict=True):
            values = ValueBuffer(layer, module, dtype)
            self.bind({layer.index: module}, {layer.index: values})
            try:
                x = self._try(layer.index, x, keys, batch, GradientBuffer(layer))
            except torch._dynamo.exc.TorchDynamoException as error:
                raise ModelError(
                    "with runtime.compile=true every layer is compiled, as one graph",
                    got=str(error).strip().splitlines()[0],
                    where=f"layer {layer.name}",
                    fix="write its forward without what torch.compile refuses, or runtime.compile=false",
                ) from error
        self.bind({}, {})
        self.memory = LayerMemory()
        self._before = self._counter.number

    def _try(self, layer: int, x: Tensor, keys: Keys, batch: Batch, into: GradientBuffer) -> Tensor:
        """Evaluates a layer and trains it once. Returns its output: the next one's input."""
        self.set_training(False)
        self.evaluate(layer, x, keys.at(layer), batch)
        self.set_training(True)
        y = self.forward(layer, 0, x, keys.at(layer), batch)
        dy = None if layer == self._last else torch.zeros_like(y)
        self.backward(layer, 0, dy, into, add=False, batch=batch)
        return torch.zeros_like(y)

    def _compute(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        if layer < self._last:
            return self._run_layer(self._modules[layer], x, keys)
        assert batch is not None
        return self._run_last(self._modules[layer], self._loss, x, keys, batch)


def _run_layer(module: nn.Module, x: Tensor, keys: Keys) -> Tensor:
    return module(x, keys)


def _run_last(module: nn.Module, loss: Loss, x: Tensor, keys: Keys, batch: Batch) -> Tensor:
    return loss(module(x, keys), batch)


class _Counter:
    """Programs that torch.compile has made in this process since it was told to count."""

    def __init__(self) -> None:
        self.number = 0
        # A forward is compiled when it is traced; its backward at the first one, or with it.
        torch._dynamo.callback.on_compile_start(self._count)

    def _count(self, args: Any) -> None:
        self.number += 1


def _configure(threads: int, num_layers: int) -> None:
    """Settings of torch.compile for a worker's process."""
    import torch._inductor.config as inductor  # heavy: only where something is compiled

    inductor.compile_threads = 1  # no pool of processes behind a worker, which is a forked process itself
    inductor.cpp.threads = threads  # part of what is compiled, and of a run's bits
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # no choice of kernels by their speed: workers would choose differently
    # Layers that are unlike are programs of their own, each of them wanted.
    torch._dynamo.config.recompile_limit = max(8, _KINDS * num_layers)
    torch._dynamo.config.accumulated_recompile_limit = max(256, _KINDS * num_layers)


def check_compiler(device: str) -> str:
    """The compiler behind torch.compile on a device, as it names itself: part of a run's identity.

    Raises:
        ConfigError: there is none.
    """
    import torch._inductor.config as inductor

    if device != "cpu":
        return ""  # triton comes with torch
    names = [name for name in inductor.cpp.cxx if name] if isinstance(inductor.cpp.cxx, tuple) else [inductor.cpp.cxx]
    for name in names:
        if (path := shutil.which(name)) is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
            return done.stdout.partition("\n")[0]
    raise ConfigError(
        "runtime.compile=true needs a C++ compiler on every machine",
        got=f"no {' or '.join(names)}",
        where="runtime.compile=true",
        fix="install g++, or name a compiler in CXX, or runtime.compile=false",
    )
