"""The worker's half of the step protocol: a state machine without I/O.

It is given facts ("this reduced gradient is complete") and messages (votes, published pages), and returns effects for
the caller to carry out, in order, before it gives the protocol anything else. It knows ids and norm values, never
tensors. `worker.step_commit.StepCommit` carries out its effects; the executor asks it about epochs, and other parts of
the worker read it or give it the norms that they received. All of them run on the training thread.

Rules S1 to S3 and S9 of docs/protocol.md, and the voting parts of C2 and C7, are the asserts and conditions of this
file. Those marked [m] have a mutant in tests/simulated that breaks just this rule.

One step, as this half sees it: `computed` and `gradient_complete` until nothing is missing, then SendVote; votes of the
others come in by `vote_received`; on large meshes a SendVote of their sum follows, and with the last one Apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol, TypeAlias

from elaswave_spmd.determinism.exact_sum import exact_sum, expansion
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.messages import Publish, Vote
from elaswave_spmd.recovery.vote_exchange import WIDEST, Round, added, content_of, rounds_of
from elaswave_spmd.sharding.replicas import PageIndex, PageRange, ReplicaMap, ReplicaSet


@dataclass(frozen=True)
class SendVote:
    """Send this vote to these members of the mesh epoch."""

    vote: Vote
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Apply:
    """Apply the step's reduced gradients to every held page, then publish. The step is decided: it cannot be undone.

    Args:
        loss: of the step.
        norm: of the whole gradient.
        extension: that all votes carried, or empty: all members know that it takes effect in all of them.
        divisor: of the gradient, in proportion to the weight of the loss; 1.0 where it has none. Loss and norm have
            been divided by it.
        weight: of the step's loss; None: it has none.
    """

    step: int
    loss: float
    norm: float
    extension: str = ""
    divisor: float = 1.0
    weight: float | None = None

    @property
    def finite(self) -> bool:
        """False if the norm is not finite: the version advances, and the state stays."""
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Install:
    """Copy published pages, which were received as `publish`, into the compute buffers."""

    publish: Publish


Effect: TypeAlias = SendVote | Apply | Install


class VoteExtension(Protocol):
    """An option that takes effect in a step if all members offer it in their votes. Without options there is none."""

    def offered(self) -> str:
        """The value that this worker's next vote carries; empty if it cannot offer it now."""
        ...


@dataclass
class _Tally:
    """The votes of a step, as one worker has them.

    Args:
        own: of the worker's block at each level; first its own vote, which is missing until it has voted.
        came: per level, sender -> vote.
    """

    came: tuple[dict[int, Vote], ...]
    own: list[Vote] = field(default_factory=list)


