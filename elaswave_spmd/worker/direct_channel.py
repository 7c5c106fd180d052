"""The option `runtime.pairs`: boundary tensors and state go from device to device, through pairs, in place of links.

A pair is two workers, and a group of the device's library for each direction in which one has something to send the
other. The message itself goes over the link as ever, without its payload (PairSent); the payload goes through the pair.
To whoever is above, the channel is one over links that are slow at times: what one worker sends another arrives once,
in order, whatever way each payload has taken (docs/protocol.md, P1 to P8).

Who is told what: the sender keeps a payload until the receiver has it (PairReceived), or nobody needs it any more. The
receiver holds back everything that has come after a message whose payload is still on its way. Either may give the pair
up: then the sender sends over the link what the receiver has not got, and the receiver puts it where it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor

from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import LONGEST_TEXT
from elaswave_spmd.runtime.devices import Device
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import ReplicaMap
from elaswave_spmd.worker.channel import Channel, ForwardingChannel, Incoming, payload_dtype
from elaswave_spmd.worker.stage_boundary import Crossing
from elaswave_spmd.worker.stage_collectives import CollectiveWork

Direct: TypeAlias = Crossing | m.PageState
_Boundary: TypeAlias = tuple[type[m.Message], int]
"""(kind of message, layer): boundary tensors of one such have one size, where all micro-batches have one shape."""


MOST_STATE_KEPT = 256 << 20
"""Bytes of state that may wait at a time, on the device of its sender, for word that pairs have brought it; one page
range may be larger. What is beyond goes over links, which have it in host memory."""


@dataclass(frozen=True)
class HeldBack:
    """What may wait, of one sender, behind a payload that its pair has not brought. Above it the pair is given up.

    Args:
        messages: more than any worker sends another in a step.
        nbytes: of payloads that came over the link; what a worker may send another in a step.
    """

    messages: int = 100_000
    nbytes: int = 1 << 30

    @classmethod
    def of(cls, layout: ModelLayout) -> HeldBack:
        """For a model: all of its state, which is four values of fp32 for each parameter at most."""
        return cls(nbytes=max(cls.nbytes, 16 * layout.num_parameters))


@dataclass(frozen=True)
class PairLimits:
    """The limits of one worker's pairs: which messages go through them, and how much of these may wait.

    Args:
        sends_state: state goes through pairs as well. Not on devices that recover: with state under way in their queue
            they could not be synchronized at the begin of a step.
        most_state: as MOST_STATE_KEPT.
        held_back: what may wait here for the payloads of pairs.
    """

    sends_state: bool = True
    most_state: int = MOST_STATE_KEPT
    held_back: HeldBack = field(default_factory=HeldBack)


class Pairs(Protocol):
    """The pairs of one worker, made anew for every epoch; until a pair is there, the link is used."""

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        """Begin to make the pairs of a newer epoch, and give up those before. Returns at once.

        Args:
            receivers, senders: workers that this one, `rank`, sends to and gets from. The other end says the same.
        """
        ...

    def sends_to(self, peer: int) -> bool:
        """True if both workers are connected, for what this one sends the other."""
        ...

    def receives_from(self, peer: int) -> bool:
        """The same for what the other one sends this one."""
        ...

    def failure(self, peer: int) -> str:
        """The reason for which a pair of this epoch could not be made; "": there is none."""
        ...

    def send(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begin to send bytes. The pair keeps their memory as long as it may be read.

        Args:
            what: the kind of message that they belong to. It is told with what becomes of them.

        Raises:
            RuntimeError: the library refuses, for example since it knows that the peer is gone.
        """
        ...

    def receive(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begin to receive bytes; as `send`."""
        ...

    def give_up(self, peer: int) -> None:
        """A pair is not used again in this epoch, and what is under way in it ends, both ways.

        The caller refers to nothing that is under way in it (`StageGroup.give_up` says why).
        """
        ...


@dataclass
class _Sent:
    """A message whose payload goes, or went, through a pair.

    Args:
        payload: kept until it has been received; None: nobody needs it any more.
    """

    number: int
    message: Direct
    payload: Tensor | None


@dataclass
class _Leaving:
    """What this worker sends one other.

    Args:
        number: of the last message.
        kept: messages that are not known to have been received, oldest first.
        waiting: those of them whose payload the pair has not been given yet.
        work: the payload that is under way; one at a time.
        sizes: bytes of the last boundary tensor of each kind that went over the link while this epoch's pair served.
        is_silent: the receiver is not told that what is kept does not come, as there is no link to it now.
    """

    number: int = 0
    kept: deque[_Sent] = field(default_factory=deque)
    waiting: deque[tuple[Direct, Tensor]] = field(default_factory=deque)
    work: CollectiveWork | None = None
    sizes: dict[_Boundary, int] = field(default_factory=dict)
    is_silent: bool = False


@dataclass
class _Slot:
    """A message that has come, in its place.

    Args:
        number: of PairSent; 0: it came over the link as a whole.
        incoming: what is given on; None: nothing, as nobody needs it.
        size: bytes of a payload that the pair brings; 0: the link brings it again, if it has not come.
        is_here: it is complete.
        held: bytes of its payload, if it came over the link and waits for those before it.
    """

    number: int
    incoming: Incoming | None
    size: int = 0
    is_here: bool = True
    held: int = 0


@dataclass
class _Arriving:
    """What comes from one other worker.

    Args:
        number: of the last message that has a place in `slots`, or had one.
        given: of the last one that was given on.
        acknowledged: the sender was told so far.
        slots: messages that are not given on yet, in their order.
        held: bytes in them that came over the link and wait.
        work, memory: the payload that is under way, of the first slot that lacks one.
        sizes: bytes of the last boundary tensor of each kind that came over the link.
    """

    number: int = 0
    given: int = 0
    acknowledged: int = 0
    slots: deque[_Slot] = field(default_factory=deque)
    held: int = 0
    work: CollectiveWork | None = None
    memory: Tensor | None = None
    sizes: dict[_Boundary, int] = field(default_factory=dict)


class DirectChannel(ForwardingChannel):
    """A channel that sends payloads through pairs, where there are any.

    Like `Channel.copies_payloads` has it for all else, the memory of what goes through a pair stays as it is until the
    step is decided, whatever the links do.

    Args:
        channel: the links.
        rank: of this worker.
        device: of the payloads.
        compute: dtype of activations.
        pairs: of this worker.
        refusal: (sender, message, elements of its payload): why a message cannot be right; empty if it can.
        expects: (sender, message): the placement, or the reshard plan, has this worker get it from there.
        limits: what goes through pairs, and how much of it may wait.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        device: Device,
        compute: torch.dtype,
        pairs: Pairs,
        refusal: Callable[[int, m.AnyMessage, int | None], str],
        expects: Callable[[int, Direct], bool],
        limits: PairLimits | None = None,
    ) -> None:
        super().__init__(channel)
        self._rank = rank
        self._device = device
        self._compute = compute
        self._pairs = pairs
        self._refusal = refusal
        self._expects = expects
        self._limits = limits = limits or PairLimits()
        self._kinds = (m.Activation, m.ActivationGradient, *((m.PageState,) if limits.sends_state else ()))
        self._leaving: dict[int, _Leaving] = {}
        self._arriving: dict[int, _Arriving] = {}
        self._members: frozenset[int] = frozenset()
        self._senders: frozenset[int] = frozenset()  # workers that send this one something through pairs
        self._lost: set[int] = set()  # workers whose pair with this one was given up in this epoch
        self._lost_later: dict[int, int] = {}  # worker -> newer epoch in which it has given the pair up
        self._epoch = -1
        self._is_interrupted = False  # a StepReport was sent in this epoch: from then on all goes over links

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Begin a new epoch: pairs are made anew, and links bring what those before have not.

        Boundary tensors are not among it: the recovery plan has them sent again to whoever needs them.

        Args:
            replica_map: of the layers of this worker's stage, and of all pages that it has or learns, at least.
        """
        self._epoch, self._members = placement.mesh.epoch, frozenset(placement.mesh.members)
        self._lost.clear()
        self._is_interrupted = False
        self._arriving = {peer: arriving for peer, arriving in self._arriving.items() if peer in self._members}
        for arriving in self._arriving.values():
            self._abandon(arriving)
        self._leaving = {peer: leaving for peer, leaving in self._leaving.items() if peer in self._members}
        for peer, leaving in self._leaving.items():
            leaving.work = None
            leaving.sizes.clear()
            for sent in leaving.kept:
                if isinstance(sent.message, Crossing):
                    sent.payload = None
            self._send_again(peer, leaving)
        receivers, self._senders = pair_peers(self._rank, placement, replica_map)
        self._pairs.enter_epoch(self._epoch, receivers, self._senders, self._rank)
        # Whoever has entered this epoch first may have found already that a pair of it cannot be made.
        for peer, epoch in self._lost_later.items():
            if epoch == self._epoch and peer in receivers | self._senders:
                self._lost.add(peer)
                self._pairs.give_up(peer)
        self._lost_later = {peer: epoch for peer, epoch in self._lost_later.items() if epoch > self._epoch}

    # ---- sending

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`. What is reported to the controller is noted here, too."""
        if isinstance(message, m.StepReport):
            self._is_interrupted = True
        elif isinstance(message, m.Applied):
            self._decided(message.step)
        if payload is None or not isinstance(message, self._kinds):
            super().send(peer, message, payload)
            return
        # Looked at once, and before it is sent: a receiver that the pair serves has entered this epoch, and notes the
        # size of what comes over the link as well.
        serves = self._pairs.sends_to(peer)
        if not serves and not self._is_interrupted and (why := self._pairs.failure(peer)):
            self._give_up(peer, why)  # said once in an epoch, also if the receiver could make its end
        if not serves or not self._goes_direct(peer, message, payload):
            super().send(peer, message, payload)
            if serves and isinstance(message, Crossing):
                leaving = self._leaving.setdefault(peer, _Leaving())
                leaving.sizes[type(message), message.layer] = payload.nbytes
            return
        leaving = self._leaving.setdefault(peer, _Leaving())
        leaving.number += 1
        leaving.kept.append(_Sent(leaving.number, message, payload))
        leaving.waiting.append((message, payload))
        super().send(peer, m.PairSent(self._epoch, leaving.number, payload.nbytes, m.encode(message)))
        self._push(peer, leaving)

    def _goes_direct(self, peer: int, message: Direct, payload: Tensor) -> bool:
        """True if the payload of a message goes through the pair with its receiver, which serves.

        The first boundary tensor of a kind that is sent while the pair serves goes over the link, and shows its
        receiver the size of those that follow. So do tensors of another size, and of a validation, whose sender has no
        use for them.
        """
        leaving = self._leaving.get(peer)
        if self._is_interrupted or peer in self._lost or (leaving is not None and leaving.is_silent):
            return False
        if payload.device != self._device.place or not payload.is_contiguous() or payload.numel() <= 1:
            return False
        if isinstance(message, m.PageState):
            kept = self._state_kept_beside(payload)
            return not kept or kept + payload.nbytes <= self._limits.most_state
        if isinstance(message, m.Activation) and message.validation:
            return False
        return leaving is not None and leaving.sizes.get((type(message), message.layer)) == payload.nbytes

    def _state_kept_beside(self, payload: Tensor) -> int:
        """Bytes of other state that is not known to have been received; what goes to several receivers counts once."""
        kept = {
            sent.payload.data_ptr(): sent.payload.nbytes
            for leaving in self._leaving.values()
            for sent in leaving.kept
            if sent.payload is not None and isinstance(sent.message, m.PageState)
        }
        kept.pop(payload.data_ptr(), None)
        return sum(kept.values())

    def _push(self, peer: int, leaving: _Leaving) -> None:
        """Give the pair the next payload, when the one before has left."""
        failed = ""
        while peer not in self._lost and not failed:
            if leaving.work is not None:
                if not leaving.work.is_completed():
                    return
                failed = _ended(leaving)
            elif leaving.waiting:
                message, payload = leaving.waiting.popleft()
                try:
                    leaving.work = self._pairs.send(peer, _bytes_of(payload), type(message).__name__)
                except RuntimeError as error:  # a backend may refuse at once, when it knows that the peer is gone
                    failed = _text_of(error)
            else:
                return
        if failed:  # outside of the handler: while an exception is handled, its traceback refers to the group
            self._give_up(peer, failed)

    def _received(self, peer: int, number: int) -> None:
        """The receiver has everything up to a number, which was sent to it."""
        leaving = self._leaving.get(peer)
        if leaving is None or number > leaving.number:
            self.reject(admission.VALUE)
            return
        while leaving.kept and leaving.kept[0].number <= number:
            leaving.kept.popleft()

    def _decided(self, step: int) -> None:
        """A step is decided: the receivers of its boundary tensors have voted, and so have got them, or need them not.

        Their memory may be used for something else from now on, and must not be sent again.
        """
        for leaving in self._leaving.values():
            for sent in leaving.kept:
                if isinstance(sent.message, Crossing) and sent.message.step <= step:
                    sent.payload = None

    def _send_again(self, peer: int, leaving: _Leaving) -> None:
        """Links bring what the receiver is not known to have, and say of what nobody needs that it does not come."""
        leaving.waiting.clear()
        # On a large mesh a worker without a link is met by a new mesh epoch: not for what nobody needs.
        leaving.is_silent = bool(leaving.kept) and not any(s.payload is not None for s in leaving.kept)
        leaving.is_silent = leaving.is_silent and not self.reaches(peer)
        if leaving.is_silent:
            return
        for sent in leaving.kept:
            if sent.payload is None:
                super().send(peer, m.PairSent(self._epoch, sent.number, 0, b"", resent=True))
            else:
                message = m.PairSent(self._epoch, sent.number, sent.payload.nbytes, m.encode(sent.message), resent=True)
                super().send(peer, message, sent.payload)

    # ---- receiving

    def receive_all(self) -> list[Incoming]:
        """Return the messages that have arrived, those with a payload when that is there; see `Channel.receive_all`."""
        found = list[Incoming]()
        for incoming in super().receive_all():
            if incoming.sender == CONTROLLER or incoming.sender == self._rank:
                found.append(incoming)
            elif isinstance(incoming.message, m.PairSent | m.PairReceived | m.PairLost):
                self._of_pair(incoming)
            else:
                self._note_size(incoming)
                arriving = self._arriving.get(incoming.sender)
                if arriving is None or not arriving.slots:
                    found.append(incoming)
                else:
                    self._hold(incoming.sender, arriving, incoming)
        for peer, leaving in list(self._leaving.items()):
            if leaving.is_silent and self.reaches(peer):
                self._send_again(peer, leaving)
            self._push(peer, leaving)
        for peer, arriving in list(self._arriving.items()):
            self._take(peer, arriving)
            self._give_on(peer, arriving, found)
        return found

    def _note_size(self, incoming: Incoming) -> None:
        message, payload = incoming.message, incoming.payload
        if payload is None or not isinstance(message, Crossing) or incoming.sender not in self._members:
            return
        if not self._refusal(incoming.sender, message, payload.numel()):
            arriving = self._arriving.setdefault(incoming.sender, _Arriving())
            arriving.sizes[type(message), message.layer] = payload.nbytes

    def _hold(self, sender: int, arriving: _Arriving, incoming: Incoming) -> None:
        """What came over the link waits for a payload before it."""
        held = 0 if incoming.payload is None else incoming.payload.nbytes
        arriving.slots.append(_Slot(0, incoming, held=held))
        arriving.held += held
        self._bound(sender, arriving)

    def _bound(self, sender: int, arriving: _Arriving) -> None:
        """Give the pair up if too much waits for it: the link brings what the pair has not, and nothing waits."""
        most = self._limits.held_back
        if len(arriving.slots) > most.messages or arriving.held > most.nbytes:
            self._give_up(sender, f"{len(arriving.slots)} messages, with {arriving.held} bytes, wait for a payload")

    def _of_pair(self, incoming: Incoming) -> None:
        """A message about a pair has come over the link."""
        sender, message, payload = incoming.sender, incoming.message, incoming.payload
        if why := self._refusal(sender, message, None if payload is None else payload.numel()):
            self.reject(why)
            return
        if isinstance(message, m.PairLost) and message.epoch > self._epoch:
            self._lost_later[sender] = max(message.epoch, self._lost_later.get(sender, 0))
            return
        if sender not in self._members:
            return  # of a worker that is lost: late, as others of its messages are
        match message:
            case m.PairSent():
                self._sent(sender, message, payload)
            case m.PairReceived():
                self._received(sender, message.number)
            case m.PairLost():
                if message.epoch == self._epoch:
                    self._give_up(sender, message.reason, notify=False)

    def _sent(self, sender: int, message: m.PairSent, payload: Tensor | None) -> None:
        """A message has come whose payload the pair brings; or one has come again, with what the pair has not brought.

        Numbers tell which payload belongs to which message. If one is missing, or comes twice, the pair has another
        payload next than the one that is expected, so it is not used any more.
        """
        arriving = self._arriving.setdefault(sender, _Arriving())
        if message.resent and message.number <= arriving.number:
            slot = next((slot for slot in arriving.slots if slot.number == message.number), None)
            if slot is None:
                arriving.acknowledged = 0  # it was given on already: the sender does not know
            elif not slot.is_here:
                if slot.size:  # the sender has given the pair up, or has entered an epoch that this worker has not
                    self._give_up(sender, "", notify=False)
                self._fill(slot, sender, message, payload)
            return
        if message.number != arriving.number + 1:
            self.reject(admission.VALUE)
            if message.epoch == self._epoch:
                self._give_up(sender, f"message {message.number} came after message {arriving.number}")
            return
        arriving.number += 1
        slot = _Slot(message.number, None, is_here=False)
        arriving.slots.append(slot)
        if message.resent:
            self._fill(slot, sender, message, payload)
        elif message.epoch == self._epoch and sender not in self._lost:  # else the link will bring it again
            self._expect(slot, sender, message)
        self._bound(sender, arriving)

    def _expect(self, slot: _Slot, sender: int, message: m.PairSent) -> None:
        """Be ready for a payload that a pair brings, if this worker is to get one of just this size."""
        inner = _decoded(message.message)
        why = admission.UNREADABLE
        if isinstance(inner, self._kinds):
            size = payload_dtype(inner, self._compute).itemsize
            why = self._refusal(sender, inner, message.size // size)
            if not why and (message.size % size or not self._is_size(sender, inner, message.size)):
                why = admission.SIZE
            if not why and not (sender in self._senders and self._expects(sender, inner)):
                why = admission.PLACE
            slot.incoming, slot.size = Incoming(sender, inner, placed=True), message.size
        if why:
            slot.size = 0
            self.reject(why)
            self._give_up(sender, f"a payload was refused: {why}")

    def _is_size(self, sender: int, message: m.AnyMessage, size: int) -> bool:
        """True for the size of state, which follows from its pages, and for the one that a boundary tensor had before.

        Memory is taken for a payload before it comes, and its sender alone says how large it is.
        """
        return (
            not isinstance(message, Crossing)
            or self._arriving[sender].sizes.get((type(message), message.layer)) == size
        )

    def _fill(self, slot: _Slot, sender: int, message: m.PairSent, payload: Tensor | None) -> None:
        """The link has brought what the pair has not."""
        slot.is_here, slot.incoming, inner = True, None, _decoded(message.message)
        if payload is None and not message.message:
            return  # nobody needs it any more
        dtype = payload_dtype(inner, self._compute) if isinstance(inner, self._kinds) else None
        if dtype is None or payload is None or payload.numel() % dtype.itemsize:
            self.reject(admission.SIZE)
        elif inner is not None:
            slot.incoming = Incoming(sender, inner, payload.view(dtype))

    def _take(self, peer: int, arriving: _Arriving) -> None:
        """Take what the pair has brought, and be ready for what it brings next."""
        failed = ""
        while peer not in self._lost and not failed:
            slot = _next_by_pair(arriving)
            if slot is None:
                return
            if arriving.work is not None:
                if not arriving.work.is_completed():
                    return
                if not (failed := _ended(arriving)):
                    assert slot.incoming is not None and arriving.memory is not None
                    incoming = slot.incoming
                    payload = arriving.memory.view(payload_dtype(incoming.message, self._compute))
                    slot.incoming = Incoming(peer, incoming.message, payload, placed=True)
                    slot.is_here, arriving.memory = True, None
            elif self._pairs.receives_from(peer):
                assert slot.incoming is not None
                try:
                    # Not memory of before: a transfer that was given up may write to its own at any time.
                    arriving.memory = torch.empty(slot.size, dtype=torch.uint8, device=self._device.place)
                    what = type(slot.incoming.message).__name__
                    arriving.work = self._pairs.receive(peer, arriving.memory, what)
                except RuntimeError as error:  # as in `_push`; or there is no memory: the link brings it to the host's
                    failed = _text_of(error)
            else:
                failed = self._pairs.failure(peer)
                if not failed:
                    return
        if failed:
            self._give_up(peer, failed)

    def _give_on(self, peer: int, arriving: _Arriving, found: list[Incoming]) -> None:
        """Give on what is complete, in order, and tell the sender what it need not keep."""
        slots = arriving.slots
        while slots and slots[0].is_here:
            slot = slots.popleft()
            arriving.held -= slot.held
            arriving.given = max(arriving.given, slot.number)
            if slot.incoming is not None:
                found.append(slot.incoming)
        if arriving.given > arriving.acknowledged:
            arriving.acknowledged = arriving.given
            super().send(peer, m.PairReceived(arriving.given))

    # ---- the end of a pair

    def _give_up(self, peer: int, reason: str, *, notify: bool = True) -> None:
        """Use the link for the rest of the epoch, and for all that the pair has not brought.

        Args:
            notify: send PairLost to the other worker, and to the controller while the epoch lasts. False where the
                other worker has sent it, or the pair ends with this worker.
        """
        if peer in self._lost:
            return
        self._lost.add(peer)
        arriving, leaving = self._arriving.get(peer), self._leaving.get(peer)
        # First: the last reference to a transfer must not be dropped here when the pair is given up.
        if arriving is not None:
            self._abandon(arriving)
        if leaving is not None:
            leaving.work = None
        self._pairs.give_up(peer)
        if notify:
            lost = m.PairLost(self._epoch, self._rank, peer, reason[:LONGEST_TEXT])  # a longer one is refused
            super().send(peer, lost)
            if not self._is_interrupted:  # else this epoch is over, and the other end may have left for the next one
                super().send(CONTROLLER, lost)
        if leaving is not None:
            self._send_again(peer, leaving)

    def _abandon(self, arriving: _Arriving) -> None:
        """Nothing that is under way in a pair counts any more: the link brings it again."""
        arriving.work = arriving.memory = None
        for slot in arriving.slots:
            slot.size = 0

    def hand_over(self) -> None:
        """This worker ends by itself: links, which are flushed, bring what it has sent and nobody is known to have.

        Nobody is told of a failure: what comes again says that the pair is not used any more.
        """
        for peer in list(self._leaving):
            self._give_up(peer, "", notify=False)

    def give_up_all(self, reason: str) -> None:
        """The device has failed: nothing that is under way through it counts, nor does what is kept to be sent."""
        for peer, leaving in self._leaving.items():
            for sent in leaving.kept:
                sent.payload = None
            self._give_up(peer, reason)
        for peer in list(self._arriving):
            self._give_up(peer, reason)

    # ---- for whoever waits

    @property
    def idle(self) -> bool:
        """True if nothing is under way through pairs, and nothing waits for them."""
        leaves = any(leaving.work is not None or leaving.waiting for leaving in self._leaving.values())
        return not leaves and all(_next_by_pair(arriving) is None for arriving in self._arriving.values())

    @property
    def has_news(self) -> bool:
        """True if something has ended, or can begin."""
        for leaving in self._leaving.values():
            if leaving.waiting if leaving.work is None else leaving.work.is_completed():
                return True
        for peer, arriving in self._arriving.items():
            if arriving.work is not None:
                if arriving.work.is_completed():
                    return True
            elif _next_by_pair(arriving) is not None and (self._pairs.receives_from(peer) or self._pairs.failure(peer)):
                return True
        return False


def pair_peers(rank: int, placement: Placement, replica_map: ReplicaMap) -> tuple[frozenset[int], frozenset[int]]:
    """The workers that one has pairs with: those that it sends to, and those that it gets something from.

    They are the workers of its micro-batches on the stages before and after, both ways; learners of pages that it is
    the primary of, and primaries of pages that it learns.
    """
    stage = placement.mesh.stage_of(rank)
    beside = [other for other in (stage - 1, stage + 1) if 0 <= other < placement.num_stages]
    own = placement.microbatches_of(rank)
    receivers = {placement.worker_of_microbatch(other, microbatch) for other in beside for microbatch in own}
    senders = set(receivers)
    for pages in (pages for some in replica_map.values() for pages in some):
        if pages.primary == rank:
            receivers |= pages.learners
        elif rank in pages.learners:
            senders.add(pages.primary)
    return frozenset(receivers - {rank}), frozenset(senders - {rank})


def _next_by_pair(arriving: _Arriving) -> _Slot | None:
    """The first message that lacks its payload, if the pair brings it."""
    slot = next((slot for slot in arriving.slots if not slot.is_here), None)
    return slot if slot is not None and slot.size else None


def _ended(way: _Leaving | _Arriving) -> str:
    """Forget a transfer that has ended. Returns why it failed; empty: it has not."""
    failed = ""
    assert way.work is not None
    try:
        way.work.wait()
    except RuntimeError as error:
        failed = _text_of(error)
    way.work = None
    return failed


def _text_of(error: RuntimeError) -> str:
    return str(error) or type(error).__name__


def _bytes_of(payload: Tensor) -> Tensor:
    return payload.detach().reshape(-1).view(torch.uint8)


def _decoded(data: bytes) -> m.AnyMessage | None:
    try:
        return m.decode(data) if data else None
    except msgspec.MsgspecError:
        return None
