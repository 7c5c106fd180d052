"""The records that callbacks get. They are frozen, so that nothing of a run can be changed through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elaswave_spmd.run_dir.metrics import MetricsLine as StepRecord

__all__ = ["CheckpointRecord", "EndRecord", "EventRecord", "StartRecord", "StepRecord", "ValidationRecord"]


@dataclass(frozen=True)
class StartRecord:
    """A run that is about to train.

    Attributes:
        run_dir: its directory.
        model, mesh, sharding: names, as in the event `start`.
        params: number of parameters.
        total_steps: the last step of the run.
        first_step: the first one that is computed; above 1 if the run is resumed.
        workers: of the first mesh.
        settings: all settings, by group, as in config.yaml.
    """

    run_dir: Path
    model: str
    mesh: str
    sharding: str
    params: int
    total_steps: int
    first_step: int
    workers: int
    settings: Mapping[str, object]


@dataclass(frozen=True)
class EventRecord:
    """A line of events.jsonl.

    Attributes:
        kind: `fail`, `join`, ...: docs/run_files.md has all of them.
        time: seconds since 1970.
        text: as it was shown.
        fields: the other fields of the line.
    """

    kind: str
    time: float
    text: str
    fields: Mapping[str, object]


@dataclass(frozen=True)
class ValidationRecord:
    """The loss on the held-out split, after a step.

    Attributes:
        loss: mean over `microbatches` micro-batches, in nats per target token.
        loss_hex: `float.hex` of it.
        metrics: of the model, by name, over the same micro-batches; empty if it has none.
    """

    step: int
    loss: float
    loss_hex: str
    microbatches: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that is complete and on the disk.

    Attributes:
        step: the state is the one after this step.
        path: its directory, which goes when `checkpoint.keep` newer ones are there.
        num_bytes: of all its files.
    """

    step: int
    path: Path
    num_bytes: int


@dataclass(frozen=True)
class EndRecord:
    """The end of a run; all of its workers are gone.

    Attributes:
        run_dir: its directory.
        is_finished: it has trained to its end, and summary.json and weights.safetensors are written.
        step: the last committed one; 0: none.
        summary: as in summary.json; empty unless the run has finished.
        error: why it ended before, in one line; empty if it has finished.
    """

    run_dir: Path
    is_finished: bool
    step: int
    summary: Mapping[str, object]
    error: str
