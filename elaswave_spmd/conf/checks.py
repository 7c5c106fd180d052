"""Checks of single settings. Each returns the value, in its type, or raises ConfigError that names the override."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elaswave_spmd.errors import ConfigError


def override(name: str, value: object) -> str:
    """How a setting is written on the command line: "mesh.stages=[3,2]", "train.resume=null"."""
    if value is None:
        shown = "null"
    elif isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, (list, tuple)):
        shown = "[" + ",".join(map(str, value)) + "]"
    else:
        shown = str(value)
    return f"{name}={shown}"


def whole(name: str, value: object, *, at_least: int, below: int = 2**63) -> int:
    """A whole number in [at_least, below). 8.0, "8" and true are none."""
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value < below:
        return value
    asked = f"{at_least} or more" if below == 2**63 else f"from {at_least} to {below - 1}"
    raise _wrong(f"{name} is a whole number, {asked}", name, value)


def number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> float:
    """A finite number with above < value < below and at_least <= value <= at_most; whole ones become floats."""
    found = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if math.isfinite(found) and above < found < below and at_least <= found <= at_most:
        return float(found)
    limits = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    asked = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
    raise _wrong(f"{name} is a number {asked}".rstrip(), name, value)


def flag(name: str, value: object) -> bool:
    """true or false."""
    if isinstance(value, bool):
        return value
    raise _wrong(f"{name} is true or false", name, value, fix=f"{name}=true or {name}=false")


def text(name: str, value: object) -> str:
    """Text that is not empty. A whole number is taken as its digits: `run.dir=7` is a folder."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise _wrong(f"{name} is a text, and not an empty one", name, value)


def choice(name: str, value: object, exists: tuple[str, ...]) -> str:
    """One of `exists`."""
    if isinstance(value, str) and value in exists:
        return value
    raise _wrong(f"{name} is one of {len(exists)} words", name, value, exists=", ".join(exists), fix="use one of these")


def plain_mapping(name: str, value: object) -> dict[str, Any]:
    """A mapping from names to plain values, as JSON has them."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise _wrong(f"{name} is a mapping from names to values", name, value, fix=f"+{name}.NAME=VALUE")


def put(section: object, **values: object) -> None:
    """Put checked values in their own type into a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(section, name, value)


def plain(value: Any) -> Any:
    """The value with lists for tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _wrong(rule: str, name: str, value: object, *, exists: str = "", fix: str = "") -> ConfigError:
    got = "nothing" if value is None or value == "" else value
    return ConfigError(
        rule, got=got, where=override(name, value), exists=exists, fix=fix or f"give {name}=VALUE, or leave it out"
    )
