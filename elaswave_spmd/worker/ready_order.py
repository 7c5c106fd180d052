"""The order in which a worker does its part of a step: whatever is ready runs.

The placement, or the recovery plan of an interrupted step, says which micro-batches a worker runs. In which order it
does so is its own affair, which no bit depends on: a backward as soon as there is one, else a forward, with a bounded
number of micro-batches in flight, else weight gradients that were put off (programs/split_backward.py). Of several it
takes the one whose turn it is (`pipeline.turns`).

No worker can wait for ever. Weight gradients wait for nothing, and every micro-batch in flight on the last stage can
run backward at once. So its bound lets every micro-batch through in the end, the stage before gets every gradient that
it waits for, and so on to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elaswave_spmd.recovery.partial_step import FULL, INPUT_GRADIENT, WEIGHTS_ONLY
from elaswave_spmd.scheduling.pipeline import FORWARD, WEIGHTS


@dataclass
class MicrobatchWork:
    """The actions that are left of a micro-batch on this worker.

    Args:
        forward: it has to run forward; else a saved forward serves.
        backward: FULL, INPUT_GRADIENT, WEIGHTS_ONLY if its weight gradients were put off, or 0 for none
            (`recovery.partial_step`).
        alone: its gradient is not added to others here, but sent by itself.
    """

    forward: bool
    backward: int
    alone: bool

    @property
    def is_in_flight(self) -> bool:
        """True between forward and backward: activations are kept."""
        return not self.forward and self.needs_gradient

    @property
    def needs_gradient(self) -> bool:
        """True if a backward is to come that begins with the gradient of the stage's output."""
        return self.backward in (FULL, INPUT_GRADIENT)


@dataclass(frozen=True)
class KeptLimits:
    """The most micro-batches that a worker keeps anything of.

    Args:
        in_flight: between forward and backward. A forward whose backward another worker runs keeps nothing, and does
            not count.
        put_off: between backward and weight gradients; 0: backwards are whole.
    """

    in_flight: int
    put_off: int = 0


def next_ready(
    work: Mapping[int, MicrobatchWork],
    turn: Callable[[int], float],
    has_activation: Callable[[int], bool],
    has_gradient: Callable[[int], bool],
    limits: KeptLimits,
) -> int | None:
    """A micro-batch whose next action has its input; None if there is none.

    A backward if there is one: it frees memory, and other stages wait for it. Else a forward, else weight gradients;
    these come before a backward where no more may be put off.

    Args:
        work: micro-batch -> what is left of it.
        turn: of a micro-batch; the lowest goes first.
        has_activation, has_gradient: the input of a micro-batch's forward, or backward, is here.
    """
    to_come: list[int] = []
    in_flight: list[int] = []
    put_off: list[int] = []
    for microbatch, left in work.items():  # once: it is asked before every action, of all that is left of the step
        if left.forward:
            to_come.append(microbatch)
        elif left.backward == WEIGHTS_ONLY:
            put_off.append(microbatch)
        elif left.backward:
            in_flight.append(microbatch)
    if backwards := [u for u in in_flight if has_gradient(u)]:
        has_room = not put_off or len(put_off) < limits.put_off
        return min(backwards if has_room else put_off, key=turn)
    is_full = len(in_flight) >= limits.in_flight
    forwards = [u for u in to_come if not (is_full and work[u].needs_gradient) and has_activation(u)]
    return min(forwards or put_off, key=turn, default=None)


def is_ready(
    kind: str,
    microbatch: int,
    work: Mapping[int, MicrobatchWork],
    has_activation: Callable[[int], bool],
    has_gradient: Callable[[int], bool],
    limits: KeptLimits,
) -> bool:
    """True if an action of this kind (`scheduling.pipeline`) may run now.

    It is the next one of its micro-batch, has its input, and is within the limits. Further arguments as for
    `next_ready`.
    """
    left = work.get(microbatch)
    if left is None:
        return False
    if kind == WEIGHTS:
        return not left.forward and left.backward == WEIGHTS_ONLY
    if kind == FORWARD:
        in_flight = sum(other.is_in_flight for other in work.values())
        has_room = in_flight < limits.in_flight or not left.needs_gradient
        return left.forward and has_room and has_activation(microbatch)
    put_off = sum(not other.forward and other.backward == WEIGHTS_ONLY for other in work.values())
    has_room = not put_off or put_off < limits.put_off
    return left.is_in_flight and has_room and has_gradient(microbatch)
