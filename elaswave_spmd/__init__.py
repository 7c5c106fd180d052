"""Elastic SPMD training of PyTorch models.

The names below are what a model of your own needs: `from elaswave_spmd import LayeredModel, P, Shardings, shard, tie`.
They are loaded when they are first used, so that importing the package imports neither torch nor numpy: planning needs
no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elaswave_spmd.determinism import KeyedDropout, Keys
    from elaswave_spmd.models import Batch, LayeredModel
    from elaswave_spmd.sharding import P, Shardings, shard, tie

__version__ = "0.1.0"

_ROOM_OF = {
    "Batch": "models",
    "KeyedDropout": "determinism",
    "Keys": "determinism",
    "LayeredModel": "models",
    "P": "sharding",
    "Shardings": "sharding",
    "shard": "sharding",
    "tie": "sharding",
}

__all__ = ["Batch", "KeyedDropout", "Keys", "LayeredModel", "P", "Shardings", "__version__", "shard", "tie"]


def __getattr__(name: str) -> object:
    """Called for a name that is not there yet (PEP 562)."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = found
    return found
