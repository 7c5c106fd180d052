"""The backward of a layer of an island as a graph of torch's operators, so that it can be cut (backward_pair.py).

torch_xla traces a backward in its own way, and does not show what it has traced. So the operators are recorded when
they reach it, below the level at which views and changes in place are removed. There every operator makes new tensors,
so a tensor can be recognised by its id. Each part of the graph is then traced again, into a program of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from elaswave_spmd.runtime.devices.xla_island import XlaIsland


class BackwardTrace(TorchDispatchMode):
    """Records the operators that run while this mode is entered. It can be used once.

    Args:
        island: the island that has the tensors.
        arguments: the arguments of the graph. Other tensors that the operators read become constants of the graph.
    """

    def __init__(self, island: XlaIsland, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self._island = island
        self._graph = fx.Graph()
        self._constants = nn.Module()
        self._nodes: dict[int, fx.Node] = {}  # id of a tensor -> its node
        for number, argument in enumerate(arguments):
            self._note(self._graph.placeholder(f"argument_{number}"), argument)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        node = self._graph.call_function(func, *tree_map_only(Tensor, self._node_of, (args, dict(kwargs or {}))))
        if isinstance(results, Tensor):
            self._note(node, results)
        elif isinstance(results, (tuple, list)):
            for number, result in enumerate(results):
                if isinstance(result, Tensor):
                    self._note(self._graph.call_function(operator.getitem, (node, number)), result)
        return results

    def graph(self, results: Sequence[Tensor | None]) -> fx.GraphModule | None:
        """The recorded graph, as a function of the arguments.

        Args:
            results: the tensors that the graph returns; None stays None.

        Returns:
            The graph. None if some result was not made by a recorded operator.
        """
        nodes = [None if one is None else self._nodes.get(self._island.identity(one)) for one in results]
        if any(node is None and one is not None for node, one in zip(nodes, results, strict=True)):
            return None
        self._graph.output(tuple(nodes))
        return fx.GraphModule(self._constants, self._graph)

    def _note(self, node: fx.Node, value: Tensor) -> None:
        node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        if value.device == self._island.place:
            self._nodes[self._island.identity(value)] = node

    def _node_of(self, value: Tensor) -> fx.Node:
        """The node that has made a tensor. A tensor that no node has made becomes a constant."""
        is_there = value.device == self._island.place
        if is_there and (node := self._nodes.get(self._island.identity(value))) is not None:
            return node
        name = f"constant_{len(list(self._constants.buffers()))}"
        self._constants.register_buffer(name, value)
        node = self._graph.get_attr(name)
        self._note(node, value)
        return node
