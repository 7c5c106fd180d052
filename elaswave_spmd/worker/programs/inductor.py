"""Layer programs made by torch.compile: forward, backward and evaluation of each layer, compiled before the first step.

A layer is traced as a function of tensors alone (parameters, input, keys). So layers of the same kind share one
program, and no step, micro-batch or reconfiguration needs another one. Every worker compiles the programs of all
layers, since a reconfiguration may move any layer to it.

If the input of a layer has a gradient, its backward is two programs (backward_pair.py), on every mesh and whether or
not the second one is put off.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Loss, Metrics, Objective
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.activations import Activation, graded, map_tensors, zero_gradient
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import Example
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.programs.backward_pair import PairBackend, PairPrograms, WeightPrograms
from elaswave_spmd.worker.programs.eager import BegunBackward, naming_layer

_FORMS = 3
"""The number of forms in which a layer is traced: for training, for evaluation, and without a graph (checkpointing)."""


class CompiledPrograms(PairPrograms):
    """Like `StagePrograms`, with each layer compiled as one graph. Call `compile` once, before any other method.

    Args:
        num_layers, loss, loss_scale, checkpointing, first_trained: as for `StagePrograms`.
        threads: intra-op threads of this worker.
        place: the device of parameters, inputs and outputs.
        backend: the backend of torch.compile. Tests use "aot_eager", which needs no C++ compiler.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        loss: Loss | Objective,
        loss_scale: float,
        checkpointing: bool,
        threads: int,
        place: torch.device,
        backend: str = "inductor",
        first_trained: int = 0,
    ) -> None:
        super().__init__(
            num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing, first_trained=first_trained
        )
        self._place = place
        self._num_compiled = 0
        self._pairs = PairBackend(backend, self._count)
        _configure(threads, num_layers, self._count)
        # fullgraph: after a graph break, parts of the layer would run eagerly without anybody noticing. Not dynamic:
        # all micro-batches have one shape, and a program for any shape may have other bits.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": self._pairs.compile}
        self._run_layer: Callable[..., Any] = torch.compile(_run_layer, **options)
        self._run_last: Callable[..., Any] = torch.compile(_run_last, **options)
        self._run_scored: Callable[..., Any] = torch.compile(_run_scored, **options)

    def _count(self, args: object) -> None:
        """Counts the compilation of one program: a forward, an evaluation, a backward, or its second part."""
        self._num_compiled += 1

    @property
    def num_compiled(self) -> int:
        return self._num_compiled

    def compile(
        self,
        modules: Sequence[nn.Module],
        layout: ModelLayout,
        example: Example,
        dtype: torch.dtype,
        compiled: Callable[[str], None] = lambda layer: None,
    ) -> None:
        """Compiles the programs of all layers, by running each in every way that a step or a validation does.

        Args:
            modules: all layers, first to last; parameters may be on the meta device. Do not use them afterwards: their
                parameters are bound to buffers that are freed.
            layout: the layout of the model.
            example: a micro-batch of the form that all have. Layers after the first run on zeros.
            dtype: the dtype of parameters and activations.
            compiled: called with the name of each layer once its programs exist. Compiling takes seconds per layer, so
                the worker reports progress from it.

        Raises:
            ModelError: a layer cannot be compiled as one graph.
            Exception: what the model's own code raises, with a note that names the layer, or loss() or metrics().
        """
        from torch._dynamo.exc import TorchDynamoException

        place = self._place
        self._example = example
        x, batch, keys = example.x, example.batch, Keys.make(0, 0, [0] * example.num_samples, 0, place)
        for layer, module in zip(layout.layers, modules, strict=True):
            values = ValueBuffer(layer, module, dtype, place)
            self.bind({layer.index: module}, {layer.index: values})
            try:
                x = self._run_once(layer.index, x, keys, batch, GradientBuffer(layer, place))
            except Exception as error:
                self._run_own_code(layer.index, x, keys.at(layer.index), batch)
                if not isinstance(error, TorchDynamoException):
                    raise
                where = self._code_of(layer)
                raise ModelError(
                    f"torch.compile refused {where} ({str(error).strip().splitlines()[0]})",
                    rule="with runtime.compile=true every layer is compiled, as one graph",
                    where=where,
                    fix="write it without what torch.compile refuses, or set runtime.compile=false",
                ) from error
            compiled(layer.name)
        self.bind({}, {})
        self.memory = LayerMemory()  # runs on zeros do not count: layers are measured when they train

    def _run_once(self, layer: int, x: Activation, keys: Keys, batch: Any, into: GradientBuffer) -> Activation:
        """Runs a layer for evaluation, forward and backward. Returns zeros like its output: the next layer's input."""
        self.set_training(False)
        self.evaluate(layer, x, keys.at(layer), batch)
        self.set_training(True)
        y = self.forward(layer, 0, x, keys.at(layer), batch)
        self.backward(layer, 0, None if layer == self._last else zero_gradient(y), into, add=False, batch=batch)
        return map_tensors(lambda one: torch.zeros_like(one, requires_grad=one.requires_grad), y)

    def _run_own_code(self, layer: int, x: Activation, keys: Keys, batch: Any) -> None:
        """Runs a layer without the compiler. If this raises as well, the layer's own code is wrong."""
        with torch.no_grad(), naming_layer(self._name_of(layer), "compilation", x):
            y = self._modules[layer](*self._arguments(layer, x, keys))
            if layer == self._last:
                self._loss_of(y, batch)
                self._metrics_of(y, batch)

    def _begin_backward(
        self,
        layer: int,
        x: Activation,
        outputs: tuple[Tensor, ...],
        gradients: tuple[Tensor, ...] | None,
        begun: BegunBackward,
    ) -> None:
        begun.put_off = programs = WeightPrograms()
        # Not accumulated in `grad` of the leaves, as autograd would copy a stand-in to a tensor as large as a gradient.
        inputs = graded(x)
        leaves = [*inputs, *self._values[layer].trained]
        with self._pairs.putting_off(programs):
            made = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        for one, gradient in zip(inputs, made, strict=False):
            one.grad = gradient
        begun.gradients = list(made[len(inputs) :])

    def _compute(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Any:
        arguments = self._arguments(layer, x, keys)
        if layer < self._last:
            return self._run_layer(self._modules[layer], *arguments)
        return self._run_last(self._modules[layer], self._loss, batch, *arguments)

    def _compute_scores(self, layer: int, x: Activation, keys: Keys, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        if self._metrics is None:
            return self._compute(layer, x, keys, batch), {}
        arguments = self._arguments(layer, x, keys)
        return self._run_scored(self._modules[layer], self._loss, self._metrics, batch, *arguments)


def _run_layer(module: nn.Module, *arguments: Any) -> Any:
    return module(*arguments)


def _run_last(module: nn.Module, loss: Loss, batch: Any, *arguments: Any) -> Any:
    return loss(module(*arguments), batch)


def _run_scored(module: nn.Module, loss: Loss, metrics: Metrics, batch: Any, *arguments: Any) -> Any:
    output = module(*arguments)
    return loss(output, batch), metrics(output, batch)


def _configure(threads: int, num_layers: int, count: Callable[[object], None]) -> None:
    """Configures torch.compile for this process. The compiler is imported here, so only if something is compiled.

    Args:
        threads: intra-op threads.
        num_layers: the number of layers of the model.
        count: called at the start of every compilation in this process from now on.
    """
    import torch._dynamo
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no pool of compiler processes, which could outlive a worker that is killed
    inductor.cpp.threads = threads  # the number is compiled into the programs, and decides about the bits of reductions
    if hasattr(inductor, "deterministic"):
        inductor.deterministic = True  # no choice of kernels by measured speed, which may differ between workers
    # Dynamo takes it for a mistake if a function is compiled more often than this. Here all layers are compilations of
    # the same function (`_run_layer`), so that each kind of layer needs some.
    torch._dynamo.config.recompile_limit = max(8, _FORMS * num_layers)
    torch._dynamo.config.accumulated_recompile_limit = max(256, _FORMS * num_layers)
    torch._dynamo.callback.on_compile_start(count)


def compiler_version(compiler: str) -> str:
    """The first line of `COMPILER --version`, or "" if there is no such compiler.

    It is part of a run's identity (controller/run_fingerprint.py), since another compiler may give other bits.
    """
    if shutil.which(compiler) is None:
        return ""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.partition("\n")[0]
