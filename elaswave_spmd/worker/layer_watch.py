"""The watch over one copy of a layer: comparisons before and after each run of what the layer must not change.

A layer must not keep state from one call to the next. The one exception is what its first call sets for good and is the
same for any micro-batch, such as a table that it computes once. So a copy may change its own buffers and attributes
during its first micro-batch, and nothing after that; it must never change its parameters. What it has set is compared
with what another copy has set whose first micro-batch was a different one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from elaswave_spmd.determinism import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.worker.buffers import ValueBuffer

SAME_RESULT = "a micro-batch has the same result on every worker, whatever ran before, and when it is computed again"
_SETTINGS = (
    "get_num_threads",
    "is_grad_enabled",
    "get_default_dtype",
    "get_deterministic_debug_mode",
    "get_float32_matmul_precision",
    "is_autocast_enabled",
)
"""Functions of torch that return settings of the process, on which all later computations depend."""

_IN_PLACE = ("in-place operation", "inplace operation")  # in torch's own errors for changes in place that it detects
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
class LayerState:
    """Everything besides its parameters that a layer could keep in itself.

    Args:
        tensors: buffers, and attributes that are tensors, by name.
        numbers: attributes that are numbers or strings, by name.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, object]

    @classmethod
    def of(cls, module: nn.Module, layer: str, *, copy: bool) -> LayerState:
        """The state of a layer now.

        Args:
            layer: the name of the layer, with which the names in the state begin.
            copy: True to copy the tensors, so that the state stays as it is when the layer changes them in place.
        """
        tensors, numbers = {}, {}
        for path, one in module.named_modules(prefix=layer):
            own = [(name, value) for name, value in vars(one).items() if name != "training"]
            for name, value in [*one.named_buffers(recurse=False), *own]:
                if isinstance(value, Tensor):
                    tensors[f"{path}.{name}"] = value.detach().clone() if copy else value.detach()
                elif isinstance(value, bool | int | float | str):
                    numbers[f"{path}.{name}"] = value
        return cls(tensors, numbers)

    def difference(self, now: LayerState) -> str | None:
        """The name of the first value that differs now, or None. Values that are new do not count."""
        for name, old in self.tensors.items():
            if name not in now.tensors or not equal_bits(old, now.tensors[name]):
                return name
        for name, old in self.numbers.items():
            if name in now.numbers and not _same(old, now.numbers[name]):
                return name
        return None


class LayerWatch:
    """Comparisons around each run of one copy of a layer: `begin`, `check_settled` at any point of the run, `end`.

    Args:
        values: the buffer of the copy's parameters, with initial values; it has the module as well.
        place: the device that the layer runs on.
    """

    def __init__(self, values: ValueBuffer, place: torch.device) -> None:
        self._values = values
        self._place = place
        self._layer = values.layout.name
        self._made = LayerState.of(values.module, self._layer, copy=True)
        self._parameters: Tensor | None = None  # during a run, a copy from before it
        self._given: dict[str, tuple[Tensor, Tensor]] = {}  # name -> (the tensor, a copy of it)
        self._process: dict[str, object] = {}
        self._settled: LayerState | None = None

    @property
    def settled(self) -> LayerState:
        """The copy's own state after its first micro-batch, which must have been run."""
        assert self._settled is not None
        return self._settled

    def begin(self, given: Mapping[str, Tensor], keys: Keys) -> None:
        """Note that a run begins: copy what the layer must not change.

        Args:
            given: the tensors that the layer gets, by their names for errors.
            keys: the keys of the run, which must not change either, as other layers of the micro-batch share them.
        """
        self._parameters = self._values.flat.detach().clone()
        self._process = process_state(self._place)
        of_keys = {f"keys.{name}": getattr(keys, name) for name in ("seed", "step", "layer", "sample_ids")}
        for name, value in {**given, **of_keys}.items():
            self.give(name, value)

    def give(self, name: str, value: Tensor) -> None:
        """Note that the layer gets another tensor, which it must not change. `name` is its name for errors."""
        self._given[name] = value, value.clone()

    def check_settled(self) -> None:
        """Compare the layer's own state with that after its first micro-batch. May be called at any point of a run.

        Raises:
            ModelError: the state has changed since.
        """
        if self._settled is None:
            return
        now = LayerState.of(self._values.module, self._layer, copy=False)
        if (name := self._settled.difference(now)) is not None:
            raise self._change(name, self._settled, now)

    def end(self) -> None:
        """Note that the run has ended: compare everything with what it was before.

        Raises:
            ModelError: the layer has changed its parameters, its own state, something that it was given, a random
                generator or a setting of torch.
        """
        layer = f"layer {self._layer}"
        refuse_process(layer, _KEYED, self._process, process_state(self._place), where=layer)
        _refuse_other_parameters(self._values)
        if self._parameters is None or not equal_bits(self._parameters, self._values.flat):
            raise _parameters_changed(self._layer, "changes its parameters")
        self._parameters = None  # large
        self.check_settled()
        if self._settled is None:
            self._settled = LayerState.of(self._values.module, self._layer, copy=True)
        for name, (value, before) in self._given.items():
            if not equal_bits(before, value):
                raise _in_place(self._layer, f"layer {self._layer} changes {name} in place")
        self._given.clear()

    def refuse_difference(self, other: LayerState) -> None:
        """Compare the states of this copy and another one after their first micro-batches, which were different ones.

        Raises:
            ModelError: the states differ, so the layer keeps something of a micro-batch.
        """
        if (name := other.difference(self.settled)) is not None:
            raise self._change(name, other, self.settled)

    def _change(self, name: str, before: LayerState, now: LayerState) -> ModelError:
        what = f"layer {self._layer} changes {name} while it computes"
        if name in before.tensors:
            return ModelError(what, rule=_STATELESS, where=name, fix=_CONSTANT)
        old, new = before.numbers[name], now.numbers[name]
        made = self._made.numbers.get(name, new)
        return ModelError(
            f"{what}, from {old if _same(made, new) else made!r} to {new!r}",
            rule=_STATELESS,
            where=name,
            fix="leave it out; keys.step is the number of the step",
        )


