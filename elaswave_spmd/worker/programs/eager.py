"""The layer programs of one worker, run eagerly. The other kinds of programs derive from them (README.md).

Each layer is run forward and backward by itself, on one micro-batch. The layer's input is detached from the graph of
the layer before. So the bits of a layer do not depend on where stages are cut, and the gradients of a layer can be sent
as soon as its own backward is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import add_note, exit_as_error
from elaswave_spmd.models import Loss, Metrics, Objective, keys_parameter
from elaswave_spmd.recovery.validation import other_metrics
from elaswave_spmd.sharding.layout import LayerLayout, ModelLayout
from elaswave_spmd.worker.activations import (
    Activation,
    checked_output,
    graded,
    gradient_of,
    handed_on,
    in_own_memory,
    in_words,
    leaf,
    marked,
    marks_of,
    num_bytes,
    tensors_of,
)
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.inputs import leaves_of
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.programs.engine_run import run_backward
from elaswave_spmd.worker.programs.scores import ScoreForm, checked_loss, loss_and_weight, mixed_weights, scores_of
from elaswave_spmd.worker.programs.split_backward import PutOff, SplitLayer
from elaswave_spmd.worker.spec import Job


class Batches(Protocol):
    """One split of a dataset, addressed by sample id (`data.DataSplit`)."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, ids: np.ndarray) -> Any:
        """The batch of these samples: tokens and targets, int64 [samples, seq_len] each; or a tree of CPU tensors.

        Args:
            ids: sample ids, int64 [samples].
        """
        ...


class ProgramArgs(TypedDict):
    """The arguments that the constructors of all kinds of `StagePrograms` have in common. They are described there."""

    num_layers: int
    loss: Loss | Objective
    loss_scale: float
    checkpointing: bool
    first_trained: int


def program_args(job: Job, layout: ModelLayout, loss: Loss | Objective) -> ProgramArgs:
    """Returns the constructor arguments for the layers of a run."""
    # A micro-batch's loss is scaled to its part of the mean over the global batch, not to a mean of its own. So the
    # losses of all micro-batches add up to the loss of the step, and so do their gradients.
    scale = 1.0 / job.tokens_per_step
    return {
        "num_layers": len(layout.layers),
        "loss": loss,
        "loss_scale": scale,
        "checkpointing": job.activation_checkpointing,
        "first_trained": layout.first_trained,
    }


BACKWARD_OF_LOSS = "backward, with the loss"
"""The phase of the last layer's backward in the notes of exceptions."""


@dataclass
class SavedForward:
    """The parts of the forward of one layer and micro-batch that its backward needs.

    Args:
        x: the layer's input, a leaf of the autograd graph.
        y: the layer's output with its graph; None with activation checkpointing, where the forward is run again, and
            for layers before the first trained one.
        keys: the random keys of the forward.
        put_off: receives the weight products that the backward puts off. None if the backward makes all gradients.
    """

    x: Activation
    y: Activation | None
    keys: Keys
    put_off: PutOff | None = None


@dataclass
class BegunBackward:
    """The second part of a layer's backward for one micro-batch, while it is put off.

    Args:
        gradients: for each trained parameter the gradient that the first part has made, or None if it has made none.
        put_off: the weight products that the first part has put off. None if it has made all gradients.
        loss: in the last layer the micro-batch's scaled loss, as `into.add_loss` takes it; else None.
    """

    gradients: list[Tensor | None]
    put_off: PutOff | None
    loss: Tensor | None


