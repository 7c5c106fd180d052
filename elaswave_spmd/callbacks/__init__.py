"""Code of a user's that hears of a run while it goes on. See README.md."""

from __future__ import annotations

from elaswave_spmd.callbacks.callback import Callback
from elaswave_spmd.callbacks.mlflow_tracker import MlflowTracker
from elaswave_spmd.callbacks.records import (
    CheckpointRecord,
    EndRecord,
    EventRecord,
    StartRecord,
    StepRecord,
    ValidationRecord,
)
from elaswave_spmd.callbacks.wandb_tracker import WandbTracker

__all__ = [
    "Callback",
    "CheckpointRecord",
    "EndRecord",
    "EventRecord",
    "MlflowTracker",
    "StartRecord",
    "StepRecord",
    "ValidationRecord",
    "WandbTracker",
]
