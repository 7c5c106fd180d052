"""The messages between workers and the controller: plain data, encoded by msgspec, never pickled.

*Data* messages are named by their content, which is a pure function of (run, step, id). They are valid in any mesh
epoch, filed by their id, and duplicates are ignored. There is one exception: if a worker may have computed wrongly, the
step is computed again in another `attempt`, and data messages of older attempts are dropped. The first attempt of a
step is 0; another one has the number of the mesh epoch that began it. *Control* messages carry the mesh epoch that
fences them (docs/protocol.md, "Messages"). A tensor travels beside its message, as the *payload*, and is not copied
into it.

The first line of each docstring is "sender -> receiver, when". Page ranges are given as pages [first, stop) of a layer.

Fields that belong to an option are not sent while the option is off: see `Message.NUM_OPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, TypeAlias

import msgspec

ReplicaRow: TypeAlias = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""(layer, first page, stop page, primary, mirrors, learners): a row of a replica map, as sharding.replicas makes it."""

DigestRow: TypeAlias = tuple[int, bytes, bytes, bytes]
"""(layer, digest of its output, digest of the gradient of its input, digest of its weight gradient), for one
micro-batch. A digest is empty if there is no such tensor."""

SumRow: TypeAlias = tuple[int, int, int, bytes]
"""(layer, lo, hi, digest of the sum of the layer's gradients of micro-batches lo to hi - 1), for some of its pages."""

SumResult: TypeAlias = tuple[bytes, bytes]
"""(digest of a reduced gradient, the norm value of each of its pages as in ReducedGradient)."""

MetricRow: TypeAlias = tuple[str, tuple[float, ...], tuple[float, ...]]
"""(name of a metric, its sum for each micro-batch, the weight of each sum; () if it has no weights)."""

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
"""Name of the dtype of a boundary tensor -> bytes of an element. Boundary tensors have no other dtypes."""

ALIGNMENT = 64
"""In a payload that packs a tuple of tensors, each tensor begins at a multiple of this number of bytes, so that it is
aligned as if it had been allocated by itself."""

MOST_TENSORS = 1000
"""The most tensors in a tuple that goes from one stage to another."""

AT_ONCE = -1
"""The value of Prepare.after for a change that cannot wait for the end of a step. It is less than any step, so that the
more urgent of two changes is the one with the smaller value."""

GROUPED = "grouped"
"""The value of Vote.extension by which a worker offers to publish the step through the process group of its stage."""


class PartialStep(msgspec.Struct, frozen=True, array_like=True):
    """Part of StepReport: everything that a worker keeps of one step that is not decided.

    It lists ids only; the tensors stay where they are. Every tensor that is listed is a pure function of (run, step,
    id), so it does not matter which worker made it, or in which mesh.

    Args:
        step: the step.
        assigned: micro-batches that the worker regards as its own on its stage.
        computed: micro-batches whose backward the worker has done, through all layers of its stage.
        forwarded: micro-batches whose forward it has done and saved, and whose backward has not begun.
        activations: (layer, micro-batch) of each activation that it keeps after sending it; `layer` is the first layer
            of the stage that the activation goes to.
        gradients: (layer, micro-batch) of each activation gradient that it keeps after sending it; `layer` is the last
            layer of the stage that the gradient goes to.
        layer_sums: layer -> tree nodes whose partial sum it keeps for the whole layer, except for the pages of which it
            is the primary.
        page_sums: (layer, first, stop, use, tree nodes) for page ranges of which it is the primary: the tree nodes
            whose partial sums it has, in the tree of gradients that the layer `use` contributes. `use` differs from
            `layer` for tied parameters only.
        reduced: page ranges (layer, first, stop) whose reduced gradient it has.
        put_off: micro-batches, among `assigned`, of whose backward only the weight gradients are still to be computed.
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
        stage: the number of the stage in the new mesh.
        microbatch: the number of the micro-batch in the global batch.
        worker: the rank of the worker.
        forward: True if the worker has to run the forward; False if it uses the forward that it has saved.
        backward: how much of the backward it runs. 0: none; 1: only the gradient of the stage's input; 2: all of it;
            3: only the weight gradients (recovery/partial_step.py has names for these numbers).
    """

    stage: int
    microbatch: int
    worker: int
    forward: bool
    backward: int


