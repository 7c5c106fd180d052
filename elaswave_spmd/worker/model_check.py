"""The check of a model before the first step: is a micro-batch's result a function of the micro-batch alone?

Everything that a run promises rests on that, because a micro-batch may be computed by any worker, after any other
micro-batch, and again after a worker is lost. So before a worker is ready, it runs each *kind* of layer forward and
backward on one micro-batch, with its own programs on its own device. Then it runs the same micro-batch with another
copy of the layer, which has run a different micro-batch before. The model is refused if the results differ, if
something else has changed meanwhile (generators, buffers, inputs), or if a result is not finite. The error names the
layer, what was observed, and a fix. `inputs(batch)` is checked in the same way (`function_watch`). For `loss` and
`metrics` it is checked that they are sums over samples (`loss_check`).

One worker cannot notice what is always the same on it and differs on others: its rank, the order of a set, a library of
its machine. So each worker reports digests of its results, which the controller compares (controller/model_checks.py).
Workers of odd rank run the two micro-batches in the other order, so that a value that the first micro-batch leaves
behind for good differs between workers. A worker without others to compare with runs each kind of layer forward once
more, after the other layers have run the same micro-batch. State that layers share, such as a global variable, then has
another value than before.

The check leaves nothing behind: the copies of layers are dropped, the programs are as before, and no random key of a
step is used up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys, sample_ids
from elaswave_spmd.errors import DataError, ModelError, UserError, headline_of, place_in_user_code
from elaswave_spmd.models import call_layer
from elaswave_spmd.sharding.layout import LayerLayout
from elaswave_spmd.worker.activations import (
    Activation,
    checked_output,
    forms_of,
    graded,
    leaf,
    like,
    map_tensors,
    tensors_of,
)
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.function_watch import checked_inputs, refuse_functions
from elaswave_spmd.worker.inputs import leaves_of, to_batch, with_leaves
from elaswave_spmd.worker.layer_kinds import kind_of
from elaswave_spmd.worker.layer_watch import (
    SAME_RESULT,
    LayerState,
    LayerWatch,
    bits_of,
    difference_of,
    equal_bits,
    no_in_place,
)
from elaswave_spmd.worker.loss_check import check_loss, check_metrics, refuse_detached, shortened
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.programs.eager import BACKWARD_OF_LOSS, Batches, StagePrograms, naming_layer
from elaswave_spmd.worker.spec import Job

DIGEST_BYTES = 16
_FINITE = "a step whose gradient is not finite is skipped: this model would skip its steps"
_GRADIENT = 1e-3  # size of the made-up gradient of a layer's output, about that of gradients in training
# Parameters are disturbed by 0 to 2 times this number. It is only added, since some must not become negative, such as a
# variance that begins as zero.
_DISTURBANCE = 0.01


@dataclass(frozen=True)
class LayerCheck:
    """The result of one kind of layer.

    Args:
        layer: the number of the first layer of the kind.
        count: the number of layers of the kind.
        kept_bytes: the bytes that the layer keeps of one micro-batch from its forward to its backward.
        output_bytes: the size of its output for one micro-batch, in bytes.
        put_off_bytes: the bytes that the layer keeps of one micro-batch from its backward to its weight gradients, if
            these are put off. 0 if the backward must stay whole, because in two parts it would have other bits.
        digest: a hash of the outputs and gradients of both micro-batches in training, and of whether the backward can
            be in two parts. Validations are not in it, as they may differ in a run that is resumed.
    """

    layer: int
    count: int
    kept_bytes: int
    output_bytes: int
    put_off_bytes: int
    digest: bytes


@dataclass(frozen=True)
class ModelCheck:
    """A model that has passed.

    Args:
        seconds: the duration of the check.
        layers: the result of each kind of layer.
        kinds: for each layer of the model, the number of the first layer of its kind.
        loss_unchecked: the reason why the loss could not be checked, such as what it raised for half a micro-batch; ""
            if it was checked.
        samples: a digest of the micro-batches that were read. b"" for tokens, which are read as they are stored.
    """

    seconds: float
    layers: tuple[LayerCheck, ...]
    kinds: tuple[int, ...]
    loss_unchecked: str = ""
    samples: bytes = b""


@dataclass(frozen=True)
class Sample:
    """One of the two micro-batches: its number (0 or 1), the step of its random keys, its sample ids and its batch."""

    number: int
    step: int
    ids: np.ndarray
    batch: Any


@dataclass(frozen=True)
class _Result:
    """A layer's results for one micro-batch. `evaluated` is None if the run does not validate."""

    y: Activation
    dx: Activation | None
    gradient: Tensor
    evaluated: Activation | None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors with their names for errors."""
        yield from _named("output", self.y)
        if self.dx is not None:
            yield from _named("the gradient of its input", self.dx)
        yield "the gradients of its parameters", self.gradient
        if self.evaluated is not None:
            yield from _named("its output in a validation", self.evaluated)

    def digest(self) -> bytes:
        """A hash of all bits that training depends on: output and gradients, but not the output in a validation."""
        hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
        dx = () if self.dx is None else tensors_of(self.dx)
        for value in (*tensors_of(self.y), self.gradient, *dx):
            hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return hashed.digest()


def check_model(
    model: LocalModel,
    job: Job,
    data: Batches,
    place: torch.device,
    *,
    rank: int = 0,
    alone: bool = False,
    checked: Callable[[str], None] = lambda layer: None,
) -> ModelCheck:
    """Check each kind of layer with the programs of a worker. The programs must not be used otherwise meanwhile.

    Args:
        model: layers, initial values and programs.
        data: the training split.
        place: the device of parameters, inputs and outputs.
        rank: the rank of the worker. Workers of odd rank begin with the other micro-batch.
        alone: True if no worker runs the micro-batches in the other order. Then it is checked here that layers share no
            state.
        checked: called with the name of each layer that has passed.

    Raises:
        ModelError: the model breaks the promise of equal bits.
        DataError: the dataset breaks it, or the programs were compiled for micro-batches of another form.
        Exception: whatever the model's code raises, with a note that names the layer.
    """
    began = time.perf_counter()
    samples = _samples(job, data, place)
    for sample in samples:
        model.programs.check_form(sample.batch)
    check = _Check(model, job, place, samples if rank % 2 == 0 else samples[::-1], alone=alone)
    try:
        found = check.run(checked)
    finally:
        model.programs.bind({}, {})
        model.programs.memory = LayerMemory()  # layers are measured again when they train
    read = b"" if job.is_tokens else _check_samples(job, data, samples)
    return ModelCheck(time.perf_counter() - began, found, tuple(check.kinds), check.loss_unchecked, read)


@contextmanager
def refusing_mistakes(place: torch.device) -> Iterator[None]:
    """Context in which an exception of the model's code is replaced by a ModelError (`mistake_in_model`).

    Args:
        place: the device that the model's code runs on.

    Raises:
        UserError: the exception is a mistake in the model, or is a UserError already.
        Exception: any other exception that was raised inside.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (mistake := mistake_in_model(error, place)) is None:
            raise
        raise mistake from error


