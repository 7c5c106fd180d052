"""Which messages a process acts upon: those that can be right. The others are refused and counted.

Whoever has the keys of a run is trusted to compute rightly (docs/security.md). But a message that cannot be right, from
a process that has gone wrong or that speaks for another, must not end the one that gets it, nor make it keep things
without limit. So each message is looked at before anything acts on it: is it for this process, from the worker that it
names, about layers, pages, micro-batches and steps that exist, with a payload of the size that these have?

Late messages are no case for this module: data of a decided step and control messages of an older mesh epoch are part
of every recovery, and the protocol ignores them by its own rules (docs/protocol.md). All functions are pure.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import Final, NamedTuple, get_args

from elaswave_spmd.determinism.reduction_tree import is_node
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.checks import DIGEST_BYTES, DIGEST_COLUMNS
from elaswave_spmd.sharding.layout import LOSS, READER, STATE, Block, ModelLayout

UNREADABLE: Final = "message that is none of the protocol"
DIRECTION: Final = "message that is not for this process"
SENDER: Final = "message that speaks for another worker"
RANK: Final = "message about a worker that does not exist"
EPOCH: Final = "message of a mesh epoch that does not exist"
STEP: Final = "message about a step that cannot be"
PLACE: Final = "message about a layer, page or micro-batch that does not exist"
SIZE: Final = "message of a wrong size"
VALUE: Final = "message with a value that cannot be"

_FROM_CONTROLLER = (
    *(m.Prepare, m.PackedReconfigure, m.PeerAddresses, m.Validated, m.ReplicasAgree, m.Stop),
    *(m.CheckAgain, m.CheckAccepted, m.AddAgain, m.SumAccepted, m.Pace, m.Limits),
    *(m.Adopt, m.OfGeneration, m.Written),
)
_TO_WORKERS = (
    m.Activation,
    m.ActivationGradient,
    m.PartialSum,
    m.ReducedGradient,
    m.Publish,
    m.PageState,
    m.Need,
    m.CheckDigests,
    m.Addend,
    m.Vote,
    m.GroupLost,
    m.PairSent,
    m.PairReceived,
    m.PairLost,
)
_STEPS_AHEAD = 2
"""Members are at most two steps apart, and a worker whose micro-batches are all others' works ahead by one."""
_MOST_LEVELS = 16  # of votes
_LONGEST_NORM = 64
"""An exact sum of doubles is at most 40 doubles long: their exponents span 2,098 bits, and one has 53 of them."""
LONGEST_TEXT: Final = 2_000
"""The most characters of a text in a message."""
MOST_METRICS: Final = 100
"""The most metrics of a model (`metrics(output, batch)`)."""
LONGEST_METRIC: Final = 100
"""The most characters of the name of a metric."""
LONGEST_REPORT: Final = 1_000_000
"""The most characters of the report of an exception."""
_MOST_KINDS = 100  # of state, or of memory
_MOST_MADE = 1_000_000  # tensors that the constructors of a model make
_MOST_DIMENSIONS = 16  # the product of the numbers of a longer shape takes time that grows with its square
_MOST_REASONS, _LONGEST_REASON = 64, 200
_ADDRESS = re.compile(r"\S{1,300}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{64}")
_DIGEST_BYTES = 16  # of worker/model_check.py
_HASH_BYTES = 8  # of a replica's state
_ERROR_FIELDS = frozenset(("what", "rule", "where", "exists", "fix"))
_TEXTS = ("reason", "extension", "action", "loss_unchecked")
_TEXTS_OF = {kind: tuple(name for name in _TEXTS if name in kind.__struct_fields__) for kind in get_args(m.AnyMessage)}
"""Kind of message -> its fields that are texts. A controller looks at tens of thousands of messages a second."""


