"""Replicas that differ: which of them are wrong, and when that is known."""

from __future__ import annotations

from elaswave_spmd.recovery.messages import Fingerprints
from elaswave_spmd.recovery.replica_check import Compared, ReplicaHashes, compared
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet

P, Q = (0, 0, 4), (1, 2, 5)


def test_the_majority_is_right() -> None:
    assert compared(4, {P: {0: b"a", 1: b"a", 2: b"a"}}) == Compared(4)
    assert compared(4, {P: {0: b"a", 1: b"b", 2: b"a"}}) == Compared(4, {1: (P,)})
    found = compared(4, {P: {0: b"a", 1: b"b", 2: b"a", 3: b"a", 4: b"c"}, Q: {0: b"x", 1: b"y", 2: b"x"}})
    assert found == Compared(4, {1: (P, Q), 4: (P,)}) and not found.agree


def test_two_that_differ_are_not_judged_and_neither_are_three_that_all_differ() -> None:
    for hashes in ({0: b"a", 1: b"b"}, {0: b"a", 1: b"b", 2: b"c"}, {0: b"a", 1: b"a", 2: b"b", 3: b"b"}):
        assert compared(4, {P: hashes}) == Compared(4, {}, {P: tuple(hashes)})


def test_a_worker_that_is_wrong_elsewhere_is_not_believed() -> None:
    """Worker 2 is contradicted by two others about P; so of the two replicas of Q that differ, its own is wrong."""
    found = compared(4, {P: {0: b"a", 1: b"a", 2: b"b"}, Q: {1: b"x", 2: b"y"}})
    assert found == Compared(4, {2: (P, Q)})


def test_a_learner_is_compared_and_is_no_witness() -> None:
    assert compared(4, {P: {0: b"a", 1: b"a"}}, {P: {2: b"b"}}) == Compared(4, {2: (P,)})
    assert compared(4, {P: {0: b"a", 1: b"b"}}, {P: {2: b"b"}}) == Compared(4, {}, {P: (0, 1)})
    assert compared(4, {P: {0: b"a"}}, {P: {2: b"a"}}) == Compared(4)
    known = hashes()
    known.add(hashes_of(1, (P, b"a"), (Q, b"x")))
    known.add(hashes_of(2, (P, b"a"), (Q, b"x")))
    assert known.add(hashes_of(0, (P, b"a"), (Q, b"y"))) == Compared(4, {0: (Q,)})


def test_a_learner_that_differs_from_a_single_replica_is_not_judged() -> None:
    """It has applied updates itself: the replica may be the wrong one. A learner that is wrong elsewhere is."""
    assert compared(4, {P: {0: b"a"}}, {P: {2: b"b"}}) == Compared(4, {}, {P: (0, 2)})
    assert compared(4, {P: {0: b"a"}}, {P: {2: b"b", 1: b"b"}}) == Compared(4, {}, {P: (0, 1, 2)})
    assert compared(4, {P: {0: b"a"}}, {P: {2: b"b", 1: b"a"}}) == Compared(4, {}, {P: (0, 2)})
    two = {P: {0: b"a"}, Q: {0: b"x", 1: b"x"}}
    assert compared(4, two, {P: {2: b"b"}, Q: {2: b"y"}}) == Compared(4, {2: (P, Q)})
    assert compared(4, two, {P: {2: b"b", 3: b"c"}, Q: {2: b"y"}}) == Compared(4, {2: (P, Q)}, {P: (0, 3)})
    three = {P: {0: b"a"}, Q: {0: b"y", 1: b"x", 2: b"x"}}
    assert compared(4, three, {P: {3: b"b"}}) == Compared(4, {0: (Q,)}, {P: (0, 3)})


def hashes_of(rank: int, *rows: tuple[PageRange, bytes], step: int = 4, epoch: int = 3) -> Fingerprints:
    return Fingerprints(rank, epoch, step, tuple((*pages, digest) for pages, digest in rows))


def hashes() -> ReplicaHashes:
    """P is held by 0, 1 and 2; Q by 1 and 2, and learned by 0."""
    sets = ReplicaSet(*P, 0, frozenset((0, 1, 2))), ReplicaSet(*Q, 1, frozenset((1, 2)), frozenset((0,)))
    return ReplicaHashes(3, sets)


def test_nothing_is_known_before_the_last_replica_has_sent() -> None:
    known = hashes()
    assert known.add(hashes_of(0, (P, b"a"))) is None
    assert known.add(hashes_of(1, (P, b"a"), (Q, b"x"))) is None
    assert known.add(hashes_of(2, (P, b"a"), (Q, b"x"))) == Compared(4)


def test_hashes_of_another_mesh_epoch_or_version_are_no_others() -> None:
    known = hashes()
    known.add(hashes_of(0, (P, b"a")))
    known.add(hashes_of(1, (P, b"a"), (Q, b"x")))
    assert known.add(hashes_of(2, (P, b"b"), (Q, b"x"), epoch=2)) is None
    assert known.add(hashes_of(2, (P, b"b"), (Q, b"x"), step=5)) is None
    assert known.add(hashes_of(2, (P, b"b"), (Q, b"x"))) == Compared(4, {2: (P,)})


def test_a_replica_that_its_worker_has_given_up_is_waited_for() -> None:
    """Its Damaged begins a mesh epoch without it."""
    known = hashes()
    known.add(hashes_of(0, (P, b"a")))
    known.add(hashes_of(1, (P, b"b"), (Q, b"x")))
    assert known.add(hashes_of(2, (P, b"a"))) is None
