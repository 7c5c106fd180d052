"""Payloads through pairs, on pairs and links that are lists: lost, doubled and disordered messages, sizes, ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.mesh.topology import Topology
from elaswave_spmd.models import GPT
from elaswave_spmd.recovery import admission
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.admission import LONGEST_TEXT
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.direct_channel import DirectChannel, HeldBack, PairLimits, pair_peers
from elaswave_spmd.worker.model_layout import describe

A, B, SHAPE = 0, 1, (2, 3)
with torch.device("meta"):
    MODEL = GPT(vocab_size=29, seq_len=6, layers=1, d_model=8, heads=2)
LAYOUT = describe(MODEL, page_size=64).layout


def placement(epoch: int = 0, mesh: str = "pp2") -> Placement:
    return place(replace(Mesh.initial(MeshShape.parse(mesh)), epoch=epoch), LAYOUT, MODEL.shardings.with_zero(1), 4)


@dataclass
class Transfer:
    """One end of a transfer, which ends when a test says so."""

    values: Tensor
    done: bool = False
    error: str = ""

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        assert self.done
        if self.error:
            raise RuntimeError(self.error)


@dataclass
class ListedPairs:
    """The pairs of a worker. All are ready, unless a test says otherwise."""

    ready: bool = True
    failed: str = ""
    refuses: str = ""
    epochs: list[tuple[int, Collection[int], Collection[int]]] = field(default_factory=list)
    sent: list[Transfer] = field(default_factory=list)
    received: list[Transfer] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)

    def enter_epoch(self, epoch: int, receivers: Collection[int], senders: Collection[int], rank: int) -> None:
        self.epochs.append((epoch, receivers, senders))
        self.sent, self.received = [], []

    def sends_to(self, peer: int) -> bool:
        return self.ready

    def receives_from(self, peer: int) -> bool:
        return self.ready

    def failure(self, peer: int) -> str:
        return self.failed

    def send(self, peer: int, values: Tensor, what: str) -> Transfer:
        return self._begin(self.sent, values)

    def receive(self, peer: int, values: Tensor, what: str) -> Transfer:
        return self._begin(self.received, values)

    def _begin(self, transfers: list[Transfer], values: Tensor) -> Transfer:
        assert all(one.done for one in transfers), "one at a time in each direction"
        if self.refuses:
            raise RuntimeError(self.refuses)
        transfers.append(Transfer(values))
        return transfers[-1]

    def give_up(self, peer: int) -> None:
        self.given_up.append(peer)


class ListedLinks:
    """The links of a worker: what it has sent, and what is to come."""

    copies_payloads = False

    def __init__(self) -> None:
        self.sent: list[tuple[int, m.Message, Tensor | None]] = []
        self.inbox: list[Incoming] = []
        self.rejected = Counter[str]()
        self.unlinked: set[int] = set()

    def send(self, peer: int, message: m.Message, payload: Tensor | None = None) -> None:
        self.sent.append((peer, message, payload))

    def lend(self, peer: int, num_elements: int) -> Tensor | None:
        return None

    def receive_all(self) -> list[Incoming]:
        found, self.inbox = self.inbox, []
        return found

    def reaches(self, peer: int) -> bool:
        return peer not in self.unlinked

    def reject(self, reason: str) -> None:
        self.rejected[reason] += 1


class End:
    """A worker with its channel."""

    def __init__(self, rank: int, first: Placement | None = None, **bounds: Any) -> None:
        self.rank, self.links, self.pairs = rank, ListedLinks(), ListedPairs()
        self.refused, self.unexpected = "", False
        device = HostDevice(device_of("cpu"))
        self.channel = DirectChannel(
            self.links,
            rank,
            device,
            torch.float32,
            self.pairs,
            lambda sender, message, elements: self._refusal(message, elements),
            lambda sender, message: not self.unexpected,
            PairLimits(**bounds),
        )
        self.channel.enter_epoch(first or placement(), {})

    def _refusal(self, message: m.AnyMessage, elements: int | None) -> str:
        if isinstance(message, m.Activation) and elements != torch.Size(message.shape).numel():
            return admission.SIZE
        return self.refused if isinstance(message, m.Activation | m.PageState) else ""

    def given(self) -> list[tuple[str, list[float]]]:
        """What comes: (kind and id, values)."""
        found = self.channel.receive_all()
        return [(_id(one.message), [] if one.payload is None else one.payload.tolist()) for one in found]


def _id(message: m.AnyMessage) -> str:
    number = getattr(message, "microbatch", getattr(message, "first", getattr(message, "epoch", "")))
    return f"{type(message).__name__} {number}"


class World:
    """Two workers, A on the first stage and B on the second one."""

    def __init__(self, *, begun: bool = True) -> None:
        self.a, self.b = End(A), End(B)
        if begun:  # the first tensor of a kind goes over the link
            self.send(100)
            self.deliver()
            assert len(self.b.given()) == 1

    def send(self, microbatch: int) -> Tensor:
        """A sends the activation of a micro-batch, whose values are all its number."""
        value = torch.full(SHAPE, float(microbatch))
        self.a.channel.send(B, m.Activation(1, microbatch, 2, SHAPE), value)
        return value

    def send_state(self, first: int) -> None:
        self.a.channel.send(B, m.PageState(1, 2, first, first + 1, b""), torch.full((6,), float(first)))

    def deliver(self, *places: int) -> None:
        """What A and B have sent each other arrives; or, of A's messages, those at these places, in this order."""
        for one, other in ((self.a, self.b), (self.b, self.a)):
            sent, one.links.sent = one.links.sent, []
            chosen = [sent[place] for place in places] if places and one is self.a else sent
            other.links.inbox += [_arrived(one.rank, message, p) for peer, message, p in chosen if peer == other.rank]

    def copy(self) -> None:
        """The pair copies what both ends have begun."""
        for sent, received in zip(self.a.pairs.sent, self.b.pairs.received, strict=False):
            assert len(sent.values) == len(received.values), "no payload goes into memory of another size"
            if not received.done:
                received.values.copy_(sent.values)
            sent.done = received.done = True

    def run(self) -> list[tuple[str, list[float]]]:
        """All goes on until nothing moves. Returns what B gets."""
        found = list[tuple[str, list[float]]]()
        for _ in range(20):
            self.deliver()
            found += self.b.given()
            self.a.given()
            self.copy()
        return found

    def kinds(self) -> list[str]:
        """What A has sent over the link and B has not got."""
        return [
            f"{type(message).__name__}{'' if p is None else ' with payload'}" for _, message, p in self.a.links.sent
        ]


