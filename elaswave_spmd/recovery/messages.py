"""What workers and the controller say to each other. Plain data, encoded by msgspec, never pickle.

*Data* messages are content: pure functions of (run, step, id), valid in any mesh epoch, filed by id. *Control*
messages (VOTE, PLACE, STATUS ...) carry the mesh epoch that fences them (protocol.md, rule 1). Tensors travel beside
a message, as its payload.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# What messages have as fields, where that is more than numbers and words.
ReplicaRow: TypeAlias = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first page, stop page, primary, mirrors, learners): scheduling.holders.to_rows."""


class StepHeld(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has of one step that is not decided. Everything in it is a pure function of (run, step, id).

    Args:
        assigned: micro-batches that it regards as its own on its stage.
        computed: micro-batches whose backward it has done, through all layers of its stage.
        forwarded: micro-batches with a saved forward whose backward is not done.
        activations: (layer, micro-batch): outgoing activations that it keeps; `layer` is the consumer's first.
        gradients: (layer, micro-batch): outgoing gradients that it keeps, of the output of `layer`, the consumer's
        last. nodes: layer -> tree nodes whose sum it keeps for the whole layer, but for pages that it is the primary
        of. trees: (layer, first, stop, use, nodes): of runs that it is the primary of, the nodes held of `use`'s tree.
        entries: runs (layer, first, stop) whose entry it holds.
    """

    step: int
    assigned: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    forwarded: tuple[int, ...] = ()
    activations: tuple[tuple[int, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    nodes: dict[int, tuple[tuple[int, int], ...]] = {}
    trees: tuple[tuple[int, int, int, int, tuple[tuple[int, int], ...]], ...] = ()
    entries: tuple[tuple[int, int, int], ...] = ()


class Recompute(msgspec.Struct, frozen=True, array_like=True):
    """One line of a salvage plan: `worker` runs `microbatch` through `stage`.

    `forward`: it has to run forward (else the saved one serves). `backward`: 0 none, 1 for the gradient of its input
    only, 2 in full.
    """

    stage: int
    microbatch: int
    worker: int
    forward: bool
    backward: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encodes as a compact array [kind, fields ...]."""


# ---- data: filed by id, valid in any epoch ---------------------------------------------------------------------------


class Activation(Message, frozen=True):
    """Payload: what `layer`, the receiver's first, takes for a micro-batch.

    `validation`: of a validation micro-batch, at version `step`.
    """

    step: int
    microbatch: int
    layer: int
    shape: tuple[int, ...]
    validation: bool = False


class ActivationGradient(Message, frozen=True):
    """Payload: the gradient of the loss by the output of `layer`, the receiver's last, for a micro-batch."""

    step: int
    microbatch: int
    layer: int
    shape: tuple[int, ...]


class PartialSum(Message, frozen=True):
    """NODE: payload, fp32, is the tree node (lo, hi) for pages [first, stop) of `layer`'s gradient buffer."""

    step: int
    layer: int
    first: int
    stop: int
    lo: int
    hi: int


class ReducedGradient(Message, frozen=True):
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


class PageState(Message, frozen=True):
    """Primary to learner: payload, fp32, is the state of pages [first, stop) of `layer` at version `step`.

    The payload is the master and then each optimizer state in turn; `norms` as in Entry, of step `step`.
    """

    step: int
    layer: int
    first: int
    stop: int
    norms: bytes


class Need(Message, frozen=True):
    """To a primary: publish pages [first, stop) of `layer` again, at version `step`. Its answer is a Publish."""

    step: int
    layer: int
    first: int
    stop: int


# ---- control: fenced by the mesh epoch -------------------------------------------------------------------------------


class Vote(Message, frozen=True):
    """VOTE(step, epoch): the sender is at step - 1 and holds the entries of all pages it holds.

    `norm` is the expansion (scheduling.exact) of the norm values of its primary pages; `loss` the step's loss, from the
    primary of the loss page. `grouped`: the group of its stage (runtime.stage_group) can be used to publish this step.
    """

    step: int
    epoch: int
    sender: int
    norm: tuple[float, ...]
    loss: float | None = None
    grouped: bool = False


class GroupLost(Message, frozen=True):
    """To the other members of the sender's stage, and the controller: their group of `epoch` has failed, for a reason
    in words, and is not used again in it."""

    epoch: int
    sender: int
    reason: str = ""


class Ready(Message, frozen=True):
    """Worker to controller: listening at `address`. `latched`: it holds its latch, whose release tells of its death.

    `compiled`: programs that it has compiled, all that it will ever need.
    """

    rank: int
    address: str
    latched: bool = False
    compiled: int = 0


class StepReport(Message, frozen=True):
    """STATUS: the answer to PREPARE(epoch), and to no other. `held`: of the steps version + 1 and version + 2."""

    epoch: int
    rank: int
    version: int
    held: tuple[StepHeld, ...] = ()


class Heartbeat(Message, frozen=True):
    """Worker to controller, every period, from a thread of its own: how far its training thread has come.

    `progress` counts actions; `waiting`: it waits for a message; `action`: what it does, in words.
    """

    rank: int
    progress: int
    waiting: bool
    action: str = ""


class Prepare(Message, frozen=True):
    """PREPARE(epoch): the controller is about to change the mesh. Answered by STATUS, once.

    Answered at once when `after` is below the step that the worker has begun; else after that step is applied and
    before the next one is begun (a planned change: nothing is under way then).
    """

    epoch: int
    after: int = -1


class Reconfigure(Message, frozen=True):
    """PLACE(epoch): members by stage with their addresses, and all that makes the placement.

    `replicas` are rows of scheduling.holders (empty: the healthy deal of the mesh). `version` is the highest of any
    member, and `work` says who runs what of step version + 1 (None: nothing of it was begun, and the placement holds
    for it too). `validate`: the version whose validation is to be run again, or -1. `save`: the run is about to stop:
    write the state of `version` and begin no other step. `forgot`: members that lost what they had of undecided steps;
    they get it anew.
    """

    epoch: int
    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    addresses: dict[int, str]
    replicas: tuple[ReplicaRow, ...] = ()
    version: int = 0
    work: tuple[Recompute, ...] | None = None
    validate: int = -1
    save: bool = False
    forgot: tuple[int, ...] = ()


class CaughtUp(Message, frozen=True):
    """Worker to controller: it has caught up with all runs that it learns in this epoch."""

    rank: int
    epoch: int


class Fingerprints(Message, frozen=True):
    """Worker to controller: hashes of the state that it holds at version `step`: (layer, first, stop, hash)."""

    rank: int
    step: int
    rows: tuple[tuple[int, int, int, bytes], ...]


class Damaged(Message, frozen=True):
    """Worker to controller: before it applied `step`, these runs were not what it had written, or its device had to be
    brought back, for this `reason`: then all that it had of undecided steps is lost too. It has given them up."""

    rank: int
    epoch: int
    step: int
    runs: tuple[tuple[int, int, int], ...]
    reason: str = ""


class LinkClosed(Message, frozen=True):
    """Worker to controller: its link to `peer` is gone, and perhaps some of what it had sent on it."""

    rank: int
    peer: int


class Leaving(Message, frozen=True):
    """Worker to controller: it was asked to end (SIGTERM) and wants to be drained."""

    rank: int


class Wanted(Message, frozen=True):
    """Worker to controller, for chaos: `count` newcomers are to be started."""

    rank: int
    count: int


class Applied(Message, frozen=True):
    """Worker to controller: it is at version `step`. `updated` is False when the gradient was not finite; `grouped`:
    all members have agreed to publish it through the groups of their stages."""

    step: int
    epoch: int
    rank: int
    loss: float
    grad_norm: float
    updated: bool
    grouped: bool = False


class Measured(Message, frozen=True):
    """Worker to controller: what its layer programs took in `step`, `rows` as runtime.layer_times has them. `memory`:
    what micro-batches keep of layers that are new to it, as in runtime.layer_memory. `compiled`: programs that it has
    compiled so far. `link`, once known: (latency in s, bytes per s) of its link to a neighbour (runtime.link_probe)."""

    rank: int
    step: int
    rows: tuple[tuple[int, float, float, int, int], ...]
    memory: tuple[tuple[int, int, int], ...] = ()
    compiled: int = 0
    link: tuple[float, ...] = ()


class ValidationLoss(Message, frozen=True):
    """Last-stage worker to controller: token-sum losses of its validation micro-batches at version `step`."""

    step: int
    rank: int
    microbatches: tuple[int, ...]
    losses: tuple[float, ...]


class Validated(Message, frozen=True):
    """Controller to worker: the validation at version `step` is complete; training goes on."""

    step: int


class FinalPages(Message, frozen=True):
    """Primary to controller: payload, fp32, is the master parameters of state pages [first, stop) of `layer`."""

    layer: int
    first: int
    stop: int


class Finished(Message, frozen=True):
    """Worker to controller: all steps applied and all its final pages sent, as the primaries of `epoch` are."""

    rank: int
    epoch: int
    state_bytes: dict[str, int]
    peak_bytes: dict[str, int]


class Failed(Message, frozen=True):
    """Worker to controller: an exception ended it, in this step; `report` is its traceback."""

    rank: int
    report: str
    step: int = 0


class Wrote(Message, frozen=True):
    """Worker to controller: its shard of the checkpoint of `step` is on the disk, or why there will be none.

    The fields are those of checkpoint_files.ShardInfo. `copy_ms`: how long training stood still for it.
    """

    step: int
    rank: int
    epoch: int
    name: str = ""
    num_bytes: int = 0
    sha256: str = ""
    runs: tuple[tuple[int, int, int], ...] = ()
    copy_ms: float = 0.0
    write_ms: float = 0.0
    error: str = ""


class Stop(Message, frozen=True):
    """Controller to worker: end now."""


AnyMessage: TypeAlias = (
    Activation
    | ActivationGradient
    | PartialSum
    | ReducedGradient
    | Publish
    | PageState
    | Need
    | Vote
    | GroupLost
    | Ready
    | Prepare
    | StepReport
    | Reconfigure
    | CaughtUp
    | Fingerprints
    | Damaged
    | LinkClosed
    | Leaving
    | Wanted
    | Heartbeat
    | Applied
    | Measured
    | ValidationLoss
    | Validated
    | FinalPages
    | Finished
    | Failed
    | Wrote
    | Stop
)


_DECODER = msgspec.msgpack.Decoder(AnyMessage)  # immutable; to make one of this many types takes 30 us, to decode 0.2


def encode(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """The inverse of `encode`.

    Raises:
        msgspec.ValidationError: not one of our messages.
    """
    return _DECODER.decode(data)
