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

    Args:
        make: makes the model for real; of the layers that are given as factories, those with these names.
    """

    def __init__(self, make: Callable[[Collection[str]], LayeredModel]) -> None:
        self._make = make
        self._values: dict[str, dict[str, Tensor]] = {}

    def prepare(self, layers: Collection[str]) -> None:
        """Make these layers, all in one construction of the model.

        Raises:
            ModelError: a parameter has no initial value, since its constructor left it as it found it.
        """
        if not (missing := [layer for layer in layers if layer not in self._values]):
            return
        model = self._make(missing)
        for layer in model.layer_names:
            own = dict(model.get_submodule(layer).named_parameters(prefix=layer))
            if layer not in missing and any(parameter.is_meta for parameter in own.values()):
                continue  # given as a factory, and not wanted
            self._values[layer] = {name: _checked(name, parameter) for name, parameter in own.items()}

    def values_of(self, layer: str) -> dict[str, Tensor]:
        """The values of a layer's parameters by name, fp32 and flat."""
        self.prepare([layer])
        return self._values[layer]

    def part(self, name: str, first: int, stop: int) -> Tensor:
        """Elements [first, stop) of a flattened parameter, fp32."""
        return self.values_of(name.partition(".")[0])[name][first:stop]

    def clear(self) -> None:
        """Forget what was made: it is in the state of the workers now."""
        self._values.clear()


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
