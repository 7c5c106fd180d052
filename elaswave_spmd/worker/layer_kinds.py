"""Kinds of layers: layers with the same code, parameters and settings, of which only one has to be checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def kind_of(module: nn.Module) -> object:
    """A value that is equal for layers with the same code, the same shapes and dtypes, and the same settings.

    A layer with an attribute that cannot be compared is a kind of its own.

    Args:
        module: a layer; only the shapes and dtypes of its tensors are read, so it may be on the meta device.
    """
    return tuple((path, type(one), _attributes(one)) for path, one in module.named_modules())


def _attributes(module: nn.Module) -> object:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    forms = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    own = {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    return forms, tuple((name, _comparable(value, ())) for name, value in own.items())


def _comparable(value: Any, inside: tuple[int, ...]) -> object:
    """A value that is hashable, and equal for equal values.

    Args:
        inside: the ids of the containers around `value`, by which a container that contains itself is recognised.
    """
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, Mapping | list | tuple):
        if id(value) in inside:
            return object()  # it contains itself: equal to nothing else
        inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return type(value), tuple((str(name), _comparable(item, inside)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_comparable(item, inside) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_comparable(item, inside) for item in value)
    try:
        hash(value)
    except TypeError:
        return object()  # equal to nothing else
    return type(value), value
