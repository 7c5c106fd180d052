"""The option `runtime.pairs`: boundary tensors and state go from device to device, through pairs, in place of links.

A pair is two workers, with a group of the device's library for each direction in which one has something to send the
other. The message itself goes over the link in a PairSent, without its payload; the payload goes through the pair. To
its callers this channel looks like one over links that are slow at times: what one worker sends another arrives once
and in order, whatever way each payload has taken (docs/protocol.md, P1 to P8).

The sender keeps a payload until the receiver has it (PairReceived), or until nobody needs it any more. The receiver
holds back all messages of the sender that come after one whose payload is still on its way. Either of the two may give
the pair up. Then the sender sends the payloads that the receiver lacks over the link, and the receiver completes the
waiting messages with them.
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
"""(kind of message, layer). If all micro-batches have one shape, all boundary tensors of one such key have one size."""


MOST_STATE_KEPT = 256 << 20
"""The most bytes of state that a sender keeps on its device until receivers confirm it; one page range may be larger.
Further state goes over links, which keep it in host memory."""


@dataclass(frozen=True)
class HeldBack:
    """The most that may wait here, of one sender, behind a payload that its pair has not brought (P4).

    Above that the pair is given up.

    Args:
        messages: number of messages; more than any worker sends another in a step.
        nbytes: bytes of payloads that came over the link; as many as a worker may send another in a step.
    """

    messages: int = 100_000
    nbytes: int = 1 << 30

    @classmethod
    def of(cls, layout: ModelLayout) -> HeldBack:
        """The limits for a model. `nbytes` is all of its state: at most four fp32 values for each parameter."""
        return cls(nbytes=max(cls.nbytes, 16 * layout.num_parameters))


@dataclass(frozen=True)
class PairLimits:
    """The limits of one worker's pairs: which messages go through them, and how much of these may wait.

    Args:
        sends_state: state goes through pairs as well. False on devices that can be recovered: they are synchronized at
            the begin of a step, which would wait for state under way in their queue.
        most_state: bytes; see MOST_STATE_KEPT.
        held_back: the most that may wait here behind payloads of pairs.
    """

    sends_state: bool = True
    most_state: int = MOST_STATE_KEPT
    held_back: HeldBack = field(default_factory=HeldBack)


class Pairs(Protocol):
    """The pairs of one worker. They are made anew for every epoch; until a pair is connected, the link is used."""

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        """Begin to make the pairs of a newer epoch, and give up those of the older one. Returns at once.

        Args:
            receivers, senders: the workers that this one, `rank`, sends to and receives from. The other end of each
                pair must name this worker in the same way.
        """
        ...

    def sends_to(self, peer: int) -> bool:
        """True if the pair is connected in the direction from this worker to the peer."""
        ...

    def receives_from(self, peer: int) -> bool:
        """True if the pair is connected in the direction from the peer to this worker."""
        ...

    def failure(self, peer: int) -> str:
        """The reason for which a pair of this epoch could not be made; empty if it is there or still being made."""
        ...

    def send(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begin to send bytes. The pair keeps a reference to their memory as long as that may be read.

        Args:
            values: uint8, flat, on the device.
            what: the kind of message that the bytes belong to, for traces and errors.

        Raises:
            RuntimeError: the library refuses, for example since it knows that the peer is gone.
        """
        ...

    def receive(self, peer: int, values: Tensor, what: str) -> CollectiveWork:
        """Begin to receive bytes into `values`; otherwise as `send`."""
        ...

    def give_up(self, peer: int) -> None:
        """End a pair for the rest of this epoch, with everything that is under way in it, in both directions.

        The caller must have dropped its references to all transfers of the pair (`StageGroup.give_up` says why).
        """
        ...


@dataclass
class _Sent:
    """A message whose payload goes, or went, through a pair.

    Args:
        number: the number of the message among those that this worker sends the peer through pairs (P3).
        message: the message without its payload.
        payload: kept until the peer has confirmed it; None if nobody needs it any more.
    """

    number: int
    message: Direct
    payload: Tensor | None


@dataclass
class _Leaving:
    """What this worker sends one peer through pairs.

    Args:
        number: the number of the last message.
        kept: the messages that the peer has not confirmed yet, oldest first.
        waiting: those of `kept` whose payload the pair has not been given yet.
        work: the transfer that is under way (one at a time); None if there is none.
        sizes: the bytes of the last boundary tensor of each kind that went over the link while this epoch's pair was
            connected.
        is_silent: nobody needs what is kept, and the peer still has to be told so: there is no link to it at present.
    """

    number: int = 0
    kept: deque[_Sent] = field(default_factory=deque)
    waiting: deque[tuple[Direct, Tensor]] = field(default_factory=deque)
    work: CollectiveWork | None = None
    sizes: dict[_Boundary, int] = field(default_factory=dict)
    is_silent: bool = False


