"""The rules of the worker's half of the step protocol, one test each: leave a rule out and its test fails."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elaswave_spmd.recovery.messages import Publish, Vote
from elaswave_spmd.recovery.worker_protocol import Apply, Install, SendVote, WorkerProtocol, held_ranges
from elaswave_spmd.sharding.replicas import ReplicaSet

ME, OTHER, THIRD = 1, 0, 2
OWN = ReplicaSet(0, 0, 2, ME, frozenset({ME, OTHER}))  # this worker is its primary ...
MIRRORED = ReplicaSet(0, 2, 3, OTHER, frozenset({OTHER, ME}))  # ... and mirrors this one
LOSS = ReplicaSet(1, 4, 5, ME, frozenset({ME}))
OWN_NORMS, MIRRORED_NORMS = [9.0, 7.0], [5.0]


def worker(
    *, version: int = 0, epoch: int = 3, members: Sequence[int] = (OTHER, ME), loss: bool = True
) -> WorkerProtocol:
    held = [OWN, MIRRORED, LOSS] if loss else [OWN, MIRRORED]
    return WorkerProtocol(ME, epoch, members, held, LOSS.key if loss else None, version)


def complete_gradients(
    protocol: WorkerProtocol, step: int, runs: Sequence[ReplicaSet] = (OWN, MIRRORED, LOSS)
) -> list[object]:
    """Complete the reduced gradients of these page ranges; returns all effects."""
    norms = {OWN: OWN_NORMS, MIRRORED: MIRRORED_NORMS, LOSS: [99.0]}  # the loss page is no part of the norm
    effects: list[object] = []
    for run in runs:
        effects += protocol.gradient_complete(step, run.key, norms[run], 2.5 if run is LOSS else None)
    return effects


def vote(step: int, sender: int = OTHER, epoch: int = 3, norm: tuple[float, ...] = (9.0,)) -> Vote:
    return Vote(step, epoch, sender, norm, None)


def test_a_vote_waits_for_the_own_microbatches() -> None:
    protocol = worker()
    assert complete_gradients(protocol, 1) == []
    (sent,) = protocol.computed(1)
    wanted = SendVote(Vote(1, 3, ME, (16.0,), 2.5), (OTHER,))
    assert sent == wanted, "norm values of primary pages only, without the loss page"


@pytest.mark.parametrize("late", [OWN, MIRRORED, LOSS], ids=["primary", "mirror", "loss"])
def test_a_vote_waits_for_the_entry_of_every_held_run(late: ReplicaSet) -> None:
    protocol = worker()
    protocol.computed(1)
    assert complete_gradients(protocol, 1, [run for run in (OWN, MIRRORED, LOSS) if run is not late]) == []
    assert [type(e) for e in complete_gradients(protocol, 1, [late])] == [SendVote]


def test_a_worker_votes_once() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    assert len(protocol.computed(1)) == 1
    assert protocol.computed(1) == [] and complete_gradients(protocol, 1) == []


def test_entries_of_the_next_step_do_not_make_a_vote_early() -> None:
    protocol = worker()
    assert (
        complete_gradients(protocol, 2) == []
    )  # a worker without micro-batches may have them before it has applied step 1
    protocol.computed(1)
    assert complete_gradients(protocol, 1, [OWN, MIRRORED]) == []
    complete_gradients(protocol, 1, [LOSS])
    assert protocol.vote_received(vote(1)) == [Apply(1, 2.5, 5.0)]
    assert protocol.computed(2) == [SendVote(Vote(2, 3, ME, (16.0,), 2.5), (OTHER,))]


def test_entries_of_the_next_step_do_not_make_its_vote_while_this_one_is_open() -> None:
    protocol = worker()
    protocol.computed(1)
    assert complete_gradients(protocol, 2) == [] and protocol.version == 0
    assert [type(e) for e in complete_gradients(protocol, 1)] == [SendVote]


def test_computing_ahead_of_the_version_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        worker().computed(2)


def test_an_entry_that_is_not_held_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="not held"):
        worker().gradient_complete(1, (7, 0, 1), [1.0])


def test_all_votes_decide_and_the_version_advances_in_the_same_call() -> None:
    protocol = worker(members=(OTHER, ME, THIRD))
    complete_gradients(protocol, 1)
    protocol.computed(1)
    assert protocol.vote_received(vote(1, OTHER)) == [] and protocol.version == 0
    assert protocol.vote_received(vote(1, OTHER)) == [], "the same vote twice is one vote"
    (apply,) = protocol.vote_received(vote(1, THIRD, norm=(0.0,)))
    assert isinstance(apply, Apply) and apply == Apply(1, 2.5, 5.0) and apply.finite
    assert protocol.version == 1, "while applying t the worker says t"


def test_the_own_vote_is_needed_too() -> None:
    protocol = worker()
    assert protocol.vote_received(vote(1)) == []
    protocol.computed(1)
    sent, apply = complete_gradients(protocol, 1)
    assert isinstance(sent, SendVote) and apply == Apply(1, 2.5, 5.0)


def test_a_step_is_applied_once() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    protocol.computed(1)
    assert len(protocol.vote_received(vote(1))) == 1
    assert protocol.vote_received(vote(1)) == [] and complete_gradients(protocol, 1) == [] and protocol.version == 1
    assert 1 not in protocol._tallies and 1 not in protocol._missing, "what comes late leaves no trace"


def test_votes_of_an_older_epoch_are_void() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    protocol.computed(1)
    assert protocol.vote_received(vote(1, epoch=2)) == [] and protocol.version == 0
    assert protocol.vote_received(vote(1)) != []


def test_votes_of_a_future_epoch_do_not_count_in_this_one_and_are_kept() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    protocol.computed(1)
    early = vote(1, epoch=4)
    assert protocol.vote_received(early) == [] and protocol.version == 0
    assert early in protocol._later_epochs.values(), "held for its epoch, not dropped"


def test_a_vote_of_a_stranger_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        worker().vote_received(vote(1, sender=9))


def test_a_vote_may_come_one_step_early() -> None:
    """Another worker that has all votes of step 1 may have voted for 2 before this one has them."""
    protocol = worker(members=(OTHER, ME, THIRD))
    complete_gradients(protocol, 1)
    protocol.computed(1)
    protocol.vote_received(vote(1, OTHER))
    assert protocol.vote_received(vote(2, OTHER)) == []
    assert protocol.vote_received(vote(1, THIRD)) == [Apply(1, 2.5, math.sqrt(34.0))]
    complete_gradients(protocol, 2)
    protocol.computed(2)
    assert [type(e) for e in protocol.vote_received(vote(2, THIRD))] == [Apply]


def test_a_published_page_is_filed_until_its_step_is_applied() -> None:
    protocol = worker()
    early = Publish(1, 0, 5, 6)
    assert protocol.publish_received(early) == []
    complete_gradients(protocol, 1)
    protocol.computed(1)
    assert protocol.vote_received(vote(1)) == [Apply(1, 2.5, 5.0), Install(early)], "installed after the own Apply"
    late, stale = Publish(1, 0, 6, 7), Publish(0, 0, 6, 7)
    assert protocol.publish_received(late) == [Install(late)]
    assert protocol.publish_received(stale) == [] and not protocol._filed


def test_a_norm_that_is_not_finite_is_seen_by_all_and_advances_the_version() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    protocol.computed(1)
    (apply,) = protocol.vote_received(vote(1, norm=(math.nan,)))
    assert isinstance(apply, Apply) and math.isnan(apply.norm) and not apply.finite and protocol.version == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_page_that_is_not_finite_travels_in_the_vote(value: float) -> None:
    protocol = worker()
    protocol.computed(1)
    protocol.gradient_complete(1, OWN.key, [1.0, value])
    (sent,) = complete_gradients(protocol, 1, [MIRRORED, LOSS])
    assert isinstance(sent, SendVote) and len(sent.vote.norm) == 1 and not math.isfinite(sent.vote.norm[0])


def test_the_norm_is_exactly_rounded_whoever_holds_which_page() -> None:
    values = [1e30, 1.0, -1.0, 1e-30, 3.0]  # a plain sum in another order would lose the small ones
    norms = set()
    for own in range(1, len(values)):
        mine = ReplicaSet(0, 0, own, ME, frozenset({ME}))
        protocol = WorkerProtocol(ME, 0, (OTHER, ME), [mine, LOSS], LOSS.key)
        protocol.gradient_complete(1, mine.key, values[:own])
        protocol.gradient_complete(1, LOSS.key, [], 1.0)
        (sent,) = protocol.computed(1)
        other = ReplicaSet(0, 0, len(values) - own, OTHER, frozenset({OTHER}))
        peer = WorkerProtocol(OTHER, 0, (OTHER, ME), [other])
        peer.gradient_complete(1, other.key, values[own:])
        (theirs,) = peer.computed(1)
        assert isinstance(sent, SendVote) and isinstance(theirs, SendVote)
        (apply,) = protocol.vote_received(theirs.vote)
        assert isinstance(apply, Apply)
        assert peer.vote_received(sent.vote) == [apply]
        norms.add(apply.norm)
    assert norms == {math.sqrt(math.fsum(values))}


def test_the_sum_over_workers_is_exactly_rounded_too() -> None:
    members = tuple(range(9))
    run = ReplicaSet(0, 0, 1, ME, frozenset({ME}))
    protocol = WorkerProtocol(ME, 0, members, [run])
    protocol.gradient_complete(1, run.key, [1.0])
    protocol.computed(1)
    effects: list[object] = []
    for sender in members:
        if sender != ME:
            effects += protocol.vote_received(Vote(1, 0, sender, (2.0**-53,), 0.5 if sender == 0 else None))
    assert effects == [Apply(1, 0.5, math.sqrt(1.0 + 2.0**-50))] and math.sqrt(1.0 + 2.0**-50) > 1.0


def test_a_worker_alone_decides_by_its_own_vote() -> None:
    protocol = WorkerProtocol(ME, 0, (ME,), [LOSS], LOSS.key)
    protocol.gradient_complete(1, LOSS.key, [], 1.5)
    assert [type(e) for e in protocol.computed(1)] == [SendVote, Apply]


def test_a_worker_that_holds_nothing_votes_too() -> None:
    protocol = WorkerProtocol(ME, 0, (OTHER, ME), [])
    assert protocol.computed(1) == [SendVote(Vote(1, 0, ME, (), None), (OTHER,))]


def test_norm_values_are_kept_for_two_versions() -> None:
    protocol = worker()
    for step in (1, 2, 3):
        complete_gradients(protocol, step)
        protocol.computed(step)
        protocol.vote_received(vote(step))
        assert sorted(protocol._norms) == sorted(protocol._losses) == [step], "a promoted mirror votes with them"
        assert protocol.norms_at(step, OWN.key) == (9.0, 7.0) and protocol.loss_at(step) == 2.5
    complete_gradients(protocol, 4)
    assert sorted(protocol._norms) == [3, 4]


def test_held_runs_are_in_layer_and_page_order() -> None:
    first, second = ReplicaSet(0, 0, 1, 5, frozenset({5})), ReplicaSet(1, 0, 1, 4, frozenset({4, 5}))
    found = held_ranges({1: (second,), 0: (first, ReplicaSet(0, 1, 2, 4, frozenset({4})))}, 5)
    assert found == (first, second)
    keys = [run.key for run in found]
    assert keys == [(0, 0, 1), (1, 0, 1)]


# ---- an option that all members have to agree on


class Offer:
    """A vote extension that offers what a test says."""

    def __init__(self, value: str) -> None:
        self._value = value

    def offered(self) -> str:
        return self._value


@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_extension_takes_effect_if_all_votes_carry_it(here: bool, there: bool) -> None:
    protocol = replace(worker(), extension=Offer("grouped" if here else ""))
    complete_gradients(protocol, 1)
    sent, *_ = protocol.computed(1)
    assert isinstance(sent, SendVote) and sent.vote.extension == ("grouped" if here else "")
    found = protocol.vote_received(Vote(1, 3, OTHER, (9.0,), None, "grouped") if there else vote(1))
    assert [e.extension for e in found if isinstance(e, Apply)] == ["grouped" if here and there else ""]


def test_a_step_that_a_member_has_applied_in_an_older_epoch_is_not_extended() -> None:
    """The member that has applied it has published it, and does not again: a group would wait for it."""
    protocol = replace(worker(), extension=Offer("grouped"))
    complete_gradients(protocol, 1)
    protocol.computed(1)
    protocol.vote_received(vote(1))
    protocol.promise(4)
    protocol.enter_epoch(4, (OTHER, ME), [OWN, MIRRORED, LOSS], LOSS.key, 1)
    assert [effect.vote.extension for effect in protocol.votes_again() if isinstance(effect, SendVote)] == [""]
    complete_gradients(protocol, 2)
    sent, *_ = protocol.computed(2)
    assert isinstance(sent, SendVote) and sent.vote.extension == "grouped", "the first step that nobody had applied"


def test_without_the_option_votes_carry_nothing() -> None:
    protocol = worker()
    complete_gradients(protocol, 1)
    sent, *_ = protocol.computed(1)
    assert isinstance(sent, SendVote) and sent.vote.extension == ""
