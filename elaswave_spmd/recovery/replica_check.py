"""Comparison of replicas by hashes of their state: which differ, and which of them are wrong (`mirror.verify_every`).

All replicas of a page apply the same gradients to the same state, so their bits are equal unless memory or a device is
at fault. A worker checks by itself that its state is still what it had written (HeldState.damaged). The comparison here
finds the other case, in which a worker has computed something else than the others. Pure: no message is sent here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elaswave_spmd.recovery.messages import Fingerprints
from elaswave_spmd.sharding.replicas import PageRange, ReplicaSet


@dataclass(frozen=True)
class Compared:
    """The outcome of the comparison of all replicas at a version.

    Args:
        version: the version that was compared.
        wrong: rank -> the page ranges of which this worker's replica is wrong.
        undecided: page range -> its replicas, for ranges whose replicas differ without showing which one is wrong.
    """

    version: int
    wrong: Mapping[int, tuple[PageRange, ...]] = field(default_factory=dict)
    undecided: Mapping[PageRange, tuple[int, ...]] = field(default_factory=dict)

    @property
    def agree(self) -> bool:
        """True if all replicas of all pages are the same."""
        return not self.wrong and not self.undecided


class ReplicaHashes:
    """Collects the hashes that replicas send in one mesh epoch, until all hashes of a version are here.

    Args:
        epoch: the mesh epoch. Hashes of other epochs are ignored, as page ranges may be cut differently there, and have
            other replicas.
        replicas: the replica sets of all page ranges with state.
    """

    def __init__(self, epoch: int, replicas: Iterable[ReplicaSet]) -> None:
        self.epoch = epoch
        sets = tuple(replicas)
        self._replicas = {pages.key: pages.replicas for pages in sets}
        # A learner that has its state computes with it, so it is compared as well. A learner without it sends no hash.
        self._learners = {pages.key: pages.learners for pages in sets}
        self._holders = frozenset(rank for pages in sets for rank in pages.replicas | pages.learners)
        self._hashes: dict[int, dict[int, dict[PageRange, bytes]]] = {}  # version -> rank -> its rows

    def add(self, message: Fingerprints) -> Compared | None:
        """File a worker's hashes. Returns the outcome, once the hashes of all replicas at that version are here."""
        if message.epoch != self.epoch:
            return None
        of_version = self._hashes.setdefault(message.step, {})
        of_version[message.rank] = {row[:3]: row[3] for row in message.rows}
        if not self._holders <= of_version.keys():
            return None
        # If the hash of a replica is missing, its worker has given up the state by itself, and the mesh will change.
        if any(pages not in of_version[rank] for pages, held in self._replicas.items() for rank in held):
            return None
        self._hashes = {version: rows for version, rows in self._hashes.items() if version > message.step}
        known = {
            pages: {rank: of_version[rank][pages] for rank in sorted(held)} for pages, held in self._replicas.items()
        }
        learned = {
            pages: {rank: of_version[rank][pages] for rank in sorted(ranks) if pages in of_version[rank]}
            for pages, ranks in self._learners.items()
        }
        return compared(message.step, known, learned)


def compared(
    version: int,
    known: Mapping[PageRange, Mapping[int, bytes]],
    learned: Mapping[PageRange, Mapping[int, bytes]] | None = None,
) -> Compared:
    """Decide which replicas are wrong: those that differ from the majority of the replicas of their page range.

    A worker that is wrong about one page range is not believed about any other. So if two replicas differ, and one of
    their workers is wrong elsewhere, that one is wrong here as well.

    Args:
        version: the version that is compared.
        known: page range -> rank -> hash of its replica.
        learned: the same for learners that have the state. They got it from a replica, so they prove nothing about
            replicas. But they apply updates themselves, so a single replica proves nothing about them either.
    """
    different = {pages: hashes for pages, hashes in known.items() if len(set(hashes.values())) > 1}
    wrong = {rank for hashes in different.values() for rank in _minority(hashes)}
    of_wrong: dict[int, list[PageRange]] = {}
    undecided: dict[PageRange, tuple[int, ...]] = {}
    for pages, hashes in sorted(different.items()):
        believed = {digest for rank, digest in hashes.items() if rank not in wrong}
        if len(believed) != 1:
            undecided[pages] = tuple(sorted(hashes))
            continue
        for rank, digest in hashes.items():
            if digest not in believed:
                of_wrong.setdefault(rank, []).append(pages)
    apart: list[tuple[PageRange, int, list[int]]] = []  # learners that differ from the replicas that are believed
    for pages, hashes in sorted((learned or {}).items()):
        right = {rank: digest for rank, digest in known[pages].items() if pages not in of_wrong.get(rank, ())}
        if pages not in undecided:
            apart += [(pages, rank, [*right]) for rank, digest in hashes.items() if digest not in right.values()]
    wrong |= {learner for _, learner, replicas in apart if len(replicas) > 1}
    for pages, learner, replicas in apart:
        if learner in wrong:
            of_wrong.setdefault(learner, []).append(pages)
        else:
            undecided[pages] = tuple(sorted({*undecided.get(pages, replicas), learner}))
    return Compared(version, {rank: tuple(ranges) for rank, ranges in sorted(of_wrong.items())}, undecided)


def _minority(hashes: Mapping[int, bytes]) -> list[int]:
    """The workers whose hash differs from that of more than half of the replicas; empty if no hash has a majority."""
    values = list(hashes.values())
    most = max(values, key=values.count)
    return [rank for rank, digest in hashes.items() if digest != most] if 2 * values.count(most) > len(values) else []
