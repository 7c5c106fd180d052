"""The weights that a run has trained, with the settings of its model: opened for `export` and `generate`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.conf.schema import DataSettings, ModelSettings, TrainSettings
from elaswave_spmd.data.spec import BYTES
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.models import LayeredModel, build_model
from elaswave_spmd.run_dir.checkpoints import load_newest_good, open_checkpoint
from elaswave_spmd.run_dir.directory import SUMMARY, WEIGHTS, read_summary
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.weights.sources import OwnTensors, SavedState, WeightSource
from elaswave_spmd.weights.tensor_files import TensorFiles

_RUN_RULE = "RUN is the directory of a run, or of one of its checkpoints"
_FIX = "runs/NAME, or runs/NAME/checkpoints/step_00000100"


@dataclass(frozen=True)
class TrainedModel:
    """A model as a run has trained it.

    Args:
        path: the file or checkpoint that holds the weights.
        settings: of the model.
        data: the settings of the data: its tokenizer.
        seq_len: tokens of a training sequence.
        model: on the meta device; its parameters are read from `source`.
        source: the weights.
    """

    path: Path
    settings: ModelSettings
    data: DataSettings
    seq_len: int
    model: LayeredModel
    source: WeightSource


def open_trained(run: str) -> TrainedModel:
    """Open a run's weights: of the checkpoint, if one is named; else weights.safetensors, or the newest checkpoint.

    Raises:
        ConfigError: RUN is no directory of a run; its settings cannot be read.
        CheckpointError: the checkpoint is damaged, or there is none.
        ModelError: the model cannot be built, as where its file is missing.
    """
    given = Path(run).expanduser()
    is_checkpoint = (given / MANIFEST).exists()
    folder = given.resolve().parent.parent if is_checkpoint else given
    fields = _read_config(folder / CONFIG, run)
    settings = ModelSettings.from_fields(fields.get("model", {}))
    data, train = DataSettings.from_fields(fields.get("data", {})), TrainSettings.from_fields(fields.get("train", {}))
    path, source = _open_source(given, is_checkpoint=is_checkpoint)
    model = _build(settings, source, train.seq_len, run)
    return TrainedModel(path, settings, data, train.seq_len, model, source)


def tokenizer_file(trained: TrainedModel) -> Path | None:
    """The tokenizers JSON file that the run's data was made with; None: bytes, or a dataset that has none here.

    Raises:
        ConfigError: the file is not there any more.
    """
    data = trained.data
    if data.target is not None or data.tokenizer == BYTES:
        return None
    file = Path(data.tokenizer).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"the tokenizer of the run, {file}, is not there",
            rule="text is turned into tokens by the tokenizer that the model was trained with",
            where=f"data.tokenizer={data.tokenizer}",
            fix="put it back, or run this command in the directory in which the run was started",
        )
    _check_same(trained, file)
    return file


def _check_same(trained: TrainedModel, file: Path) -> None:
    """Refuse a tokenizer file that has changed since the run was started."""
    if isinstance(trained.source, SavedState):
        about = trained.source.checkpoint.manifest.identity.get("data", {})
    elif (trained.path.parent / SUMMARY).exists():
        about = read_summary(trained.path.parent).get("corpus", {})
    else:
        return
    named = str(about.get("tokenizer", ""))
    _, _, digest = named.rpartition(":")
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest and not found.startswith(digest):
        raise ConfigError(
            f"the tokenizer {file} has changed since the run was started",
            rule="text is turned into tokens by the tokenizer that the model was trained with",
            where=f"data.tokenizer={trained.data.tokenizer}",
            exists=f"sha256 {found[:12]}, and {digest} in the run",
            fix="put the former file back",
        )


def _read_config(file: Path, run: str) -> Mapping[str, Any]:
    import yaml

    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror or error})", rule=_RUN_RULE, where=run, fix=_FIX
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} does not hold the settings of a run", rule=_RUN_RULE, where=run, fix=_FIX)
    return fields


def _open_source(given: Path, *, is_checkpoint: bool) -> tuple[Path, WeightSource]:
    if is_checkpoint:
        open_checkpoint(given, verify=True)
        return given, SavedState(given)
    if (given / WEIGHTS).exists():
        return given / WEIGHTS, OwnTensors(TensorFiles([given / WEIGHTS], str(given)))
    checkpoint, _ = load_newest_good(given)
    return checkpoint.path, SavedState(checkpoint.path)


def _build(settings: ModelSettings, source: WeightSource, seq_len: int, run: str) -> LayeredModel:
    """The model on the meta device. Its vocabulary is the data's, which the embedding shows."""
    if "embed.weight" not in source.shapes:
        raise ConfigError(
            f"the weights of {run} have no embed.weight",
            rule="this command is for models whose first layer is an embedding called embed, as in the built-in ones",
            where=run,
            exists=", ".join(sorted(source.shapes)[:5]),
            fix="read its weights.safetensors by safetensors.torch.load_file",
        )
    sizes = {
        "vocab_size": source.shapes["embed.weight"][0],
        "seq_len": seq_len,
        "layers": settings.layers,
        "d_model": settings.d_model,
        "heads": settings.heads,
        "dropout": settings.dropout,
    }
    with torch.device("meta"):
        return build_model(settings.target, sizes, settings.args)
