"""The messages between workers and the controller: plain data, encoded by msgspec, never pickled.

*Data* messages are content: pure functions of (run, step, id). They are valid in any mesh epoch, filed by their id, and
duplicates are ignored. Where a worker may have computed wrongly the step has another `attempt` (0 is the first one, and
otherwise the number of the mesh epoch that began it), and what was sent in an older one is dropped. *Control* messages
carry the mesh epoch that fences them (docs/protocol.md, "Messages"). Tensors travel beside a message, as its payload,
and are not copied into it.

The first line of each docstring is "sender -> receiver, when".

Fields of an option that is off are not sent: see `Message.NUM_OPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

import msgspec

ReplicaRow: TypeAlias = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first page, stop page, primary, mirrors, learners): a row of a replica map, as sharding.replicas makes it."""

DigestRow: TypeAlias = tuple[int, bytes, bytes, bytes]
"""(layer, digests of its output, of the gradient of its input, and of its weight gradient) for one micro-batch; empty
where there is no such tensor."""

SumRow: TypeAlias = tuple[int, int, int, bytes]
"""(layer, lo, hi, digest of the sum of its gradients of micro-batches lo to hi - 1) of some pages."""

SumResult: TypeAlias = tuple[bytes, bytes]
"""(digest of a reduced gradient, the norm value of each of its pages as in ReducedGradient)."""

MetricRow: TypeAlias = tuple[str, tuple[float, ...], tuple[float, ...]]
"""(name of a metric, its sum over each micro-batch, the weight of each; () without weights)."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
"""dtype of a tensor that crosses from one stage to another -> bytes of an element."""

ALIGNMENT = 64
"""Bytes: each tensor of a tuple that is sent begins at a multiple, as if it had been made by itself."""

MOST_TENSORS = 1000
"""The most tensors of a tuple that crosses from one stage to another."""

AT_ONCE = -1
"""Prepare.after of a change that cannot wait for the end of a step: it is less than every step, so it is the more
urgent of two changes (their minimum)."""

GROUPED = "grouped"
"""The extension of a vote of a worker that can publish the step through the process group of its stage."""


class PartialStep(msgspec.Struct, frozen=True, array_like=True):
    """Part of StepReport: everything that a worker keeps of one step that is not decided.

    It lists ids only; the tensors stay where they are. Every tensor that is listed is a pure function of (run, step,
    id), so it does not matter which worker made it, or in which mesh.

    Args:
        step: the step.
        assigned: micro-batches that the worker regards as its own on its stage.
        computed: micro-batches whose backward it has done, through all layers of its stage.
        forwarded: micro-batches with a saved forward whose backward has not begun.
        activations: (layer, micro-batch): outgoing activations that it keeps; `layer` is the consumer's first.
        gradients: (layer, micro-batch): outgoing activation gradients that it keeps; `layer` is the consumer's last.
        layer_sums: layer -> tree nodes whose partial sum it keeps for the whole layer, except for pages that it is the
            primary of.
        page_sums: (layer, first, stop, use, tree nodes): of page ranges that it is the primary of, the tree nodes whose
            partial sums it has in the tree of the layer `use`. `use` differs from `layer` for tied parameters only.
        reduced: page ranges (layer, first, stop) whose reduced gradient it has.
        put_off: micro-batches whose backward it has done but for the weight gradients, and which it regards as its own.
    """

    step: int
    assigned: tuple[int, ...] = ()
    computed: tuple[int, ...] = ()
    forwarded: tuple[int, ...] = ()
    activations: tuple[tuple[int, int], ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    layer_sums: dict[int, tuple[tuple[int, int], ...]] = {}
    page_sums: tuple[tuple[int, int, int, int, tuple[tuple[int, int], ...]], ...] = ()
    reduced: tuple[tuple[int, int, int], ...] = ()
    put_off: tuple[int, ...] = ()


class Recompute(msgspec.Struct, frozen=True, array_like=True):
    """Part of Reconfigure, one line of a recovery plan: `worker` runs `microbatch` through `stage`.

    Args:
        forward: it has to run forward; else the saved forward serves.
        backward: 0 for none, 1 for the gradient of its input only, 2 in full, 3 for its weight gradients only.
    """

    stage: int
    microbatch: int
    worker: int
    forward: bool
    backward: int


class TensorForm(msgspec.Struct, frozen=True, array_like=True):
    """Part of Activation: a tensor of a tuple.

    Args:
        dtype: its name, of `ITEM_BYTES`.
        graded: it has a gradient, which comes back.
    """

    dtype: str
    shape: tuple[int, ...]
    graded: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def packed_bytes(forms: Iterable[TensorForm]) -> int:
    """The bytes of a tuple that is sent: each tensor begins at a multiple of `ALIGNMENT`."""
    return sum(aligned(form.num_bytes) for form in forms)


def aligned(size: int) -> int:
    """The bytes between the begins of a tensor of so many bytes and the next one, in a tuple that is sent."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; encodes as a compact array [kind, fields ...]."""

    NUM_OPTIONS: ClassVar[int] = 0
    """The last so many fields belong to options. They are left out of the encoding where they have their defaults, so
    that nothing of an option that is off is on the wire."""