@dataclass(frozen=True)
class MessageBounds:
    """The ids and sizes that messages of a run can have.

    Args:
        layout: the pages.
        steps: of the run.
        num_microbatches: of a step.
        num_validation_microbatches: of a validation; 0: the run has none.
        state_tensors: fp32 values of a trained parameter's state: the master and those of the optimizer.
        spawns: workers may ask for new ones, in fault injection.
        checks: micro-batches may be checked (verify.rate).
        averages: state has an average of the parameters (optim.ema).
        pairs: payloads may go through pairs (runtime.pairs).
    """

    layout: ModelLayout
    steps: int
    num_microbatches: int
    num_validation_microbatches: int
    state_tensors: int
    spawns: bool = False
    checks: bool = False
    averages: bool = False
    pairs: bool = False

    # ---- what exists

    def has_step(self, step: int, version: int) -> bool:
        """True if a message can be about this step where the receiver is at a version."""
        return 0 <= step <= min(version + _STEPS_AHEAD, self.steps)

    def num_elements(self, pages: tuple[int, int, int], *kinds: str, trained: bool = False) -> int | None:
        """The elements of a page range (layer, first, stop) in a block of one of these kinds; None: there is none.

        Args:
            trained: frozen blocks do not count: the range is to have a gradient.
        """
        if self._block_of(pages, kinds, trained) is None:
            return None
        layer, first, stop = pages
        return self.layout.layers[layer].num_elements(first, stop)

    def _block_of(self, pages: tuple[int, int, int], kinds: Collection[str], trained: bool) -> Block | None:
        """The block of one of these kinds that a page range lies in; None: there is none."""
        layer, first, stop = pages
        if not 0 <= layer < len(self.layout.layers) or not 0 <= first < stop:
            return None
        for block in self.layout.layers[layer].blocks:
            if block.first_page <= first and stop <= block.first_page + block.num_pages and block.kind in kinds:
                return None if trained and not block.has_gradient else block
        return None

    def has_ranges(self, ranges: Collection[tuple[int, int, int]], *kinds: str, trained: bool = False) -> bool:
        """True if all of these page ranges exist, and are no more than there are pages."""
        exist = (self._block_of(pages, kinds, trained) is not None for pages in ranges)
        return not ranges or (len(ranges) <= self._num_pages and all(exist))

    @cached_property
    def _num_pages(self) -> int:
        return sum(block.num_pages for layer in self.layout.layers for block in layer.blocks)

    def has_microbatches(self, microbatches: Collection[int], *, validation: bool = False) -> bool:
        """True if all of these micro-batches exist, each named once."""
        if not microbatches:
            return True
        most = self.num_validation_microbatches if validation else self.num_microbatches
        return min(microbatches) >= 0 and max(microbatches) < most and len(set(microbatches)) == len(microbatches)

    # ---- messages between workers

    def refused_payload(self, message: m.AnyMessage, num_elements: int | None) -> str:
        """Why a message cannot be right, by what it names and the elements of its payload; empty if it can.

        Args:
            num_elements: of the payload; None: it came without one.
        """
        match message:
            case m.Activation() | m.ActivationGradient():
                validation = isinstance(message, m.Activation) and message.validation
                if not self.has_microbatches((message.microbatch,), validation=validation):
                    return PLACE
                if not 0 <= message.layer < len(self.layout.layers):
                    return PLACE
                return "" if _has_form(message, num_elements) else SIZE
            case m.PartialSum():
                return self._refused_sum(message, num_elements)
            case m.ReducedGradient():
                return self._refused_gradient(message, num_elements)
            case m.PageState():
                return self._refused_state(message, num_elements)
            case m.Publish() | m.FinalPages():
                wanted = self.num_elements((message.layer, message.first, message.stop), STATE)
                return PLACE if wanted is None else SIZE if wanted != num_elements else ""
            case m.Need():
                if self.num_elements((message.layer, message.first, message.stop), STATE) is None:
                    return PLACE
            case m.CheckDigests(microbatch=microbatch, rows=rows):
                if why := self.refused_digests(microbatch, rows):
                    return why
            case m.Addend():
                return self._refused_addend(message, num_elements)
        return "" if num_elements is None else SIZE

    def refused_digests(self, microbatch: int, *results: tuple[m.DigestRow, ...]) -> str:
        """Why results of a checked micro-batch cannot be right; empty if they can."""
        layers = [[layer for layer, *_ in rows] for rows in results]
        if not self.checks:
            return DIRECTION
        if not self.has_microbatches((microbatch,)) or any(layers[0] != some for some in layers):
            return PLACE
        if any(some != list(range(some[0], some[0] + len(some))) if some else True for some in layers):
            return PLACE
        if not 0 <= layers[0][0] <= layers[0][-1] < len(self.layout.layers):
            return PLACE
        sizes = {len(digest) for rows in results for _, *digests in rows for digest in digests}
        return "" if sizes <= {0, DIGEST_BYTES * DIGEST_COLUMNS} else SIZE

    def _refused_addend(self, message: m.Addend, num_elements: int | None) -> str:
        wanted = self.num_elements((message.layer, message.first, message.stop), STATE, READER, LOSS, trained=True)
        if not self.checks:
            return DIRECTION
        if wanted is None or not self.has_microbatches((message.microbatch,)):
            return PLACE
        return "" if wanted == num_elements else SIZE

    def refused_sums(self, pages: tuple[int, int, int], sums: Collection[m.SumRow], *results: m.SumResult) -> str:
        """Why digests of sums, or of reduced gradients, of some pages cannot be right; empty if they can."""
        if not self.checks:
            return DIRECTION
        of_state = self.num_elements(pages, STATE, trained=True)
        if of_state is None and self.num_elements(pages, LOSS) is None:
            return PLACE
        nodes = {(lo, hi) for _, lo, hi, _ in sums}
        uses = {use for use, *_ in sums}
        if not uses <= set(range(len(self.layout.layers))) or not _are_nodes(nodes, self.num_microbatches):
            return PLACE
        norms = 4 * (pages[2] - pages[1]) if of_state is not None else 0
        good = all(len(digest) == DIGEST_BYTES * DIGEST_COLUMNS and len(some) == norms for digest, some in results)
        good = good and all(len(digest) == DIGEST_BYTES * DIGEST_COLUMNS for *_, digest in sums)
        return "" if good and len(sums) == len({row[:3] for row in sums}) and len(results) <= 2 else SIZE

    def _refused_sum(self, message: m.PartialSum, num_elements: int | None) -> str:
        wanted = self.num_elements((message.layer, message.first, message.stop), STATE, READER, LOSS, trained=True)
        if wanted is None or not is_node((message.lo, message.hi), self.num_microbatches):
            return PLACE
        return "" if wanted == num_elements else SIZE

    def _refused_gradient(self, message: m.ReducedGradient, num_elements: int | None) -> str:
        pages = message.layer, message.first, message.stop
        of_state, of_loss = self.num_elements(pages, STATE, trained=True), self.num_elements(pages, LOSS)
        if of_state is None and of_loss is None:
            return PLACE
        norms = 4 * (message.stop - message.first) if of_state is not None else 0
        return "" if num_elements == (of_state or of_loss) and len(message.norms) == norms else SIZE

    def _refused_state(self, message: m.PageState, num_elements: int | None) -> str:
        pages = message.layer, message.first, message.stop
        if self.num_elements(pages, LOSS) is not None:
            # Whether there is a loss, the loss, and its weight if it has one.
            return "" if num_elements in (2, 3) and not message.norms else SIZE
        if (wanted := self.num_elements(pages, STATE)) is None:
            return PLACE
        if self.num_elements(pages, STATE, trained=True) is None:  # frozen: a master alone, and never a gradient
            return "" if num_elements == wanted and not message.norms else SIZE
        # None of a version that all members began with, for which nobody votes: 0, or that of a checkpoint. Who is of
        # the first mesh knows which that is (`refused_by_worker`).
        norms = (0, 4 * (message.stop - message.first)) if message.step else (0,)
        return "" if num_elements == self.state_tensors * wanted and len(message.norms) in norms else SIZE

    def lacks_norms(self, message: m.PageState) -> bool:
        """True for state of trained pages that comes without the norms of the step that made it."""
        pages = message.layer, message.first, message.stop
        return not message.norms and self.num_elements(pages, STATE, trained=True) is not None


