"""Activations and their gradients. An activation is what one layer gives to the next: a tensor or a flat tuple of them.

Floating-point tensors are in the compute dtype, and others have the dtype in which the layer made them. All tensors,
and their gradients, are aligned and contiguous, with the strides that follow from their shapes (`in_plain_strides`).

Some tensors of a tuple may have no gradient: integers, and tensors that depend on no parameter and on no input with a
gradient, such as a mask. `requires_grad` marks the tensors that have one, and the gradient of an activation has one
tensor for each of them. A named tuple arrives at the next layer as a named tuple with the same fields.

Between stages a single tensor is sent as it is. The tensors of a tuple are sent together as bytes, and the message has
the dtype and shape of each.
"""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from elaswave_spmd.determinism.rng_keys import Keys
from elaswave_spmd.errors import ModelError
from elaswave_spmd.recovery.messages import ALIGNMENT, ITEM_BYTES, MOST_TENSORS, TensorForm, aligned

Activation: TypeAlias = Tensor | tuple[Tensor, ...]
"""The input or output of a layer, or the gradient of one."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def tensors_of(value: Activation) -> tuple[Tensor, ...]:
    """The tensors of an activation, or of a gradient."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def graded(value: Activation) -> tuple[Tensor, ...]:
    """The tensors of an activation that have a gradient."""
    if isinstance(value, Tensor):
        return (value,) if value.requires_grad else ()
    return tuple(tensor for tensor in value if tensor.requires_grad)


def like(value: Activation, tensors: Iterable[Tensor]) -> Activation:
    """An activation of the form of `value`, with other tensors."""
    if isinstance(value, Tensor):
        (tensor,) = tensors
        return tensor
    return _of_fields(_fields(value), tensors)


def map_tensors(function: Callable[[Tensor], Tensor], value: Activation) -> Activation:
    """An activation of the same form, whose tensors are the function's results for the tensors of `value`."""
    return function(value) if isinstance(value, Tensor) else like(value, map(function, value))


def num_bytes(value: Activation) -> int:
    """The size of all tensors, in bytes."""
    return value.nbytes if isinstance(value, Tensor) else sum(tensor.nbytes for tensor in value)


