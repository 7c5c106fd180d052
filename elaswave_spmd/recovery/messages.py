"""What workers and the controller say to each other. Plain data, encoded by msgspec, never pickle.

*Data* messages are content: pure functions of (run, step, id), valid in any mesh epoch, filed by id. *Control*
messages (VOTE, PLACE, STATUS ...) carry the mesh epoch that fences them (protocol.md, rule 1). Tensors travel beside
a message, as its payload.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encodes as a compact array [kind, fields ...]."""


# ---- data: filed by id, valid in any epoch ---------------------------------------------------------------------------


class Activation(Message, frozen=True):
    """Payload: what the receiver's stage takes for a unit. `validation`: of a validation unit, at version `step`."""

    step: int
    unit: int
    shape: tuple[int, ...]
    validation: bool = False


class ActivationGradient(Message, frozen=True):
    """Payload: the gradient of the loss by what the receiver's stage gave for a unit."""

    step: int
    unit: int
    shape: tuple[int, ...]


class NodeSum(Message, frozen=True):
    """NODE: payload, fp32, is the tree node (lo, hi) for pages [first, stop) of `layer`'s gradient buffer."""

    step: int
    layer: int
    first: int
    stop: int
    lo: int
    hi: int


class Entry(Message, frozen=True):
    """ENTRY: payload, fp32, is the reduced gradient g(p, step) of state pages [first, stop) of `layer`.

    `norms`: the norm value of each of these pages, little-endian fp32.
    """

    step: int
    layer: int
    first: int
    stop: int
    norms: bytes


class Publish(Message, frozen=True):
    """PUBLISH: payload, compute dtype, is the parameters of state pages [first, stop) of `layer` at version `step`."""

    step: int
    layer: int
    first: int
    stop: int


# ---- control: fenced by the mesh epoch -------------------------------------------------------------------------------


class Vote(Message, frozen=True):
    """VOTE(step, epoch): the sender is at step - 1 and holds the entries of all pages it holds.

    `norm` is the expansion (scheduling.exact) of the norm values of its primary pages; `loss` the step's loss, from the
    primary of the loss page.
    """

    step: int
    epoch: int
    sender: int
    norm: tuple[float, ...]
    loss: float | None = None


class Ready(Message, frozen=True):
    """Worker to controller: listening at `address`."""

    rank: int
    address: str


class Place(Message, frozen=True):
    """PLACE(epoch): members by stage with their addresses, and the counts that make the placement."""

    epoch: int
    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    unit_counts: tuple[tuple[int, ...], ...]
    addresses: dict[int, str]


class Applied(Message, frozen=True):
    """Worker to controller: it is at version `step`. `updated` is False when the gradient was not finite."""

    step: int
    epoch: int
    rank: int
    loss: float
    grad_norm: float
    updated: bool


class ValidationLoss(Message, frozen=True):
    """Last-stage worker to controller: token-sum losses of its validation units at version `step`."""

    step: int
    rank: int
    units: tuple[int, ...]
    losses: tuple[float, ...]


class FinalPages(Message, frozen=True):
    """Primary to controller: payload, fp32, is the master parameters of state pages [first, stop) of `layer`."""

    layer: int
    first: int
    stop: int


class Finished(Message, frozen=True):
    """Worker to controller: all steps applied and all its final pages sent."""

    rank: int
    state_bytes: dict[str, int]
    peak_rss: int


class Failed(Message, frozen=True):
    """Worker to controller: an exception ended it; `report` is its traceback."""

    rank: int
    report: str


class Stop(Message, frozen=True):
    """Controller to worker: end now."""


AnyMessage: TypeAlias = (
    Activation
    | ActivationGradient
    | NodeSum
    | Entry
    | Publish
    | Vote
    | Ready
    | Place
    | Applied
    | ValidationLoss
    | FinalPages
    | Finished
    | Failed
    | Stop
)


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """The inverse of `encode`.

    Raises:
        msgspec.ValidationError: not one of our messages.
    """
    return msgspec.msgpack.decode(data, type=AnyMessage)