# ---- at a worker


@dataclass(frozen=True)
class WorkerPosition:
    """The place of the worker that gets a message: its version, its mesh epoch, and who votes to it in that.

    Args:
        promised: the newest mesh epoch whose Prepare it has answered, or `epoch`. No member can be in a later one: an
            epoch begins when all living members of the one before have answered, this worker among them.
        voters: at each level.
        began: the version that all members of the first mesh began with; None: the worker came later, and knows not.
    """

    version: int
    epoch: int
    promised: int
    voters: Sequence[Collection[int]]
    began: int | None = None


def not_for_workers(message: m.AnyMessage, sender: int, *, me: int, controller: int) -> str:
    """Why a worker does not take this kind of message from this sender; empty if it does.

    Args:
        me: rank of the worker.
        controller: the controller's peer id.
    """
    if isinstance(message, _FROM_CONTROLLER):
        return "" if sender == controller else DIRECTION
    if not isinstance(message, _TO_WORKERS):
        return DIRECTION
    return "" if sender >= 0 and sender != me else SENDER


def refused_by_worker(
    bounds: MessageBounds, message: m.AnyMessage, sender: int, num_elements: int | None, at: WorkerPosition
) -> str:
    """Why a worker refuses a message of another worker; empty if it acts on it. The controller's are trusted."""
    if not isinstance(message, _TO_WORKERS):
        return DIRECTION
    match message:
        case m.Vote():
            return _refused_vote(bounds, message, sender, num_elements, at)
        case m.GroupLost():
            good = num_elements is None and len(message.reason) <= LONGEST_TEXT
            return SENDER if message.sender != sender else "" if good else SIZE
        case m.PairSent() | m.PairReceived() | m.PairLost():
            return _refused_of_pair(message, sender, num_elements, at) if bounds.pairs else DIRECTION
        case _:
            if not 0 <= getattr(message, "attempt", 0) <= at.promised:
                return EPOCH
            if not bounds.has_step(message.step, at.version):
                return STEP
            lacks_norms = isinstance(message, m.PageState) and bounds.lacks_norms(message)
            if lacks_norms and at.began not in (None, message.step):
                return SIZE  # a step has been voted for since: whoever has its state has its norms
            return bounds.refused_payload(message, num_elements)


