"""The state pages that a worker holds: fp32 master and optimizer state, and their update.

A held run is one contiguous slice of its layer, so that an update is a few kernel calls on whole runs. In fp32 with
replicated parameters the master *is* the slice of the compute buffer; otherwise it lies in a buffer of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elaswave_spmd.runtime.buffers import ValueBuffer
from elaswave_spmd.runtime.optimizers import PageOptimizer, Update
from elaswave_spmd.scheduling.placement import HolderRun, RunKey
from elaswave_spmd.sharding.pages import LayerLayout


@dataclass(frozen=True)
class HeldRun:
    """One run of state pages: elements [start, stop) of its layer."""

    run: HolderRun
    start: int
    stop: int
    master: Tensor
    optimizer_state: dict[str, Tensor]


@dataclass(frozen=True)
class _Cut:
    """What one call of the optimizer updates: pieces [first, stop) of held runs that share a rule, and their slices."""

    decay: bool
    lr_scale: float
    pieces: list[tuple[RunKey, int, int]]
    masters: list[Tensor]
    optimizer_states: dict[str, list[Tensor]]


class HeldState:
    """All held runs of one worker, by layer.

    Args:
        runs: the held runs without the loss page.
        values: the compute buffers of this worker's layers, by layer.
        separate_master: keep masters apart from the compute buffers (bf16, or sharded parameters).
    """

    def __init__(
        self,
        runs: Iterable[HolderRun],
        values: dict[int, ValueBuffer],
        optimizer: PageOptimizer,
        *,
        separate_master: bool,
    ) -> None:
        self.optimizer = optimizer
        self.separate_master = separate_master
        self._values = values
        self.layers: dict[int, list[HeldRun]] = {}
        for run in runs:
            layout = values[run.layer].layout
            start, stop = layout.span(run.first, run.stop)
            shape = (stop - start,)
            master = torch.zeros(shape) if separate_master else values[run.layer].pages(run.first, run.stop)
            state = {name: torch.zeros(shape) for name in optimizer.state_names}
            self.layers.setdefault(run.layer, []).append(HeldRun(run, start, stop, master, state))
        self._cuts = {layer: _cut_by_rule(values[layer].layout, held) for layer, held in self.layers.items()}

    def initialise(self, draw: Callable[[str, int, int], Tensor]) -> None:
        """Fills the masters with initial values.

        Args:
            draw: (parameter name, first, stop) -> fp32 elements [first, stop) of the flattened parameter.
        """
        for layer, held in self.layers.items():
            for part in held:
                for slot in self._values[layer].layout.slots:
                    first, stop = max(slot.start, part.start), min(slot.stop, part.stop)
                    if first < stop:
                        values = draw(slot.parameter.name, first - slot.start, stop - slot.start)
                        part.master[first - part.start : stop - part.start].copy_(values)
            self._to_compute(layer, 0)

    def apply(
        self,
        layer: int,
        entries: Mapping[RunKey, Tensor],
        *,
        step: int,
        lr: float,
        divisor: float,
    ) -> None:
        """Updates all held pages of a layer from its entries and moves their values into the compute buffer.

        Args:
            entries: (layer, first, stop) -> fp32 reduced gradient of that run; may be overwritten.
        """
        for cut in self._cuts.get(layer, ()):
            self.optimizer.update(
                cut.masters,
                [entries[key][first:stop] for key, first, stop in cut.pieces],
                cut.optimizer_states,
                Update(step, lr * cut.lr_scale, cut.decay, divisor),
            )
        self._to_compute(layer, step)

    def keep(self, layer: int, step: int) -> None:
        """The version advances without an update (the step's gradient was not finite)."""
        self._to_compute(layer, step)

    def compute_values(self, part: HeldRun) -> Tensor:
        """The run's values as this worker computes with them, a view."""
        return self._values[part.run.layer].pages(part.run.first, part.run.stop)

    def _to_compute(self, layer: int, version: int) -> None:
        values = self._values[layer]
        for part in self.layers.get(layer, ()):
            if self.separate_master:
                values.install(part.run.first, part.run.stop, part.master, version)
            else:
                values.mark(part.run.first, part.run.stop, version)

    def num_bytes(self) -> dict[str, int]:
        """Bytes of masters (whether or not they are part of a compute buffer) and of optimizer state."""
        found = {"master": 0, "optimizer": 0}
        for held in self.layers.values():
            for part in held:
                found["master"] += part.master.numel() * 4
                found["optimizer"] += sum(t.numel() * 4 for t in part.optimizer_state.values())
        return found


def _cut_by_rule(layout: LayerLayout, held: list[HeldRun]) -> list[_Cut]:
    """The held elements of a layer, by update rule."""
    cuts: dict[tuple[bool, float], _Cut] = {}
    for part in held:
        for segment in layout.segments:
            first, stop = max(segment.start, part.start) - part.start, min(segment.stop, part.stop) - part.start
            if first >= stop:
                continue
            states = {name: [] for name in part.optimizer_state}
            cut = cuts.setdefault(
                (segment.decay, segment.lr_scale), _Cut(segment.decay, segment.lr_scale, [], [], states)
            )
            cut.pieces.append((part.run.key, first, stop))
            cut.masters.append(part.master[first:stop])
            for name, values in part.optimizer_state.items():
                cut.optimizer_states[name].append(values[first:stop])
    return list(cuts.values())
