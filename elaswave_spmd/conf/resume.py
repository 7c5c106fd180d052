"""`train.resume=RUN`: the settings of RUN, replaced by those that the command line names explicitly."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.format_version import FORMAT_FIELD, version_mismatch
from elaswave_spmd.conf.given_files import yaml_of
from elaswave_spmd.conf.schema import GROUPS, READ_BY
from elaswave_spmd.errors import ConfigError

CONFIG = "config.yaml"
"""Name of the file in a run directory that holds the settings of the run."""

_WHOLE = ("mesh",)  # groups whose settings exclude each other: if one setting is named, all of them are replaced
# Groups and settings that a resumed run does not inherit:
_GROUPS_OF_ONE_COMMAND = ("chaos", "run")  # injected faults; where the run's files are, and how it is shown
_OF_ONE_COMMAND = (
    *(("train", "resume"), ("train", "resume_at"), ("train", "reschedule")),  # how that run was itself resumed
    ("runtime", "launcher"),  # by what its command was started
)
_NOT_AGAIN = ("run.dir", "train.resume", "train.resume_at")
"""Where a run is, and where it was resumed from. `words_resuming` leaves them out, and names the run's directory as
`train.resume`."""

_REFERENCE = re.compile(r"(\\*)\$\{")
"""The begin of a reference to another setting, with the backslashes before it. A pair of them stands for one."""

_STEP = re.compile(r"step_0*([0-9]+)")
"""The name of the directory of a checkpoint."""

_WEIGHTS_OF_A_RUN = re.compile(r"weights\.safetensors|checkpoints/step_[0-9]+")
"""The files and checkpoints, by their paths in the directory of a run, that `model.init_from=RUN` may stand for."""


def merge(saved: Mapping[str, Any], composed: Mapping[str, Any], named: Collection[str]) -> dict[str, Any]:
    """The settings of a run that is resumed: the saved ones, replaced by those that the command line names.

    Args:
        saved: settings of the run that is resumed.
        composed: all settings as composed from the command line.
        named: groups and dotted names of settings that the command line names.
    """
    found = without_those_of_one_command(saved)
    for name in _GROUPS_OF_ONE_COMMAND:
        found[name] = composed[name]
    # Groups come first, so that `model.layers=2 model=llama_tiny` is llama_tiny with 2 layers in any order.
    for name in sorted(dict.fromkeys(named), key=lambda n: n.count(".")):
        path = name.split(".")
        _put(found, composed, path[:1] if path[0] in _WHOLE else path)
    if "optim.schedule" in named:
        _drop_unread(found, named)
    return found


def _drop_unread(settings: dict[str, Any], named: Collection[str]) -> None:
    """Leave out what only the earlier schedule of the learning rate reads, and the command line does not name.

    Whoever gives these beside a schedule that does not read them is refused; here the earlier command has given them.
    """
    optim = settings["optim"]
    for name in ("decay_steps", "schedule_steps"):
        _, readers = READ_BY[name]
        if f"optim.{name}" not in named and optim.get("schedule") not in readers:
            optim[name] = None


def without_those_of_one_command(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings, by group, without those that belong to one command and not to the run."""
    kept = {name: copy.deepcopy(found) for name, found in settings.items() if name not in _GROUPS_OF_ONE_COMMAND}
    for group, name in _OF_ONE_COMMAND:
        kept.setdefault(group, {}).pop(name, None)
    return kept


def literal(value: Any) -> Any:
    """The value with every `${` in its texts escaped, because it is resolved already and must not be resolved again."""
    if isinstance(value, str):
        return _REFERENCE.sub(r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, (list, tuple)) else value


def begun_from(named: str | None, saved: Mapping[str, Any]) -> str | None:
    """The `model.init_from` of a run that is resumed: the saved one, even if its first command is repeated.

    That command may have named the directory of another run, and what was saved is the file or checkpoint in it that
    was read. If its words are given again, they mean this same file or checkpoint, whatever the other run has written
    since. The settings must stay equal, because the weights with which a run begins are part of its identity, and
    because workers are adopted only with equal settings.

    Args:
        named: the setting as it is after `merge`.
        saved: the settings of the run that is resumed; empty if no run is resumed.
    """
    model = saved.get("model", {})
    found = model.get("init_from") if isinstance(model, Mapping) else None
    if named is None or not isinstance(found, str):
        return named
    folder, file = (Path(os.path.abspath(os.path.expanduser(path))) for path in (named, found))
    is_part = file.is_relative_to(folder) and _WEIGHTS_OF_A_RUN.fullmatch(file.relative_to(folder).as_posix())
    return found if is_part or file == folder else named


def words_resuming(words: Iterable[str], run_dir: str) -> list[str]:
    """The words of the command that continues a run whose controller has died.

    All words of its command are kept, except for those that say where the run is and where it was resumed from.
    `train.reschedule` is kept, too, because the newest checkpoint may be from before the change of the learning rates.
    Injected faults (`chaos`) are left out, because some of them may have happened already.

    Args:
        words: the words of the command that has died.
        run_dir: the directory of the run.
    """
    from elaswave_spmd.conf.compose import setting_of, word_of  # Hydra: not before it is needed

    names = [(word, setting_of(word)) for word in words]
    kept = [word for word, name in names if name not in _NOT_AGAIN and name.partition(".")[0] != "chaos"]
    return [*kept, word_of("train.resume", run_dir)]


def _put(target: dict[str, Any], composed: Mapping[str, Any], path: list[str]) -> None:
    """Copy the composed value at `path` into `target`. A name that was removed (`~name`) is removed from `target`."""
    head, *rest = path
    if head not in composed:
        target.pop(head, None)
    elif rest and isinstance(composed[head], Mapping) and isinstance(target.get(head), dict):
        _put(target[head], composed[head], rest)
    else:
        target[head] = copy.deepcopy(composed[head])


def _inside_a_run(path: Path, where: str) -> ConfigError | None:
    """The error about a path inside the directory of a run, such as that of a checkpoint; None if it is in no run.

    Args:
        where: the override that names the path.
    """
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
    """True if a name and its value can be an item of config.yaml: a setting, or a group of settings."""
    return isinstance(name, str) and (name not in GROUPS or isinstance(found, dict))


def fields_in(file: Path) -> dict[str, Any] | None:
    """The settings in a config.yaml, by group; None if it is not a mapping, or not YAML as a run writes it.

    Raises:
        OSError: the file cannot be read.
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