def _refused_of_pair(
    message: m.PairSent | m.PairReceived | m.PairLost, sender: int, num_elements: int | None, at: WorkerPosition
) -> str:
    if not 0 <= getattr(message, "epoch", 0) <= at.promised:
        return EPOCH
    match message:
        case m.PairSent(epoch=epoch, number=number, size=size, resent=resent):
            # Who sends through a pair has met the receiver in its epoch. What that did not bring comes with the next.
            if epoch > at.epoch and not resent:
                return EPOCH
            if number < 1 or size < 0:
                return VALUE
            return "" if num_elements == (size or None if resent else None) else SIZE  # elements are bytes
        case m.PairReceived(number=number):
            return VALUE if number < 1 else "" if num_elements is None else SIZE
        case m.PairLost(reason=reason):
            good = num_elements is None and len(reason) <= LONGEST_TEXT
            return SENDER if message.sender != sender else "" if good else SIZE


def _refused_vote(
    bounds: MessageBounds, vote: m.Vote, sender: int, num_elements: int | None, at: WorkerPosition
) -> str:
    if vote.sender != sender:
        return SENDER
    if num_elements is not None or len(vote.norm) > _LONGEST_NORM or len(vote.extension) > LONGEST_TEXT:
        return SIZE
    if not vote.step >= 1 or not bounds.has_step(vote.step, at.version):
        return STEP
    if not 0 <= vote.epoch <= at.promised:
        return EPOCH
    # A vote of a later epoch may come before its Reconfigure, from a worker that is not known here yet.
    if not 0 <= vote.level < (len(at.voters) if vote.epoch == at.epoch else _MOST_LEVELS):
        return VALUE
    return RANK if vote.epoch == at.epoch and sender not in at.voters[vote.level] else ""


# ---- at the controller


class ControllerPosition(NamedTuple):
    """The controller's knowledge when a message comes.

    Args:
        version: the step committed last.
        last_epoch: the newest mesh epoch of which any Prepare was sent.
        num_ranks: ranks below it have been given to workers.
        ready: the workers that have reported Ready, which each does once.
    """

    version: int
    last_epoch: int
    num_ranks: int
    ready: Container[int]


def refused_by_controller(
    bounds: MessageBounds, message: m.AnyMessage, sender: int, num_elements: int | None, at: ControllerPosition
) -> str:
    """Why the controller refuses a message of a worker; empty if it acts on it."""
    if not 0 <= sender < at.num_ranks:
        return RANK
    if getattr(message, "rank", getattr(message, "sender", sender)) != sender:
        return SENDER
    if not -1 <= getattr(message, "epoch", 0) <= at.last_epoch:
        return EPOCH
    if num_elements is not None and not isinstance(message, m.FinalPages):
        return SIZE
    return _refused_report(bounds, message, num_elements, at)


def refused_heartbeat(message: m.Heartbeat, sender: int) -> str:
    """Why the controller refuses a heartbeat, also one that the sender's agent has sent on; empty if it does not."""
    if message.rank != sender:
        return SENDER
    return "" if len(message.action) <= LONGEST_TEXT and _are_counts(message.rejected) else SIZE


