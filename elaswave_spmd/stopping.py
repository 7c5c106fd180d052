"""A run that has too few workers left to go on: their state is written, then it ends and says how to resume it."""

from __future__ import annotations

import time
from pathlib import Path

from elaswave_spmd.controller.checkpoints import Durability
from elaswave_spmd.controller.failures import Losses
from elaswave_spmd.recovery.actions import Save
from elaswave_spmd.restart import advice, resume_command
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path


class Stopping:
    """Part of the controller, in its thread.

    Args:
        seconds: how long the last checkpoint may take (timeouts.shutdown).
    """

    def __init__(self, durability: Durability, losses: Losses, run_dir: Path, seconds: float) -> None:
        self._durability, self._losses, self._run_dir, self._seconds = durability, losses, run_dir, seconds
        self._save: Save | None = None
        self._until = 0.0

    def begin(self, save: Save) -> None:
        """The workers have been told; again if one more is lost meanwhile."""
        self._save, self._until = save, time.monotonic() + self._seconds
        self._durability.stops_at(save.version, save.epoch)

    def look(self) -> None:
        """Ends the run if there is something to wait for no longer.

        Raises:
            RunError: the checkpoint is there, or will not be.
        """
        if self._save is None:
            return
        step, reason = self._save.version, self._save.reason
        if self._durability.newest >= step:
            where = checkpoint_path(self._run_dir, step)
            self._losses.stop(
                step,
                f"the run stops: {reason}. Its state after step {step} is in {where}; "
                f"to go on from there: {resume_command(self._run_dir)}",
            )
        why = self._durability.why_not(step)
        if not why and time.monotonic() > self._until:
            why = f"not within {self._seconds:g} s (timeouts.shutdown)"
        if why:
            self._durability.drain()
            self._losses.stop(
                step,
                f"the run stops: {reason}. Its state after step {step} could not be written: {why}. "
                f"{advice(self._run_dir)}",
            )
