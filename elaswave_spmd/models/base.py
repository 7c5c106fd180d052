"""The layer contract: `LayeredModel` is an ordered list of layers, each called on one micro-batch.

A layer is called `layer(x, keys)`, or `layer(x)` if its `forward` has no parameter for keys. So any module of torch,
such as `nn.Sequential`, can be a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.spectral_norm import SpectralNorm

from elaswave_spmd.determinism import Constant, Init, KeyedDropout, Keys, Normal
from elaswave_spmd.errors import ModelError
from elaswave_spmd.models.construction import build_layer
from elaswave_spmd.models.objective import Batch, first_inputs, other_loss
from elaswave_spmd.sharding import Shardings, Tie

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


class LayeredModel(nn.Module):
    """An ordered stack of layers. Subclasses build the layers and pass them to `super().__init__`.

    A layer is called on one micro-batch, as `layer(x, keys)` or `layer(x)`. It returns what the next layer takes: a
    tensor, or a flat tuple or named tuple of tensors, some of which may have no gradient. The first layer gets what
    `inputs(batch)` returns. For token data these are int64 tokens [B, T]. For a dataset without a vocabulary they are
    inputs from its batches, whose floating-point tensors have the compute dtype.

    A layer reads its parameters through attributes at every call, because the framework replaces them by views of a
    flat buffer. Names of parameters are `<layer>.<path>`, such as `block0.attn.qkv.weight`. Parameters with
    `requires_grad=False`, set by the constructor of the model or of a layer, are frozen: they are not trained.

    Initial values are those that the constructors of the layers made, unless a subclass overrides `init`.

    Args:
        layers: name -> module, first to last. In place of a module there may be a factory: a callable without arguments
            that returns it. Layers from factories have memory only in workers that need them, so such a model need not
            fit into one process.
        ties: pairs of parameters that are one array. Each of the two layers has a parameter of its own; the framework
            binds both to the same values and adds their gradients, because the layers may be on different workers.

    Raises:
        ModelError: the model breaks the contract: it has no layers; a layer that cannot be called with one input;
            random numbers that are not keyed; statistics over the batch; shared parameters; parameters outside all
            layers; a tie that does not fit. Most of these would make the bits of a run depend on its mesh, or leave a
            parameter untrained.
    """

    shardings: Shardings = Shardings()

    def __init__(self, layers: Mapping[str, nn.Module | Callable[[], nn.Module]], ties: Sequence[Tie] = ()) -> None:
        super().__init__()
        if not isinstance(layers, Mapping):
            raise ModelError(
                f"the layers of {type(self).__name__} are an object of type {type(layers).__name__}",
                rule="layers are given as a dict, first to last; their names become those of the parameters",
                fix='super().__init__({"embed": embed, "block0": block, "head": head})',
            )
        if not layers:
            raise ModelError(f"{type(self).__name__} has no layers", rule="a model has at least one layer")
        for name, given in layers.items():
            _check_name(self, name)
            is_factory = callable(given) and not isinstance(given, nn.Module)
            if is_factory:
                _check_factory(name, given)
            layer = build_layer(name, given) if is_factory else given
            self.add_module(name, _checked_layer(name, layer))
        self.layer_names: tuple[str, ...] = tuple(layers)
        self.factories: frozenset[str] = frozenset(n for n, g in layers.items() if not isinstance(g, nn.Module))
        """The names of the layers that were given as factories."""
        self.ties: tuple[Tie, ...] = tuple(ties)
        _check_parameters(self)
        _check_ties(self)
        _number_dropouts(self)

    # A subclass may add modules and parameters after `super().__init__`. Each way to do so passes through one of these
    # three methods, which refuse a parameter that belongs to no layer: it would be neither trained nor saved.

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
        """Run all layers in one process, for evaluation (without `keys`) and tests.

        Training does not call this: it calls the layers one by one, each on the workers of its stage.
        """
        for number, layer in enumerate(self.layers):
            x = call_layer(layer, x, None if keys is None else keys.at(number))
        return x

    def inputs(self, batch: Any) -> Any:
        """The first layer's input for a micro-batch: a tensor, or a flat tuple or named tuple of tensors.

        Called on workers that have the first layer, with the whole micro-batch. `first_inputs` says what is returned
        unless a subclass overrides this.
        """
        return first_inputs(batch)

    def loss(self, output: Any, batch: Any) -> Any:
        """The cross entropy of logits [B, T, V] against `batch.targets` [B, T], summed over tokens: an fp32 scalar.

        It is a sum and not a mean, because the losses of the micro-batches of a step are added up. The framework
        divides this sum by the number of tokens of the step, or by that of samples if samples are not tokens.

        A subclass may return (sum, weight), for example if tokens are masked. The sum of the step is then divided by
        the weight of all its micro-batches. For validations a subclass may also have a method
        `metrics(output, batch)`, which returns further sums, or (sum, weight), by name.
        """
        if not isinstance(batch, Batch):
            raise other_loss(type(self).__name__)
        return nn.functional.cross_entropy(output.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")

    def init(self, name: str, shape: tuple[int, ...]) -> Init:
        """The rule for the initial values of parameter `name`. It is used only if a subclass overrides this method.

        Without an override parameters keep the values that the constructors made. By a rule any worker can draw any
        part of a parameter by itself. An override may return `super().init(name, shape)`: normal values for parameters
        of two or more dims, zeros for biases, ones for all others.
        """
        if len(shape) >= 2:
            return Normal(0.02)
        return Constant(0.0) if name.endswith("bias") else Constant(1.0)

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if weight decay applies to parameter `name`: if it has two or more dims, unless a subclass says else."""
        return len(shape) >= 2

    def share_ties(self) -> None:
        """Make each tied reader the owner's Parameter, to use the whole model in one process without the framework.

        Loaded models and the baselines of the benchmarks need it. Workers bind ties by views of flat buffers instead.
        """
        for tie in self.ties:
            path, _, name = tie.reader.rpartition(".")
            setattr(self.get_submodule(path), name, self.get_parameter(tie.owner))


