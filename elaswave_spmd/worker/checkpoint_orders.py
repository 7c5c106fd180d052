"""A worker's part of a run's checkpoints: the shards that it writes, and the checkpoint that the run begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaswave_spmd.run_dir.checkpoints import open_checkpoint
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange, ReplicaMap


@dataclass(frozen=True)
class CheckpointOrders:
    """The checkpoint settings of a run as a worker gets them: plain values, the same on every worker.

    Args:
        run_dir: the run's directory, absolute; the same path on all machines.
        run: the run's id.
        incarnation: the number of the controller that started this worker, counted over all starts of the run.
        every: steps between checkpoints; 0 for none. The last step has none, since its weights are the result.
        steps: number of steps of the run.
        source: the directory of the checkpoint that the run begins with, or None.
        validate_every: steps between checkpoints of validated state; 0 for none.
        committed: the last step that was committed before the run was resumed; 0 if it is not a resumed run.
    """

    run_dir: str
    run: str
    incarnation: int
    every: int = 0
    steps: int = 0
    source: str | None = None
    committed: int = 0
    validate_every: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON types. `CheckpointOrders(**fields)` inverts it."""
        return asdict(self)

    def is_due(self, step: int) -> bool:
        """True if the state after this step is to be written."""
        is_validated = self.validate_every > 0 and step % self.validate_every == 0
        return (is_validated or (self.every > 0 and step % self.every == 0)) and step < self.steps

    def newest_due(self, step: int) -> int:
        """The newest step, up to this one, after which the state is to be written; 0: there is none."""
        last = min(step, self.steps - 1)
        return max((last - last % every for every in (self.every, self.validate_every) if every > 0), default=0)

    def reader(self, rank: int, layout: ModelLayout, replicas: ReplicaMap) -> Callable[[PageRange, str], Tensor] | None:
        """Opens the checkpoint that the run begins with, and plans what this worker reads of it.

        Its hashes are not verified again: the controller did so before it started the workers.

        Args:
            replicas: of the first mesh, all layers.

        Returns:
            (page range, kind of state) -> fp32 [elements]; None if the run begins with initial values.

        Raises:
            CheckpointError: the checkpoint cannot be read any more.
        """
        if self.source is None:
            return None
        checkpoint = open_checkpoint(Path(self.source), verify=False)
        plan = checkpoint.plan_to(layout, replicas)
        return lambda pages, kind: torch.from_numpy(checkpoint.read(plan, rank, pages, kind))