def _arrived(sender: int, message: m.Message, payload: Tensor | None) -> Incoming:
    decoded = m.decode(m.encode(message))
    if payload is None:
        return Incoming(sender, decoded)
    flat = payload.reshape(-1)
    return Incoming(sender, decoded, flat.view(torch.uint8).clone() if isinstance(decoded, m.PairSent) else flat)


def activation(microbatch: int) -> tuple[str, list[float]]:
    return f"Activation {microbatch}", [float(microbatch)] * 6


def state(first: int) -> tuple[str, list[float]]:
    return f"PageState {first}", [float(first)] * 6


def lost(world: World) -> list[m.PairLost]:
    """What A and B have told the controller of pairs."""
    sent = [*world.a.links.sent, *world.b.links.sent]
    return [message for peer, message, _ in sent if peer == CONTROLLER and isinstance(message, m.PairLost)]


def test_a_payload_goes_through_the_pair_and_its_message_over_the_link() -> None:
    world = World()
    value = world.send(0)
    assert world.kinds() == ["PairSent"] and world.a.pairs.sent[0].values.data_ptr() == value.data_ptr()
    world.deliver()
    assert world.b.given() == [] and not world.b.channel.idle
    world.copy()
    assert world.b.channel.has_news and world.b.given() == [activation(0)]
    assert world.b.channel.idle
    assert [message for _, message, _ in world.b.links.sent] == [m.PairReceived(1)]


def test_a_tensor_that_a_pair_has_brought_lies_where_it_is_used() -> None:
    world = World()
    world.send(0)
    world.deliver()
    world.b.given()
    world.copy()
    (incoming,) = world.b.channel.receive_all()
    assert incoming.placed and incoming.payload is not None and incoming.payload.dtype == torch.float32
    assert incoming.payload.data_ptr() == world.b.pairs.received[0].values.data_ptr()