def mistake_in_model(error: Exception, place: torch.device) -> ModelError | None:
    """The ModelError for an exception that was raised in the check; None if the model may not be what is wrong.

    An exception that comes out of a layer has a note that names the layer (`naming_layer`), and so has one from
    `inputs`, `loss` or `metrics`. Without a note the mistake may be ours. A lack of memory may be that of this worker
    alone, and an exception on an accelerator may be a failure of the device.
    """
    notes = vars(error).get("__notes__", ())
    lacks = isinstance(error, MemoryError | OSError) or "memory" in str(error)
    if not notes or lacks or (isinstance(error, RuntimeError) and place.type != "cpu"):
        return None
    rule, fix = "before the first step each kind of layer computes two micro-batches, forward and backward", ""
    function = next((name for name in ("loss", "metrics") if notes[0].startswith(f"in {name}(output, batch)")), None)
    if function is not None:
        rule += f", with {function}(output, batch) after the last layer: of its output and the micro-batch"
        fix = f"correct {function}()"
    elif notes[0].startswith("in layer"):
        fix = "correct the layer, or what gives it its input: the layer before it, or inputs(batch)"
        if "dtype" in str(error):
            rule += "; parameters are in runtime.dtype, whichever dtype the constructor gave them, and so are the "
            rule += "floating-point tensors between layers, while integers of inputs(batch) stay integers"
        if BACKWARD_OF_LOSS in notes[0] and (found := re.match("Found dtype (Double|Float|Half) ", str(error))):
            rule = (
                "loss(output, batch) computes in one dtype: some functions, such as huber_loss, take two and have no "
                "backward then; Python floats in a sample become float64"
            )
            wrong = {"Double": "float64", "Float": "float32", "Half": "float16"}[found[1]]
            label = re.search(rf"(batch\S*) {wrong}\[", notes[0])
            fix = f"in loss(): {label[1] if label else 'what has another dtype'}.to(output.dtype)"
    if "meta" in str(error):  # torch's name of a device on which tensors have no values
        rule = (
            "inputs(batch), loss() and metrics() are called on the model without memory: its parameters and constants "
            "have values in their layers alone"
        )
        fix = (
            "make a constant where it is used, as output.new_tensor([1.0, 3.0]), or at the top of the file; hand a "
            "term of the loss that needs parameters on from a layer, as a tensor without dims"
        )
    return ModelError(
        f"the model raised {headline_of(error)}, {notes[0]}",
        rule=rule,
        where=place_in_user_code(error) or "model.target",
        fix=fix or "correct it, or the data",
    )


def _samples(job: Job, data: Batches, place: torch.device) -> tuple[Sample, Sample]:
    """The first micro-batch of the first step, and another one: the last of that step, or the first of the next.

    Their keys are of different steps, so that values that depend on the step differ between the two, too.
    """
    size, last = job.microbatch_size, job.num_microbatches - 1
    found = []
    for number, (step, microbatch) in enumerate(((1, 0), (1, last) if last else (2, 0))):
        slots = microbatch * size + np.arange(size)
        ids = sample_ids(job.seed, step, job.global_batch, len(data), slots)
        found.append(Sample(number, 1 + number, ids, _read(data, ids, place, job.seed, 1 + number)))
    return found[0], found[1]


