"""The backward of a compiled layer as two programs: B for the gradient of its input, W for those of its weights.

A layer's backward is one graph, which is cut in two by the dependences of its nodes. B has all nodes that the gradient
of the input needs. It also has all nodes that read a parameter, because with ZeRO-3 the values of parameters may be
gone when W runs. W is the rest. B returns the values that W needs of it, except those that W can compute again at no
cost: views, conversions to a wider dtype, and constants.

A compiler fuses what it sees in one graph, so two programs may have other bits than one. Therefore a backward that can
be cut is always run as these two programs, one right after the other if nothing is put off.

The graph is the one of torch.compile, or consists of the operators that an island has traced (backward_trace.py). With
torch.compile, autograd runs B within the function that torch.compile has made of the layer. B gives autograd a stand-in
for each gradient that W will make: a tensor of the right shape with the memory of one element. Each result of W is
matched with its parameter by the identity of the stand-in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from elaswave_spmd.worker.activations import Activation
from elaswave_spmd.worker.buffers import GradientBuffer
from elaswave_spmd.worker.inputs import Example, refuse_other_form
from elaswave_spmd.worker.programs.eager import StagePrograms
from elaswave_spmd.worker.programs.split_backward import refuse_change

Program = Callable[[list[Any]], Sequence[Any]]
"""A compiled graph. It empties the list of its arguments, so that no argument is kept longer than it is needed."""

Compiler = Callable[..., Program]
"""(graph, arguments without values) -> the program of the graph."""


class PairPrograms(StagePrograms):
    """Layer programs whose backward is a pair of programs if it can be cut.

    `set_split_layers` does not change the programs. It only decides when the second one runs.
    """

    _put_off: frozenset[int] = frozenset()
    _example: Example | None = None  # a micro-batch of the form for which the programs were compiled

    def check_form(self, batch: Any) -> None:
        if self._example is not None:
            refuse_other_form(self._example, batch)

    def set_split_layers(self, layers: Collection[int]) -> None:
        self._put_off = frozenset(layers)

    @property
    def has_split_layers(self) -> bool:
        return bool(self._put_off)

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
        dx = self.backward_input(layer, microbatch, dy, batch=batch)
        self.backward_weights(layer, microbatch, into, add=add)
        return dx


# ---- with torch.compile


@dataclass(frozen=True)
class _Second:
    """A second program (W) that is still to be run, with its arguments.

    Args:
        program: the program.
        arguments: its arguments; the program empties this list.
        versions: the version counter of each argument, by which a later change in place is detected.
        stand_ins: for each result the tensor that autograd was given in its place.
    """

    program: Program
    arguments: list[Tensor]
    versions: tuple[int, ...]
    stand_ins: tuple[Tensor, ...]

    def run(self) -> Iterator[tuple[int, Tensor]]:
        """Run the program. Returns (id of the stand-in, result) for each of its results.

        Raises:
            RuntimeError: an argument was changed in place meanwhile.
        """
        for argument, version in zip(self.arguments, self.versions, strict=True):
            refuse_change(argument, version)
        with torch.no_grad():
            results = self.program(self.arguments)
        return zip(map(id, self.stand_ins), results, strict=True)


@dataclass
class WeightPrograms:
    """The second part of one backward with compiled programs; implements `split_backward.PutOff`.

    Args:
        brought: the programs that are still to be run: one, or none if the backward is whole.
    """

    brought: list[_Second] = field(default_factory=list)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """All tensors that are kept until W."""
        return tuple(tensor for second in self.brought for tensor in second.arguments)

    def gradients(self, parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run W, and return the gradients of a layer's parameters.

        Args:
            others: for each parameter the result of B: a gradient, a stand-in, or None.
        """
        made = dict[int, Tensor]()
        for second in self.brought:
            made.update(second.run())
        self.brought.clear()
        assert made.keys() <= {id(other) for other in others}, "autograd has made another tensor of a stand-in"
        return [None if other is None else made.get(id(other), other) for other in others]