# ---- data: filed by id, valid in any epoch ---------------------------------------------------------------------------


class Activation(Message, frozen=True):
    """A micro-batch's worker on one stage -> its worker on the next stage, as soon as it is made.

    Payload, in the compute dtype: the input of `layer`, which is the receiver's first. The sender keeps it until the
    step is decided, to send it again if the receiver is lost.

    Args:
        shape: of the payload.
        validation: it is of a validation micro-batch, at version `step`, and not kept. Its `attempt` is the mesh epoch
            of the sender.
        forms: of the tensors of a tuple, whose bytes are the payload; () for one tensor.
        names: of its fields, if it is a named tuple.
    """

    NUM_OPTIONS = 3

    step: int
    microbatch: int
    layer: int
    shape: tuple[int, ...]
    validation: bool = False
    attempt: int = 0
    forms: tuple[TensorForm, ...] = ()
    names: tuple[str, ...] = ()


class ActivationGradient(Message, frozen=True):
    """A micro-batch's worker on one stage -> its worker on the stage before, as soon as it is made.

    Payload, in the compute dtype: the gradient of the loss by the output of `layer`, which is the receiver's last; of a
    tuple those of its tensors that have one, whose `forms` are given. Kept by the sender as an Activation is.
    """

    NUM_OPTIONS = 2

    step: int
    microbatch: int
    layer: int
    shape: tuple[int, ...]
    attempt: int = 0
    forms: tuple[TensorForm, ...] = ()


class PartialSum(Message, frozen=True):
    """Worker -> primary, when a tree node is complete as far as it can be on this worker.

    Payload, fp32: the sum of the gradients of micro-batches [lo, hi), for pages [first, stop) of `layer`'s gradient
    buffer.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    lo: int
    hi: int
    attempt: int = 0


class ReducedGradient(Message, frozen=True):
    """Primary -> mirrors and learners, when the root of the tree is there. After a change of primary also mirror -> new
    primary.

    Payload, fp32: the reduced gradient of state pages [first, stop) of `layer`, which is the whole effect of a step on
    these pages.

    Args:
        norms: the norm value of each of these pages, little-endian fp32.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    norms: bytes
    attempt: int = 0


class Publish(Message, frozen=True):
    """Primary -> workers that compute with pages and do not hold them, after the update; and the answer to Need.

    Payload, in the compute dtype: the parameters of state pages [first, stop) of `layer` at version `step`.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    attempt: int = 0


class PageState(Message, frozen=True):
    """Primary -> learner: the state of pages [first, stop) of `layer` at version `step`.

    The primary picks the pages between two steps, and sends them in the background of the next step, before it votes.

    Payload, fp32: the master parameters, then each optimizer state in turn. Of the loss page: whether there is a loss
    yet (0 or 1), and the loss.

    Args:
        norms: as in ReducedGradient, of step `step`: a learner that becomes the primary votes with them.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    norms: bytes
    attempt: int = 0