def _read(data: Batches, ids: np.ndarray, place: torch.device, seed: int, step: int) -> Any:
    """`to_batch`, with a DataError in place of what the user's dataset raises.

    Raises:
        DataError: the dataset does not return these samples.
        MemoryError, OSError: as they were raised, since their cause may be this machine, and another attempt may
            succeed.
    """
    try:
        return to_batch(data, ids, place, seed, step)
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:
        if not (notes := vars(error).get("__notes__", ())):
            raise
        raise DataError(
            f"the dataset raised {headline_of(error)}, {notes[0]}",
            rule="a dataset returns each of its samples, in every worker; the thread that reads is not the one that "
            "made the dataset",
            where=place_in_user_code(error) or "data.target",
            fix="correct the dataset; connections and readers that are bound to a thread are opened at the first read",
        ) from error


def _check_samples(job: Job, data: Batches, samples: Sequence[Sample]) -> bytes:
    """Read both micro-batches again, in the other order. Returns a digest, which must be the same on all workers.

    Raises:
        DataError: the dataset does not return the same samples again.
    """
    hashed = {}
    for sample in reversed(samples):
        again = _read(data, sample.ids, torch.device("cpu"), job.seed, sample.step)
        for (name, one), (_, other) in zip(leaves_of(sample.batch), leaves_of(again), strict=True):
            if one.shape != other.shape or one.dtype != other.dtype or not equal_bits(one.cpu(), other):
                raise DataError(
                    f"samples {_listed(sample.ids)} are not the same when they are read again: {name} differs",
                    rule="a batch is a function of its sample ids: any worker reads it, and again after a loss",
                    where="data.target",
                    fix="draw random numbers for augmentation by keys: def __getitem__(self, index, keys), with "
                    "keys.generator() for torch and keys.numpy() for numpy",
                )
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, value in leaves_of(again):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        hashed[sample.number] = digest.digest()
    return hashlib.blake2b(hashed[0] + hashed[1], digest_size=DIGEST_BYTES).digest()


