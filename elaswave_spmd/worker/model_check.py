"""The check of a model before the first step: is a micro-batch's result a function of the micro-batch alone?

Everything that a run promises rests on that: a micro-batch may be computed by any worker, after any other one, and
again after a loss. So before a worker is ready each *kind* of layer is run forward and backward on one micro-batch, by
the worker's own programs on its own device, and then once more by another copy of the layer that has run another
micro-batch before. What differs, what changed meanwhile (generators, buffers, inputs) and what is not finite is refused
with the layer, what was seen and the fix. `check_loss` holds the loss of a micro-batch to the losses of its halves.

A worker cannot see what it does alike at all times: a number of its own, the order of a set, a library of its machine.
So each reports digests of its results, which the controller compares (controller/model_checks.py), and workers of odd
rank run the two micro-batches in the other order: a value that the first micro-batch leaves behind for good differs
between the two.

Nothing is left behind: the copies of layers are dropped, the programs are as before, and no key of a step is used up.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys, sample_ids
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import Batch
from elaswave_spmd.sharding.layout import LayerLayout
from elaswave_spmd.worker.buffers import GradientBuffer, ValueBuffer
from elaswave_spmd.worker.context import LocalModel
from elaswave_spmd.worker.microbatches import to_batch
from elaswave_spmd.worker.profiling import LayerMemory
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms, checked_output, naming_layer
from elaswave_spmd.worker.spec import Job

DIGEST_BYTES = 16
_LOSS_TOLERANCE = 1e-3  # relative, in fp32: sums of other lengths are rounded otherwise, a mean is off by a factor
_GRADIENT = 1e-3  # size of the made-up gradient of a layer's output, about what training has
_IN_PLACE = ("in-place operation", "inplace operation")  # what torch says of the two mistakes below

_SAME = "a micro-batch has the same result on every worker, whatever ran before, and when it is computed again"
_STATELESS = "a layer keeps nothing from one call to the next: its calls come in another order on every mesh"
_KEYED = (
    "KeyedDropout(p), called drop(x, keys); other noise from a torch.Generator seeded by keys.seed, keys.step, "
    "keys.layer and one of keys.sample_ids, row by row"
)
_CONSTANT = (
    "make it a constant buffer that the constructor fills; compute in forward what depends on the input, "
    "and train what is to be learned, as an nn.Parameter"
)


@dataclass(frozen=True)
class LayerCheck:
    """The result of one kind of layer.

    Args:
        layer: number of the first layer of its kind.
        count: layers of the kind.
        kept_bytes: what one micro-batch keeps of the layer until its backward.
        output_bytes: of its output for one micro-batch.
        digest: of outputs and gradients of both micro-batches, as they are trained; not of validations, which a run
            that is resumed may do otherwise.
    """

    layer: int
    count: int
    kept_bytes: int
    output_bytes: int
    digest: bytes


@dataclass(frozen=True)
class ModelCheck:
    """A model that has passed: how long that took, in seconds, and the result of each kind of layer."""

    seconds: float
    layers: tuple[LayerCheck, ...]


@dataclass(frozen=True)
class Sample:
    """One of the two micro-batches: its number, its ids of samples and the step that they are of."""

    number: int
    step: int
    ids: np.ndarray
    batch: Batch


@dataclass(frozen=True)
class _Result:
    """A layer's results for one micro-batch; `evaluated` is None where the run does not validate."""

    y: Tensor
    dx: Tensor | None
    gradient: Tensor
    evaluated: Tensor | None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors with their names for a user."""
        yield "output", self.y
        if self.dx is not None:
            yield "the gradient of its input", self.dx
        yield "the gradients of its parameters", self.gradient
        if self.evaluated is not None:
            yield "its output in a validation", self.evaluated

    def digest(self) -> bytes:
        """A hash of all bits that are of training."""
        hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for value in (self.y, self.gradient, *(() if self.dx is None else (self.dx,))):
            hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return hashed.digest()


def check_model(
    model: LocalModel,
    job: Job,
    data: Batches,
    place: torch.device,
    *,
    rank: int = 0,
    checked: Callable[[str], None] = lambda layer: None,
) -> ModelCheck:
    """Check each kind of layer with the programs of a worker, which run no layer meanwhile.

    Args:
        model: layers, initial values and programs.
        data: the training split.
        place: where parameters, inputs and outputs lie.
        rank: of the worker; those of odd rank begin with the other micro-batch.
        checked: called with the name of each layer that has passed.

    Raises:
        ModelError: the model breaks the promise of equal bits.
        Exception: whatever the model's code raises, with a note that names the layer.
    """
    began = time.perf_counter()
    samples = _samples(job, data, place)
    check = _Check(model, job, place, samples if rank % 2 == 0 else samples[::-1])
    try:
        found = check.run(checked)
    finally:
        model.programs.bind({}, {})
        model.programs.memory = LayerMemory()  # layers are measured when they train, too
    return ModelCheck(time.perf_counter() - began, found)


def _samples(job: Job, data: Batches, place: torch.device) -> tuple[Sample, Sample]:
    """The first micro-batch of the first step, and another one: the last of that step, or the first of the next."""
    size, last = job.microbatch_size, job.num_microbatches - 1
    found = []
    for number, (step, microbatch) in enumerate(((1, 0), (1, last) if last else (2, 0))):
        slots = microbatch * size + np.arange(size)
        ids = sample_ids(job.seed, step, job.global_batch, len(data), slots)
        found.append(Sample(number, step, ids, to_batch(data, ids, place)))
    return found[0], found[1]


class _Check:
    """One check, layer by layer. `first` is the micro-batch that is run twice, `other` the one in between."""

    def __init__(self, model: LocalModel, job: Job, place: torch.device, samples: Sequence[Sample]) -> None:
        self._model = model
        self._job = job
        self._place = place
        self._programs = model.programs
        self._first, self._other = samples
        self._inputs = {sample.number: sample.batch.tokens for sample in samples}
        self._last = len(model.layout.layers) - 1

    def run(self, checked: Callable[[str], None]) -> tuple[LayerCheck, ...]:
        """Run every layer whose kind is new on the outputs of the layers before it."""
        # Kind -> (its first layer, the outputs of that), number of layers so far. A layer that is like an earlier one
        # and gets an input of the same form is not run again: its output has the form of that one's.
        known: dict[object, tuple[LayerCheck, dict[int, Tensor]]] = {}
        counts: dict[object, int] = {}
        for layer in self._model.layout.layers:
            (module,) = self._model.make_modules([layer.index]).values()
            x = next(iter(self._inputs.values()))
            kind = (kind_of(module), x.dtype, tuple(x.shape), layer.index == self._last, self._backward_of(layer))
            counts[kind] = counts.get(kind, 0) + 1
            if kind not in known:
                known[kind] = self._check_layer(layer, module)
                checked(layer.name)
            self._inputs = known[kind][1]
        return tuple(
            LayerCheck(one.layer, counts[kind], one.kept_bytes, one.output_bytes, one.digest)
            for kind, (one, _) in known.items()
        )

    def _backward_of(self, layer: LayerLayout) -> int:
        """Which backward a layer has: none before the first trained parameter, no gradient of its input there."""
        first = self._model.layout.first_trained
        return (layer.index > first) - (layer.index < first) if first else 1

    def _check_layer(self, layer: LayerLayout, module: nn.Module) -> tuple[LayerCheck, dict[int, Tensor]]:
        """Check one layer. Returns its row, and its output by micro-batch: the next layer's input."""
        compiled = self._programs.num_compiled
        first, other = self._first, self._other
        once = self._run_once(layer, module, first)
        ((_, kept, output),) = self._programs.memory.pop_rows()
        # A copy of its own, which has run another micro-batch: whatever the layer keeps is another thing now.
        (again,) = self._model.make_modules([layer.index]).values()
        values = self._values(layer, again)
        with _bound(self._programs, layer, values):
            between = self._run(layer, values, other)
            digests, outputs = {other.number: between.digest()}, {other.number: between.y}
            del between  # a layer's gradients may be large
            twice = self._run(layer, values, first)
            if layer.index == self._last:
                self._check_loss(layer, again)
        _compare(layer.name, once, twice)
        if self._programs.num_compiled > compiled:
            raise ModelError(
                f"layer {layer.name} was compiled again for a micro-batch like the one before",
                rule="all programs of a layer are compiled before training, and serve all micro-batches",
                fix="read nothing in forward that changes from call to call: a counter, a list that grows",
            )
        digests[first.number], outputs[first.number] = twice.digest(), twice.y
        both = hashlib.blake2b(digests[0] + digests[1], digest_size=DIGEST_BYTES).digest()
        return LayerCheck(layer.index, 1, kept, output, both), outputs

    def _run_once(self, layer: LayerLayout, module: nn.Module, sample: Sample) -> _Result:
        """Run one micro-batch with a copy of the layer that serves no other."""
        values = self._values(layer, module)
        with _bound(self._programs, layer, values):
            return self._run(layer, values, sample)

    def _values(self, layer: LayerLayout, module: nn.Module) -> ValueBuffer:
        """A buffer with the layer's initial values, which the module's parameters become views of."""
        values = ValueBuffer(layer, module, self._job.torch_dtype, self._place)
        values.flat.zero_()
        fill_initial(values, self._model, self._job.seed)
        return values

    def _run(self, layer: LayerLayout, values: ValueBuffer, sample: Sample) -> _Result:
        """Run one micro-batch forward and backward, and see that nothing else has changed and all is finite."""
        x, batch = self._inputs[sample.number], sample.batch
        given = {"its input": x, "batch.tokens": batch.tokens, "batch.targets": batch.targets}
        before = {name: value.clone() for name, value in given.items()}
        state, generators = _State.of(values, copy=True), _generators(self._place)
        into = GradientBuffer(layer, self._place)
        keys = Keys.make(self._job.seed, sample.step, sample.ids, layer.index, self._place)
        programs, dy, dy_before = self._programs, None, None
        with _no_in_place(layer.name):
            y = programs.forward(layer.index, sample.number, x, keys, batch)
            if layer.index != self._last:
                dy = _made_up_gradient(y)
                dy_before = dy.clone()
            dx = programs.backward(layer.index, sample.number, dy, into, add=False, batch=batch)
            evaluated = None
            if self._job.validates:
                programs.set_training(False)
                evaluated = programs.evaluate(layer.index, x, keys.again(), batch)
                programs.set_training(True)
        _refuse_draws(layer.name, generators, _generators(self._place))
        _refuse_changes(layer.name, state, _State.of(values, copy=False))
        if dy is not None and dy_before is not None:
            given, before = (
                given | {"the gradient of its output": dy},
                before | {"the gradient of its output": dy_before},
            )
        for name, value in given.items():
            if not _equal(value, before[name]):
                raise _in_place(layer.name, f"layer {layer.name} changes {name} in place")
        result = _Result(y, dx, into.flat, evaluated)
        self._refuse_not_finite(layer, values, result, into)
        return result

    def _refuse_not_finite(
        self, layer: LayerLayout, values: ValueBuffer, result: _Result, into: GradientBuffer
    ) -> None:
        """Refuse numbers that are not finite with initial values: no step would ever update the weights."""
        name, is_last = layer.name, layer.index == self._last
        y = result.y
        if bool(y.isnan().any()) or (is_last and not bool(y.isfinite())):
            what = "the loss after" if is_last else "the output of"
            raise _not_finite(name, f"{what} layer {name} is not finite for the first micro-batch, with initial values")
        wrong = [
            slot.parameter.name
            for slot, view in zip(layer.gradient_slots, into.views, strict=True)
            if not _finite(view)
        ]
        if result.dx is not None and not _finite(result.dx):
            wrong.insert(0, "its input")
        if wrong:
            of = ", ".join(wrong[:4]) + (", ..." if len(wrong) > 4 else "")
            seen = f"layer {name} gives gradients that are not finite, though its output is: of {of}"
            raise _not_finite(name, seen)

    def _check_loss(self, layer: LayerLayout, module: nn.Module) -> None:
        """Hold the loss of a micro-batch to the sum of the losses of its halves.

        It is computed without the worker's programs, which are made for whole micro-batches; `loss()` alone is checked.
        Micro-batches of one sample use both samples.
        """
        outputs, batches = [], []
        for sample in (self._first, self._other):
            x = self._inputs[sample.number].detach()
            keys = Keys.make(self._job.seed, sample.step, sample.ids, layer.index, self._place)
            with torch.no_grad(), naming_layer(layer.name, "check of the loss", x):
                y = module(x, keys)
            outputs.append(checked_output(y, self._job.torch_dtype, layer.name).float())
            batches.append(sample.batch)
        size = self._job.microbatch_size
        if size == 1:
            output, batch, size = torch.cat(outputs), _joined(batches), 2
        else:
            output, batch = outputs[0], batches[0]
        loss = self._programs.loss
        with torch.no_grad(), naming_layer(layer.name, "check of the loss", output):
            check_loss(loss, output, batch, size // 2)
            # Initial outputs are nearly equal and nearly zero, where many a term is too small to be seen.
            made_up = 1.0 + 0.5 * _waves(output)
            try:
                check_loss(loss, made_up, batch, size // 2)
            except ModelError:
                raise
            except Exception:
                return  # a loss may take nothing but what its model puts out: it has shown what it can


def check_loss(loss: Callable[[Tensor, Batch], Tensor], output: Tensor, batch: Batch, cut: int) -> None:
    """Hold the loss of a batch to the sum of the losses of samples [0, cut) and of the others.

    Args:
        output: of the last layer, fp32 [samples, ...].

    Raises:
        ModelError: they differ by more than rounding explains.
    """
    whole = float(loss(output, batch))
    if not math.isfinite(whole):
        return  # with the model's own outputs that has been refused by now
    parts = [
        float(loss(output[part].contiguous(), Batch(batch.tokens[part], batch.targets[part])))
        for part in (slice(None, cut), slice(cut, None))
    ]
    if abs(whole - sum(parts)) <= _LOSS_TOLERANCE * max(abs(whole), sum(map(abs, parts))):
        return
    raise ModelError(
        f"loss() of {len(output)} samples is {whole:.6g}, and of their two halves {parts[0]:.6g} + {parts[1]:.6g}",
        rule="the loss of a micro-batch is the sum over its samples and tokens: the loss of a step is added up from "
        "micro-batches, and divided by its tokens there",
        where="loss(output, batch)",
        fix='end it with .sum(), or reduction="sum", in place of a mean; let each sample count by itself',
    )


# ---- kinds of layers


def kind_of(module: nn.Module) -> object:
    """A value that is equal for layers of the same code, parameters and settings: one of them stands for all.

    What cannot be compared makes a layer a kind of its own.
    """
    return tuple((path, type(one), _attributes(one)) for path, one in module.named_modules())


def _attributes(module: nn.Module) -> object:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    forms = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    return forms, tuple((name, _comparable(value)) for name, value in own.items())


def _comparable(value: Any) -> object:
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return type(value), tuple((str(name), _comparable(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_comparable, value))
    try:
        hash(value)
    except TypeError:
        return object()  # equal to nothing else
    return type(value), value


# ---- what is compared before and after


@dataclass(frozen=True)
class _State:
    """Everything that a layer could change in itself.

    Args:
        tensors: parameters (the whole buffer), buffers and attributes that are tensors, by their names.
        numbers: attributes that are numbers or texts.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, object]

    @classmethod
    def of(cls, values: ValueBuffer, *, copy: bool) -> _State:
        """What a bound layer has now; `copy`: it may change from now on."""
        tensors, numbers = {"its parameters": values.flat.detach()}, {}
        for path, module in values.module.named_modules(prefix=values.layout.name):
            own = [(name, value) for name, value in vars(module).items() if name != "training"]
            for name, value in [*module.named_buffers(recurse=False), *own]:
                if isinstance(value, Tensor):
                    tensors[f"{path}.{name}"] = value.detach()
                elif isinstance(value, bool | int | float | str):
                    numbers[f"{path}.{name}"] = value
        return cls({name: value.clone() for name, value in tensors.items()} if copy else tensors, numbers)


def _refuse_changes(layer: str, before: _State, after: _State) -> None:
    """Refuse a layer that has changed itself. What it has made meanwhile, such as a table, it may keep."""
    for name, old in before.tensors.items():
        if (new := after.tensors.get(name)) is None or not _equal(old, new):
            raise ModelError(
                f"layer {layer} changes {name} while it computes", rule=_STATELESS, where=name, fix=_CONSTANT
            )
    for name, old in before.numbers.items():
        if name in after.numbers and after.numbers[name] != old:
            raise ModelError(
                f"layer {layer} changes {name} while it computes, from {old!r} to {after.numbers[name]!r}",
                rule=_STATELESS,
                where=name,
                fix="leave it out; keys.step is the number of the step",
            )


def _generators(place: torch.device) -> dict[str, object]:
    """The states of the generators that nobody has keyed."""
    found: dict[str, object] = {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }
    if place.type != "cpu" and (state := getattr(torch.get_device_module(place), "get_rng_state", None)) is not None:
        found[f"torch's generator of {place}"] = state(place).cpu().numpy().tobytes()
    return found


def _refuse_draws(layer: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    drawn = [name for name, state in before.items() if state != after[name]]
    if drawn:
        raise ModelError(
            f"layer {layer} draws from {' and '.join(drawn)}",
            rule=f"random numbers are keyed by seed, step, sample and layer: {_SAME}",
            where=f"layer {layer}",
            fix=_KEYED,
        )


def _compare(layer: str, once: _Result, twice: _Result) -> None:
    """Refuse a layer whose two results for one micro-batch differ in a bit."""
    for (name, one), (_, other) in zip(once.named(), twice.named(), strict=True):
        if one.shape != other.shape or not _equal(one, other):
            raise ModelError(
                f"layer {layer} gave other results for the same micro-batch: {_difference(name, one, other)}",
                rule=_SAME,
                where=f"layer {layer}",
                fix="no state that is kept between calls, no time, no random numbers but keyed ones "
                "(KeyedDropout, keys.seed, keys.step, keys.sample_ids), no operation that torch calls nondeterministic",
            )


def _difference(name: str, one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"{name} had the shape {list(one.shape)}, then {list(other.shape)}"
    wrong = int((_bits(one) != _bits(other)).sum())
    return f"{wrong} of {one.numel()} elements of {name} differ" if one.ndim else f"{name} was {one}, then {other}"


# ---- tensors


def fill_initial(values: ValueBuffer, model: LocalModel, seed: int) -> None:
    """Fill a layer's buffer with the initial values of all of its parameters, those that others own included."""
    layers = model.layout.layers
    for block in values.layout.blocks:
        owned = block.slots
        if block.source is not None:  # of a tie: the owner's block has the same slots
            owner, first_page = block.source
            owned = next(b for b in layers[owner].blocks if b.first_page == first_page).slots
        for slot, own in zip(block.slots, owned, strict=True):
            name, size = own.parameter.name, own.parameter.num_elements
            values.flat[slot.start : slot.stop].copy_(model.initial(seed, name, 0, size))


def _made_up_gradient(y: Tensor) -> Tensor:
    """A gradient in the form of an output, the same at all times, with no two neighbours alike."""
    return (_GRADIENT * _waves(y)).to(y.dtype)


def _waves(like: Tensor) -> Tensor:
    """Numbers from -1 to 1 in the shape of a tensor, fp32."""
    return torch.arange(like.numel(), dtype=torch.float32).mul_(0.7).cos_().view(like.shape).to(like.device)


def _joined(batches: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([b.tokens for b in batches]), torch.cat([b.targets for b in batches]))


def _bits(value: Tensor) -> Tensor:
    """The bits of a tensor as integers: NaN is equal to itself, and -0.0 is not 0.0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.detach().contiguous().view(integer) if value.dtype.is_floating_point else value.detach()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


# ---- around a layer


@contextmanager
def _bound(programs: StagePrograms, layer: LayerLayout, values: ValueBuffer) -> Iterator[None]:
    """Bind one layer to the programs, and none afterwards."""
    programs.bind({layer.index: values.module}, {layer.index: values})
    try:
        yield
    finally:
        programs.bind({}, {})


@contextmanager
def _no_in_place(layer: str) -> Iterator[None]:
    """Turn what torch says of a change in place, which names no layer, into the error of this check."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in _IN_PLACE):
            first = str(error).splitlines()[0]
            raise _in_place(
                layer, f"layer {layer} changes a tensor in place that its backward needs ({first})"
            ) from error
        raise


def _in_place(layer: str, what: str) -> ModelError:
    return ModelError(
        what,
        rule="a layer leaves what it is given as it is: others read it too, and a loss makes them read it again",
        where=f"layer {layer}",
        fix="x = x + y in place of x += y, x.relu() in place of x.relu_()",
    )


def _not_finite(layer: str, what: str) -> ModelError:
    return ModelError(
        what,
        rule="a step whose gradient is not finite is skipped: this model would skip its steps",
        where=f"layer {layer}",
        fix="torch.autograd.detect_anomaly() names the operation, such as a square root or a logarithm of 0, or "
        "a branch of torch.where; runtime.check_model=false trains it all the same",
    )
