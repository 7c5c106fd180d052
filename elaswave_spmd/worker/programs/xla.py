"""Layer programs on PyTorch/XLA: forward, backward and evaluation of each layer as compiled programs of an island.

An island is the local devices of one worker as one XLA client (runtime/devices/xla_island.py). Programs are traced
once, before the worker is ready; after that a step only runs programs by their hash.

A layer's forward program returns its output and the residuals: the tensors that autograd saved for the backward. The
backward program takes them as arguments. So both programs are functions without hidden state, and no autograd runs in a
step. The keys of a micro-batch are an argument too, packed into one vector of integers: a step number or a sample id in
the graph would need another compilation in every step.

Tensors stay on the island between the layers of a stage. What leaves the stage, and all gradients, are host tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch
from elaswave_spmd.runtime.devices.xla_island import WHOLE, FrozenTensorError, Program, XlaIsland
from elaswave_spmd.sharding import P
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout, Slot
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.programs.eager import (
    Loss,
    SavedForward,
    StagePrograms,
    checked_loss,
    checked_output,
    naming_layer,
    no_gradient,
)

_INPUT, _RESIDUAL, _NUMBER = "input", "residual", "number"
"""Sources of a tensor that autograd saved: an input of the forward, a result of it, or a number in the layer's code."""


@dataclass(frozen=True)
class LayerPrograms:
    """The programs of one layer.

    All three take the same arguments first, called `given`: the layer's parameters, its input, the packed keys, and in
    the last layer the tokens and targets.

    Args:
        forward: (*given) -> output, *residuals.
        backward: (*given, *residuals, gradient of the output) -> gradient of the input if `has_dx`, and the gradients
            of the `graded` parameters. The last layer's output is the loss, so there no gradient of it is given. None
            if the layer has nothing to differentiate.
        evaluate: (*given) -> output.
        graded: for each parameter, True if it gets a gradient; a frozen one gets none.
        has_dx: True if the input gets a gradient.
    """

    forward: Program
    backward: Program | None
    evaluate: Program
    graded: tuple[bool, ...]
    has_dx: bool


@dataclass
class IslandForward:
    """The forward of one layer and micro-batch on the island, as far as its backward needs it.

    Args:
        given: the arguments of the forward program.
        residuals: its results for the backward; None with activation checkpointing, where the forward is run again.
    """

    given: list[Tensor]
    residuals: list[Tensor] | None


