"""Layer programs made by torch.compile: each layer forward, backward and evaluation, compiled before the first step.

A layer is traced as a function of tensors alone (parameters, input, keys), so layers that are alike share one program,
and no step, micro-batch or change of the mesh needs another one. Every worker compiles the programs of all layers:
which of them it runs changes while a run goes on.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.programs.eager import Loss, StagePrograms

_KINDS = 3
"""Forms in which a layer is traced: to be trained, to be evaluated, and without a graph when checkpointing."""


class CompiledPrograms(StagePrograms):
    """As `StagePrograms`, with layers compiled by inductor. Call `compile` before anything else, once.

    Args:
        threads: intra-op threads of this worker.
        place: the device of parameters and of what programs take and give.
        backend: of torch.compile.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        loss: Loss,
        loss_scale: float,
        checkpointing: bool,
        threads: int,
        place: torch.device,
        backend: str = "inductor",
    ) -> None:
        super().__init__(num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing)
        self._place, self._num_compiled = place, 0
        _configure(threads, num_layers, self._count)
        # Whole layers: a graph break would leave parts between programs that run as they are written.
        as_one: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
        self._run_layer: Callable[..., Tensor] = torch.compile(_run_layer, **as_one)
        self._run_last: Callable[..., Tensor] = torch.compile(_run_last, **as_one)

    def _count(self, args: object) -> None:
        """A forward or an evaluation is being compiled; or a backward, unless that comes with its forward."""
        self._num_compiled += 1

    @property
    def num_compiled(self) -> int:
        return self._num_compiled

    def compile(
        self,
        modules: Sequence[nn.Module],
        layout: ModelLayout,
        tokens_BT: tuple[int, int],
        dtype: torch.dtype,
        compiled: Callable[[str], None] = lambda layer: None,
    ) -> None:
        """Compiles the programs of all layers, by running each on zeros in every way that a step or validation does.

        Args:
            modules: every layer, first to last; parameters may be on the meta device. They are of no use afterwards.
            layout: of the model.
            tokens_BT: shape of a micro-batch.
            dtype: of parameters and activations.
            compiled: told the name of each layer when its programs are there.

        Raises:
            ModelError: a layer that cannot be compiled as one graph.
        """
        from torch._dynamo.exc import TorchDynamoException

        place = self._place
        tokens = torch.zeros(tokens_BT, dtype=torch.int64, device=place)
        batch, keys, x = Batch(tokens, tokens), Keys.make(0, 0, [0] * tokens_BT[0], 0, place), tokens
        for layer, module in zip(layout.layers, modules, strict=True):
            values = ValueBuffer(layer, module, dtype, place)
            self.bind({layer.index: module}, {layer.index: values})
            try:
                x = self._try(layer.index, x, keys, batch, GradientBuffer(layer, place))
            except TorchDynamoException as error:
                raise ModelError(
                    "with runtime.compile=true every layer is compiled, as one graph",
                    got=str(error).strip().splitlines()[0],
                    where=f"layer {layer.name}",
                    fix="write its forward without what torch.compile refuses, or runtime.compile=false",
                ) from error
            compiled(layer.name)
        self.bind({}, {})
        self.memory = LayerMemory()  # what was weighed is of no micro-batch

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


def _configure(threads: int, num_layers: int, count: Callable[[object], None]) -> None:
    """Sets up torch.compile for a worker's process; it is imported only where something is compiled.

    Args:
        count: called whenever a program is compiled, from now on.
    """
    import torch._dynamo
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no pool of processes behind a worker
    inductor.cpp.threads = threads  # part of what is compiled, and of a run's bits
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # no choice of kernels by their speed: two workers would choose differently
    # Layers that are unlike are programs of their own, each of them wanted.
    torch._dynamo.config.recompile_limit = max(8, _KINDS * num_layers)
    torch._dynamo.config.accumulated_recompile_limit = max(256, _KINDS * num_layers)
    torch._dynamo.callback.on_compile_start(count)


def compiler_version(compiler: str) -> str:
    """What a C++ compiler calls itself, "" where there is none: other compilers may give other bits."""
    if shutil.which(compiler) is None:
        return ""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.partition("\n")[0]
