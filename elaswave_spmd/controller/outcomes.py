"""The ways in which a run ends, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elaswave_spmd.conf.schema import MeshSettings
from elaswave_spmd.errors import RunError, UserError


@dataclass(frozen=True)
class RunFinished:
    """All steps are committed, and the trained weights are collected."""


@dataclass(frozen=True)
class RunStopped:
    """The run has ended before its last step. `error` says why and, where its state is saved, how to go on.

    A UserError: what the run was given is refused, by a worker that is about to start; no step was done.
    """

    error: RunError | UserError


@dataclass(frozen=True)
class RestartFrom:
    """The run in this directory begins again, on this mesh, at its checkpoint of this step.

    Args:
        is_begin: it has no checkpoint that it could begin with, and begins again with what it began with.
        doubted: what was committed after the step may be wrong, up to this one, and is given up, its checkpoints and
            metrics as well. None: it is right, and comes out again bit for bit.
        is_undecided: nothing shows which of some workers is wrong. The run does not go back for that a second time.
    """

    run_dir: Path
    mesh: MeshSettings
    step: int
    is_begin: bool = False
    doubted: int | None = None
    is_undecided: bool = False


Outcome: TypeAlias = RunFinished | RunStopped | RestartFrom
