"""The exchange of votes: every member gets the vote of every other exactly once, however many there are."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism.exact_sum import exact_sum, expansion
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import Vote
from elaswave_spmd.recovery.vote_exchange import WIDEST, added, content_of, rounds_of
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, SendVote, WorkerProtocol
from elaswave_spmd.sharding.replicas import ReplicaSet


def known_after(number: int, widest: int) -> list[Counter[int]]:
    """Plays the exchange: whose votes each member has in the end, and how often."""
    members = random.Random(number).sample(range(10 * number), number)
    rounds = {rank: rounds_of(members, rank, widest) for rank in members}
    known = {rank: Counter([rank]) for rank in members}
    depth = {len(found) for found in rounds.values()}
    assert len(depth) == 1
    for level in range(depth.pop()):
        came: dict[int, dict[int, Counter[int]]] = {rank: {} for rank in members}
        for rank in members:
            for peer in rounds[rank][level].receivers:
                assert rank not in came[peer], "one message from each sender"
                came[peer][rank] = known[rank]
        assert all(came[rank].keys() == rounds[rank][level].senders for rank in members)
        known = {rank: sum(came[rank].values(), known[rank]) for rank in members}
    return list(known.values())


@pytest.mark.parametrize("widest", [2, 3, 5])
@pytest.mark.parametrize("number", [*range(1, 28), 50, 81, 82, 125, 126])
def test_every_member_gets_the_vote_of_every_other_once(number: int, widest: int) -> None:
    for known in known_after(number, widest):
        assert len(known) == number and set(known.values()) == {1}


@given(st.integers(1, 90), st.integers(2, 9))
def test_so_it_is_for_any_number_of_members(number: int, widest: int) -> None:
    assert all(len(known) == number and set(known.values()) == {1} for known in known_after(number, widest))


def test_up_to_the_widest_all_vote_to_all() -> None:
    members = range(WIDEST)
    (only,) = rounds_of(members, 7)
    assert only.senders == set(members) - {7} and sorted(only.receivers) == sorted(only.senders)
    assert len(rounds_of(range(WIDEST + 1), 7)) == 2


@pytest.mark.parametrize(("number", "most"), [(100, 20), (1_000, 65), (10_000, 70), (100_000, 75), (1_000_000, 125)])
def test_a_worker_hears_from_few_on_any_mesh(number: int, most: int) -> None:
    members = range(number)
    for rank in (0, number // 3, number - 1):
        rounds = rounds_of(members, rank)
        assert sum(len(turn.senders) for turn in rounds) <= most
        assert sum(len(turn.receivers) for turn in rounds) <= 2 * most, "where blocks differ, one sends to two"


VALUES = st.lists(st.floats(0, 1e300), max_size=5)


@given(st.lists(VALUES, min_size=2, max_size=7), st.data())
def test_sums_of_sums_are_exact(values: list[list[float]], data: st.DataObject) -> None:
    """Whoever adds them up in whatever blocks: the norm has the same bits."""
    votes = [Vote(1, 0, rank, expansion(some)) for rank, some in enumerate(values)]
    cut = data.draw(st.integers(1, len(votes) - 1))
    halves = [added(votes[:cut], 0, 1), added(votes[cut:], 1, 1)]
    assert exact_sum(vote.norm for vote in halves).hex() == exact_sum(vote.norm for vote in votes).hex()
    exact = sum((Fraction(value) for some in values for value in some), Fraction(0))
    assert sum((Fraction(part) for vote in halves for part in vote.norm), Fraction(0)) == exact


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_stays_so(wrong: float) -> None:
    votes = [Vote(1, 0, rank, expansion([value])) for rank, value in enumerate((1.0, wrong, 2.0))]
    assert math.isnan(exact_sum([added(votes, 0, 1).norm, (4.0,)]))


def test_what_votes_carry_is_added_up() -> None:
    first, second = Vote(1, 0, 0, (1.0,), 2.5, "grouped", 7.0), Vote(1, 0, 1, (2.0,), None, "grouped")
    assert added([second, first], 5, 1) == Vote(1, 0, 5, (3.0,), 2.5, "grouped", 7.0, 1)
    assert content_of([first, second, Vote(1, 0, 2, ())]) == (2.5, "", 7.0), "one does not carry it"


# ---- in the worker's half of the protocol


class Mesh:
    """Protocols of one mesh, and the votes between them, which are delivered in an order that is drawn."""

    def __init__(self, number: int, widest: int, seed: int) -> None:
        self.random, self.ranks = random.Random(seed), range(number)
        self.wires: list[tuple[int, Vote]] = []
        self.applied: dict[int, list[tuple[int, str, str]]] = {rank: [] for rank in self.ranks}
        loss = ReplicaSet(9, 0, 1, 0, frozenset({0}))
        self.held = {rank: ReplicaSet(0, rank, rank + 1, rank, frozenset({rank})) for rank in self.ranks}
        self.protocols = {
            rank: WorkerProtocol(
                rank,
                0,
                self.ranks,
                (self.held[rank], loss) if rank == 0 else (self.held[rank],),
                loss.key,
                widest=widest,
            )
            for rank in self.ranks
        }
        self.loss = loss

    def do(self, rank: int, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendVote(vote, receivers):
                    self.wires += [(peer, vote) for peer in receivers]
                case Apply(step, loss, norm):
                    self.applied[rank].append((step, loss.hex(), norm.hex()))
                case _:
                    raise AssertionError(effect)

    def compute(self, rank: int, step: int) -> None:
        protocol = self.protocols[rank]
        self.do(rank, protocol.gradient_complete(step, self.held[rank].key, [1 / (3 + rank + step)]))
        if rank == 0:
            self.do(rank, protocol.gradient_complete(step, self.loss.key, [], 2.5))
        self.do(rank, protocol.computed(step))

    def deliver(self, *, but: frozenset[int] = frozenset()) -> None:
        """Delivers all votes that there are, and those that follow; none to some workers."""
        while ready := [i for i, (peer, _) in enumerate(self.wires) if peer not in but]:
            peer, vote = self.wires.pop(self.random.choice(ready))
            self.do(peer, self.protocols[peer].vote_received(vote))

    def deliver_one(self) -> None:
        """Delivers some vote, if there is any."""
        if self.wires:
            peer, vote = self.wires.pop(self.random.randrange(len(self.wires)))
            self.do(peer, self.protocols[peer].vote_received(vote))

    def change(self, epoch: int) -> None:
        """All enter the next epoch, at different times."""
        order = self.random.sample(self.ranks, len(self.ranks))
        highest = max(protocol.version for protocol in self.protocols.values())
        for protocol in self.protocols.values():
            protocol.promise(epoch)
        for rank in order:
            protocol = self.protocols[rank]
            protocol.enter_epoch(epoch, self.ranks, protocol.held, self.loss.key if rank == 0 else None, highest)
            self.do(rank, protocol.votes_again())
            if self.random.random() < 0.5:
                self.deliver(but=frozenset(order[order.index(rank) + 1 :]))


@pytest.mark.parametrize("widest", [2, 3, 32])
@pytest.mark.parametrize("number", [1, 2, 5, 9, 17, 30])
def test_all_decide_the_same_steps_with_the_same_bits(number: int, widest: int) -> None:
    mesh = Mesh(number, widest, seed=number)
    for step in (1, 2, 3):
        for rank in mesh.random.sample(mesh.ranks, number):
            mesh.compute(rank, step)
        mesh.deliver()
    norms = [math.sqrt(math.fsum(1 / (3 + rank + step) for rank in mesh.ranks)) for step in (1, 2, 3)]
    wanted = [(step, (2.5).hex(), norm.hex()) for step, norm in zip((1, 2, 3), norms, strict=True)]
    assert all(found == wanted for found in mesh.applied.values())


@pytest.mark.parametrize("seed", range(40))
def test_nobody_decides_before_all_have_voted(seed: int) -> None:
    mesh = Mesh(11, 2, seed)
    late = mesh.random.choice(mesh.ranks)
    for rank in mesh.ranks:
        if rank != late:
            mesh.compute(rank, 1)
    mesh.deliver()
    assert not any(mesh.applied.values())
    mesh.compute(late, 1)
    mesh.deliver()
    assert all(len(found) == 1 for found in mesh.applied.values())


def test_whoever_is_behind_when_the_mesh_changes_completes_the_step_by_votes_that_are_passed_on() -> None:
    """Some have applied it, and vote again in the new epoch; between those that have not, they pass votes on."""
    num_behind = 0
    for seed in range(60):
        mesh = Mesh(11, 2, seed)
        for rank in mesh.ranks:
            mesh.compute(rank, 1)
        while not any(mesh.applied.values()) or mesh.random.random() < 0.9:
            mesh.deliver_one()
        num_behind += not all(mesh.applied.values())
        mesh.wires.clear()  # of the old epoch
        mesh.change(1)
        mesh.deliver()
        assert (
            all(len(found) == 1 for found in mesh.applied.values()) and len({*map(tuple, mesh.applied.values())}) == 1
        )
        for rank in mesh.ranks:
            mesh.compute(rank, 2)
        mesh.deliver()
        assert all([step for step, *_ in found] == [1, 2] for found in mesh.applied.values())
    assert num_behind > 40


def test_a_member_owes_votes_until_it_has_passed_on_those_that_others_may_need() -> None:
    mesh = Mesh(4, 2, 0)
    for rank in mesh.ranks:
        mesh.compute(rank, 1)
    mesh.deliver()
    assert not any(protocol.owes_votes for protocol in mesh.protocols.values()), "all of them went before the decision"
    mesh.change(1)
    mesh.deliver()
    assert not any(protocol.owes_votes for protocol in mesh.protocols.values())
    one = mesh.protocols[0]
    one.promise(2)
    one.enter_epoch(2, mesh.ranks, one.held, mesh.loss.key, 1)
    assert not one.owes_votes
    one.votes_again()
    assert one.owes_votes
    (near,), _ = one.voters
    assert one.vote_received(Vote(1, 2, near, (1.0,))) and not one.owes_votes


def test_votes_that_cannot_be_right_together_end_their_receiver() -> None:
    held = ReplicaSet(0, 0, 1, 1, frozenset({1}))
    protocol = WorkerProtocol(1, 0, (0, 1), [held])
    protocol.gradient_complete(1, held.key, [1.0])
    protocol.computed(1)
    with pytest.raises(RunError, match="the votes of all members for step 1 have no loss"):
        protocol.vote_received(Vote(1, 0, 0, (1.0,)))


def test_of_votes_for_later_epochs_one_is_kept_for_each_sender_and_step() -> None:
    protocol = WorkerProtocol(1, 0, (0, 1), [])
    for number in range(100):
        assert protocol.vote_received(Vote(2, 5, 0, (math.nan if number % 2 else float(number),))) == []
    assert len(protocol._later_epochs) == 1


def test_a_worker_that_has_answered_a_prepare_passes_votes_on_and_applies_nothing() -> None:
    """Another one may need them to finish the step after which it answers."""
    members, me = range(4), 1
    held = ReplicaSet(0, 0, 1, me, frozenset({me}))
    protocol = WorkerProtocol(me, 0, members, [held], None, widest=2)
    protocol.gradient_complete(1, held.key, [1.0])
    protocol.computed(1)
    protocol.promise(1)
    first, second = protocol.voters
    (near,), (far,) = first, second
    (passed,) = protocol.vote_received(Vote(1, 0, near, (2.0,), 2.5))
    assert isinstance(passed, SendVote) and passed.vote == Vote(1, 0, me, (3.0,), 2.5, level=1)
    assert protocol.vote_received(Vote(1, 0, far, (4.0,), None, level=1)) == [] and protocol.version == 0
