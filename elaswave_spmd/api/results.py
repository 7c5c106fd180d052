"""`RunResult`: what a run has left in its directory, read as values for Python."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elaswave_spmd.conf.given_files import path_given
from elaswave_spmd.conf.resume import CONFIG
from elaswave_spmd.run_dir import MetricsLine, read_events, read_metrics, read_summary
from elaswave_spmd.run_dir.directory import SUMMARY
from elaswave_spmd.run_dir.rollback import still_valid

if TYPE_CHECKING:
    from torch import Tensor

    from elaswave_spmd.models import LayeredModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class History:
    """The committed steps of a run, as columns: arrays of one length, an element for each step.

    Attributes:
        step: int64, from 1 on.
        loss: float64, mean over the global batch (cross entropy in nats per token for language models).
        grad_norm: float64, global norm of the gradient before clipping.
        lr: float64, the learning rate of the step.
        seconds: float64, wall time since the previous step.
        weight: float64, of the loss over the global batch; NaN: it has none.
        tokens: int64, target tokens of the global batch; its samples, if these are no tokens.
        data_seconds: float64, how long the worker that waited longest waited for samples of the step; NaN: not known.
        workers: int64, members of the mesh when the step committed.
        mesh_epoch: int64, grows with every change of the mesh.
    """

    step: Ints
    loss: Floats
    grad_norm: Floats
    lr: Floats
    seconds: Floats
    data_seconds: Floats
    weight: Floats
    tokens: Ints
    workers: Ints
    mesh_epoch: Ints

    @classmethod
    def of(cls, lines: Sequence[MetricsLine]) -> History:
        """The columns of these lines. Losses and norms are exact: those of `loss_hex` and `grad_norm_hex`."""

        def column(name: str, dtype: type) -> NDArray[Any]:
            return np.array([getattr(line, name) for line in lines], dtype)

        return cls(
            step=column("step", np.int64),
            loss=column("loss", np.float64),
            grad_norm=column("grad_norm", np.float64),
            lr=column("lr", np.float64),
            seconds=column("seconds", np.float64),
            data_seconds=column("data_seconds", np.float64),
            weight=column("weight", np.float64),
            tokens=column("tokens", np.int64),
            workers=column("workers", np.int64),
            mesh_epoch=column("mesh_epoch", np.int64),
        )

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"History({len(self)} steps: {', '.join(vars(self))})"


@dataclass(frozen=True, eq=False)
class Validation:
    """The validations of a run, as columns: arrays of one length, an element for each.

    Attributes:
        step: int64, the step whose state was validated.
        loss: float64, mean over the held-out samples that were read.
        microbatches: int64, how many micro-batches of the held-out split these were.
        metrics: float64 by name, the means of what the model's `metrics` returned; empty if it has none. NaN where a
            validation lacks the name: a run may be resumed with other metrics.
    """

    step: Ints
    loss: Floats
    microbatches: Ints
    metrics: Mapping[str, Floats]

    @classmethod
    def of(cls, events: Sequence[dict[str, Any]]) -> Validation:
        """The columns of the events `validation` among a run's events; those of steps that were given up are not."""
        found = still_valid(events, "validation")
        return cls(
            step=np.array([event["step"] for event in found], np.int64),
            loss=np.array([float.fromhex(event["loss_hex"]) for event in found], np.float64),
            microbatches=np.array([event["microbatches"] for event in found], np.int64),
            metrics={
                name: np.array([event.get("metrics", {}).get(name, math.nan) for event in found], np.float64)
                for name in dict.fromkeys(name for event in found for name in event.get("metrics", {}))
            },
        )

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        return f"Validation({len(self)} validations: {', '.join(vars(self))})"


class Weights(Mapping[str, "Tensor"]):
    """The trained parameters by name, float32 in their own shapes; each is read from the disk when it is asked for.

    Of a run that has finished they are those of weights.safetensors, else those of its newest good checkpoint. A
    parameter that is tied to another one has the name of its owner.

    Raises:
        CheckpointError: there is neither.
    """

    def __init__(self, run_dir: Path) -> None:
        from elaswave_spmd.weights.trained import open_source

        self.path, self._source = open_source(run_dir)

    def __getitem__(self, name: str) -> Tensor:
        from elaswave_spmd.weights.sources import whole

        if name not in self._source.shapes:
            raise KeyError(name)
        try:
            return whole(self._source, name)
        finally:
            self._source.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.shapes)

    def __len__(self) -> int:
        return len(self._source.shapes)

    def __repr__(self) -> str:
        return f"Weights({len(self)} parameters in {self.path})"


@dataclass(frozen=True, eq=False)
class RunResult:
    """A run as its files have it; docs/run_files.md describes each field of them.

    Attributes:
        run_dir: the run's directory.
        settings: all settings, by group: `settings["optim"]["lr"]`.
        history: the committed steps, as arrays.
        validation: the validations, as arrays.
        events: all events in order, as in events.jsonl: `event` is the kind, `time` in seconds since 1970.
        summary: as in summary.json; None if the run has not finished.
    """

    run_dir: Path
    settings: Mapping[str, Any] = field(repr=False)
    history: History
    validation: Validation
    events: tuple[Mapping[str, Any], ...] = field(repr=False)
    summary: Mapping[str, Any] | None = field(repr=False)

    @property
    def finished(self) -> bool:
        """True if the run has its result: it has done its last step, or has stopped early by its validations."""
        return self.summary is not None

    @cached_property
    def weights(self) -> Weights:
        """The trained parameters by name, each read when it is asked for."""
        return Weights(self.run_dir)

    def model(
        self, model: Callable[..., LayeredModel] | None = None, *, ema: bool = False, best: bool = False
    ) -> LayeredModel:
        """The trained model, as `elaswave_spmd.load_model` makes it; the arguments as there."""
        from elaswave_spmd.weights.load import load_model

        return load_model(self.run_dir, model, ema=ema, best=best)

    def __repr__(self) -> str:
        losses = f", loss {self.history.loss[-1]:.4f}" if len(self.history) else ""
        validated = f", validation {self.validation.loss[-1]:.4f}" if len(self.validation) else ""
        ended = "finished" if self.finished else "not finished"
        return f"RunResult({str(self.run_dir)!r}: {len(self.history)} steps{losses}{validated}, {ended})"


def load_run(run_dir: str | os.PathLike[str]) -> RunResult:
    """Read a run from its directory, whether it has finished, has stopped, or goes on.

    Raises:
        ConfigError: it is not the directory of a run, or its settings cannot be read.
        DataError: a file of it is malformed.
    """
    from elaswave_spmd.weights.trained import read_config

    path = Path(os.path.expanduser(path_given("run_dir", run_dir)))
    settings = read_config(path / CONFIG, str(run_dir))
    events = read_events(path)
    summary = read_summary(path) if (path / SUMMARY).exists() else None
    return RunResult(
        run_dir=path,
        settings=settings,
        history=History.of(read_metrics(path)),
        validation=Validation.of(events),
        events=tuple(events),
        summary=summary,
    )
