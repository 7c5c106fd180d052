"""Constructs models from a name and sizes: the project's own, or a user's `my_file.MyModel`."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from elaswave_spmd import by_value
from elaswave_spmd.errors import ModelError, UserError, closest, headline_of, place_in_user_code
from elaswave_spmd.models.base import LayeredModel, check_modules
from elaswave_spmd.sharding import Shardings
from elaswave_spmd.user_code import import_here, modules_here, names_like

OWN = {
    "gpt": "elaswave_spmd.models.gpt.GPT",
    "llama": "elaswave_spmd.models.llama.Llama",
    "mlp": "elaswave_spmd.models.mlp.MLP",
}
"""The short names of the project's models."""

_WITHOUT_MEMORY = (
    "a run is planned with a model that has shapes and no memory: compute numbers with Python, or with "
    'device="cpu", as in torch.linspace(0, 0.1, n, device="cpu").tolist(); make a module that reads its own values, '
    'such as nn.utils.parametrizations.orthogonal(...), inside `with torch.device("cpu"):`'
)

_LISTED = 40
"""The most names of parameters that an error lists in full."""


def build_model(
    target: str | Callable[..., LayeredModel],
    sizes: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    attributes: Mapping[str, Any] | None = None,
    named: Collection[str] = (),
) -> LayeredModel:
    """Construct the model `target` and check it. Under `with torch.device("meta")` no memory is allocated.

    Args:
        target: a class or a factory (a callable that returns a model), a short name (gpt, llama, mlp), or "module.Name"
            of a class or factory; the working directory is on the import path.
        sizes: vocab_size, seq_len, layers, d_model, heads, dropout. The constructor, or the factory, gets those that it
            has parameters for.
        extra: further arguments. The constructor must have a parameter for each.
        attributes: attributes of the dataset, such as num_classes. They are given for parameters that would be missing
            otherwise.
        named: the names of those sizes that the user has set. The constructor must have a parameter for each.

    Raises:
        ModelError: there is no such model; it is not a LayeredModel, or breaks its contract; its constructor failed in
            the user's code; or arguments are unknown, unused or missing.
        Exception: whatever the constructor raises, if no line of the user's code was running.
    """
    make = find_model(target) if isinstance(target, str) else target
    shown = target if isinstance(target, str) else by_value.plain_name(make, "model")
    if not callable(make) or (inspect.isclass(make) and not issubclass(make, LayeredModel)):
        raise _no_model(f"model.target={shown} is {make!r}")
    _refuse_unused(make, shown, {name: sizes[name] for name in sizes if name in named})
    given = _arguments(make, shown, sizes, extra or {}, attributes or {})[0]
    if target in OWN:
        _check_kinds(make, extra or {})
    try:
        model = make(**given)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        place = place_in_user_code(error)
        if place is None and isinstance(error, (OverflowError, RuntimeError)) and target in OWN:
            raise ModelError(  # an error of torch about the sizes, such as a tensor of 2**63 elements
                f"model.target={target} cannot be made ({type(error).__name__}: {headline_of(error)})",
                where="model.target",
                exists=f"it was given {given}",
                fix="smaller sizes",
            ) from error
        if place is None and isinstance(error, Exception):
            raise
        raise ModelError(
            f"{'the constructor of ' if inspect.isclass(make) else ''}{shown} failed ({type(error).__name__}: {error})",
            where=place or "model.target",
            exists=f"it was given {given}",
            fix="correct it, or these arguments" if "meta tensor" not in str(error).lower() else _WITHOUT_MEMORY,
        ) from error
    if not isinstance(model, LayeredModel):
        raise _no_model(f"{shown}() returned {type(model).__name__}")
    _check_shardings(model)
    check_modules(model)  # again, as the constructor may have changed the mode of layers after they were checked
    _check_hooks(model)
    _check_hidden(model)
    return model


def _check_kinds(make: Callable[..., object], extra: Mapping[str, Any]) -> None:
    """Refuse arguments of the project's own models of another kind than their constructors take.

    A text such as "false" would count as true, and other mistakes would end with a traceback of torch. None is not
    checked here, but left to the constructor.

    Raises:
        ModelError: an argument is of another kind.
    """
    parameters = inspect.signature(make).parameters
    for name, value in extra.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kinds = {
            "bool": (isinstance(value, bool), "true or false"),
            "int": (is_number and isinstance(value, int) and value >= 0, "a whole number, 0 or more"),
            "float": (is_number and abs(value) < float("inf"), "a number"),
        }
        is_right, kind = kinds.get(parameters[name].annotation, (True, ""))
        if not is_right and value is not None:
            raise ModelError(
                f"model.args.{name}={value!r} is not {kind}",
                rule=f"{name} is {kind}",
                where=f"model.args.{name}",
                fix=f"++model.args.{name}=VALUE, without quotes",
            )


def _no_model(what: str) -> ModelError:
    return ModelError(
        what,
        rule="a model is a subclass of elaswave_spmd.LayeredModel, or a function that returns one",
        where="model.target",
        fix="class MyModel(LayeredModel), which gives its layers to super().__init__({name: module, ...})",
    )