def test_what_one_worker_sends_another_keeps_its_order() -> None:
    """Whatever comes after a payload that is on its way waits for it: a vote after state, for one."""
    world = World()
    world.send_state(0)
    world.a.channel.send(B, m.Vote(1, 0, A, ()))
    world.send(1)
    world.send(2)
    world.a.channel.send(B, m.Vote(2, 0, A, ()))
    world.deliver()
    assert world.b.given() == []
    wanted = [state(0), ("Vote 0", []), activation(1), activation(2), ("Vote 0", [])]
    assert world.run() == wanted and world.a.channel.idle and world.b.channel.idle


@pytest.mark.parametrize(
    ("most", "sent"), [(HeldBack(messages=3), "pairs"), (HeldBack(messages=3), "votes"), (HeldBack(nbytes=60), "state")]
)
def test_a_pair_is_given_up_when_too_much_waits_for_it(most: HeldBack, sent: str) -> None:
    """Whatever comes after a payload counts: its number, and the bytes that came over the link."""
    world = World(begun=False)
    world.b = End(B, held_back=most)
    world.send_state(0)
    for number in range(1, 4):
        world.deliver()
        assert world.b.given() == [] and not world.b.pairs.given_up
        if sent == "pairs":
            world.send_state(number)
        elif sent == "votes":
            world.a.channel.send(B, m.Vote(1, number, A, ()))
        else:
            world.a.channel.send(B, m.ReducedGradient(1, 2, number, number + 1, b""), torch.full((6,), float(number)))
    world.deliver()
    world.b.given()
    assert world.b.pairs.given_up == [A] and "wait for a payload" in lost(world)[0].reason
    kind = {"pairs": "PageState", "votes": "Vote", "state": "ReducedGradient"}[sent]
    found = world.run()
    assert [one for one, _ in found] == ["PageState 0", *([f"{kind} {number}" for number in range(1, 4)])]
    assert not world.b.links.rejected and world.b.channel._arriving[A].held == 0


def test_messages_of_others_wait_for_nobody() -> None:
    world = World()
    world.send(0)
    world.deliver()
    world.b.links.inbox += [Incoming(CONTROLLER, m.Prepare(1)), Incoming(B, m.LinkClosed(B, A))]
    assert world.b.given() == [("Prepare 1", []), ("LinkClosed ", [])]


def test_what_does_not_go_through_a_pair() -> None:
    world = World(begun=False)
    world.send(0)
    assert world.kinds() == ["Activation with payload"], "the first of its kind shows its size"
    world.a.channel.send(B, m.Activation(1, 1, 2, (3, 3)), torch.zeros(3, 3))
    world.a.channel.send(B, m.Activation(0, 1, 2, (3, 3), validation=True), torch.zeros(3, 3))
    world.a.channel.send(B, m.ActivationGradient(1, 1, 2, (1,)), torch.zeros(1))
    world.a.channel.send(B, m.ReducedGradient(1, 2, 0, 1, b""), torch.zeros(6))
    world.a.pairs.ready = False
    world.send_state(0)
    assert all(kind.endswith("with payload") for kind in world.kinds()) and not world.a.pairs.sent
    world.a.pairs.ready = True
    world.send_state(1)
    assert len(world.a.pairs.sent) == 1


def test_a_newcomer_that_is_first_in_its_epoch_keeps_its_pair() -> None:
    """What it sends a member that is an epoch behind shows no size: that member knows it as no sender yet."""
    world = World(begun=False)
    single = Mesh.initial(MeshShape.parse("single"))
    alone = replace(single, stages=((B,),), topology=Topology.of({B: ("host0",)}))
    world.b = End(B, place(alone, LAYOUT, MODEL.shardings, 4))
    world.a.channel.enter_epoch(placement(1), {})
    world.a.pairs.ready = False
    world.send(0)
    assert world.run() == [activation(0)]
    world.b.channel.enter_epoch(placement(1), {})
    world.a.pairs.ready = True
    world.send(1)
    assert world.kinds() == ["Activation with payload"], "the first one since the pair serves"
    world.send(2)
    assert world.kinds()[1:] == ["PairSent"]
    assert world.run() == [activation(1), activation(2)]
    assert not world.b.links.rejected and world.a.pairs.given_up == world.b.pairs.given_up == []


