"""The backward of a layer of an island: tracing, cutting and compiling it, and W while it is put off.

Autograd runs only here, before the first step. The operators that it runs are recorded as a graph (backward_trace.py).
If the layer's input has a gradient and the graph can be cut (backward_pair.py), each part is traced again, into a
program of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elaswave_spmd.runtime.devices.xla_island import WHOLE, Program, TracedNumbersRefused, XlaIsland
from elaswave_spmd.sharding import P
from elaswave_spmd.worker.programs.backward_pair import Cut, cut_by_dependence
from elaswave_spmd.worker.programs.backward_trace import BackwardTrace

_INPUT, _RESIDUAL, _NUMBER = "input", "residual", "number"
"""Sources of a tensor that autograd saved: an input of the forward, a result of it, or a number in the layer's code."""


@dataclass(frozen=True)
class WeightsProgram:
    """W, the second program of a backward: it makes the gradients of parameters that the first one leaves to it.

    Args:
        program: (*arguments of the backward that W needs, *results of the first program that W needs) -> gradients.
        kept: the numbers of the arguments of the backward that W needs.
        later: the numbers of the parameters whose gradients W makes.
    """

    program: Program
    kept: tuple[int, ...]
    later: tuple[int, ...]


@dataclass(frozen=True)
class BackwardPrograms:
    """The backward of one layer.

    Args:
        program: (*given, *residuals, *gradients of the output) -> the gradients of the input as `has_dx` says, then the
            gradients of the `graded` parameters that `weights` does not make, then what `weights` needs. The last layer
            gets no gradient of its output, which is the loss. None if the layer has nothing to differentiate.
        weights: the second program; None if the backward is whole.
        graded: for each parameter, True if it gets a gradient; a frozen one gets none.
        has_dx: for each tensor of the input, True if it gets a gradient.
    """

    program: Program | None
    weights: WeightsProgram | None
    graded: tuple[bool, ...]
    has_dx: tuple[bool, ...]


@dataclass(frozen=True)
class IslandWeights:
    """The second part of one backward on the island; implements `split_backward.PutOff`.

    Args:
        island: the island that computes it.
        weights: the program; None if the backward was whole.
        operands: the arguments of the program, on the island.
        trained: the numbers of the layer's trained parameters.
    """

    island: XlaIsland
    weights: WeightsProgram | None
    operands: tuple[Tensor, ...]
    trained: tuple[int, ...]

    def gradients(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs W, and returns the gradients of a layer's trained parameters in host memory.

        Args:
            others: for each trained parameter the gradient that B has made, on the island, or None.
        """
        made = dict(zip(self.trained, others, strict=True))
        if self.weights is not None:
            made.update(zip(self.weights.later, self.island.run(self.weights.program, self.operands), strict=True))
        host = iter(self.island.fetch([one for one in made.values() if one is not None]))
        return [None if one is None else next(host) for one in made.values()]


@dataclass(frozen=True)
class ZeroArguments:
    """Makes arguments of zeros, from which the programs of one layer are traced.

    Each program is traced from new arguments, because those of another trace belong to the program of that trace.

    Args:
        island: the island that receives the arguments.
        host: zeros in the form of the layer's parameters, and then of the other arguments.
        specs: the placements of the parameters, on the island's axes.
    """

    island: XlaIsland
    host: tuple[Tensor, ...]
    specs: tuple[P, ...]

    def given(self) -> list[Tensor]:
        """New arguments of the forward and the evaluation."""
        return self.island.put(self.host, [*self.specs, *[WHOLE] * (len(self.host) - len(self.specs))])


@dataclass(frozen=True)
class TracedForward:
    """The forward of one layer as it was traced, to be differentiated.

    Args:
        zeros: makes arguments.
        outputs: the outputs that have a gradient, with their graph. The tensors that the graph saved are replaced when
            the backward is traced.
        leaves: number of an argument -> that argument of the traced forward, for all that get a gradient.
        saved: the tensors that the graph has saved.
        program: the program of the forward.
        ends: zeros in the form of the gradients of the outputs. () for the loss, whose gradient is no argument.
        num_inputs: the number of tensors of the layer's input.
        num_outputs: the number of tensors of its output, with and without a gradient.
    """

    zeros: ZeroArguments
    outputs: tuple[Tensor, ...]
    leaves: Mapping[int, Tensor]
    saved: SavedTensors
    program: Program
    ends: tuple[Tensor, ...]
    num_inputs: int
    num_outputs: int

    def arguments(self) -> _Arguments:
        """New arguments of the backward."""
        island, given = self.zeros.island, self.zeros.given()
        ends = island.put(self.ends, [WHOLE] * len(self.ends)) if self.ends else []
        return _Arguments(given, island.run(self.program, given)[self.num_outputs :], ends)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a backward, on the island.

    Args:
        given: the arguments of the forward.
        residuals: the results of the forward that the backward needs.
        ends: the gradients of the forward's outputs; empty for the loss.
    """

    given: list[Tensor]
    residuals: list[Tensor]
    ends: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.given, *self.residuals, *self.ends]