def takes_keys(layer: nn.Module) -> bool:
    """True if a layer is called `layer(x, keys)`; False if it is called `layer(x)`.

    The second parameter of its `forward` is for keys if it is named `keys` or has no default. So the optional arguments
    of torch's modules, such as the mask of `nn.TransformerEncoderLayer`, keep their defaults.
    """
    return bool(keys_parameter(layer))


def keys_parameter(layer: nn.Module) -> str:
    """The parameter of a layer's `forward` that gets the keys, as it is written there: "keys", "*args"; "" if none."""
    forward = layer.forward
    is_method = isinstance(forward, MethodType)
    parameters = _of_method(forward.__func__) if is_method else tuple(inspect.signature(forward).parameters.values())
    given = [p for p in parameters if p.kind in _POSITIONAL]
    if given and given[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return f"*{given[0].name}"
    if len(given) < 2 or not (given[1].name == "keys" or given[1].default is inspect.Parameter.empty):
        return ""
    return f"*{given[1].name}" if given[1].kind is inspect.Parameter.VAR_POSITIONAL else given[1].name


@lru_cache(maxsize=256)  # `LayeredModel.forward` asks at every call of a layer
def _of_method(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of a function as a bound method: without `self`, unless its first parameter is `*args`."""
    parameters = tuple(inspect.signature(function).parameters.values())
    takes_all = bool(parameters) and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
    return parameters if takes_all else parameters[1:]


def call_layer(layer: nn.Module, x: Any, keys: Keys | None) -> Any:
    """The output of a layer, which is called with keys if it takes them."""
    return layer(x, keys) if takes_keys(layer) else layer(x)


def _check_name(model: nn.Module, name: str) -> None:
    if not name.isidentifier() or hasattr(model, name):
        raise ModelError(
            f"{type(model).__name__} has a layer named {name!r}",
            rule="a layer's name is an identifier that the model does not use otherwise",
            fix=f"call it {name}_layer" if name.isidentifier() else 'names such as "embed", "block0", "head"',
        )


def _check_factory(name: str, factory: Callable[..., object]) -> None:
    """Refuse a function that was meant as the layer itself, such as `torch.relu` or a lambda of the layer's input."""
    takes = ""
    try:
        inspect.signature(factory).bind()
    except ValueError:  # no signature is known. A function in C makes no module
        if not inspect.isbuiltin(factory):
            return
    except TypeError as error:
        takes = f" ({error})"
    else:
        return
    raise ModelError(
        f"layer {name} is {getattr(factory, '__name__', type(factory).__name__)}, which is no module, and makes none "
        f"when it is called without arguments{takes}",
        rule="a layer is an nn.Module, or a factory of one: a callable without arguments",
        where=f"layer {name}",
        fix="an nn.Module whose forward calls the function; or lambda: Block(...), which makes the module",
    )


def _checked_layer(name: str, layer: object) -> nn.Module:
    """Return the layer, after a check that it can be called with one input and contains no forbidden module."""
    if not isinstance(layer, nn.Module):
        raise ModelError(f"layer {name} is of type {type(layer).__name__}", rule="a layer is an nn.Module")
    keyed = takes_keys(layer)
    signature = inspect.signature(layer.forward)
    try:
        signature.bind(*([object()] * (1 + keyed)))
    except TypeError:
        raise _other_call(name, layer) from None
    if not keyed and "keys" in signature.parameters:
        raise _other_call(name, layer)
    check_modules(layer, name)
    for path, module in layer.named_modules(prefix=name):
        if not keyed and isinstance(module, KeyedDropout) and module.p > 0:
            raise ModelError(
                f"{path} is {module!r}, and {type(layer).__name__}.forward{signature} has no keys to give it",
                rule="a KeyedDropout is called drop(x, keys) with the keys of its layer",
                where=f"layer {name}",
                fix="def forward(self, x, keys) in a module of your own; torch's containers pass on no keys",
            )
    return layer


def check_modules(module: nn.Module, name: str = "") -> None:
    """Refuse modules that cannot give the same bits on every mesh, in their present mode (training or evaluation).

    Args:
        name: the name of the module in errors; "" for a whole model.

    Raises:
        ModelError: a module is forbidden.
    """
    for path, inner in module.named_modules(prefix=name):
        if problem := _forbidden(inner):
            rule, fix = problem
            raise ModelError(f"{path} is {inner!r}", rule=rule, fix=fix)


def _other_call(name: str, layer: nn.Module) -> ModelError:
    return ModelError(
        f"layer {name} has {type(layer).__name__}.forward{inspect.signature(layer.forward)}",
        rule="a layer is called layer(x, keys), or layer(x) if it needs no keys",
        where=f"layer {name}",
        fix="def forward(self, x, keys), and pass keys on to KeyedDropout",
    )


def _forbidden(module: nn.Module) -> tuple[str, str] | None:
    """The rule and the fix of an error, if a module cannot give the same bits on every mesh; else None."""
    dropouts = nn.modules.dropout._DropoutNd
    unkeyed = (isinstance(module, dropouts) and module.p > 0) or (
        isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
    )
    if unkeyed or isinstance(module, nn.RReLU):
        return (
            "random numbers are keyed by sample; this module draws from a global generator",
            "use elaswave_spmd.determinism.KeyedDropout(p), called drop(x, keys), or p=0",
        )
    if isinstance(module, nn.modules.batchnorm._NormBase) and (problem := _statistics(module)):
        return problem
    lazy: Any = module  # the mixin is annotated for itself alone
    if isinstance(module, LazyModuleMixin) and lazy.has_uninitialized_params():
        return (
            "a model is planned before it has seen a batch, so its constructor knows the shape of every parameter",
            f"give {type(module).__name__.removeprefix('Lazy')} all its sizes; no lazy modules",
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return (
            "gradients are dense: they are added up and reduced in pages of all elements",
            "sparse=False",
        )
    if module.training and _has_power_iteration(module):
        return (
            "a layer keeps nothing from one call to the next; spectral norm goes on with its power iteration in each",
            "nn.utils.parametrizations.weight_norm, which keeps nothing; there is no spectral norm in training",
        )
    return None


def _statistics(module: nn.modules.batchnorm._NormBase) -> tuple[str, str] | None:
    """The rule and the fix of an error, if a norm takes its statistics from the batch; else None.

    Running statistics in evaluation mode are constants, and are allowed.
    """
    fix = "use nn.LayerNorm, nn.RMSNorm or nn.GroupNorm"
    if module.track_running_stats:
        if not module.training:
            return None
        return (
            "a micro-batch's result does not depend on other micro-batches; running statistics do",
            f"{fix}; or keep the statistics that it has: .eval() before super().__init__(...)",
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "a sample is normalized alone; without running statistics it is by those of its micro-batch", fix
    return None


def _has_power_iteration(module: nn.Module) -> bool:
    """True if one of torch's two functions `spectral_norm` has been applied to the module."""
    hooks = module._forward_pre_hooks.values()
    own = isinstance(module, nn.utils.parametrizations._SpectralNorm)
    return own or any(isinstance(hook, SpectralNorm) for hook in hooks)


def _check_parameters(model: LayeredModel) -> None:
    """Refuse parameters that cannot be trained, and parameters that two layers share."""
    homes: dict[int, str] = {}  # id of a parameter -> its path in an earlier layer
    for layer in model.layer_names:
        seen: dict[int, str] = {}
        for path, parameter in model.get_submodule(layer).named_parameters(prefix=layer):
            if not parameter.is_floating_point():
                raise ModelError(
                    f"parameter {path} has {parameter.dtype}",
                    rule="every parameter is a tensor of real floating-point numbers",
                    fix="a parameter of real numbers, with a last dim of 2, and torch.view_as_complex of it in forward"
                    if parameter.is_complex()
                    else "register constants by register_buffer",
                )
            if other := homes.get(id(parameter)):
                raise ModelError(
                    f"{path} and {other} are one Parameter",
                    rule="a parameter that two layers use is declared by a tie, not shared: the layers may be on "
                    "different workers",
                    fix=f'give each layer its own and pass ties=[tie("{path}", "{other}")]',
                )
            seen[id(parameter)] = path
        homes.update(seen)


def _check_outside(model: LayeredModel) -> None:
    """Refuse parameters that belong to no layer."""
    if "layer_names" not in vars(model):  # the layers themselves are being added
        return
    inside = {id(module) for layer in model.layers for module in layer.modules()}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            raise ModelError(
                f"parameter {name} of {type(model).__name__} belongs to no layer",
                rule="every parameter belongs to a layer; only layers are trained and saved",
                exists="layers " + ", ".join(model.layer_names),
                fix="make it a parameter of the layer that uses it; register constants by register_buffer",
            )


def _check_ties(model: LayeredModel) -> None:
    """Refuse ties that do not fit the parameters of the model, or each other."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    readers = [tie.reader for tie in model.ties]
    for tie in model.ties:
        for name in (tie.reader, tie.owner):
            if name not in shapes:
                close = get_close_matches(name, shapes, n=3, cutoff=0.0)
                raise ModelError(
                    f"{tie} names {name}, which is not a parameter",
                    rule="a tie names two parameters",
                    exists=", ".join(close) + ", ...",
                )
        if shapes[tie.reader] != shapes[tie.owner]:
            raise ModelError(
                f"{tie} joins parameters of shapes {shapes[tie.reader]} and {shapes[tie.owner]}",
                rule="tied parameters have one shape",
                fix="give both layers the same sizes",
            )
        if tie.reader.partition(".")[0] == tie.owner.partition(".")[0]:
            raise ModelError(
                f"{tie} joins two parameters of one layer",
                rule="a tie joins two layers",
                fix="inside one layer use the same attribute twice",
            )
        if readers.count(tie.reader) > 1 or tie.owner in readers:
            raise ModelError(
                f"{tie} does not fit with the other ties: {', '.join(map(str, model.ties))}",
                rule="a reader has one owner, and an owner is not a reader itself",
                fix="tie every reader to the first owner",
            )
        layer = tie.reader.partition(".")[0]
        once = next(t for t in model.ties if (t.owner, t.reader.partition(".")[0]) == (tie.owner, layer))
        if once is not tie:
            raise ModelError(
                f"{once} and {tie} join two parameters of layer {layer} to one owner",
                rule="a layer reads the parameter of another layer through one tie: it has one gradient of it",
                fix=f"leave out {tie.reader}, and use {once.reader} twice within layer {layer}",
            )


def _number_dropouts(model: LayeredModel) -> None:
    """Number the KeyedDropouts within each layer. The number and that of the layer give each one its own masks."""
    homes: dict[int, str] = {}
    for layer in model.layer_names:
        modules = [m for m in model.get_submodule(layer).modules() if isinstance(m, KeyedDropout)]
        for site, module in enumerate(modules):
            if other := homes.get(id(module)):
                raise ModelError(
                    f"layers {other} and {layer} share a KeyedDropout",
                    rule="a KeyedDropout belongs to one layer, whose number is in its key",
                    fix="make two",
                )
            module.site = site
        homes.update({id(module): layer for module in modules})
