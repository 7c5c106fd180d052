"""Elastic SPMD training of PyTorch models.

`import elaswave_spmd as ew`: `ew.train`, `ew.load_run`, `ew.load_model`, `ew.plan` and `ew.simulate` are the command
line as functions, and `ew.errors` is what they raise. A model of your own needs LayeredModel, P, Shardings, shard, tie
and KeyedDropout; code that hears of a run, `Callback` with its records.

They are loaded when they are first used, so that importing the package imports neither torch nor numpy: planning needs
no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from elaswave_spmd import errors
from elaswave_spmd.version import __version__

if TYPE_CHECKING:
    from elaswave_spmd.api.planning import plan, simulate
    from elaswave_spmd.api.results import RunResult, load_run
    from elaswave_spmd.api.training import train
    from elaswave_spmd.callbacks import (
        Callback,
        CheckpointRecord,
        EndRecord,
        EventRecord,
        StartRecord,
        StepRecord,
        ValidationRecord,
    )
    from elaswave_spmd.determinism import KeyedDropout, Keys
    from elaswave_spmd.models import Batch, LayeredModel
    from elaswave_spmd.sharding import P, Shardings, shard, tie
    from elaswave_spmd.weights.load import load_model

_ROOM_OF = {
    "Batch": "models",
    "Callback": "callbacks",
    "CheckpointRecord": "callbacks",
    "EndRecord": "callbacks",
    "EventRecord": "callbacks",
    "KeyedDropout": "determinism",
    "Keys": "determinism",
    "LayeredModel": "models",
    "P": "sharding",
    "RunResult": "api.results",
    "Shardings": "sharding",
    "StartRecord": "callbacks",
    "StepRecord": "callbacks",
    "ValidationRecord": "callbacks",
    "load_model": "weights.load",
    "load_run": "api.results",
    "plan": "api.planning",
    "shard": "sharding",
    "simulate": "api.planning",
    "tie": "sharding",
    "train": "api.training",
}

__all__ = [
    "Batch",
    "Callback",
    "CheckpointRecord",
    "EndRecord",
    "EventRecord",
    "KeyedDropout",
    "Keys",
    "LayeredModel",
    "P",
    "RunResult",
    "Shardings",
    "StartRecord",
    "StepRecord",
    "ValidationRecord",
    "__version__",
    "errors",
    "load_model",
    "load_run",
    "plan",
    "shard",
    "simulate",
    "tie",
    "train",
]


def __getattr__(name: str) -> object:
    """Called for a name that is not there yet (PEP 562)."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The names that are there and those that are loaded when they are first used: what tab completion shows."""
    return sorted({*globals(), *_ROOM_OF})