@dataclass
class _Slot:
    """A received message in the order of its sender, while it or one before it is incomplete.

    Args:
        number: the number in its PairSent; 0 if the message came over the link as a whole.
        incoming: the message to give to the caller; None if there is nothing to give, as nobody needs it.
        size: the bytes of the payload, if the pair brings it; 0 if the link brings it.
        is_here: the message is complete.
        held: the bytes of its payload, if it came over the link and waits for messages before it.
    """

    number: int
    incoming: Incoming | None
    size: int = 0
    is_here: bool = True
    held: int = 0


@dataclass
class _Arriving:
    """What comes from one peer.

    Args:
        number: the number of the last PairSent that was given a slot.
        given: the number of the last message that was given to the caller.
        acknowledged: the number that the sender was told last, in PairReceived.
        slots: the messages that were not given to the caller yet, in their order.
        held: the bytes of payloads in `slots` that came over the link.
        work, memory: the transfer that is under way, and where it goes; it is for the first slot that lacks a payload.
        sizes: the bytes of the last boundary tensor of each kind that came over the link.
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
    """A channel that sends payloads through pairs if there are any, and otherwise over links.

    The memory of a payload that goes through a pair must stay as it is until the step is decided, even if the links
    copy payloads (`Channel.copies_payloads`).

    Args:
        channel: the channel over links.
        rank: the rank of this worker.
        device: the device of the payloads.
        compute: the dtype of activations.
        pairs: the pairs of this worker.
        refusal: called with (sender, message, number of elements of its payload); returns the reason for which the
            message cannot be right, or an empty string.
        expects: called with (sender, message); True if in this configuration the worker is to get it from there.
        limits: which messages go through pairs, and how much of them may wait.
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
        self._lost_later: dict[int, int] = {}  # worker -> a newer epoch in which it has given the pair up already
        self._epoch = -1
        self._is_interrupted = False  # a StepReport was sent in this epoch: from then on payloads go over links (P1)

    def enter_epoch(self, placement: Placement, replica_map: ReplicaMap) -> None:
        """Begin a new epoch: begin to make new pairs, and send over links what the old ones may not have brought (P6).

        Boundary tensors are not sent here: by the recovery plan they are sent again to the workers that need them.

        Args:
            placement: the mesh and what runs where, in the new epoch.
            replica_map: the replicas at least of the layers of this worker's stage, and of all pages that it holds or
                learns.
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
        # A peer that has entered this epoch before this worker may have given the pair up already.
        for peer, epoch in self._lost_later.items():
            if epoch == self._epoch and peer in receivers | self._senders:
                self._lost.add(peer)
                self._pairs.give_up(peer)
        self._lost_later = {peer: epoch for peer, epoch in self._lost_later.items() if epoch > self._epoch}

    # ---- sending

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        """Send a message to a peer; see `Channel.send`.

        Reports to the controller also pass here. A StepReport ends the use of pairs in this epoch, and an Applied shows
        that a step is decided.
        """
        if isinstance(message, m.StepReport):
            self._is_interrupted = True
        elif isinstance(message, m.Applied):
            self._decided(message.step)
        if payload is None or not isinstance(message, self._kinds):
            super().send(peer, message, payload)
            return
        # Asked once, before the message is sent: if the pair is connected by then, the receiver has entered this epoch,
        # so it notes the size of this tensor as this sender does.
        serves = self._pairs.sends_to(peer)
        if not serves and not self._is_interrupted and (why := self._pairs.failure(peer)):
            self._give_up(peer, why)  # tells the receiver, once in an epoch: it may have been able to make its end
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
        """True if the payload of a message goes through the pair with its receiver. The pair is connected.

        The first boundary tensor of each kind that is sent while the pair is connected goes over the link, and shows
        its receiver the size of those that follow (P2). Tensors of another size go over the link as well, and so do
        those of a validation, which the sender does not keep.
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
        """Bytes of other state that receivers have not confirmed. A copy that goes to several receivers counts once."""
        kept = {
            sent.payload.data_ptr(): sent.payload.nbytes
            for leaving in self._leaving.values()
            for sent in leaving.kept
            if sent.payload is not None and isinstance(sent.message, m.PageState)
        }
        kept.pop(payload.data_ptr(), None)
        return sum(kept.values())

    def _push(self, peer: int, leaving: _Leaving) -> None:
        """Give the pair its next payload, if the one before has been transferred."""
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
        # Not in the handler: while an exception is handled, its traceback refers to the group, which is given up here.
        if failed:
            self._give_up(peer, failed)

    def _received(self, peer: int, number: int) -> None:
        """Handle PairReceived: the peer has everything up to this number. A number that was not sent is refused."""
        leaving = self._leaving.get(peer)
        if leaving is None or number > leaving.number:
            self.reject(admission.VALUE)
            return
        while leaving.kept and leaving.kept[0].number <= number:
            leaving.kept.popleft()

    def _decided(self, step: int) -> None:
        """A step is decided: drop its boundary tensors. Their receivers have voted, so they have them or do not need
        them.

        The memory of these tensors may be used for something else from now on, so it must not be sent again.
        """
        for leaving in self._leaving.values():
            for sent in leaving.kept:
                if isinstance(sent.message, Crossing) and sent.message.step <= step:
                    sent.payload = None

    def _send_again(self, peer: int, leaving: _Leaving) -> None:
        """Send over the link everything that the peer has not confirmed: payloads, and notices for those that nobody
        needs any more, so that the peer does not wait for them."""
        leaving.waiting.clear()
        # On a large mesh there may be no link to the peer, and a message to it would cost a new mesh epoch (C16). If
        # only notices are left, they wait until there is a link.
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
        """Return the messages that are complete, with their payloads, in the order of each sender.

        See `Channel.receive_all`. Messages about pairs are handled here and not returned. This also begins transfers
        that can begin, and ends those that are complete.
        """
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
        """Hold back a message that came over the link, since a message before it lacks its payload (P4)."""
        held = 0 if incoming.payload is None else incoming.payload.nbytes
        arriving.slots.append(_Slot(0, incoming, held=held))
        arriving.held += held
        self._bound(sender, arriving)

    def _bound(self, sender: int, arriving: _Arriving) -> None:
        """Give the pair up if too much waits for it. The link then brings what is missing."""
        most = self._limits.held_back
        if len(arriving.slots) > most.messages or arriving.held > most.nbytes:
            self._give_up(sender, f"{len(arriving.slots)} messages, with {arriving.held} bytes, wait for a payload")

    def _of_pair(self, incoming: Incoming) -> None:
        """Handle a message about a pair: PairSent, PairReceived or PairLost."""
        sender, message, payload = incoming.sender, incoming.message, incoming.payload
        if why := self._refusal(sender, message, None if payload is None else payload.numel()):
            self.reject(why)
            return
        if isinstance(message, m.PairLost) and message.epoch > self._epoch:
            self._lost_later[sender] = max(message.epoch, self._lost_later.get(sender, 0))
            return
        if sender not in self._members:
            return  # a late message of a worker that is lost
        match message:
            case m.PairSent():
                self._sent(sender, message, payload)
            case m.PairReceived():
                self._received(sender, message.number)
            case m.PairLost():
                if message.epoch == self._epoch:
                    self._give_up(sender, message.reason, notify=False)

    def _sent(self, sender: int, message: m.PairSent, payload: Tensor | None) -> None:
        """Handle PairSent: a message whose payload the pair brings, or one that is sent again with its payload.

        The numbers tell which payload belongs to which message (P3). If a number is missing or comes twice, the next
        payload of the pair may not be the one that is expected, so the pair is given up.
        """
        arriving = self._arriving.setdefault(sender, _Arriving())
        if message.resent and message.number <= arriving.number:
            slot = next((slot for slot in arriving.slots if slot.number == message.number), None)
            if slot is None:
                arriving.acknowledged = 0  # the message was given on already: tell the sender again
            elif not slot.is_here:
                if slot.size:  # the sender has given the pair up, or has entered an epoch before this worker
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
        elif message.epoch == self._epoch and sender not in self._lost:  # otherwise the link will bring the payload
            self._expect(slot, sender, message)
        self._bound(sender, arriving)

    def _expect(self, slot: _Slot, sender: int, message: m.PairSent) -> None:
        """Note that the pair brings a payload, if this worker is to get one of just this size; else refuse it (P2)."""
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
        """True if a boundary tensor has the size of the last one that came over the link. Always true for state, whose
        size follows from its pages and is checked by `refusal`.

        This is checked since memory is allocated before the payload comes, by the size that its sender has named.
        """
        return (
            not isinstance(message, Crossing)
            or self._arriving[sender].sizes.get((type(message), message.layer)) == size
        )

    def _fill(self, slot: _Slot, sender: int, message: m.PairSent, payload: Tensor | None) -> None:
        """Complete a slot with what came over the link: a payload, or the notice that none will come."""
        slot.is_here, slot.incoming, inner = True, None, _decoded(message.message)
        if payload is None and not message.message:
            return  # the notice: nobody needs the payload any more
        dtype = payload_dtype(inner, self._compute) if isinstance(inner, self._kinds) else None
        if dtype is None or payload is None or payload.numel() % dtype.itemsize:
            self.reject(admission.SIZE)
        elif inner is not None:
            slot.incoming = Incoming(sender, inner, payload.view(dtype))

    def _take(self, peer: int, arriving: _Arriving) -> None:
        """Take the payload that the pair has brought, and begin to receive the next one."""
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
                    # Always new memory: a transfer that was given up may still write to the memory that it had.
                    arriving.memory = torch.empty(slot.size, dtype=torch.uint8, device=self._device.place)
                    what = type(slot.incoming.message).__name__
                    arriving.work = self._pairs.receive(peer, arriving.memory, what)
                # The backend refuses (as in `_push`), or the device has no memory left: the link uses host memory.
                except RuntimeError as error:
                    failed = _text_of(error)
            else:
                failed = self._pairs.failure(peer)
                if not failed:
                    return
        if failed:
            self._give_up(peer, failed)

    def _give_on(self, peer: int, arriving: _Arriving, found: list[Incoming]) -> None:
        """Move messages that are complete to `found`, in order, and tell the sender which ones it need not keep."""
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
        """Give a pair up (P5): use the link for the rest of the epoch, and for all that the pair has not brought.

        Args:
            reason: for the peer and the controller.
            notify: send PairLost to the other worker, and to the controller while the epoch lasts. False where the
                other worker has sent it, or the pair ends with this worker.
        """
        if peer in self._lost:
            return
        self._lost.add(peer)
        arriving, leaving = self._arriving.get(peer), self._leaving.get(peer)
        # References to transfers are dropped first, as `Pairs.give_up` requires.
        if arriving is not None:
            self._abandon(arriving)
        if leaving is not None:
            leaving.work = None
        self._pairs.give_up(peer)
        if notify:
            lost = m.PairLost(self._epoch, self._rank, peer, reason[:LONGEST_TEXT])  # a longer text would be refused
            super().send(peer, lost)
            # After a StepReport the epoch is nearly over. The peer may have entered the next one, which ends the pair
            # without a failure, so there is nothing to report.
            if not self._is_interrupted:
                super().send(CONTROLLER, lost)
        if leaving is not None:
            self._send_again(peer, leaving)

    def _abandon(self, arriving: _Arriving) -> None:
        """Stop receiving through a pair. The link brings what is missing."""
        arriving.work = arriving.memory = None
        for slot in arriving.slots:
            slot.size = 0

    def hand_over(self) -> None:
        """This worker is about to end: send over links what receivers have not confirmed (P7). Links are flushed then.

        No PairLost is sent: a message that comes again shows the receiver that the pair is not used any more.
        """
        for peer in list(self._leaving):
            self._give_up(peer, "", notify=False)

    def give_up_all(self, reason: str) -> None:
        """The device has failed: give all pairs up, and drop the payloads that are kept, as they may be wrong."""
        for peer, leaving in self._leaving.items():
            for sent in leaving.kept:
                sent.payload = None
            self._give_up(peer, reason)
        for peer in list(self._arriving):
            self._give_up(peer, reason)

    # ---- for whoever waits

    @property
    def idle(self) -> bool:
        """True if no transfer is under way or waiting, in either direction."""
        leaves = any(leaving.work is not None or leaving.waiting for leaving in self._leaving.values())
        return not leaves and all(_next_by_pair(arriving) is None for arriving in self._arriving.values())

    @property
    def has_news(self) -> bool:
        """True if a transfer has ended or can begin, so that `receive_all` has something to do."""
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
    """(receivers, senders) of one worker's pairs.

    The workers of its micro-batches on the stages before and after are both. Learners of pages that it is the primary
    of are receivers, and primaries of pages that it learns are senders.
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
    """The first message that lacks its payload, if the pair brings that payload; else None."""
    slot = next((slot for slot in arriving.slots if not slot.is_here), None)
    return slot if slot is not None and slot.size else None


def _ended(way: _Leaving | _Arriving) -> str:
    """Drop a transfer that has ended. Returns the reason for which it failed; empty if it has not."""
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