def _refused_report(
    bounds: MessageBounds, message: m.AnyMessage, num_elements: int | None, at: ControllerPosition
) -> str:
    """Why the controller refuses the content of a report."""
    if isinstance(message, m.Heartbeat):
        return refused_heartbeat(message, message.rank)
    for name in _TEXTS_OF[type(message)]:
        if len(getattr(message, name)) > LONGEST_TEXT:
            return SIZE
    match message:
        # First those that a large mesh sends thousands of: each class before the right one takes its time.
        case m.Applied(step=step):
            return "" if step >= 1 and bounds.has_step(step, at.version) else STEP
        case m.Measured():
            return _refused_times(bounds, message)
        case m.StepReport():
            # One for an older epoch is void, whatever is in it, and the largest of all messages.
            return _refused_step_report(bounds, message, at) if message.epoch == at.last_epoch else ""
        case m.Ready(rank, address):
            return VALUE if rank in at.ready or not _ADDRESS.fullmatch(address) else ""
        case m.Checked():
            return VALUE if message.rank in at.ready else _refused_check(bounds, message)
        case m.Constructed(rank, rows):
            named = all(0 < len(name) <= LONGEST_TEXT for name, _, _ in rows)
            good = named and all(len(digest) == _DIGEST_BYTES for *_, digest in rows)
            return VALUE if rank in at.ready else "" if good and 0 < len(rows) <= _MOST_MADE else SIZE
        case m.Refused(rank, error):
            good = "what" in error and _ERROR_FIELDS.issuperset(error)
            short = all(len(text) <= LONGEST_TEXT for text in error.values())
            return VALUE if rank in at.ready or not good else "" if short else SIZE
        case m.Adopted():
            return _refused_adoption(bounds, message, at)
        case m.ValidationLoss():
            return _refused_validation(bounds, message, at)
        case m.Fingerprints(step=step, rows=rows):
            good = bounds.has_ranges([row[:3] for row in rows], STATE)
            if any(len(digest) != _HASH_BYTES for *_, digest in rows):
                return SIZE
            return STEP if not bounds.has_step(step, at.version) else "" if good else PLACE
        case m.Damaged(step=step, page_ranges=ranges):
            good = bounds.has_ranges(ranges, STATE, LOSS)
            return STEP if not bounds.has_step(step, at.version) else "" if good else PLACE
        case m.ChecksDiffer(step=step, owner=owner):
            good = bounds.has_step(step, at.version) and 0 <= owner < at.num_ranks
            return bounds.refused_digests(message.microbatch, message.owned, message.checked) if good else STEP
        case m.CheckedAgain(step=step):
            good = bounds.has_step(step, at.version)
            return bounds.refused_digests(message.microbatch, message.rows) if good else STEP
        case m.SumsDiffer(step=step, owner=owner):
            pages = message.layer, message.first, message.stop
            good = bounds.has_step(step, at.version) and 0 <= owner < at.num_ranks
            return bounds.refused_sums(pages, (), message.owned, message.checked) if good else STEP
        case m.AddedUp(step=step):
            pages = message.layer, message.first, message.stop
            good = bounds.has_step(step, at.version)
            return bounds.refused_sums(pages, message.sums, *message.results) if good else STEP
        case m.ShardWritten():
            return _refused_shard(bounds, message, at)
        case m.FinalPages(average=average):
            return DIRECTION if average and not bounds.averages else bounds.refused_payload(message, num_elements)
        case m.LinkClosed(rank=rank, peer=peer):
            return VALUE if peer == rank else "" if -1 <= peer < at.num_ranks else RANK
        case m.LinksClosed(rank=rank, peers=peers):
            exist = 0 <= min(peers, default=-1) <= max(peers, default=-1) < at.num_ranks
            return RANK if not exist else "" if len({rank, *peers}) == len(peers) + 1 else VALUE
        case m.SpawnRequest(count=count):
            return DIRECTION if not bounds.spawns else "" if 1 <= count <= at.num_ranks else VALUE
        case m.Failed(report=report):
            return SIZE if len(report) > LONGEST_REPORT else ""
        case m.Finished(rejected=rejected) if not _are_counts(rejected):
            return SIZE
        case m.Finished(checks=checks) if len(checks) not in (0, 3) or min(checks, default=0) < 0:
            return VALUE
        case m.Finished(state_bytes=state, peak_bytes=peak):
            names = [*state, *peak]
            return SIZE if len(names) > _MOST_KINDS or max(map(len, names), default=0) > LONGEST_TEXT else ""
        case m.PairLost(other=other):
            return DIRECTION if not bounds.pairs else "" if 0 <= other < at.num_ranks else RANK
        case m.GroupLost() | m.CaughtUp() | m.Leaving():
            return ""
    return DIRECTION


