"""The translation of command-line words into settings: `train mesh=dp2_pp2 train.steps=20 +model.args.window=8`.

It uses the grammar and the composition of Hydra, but not its command line. Names are checked here first, so that the
error about a typo shows the closest name that exists, and everything that Hydra refuses becomes a ConfigError. The
configuration that overrides apply to is made from the declarations in `schema.py`; the YAML files beside this file are
choices (`model=llama_tiny`) that are laid over it. No Hydra or OmegaConf object leaves this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from elaswave_spmd.conf import checks, resume
from elaswave_spmd.conf.mesh_names import FORMS, register_mesh_names
from elaswave_spmd.conf.schema import GROUPS, NAMES, SIZES, OptimSettings, Settings
from elaswave_spmd.conf.section import unknown_setting
from elaswave_spmd.errors import ConfigError, closest

CHOICES: Mapping[str, str] = {
    "mesh": "single",
    "sharding": "model",
    "model": "gpt_tiny",
    "data": "stdlib",
    "optim": "adamw",
    "chaos": "none",
}
"""The groups of settings that have named choices, each with the choice that applies if none is named."""

_OPEN = ("model.args.", "data.args.")  # names below these belong to the user's own code
_LONGEST_SHOWN = 500  # characters of a word in an error


def choices_of(group: str) -> list[str]:
    """The names that a group can be set to. For `mesh`, which has any number of names, the forms of names."""
    if group == "mesh":
        return [*FORMS]
    return sorted(file.stem for file in (Path(__file__).parent / group).glob("*.yaml"))


def settings_from(words: Sequence[str]) -> Settings:
    """The settings of a command line, as `name=value` words in Hydra's grammar.

    With `train.resume=RUN` they are those of RUN, except for what the words name.

    Raises:
        ConfigError: a word cannot be read; a name, a choice or a value is not valid; or there is no run to resume.
    """
    own = any("hydra.searchpath" in word for word in words)
    overrides = [_parsed(word, own) for word in words]
    composed, saved = _compose(words), dict[str, Any]()
    if (run := composed["train"].get("resume")) is not None:
        named = [override.key_or_group for override in overrides]
        run = _resolved({"resume": run})["resume"] if "\\${" in str(run) else run  # words_resuming escapes it
        saved = resume.saved(str(run))
        composed = resume.merge(resume.literal(saved), composed, named)
    settings = Settings.from_dict(_resolved(composed))
    begun_from = resume.begun_from(settings.model.init_from, saved)
    settings = replace(settings, model=replace(settings.model, init_from=begun_from))
    given = [override.key_or_group for override in overrides if not override.is_delete()]
    settings.optim.check_read(_given_of(settings.optim, given, whole=run is None or "optim" in given))
    settings.check_named(given)
    sizes = frozenset(_names_in("model", given))
    return replace(settings, model=replace(settings.model, named=sizes & SIZES))


def _names_in(group: str, names: Sequence[str]) -> set[str]:
    """The settings of one group that are among names: {"lr"} for "optim" and ["optim.lr", "optim", "seed"]."""
    return {name.removeprefix(f"{group}.") for name in names if name.startswith(f"{group}.")}


def _given_of(optim: OptimSettings, named: Sequence[str], *, whole: bool) -> set[str]:
    """The settings of the optimizer that were given: by the words of the command line, or by the file of a choice.

    A setting that the file of a choice sets is known by its value, which is not the default.

    Args:
        named: the names of settings on the command line.
        whole: all settings of the group come from this command. False if some may come from a run that is resumed,
            where a value other than the default does not show that somebody gave it.
    """
    defaults = vars(OptimSettings()) if whole else {}
    return _names_in("optim", named) | {name for name, value in defaults.items() if getattr(optim, name) != value}


def named_settings(words: Sequence[str]) -> set[str]:
    """The settings and groups that the words of a command line name: {"mesh", "train.steps"}."""
    return {setting_of(word) for word in words}


def given_value(words: Sequence[str], name: str, default: object) -> object:
    """The value that the words of a command line give to a setting, before any of its checks; or the default."""
    values = [parsed.value() for word in words if (parsed := _parsed(word, own=True)).key_or_group == name]
    return values[-1] if values else default


def setting_of(word: str) -> str:
    """The setting or group that one word of a command line names: "train.steps", "mesh"."""
    return _parsed(word, own=True).key_or_group


def word_of(name: str, text: str) -> str:
    """The word of a command line that sets `name` to a text, in quotes where Hydra's grammar would take it apart."""
    plain = re.fullmatch(r"/[\w/.+@%:-]*( +[\w/.+@%:-]+)*", text, re.ASCII)
    return f"{name}={text if plain else QuotedString(resume.literal(text), Quote.single).with_quotes()}"


