"""The order in which a worker does its part of a step: it runs whichever action is ready.

The placement, or the recovery plan of an interrupted step, says which micro-batches a worker runs. The worker chooses
their order by itself, and no bit depends on it. It prefers a backward; if none is ready, a forward, as long as the
number of micro-batches in flight is below its bound; else weight gradients that were put off
(programs/split_backward.py). Of several it takes the one with the lowest turn (`pipeline.turns`).

No worker waits for ever. Weight gradients wait for nothing, and on the last stage every micro-batch in flight can run
backward at once. So the last stage runs every micro-batch in spite of its bound, and sends the stage before every
gradient that it waits for; the same then holds for that stage, and so on to the first.
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
        forward: it must run forward. False: its forward is done, and is saved if the backward needs it.
        backward: what is left of the backward: FULL, INPUT_GRADIENT, WEIGHTS_ONLY (its weight gradients were put off),
            or 0 if nothing is (`recovery.partial_step`).
        alone: its weight gradients are sent by themselves, not added to those of other micro-batches here.
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
    """The most micro-batches of which a worker keeps tensors.

    Args:
        in_flight: the most between forward and backward. A forward whose backward another worker runs keeps nothing,
            and does not count.
        put_off: the most between backward and weight gradients; 0: backwards are not in two parts.
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
    """The micro-batch to run next, of those whose next action has its input; None if there is none.

    A backward comes first: it frees memory, and other stages wait for it. Then come forwards, then weight gradients. If
    no more may be put off, weight gradients come before a backward.

    Args:
        work: micro-batch -> what is left of it.
        turn: returns the turn of a micro-batch; the lowest runs first.
        has_activation, has_gradient: return True if the input of a micro-batch's forward, or backward, is here.
        limits: the most micro-batches in flight and put off.
    """
    to_come: list[int] = []
    in_flight: list[int] = []
    put_off: list[int] = []
    # One pass, since this runs before every action, over everything that is left of the step.
    for microbatch, left in work.items():
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

    That is so if the action is the next one of its micro-batch, has its input, and is within the limits. The other
    arguments are those of `next_ready`.
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