def _refuse_other_parameters(values: ValueBuffer) -> None:
    """Refuse a layer that has replaced a parameter, which updates would not reach, or changed which are frozen."""
    layer = values.layout
    now = dict(values.module.named_parameters(prefix=layer.name, remove_duplicate=False))
    for slot, bound in zip(layer.slots, values.parameters, strict=True):
        name, parameter = slot.parameter.name, now.get(slot.parameter.name)
        if parameter is None or parameter is not bound or parameter.data_ptr() != values.flat[slot.start :].data_ptr():
            raise _parameters_changed(layer.name, f"puts another tensor in the place of {name}")
        if parameter.requires_grad == slot.parameter.frozen:
            raise ModelError(
                f"layer {layer.name} sets requires_grad={parameter.requires_grad} of {name} while it computes",
                rule="what is frozen is so for the whole run: it has no gradient and no optimizer state",
                where=name,
                fix='in the constructor, or optim.freeze="..."; .detach() for one use of a parameter in forward',
            )


def _parameters_changed(layer: str, what: str) -> ModelError:
    return ModelError(
        f"layer {layer} {what} while it computes",
        rule="parameters are views of a flat buffer, and change by updates alone, after a step",
        where=f"layer {layer}",
        fix="compute with a changed copy: w = self.weight.clamp(-1, 1), F.linear(x, w); no max_norm in an embedding",
    )


# ---- what all layers of a process share


def process_state(place: torch.device) -> dict[str, object]:
    """The states of the process's own random generators, which are not keyed, and settings of torch, by name."""
    found: dict[str, object] = {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }
    if place.type != "cpu" and (state := getattr(torch.get_device_module(place), "get_rng_state", None)) is not None:
        found[f"torch's generator of {place}"] = state(place).cpu().numpy().tobytes()
    return found | {f"torch.{name}()": getattr(torch, name)() for name in _SETTINGS}


def refuse_process(
    who: str, draw: str, before: Mapping[str, object], after: Mapping[str, object], *, where: str
) -> None:
    """Refuse a layer or function that has drawn from a generator without keys, or has changed a setting of torch.

    Args:
        who: the layer or function that has run, in words.
        draw: how it should draw random numbers; the fix in the error.
        before, after: `process_state` before and after it ran.
        where: as in `UserError`.

    Raises:
        ModelError: a state or setting differs.
    """
    changed = [name for name, state in before.items() if state != after[name]]
    if drawn := [name for name in changed if not name.endswith("()")]:
        raise ModelError(
            f"{who} draws from {' and '.join(drawn)}",
            rule=f"random numbers are keyed by seed, step, sample and layer: {SAME_RESULT}",
            where=where,
            fix=draw,
        )
    for name in changed:
        raise ModelError(
            f"{who} changes {name} while it computes, from {before[name]} to {after[name]}",
            rule="settings of torch are those of the process: the layers that come next compute otherwise",
            where=where,
            fix="only inside a with, such as with torch.no_grad()",
        )


# ---- in place


@contextmanager
def no_in_place(layer: str) -> Iterator[None]:
    """Context in which torch's own errors about changes in place are replaced by a ModelError that names the layer."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in _IN_PLACE):
            first = str(error).splitlines()[0]
            what = f"layer {layer} changes a tensor in place that its backward needs ({first})"
            raise _in_place(layer, what) from error
        raise


def _in_place(layer: str, what: str) -> ModelError:
    return ModelError(
        what,
        rule="a layer leaves what it is given as it is: others read it too, and a loss makes them read it again",
        where=f"layer {layer}",
        fix="x = x + y in place of x += y, x.relu() in place of x.relu_()",
    )


# ---- tensors and numbers


def bits_of(value: Tensor) -> Tensor:
    """The bits of a tensor as integers, so that NaN is equal to itself and -0.0 is not equal to 0.0."""
    value = value.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
    return value.contiguous().view(integer) if value.is_floating_point() and integer is not None else value


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have the same dtype, shape and bits."""
    return one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other))


def difference_of(name: str, one: Tensor, other: Tensor) -> str:
    """How two results that do not have equal bits differ, in words."""
    if one.shape != other.shape:
        return f"{name} had the shape {list(one.shape)}, then {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"{name} was {one.dtype}, then {other.dtype}"
    wrong = int((bits_of(one) != bits_of(other)).sum())
    return f"{wrong} of {one.numel()} elements of {name} differ" if one.ndim else f"{name} was {one}, then {other}"


def _same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)  # both are NaN
