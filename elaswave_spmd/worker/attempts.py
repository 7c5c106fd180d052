"""Attempts of a step (V5): what was computed in an older attempt may be wrong, and does not count any more.

A new attempt begins with a mesh epoch, and has the number of that epoch. Data messages carry the number of the attempt.
Without checks (`verify.rate`, `mirror.verify_every`) all steps are in attempt 0, and messages carry no such number.

A validation that a change of the mesh interrupts is run again as a whole, so every mesh epoch begins another attempt of
a validation: its activations carry the mesh epoch of their sender.

Parameters and state that are sent are right in any attempt, unless replicas have differed. That is followed by a
*repair* (H3), which is an attempt too: messages with parameters or state carry the number of the last repair.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.channel import Channel, ForwardingChannel, Incoming

# Tuples and not unions: isinstance with a union takes several times as long, and every message is tested twice.
_OF_ATTEMPT = m.Activation, m.ActivationGradient, m.PartialSum, m.ReducedGradient, m.CheckDigests, m.Addend
_OF_STATE = m.Publish, m.PageState, m.Need
_STAMPED = _OF_ATTEMPT + _OF_STATE
_CONTENT = frozenset({"shape", "forms", "names", "norms", "rows", "attempt"})
"""Fields that are the content of a message. The other fields are its id, which no result of a peer can change."""


class Attempts:
    """The attempt that a worker is in: marks what it sends, and says which received messages count.

    Attributes:
        number: the number of the present attempt; 0 is the first one.
        repair: the number of the newest attempt that began with a repair; 0 if none did.
        epoch: the mesh epoch that was entered last, which is the number of a validation's attempt.
    """

    def __init__(self) -> None:
        self.number = 0
        self.repair = 0
        self.epoch = 0
        self._since = 0  # the version at which the attempt began: all steps up to it are decided
        # (sender, id) -> a message of an attempt that begins with an epoch which this worker has not entered yet.
        self._later: dict[tuple[object, ...], Incoming] = {}

    def begin(self, number: int, version: int, repair: int = 0) -> None:
        """Begin another attempt of the steps after a version; `enter_epoch` follows."""
        self.number, self.repair, self._since = number, repair, version

    def enter_epoch(self, epoch: int) -> list[Incoming]:
        """Enter a mesh epoch. Returns the messages that came early, which the caller handles as if they came now."""
        self.epoch = epoch
        later, self._later = self._later, {}
        return list(later.values())

    def of(self, message: m.Message) -> int:
        """The number that a message carries if it is sent now; 0 for kinds of messages that carry none."""
        if is_of_validation(message):
            return self.epoch
        return self.number if isinstance(message, _OF_ATTEMPT) else self.repair if isinstance(message, _OF_STATE) else 0

    def admits(self, incoming: Incoming) -> bool:
        """True if a message is to be handled now.

        If False, the caller must ignore the message: it is either dropped, as it is of an older attempt of a step or of
        a validation, or kept here for `enter_epoch`, as it is of a later attempt, whose epoch its sender has entered
        first. For each sender and id only the newest message is kept, so that what is kept is bounded by the ids that
        exist, whatever a peer sends.
        """
        message = incoming.message
        if not isinstance(message, _STAMPED) or message.attempt == self.of(message):
            return True
        if message.attempt > self.of(message):
            self._later[(incoming.sender, *_id(message))] = incoming
            return False
        # What was computed of a step that is decided counts, in whichever attempt. Of a validation nothing is decided
        # before its end.
        return isinstance(message, _OF_ATTEMPT) and message.step <= self._since and not is_of_validation(message)


def is_of_validation(message: m.Message) -> bool:
    """True for an activation of a validation."""
    return isinstance(message, m.Activation) and message.validation


def _id(message: m.Message) -> tuple[object, ...]:
    fields = (getattr(message, name) for name in message.__struct_fields__ if name not in _CONTENT)
    return type(message), *fields


class AttemptChannel(ForwardingChannel):
    """A channel that writes the sender's attempt into the data messages that it sends.

    Args:
        channel: sends and receives.
        attempts: the attempt that the worker is in.
    """

    def __init__(self, channel: Channel, attempts: Attempts) -> None:
        super().__init__(channel)
        self._attempts = attempts

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`."""
        if attempt := self._attempts.of(message):
            message = msgspec.structs.replace(message, attempt=attempt)
        super().send(peer, message, payload)