def test_after_a_step_report_all_goes_over_links_until_the_next_epoch() -> None:
    world = World()
    world.a.channel.send(CONTROLLER, m.StepReport(1, A, 0))
    world.send(0)
    world.send_state(0)
    assert [kind for kind in world.kinds() if "payload" in kind] == [
        "Activation with payload",
        "PageState with payload",
    ]
    world.a.channel.enter_epoch(placement(1), {})
    world.send_state(1)
    assert len(world.a.pairs.sent) == 1


@pytest.mark.parametrize("places", [(1,), (1, 0), (0, 0, 1), (2, 1, 0), (0, 2)], ids=str)
def test_a_message_that_is_missing_or_comes_twice_ends_the_pair_and_no_payload_is_taken_for_another(
    places: tuple[int, ...],
) -> None:
    """The messages of the payloads arrive in this order: one is lost, they change places, or one comes twice."""
    world = World()
    for microbatch in range(3):
        world.send(microbatch)
    world.deliver(*places)
    found = world.run()
    assert sorted(found) == [activation(0), activation(1), activation(2)], "each once, with its own values"
    assert world.b.links.rejected[admission.VALUE] >= 1
    assert world.a.pairs.given_up == [B] and world.b.pairs.given_up == [A]
    world.send(3)
    assert world.kinds()[-1] == "Activation with payload", "the link serves for the rest of the epoch"


@pytest.mark.parametrize("copied", [0, 1, 2])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_pair_that_fails_is_replaced_by_the_link_and_each_message_comes_once(side: str, copied: int) -> None:
    world = World()
    for microbatch in range(3):
        world.send(microbatch)
    world.deliver()
    found = list[Any]()
    for _ in range(copied):
        found += world.b.given()
        world.copy()
        world.a.given()
    found += world.b.given()
    end = getattr(world, side)
    transfer = (end.pairs.sent if side == "a" else end.pairs.received)[-1]
    transfer.done, transfer.error = True, "Connection closed by peer"
    found += end.given()
    assert [(one.sender, one.reason) for one in lost(world)] == [(end.rank, "Connection closed by peer")]
    found += world.run()
    assert found == [activation(0), activation(1), activation(2)] and not lost(world), "it is told once"


def test_what_a_pair_brings_after_it_was_given_up_counts_no_more() -> None:
    world = World()
    world.send(0)
    world.deliver()
    world.b.given()
    world.a.pairs.sent[0].done, world.a.pairs.sent[0].error = True, "not complete within 5 s"
    world.a.given()
    world.b.pairs.received[0].values.fill_(77)
    world.b.pairs.received[0].done = True
    world.deliver()
    assert world.b.given() == [activation(0)] and world.b.given() == []


def test_a_library_that_refuses_at_once_ends_the_pair() -> None:
    world = World()
    world.a.pairs.refuses = "x" * 3000
    world.send(0)
    assert world.kinds() == ["PairSent", "PairLost", "PairLost", "PairSent with payload"]
    assert {len(message.reason) for _, message, _ in world.a.links.sent if isinstance(message, m.PairLost)} == {
        LONGEST_TEXT
    }
    assert world.run() == [activation(0)]


def test_a_receiver_whose_pair_could_not_be_made_asks_for_the_link() -> None:
    world = World()
    world.b.pairs.ready = False
    world.send(0)
    world.deliver()
    assert world.b.given() == [] and not world.b.channel.has_news and not world.b.channel.idle
    world.b.pairs.failed = "Timed out"
    assert world.b.channel.has_news
    assert world.run() == [activation(0)] and world.a.pairs.given_up == [B]


