"""`train.resume=RUN`: the settings of RUN, with what the command line names explicitly on top."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.format_version import FORMAT_FIELD, version_mismatch
from elaswave_spmd.conf.given_files import yaml_of
from elaswave_spmd.conf.schema import GROUPS
from elaswave_spmd.errors import ConfigError

CONFIG = "config.yaml"
"""Name of the file in a run directory that holds the settings of the run."""

_WHOLE = ("mesh",)  # groups whose settings exclude each other: naming one names them all
_GROUPS_OF_ONE_COMMAND = ("chaos", "run")  # injected faults, and where and how the run is written and shown
_OF_ONE_COMMAND = (
    *(("train", "resume"), ("train", "resume_at"), ("train", "reschedule")),  # how the run was resumed itself
    ("runtime", "launcher"),  # what had started its command
)
_NOT_AGAIN = ("run.dir", "train.resume", "train.resume_at")
"""Where a run is, and where it came from. A command that goes on with it is told the former as `train.resume`."""

_REFERENCE = re.compile(r"(\\*)\$\{")
"""The begin of a reference to another setting, with the backslashes before it, each pair of which stands for one."""

_STEP = re.compile(r"step_0*([0-9]+)")
"""The directory of a checkpoint, below that of its run."""

_WEIGHTS_OF_A_RUN = re.compile(r"weights\.safetensors|checkpoints/step_[0-9]+")
"""The part of a run that `model.init_from=RUN` was found to mean, below the directory of that run."""


def merge(saved: Mapping[str, Any], composed: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The saved settings, with those that were named as they were composed.

    Args:
        saved: settings of the run that is resumed.
        composed: settings of the command line.
        named: groups and dotted names of settings that the command line names.
    """
    found = without_those_of_one_command(saved)
    for name in _GROUPS_OF_ONE_COMMAND:
        found[name] = composed[name]
    # Groups come first: `model.layers=2 model=llama_tiny` is llama_tiny with 2 layers in any order.
    for name in sorted(dict.fromkeys(named), key=lambda n: n.count(".")):
        path = name.split(".")
        _put(found, composed, path[:1] if path[0] in _WHOLE else path)
    return found


def without_those_of_one_command(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of settings, by group, without what belongs to one command line and not to the run."""
    kept = {name: copy.deepcopy(found) for name, found in settings.items() if name not in _GROUPS_OF_ONE_COMMAND}
    for group, name in _OF_ONE_COMMAND:
        kept.setdefault(group, {}).pop(name, None)
    return kept


def literal(value: Any) -> Any:
    """The value with every `${` in its texts written so that it stays what it is: these values are resolved already."""
    if isinstance(value, str):
        return _REFERENCE.sub(r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, (list, tuple)) else value


def begun_from(named: str | None, saved: Mapping[str, Any]) -> str | None:
    """The `model.init_from` of a run that is resumed: the saved one, also where its own command is repeated.

    The first command named a run and saved which file or checkpoint of it was read. Its words, given again, name the
    run: they mean what was found then, whatever that run has written since. No other settings must come of them, as
    weights with which a run has begun are part of its identity, and workers are adopted by equal settings only.

    Args:
        named: the setting as it is after `merge`.
        saved: settings of the run that is resumed; empty: none is.
    """
    model = saved.get("model", {})
    found = model.get("init_from") if isinstance(model, Mapping) else None
    if named is None or not isinstance(found, str):
        return named
    folder, file = (Path(os.path.abspath(os.path.expanduser(path))) for path in (named, found))
    is_part = file.is_relative_to(folder) and _WEIGHTS_OF_A_RUN.fullmatch(file.relative_to(folder).as_posix())
    return found if is_part or file == folder else named


def words_resuming(words: Iterable[str], run_dir: str) -> list[str]:
    """The words of the command that goes on with a run, whose command was given `words` and has died.

    All of them hold on, `train.reschedule` as well: the checkpoint that the next command finds may be older than the
    other learning rates. Only where the run comes from is another place. Faults that were to be injected are not named
    again: what has happened of them has happened.

    Args:
        run_dir: the directory of the run.
    """
    from elaswave_spmd.conf.compose import setting_of, word_of  # Hydra: not before it is needed

    names = [(word, setting_of(word)) for word in words]
    kept = [word for word, name in names if name not in _NOT_AGAIN and name.partition(".")[0] != "chaos"]
    return [*kept, word_of("train.resume", run_dir)]


def _put(target: dict[str, Any], composed: Mapping[str, Any], path: list[str]) -> None:
    """Copy what was composed at `path`; what is not there any more (`~name`) is removed from `target`."""
    head, *rest = path
    if head not in composed:
        target.pop(head, None)
    elif rest and isinstance(composed[head], Mapping) and isinstance(target.get(head), dict):
        _put(target[head], composed[head], rest)
    else:
        target[head] = copy.deepcopy(composed[head])


def _inside_a_run(path: Path, where: str) -> ConfigError | None:
    """The refusal of a path in the directory of a run, such as that of a checkpoint; None: it lies in no run."""
    run = next((folder for folder in path.parents if os.path.isfile(folder / CONFIG)), None)
    if run is None:
        return None
    resume = checks.override("train.resume", run)
    steps = [found[1] for part in path.relative_to(run).parts if (found := _STEP.fullmatch(part))]
    if steps:
        fix = f"{resume} train.resume_at={steps[-1]} run.dir=DIR; without the other two it goes on from its newest one"
    else:
        fix = resume
    return ConfigError(
        f"{where} is {'a checkpoint' if steps else 'a part'} of the run {run}",
        rule="train.resume names the directory of a run; train.resume_at, with another run.dir, the step of an earlier "
        "checkpoint",
        where=where,
        fix=fix,
    )


def _is_saved(name: object, found: object) -> bool:
    """True for an item as config.yaml has them: a setting, or a group of settings."""
    return isinstance(name, str) and (name not in GROUPS or isinstance(found, dict))


def fields_in(file: Path) -> dict[str, Any] | None:
    """The settings in a config.yaml, by group; None: it is no mapping, or no YAML that a run writes.

    Raises:
        OSError: it cannot be read.
    """
    try:
        fields = yaml_of(file)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def saved(run: str) -> dict[str, Any]:
    """The settings in a run's config.yaml, as plain data.

    Raises:
        ConfigError: the file is missing or damaged, or a version with another format wrote it.
    """
    file = Path(os.path.expanduser(checks.text("train.resume", run))) / CONFIG
    where = checks.override("train.resume", run)
    try:
        fields = fields_in(file)
    except OSError as error:
        if (inside := _inside_a_run(Path(os.path.expanduser(run)), where)) is not None:
            raise inside from None
        raise ConfigError(
            f"cannot read {file} ({error.strerror or error})",
            rule="train.resume names the directory of a run",
            where=where,
            fix="train.resume=runs/NAME",
        ) from None
    if fields is None or not all(_is_saved(name, found) for name, found in fields.items()):
        raise ConfigError(f"{file} does not hold the settings of a run", where=where, fix="another run")
    if mismatch := version_mismatch(fields.pop(FORMAT_FIELD, None)):
        raise ConfigError(
            f"{file} {mismatch}",
            rule="a run goes on with the format version that it began with",
            where=where,
            fix="resume it with the version of elaswave_spmd that wrote it, or start another run",
        )
    return fields
