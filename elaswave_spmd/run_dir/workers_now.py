"""The workers of a run at one moment, as a live view shows them."""

from __future__ import annotations

from dataclasses import dataclass

STARTING = "starting"
READY = "ready"
TRAINING = "training"
LEARNER = "learner"
SLOW = "slow"
LEAVING = "leaving"
LOST = "lost"
LEFT = "left"
JOINING = "joining"
SPARE = "spare"
STATES = (TRAINING, STARTING, READY, LEARNER, SLOW, LEAVING, JOINING, SPARE, LEFT, LOST)
"""All states, in the order in which a view counts them."""


@dataclass(frozen=True)
class WorkerNow:
    """One worker.

    Args:
        rank: the rank of the worker.
        state: one of `STATES`.
        stage: the stage that it is in, or was in; None if it is not a member of the mesh.
        microbatches: the number of micro-batches of each step that it computes.
        speed: its speed relative to the median worker; None if it is not measured.

    Raises:
        ValueError: the state is unknown.
    """

    rank: int
    state: str
    stage: int | None = None
    microbatches: int = 0
    speed: float | None = None

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"worker {self.rank} is in no known state: {self.state!r}")

    @property
    def is_gone(self) -> bool:
        """True if it is not a worker of the run any more."""
        return self.state in (LOST, LEFT)


@dataclass(frozen=True)
class WorkersNow:
    """All workers of a run, including those that were lost or left a short time ago.

    Args:
        mesh: the name of the mesh.
        epoch: the epoch of the mesh.
        layer_cuts: stage s runs layers layer_cuts[s] to layer_cuts[s + 1] - 1.
        workers: the workers by stage, and within a stage in the order of the mesh.
        is_changing: True if the next mesh epoch is about to begin.
    """

    mesh: str
    epoch: int
    layer_cuts: tuple[int, ...]
    workers: tuple[WorkerNow, ...]
    is_changing: bool = False

    @property
    def num_stages(self) -> int:
        """The number of stages of the mesh."""
        return len(self.layer_cuts) - 1

    def of_stage(self, stage: int | None) -> tuple[WorkerNow, ...]:
        """The workers of a stage, or for None those that are not members of the mesh."""
        return tuple(worker for worker in self.workers if worker.stage == stage)

    @classmethod
    def planned(
        cls,
        mesh: str,
        stages: tuple[tuple[int, ...], ...],
        layer_cuts: tuple[int, ...],
        counts: tuple[tuple[int, ...], ...],
    ) -> WorkersNow:
        """The workers of a first mesh before any of them is ready.

        Args:
            mesh: the name of the mesh.
            stages: the ranks of each stage.
            layer_cuts: as for `WorkersNow`.
            counts: the number of micro-batches of each worker, by stage.
        """
        workers = tuple(
            WorkerNow(rank, STARTING, stage, microbatches)
            for stage, (ranks, some) in enumerate(zip(stages, counts, strict=True))
            for rank, microbatches in zip(ranks, some, strict=True)
        )
        return cls(mesh, 0, layer_cuts, workers)