@pytest.mark.parametrize(
    "how", ["size", "refused", "unexpected", "without a pair", "unreadable", "no payload", "another kind"]
)
def test_no_memory_is_taken_for_a_payload_that_is_not_expected(how: str) -> None:
    world = World()
    message = m.encode(m.Activation(1, 0, 2, SHAPE))
    size = 24
    if how == "size":  # as its message says, but not as others were
        message, size = m.encode(m.Activation(1, 0, 2, (1 << 20, 1 << 10))), 1 << 32
    world.b.refused = admission.STEP if how == "refused" else ""
    world.b.unexpected = how == "unexpected"
    if how == "without a pair":
        world.b.channel.enter_epoch(placement(1, "dp2"), {})
    message = {"unreadable": b"\xff", "no payload": b"", "another kind": m.encode(m.Need(1, 2, 0, 1))}.get(how, message)
    world.b.links.inbox.append(Incoming(A, m.PairSent(world.b.channel._epoch, 1, size, message)))
    assert world.b.given() == [] and world.b.pairs.received == [] and world.b.channel.idle
    assert sum(world.b.links.rejected.values()) == 1 and world.b.pairs.given_up == [A]


def test_one_transfer_is_under_way_in_each_direction() -> None:
    world = World()
    world.b.channel.send(A, m.ActivationGradient(1, 9, 1, SHAPE), torch.zeros(SHAPE))
    world.deliver()
    world.a.given()
    for microbatch in range(3):
        world.send(microbatch)
        world.b.channel.send(A, m.ActivationGradient(1, microbatch, 1, SHAPE), torch.ones(SHAPE))
    assert len(world.a.pairs.sent) == len(world.b.pairs.sent) == 1
    world.deliver()
    world.a.given()
    world.b.given()
    assert len(world.a.pairs.received) == len(world.b.pairs.received) == 1


def test_state_goes_over_the_link_while_enough_of_it_is_kept() -> None:
    """Its copies lie on the device until they are known to have come."""
    world = World(begun=False)
    world.a = End(A, most_state=48)
    for number in range(3):
        world.send_state(number)
    assert world.kinds() == ["PairSent", "PairSent", "PageState with payload"]
    assert world.run() == [state(0), state(1), state(2)], "in order"
    world.a.channel.send(B, m.PageState(1, 2, 3, 9, b""), torch.full((20,), 3.0))
    assert world.kinds() == ["PairSent"], "a larger range goes through the pair by itself"
    world.send_state(4)
    assert world.kinds() == ["PairSent", "PageState with payload"]


def test_without_memory_for_a_payload_the_pair_is_given_up() -> None:
    """The worker goes on, and gets it over the link."""
    world = World(begun=False)
    world.b.links.inbox.append(Incoming(A, m.PairSent(0, 1, 1 << 60, m.encode(m.PageState(1, 2, 0, 1, b"")))))
    world.b.links.inbox.append(Incoming(A, m.Need(1, 2, 0, 1)))
    assert world.b.given() == [] and world.b.pairs.given_up == [A] and world.b.pairs.received == []
    message = m.PairSent(0, 1, 24, m.encode(m.PageState(1, 2, 0, 1, b"")), resent=True)
    world.b.links.inbox.append(_arrived(A, message, torch.zeros(6)))
    assert world.b.given() == [state(0), ("Need 0", [])]


def test_a_resent_message_that_was_given_on_is_acknowledged_once_more() -> None:
    """The acknowledgement was lost with a link."""
    world = World()
    world.send_state(0)
    assert world.run() == [state(0)]
    world.send_state(1)
    world.deliver()
    world.b.given()
    world.copy()
    assert world.b.given() == [state(1)]
    world.b.links.sent.clear()
    world.a.channel.enter_epoch(placement(1), {})
    world.deliver()
    assert world.b.given() == []
    assert [message for _, message, _ in world.b.links.sent] == [m.PairReceived(2)]


def test_nobody_has_received_what_was_not_sent() -> None:
    world = World(begun=False)
    world.a.links.inbox.append(Incoming(B, m.PairReceived(1)))
    world.a.given()
    assert world.a.links.rejected == {admission.VALUE: 1}, "nothing was sent yet"
    world.send_state(0)
    world.a.links.inbox.append(Incoming(B, m.PairReceived(2)))
    world.a.given()
    assert world.a.links.rejected == {admission.VALUE: 2}
    world.b.channel.enter_epoch(placement(1), {})
    world.a.channel.enter_epoch(placement(1), {})
    assert world.run() == [state(0)], "it was kept"


