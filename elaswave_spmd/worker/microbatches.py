"""Micro-batches through the layers of one worker's stage: forward, backward, validation, with their data and their
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys, sample_ids
from elaswave_spmd.determinism.rng import WordSource
from elaswave_spmd.models import Batch
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.worker.buffers import ValueBuffer
from elaswave_spmd.worker.fault_points import FaultPoint, OnFaultPoint
from elaswave_spmd.worker.gradient_reduction import GradientReducer
from elaswave_spmd.worker.profiling import LayerTimes, Row
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.stage_boundary import ACTIVATION, GRADIENT, VALIDATION, Boundaries, BoundaryKey

Waiting = str
"""What a suspended executor waits for, in words."""

Waits = Generator[Waiting, None, None]

Until = Callable[[Callable[[], bool], str, int], Waits]
"""(condition, what is waited for, its number); raises EpochChangedError when a PLACE comes instead."""

Modules = Callable[[Iterable[int]], Mapping[int, nn.Module]]
"""Layer numbers -> new modules of these layers."""

Traced = Callable[[int, int, int, bool, float, float], None]
"""(step, micro-batch, layer, backward, began, ended): told of a layer program that has run; by time.perf_counter()."""

Peer = Callable[[], int | None]
"""Who takes what an action makes; None: nobody has to, any more."""


class EpochChangedError(Exception):
    """A PLACE has come: what is under way is looked at anew. A turn of events inside an executor, no failure."""


class MicrobatchRunner:
    """Runs micro-batches through whatever layers this worker has at the time.

    Args:
        programs: runs the layers.
        device: where their parameters, inputs and outputs lie.
        until, take: the executor's ways to wait for a condition, and to take messages in between.
    """

    reducer: GradientReducer

    def __init__(
        self,
        job: Job,
        layout: ModelLayout,
        modules: Modules,
        programs: StagePrograms,
        device: Device,
        train: Batches,
        boundaries: Boundaries,
        until: Until,
        take: Callable[[], None],
        visit: OnFaultPoint,
    ) -> None:
        self._job, self._layout, self._modules, self._train = job, layout, modules, train
        self._boundaries, self._until, self._take, self._visit = boundaries, until, take, visit
        self.values: dict[int, ValueBuffer] = {}
        self.programs, self._device, self._place = programs, device, device.place
        self._times = LayerTimes()
        # Programs whose time the device has to be asked for later; None: they are done when they return.
        self._unasked: list[tuple[tuple[int, int, int, bool], Any, Any]] | None = None
        if device.kind.capabilities.streams:
            self._unasked = []
        self.traced: Traced | None = None
        self.backward_of = -1  # the micro-batch in the middle of its backward
        self._batches: dict[int, Batch] = {}
        self._samples: dict[int, np.ndarray] = {}
        self._seed, self._step_number = self._number(job.seed), self._number(0)
        self._words = WordSource()

    def _number(self, value: int) -> Tensor:
        return torch.tensor(value, device=self._place)

    def take(self, placement: Placement, stage: int) -> bool:
        """Makes buffers and programs of exactly the stage's layers. Returns whether they are others than before."""
        layers = placement.layers_of_stage(stage)
        self._placement, self._stage = placement, stage
        self._is_first, self._is_last = stage == 0, stage == placement.num_stages - 1
        if tuple(self.values) == tuple(layers):
            return False
        wanted = [layer for layer in layers if layer not in self.values]
        new = self._modules(wanted)
        kept = {layer: v for layer, v in self.values.items() if layer in layers}
        layouts, dtype = self._layout.layers, self._job.torch_dtype
        made = {layer: ValueBuffer(layouts[layer], new[layer], dtype, self._place) for layer in wanted}
        self.values.clear()  # the dict is shared with the replica
        self.values.update((layer, kept[layer] if layer in kept else made[layer]) for layer in layers)
        self._layers = layers
        self.programs.bind({layer: self.values[layer].module for layer in layers}, self.values)
        self._layer_numbers = {layer: self._number(layer) for layer in layers}
        self._batches.clear()
        return True

    def begin_step(self, step: int, microbatches: Sequence[int]) -> None:
        """The micro-batches that are to come in this step, as far as known."""
        self.programs.discard_all()  # forwards of the last step whose backward another worker did
        self._step_number = self._number(step)
        self._samples = {}
        self._batches.clear()
        self._sample(step, microbatches)

    def _sample(self, step: int, microbatches: Sequence[int]) -> None:
        size = self._job.microbatch_size
        slots = (np.array(microbatches, dtype=np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        ids = sample_ids(self._job.seed, step, self._job.global_batch, len(self._train), slots)
        self._samples |= dict(zip(microbatches, ids.reshape(-1, size), strict=True))

    # ---- actions

    def forward(self, step: int, microbatch: int, peer: Peer, *, saves: bool) -> Waits:
        """A micro-batch forward; its output goes to `peer`. `saves`: its backward will be run here too."""
        self._visit(FaultPoint.FORWARD, step)
        batch = self._microbatch_batch(step, microbatch)
        key = BoundaryKey(ACTIVATION, step, microbatch, self._layers.start)
        if self._is_first:
            assert batch is not None
            given = batch.tokens
        else:
            given = yield from self._receive(key)
        samples, x = torch.from_numpy(self._samples[microbatch]).to(self._place), given
        try:
            for layer in self._layers:
                yield from self.until_at(layer, step - 1)
                keys = Keys(self._seed, self._step_number, samples, self._layer_numbers[layer], {}, self._words)
                started = self._device.mark()
                x = self.programs.forward(layer, microbatch, x, keys, batch)
                self._ran(step, microbatch, layer, False, started)
                self._take()
        except EpochChangedError:
            self.programs.discard(microbatch)
            if not self._is_first:
                self._boundaries.put_back(key, given)
            raise
        if not saves:
            self.programs.discard(microbatch)
        if not self._is_last:
            message = m.Activation(step, microbatch, self._layers.stop, tuple(x.shape))
            self._boundaries.send(peer(), message, x)

    def backward(self, step: int, microbatch: int, peer: Peer, *, weights: bool, alone: bool, drop: bool) -> Waits:
        """A micro-batch backward; the gradient of its input goes to `peer`.

        Args:
            weights: its weight gradients are wanted; else only that of its input.
            alone: the weight gradients are sent by themselves, not added to others here.
            drop: the parameters are not needed any more in this step.
        """
        dy: Tensor | None = None
        if not self._is_last:
            dy = yield from self._receive(BoundaryKey(GRADIENT, step, microbatch, self._layers.stop - 1))
        self._visit(FaultPoint.BACKWARD, step)
        alone = alone or not weights
        batch = self._batches.pop(microbatch, None)
        self.backward_of = microbatch
        for layer in reversed(self._layers):
            assert self.values[layer].is_at(step - 1), (layer, step)
            buffer, add = self.reducer.begin_microbatch(layer, microbatch, alone=alone)
            started = self._device.mark()
            dy = self.programs.backward(layer, microbatch, dy, buffer, add=add, batch=batch)
            self._ran(step, microbatch, layer, True, started)
            if drop:
                self.values[layer].drop()
                self.programs.dropped(layer)
            if weights:
                self._visit(FaultPoint.REDUCE, step)
                self.reducer.end_microbatch(step, layer, microbatch, alone=alone)
            else:
                self.reducer.drop_microbatch(layer)
            self._take()
        self.backward_of = -1
        if not self._is_first:
            assert dy is not None
            message = m.ActivationGradient(step, microbatch, self._layers.start - 1, tuple(dy.shape))
            self._boundaries.send(peer(), message, dy.contiguous())

    def validate(self, version: int, microbatch: int, data: Batches) -> Generator[Waiting, None, Tensor]:
        """A validation micro-batch at a version: its token-sum loss in the last stage, its output in others."""
        size = self._job.microbatch_size
        ids = np.arange(microbatch * size, (microbatch + 1) * size)
        batch = to_batch(data, ids, self._place) if self._is_first or self._is_last else None
        if self._is_first:
            assert batch is not None
            x = batch.tokens
        else:
            x = yield from self._receive(BoundaryKey(VALIDATION, version, microbatch, self._layers.start))
        keys = Keys.make(self._job.seed, version, ids, 0, self._place)
        for layer in self._layers:
            yield from self.until_at(layer, version)
            x = self.programs.evaluate(layer, x, keys.at(layer), batch)
        if not self._is_last:
            peers = self._placement.mesh.stages[self._stage + 1]
            message = m.Activation(version, microbatch, self._layers.stop, tuple(x.shape), True)
            self._boundaries.send(peers[microbatch % len(peers)], message, x)
        return x

    def _microbatch_batch(self, step: int, microbatch: int) -> Batch | None:
        """The micro-batch's data, where it is needed: tokens in the first stage, targets in the last."""
        if microbatch not in self._samples:
            self._sample(step, [microbatch])
        if not self._is_first and not self._is_last:
            return None
        batch = self._batches[microbatch] = to_batch(self._train, self._samples[microbatch], self._place)
        return batch

    def _ran(self, step: int, microbatch: int, layer: int, backward: bool, started: Any) -> None:
        ended = self._device.mark()
        if self._unasked is None:
            self._took(step, microbatch, layer, backward, started, ended)
        else:
            self._unasked.append(((step, microbatch, layer, backward), started, ended))

    def _took(self, step: int, microbatch: int, layer: int, backward: bool, began: float, ended: float) -> None:
        self._times.add(layer, ended - began, backward=backward)
        if self.traced is not None:
            self.traced(step, microbatch, layer, backward, began, ended)

    def take_times(self) -> tuple[Row, ...]:
        """What layer programs took since the last call."""
        if self._unasked:
            times = iter(self._device.times([mark for _, *marks in self._unasked for mark in marks]))
            for (program, _, _), began, ended in zip(self._unasked, times, times, strict=True):
                self._took(*program, began, ended)
            self._unasked.clear()
        return self._times.take()

    # ---- waiting

    def until_at(self, layer: int, version: int) -> Waits:
        """Waits until every page of the layer's compute buffer is at this version, exactly."""
        values = self.values[layer]
        if not values.is_at(version):
            yield from self._until(lambda: values.is_at(version), "parameters of layer", layer)

    def _receive(self, key: BoundaryKey) -> Generator[Waiting, None, Tensor]:
        yield from self._until(lambda: key in self._boundaries, f"{key.kind} of micro-batch", key.microbatch)
        return self._boundaries.pop(key)


def to_batch(data: Batches, ids: np.ndarray, place: torch.device) -> Batch:
    tokens, targets = (torch.from_numpy(np.ascontiguousarray(rows)).to(place) for rows in data.batch(ids))
    return Batch(tokens, targets)
