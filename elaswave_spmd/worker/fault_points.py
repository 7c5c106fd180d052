"""Named points of a step on one worker: progress is counted there, and faults can be injected."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class FaultPoint(str, Enum):
    """A point of a step.

    FORWARD, BACKWARD: before a micro-batch's forward or backward. REDUCE: a micro-batch's gradient of a layer is made,
    and not added to another one or sent yet. SUM: a sum of micro-batches that this worker computes is complete, and not
    sent yet. NORM: a reduced gradient is complete, and no other worker knows. APPLY: the step is decided, and
    nothing is changed yet. PUBLISH: a layer is updated, and its parameters are on their way.

    Only where backwards are in two parts (programs/split_backward.py): INPUT: in the first part, a layer's gradient of
    its input is made. WEIGHTS: before the second part, which makes a micro-batch's weight gradients; in the middle of
    it is REDUCE.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    SUM = "sum"
    NORM = "norm"
    APPLY = "apply"
    PUBLISH = "publish"
    INPUT = "input"
    WEIGHTS = "weights"


OF_SPLIT_BACKWARDS = (FaultPoint.INPUT, FaultPoint.WEIGHTS)
"""The points that no worker passes whose backwards are whole."""

DRAWN = tuple(point for point in FaultPoint if point not in (FaultPoint.SUM, *OF_SPLIT_BACKWARDS))
"""The points of faults that are drawn: those that there were first, so that a seed means the same faults as ever."""

OnFaultPoint = Callable[[FaultPoint, int], None]
"""(point, step): called by the training thread each time that it passes a point."""


def no_op(point: FaultPoint, step: int) -> None:
    """The default: nothing happens at a point."""