class TensorForm(msgspec.Struct, frozen=True, array_like=True):
    """Part of Activation and ActivationGradient: the form of one tensor of a tuple.

    Args:
        dtype: the name of its dtype, one of `ITEM_BYTES`.
        shape: its sizes.
        graded: True if it needs a gradient, which the next stage sends back.
    """

    dtype: str
    shape: tuple[int, ...]
    graded: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def packed_bytes(forms: Iterable[TensorForm]) -> int:
    """The bytes of the payload for a tuple of tensors. Each tensor begins at a multiple of `ALIGNMENT`."""
    return sum(aligned(form.num_bytes) for form in forms)


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes up in the payload for a tuple: padded, and at least `ALIGNMENT`."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of all messages. A message is encoded as a compact array [kind, fields ...]."""

    NUM_OPTIONS: ClassVar[int] = 0
    """Number of fields, at the end of a message, that belong to options. Those at the end that have their default are
    left out of the encoding, so that an option that is off adds no bytes."""


# ---- data: filed by id, valid in any epoch ---------------------------------------------------------------------------


class Activation(Message, frozen=True):
    """A micro-batch's worker on one stage -> its worker on the next stage, as soon as the activation is computed.

    Payload, in the compute dtype: the input of `layer`, which is the receiver's first layer. The sender keeps it until
    the step is decided, to send it again if the receiver is lost.

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
    """A micro-batch's worker on one stage -> its worker on the stage before, as soon as the gradient is computed.

    Payload, in the compute dtype: the gradient of the loss with respect to the output of `layer`, which is the
    receiver's last layer. If that output is a tuple: the gradients of the tensors that need one, with their `forms`.
    The sender keeps it until the step is decided, like an Activation.
    """

    NUM_OPTIONS = 2

    step: int
    microbatch: int
    layer: int
    shape: tuple[int, ...]
    attempt: int = 0
    forms: tuple[TensorForm, ...] = ()


class PartialSum(Message, frozen=True):
    """Worker -> primary, when the sum of a tree node cannot grow any more on this worker.

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
    """Primary -> mirrors and learners, when the primary has the root of the tree. After a change of primary also
    mirror -> new primary.

    Payload, fp32: the reduced gradient of state pages [first, stop) of `layer`. Nothing else of a step's results is
    needed to update these pages, besides the votes.

    Args:
        norms: the norm value (sum of squares) of each of these pages, little-endian fp32.
    """

    NUM_OPTIONS = 1

    step: int
    layer: int
    first: int
    stop: int
    norms: bytes
    attempt: int = 0


class Publish(Message, frozen=True):
    """Primary -> workers that compute with the pages without being replicas, after the update; also the answer to Need.

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

    Payload, fp32: the master parameters, then each optimizer state in turn. For the loss page, which has no state:
    whether there is a loss yet (0 or 1), the loss, and its weight if it has one.

    Args:
        norms: as in ReducedGradient, for the step `step`. If the learner becomes the primary, it votes with them.
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
        rows: digests of what the sender has computed, one row for each layer of the stage.
    """

    NUM_OPTIONS = 1

    step: int
    microbatch: int
    rows: tuple[DigestRow, ...]
    attempt: int = 0


