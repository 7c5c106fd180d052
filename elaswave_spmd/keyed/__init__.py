"""An alias of `elaswave_spmd.determinism`, the name under which models import keyed randomness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elaswave_spmd import determinism

if TYPE_CHECKING:
    from elaswave_spmd.determinism import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Forwards every name. Names that need torch import it only when they are used."""
    return getattr(determinism, name)
