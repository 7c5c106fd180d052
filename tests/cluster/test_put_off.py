"""Weight gradients that are put off, when the step is interrupted: those that nobody wants are given up."""

from __future__ import annotations

import pytest

from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.partial_step import RecoveryPlan
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker
from tests.cluster.schedules import Schedule, cluster_of
from tests.cluster.tiny import TinyRun


class _FoundError(Exception):
    pass


class _Interrupted(SimulatedCluster):
    """A cluster that ends at the first forward that runs while weight gradients are put off."""

    found: Worker
    step: int

    def _visit(self, worker: Worker, point: FaultPoint, step: int) -> None:
        super()._visit(worker, point, step)
        if point is FaultPoint.FORWARD and worker.has_put_off:
            self.found, self.step = worker, step
            raise _FoundError


@pytest.mark.parametrize("mesh", ["pp2", "dp2_pp2", "stages1-3"])
def test_what_was_put_off_of_a_microbatch_that_is_not_in_the_plan_is_given_up(mesh: str) -> None:
    cluster = cluster_of(Schedule(seed=1, mesh=mesh, run=TinyRun(microbatches=6, steps=3)), kind=_Interrupted)
    assert isinstance(cluster, _Interrupted)
    with pytest.raises(_FoundError):
        cluster.run()
    executor, programs = cluster.found.executor, cluster.found.programs
    assert executor is not None and programs is not None and programs.begun
    assert executor._steps._remaining_of(RecoveryPlan(cluster.step, ())) == {}
    assert not programs.begun, "memory of a micro-batch that another worker has now"
