"""Everything that makes the bits of a run independent of its mesh. Imports without torch; see README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elaswave_spmd.determinism.init import Constant, Init, Normal, Uniform, materialize
from elaswave_spmd.determinism.permutation import permute_many, sample_ids
from elaswave_spmd.determinism.rng import Key, fast_words, fold, philox4x32, root, words

if TYPE_CHECKING:
    from elaswave_spmd.determinism.dropout import KeyedDropout, keyed_dropout
    from elaswave_spmd.determinism.rng_keys import Keys

# The modules of these names import torch. They are loaded on first use, so that planning works without torch.
_NEEDS_TORCH = {
    "KeyedDropout": "elaswave_spmd.determinism.dropout",
    "keyed_dropout": "elaswave_spmd.determinism.dropout",
    "Keys": "elaswave_spmd.determinism.rng_keys",
}

__all__ = [
    "Constant",
    "Init",
    "Key",
    "KeyedDropout",
    "Keys",
    "Normal",
    "Uniform",
    "fast_words",
    "fold",
    "keyed_dropout",
    "materialize",
    "permute_many",
    "philox4x32",
    "root",
    "sample_ids",
    "words",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEEDS_TORCH[name]), name)
