"""Workers that others overtake in the middle of a copy, as processes do and workers of one process do not."""

from __future__ import annotations

from collections.abc import Callable, Generator

from elaswave_spmd.runtime.executor import Executor
from elaswave_spmd.runtime.units import EpochChangedError, Waiting
from elaswave_spmd.testing.cluster import LocalCluster
from elaswave_spmd.testing.processes import Worker


class PiecewiseExecutor(Executor):
    """An executor that gives way after each piece of a chore."""

    def _until(self, ready: Callable[[], bool], what: str, number: int) -> Generator[Waiting, None, None]:
        self._take()
        while not ready():
            if self._place is not None:
                raise EpochChangedError
            self.replica.chores.do_one()
            yield f"{what} {number}"
            self._take()


class PiecewiseCluster(LocalCluster):
    """A cluster in which who has chores has something to do. To be used with `PiecewiseExecutor`."""

    def _can_go(self, worker: Worker) -> bool:
        return super()._can_go(worker) or bool(worker.executor and worker.executor.replica.chores)
