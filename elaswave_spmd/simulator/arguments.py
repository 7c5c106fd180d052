"""Arguments of commands that are no runs, as `name=value`, in the words of `train` but without Hydra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elaswave_spmd.errors import ConfigError


def read(arguments: Sequence[str], known: Mapping[str, str | None], command: str) -> dict[str, str]:
    """The values of all names.

    Args:
        known: name -> default; None: it must be given. "" stands for nothing.

    Raises:
        ConfigError: an argument without "=", a name that is unknown or given twice, one that is missing.
    """
    found: dict[str, str] = {}
    exists = ", ".join(known)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"arguments of {command} are name=value",
                got=argument,
                where="the command line",
                exists=exists,
                fix=f"{command} --help",
            )
        if name not in known:
            raise ConfigError(f"{command} knows the name", got=name, where=argument, exists=exists, fix="leave it out")
        if name in found:
            raise ConfigError("a name is given once", got=f"{name} twice", where=argument, fix="keep one of them")
        found[name] = value
    if missing := [name for name, default in known.items() if default is None and not found.get(name)]:
        rule, fix = f"{command} needs {missing[0]}", f"{command} --help"
        raise ConfigError(rule, got="none", where="the command line", exists=exists, fix=fix)
    return {name: found.get(name, default or "") for name, default in known.items()}


def whole(values: Mapping[str, str], name: str, at_least: int) -> int:
    """A whole number.

    Raises:
        ConfigError: it is none, or too small.
    """
    text = values[name]
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(
            f"{name} is a whole number, {at_least} or more",
            got=text or "nothing",
            where=f"{name}={text}",
            fix=f"{name}={max(at_least, 16)}",
        )
    return int(text)


def flag(values: Mapping[str, str], name: str) -> bool:
    """true or false.

    Raises:
        ConfigError: neither.
    """
    if values[name] not in ("true", "false"):
        got, where = values[name] or "nothing", f"{name}={values[name]}"
        raise ConfigError(f"{name} is true or false", got=got, where=where, fix=f"{name}=true")
    return values[name] == "true"


def numbers(values: Mapping[str, str], name: str, count: int) -> tuple[float, ...]:
    """So many numbers, or none where nothing is given.

    Raises:
        ConfigError: another number of them, or what is no number.
    """
    words = values[name].split()
    try:
        found = tuple(float(word) for word in words)
    except ValueError:
        found = ()
    if len(found) != len(words) or len(words) not in (0, count):
        raise ConfigError(
            f"{name} is {count} number{'s' * (count > 1)}", got=values[name], where=f"{name}={values[name]!r}"
        )
    return found
