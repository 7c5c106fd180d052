"""The keywords of `elaswave_spmd.train` as settings: a model and data by their names, or as what is given by value."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elaswave_spmd.by_value import Held, importable_name, plain_name, target_of
from elaswave_spmd.errors import ConfigError, DataError, ModelError


@dataclass(frozen=True)
class Given:
    """The arguments that a call gives by value, and how a call gives them again.

    Attributes:
        objects: name in the module `by_value` -> the object.
        names: keyword -> the name of the object in the caller's module, or "..." if it has none there.
    """

    objects: dict[str, object] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, keyword: str, value: object) -> str:
        """Take an object. Returns its name in settings."""
        name = plain_name(value.value if isinstance(value, Held) else value, keyword)
        if name in self.objects:
            name = f"{name}_{keyword}"
        self.objects[name] = value
        self.names[keyword] = _name_there(value)
        return target_of(name)


def _name_there(value: object) -> str:
    """The name of a class or function in the module that defines it, where that is the object itself; else "..."."""
    module, name = sys.modules.get(getattr(value, "__module__", None) or ""), getattr(value, "__name__", None)
    return name if isinstance(name, str) and getattr(module, name, None) is value else "..."


def name_model(model: object, named: dict[str, Any], given: Given) -> None:
    """Put the model into the settings, by its name or as one that is given by value."""
    if model is None or isinstance(model, str):
        put(named, "model", model, "model.target" if model and "." in model else "model", ("model.target", "model"))
        return
    if hasattr(model, "named_parameters") and not inspect.isclass(model):
        raise ModelError(
            f"model is a {type(model).__name__} that is constructed already",
            rule="every worker builds the model itself, with the layers that it computes",
            where="model",
            fix=f"model={type(model).__name__}, its class, or model=lambda: {type(model).__name__}(...)",
        )
    if not callable(model):
        raise ModelError(
            f"model is {model!r}",
            rule="a model is the name of a choice, a subclass of LayeredModel, or a function that returns one",
            where="model",
        )
    target = importable_name(model) or given.add("model", model)
    put(named, "model", target, "model.target", ("model.target", "model"))


def name_data(data: object, named: dict[str, Any], given: Given) -> None:
    """Put the data into the settings, by its name or as what is given by value."""
    rivals = ("data.target", "data", "data.name")
    if data is None or isinstance(data, str):
        put(named, "data", data, "data.target" if data and "." in data else "data", rivals)
        return
    is_dataset = not inspect.isclass(data) and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not is_dataset and not callable(data):
        raise DataError(
            f"data is a {type(data).__name__}, no dataset",
            rule="a dataset is map-style: it has __len__ and __getitem__",
            where="data",
            fix="the name of a choice, a class or function of a dataset, or a constructed one; what can only be "
            "iterated over becomes one with elaswave_spmd.data.ShardedDataset",
        )
    target = given.add("data", Held(data)) if is_dataset else importable_name(data) or given.add("data", data)
    put(named, "data", target, "data.target", rivals)


def copied(settings: object) -> dict[str, Any]:
    """The settings of a call, as a dict of its own.

    Raises:
        ConfigError: they are no mapping.
    """
    if settings is None or isinstance(settings, Mapping):
        return dict(settings or {})
    raise ConfigError(
        f"settings is {settings!r}, which is no dict",
        rule="settings are names of the command line with their values",
        where="settings",
        fix='settings={"optim.lr": 1e-3}',
    )


def put(named: dict[str, Any], keyword: str, value: object, setting: str, rivals: tuple[str, ...] = ()) -> None:
    """Put the value of a keyword into the settings, unless it is None.

    Raises:
        ConfigError: the settings have another value for it.
    """
    if value is None:
        return
    for name in rivals or (setting,):
        if name in named and (name != setting or named[name] != value):
            raise ConfigError(
                f"{keyword} is given as {value!r}, and settings has {name!r}: {named[name]!r}",
                rule="a keyword and a setting do not contradict each other",
                where=f"{keyword}={value!r}",
                fix=f"keep {keyword}= or the setting {name!r}",
            )
    named[setting] = value
