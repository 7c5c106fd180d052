"""What is left to do when state is lost for good: the run goes back to its newest good checkpoint, or ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.errors import CheckpointError, RunError
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.run_dir.checkpoints import Checkpoint, load_newest_good
from elaswave_spmd.scheduling.placement import even_counts
from elaswave_spmd.sharding.replicas import HolderRun

_MAX_IN_A_ROW = 3


class RestartError(Exception):
    """The run begins again, at a checkpoint.

    Args:
        settings: of the run from now on.
        step: of the checkpoint.
    """

    def __init__(self, settings: Settings, step: int) -> None:
        super().__init__(f"the run begins again after step {step}")
        self.settings, self.step = settings, step


class Restarts:
    """Those of one command: a run that does not get ahead is not begun again for ever."""

    def __init__(self) -> None:
        self._steps: list[int] = []

    def next(self, restart: RestartError) -> Settings:
        """The settings to go on with.

        Raises:
            RunError: the run has been begun again at the same checkpoint too often.
        """
        self._steps.append(restart.step)
        if self._steps[-_MAX_IN_A_ROW - 1 :].count(restart.step) > _MAX_IN_A_ROW:
            raise RunError(
                f"the run was begun again {_MAX_IN_A_ROW} times after step {restart.step}, and got no further"
            )
        return restart.settings


def begin_again(
    observer: RunObserver,
    protocol: ControllerProtocol,
    settings: Settings,
    lost: Sequence[HolderRun],
    reason: str,
) -> str:
    """Has the run begin again with the workers that are left, if there is a good checkpoint and they are enough.

    Args:
        lost: runs of pages that nobody holds any more.

    Returns:
        If it does not: what the user can do.

    Raises:
        RestartError: it does; the event `restart` is written.
    """
    run_dir = observer.run_dir.path
    checkpoint = _newest(run_dir)
    left = settings.mesh.shape.num_workers if settings.elastic.replace else len(protocol.members)
    is_lost = lost or not protocol.members
    # With agents the launcher cannot be started again: they end with it.
    is_possible = left >= settings.elastic.min_workers and settings.runtime.rendezvous is None
    if checkpoint is None or not is_lost or not is_possible:
        return _advice(run_dir, checkpoint)
    mesh = mesh_of(left, settings.mesh)
    pages = sum(run.num_pages for run in lost) or "all"
    observer.on_event(
        "restart",
        step=checkpoint.step,
        lost_after=protocol.version,
        lost_pages=pages,
        workers=left,
        mesh=mesh.shape.name,
        reason=reason,
        message=f"{reason}: {pages} pages of state after step {protocol.version} are gone; "
        f"{left} workers ({mesh.shape.name}) begin again after step {checkpoint.step}, "
        f"from {checkpoint.path} or one that is becoming whole just now",
    )
    again = dataclasses.replace(
        settings,
        mesh=mesh,
        train=dataclasses.replace(settings.train, resume=str(run_dir)),
        run=dataclasses.replace(settings.run, dir=None),
    )
    raise RestartError(again, checkpoint.step)


def advice(run_dir: Path) -> str:
    """What the user of a run that has ended can do: where its newest good checkpoint is, and how to go on from it."""
    return _advice(run_dir, _newest(run_dir))


def _advice(run_dir: Path, checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "There is no checkpoint to go on from (checkpoint.every=N makes them)"
    return f"Its newest checkpoint is {checkpoint.path}; to go on from there: {resume_command(run_dir)}"


def resume_command(run_dir: Path) -> str:
    """What a user types to go on from the newest checkpoint of a run."""
    return f"python train.py train.resume={run_dir}"


def mesh_of(num_workers: int, mesh: MeshSettings) -> MeshSettings:
    """So many workers, as they are inside, on as many stages as `mesh` has, or on fewer, as evenly as it goes."""
    stages = min(num_workers, mesh.shape.num_stages)
    sizes = even_counts(num_workers, stages)
    if len(set(sizes)) == 1:
        return MeshSettings(dp=sizes[0], pp=stages, tp=mesh.tp, fsdp=mesh.fsdp)
    return MeshSettings(stages=sizes, tp=mesh.tp, fsdp=mesh.fsdp)


def _newest(run_dir: Path) -> Checkpoint | None:
    try:
        return load_newest_good(run_dir)[0]
    except CheckpointError:
        return None
