"""Layer programs on PyTorch/XLA: forward, backward and evaluation of each layer as compiled programs of an island.

An island is the local devices of one worker as one XLA client (runtime/devices/xla_island.py). Programs are traced
once, before the worker is ready; after that a step only runs programs by their hash.

A layer's forward program returns its output and the residuals: the tensors that autograd saved for the backward. The
backward program takes them as arguments. So both programs are functions without hidden state, and no autograd runs in a
step. The keys of a micro-batch are an argument too, packed into one vector of integers. If a step number or a sample id
were part of the graph, every step would need another compilation.

If the input of a layer has a gradient, its backward is two programs (backward_pair.py), on every mesh and whether or
not the second one is put off. What the second one needs stays on the island until it has run.

Tensors stay on the island between the layers of a stage. Tensors that leave the stage, and all weight gradients, are
host tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Loss, Objective, takes_keys
from elaswave_spmd.runtime.devices.xla_island import (
    WHOLE,
    FrozenNumberError,
    FrozenTensorError,
    Program,
    TracedNumbersRefused,
    XlaIsland,
)
from elaswave_spmd.sharding import P
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout, Slot
from elaswave_spmd.worker.activations import (
    Activation,
    checked_output,
    graded,
    leaf,
    like,
    map_tensors,
    marks_of,
    tensors_of,
)
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.inputs import Example, leaves_of, with_leaves
from elaswave_spmd.worker.programs.backward_pair import PairPrograms
from elaswave_spmd.worker.programs.eager import BegunBackward, SavedForward, StagePrograms, naming_layer, no_gradient
from elaswave_spmd.worker.programs.scores import checked_loss, loss_and_weight
from elaswave_spmd.worker.programs.xla_backward import (
    BackwardPrograms,
    IslandWeights,
    SavedTensors,
    TracedForward,
    ZeroArguments,
    compile_backward,
)


@dataclass(frozen=True)
class LayerPrograms:
    """The programs of one layer.

    All take the same arguments first, called `given`: the layer's parameters, its input, the packed keys, and in the
    last layer the tensors of the micro-batch. Input and output are one tensor, or the tensors of a tuple one after the
    other. A tensor without dims has one dim on the island, where a scalar argument could not be distinguished from a
    number in the code.

    Args:
        forward: (*given) -> *output, *residuals.
        backward: the programs of the backward.
        evaluate: (*given) -> *output; for the last layer the loss and the metrics.
        num_parameters: the number of parameters of the layer.
        x: zeros in the form of the layer's input.
        y: zeros in the form of the layer's output.
    """

    forward: Program
    backward: BackwardPrograms
    evaluate: Program
    num_parameters: int
    x: Activation
    y: Activation

    def input(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the layer's input among the arguments."""
        return list(given[self.num_parameters : self.num_parameters + len(tensors_of(self.x))])


@dataclass
class IslandForward:
    """The parts of the forward of one layer and micro-batch that its backward needs, on the island.

    Args:
        given: the arguments of the forward program.
        residuals: its results for the backward. None with activation checkpointing, where the forward is run again.
    """

    given: list[Tensor]
    residuals: list[Tensor] | None


