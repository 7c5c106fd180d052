"""An island of PyTorch/XLA: its local devices, tensors that go there and come back, programs that run by their hash.

The only file that calls torch_xla. A program is explicit: outputs as a function of inputs, found once by tracing, and
run from then on by the hash of its graph. Two layers with equal graphs have equal hashes, so one compilation serves
both; and since nothing is traced at a run, nothing can be compiled at one.

What is built on (torch_xla 2.9, `torch_xla._dynamo.dynamo_bridge` does the same for torch.compile): `_get_graph_hash`,
`_xla_warm_up_cache`, `_run_cached_graph`, and `_get_tensors_xla_device_data_node` for the order of a graph's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.mesh import ISLAND_AXES
from elaswave_spmd.sharding import P

WHOLE = P()


class FrozenTensorError(Exception):
    """A program would have a tensor inside that is none of its inputs, at the value that it had while it was traced.

    Args:
        operators: that XLA lacks and that were run on the CPU while tracing: the likely reason.
    """

    def __init__(self, operators: tuple[str, ...]) -> None:
        super().__init__(f"a tensor of the graph is no input; run on the CPU: {operators}")
        self.operators = operators


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Args:
        graph: hash of its graph.
        order: for each input of the graph, the number of the caller's input; None: a constant.
        constants: of the inputs that are numbers in the code, by their place in `order`.
        specs: how each output lies on the island.
    """

    graph: Any
    order: tuple[int | None, ...]
    constants: Mapping[int, Tensor]
    specs: tuple[P, ...]


class XlaIsland:
    """This process's client, over the axes inside a worker. One in a process; torch_xla is imported by it.

    Args:
        axes: size of each axis inside a worker, such as {"tp": 2}; sizes of 1 say nothing. Their product is the number
            of local devices (CPU_NUM_DEVICES).
    """

    def __init__(self, axes: Mapping[str, int]) -> None:
        import torch_xla  # pyright: ignore[reportMissingImports]
        import torch_xla.debug.metrics  # pyright: ignore[reportMissingImports]
        import torch_xla.distributed.spmd as spmd  # pyright: ignore[reportMissingImports]
        import torch_xla.runtime as runtime  # pyright: ignore[reportMissingImports]

        self._c: Any = torch_xla._XLAC
        self._metrics, self._spmd = torch_xla.debug.metrics, spmd
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
        """Programs compiled in this process so far, by torch_xla's own count."""
        found = self._metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def lower(self, spec: P, num_dims: int) -> tuple[Any, ...]:
        """A spec as `xs.mark_sharding` takes it: axes that the island lacks, or of size 1, mean whole.

        So does one of two axes on a tensor of one dim: torch_xla 2.9 cannot place it ("too many indices").
        """
        found: list[Any] = []
        for dim in range(num_dims):
            axes = tuple(axis for axis in spec.axes_of(dim) if axis in self.axes)
            found.append(axes[0] if len(axes) == 1 else axes or None)
        partly = num_dims == 1 and 0 < len(spec.axes) < len(self.axes)
        return (None,) if partly else tuple(found)

    # ---- tensors

    def put(self, values: Sequence[Tensor], specs: Sequence[P]) -> list[Tensor]:
        """Host tensors to the island, each as its spec says. They may change once this returns: it copies."""
        values = [value.detach() for value in values]
        shardings = None
        if self._mesh is not None:  # marking afterwards would fetch the tensor and send it a second time
            pairs = zip(values, specs, strict=True)
            shardings = [self._spmd.ShardingSpec(self._mesh, self.lower(s, v.ndim)).xla_spec(v) for v, s in pairs]
        return self._c._xla_tensors_from_aten(values, [str(self.place)] * len(values), shardings)

    def mark(self, value: Tensor, spec: P) -> Tensor:
        """Says, while tracing, how a tensor lies on the island; whole ones are marked as well."""
        if self._mesh is not None and value.ndim:
            self._spmd.mark_sharding(value, self._mesh, self.lower(spec, value.ndim))
        return value

    def fetch(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the island in host memory, put together from the local shards where they are split.

        `.cpu()` of a split tensor would compile a program that gathers it, every time anew.
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
        """Until everything that was started is done."""
        self._c._xla_wait_device_ops([])

    def shard_bytes(self, value: Tensor) -> list[int]:
        """Bytes of a tensor on each local device."""
        if self._mesh is None:
            return [value.numel() * value.element_size()]
        return [shard.numel() * shard.element_size() for shard, _ in self._c._get_local_shards([value])[0]]

    def identity(self, value: Tensor) -> int:
        """What two Python objects have in common that are one tensor of the island."""
        return self._c._xla_get_tensor_id(value)

    def is_traced(self, value: Tensor) -> bool:
        """Whether it is still to be computed."""
        return self._c._check_tensor_need_materialization([value])[0]

    # ---- programs

    def capture(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], specs: Sequence[P]) -> Program:
        """The program that makes traced outputs of inputs; compiles it unless an equal one was.

        Args:
            outputs: traced from `inputs`, not yet run; each computed, none of them an input.
            inputs: from `put` or of an earlier program; not used in another trace. None is a scalar: a number that is
                part of the code and one that is given could not be told apart.
            specs: of the outputs.

        Raises:
            FrozenTensorError: the outputs depend on a tensor that is no input.
        """
        outputs, c = list(outputs), self._c
        self.wait()  # tensors of a program that still runs have no data to look at: it crashes, now and then
        assert all(value.ndim for value in inputs), "inputs have dims"
        assert all(map(self.is_traced, outputs)), "every output is computed"
        numbers = {self.identity(value): number for number, value in enumerate(inputs)}
        ids, values = c._get_tensors_xla_device_data_node(outputs)
        order = tuple(numbers.get(i) for i in ids)
        constants = {place: values[place] for place, number in enumerate(order) if number is None}
        if any(value.ndim for value in constants.values()):
            raise FrozenTensorError(tuple(self._metrics.executed_fallback_ops()))
        graph = c._get_graph_hash(outputs)
        c._xla_warm_up_cache(outputs, [])
        return Program(graph, order, constants, tuple(specs))

    def run(self, program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs a program; nothing is traced. Returns its outputs, on the island."""
        given = [program.constants[i] if n is None else inputs[n] for i, n in enumerate(program.order)]
        return self._c._run_cached_graph(program.graph, given)

    def forget_traces(self) -> None:
        """Drops what was traced and not run, so that no later program computes it."""
        self._c._clear_pending_irs(str(self.place))
