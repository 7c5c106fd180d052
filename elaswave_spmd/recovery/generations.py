"""Generations of a run's controller: the number that fences what a controller of the past had sent.

A controller that comes back (docs/protocol.md, A1 to A12) is the next generation of the run's controller, and its
number precedes the mesh epoch in every message that it sends. The first controller of a run is generation 1, and writes
no number: a run whose controller never dies has nothing of this on its links.
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
"""The generation of a controller that has started its run, or begun it again."""


def stamped(data: bytes, generation: int) -> bytes:
    """An encoded message of a controller, as it goes over a link."""
    return data if generation == FIRST else encode(OfGeneration(generation, data))


class ControllerFence:
    """A worker's end of all links that it ever has from a controller: the newest one alone is listened to.

    Args:
        generation: of the controller that has started the worker.
    """

    def __init__(self, generation: int = FIRST) -> None:
        self.generation = generation
        """Of the controller that is listened to."""
        self.was_adopted = False
        """True once a controller has adopted this worker: the one that has started it is gone."""
        self.unpacker = Unpacker()

    def admitted(self, message: AnyMessage) -> AnyMessage | None:
        """What a message of a controller says, as it comes; None if it is one of an older generation, or belongs to the
        next one.

        Raises:
            RunError: it is a change to another Reconfigure than the last one.
            msgspec.MsgspecError: it has something else inside than a message.
        """
        if isinstance(message, Adopt):
            if message.generation <= self.generation:
                return None
            self.generation, self.was_adopted = message.generation, True
            return message
        generation = FIRST
        if isinstance(message, OfGeneration):
            generation, message = message.generation, decode(message.data)
        # The first message of a controller on its link is Adopt, so nothing comes of one that is not known yet.
        if generation != self.generation:
            return None
        if isinstance(message, PeerAddresses):
            self.unpacker.addresses_received(message)
            return None
        return self.unpacker.unpacked(message) if isinstance(message, PackedReconfigure) else message
