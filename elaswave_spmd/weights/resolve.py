"""Finds the file or checkpoint that `model.init_from` means, once, before any process reads it. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.run_dir.checkpoints import load_newest_good, open_checkpoint
from elaswave_spmd.run_dir.directory import WEIGHTS, has_result
from elaswave_spmd.run_dir.manifest import MANIFEST

SETTING = "model.init_from"
FORMS = (
    f"{SETTING} names a safetensors file, the directory of a run or of its checkpoint, or a directory of Hugging Face"
)


def resolved(settings: Settings) -> Settings:
    """The settings, with a run's directory in `model.init_from` replaced by the file or checkpoint that is read.

    This is weights.safetensors if the run has finished, and its newest good checkpoint otherwise. All workers must read
    the same one, and a run that is still training writes newer checkpoints while they start. A checkpoint is compared
    with its hashes here, and not again when workers read it.

    Raises:
        ConfigError, CheckpointError: there is no such file or directory; the run has no good checkpoint; the checkpoint
            is damaged.
    """
    given = settings.model.init_from
    if given is None or settings.train.resume is not None:
        return settings  # a run that is resumed goes on from its own checkpoint
    path = found = existing_path(given)
    if os.path.exists(path / MANIFEST):
        open_checkpoint(path, verify=True)
    elif os.path.exists(path / CONFIG):
        found = path / WEIGHTS if has_result(path) else load_newest_good(path)[0].path
    return settings if found == path else replace(settings, model=replace(settings.model, init_from=str(found)))


def existing_path(given: str) -> Path:
    """The path that `model.init_from` names.

    Raises:
        ConfigError: nothing is there, or a directory on the way to it may not be entered.
    """
    path, where = Path(os.path.expanduser(given)), checks.override(SETTING, given)
    try:
        os.stat(path)
    except PermissionError as error:
        raise unreadable(path, where, error) from error
    except OSError:  # also raised for a name that is too long
        raise ConfigError(
            f"there is no file or directory {path}",
            rule=FORMS,
            where=where,
            fix=f"{SETTING}=FILE or {SETTING}=DIR; models are not downloaded",
        ) from None
    return path


def unreadable(path: Path, where: str, error: OSError) -> ConfigError:
    """The error about weights that cannot be read and may exist all the same: no permission, or a failing disk."""
    return ConfigError(
        f"{path} cannot be read ({error.strerror or error})", rule=FORMS, where=where, fix="make it readable"
    )
