"""The layer contract: `LayeredModel` is an ordered list of layers, each called `layer(x, keys)` on one micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from elaswave_spmd.determinism import Constant, Init, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import ModelError
from elaswave_spmd.sharding import Shardings, Tie


@dataclass(frozen=True)
class Batch:
    """One micro-batch of samples: `tokens` int64 [B, T] go in, `targets` int64 [B, T] are to be predicted."""

    tokens: Tensor
    targets: Tensor


class LayeredModel(nn.Module):
    """An ordered stack of layers. Subclasses build the layers and hand them to `super().__init__`.

    A layer maps (x, keys) of one micro-batch to one contiguous tensor; the first gets int64 tokens [B, T]. A layer
    reads its parameters through attributes at every call, because the framework replaces them by views of a flat
    buffer. Names of parameters are "<layer>.<path>", such as "block0.attn.qkv.weight".

    Args:
        layers: name -> module, first to last.
        ties: parameters that are one array used by two layers. Each of the two keeps a parameter of its own here; the
            framework binds both to the same values and adds their gradients.

    Raises:
        ModelError: what the contract forbids: no layers; a layer without `forward(x, keys)`; random numbers that are
            not keyed; statistics over the batch; frozen or shared parameters; parameters outside all layers; a tie that
            does not fit.
    """

    shardings: Shardings = Shardings()

    def __init__(self, layers: Mapping[str, nn.Module], ties: Sequence[Tie] = ()) -> None:
        super().__init__()
        if not layers:
            raise ModelError("a model has at least one layer", got=f"{type(self).__name__} with none")
        for name, layer in layers.items():
            _check_name(self, name)
            _check_layer(name, layer)
            self.add_module(name, layer)
        self.layer_names: tuple[str, ...] = tuple(layers)
        self.ties: tuple[Tie, ...] = tuple(ties)
        _check_parameters(self)
        _check_ties(self)
        _number_dropouts(self)

    # What a subclass adds after its layers passes through one of these three.

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            _check_outside(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        _check_outside(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        _check_outside(self)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, first to last."""
        return [self.get_submodule(name) for name in self.layer_names]

    def forward(self, x: Tensor, keys: Keys | None = None) -> Tensor:
        """The whole stack in one process: evaluation (without `keys`) and tests; training goes layer by layer."""
        for number, layer in enumerate(self.layers):
            x = layer(x, None if keys is None else keys.at(number))
        return x

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """Token-sum cross entropy, an fp32 scalar, of logits [B, T, V] against `batch.targets` [B, T]."""
        return nn.functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """How parameter `name` begins; override for other rules."""
        if len(shape) >= 2:
            return Normal(0.02)
        return Constant(0.0) if name.endswith("bias") else Constant(1.0)

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether weight decay applies to parameter `name`."""
        return len(shape) >= 2

    def share_ties(self) -> None:
        """Make each tied reader the owner's Parameter, to run the whole model in one process outside the framework."""
        for tie in self.ties:
            path, _, name = tie.reader.rpartition(".")
            setattr(self.get_submodule(path), name, self.get_parameter(tie.owner))


def _check_name(model: nn.Module, name: str) -> None:
    if not name.isidentifier() or hasattr(model, name):
        raise ModelError(
            "a layer's name is an identifier that the model does not use otherwise",
            got=name,
            where=type(model).__name__,
            fix=f"call it {name}_layer" if name.isidentifier() else 'names such as "embed", "block0", "head"',
        )


def _check_layer(name: str, layer: nn.Module) -> None:
    if not isinstance(layer, nn.Module):
        raise ModelError("a layer is an nn.Module", got=type(layer).__name__, where=f"layer {name}")
    try:
        inspect.signature(layer.forward).bind(object(), object())
    except TypeError:
        raise ModelError(
            "a layer is called layer(x, keys)",
            got=f"{type(layer).__name__}.forward{inspect.signature(layer.forward)}",
            where=f"layer {name}",
            fix="def forward(self, x, keys); wrap modules of torch, and hand keys on to KeyedDropout",
        ) from None
    for path, module in layer.named_modules(prefix=name):
        if problem := _forbidden(module):
            rule, fix = problem
            raise ModelError(rule, got=repr(module), where=path, fix=fix)


