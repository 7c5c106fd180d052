"""The order in which a worker does its part of a step: whatever is ready runs.

The placement, or the recovery plan of an interrupted step, says which micro-batches a worker runs. In which order it
does so is its own affair, which no bit depends on: a backward as soon as there is one, else a forward, with a bounded
number of micro-batches in flight. Of several it takes the one whose turn it is (`pipeline.turns`).

No worker can wait for ever. Every micro-batch in flight on the last stage can run backward at once. So its bound lets
every micro-batch through in the end, the stage before gets every gradient that it waits for, and so on to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass
class MicrobatchWork:
    """The actions that are left of a micro-batch on this worker.

    Args:
        forward: it has to run forward; else a saved forward serves.
        backward: FULL, INPUT_GRADIENT, or 0 for none (`recovery.partial_step`).
        alone: its gradient is not added to others here, but sent by itself.
    """

    forward: bool
    backward: int
    alone: bool

    @property
    def is_in_flight(self) -> bool:
        """True between forward and backward: activations are kept."""
        return not self.forward and self.backward > 0


def next_ready(
    work: Mapping[int, MicrobatchWork],
    turn: Callable[[int], float],
    has_activation: Callable[[int], bool],
    has_gradient: Callable[[int], bool],
    limit: int,
) -> int | None:
    """A micro-batch whose next action has its input: a backward if there is one, else a forward; None if there is none.

    Backwards go first because they free memory, and because other stages wait for them.

    Args:
        work: micro-batch -> what is left of it.
        turn: of a micro-batch; the lowest goes first.
        has_activation, has_gradient: the input of a micro-batch's forward, or backward, is here.
        limit: the most micro-batches in flight. A forward whose backward another worker runs keeps nothing, and counts
            not.
    """
    backwards = [u for u, left in work.items() if not left.forward and has_gradient(u)]
    if backwards:
        return min(backwards, key=turn)
    is_full = sum(left.is_in_flight for left in work.values()) >= limit
    forwards = [u for u, left in work.items() if left.forward and has_activation(u) and not (is_full and left.backward)]
    return min(forwards, key=turn, default=None)