def _one_by_one(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The settings one by one. A dict of all arguments of a model or dataset, {"data.args": {...}}, is taken apart."""
    for name, value in settings.items():
        if f"{name}." in _OPEN and isinstance(value, Mapping):
            yield from ((f"{name}.{argument}", given) for argument, given in value.items())
        else:
            yield name, value


def words_of(settings: Mapping[str, object]) -> list[str]:
    """The words of a command line that set these values, given as Python has them: {"optim.lr": 1e-3, "mesh": "dp2"}.

    A text stays a text, even if a command line would read it as a number or a list. Arguments of the user's own models
    and datasets (`model.args.NAME`) are added if they are not set yet.

    Raises:
        ConfigError: a name is not a text, a value is a dict for a whole group, or one that no setting can have.
    """
    _refuse_groups(settings)
    words = []
    for name, value in _one_by_one(settings):
        if not isinstance(name, str) or not name or "=" in name:
            raise ConfigError(f"settings has the name {name!r}", rule="names are texts", fix='{"optim.lr": 1e-3}')
        plus = "++" if name.startswith(_OPEN) else ""
        try:
            words.append(f"{plus}{name}={_in_grammar(name, value)}")
        except RecursionError:
            what = f"{name} is given as a value that is nested without an end"
            raise ConfigError(what, where=f"settings[{name!r}]", fix="one that does not contain itself") from None
    return words


def _refuse_groups(settings: Mapping[str, object]) -> None:
    """Refuse dicts of settings for whole groups. The error shows the same settings in the form that is accepted."""
    nested = {name: value for name, value in settings.items() if name in GROUPS and isinstance(value, Mapping)}
    if not nested:
        return
    flat = {f"{group}.{name}": value for group, values in nested.items() for name, value in values.items()}
    raise ConfigError(
        f"settings has a dict for {' and '.join(nested)}: {_as_python(nested)}",
        rule="a setting is given by its whole name, with the group in front",
        where="settings",
        fix=f"settings={_as_python(flat)}" if flat else f"leave {' and '.join(nested)} out",
    )


def _as_python(values: Mapping[Any, object]) -> str:
    """A dict as one writes it in Python."""
    return "{" + ", ".join(f"{_item(name)}: {_item(value)}" for name, value in values.items()) + "}"


def _item(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return _as_python(value) if isinstance(value, Mapping) else repr(value)


def _in_grammar(name: str, value: object) -> str:
    """A Python value as it is written in Hydra's grammar.

    Raises:
        ConfigError: no setting can have this value.
    """
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        value = item()  # a scalar of numpy or torch
    if value is None or isinstance(value, bool):
        return checks.shown(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, PurePath):
        value = str(value)
    if isinstance(value, str):
        return value if _is_plain_text(value) else QuotedString(resume.literal(value), Quote.single).with_quotes()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_in_grammar(name, item) for item in value) + "]"
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str) or not _is_plain_text(key)]:
            what = f"{name} has the key {strange[0]!r}"
            raise ConfigError(what, rule="keys are words of letters and digits", where=f"settings[{name!r}]")
        return "{" + ",".join(f"{key}:{_in_grammar(name, item)}" for key, item in value.items()) + "}"
    raise ConfigError(
        f"{name} is given as {value!r}, a {type(value).__name__}",
        rule="a setting is a number, a text, true or false, None, or a list or dict of them",
        where=f"settings[{name!r}]",
        fix="code of your own is given by the keywords model and data",
    )


def _is_plain_text(text: str) -> bool:
    """True for a text that Hydra's grammar reads as the same text without quotes."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text, re.ASCII):
        return False
    return text.lower() not in ("true", "false", "yes", "no", "on", "off", "null", "nan", "inf")


def own_arguments(words: Sequence[str], known: Mapping[str, str], command: str) -> tuple[dict[str, str], list[str]]:
    """The arguments of a command that are not settings, and the words that are left: `plan event='fail 3' mesh=dp4`.

    Args:
        known: the command's own arguments, each with its default.
        command: the name of the command, for errors.

    Raises:
        ConfigError: an argument is given twice, or a word has no value.
    """
    found: dict[str, str] = {}
    rest = []
    for word in words:
        name, equals, value = word.partition("=")
        if name not in known:
            rest.append(word)
        elif not equals:
            raise ConfigError(f"{name} has no value", where=word, fix=f"{name}=VALUE, or {command} --help")
        elif name in found:
            raise ConfigError(f"{name} is given twice", where=word, fix=f"keep {name}={found[name]} or {word}")
        else:
            found[name] = value
    return {**known, **found}, rest


def own_flag(values: Mapping[str, str], name: str) -> bool:
    """The value of a command's own argument that is true or false.

    Raises:
        ConfigError: it is neither.
    """
    return checks.flag(name, {"true": True, "false": False}.get(values[name], values[name]))


def _compose(words: Sequence[str]) -> dict[str, Any]:
    """The configuration as Hydra composes it, with `${...}` not resolved yet."""
    register_mesh_names()
    defaults = ["_self_", *({group: choice} for group, choice in CHOICES.items())]
    # `_self_` first: the values of chosen files win over the defaults of the schema.
    ConfigStore.instance().store("config", {"defaults": defaults, **Settings().to_dict()}, provider="elaswave_spmd")
    try:
        with hydra.initialize_config_module("elaswave_spmd.conf", version_base="1.3"):
            config = hydra.compose("config", overrides=[*words])
        # Not resolved yet: a resumed run lays its own settings over these, and `${...}` must see the result.
        plain: Any = OmegaConf.to_container(config, resolve=False)
    except (HydraException, OmegaConfBaseException, OSError) as error:  # OSError: a name longer than one of a file
        raise _refused_by_hydra(error, words) from None
    return plain


def _resolved(composed: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with each `${...}` replaced by the value that it refers to.

    Raises:
        ConfigError: a reference cannot be resolved, or a value is missing.
    """
    config = OmegaConf.create(dict(composed))
    assert isinstance(config, DictConfig)
    try:
        if missing := sorted(map(str, OmegaConf.missing_keys(config))):
            raise ConfigError(
                f"{' and '.join(missing)} must be given",
                where=" ".join(f"{name}=???" for name in missing),
                fix=" ".join(f"{name}=VALUE" for name in missing),
            )
        fields = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        what = f"a setting cannot be resolved ({str(error).splitlines()[0]})"
        raise ConfigError(what, rule="${...} in a setting names another setting") from None
    assert isinstance(fields, dict)
    return {str(name): value for name, value in fields.items()}


def _parsed(word: str, own: bool = False) -> Override:
    """Parse one word, and check that its name and, for a group, its choice exist.

    `hydra.searchpath=[file:///my/conf]` is the one setting of Hydra's that is passed on: it adds choices of the user's.

    Args:
        own: there are other choices than those of conf/, so the names of choices are left to Hydra.

    Raises:
        ConfigError: the word cannot be read, asks for several runs, or names a setting or choice that does not exist.
    """
    # Hydra's option for sweeps, in every abbreviation that its parser would accept.
    if re.fullmatch(r"-m.*|--mu?l?t?i?r?u?n?", word) or word.lstrip("+").startswith("hydra.mode="):
        raise _is_sweep(word)
    if word.startswith("-"):
        raise ConfigError(f"{word} is not an option", where=word, exists="name=value, --help, --cfg job", fix="--help")
    if "=" not in word and not word.startswith("~"):
        raise _without_value(word)
    try:
        override = OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, RecursionError) as error:  # the last two: 5000 digits, deep lists
        why = str(error).splitlines()[0]
        fix = "quote what a shell or a list would take apart: 'data.path=\"a b.txt\"'"
        raise ConfigError(f"{_shortened(word)} cannot be read ({why})", where=_shortened(word), fix=fix) from None
    name = override.key_or_group
    if override.is_sweep_override():
        raise _is_sweep(word)
    if name in CHOICES and not override.is_delete():
        _check_choice(name, override.value(), word, own)
    elif name in GROUPS and not override.is_delete():
        what = f"{word} does not name a setting: {name} is a group of settings"
        raise ConfigError(what, where=word, fix=f"{name}.NAME=VALUE")
    # Refused here and not by Hydra, which would advise to add a plus to a misspelt name.
    elif name not in (*NAMES, *GROUPS, "hydra.searchpath") and not name.startswith(_OPEN):
        raise unknown_setting(name, [*NAMES, *CHOICES], word.lstrip("~"))
    return override


def _shortened(word: str) -> str:
    """A word of a command line as an error shows it: a very long one is cut off."""
    return word if len(word) <= _LONGEST_SHOWN else f"{word[:_LONGEST_SHOWN]}..."


def _is_sweep(word: str) -> ConfigError:
    return ConfigError(
        f"{word} asks for several runs",
        rule="a command is one run; sweeps are left to a shell",
        where=word,
        fix="for seed in 0 1 2; do python train.py seed=$seed; done",
    )


def _without_value(word: str) -> ConfigError:
    name = word.lstrip("+")
    if name in NAMES or name in CHOICES:
        return ConfigError(f"{name} has no value", rule="settings are name=value", where=word, fix=f"{name}=VALUE")
    # Not a name at all: perhaps a misspelt one.
    like = closest(name, [*NAMES, *CHOICES])
    fix = f"{like}=VALUE" if like else "--help"
    return ConfigError(f"{word} is not a setting", rule="settings are name=value", where=word, fix=fix)


def _check_choice(group: str, value: object, word: str, own: bool) -> None:
    exists = choices_of(group)
    if isinstance(value, str) and (own or group == "mesh" or value in exists):
        return  # names of meshes are checked where they are spelled out
    text = checks.shown(value)
    like = closest(text, exists)
    if group == "mesh" and text.isdecimal():
        like = f"dp{text}"
    raise ConfigError(
        f"{group}={text} is not a choice" if text else f"{group} has no value",
        where=word,
        exists=", ".join(exists),
        fix=f"{group}={like}" if like else "use one of these",
    )


def _refused_by_hydra(error: Exception, words: Sequence[str]) -> ConfigError:
    """An error of Hydra as a ConfigError. It names the override that the error is about, if the error's text tells."""
    text = str(error)
    # Hydra's exceptions have no field for the override, only this line in their text.
    key = re.search(r"full_key: (\S+)", f"{text}\n{error.__cause__}")
    name = key[1] if key else ""
    where = next((word for word in words if name and word.lstrip("+~").startswith(name)), None)
    if where is None:  # the key may be deeper than the word: data.args.rows for `data.args={rows: 3}`, not `data=bin`
        around = [word for word in words if name.startswith(f"{word.partition('=')[0]}.")]
        where = max(around, key=lambda word: len(word.partition("=")[0]), default=None)
    if where is None:
        where = " ".join(words)
    elif name.startswith(_OPEN) and "Could not override" in text:
        what, fix = f"{where} names an argument that this model or dataset does not set yet", f"+{where}"
        return ConfigError(what, rule="new arguments are added with a plus", where=where, fix=fix)
    where, why = _shortened(where), _shortened(text.splitlines()[0].strip())
    return ConfigError(f"{where} cannot be applied ({why})", where=where)