class _Check:
    """One check, layer by layer. The first of the two samples is run twice, and the other one in between."""

    def __init__(
        self, model: LocalModel, job: Job, place: torch.device, samples: Sequence[Sample], *, alone: bool
    ) -> None:
        self._model = model
        self._job = job
        self._place = place
        self._programs = model.programs
        self._first, self._other = samples
        self._alone = alone
        found = checked_inputs(model.inputs, [sample.batch for sample in samples], job.torch_dtype, place)
        self._inputs = {sample.number: x for sample, x in zip(samples, found, strict=True)}
        self._last = len(model.layout.layers) - 1
        self.loss_unchecked = ""
        self.kinds: list[int] = []
        """For each layer so far, the number of the first layer of its kind."""

    def run(self, checked: Callable[[str], None]) -> tuple[LayerCheck, ...]:
        """Check the first layer of each kind, on the outputs of the layers before it."""
        # Kind -> (the check of its first layer, the outputs of that layer by micro-batch). A layer of a known kind with
        # an input of the same form is not run: its output would have the same form, so the known outputs are used.
        known: dict[object, tuple[LayerCheck, dict[int, Activation]]] = {}
        # Of each kind: its first layer, the inputs by micro-batch, and the output for the first sample.
        ran: list[tuple[LayerLayout, dict[int, Activation], Activation]] = []
        counts: dict[object, int] = {}
        for layer in self._model.layout.layers:
            x = next(iter(self._inputs.values()))
            form = kind_of(self._model.prototype(layer.index))
            kind = (form, forms_of(x), layer.index == self._last, self._backward_of(layer))
            counts[kind] = counts.get(kind, 0) + 1
            if kind not in known:
                with self._telling_functions(layer):
                    known[kind] = self._check_layer(layer)
                ran.append((layer, self._inputs, known[kind][1][self._first.number]))
                checked(layer.name)
            one, self._inputs = known[kind]
            self.kinds.append(one.layer)
        if self._alone:
            for layer, self._inputs, output in ran:
                self._refuse_shared(layer, output)
        return tuple(dataclasses.replace(one, count=counts[kind]) for kind, (one, _) in known.items())

    def _refuse_shared(self, layer: LayerLayout, output: Activation) -> None:
        """Refuse a layer whose output depends on what other layers have computed last, as through a global variable.

        When the layer was checked, the layers before it had run the other micro-batch last. Now they have run the same
        micro-batch last.

        Args:
            output: the layer's output for the first micro-batch, when it was checked.
        """
        values = self._values(layer)
        with _bound(self._programs, layer, values):
            again = self._forward_alone(layer, self._first)
        if difference := _difference_of_outputs(output, again):
            raise ModelError(
                f"layer {layer.name} computes other bits for the same micro-batch when the other layers have "
                f"computed another one before: {difference}",
                rule="a layer gets all that it needs from the layer before it: those of another stage run in "
                "another process, and on other micro-batches",
                where=f"layer {layer.name}",
                fix="no global variable and no object that layers share; hand on what a later layer needs in a "
                "tuple: return y, gate",
            )

    def _refuse_other_without_graph(
        self, layer: LayerLayout, values: ValueBuffer, watch: LayerWatch, output: Activation
    ) -> None:
        """Refuse a bound layer whose output has other bits with activation checkpointing than without.

        Some operators of torch, such as its LSTM on CPUs, use other kernels if nothing is kept for a backward. But a
        run may be resumed with or without checkpointing, and the repeated forward must give what the next layer got.

        The whole run is done, not only a forward, because it also refuses a layer that draws masks in its backward
        (`_refuse_other_masks`). With checkpointing this cannot be seen, as the backward repeats the forward.

        Args:
            output: the layer's output for the first micro-batch, with checkpointing.
        """
        with self._programs.without_checkpointing():
            kept = self._run(layer, values, watch, self._first).y
        if difference := _difference_of_outputs(kept, output):
            raise ModelError(
                f"layer {layer.name} computes other bits where nothing is kept for its backward: {difference}",
                rule="activation checkpointing changes no bits: a forward that keeps nothing gives what the one "
                "gives that is repeated for the backward",
                where=f"layer {layer.name}",
                fix="runtime.activation_checkpointing=false; torch's LSTM on CPUs is such a layer, its GRU is not",
            )

    def _forward_alone(self, layer: LayerLayout, sample: Sample) -> Activation:
        """Run a bound layer forward, and nothing else."""
        x, keys = self._inputs[sample.number], self._keys(layer, sample)
        y = self._programs.forward(layer.index, sample.number, x, keys, sample.batch)
        self._programs.discard_all()
        return y

    def _backward_of(self, layer: LayerLayout) -> int:
        """The kind of backward that a layer has.

        Returns:
            -1 for a layer before the first trained one, which has no backward. 0 for the first trained one, which gives
            no gradient of its input. 1 for a layer after it.
        """
        first = self._model.layout.first_trained
        return (layer.index > first) - (layer.index < first)

    @contextmanager
    def _telling_functions(self, layer: LayerLayout) -> Iterator[None]:
        """Context in which a refusal of the last layer is replaced by one of loss() or metrics() if these are to blame.

        They run within the programs of the last layer, so that the check of the layer cannot tell which one is wrong.
        """
        if layer.index != self._last:
            yield
            return
        samples = self._first, self._other
        # Copied now, since some changes in place, such as by clamp_, change nothing when they are made a second time.
        batches = [with_leaves(one.batch, [leaf.clone() for _, leaf in leaves_of(one.batch)]) for one in samples]
        try:
            yield
        except ModelError as error:
            if (mistake := self._mistake_of_functions(layer, batches)) is None:
                raise
            raise mistake from error

    def _mistake_of_functions(self, layer: LayerLayout, batches: Sequence[Any]) -> ModelError | None:
        """The error of loss() or metrics(), computed alone; None if they are right, or cannot be computed alone."""
        programs, metrics = self._programs, self._programs.metrics if self._job.validates else None
        try:
            module = self._values(layer).module
            outputs = [self._output(layer, module, sample) for sample in (self._first, self._other)]
            refuse_functions(programs.loss, metrics, outputs, batches, self._place)
        except ModelError as mistake:
            return mistake
        except Exception:
            return None  # the layer itself may be the cause, and it is refused anyway
        return None

    def _check_layer(self, layer: LayerLayout) -> tuple[LayerCheck, dict[int, Activation]]:
        """Check one layer. Returns the result, and the layer's output by micro-batch: the next layer's input."""
        compiled = self._programs.num_compiled
        first, other = self._first, self._other
        once, alone = self._run_alone(layer, first)
        ((_, kept, output),) = self._programs.memory.pop_rows()
        # Another copy of the layer, which runs another micro-batch first. So if the layer keeps something, it differs.
        values = self._values(layer)
        watch = LayerWatch(values, self._place)
        with _bound(self._programs, layer, values):
            between = self._run(layer, values, watch, other)
            watch.refuse_difference(alone)
            digests, outputs = {other.number: between.digest()}, {other.number: between.y}
            del between  # a layer's gradients may be large
            twice = self._run(layer, values, watch, first, returned=outputs[other.number])
            _compare(layer.name, once, twice)
            if self._job.activation_checkpointing:
                self._refuse_other_without_graph(layer, values, watch, twice.y)
            self._check_addition(layer, values, watch, twice)
            self._refuse_without_gradient(layer, values.module)
            put_off = self._bytes_put_off(layer, values)
            if layer.index == self._last:
                self._check_loss(layer, values.module)
            if self._alone:  # so that this layer has run the other micro-batch last when the next ones are checked
                self._forward_alone(layer, other)
        if self._programs.num_compiled > compiled:
            raise ModelError(
                f"layer {layer.name} was compiled again for a micro-batch like the one before",
                rule="all programs of a layer are compiled before training, and serve all micro-batches",
                fix="read nothing in forward that changes from call to call: a counter, a list that grows",
            )
        digests[first.number], outputs[first.number] = twice.digest(), twice.y
        # All workers must find the same about the backward in two parts, and so must a run that is resumed.
        found = digests[0] + digests[1] + (b"in two parts" if put_off else b"")
        digest = hashlib.blake2b(found, digest_size=DIGEST_BYTES).digest()
        return LayerCheck(layer.index, 1, kept, output, put_off, digest), outputs

    def _bytes_put_off(self, layer: LayerLayout, values: ValueBuffer) -> int:
        """Run the backward in two parts, and compare it with the whole backward, for both micro-batches.

        Parameters are disturbed meanwhile. Otherwise some gradients would all be zero, for example before a gate or a
        weight that begins as zero, and the comparison would show nothing.

        Args:
            values: the buffer of the bound copy of the layer.

        Returns:
            The bytes that are kept between the two parts. 0 if the backward must stay whole: nothing of it can be put
            off, in two parts it has other bits, or the layer's code cannot be run in this way.
        """
        programs, first_trained = self._programs, self._model.layout.first_trained
        given = tensors_of(leaf(self._inputs[self._first.number], passes_gradient=True))
        if layer.index <= first_trained or not any(one.requires_grad for one in given):
            return 0
        initial = values.flat.detach().clone()
        values.flat.add_(_waves(values.flat).add_(1.0).mul_(_DISTURBANCE))
        try:
            # All workers try both micro-batches, so that they find the same, whichever they begin with.
            kept = [self._bytes_if_equal(layer, sample) for sample in (self._first, self._other)]
        except Exception:
            # The whole backward has run twice by now, so the layer can be trained. But its code may accept only
            # torch's own type of parameters, or only the initial values.
            programs.discard_all()
            return 0
        finally:
            programs.set_split_layers(())
            values.flat.copy_(initial)
        return max(kept) if all(kept) else 0

    def _bytes_if_equal(self, layer: LayerLayout, sample: Sample) -> int:
        """The bytes kept between the two parts of a backward; 0 if the parts have other bits than the whole."""
        self._programs.set_split_layers([layer.index])
        put_off, found = self._run_in_parts(layer, sample)
        self._programs.set_split_layers(())
        if not put_off:
            return 0
        # Not if there are infinities: they, and what is computed from them, would be equal even if something is wrong.
        same = all(equal_bits(one, other) for one, other in zip(found, self._run_whole(layer, sample), strict=True))
        return put_off if same and all(map(_finite, found)) else 0

    def _run_whole(self, layer: LayerLayout, sample: Sample) -> list[Tensor]:
        """Run a micro-batch forward and backward. Returns the tensors of its output and dx, and weight gradients."""
        programs, x, number = self._programs, self._inputs[sample.number], sample.number
        keys = self._keys(layer, sample)
        into = GradientBuffer(layer, self._place)
        y = programs.forward(layer.index, number, x, keys, sample.batch)
        dy = None if layer.index == self._last else _made_up_gradient(y)
        dx = programs.backward(layer.index, number, dy, into, add=False, batch=sample.batch)
        assert dx is not None
        return [*tensors_of(y), *tensors_of(dx), into.flat]

    def _run_in_parts(self, layer: LayerLayout, sample: Sample) -> tuple[int, list[Tensor]]:
        """Run a micro-batch with its backward in two parts.

        Returns the bytes that are kept between the parts, and tensors as `_run_whole`.
        """
        programs, x, number = self._programs, self._inputs[sample.number], sample.number
        keys = self._keys(layer, sample)
        into = GradientBuffer(layer, self._place)
        y = programs.forward(layer.index, number, x, keys, sample.batch)
        dy = None if layer.index == self._last else _made_up_gradient(y)
        dx = programs.backward_input(layer.index, number, dy, batch=sample.batch)
        put_off = programs.bytes_put_off(layer.index, number)
        programs.backward_weights(layer.index, number, into, add=False)
        assert dx is not None
        return put_off, [*tensors_of(y), *tensors_of(dx), into.flat]

    def _run_alone(self, layer: LayerLayout, sample: Sample) -> tuple[_Result, LayerState]:
        """Run one micro-batch with a new copy of the layer. Returns the result, and the copy's own state after it."""
        values = self._values(layer)
        watch = LayerWatch(values, self._place)
        with _bound(self._programs, layer, values):
            result = self._run(layer, values, watch, sample)
        return result, watch.settled

    def _keys(self, layer: LayerLayout, sample: Sample) -> Keys:
        return Keys.make(self._job.seed, sample.step, sample.ids, layer.index, self._place)

    def _values(self, layer: LayerLayout) -> ValueBuffer:
        """A new copy of a layer, whose parameters are views of a buffer with initial values."""
        (module,) = self._model.make_modules([layer.index]).values()
        values = ValueBuffer(layer, module, self._job.torch_dtype, self._place)
        values.flat.zero_()
        fill_initial(values, self._model, self._job.seed)
        return values

    def _run(
        self,
        layer: LayerLayout,
        values: ValueBuffer,
        watch: LayerWatch,
        sample: Sample,
        *,
        returned: Activation | None = None,
        sums: GradientBuffer | None = None,
    ) -> _Result:
        """Run one micro-batch forward and backward, and check that nothing else changes and that all is finite.

        Args:
            returned: the output of the same copy for the micro-batch before, which must not change either.
            sums: a buffer to add the gradients to; None to write them into a new one.
        """
        x, batch = self._inputs[sample.number], sample.batch
        keys = self._keys(layer, sample)
        into, programs = sums or GradientBuffer(layer, self._place), self._programs
        given = {**dict(_named("its input", x)), **dict(leaves_of(batch))}
        if returned is not None:
            given |= dict(_named("an earlier output of its own", returned))
        watch.begin(given, keys)
        dy = evaluated = None
        with no_in_place(layer.name):
            y = programs.forward(layer.index, sample.number, x, keys, batch)
            watch.check_settled()
            for name, value in _named("its own output, once returned,", y):
                watch.give(name, value)
            if layer.index != self._last:
                dy = _made_up_gradient(y)
                for name, value in _named("the gradient of its output", dy):
                    watch.give(name, value)
            uses = dict(keys.uses)
            dx = programs.backward(layer.index, sample.number, dy, into, add=sums is not None, batch=batch)
            _refuse_other_masks(layer.name, uses, keys)
            watch.check_settled()
            if self._job.validates:
                programs.set_training(False)
                evaluated = programs.evaluate(layer.index, x, keys.again(), batch)
                programs.set_training(True)
        watch.end()
        result = _Result(y, dx, into.flat, evaluated)
        self._refuse_not_finite(layer, sample, result, into)
        return result

    def _check_addition(self, layer: LayerLayout, values: ValueBuffer, watch: LayerWatch, result: _Result) -> None:
        """Refuse a layer whose gradient, added to that of another micro-batch, is not the sum of the two.

        Workers let autograd add gradients to the buffer of another micro-batch (`gradient_reduction`), and it depends
        on the mesh to which one. If a layer makes autograd compute a gradient in two parts, it adds them one by one,
        which gives other bits than adding their sum.

        Args:
            result: the result of the first micro-batch, in a buffer of its own.
        """
        if self._job.torch_dtype is not torch.float32 or layer.index < self._model.layout.first_trained:
            return  # autograd adds only in fp32, and only for layers that have a backward
        sums = GradientBuffer(layer, self._place)
        alone = [result.gradient[slot.start : slot.stop] for slot in layer.gradient_slots]
        # They stand for another micro-batch's gradient: numbers of about the same size, but in other places.
        others = [gradient.roll(1) for gradient in alone]
        sums.set([other.view(view.shape) for other, view in zip(others, sums.views, strict=True)])
        if layer.loss_block is not None:
            sums.loss.zero_()
        self._run(layer, values, watch, self._first, sums=sums)
        for slot, view, gradient, other in zip(layer.gradient_slots, sums.views, alone, others, strict=True):
            found, wanted = view.reshape(-1), other + gradient
            if not equal_bits(found, wanted):
                name, wrong = slot.parameter.name, int((bits_of(found) != bits_of(wanted)).sum())
                raise ModelError(
                    f"layer {layer.name} adds to the gradient of {name} more than once in a backward: {wrong} of "
                    f"{view.numel()} elements of a sum of two micro-batches differ",
                    rule="the gradient of a micro-batch is added as a whole: to which others a worker adds it depends "
                    "on the mesh",
                    where=name,
                    fix="use_reentrant=False for torch.utils.checkpoint.checkpoint; no backward() within a layer",
                )

    def _refuse_not_finite(self, layer: LayerLayout, sample: Sample, result: _Result, into: GradientBuffer) -> None:
        """Refuse results that are not finite with initial values, since no step would ever update the weights."""
        name, is_last = layer.name, layer.index == self._last
        y = tensors_of(result.y)
        if any(bool(one.isnan().any()) for one in y) or (is_last and not _finite(y[0])):
            what = "the loss after" if is_last else "the output of"
            what = f"{what} layer {name} is not finite for the first micro-batch, with initial values"
            raise self._not_finite(layer, sample, what)
        if is_last and layer.loss_block is not None and not 0 <= into.weight < math.inf:
            raise ModelError(
                f"the weight of loss() is {into.weight:g} for the first micro-batch",
                rule="the weights of all micro-batches are added, and the gradient is divided by their sum: each is 0 "
                "or more, and finite",
                where="loss(output, batch)",
                fix="return (sum, weight), the weight being how much the sum counts, such as mask.sum()",
            )
        wrong = [
            slot.parameter.name
            for slot, view in zip(layer.gradient_slots, into.views, strict=True)
            if not _finite(view)
        ]
        if result.dx is not None and not all(map(_finite, tensors_of(result.dx))):
            wrong.insert(0, "its input")
        if wrong:
            of = _listed(wrong)
            output = "though its output is" if all(map(_finite, y)) else "and its output has infinities"
            what = f"layer {name} gives gradients that are not finite, {output}: of {of}"
            raise self._not_finite(layer, sample, what)

    def _not_finite(self, layer: LayerLayout, sample: Sample, what: str) -> UserError:
        """The error for a layer whose results are not finite. It is a DataError if numbers of the batch are the cause.

        They can be if the layer's input is not finite either. The loss after the last layer also reads the batch
        itself.
        """
        x_is_finite = all(map(_finite, tensors_of(self._inputs[sample.number])))
        for name, values in leaves_of(sample.batch):
            if not _finite(values) and (not x_is_finite or layer.index == self._last):
                has = "NaN" if bool(values.isnan().any()) else "infinities"
                return DataError(
                    f"{name} has {has}{_of_samples(sample.ids, values)}: {what}",
                    rule=_FINITE,
                    where=name,
                    fix="correct these samples, or leave them out of the dataset; or put numbers in place of what is "
                    "missing, with torch.nan_to_num, in the dataset, in inputs(batch) or in loss(output, batch)",
                )
        if layer.index == 0 and not x_is_finite:
            return ModelError(
                f"inputs(batch) returns numbers that are not finite, of a batch whose numbers are: {what}",
                rule=_FINITE,
                where="inputs(batch)",
                fix="no division by 0 and no logarithm of it there, such as by the deviation of a constant; no number "
                "that is too large for runtime.dtype",
            )
        return ModelError(
            what,
            rule=_FINITE,
            where=f"layer {layer.name}",
            fix="torch.autograd.detect_anomaly() names the operation, such as a square root or a logarithm of 0, or "
            "a branch of torch.where; runtime.check_model=false trains it all the same",
        )

    def _refuse_without_gradient(self, layer: LayerLayout, module: nn.Module) -> None:
        """Refuse a layer with an output that has no graph: the layer and those before it would never be trained.

        Some parameters may be unused, and some tensors of a tuple may have no gradient. It is refused if none has one.
        """
        first = self._model.layout.first_trained
        until = self._model.layout.layers[first : layer.index + 1]
        if not any(one.gradient_slots for one in until):
            return  # nothing is trained up to here, for example if the layer only makes features of tokens
        x = leaf(self._inputs[self._first.number], passes_gradient=layer.index > first)
        keys = self._keys(layer, self._first)
        with torch.enable_grad(), naming_layer(layer.name, "check of its gradient", x):
            y = checked_output(call_layer(module, x, keys), self._job.torch_dtype, layer.name)
        if any(one.requires_grad for one in tensors_of(y)):
            return
        which = "it" if layer.index == first else "it and the layers before it"
        raise ModelError(
            f"no gradient comes back through layer {layer.name}: {which} would not be trained",
            rule="parameters are trained by the gradient of the loss, which comes back through all layers behind them",
            where=f"layer {layer.name}",
            fix="leave out detach(), data and torch.no_grad() in its forward; or freeze what is not to be trained: "
            "requires_grad=False, or optim.freeze",
        )

    def _check_loss(self, layer: LayerLayout, module: nn.Module) -> None:
        """Check that the loss and the metrics of a micro-batch are the sums of those of its two halves.

        The functions are called directly, without the worker's programs, which are made for whole micro-batches. If a
        micro-batch is a single sample, the two micro-batches together are used. A tensor of the output without dims is
        a term of the whole micro-batch, not of its samples, and is zero here.
        """
        size = self._job.microbatch_size
        samples = (self._first,) if size > 1 else (self._first, self._other)
        outputs = [_without_terms(self._output(layer, module, sample)) for sample in samples]
        number = size if size > 1 else len(samples)
        try:
            output, batch = (outputs[0], self._first.batch) if size > 1 else (_cat(outputs), _joined(samples))
        except RuntimeError as error:  # micro-batches of other shapes: there is nothing to halve
            self.loss_unchecked = shortened(error)
            return
        del outputs  # those of a language model are large
        cut, loss, metrics = number // 2, self._programs.loss, self._programs.metrics
        with torch.no_grad():
            # Initial outputs are nearly equal and nearly zero, so that a wrong term may be too small to be noticed.
            disturbed = map_tensors(_disturbed, output)
            self.loss_unchecked = check_loss(loss, output, batch, cut)
            check_loss(loss, disturbed, batch, cut)
            if not self.loss_unchecked:
                refuse_detached(loss, disturbed, batch)
            if metrics is not None:
                check_metrics(metrics, output, batch, cut)
                check_metrics(metrics, disturbed, batch, cut)

    def _output(self, layer: LayerLayout, module: nn.Module, sample: Sample) -> Activation:
        """The last layer's output for a micro-batch, before the loss; floating-point tensors in fp32."""
        x = leaf(self._inputs[sample.number], passes_gradient=False)
        keys = self._keys(layer, sample)
        with torch.no_grad(), naming_layer(layer.name, "check of the loss", x):
            y = call_layer(module, x, keys)
        return map_tensors(_in_fp32, checked_output(y, self._job.torch_dtype, layer.name))


