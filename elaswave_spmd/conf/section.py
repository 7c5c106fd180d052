"""The declaration of settings: name, type, default, range and meaning, in one line of a frozen dataclass.

    @dataclass(frozen=True)
    class TrainSettings(Section, group="train"):
        steps: int = setting(400, "steps of the run", at_least=1)

From such lines come the checks (when a section is made), the names that the command line accepts, the configuration
that Hydra starts from, and `--help`. The annotation says which check applies:

    int, float, bool        a number of exactly that type (an int is accepted for a float)
    str                     a text, or one of `choices`
    tuple[T, ...]           a list of any length; tuple[T, T] a list of two
    Mapping[str, Any]       names and plain values
    a Section               an item of a list, given as a mapping
    T | None                any of these, or null

Any other union is left to the section's own `check_rules`, which also checks the rules across its settings.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from elaswave_spmd.conf import checks
from elaswave_spmd.errors import ConfigError, closest

T = TypeVar("T")
_KEY = "elaswave_spmd.setting"
_ELSEWHERE: Mapping[str, str] = types.MappingProxyType(
    {"learning_rate": "lr", "batch_size": "global_batch", "max_steps": "steps", "num_layers": "layers"}
)
"""Names that other programs give to settings -> the last part of the name here."""
REQUIRED: Any = dataclasses.MISSING
"""Stands for the default of a setting that has none, such as the field `step` of a chaos event."""


@dataclass(frozen=True)
class Limits:
    """The values that a setting may take, and its meaning. Fields that do not apply to its type are unused."""

    meaning: str
    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    example: str = ""


def setting(
    default: T,
    meaning: str,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    multiple_of: int = 1,
    choices: tuple[str, ...] = (),
    example: str = "",
) -> T:
    """Declare a setting: the default of a dataclass field, with everything else about it as the field's metadata.

    Args:
        default: the value if no other is given, or REQUIRED.
        meaning: one line for `--help`.
        at_least, above, below, at_most, multiple_of: limits of a number, or of each number in a list.
        choices: the words that a text may be.
        example: a valid override, for errors about lists.
    """
    limits = Limits(meaning, at_least, above, below, at_most, multiple_of, choices, example)
    metadata = {_KEY: limits}
    if isinstance(default, dict):  # a mutable default: each section gets its own copy, and mappings have no hash
        return typing.cast("T", dataclasses.field(default_factory=default.copy, hash=False, metadata=metadata))
    return typing.cast("T", dataclasses.field(default=default, metadata=metadata))


@dataclass(frozen=True)
class Declaration:
    """A setting as its section declares it. `name` is its whole name, "train.steps"; `field` the attribute, "steps"."""

    name: str
    field: str
    type: Any
    default: Any
    limits: Limits

    def check(self, value: object) -> Any:
        """The value in the setting's own type.

        Raises:
            ConfigError: the value has another type or is out of range.
        """
        return self._check(self.type, self.name, value)

    @property
    def items(self) -> type[Section] | None:
        """The section that describes each item, if the setting is a list of mappings; else None."""
        found = [arg for arg in typing.get_args(self.type) if isinstance(arg, type) and issubclass(arg, Section)]
        return found[0] if found else None

    def _check(self, kind: Any, name: str, value: object) -> Any:
        """Check a value, or an item of it, against `kind`: the type of the setting, or a part of this type."""
        limits = self.limits
        arguments = typing.get_args(kind)
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            if value is None and type(None) in arguments:
                return None
            rest = [arg for arg in arguments if arg is not type(None)]
            return self._check(rest[0], name, value) if len(rest) == 1 else value
        if typing.get_origin(kind) is tuple:
            return self._check_list(arguments, name, value)
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind.from_item(value, limits.example)
        if kind is bool:
            return checks.flag(name, value)
        if kind is int:
            least, below = max(limits.at_least, -(2**63)), min(limits.below, limits.at_most + 1, 2**63)
            return checks.whole(name, value, at_least=least, below=below, multiple_of=limits.multiple_of)
        if kind is float:
            bounds = {word: getattr(limits, word) for word in ("above", "at_least", "below", "at_most")}
            return checks.number(name, value, **bounds)
        if kind is str:
            return checks.choice(name, value, limits.choices) if limits.choices else checks.text(name, value)
        return checks.plain_mapping(name, value)

    def _check_list(self, arguments: tuple[Any, ...], name: str, value: object) -> tuple[Any, ...]:
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            given = checks.given(name, value)
            is_text = isinstance(value, str) and value.strip().startswith("[")
            raise ConfigError(
                f"{given} is not a list" + (f" of {length}" if length else "") + (", it is a text" if is_text else ""),
                where=given,
                fix=f"'{self.limits.example or checks.override(name, self.default)}'",
            )
        return tuple(self._check(arguments[0], f"{name}[{i}]", item) for i, item in enumerate(value))


class Section:
    """Base of a group of settings: a frozen dataclass whose values are checked when it is made.

    Raises (when made):
        ConfigError: a value of the wrong type or out of range, or values that contradict each other. Its `where`
            begins with the name of the override.
    """

    GROUP: ClassVar[str] = ""

    def __init_subclass__(cls, *, group: str = "", **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.GROUP = group

    def __post_init__(self) -> None:
        for declared in declarations(type(self)):
            # The dataclass is frozen. Here it is still being made, so values may be replaced by checked ones.
            object.__setattr__(self, declared.field, declared.check(getattr(self, declared.field)))
        self.check_rules()

    def check_rules(self) -> None:
        """Check the rules across several settings. Called after each setting has been checked by itself."""

    @classmethod
    def from_fields(cls: type[S], fields: object) -> S:
        """The section from plain data; a setting that is left out has its default.

        Raises:
            ConfigError: the data is not a mapping, or has an unknown name.
        """
        if not isinstance(fields, Mapping):
            given = checks.override(cls.GROUP, fields)
            raise ConfigError(f"{given} is not a group of settings", where=given, fix=f"{cls.GROUP}.NAME=VALUE")
        names = [declared.name for declared in declarations(cls)]
        prefix = f"{cls.GROUP}." if cls.GROUP else ""
        for name, value in fields.items():
            if prefix + str(name) not in names:
                raise unknown_setting(f"{prefix}{name}", names, checks.override(f"+{prefix}{name}", value))
        return cls(**fields)

    @classmethod
    def from_item(cls: type[S], item: object, example: str) -> S:
        """The section for one item of a list, from a mapping of its fields.

        Args:
            item: the mapping, or a section that is returned as it is.
            example: a valid override of the whole list, for errors.

        Raises:
            ConfigError: the item is not a mapping, has an unknown name, or lacks a field.
        """
        if isinstance(item, cls):
            return item
        declared = declarations(cls)
        known = [d.field for d in declared]
        needed = [d.field for d in declared if d.default is REQUIRED]
        where = checks.override(cls.GROUP, [item])
        given = list(item) if isinstance(item, Mapping) else []
        unknown = [str(name) for name in given if name not in known]
        lacking = [name for name in needed if name not in given]
        if not given:
            what = f"{where} is not a list of mappings"
        elif unknown:
            what = f"{where} has an unknown name, {unknown[0]}"
        elif lacking:
            what = f"{where} has no {lacking[0]}"
        else:
            return cls(**typing.cast("Mapping[str, Any]", item))
        optional = [name for name in known if name not in needed]
        rule = f"each item has {' and '.join(needed)}, and may have {' and '.join(optional)}"
        raise ConfigError(what, rule=rule, where=where, exists=", ".join(known), fix=f"'{example}'")


S = TypeVar("S", bound=Section)


def unknown_setting(name: str, names: list[str], where: str) -> ConfigError:
    """The error about a name that no setting has, with the closest one that exists.

    Args:
        name: the name as given, "train.stpes".
        names: the names that exist, for the list and the advice.
        where: the override or the file that names it.
    """
    by_last_part = {known.rpartition(".")[2]: known for known in reversed(names)}
    group, last = name.partition(".")[0] + ".", name.rpartition(".")[2]
    in_group = {known.rpartition(".")[2]: known for known in names if known.startswith(group)}
    # All names of a group are similar because of the group alone, so within it only the last parts are compared.
    close = in_group.get(closest(last, in_group), "") if in_group else closest(name, names)
    other = by_last_part.get(_ELSEWHERE.get(last, ""), "")
    # The user's own code may have arguments of any name. So for them a setting of another group is advised only if it
    # has exactly this name, not if it is similar.
    may_be_argument = name.startswith(("model.", "data."))
    elsewhere = by_last_part.get(last if may_be_argument else closest(last, by_last_part), "")
    like = other or close or elsewhere
    beside = list(in_group.values()) or names
    exists = ", ".join(beside) if len(beside) <= 40 else "see --help"
    value = where.partition("=")[2]
    fix = f"{like}={value}" if like and value else like or "see --help"
    if may_be_argument and not like:
        fix = f"+{group}args.{name.partition('.')[2]}={value or 'VALUE'}, if it is an argument of your own code"
    return ConfigError(f"there is no setting {name}", where=where, exists=exists, fix=fix)


@cache
def declarations(section: type[Section]) -> tuple[Declaration, ...]:
    """The settings that a section declares itself, in order. Sections inside it, as in `Settings`, are left out."""
    hints = typing.get_type_hints(section)
    prefix = f"{section.GROUP}." if section.GROUP else ""
    found = []
    for field in dataclasses.fields(typing.cast("Any", section)):
        if _KEY in field.metadata:
            made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if made else field.default  # type: ignore[misc]
            found.append(Declaration(prefix + field.name, field.name, hints[field.name], default, field.metadata[_KEY]))
    return tuple(found)
