"""The worker's half of the step protocol: a state machine without I/O.

The caller reports facts ("this reduced gradient is complete") and messages (votes, published pages) to
`WorkerProtocol`, which returns effects. The caller must carry out these effects, in order, before it reports anything
else. The protocol knows ids and norm values, never tensors. `worker.step_commit.StepCommit` carries out the effects;
the executor asks the protocol about mesh epochs, and other parts of the worker read its state or pass on norms that
they received. All callers run on the training thread, so there are no locks.

Rules S1 to S3 and S9 of docs/protocol.md, and the voting parts of C2 and C7, are the asserts and conditions of this
file. A rule marked [m] has a mutant in tests/simulated/mutants.py: this class with just that rule broken.

One step, as seen here: the caller calls `computed` once and `gradient_complete` for each page range, until no reduced
gradient is missing. Then the protocol returns SendVote. Votes of other members arrive by `vote_received`. On large
meshes one or more SendVotes with sums of votes follow. When the votes of all members are counted, it returns Apply.
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
    """Apply the step's reduced gradients to every page held here, then publish. The step is decided: no way back.

    Args:
        step: the step that is decided; the version from now on.
        loss: the loss of the step.
        norm: the L2 norm of the whole gradient, before clipping.
        extension: the value of `Vote.extension` if all votes carried the same one, else empty. Every member sees the
            same votes, so every member knows that the option takes effect on all of them in this step.
        divisor: the number to divide the gradient by: weight / `WorkerProtocol.whole_weight`, or 1.0 if losses have no
            weight. `loss` and `norm` are divided by it already.
        weight: the sum of the weights in the global batch; None if losses have no weight.
    """

    step: int
    loss: float
    norm: float
    extension: str = ""
    divisor: float = 1.0
    weight: float | None = None

    @property
    def finite(self) -> bool:
        """False if the norm is not finite: the step is skipped. The version advances, the state is not updated (S6)."""
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class Install:
    """Copy the published parameters that arrived with `publish` into the compute buffers."""

    publish: Publish


Effect: TypeAlias = SendVote | Apply | Install


class VoteExtension(Protocol):
    """An option that takes effect in a step only if all members offer it in their votes.

    The only one so far is the exchange through a process group of the stage (`runtime.collectives=group`).
    """

    def offered(self) -> str:
        """The value of `Vote.extension` for this worker's next vote; empty if it cannot offer the option now."""
        ...


@dataclass
class _Tally:
    """The votes for one step that this worker has so far. A level is a round of the exchange (vote_exchange.py).

    Args:
        came: for each level, sender -> the vote received from it. Above level 0 that vote is the sum over a block.
        own: what this worker contributes at each level, so far: at level 0 its own vote, which is missing until it has
            voted; at level n the sum over its block, which it has when all votes of level n - 1 have come.
    """

    came: tuple[dict[int, Vote], ...]
    own: list[Vote] = field(default_factory=list)


