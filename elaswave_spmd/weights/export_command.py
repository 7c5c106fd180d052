"""`python -m elaswave_spmd export RUN --to hf DIR`: writes a run's model in the format of Hugging Face."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.errors import ConfigError, closest

FORMATS = ("hf",)


def main(arguments: Sequence[str], program: str) -> int:
    """Write the model, and print the names of its files. Returns the exit code.

    Raises:
        UserError: there is no such run or format; the model cannot be expressed; the directory cannot be written.
    """
    options = _parse(arguments, program)
    form, folder = options.to
    if form not in FORMATS:
        like = closest(form, FORMATS) or FORMATS[0]
        raise ConfigError(
            f"--to {form} is not a format",
            where=f"--to {form} {folder}",
            exists=", ".join(FORMATS),
            fix=f"--to {like} {folder}",
        )
    from elaswave_spmd.weights.export import export_model  # imports torch
    from elaswave_spmd.weights.trained import open_trained

    trained = open_trained(options.run, average=options.ema, best=options.best)
    files = export_model(trained, Path(folder))
    print(f"{folder}: the weights of {trained.path}, in {', '.join(files)}")
    if "tokenizer.json" not in files:
        print("no tokenizer is written: the run was trained on data without one; put its own beside the model")
    return 0


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"{program} export",
        description="Writes the model of a run (gpt or llama) as transformers loads it: config.json, safetensors "
        "files, and the files of its tokenizer.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory, or that of one of its checkpoints")
    parser.add_argument("--best", action="store_true", help="of RUN, the checkpoint with the lowest validation loss")
    parser.add_argument(
        "--to", nargs=2, metavar=("FORMAT", "DIR"), required=True, help="hf, and a directory that is new or empty"
    )
    parser.add_argument("--ema", action="store_true", help="the average of the weights over the steps (optim.ema)")
    return parser.parse_args(arguments)
