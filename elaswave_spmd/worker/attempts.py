"""Attempts of a step: what was computed in an older one may be wrong, and counts no more.

A new attempt begins with a mesh epoch, and has its number. Data messages carry it. Without checks (`verify.rate`,
`mirror.verify_every`) all attempts of steps are 0, and nothing of this is in a message.

A validation that a change of the mesh interrupts is run again as a whole, so every mesh epoch begins another attempt of
a validation: its activations carry the mesh epoch of their sender.

Parameters and state that are sent are right unless replicas have differed: they carry the number of the attempt that
began with a *repair*, which that was the reason for.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.channel import Channel, ForwardingChannel, Incoming

# As tuples: a look at a union takes several times as long, and every message is looked at twice.
_OF_ATTEMPT = m.Activation, m.ActivationGradient, m.PartialSum, m.ReducedGradient, m.CheckDigests, m.Addend
_OF_STATE = m.Publish, m.PageState, m.Need
_STAMPED = _OF_ATTEMPT + _OF_STATE
_CONTENT = frozenset({"shape", "forms", "names", "norms", "rows", "attempt"})
"""Fields that say what a message brings. The others are its id, which does not depend on what a peer has computed."""


class Attempts:
    """The attempt that a worker is in, for what it sends and what it gets.

    Attributes:
        number: of the attempt; 0 is the first one.
        repair: of the newest attempt that began with a repair; 0: none did.
        epoch: the mesh epoch that was entered last, which is the attempt of a validation.
    """

    def __init__(self) -> None:
        self.number = 0
        self.repair = 0
        self.epoch = 0
        self._since = 0  # the version at which it began: steps up to it are decided
        self._later: dict[tuple[object, ...], Incoming] = {}  # of attempts that begin with an epoch still to come

    def begin(self, number: int, version: int, repair: int = 0) -> None:
        """Begin another attempt of the steps after a version; `enter_epoch` follows."""
        self.number, self.repair, self._since = number, repair, version

    def enter_epoch(self, epoch: int) -> list[Incoming]:
        """Enter a mesh epoch. Returns what has come early, to be handled as if it came now."""
        self.epoch = epoch
        later, self._later = self._later, {}
        return list(later.values())

    def of(self, message: m.Message) -> int:
        """The number that a message carries if it is sent now; 0 for kinds that carry none."""
        if is_of_validation(message):
            return self.epoch
        return self.number if isinstance(message, _OF_ATTEMPT) else self.repair if isinstance(message, _OF_STATE) else 0

    def admits(self, incoming: Incoming) -> bool:
        """True if a message is to be handled now.

        It is dropped if it is of an older attempt of a step or a validation, and kept if it is of a later one, whose
        mesh epoch its sender has entered first. Of one id and sender the newest is kept, so that no peer can send more
        than there is.
        """
        message = incoming.message
        if not isinstance(message, _STAMPED) or message.attempt == self.of(message):
            return True
        if message.attempt > self.of(message):
            self._later[(incoming.sender, *_id(message))] = incoming
            return False
        # What was computed of a step that is decided is right. Of a validation nothing is decided before its end.
        return isinstance(message, _OF_ATTEMPT) and message.step <= self._since and not is_of_validation(message)


def is_of_validation(message: m.Message) -> bool:
    """True for an activation of a validation."""
    return isinstance(message, m.Activation) and message.validation


def _id(message: m.Message) -> tuple[object, ...]:
    fields = (getattr(message, name) for name in message.__struct_fields__ if name not in _CONTENT)
    return type(message), *fields


class AttemptChannel(ForwardingChannel):
    """A channel whose data messages carry the attempt of their sender.

    Args:
        channel: does the work.
    """

    def __init__(self, channel: Channel, attempts: Attempts) -> None:
        super().__init__(channel)
        self._attempts = attempts

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`."""
        if attempt := self._attempts.of(message):
            message = msgspec.structs.replace(message, attempt=attempt)
        super().send(peer, message, payload)