class Need(Message, frozen=True):
    """Worker -> primary, at the begin of an epoch: publish pages [first, stop) of `layer` again, at version `step`.

    The answer is a Publish, as soon as the primary can give it.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    attempt: int = 0


class CheckDigests(Message, frozen=True):
    """The worker of a micro-batch -> the worker that checks it, after its backward (`verify.rate`).

    Args:
        rows: digests of what it has computed, by layer of its stage.
    """

    NUM_OPTIONS = 1

    step: int
    microbatch: int
    rows: tuple[DigestRow, ...]
    attempt: int = 0


class Addend(Message, frozen=True):
    """The worker of a micro-batch -> the worker that checks the sums of pages of `layer`, after its backward
    (`verify.rate`); and -> a worker that is asked to add them up again.

    Payload, fp32: the gradient of the micro-batch alone, for pages [first, stop) of `layer`'s gradient buffer.

    Args:
        again: an answer to AddAgain.
    """

    NUM_OPTIONS = 2

    step: int
    layer: int
    first: int
    stop: int
    microbatch: int
    again: bool = False
    attempt: int = 0


# ---- control: fenced by the mesh epoch -------------------------------------------------------------------------------


# A vote carries everything that deciding needs: the parts of the gradient's norm, and the loss. So the last vote
# decides the step on every worker, and there is no round trip to a coordinator.


class Vote(Message, frozen=True):
    """Worker -> other members of the epoch, once for a step: everything is there to apply it.

    The sender is at version step - 1, has done its micro-batches, and has the reduced gradients of all pages that it
    holds or learns. On a large mesh it sends sums of more and more votes after its own (recovery/vote_exchange.py).

    Args:
        norm: the exact sum (determinism.exact_sum) of the norm values of its primary pages.
        loss: the step's loss, from the primary of the loss page; None from the others.
        extension: an option that takes effect in this step if all votes carry the same value; empty if off.
        weight: of the loss, with it; None if the model's loss has no weight.
        level: of the block whose votes it is the sum of; 0: it is the sender's own.
    """

    NUM_OPTIONS = 3

    step: int
    epoch: int
    sender: int
    norm: tuple[float, ...]
    loss: float | None = None
    extension: str = ""
    weight: float | None = None
    level: int = 0


class GroupLost(Message, frozen=True):
    """Worker -> the other members of its stage, and the controller: their process group of `epoch` has failed.

    Sent only with `runtime.collectives=group`. Links are used until the next epoch.

    Args:
        reason: of the failure, in words.
    """

    epoch: int
    sender: int
    reason: str = ""


class PairSent(Message, frozen=True):
    """Worker -> another one that it has a pair with (`runtime.pairs`): an Activation, ActivationGradient or PageState.

    Its payload goes from device to device through the pair. If the pair has failed, or its epoch is over, the same is
    sent again, `resent`, with the payload, as raw bytes; or without one, if nobody needs it any more.

    Args:
        epoch: the sender's.
        number: of what this sender has sent this receiver through pairs, from 1 on, whatever the epoch.
        size: bytes of the payload.
        message: the encoded message; empty if nobody needs it any more.
        resent: it comes over the link, with whatever payload it has.
    """

    epoch: int
    number: int
    size: int
    message: bytes
    resent: bool = False


class PairReceived(Message, frozen=True):
    """Worker -> the sender of a PairSent: everything up to this number is here, so that it need not be kept.

    Args:
        number: of PairSent.
    """

    number: int


class PairLost(Message, frozen=True):
    """Worker -> the other worker of a pair, and the controller: the pair of `epoch` has failed.

    Sent only with `runtime.pairs`. Links are used between the two until the next epoch.

    Args:
        other: rank of the other worker.
        reason: of the failure, in words.
    """

    epoch: int
    sender: int
    other: int
    reason: str = ""


class Ready(Message, frozen=True):
    """Worker -> controller, once, when it listens at `address` and has compiled its programs.

    Args:
        holds_mutex: it holds the robust mutex of the death watch, by which its death is noticed at once.
        compiled: number of programs that it has compiled, which are all that it will ever need.
    """

    rank: int
    address: str
    holds_mutex: bool = False
    compiled: int = 0


class Checked(Message, frozen=True):
    """Worker -> controller, before Ready, where the model is checked (`runtime.check_model`): it has passed.

    Args:
        seconds: that the check took.
        layers: of each kind of layer the first one, how many there are, the bytes that a micro-batch keeps of it until
            its backward, those of its output, those that it keeps from its backward to its weight gradients where these
            may be put off, else 0, and a digest of all bits that it has computed: (layer, count, kept, output, put off,
            digest). They are the same on all workers.
        kinds: of each layer of the model, the first one of its kind.
        loss_unchecked: what the loss raised for half a micro-batch, so that it was held to nothing; or "".
        samples: a digest of the micro-batches that it has read, of data without tokens; the same on all workers.
    """

    NUM_OPTIONS = 1

    rank: int
    seconds: float
    layers: tuple[tuple[int, int, int, int, int, bytes], ...]
    kinds: tuple[int, ...]
    loss_unchecked: str = ""
    samples: bytes = b""


class Constructed(Message, frozen=True):
    """Worker -> controller, before Ready: digests of the values that it begins with, where these have to be compared.

    These are what constructors of the model made, or, on several machines, the given weights (`model.init_from`).

    Args:
        rows: (name, whether it is a constant and no parameter, digest). What two workers have is the same.
    """

    rank: int
    rows: tuple[tuple[str, bool, bytes], ...]


class Refused(Message, frozen=True):
    """Worker -> controller, in place of Ready: what the run was given is refused; no other worker could accept it.

    Args:
        error: the fields of the user's error (errors.UserError), by name.
    """

    rank: int
    error: dict[str, str]


class StepReport(Message, frozen=True):
    """Worker -> controller, once for each Prepare: where it is.

    Args:
        version: the step that it applied last. It votes for nothing and applies nothing in older epochs from now on.
        partial_steps: what it keeps of steps version + 1 and version + 2, where that is anything. A worker whose
            micro-batches are all done by others may have gradients of the second one before it has applied the first.
        attempt: that it is in, of the steps after its version.
        ahead: trained page ranges whose state it has learned from a primary that had applied version + 1, already.
        layers: [first, stop) of the stage that it is on. Others than by the newest Reconfigure if that was overtaken
            before it was entered. (): those of the newest Reconfigure.
    """

    NUM_OPTIONS = 3

    epoch: int
    rank: int
    version: int
    partial_steps: tuple[PartialStep, ...] = ()
    attempt: int = 0
    ahead: tuple[tuple[int, int, int], ...] = ()
    layers: tuple[int, ...] = ()


class Heartbeat(Message, frozen=True):
    """Worker -> controller, every period, from a thread of its own: how far its training thread has come.

    Args:
        progress: number of actions so far.
        waiting: the training thread waits for a message, and makes no progress by itself.
        action: what it does, in words.
        rejected: connections and messages that its links have refused so far: (reason, number).
        is_sending: it waits, and much of what it has sent is still on its way over a slow network.
    """

    NUM_OPTIONS = 2

    rank: int
    progress: int
    waiting: bool
    action: str = ""
    rejected: tuple[tuple[str, int], ...] = ()
    is_sending: bool = False


class Prepare(Message, frozen=True):
    """Controller -> members, when the mesh is about to change to `epoch`. Each answers with a StepReport, once.

    Args:
        after: AT_ONCE after a loss. For a planned change: answered after this step is applied and before the next is
            begun, so that nothing is under way; at once by a worker that has begun a later step.
    """

    epoch: int
    after: int = AT_ONCE


class Reconfigure(Message, frozen=True):
    """Controller -> members of the new epoch, when all living members have given their StepReport.

    Args:
        stages: members by stage.
        layer_cuts: first layer of each stage, and the number of layers.
        microbatch_counts: number of micro-batches of each member, by stage.
        addresses: rank -> address, of all members; on a large mesh of those that have been the receiver's peers
            (recovery/peers.py).
        replicas: rows of the replica map; empty: as the mesh without losses has them.
        version: the highest of any member.
        recovery_plan: the recovery plan of step version + 1; to a member of a large mesh come the lines of those
            micro-batches that it has to do with (recovery/peers.py). None: nothing of it was begun, and it runs as
            placed.
        validate: the version whose validation losses the controller does not have, not yet or not any more; None if
            it has all. A run that resumes at a validated step validates it again.
        save: the run is about to stop: write the state of `version` and begin no other step.
        recovered: members that have given up state, or whose device failed and was brought back, which lost everything
            that they had of undecided steps: the others send again what they had sent to them.
        attempt: of the steps after `version`: what was computed of them in older attempts counts no more.
        repair: the attempt before which replicas differed last: published parameters, and the state that learners have,
            may be a wrong replica's, and are given up as well. 0: they never did.
        split_layers: layers whose backward may be in two parts, as both together have the bits of the whole.
        put_off: per stage, the most micro-batches whose weight gradients a worker may put off; (): none on any stage.
        in_flight: per stage, the most micro-batches that a worker may have between forward and backward; (): as
            `pipeline.in_flight_limits` has it.
        is_last: the run ends early, after `version`.
        hosts: per stage, the number of each member's host: with `runtime.collectives=group`, and on several hosts only.
    """

    NUM_OPTIONS = 8

    epoch: int
    stages: tuple[tuple[int, ...], ...]
    layer_cuts: tuple[int, ...]
    microbatch_counts: tuple[tuple[int, ...], ...]
    addresses: dict[int, str]
    replicas: tuple[ReplicaRow, ...] = ()
    version: int = 0
    recovery_plan: tuple[Recompute, ...] | None = None
    validate: int | None = None
    save: bool = False
    recovered: tuple[int, ...] = ()
    attempt: int = 0
    repair: int = 0
    split_layers: tuple[int, ...] = ()
    put_off: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    is_last: bool = False
    hosts: tuple[tuple[int, ...], ...] = ()


class PackedReconfigure(Message, frozen=True):
    """Controller -> member: a Reconfigure, as it goes over the link (recovery/packed_reconfigure.py).

    Args:
        base: mesh epoch of the Reconfigure that it was packed against, the last one on this link; -1: of none.
        size: bytes of the whole, before it is decoded.
        digest: of these, and of the lines.
        data: the packed message.
        lines: on a large mesh, packed: the lines of the recovery plan that the member has to do with, where the message
            has none (recovery/peers.py).
    """

    NUM_OPTIONS = 1

    base: int
    size: int
    digest: bytes
    data: bytes
    lines: bytes = b""


class PeerAddresses(Message, frozen=True):
    """Controller -> member, on a large mesh, before a PackedReconfigure: the addresses of the member's peers, as far as
    they change.

    Args:
        came: packed addresses of peers that it may not have.
        gone: members that are no peers of it any more, neither in this mesh epoch nor in the one before.
    """

    came: bytes
    gone: tuple[int, ...] = ()


class ChecksDiffer(Message, frozen=True):
    """The checker of a micro-batch -> controller: its own results are others than those that it was sent.

    The sender does not vote for the step.

    Args:
        owner: the worker of the micro-batch.
        owned: its results.
        checked: those of the sender.
    """

    rank: int
    epoch: int
    step: int
    microbatch: int
    owner: int
    owned: tuple[DigestRow, ...]
    checked: tuple[DigestRow, ...]


class CheckAgain(Message, frozen=True):
    """Controller -> members: a micro-batch of this stage is to be computed once more, to see who is wrong.

    Whoever keeps its inputs sends them to `ranks`, which answer by CheckedAgain.
    """

    epoch: int
    step: int
    microbatch: int
    stage: int
    ranks: tuple[int, ...]


class CheckedAgain(Message, frozen=True):
    """Worker -> controller: its results of the micro-batch that it was asked for."""

    rank: int
    epoch: int
    step: int
    microbatch: int
    rows: tuple[DigestRow, ...]


class CheckAccepted(Message, frozen=True):
    """Controller -> the checker of a micro-batch: the step goes on with what was computed (`verify.action=report`)."""

    epoch: int
    step: int
    microbatch: int


class Pace(Message, frozen=True):
    """Controller -> member: the frequencies of its device within a step, from its next step of this mesh epoch on
    (`schedule.frequency`).

    Args:
        starts, frequencies: from its starts[i]-th action of a step on, frequencies[i], relative to the normal one.
        order: the actions that they are planned for: (0 for forward, 1 for backward, 2 for weight gradients that were
            put off; micro-batch).
        hold_s: seconds for which it waits for the next of these though another action is ready.
    """

    epoch: int
    starts: tuple[int, ...]
    frequencies: tuple[float, ...]
    order: tuple[tuple[int, int], ...]
    hold_s: float


class Limits(Message, frozen=True):
    """Controller -> member: other limits than those of the Reconfigure, from its next step of this mesh epoch on.

    Whether weight gradients are put off is tried while a run trains (`schedule.split_backward`).

    Args:
        split_layers, put_off, in_flight: as in Reconfigure.
    """

    epoch: int
    split_layers: tuple[int, ...]
    put_off: tuple[int, ...]
    in_flight: tuple[int, ...]


class SumsDiffer(Message, frozen=True):
    """The checker of sums -> controller: its reduced gradient of state pages [first, stop) is another than the one that
    the primary has sent it, or their norms differ. The sender does not vote for the step.

    Args:
        owner: the primary.
        owned: its result, as it came.
        checked: that of the sender.
    """

    rank: int
    epoch: int
    step: int
    layer: int
    first: int
    stop: int
    owner: int
    owned: SumResult
    checked: SumResult


class AddAgain(Message, frozen=True):
    """Controller -> members: reduced gradients of state pages [first, stop) of `layer` differ.

    Whoever has made a part of it tells which sums it had made (AddedUp), and sends the gradients of its micro-batches
    to `ranks`, which add them up once more.
    """

    epoch: int
    step: int
    layer: int
    first: int
    stop: int
    ranks: tuple[int, ...]


class AddedUp(Message, frozen=True):
    """Worker -> controller, after AddAgain: the sums of some pages.

    Args:
        again: they were made now, all of them, by one of `AddAgain.ranks`; else those that it had made before.
        sums: digests of its sums of micro-batches, and of those that it has collected on its host for other hosts.
        results: of the reduced gradient, from the primary, and with `again`; else none.
    """

    rank: int
    epoch: int
    step: int
    layer: int
    first: int
    stop: int
    again: bool
    sums: tuple[SumRow, ...]
    results: tuple[SumResult, ...] = ()


class SumAccepted(Message, frozen=True):
    """Controller -> the checker of sums: the step goes on with what was added up (`verify.action=report`)."""

    epoch: int
    step: int
    layer: int
    first: int
    stop: int


class CaughtUp(Message, frozen=True):
    """Worker -> controller, once an epoch: it has the state of all pages that it is a learner of."""

    rank: int
    epoch: int


class Fingerprints(Message, frozen=True):
    """Replica -> controller, at a version that is compared (`mirror.verify_every`), once in each mesh epoch.

    Args:
        step: the version.
        rows: (layer, first, stop, hash) of the page ranges that it is a replica of.
    """

    rank: int
    epoch: int
    step: int
    rows: tuple[tuple[int, int, int, bytes], ...]


class ReplicasAgree(Message, frozen=True):
    """Controller -> members: all replicas of all pages have the same state at version `step`, which may be used."""

    epoch: int
    step: int


class Damaged(Message, frozen=True):
    """Worker -> controller: it has given up the state of these page ranges, before it applied `step`.

    Their content was not what it had written. Or its device failed and was brought back: then everything that it had of
    undecided steps is lost too.

    Args:
        page_ranges: (layer, first, stop) of each.
        reason: of the fault of the device, in words; empty if it was none.
    """

    NUM_OPTIONS = 1

    rank: int
    epoch: int
    step: int
    page_ranges: tuple[tuple[int, int, int], ...]
    reason: str = ""


class LinkClosed(Message, frozen=True):
    """Worker -> controller: its link to `peer` is gone, and perhaps some of what it had sent on it.

    A worker's channel also delivers it to the worker itself, whose link it was; with the controller as `peer` it goes
    nowhere else.

    Args:
        was_linked: False if it had none, as `peer` was to be none of its peers, and what it had for it is lost.
    """

    NUM_OPTIONS = 1

    rank: int
    peer: int
    was_linked: bool = True


class Leaving(Message, frozen=True):
    """Worker -> controller: it got SIGTERM, and requests to leave without a loss."""

    rank: int


class SpawnRequest(Message, frozen=True):
    """Worker -> controller, in fault injection only: `count` new workers are to be started."""

    rank: int
    count: int


class Applied(Message, frozen=True):
    """Worker -> controller, after each step: it is at version `step`. All members send the same numbers, bit for bit.

    Args:
        loss: of the step.
        grad_norm: of the whole gradient, before clipping.
        updated: False if the norm was not finite, or a weight not positive: the version advanced and the state stayed.
        extension: that all votes carried, or empty.
        weight: of the step's loss, which `loss` and `grad_norm` have been divided by; None if it has none.
    """

    NUM_OPTIONS = 2

    step: int
    epoch: int
    rank: int
    loss: float
    grad_norm: float
    updated: bool
    extension: str = ""
    weight: float | None = None


class Measured(Message, frozen=True):
    """Worker -> controller, after each step: what it measured, for the cost model; and of a worker that reads a dataset
    of the user's, before its vote for a step, how long it waited for the samples.

    Args:
        rows: times of layer programs, as worker.profiling.Row.
        memory: what micro-batches keep of layers that are new to the worker, as worker.profiling.MemoryRow.
        compiled: number of programs that it has compiled so far.
        link: (latency in s, bytes per s) of its link to a neighbour, once it is known; else empty.
        weights: times of weight gradients that were put off, as worker.profiling.WeightsRow.
        data_seconds: that it waited for the samples of the step; None: it is not about that.
    """

    NUM_OPTIONS = 2

    rank: int
    step: int
    rows: tuple[tuple[int, float, float, int, int], ...]
    memory: tuple[tuple[int, int, int], ...] = ()
    compiled: int = 0
    link: tuple[float, ...] = ()
    weights: tuple[tuple[int, float, int], ...] = ()
    data_seconds: float | None = None


class ValidationLoss(Message, frozen=True):
    """Worker of the last stage -> controller: losses of its validation micro-batches at version `step`, each a sum.

    Where replicas are compared, workers of all stages report, those without losses as well (H5).

    Args:
        epoch: the mesh epoch in which they were computed: a change of the mesh begins the validation anew.
        weights: of the losses; () if the model's loss has no weight.
        metrics: (name, sum of each micro-batch, weight of each, or ()) of each metric of the model.
    """

    NUM_OPTIONS = 2

    step: int
    epoch: int
    rank: int
    microbatches: tuple[int, ...]
    losses: tuple[float, ...]
    weights: tuple[float, ...] = ()
    metrics: tuple[MetricRow, ...] = ()


class Validated(Message, frozen=True):
    """Controller -> members: it has all losses of the validation at version `step`. Training goes on.

    Args:
        is_last: it does not: the run ends early, after this step.
    """

    NUM_OPTIONS = 1

    step: int
    is_last: bool = False


class FinalPages(Message, frozen=True):
    """Primary -> controller, after the last step.

    Payload, fp32: the master parameters of state pages [first, stop) of `layer`, or their average over the steps.

    Args:
        average: it is the average (optim.ema).
    """

    NUM_OPTIONS = 1

    layer: int
    first: int
    stop: int
    average: bool = False


class Finished(Message, frozen=True):
    """Worker -> controller: all steps are applied, and the final pages of all primaries of `epoch` that it is are sent.

    Args:
        state_bytes: kind of state -> bytes of it on this worker.
        peak_bytes: kind of memory -> the most bytes of it that the worker had.
        rejected: as in Heartbeat: no other one may follow.
        checks: number of checks of micro-batches that it made, of those among them that it made while its next action
            had no input, and of checks of sums.
    """

    NUM_OPTIONS = 2

    rank: int
    epoch: int
    state_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    rejected: tuple[tuple[str, int], ...] = ()
    checks: tuple[int, ...] = ()


class Failed(Message, frozen=True):
    """Worker -> controller: an exception ended it, in step `step`.

    Args:
        report: its traceback.
        is_deaf: it cannot receive any more. That is its own lack: others may have it in the same step, and no bug.
    """

    NUM_OPTIONS = 1

    rank: int
    report: str
    step: int = 0
    is_deaf: bool = False


class ShardWritten(Message, frozen=True):
    """Worker -> controller: its shard of the checkpoint of `step` is on the disk, or `error` says why it is not.

    The fields are those of run_dir's ShardInfo.

    Args:
        copy_ms: how long training stood still for it.
        write_ms: how long the writing took, beside training.
    """

    step: int
    rank: int
    epoch: int
    name: str = ""
    num_bytes: int = 0
    sha256: str = ""
    page_ranges: tuple[tuple[int, int, int], ...] = ()
    copy_ms: float = 0.0
    write_ms: float = 0.0
    error: str = ""


class Stop(Message, frozen=True):
    """Controller -> worker: end now."""


class Adopt(Message, frozen=True):
    """Controller that came back -> living worker: it is the run's controller from now on, and listens at `address`.

    Args:
        generation: of the controller, above that of every one before.
    """

    generation: int
    address: str


class Adopted(Message, frozen=True):
    """Worker -> the controller that came back: what its predecessor may not have lived to write down.

    Args:
        generation: of the controller that is answered.
        version: the step that it applied last.
        epoch: mesh epoch of the Reconfigure that came to it last.
        reconfigure: that message, whole, as packed_reconfigure.py has it; that of an epoch is the same for all members.
        applied: its reports of steps that were not acknowledged (Written), oldest first.
        damaged: state that it has given up since it entered its mesh epoch.
        closed: members to which its link is closed.
        leaves: it has got SIGTERM.
        is_suspect: it has other results than another worker of the step under way, and does not vote for it.
    """

    rank: int
    generation: int
    version: int
    epoch: int
    reconfigure: bytes
    applied: tuple[Applied, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    closed: tuple[int, ...] = ()
    leaves: bool = False
    is_suspect: bool = False


class OfGeneration(Message, frozen=True):
    """Controller that came back -> worker: another message, encoded, with the generation that fences it."""

    generation: int
    data: bytes


class Written(Message, frozen=True):
    """Controller -> members, now and then, where it may be replaced: steps up to `step` have their lines in
    metrics.jsonl, and their reports need not be kept any more."""

    step: int


AnyMessage: TypeAlias = (
    Activation
    | ActivationGradient
    | PartialSum
    | ReducedGradient
    | Publish
    | PageState
    | Need
    | CheckDigests
    | Addend
    | Vote
    | GroupLost
    | PairSent
    | PairReceived
    | PairLost
    | Ready
    | Checked
    | Constructed
    | Refused
    | Prepare
    | StepReport
    | Reconfigure
    | PackedReconfigure
    | PeerAddresses
    | ChecksDiffer
    | CheckAgain
    | CheckedAgain
    | CheckAccepted
    | Pace
    | Limits
    | SumsDiffer
    | AddAgain
    | AddedUp
    | SumAccepted
    | CaughtUp
    | Fingerprints
    | ReplicasAgree
    | Damaged
    | LinkClosed
    | Leaving
    | SpawnRequest
    | Heartbeat
    | Applied
    | Measured
    | ValidationLoss
    | Validated
    | FinalPages
    | Finished
    | Failed
    | ShardWritten
    | Stop
    | Adopt
    | Adopted
    | OfGeneration
    | Written
)


# Immutable, so one serves all threads. To make a decoder of so many types takes 30 us, to decode with it 0.2 us.
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The bytes of a message; fields of options that are off are not among them."""
    if message.NUM_OPTIONS:
        fields: list[Any] = list(msgspec.structs.astuple(message))
        # array_like structs may be cut short at the end: the decoder fills in the defaults.
        defaults = type(message).__struct_defaults__
        for default in reversed(defaults[-message.NUM_OPTIONS :]):
            if fields[-1] != default:
                break
            fields.pop()
        return msgspec.msgpack.encode([type(message).__name__, *fields])
    return msgspec.msgpack.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """The inverse of `encode`.

    Raises:
        msgspec.MsgspecError: the bytes are none of these messages.
    """
    try:
        return _DECODER.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec lets these through: text, and arrays nested deeply
        raise msgspec.DecodeError(str(error)) from error