# ---- two results


def _compare(layer: str, once: _Result, twice: _Result) -> None:
    """Refuse a layer whose two results for one micro-batch differ in a bit."""
    for (name, one), (_, other) in zip(once.named(), twice.named(), strict=True):
        if one.shape != other.shape or not equal_bits(one, other):
            raise ModelError(
                f"layer {layer} gave other results for the same micro-batch: {difference_of(name, one, other)}",
                rule=SAME_RESULT,
                where=f"layer {layer}",
                fix="no state that is kept between calls, no time, no random numbers but keyed ones "
                "(KeyedDropout, keys.seed, keys.step, keys.sample_ids), no operation that torch calls nondeterministic",
            )


def _refuse_other_masks(layer: str, uses: Mapping[int, int], keys: Keys) -> None:
    """Refuse a layer that draws dropout masks in its backward: its gradient belongs to other masks than its output.

    This is the same on every mesh and at every time, so no comparison of results shows it.

    Args:
        uses: the uses of the keys after the forward.
        keys: the keys of the run, after the backward.
    """
    if keys.uses != uses:
        number = sum(keys.uses.values()) - sum(uses.values())
        raise ModelError(
            f"layer {layer} draws {number} more {'mask' if number == 1 else 'masks'} of KeyedDropout in its backward, "
            "other ones than in its forward",
            rule="a mask has the number of its use within a call of the layer in its key: a function that "
            "torch.utils.checkpoint runs a second time counts on, and its gradient would be that of other masks",
            where=f"layer {layer}",
            fix="keys.checkpoint(function, x) in place of torch.utils.checkpoint.checkpoint(function, x, keys); or a "
            "plain call, with runtime.activation_checkpointing=true, which computes whole layers again",
        )