class Addend(Message, frozen=True):
    """The worker of a micro-batch -> the worker that checks the sums of these pages, after the micro-batch's backward
    (`verify.rate`). After AddAgain also -> the workers that add these pages up once more.

    Payload, fp32: the gradient of the micro-batch alone, for pages [first, stop) of `layer`'s gradient buffer.

    Args:
        again: True if it is an answer to AddAgain.
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


# A vote carries everything that is needed to decide a step: the parts of the gradient's norm, and the loss. So each
# worker decides the step by itself when it has the last vote, without a round trip to a coordinator.


class Vote(Message, frozen=True):
    """Worker -> other members of the epoch, once for each step and epoch: the sender has all that it needs to apply it.

    The sender is at version step - 1, has done its micro-batches, and has the reduced gradients of all pages that it
    holds or learns. On a large mesh it then sends sums of more and more votes (recovery/vote_exchange.py).

    Args:
        norm: the squared gradient norm of the pages of which the sender is the primary, as an exact sum: several
            doubles (determinism/exact_sum.py).
        loss: the step's loss, if the sender is the primary of the loss page; else None.
        extension: an option that takes effect in this step if all votes carry the same value; empty if it is off.
        weight: the weight of the loss, with `loss`; None if the model's loss has no weight.
        level: 0 for the sender's own vote; n for the sum over a block, which is sent in round n of the exchange.
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

    Sent only with `runtime.collectives=group`. The stage uses links in place of the group until the next epoch.

    Args:
        reason: why it has failed, in words.
    """

    epoch: int
    sender: int
    reason: str = ""


class PairSent(Message, frozen=True):
    """Worker -> the other worker of a pair (`runtime.pairs`): an Activation, ActivationGradient or PageState.

    A *pair* is a process group of two workers. The payload goes through it, from device to device. If the pair has
    failed, or its epoch is over, the message is sent again over the link, as `resent`, with the payload as raw bytes,
    or without a payload if nobody needs it any more.

    Args:
        epoch: the mesh epoch that the sender is in.
        number: counts what this sender has sent this receiver through pairs, from 1 on, through all epochs.
        size: the bytes of the payload.
        message: the encoded message; empty if nobody needs it any more.
        resent: True if the payload, if any, comes over the link.
    """

    epoch: int
    number: int
    size: int
    message: bytes
    resent: bool = False


class PairReceived(Message, frozen=True):
    """Worker -> the sender of a PairSent: everything up to `number` is here, so that the sender need not keep it.

    Args:
        number: as in PairSent.
    """

    number: int


class PairLost(Message, frozen=True):
    """Worker -> the other worker of a pair, and the controller: the pair of `epoch` has failed.

    Sent only with `runtime.pairs`. The two workers use their link in place of the pair until the next epoch.

    Args:
        other: the rank of the other worker.
        reason: why it has failed, in words.
    """

    epoch: int
    sender: int
    other: int
    reason: str = ""


class Ready(Message, frozen=True):
    """Worker -> controller, once, when the worker listens at `address` and has compiled its programs.

    Args:
        holds_mutex: True if the worker holds its robust mutex, by which the death watch notices its death at once.
        compiled: the number of programs that it has compiled. It needs no others later.
    """

    rank: int
    address: str
    holds_mutex: bool = False
    compiled: int = 0


class Checked(Message, frozen=True):
    """Worker -> controller, before Ready: the check of the model has passed (`runtime.check_model`).

    Args:
        seconds: how long the check took.
        layers: (layer, count, kept, output, put off, digest), one row for each kind of layer; the same on all workers.
            `layer` is the first layer of this kind, and `count` the number of layers of this kind. `kept` is the bytes
            that a micro-batch keeps of such a layer until its backward, `output` the bytes of the layer's output, and
            `put off` the bytes kept from the backward to the weight gradients if these can be put off, else 0.
            `digest` is a digest of all bits that the check has computed with the layer.
        kinds: for each layer of the model, the first layer of the same kind.
        loss_unchecked: the exception that the loss raised for half a micro-batch, so that it could not be checked;
            empty if it raised none.
        samples: for data other than tokens, a digest of the micro-batches that were read; the same on all workers.
    """

    NUM_OPTIONS = 1

    rank: int
    seconds: float
    layers: tuple[tuple[int, int, int, int, int, bytes], ...]
    kinds: tuple[int, ...]
    loss_unchecked: str = ""
    samples: bytes = b""


class Constructed(Message, frozen=True):
    """Worker -> controller, before Ready: digests of the values that the worker begins with, if these must be compared.

    They must if constructors of the model made them, or if workers on several machines read weights from files
    (`model.init_from`).

    Args:
        rows: (name, True for a constant and False for a parameter, digest). If two workers have different digests for a
            name, the controller ends the run.
    """

    rank: int
    rows: tuple[tuple[str, bool, bytes], ...]


class Refused(Message, frozen=True):
    """Worker -> controller, in place of Ready: the worker refuses the model, data or settings, as any other would.

    So the run ends, and no replacement is started.

    Args:
        error: field name -> text, of the user's error (errors.UserError).
    """

    rank: int
    error: dict[str, str]


class StepReport(Message, frozen=True):
    """Worker -> controller, once for each Prepare: how far the worker has come.

    It is a promise as well: from now on the worker neither votes nor applies a step in an older epoch (C2).

    Args:
        version: the step that the worker applied last.
        partial_steps: what it keeps of steps version + 1 and version + 2, if anything. It may have gradients of the
            latter before it has applied the former, if other workers compute all of its micro-batches.
        attempt: the attempt in which it computes the steps after its version.
        ahead: trained page ranges of which it has, as a learner, the state of version + 1 already, from a primary that
            had applied that step.
        layers: the layers [first, stop) of the stage that it is on; () if they are those of the newest Reconfigure.
            They differ if another change began before the worker had entered the epoch of that Reconfigure.
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
    """Worker -> controller, periodically, from a thread of its own: how far the worker's training thread has come.

    Args:
        progress: the number of actions that the training thread has run so far.
        waiting: True if the training thread waits for a message, so that it cannot make progress by itself.
        action: what the training thread does, in words.
        rejected: (reason, number) of connections and messages that the worker's links have refused so far.
        is_sending: True if the worker waits while much of what it has sent is still on its way over a slow network.
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
        after: AT_ONCE for a change that cannot wait, such as a loss. For a planned change: the step after which to
            answer. A worker answers when it has applied this step and before it begins the next one, so that nothing is
            under way. A worker that has begun a later step already answers at once.
    """

    epoch: int
    after: int = AT_ONCE