class PairBackend:
    """A backend of torch.compile that makes two programs of a backward. Otherwise it works like the named backend.

    Args:
        name: "inductor", or "aot_eager", which runs graphs as they are.
        count: called when a W is compiled. For other programs torch.compile calls its own callback.
    """

    def __init__(self, name: str, count: Callable[[object], None]) -> None:
        self._compile = {"inductor": _by_inductor, "aot_eager": _as_they_are}[name]
        self._count = count
        self._brought = WeightPrograms()

    @contextmanager
    def putting_off(self, programs: WeightPrograms) -> Iterator[None]:
        """Context in which a backward is run whose second part is stored in `programs`."""
        before, self._brought = self._brought, programs
        try:
            yield
        finally:
            self._brought = before

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a traced function. Called by torch.compile.

        Args:
            inputs: parameters and other arguments. Besides parameters, only tensors of the layer's input may need a
                gradient.
        """
        import torch._functorch.config as functorch

        # The autograd cache would return a function whose backward is not cut. Each program is still cached by itself.
        # A program may overwrite a donated buffer once it has read it, but here the other program reads it as well.
        with functorch.patch(enable_autograd_cache=False, donated_buffer=False):
            return self._compile(graph, inputs, _LayerGraphs(self, inputs))

    def pair(self, cut: Cut, inputs: Sequence[Any], compiler: Compiler) -> Program:
        """Compile both parts. Returns the program for autograd, which runs B and stores W with its arguments."""
        first = compiler(cut.first, inputs)
        self._count(cut)
        second = compiler(cut.second, cut.second_inputs)
        stand_ins = cut.stand_ins()

        def run(arguments: list[Any]) -> list[Any]:
            # Taken out now, as `first` empties the list.
            kept = [arguments[number] for number in cut.kept]
            results = list(first(arguments))
            gradients = results[: cut.num_gradients]
            for number, stand_in in zip(cut.later, stand_ins, strict=True):
                gradients[number] = stand_in
            kept += results[cut.num_gradients :]
            versions = tuple(tensor._version for tensor in kept)
            self._brought.brought.append(_Second(second, kept, versions, stand_ins))
            return gradients

        vars(run)["_boxed_call"] = True  # torch's mark of a function that takes one list of arguments and empties it
        return run


class _LayerGraphs:
    """The graphs of one traced function. The graph of its forward is compiled before that of its backward."""

    def __init__(self, backend: PairBackend, inputs: Sequence[Any]) -> None:
        self._backend = backend
        self._num_inputs = len(inputs)
        graded = [number for number, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad]
        self._parameters = [number for number, one in enumerate(inputs) if isinstance(one, nn.Parameter)]
        self._of_input = [number for number in graded if number not in self._parameters]
        self._values: list[Tensor] = []

    def compile_forward(self, graph: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Program:
        self._values = [inputs[number] for number in self._parameters]
        return compiler(graph, inputs)

    def compile_backward(self, graph: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler) -> Program:
        if self._of_input and len(_outputs(graph)) == self._num_inputs:
            cut = cut_backward(graph, inputs, self._of_input, self._values)
            if cut is not None:
                return self._backend.pair(cut, inputs, compiler)
        return compiler(graph, inputs)


def _by_inductor(graph: fx.GraphModule, inputs: Sequence[Any], layer: _LayerGraphs) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not options.get("is_backward"):
            return layer.compile_forward(graph, inputs, partial(compile_fx_inner, **options))
        options["static_input_idxs"] = ()  # the given ones number the arguments of the whole backward
        return layer.compile_backward(graph, inputs, partial(compile_fx_inner, **options))

    return cast(Callable[..., Any], compile_fx(graph, inputs, inner_compile=compile_one))


def _as_they_are(graph: fx.GraphModule, inputs: Sequence[Any], layer: _LayerGraphs) -> Callable[..., Any]:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(
        fw_compiler=partial(layer.compile_forward, compiler=boxed_nop),
        bw_compiler=partial(layer.compile_backward, compiler=boxed_nop),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)


# ---- the cut


@dataclass(frozen=True)
class Cut:
    """The graph of a backward in two parts.

    Args:
        first: the graph of B: (*arguments of the whole) -> the gradients, with None for those of W, followed by the
            values that W needs of B.
        second: the graph of W: (*arguments of the whole that W needs, *values that W needs of B) -> its gradients.
        num_gradients: the number of gradients of the whole backward.
        kept: the numbers of the arguments of the whole that W needs.
        later: the numbers of the gradients that W makes.
        second_inputs: the arguments of W without values.
        results: the results of W without values.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    num_gradients: int
    kept: tuple[int, ...]
    later: tuple[int, ...]
    second_inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def stand_ins(self) -> tuple[Tensor, ...]:
        """For each result of W, a tensor of its shape, dtype and device that has the memory of one element."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            return tuple(torch.zeros((), dtype=one.dtype, device=one.device).expand(one.shape) for one in self.results)


def cut_backward(
    graph: fx.GraphModule, inputs: Sequence[Any], of_input: Sequence[int], values: Sequence[Tensor]
) -> Cut | None:
    """Cut the graph of a backward in two.

    Args:
        graph: (*inputs) -> a gradient or None for each input of the forward.
        inputs: its arguments without values.
        of_input: the numbers of the gradients of the layer's input, which B makes.
        values: the parameters without values, as the graph of the forward had them. Views of them are recognised by
            their storage.

    Returns:
        Both parts. None if nothing can be left to the second part, or the input has no gradient.
    """
    _note_forms(graph, inputs)
    storages = {value.untyped_storage()._cdata for value in values}
    parameters = {node for node in graph.graph.nodes if storages & _storages(node)}
    return cut_by_dependence(graph, of_input, parameters)


def cut_by_dependence(graph: fx.GraphModule, of_input: Sequence[int], parameters: set[fx.Node]) -> Cut | None:
    """Cut a graph whose nodes have their results, without values, in `meta["val"]`.

    Args:
        graph, of_input: as for `cut_backward`.
        parameters: the nodes that are parameters, or views of them.

    Returns:
        As `cut_backward`.
    """
    nodes, gradients = list(graph.graph.nodes), _outputs(graph)
    wanted = [gradients[number] for number in of_input if isinstance(gradients[number], fx.Node)]
    if not wanted:
        return None
    first = _first_part(nodes, wanted, parameters)
    later = [number for number, one in enumerate(gradients) if _is_made(one) and one not in first]
    if not later:
        return None
    second, needed = _second_part([gradients[number] for number in later], first, parameters)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    arguments = [node for node in placeholders if node in needed]
    of_first = [node for node in nodes if node in needed and node.op != "placeholder"]
    made = [None if number in later else one for number, one in enumerate(gradients)]
    return Cut(
        _part(graph, placeholders, [node for node in nodes if node in first], [*made, *of_first]),
        _part(graph, arguments + of_first, [n for n in nodes if n in second], [gradients[n] for n in later]),
        len(gradients),
        tuple(placeholders.index(node) for node in arguments),
        tuple(later),
        tuple(node.meta["val"] for node in arguments + of_first),
        tuple(gradients[number].meta["val"] for number in later),
    )


def _note_forms(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Set `meta["val"]` of every node to its result without values, as it follows from these inputs."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(graph, mode=detect_fake_mode(inputs)).propagate_dont_convert_inputs(*inputs)


def _outputs(graph: fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _is_made(value: Any) -> bool:
    """True for a node that computes something. False for an argument, a constant, and None."""
    return isinstance(value, fx.Node) and value.op == "call_function"


def _storages(node: fx.Node) -> set[int]:
    """The storage of a node's result, if it is one tensor."""
    value = node.meta.get("val")
    return {value.untyped_storage()._cdata} if isinstance(value, Tensor) else set()


