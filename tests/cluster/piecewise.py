"""Workers that others overtake in the middle of a copy, as processes do and workers of one process do not."""

from __future__ import annotations

from unittest import mock

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker import state_replica
from elaswave_spmd.worker.state import BackgroundCopies
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker


class PiecewiseCopies(BackgroundCopies):
    """Copies of which a worker does one piece at a time, and then waits as if there were none."""

    def do_one(self) -> bool:
        super().do_one()
        return False


class PiecewiseCluster(SimulatedCluster):
    """A cluster in which each piece of a background copy is a turn of its worker."""

    def _begin(self, worker: Worker, first: m.Reconfigure) -> None:
        with mock.patch.object(state_replica, "BackgroundCopies", PiecewiseCopies):
            super()._begin(worker, first)

    def _can_go(self, worker: Worker) -> bool:
        return super()._can_go(worker) or bool(worker.executor and worker.executor.replica.background)