class Reconfigure(Message, frozen=True):
    """Controller -> members of the new epoch, when all living members have given their StepReport.

    Args:
        epoch: the number of the new mesh epoch.
        stages: the ranks of the members, by stage.
        layer_cuts: the first layer of each stage, and at the end the number of layers.
        microbatch_counts: the number of micro-batches of each member, by stage.
        addresses: rank -> address, of all members; on a large mesh, of the receiver's peers only (recovery/peers.py).
        replicas: the rows of the replica map; empty if every worker can compute it from the settings.
        version: the highest version of any member.
        recovery_plan: the recovery plan for step version + 1. None if no member has begun that step, so that it runs as
            placed. On a large mesh a member gets only the lines that it needs (recovery/peers.py).
        validate: the version that the receivers have to validate, as the controller does not have all of its losses;
            None if it has. A run that resumes at a validated step validates it again.
        save: True if the run is about to stop: write the state of `version`, and begin no other step.
        resend_to: members to which all others send again what they had sent: they have given up state, or lost all of
            undecided steps as their device was reset, or the run stood still (then all members).
        attempt: the attempt of the steps after `version`. What was computed of them in older attempts is given up.
        repair: the newest attempt that began because a replica was, or may have been, wrong; 0 if none did. In that
            attempt, published parameters and state received by learners are given up as well, as they may have come
            from that replica.
        split_layers: layers whose backward may run in two parts, as both parts together give the same bits as the
            whole.
        put_off: for each stage, the most micro-batches of which a worker may put off the weight gradients; () if none
            on any stage.
        in_flight: for each stage, the most micro-batches that a worker may have between forward and backward; () for
            the numbers of `pipeline.in_flight_limits`.
        is_last: True if the run ends early, after `version`.
        hosts: for each stage, the number of each member's host; () without `runtime.collectives=group` and on a single
            host.
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
    resend_to: tuple[int, ...] = ()
    attempt: int = 0
    repair: int = 0
    split_layers: tuple[int, ...] = ()
    put_off: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    is_last: bool = False
    hosts: tuple[tuple[int, ...], ...] = ()


class PackedReconfigure(Message, frozen=True):
    """Controller -> member: a Reconfigure in the form in which it goes over the link (recovery/packed_reconfigure.py).

    Args:
        base: the mesh epoch of the Reconfigure that `data` is a change of, the last one on this link; -1 if it is
            packed by itself.
        size: the bytes of the unpacked, encoded Reconfigure.
        digest: a digest of the unpacked bytes, and of those of `lines`.
        data: the packed Reconfigure.
        lines: on a large mesh, packed: the lines of the recovery plan that this member needs. The Reconfigure itself,
            which is the same for all members, then has none (recovery/peers.py).
    """

    NUM_OPTIONS = 1

    base: int
    size: int
    digest: bytes
    data: bytes
    lines: bytes = b""


class PeerAddresses(Message, frozen=True):
    """Controller -> member, on a large mesh, before a PackedReconfigure: what changes in the addresses of its peers.

    Args:
        came: packed addresses of peers that the receiver may not have.
        gone: members that the receiver drops: they are its peers neither in this mesh epoch nor in the one before.
    """

    came: bytes
    gone: tuple[int, ...] = ()


class ChecksDiffer(Message, frozen=True):
    """The checker of a micro-batch -> controller: its results differ from those of the micro-batch's worker.

    The sender does not vote for the step.

    Args:
        rank: the checker, which sends this.
        owner: the worker of the micro-batch.
        owned: the results of the owner.
        checked: the results of the checker.
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

    Members that keep inputs of this micro-batch send them to `ranks`, which answer by CheckedAgain.
    """

    epoch: int
    step: int
    microbatch: int
    stage: int
    ranks: tuple[int, ...]


class CheckedAgain(Message, frozen=True):
    """Worker -> controller, after CheckAgain: its results of the micro-batch that it was asked to compute once more."""

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
    """Controller -> member: the clock frequencies of its device within each step, from its next step of this mesh epoch
    on (`schedule.frequency`).

    Args:
        starts: the numbers of the actions within a step at which the frequency changes.
        frequencies: from action starts[i] on, the device runs at frequencies[i], relative to its normal frequency.
        order: the actions that the frequencies are planned for, as (kind, micro-batch). The kind is 0 for a forward, 1
            for a backward, and 2 for weight gradients that were put off.
        hold_s: the seconds for which the member waits for the next action in `order` although another one is ready.
    """

    epoch: int
    starts: tuple[int, ...]
    frequencies: tuple[float, ...]
    order: tuple[tuple[int, int], ...]
    hold_s: float


class Limits(Message, frozen=True):
    """Controller -> member: other limits than those of the Reconfigure, from its next step of this mesh epoch on.

    With `schedule.split_backward=auto` the controller tries, while the run trains, whether to put off weight gradients.

    Args:
        split_layers, put_off, in_flight: as in Reconfigure.
    """

    epoch: int
    split_layers: tuple[int, ...]
    put_off: tuple[int, ...]
    in_flight: tuple[int, ...]


class SumsDiffer(Message, frozen=True):
    """The checker of sums -> controller: its reduced gradient of state pages [first, stop), or a norm of it, differs
    from what the primary has sent. The sender does not vote for the step.

    Args:
        rank: the checker, which sends this.
        owner: the primary.
        owned: the result of the primary, as it arrived at the checker.
        checked: the result of the checker.
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

    Every member that has made sums for these pages reports their digests (AddedUp), and sends the gradients of its
    micro-batches to `ranks`, which add them up once more.
    """

    epoch: int
    step: int
    layer: int
    first: int
    stop: int
    ranks: tuple[int, ...]


class AddedUp(Message, frozen=True):
    """Worker -> controller, after AddAgain: digests of the sums of some pages.

    Args:
        again: True if the sender is one of `AddAgain.ranks` and has made all sums now, from the single gradients;
            False if these are the sums that it had made before.
        sums: digests of the sums over its own micro-batches, and of those that it has added up, as a collector, for
            primaries on other hosts.
        results: the result for the reduced gradient, from the primary and if `again`; else empty.
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
    """Learner -> controller, once in each epoch: it has the state of all pages of which it is a learner."""

    rank: int
    epoch: int


