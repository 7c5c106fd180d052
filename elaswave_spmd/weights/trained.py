"""Opens the trained weights of a run, with the settings of its model, for `export`, `generate` and `load_model`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elaswave_spmd.conf.format_version import FORMAT_FIELD, version_mismatch
from elaswave_spmd.conf.resume import CONFIG, fields_in
from elaswave_spmd.conf.schema import DataSettings, ModelSettings, TrainSettings
from elaswave_spmd.data.spec import BYTES, names_tokenizer
from elaswave_spmd.errors import ConfigError, ModelError
from elaswave_spmd.models import LayeredModel, build_model, import_model
from elaswave_spmd.models.build import OWN
from elaswave_spmd.regular_files import read_regular
from elaswave_spmd.run_dir.best import best_path
from elaswave_spmd.run_dir.checkpoints import load_newest_good, open_checkpoint
from elaswave_spmd.run_dir.directory import SUMMARY, WEIGHTS, WEIGHTS_EMA, has_result, read_summary
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.weights.given import owned_parameters
from elaswave_spmd.weights.intact import check_intact
from elaswave_spmd.weights.sources import OwnTensors, SavedState, WeightSource, no_average
from elaswave_spmd.weights.tensor_files import TensorFiles

_RUN_RULE = "RUN is the directory of a run, or of one of its checkpoints"
_FIX = "runs/NAME, or runs/NAME/checkpoints/step_00000100"
AS_WRITTEN = "config.yaml as the run wrote it"
"""The advice about a model whose settings give other parameters than those that were trained."""
_LISTED = 5  # names in a message


@dataclass(frozen=True)
class TrainedModel:
    """A model as a run has trained it.

    Args:
        path: the file or checkpoint that holds the weights.
        settings: the settings of the model.
        data: the settings of the data, which name its tokenizer.
        seq_len: tokens of a training sequence.
        model: the model on the meta device. The values of its parameters are read from `source`.
        source: the weights.
    """

    path: Path
    settings: ModelSettings
    data: DataSettings
    seq_len: int
    model: LayeredModel
    source: WeightSource


def open_trained(run: str, *, average: bool = False, best: bool = False) -> TrainedModel:
    """Open the weights of a run of a built-in model and build the model, for `generate` and `export`.

    No code that the run's settings name is imported or called, so the run may come from anybody.

    Args:
        run: the directory of a checkpoint, whose weights are opened; or that of a run, of which weights.safetensors is
            opened, or else the newest good checkpoint.
        average: open the average of the weights over the steps (optim.ema) instead; weights_ema.safetensors.
        best: of a run's directory, open the checkpoint with the lowest validation loss, or weights.safetensors if its
            loss is the lowest.

    Raises:
        ConfigError: RUN is not the directory of a run; its settings cannot be read; it has no average; its model is not
            a built-in one; the weights have no embed.weight.
        CheckpointError: the checkpoint is damaged, or there is none; weights.safetensors does not match its hash.
        ModelError: the model cannot be built.
    """
    opened = open_run(run, average=average, best=best)
    fields, source = opened.fields, opened.source
    settings = ModelSettings.from_fields(fields.get("model", {}))
    _refuse_own_model(settings, opened.path)
    data, train = DataSettings.from_fields(fields.get("data", {})), TrainSettings.from_fields(fields.get("train", {}))
    model = _build(settings, source, train.seq_len, run)
    return TrainedModel(opened.path, settings, data, train.seq_len, model, source)


def _refuse_own_model(settings: ModelSettings, path: Path) -> None:
    """Refuse a model of the user's own, before the name in the run's settings is imported: it may name any code.

    Raises:
        ConfigError: the model is not one of the built-in models.
    """
    if settings.target not in OWN:
        raise ConfigError(
            f"model.target={settings.target} is not a built-in model",
            rule="generate and export are for built-in models: what another one computes is not known, and code that "
            "a run's directory names is not called",
            where=str(path),
            exists=", ".join(f"model.target={name}" for name in OWN),
            fix="for a run that you trust elaswave_spmd.load_model(RUN) in Python; or read its weights.safetensors, "
            "which has the parameters by their names",
        )


@dataclass(frozen=True)
class OpenedRun:
    """The settings of a run, and opened weights of it.

    Args:
        folder: the run's directory.
        fields: its settings, by group.
        path: the file or checkpoint that holds the weights.
        source: the weights.
    """

    folder: Path
    fields: Mapping[str, Any]
    path: Path
    source: WeightSource


def open_run(run: str, *, average: bool = False, best: bool = False) -> OpenedRun:
    """Open the weights of a run, of a model of any kind. The arguments are those of `open_trained`.

    Raises:
        ConfigError: RUN is not the directory of a run; its settings cannot be read; it has no average.
        CheckpointError: the checkpoint is damaged, or there is none; weights.safetensors does not match its hash.
    """
    given = Path(os.path.expanduser(run))
    if best:
        _refuse_checkpoint(given, run)
        given = best_path(given)
    is_checkpoint = os.path.exists(given / MANIFEST)
    folder = given.resolve().parent.parent if is_checkpoint else given
    fields = read_config(folder / CONFIG, run)
    path, source = open_source(given, is_checkpoint=is_checkpoint, average=average)
    check_intact(path, source)
    return OpenedRun(folder, fields, path, source)


def _refuse_checkpoint(given: Path, run: str) -> None:
    """Refuse the directory of a checkpoint where the best weights of a run are asked for.

    Raises:
        ConfigError: `given` is the directory of a checkpoint.
    """
    if os.path.exists(given / MANIFEST):
        raise ConfigError(
            f"{run} is a checkpoint, and the best one is asked for",
            rule="--best, in Python best=True, takes the checkpoint of a run with the lowest validation loss",
            where=run,
            fix=f"{given.resolve().parent.parent}, its run; or leave it out",
        )


def check_parameters(model: LayeredModel, source: WeightSource, run: str, fix: str) -> None:
    """Refuse a model whose parameters are not those that were trained.

    Args:
        source: the trained weights.
        run: the run as the user named it, for errors.
        fix: the advice in the error.

    Raises:
        ModelError: the names or shapes of parameters differ.
    """
    wanted = {name: tuple(model.get_parameter(name).shape) for name, _ in owned_parameters(model)}
    stored = dict(source.shapes)
    wrong = [
        f"{name}: {wanted.get(name, 'not there')} in the model, {stored.get(name, 'not there')} in the run"
        for name in sorted(wanted.keys() | stored.keys())
        if wanted.get(name) != stored.get(name)
    ]
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        raise ModelError(
            f"{type(model).__name__} has other parameters than {run}:"
            + "".join(f"\n  {line}" for line in wrong[:_LISTED] + more),
            rule="a model is loaded by the code and the settings that it was trained with",
            where="model",
            fix=fix,
        )


def tokenizer_file(trained: TrainedModel) -> Path | None:
    """The tokenizers JSON file that the run's text was tokenised with.

    None if the run was trained on bytes, on given token ids or on a user's own dataset.

    Raises:
        ConfigError: the file is gone, or has changed since the run was started.
    """
    data = trained.data
    if data.target is not None or data.tokenizer == BYTES:
        return None
    file = Path(os.path.expanduser(data.tokenizer))
    if not os.path.isfile(file):
        raise ConfigError(
            f"the tokenizer of the run, {file}, is not there",
            rule="text is turned into tokens by the tokenizer that the model was trained with",
            where=f"data.tokenizer={data.tokenizer}",
            fix="put it back, or run this command in the directory in which the run was started",
        )
    _check_same(trained, file)
    return file


def about_data(path: Path, source: WeightSource) -> Mapping[str, Any]:
    """A run's record of its data: `tokenizer`, `vocab_size` and `attributes`, as far as it has them.

    The record is in the manifest of a checkpoint, or in the summary of a finished run.

    Args:
        path: the file or checkpoint that holds the weights.
        source: these weights.

    Raises:
        DataError: the summary is malformed.
    """
    if isinstance(source, SavedState):
        return source.checkpoint.manifest.identity.get("data", {})
    found = read_summary(path.parent).get("corpus") if os.path.exists(path.parent / SUMMARY) else None
    return found if isinstance(found, dict) else {}


def recorded_tokenizer(trained: TrainedModel) -> str:
    """The tokenizer that the run was trained with, in the form of `PreparedData.tokenizer`; "" if it is not known."""
    return str(about_data(trained.path, trained.source).get("tokenizer", ""))


def is_on_tokens(trained: TrainedModel) -> bool:
    """True if the run was trained on given token ids, so that the tokenizer that made them is not known."""
    named = recorded_tokenizer(trained)
    return bool(named) and not names_tokenizer(named)


def _check_same(trained: TrainedModel, file: Path) -> None:
    """Refuse a tokenizer file that has changed since the run was started, by the digest in the run's record."""
    named = recorded_tokenizer(trained)
    _, _, digest = named.rpartition(":")
    found = hashlib.sha256(read_regular(file)).hexdigest()
    if digest and not found.startswith(digest):
        raise ConfigError(
            f"the tokenizer {file} has changed since the run was started",
            rule="text is turned into tokens by the tokenizer that the model was trained with",
            where=f"data.tokenizer={trained.data.tokenizer}",
            exists=f"sha256 {found[:12]}, and {digest} in the run",
            fix="put the former file back",
        )


