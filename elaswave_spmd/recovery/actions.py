"""The actions that `ControllerProtocol` returns. Its driver carries them out in the order in which they are returned.

Four of them only inform the driver, for the log and for its other parts: Committed, ValidationDone, EpochBegun and
Done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from elaswave_spmd.recovery.messages import Applied, Message
from elaswave_spmd.recovery.peers import Peers
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.sharding.reshard import ReshardPlan


@dataclass(frozen=True)
class Send:
    """Send this message to a worker."""

    rank: int
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """Send this message to several workers. It is encoded once, however many they are.

    Args:
        ranks: the receivers.
        peers: for a Reconfigure on a large mesh: the peers of each receiver, whose addresses it is sent; None if each
            is sent the addresses of all members.
    """

    ranks: tuple[int, ...]
    message: Message
    peers: Peers | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RemoveMember:
    """The worker is not a member any more.

    Args:
        lost: True if it failed: its process must be killed, so that it cannot go on. False if it has left: it ends by
            itself, as it was sent Stop.
    """

    rank: int
    lost: bool


@dataclass(frozen=True)
class Committed:
    """The first report of a step."""

    applied: Applied


@dataclass(frozen=True)
class ValidationDone:
    """A validation is complete: the losses of all of its micro-batches are known.

    Args:
        step: the version that was validated.
        total: the exactly rounded sum of the losses of all micro-batches.
        is_last: True if this loss ends the run early, after `step`.
        weight: the exactly rounded sum of the weights of the losses; None if losses have no weight.
        metrics: (name, exactly rounded sum, exactly rounded sum of weights or None) of each metric.
    """

    step: int
    total: float
    is_last: bool = False
    weight: float | None = None
    metrics: tuple[tuple[str, float, float | None], ...] = ()


@dataclass(frozen=True)
class EpochBegun:
    """A new mesh epoch has begun: why, and what it costs.

    Args:
        placement: the placement of the new epoch.
        kinds: rank -> "fail", "leave", "join" or "link"; empty if the members stay and only state moves.
        reasons: rank -> reason, in words.
        version: the highest version of any member.
        microbatches_redone: the number of (micro-batch, stage) pairs that are computed again, or by another worker than
            planned.
        why: the reason for a move of micro-batches, layers or workers, in words; else empty.
        plan: the reshard plan; None if no state moves.
        checks_dropped: the number of checks of the step under way that are not made any more.
    """

    placement: Placement
    kinds: Mapping[int, str]
    reasons: Mapping[int, str]
    version: int
    microbatches_redone: int
    why: str = ""
    plan: ReshardPlan | None = None
    checks_dropped: int = 0

    @property
    def num_copies(self) -> int:
        """The number of page ranges that are copied to learners in this epoch."""
        return len(self.plan.copies) if self.plan is not None else 0


@dataclass(frozen=True)
class Save:
    """The run stops: the Reconfigure of this epoch makes its members write their state and begin no other step.

    Args:
        version: the version of the state that is written.
        epoch: the mesh epoch of the Reconfigure.
        reason: why the run stops, in words: too few workers are left, or somebody asked for it.
    """

    version: int
    epoch: int
    reason: str


@dataclass(frozen=True)
class Done:
    """All steps are applied, and the present primaries have sent the final values of all pages."""


@dataclass(frozen=True)
class Unrecoverable:
    """The run cannot go on from the state that its workers have: only a checkpoint helps.

    Args:
        lost: the page ranges that have no replica left; empty if the cause is another one.
        reason: the cause, in words.
    """

    lost: tuple[ReplicaSet, ...]
    reason: str


ProtocolAction: TypeAlias = (
    Send | Broadcast | RemoveMember | Committed | ValidationDone | EpochBegun | Save | Done | Unrecoverable
)
