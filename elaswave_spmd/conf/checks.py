"""Checks of the values of single settings.

Each check returns the value in its own type, or raises a ConfigError that begins with the override ("train.steps=0").
`section.py` calls the checks with the limits that a setting declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from elaswave_spmd.errors import ConfigError, closest

_LARGEST = 2**63


def override(name: str, value: object) -> str:
    """The way a setting is written on the command line: "mesh.stages=[3,2]", "train.resume=null"."""
    return f"{name}={shown(value)}"


def shown(value: object) -> str:
    """A value in YAML's flow style, as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(shown, value)) + "]"
    return str(value)


def given(name: str, value: object) -> str:
    """The setting with its value, for the error that refuses it: as `override` writes it, but with quotes if needed.

    Quotes show that the value is a text where a number, a bool or a list is expected: "optim.lr='0.01'".
    """
    return f"{name}={value!r}" if isinstance(value, str) and _looks_otherwise(value) else override(name, value)


def unquoted(name: str, value: object, reads: Callable[[str], object]) -> str:
    """The advice about a text that would be accepted without its quotes; "" for any other value.

    Args:
        reads: converts the text, or raises a ValueError if it would not be accepted.
    """
    if not isinstance(value, str) or not _looks_otherwise(value):
        return ""
    try:
        reads(value)
    except ValueError:
        return ""
    return f"{name}={value.strip()}, without the quotes that make it a text"


def _looks_otherwise(text: str) -> bool:
    """True for a text that without quotes would be read as a number, true, false, null, a list or a mapping."""
    word = text.strip().lower()
    if word in ("true", "false", "null", "none") or word.startswith(("[", "{")):
        return True
    try:
        float(word)
    except ValueError:
        return False
    return True


def whole(name: str, value: object, *, at_least: float = 0, below: float = _LARGEST, multiple_of: int = 1) -> int:
    """A whole number in [at_least, below). Floats, strings and bools are rejected: 8.0, "8", true."""
    rule = f"{name} is {asked_whole(at_least, below, multiple_of)}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(name, value, "is not a whole number", rule, fix=unquoted(name, value, int))
    if not at_least <= value < below:
        raise _refused(name, value, "is out of range", rule)
    if value % multiple_of:
        fix = override(name, value // multiple_of * multiple_of)
        raise _refused(name, value, f"is not a multiple of {multiple_of}", rule, fix=fix)
    return value


def asked_whole(at_least: float, below: float, multiple_of: int = 1) -> str:
    """The rule that `whole` checks: "a whole number, 1 or more"."""
    asked = f"{at_least:g} or more" if below >= _LARGEST else f"from {at_least:g} to {below - 1:.0f}"
    return f"a whole number, {asked}" + (f", and a multiple of {multiple_of}" if multiple_of > 1 else "")


def number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> float:
    """A finite number with above < value < below and at_least <= value <= at_most; whole numbers become floats."""
    rule = f"{name} is {asked_number(above, at_least, below, at_most)}"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _refused(name, value, "is not a number", rule, fix=unquoted(name, value, _finite))
    if not (above < value < below and at_least <= value <= at_most):
        raise _refused(name, value, "is out of range", rule)
    return float(value)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def asked_number(above: float, at_least: float, below: float, at_most: float) -> str:
    """The rule that `number` checks: "a number above 0 and at most 1"."""
    limits = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    return f"a number {' and '.join(f'{word} {limit:g}' for word, limit in limits.items() if math.isfinite(limit))}"


def flag(name: str, value: object) -> bool:
    """A bool: true or false."""
    if isinstance(value, bool):
        return value
    fix = unquoted(name, value, ("true", "false").index) or f"{name}=true or {name}=false"
    raise _refused(name, value, "is neither true nor false", "", fix=fix)


def text(name: str, value: object) -> str:
    """A text that is not empty. A whole number becomes the text of its digits: `run.dir=7` names a folder."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and "\0" in value:  # no path and no argument of a program can have one
        raise _refused(name, value, "has a NUL character", f"{name} is a text without it")
    if isinstance(value, str) and value.strip():
        return value
    raise _refused(name, value, "is not a text", f"{name} is a text that is not empty")


def choice(name: str, value: object, exists: tuple[str, ...]) -> str:
    """One of the words `exists`. The error advises the closest one."""
    if isinstance(value, str) and value in exists:
        return value
    like = closest(str(value), exists)
    fix = f"{name}={like}" if like else "use one of these"
    raise _refused(name, value, "is not one of its choices", "", exists=", ".join(exists), fix=fix)


def plain_mapping(name: str, value: object) -> dict[str, Any]:
    """A mapping from names to plain values, as JSON has them."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise _refused(name, value, "is not a mapping from names to values", "", fix=f"+{name}.NAME=VALUE")


def plain(value: Any) -> Any:
    """The value with lists in place of tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _refused(name: str, value: object, why: str, rule: str, *, exists: str = "", fix: str = "") -> ConfigError:
    where = given(name, value)
    what = f"{name} has no value" if value == "" else f"{where} {why}"
    return ConfigError(what, rule=rule, where=where, exists=exists, fix=fix or f"{name}=VALUE, or leave it out")