def _refused_step_report(bounds: MessageBounds, report: m.StepReport, at: ControllerPosition) -> str:
    if not bounds.has_step(report.version, at.version):
        return STEP
    steps = [part.step for part in report.partial_steps]
    if len(set(steps)) < len(steps) or not set(steps) <= {report.version + 1, report.version + 2}:
        return STEP
    if not 0 <= report.attempt <= at.last_epoch:
        return EPOCH
    good = bounds.has_ranges(report.ahead, STATE, LOSS, trained=True)
    if report.layers:
        first, stop = report.layers if len(report.layers) == 2 else (0, 0)
        good = good and 0 <= first < stop <= len(bounds.layout.layers)
    return "" if good and all(_exists(bounds, part) for part in report.partial_steps) else PLACE


def _refused_adoption(bounds: MessageBounds, message: m.Adopted, at: ControllerPosition) -> str:
    """A controller that came back does not know yet how far the run is: a step need only be one of the run."""
    steps = [report.step for report in message.applied]
    if not 0 <= message.version <= bounds.steps or not all(1 <= step <= message.version for step in steps):
        return STEP
    if steps != sorted(set(steps)) or any(
        report.rank != message.rank for report in (*message.applied, *message.damaged)
    ):
        return VALUE
    if message.rank in message.closed:  # nobody has a link to itself
        return VALUE
    if not all(0 <= report.epoch <= at.last_epoch for report in (*message.applied, *message.damaged)):
        return EPOCH
    if (check := message.checked) is not None:
        if check.rank != message.rank:
            return VALUE
        if why := SIZE if len(check.loss_unchecked) > LONGEST_TEXT else _refused_check(bounds, check):
            return why
    good = all(bounds.has_ranges(report.page_ranges, STATE, LOSS) for report in message.damaged)
    # Any rank: the journal may lack those of the first mesh, which begins without a Prepare.
    return "" if good and min(message.closed, default=0) >= 0 else PLACE


def _exists(bounds: MessageBounds, part: m.PartialStep) -> bool:
    """True if everything that a partial step lists exists, each once."""
    num_layers = len(bounds.layout.layers)
    crossing = (*part.activations, *part.gradients)
    sums = {*part.layer_sums.values(), *(nodes for *_, nodes in part.page_sums)}  # mostly the same nodes in all layers
    return (
        all(bounds.has_microbatches(some) for some in (part.assigned, part.computed, part.forwarded, part.put_off))
        and (not part.put_off or set(part.put_off) <= set(part.assigned) - set(part.computed))
        and len(set(part.activations)) == len(part.activations)
        and len(set(part.gradients)) == len(part.gradients)
        and all(0 <= layer < num_layers and 0 <= one < bounds.num_microbatches for layer, one in crossing)
        and all(0 <= layer < num_layers for layer in part.layer_sums)
        and all(0 <= use < num_layers for *_, use, _ in part.page_sums)
        and bounds.has_ranges(part.reduced, STATE, LOSS, trained=True)
        and bounds.has_ranges({row[:3] for row in part.page_sums}, STATE, LOSS, trained=True)
        and all(_are_nodes(nodes, bounds.num_microbatches) for nodes in sums)
    )


def _has_form(message: m.Activation | m.ActivationGradient, num_elements: int | None) -> bool:
    """True if the payload has the size of the tensor, or of the tuple, that the message names."""
    forms, names = message.forms, message.names if isinstance(message, m.Activation) else ()
    if not forms:
        return not names and _has_shape(message.shape, num_elements)
    if len(forms) > m.MOST_TENSORS or len(names) not in (0, len(forms)) or message.shape != (num_elements,):
        return False
    named = len(set(names)) == len(names) and all(_is_field(name) for name in names)
    known = all(one.dtype in m.ITEM_BYTES and len(one.shape) <= _MOST_DIMENSIONS for one in forms)
    if not named or not known or any(min(one.shape, default=0) < 0 for one in forms):
        return False
    return m.packed_bytes(forms) == num_elements