def _check_shardings(model: LayeredModel) -> None:
    """Refuse an attribute `shardings` that is not a `Shardings`, and a `Shardings` that has another name.

    Nothing would read the latter, and the defaults would apply without a word.

    Raises:
        ModelError: there is such an attribute.
    """
    shown, fix = type(model).__name__, 'shardings = Shardings(batch=P("dp"), layers=P("pp"), optim=P("dp"))'
    rule = "a model declares how its arrays lie on the mesh as its attribute shardings, an elaswave_spmd.Shardings"
    try:
        declared = model.shardings
    except (Exception, SystemExit) as error:  # `shardings` may be a property of the user's
        what = f"{shown}.shardings failed ({type(error).__name__}: {error})"
        raise ModelError(what, rule=rule, where=place_in_user_code(error) or "model.target", fix=fix) from error
    if not isinstance(declared, Shardings):
        raise ModelError(f"{shown}.shardings is {declared!r}", rule=rule, where="model.target", fix=fix)
    if declared is not LayeredModel.shardings:
        return
    everything = [vars(model), *(vars(cls) for cls in type(model).__mro__ if cls is not LayeredModel)]
    if named := [name for found in everything for name, value in found.items() if isinstance(value, Shardings)]:
        raise ModelError(f"{shown} has {named[0]}, and no shardings", rule=rule, where="model.target", fix=fix)


def _check_hooks(model: LayeredModel) -> None:
    """Refuse hooks of parameters, which would silently be lost. Hooks of modules are kept."""
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise ModelError(
                f"parameter {name} has a hook",
                rule="parameters are replaced by views of a flat buffer, and their hooks are not called then",
                where=name,
                fix="change the gradient inside the layer: a hook of the module, or of a tensor that forward computes",
            )


def _check_hidden(model: LayeredModel) -> None:
    """Refuse tensors, parameters and modules that require training and are not registered with torch.

    They would be neither trained nor saved.
    """
    known = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if name == "_flat_weights" and isinstance(module, nn.RNNBase):
                continue  # torch keeps it in step with the attributes
            # A tensor with a grad_fn was computed from parameters, as torch's older weight norm keeps one.
            is_free = isinstance(value, Tensor) and value.requires_grad and value.grad_fn is None
            if is_free and not isinstance(value, nn.Parameter):
                raise _untrained(f"{path}.{name}")
            for one in _inside(value):
                # A module that is also registered elsewhere is allowed, because its parameters are replaced there.
                if isinstance(one, nn.Parameter) or (id(one) not in known and any(True for _ in one.parameters())):
                    what = "a parameter" if isinstance(one, nn.Parameter) else f"the parameters of {one!r}"
                    raise ModelError(
                        f"{path}.{name} keeps {what} in a {type(value).__name__}",
                        rule="parameters are attributes of modules: those that are kept otherwise are not trained",
                        where=f"{path}.{name}",
                        fix="nn.ModuleList, nn.ModuleDict, nn.ParameterList, or an attribute of its own",
                    )


def _untrained(name: str) -> ModelError:
    return ModelError(
        f"{name} is a tensor with requires_grad=True, and no nn.Parameter",
        rule="parameters are attributes of type nn.Parameter: other tensors are neither trained nor saved",
        where=name,
        fix="nn.Parameter(tensor); or register_buffer(name, tensor.detach()), if it is a constant",
    )


def _inside(value: object, around: tuple[int, ...] = ()) -> Iterator[nn.Parameter | nn.Module]:
    """The parameters and modules in a list, tuple or dict, and in containers inside it.

    Args:
        around: ids of the containers around it, so that a container which contains itself is not followed for ever.
    """
    if id(value) in around:
        return
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        if isinstance(one, nn.Parameter | nn.Module):
            yield one
        else:
            yield from _inside(one, (*around, id(value)))


