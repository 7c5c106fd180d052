"""What layers keep between forward and backward, weighed once on this worker while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MemoryRow = tuple[int, int, int]
"""(layer, bytes that one unit keeps until its backward, bytes of its output)."""


class LayerMemory:
    """Bytes by layer. A later unit keeps as much as the first: units have one shape."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._new: list[MemoryRow] = []

    def __contains__(self, layer: int) -> bool:
        return layer in self._known

    def note(self, layer: int, kept: int, output: int) -> None:
        """A layer keeps so many bytes for one unit, and its output has so many."""
        if layer not in self._known:
            self._known.add(layer)
            self._new.append((layer, kept, output))

    def weigh(self, layer: int, x: Tensor, values: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Runs a layer forward and notes what autograd saves for its backward, its input `x` included.

        Its parameters, views of `values`, are there anyway, and its output is the next layer's input. No bit depends on
        it: what is saved comes back as it was.
        """
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}

        def pack(saved: Tensor) -> Tensor:
            memory = saved.untyped_storage()
            kept[memory.data_ptr()] = memory.nbytes()
            return saved.detach()  # the tensor itself may be an output of what saves it: a circle

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = run()
        for other in (values, y):
            kept.pop(other.untyped_storage().data_ptr(), None)
        self.note(layer, sum(kept.values()), y.nbytes)
        return y

    def take(self) -> tuple[MemoryRow, ...]:
        """What was weighed since the last call."""
        new, self._new = self._new, []
        return tuple(new)