@dataclass
class WorkerProtocol:
    """The protocol's state on one worker, from mesh epoch to mesh epoch.

    Attributes:
        voters: from whom a vote comes, at each level.

    Args:
        rank: this worker.
        epoch: the mesh epoch that fences control messages.
        members: all workers of the epoch.
        held: the page ranges whose reduced gradients this worker gets: as primary, mirror or learner.
        loss_range: the page range of the loss page, if among them.
        version: the step last applied.
        restored: the version of the checkpoint that all members began with, or 0. Nobody is behind it, so nobody votes
            for it again.
        extension: of an option that is on; None without.
        whole_weight: the weight of a step's loss for which its gradient is what it is without weights: its number of
            tokens or samples.
        widest: members up to which all vote to all (recovery/vote_exchange.py).
    """

    rank: int
    epoch: int
    members: Sequence[int]
    held: Sequence[ReplicaSet]
    loss_range: PageRange | None = None
    version: int = 0
    restored: int = 0
    extension: VoteExtension | None = None
    whole_weight: int = 1
    widest: int = WIDEST
    promised: int = -1  # the highest epoch whose Prepare was answered
    _computed: int = 0  # the step whose micro-batches are done here
    _entered_at: int = 0  # the highest version of any member when this epoch began
    _missing: dict[int, set[PageRange]] = field(default_factory=dict)
    _norms: dict[int, dict[PageRange, tuple[float, ...]]] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)  # of losses that have one
    _tallies: dict[int, _Tally] = field(default_factory=dict)
    _later_epochs: dict[tuple[int, int, int, int], Vote] = field(
        default_factory=dict
    )  # in the order in which they came
    _filed: dict[int, dict[Publish, None]] = field(default_factory=dict)  # in the order in which they came, each once

    def __post_init__(self) -> None:
        self._computed = self._entered_at = self.version
        self._index_held()

    def _index_held(self) -> None:
        self._primary = frozenset(r.key for r in self.held if r.primary == self.rank)
        self._holds = frozenset(r.key for r in self.held)
        self._rounds: tuple[Round, ...] = ()  # none before the first configuration
        if self.members:
            self._rounds = rounds_of(self.members, self.rank, self.widest)
        self.voters = tuple(round_.senders for round_ in self._rounds)

    # ---- the step

    def computed(self, step: int) -> list[Effect]:
        """This worker has done its micro-batches of the step, and its compute buffers are all at step - 1.

        A vote says the latter too. Only then may a primary overwrite, at its next Apply, memory that a published page
        is still being sent from. It matters to workers without micro-batches, which have not waited for parameters.
        """
        assert step == self.version + 1, (step, self.version)
        self._computed = step
        return self._vote_if_complete(step)

    def gradient_complete(
        self,
        step: int,
        pages: PageRange,
        norms: Sequence[float],
        loss: float | None = None,
        weight: float | None = None,
    ) -> list[Effect]:
        """The reduced gradient of a held page range is here, summed up or received. Duplicates are ignored.

        Args:
            norms: the norm value of each page; none of the loss page.
            loss, weight: of the step, if it is the loss page; the weight if losses have one.
        """
        assert pages in self._holds, (pages, "is not held by worker", self.rank)
        if step <= self.version:
            return []  # decided: sent again by a peer that did not know it
        self._norms.setdefault(step, {})[pages] = tuple(norms)
        if loss is not None:
            self._losses[step] = loss
        if weight is not None:
            self._weights[step] = weight
        self._missing_of(step).discard(pages)
        return self._vote_if_complete(step)

    def has_gradient(self, step: int, pages: PageRange) -> bool:
        """True if the reduced gradient of a held page range is here."""
        return pages not in self._missing_of(step)

    def norms_at(self, step: int, pages: PageRange) -> tuple[float, ...]:
        """Norm values of a held range's reduced gradient. Empty for the loss page, and before the first step."""
        return self._norms.get(step, {}).get(pages, ())

    @property
    def newest_version(self) -> int:
        """The newest version of any member that is known here: this worker's own, or that at which the epoch began."""
        return max(self.version, self._entered_at)

    def loss_at(self, step: int) -> float | None:
        """The loss of a step whose loss page is held here; None if it is not known."""
        return self._losses.get(step)

    def weight_at(self, step: int) -> float | None:
        """The weight of that loss; None if it has none, or is not known."""
        return self._weights.get(step)

    def state_received(
        self, step: int, pages: PageRange, norms: Sequence[float], loss: float | None, weight: float | None = None
    ) -> None:
        """A learner got the state of a page range at `step`, and what it needs to vote for that step as primary."""
        if step:
            self._norms.setdefault(step, {}).setdefault(pages, tuple(norms))
        if loss is not None:
            self._losses.setdefault(step, loss)
        if weight is not None:
            self._weights.setdefault(step, weight)

    def vote_received(self, vote: Vote) -> list[Effect]:
        """Count a vote of this epoch. Older votes are void, and those of a future epoch are kept for it [m].

        Votes for the version are counted as well if the epoch began with it: who is behind completes it by them, and
        needs those that this worker passes on [m].
        """
        if vote.epoch > self.epoch:  # its sender has entered the next epoch first
            self._later_epochs.setdefault((vote.epoch, vote.step, vote.level, vote.sender), vote)
            return []
        if vote.epoch < self.epoch or not (vote.step > self.version or vote.step == self.version == self._entered_at):
            return []
        assert self._is_expected(vote), (vote, self.rank)
        came = self._tally_of(vote.step).came[vote.level]
        came.setdefault(vote.sender, vote)
        return self._advance(vote.step) if len(came) == len(self.voters[vote.level]) else []

    def _is_expected(self, vote: Vote) -> bool:
        return vote.level < len(self.voters) and vote.sender in self.voters[vote.level]

    def publish_received(self, publish: Publish) -> list[Effect]:
        """File a published page; it is installed only once this worker has itself applied that step [m].

        Before that, a micro-batch of this step may still need the values of the version before.
        """
        if publish.step < self.version:
            return []  # late: this worker has applied the step after it, so it had all its parameters
        if publish.step == self.version:
            return [Install(publish)]
        self._filed.setdefault(publish.step, {})[publish] = None
        return []

    @property
    def may_drop_undecided(self) -> bool:
        """True if no member can have decided a step beyond the version: this worker has not voted in its epoch."""
        return not self._has_voted(self.version + 1)

    @property
    def owes_votes(self) -> bool:
        """True if a member that is behind may need sums of votes that this worker has still to pass on."""
        return self._has_voted(self.version) and len(self._tallies[self.version].own) < len(self._rounds)

    def drop_undecided(self) -> None:
        """Nothing of undecided steps is here any more: every reduced gradient has to come again."""
        assert self.may_drop_undecided, self
        for table in (self._norms, self._losses, self._weights, self._missing):
            for step in [s for s in table if s > self.version]:
                del table[step]
        self._computed = self.version

    def forget_beyond(self, version: int) -> None:
        """Another attempt of the steps after a version begins with the next epoch: nothing of them is here any more.

        What this worker has of a step that others have applied stays: it completes that step.
        """
        for table in (self._norms, self._losses, self._weights, self._missing):
            for step in [s for s in table if s > max(version, self.version)]:
                del table[step]

    # ---- a change of the mesh epoch

    def promise(self, epoch: int) -> bool:
        """A Prepare is about to be answered: from now on no vote and no Apply in an older epoch [m].

        Returns:
            False if this epoch, or a later one, was answered already.
        """
        if epoch <= self.promised:
            return False
        self.promised = epoch
        return True

    def accepts(self, epoch: int) -> bool:
        """True if a Reconfigure of this epoch may be followed: it is newer, and no later epoch was promised."""
        return epoch > self.epoch and epoch >= self.promised

    def enter_epoch(
        self,
        epoch: int,
        members: Sequence[int],
        held: Sequence[ReplicaSet],
        loss_range: PageRange | None,
        highest_version: int,
    ) -> None:
        """Become a member of a newer epoch. The caller asks for `votes_again` when everything else is in place.

        Args:
            held: page ranges of the older epoch or parts of them, whose reduced gradients stay; ones that those were
                joined to, if nothing of a step is under way; or new ones without.
            highest_version: of any member. A worker that is behind it had voted for it, or it could not have been
                decided: its reduced gradients are all here.
        """
        assert self.accepts(epoch) and self.version <= highest_version <= self.version + 1, (epoch, self)
        self.epoch = epoch
        self.promised = max(epoch, self.promised)
        self.members = members
        self.held = held
        self.loss_range = loss_range
        self._index_held()
        # Page ranges are joined when no member has anything of the step after the version. What members of this epoch
        # have sent a worker without micro-batches since is handled again, by the names of this epoch.
        self._norms = {
            step: _recut(norms, self._holds, joins=step <= self.version) for step, norms in self._norms.items()
        }
        self._missing = {step: set(self._holds - norms.keys()) for step, norms in self._norms.items()}
        if self.version < highest_version:
            self._missing[highest_version] = set()  # what it lacks are pages that it learns: their state comes later
        # Votes of older epochs are void, this worker's own too: a member of the old epoch may be lost, and the votes of
        # the new epoch must come from exactly its members.
        self._tallies.clear()
        self._computed = self._entered_at = highest_version

    def votes_again(self) -> list[Effect]:
        """Vote in this epoch for the step last applied, and count votes that came early.

        A member that is behind completes that step by the normal rule, and votes for it here as well: there is no
        roll-forward message. A vote for a step that no member had applied was void with its epoch; the worker votes for
        that step anew when it has done its part of the recovery plan.
        """
        effects: list[Effect] = []
        if self.version > self.restored and not self._is_ahead():
            effects += self._cast(self._vote(self.version))
        if self._computed > self.version:
            effects += self._vote_if_complete(self._computed)
        early, self._later_epochs = self._later_epochs, {}
        for vote in early.values():
            # Only now it can be told whether its sender is a member of its epoch: nobody else has a vote there.
            if vote.epoch > self.epoch or self._is_expected(vote):
                effects += self.vote_received(vote)
        return effects

    def _is_ahead(self) -> bool:
        """True if this worker is the primary of pages whose state it received at the step after its version.

        Then some member had applied that step, and so all members have this worker's version: none needs its vote.
        """
        norms, next_norms = (self._norms.get(step, {}) for step in (self.version, self.version + 1))
        lacking = self._primary - norms.keys() - {self.loss_range}
        return bool(lacking) and lacking <= next_norms.keys()

    # ---- rules

    def _missing_of(self, step: int) -> set[PageRange]:
        if (missing := self._missing.get(step)) is None:
            missing = self._missing[step] = set(self._holds)
        return missing

    def _vote_if_complete(self, step: int) -> list[Effect]:
        ready = step == self.version + 1 == self._computed and not self._missing_of(step)
        # After a promise the controller plans with what was reported: a vote now could decide the step behind its back.
        if not ready or self.promised > self.epoch or self._has_voted(step):
            return []
        return self._cast(self._vote(step))

    def _has_voted(self, step: int) -> bool:
        return step in self._tallies and bool(self._tallies[step].own)

    def _tally_of(self, step: int) -> _Tally:
        if (tally := self._tallies.get(step)) is None:
            tally = self._tallies[step] = _Tally(tuple({} for _ in self._rounds))
        return tally

    def _cast(self, vote: Vote) -> list[Effect]:
        """This worker's own vote goes out."""
        assert not self._has_voted(vote.step), (vote, "comes a second time, and would be taken for the sum of a block")
        self._tally_of(vote.step).own.append(vote)
        return [SendVote(vote, self._rounds[0].receivers), *self._advance(vote.step)]

    def _advance(self, step: int) -> list[Effect]:
        """Pass on what is complete of the votes of a step, and decide it with the votes of all.

        Sums go out after a promise as well: they are of votes that were cast before it, and others may need them to get
        to where they answer.
        """
        tally = self._tally_of(step)
        effects: list[Effect] = []
        while tally.own:  # a sum without this worker's vote would be taken for one with it [m]
            level = len(tally.own) - 1
            if len(tally.came[level]) < len(self.voters[level]):
                break
            votes = tally.own[level], *tally.came[level].values()
            if level + 1 == len(self._rounds):
                return [*effects, *self._decide(step, votes)]
            tally.own.append(added(votes, self.rank, level + 1))
            effects.append(SendVote(tally.own[-1], self._rounds[level + 1].receivers))
        return effects

    def _vote(self, step: int) -> Vote:
        norms = self._norms.get(step, {})
        # Each primary contributes its own pages, so that every page counts once. The sum is exact (an expansion, not a
        # rounded float), so it has the same bits on whatever members the pages lie.
        own = (value for pages in sorted(self._primary) if pages != self.loss_range for value in norms[pages])
        loss, weight = None, None
        if self.loss_range in self._primary:
            loss, weight = self._losses.get(step), self._weights.get(step)
        # A step that some member has applied in an older epoch is not applied by all in this one.
        offered = self.extension.offered() if self.extension is not None and step > self._entered_at else ""
        return Vote(step, self.epoch, self.rank, expansion(own), loss, offered, weight)

    def _decide(self, step: int, votes: Sequence[Vote]) -> list[Effect]:
        """With all votes of the epoch the step is decided: advance the version and apply, in one transition.

        Args:
            votes: sums of all votes for the step.

        Raises:
            RunError: they cannot be right. What a member says is believed otherwise (docs/security.md).
        """
        if step != self.version + 1 or self.promised > self.epoch:
            return []
        # Every member computes the same norm from the same votes, so all clip alike without another message.
        total = exact_sum(vote.norm for vote in votes)
        loss, extension, weight = content_of(votes)
        if loss is None:
            raise RunError(f"the votes of all members for step {step} have no loss: one of them has gone wrong")
        self.version = step
        self._losses[step] = loss
        if weight is not None:
            self._weights[step] = weight
        self._forget(step)
        norm = math.sqrt(total) if total >= 0 else math.nan  # nan >= 0 is False as well
        decided = Apply(step, loss, norm, extension)
        effects: list[Effect] = [decided if weight is None else self._per_weight(decided, weight)]
        return [*effects, *map(Install, self._filed.pop(step, ()))]

    def _per_weight(self, decided: Apply, weight: float) -> Apply:
        """A step with gradient, loss and norm divided by the weight of its loss, in proportion to the whole weight.

        Without a positive weight there is nothing to divide by: the step is skipped like one that is not finite.
        """
        if not (0.0 < weight < math.inf):
            return replace(decided, loss=math.nan, norm=math.nan, weight=weight)
        divisor = weight / self.whole_weight
        loss, norm = decided.loss / divisor, decided.norm / divisor
        return replace(decided, loss=loss, norm=norm, divisor=divisor, weight=weight)

    def _forget(self, step: int) -> None:
        """Drop the votes of a decided step.

        Norm values and losses are kept for two versions: a mirror that is promoted votes again with them.
        """
        self._missing.pop(step, None)
        for old in [s for s in self._tallies if s <= step]:
            del self._tallies[old]
        for table in (self._norms, self._losses, self._weights):
            for old in [s for s in table if s < step]:
                del table[old]


def _recut(
    norms: Mapping[PageRange, tuple[float, ...]], held: frozenset[PageRange], *, joins: bool
) -> dict[PageRange, tuple[float, ...]]:
    """The norm values of the held page ranges, as far as they are known of those of before.

    Args:
        joins: a page range may be made of several; else it is one of those known, or a part of one.
    """
    found = {key: norms[key] for key in held if key in norms}
    index = PageIndex(norms)
    for key in held - found.keys():
        parts = index.covering(key)
        if len(parts) == 1 or (parts and joins):
            values = (norms[part][max(0, key[1] - part[1]) : key[2] - part[1]] for part in parts)
            found[key] = tuple(chain.from_iterable(values))  # none of the loss page
    return found


def held_ranges(replica_map: ReplicaMap, rank: int) -> tuple[ReplicaSet, ...]:
    """The page ranges whose reduced gradients a worker gets, as replica or learner, in layer and page order."""
    return tuple(
        pages
        for _, ranges in sorted(replica_map.items())
        for pages in ranges
        if rank in pages.replicas or rank in pages.learners
    )
