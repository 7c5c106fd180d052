"""Actions of the controller's half of the protocol: its driver carries them out, in the order in which they come.

Four of them only tell the driver something, for the log and its other parts: Committed, ValidationDone, EpochBegun and
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
        peers: of a Reconfigure on a large mesh: the workers whose addresses each is told; None: those of all.
    """

    ranks: tuple[int, ...]
    message: Message
    peers: Peers | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RemoveMember:
    """The worker is no member any more.

    Args:
        lost: it failed, and must not live on: its process is killed. Else it has left, and ends by itself (Stop).
    """

    rank: int
    lost: bool


@dataclass(frozen=True)
class Committed:
    """The first report of a step."""

    applied: Applied


@dataclass(frozen=True)
class ValidationDone:
    """All micro-batches of a validation: the exactly rounded sum of their losses.

    Args:
        is_last: by this loss the run ends after `step`.
        weight: the exactly rounded sum of their weights; None: losses have none.
        metrics: (name, sum, weight or None) of each metric, likewise.
    """

    step: int
    total: float
    is_last: bool = False
    weight: float | None = None
    metrics: tuple[tuple[str, float, float | None], ...] = ()


@dataclass(frozen=True)
class EpochBegun:
    """A new mesh epoch has begun: its reasons, and its cost.

    Args:
        kinds: rank -> "fail", "leave", "join" or "link"; empty when only state changed hands.
        microbatches_redone: (micro-batch, stage) pairs that are computed again, or by another worker than planned.
        why: the reason of a move of micro-batches, layers or workers, in words; else empty.
        plan: the movement of state; None: no state moves.
        checks_dropped: pairs of the step under way that are not checked any more.
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
        """Copies of page ranges that are being made now."""
        return len(self.plan.copies) if self.plan is not None else 0


@dataclass(frozen=True)
class Save:
    """The Reconfigure of an epoch orders its members to write their state and to begin no other step.

    Too few workers are left, or the run was asked to stop.

    Args:
        version: of the state.
        reason: in words.
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
        lost: page ranges without a replica; empty if that is not the cause.
        reason: in words.
    """

    lost: tuple[ReplicaSet, ...]
    reason: str


ProtocolAction: TypeAlias = (
    Send | Broadcast | RemoveMember | Committed | ValidationDone | EpochBegun | Save | Done | Unrecoverable
)
