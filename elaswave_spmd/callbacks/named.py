"""The callbacks that a command line names: `run.callbacks=[my_file.MyCallback]`, and `run.trackers=[wandb]`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.mlflow_tracker import MlflowTracker
from elaswave_spmd.callbacks.wandb_tracker import WandbTracker
from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError, UserError, closest, place_in_user_code
from elaswave_spmd.user_code import import_user_module, is_dotted_name, names_like

_RULE = "a callback is a class derived from elaswave_spmd.Callback, made without arguments, or an object of one"
_EXAMPLE = "run.callbacks=[my_file.MyCallback]"


def load_callbacks(targets: Sequence[str]) -> list[Callback]:
    """Import and make the callbacks that are named, in order.

    Raises:
        ConfigError: one cannot be imported or made, or is no callback.
    """
    return [_load(target) for target in targets]


def load_trackers(services: Sequence[str]) -> list[Callback]:
    """Make the trackers of the services that are named, in order.

    Raises:
        ConfigError: the library of one is not installed, or cannot be used as it is configured.
    """
    trackers: dict[str, type[Callback]] = {kind.SERVICE: kind for kind in (WandbTracker, MlflowTracker)}
    return [trackers[service]() for service in services]


def checked(callbacks: object) -> list[Callback]:
    """The callbacks that a caller has made, as a list.

    Raises:
        ConfigError: it is no list, nor anything else that can be iterated over; one of them is no callback, or is
            there twice.
    """
    if not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"callbacks is {callbacks!r}, which is no list",
            rule="callbacks is a list of objects of classes that are derived from elaswave_spmd.Callback",
            where="callbacks",
            fix="callbacks=[Watch()]; leave it out, if there are none",
        )
    found: list[Callback] = []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks has {callback!r}, which is no callback",
                rule="a callback is an object of a class that is derived from elaswave_spmd.Callback",
                where="callbacks",
                fix="give an object: Watch() for a class Watch, derived from elaswave_spmd.Callback",
            )
        if any(callback is other for other in found):
            raise ConfigError(f"callbacks has {callback!r} twice", where="callbacks", fix="give it once")
        _refuse_unheard(callback, "callbacks")
        found.append(callback)
    return found


def _load(target: str) -> Callback:
    where = checks.override("run.callbacks", [target])
    module_name, _, name = target.rpartition(".")
    if not is_dotted_name(target):
        raise ConfigError(f"{where} does not name a class in a module", rule=_RULE, where=where, fix=f"'{_EXAMPLE}'")
    module = import_user_module(module_name, where, where, ConfigError)
    found = getattr(module, name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, Callback)]
        known = [key for key in classes if key != Callback.__name__]
        raise ConfigError(
            f"module {module_name} has no {name}",
            where=where,
            exists=names_like(name, known) or "no callbacks",
            fix=_RULE,
        )
    callback = found if isinstance(found, Callback) else _made(found, where)
    _refuse_unheard(callback, where)
    return callback


def _refuse_unheard(callback: Callback, where: str) -> None:
    """Refuse a callback with a method of another name than those that a run calls: it would wait for that in vain.

    Looked at are its class and what was set on the object. Methods that it has of other base classes are not looked at.

    Raises:
        ConfigError: there is one.
    """
    heard = [name for name in vars(Callback) if name.startswith("on_")]
    own = [cls for cls in type(callback).__mro__ if issubclass(cls, Callback)]
    scopes = [getattr(callback, "__dict__", {}), *map(vars, own)]
    named = {name for scope in scopes for name, value in scope.items() if name.startswith("on_") and callable(value)}
    if unheard := sorted(named - {*heard}):
        like = closest(unheard[0], heard)
        raise ConfigError(
            f"{callback.name} has {unheard[0]}, which no run calls",
            rule="methods of a callback that begin with on_ are those that a run calls",
            where=where,
            exists=", ".join(heard),
            fix=f"def {like}(self, record)" if like else "one of these, or a name that does not begin with on_",
        )


def _made(target: object, where: str) -> Callback:
    if not callable(target):
        raise ConfigError(
            f"{where} names {target!r}, which is no callback", rule=_RULE, where=where, fix=f"'{_EXAMPLE}'"
        )
    try:
        made = target()
    except UserError:
        raise  # it says itself what is wrong
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{where} cannot be made ({type(error).__name__}: {error})",
            rule=_RULE,
            where=place_in_user_code(error) or where,
            fix="give its arguments defaults, or name a subclass or an object that has them",
        ) from error
    if not isinstance(made, Callback):
        raise ConfigError(f"{where} makes {made!r}, which is no callback", rule=_RULE, where=where, fix=f"'{_EXAMPLE}'")
    return made
