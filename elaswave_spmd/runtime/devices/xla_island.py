"""An island of PyTorch/XLA: its local devices, transfers of tensors, and compiled programs that are run by their hash.

The only file that calls torch_xla. A program is explicit: a function from inputs to outputs that is traced once and run
from then on by the hash of its graph. Two layers with equal graphs have equal hashes and share one compilation. Nothing
is traced when a program runs, so nothing can be compiled then.

Built on functions of torch_xla 2.9 that `torch_xla._dynamo.dynamo_bridge` uses for torch.compile: `_get_graph_hash`,
`_xla_warm_up_cache`, `_run_cached_graph`, and `_get_tensors_xla_device_data_node` for the order of a graph's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave_spmd.mesh import ISLAND_AXES
from elaswave_spmd.sharding import P

WHOLE = P()


class FrozenTensorError(Exception):
    """A program depends on a tensor that is not an input: the value it had while tracing would be used in every run.

    Args:
        operators: the operators that XLA lacks and that ran on the CPU while tracing; the likely reason.
    """

    def __init__(self, operators: tuple[str, ...]) -> None:
        super().__init__(f"a tensor of the graph is no input; run on the CPU: {operators}")
        self.operators = operators


class FrozenNumberError(Exception):
    """The code of a program has read a number out of a traced tensor, which has the values of the tracing: zeros."""


class TracedNumbersRefused(TorchDispatchMode):
    """A context in which code that reads the values of traced tensors is refused: `.item()`, `float()`, `if`, `.cpu()`.

    What is read while a program is traced would stay in the program, whatever the tensor is when the program runs.
    Only the model's own code runs in it: what `put` copies in it would be given up under the interpreter's lock.

    Raises:
        FrozenNumberError: at the operator that reads.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator unless it reads a tensor of the island."""
        aten, kwargs = torch.ops.aten, kwargs or {}
        reads = func in (aten._local_scalar_dense.default, aten.equal.default)
        reads = reads or (func is aten._to_copy.default and torch.device(kwargs.get("device") or "xla").type != "xla")
        if reads and args[0].device.type == "xla":
            raise FrozenNumberError(str(func))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
        graph: hash of its graph.
        order: for each input of the graph the index of the caller's input, or None for a constant.
        constants: index in `order` -> value, for inputs that are numbers in the code.
        specs: placement of each output on the island.
        outputs: for each output the number of the graph's result that it is: torch_xla returns each tensor once.
    """

    graph: Any
    order: tuple[int | None, ...]
    constants: Mapping[int, Tensor]
    specs: tuple[P, ...]
    outputs: tuple[int, ...]


