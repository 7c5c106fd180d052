"""An alias of `elaswave_spmd.determinism`, the name under which models import keyed randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elaswave_spmd import determinism
from elaswave_spmd.determinism import *  # noqa: F403  (the names that need no torch)

if TYPE_CHECKING:
    from elaswave_spmd.determinism import KeyedDropout as KeyedDropout
    from elaswave_spmd.determinism import Keys as Keys
    from elaswave_spmd.determinism import keyed_dropout as keyed_dropout


def __getattr__(name: str) -> Any:
    return getattr(determinism, name)
