"""The worker's half when the mesh changes, one rule per test: leave the rule out and its test fails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from elaswave_spmd.recovery.messages import Publish, Vote
from elaswave_spmd.recovery.worker_protocol import Apply, Effect, Install, SendVote, WorkerProtocol
from elaswave_spmd.sharding.replicas import ReplicaSet

ME, OTHER, THIRD = 1, 0, 2
OWN = ReplicaSet(0, 0, 2, ME, frozenset({ME, OTHER}))
MIRRORED = ReplicaSet(0, 2, 3, OTHER, frozenset({OTHER, ME}))
THIRDS = ReplicaSet(0, 3, 4, THIRD, frozenset({THIRD, ME}))
LOSS = ReplicaSet(1, 4, 5, ME, frozenset({ME}))
NORMS = {OWN: [9.0, 7.0], MIRRORED: [5.0], THIRDS: [4.0], LOSS: [99.0]}
OLD, NEW = 3, 4


def worker(version: int = 0) -> WorkerProtocol:
    """One of three, in epoch OLD."""
    return WorkerProtocol(ME, OLD, (OTHER, ME, THIRD), [OWN, MIRRORED, THIRDS, LOSS], LOSS.key, version)


def complete_gradients(protocol: WorkerProtocol, step: int, *runs: ReplicaSet) -> list[Effect]:
    effects: list[Effect] = []
    for run in runs or tuple(NORMS):
        effects += protocol.gradient_complete(step, run.key, NORMS[run], 2.5 if run is LOSS else None)
    return effects


def vote(step: int, sender: int, epoch: int, *norm: float, loss: float | None = None) -> Vote:
    return Vote(step, epoch, sender, norm, loss)


def ready_to_vote(step: int = 1) -> WorkerProtocol:
    """It has everything of the step but its own micro-batches."""
    protocol = worker(step - 1)
    complete_gradients(protocol, step)
    return protocol


def voted(step: int = 1) -> WorkerProtocol:
    protocol = ready_to_vote(step)
    protocol.computed(step)
    return protocol


def enter(
    protocol: WorkerProtocol,
    highest: int,
    held: Sequence[ReplicaSet] = (OWN, MIRRORED, LOSS),
    members: Sequence[int] = (OTHER, ME),
    epoch: int = NEW,
) -> list[Effect]:
    loss = LOSS.key if LOSS in held else None
    protocol.enter_epoch(epoch, members, held, loss, highest)
    return protocol.votes_again()


def sent(effects: Sequence[Effect]) -> list[Vote]:
    return [effect.vote for effect in effects if isinstance(effect, SendVote)]


def applied(effects: Sequence[Effect]) -> list[int]:
    return [effect.step for effect in effects if isinstance(effect, Apply)]


# ---- the promise


def test_prepare_is_answered_once_and_only_upwards() -> None:
    protocol = worker()
    assert protocol.promise(NEW) and not protocol.promise(NEW) and not protocol.promise(OLD)
    assert protocol.promise(NEW + 1) and protocol.promised == NEW + 1


def test_after_the_promise_it_does_not_vote() -> None:
    protocol = ready_to_vote()
    protocol.promise(NEW)
    assert protocol.computed(1) == []
    assert not protocol._has_voted(1), "its vote is not counted by itself either"


def test_after_the_promise_it_does_not_apply() -> None:
    """It said in StepReport that it had not: the new epoch may have been planned from that."""
    protocol = voted()
    protocol.vote_received(vote(1, OTHER, OLD, 9.0))
    protocol.promise(NEW)
    assert protocol.vote_received(vote(1, THIRD, OLD, 9.0)) == [] and protocol.version == 0


def test_data_is_taken_after_the_promise_too() -> None:
    """Content is valid in any epoch: what comes between StepReport and Reconfigure is not lost."""
    protocol = worker()
    protocol.promise(NEW)
    complete_gradients(protocol, 1)
    assert protocol.has_gradient(1, OWN.key) and protocol.publish_received(Publish(0, 0, 5, 6)) != []
    enter(protocol, 0)
    assert [v.step for v in sent(protocol.computed(1))] == [1]


def test_a_place_is_followed_upwards_and_never_below_the_promise() -> None:
    protocol = worker()
    assert not protocol.accepts(OLD) and not protocol.accepts(OLD - 1) and protocol.accepts(NEW)
    protocol.promise(NEW + 1)
    assert not protocol.accepts(NEW), "superseded: another change is under way, its plan is made from other answers"
    assert protocol.accepts(NEW + 1) and protocol.accepts(NEW + 2)
    with pytest.raises(AssertionError):
        protocol.enter_epoch(NEW, (ME,), [LOSS], LOSS.key, 0)


def test_in_the_new_epoch_it_votes_again() -> None:
    protocol = ready_to_vote()
    protocol.promise(NEW)
    assert protocol.computed(1) == []
    assert enter(protocol, 0) == [], "what there is to do of the step is worked out anew"
    assert sent(protocol.computed(1)) == [vote(1, ME, NEW, 16.0, loss=2.5)]


# ---- the new epoch


@pytest.mark.parametrize("highest", [-1, 2])
def test_nobody_is_two_steps_behind_or_ahead_of_everybody(highest: int) -> None:
    with pytest.raises(AssertionError):
        enter(worker(), highest)


def test_votes_of_the_old_epoch_do_not_count_in_the_new_one() -> None:
    protocol = ready_to_vote()
    protocol.vote_received(vote(1, OTHER, OLD, 9.0))
    protocol.vote_received(vote(1, THIRD, OLD, 9.0))
    enter(protocol, 0)
    assert applied(protocol.computed(1)) == [] and protocol.version == 0
    assert applied(protocol.vote_received(vote(1, OTHER, OLD, 9.0))) == [], "nor those that come late"
    assert applied(protocol.vote_received(vote(1, OTHER, NEW, 9.0))) == [1], "and the lost one's is not waited for"


def test_early_votes_count_when_their_epoch_has_begun() -> None:
    protocol = voted()
    assert protocol.vote_received(vote(1, OTHER, NEW, 9.0)) == []
    assert protocol.vote_received(vote(1, OTHER, NEW + 1, 9.0)) == [] and protocol.version == 0
    assert applied(enter(protocol, 1)) == [1]
    assert [v.epoch for v in protocol._later_epochs.values()] == [NEW + 1], "those of a later epoch still wait"


def test_an_early_vote_of_one_who_is_no_member_of_its_epoch_counts_for_nothing() -> None:
    """Nobody can tell before the epoch is entered, so it is kept until then."""
    protocol, stranger = voted(), 10_000
    assert protocol.vote_received(vote(1, stranger, NEW, 9.0)) == []
    assert applied(enter(protocol, 1)) == [] and not protocol._later_epochs
    assert applied(protocol.vote_received(vote(1, OTHER, NEW, 9.0))) == [1]


def test_it_computes_again_before_it_votes_for_a_step_that_nobody_has_applied() -> None:
    """A micro-batch of the lost may be its own now: its votes of the old epoch said something else."""
    protocol = voted()
    effects = enter(protocol, 0)
    assert sent(effects) == []
    assert len(sent(protocol.computed(1))) == 1


def test_whoever_is_behind_completes_the_step_by_the_votes_of_the_new_epoch() -> None:
    """Another one has applied it, so all had voted. Its gradients are here, and the step is not computed again."""
    protocol = voted()
    assert sent(enter(protocol, 1)) == [vote(1, ME, NEW, 16.0, loss=2.5)]
    assert protocol.vote_received(vote(1, OTHER, NEW, 9.0)) == [Apply(1, 2.5, 5.0)]


def test_whoever_has_applied_a_step_votes_for_it_again_and_applies_it_once() -> None:
    protocol = voted()
    protocol.vote_received(vote(1, OTHER, OLD, 5.0))
    assert applied(protocol.vote_received(vote(1, THIRD, OLD, 4.0))) == [1]
    held = [OWN, MIRRORED, LOSS]
    assert enter(protocol, 1, held) == [SendVote(vote(1, ME, NEW, 16.0, loss=2.5), (OTHER,))]
    assert protocol.vote_received(vote(1, OTHER, NEW, 9.0)) == [] and protocol.version == 1


def test_nothing_is_voted_for_again_before_the_first_step() -> None:
    assert enter(worker(), 0) == []


def test_a_promoted_mirror_votes_with_the_norms_of_its_new_pages() -> None:
    protocol = voted()
    mine = ReplicaSet(*THIRDS.key, ME, frozenset({ME, OTHER}))
    (again,) = sent(enter(protocol, 1, [OWN, MIRRORED, mine, LOSS]))
    assert math.fsum(again.norm) == 9.0 + 7.0 + 4.0


def test_a_promoted_mirror_votes_with_the_loss() -> None:
    mirrored = ReplicaSet(*LOSS.key, THIRD, frozenset({ME, THIRD}))
    protocol = WorkerProtocol(ME, OLD, (OTHER, ME, THIRD), [OWN, mirrored], LOSS.key)
    protocol.gradient_complete(1, OWN.key, [1.0, 1.0])
    protocol.gradient_complete(1, LOSS.key, [], 2.5)
    (before,) = sent(protocol.computed(1))
    protocol.enter_epoch(NEW, (OTHER, ME), [OWN, LOSS], LOSS.key, 1)
    (after,) = sent(protocol.votes_again())
    assert (before.loss, after.loss) == (None, 2.5)


def test_norms_follow_a_run_that_was_cut() -> None:
    protocol = voted()
    halves = [ReplicaSet(0, 0, 1, OTHER, frozenset({OTHER, ME})), ReplicaSet(0, 1, 2, ME, frozenset({ME, OTHER}))]
    (again,) = sent(enter(protocol, 1, [*halves, MIRRORED, LOSS]))
    assert math.fsum(again.norm) == 7.0 and protocol.norms_at(1, (0, 0, 1)) == (9.0,)
    assert protocol.has_gradient(1, (0, 1, 2)) and protocol.norms_at(1, OWN.key) == ()


def test_norms_follow_runs_that_were_joined() -> None:
    """Also with a part of a run: a worker that has missed a mesh epoch may enter one that has cut the joined run."""
    protocol = voted()
    protocol.vote_received(vote(1, OTHER, OLD, 5.0))
    assert applied(protocol.vote_received(vote(1, THIRD, OLD, 4.0))) == [1]
    joined = ReplicaSet(0, 1, 3, ME, frozenset({OTHER, ME}))
    (again,) = sent(enter(protocol, 1, [ReplicaSet(0, 0, 1, OTHER, frozenset({OTHER, ME})), joined, LOSS]))
    assert protocol.norms_at(1, joined.key) == (7.0, 5.0) and protocol.has_gradient(1, joined.key)
    assert math.fsum(again.norm) == 12.0


def test_of_an_undecided_step_nothing_is_known_of_runs_that_were_joined() -> None:
    """The gradients of its parts were given up: they come again."""
    protocol = worker()
    complete_gradients(protocol, 1, OWN, MIRRORED, LOSS)
    joined = ReplicaSet(0, 0, 3, ME, frozenset({OTHER, ME}))
    enter(protocol, 0, [joined, LOSS])
    assert not protocol.has_gradient(1, joined.key) and protocol.has_gradient(1, LOSS.key)
    assert protocol.computed(1) == []
    assert len(sent(protocol.gradient_complete(1, joined.key, [9.0, 7.0, 5.0]))) == 1


def test_entries_of_a_step_under_way_stay_and_new_ones_are_missing() -> None:
    protocol = worker()
    complete_gradients(protocol, 1, OWN, LOSS)
    new = ReplicaSet(0, 7, 9, OTHER, frozenset({OTHER}), frozenset({ME}))
    enter(protocol, 0, [OWN, MIRRORED, LOSS, new])
    assert protocol.has_gradient(1, OWN.key) and protocol.has_gradient(1, LOSS.key)
    assert not protocol.has_gradient(1, MIRRORED.key) and not protocol.has_gradient(1, new.key)
    protocol.computed(1)
    assert protocol.gradient_complete(1, MIRRORED.key, [5.0]) == [], (
        "a learner waits for the gradients of what it learns"
    )
    assert len(sent(protocol.gradient_complete(1, new.key, [1.0, 1.0]))) == 1


def test_entries_of_what_it_does_not_hold_any_more_are_not_waited_for() -> None:
    protocol = worker()
    complete_gradients(protocol, 1, OWN, MIRRORED, LOSS)
    enter(protocol, 0, [OWN, MIRRORED, LOSS])
    assert len(sent(protocol.computed(1))) == 1


def test_a_learner_that_is_behind_does_not_wait_for_entries_that_nobody_sends_any_more() -> None:
    protocol = voted()
    new = ReplicaSet(0, 7, 9, OTHER, frozenset({OTHER}), frozenset({ME}))
    assert len(sent(enter(protocol, 1, [OWN, MIRRORED, LOSS, new]))) == 1
    assert applied(protocol.vote_received(vote(1, OTHER, NEW, 9.0))) == [1]


def test_what_a_learner_was_told_it_votes_with_as_primary() -> None:
    protocol = WorkerProtocol(ME, OLD, (OTHER, ME), [], version=5)
    protocol.state_received(5, OWN.key, [9.0, 7.0], None)
    protocol.state_received(5, LOSS.key, (), 2.5)
    assert sent(enter(protocol, 5, [OWN, LOSS])) == [vote(5, ME, NEW, 16.0, loss=2.5)]


def test_what_it_knows_itself_is_not_replaced_by_what_it_is_told() -> None:
    protocol = voted()
    protocol.state_received(1, OWN.key, [0.0, 0.0], 0.0)
    assert protocol.norms_at(1, OWN.key) == (9.0, 7.0) and protocol.loss_at(1) == 2.5


def test_pages_published_early_are_installed_in_the_epoch_that_applies_their_step() -> None:
    protocol = voted()
    publish = Publish(1, 0, 5, 6)
    assert protocol.publish_received(publish) == []
    enter(protocol, 1)
    effects = protocol.vote_received(vote(1, OTHER, NEW, 9.0))
    assert [type(effect) for effect in effects] == [Apply, Install]


def test_pages_published_early_of_a_step_that_no_member_has_applied_are_given_up() -> None:
    """Their sender alone had applied it, and is lost. The members publish them again."""
    protocol = voted()
    assert protocol.publish_received(Publish(1, 0, 5, 6)) == []
    enter(protocol, 0)
    protocol.computed(1)
    effects = protocol.vote_received(vote(1, OTHER, NEW, 9.0))
    assert [type(effect) for effect in effects] == [Apply]


def test_what_the_lost_have_sent_of_a_step_that_no_member_had_applied_does_not_count() -> None:
    protocol = voted()
    assert protocol.counts(THIRD, 1) and protocol.counts(OTHER, 1)
    enter(protocol, 0)
    assert not protocol.counts(THIRD, 1) and protocol.counts(THIRD, 0), "nor in any later epoch, as it is decided anew"
    assert protocol.counts(OTHER, 1) and protocol.counts(THIRD + 1, 1), "members, and who is to become one"
    protocol.computed(1)
    protocol.vote_received(vote(1, OTHER, NEW, 9.0))
    enter(protocol, 1, members=(ME,), epoch=NEW + 1)
    assert protocol.version == 1 and not protocol.counts(THIRD, 1)
    assert protocol.counts(OTHER, 1) and not protocol.counts(OTHER, 2)


def test_a_second_change_before_the_first_is_settled() -> None:
    protocol = voted()
    enter(protocol, 1)
    protocol.promise(NEW + 1)
    assert protocol.vote_received(vote(1, OTHER, NEW, 9.0)) == [], "promised away"
    protocol.enter_epoch(NEW + 1, (ME,), [OWN, MIRRORED, LOSS], LOSS.key, 1)
    effects = protocol.votes_again()
    assert [v.epoch for v in sent(effects)] == [NEW + 1] and applied(effects) == [1]