def read_config(file: Path, run: str) -> Mapping[str, Any]:
    """The settings in a run's config.yaml, by group.

    Args:
        run: the run as the user named it, for errors.

    Raises:
        ConfigError: the file cannot be read, does not hold settings, or has another format version.
    """
    try:
        fields = fields_in(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror or error})", rule=_RUN_RULE, where=run, fix=_FIX
        ) from None
    if fields is None:
        raise ConfigError(f"{file} does not hold the settings of a run", rule=_RUN_RULE, where=run, fix=_FIX)
    if FORMAT_FIELD in fields and (mismatch := version_mismatch(fields[FORMAT_FIELD])):
        raise ConfigError(
            f"{file} {mismatch}",
            rule="a run is read by the format version that it was written with",
            where=run,
            fix="read it with the version of elaswave_spmd that wrote it",
        )
    return fields


def open_source(given: Path, *, is_checkpoint: bool = False, average: bool = False) -> tuple[Path, WeightSource]:
    """Open the weights of a run or of a checkpoint.

    Args:
        given: the directory of the run, or of the checkpoint.
        is_checkpoint: `given` is the directory of a checkpoint.
        average: open the average of the weights over the steps instead.

    Returns:
        The path of the file or checkpoint that holds the weights, and the weights.

    Raises:
        ConfigError: there is no average.
        CheckpointError: the checkpoint is damaged, or there is none.
    """
    if is_checkpoint:
        open_checkpoint(given, verify=True)
        return given, SavedState(given, average=average)
    if has_result(given):
        file = given / (WEIGHTS_EMA if average else WEIGHTS)
        if not os.path.exists(file):
            raise no_average(given)
        return file, OwnTensors(TensorFiles([file], str(given)))
    checkpoint, _ = load_newest_good(given)
    return checkpoint.path, SavedState(checkpoint.path, average=average)


def _build(settings: ModelSettings, source: WeightSource, seq_len: int, run: str) -> LayeredModel:
    """Build the model on the meta device. Its vocabulary was that of the data: the number of rows of embed.weight.

    Raises:
        ConfigError: the weights have no embed.weight.
        ModelError: the model cannot be built.
    """
    if "embed.weight" not in source.shapes:
        raise ConfigError(
            f"the weights of {run} have no embed.weight",
            rule="this command is for models whose first layer is an embedding called embed, as in the built-in ones",
            where=run,
            exists=", ".join(sorted(source.shapes)[:5]),
            fix="read its weights.safetensors by safetensors.torch.load_file",
        )
    import_model(settings.target)
    with torch.device("meta"):
        return build_model(settings.target, settings.sizes(seq_len, source.shapes["embed.weight"][0]), settings.args)
