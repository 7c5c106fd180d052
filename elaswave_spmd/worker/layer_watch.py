"""The watch over one copy of a layer: what the layer must leave as it is while it computes, before and after each run.

A layer keeps nothing from one call to the next but what its first call settles for good, whichever micro-batch came
first, such as a table. So a copy may change its own buffers and attributes during its first micro-batch, never its
parameters, and nothing from then on. That is compared with what a copy keeps whose first micro-batch was
another one.
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
"""Functions of torch that tell what all later computations of the process depend on."""

_IN_PLACE = ("in-place operation", "inplace operation")  # what torch says of the two mistakes that it sees itself
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
    """Everything that a layer could keep in itself besides parameters.

    Args:
        tensors: buffers, and attributes that are tensors, by their names.
        numbers: attributes that are numbers or texts.
    """

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, object]

    @classmethod
    def of(cls, module: nn.Module, layer: str, *, copy: bool) -> LayerState:
        """The state of a layer now; `copy`: it may change from now on."""
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
        """The name of the first value that is another one now. What is new may stay."""
        for name, old in self.tensors.items():
            if name not in now.tensors or not equal_bits(old, now.tensors[name]):
                return name
        for name, old in self.numbers.items():
            if name in now.numbers and not _same(old, now.numbers[name]):
                return name
        return None


class LayerWatch:
    """A comparison around each run of one copy of a layer: `begin`, `look` at any point of the run, `end`.

    Args:
        values: the copy and its parameters, with initial values.
        place: the device that computes.
    """

    def __init__(self, values: ValueBuffer, place: torch.device) -> None:
        self._values = values
        self._place = place
        self._layer = values.layout.name
        self._made = LayerState.of(values.module, self._layer, copy=True)
        self._parameters: Tensor | None = None  # a copy of before, during a run
        self._given: dict[str, tuple[Tensor, Tensor]] = {}  # name -> the tensor, a copy of before
        self._process: dict[str, object] = {}
        self._settled: LayerState | None = None

    @property
    def settled(self) -> LayerState:
        """The facts that the copy keeps of its first micro-batch, which has been run."""
        assert self._settled is not None
        return self._settled

    def begin(self, given: Mapping[str, Tensor], keys: Keys) -> None:
        """A run begins.

        Args:
            given: what the layer gets and must not change, by names for a user.
            keys: of the run; other layers of the micro-batch share them.
        """
        self._parameters = self._values.flat.detach().clone()
        self._process = process_state(self._place)
        of_keys = {f"keys.{name}": getattr(keys, name) for name in ("seed", "step", "layer", "sample_ids")}
        for name, value in {**given, **of_keys}.items():
            self.give(name, value)

    def give(self, name: str, value: Tensor) -> None:
        """The layer gets another tensor."""
        self._given[name] = value, value.clone()

    def check_settled(self) -> None:
        """Compare the layer's own state, at any point.

        Raises:
            ModelError: it has changed after the layer's first micro-batch.
        """
        if self._settled is None:
            return
        now = LayerState.of(self._values.module, self._layer, copy=False)
        if (name := self._settled.difference(now)) is not None:
            raise self._change(name, self._settled, now)

    def end(self) -> None:
        """The run has ended.

        Raises:
            ModelError: the layer has changed itself, or something else.
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
        """Compare what this copy and another one keep after their first micro-batches, which were different ones.

        Raises:
            ModelError: the layer keeps something of the micro-batch.
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
    """Refuse a layer that has exchanged its parameters, or what is frozen: updates would not reach the new ones."""
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
    """The states of the generators that nobody has keyed, by their names, and settings of torch."""
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
    """Refuse who has drawn from a generator that nobody has keyed, or has changed a setting of torch.

    Args:
        who: the layer or function that has run, in words.
        draw: how it gets its random numbers: the fix.
        before, after: `process_state`.
        where: as in `UserError`.

    Raises:
        ModelError: a state or setting is another one after than before.
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
    """Turn what torch says of a change in place, which names no layer, into an error that does."""
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
    """The bits of a tensor as integers: NaN is equal to itself, and -0.0 is not 0.0."""
    value = value.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
    return value.contiguous().view(integer) if value.is_floating_point() and integer is not None else value


def equal_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors have one dtype, one shape and the same bits."""
    return one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other))


def difference_of(name: str, one: Tensor, other: Tensor) -> str:
    """How two results with other bits differ, in words."""
    if one.shape != other.shape:
        return f"{name} had the shape {list(one.shape)}, then {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"{name} was {one.dtype}, then {other.dtype}"
    wrong = int((bits_of(one) != bits_of(other)).sum())
    return f"{wrong} of {one.numel()} elements of {name} differ" if one.ndim else f"{name} was {one}, then {other}"


def _same(one: object, other: object) -> bool:
    return one == other or (one != one and other != other)  # NaN