def _first_part(nodes: Sequence[fx.Node], of_input: Sequence[fx.Node], parameters: set[fx.Node]) -> set[fx.Node]:
    """The nodes of B: those that the gradient of the input needs, that have effects, or that read a parameter.

    Args:
        nodes: all nodes of the graph, in order.
        of_input: the nodes of the input's gradients.
        parameters: the nodes that are parameters, or views of them.
    """
    ends = [node for node in nodes if _is_made(node) and (node.is_impure() or node in parameters)]
    ends += [node for node in nodes if _is_made(node) and parameters & set(node.all_input_nodes)]
    found, left = set(), [*of_input, *ends]
    while left:
        node = left.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            left += node.all_input_nodes
    # If an operator has several results, B takes all of them apart, since only single tensors can be given to W.
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in found:
            found.add(node)
    return found


def _second_part(
    ends: Iterable[fx.Node], first: set[fx.Node], parameters: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes of W, and the arguments and nodes of B that it needs.

    Args:
        ends: the gradients that W makes.
        first: the nodes of B.
        parameters: as for `_first_part`.
    """
    found: set[fx.Node] = set()
    needed: set[fx.Node] = set()
    left = list(ends)
    while left:
        node = left.pop()
        if node.op == "placeholder" or (node in first and not _is_had_for_nothing(node, parameters)):
            needed.add(node)
        elif node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found, needed


def _is_had_for_nothing(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """True if W computes a node of B again, at no cost: a constant, or a view or wider dtype of another node."""
    inputs = node.all_input_nodes
    if node.target is operator.getitem or node.is_impure() or parameters & {node, *inputs}:
        return False
    if not inputs:
        tags = getattr(node.target, "tags", ())
        return node.op == "get_attr" or torch.Tag.nondeterministic_seeded not in tags
    if len(inputs) > 1 or not isinstance(inputs[0].meta.get("val"), Tensor):
        return False
    before, after = inputs[0].meta["val"], node.meta["val"]
    if _storages(node) & _storages(inputs[0]) or torch.Tag.view_copy in getattr(node.target, "tags", ()):
        return True
    casts = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
    return node.target in casts and before.dtype.itemsize < after.dtype.itemsize


def _part(
    whole: fx.GraphModule, arguments: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Sequence[Any]
) -> fx.GraphModule:
    """A part of a graph, as a graph of its own.

    Args:
        arguments: the nodes of the whole that the part gets as arguments.
        nodes: the nodes that it computes, in order.
        results: its results: nodes, and None.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[one] if isinstance(one, fx.Node) else one for one in results))
    # Tells inductor to return the results with the strides of the graph, which W and autograd expect.
    output.meta["user_visible_output_idxs"] = [n for n, one in enumerate(results) if isinstance(one, fx.Node)]
    return fx.GraphModule(whole, graph)
