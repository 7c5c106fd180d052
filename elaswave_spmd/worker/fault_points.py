"""The points that a step passes on one worker, by name: where faults are injected and progress is seen."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class FaultPoint(str, Enum):
    """Where a worker is in a step.

    FORWARD, BACKWARD: before a micro-batch's forward or backward. REDUCE: a micro-batch's gradient is made, and not yet
    sent.
    NORM: an entry is complete, and nobody knows. APPLY: the step is decided, nothing is changed yet. PUBLISH: a layer
    is updated and on its way.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    NORM = "norm"
    APPLY = "apply"
    PUBLISH = "publish"


OnFaultPoint = Callable[[FaultPoint, int], None]
"""(point, step): called by the training thread, each time that it passes."""


def no_op(point: FaultPoint, step: int) -> None:
    """A visit that does nothing."""
