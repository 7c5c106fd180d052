"""The scalars of steps and validations for TensorBoard and other trackers, by the names that they have there."""

from __future__ import annotations

from collections.abc import Mapping

from elaswave_spmd.run_dir.metrics import MetricsLine


def step_scalars(line: MetricsLine) -> dict[str, float]:
    """The scalars of one committed step."""
    values = {"train/loss": line.loss, "train/grad_norm": line.grad_norm, "train/lr": line.lr}
    if line.seconds > 0:
        values["speed/tokens_per_second"] = line.tokens / line.seconds
        values["speed/seconds"] = line.seconds
    values["mesh/workers"] = line.workers
    if line.data_seconds is not None:
        values["speed/data_seconds"] = line.data_seconds
    if line.weight is not None:
        values["train/weight"] = line.weight
    return values


def validation_scalars(loss: float, metrics: Mapping[str, float]) -> dict[str, float]:
    """The scalars of one validation: its loss, and the metrics of the model."""
    return {f"validation/{name}": value for name, value in {"loss": loss, **metrics}.items()}
