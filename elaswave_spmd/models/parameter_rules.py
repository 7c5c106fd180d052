"""Asks a model's own `init` and `decays` about a parameter. Both are a user's code, called while a run is planned."""

from __future__ import annotations

from elaswave_spmd.determinism import Constant, Init, Normal, Uniform
from elaswave_spmd.errors import ModelError, UserError, place_in_user_code
from elaswave_spmd.models.base import LayeredModel


def init_of(model: LayeredModel, name: str, shape: tuple[int, ...]) -> Init:
    """The rule for the initial values of a parameter, of a model that overrides `init`.

    Raises:
        ModelError: `init` failed, or returned something that is not a rule.
    """
    found = _asked(model, "init", name, shape)
    if isinstance(found, Normal | Uniform | Constant):
        return found
    raise _wrong(
        model,
        "init",
        name,
        found,
        "a rule of initial values: Normal, Uniform or Constant",
        "from elaswave_spmd.determinism import Normal, Uniform, Constant, and return Normal(0.02)",
    )


def decays_of(model: LayeredModel, name: str, shape: tuple[int, ...]) -> bool:
    """True if weight decay applies to a parameter.

    Raises:
        ModelError: `decays` failed, or returned neither True nor False.
    """
    found = _asked(model, "decays", name, shape)
    if isinstance(found, bool):
        return found
    raise _wrong(model, "decays", name, found, "True or False", "return len(shape) >= 2")


def _asked(model: LayeredModel, function: str, name: str, shape: tuple[int, ...]) -> object:
    try:
        return getattr(model, function)(name, shape)
    except UserError:
        raise  # this error already says what is wrong
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{type(model).__name__}.{function}({name!r}, {shape}) failed ({type(error).__name__}: {error})",
            rule=f"{function}(name, shape) is called for each parameter of the model",
            where=place_in_user_code(error) or name,
            fix=f"correct {function}; return super().{function}(name, shape) for parameters that it does not know",
        ) from error


def _wrong(model: LayeredModel, function: str, name: str, found: object, wanted: str, fix: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}.{function} returned {found!r} for parameter {name}",
        rule=f"{function}(name, shape) returns {wanted}",
        where=name,
        fix=f"{fix}, or super().{function}(name, shape) for parameters that it does not know",
    )