def in_words(value: object) -> str:
    """Dtypes and shapes in words, such as "float32[2, 16, 32]" or "(float32[2, 16, 32], bool[2, 16])"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    return f"an object of type {type(value).__name__}"


def forms_of(value: Activation) -> tuple[object, ...]:
    """A value that is equal for activations of the same form: field names, and of each tensor dtype, shape and
    `requires_grad`."""
    names = None if isinstance(value, Tensor) else _fields(value)
    return names, *((tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors_of(value))


# ---- between layers


def checked_output(y: object, dtype: torch.dtype, name: str) -> Activation:
    """Checks the output of a layer, and converts it to the form that the next layer takes.

    Args:
        y: the output.
        dtype: the compute dtype.
        name: the name of the layer.

    Returns:
        The output. Each tensor has plain strides, and floating-point tensors are in the compute dtype.

    Raises:
        ModelError: the output is neither a floating-point tensor nor a flat tuple of tensors.
    """
    if isinstance(y, Tensor) and y.is_floating_point():
        return in_plain_strides(y if y.dtype is dtype and y.is_contiguous() else y.to(dtype).contiguous())
    if isinstance(y, tuple) and (converted := in_compute_dtype(y, dtype)) is not None:
        return converted
    fix = "return (hidden, mask) or the like; integers only beside others, and numbers as tensors"
    if any(isinstance(one, Tensor) and one.is_complex() for one in (y if isinstance(y, tuple) else (y,))):
        fix = "return torch.view_as_real(y), and begin the next layer with torch.view_as_complex(x)"
    if isinstance(y, tuple) and any(isinstance(one, Keys) for one in y):
        fix = "def forward(self, x) with hidden, mask = x: a tuple comes as one argument, and the second one is keys"
    raise ModelError(
        f"layer {name} returned {described(y)}, which the next layer cannot be given",
        rule="a layer returns what the next one takes: a floating-point tensor, or a flat tuple (or named tuple) of "
        "tensors",
        where=f"layer {name}",
        fix=fix,
    )


def in_compute_dtype(value: object, dtype: torch.dtype) -> Activation | None:
    """A tensor, or a flat tuple of tensors, in the form of an activation; None if it is neither.

    Each tensor has plain strides. Floating-point tensors are in the compute dtype, others keep their dtype.
    """
    if isinstance(value, Tensor):
        return _converted(value, dtype) if value.dtype in _NAMES else None
    if (
        isinstance(value, tuple)
        and 0 < len(value) <= MOST_TENSORS
        and all(isinstance(one, Tensor) and one.dtype in _NAMES for one in value)
    ):
        return _of_fields(_fields(value), (_converted(one, dtype) for one in value))
    return None


def described(value: object) -> str:
    """A returned value in words: "a tensor int64[2, 16]", or "an object of type list"."""
    if isinstance(value, Tensor):
        return f"a tensor {in_words(value)}"
    if isinstance(value, tuple) and value and all(isinstance(one, Tensor) for one in value):
        return f"a tuple {in_words(value)}"
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in value) or 'nothing'}"
    return f"an object of type {type(value).__name__}"


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return in_plain_strides((tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous())


def in_plain_strides(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the strides that follow from its shape, as it arrives in another stage.

    In a contiguous tensor a dim of size 1 may have any stride, but torch chooses kernels by it. For example on CPUs a
    group norm or a 3 x 3 convolution of a tensor [8, 64, 1, 1] has other bits if its strides are those of
    channels_last.
    """
    shape = tensor.shape
    if 1 not in shape or tensor.stride() == (strides := _plain_strides(shape)):
        return tensor
    return tensor.as_strided(shape, strides)  # `view` would keep the strides that the tensor has


def in_own_memory(y: Activation, parameters: Tensor) -> Activation:
    """A layer's output, with copies in place of tensors that share memory with its parameters or are not aligned.

    Parameters are updated in place, and with ZeRO-3 their memory is freed after the layer has run, while the next layer
    or stage may need the output for longer. A tensor that begins in the middle of another one would arrive in another
    stage as an aligned copy, with which kernels may compute other bits (`HostDevice.from_host`).

    Args:
        y: the output.
        parameters: the flat buffer of the layer's parameters.
    """
    if isinstance(y, Tensor):
        return y if _is_aligned_alone(y, parameters) else y.clone()
    if all(_is_aligned_alone(one, parameters) for one in y):
        return y
    return like(y, (one if _is_aligned_alone(one, parameters) else one.clone() for one in y))


def _is_aligned_alone(tensor: Tensor, parameters: Tensor) -> bool:
    """True if a tensor begins where memory is allocated, and shares none with the parameters."""
    mine, theirs = tensor.untyped_storage().data_ptr(), parameters.untyped_storage().data_ptr()
    return tensor.data_ptr() % ALIGNMENT == 0 and (mine != theirs or not mine)


@lru_cache(maxsize=1024)
def _plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
    return tuple(strides)[::-1]


def handed_on(y: Activation) -> Activation:
    """A layer's output without its graph, for the next layer or stage. Tensors of a tuple that have a gradient stay
    marked."""
    if isinstance(y, Tensor):
        return y.detach()
    return like(y, (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in y))


def marked(y: Activation, marks: Sequence[bool]) -> Activation:
    """An output that was computed without a graph, with the tensors marked that would have a gradient with one.

    Args:
        marks: for each tensor of a tuple True if it has a gradient, as by `marks_of`.
    """
    if isinstance(y, Tensor):
        return y
    return like(y, (tensor.detach().requires_grad_(mark) for tensor, mark in zip(y, marks, strict=True)))