def _arguments(
    make: Callable[..., object],
    shown: str,
    sizes: Mapping[str, Any],
    extra: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for a model's constructor, and those of them that are `attributes` of the dataset.

    The constructor gets the sizes that it has parameters for, all of `extra`, and attributes for parameters that have
    no default and no value yet. A parameter with a default keeps it, even if the dataset has an attribute of this name:
    the name may mean something else to the model.

    Raises:
        ModelError: an argument of `extra` is unknown, or a parameter has no value.
    """
    parameters = inspect.signature(make).parameters
    name_of_it = by_value.plain_name(make, shown)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in extra:
        if name not in parameters and not open_ended:
            raise ModelError(
                f"model.args.{name} is not an argument of {name_of_it}",
                exists=", ".join(parameters),
                fix="use one of these",
            )
    given = {name: value for name, value in sizes.items() if name in parameters or open_ended} | dict(extra)
    # 1 and 3 are parameters that can be given by name; the others (*args, **kwargs, /) are never missing.
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.kind in (1, 3) and p.name not in given]
    of_dataset = {name: attributes[name] for name in missing if name in attributes}
    given |= of_dataset
    if missing := [name for name in missing if name not in given]:
        of_data = f"; of the dataset {', '.join(attributes)}" if attributes else ""
        raise ModelError(
            f"{name_of_it} needs {', '.join(missing)}, which the settings do not give",
            rule="a model's constructor gets sizes, model.args, and public attributes of a dataset that are integers, "
            "or lists of up to 8 of them; a property is not read",
            where=f"model.target={shown}",
            exists=f"sizes {', '.join(sizes)}{of_data}",
            fix=("vocab_size on the dataset, if its samples are tokens; else " if "vocab_size" in missing else "")
            + " ".join(f"+model.args.{name}=VALUE" for name in missing),
        )
    return given, of_dataset


def _refuse_unused(make: Callable[..., object], shown: str, named: Mapping[str, Any]) -> None:
    """Refuse sizes that the user has set and the constructor has no parameter for: they would change nothing."""
    parameters = inspect.signature(make).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if unused := {name: value for name, value in named.items() if name not in parameters}:
        words = [f"model.{name}={value}" for name, value in unused.items()]
        raise ModelError(
            f"{' and '.join(words)} would change nothing: {by_value.plain_name(make, shown)} does not take "
            f"{' and '.join(unused)}",
            rule="a model's constructor gets those sizes that it has a parameter for, by that name",
            where=" ".join(words),
            exists=", ".join(parameters) or "it takes nothing",
            fix="leave it out, or +model.args.NAME=VALUE with the name that the constructor has for it",
        )


def attributes_given(
    target: str, sizes: Mapping[str, Any], extra: Mapping[str, Any], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """The attributes of the dataset that `build_model` gives to the model `target`, with the same arguments."""
    return _arguments(find_model(target), target, sizes, extra, attributes)[1]


def freeze_parameters(model: LayeredModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of the patterns (`optim.freeze`), beside those frozen already.

    Args:
        patterns: patterns as for file names: `*` stands for any characters, `?` for one.

    Raises:
        ModelError: no parameter matches a pattern.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        names = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ModelError(
                f"optim.freeze={pattern} matches no parameter of {type(model).__name__}",
                rule="each pattern of optim.freeze matches the name of a parameter",
                where=f"optim.freeze={pattern}",
                exists=close_names(pattern, named),
                fix=f'optim.freeze="{model.layer_names[0]}.*" for all parameters of a layer',
            )
        for name in names:
            named[name].requires_grad_(False)


def close_names(pattern: str, names: Collection[str]) -> str:
    """The names of parameters, for an error about a pattern: all of them, or of many the ones closest to it."""
    if len(names) <= _LISTED:
        return ", ".join(sorted(names))
    return ", ".join(get_close_matches(pattern, names, n=5, cutoff=0.0)) + ", ..."


def import_model(target: str | Callable[..., LayeredModel]) -> None:
    """Import a model's file before the model is constructed on the meta device or under seeded generators.

    So tensors that the file makes when it is imported, such as class weights, have memory and their usual values.

    Raises:
        ModelError: as for `find_model`.
    """
    if isinstance(target, str):
        find_model(target)


def find_model(target: str) -> Any:
    """Import the object that "module.Name" or a short name stands for.

    Raises:
        ModelError: no such module or name, or a module that fails while it is imported.
    """
    by_value.check_given(target, "model", ModelError)
    dotted = OWN.get(target, target)
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise _unknown(target, f"models {', '.join(OWN)}; files {_files_like(target)}", closest(target, [*OWN]))
    try:
        module = import_here(module_name)
    except ModuleNotFoundError as error:
        # Either the user's module does not exist, or it exists and imports one that does not.
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise _unknown(target, f"models {', '.join(OWN)}; files {_files_like(module_name)}") from None
        raise _broken(target, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(target, error) from error
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, LayeredModel)]
        classes = [n for n in classes if vars(module)[n] is not LayeredModel]  # imported by the file as the base class
        close = closest(name, classes)
        exists = f"models in {module_name}: {names_like(name, classes) or 'none'}"
        raise _unknown(target, exists, f"{module_name}.{close}" if close else "")
    return getattr(module, name)


def _unknown(target: str, exists: str, close: str = "") -> ModelError:
    fix = f"model.target={close or 'my_file.MyModel'}"
    return ModelError(f"model.target={target} is not found: no such model", exists=exists, fix=fix)


def _broken(target: str, error: Exception | SystemExit) -> ModelError:
    """The error about a module that failed while it was imported, with the innermost line that was running."""
    at = getattr(error, "filename", None), getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if not isinstance(error, SyntaxError):
            at = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return ModelError(
        f"importing model.target={target} failed at {at[0]}:{at[1]} ({type(error).__name__}: {error})",
        fix="import the file in Python alone until it works",
    )


def _files_like(name: str) -> str:
    return names_like(name, modules_here()) or "none in the working directory"
