"""`train.resume=RUN`: the settings of RUN, with what the command line names explicitly on top."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.format_version import FORMAT_FIELD, version_mismatch
from elaswave_spmd.errors import ConfigError

CONFIG = "config.yaml"
"""Name of the file in a run directory that holds the settings of the run."""

_WHOLE = ("mesh",)  # groups whose settings exclude each other: naming one names them all
_NOT_TAKEN_OVER = ("chaos", "run")  # injected faults and the directory belong to one command line
_OF_ONE_COMMAND = {
    "train": ("resume", "resume_at", "reschedule"),  # how that run was resumed itself
    "runtime": ("launcher",),  # what had started its command
}


def merge(saved: Mapping[str, Any], composed: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The saved settings, with those that were named as they were composed.

    Args:
        saved: settings of the run that is resumed.
        composed: settings of the command line.
        named: groups and dotted names of settings that the command line names.
    """
    found: dict[str, Any] = copy.deepcopy(dict(saved))
    for name in _NOT_TAKEN_OVER:
        found[name] = composed[name]
    for group, names in _OF_ONE_COMMAND.items():
        for name in names:
            found.setdefault(group, {}).pop(name, None)
    # Groups come first: `model.layers=2 model=llama_tiny` is llama_tiny with 2 layers in any order.
    for name in sorted(dict.fromkeys(named), key=lambda n: n.count(".")):
        path = name.split(".")
        _put(found, composed, path[:1] if path[0] in _WHOLE else path)
    return found


def _put(target: dict[str, Any], composed: Mapping[str, Any], path: list[str]) -> None:
    """Copy what was composed at `path`; what is not there any more (`~name`) is removed from `target`."""
    head, *rest = path
    if head not in composed:
        target.pop(head, None)
    elif rest and isinstance(composed[head], Mapping) and isinstance(target.get(head), dict):
        _put(target[head], composed[head], rest)
    else:
        target[head] = copy.deepcopy(composed[head])


def saved(run: str) -> dict[str, Any]:
    """The settings in a run's config.yaml, as plain data.

    Raises:
        ConfigError: the file is missing or damaged, or a version with another format wrote it.
    """
    import yaml

    file = Path(run).expanduser() / CONFIG
    where = checks.override("train.resume", run)
    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror or error})",
            rule="train.resume names the directory of a run",
            where=where,
            fix="train.resume=runs/NAME",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} does not hold the settings of a run", where=where, fix="another run")
    if mismatch := version_mismatch(fields.pop(FORMAT_FIELD, None)):
        raise ConfigError(
            f"{file} {mismatch}",
            rule="a run goes on with the format version that it began with",
            where=where,
            fix="resume it with the version of elaswave_spmd that wrote it, or start another run",
        )
    return fields