class Fingerprints(Message, frozen=True):
    """Replica -> controller, at a version that is compared (`mirror.verify_every`), once in each mesh epoch.

    Args:
        step: the version.
        rows: (layer, first, stop, hash) of each page range of which the sender is a replica.
    """

    rank: int
    epoch: int
    step: int
    rows: tuple[tuple[int, int, int, bytes], ...]


class ReplicasAgree(Message, frozen=True):
    """Controller -> members: all replicas of all pages have the same state at version `step`. It may be used."""

    epoch: int
    step: int


class Damaged(Message, frozen=True):
    """Worker -> controller: it has given up the state of these page ranges, before it applied `step`.

    Either the memory did not contain what the worker had written, or its device failed and was reset. In the second
    case everything that the worker had of undecided steps is lost too.

    Args:
        page_ranges: (layer, first, stop) of each.
        reason: the fault of the device, in words; empty if the device did not fail.
    """

    NUM_OPTIONS = 1

    rank: int
    epoch: int
    step: int
    page_ranges: tuple[tuple[int, int, int], ...]
    reason: str = ""


class LinkClosed(Message, frozen=True):
    """Worker -> controller: its link to `peer` has closed, and some of what it had sent on it may be lost.

    The worker's channel delivers this message to the worker itself as well, and only there if `peer` is the controller.

    Args:
        was_linked: False if the worker never had this link, as `peer` was not among its peers; the message that it
            wanted to send is lost.
    """

    NUM_OPTIONS = 1

    rank: int
    peer: int
    was_linked: bool = True


