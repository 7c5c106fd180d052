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

from elaswave_spmd.recovery.messages import Publish, Vote
from elaswave_spmd.scheduling.exact import exact_sum, expansion
from elaswave_spmd.scheduling.placement import HolderMap, HolderRun, RunKey


@dataclass(frozen=True)
class SendVote:
    """Send this vote to every other member of the mesh epoch."""

    vote: Vote


@dataclass(frozen=True)
class Apply:
    """Apply the step's entries to every held page, then publish. The step is decided: it cannot be undone.

    `finite` False: the gradient's norm is not finite; the version advances and the state stays.
    """

    step: int
    loss: float
    norm: float

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
    """One worker in one mesh epoch.

    Args:
        rank: this worker.
        epoch: the mesh epoch that fences control messages.
        members: all workers of the epoch.
        held: the runs of pages that this worker holds, as primary or mirror.
        loss_run: the run of the loss page, if held here.
        version: the step last applied.
    """

    rank: int
    epoch: int
    members: Sequence[int]
    held: Sequence[HolderRun]
    loss_run: RunKey | None = None
    version: int = 0
    _computed: int = 0
    _missing: dict[int, set[RunKey]] = field(default_factory=dict)
    _norms: dict[int, dict[RunKey, tuple[float, ...]]] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)
    _votes: dict[int, dict[int, Vote]] = field(default_factory=dict)
    _later_epochs: list[Vote] = field(default_factory=list)
    _filed: dict[int, list[Publish]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._computed = self.version
        self._primary = frozenset(r.key for r in self.held if r.primary == self.rank)
        self._holds = frozenset(r.key for r in self.held)
        self._members = frozenset(self.members)

    def computed(self, step: int) -> list[Effect]:
        """This worker has done its units of the step, and its compute buffers are all at step - 1.

        A vote says that too: only then may a primary overwrite, at its next Apply, memory that a published page is
        still being sent from. It matters for workers that have no unit and would not have waited for parameters.
        """
        assert step == self.version + 1, (step, self.version)
        self._computed = step
        return self._vote_if_complete(step)

    def entry_complete(self, step: int, run: RunKey, norms: Sequence[float], loss: float | None = None) -> list[Effect]:
        """A held run's entry is here: reduced to the root, or received from its primary. Duplicates are ignored."""
        assert run in self._holds, (run, "is not held by worker", self.rank)
        if step <= self.version:
            return []
        self._norms.setdefault(step, {})[run] = tuple(norms)
        if loss is not None:
            self._losses[step] = loss
        self._missing_of(step).discard(run)
        return self._vote_if_complete(step)

    def vote_received(self, vote: Vote) -> list[Effect]:
        """Fenced by the epoch: older votes are void, those of a future epoch are kept for it [m]."""
        if vote.epoch < self.epoch or vote.step <= self.version:
            return []
        if vote.epoch > self.epoch:
            self._later_epochs.append(vote)
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

    def _missing_of(self, step: int) -> set[RunKey]:
        return self._missing.setdefault(step, set(self._holds))

    def _vote_if_complete(self, step: int) -> list[Effect]:
        ready = step == self.version + 1 == self._computed and not self._missing_of(step)
        if not ready or self.rank in self._votes.get(step, {}):
            return []
        norms = self._norms.get(step, {})
        own = (value for run in sorted(self._primary) if run != self.loss_run for value in norms[run])
        loss = self._losses[step] if self.loss_run in self._primary else None
        vote = Vote(step, self.epoch, self.rank, expansion(own), loss)
        self._votes.setdefault(step, {})[self.rank] = vote
        return [SendVote(vote), *self._decide()]

    def _decide(self) -> list[Effect]:
        """With all votes of the epoch the step is decided: advance the version and apply, in one transition."""
        step = self.version + 1
        votes = self._votes.get(step, {})
        if len(votes) < len(self.members):
            return []
        total = exact_sum(votes[m].norm for m in self.members)
        loss = next(v.loss for v in votes.values() if v.loss is not None)
        self.version = step
        self._forget(step)
        effects: list[Effect] = [Apply(step, loss, math.sqrt(total) if total >= 0 else math.nan)]
        return [*effects, *map(Install, self._filed.pop(step, ()))]

    def _forget(self, step: int) -> None:
        """Norm values are kept for two versions (a promoted mirror votes with them); votes and losses are done with."""
        for table in (self._missing, self._votes, self._losses):
            table.pop(step, None)
        for old in [s for s in self._norms if s < step - 1]:
            del self._norms[old]


def held_runs(holder_runs: HolderMap, rank: int) -> tuple[HolderRun, ...]:
    """The runs that a worker holds, in layer and page order."""
    return tuple(run for _, runs in sorted(holder_runs.items()) for run in runs if rank in run.holders)