def test_a_new_epoch_brings_state_over_the_link_and_says_that_boundary_tensors_do_not_come() -> None:
    """Those the recovery plan has sent again. What has come after them was held back, and goes on."""
    world = World()
    world.send(0)
    world.send_state(1)
    world.a.channel.send(B, m.Vote(1, 0, A, ()))
    world.deliver()
    assert world.b.given() == []
    world.a.channel.enter_epoch(placement(1), {})
    assert world.kinds() == ["PairSent", "PairSent with payload"]
    world.deliver()
    assert world.b.given() == [state(1), ("Vote 0", [])]
    world.b.channel.enter_epoch(placement(1), {})
    world.send_state(2)
    world.deliver()
    world.b.given()
    world.b.pairs.received[-1].values.copy_(world.a.pairs.sent[-1].values)
    world.b.pairs.received[-1].done = True
    assert world.b.given() == [state(2)], "numbers go on from epoch to epoch"


def test_a_worker_without_a_link_is_sent_nothing_that_nobody_needs() -> None:
    """On a large mesh it would take a mesh epoch to have a link for that. It is told once there is one."""
    world = World()
    world.send(0)
    world.a.links.unlinked.add(B)
    world.a.links.sent.clear()  # lost with the link
    world.a.channel.enter_epoch(placement(1), {})
    world.b.channel.enter_epoch(placement(1), {})
    assert world.kinds() == []
    world.send_state(1)
    assert world.kinds() == ["PageState with payload"], "nothing goes by the pair before it is told"
    world.a.links.unlinked.clear()
    assert world.run() == [state(1)]
    world.send_state(2)
    assert world.kinds() == ["PairSent"] and world.run() == [state(2)]
    assert not world.b.links.rejected and not world.a.pairs.given_up
    world.send(3)
    world.send(4)
    world.send_state(5)
    world.a.links.unlinked.add(B)
    world.a.channel.enter_epoch(placement(2), {})
    assert world.kinds()[-1] == "PairSent with payload", "state is needed, and has the link made"


def test_a_sender_tells_of_a_pair_that_could_not_be_made() -> None:
    """The receiver may have made its end, and would wait for what never comes by it. It is told once in an epoch."""
    world = World()
    world.a.pairs.ready, world.a.pairs.failed = False, "Timed out"
    world.send(0)
    world.send(1)
    assert [(one.sender, one.reason) for one in lost(world)] == [(A, "Timed out")]
    assert world.run() == [activation(0), activation(1)] and world.b.pairs.given_up == [A]
    world.a.channel.enter_epoch(placement(1), {})
    world.send(2)
    assert len(lost(world)) == 1
    world.a.channel.enter_epoch(placement(2), {})
    world.a.channel.send(CONTROLLER, m.StepReport(3, A, 0))
    world.a.links.sent.clear()
    world.send(3)
    assert world.kinds() == ["Activation with payload"], "not when the epoch is over"


@pytest.mark.parametrize("entered", [1, 2])
def test_a_pair_that_was_lost_in_an_epoch_that_is_not_entered_yet_is_not_used_there(entered: int) -> None:
    """Its other end has entered first, and takes no payload by it: it would wait for ever for the link to bring it."""
    world = World()
    world.b.channel.enter_epoch(placement(1), {})
    world.b.pairs.ready, world.b.pairs.failed = False, "Timed out"
    world.b.channel.send(A, m.ActivationGradient(1, 0, 2, SHAPE), torch.zeros(SHAPE))
    assert [message.epoch for _, message, _ in world.b.links.sent if isinstance(message, m.PairLost)] == [1, 1]
    world.deliver()
    world.a.given()
    world.b.pairs.ready, world.b.pairs.failed = True, ""
    for epoch in range(1, entered + 1):
        world.a.channel.enter_epoch(placement(epoch), {})
    if entered == 2:
        world.b.channel.enter_epoch(placement(2), {})
    for microbatch in (0, 1, 2):
        world.send(microbatch)
    through_pair = [kind for kind in world.kinds() if kind == "PairSent"]
    assert len(through_pair) == (0 if entered == 1 else 2), "another epoch has another pair"
    assert world.a.pairs.given_up == [B] and world.run() == [activation(0), activation(1), activation(2)]