@dataclass
class WorkerProtocol:
    """The step protocol's state on one worker. One object lives through all mesh epochs of the worker.

    Attributes:
        voters: the ranks from which a vote is expected, for each level of the vote exchange.

    Args:
        rank: the rank of this worker.
        epoch: the number of the present mesh epoch. Votes of other epochs are not counted in it.
        members: the ranks of all workers of the epoch, in the order of the mesh. Empty before the first configuration.
        held: the page ranges whose reduced gradients this worker needs: as primary, mirror or learner.
        loss_range: the page range that contains the loss page, if this worker is primary, mirror or learner of it.
        version: the step that this worker applied last.
        restored: the version of the checkpoint that all members began with, or 0. No member can be behind it, so
            `votes_again` does not repeat the vote for it.
        extension: the option that votes can offer; None if it is off.
        whole_weight: the weight of a global batch for which gradients are not scaled: its number of tokens or samples.
            Gradients are divided by (actual weight / whole_weight).
        widest: up to this number of members, every member sends its vote to every other; on larger meshes votes are
            summed in rounds (recovery/vote_exchange.py).
        promised: the highest epoch whose Prepare this worker has answered; -1 before the first one.
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
    promised: int = -1
    _computed: int = 0  # the newest step for which `computed` was called
    _entered_at: int = 0  # the highest version of any member when this epoch began
    # The tables below are keyed by step.
    _missing: dict[int, set[PageRange]] = field(default_factory=dict)  # ranges in `held` without a reduced gradient
    _norms: dict[int, dict[PageRange, tuple[float, ...]]] = field(default_factory=dict)  # one norm value per page
    _losses: dict[int, float] = field(default_factory=dict)
    _weights: dict[int, float] = field(default_factory=dict)  # of losses that have one
    _tallies: dict[int, _Tally] = field(default_factory=dict)
    # Votes of epochs that this worker has not entered: (epoch, step, level, sender) -> vote, in order of arrival.
    _later_epochs: dict[tuple[int, int, int, int], Vote] = field(default_factory=dict)
    # Published pages of steps that are not applied here yet. The dict serves as an ordered set: in order of arrival.
    _filed: dict[int, dict[Publish, None]] = field(default_factory=dict)
    # Rank that was a member -> the version with which the first epoch began, of those entered here, that is without it.
    _ceased: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._computed = self._entered_at = self.version
        self._index_held()

    def _index_held(self) -> None:
        self._primary = frozenset(r.key for r in self.held if r.primary == self.rank)
        self._holds = frozenset(r.key for r in self.held)
        self._rounds: tuple[Round, ...] = ()  # there are no members, hence no rounds, before the first configuration
        if self.members:
            self._rounds = rounds_of(self.members, self.rank, self.widest)
        self.voters = tuple(round_.senders for round_ in self._rounds)

    # ---- the step

    def computed(self, step: int) -> list[Effect]:
        """This worker has done its micro-batches of the step, and all of its compute buffers are at version step - 1.

        The second condition is part of what a vote says: this worker has received every published page of step - 1. So
        once all votes are in, a primary may overwrite the memory that these pages were sent from, which it does when it
        applies the step (S5). Workers with micro-batches have waited for all parameters anyway; a worker without any
        has not, and its caller must wait before it calls this.
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
        """The reduced gradient of a held page range is here, reduced by this worker or received from the primary.

        Duplicates are ignored.

        Args:
            norms: the squared norm of each page of the range; the loss page has none.
            loss: the loss of the step, if the range contains the loss page.
            weight: the weight of that loss, if losses have one.
        """
        assert pages in self._holds, (pages, "is not held by worker", self.rank)
        if step <= self.version:
            return []  # the step is decided: a peer that did not know this has sent the gradient again
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
        """Norm values of a held range's reduced gradient, one per page. Empty for the loss page and if unknown here."""
        return self._norms.get(step, {}).get(pages, ())

    @property
    def newest_version(self) -> int:
        """The newest version of any member that this worker knows of: its own, or the highest at the epoch's start."""
        return max(self.version, self._entered_at)

    def loss_at(self, step: int) -> float | None:
        """The loss of a step; None if it is not known here."""
        return self._losses.get(step)

    def weight_at(self, step: int) -> float | None:
        """The weight of a step's loss; None if losses have no weight, or if it is not known here."""
        return self._weights.get(step)

    def state_received(
        self, step: int, pages: PageRange, norms: Sequence[float], loss: float | None, weight: float | None = None
    ) -> None:
        """A learner has received the state of a page range as of `step`.

        The norms, and for the loss page the loss and its weight, come with the state: the learner may become primary,
        and then has to vote for `step` again if some member is still behind it.
        """
        if step:
            self._norms.setdefault(step, {}).setdefault(pages, tuple(norms))
        if loss is not None:
            self._losses.setdefault(step, loss)
        if weight is not None:
            self._weights.setdefault(step, weight)

    def vote_received(self, vote: Vote) -> list[Effect]:
        """Count a vote of this epoch. Votes of older epochs are void; votes of a later epoch are kept for it [m].

        Votes for the step that this worker has applied already are counted as well, if that was the highest version
        when the epoch began: a member that is one step behind completes the step by these votes, and on large meshes it
        needs the sums of them that this worker passes on [m].
        """
        if vote.epoch > self.epoch:  # the sender has entered the next epoch before this worker
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
        """File published pages. They are installed only once this worker has itself applied their step [m].

        Until then, a micro-batch of that step may still have to run here, with the parameters of the version before.
        """
        if publish.step < self.version:
            return []  # late: this worker has applied a later step, for which it had all parameters of this one
        if publish.step == self.version:
            return [Install(publish)]
        self._filed.setdefault(publish.step, {})[publish] = None
        return []

    def counts(self, sender: int, step: int) -> bool:
        """True if parameters or state of a step count that this sender has sent.

        False if no member of an epoch without the sender had applied that step when the epoch began: the sender alone
        may have. The members decide the step among themselves, and whoever has its results sends them. Nobody can
        compare the sender's with those.
        """
        return step <= self._ceased.get(sender, step)

    @property
    def may_drop_undecided(self) -> bool:
        """True if no member can have decided the step after this worker's version.

        A decision needs the votes of all members of the epoch, and this worker has not voted for that step in it.
        """
        return not self._has_voted(self.version + 1)

    @property
    def owes_votes(self) -> bool:
        """True if this worker has not yet passed on all sums of votes for the step that it has applied.

        A member that is behind may need them. A worker that is about to end must wait until this is False.
        """
        return self._has_voted(self.version) and len(self._tallies[self.version].own) < len(self._rounds)

    def drop_undecided(self) -> None:
        """Forget all about undecided steps: their data is lost here, and all reduced gradients must come again."""
        assert self.may_drop_undecided, self
        for table in (self._norms, self._losses, self._weights, self._missing):
            for step in [s for s in table if s > self.version]:
                del table[step]
        self._computed = self.version

    def forget_beyond(self, version: int) -> None:
        """Forget what was computed of the steps after `version`: the next epoch begins another attempt of them (V5).

        If other members have applied the step `version` and this worker has not, its data of that step is kept: the
        worker still has to complete that step.
        """
        for table in (self._norms, self._losses, self._weights, self._missing):
            for step in [s for s in table if s > max(version, self.version)]:
                del table[step]

    # ---- a change of the mesh epoch

    def promise(self, epoch: int) -> bool:
        """Note that the Prepare of `epoch` is about to be answered: from now on no vote, no Apply in an older one [m].

        Returns:
            False if the Prepare of this epoch, or of a later one, was answered already.
        """
        if epoch <= self.promised:
            return False
        self.promised = epoch
        return True

    def accepts(self, epoch: int) -> bool:
        """True if a Reconfigure of `epoch` may be entered: it is newer than this one, and no later one was promised."""
        return epoch > self.epoch and epoch >= self.promised

    def enter_epoch(
        self,
        epoch: int,
        members: Sequence[int],
        held: Sequence[ReplicaSet],
        loss_range: PageRange | None,
        highest_version: int,
    ) -> None:
        """Become a member of a newer epoch. The caller calls `votes_again` when everything else is in place.

        Args:
            held: the page ranges that this worker holds or learns in the new epoch. A range of the old epoch, or a part
                of one, keeps its norms and needs no new reduced gradient. Ranges that are joined from several old ones
                occur only when no member has anything of a step under way. Other ranges are new to this worker.
            loss_range: the range among them that contains the loss page, if any.
            highest_version: the highest version of any member. If this worker is behind it, it has voted for that step,
                as the step could not have been decided otherwise: its reduced gradients are all here.
        """
        assert self.accepts(epoch) and self.version <= highest_version <= self.version + 1, (epoch, self)
        self.epoch = epoch
        self.promised = max(epoch, self.promised)
        for rank in set(self.members).difference(members):
            self._ceased[rank] = highest_version
        # Published by who had applied a step that no member has: it is lost, or was taken for lost.
        for step in [s for s in self._filed if s > highest_version]:
            del self._filed[step]
        self.members = members
        self.held = held
        self.loss_range = loss_range
        self._index_held()
        # Ranges may be joined for steps up to the version only: the controller joins them when no member has anything
        # of the next step. Members that entered this epoch first may have sent gradients of the next step by now, to a
        # worker without micro-batches: the caller handles these again, by the page ranges of this epoch.
        self._norms = {
            step: _recut(norms, self._holds, joins=step <= self.version) for step, norms in self._norms.items()
        }
        self._missing = {step: set(self._holds - norms.keys()) for step, norms in self._norms.items()}
        if self.version < highest_version:
            # The ranges without gradients are those that this worker begins to learn: it gets their state later.
            self._missing[highest_version] = set()
        # Votes of older epochs are void, this worker's own included: a member of the old epoch may be lost, and the
        # votes that decide a step in the new epoch must come from exactly the members of the new epoch.
        self._tallies.clear()
        self._computed = self._entered_at = highest_version

    def votes_again(self) -> list[Effect]:
        """Vote again, in this epoch, for the step applied last, and count the votes that arrived early.

        A member that is one step behind completes that step by the normal rule, with the votes of the new epoch, and
        votes for it as well. So no roll-forward message is needed. A vote for a step that no member had applied became
        void with its epoch; the worker votes for that step anew when it has done its part of the recovery plan.
        """
        effects: list[Effect] = []
        if self.version > self.restored and not self._is_ahead():
            effects += self._cast(self._vote(self.version))
        if self._computed > self.version:
            effects += self._vote_if_complete(self._computed)
        early, self._later_epochs = self._later_epochs, {}
        for vote in early.values():
            # Whether the sender is a member of its epoch can be checked only now, as the members are known only now.
            # Votes of other senders are dropped.
            if vote.epoch > self.epoch or self._is_expected(vote):
                effects += self.vote_received(vote)
        return effects

    def _is_ahead(self) -> bool:
        """True if this worker is now primary of pages that it received, as a learner, at its version + 1.

        It has no norms of these pages for its version, so it could not vote for that step. It need not: the sender of
        the state had applied version + 1, for which all members had voted, so no member is behind this version.
        """
        norms, next_norms = (self._norms.get(step, {}) for step in (self.version, self.version + 1))
        lacking = self._primary - norms.keys() - {self.loss_range}
        return bool(lacking) and lacking <= next_norms.keys()

    # ---- voting, deciding and forgetting

    def _missing_of(self, step: int) -> set[PageRange]:
        if (missing := self._missing.get(step)) is None:
            missing = self._missing[step] = set(self._holds)
        return missing

    def _vote_if_complete(self, step: int) -> list[Effect]:
        ready = step == self.version + 1 == self._computed and not self._missing_of(step)
        # Once this worker has answered a Prepare, the controller plans with what the answer says. A vote cast now could
        # decide the step after all, which the controller would not know.
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
        """Send this worker's own vote, and whatever can be passed on or decided with it."""
        assert not self._has_voted(vote.step), (vote, "comes a second time, and would be taken for the sum of a block")
        self._tally_of(vote.step).own.append(vote)
        return [SendVote(vote, self._rounds[0].receivers), *self._advance(vote.step)]

    def _advance(self, step: int) -> list[Effect]:
        """Pass on each sum of votes that is complete, and decide the step once the votes of all members are counted.

        Sums are passed on even after this worker has answered a Prepare: they consist of votes that were cast before,
        and another member may need them to complete the step after which it answers the same Prepare.
        """
        tally = self._tally_of(step)
        effects: list[Effect] = []
        while tally.own:  # not before this worker has voted: receivers would take its vote to be in the sum [m]
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
        # Each worker contributes the pages of which it is primary, so that every page counts once. The sum is exact (an
        # expansion, not a rounded float), so its bits do not depend on how pages are distributed over members.
        own = (value for pages in sorted(self._primary) if pages != self.loss_range for value in norms[pages])
        loss, weight = None, None
        if self.loss_range in self._primary:
            loss, weight = self._losses.get(step), self._weights.get(step)
        # Members that applied `_entered_at` in an older epoch do not apply it again in this one. So the option could
        # not take effect on all members in that step, and is not offered for it.
        offered = self.extension.offered() if self.extension is not None and step > self._entered_at else ""
        return Vote(step, self.epoch, self.rank, expansion(own), loss, offered, weight)

    def _decide(self, step: int, votes: Sequence[Vote]) -> list[Effect]:
        """All members of the epoch have voted: decide the step, advance the version and apply, in one transition (S2).

        Args:
            votes: sums that contain the vote of each member once.

        Raises:
            RunError: the votes cannot be right, as none of them has a loss. Other contents of votes are not
                questioned: members are trusted (docs/security.md).
        """
        if step != self.version + 1 or self.promised > self.epoch:
            return []
        # Every member computes the same norm from the same votes, so all of them clip by the same factor, without
        # another message.
        total = exact_sum(vote.norm for vote in votes)
        loss, extension, weight = content_of(votes)
        if loss is None:
            raise RunError(f"the votes of all members for step {step} have no loss: one of them has gone wrong")
        self.version = step
        self._losses[step] = loss
        if weight is not None:
            self._weights[step] = weight
        self._forget(step)
        # `total` is the squared norm. It is nan if a gradient is not finite; sqrt of a negative number would raise.
        norm = math.sqrt(total) if total >= 0 else math.nan
        decided = Apply(step, loss, norm, extension)
        effects: list[Effect] = [decided if weight is None else self._per_weight(decided, weight)]
        return [*effects, *map(Install, self._filed.pop(step, ()))]

    def _per_weight(self, decided: Apply, weight: float) -> Apply:
        """The decided step with loss and norm divided by weight / whole_weight, and this as divisor of its gradient.

        If the weight is not positive and finite, there is nothing to divide by: loss and norm become nan, so that the
        step is skipped like one whose gradient is not finite (S6).
        """
        if not (0.0 < weight < math.inf):
            return replace(decided, loss=math.nan, norm=math.nan, weight=weight)
        divisor = weight / self.whole_weight
        loss, norm = decided.loss / divisor, decided.norm / divisor
        return replace(decided, loss=loss, norm=norm, divisor=divisor, weight=weight)

    def _forget(self, step: int) -> None:
        """Drop the votes for a decided step, and the norms, losses and weights of the steps before it.

        Norms, losses and weights of the step itself are kept: this worker may have to vote for it again in the next
        epoch, for the pages of which it is primary then (`votes_again`).
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
    """The norm values of one step, cut anew: from the page ranges of the old epoch to those of the new one.

    Args:
        norms: page range of the old epoch -> one norm value per page.
        held: the page ranges of the new epoch.
        joins: True if a new range may consist of several old ones. Otherwise a range that is neither an old one nor a
            part of one counts as unknown.

    Returns:
        The norm values of those ranges of `held` for which they are known.
    """
    found = {key: norms[key] for key in held if key in norms}
    index = PageIndex(norms)
    for key in held - found.keys():
        parts = index.covering(key)
        if len(parts) == 1 or (parts and joins):
            values = (norms[part][max(0, key[1] - part[1]) : key[2] - part[1]] for part in parts)
            found[key] = tuple(chain.from_iterable(values))  # shorter than the range if it has the loss page: no norm
    return found


def held_ranges(replica_map: ReplicaMap, rank: int) -> tuple[ReplicaSet, ...]:
    """The page ranges whose reduced gradients a worker needs, as replica or learner, in order of layer and page."""
    return tuple(
        pages
        for _, ranges in sorted(replica_map.items())
        for pages in ranges
        if rank in pages.replicas or rank in pages.learners
    )