def compile_backward(island: XlaIsland, forward: TracedForward) -> BackwardPrograms:
    """Traces and compiles the backward of one layer."""
    num_parameters = len(forward.zeros.specs)
    if not forward.outputs:
        return BackwardPrograms(None, None, (False,) * num_parameters, (False,) * forward.num_inputs)
    arguments = forward.arguments()
    trace = BackwardTrace(island, arguments.all)
    with TracedNumbersRefused(), trace:
        forward.saved.give(arguments.given, arguments.residuals)
        leaves = [*forward.leaves.values()]
        made = torch.autograd.grad(forward.outputs, leaves, arguments.ends or None, allow_unused=True)
    found = dict(zip(forward.leaves, made, strict=True))
    of_parameters = [found.get(number) for number in range(num_parameters)]
    of_input = [found.get(num_parameters + number) for number in range(forward.num_inputs)]
    graded = tuple(gradient is not None for gradient in of_parameters)
    has_dx = tuple(gradient is not None for gradient in of_input)
    graph = trace.graph([*of_input, *of_parameters])
    if any(has_dx) and graph is not None:
        parameters = [*graph.graph.find_nodes(op="placeholder")][:num_parameters]
        cut = cut_by_dependence(graph, range(forward.num_inputs), set(parameters))
        if cut is not None:
            return _pair(island, forward, cut, graded, has_dx)
    gradients, specs = _marked(island, [*of_input, *of_parameters], forward.zeros.specs)
    return BackwardPrograms(island.capture(gradients, arguments.all, specs), None, graded, has_dx)


def _pair(
    island: XlaIsland, forward: TracedForward, cut: Cut, graded: tuple[bool, ...], has_dx: tuple[bool, ...]
) -> BackwardPrograms:
    """Compiles both parts of a backward, each traced from arguments of its own."""
    island.forget_traces()
    arguments = forward.arguments().all
    results = cut.first(*arguments)
    gradients, specs = _marked(island, results[: cut.num_gradients], forward.zeros.specs)
    # Scalars get a dim, as residuals do (`SavedTensors.besides`).
    needed = [one if one.ndim else one.reshape(1) for one in results[cut.num_gradients :]]
    first = island.capture([*gradients, *needed], arguments, [*specs, *[WHOLE] * len(needed)])
    island.forget_traces()
    arguments = forward.arguments().all
    operands = [arguments[number] for number in cut.kept] + island.run(first, arguments)[len(gradients) :]
    forms = [like.shape for like in cut.second_inputs]
    results = cut.second(
        *(o if o.ndim == len(form) else o.reshape(form) for o, form in zip(operands, forms, strict=True))
    )
    made = dict(zip(cut.later, results, strict=True))
    gradients, specs = _marked(island, [made.get(number) for number in range(cut.num_gradients)], forward.zeros.specs)
    second = island.capture(gradients, operands, specs)
    weights = WeightsProgram(second, cut.kept, tuple(number - len(has_dx) for number in cut.later))
    return BackwardPrograms(first, weights, graded, has_dx)


def _marked(island: XlaIsland, gradients: Sequence[Tensor | None], specs: Sequence[P]) -> tuple[list[Tensor], list[P]]:
    """Fixes the placements of traced gradients. Returns the gradients that are not None, and their placements.

    Args:
        gradients: those of the layer's input, which is whole on each device, and then those of the parameters.
        specs: the placements of the parameters.
    """
    whole = [WHOLE] * (len(gradients) - len(specs))
    found = [(g, spec) for g, spec in zip(gradients, (*whole, *specs), strict=True) if g is not None]
    # A gradient may be an argument itself, such as that of x in x + bias. But a program has to compute its results.
    traced = [gradient if island.is_traced(gradient) else gradient * 1.0 for gradient, _ in found]
    specs = [spec for _, spec in found]
    return [island.mark(gradient, spec) for gradient, spec in zip(traced, specs, strict=True)], specs


class SavedTensors:
    """The tensors that autograd saves while a forward is traced, and their replacements when the backward is traced.

    The order of calls is `hooks` (around the forward), `besides`, `give`, and then the backward.
    """

    def __init__(self, island: XlaIsland) -> None:
        self._island = island
        self._saved: list[Tensor] = []
        self._given: list[Tensor] = []
        self._sources: list[tuple[str, int]] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The hooks that record what autograd saves, and that return the replacements in the backward."""

        def pack(value: Tensor) -> int:
            self._saved.append(value)
            return len(self._saved) - 1

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda number: self._given[number])

    def besides(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The residuals: the saved tensors that the forward computes, each once.

        Saved inputs are not among them, since the inputs are arguments of the backward program anyway. Numbers in the
        layer's code are not either, since they are constants of both programs.
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
                # Scalars get a dim: an argument without dims could not be distinguished from a number in the code.
                found.setdefault(tensor, (len(found), value.detach() if value.ndim else value.detach().reshape(1)))
                self._sources.append((_RESIDUAL, found[tensor][0]))
        return [value for _, value in found.values()]

    def give(self, inputs: Sequence[Tensor], residuals: Sequence[Tensor]) -> None:
        """Sets the replacements of the saved tensors, taken from the arguments of the backward's trace."""
        tables = {_INPUT: inputs, _RESIDUAL: residuals, _NUMBER: self._saved}
        given = [tables[kind][index] for kind, index in self._sources]
        self._given = [
            g.reshape(saved.shape) if not saved.ndim else g for g, saved in zip(given, self._saved, strict=True)
        ]