def _is_field(name: str) -> bool:
    """True for the name of a field of a named tuple."""
    return name.isidentifier() and not name.startswith("_") and not iskeyword(name) and len(name) <= LONGEST_TEXT


def _has_shape(shape: tuple[int, ...], num_elements: int | None) -> bool:
    """True for the shape of a payload. It may have no elements, as where all tokens of a micro-batch are padding."""
    return 0 < len(shape) <= _MOST_DIMENSIONS and min(shape) >= 0 and math.prod(shape) == num_elements


def _are_nodes(nodes: Collection[tuple[int, int]], num_microbatches: int) -> bool:
    few = len(set(nodes)) == len(nodes) <= 2 * num_microbatches
    return few and all(is_node(node, num_microbatches) for node in nodes)


def _refused_validation(bounds: MessageBounds, message: m.ValidationLoss, at: ControllerPosition) -> str:
    if not bounds.num_validation_microbatches:
        return DIRECTION
    if not bounds.has_step(message.step, at.version):
        return STEP
    if len(message.microbatches) != len(message.losses) or len(message.metrics) > MOST_METRICS:
        return SIZE
    number = len(message.losses)
    rows = (("loss", message.losses, message.weights), *message.metrics)
    if any(len(name) > LONGEST_METRIC or len(sums) != number for name, sums, _ in rows):
        return SIZE
    if any(len(weights) not in (0, number) for *_, weights in rows):
        return SIZE
    return "" if bounds.has_microbatches(message.microbatches, validation=True) else PLACE


def _refused_shard(bounds: MessageBounds, message: m.ShardWritten, at: ControllerPosition) -> str:
    if not bounds.has_step(message.step, at.version):
        return STEP
    if message.error:
        return SIZE if len(message.error) > LONGEST_REPORT else ""
    if not _FILE_NAME.fullmatch(message.name) or not _HASH.fullmatch(message.sha256) or message.num_bytes < 0:
        return VALUE
    return "" if bounds.has_ranges(message.page_ranges, STATE) else PLACE


def _refused_times(bounds: MessageBounds, message: m.Measured) -> str:
    num_layers, good = len(bounds.layout.layers), True
    for rows in filter(None, (message.rows, message.memory, message.weights)):
        layers = {row[0] for row in rows}
        if min(layers) < 0 or max(layers) >= num_layers:
            return PLACE
        if len(layers) < len(rows):
            return SIZE
        good = good and all(map(_are_amounts, rows))
    if len(message.link) not in (0, 2):
        return SIZE
    # The link: a latency in seconds and a bandwidth.
    good = good and (message.data_seconds is None or _are_amounts((message.data_seconds,)))
    return "" if good and _are_amounts(message.link) and all(message.link[1:]) else VALUE


def _refused_check(bounds: MessageBounds, message: m.Checked) -> str:
    layers = [layer for layer, *_ in message.layers]
    num_layers = len(bounds.layout.layers)
    if not all(0 <= layer < num_layers for layer in (*layers, *message.kinds)):
        return PLACE
    if (
        not layers
        or len(set(layers)) < len(layers)
        or any(len(digest) != _DIGEST_BYTES for *_, digest in message.layers)
        or len(message.samples) not in (0, _DIGEST_BYTES)
    ):
        return SIZE
    counted = {layer: count for layer, count, *_ in message.layers}
    good = min(counted.values()) >= 1 and len(message.kinds) == num_layers and Counter(message.kinds) == counted
    amounts = message.seconds, *(number for _, _, *numbers, _ in message.layers for number in numbers)
    return "" if good and _are_amounts(amounts) else VALUE


def _are_counts(counts: tuple[tuple[str, int], ...]) -> bool:
    """True if these can be the numbers of what a process has refused: reason, number."""
    if not counts:
        return True
    few = len(counts) <= _MOST_REASONS
    return few and all(len(reason) <= _LONGEST_REASON and number >= 0 for reason, number in counts)


def _are_amounts(numbers: Sequence[float]) -> bool:
    """True if none is negative, and all are finite, together as well."""
    return not numbers or (min(numbers) >= 0 and math.isfinite(sum(numbers)))  # the sum tells NaN and infinity