class StagePrograms:
    """Runs the layers of one worker's stage: forward, backward, and evaluation for validation.

    Invariant: what a method computes depends only on its arguments and on the layer's parameters, never on what ran
    before it on this worker.

    Args:
        num_layers: number of layers of the whole model; the loss is computed after the last one.
        loss: the model's loss function, perhaps with metrics for validations.
        loss_scale: 1 / number of tokens (or samples) of the global batch.
        checkpointing: activation checkpointing: save only the inputs of layers, and run each layer again before its
            backward.
        first_trained: the first layer that has a backward (`ModelLayout.first_trained`). The layers before it have
            nothing to train, and their inputs need no gradient: their backward returns `no_gradient`.
    """

    _SAVED = ("_saved", "_losses", "_begun")
    """The names of the attributes with what is kept of micro-batches until the end of their backward."""

    def __init__(
        self, num_layers: int, *, loss: Loss | Objective, loss_scale: float, checkpointing: bool, first_trained: int = 0
    ) -> None:
        self._modules: Mapping[int, nn.Module] = {}
        self._values: Mapping[int, ValueBuffer] = {}
        self._keyed: Mapping[int, str] = {}  # bound layers that take keys -> text about that in notes on errors
        objective = loss if isinstance(loss, Objective) else Objective(loss)
        self._loss, self._metrics = objective.loss, objective.metrics
        owner = objective.model
        self._of_model = [] if owner is None else [module for module in owner.modules() if module.training]
        self._loss_scale = loss_scale
        self._checkpointing = checkpointing
        self._first_trained = first_trained
        self._last = num_layers - 1
        self._saved: dict[tuple[int, int], SavedForward] = {}  # keys are (layer, micro-batch)
        self._losses: dict[int, Tensor] = {}  # micro-batch -> scaled loss, fp32, as `into.add_loss` takes it
        self._begun: dict[tuple[int, int], BegunBackward] = {}  # keys are (layer, micro-batch)
        self._split: dict[int, SplitLayer] = {}  # the bound layers that put off weight products
        self._marks: dict[int, tuple[bool, ...]] = {}  # layer -> which tensors of its output have a gradient
        self._weighted: bool | None = None  # whether the loss has a weight; None before it was first computed
        self.scored: ScoreForm | None = None
        """The form of the numbers that `evaluate` returns for the last layer. None before it has run."""
        self.memory = LayerMemory()

    @property
    def loss(self) -> Loss:
        """The loss function of the model's own code, never compiled."""
        return self._loss

    @property
    def metrics(self) -> Metrics | None:
        """The metrics function of the model's own code, never compiled; None if the model has none."""
        return self._metrics

    @property
    def num_compiled(self) -> int:
        """The number of programs that this worker has compiled so far; it must not grow once the worker is ready."""
        return 0

    def check_form(self, batch: Any) -> None:
        """Refuses a micro-batch that these programs cannot run. Eager programs take any shapes, and refuse none.

        Raises:
            DataError: the programs were compiled for other shapes. Only subclasses raise it.
        """

    def dropped(self, layer: int) -> None:
        """Notes that a layer's parameters were dropped until their next version. Subclasses may free their copies."""

    @contextmanager
    def aside(self, tables: dict[str, dict]) -> Iterator[None]:
        """Context in which programs save their forwards in the tables of a check, in place of the worker's own.

        Args:
            tables: the tables of the check; an empty dict before its first program.
        """
        own = {name: getattr(self, name) for name in self._SAVED}
        vars(self).update((name, tables.setdefault(name, {})) for name in own)
        try:
            yield
        finally:
            vars(self).update(own)

    @contextmanager
    def without_checkpointing(self) -> Iterator[None]:
        """Context in which forwards keep their graph, whether or not the run has activation checkpointing."""
        own = self._checkpointing
        self._checkpointing = False
        try:
            yield
        finally:
            self._checkpointing = own

    def bind(self, modules: Mapping[int, nn.Module], values: Mapping[int, ValueBuffer]) -> None:
        """Sets the layers to run from now on, the bound layers. If they change, all saved forwards are discarded.

        Args:
            modules: layer -> module, whose parameters are views of its value buffer.
            values: layer -> value buffer.
        """
        if modules.keys() != self._modules.keys():
            self.discard_all()
        self._modules = modules
        self._values = values
        keyed = {layer: name for layer, module in modules.items() if (name := keys_parameter(module))}
        self._keyed = {layer: "" if name == "keys" else f", {name} being keys" for layer, name in keyed.items()}
        self.set_split_layers(())
        # A model may keep a part of itself in evaluation mode (a frozen encoder): `set_training` leaves that alone.
        self._training = [m for module in modules.values() for m in module.modules() if m.training]

    def set_split_layers(self, layers: Collection[int]) -> None:
        """Sets the bound layers that put off weight products, for micro-batches whose forward runs from now on."""
        for layer in self._split.keys() - set(layers):
            del self._split[layer]
        for layer in set(layers) - self._split.keys():
            if layer >= self._first_trained:
                self._split[layer] = SplitLayer(self._values[layer].trained)

    @property
    def has_split_layers(self) -> bool:
        """True if the backward of any bound layer puts off weight products."""
        return bool(self._split)

    @property
    def forwarded(self) -> frozenset[int]:
        """The micro-batches that were run forward through all bound layers, and not yet backward."""
        # The last bound layer is run last in a forward and first in a backward, so only its entries have to be read.
        return frozenset(microbatch for layer, microbatch in self._saved if layer == max(self._modules))

    def discard_all(self) -> None:
        """Discards what is saved of all micro-batches."""
        self._saved.clear()
        self._losses.clear()
        self._begun.clear()

    def discard(self, microbatch: int) -> None:
        """Discards what is saved of one micro-batch."""
        for key in [k for k in self._saved if k[1] == microbatch]:
            del self._saved[key]
        self._losses.pop(microbatch, None)

    def forward(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        """Runs a layer on a micro-batch, and saves what its backward needs.

        Args:
            layer: number of a bound layer.
            microbatch: number within the step, by which `backward` finds what is saved.
            x: for layer 0 what the model's `inputs(batch)` returns, such as token ids; for others the output of the
                layer before.
            keys: the random keys of this layer, step and samples.
            batch: the micro-batch; needed by the last layer only, for its loss.

        Returns:
            The layer's output, detached, in the form that the next layer takes (`worker.activations`); for the last
            layer the loss x `loss_scale`, fp32 scalar.

        Raises:
            ModelError: the layer or the loss returned something else than the contract says.
            Exception: whatever the model's code raises, with a note that names the layer.
        """
        # The input becomes a new leaf, so that this layer's graph begins here even if the layer before ran on this
        # worker.
        x = leaf(x, passes_gradient=self._passes_gradient(layer))
        if layer < self._first_trained:
            y = self._run_and_save(layer, microbatch, x, keys, batch)
            self.memory.note(layer, 0, num_bytes(y))
            return y
        if layer in self.memory.known:
            return handed_on(self._run_and_save(layer, microbatch, x, keys, batch))
        run = partial(self._run_and_save, layer, microbatch, x, keys, batch)
        return handed_on(self.memory.measure(layer, x, self._values[layer].flat, run))

    def _passes_gradient(self, layer: int) -> bool:
        """True if a layer before this one needs the gradient of this layer's input."""
        return layer > self._first_trained

    def _run_and_save(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        if layer < self._first_trained:
            with torch.no_grad():
                y = self._run(layer, microbatch, x, keys, batch)
            # Nothing is run again for such a layer: its backward returns what is saved as its input here.
            self._saved[layer, microbatch] = SavedForward(no_gradient(x), None, keys)
        elif self._checkpointing:
            y = self._without_graph(layer, microbatch, x, keys, batch)
            self._saved[layer, microbatch] = SavedForward(x, None, keys)
        else:
            # The first forward of a layer measures the memory that autograd saves, so its backward puts nothing off.
            split = self._split.get(layer) if layer in self.memory.known else None
            put_off = None
            if split is None:
                y = self._run(layer, microbatch, x, keys, batch)
            else:
                with split.putting_off() as put_off:
                    y = self._run(layer, microbatch, x, keys, batch)
            self._saved[layer, microbatch] = SavedForward(x, y, keys, put_off)
        return y

    def _without_graph(self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        """Runs a layer whose forward is run again for its backward."""
        with torch.no_grad():
            y = self._run(layer, microbatch, x, keys, batch)
        if isinstance(y, Tensor):
            return y
        # Only with a graph it is known which tensors of a tuple have a gradient. They are the same in every forward, so
        # one additional forward with a graph is enough.
        if layer not in self._marks:
            self._marks[layer] = marks_of(self._run(layer, microbatch, x, keys.again(), batch))
        return marked(y, self._marks[layer])

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
        """Computes a layer's gradients for a micro-batch that was run forward, and discards what was saved of it.

        Args:
            layer: number of a bound layer.
            microbatch: as it was given to `forward`.
            dy: gradient of the step's loss with respect to the layer's output, in its shape and dtype. If the output
                is a tuple, gradients of those of its tensors that have one. None for the last layer, whose output is
                the loss.
            into: receives the gradients of the layer's trained parameters, and the loss of the last layer.
            add: add to the content of `into` instead of overwriting it. Only with fp32 compute: in bf16 the sum would
                be rounded.
            batch: the micro-batch; needed by the last layer only, with activation checkpointing.

        Returns:
            The gradient with respect to the layer's input, in its shape and dtype; of a tuple, gradients of those of
            its tensors that have one. None for layer 0. `no_gradient` if no layer before this one has a backward.

        Raises:
            Exception: whatever autograd or the model's code raises, with a note that names the layer.
        """
        if self._saved[layer, microbatch].put_off is not None:
            dx = self.backward_input(layer, microbatch, dy, batch=batch)
            self.backward_weights(layer, microbatch, into, add=add)
            return dx
        saved = self._saved.pop((layer, microbatch))
        if layer < self._first_trained:
            return saved.x
        y = self._output_again(layer, microbatch, saved, batch) if saved.y is None else saved.y
        parameters = self._values[layer].trained
        if add:
            # Autograd accumulates into a gradient that exists, so this adds without a temporary copy.
            for parameter, view in zip(parameters, into.views, strict=True):
                parameter.grad = view
        if outputs := graded(y):  # empty if, for example, a layer without parameters makes features of tokens
            try:
                run_backward(outputs, gradients_of(dy))
            except (Exception, SystemExit) as error:
                self._note_backward(error, layer, saved.x, batch)
                raise
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if add:
            # Had autograd made a new gradient tensor instead of adding in place, `into` would lack it without an error.
            assert all(map(is_, gradients, into.views))
        else:
            # Autograd does not write into the views directly: a bf16 gradient is converted to fp32, and a missing
            # gradient must become zero.
            into.set(gradients)
        if layer == self._last:
            # The loss is an element of the gradient (the loss page). So it is reduced, replicated and recovered like
            # any page of gradients.
            into.add_loss(self._losses.pop(microbatch), add=add)
        return self._gradient_of(layer, saved.x)

    def backward_input(self, layer: int, microbatch: int, dy: Activation | None, *, batch: Any) -> Activation | None:
        """Runs the first part of a backward: the gradient of the layer's input. `backward_weights` may follow any time.

        The two parts together have the bits of `backward`, whatever runs in between. What is saved of the forward is
        discarded, except what the second part needs.

        Args:
            layer, microbatch, dy, batch: as for `backward`.

        Returns:
            As `backward`.

        Raises:
            Exception: as `backward`.
        """
        saved = self._saved.pop((layer, microbatch))
        if layer < self._first_trained:
            return saved.x
        y, put_off = saved.y, saved.put_off
        if y is None:
            split = self._split.get(layer)
            with split.putting_off() if split is not None else nullcontext() as put_off:
                y = self._output_again(layer, microbatch, saved, batch)
        loss = self._losses.pop(microbatch) if layer == self._last else None
        begun = BegunBackward([None] * len(self._values[layer].trained), put_off, loss)
        if outputs := graded(y):
            try:
                self._begin_backward(layer, saved.x, outputs, gradients_of(dy), begun)
            except (Exception, SystemExit) as error:
                self._note_backward(error, layer, saved.x, batch)
                raise
        self._begun[layer, microbatch] = begun
        return self._gradient_of(layer, saved.x)

    def _note_backward(self, error: Exception | SystemExit, layer: int, x: Activation, batch: Any) -> None:
        """Adds the note of `note_layer`. That of the last layer's backward is the loss's as well, and names the batch.

        Raises:
            ModelError: in place of a SystemExit.
        """
        if layer == self._last:
            note_layer(error, self._name_of(layer), BACKWARD_OF_LOSS, x, batch)
        else:
            note_layer(error, self._name_of(layer), "backward", x)

    def _begin_backward(
        self,
        layer: int,
        x: Activation,
        outputs: tuple[Tensor, ...],
        gradients: tuple[Tensor, ...] | None,
        begun: BegunBackward,
    ) -> None:
        """Runs the first part of a backward: sets the `grad` of `x`, and stores the parameters' gradients in `begun`.

        Args:
            layer: number of a bound layer.
            x: the layer's input, a leaf.
            outputs: the tensors of the layer's output that have a gradient.
            gradients: the gradients of `outputs`; None if the output is the loss.
            begun: the record of the second part. Its `gradients` are set here.
        """
        run_backward(outputs, gradients)
        parameters = self._values[layer].trained
        begun.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def backward_weights(self, layer: int, microbatch: int, into: GradientBuffer, *, add: bool) -> None:
        """Runs the second part of a backward: the gradients of the trained parameters, and the last layer's loss.

        Args:
            layer, microbatch: as for `backward_input`, which has run.
            into, add: as for `backward`.

        Raises:
            RuntimeError: the model's code has changed tensors in place that the gradients are computed from. It has a
                note that names the layer.
        """
        if layer < self._first_trained:
            return
        begun = self._begun.pop((layer, microbatch))
        gradients = begun.gradients
        if begun.put_off is not None:
            with naming_layer(self._name_of(layer), "weight gradients"):
                gradients = begun.put_off.gradients(self._values[layer].trained, gradients)
        if add:
            made = [(view, one) for view, one in zip(into.views, gradients, strict=True) if one is not None]
            if made:  # one call adds each gradient to its own view; the bits are those of single additions
                torch._foreach_add_([view for view, _ in made], [one for _, one in made])  # pyright: ignore[reportPrivateImportUsage]
        else:
            into.set(gradients)
        if begun.loss is not None:
            into.add_loss(begun.loss, add=add)

    @property
    def begun(self) -> frozenset[int]:
        """The micro-batches for which the second part of a backward is still to run in some layer."""
        return frozenset(microbatch for _, microbatch in self._begun)

    def bytes_put_off(self, layer: int, microbatch: int) -> int:
        """The bytes of memory that are kept for the second part of a layer's backward; 0 if nothing is put off."""
        begun = self._begun[layer, microbatch]
        operands = () if begun.put_off is None else begun.put_off.operands
        if not operands:
            return 0
        made = (gradient for gradient in begun.gradients if gradient is not None)
        storages = (kept.untyped_storage() for kept in (*operands, *made))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def discard_begun(self, microbatch: int) -> None:
        """Discards the second part of a micro-batch's backward, whose weight gradients nobody needs any more."""
        for key in [k for k in self._begun if k[1] == microbatch]:
            del self._begun[key]

    def _output_again(self, layer: int, microbatch: int, saved: SavedForward, batch: Any) -> Activation:
        """Runs a forward again for its backward (activation checkpointing). Returns the output with its graph."""
        # `again` resets the counters of random draws, so that dropout has the mask of the first forward.
        return self._run(layer, microbatch, saved.x, saved.keys.again(), batch, "forward, repeated for backward")

    def _gradient_of(self, layer: int, x: Activation) -> Activation | None:
        """The gradient that a backward returns for the layer's input."""
        if not self._passes_gradient(layer):
            return no_gradient(x) if layer else None
        dx = gradient_of(x)
        return no_gradient(x) if dx is None and not isinstance(x, Tensor) else dx

    def evaluate(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Activation:
        """Runs a layer for validation: without a graph, and without saving anything for a backward.

        Args:
            layer: number of a bound layer.
            x: as for `forward`.
            keys: as for `forward`, at the version that is validated.
            batch: needed by the last layer only.

        Returns:
            The layer's output. For the last layer the micro-batch's loss, summed over its tokens, fp32 scalar; if the
            loss has a weight or the model has metrics, a tuple of such scalars, in the form `scored`.

        Raises:
            ModelError: as `forward`.
            Exception: as `forward`.
        """
        with torch.no_grad():
            x = leaf(x, passes_gradient=False)
            if layer < self._last:
                return self._call(layer, x, keys, batch, "evaluation")
            with naming_layer(self._name_of(layer), "evaluation, with the loss", x):
                loss, metrics = self._compute_scores(layer, x, keys, batch)
            return self._checked_scores(loss, metrics)

    def _checked_scores(self, loss: Any, metrics: Mapping[str, Any]) -> Activation:
        """The scores that `evaluate` returns for the last layer."""
        form, values = scores_of(checked_loss(loss), metrics)
        if (before := self.scored) is not None and before != form:
            raise other_metrics(f"metrics(output, batch) has returned {form.in_words}, and {before.in_words} before")
        self.scored = form
        return values[0] if len(values) == 1 else values

    def _run(
        self, layer: int, microbatch: int, x: Activation, keys: Keys, batch: Any, phase: str = "forward"
    ) -> Activation:
        """The layer's output. The loss of the last layer is scaled, and kept for the backward."""
        y = self._call(layer, x, keys, batch, phase)
        if layer < self._last:
            return y
        loss, weight = (y, None) if isinstance(y, Tensor) else y
        self._check_weighted(weight is not None)
        y = loss * self._loss_scale
        self._losses[microbatch] = y.detach() if weight is None else loss_and_weight(y, weight)
        return y

    def _check_weighted(self, weighted: bool) -> None:
        """Refuse a loss that has a weight only for some micro-batches.

        Raises:
            ModelError: the losses before had a weight and this one has none, or the other way round.
        """
        if self._weighted is not weighted and self._weighted is not None:
            raise mixed_weights(
                "loss(output, batch) has returned a sum with a weight for one micro-batch, and without for another"
            )
        self._weighted = weighted

    def _call(self, layer: int, x: Activation, keys: Keys, batch: Any, phase: str = "forward") -> Activation:
        """The layer's output; for the last layer the loss, or (loss, weight).

        An output is contiguous, aligned and in the compute dtype, even if no stage ends after the layer. Otherwise the
        next layer would see other strides or another dtype when the stages are cut elsewhere, and other kernels, with
        other bits, could run.
        """
        try:
            y = self._compute(layer, x, keys, batch)
        except (Exception, SystemExit) as error:
            phase += (", with the loss" if layer == self._last else "") + self._keyed.get(layer, "")
            note_layer(error, self._name_of(layer), phase, x)
            raise
        if layer == self._last:
            return checked_loss(y)
        parameters = self._values[layer].flat
        return in_own_memory(checked_output(y, parameters.dtype, self._name_of(layer)), parameters)

    def _name_of(self, layer: int) -> str:
        return self._values[layer].layout.name

    def _arguments(self, layer: int, x: Activation, keys: Keys) -> tuple[Any, ...]:
        """The arguments that a layer is called with."""
        return (x, keys) if layer in self._keyed else (x,)

    def _compute(self, layer: int, x: Activation, keys: Keys, batch: Any) -> Any:
        """Runs the model's own code of the layer, and the loss after the last layer. Subclasses may run it compiled."""
        y = self._modules[layer](*self._arguments(layer, x, keys))
        return y if layer < self._last else self._loss_of(y, batch)

    def _compute_scores(self, layer: int, x: Activation, keys: Keys, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        """Runs the last layer, the loss and the metrics for a validation. Subclasses may run them compiled."""
        if self._metrics is None:
            return self._compute(layer, x, keys, batch), {}
        y = self._modules[layer](*self._arguments(layer, x, keys))
        return self._loss_of(y, batch), self._metrics_of(y, batch)

    def _code_of(self, layer: LayerLayout) -> str:
        """What is compiled as one program with a layer, in words."""
        return f"layer {layer.name}" + (", loss() or metrics()" if layer.index == self._last else "")

    def _loss_of(self, y: Any, batch: Any) -> Any:
        """The loss of an output, as the model's own code gives it."""
        with naming_function("loss", y, batch):
            return self._loss(y, batch)

    def _metrics_of(self, y: Any, batch: Any) -> Mapping[str, Any]:
        """The metrics of an output, as the model's own code gives them; empty if the model has none."""
        if self._metrics is None:
            return {}
        with naming_function("metrics", y, batch):
            return self._metrics(y, batch)

    def set_training(self, training: bool) -> None:
        """Switches the model and its modules between training and evaluation mode.

        Modules that the model itself has put into evaluation mode stay there. Layers that were made by a factory are
        none of the model's modules, and the model is none of the bound layers': so both are switched.
        """
        for module in (*self._of_model, *self._training):
            module.training = training


def note_layer(
    error: Exception | SystemExit, name: str, phase: str, x: Activation | None = None, batch: Any = None
) -> None:
    """Adds a note to an exception that comes out of a layer: the layer, what it was doing, and its input.

    For example "in layer 'block0' (forward), input float32[2, 16, 32]". The caller raises the same exception again, so
    that its type still tells a device's error from a mistake in the model. Only SystemExit is replaced by an error:
    otherwise a sys.exit() in a model would end the worker, and its state would be lost.

    Args:
        error: the exception.
        name: the layer's name.
        phase: "forward", "backward", "weight gradients", "evaluation" or "compilation", perhaps with an addition.
        x: the layer's input, if it still exists; only its shape and dtype are read.
        batch: the micro-batch, if it has part in it; of this as well.

    Raises:
        ModelError: in place of a SystemExit.
    """
    note = f"in layer '{name}' ({phase})" + (f", input {in_words(x)}" if x is not None else "")
    if batch is not None:
        note += "".join(f", {leaf} {in_words(values)}" for leaf, values in leaves_of(batch))
    if isinstance(error, SystemExit):
        raise exit_as_error(error, note) from error
    add_note(error, note)


@contextmanager
def naming_layer(name: str, phase: str, x: Activation | None = None) -> Iterator[None]:
    """Context that adds the note of `note_layer` to any exception that comes out of the block."""
    try:
        yield
    except (Exception, SystemExit) as error:
        note_layer(error, name, phase, x)
        raise


@contextmanager
def naming_function(name: str, output: Any, batch: Any) -> Iterator[None]:
    """Context that adds a note to an exception from a function that the model has after its last layer.

    For example "in loss(output, batch), of output float32[2, 9], batch.tokens int64[2, 4], batch.targets int64[2, 4]".
    `naming_layer` adds its own note after it.

    Args:
        name: "loss" or "metrics".
        output, batch: the arguments of the function; only shapes and dtypes are read.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{leaf} {in_words(values)}" for leaf, values in leaves_of(batch))
        note = f"in {name}(output, batch), of output {in_words(output)}" + (f", {given}" if given else "")
        if isinstance(error, SystemExit):
            raise exit_as_error(error, note) from error
        add_note(error, note)
        raise


def gradients_of(dy: Activation | None) -> tuple[Tensor, ...] | None:
    """The gradients of a layer's outputs, in the form that autograd takes; None if the output is the loss."""
    return None if dy is None else tensors_of(dy)


def no_gradient(x: Activation) -> Tensor:
    """A stand-in for a gradient of `x` that no layer before it needs: a zero of shape [1], on the device of `x`.

    Between stages it is sent like any gradient, so that every stage has the same actions in a step and in a recovery.
    """
    dtypes = [tensor.dtype for tensor in tensors_of(x) if tensor.is_floating_point()]
    return torch.zeros(1, dtype=dtypes[0] if dtypes else torch.float32, device=tensors_of(x)[0].device)
