"""The description of a model for planners and workers: shapes, update rules and initial values of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from elaswave_spmd.conf.schema import OptimGroup
from elaswave_spmd.determinism import Init
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models import LayeredModel, init_of
from elaswave_spmd.sharding.layout import LayerUse, ModelLayout, ParameterInfo, lay_out
from elaswave_spmd.worker.update_rules import update_rules


@dataclass(frozen=True)
class ModelDescription:
    """The layout of a model's state, and the initial distribution of every owned parameter by name.

    Args:
        inits: empty if `has_own_values`.
        has_own_values: the model does not override `init`: parameters begin with what constructors made.
    """

    layout: ModelLayout
    inits: Mapping[str, Init]
    has_own_values: bool = False


def describe(model: LayeredModel, *, page_size: int = 4096, groups: Sequence[OptimGroup] = ()) -> ModelDescription:
    """Describe a model by its names, shapes, ties and rules; its parameters may be on the meta device.

    Args:
        groups: parameters with settings of their own, by patterns of their names.

    Raises:
        LayoutError: a page size or parameter that cannot be laid out.
        ModelError: nothing is trained, or one of two tied parameters alone is frozen; groups that do not fit the model;
            its own `init` or `decays` fails, or returns something else than a rule.
    """
    _check_frozen(model)
    rules = update_rules(model, groups)
    owner_of = {tie.reader: tie.owner for tie in model.ties}
    uses, inits, own_values = [], {}, type(model).init is LayeredModel.init
    for name, module in zip(model.layer_names, model.layers, strict=True):
        shapes, frozen = {}, {}
        for path, parameter in module.named_parameters(prefix=name):
            shapes[path], frozen[path] = tuple(parameter.shape), not parameter.requires_grad
        owned = [
            ParameterInfo(path, shape, rule.decay, rule.lr_scale, frozen[path], rule.weight_decay)
            for path, shape in shapes.items()
            if path not in owner_of
            for rule in (rules[path],)
        ]
        if not own_values:
            inits |= {p.name: init_of(model, p.name, p.shape) for p in owned}
        uses.append(LayerUse(name, tuple(owned), tuple((path, owner_of[path]) for path in shapes if path in owner_of)))
    return ModelDescription(lay_out(uses, page_size=page_size), inits, own_values)


def _check_frozen(model: LayeredModel) -> None:
    """Refuse a model of which nothing is trained, and a tie that is half frozen.

    Read here, not by the constructor of `LayeredModel`: a model may freeze its parameters at any time before training.

    Raises:
        ModelError: it is so.
    """
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if trained and not any(trained.values()):
        raise ModelError(
            f"all parameters of {type(model).__name__} are frozen",
            rule="a run trains at least one parameter",
            exists=", ".join(trained),
            fix="freeze fewer, by requires_grad_(False) or by optim.freeze",
        )
    for tie in model.ties:
        if trained[tie.reader] != trained[tie.owner]:
            frozen, other = sorted((tie.reader, tie.owner), key=trained.__getitem__)
            raise ModelError(
                f"{frozen} is frozen, and {other}, which is tied to it, is trained",
                rule="tied parameters are one array: both are trained, or both are frozen",
                where=str(tie),
                fix=f'freeze both, as by optim.freeze="{tie.owner} {tie.reader}", or none',
            )


def has_constants(model: nn.Module) -> bool:
    """True if modules keep tensors besides parameters, as buffers or attributes (without values on the meta device)."""
    kept = (value for module in model.modules() for value in vars(module).values())
    return next(model.buffers(), None) is not None or any(isinstance(value, Tensor) for value in kept)
