"""Measurements of layers while they train: the time that their programs take, and the memory that they keep.

A worker reports both to the controller (`Measured`), which makes a `CostModel` of them: what `schedule.layers` and the
rescheduling of a run are computed from. Neither changes a bit of what is trained. Used by the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass, field

import torch
from torch import Tensor

from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS
from elaswave_spmd.worker.activations import Activation, num_bytes, tensors_of

Row = tuple[int, float, float, int, int]
"""(layer, seconds of all forwards, seconds of all backwards, number of forwards, number of backwards)."""

WeightsRow = tuple[int, float, int]
"""(layer, seconds of all weight gradients that were put off, which are part of its backwards' seconds; number of
these)."""

MemoryRow = tuple[int, int, int]
"""(layer, bytes that one micro-batch keeps until its backward, bytes of its output)."""


@dataclass
class LayerTimes:
    """Wall time of layer programs since the last `pop_rows`. Costs two clock reads per program, about 0.1 us."""

    _seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    _counts: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, layer: int, seconds: float, kind: str) -> None:
        """Records that a program of this layer ran for this long, on one micro-batch.

        Args:
            kind: of `scheduling.pipeline`; a backward in two parts is one backward, and its weight gradients beside.
        """
        key = layer, kind
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds
        self._counts[key] = self._counts.get(key, 0) + 1

    def pop_rows(self) -> tuple[tuple[Row, ...], tuple[WeightsRow, ...]]:
        """Returns the measurements since the last call, sorted by layer, and begins anew."""
        seconds = self._seconds
        counts = self._counts
        self._seconds = {}
        self._counts = {}
        rows = tuple(
            (
                layer,
                seconds.get((layer, FORWARD), 0.0),
                seconds.get((layer, BACKWARD), 0.0) + seconds.get((layer, WEIGHTS), 0.0),
                counts.get((layer, FORWARD), 0),
                counts.get((layer, BACKWARD), 0),
            )
            for layer in sorted({layer for layer, _ in counts})
        )
        put_off = sorted(layer for layer, kind in counts if kind == WEIGHTS)
        return rows, tuple((layer, seconds[layer, WEIGHTS], counts[layer, WEIGHTS]) for layer in put_off)


class LayerMemory:
    """Bytes that each layer keeps between forward and backward.

    Each layer is measured once: all micro-batches of a run have the same shape, so all keep the same number of bytes.
    """

    def __init__(self) -> None:
        self._rows: dict[int, MemoryRow] = {}  # by layer
        self.known: KeysView[int] = self._rows.keys()
        """The layers that have been measured."""
        self._new: list[MemoryRow] = []

    def note(self, layer: int, kept: int, output: int) -> None:
        """Records the bytes that a layer keeps for one micro-batch, and the bytes of its output, unless it is known."""
        if layer not in self._rows:
            self._rows[layer] = (layer, kept, output)
            self._new.append(self._rows[layer])

    def measure(self, layer: int, x: Activation, values: Tensor, run: Callable[[], Activation]) -> Activation:
        """Runs a layer forward and records what autograd saves for its backward, its input `x` included.

        Two storages are left out: the parameters, since they are there anyway, and the output, since it is counted as
        the next layer's input. No bit depends on the measurement: saved tensors are returned as they were.

        Args:
            x: the layer's input.
            values: the flat tensor that the layer's parameters are views of.
            run: runs the layer.

        Returns:
            The output of `run`.
        """
        kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_of(x)}

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            # The tensor itself may be the output of the node that saves it: returned as is, it would be a reference
            # cycle, and the micro-batch's memory would be freed by the garbage collector only.
            return saved.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            y = run()
        for other in (values, *tensors_of(y)):
            kept.pop(other.untyped_storage().data_ptr(), None)
        self.note(layer, sum(kept.values()), num_bytes(y))
        return y

    def pop_rows(self) -> tuple[MemoryRow, ...]:
        """Returns the layers measured since the last call."""
        new = self._new
        self._new = []
        return tuple(new)

    def report_again(self) -> None:
        """Make the next `pop_rows` return all layers measured so far: another controller knows none of them."""
        self._new = list(self._rows.values())
