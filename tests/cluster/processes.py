"""Parts of the simulated cluster: a worker, its end, and what a run leaves."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elaswave_spmd.mesh import Mesh
from elaswave_spmd.mesh.topology import Path
from elaswave_spmd.recovery.actions import EpochBegun, Save, Unrecoverable
from elaswave_spmd.sharding.replicas import ReplicaSet
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.programs.eager import StagePrograms
from tests.cluster.faults import ThenFault
from tests.cluster.wires import SimulatedChannel


class Killed(Exception):  # noqa: N818  (the end of a simulated process)
    pass


class LostStateError(AssertionError):
    """All replicas of some pages are gone.

    Args:
        losses: workers lost since every page had all its mirrors, with those that left if any was lost without notice.
        members: how many members there were then.
        left: workers that are neither lost nor asked to leave.
    """

    def __init__(self, effect: Unrecoverable | Save, losses: int, members: int, left: int) -> None:
        super().__init__(effect)
        self.losses, self.members, self.left = losses, members, left


@dataclass
class Trained:
    """The result of a run: per committed step the loss and gradient norm as hex, validation losses, final parameters.

    Args:
        epochs: all changes of the mesh, in order.
        restarts: the steps of the checkpoints from which the run began again.
        num_put_off: micro-batches that StepReports named of which only the weight gradients were left.
        num_weights_only: lines of plans that asked for these alone.
        turns: of the simulated clock.
        comebacks: how often a controller was killed, and another one came.
        most_strangers: the most members that a worker had no link to.
    """

    losses: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    averages: dict[str, np.ndarray] = field(default_factory=dict)
    epochs: list[EpochBegun] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    num_put_off: int = 0
    num_weights_only: int = 0
    turns: int = 0
    comebacks: int = 0
    most_strangers: int = 0


class Worker:
    """A simulated process: it waits for its first Reconfigure, then trains."""

    def __init__(self, rank: int, port: SimulatedChannel) -> None:
        self.rank, self.port = rank, port
        self.executor: Executor | None = None
        self.programs: StagePrograms | None = None
        self.point: FaultPoint | None = None  # of a micro-batch, that it has passed last
        self.running: Generator[str, None, None] | None = None
        self.waiting = "its first Reconfigure"
        self.stopped_for = 0  # turns of its own that it is still stopped
        self.num_points = 0  # of steps, that it has passed
        self.silent = False  # its heartbeats do not arrive
        self.pace = 1.0  # how often it gets a turn
        self.version = 0

    @property
    def has_put_off(self) -> bool:
        """True if some micro-batch has nothing left but its weight gradients, outside the first part of a backward."""
        is_in_backward = self.point in (FaultPoint.BACKWARD, FaultPoint.INPUT)
        return self.programs is not None and bool(self.programs.begun) and not is_in_backward


def victims(
    fault: ThenFault,
    members: Mapping[int, Worker],
    replica_sets: Iterable[ReplicaSet],
    lost: Sequence[int],
    newest: Worker | None,
) -> list[int]:
    """The workers that a fault that is due can happen to. None: it has to wait.

    Args:
        members: by rank, without those that are lost.
        replica_sets: the replicas of all pages.
        lost: ranks, in the order of their losses.
        newest: the last worker that was started, if it is not lost.
    """
    able = list(members)
    if fault.target == "mirror" and lost:
        peers = {rank for pages in replica_sets if lost[-1] in pages.replicas for rank in pages.replicas}
        return [rank for rank in able if rank in peers] or able
    if fault.target == "newcomer" and newest is not None:
        return [newest.rank]
    if fault.target == "ahead":
        versions = {rank: worker.executor.version for rank, worker in members.items() if worker.executor is not None}
        first, last = min(versions.values(), default=0), max(versions.values(), default=0)
        return [rank for rank, version in versions.items() if version == last > first]
    return able


def domain_of(mesh: Mesh, rank: int) -> Path | None:
    """The failure domain of a worker, newcomers included: domains take turns, by rank."""
    paths = sorted({path for _, path in mesh.topology.domains})
    return paths[rank % len(paths)] if len(paths) > 1 else None