class XlaPrograms(PairPrograms):
    """Layer programs of an XLA island; otherwise like `StagePrograms`. Call `compile` once, before any other method.

    Args:
        num_layers, loss, loss_scale, checkpointing, first_trained: as for `StagePrograms`.
        island: the devices that compute.
        specs: parameter name -> its placement on the island's axes. Other parameters are whole on each device.
    """

    _SAVED = (*StagePrograms._SAVED, "_kept")

    def __init__(
        self,
        num_layers: int,
        *,
        loss: Loss | Objective,
        loss_scale: float,
        checkpointing: bool,
        island: XlaIsland,
        specs: Mapping[str, P],
        first_trained: int = 0,
    ) -> None:
        super().__init__(
            num_layers, loss=loss, loss_scale=loss_scale, checkpointing=checkpointing, first_trained=first_trained
        )
        self._island = island
        self._specs = specs
        self._programs: dict[int, LayerPrograms] = {}
        # Layer -> (its buffer, the buffer's `times_marked`, parameters on the island).
        self._placed: dict[int, tuple[ValueBuffer, int, list[Tensor]]] = {}
        # (layer, micro-batch) -> its forward. `_saved` of the base class has the same keys.
        self._kept: dict[tuple[int, int], IslandForward] = {}

    # ---- compiling

    @property
    def num_compiled(self) -> int:
        return self._island.num_compiled

    def compile(
        self,
        modules: Sequence[nn.Module],
        layout: ModelLayout,
        example: Example,
        dtype: torch.dtype,
        compiled: Callable[[str], None] = lambda layer: None,
    ) -> None:
        """Compiles the programs of all layers of the model, so that no reconfiguration compiles anything later.

        Args:
            modules: all layers, first to last; parameters may be on the meta device.
            layout: the layout of the model.
            example: a micro-batch of the form that all have, in host memory.
            dtype: the dtype of parameters and activations.
            compiled: called with the name of each layer once its programs exist.

        Raises:
            ModelError: a layer cannot be compiled.
        """
        self._example = example
        x = map_tensors(lambda one: torch.zeros_like(one), example.x)
        for layer, module in zip(layout.layers, modules, strict=True):
            try:
                with naming_layer(layer.name, "compilation", x):
                    self._programs[layer.index], x = self._compile(layer, module, x, example, dtype)
            except FrozenNumberError as error:
                where = self._code_of(layer)
                raise ModelError(
                    f"XLA cannot compile {where}: the code reads the value of a tensor ({error})",
                    rule="a layer is compiled once, on zeros: what `.item()`, `float()` or `if` has read of them would "
                    "stay in it for good",
                    where=where,
                    fix="compute with tensors (torch.where in place of `if`, a tensor as weight or metric), or use "
                    "runtime.device=cpu",
                ) from None
            except FrozenTensorError as error:
                on_cpu = f"operators that ran on the CPU: {', '.join(error.operators)}"
                reason = on_cpu if error.operators else "a tensor that is neither its input nor a parameter"
                raise ModelError(
                    f"XLA cannot compile layer {layer.name}, which uses {reason}",
                    rule="a layer that is compiled consists of operators that XLA has, on its input and parameters",
                    where=f"layer {layer.name}",
                    fix="write it with other operators, or use runtime.device=cpu",
                ) from None
            compiled(layer.name)

    def _compile(
        self, layout: LayerLayout, module: nn.Module, x: Activation, example: Example, dtype: torch.dtype
    ) -> tuple[LayerPrograms, Activation]:
        """Compiles the programs of one layer for inputs like `x`. Returns them, and zeros like the layer's output."""
        island, layer, specs = self._island, layout.index, self._specs_of(layout)
        host = [torch.zeros(slot.parameter.shape, dtype=dtype) for slot in layout.slots]
        host += [_with_dims(torch.zeros_like(one, requires_grad=False)) for one in tensors_of(x)]
        # The packed keys: seed, step and layer, then the sample ids (`_given`).
        host.append(torch.zeros(3 + example.num_samples, dtype=torch.int64))
        if layer == self._last:
            host += [_with_dims(torch.zeros_like(leaf)) for _, leaf in leaves_of(example.batch)]
        zeros = ZeroArguments(island, tuple(host), tuple(specs))
        with torch.no_grad(), _evaluating([*self._of_model, *module.modules()]):
            inputs = zeros.given()
            if layer == self._last:
                with TracedNumbersRefused():
                    loss, metrics = self._scores(layout, module, inputs, x)
                scores = tensors_of(self._checked_scores(loss, metrics))
                # A loss alone keeps its form, without dims. Several numbers each get a dim, and none may be an argument
                # itself (`_computed`).
                outputs = scores if len(scores) == 1 else tuple(self._computed(_with_dims(one)) for one in scores)
            else:
                with TracedNumbersRefused():
                    y = self._output(layout, module, dtype, inputs, x)
                outputs = tensors_of(_all_with_dims(y))
            evaluate = island.capture(outputs, inputs, [WHOLE] * len(outputs))
            island.forget_traces()
        inputs = zeros.given()
        trained = [not slot.parameter.frozen for slot in layout.slots]
        of_input = marks_of(leaf(x, passes_gradient=self._passes_gradient(layer)))
        wanted = [*trained, *of_input] if layer >= self._first_trained else []
        leaves = {n: inputs[n] for n, is_leaf in enumerate(wanted) if is_leaf}
        for one in leaves.values():
            one.requires_grad_()
        saved = SavedTensors(island)
        with saved.hooks():
            with TracedNumbersRefused():
                y = self._output(layout, module, dtype, inputs, x)
            if layer == self._last:
                loss, *weight = tensors_of(y)
                y = (loss * self._loss_scale, *map(self._computed, weight)) if weight else loss * self._loss_scale
            output = map_tensors(lambda o: torch.zeros(o.shape, dtype=o.dtype, requires_grad=o.requires_grad), y)
            y = _all_with_dims(y)
        residuals = saved.besides(inputs)
        results = [*(one.detach() for one in tensors_of(y)), *residuals]
        forward = island.capture(results, inputs, [WHOLE] * len(results))
        ends = () if layer == self._last else tuple(torch.zeros(o.shape, dtype=o.dtype) for o in graded(y))
        traced = TracedForward(
            zeros, graded(y), leaves, saved, forward, ends, len(of_input), num_outputs=len(tensors_of(y))
        )
        backward = compile_backward(island, traced)
        island.forget_traces()
        return LayerPrograms(forward, backward, evaluate, len(specs), x, output), output

    def _output(
        self, layout: LayerLayout, module: nn.Module, dtype: torch.dtype, inputs: list[Tensor], like_x: Activation
    ) -> Activation:
        """Traces the layer's output, or the loss after the last layer, in the form that `StagePrograms` gives it.

        Args:
            inputs: the arguments `given` of `LayerPrograms`.
            like_x: a tensor or tuple in the form of the layer's input.
        """
        if layout.index == self._last:
            y, batch = self._traced(layout, module, inputs, like_x)
            return checked_loss(self._loss_of(y, batch))
        y, _ = self._traced(layout, module, inputs, like_x)
        mark = partial(self._island.mark, spec=WHOLE)
        y = checked_output(y, dtype, layout.name)
        return map_tensors(mark, y if isinstance(y, Tensor) else map_tensors(self._computed, y))

    def _scores(
        self, layout: LayerLayout, module: nn.Module, inputs: list[Tensor], like_x: Activation
    ) -> tuple[Any, Mapping[str, Any]]:
        """Traces the loss and the metrics of a validation; arguments as for `_output`."""
        y, batch = self._traced(layout, module, inputs, like_x)
        return self._loss_of(y, batch), self._metrics_of(y, batch)

    def _traced(
        self, layout: LayerLayout, module: nn.Module, inputs: list[Tensor], like_x: Activation
    ) -> tuple[Any, Any]:
        """Traces a layer; arguments as for `_output`. Returns its result, and for the last layer the traced batch."""
        paths = [_path(layout, slot) for slot in layout.slots]
        parameters, others = inputs[: len(paths)], inputs[len(paths) :]
        number = len(tensors_of(like_x))
        given = (o if form.ndim else o.reshape(()) for o, form in zip(others, tensors_of(like_x), strict=False))
        x, (packed, *leaves) = like(like_x, given), others[number:]
        keys = Keys(packed[0], packed[1], packed[3:], packed[2])
        arguments = (x, keys) if takes_keys(module) else (x,)
        y = torch.func.functional_call(module, dict(zip(paths, parameters, strict=True)), arguments)
        if layout.index < self._last:
            return y, None
        assert self._example is not None
        forms = [leaf for _, leaf in leaves_of(self._example.batch)]
        leaves = (one if form.ndim else one.reshape(()) for one, form in zip(leaves, forms, strict=True))
        y = self._island.mark(y, WHOLE) if isinstance(y, Tensor) else y
        return y, with_leaves(self._example.batch, leaves)

    def _computed(self, value: Tensor) -> Tensor:
        """A tensor of an output; if it is an input of the layer itself, a result that the program computes from it."""
        if self._island.is_traced(value):
            return value
        return value * 1.0 if value.is_floating_point() else value | value

    # ---- running

    def bind(self, modules: Mapping[int, nn.Module], values: Mapping[int, ValueBuffer]) -> None:
        super().bind(modules, values)
        self._placed = {layer: placed for layer, placed in self._placed.items() if layer in modules}

    def discard_all(self) -> None:
        super().discard_all()
        self._kept.clear()

    def discard(self, microbatch: int) -> None:
        super().discard(microbatch)
        for key in [k for k in self._kept if k[1] == microbatch]:
            del self._kept[key]

    def forward(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        given, programs = self._given(layer, x, keys, batch), self._programs[layer]
        results = self._island.run(programs.forward, given)
        number = len(tensors_of(programs.y))
        outputs, residuals = results[:number], results[number:]
        self._saved[layer, microbatch] = SavedForward(given[-1], None, keys)  # only its key is used, by `forwarded`
        self._kept[layer, microbatch] = kept = IslandForward(given, None if self._checkpointing else residuals)
        held = [*programs.input(given), *(kept.residuals or ())]
        self.memory.note(layer, sum(value.nbytes for value in held), sum(value.nbytes for value in outputs))
        y = self._as_output(layer, outputs)
        if layer == self._last:
            if isinstance(y, Tensor):
                self._losses[microbatch] = y
            else:
                loss, weight = y
                self._losses[microbatch], y = loss_and_weight(loss, weight), loss.detach()
        return y

    def backward_input(self, layer: int, microbatch: int, dy: Activation | None, *, batch: Any) -> Activation | None:
        del self._saved[layer, microbatch]
        kept, programs = self._kept.pop((layer, microbatch)), self._programs[layer]
        x, backward = programs.x, programs.backward
        if layer < self._first_trained:
            return no_gradient(x)
        made, arguments = list[Tensor](), list[Tensor]()
        if backward.program is not None:
            # With activation checkpointing the forward's own program is run again: a backward program that contains the
            # forward could be fused in another way, and give other bits.
            residuals = kept.residuals
            if residuals is None:
                residuals = self._island.run(programs.forward, kept.given)[len(tensors_of(programs.y)) :]
            ends = [] if dy is None else [self._there(one) for one in tensors_of(dy)]
            arguments = [*kept.given, *residuals, *ends]
            made = self._island.run(backward.program, arguments)
        of_input = [made.pop(0) if has_dx else None for has_dx in backward.has_dx]
        loss = self._losses.pop(microbatch) if layer == self._last else None
        self._begun[layer, microbatch] = self._begin_weights(layer, arguments, made, loss)
        if not self._passes_gradient(layer):
            return no_gradient(x) if layer else None
        return self._as_gradient(layer, x, of_input)

    def _as_output(self, layer: int, outputs: Sequence[Tensor]) -> Activation:
        """The output of a layer in the form that the caller gets."""
        last = layer == max(self._modules)
        form = self._programs[layer].y
        outputs = self._out(outputs, last)
        if isinstance(form, Tensor):
            return outputs[0]
        if last:
            outputs = [one.reshape(of.shape) for one, of in zip(outputs, form, strict=True)]
        return like(form, (o.requires_grad_(f.requires_grad) for o, f in zip(outputs, form, strict=True)))

    def _as_gradient(self, layer: int, x: Activation, made: Sequence[Tensor | None]) -> Activation | None:
        """The gradient of a layer's input in the form that the caller gets: of those of its tensors that have one.

        Args:
            x: zeros in the form of the input.
            made: for each tensor of the input its gradient. None if it has none, or if the layer does not use it.
        """
        first = layer == min(self._modules)
        found = iter(self._out([one for one in made if one is not None], first))
        all_of_it = [None if one is None else next(found) for one in made]
        marks = marks_of(leaf(x, passes_gradient=True))
        dx = tuple(
            torch.zeros(one.shape, dtype=one.dtype)
            if gradient is None
            else gradient.view(one.shape)
            if first
            else gradient
            for one, gradient, mark in zip(tensors_of(x), all_of_it, marks, strict=True)
            if mark
        )
        if isinstance(x, Tensor):
            return dx[0] if dx else None
        return dx or (no_gradient(x) if layer else None)

    def _begin_weights(
        self, layer: int, arguments: Sequence[Tensor], made: Sequence[Tensor], loss: Tensor | None
    ) -> BegunBackward:
        """The record of the second part of a backward, after the first program has run.

        Args:
            arguments: the arguments of the first program.
            made: its results without the gradients of the input.
            loss: for the last layer the micro-batch's loss; else None.
        """
        backward, slots = self._programs[layer].backward, self._values[layer].layout.slots
        weights = backward.weights
        later = weights.later if weights is not None else ()
        results = iter(made)
        gradients = [next(results) if g and n not in later else None for n, g in enumerate(backward.graded)]
        operands = (*(arguments[n] for n in weights.kept), *results) if weights is not None else ()
        trained = tuple(n for n, slot in enumerate(slots) if not slot.parameter.frozen)
        put_off = IslandWeights(self._island, weights, operands, trained)
        return BegunBackward([gradients[n] for n in trained], put_off, loss)

    def bytes_put_off(self, layer: int, microbatch: int) -> int:
        begun = self._begun[layer, microbatch]
        operands = () if begun.put_off is None else begun.put_off.operands
        if not operands:
            return 0
        made = (gradient for gradient in begun.gradients if gradient is not None)
        return sum({self._island.identity(kept): kept.nbytes for kept in (*operands, *made)}.values())

    def evaluate(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        outputs = self._island.run(self._programs[layer].evaluate, self._given(layer, x, keys, batch))
        if layer < self._last:
            return self._as_output(layer, outputs)
        scores = tuple(one.reshape(()) for one in self._out(outputs, True))
        return scores[0] if len(scores) == 1 else scores

    def set_training(self, training: bool) -> None:
        """Does nothing, since training and evaluation are separate programs."""

    def _given(self, layer: int, x: Activation, keys: Keys, batch: Any) -> list[Tensor]:
        """The arguments of the layer's programs, on the island (`LayerPrograms`)."""
        packed = torch.cat([torch.stack([keys.seed, keys.step, keys.layer]), keys.sample_ids])
        host = [packed]
        if layer == self._last:
            host += [_with_dims(leaf) for _, leaf in leaves_of(batch)]
        there = [self._there(one) for one in tensors_of(x)]
        return [*self._parameters(layer), *there, *self._island.put(host, [WHOLE] * len(host))]

    def _parameters(self, layer: int) -> list[Tensor]:
        """The layer's parameters on the island. They are sent there again only after they were written."""
        values = self._values[layer]
        now = values, values.times_marked
        if values.version is None or self._placed.get(layer, ())[:2] != now:
            self._placed[layer] = *now, self._island.put(values.parameters, self._specs_of(values.layout))
        return self._placed[layer][2]

    def dropped(self, layer: int) -> None:
        self._placed.pop(layer, None)

    def placed(self, layer: int) -> dict[str, Tensor]:
        """The layer's parameters on the island, by their names within the layer. For tests."""
        layout = self._values[layer].layout
        return {_path(layout, s): v for s, v in zip(layout.slots, self._parameters(layer), strict=True)}

    def _specs_of(self, layout: LayerLayout) -> list[P]:
        return [self._specs.get(slot.parameter.name, WHOLE) for slot in layout.slots]

    def _there(self, value: Tensor) -> Tensor:
        """The tensor on the island. It is sent there unless the layer before has left it there."""
        value = _with_dims(value.detach())
        return value if value.device == self._island.place else self._island.put([value], [WHOLE])[0]

    def _out(self, values: Sequence[Tensor], leaves_stage: bool) -> list[Tensor]:
        """A program's results for the caller: in host memory if they leave the stage, else on the island."""
        if leaves_stage:
            return self._island.fetch(values) if values else []
        self._island.wait()  # the caller measures the time of the program, not that of starting it
        return list(values)


def _with_dims(value: Tensor) -> Tensor:
    """The tensor, with one dim if it has none."""
    return value if value.ndim else value.reshape(1)


def _all_with_dims(y: Activation) -> Activation:
    """A traced output in the form that a program returns: each tensor of a tuple has at least one dim."""
    return y if isinstance(y, Tensor) else map_tensors(_with_dims, y)


def _path(layout: LayerLayout, slot: Slot) -> str:
    """A parameter's name within its layer."""
    return slot.parameter.name.removeprefix(layout.name + ".")


@contextmanager
def _evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which modules are in evaluation mode. Afterwards each of them is in its own mode again."""
    training = {module: module.training for module in modules}
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before
