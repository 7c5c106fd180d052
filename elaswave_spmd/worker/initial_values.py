"""The initial values that a model's own constructors made, and digests of them and of constants.

A model that does not override `LayeredModel.init` begins with what its modules' constructors put into the parameters.
A worker makes the layers whose values it needs, hands them over once, and keeps none. Digests are compared by the
controller before the first step (controller/model_checks.py): a constructor may have read the clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import LayeredModel

DIGEST_BYTES = 16

Row = tuple[str, bool, bytes]
"""(name, whether it is a constant and no parameter, digest)."""


class MadeValues:
    """The initial values of parameters as constructors make them, layer by layer when they are asked for.

    Layers that are prepared are kept, as are those that are not given as factories, which every construction makes. Of
    the other ones the last is kept, while it is read.

    Args:
        make: makes the model for real; of the layers that are given as factories, those with these names.
    """

    def __init__(self, make: Callable[[Collection[str]], LayeredModel]) -> None:
        self._make = make
        self._values: dict[str, dict[str, Tensor]] = {}
        self._borrowed: str | None = None  # a layer that is kept until another one is read

    def prepare(self, layers: Collection[str]) -> None:
        """Make these layers, all in one construction of the model.

        Raises:
            ModelError: a parameter has no initial value, since its constructor left it as it found it.
        """
        if self._borrowed in layers:
            self._borrowed = None
        if missing := [layer for layer in layers if layer not in self._values]:
            self._make_layers(missing)

    def _make_layers(self, missing: Collection[str]) -> Collection[str]:
        """Make these layers. Returns the names of the layers that are given as factories."""
        model = self._make(missing)
        readers = {tie.reader for tie in model.ties}  # their owners' values count
        for layer in model.layer_names:
            if layer in self._values:
                continue
            own = dict(model.get_submodule(layer).named_parameters(prefix=layer))
            if layer not in missing and any(parameter.is_meta for parameter in own.values()):
                continue  # given as a factory, and not wanted
            self._values[layer] = {name: _checked(name, own[name]) for name in own if name not in readers}
        return model.factories

    def values_of(self, layer: str) -> dict[str, Tensor]:
        """The values of a layer's parameters by name, fp32 and flat."""
        if layer not in self._values:
            if self._borrowed is not None:
                del self._values[self._borrowed]
            self._borrowed = layer if layer in self._make_layers([layer]) else None
        return self._values[layer]

    def part(self, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of a flattened parameter, fp32."""
        return self.values_of(name.partition(".")[0])[name][first:stop]

    def clear(self) -> None:
        """Forget what was made: it is in the state of the workers now."""
        self._values.clear()
        self._borrowed = None


def _checked(name: str, parameter: Tensor) -> Tensor:
    values = parameter.detach().to("cpu", torch.float32).reshape(-1)
    if bool(values.isnan().any()):
        raise ModelError(
            f"parameter {name} has no initial values: {int(values.isnan().sum())} of its elements are NaN",
            rule="a model that does not override init() begins with what the constructors of its layers put into them",
            where=name,
            fix="fill it there, as by torch.nn.init.normal_(self.weight, std=0.02), in place of torch.empty alone; or "
            "override init(name, shape), such as with return super().init(name, shape)",
        )
    return values


def constants_of(module: nn.Module, layer: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer besides its parameters: buffers, persistent or not, and attributes, by their names."""
    for path, one in module.named_modules(prefix=layer):
        attributes = [(name, value) for name, value in vars(one).items() if isinstance(value, Tensor)]
        for name, value in [*one.named_buffers(recurse=False), *attributes]:
            if not value.is_meta:
                yield f"{path}.{name}", value


def digests(
    layers: Iterable[tuple[str, nn.Module]], made: MadeValues | None = None, of_values: Collection[str] = ()
) -> tuple[Row, ...]:
    """Digests of what constructors made: of the constants of some layers, and of the parameters of `of_values`.

    Args:
        layers: names and modules, with their constants.
        made: the initial values; None: they are drawn by rule, and alike everywhere.
    """
    rows = [(name, True, _digest(value)) for layer, module in layers for name, value in constants_of(module, layer)]
    if made is not None:
        made.prepare(of_values)
        rows += [(name, False, _digest(value)) for layer in of_values for name, value in made.values_of(layer).items()]
    return tuple(rows)


def _digest(value: Tensor) -> bytes:
    hashed = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=DIGEST_BYTES)
    hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.digest()
