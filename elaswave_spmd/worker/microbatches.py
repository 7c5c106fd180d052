"""Runs micro-batches through the layers of one worker's stage: forward, backward and validation, with their inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.determinism import Keys
from elaswave_spmd.determinism.rng import WordSource
from elaswave_spmd.scheduling.pipeline import BACKWARD, FORWARD, WEIGHTS
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.worker.activations import Activation, like, map_tensors, tensors_of
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import WorkerContext
from elaswave_spmd.worker.digests import MicrobatchDigests
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.gradient_reduction import GradientReducer
from elaswave_spmd.worker.inputs import first_input, on_device, read_batch
from elaswave_spmd.worker.pacing import Pacing
from elaswave_spmd.worker.profiling import LayerTimes, Row, WeightsRow
from elaswave_spmd.worker.programs.eager import Batches
from elaswave_spmd.worker.sample_order import SampleOrder
from elaswave_spmd.worker.stage_boundary import ACTIVATION, GRADIENT, VALIDATION, Boundaries, BoundaryKey, message_of
from elaswave_spmd.worker.waiting import ConfigurationChanged, Reason, Waiting, Waits

Receivers = Callable[[], tuple[int | None, ...]]
"""Returns the workers to send an action's output to: the micro-batch's worker on the neighbouring stage (None if that
needs nothing any more) and, if the micro-batch is checked there, its checker. Call it only when the output is there:
messages are handled while an action runs, and may change the answer."""


class MicrobatchRunner:
    """Runs micro-batches through the layers that this worker has in the present configuration.

    Args:
        context: what all parts of the worker share.
        values: layer -> compute buffer. Filled here, by `enter_epoch`; the worker's state publishes into the same dict.
        reducer: gets the weight gradients.
        boundaries: the tensors that come from, and go to, the stages before and after.
        waiting: the worker's loop. Messages are handled between two layers, so that a Prepare is answered within the
            time of one layer.
    """

    def __init__(
        self,
        context: WorkerContext,
        values: dict[int, ValueBuffer],
        reducer: GradientReducer,
        boundaries: Boundaries,
        waiting: Waiting,
    ) -> None:
        self._job = context.job
        self._model = context.model
        self._data = context.data
        self._hooks = context.hooks
        self._injects = context.hooks.wrong_result is not None
        self._device = context.device
        self._place = context.device.place
        self._reducer = reducer
        self._boundaries = boundaries
        self._waiting = waiting
        # The stage that this worker is on. `enter_epoch` sets these, and is called before anything else.
        self._placement: Placement
        self._stage: int
        self._is_first: bool
        self._is_last: bool
        self._layers: range
        self._seed: Tensor
        self._layer_numbers: dict[int, Tensor]
        self.values = values
        self.programs = context.model.programs
        self.pacing = Pacing(context.hooks.clock)
        self._times = LayerTimes()
        # Layer programs that were queued on the device, and whose times are read from it later. None: on this device a
        # program is done when its call returns.
        self._unasked: list[tuple[tuple[int, int, int, str, float], Any, Any]] | None = None
        if context.device.kind.capabilities.streams:
            self._unasked = []
        self.backward_of = -1
        """The micro-batch whose backward is under way; -1 if there is none."""
        self._batches: dict[int, Any] = {}  # micro-batch -> its data, from forward to backward
        self._order = SampleOrder(context.job, len(context.data.train))
        self._samples: dict[int, np.ndarray] = {}  # micro-batch -> sample ids, of the step under way
        self._step_number = self._number(0)
        self._words = WordSource()

    def _number(self, value: int) -> Tensor:
        return torch.tensor(value, device=self._place)

    def _make_numbers(self, layers: Iterable[int]) -> None:
        """Make the seed and the layer numbers, of which random keys consist, on the device.

        The third part of a key, the step number, is made by `begin_step`.
        """
        self._seed = self._number(self._job.seed)
        self._layer_numbers = {layer: self._number(layer) for layer in layers}

    def enter_epoch(self, placement: Placement, stage: int, split_layers: Collection[int]) -> bool:
        """Make buffers and programs for exactly the stage's layers. Returns True if these are others than before.

        Args:
            split_layers: the layers whose backward may run in two parts.
        """
        moved = self._take_layers(placement, stage)
        self.split(split_layers)
        return moved

    def split(self, layers: Collection[int]) -> None:
        """Let the backward of exactly these layers run in two parts, for micro-batches that run forward from now on."""
        self.programs.set_split_layers([layer for layer in self._layers if layer in layers])

    def _take_layers(self, placement: Placement, stage: int) -> bool:
        layers = placement.layers_of_stage(stage)
        self._placement = placement
        self._stage = stage
        self._is_first = stage == 0
        self._is_last = stage == placement.num_stages - 1
        if tuple(self.values) == tuple(layers):
            return False
        wanted = [layer for layer in layers if layer not in self.values]
        new = self._model.make_modules(wanted)
        kept = {layer: v for layer, v in self.values.items() if layer in layers}
        layouts, dtype = self._model.layout.layers, self._job.torch_dtype
        made = {layer: ValueBuffer(layouts[layer], new[layer], dtype, self._place) for layer in wanted}
        self.values.clear()  # the dict is changed in place, since the worker's state refers to it as well
        self.values.update((layer, kept[layer] if layer in kept else made[layer]) for layer in layers)
        self._layers = layers
        self.programs.bind({layer: self.values[layer].module for layer in layers}, self.values)
        self._make_numbers(layers)
        self._batches.clear()
        return True

    def begin_step(self, step: int, microbatches: Sequence[int]) -> None:
        """Prepare the samples of a step.

        Args:
            microbatches: the micro-batches that this worker is to run. More may follow, if another worker is lost.
        """
        self.programs.discard_all()  # forwards of the last step whose backward another worker has run
        self._step_number = self._number(step)
        self._samples = {}
        self._batches.clear()
        self._sample(step, microbatches)
        if self._data.loader is not None and (self._is_first or self._is_last):
            self._data.loader.expect(self._job.seed, self._next_samples(step, microbatches))

    def _next_samples(self, step: int, microbatches: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """(step, sample ids) of the micro-batches to read ahead: those of this step, then those of the next one.

        Those of the next step are a forecast, by the placement of this one.
        """
        found = [(step, self._samples[microbatch]) for microbatch in microbatches]
        if step < self._job.steps:
            found += [(step + 1, ids) for ids in self._order.ids_of(step + 1, microbatches)]
        return found

    def report_data_wait(self, step: int) -> None:
        """Report how long this worker has waited for samples, if it reads them from a dataset with a loader."""
        if self._data.loader is not None and (self._is_first or self._is_last):
            self._hooks.data_waited(step, self._data.loader.pop_waited())

    def _sample(self, step: int, microbatches: Sequence[int]) -> None:
        self._samples |= dict(zip(microbatches, self._order.ids_of(step, microbatches), strict=True))

    # ---- actions

    def forward(
        self, step: int, microbatch: int, receivers: Receivers, *, saves: bool, digests: MicrobatchDigests | None = None
    ) -> Waits:
        """Run a micro-batch forward, and send its output to the `receivers`.

        Args:
            saves: keep what the backward needs, since this worker runs the backward too.
            digests: the object to note digests of the results in, if the micro-batch is checked.

        Raises:
            ConfigurationChanged: a new configuration has arrived. The input is put back, so that the forward can run
                again.
        """
        self._hooks.on_point(FaultPoint.FORWARD, step)
        batch = self._microbatch_batch(step, microbatch)
        key = BoundaryKey(ACTIVATION, step, microbatch, self._layers.start)
        if self._is_first:
            given = self._first_input(batch)
        else:
            given = yield from self._receive(key)
            if digests is not None and digests.computed_twice:
                self._boundaries.put_back(key, given)
        samples, x = self._device.to_place(torch.from_numpy(self._samples[microbatch])), given
        try:
            for layer in self._layers:
                if not self.values[layer].is_at(step - 1):
                    yield from self.until_at(layer, step - 1)
                keys = Keys(self._seed, self._step_number, samples, self._layer_numbers[layer], {}, self._words)
                started = self._device.mark()
                x = self.programs.forward(layer, microbatch, x, keys, batch)
                if self._injects:
                    x = self._computed_output(step, x)
                if digests is not None:
                    digests.forward(layer, x)
                self._ran(step, microbatch, layer, FORWARD, started)
                self._waiting.handle_messages()  # a Prepare is answered, and votes are counted, between two layers
        except ConfigurationChanged:
            # Only complete forwards are reported. If the new plan wants this one, it runs again from the stage's input.
            self.programs.discard(microbatch)
            if not self._is_first:
                self._boundaries.put_back(key, given)
            raise
        if not saves:
            self.programs.discard(microbatch)
        if not self._is_last:
            message = message_of(BoundaryKey(ACTIVATION, step, microbatch, self._layers.stop), x)
            for receiver in receivers():
                self._boundaries.send(receiver, message, x)

    def backward(
        self,
        step: int,
        microbatch: int,
        receivers: Receivers,
        *,
        weights: bool,
        alone: bool,
        drop: bool,
        digests: MicrobatchDigests | None = None,
    ) -> Waits:
        """Run a micro-batch backward, and send the gradient of its input to the `receivers`.

        Args:
            weights: the weight gradients are wanted. If False, only the gradient of the stage's input is.
            alone: the weight gradients are sent by themselves, not added to those of other micro-batches here.
            drop: free the parameters layer by layer, as this worker does not need them any more in this step.
            digests: the object to note digests of the results in, if the micro-batch is checked.
        """
        dy = yield from self._gradient_of_output(step, microbatch, digests)
        alone = alone or not weights
        batch, looks = self._batches.pop(microbatch, None), self._injects or digests is not None
        self.backward_of = microbatch
        for layer in reversed(self._layers):
            # A backward does not wait for parameters: its forward has waited for them, and no page changes before this
            # worker has voted.
            assert self.values[layer].is_at(step - 1), (layer, step)
            own_leaf = digests is not None
            buffer, add = self._reducer.begin_microbatch(layer, microbatch, alone=alone, own_leaf=own_leaf)
            started = self._device.mark()
            dy = self.programs.backward(layer, microbatch, dy, buffer, add=add, batch=batch)
            if looks:
                dy = self._computed_input(step, layer, dy, digests)
                self._computed_weights(step, layer, buffer, digests)
            self._ran(step, microbatch, layer, BACKWARD, started)
            if drop:
                self._drop(layer)
            if weights:
                self._hooks.on_point(FaultPoint.REDUCE, step)
                self._reducer.end_microbatch(step, layer, microbatch, alone=alone)
            else:
                self._reducer.drop_microbatch(layer)
            self._waiting.handle_messages()
        self.backward_of = -1
        self._send_gradient(step, microbatch, dy, receivers)

    def backward_input(
        self, step: int, microbatch: int, receivers: Receivers, *, drop: bool, digests: MicrobatchDigests | None = None
    ) -> Waits:
        """Run the first part of a micro-batch's backward, and send the gradient of its input to the `receivers`.

        `backward_weights` runs the second part later. Until then this worker keeps what the weight gradients need.

        Args:
            drop, digests: as for `backward`.
        """
        dy = yield from self._gradient_of_output(step, microbatch, digests)
        batch, looks = self._batches.pop(microbatch, None), self._injects or digests is not None
        for layer in reversed(self._layers):
            assert self.values[layer].is_at(step - 1), (layer, step)
            started = self._device.mark()
            dy = self.programs.backward_input(layer, microbatch, dy, batch=batch)
            if looks:
                dy = self._computed_input(step, layer, dy, digests)
            self._ran(step, microbatch, layer, BACKWARD, started)
            self._hooks.on_point(FaultPoint.INPUT, step)
            if drop:
                self._drop(layer)
            self._waiting.handle_messages()
        self._send_gradient(step, microbatch, dy, receivers)

    def backward_weights(
        self, step: int, microbatch: int, *, alone: bool, digests: MicrobatchDigests | None = None
    ) -> None:
        """Run the second part of a micro-batch's backward: its weight gradients. They need no parameters.

        Args:
            alone, digests: as for `backward`.
        """
        self._hooks.on_point(FaultPoint.WEIGHTS, step)
        looks = self._injects or digests is not None
        self.backward_of = microbatch
        for layer in reversed(self._layers):
            own_leaf = digests is not None
            buffer, add = self._reducer.begin_microbatch(layer, microbatch, alone=alone, own_leaf=own_leaf)
            started = self._device.mark()
            self.programs.backward_weights(layer, microbatch, buffer, add=add)
            if looks:
                self._computed_weights(step, layer, buffer, digests)
            self._ran(step, microbatch, layer, WEIGHTS, started)
            self._hooks.on_point(FaultPoint.REDUCE, step)
            self._reducer.end_microbatch(step, layer, microbatch, alone=alone)
            self._waiting.handle_messages()
        self.backward_of = -1

    def _gradient_of_output(
        self, step: int, microbatch: int, digests: MicrobatchDigests | None
    ) -> Generator[Reason, None, Activation | None]:
        """Wait for the gradient that a backward begins with, which the next stage sends. None on the last stage, which
        begins with the loss that its forward has saved."""
        dy: Activation | None = None
        if not self._is_last:
            key = BoundaryKey(GRADIENT, step, microbatch, self._layers.stop - 1)
            dy = yield from self._receive(key)
            if digests is not None and digests.computed_twice:
                self._boundaries.put_back(key, dy)
        self._hooks.on_point(FaultPoint.BACKWARD, step)
        return dy

    def _send_gradient(self, step: int, microbatch: int, dx: Activation | None, receivers: Receivers) -> None:
        if self._is_first:
            return
        assert dx is not None
        dx = map_tensors(Tensor.contiguous, dx)  # it is sent straight from its memory, so that must be contiguous
        message = message_of(BoundaryKey(GRADIENT, step, microbatch, self._layers.start - 1), dx)
        for receiver in receivers():
            self._boundaries.send(receiver, message, dx)

    def _drop(self, layer: int) -> None:
        self.values[layer].drop()
        self.programs.dropped(layer)

    def _computed_output(self, step: int, y: Activation) -> Activation:
        """A layer's output, as this worker goes on with it. Faults are injected here, into the first tensor of a tuple.

        The same holds for `_computed_input` and `_computed_weights`.
        """
        first, *others = tensors_of(y)
        right = first.detach()
        wrong = self._hooks.computed(FaultPoint.FORWARD, step, right)
        return y if wrong is right else like(y, (wrong.requires_grad_(first.requires_grad), *others))

    def _computed_input(
        self, step: int, layer: int, dx: Activation | None, digests: MicrobatchDigests | None
    ) -> Activation | None:
        """The gradient of a layer's input, perhaps with an injected fault; its digest is noted if it is checked."""
        if dx is not None:
            first, *others = tensors_of(dx)
            wrong = self._hooks.computed(FaultPoint.BACKWARD, step, first)
            dx = dx if wrong is first else like(dx, (wrong, *others))
        if digests is not None:
            digests.input_gradient(layer, dx)
        return dx

    def _computed_weights(
        self, step: int, layer: int, buffer: GradientBuffer, digests: MicrobatchDigests | None
    ) -> None:
        """Inject a fault into the gradient of a layer's parameters, if one is due; note its digest if it is checked."""
        if (wrong := self._hooks.computed(FaultPoint.REDUCE, step, buffer.flat)) is not buffer.flat:
            buffer.flat.copy_(wrong)
        if digests is not None:
            digests.weight_gradient(layer, buffer.flat)

    # ---- checks

    def has_inputs(self, step: int, microbatch: int) -> bool:
        """True if a micro-batch can be checked: both of its inputs are here, and all parameters are at step - 1."""
        wanted = [] if self._is_first else [BoundaryKey(ACTIVATION, step, microbatch, self._layers.start)]
        wanted += [] if self._is_last else [BoundaryKey(GRADIENT, step, microbatch, self._layers.stop - 1)]
        at_version = all(self.values[layer].is_at(step - 1) for layer in self._layers)
        return at_version and all(key in self._boundaries for key in wanted)

    def check(self, step: int, microbatch: int, digests: MicrobatchDigests) -> None:
        """Compute a micro-batch forward and backward for its digests alone: no result is kept, added or sent.

        It never waits: `has_inputs` must be true. What its forward saves is kept apart from what the worker's own
        forwards have saved (`StagePrograms.aside`), since the worker may have run the same micro-batch itself.
        """
        self._hooks.on_point(FaultPoint.FORWARD, step)
        batch = self._batch_of(step, microbatch)
        samples, tables = self._device.to_place(torch.from_numpy(self._samples[microbatch])), {}
        x = self._first_input(batch) if self._is_first else self._check_input(ACTIVATION, step, microbatch)
        for layer in self._layers:
            keys = Keys(self._seed, self._step_number, samples, self._layer_numbers[layer], {}, self._words)
            started = self._device.mark()
            with self.programs.aside(tables):
                x = self.programs.forward(layer, microbatch, x, keys, batch)
            x = self._computed_output(step, x)
            digests.forward(layer, x)
            self._ran(step, microbatch, layer, FORWARD, started)
            self._waiting.handle_messages()
        self._hooks.on_point(FaultPoint.BACKWARD, step)
        dy = None if self._is_last else self._check_input(GRADIENT, step, microbatch)
        for layer in reversed(self._layers):
            buffer = GradientBuffer(self._model.layout.layers[layer], self._place)
            started = self._device.mark()
            with self.programs.aside(tables):
                dy = self.programs.backward(layer, microbatch, dy, buffer, add=False, batch=batch)
            dy = self._computed_input(step, layer, dy, digests)
            self._computed_weights(step, layer, buffer, digests)
            self._ran(step, microbatch, layer, BACKWARD, started)
            self._waiting.handle_messages()

    def drop_parameters(self, version: int) -> None:
        """Free the parameters that are at this version. They are not needed before the next version is published."""
        for layer in self._layers:
            if self.values[layer].is_at(version):
                self._drop(layer)

    def _check_input(self, kind: str, step: int, microbatch: int) -> Activation:
        layer = self._layers.start if kind == ACTIVATION else self._layers.stop - 1
        return self._boundaries.pop(BoundaryKey(kind, step, microbatch, layer))

    def validate(self, version: int, microbatch: int) -> Generator[Reason, None, Activation]:
        """Run a validation micro-batch at a version.

        Returns:
            On the last stage the micro-batch's loss, and the weights and metrics that the model has, in the form
            `programs.scored`. On other stages the output of the stage.

        Raises:
            ConfigurationChanged: a new configuration has arrived meanwhile. The whole validation is then run again.
        """
        data = self._data.validation
        assert data is not None, "a run that validates has a validation split"
        size = self._job.microbatch_size
        ids = np.arange(microbatch * size, (microbatch + 1) * size)
        batch = self._read(data, ids, 0) if self._is_first or self._is_last else None
        if self._is_first:
            x = self._first_input(batch)
        else:
            x = yield from self._receive(BoundaryKey(VALIDATION, version, microbatch, self._layers.start))
        keys = Keys.make(self._job.seed, version, ids, 0, self._place)
        for layer in self._layers:
            yield from self.until_at(layer, version)
            x = self.programs.evaluate(layer, x, keys.at(layer), batch)
            # As in a step, progress is counted after every layer: otherwise the controller would take this worker to
            # hang while it runs its share of a validation.
            self._hooks.evaluated()
            self._waiting.handle_messages()
        if not self._is_last:
            peers = self._placement.mesh.stages[self._stage + 1]
            message = message_of(BoundaryKey(VALIDATION, version, microbatch, self._layers.stop), x)
            self._boundaries.send(peers[microbatch % len(peers)], message, x)
        self._waiting.check_configuration()
        return x

    def _microbatch_batch(self, step: int, microbatch: int) -> Any:
        """The micro-batch's data, kept for its backward: on the first stage for the inputs, on the last for the loss.

        None on other stages.
        """
        batch = self._batch_of(step, microbatch)
        if batch is not None:
            self._batches[microbatch] = batch
        return batch

    def _batch_of(self, step: int, microbatch: int) -> Any:
        if microbatch not in self._samples:
            self._sample(step, [microbatch])
        if not self._is_first and not self._is_last:
            return None
        return self._read(self._data.train, self._samples[microbatch], step)

    def _read(self, data: Batches, ids: np.ndarray, step: int) -> Any:
        # Not by `Tensor.to`: for each micro-batch that would wait for everything that is queued on the accelerator.
        batch = on_device(read_batch(data, ids, self._job.seed, step), self._device.to_place)
        if not self._job.is_tokens:
            self.programs.check_form(batch)
        return batch

    def _first_input(self, batch: Any) -> Activation:
        return first_input(self._model.inputs, batch, self._job.torch_dtype)

    def _ran(self, step: int, microbatch: int, layer: int, kind: str, started: Any) -> None:
        ended = self._device.mark()
        frequency = self.pacing.frequency
        if self._unasked is None:
            self._measured(step, microbatch, layer, kind, frequency, started, ended)
        else:
            # On a device with streams the program is only queued so far, and reading its times would wait for it.
            self._unasked.append(((step, microbatch, layer, kind, frequency), started, ended))

    def _measured(
        self, step: int, microbatch: int, layer: int, kind: str, frequency: float, began: float, ended: float
    ) -> None:
        self._times.add(layer, (ended - began) * frequency, kind)  # the time that it would take at frequency 1.0
        if self._hooks.layer_ran is not None:
            self._hooks.layer_ran(step, microbatch, layer, kind, began, ended)

    def pop_times(self) -> tuple[tuple[Row, ...], tuple[WeightsRow, ...]]:
        """The times of the layer programs that have run since the last call, and of the weight gradients among them.

        On a device with streams this waits until these programs have run.
        """
        if self._unasked:
            times = iter(self._device.times([mark for _, *marks in self._unasked for mark in marks]))
            for (program, _, _), began, ended in zip(self._unasked, times, times, strict=True):
                self._measured(*program, began, ended)
            self._unasked.clear()
        return self._times.pop_rows()

    def drop_undecided(self) -> None:
        """Drop every micro-batch that is under way, and make the numbers for keys again: their memory may be bad."""
        self.backward_of = -1
        self.programs.discard_all()
        self._make_numbers(self._layers)

    # ---- waiting

    def until_at(self, layer: int, version: int) -> Waits:
        """Wait until every page of the layer's compute buffer is at exactly this version."""
        values = self.values[layer]
        if not values.is_at(version):
            yield from self._waiting.until(lambda: values.is_at(version), "parameters of layer", layer)

    def _receive(self, key: BoundaryKey) -> Generator[Reason, None, Activation]:
        yield from self._waiting.until(lambda: key in self._boundaries, f"{key.kind} of micro-batch", key.microbatch)
        return self._boundaries.pop(key)