def marks_of(y: Activation) -> tuple[bool, ...]:
    """For each tensor of an output, True if it has a gradient."""
    return tuple(tensor.requires_grad for tensor in tensors_of(y))


def leaf(x: Activation, *, passes_gradient: bool) -> Activation:
    """A layer's input, detached: a leaf at which the autograd graph of the layer begins.

    Args:
        x: the output of the layer before.
        passes_gradient: True if a layer before this one needs the gradient of the input.
    """
    if isinstance(x, Tensor):
        x = x.detach()
        return x.requires_grad_() if passes_gradient and x.is_floating_point() else x
    return like(x, (tensor.detach().requires_grad_(passes_gradient and tensor.requires_grad) for tensor in x))


def gradient_of(x: Activation) -> Activation | None:
    """The gradient of a layer's input after its backward; None if no tensor of it has one.

    It is zero for a tensor that the layer does not use, because the layer before expects a gradient of it.
    """
    made = [torch.zeros_like(t, requires_grad=False) if t.grad is None else _aligned(t.grad) for t in graded(x)]
    if isinstance(x, Tensor):
        return made[0] if made else None
    return tuple(made) or None


def _aligned(gradient: Tensor) -> Tensor:
    """A gradient with plain strides, and aligned, as it would arrive in another stage. Autograd may return a view."""
    return in_plain_strides(gradient.clone() if gradient.data_ptr() % ALIGNMENT else gradient)


def zero_gradient(y: Activation) -> Activation:
    """Zeros in the form of the gradient of an output."""
    if isinstance(y, Tensor):
        return torch.zeros_like(y)
    return tuple(torch.zeros_like(tensor, requires_grad=False) for tensor in graded(y))


# ---- between stages


def forms_sent(value: Activation) -> tuple[tuple[TensorForm, ...], tuple[str, ...]]:
    """The forms of the tensors of a tuple and its field names, as a message carries them; both empty for a tensor."""
    if isinstance(value, Tensor):
        return (), ()
    forms = (TensorForm(_NAMES[t.dtype], tuple(t.shape), t.requires_grad) for t in value)
    return tuple(forms), _fields(value)


def packed(value: Activation) -> Tensor:
    """An activation as the one tensor that is sent: a tensor itself, or the bytes of all tensors of a tuple, uint8."""
    if isinstance(value, Tensor):
        return value
    flat = torch.zeros(sum(aligned(t.nbytes) for t in value), dtype=torch.uint8, device=value[0].device)
    begin = 0
    for tensor in value:
        flat[begin : begin + tensor.nbytes].copy_(tensor.detach().reshape(-1).view(torch.uint8))
        begin += aligned(tensor.nbytes)
    return flat


def unpacked(payload: Tensor, forms: Sequence[TensorForm], names: Sequence[str]) -> Activation:
    """The tuple that was packed, each tensor in memory of its own.

    Args:
        payload: uint8, of `messages.packed_bytes(forms)` elements.
        forms, names: what `forms_sent` returned for the tuple.
    """
    tensors, begin = [], 0
    for form in forms:
        size = form.num_bytes
        tensor = payload[begin : begin + size].clone().view(_DTYPES[form.dtype]).view(form.shape)
        tensors.append(tensor.requires_grad_(form.graded))
        begin += aligned(size)
    return _of_fields(tuple(names), tensors)


# ---- tuples


def _fields(value: tuple[Any, ...]) -> tuple[str, ...]:
    """The fields of a named tuple; () if it is a plain one."""
    return tuple(getattr(value, "_fields", ()))


def _of_fields(names: tuple[str, ...], tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """A named tuple with these fields, of the same type for the same fields; a plain tuple if there are no names."""
    return _named(names)(*tensors) if names else tuple(tensors)


@lru_cache(maxsize=256)
def _named(names: tuple[str, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The type of named tuples with these fields."""
    return namedtuple("Activations", names)
