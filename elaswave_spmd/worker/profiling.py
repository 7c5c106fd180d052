"""How long layers take on this worker, measured while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Row = tuple[int, float, float, int, int]
"""(layer, seconds of all forwards, seconds of all backwards, number of forwards, number of backwards)."""


@dataclass
class LayerTimes:
    """Wall time of layer programs since the last `take`. Two clock reads a program: about 0.1 microseconds."""

    _seconds: dict[tuple[int, bool], float] = field(default_factory=dict)
    _counts: dict[tuple[int, bool], int] = field(default_factory=dict)

    def add(self, layer: int, seconds: float, *, backward: bool) -> None:
        """A program of this layer has run for so long, on one micro-batch."""
        key = layer, backward
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._counts[key] = self._counts.get(key, 0) + 1

    def take(self) -> tuple[Row, ...]:
        """What was measured since the last call, by layer."""
        seconds, counts = self._seconds, self._counts
        self._seconds, self._counts = {}, {}
        return tuple(
            (
                layer,
                seconds.get((layer, False), 0.0),
                seconds.get((layer, True), 0.0),
                counts.get((layer, False), 0),
                counts.get((layer, True), 0),
            )
            for layer in sorted({layer for layer, _ in counts})
        )


# What layers keep between forward and backward, weighed once on this worker while it trains.
MemoryRow = tuple[int, int, int]
"""(layer, bytes that one micro-batch keeps until its backward, bytes of its output)."""


class LayerMemory:
    """Bytes by layer. A later micro-batch keeps as much as the first: micro-batches have one shape."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._new: list[MemoryRow] = []

    def __contains__(self, layer: int) -> bool:
        return layer in self._known

    def note(self, layer: int, kept: int, output: int) -> None:
        """A layer keeps so many bytes for one micro-batch, and its output has so many."""
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