class XlaPrograms(StagePrograms):
    """Layer programs of an XLA island; otherwise like `StagePrograms`. Call `compile` once, before any other method.

    Args:
        num_layers, loss, loss_scale, checkpointing, first_trained: as for `StagePrograms`.
        island: the devices that compute.
        specs: parameter name -> its placement on the island's axes; other parameters are whole on each device.
    """

    can_split = False

    _SAVED = (*StagePrograms._SAVED, "_kept")

    def __init__(
        self,
        num_layers: int,
        *,
        loss: Loss,
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
        self._placed: dict[int, tuple[object, list[Tensor]]] = {}  # layer -> (version, parameters on the island)
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
        tokens_BT: tuple[int, int],
        dtype: torch.dtype,
        compiled: Callable[[str], None] = lambda layer: None,
    ) -> None:
        """Compiles the programs of all layers of the model, so that no reconfiguration compiles anything later.

        Args:
            modules: all layers, first to last; parameters may be on the meta device.
            layout: of the model.
            tokens_BT: shape of a micro-batch: (samples, seq_len).
            dtype: of parameters and activations.
            compiled: called with the name of each layer once its programs exist.

        Raises:
            ModelError: a layer cannot be compiled.
        """
        x = torch.zeros(tokens_BT, dtype=torch.int64)
        for layer, module in zip(layout.layers, modules, strict=True):
            try:
                with naming_layer(layer.name, "compilation", x):
                    self._programs[layer.index], x = self._compile(layer, module, x, tokens_BT, dtype)
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
        self, layout: LayerLayout, module: nn.Module, x: Tensor, tokens_BT: tuple[int, int], dtype: torch.dtype
    ) -> tuple[LayerPrograms, Tensor]:
        """Compiles the programs of one layer for inputs like `x`. Returns them, and zeros like the layer's output."""
        island, layer = self._island, layout.index
        shapes = [slot.parameter.shape for slot in layout.slots]
        specs = self._specs_of(layout)

        def given() -> list[Tensor]:
            """New arguments of the programs, all zero, on the island."""
            host = [*(torch.zeros(shape, dtype=dtype) for shape in shapes), torch.zeros_like(x)]
            host.append(torch.zeros(3 + tokens_BT[0], dtype=torch.int64))
            host += [torch.zeros(tokens_BT, dtype=torch.int64)] * (2 if layer == self._last else 0)
            return island.put(host, [*specs, *[WHOLE] * (len(host) - len(specs))])

        with torch.no_grad(), _evaluating(module):
            inputs = given()
            evaluate = island.capture([self._output(layout, module, dtype, inputs)], inputs, [WHOLE])
            island.forget_traces()
        inputs = given()
        trained = [not slot.parameter.frozen for slot in layout.slots]
        wanted = [*trained, self._passes_gradient(layer)] if layer >= self._first_trained else [False] * len(inputs)
        leaves = [
            value for value, is_leaf in zip(inputs, wanted, strict=False) if is_leaf and value.is_floating_point()
        ]
        for leaf in leaves:
            leaf.requires_grad_()
        saved = _SavedTensors(island)
        with saved.hooks():
            y = self._output(layout, module, dtype, inputs)
            y = y * self._loss_scale if layer == self._last else y
        residuals = saved.besides(inputs)
        forward = island.capture([y.detach(), *residuals], inputs, [WHOLE] * (1 + len(residuals)))
        outputs = island.run(forward, inputs)
        # The backward is traced from new arguments: those of the forward's trace belong to that program.
        again = given()
        saved.give(again, outputs[1:])
        backward, graded, has_dx = self._backward_of(layer, y, leaves, inputs, again, outputs, specs)
        island.forget_traces()
        programs = LayerPrograms(forward, backward, evaluate, graded, has_dx)
        return programs, torch.zeros(outputs[0].shape, dtype=outputs[0].dtype)

    def _backward_of(
        self,
        layer: int,
        y: Tensor,
        leaves: list[Tensor],
        inputs: list[Tensor],
        again: list[Tensor],
        outputs: list[Tensor],
        specs: list[P],
    ) -> tuple[Program | None, tuple[bool, ...], bool]:
        """Traces and compiles the backward of one layer.

        Args:
            layer: its number.
            y: the forward's output with its graph, whose saved tensors are replaced by `again` and `outputs`.
            leaves: the parameters, and the input if it is not token ids: tensors to differentiate by.
            inputs: the arguments that the forward was traced from.
            again: the arguments that the backward is traced from.
            outputs: the forward's results, run on `inputs`: output and residuals.
            specs: of the parameters.

        Returns:
            The program (None if nothing requires a gradient), `graded` and `has_dx` of `LayerPrograms`.
        """
        num_parameters = len(specs)
        if not y.requires_grad:
            return None, (False,) * num_parameters, False
        ends = [] if layer == self._last else self._island.put([torch.zeros(y.shape, dtype=y.dtype)], [WHOLE])
        gradients = torch.autograd.grad(y, leaves, ends or None, allow_unused=True)
        found = dict(zip(map(id, leaves), gradients, strict=True))
        of_parameters = [found.get(id(value)) for value in inputs[:num_parameters]]
        dx = found.get(id(inputs[num_parameters]))
        made = [] if dx is None else [(dx, WHOLE)]
        made += [(g, spec) for g, spec in zip(of_parameters, specs, strict=True) if g is not None]
        marked = [self._island.mark(gradient, spec) for gradient, spec in made]
        program = self._island.capture(marked, [*again, *outputs[1:], *ends], [spec for _, spec in made])
        return program, tuple(g is not None for g in of_parameters), dx is not None

    def _output(self, layout: LayerLayout, module: nn.Module, dtype: torch.dtype, inputs: list[Tensor]) -> Tensor:
        """Traces the layer's output, or the loss after the last layer, in the form that `StagePrograms` gives it."""
        paths = [_path(layout, slot) for slot in layout.slots]
        parameters, (x, packed, *batch) = inputs[: len(paths)], inputs[len(paths) :]
        keys = Keys(packed[0], packed[1], packed[3:], packed[2])
        y = torch.func.functional_call(module, dict(zip(paths, parameters, strict=True)), (x, keys))
        if layout.index == self._last:
            return checked_loss(self._loss(self._island.mark(y, WHOLE), Batch(*batch)))
        return self._island.mark(checked_output(y, dtype, layout.name), WHOLE)

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

    def forward(self, layer: int, microbatch: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        given = self._given(layer, x, keys, batch)
        y, *residuals = self._island.run(self._programs[layer].forward, given)
        self._saved[layer, microbatch] = SavedForward(given[-1], None, keys)  # only its key is used, by `forwarded`
        self._kept[layer, microbatch] = kept = IslandForward(given, None if self._checkpointing else residuals)
        held = [given[len(self._programs[layer].graded)], *(kept.residuals or ())]
        self.memory.note(layer, sum(value.nbytes for value in held), y.nbytes)
        if layer == self._last:
            self._losses[microbatch] = y
        return self._out(y, layer == max(self._modules))

    def backward(
        self, layer: int, microbatch: int, dy: Tensor | None, into: GradientBuffer, *, add: bool, batch: Batch | None
    ) -> Tensor | None:
        del self._saved[layer, microbatch]
        kept, programs = self._kept.pop((layer, microbatch)), self._programs[layer]
        made: list[Tensor] = []
        if programs.backward is not None:
            ends = [] if dy is None else [self._there(dy)]
            # With activation checkpointing the forward's own program is run again: a backward program that contains the
            # forward could be fused in another way, and give other bits.
            residuals = self._island.run(programs.forward, kept.given)[1:] if kept.residuals is None else kept.residuals
            made = self._island.run(programs.backward, [*kept.given, *residuals, *ends])
        dx = made.pop(0) if programs.has_dx else None
        losses = [self._losses.pop(microbatch)] if layer == self._last else []
        host = iter(self._island.fetch([*made, *losses]))
        slots = self._values[layer].layout.slots
        found = [next(host) if graded else None for graded in programs.graded]
        gradients = [g for g, slot in zip(found, slots, strict=True) if not slot.parameter.frozen]
        if add:
            for view, gradient in zip(into.views, gradients, strict=True):
                if gradient is not None:
                    view.add_(gradient)
        else:
            into.set(gradients)
        if losses:
            loss = next(host)
            into.loss.copy_(into.loss + loss if add else loss)
        if not self._passes_gradient(layer):
            return no_gradient(torch.empty(0, dtype=kept.given[len(programs.graded)].dtype))
        if dx is None:
            x = kept.given[len(programs.graded)]
            return torch.zeros(x.shape, dtype=x.dtype) if x.is_floating_point() else None
        return self._out(dx, layer == min(self._modules))

    def evaluate(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> Tensor:
        (y,) = self._island.run(self._programs[layer].evaluate, self._given(layer, x, keys, batch))
        return self._out(y, layer == max(self._modules))

    def set_training(self, training: bool) -> None:
        """Does nothing: training and evaluation are two programs."""

    def _given(self, layer: int, x: Tensor, keys: Keys, batch: Batch | None) -> list[Tensor]:
        """The arguments of the layer's programs, on the island (`LayerPrograms`)."""
        packed = torch.cat([torch.stack([keys.seed, keys.step, keys.layer]), keys.sample_ids])
        host = [packed]
        if layer == self._last:
            assert batch is not None
            host += [batch.tokens, batch.targets]
        return [*self._parameters(layer), self._there(x), *self._island.put(host, [WHOLE] * len(host))]

    def _parameters(self, layer: int) -> list[Tensor]:
        """The layer's parameters on the island. They are sent there once for each version."""
        values = self._values[layer]
        version = values.version
        if version is None or self._placed.get(layer, (None,))[0] != version:
            self._placed[layer] = version, self._island.put(values.parameters, self._specs_of(values.layout))
        return self._placed[layer][1]

    def dropped(self, layer: int) -> None:
        self._placed.pop(layer, None)

    def placed(self, layer: int) -> dict[str, Tensor]:
        """The layer's parameters on the island, by their names within the layer. For tests."""
        layout = self._values[layer].layout
        return {_path(layout, s): v for s, v in zip(layout.slots, self._parameters(layer), strict=True)}

    def _specs_of(self, layout: LayerLayout) -> list[P]:
        return [self._specs.get(slot.parameter.name, WHOLE) for slot in layout.slots]

    def _there(self, value: Tensor) -> Tensor:
        """A tensor on the island, which is sent there unless the layer before left it there."""
        return value if value.device == self._island.place else self._island.put([value], [WHOLE])[0]

    def _out(self, value: Tensor, leaves_stage: bool) -> Tensor:
        """A program's result as the caller gets it: in host memory if it leaves the stage, else on the island."""
        if leaves_stage:
            return self._island.fetch([value])[0]
        self._island.wait()  # the caller measures the time: it is to be the program's, not that of starting it
        return value


def _path(layout: LayerLayout, slot: Slot) -> str:
    """A parameter's name within its layer."""
    return slot.parameter.name.removeprefix(layout.name + ".")


class _SavedTensors:
    """The tensors that autograd saves while a forward is traced, and their replacements when the backward is traced.

    The order of calls is `hooks` (around the forward), `besides`, `give`, and then the backward.
    """

    def __init__(self, island: XlaIsland) -> None:
        self._island = island
        self._saved: list[Tensor] = []
        self._given: list[Tensor] = []
        self._sources: list[tuple[str, int]] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that record what is saved, and that return the replacements."""

        def pack(value: Tensor) -> int:
            self._saved.append(value)
            return len(self._saved) - 1

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda number: self._given[number])

    def besides(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The residuals: the saved tensors that the forward computes, each once.

        Saved inputs are not among them, since the backward program has the inputs as arguments anyway, and neither are
        numbers in the layer's code, which are constants of both programs.
        """
        identity = self._island.identity
        numbers = {identity(value): number for number, value in enumerate(inputs)}
        found: dict[int, tuple[int, Tensor]] = {}
        for number, value in enumerate(self._saved):
            tensor = identity(value)
            if tensor in numbers:
                self._sources.append((_INPUT, numbers[tensor]))
            elif not value.ndim and not self._island.is_traced(value):
                self._sources.append((_NUMBER, number))
            else:
                # Scalars get a dim: an argument without dims could not be told from a number in the code.
                found.setdefault(tensor, (len(found), value.detach() if value.ndim else value.detach().reshape(1)))
                self._sources.append((_RESIDUAL, found[tensor][0]))
        return [value for _, value in found.values()]

    def give(self, inputs: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
        """Sets the tensors that the backward gets: arguments of the backward's trace, and residuals."""
        tables = {_INPUT: inputs, _RESIDUAL: residuals, _NUMBER: self._saved}
        given = [tables[kind][index] for kind, index in self._sources]
        self._given = [
            g.reshape(saved.shape) if not saved.ndim else g for g, saved in zip(given, self._saved, strict=True)
        ]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switches a module to evaluation, and each of its modules back to its mode at the end."""
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for inner, before in training.items():
            inner.training = before
