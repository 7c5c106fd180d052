"""`train.resume=RUN`: the settings of RUN, with what the command line names explicitly on top."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.format_version import FORMAT_FIELD, version_mismatch
from elaswave_spmd.conf.schema import Settings, from_config
from elaswave_spmd.errors import ConfigError

CONFIG = "config.yaml"
"""Name of the file in a run directory that holds the settings of the run."""

_WHOLE = ("mesh",)  # groups whose settings exclude each other: naming one names them all


def settings_of(config: Any, overrides: Iterable[str]) -> Settings:
    """The settings of a command line.

    Args:
        config: what Hydra composed, an `omegaconf.DictConfig`.
        overrides: what the command line named, in Hydra's form: `mesh=dp3`, `train.steps=20`, `+model.args.window=4`.

    Raises:
        ConfigError: as `from_config`; or there is no run where `train.resume` says.
    """
    overrides = list(overrides)
    resume = config.train.get("resume")
    if resume is None:
        return from_config(config)
    from omegaconf import OmegaConf

    named = [re.split(r"[=@]", text.lstrip("+~"), maxsplit=1)[0] for text in overrides]
    base = _saved(str(resume))
    composed: Any = OmegaConf.to_container(config, resolve=False)
    return from_config(OmegaConf.create(merge(base, composed, named)))


def merge(saved: Mapping[str, Any], composed: Mapping[str, Any], named: Iterable[str]) -> dict[str, Any]:
    """The saved settings, with the named ones (groups, or dotted names) as composed.

    Faults on purpose and the directory are those of the command line alone.
    """
    found: dict[str, Any] = copy.deepcopy(dict(saved))
    for name in ("chaos", "run"):
        found[name] = composed[name]
    found.setdefault("train", {}).pop("resume", None)
    for name in sorted(dict.fromkeys(named), key=lambda n: n.count(".")):  # groups first
        path = name.split(".")
        if path[0] in _WHOLE:
            path = path[:1]
        _put(found, composed, path)
    return found


def _put(target: dict[str, Any], composed: Mapping[str, Any], path: list[str]) -> None:
    """What was composed takes the place of what was saved; what it does not have (`~name`) goes."""
    head, *rest = path
    if head not in composed:
        target.pop(head, None)
    elif rest and isinstance(composed[head], Mapping) and isinstance(target.get(head), dict):
        _put(target[head], composed[head], rest)
    else:
        target[head] = copy.deepcopy(composed[head])


def _saved(run: str) -> dict[str, Any]:
    """The settings in a run's config.yaml.

    Raises:
        ConfigError: there is none, it is damaged, or it was written by a version with another format.
    """
    import yaml

    file = Path(run).expanduser() / CONFIG
    where = checks.override("train.resume", run)
    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            "train.resume names the directory of a run",
            got=f"{file} ({error.strerror or error})",
            where=where,
            fix="train.resume=runs/NAME",
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError("the run's config.yaml holds its settings", got=str(file), where=where)
    if mismatch := version_mismatch(fields.pop(FORMAT_FIELD, None)):
        raise ConfigError(
            f"{file} {mismatch}",
            rule="a run goes on with the format version that it began with",
            where=where,
            fix="resume it with the version of elaswave_spmd that wrote it, or start another run",
        )
    return fields
