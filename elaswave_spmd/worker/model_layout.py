"""The description of a model for planners and workers: shapes, update rules and initial values of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from elaswave_spmd.determinism import Init
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out


@dataclass(frozen=True)
class ModelDescription:
    """The layout of a model's state, and the initial distribution of every owned parameter by name."""

    layout: ModelLayout
    inits: Mapping[str, Init]


def describe(model: LayeredModel, *, page_size: int = 4096) -> ModelDescription:
    """Describe a model by its names, shapes, ties and rules; its parameters may be on the meta device.

    Raises:
        LayoutError: a page size or parameter that cannot be laid out.
    """
    owner_of = {tie.reader: tie.owner for tie in model.ties}
    uses, inits = [], {}
    for name, module in zip(model.layer_names, model.layers, strict=True):
        shapes = {path: tuple(p.shape) for path, p in module.named_parameters(prefix=name)}
        owned = [ParameterInfo(path, s, model.decays(path, s)) for path, s in shapes.items() if path not in owner_of]
        inits |= {p.name: model.init(p.name, p.shape) for p in owned}
        uses.append(LayerUse(name, tuple(owned), tuple((path, owner_of[path]) for path in shapes if path in owner_of)))
    return ModelDescription(lay_out(uses, page_size=page_size), inits)


def has_constants(model: nn.Module) -> bool:
    """True if modules keep tensors besides parameters, as buffers or attributes (without values on the meta device)."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return next(model.buffers(), None) is not None or any(isinstance(value, Tensor) for value in kept)
