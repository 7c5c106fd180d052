"""Actions of the controller's half of the protocol: what its driver has to carry out, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from elaswave_spmd.recovery.messages import Applied, Message
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
    """Send this message to several workers. It is encoded once, however many they are."""

    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class RemoveMember:
    """The worker is no member any more: it must not live on, or was asked to leave and may end."""

    rank: int
    lost: bool


@dataclass(frozen=True)
class Committed:
    """The first report of a step."""

    applied: Applied


@dataclass(frozen=True)
class ValidationDone:
    """All micro-batches of a validation: the exactly rounded sum of their losses."""

    step: int
    total: float


@dataclass(frozen=True)
class EpochBegun:
    """A new mesh epoch: why, and what it costs.

    Args:
        kinds: rank -> "fail", "leave", "join" or "link"; empty when only state changed hands.
        microbatches_redone: (micro-batch, stage) pairs that are computed again, or by another worker than planned.
        why: of a move of micro-batches, layers or workers.
        plan: what becomes of the state; None: nothing changes.
    """

    placement: Placement
    kinds: Mapping[int, str]
    reasons: Mapping[int, str]
    version: int
    microbatches_redone: int
    why: str = ""
    plan: ReshardPlan | None = None

    @property
    def num_copies(self) -> int:
        """Copies of page ranges that are being made now."""
        return len(self.plan.copies) if self.plan is not None else 0


@dataclass(frozen=True)
class Save:
    """The members of an epoch have been told to write their state and to begin no other step: they are too few.

    Args:
        version: of the state.
        reason: in words.
    """

    version: int
    epoch: int
    reason: str


@dataclass(frozen=True)
class Done:
    """All steps are applied, and whoever holds them now has sent the final pages."""


@dataclass(frozen=True)
class Unrecoverable:
    """Pages of state have no replica left, or no worker is left: only a checkpoint helps."""

    lost: tuple[ReplicaSet, ...]
    reason: str


Action: TypeAlias = (
    Send | Broadcast | RemoveMember | Committed | ValidationDone | EpochBegun | Save | Done | Unrecoverable
)