class LinksClosed(Message, frozen=True):
    """Worker -> controller: its links to several `peers` have closed, as LinkClosed reports one.

    When a rack is lost each survivor loses many links at once. A message for each of them, from each survivor, would
    keep the controller from the answers to its Prepare.
    """

    rank: int
    peers: tuple[int, ...]


class Leaving(Message, frozen=True):
    """Worker -> controller: the worker got SIGTERM, and asks to leave once none of its state is needed any more."""

    rank: int


class SpawnRequest(Message, frozen=True):
    """Worker -> controller, in fault injection only: `count` new workers are to be started."""

    rank: int
    count: int


class Applied(Message, frozen=True):
    """Worker -> controller, after each step: it is at version `step`. All members send the same numbers, bit for bit.

    Args:
        loss: the loss of the step.
        grad_norm: the L2 norm of the whole gradient, before clipping.
        updated: False if the step was skipped, as the norm was not finite or the weight not positive (S6): the version
            has advanced, the state is unchanged.
        extension: the extension that all votes carried, or empty.
        weight: the weight of the step's loss, by which `loss` and `grad_norm` have been divided; None if losses have
            none.
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
    """Worker -> controller, after each step: what it measured, for the cost model. A worker that reads a user's dataset
    sends another one before it votes, which says only how long the worker waited for samples.

    Args:
        rows: times of layer programs, as worker.profiling.Row.
        memory: the memory that micro-batches keep of layers that are new to the worker, as worker.profiling.MemoryRow.
            To a controller that came back, all layers are reported once more.
        compiled: the number of programs that the worker has compiled so far.
        link: (latency in s, bandwidth in bytes/s) of its link to a neighbour, once to each controller, when they are
            known; else empty.
        weights: times of weight gradients that were put off, as worker.profiling.WeightsRow.
        data_seconds: the seconds that the worker waited for the samples of the step; None in the message that is sent
            after the step.
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
    """Worker of the last stage -> controller: the losses of its validation micro-batches at version `step`.

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
    """Controller -> members: it has all losses of the validation at version `step`, so that the next step may begin.

    Args:
        is_last: True if no next step begins: the run ends early, after this one.
    """

    NUM_OPTIONS = 1

    step: int
    is_last: bool = False


class FinalPages(Message, frozen=True):
    """Primary -> controller, after the last step.

    Payload, fp32: the master parameters of state pages [first, stop) of `layer`, or their average over the steps.

    Args:
        average: True if the payload is the average (`optim.ema`).
    """

    NUM_OPTIONS = 1

    layer: int
    first: int
    stop: int
    average: bool = False


class Finished(Message, frozen=True):
    """Worker -> controller: all steps are applied, and the final pages of which it is the primary in `epoch` are sent.

    Args:
        state_bytes: kind of state -> bytes of it on this worker.
        peak_bytes: kind of memory -> the most bytes of it that the worker had.
        rejected: as in Heartbeat, since no further Heartbeat may follow.
        checks: (checks of micro-batches that it made, those among them that it made while its next action had no input
            yet, checks of sums that it made).
    """

    NUM_OPTIONS = 2

    rank: int
    epoch: int
    state_bytes: dict[str, int]
    peak_bytes: dict[str, int]
    rejected: tuple[tuple[str, int], ...] = ()
    checks: tuple[int, ...] = ()


class Failed(Message, frozen=True):
    """Worker -> controller: an exception ended its training, in step `step`.

    Args:
        report: the traceback.
        is_deaf: True if the exception was in its links, so that it receives nothing any more. The cause is then this
            machine (such as a lack of memory). If several workers fail so in the same step, that does not show a bug.
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
        copy_ms: for how many milliseconds training stood still while the state was copied.
        write_ms: how many milliseconds the writing took, in the background of training.
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
    """Controller that came back -> living worker: the sender is the run's controller from now on.

    Args:
        generation: the number of this controller, higher than that of any controller before.
        address: where it listens.
    """

    generation: int
    address: str