class XlaIsland:
    """This process's XLA client, over the mesh axes inside a worker. At most one per process; it imports torch_xla.

    Args:
        axes: size of each axis inside a worker, such as {"tp": 2}; axes of size 1 are ignored. The product of the sizes
            is the number of local devices (CPU_NUM_DEVICES).
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.debug.metrics  # pyright: ignore[reportMissingImports]
        import torch_xla.distributed.spmd as spmd  # pyright: ignore[reportMissingImports]
        import torch_xla.runtime as runtime  # pyright: ignore[reportMissingImports]

        self._c: Any = torch_xla._XLAC
        self._metrics = torch_xla.debug.metrics
        self._spmd = spmd
        self.axes = {axis: axes[axis] for axis in ISLAND_AXES if axes.get(axis, 1) > 1}
        self.num_devices = int(np.prod([1, *self.axes.values()]))
        if self.axes:
            runtime.use_spmd()
        assert runtime.global_runtime_device_count() == self.num_devices, (self.axes, "the client was made before")
        self.place: torch.device = torch_xla.device()
        self._mesh: Any = None
        if self.axes:
            self._mesh = spmd.Mesh(np.arange(self.num_devices), tuple(self.axes.values()), tuple(self.axes))

    @property
    def num_compiled(self) -> int:
        """The number of programs compiled in this process so far, as torch_xla counts them."""
        found = self._metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def lower(self, spec: P, num_dims: int) -> tuple[Any, ...]:
        """A spec in the form that `xs.mark_sharding` takes. Axes that the island does not have are left out.

        A tensor of one dim that is split over one of two axes is kept whole, since torch_xla 2.9 cannot place it ("too
        many indices").
        """
        found: list[Any] = []
        for dim in range(num_dims):
            axes = tuple(axis for axis in spec.axes_of(dim) if axis in self.axes)
            found.append(axes[0] if len(axes) == 1 else axes or None)
        partly = num_dims == 1 and 0 < len(spec.axes) < len(self.axes)
        return (None,) if partly else tuple(found)

    # ---- tensors

    def put(self, values: Sequence[Tensor], specs: Sequence[P]) -> list[Tensor]:
        """Copy host tensors to the island, each placed by its spec. They may change once this returns."""
        values = [value.detach() for value in values]
        shardings = None
        if self._mesh is not None:  # marking a tensor after its transfer would fetch it and send it a second time
            pairs = zip(values, specs, strict=True)
            shardings = [self._spmd.ShardingSpec(self._mesh, self.lower(s, v.ndim)).xla_spec(v) for v, s in pairs]
        return self._c._xla_tensors_from_aten(values, [str(self.place)] * len(values), shardings)

    def mark(self, value: Tensor, spec: P) -> Tensor:
        """Fix the placement of a tensor while tracing. Tensors that are whole on all devices are marked as well."""
        if self._mesh is not None and value.ndim:
            self._spmd.mark_sharding(value, self._mesh, self.lower(spec, value.ndim))
        return value

    def fetch(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors of the island to host memory; split ones are assembled from their local shards.

        Not by `.cpu()`: for a split tensor it compiles a program that gathers it, anew at every call.
        """
        values = list(values)
        if self._mesh is None:
            return self._c._xla_get_cpu_tensors(values)
        self.wait()
        found = []
        where = self._c._get_local_shard_replica_and_indices(values)
        for value, shards, places in zip(values, self._c._get_local_shards(values), where, strict=True):
            if not value.ndim:
                found.append(shards[0][0])
                continue
            whole = torch.empty(value.shape, dtype=value.dtype)
            for (shard, _), (replica, index) in zip(shards, places, strict=True):
                if replica == 0:
                    whole[tuple(index) if isinstance(index, list) else index] = shard
            found.append(whole)
        return found

    def wait(self) -> None:
        """Wait until everything that was started is done."""
        self._c._xla_wait_device_ops([])

    def shard_bytes(self, value: Tensor) -> list[int]:
        """The bytes of a tensor on each local device."""
        if self._mesh is None:
            return [value.numel() * value.element_size()]
        return [shard.numel() * shard.element_size() for shard, _ in self._c._get_local_shards([value])[0]]

    def identity(self, value: Tensor) -> int:
        """The id of a tensor of the island; equal for two Python objects that are the same tensor."""
        return self._c._xla_get_tensor_id(value)

    def is_traced(self, value: Tensor) -> bool:
        """True if the tensor was traced and is not computed yet."""
        return self._c._check_tensor_need_materialization([value])[0]

    # ---- programs

    def capture(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], specs: Sequence[P]) -> Program:
        """Make the program that computes traced outputs from inputs. Compiles it unless an equal one was compiled.

        Args:
            outputs: traced from `inputs`, and not run yet; none of them is an input, but one may be there twice.
            inputs: from `put` or from an earlier program, and not used in another trace. None of them is a scalar,
                since a scalar input could not be told apart from a number in the code.
            specs: placements of the outputs.

        Raises:
            FrozenTensorError: the outputs depend on a tensor that is not an input.
        """
        outputs, c = list(outputs), self._c
        self.wait()  # while a program runs, its tensors have no data yet; torch_xla then crashes now and then
        assert all(value.ndim for value in inputs), "inputs have dims"
        assert all(map(self.is_traced, outputs)), "every output is computed"
        numbers = {self.identity(value): number for number, value in enumerate(inputs)}
        places: dict[int, int] = {}
        found = tuple(places.setdefault(self.identity(value), len(places)) for value in outputs)
        outputs = [outputs[found.index(place)] for place in range(len(places))]
        ids, values = c._get_tensors_xla_device_data_node(outputs)
        order = tuple(numbers.get(i) for i in ids)
        constants = {place: values[place] for place, number in enumerate(order) if number is None}
        if any(value.ndim for value in constants.values()):
            raise FrozenTensorError(tuple(self._metrics.executed_fallback_ops()))
        graph = c._get_graph_hash(outputs)
        c._xla_warm_up_cache(outputs, [])
        return Program(graph, order, constants, tuple(specs), found)

    def run(self, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a program without tracing. Returns its outputs, on the island."""
        given = [program.constants[i] if n is None else inputs[n] for i, n in enumerate(program.order)]
        # torch_xla waits for the program before this one, and keeps the interpreter's lock meanwhile. A thread of XLA
        # that needs the lock, to give up a tensor, would never end that program. `wait` lets go of the lock.
        self.wait()
        results = self._c._run_cached_graph(program.graph, given)
        return [results[place] for place in program.outputs]

    def forget_traces(self) -> None:
        """Discard what was traced and not run; otherwise a later program would compute it, too."""
        self._c._clear_pending_irs(str(self.place))
