"""Generations of a run's controller: the number by which workers ignore messages that an earlier controller had sent.

A controller that comes back (docs/protocol.md, A1 to A12) is the next generation of the run's controller, and its
number is in front of every message that it sends. The first controller of a run is generation 1 and sends no number. So
a run whose controller never dies has no such bytes in its messages.
"""

from __future__ import annotations

from elaswave_spmd.recovery.messages import (
    Adopt,
    AnyMessage,
    OfGeneration,
    PackedReconfigure,
    PeerAddresses,
    decode,
    encode,
)
from elaswave_spmd.recovery.packed_reconfigure import Unpacker

FIRST = 1
"""The generation of a controller that has started its life of the run, in place of adopting workers."""


def stamped(data: bytes, generation: int) -> bytes:
    """The bytes that go over a link for an encoded message of a controller of this generation."""
    return data if generation == FIRST else encode(OfGeneration(generation, data))


class ControllerFence:
    """A worker's filter for messages of controllers: it accepts those of the newest generation only.

    Args:
        generation: the generation of the controller that has started the worker.
    """

    def __init__(self, generation: int = FIRST) -> None:
        self.generation = generation
        """The generation whose messages are accepted."""
        self.was_adopted = False
        """True once another controller than the one that has started this worker has adopted it."""
        self.unpacker = Unpacker()

    def admitted(self, message: AnyMessage) -> AnyMessage | None:
        """The message that a controller has sent, with its generation removed and unpacked if it is a Reconfigure.

        Returns None if the message is of another generation, or if it has only addresses for the next Reconfigure.

        Raises:
            RunError: the message is a change of another Reconfigure than the last one.
            msgspec.MsgspecError: an OfGeneration does not contain a message.
        """
        if isinstance(message, Adopt):
            if message.generation <= self.generation:
                return None
            self.generation, self.was_adopted = message.generation, True
            return message
        generation = FIRST
        if isinstance(message, OfGeneration):
            generation, message = message.generation, decode(message.data)
        # The first message of a controller on its link is Adopt. So a message of another generation is from an earlier
        # controller.
        if generation != self.generation:
            return None
        if isinstance(message, PeerAddresses):
            self.unpacker.addresses_received(message)
            return None
        return self.unpacker.unpacked(message) if isinstance(message, PackedReconfigure) else message
