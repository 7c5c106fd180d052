"""The checkpoint with the lowest validation loss: the order of a run's validated steps, and which weights exist."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elaswave_spmd.errors import CheckpointError, DataError
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.directory import SUMMARY, WEIGHTS, read_events, read_summary
from elaswave_spmd.run_dir.json_lines import float_of_hex, is_count
from elaswave_spmd.run_dir.manifest import MANIFEST
from elaswave_spmd.run_dir.rollback import still_valid


def ranked(losses: Mapping[int, float]) -> tuple[int, ...]:
    """The steps from the lowest loss to the highest. Equal losses are in the order of steps, and NaN comes last.

    Args:
        losses: step -> validation loss.
    """
    return tuple(sorted(losses, key=lambda step: (losses[step] != losses[step], losses[step], step)))


def ranked_steps(run_dir: Path) -> tuple[int, ...]:
    """The validated steps in the events of a run, from the lowest loss to the highest; empty if there are none."""
    try:
        events = read_events(run_dir)
    except DataError:
        return ()
    found = still_valid(events, "validation")
    # A loss can be compared with the newest one only if it is over as many micro-batches (train.validate_microbatches).
    number = found[-1]["microbatches"] if found else 0
    return ranked({e["step"]: float_of_hex(e["loss_hex"]) for e in found if e["microbatches"] == number})


def best_weights(run_dir: Path, steps: tuple[int, ...], last: int | None) -> tuple[int, str] | None:
    """The best step whose weights are in a run's directory, and their path relative to it. None if there is none.

    Args:
        steps: the validated steps, from the lowest loss to the highest.
        last: the last step of a run that has finished, whose weights are in weights.safetensors; else None.
    """
    for step in steps:
        if step == last:
            return step, WEIGHTS
        path = checkpoint_path(run_dir, step)
        if (path / MANIFEST).exists():
            return step, str(path.relative_to(run_dir))
    return None


def best_path(run_dir: Path) -> Path:
    """The path of the weights with the lowest validation loss: of a checkpoint, or of the run's directory itself.

    The run's directory has the weights of the last step of a run that has finished.

    Raises:
        CheckpointError: the run has not validated, or has no checkpoint of a validated step.
        DataError: its summary is malformed.
    """
    last = read_summary(run_dir).get("steps") if (run_dir / SUMMARY).exists() else None
    if last is not None and not is_count(last):
        raise DataError(f"{run_dir / SUMMARY} has steps={last!r}", rule="steps is the number of the last step")
    found = best_weights(run_dir, ranked_steps(run_dir), last)
    if found is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint of a step that was validated",
            rule="--best, in Python best=True, takes the checkpoint with the lowest validation loss",
            where=str(run_dir),
            fix="train with train.validate_every=N checkpoint.keep_best=1, or leave it out",
        )
    return run_dir if found[1] == WEIGHTS else run_dir / found[1]