def _difference_of_outputs(before: Activation, now: Activation) -> str:
    """How two outputs of a layer differ, in words; "" if they have the same bits."""
    pairs = zip(tensors_of(before), tensors_of(now), strict=True)
    return next((difference_of("its output", one, other) for one, other in pairs if not equal_bits(one, other)), "")


# ---- tensors


def fill_initial(values: ValueBuffer, model: LocalModel, seed: int) -> None:
    """Fill a layer's buffer with the initial values of all its parameters, including tied ones that others own."""
    layers = model.layout.layers
    for block in values.layout.blocks:
        owned = block.slots
        if block.source is not None:  # a tied parameter: the owner's block has the same slots
            owner, first_page = block.source
            owned = next(b for b in layers[owner].blocks if b.first_page == first_page).slots
        for slot, own in zip(block.slots, owned, strict=True):
            name, size = own.parameter.name, own.parameter.num_elements
            values.flat[slot.start : slot.stop].copy_(model.initial(seed, name, 0, size))


def _named(name: str, value: Activation) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an activation with their names for errors."""
    if isinstance(value, Tensor):
        yield name, value.detach()
    else:
        yield from ((f"{name} [{number}]", tensor.detach()) for number, tensor in enumerate(value))


def _cat(values: Sequence[Activation]) -> Activation:
    """The activations of several micro-batches as one."""
    columns = zip(*map(tensors_of, values), strict=True)
    return like(values[0], [torch.cat(column) if column[0].ndim else column[0] for column in columns])


def _without_terms(value: Activation) -> Activation:
    """The output with zeros in place of tensors without dims, which are terms of the whole micro-batch."""
    return value if isinstance(value, Tensor) else map_tensors(lambda t: t if t.ndim else torch.zeros_like(t), value)


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _disturbed(tensor: Tensor) -> Tensor:
    return _waves(tensor).mul_(0.5).add_(1.0) if tensor.is_floating_point() and tensor.ndim else tensor


def _made_up_gradient(y: Activation) -> Activation:
    """A made-up gradient of an output: always the same numbers, of which no two neighbours are equal."""
    made = [(_GRADIENT * _waves(one)).to(one.dtype) for one in ([y] if isinstance(y, Tensor) else graded(y))]
    return made[0] if isinstance(y, Tensor) else tuple(made)


def _waves(like: Tensor) -> Tensor:
    """A tensor of the same shape with fixed numbers from -1 to 1, fp32."""
    return torch.arange(like.numel(), dtype=torch.float32).mul_(0.7).cos_().view(like.shape).to(like.device)


def _joined(samples: Sequence[Sample]) -> Any:
    columns = zip(*([leaf for _, leaf in leaves_of(sample.batch)] for sample in samples), strict=True)
    return with_leaves(samples[0].batch, [torch.cat(column) if column[0].ndim else column[0] for column in columns])


def _of_samples(ids: np.ndarray, values: Tensor) -> str:
    """Which samples of a micro-batch have numbers that are not finite, in words; "" if this is not known."""
    if not values.ndim or len(values) != len(ids):
        return ""
    wrong = ids[~values.isfinite().reshape(len(ids), -1).all(1).cpu().numpy()]
    return f", of sample{'s' if len(wrong) > 1 else ''} {_listed(wrong)}"


def _listed(values: Sequence[object] | np.ndarray) -> str:
    """The first four values in words, and "..." if there are more."""
    return ", ".join(map(str, values[:4])) + (", ..." if len(values) > 4 else "")


def _finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


# ---- around a layer


@contextmanager
def _bound(programs: StagePrograms, layer: LayerLayout, values: ValueBuffer) -> Iterator[None]:
    """Context in which one layer is bound to the programs. None is bound afterwards."""
    programs.bind({layer.index: values.module}, {layer.index: values})
    try:
        yield
    finally:
        programs.bind({}, {})
