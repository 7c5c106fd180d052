"""The protocol's own ways over real links: a Reconfigure that is a change of the last one, votes in rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch

from elaswave_spmd.recovery.messages import Reconfigure, Vote
from elaswave_spmd.recovery.packed_reconfigure import Packer
from elaswave_spmd.recovery.vote_exchange import pairs_of
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, SendVote, WorkerProtocol
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.channel import SocketChannel
from tests.multiprocess.test_links import WAYS, Ends
from tests.waiting import PATIENCE_S

MEMBERS = range(7)


@dataclass
class Member:
    """A worker's end of its links, and its half of the protocol."""

    links: Links
    mailbox: Mailbox
    channel: SocketChannel
    protocol: WorkerProtocol
    told: list[Reconfigure] = field(default_factory=list)
    applied: list[Apply] = field(default_factory=list)

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendVote):
                for peer in effect.receivers:
                    self.channel.send(peer, effect.vote)
            if isinstance(effect, Apply):
                self.applied.append(effect)

    def handle(self) -> None:
        """Handles what has come."""
        if not self.mailbox.wait(0):
            return
        for incoming in self.channel.receive_all():
            if isinstance(incoming.message, Reconfigure):
                self.told.append(incoming.message)
            if isinstance(incoming.message, Vote):
                self.do(self.protocol.vote_received(incoming.message))


def until(members: list[Member], is_done: Callable[[], bool]) -> None:
    """Members handle their messages in turn: each may need what another one passes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline, [member.protocol for member in members]
        for member in members:
            member.handle()
        time.sleep(0.001)


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, stack)


@pytest.fixture
def members(ends: Ends) -> list[Member]:
    """Seven, all linked to each other; each keeps a page, the first one the loss as well."""
    device, loss = HostDevice(device_of("cpu")), ReplicaSet(1, 0, 1, 0, frozenset({0}))
    found = []
    for rank in MEMBERS:
        links, mailbox = ends.open(rank)
        held = [ReplicaSet(0, rank, rank + 1, rank, frozenset({rank})), *([loss] if rank == 0 else [])]
        protocol = WorkerProtocol(rank, 0, MEMBERS, held, loss.key, widest=2)
        found.append(Member(links, mailbox, SocketChannel(links, mailbox, torch.float32, device), protocol))
    for member in found:
        peers = [rank for rank in MEMBERS if rank != member.protocol.rank]
        for peer in peers:
            member.links.connect(peer, found[peer].links.address)
        assert member.links.wait_connected(peers, PATIENCE_S) == []
    return found


def test_votes_in_rounds_decide_steps(members: list[Member]) -> None:
    for step in (1, 2, 3):
        for member in members:
            for pages in member.protocol.held:
                norms, loss = ([], 2.5) if pages.layer else ([1 / (3 + member.protocol.rank)], None)
                member.do(member.protocol.gradient_complete(step, pages.key, norms, loss))
            member.do(member.protocol.computed(step))
        until(members, lambda at=step: all(member.protocol.version == at for member in members))
    assert all(len(member.protocol.voters) == 3 for member in members)
    norm = math.sqrt(math.fsum(1 / (3 + rank) for rank in MEMBERS))
    assert all(member.applied == [Apply(step, 2.5, norm) for step in (1, 2, 3)] for member in members)


def test_links_to_the_peers_of_the_rounds_are_enough(members: list[Member]) -> None:
    """As on a large mesh (C16): a worker has no link to whom it sends nothing, and nobody misses one."""
    pairs = pairs_of(MEMBERS, 2).tolist()
    for rank, member in enumerate(members):
        peers = {peer for pair in pairs if rank in pair for peer in pair if peer != rank}
        member.links.drop_all_but(peers, {*MEMBERS} - peers - {rank})
    assert sum(len(member.links.peers) for member in members) < len(MEMBERS) * (len(MEMBERS) - 1)
    test_votes_in_rounds_decide_steps(members)


def test_a_reconfigure_comes_whole_though_what_has_changed_is_sent(ends: Ends, members: list[Member]) -> None:
    controller, _ = ends.open(CONTROLLER)
    for rank in MEMBERS:
        controller.connect(rank, members[rank].links.address)
    assert controller.wait_connected([*MEMBERS], PATIENCE_S) == []
    packer, sent = Packer(), []
    for epoch, number in enumerate((5, 5, 7)):  # two come when the others have had two
        ranks = MEMBERS[:number]
        addresses = {rank: members[rank].links.address for rank in ranks}
        sent.append(Reconfigure(epoch, (tuple(ranks),), (0, 4), ((epoch, *range(1, number)),), addresses))
        for receivers, header in packer.encoded(ranks, sent[-1]):
            for rank in receivers:
                controller.send(rank, header)
    wanted = [sent if rank < 5 else sent[2:] for rank in MEMBERS]
    until(members, lambda: [len(member.told) for member in members] == [len(some) for some in wanted])
    assert [member.told for member in members] == wanted
