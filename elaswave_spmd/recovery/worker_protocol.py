"""The worker's half of the step protocol: a state machine without I/O.

It takes facts ("this entry is complete") and messages (votes, published pages) and returns actions for whoever drives
it: real links, or the virtual-time engine. It knows ids and norm values, never tensors. The rules marked [m] in
protocol.md are the asserts and the conditions of this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from elaswave_spmd.determinism.exact_sum import exact_sum, expansion
from elaswave_spmd.recovery.messages import Publish, Vote
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap, ReplicaSet


@dataclass(frozen=True)
class SendVote:
    """Send this vote to every other member of the mesh epoch."""

    vote: Vote


@dataclass(frozen=True)
class Apply:
    """Apply the step's entries to every held page, then publish. The step is decided: it cannot be undone.

    `finite` False: the gradient's norm is not finite; the version advances and the state stays. `grouped`: all members
    know that all publish it through the groups of their stages.
    """

    step: int
    loss: float
    norm: float
    grouped: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Install:
    """Copy published pages, received as `publish`, into the compute buffers."""

    publish: Publish


Effect: TypeAlias = SendVote | Apply | Install


@dataclass
class WorkerProtocol:
    """One worker, from mesh epoch to mesh epoch.

    Args:
        rank: this worker.
        epoch: the mesh epoch that fences control messages.
        members: all workers of the epoch.
        held: the page ranges whose entries this worker gets: as primary, mirror or learner.
        loss_run: the run of the loss page, if among them.
        version: the step last applied.
    """

    rank: int
    epoch: int
    members: Sequence[int]
    held: Sequence[ReplicaSet]
    loss_run: PageRange | None = None
    version: int = 0
    restored: int = 0  # the version of the checkpoint that all began with: nobody is behind it, nobody votes for it
    promised: int = -1  # the highest epoch whose PREPARE was answered
    group_ready: bool = False  # the driver has a group of its stage in this epoch
    _computed: int = 0
    _entered_at: int = 0  # the highest version of any member when this epoch began
    _missing: dict[int, set[PageRange]] = field(default_factory=dict)
    _norms: dict[int, dict[PageRange, tuple[float, ...]]] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)
    _votes: dict[int, dict[int, Vote]] = field(default_factory=dict)
    _later_epochs: list[Vote] = field(default_factory=list)
    _filed: dict[int, list[Publish]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._computed = self._entered_at = self.version
        self._take_place()

    def _take_place(self) -> None:
        self._primary = frozenset(r.key for r in self.held if r.primary == self.rank)
        self._holds = frozenset(r.key for r in self.held)
        self._members = frozenset(self.members)

    # ---- the step

    def computed(self, step: int) -> list[Effect]:
        """This worker has done its micro-batches of the step, and its compute buffers are all at step - 1.

        A vote says that too: only then may a primary overwrite, at its next Apply, memory that a published page is
        still being sent from. It matters for workers that have no micro-batch and would not have waited for parameters.
        """
        assert step == self.version + 1, (step, self.version)
        self._computed = step
        return self._vote_if_complete(step)

    def entry_complete(
        self, step: int, run: PageRange, norms: Sequence[float], loss: float | None = None
    ) -> list[Effect]:
        """A held run's entry is here: reduced to the root, or received from its primary. Duplicates are ignored."""
        assert run in self._holds, (run, "is not held by worker", self.rank)
        if step <= self.version:
            return []
        self._norms.setdefault(step, {})[run] = tuple(norms)
        if loss is not None:
            self._losses[step] = loss
        self._missing_of(step).discard(run)
        return self._vote_if_complete(step)

    def has_entry(self, step: int, run: PageRange) -> bool:
        """Whether the entry of a held run is here."""
        return run not in self._missing_of(step)

    def norms_at(self, step: int, run: PageRange) -> tuple[float, ...]:
        """Norm values of a held run's entry; empty where there is none: before the first step, or of the loss page."""
        return self._norms.get(step, {}).get(run, ())

    def loss_at(self, step: int) -> float | None:
        """The loss of a step whose loss page is held here."""
        return self._losses.get(step)

    def learned(self, step: int, run: PageRange, norms: Sequence[float], loss: float | None) -> None:
        """A learner got the state of a run at `step`, and with it what it needs to vote for that step as primary."""
        if step:
            self._norms.setdefault(step, {}).setdefault(run, tuple(norms))
        if loss is not None:
            self._losses.setdefault(step, loss)

    def vote_received(self, vote: Vote) -> list[Effect]:
        """Fenced by the epoch: older votes are void, those of a future epoch are kept for it [m]."""
        if vote.epoch > self.epoch:
            self._later_epochs.append(vote)
            return []
        if vote.epoch < self.epoch or vote.step <= self.version:
            return []
        assert vote.sender in self._members, (vote, self.rank)
        self._votes.setdefault(vote.step, {})[vote.sender] = vote
        return self._decide()

    def publish_received(self, publish: Publish) -> list[Effect]:
        """Filed; installed only once this worker has itself applied that step [m]."""
        if publish.step < self.version:
            return []
        if publish.step == self.version:
            return [Install(publish)]
        self._filed.setdefault(publish.step, []).append(publish)
        return []

    @property
    def may_forget(self) -> bool:
        """Whether nobody can have decided a step beyond the version: this worker has not voted for one in its epoch."""
        return self.rank not in self._votes.get(self.version + 1, {})

    def forget(self) -> None:
        """Nothing of undecided steps is here any more: every entry is to come again."""
        assert self.may_forget, self
        for table in (self._norms, self._losses, self._missing):
            for step in [s for s in table if s > self.version]:
                del table[step]
        self._computed = self.version

    # ---- a change of the mesh epoch

    def promise(self, epoch: int) -> bool:
        """A PREPARE is about to be answered: from now on no vote and no Apply in an older epoch [m].

        Returns: False when an answer was given for this epoch or a later one already.
        """
        if epoch <= self.promised:
            return False
        self.promised = epoch
        return True

    def accepts(self, epoch: int) -> bool:
        """Whether a PLACE of this epoch may be followed: a newer one than the present, and none promised beyond it."""
        return epoch > self.epoch and epoch >= self.promised

    def enter(
        self,
        epoch: int,
        members: Sequence[int],
        held: Sequence[ReplicaSet],
        loss_run: PageRange | None,
        highest_version: int,
    ) -> None:
        """Takes its place in a newer epoch. The driver asks for `votes_again` when everything else is in place.

        Args:
            held: runs are those of the older epoch or parts of them; one that was not held before has no entry.
            highest_version: of any member. A worker that is behind had voted for it: its entries are all here.
        """
        assert self.accepts(epoch) and self.version <= highest_version <= self.version + 1, (epoch, self)
        self.epoch, self.promised = epoch, max(epoch, self.promised)
        self.members, self.held, self.loss_run = members, held, loss_run
        self._take_place()
        self._norms = {step: _resplit(norms, self._holds) for step, norms in self._norms.items()}
        self._missing = {step: set(self._holds - norms.keys()) for step, norms in self._norms.items()}
        if self.version < highest_version:
            self._missing[highest_version] = set()  # what it lacks are runs that it learns: their state comes later
        self._votes.clear()
        self._computed = self._entered_at = highest_version
        self.group_ready = False

    def votes_again(self) -> list[Effect]:
        """Sends its votes for the step last applied and the step last voted for, now in this epoch; takes early ones.

        Whoever has not applied that step completes it by the normal rule; there is no other message for it.
        """
        effects: list[Effect] = []
        if self.version > self.restored and not self._is_ahead():
            effects.append(SendVote(self._vote(self.version)))
        if self._computed > self.version:
            effects += self._vote_if_complete(self._computed)
        early, self._later_epochs = self._later_epochs, []
        for vote in early:
            effects += self.vote_received(vote)
        return effects

    def _is_ahead(self) -> bool:
        """Whether it is the primary of a run that it learned at the step after its version.

        Then somebody had applied that step, and so everybody its version: nobody needs this worker's vote for it.
        """
        norms, next_norms = (self._norms.get(step, {}) for step in (self.version, self.version + 1))
        lacking = self._primary - norms.keys() - {self.loss_run}
        return bool(lacking) and lacking <= next_norms.keys()

    # ---- rules

    def _missing_of(self, step: int) -> set[PageRange]:
        return self._missing.setdefault(step, set(self._holds))

    def _vote_if_complete(self, step: int) -> list[Effect]:
        ready = step == self.version + 1 == self._computed and not self._missing_of(step)
        if not ready or self.promised > self.epoch or self.rank in self._votes.get(step, {}):
            return []
        vote = self._vote(step)
        self._votes.setdefault(step, {})[self.rank] = vote
        return [SendVote(vote), *self._decide()]

    def _vote(self, step: int) -> Vote:
        norms = self._norms.get(step, {})
        own = (value for run in sorted(self._primary) if run != self.loss_run for value in norms[run])
        loss = self._losses.get(step) if self.loss_run in self._primary else None
        # In a step that somebody has applied already, not all would be there to publish.
        grouped = self.group_ready and step > self._entered_at
        return Vote(step, self.epoch, self.rank, expansion(own), loss, grouped)

    def _decide(self) -> list[Effect]:
        """With all votes of the epoch the step is decided: advance the version and apply, in one transition."""
        step = self.version + 1
        votes = self._votes.get(step, {})
        if len(votes) < len(self.members) or self.promised > self.epoch:
            return []
        total = exact_sum(votes[m].norm for m in self.members)
        loss = next(v.loss for v in votes.values() if v.loss is not None)
        self.version = step
        self._losses[step] = loss
        self._forget(step)
        norm, grouped = math.sqrt(total) if total >= 0 else math.nan, all(v.grouped for v in votes.values())
        effects: list[Effect] = [Apply(step, loss, norm, grouped)]
        return [*effects, *map(Install, self._filed.pop(step, ()))]

    def _forget(self, step: int) -> None:
        """Norm values and losses are kept for two versions: a promoted mirror votes with them. Votes are done with."""
        for table in (self._missing, self._votes):
            table.pop(step, None)
        for table in (self._norms, self._losses):
            for old in [s for s in table if s < step]:
                del table[old]


def _resplit(
    norms: dict[PageRange, tuple[float, ...]], held: frozenset[PageRange]
) -> dict[PageRange, tuple[float, ...]]:
    """The norm values of the held runs, each of which is one of those known, or a part of one, or not known."""
    found = {key: norms[key] for key in held if key in norms}
    for key in held - found.keys():
        layer, first, stop = key
        whole = next((k for k in norms if k[0] == layer and k[1] <= first and stop <= k[2]), None)
        if whole is not None:
            found[key] = norms[whole][first - whole[1] : stop - whole[1]]  # the loss page has none
    return found


def held_runs(replica_map: ReplicaMap, rank: int) -> tuple[ReplicaSet, ...]:
    """The runs whose entries a worker gets, as replica or learner, in layer and page order."""
    return tuple(
        run for _, runs in sorted(replica_map.items()) for run in runs if rank in run.replicas or rank in run.learners
    )