class Adopted(Message, frozen=True):
    """Worker -> the controller that came back: what the controller before may have died too early to write down.

    Args:
        generation: the generation of the controller that is answered.
        version: the step that the worker applied last.
        epoch: the mesh epoch of the Reconfigure that it received last.
        reconfigure: that Reconfigure, whole, in the form of packed_reconfigure.py. It is the same for all members of an
            epoch.
        applied: its reports of steps that were not acknowledged by Written, oldest first.
        damaged: its reports of state that it has given up since it entered its mesh epoch.
        closed: members to which its link is closed.
        leaves: True if it has got SIGTERM.
        results_differ: True if its results in the step under way differ from those of another worker, so that it does
            not vote for the step.
        caught_up: True if it has the state of all pages that it learns in that epoch, and has reported so (CaughtUp).
        checked: its report of the check of the model, from which the controller knows what layers keep, and which can
            run their backward in two parts; None if there was no check.
    """

    NUM_OPTIONS = 1

    rank: int
    generation: int
    version: int
    epoch: int
    reconfigure: bytes
    applied: tuple[Applied, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    closed: tuple[int, ...] = ()
    leaves: bool = False
    results_differ: bool = False
    caught_up: bool = False
    checked: Checked | None = None


class OfGeneration(Message, frozen=True):
    """Controller that came back -> worker: another message, encoded, fenced by the controller's generation."""

    generation: int
    data: bytes


class Written(Message, frozen=True):
    """Controller -> members, with `timeouts.adopt`, every 32 steps and when a controller has come back: all steps up to
    `step` are in metrics.jsonl, so that members need not keep their reports of them any more."""

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
    | LinksClosed
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


# A decoder has no state, so that all threads share this one. Making one for so many types takes 30 us, decoding a
# message with it 0.2 us.
_DECODER = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The encoded bytes of a message. Fields of options that are off are left out."""
    if message.NUM_OPTIONS:
        fields: list[Any] = list(msgspec.structs.astuple(message))
        # An encoded array_like struct may lack fields at its end: the decoder fills in their defaults.
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
        msgspec.MsgspecError: the bytes are not one of these messages.
    """
    try:
        return _DECODER.decode(data)
    # msgspec does not turn these two into its own errors: text that is not UTF-8, and arrays nested too deeply.
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
