"""`load_model(RUN)`: the model of any run, with its trained weights, as a module in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.given_files import path_given
from elaswave_spmd.conf.schema import ModelSettings, OptimSettings, TrainSettings
from elaswave_spmd.errors import CheckpointError
from elaswave_spmd.models import LayeredModel, build_model, constructing, freeze_parameters, import_model
from elaswave_spmd.run_dir.checkpoints import load_newest_good
from elaswave_spmd.weights.given import owned_parameters
from elaswave_spmd.weights.sources import SavedState, whole
from elaswave_spmd.weights.trained import OpenedRun, about_data, check_parameters, open_run


def load_model(
    run: str | os.PathLike[str],
    model: Callable[..., LayeredModel] | None = None,
    *,
    ema: bool = False,
    best: bool = False,
) -> LayeredModel:
    """The model of a run with its trained weights, on the CPU in float32, in evaluation mode.

    `model(tokens)` runs all layers in this process. It gives them no keys, so there is no dropout.

    Without `model`, what the run's config.yaml names as its model is imported and called: only with runs that you
    trust.

    Args:
        run: the directory of a run, of which weights.safetensors is read, or else the newest good checkpoint; or the
            directory of one of its checkpoints.
        model: the class or function that the run got as its model. It must be given if the run got it by value, from a
            script or a notebook, as a run's directory holds no code. None: the model is imported by the name in the
            run's settings.
        ema: load the average of the weights over the steps (optim.ema) in place of the weights.
        best: load the weights of the run's directory with the lowest validation loss (checkpoint.keep_best).

    Raises:
        ConfigError: `run` is not the directory of a run; its settings cannot be read; it has no average.
        CheckpointError: the checkpoint or weights.safetensors is damaged, there is no checkpoint, or none of a step
            that was validated.
        ModelError: the model cannot be built, or its parameters are not those that were trained.
    """
    opened = open_run(path_given("run", run), average=ema, best=best)
    source = opened.source
    try:
        made = _build(opened.fields, _about_data(opened), model)
        check_parameters(made, source, str(run), "give the class of the run as it was then")
        for parameter in made.parameters():  # the weights are fp32, whatever dtype the constructor gave to parameters
            parameter.data = parameter.data.float()
        with torch.no_grad():
            for name, _ in owned_parameters(made):
                made.get_parameter(name).copy_(whole(source, name))
    finally:
        source.close()
    made.share_ties()
    return made.eval()


def _build(
    fields: Mapping[str, Any], data: Mapping[str, Any], model: Callable[..., LayeredModel] | None
) -> LayeredModel:
    """Construct the model as the run did: under its seed, so that constants which constructors draw are the same.

    Args:
        fields: the run's settings, by group.
        data: `vocab_size` and `attributes` of the run's data, as far as they are known.
        model: the class or function; None to import it by the name in the settings.
    """
    settings = ModelSettings.from_fields(fields.get("model", {}))
    seq_len = TrainSettings.from_fields(fields.get("train", {})).seq_len
    sizes = settings.sizes(seq_len, int(data.get("vocab_size") or 0))
    target = settings.target if model is None else model
    import_model(target)
    with constructing(checks.whole("seed", fields.get("seed", 0))):
        made = build_model(target, sizes, settings.args, data.get("attributes"))
    freeze_parameters(made, OptimSettings.from_fields(fields.get("optim", {})).freeze_patterns)
    return made


def _about_data(opened: OpenedRun) -> Mapping[str, Any]:
    """`vocab_size` and `attributes` of the data that the run was trained on, as far as they are known.

    They are read from the record that belongs to the opened weights, else from the newest checkpoint. Without any,
    `vocab_size` is the number of rows of embed.weight.
    """
    found = about_data(opened.path, opened.source)
    if "vocab_size" in found:
        return found
    try:  # the summary of an earlier version has no vocab_size
        path = load_newest_good(opened.folder)[0].path
        return about_data(path, SavedState(path))
    except CheckpointError:
        shape = opened.source.shapes.get("embed.weight")
        return {"vocab_size": shape[0]} if shape else {}