def test_what_fails_when_the_epoch_is_over_is_no_failure_of_the_pair() -> None:
    """The other end may be in the next epoch. It is told all the same, as it may not be."""
    world = World()
    world.send(0)
    world.a.channel.send(CONTROLLER, m.StepReport(1, A, 0))
    world.a.pairs.sent[0].done, world.a.pairs.sent[0].error = True, "Connection closed by peer"
    world.a.given()
    assert not lost(world) and any(isinstance(message, m.PairLost) for _, message, _ in world.a.links.sent)
    assert world.run() == [activation(0)] and not lost(world)


def test_a_message_of_an_older_epoch_waits_for_the_link() -> None:
    """Its sender has not entered the epoch yet, and nobody is at the other end of its pair any more."""
    world = World()
    world.b.channel.enter_epoch(placement(1), {})
    world.send_state(0)
    world.deliver()
    assert world.b.given() == [] and world.b.channel.idle and world.b.pairs.received == []
    world.a.channel.enter_epoch(placement(1), {})
    assert world.run() == [state(0)] and not world.b.links.rejected


def test_a_decided_step_is_not_sent_again() -> None:
    """Its memory may be used for something else."""
    world = World()
    world.send(0)
    world.send_state(1)
    world.a.channel.send(CONTROLLER, m.Applied(1, 0, A, 0.5, 0.5, True))
    world.a.links.sent.clear()
    world.a.pairs.sent[0].done, world.a.pairs.sent[0].error = True, "Connection closed by peer"
    world.a.given()
    assert [kind for kind in world.kinds() if kind.startswith("PairSent")] == ["PairSent", "PairSent with payload"]


def test_what_a_lost_worker_has_sent_is_given_on_as_far_as_it_is_complete() -> None:
    world = World()
    world.send(0)
    world.a.channel.send(B, m.Vote(1, 0, A, ()))
    world.deliver()
    assert world.b.given() == []
    single = Mesh.initial(MeshShape.parse("single"))
    alone = replace(single, stages=((B,),), epoch=1, topology=Topology.of({B: ("host0",)}))
    world.b.channel.enter_epoch(place(alone, LAYOUT, MODEL.shardings, 4), {})
    assert world.b.given() == [] and world.b.channel.idle
    world.send(1)
    world.deliver()
    assert world.b.given() == [] and not world.b.links.rejected, "late messages are no case for a refusal"


def test_a_worker_that_ends_by_itself_leaves_what_it_has_sent_to_the_links() -> None:
    """Its vote is held back until its state has come, and is needed for a step that it has applied."""
    world = World()
    world.send_state(0)
    world.send_state(1)
    world.a.channel.send(B, m.Vote(1, 0, A, ()))
    world.deliver()
    world.b.given()
    world.a.channel.hand_over()
    assert world.kinds() == ["PairSent with payload"] * 2
    world.deliver()
    assert world.b.given() == [state(0), state(1), ("Vote 0", [])] and not lost(world)
    world.a.channel.hand_over()
    assert world.kinds() == [], "once"


def test_a_device_that_has_failed_gives_up_what_goes_through_it() -> None:
    world = World()
    world.send(0)
    world.deliver()
    world.b.given()
    world.a.channel.give_up_all("the device has failed")
    assert [kind for kind in world.kinds() if kind.startswith("PairSent")] == ["PairSent"]
    assert world.run() == [] and world.b.channel.idle


def test_pairs_are_made_with_those_who_have_something_for_each_other() -> None:
    """Neighbours of micro-batches both ways, primaries and learners one way."""
    found = {rank: pair_peers(rank, placement(mesh="dp2_pp2"), {}) for rank in range(4)}
    assert found == {0: ({2}, {2}), 1: ({3}, {3}), 2: ({0}, {0}), 3: ({1}, {1})}
    learned = {0: (ReplicaSet(0, 0, 1, 0, frozenset({0}), frozenset({1, 3})),)}
    found = {rank: pair_peers(rank, placement(mesh="dp2_pp2"), learned) for rank in range(4)}
    assert found == {0: ({1, 2, 3}, {2}), 1: ({3}, {0, 3}), 2: ({0}, {0}), 3: ({1}, {0, 1})}
    for one in found:
        assert all(one in found[other][1] for other in found[one][0]), "both ends say the same"