def _forbidden(module: nn.Module) -> tuple[str, str] | None:
    """(rule, fix) if a module cannot give the same bits on every mesh."""
    dropouts = nn.modules.dropout._DropoutNd
    unkeyed = (isinstance(module, dropouts) and module.p > 0) or (
        isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    )
    if unkeyed or isinstance(module, nn.RReLU):
        return (
            "random numbers are keyed by sample; this module draws from a global generator",
            "use elaswave_spmd.determinism.KeyedDropout(p), called drop(x, keys), or p=0",
        )
    norms = nn.modules.batchnorm._NormBase
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or (
        isinstance(module, norms) and module.track_running_stats
    ):
        return (
            "a micro-batch's result does not depend on other micro-batches; running or batch statistics do",
            "use nn.LayerNorm, nn.RMSNorm or nn.GroupNorm",
        )
    return None


def _check_parameters(model: LayeredModel) -> None:
    homes: dict[int, str] = {}
    for layer in model.layer_names:
        seen: dict[int, str] = {}
        for path, parameter in model.get_submodule(layer).named_parameters(prefix=layer):
            if not parameter.is_floating_point() or not parameter.requires_grad:
                raise ModelError(
                    "every parameter is a floating-point tensor that is trained",
                    got=f"{parameter.dtype}, requires_grad={parameter.requires_grad}",
                    where=path,
                    fix="register what is fixed by register_buffer",
                )
            if other := homes.get(id(parameter)):
                raise ModelError(
                    "a parameter used by two layers is declared, not shared: the layers may lie on different workers",
                    got=path,
                    where=other,
                    fix=f'give each layer its own and pass ties=[tie("{path}", "{other}")]',
                )
            seen[id(parameter)] = path
        homes.update(seen)


def _check_outside(model: LayeredModel) -> None:
    if "layer_names" not in vars(model):  # the layers themselves are being added
        return
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            raise ModelError(
                "a parameter belongs to a layer; only layers are trained and saved",
                got=name,
                where=type(model).__name__,
                exists="layers " + ", ".join(model.layer_names),
                fix="make it a parameter of the layer that uses it; what is fixed goes into register_buffer",
            )


def _check_ties(model: LayeredModel) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    readers = [tie.reader for tie in model.ties]
    for tie in model.ties:
        for name in (tie.reader, tie.owner):
            if name not in shapes:
                close = get_close_matches(name, shapes, n=3, cutoff=0.0)
                raise ModelError(
                    "a tie names two parameters", got=name, where=str(tie), exists=", ".join(close) + ", ..."
                )
        if shapes[tie.reader] != shapes[tie.owner]:
            raise ModelError(
                "tied parameters have one shape",
                got=f"{shapes[tie.reader]} and {shapes[tie.owner]}",
                where=str(tie),
                fix="give both layers the same sizes",
            )
        if tie.reader.partition(".")[0] == tie.owner.partition(".")[0]:
            raise ModelError(
                "a tie joins two layers", got=str(tie), fix="inside one layer use the same attribute twice"
            )
        if readers.count(tie.reader) > 1 or tie.owner in readers:
            raise ModelError(
                "a reader has one owner, and an owner reads from nobody",
                got=", ".join(map(str, model.ties)),
                where=str(tie),
                fix="tie every reader to the first owner",
            )


def _number_dropouts(model: LayeredModel) -> None:
    homes: dict[int, str] = {}
    for layer in model.layer_names:
        modules = [m for m in model.get_submodule(layer).modules() if isinstance(m, KeyedDropout)]
        for site, module in enumerate(modules):
            if other := homes.get(id(module)):
                raise ModelError(
                    "a KeyedDropout belongs to one layer", got=f"one in {other} and {layer}", fix="make two"
                )
            module.site = site
        homes.update({id(module): layer for module in modules})
