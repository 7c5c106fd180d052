"""Weight gradients that are put off, when the step is interrupted: reports name them; in vain they are given up."""

from __future__ import annotations

import pytest

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.partial_step import RecoveryPlan
from elaswave_spmd.worker.ready_order import KeptLimits
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


@pytest.fixture(params=["pp2", "dp2_pp2", "stages1-3"])
def interrupted(request: pytest.FixtureRequest) -> _Interrupted:
    """A cluster at that moment, on a mesh."""
    schedule = Schedule(seed=1, mesh=request.param, run=TinyRun(microbatches=6, steps=3))
    cluster = cluster_of(schedule, kind=_Interrupted)
    assert isinstance(cluster, _Interrupted)
    with pytest.raises(_FoundError):
        cluster.run()
    assert cluster.found.programs is not None and cluster.found.programs.begun
    return cluster


def test_a_report_names_what_is_put_off(interrupted: _Interrupted) -> None:
    executor, programs = interrupted.found.executor, interrupted.found.programs
    assert executor is not None and programs is not None
    report = executor._steps.partial_step(interrupted.step)
    assert set(report.put_off) == programs.begun and set(report.put_off).isdisjoint(report.computed)
    assert set(report.put_off) <= set(report.assigned)


def test_what_was_put_off_of_a_microbatch_that_is_not_in_the_plan_is_given_up(interrupted: _Interrupted) -> None:
    executor, programs = interrupted.found.executor, interrupted.found.programs
    assert executor is not None and programs is not None
    assert executor._steps._remaining_of(RecoveryPlan(interrupted.step, ())) == {}
    assert not programs.begun, "memory of a micro-batch that another worker has now"


def test_what_was_put_off_in_an_older_attempt_is_given_up(interrupted: _Interrupted) -> None:
    """It may come of what was wrong; in the new attempt the micro-batch is run again from its begin."""
    executor, programs = interrupted.found.executor, interrupted.found.programs
    assert executor is not None and programs is not None
    executor._steps.forget_beyond(interrupted.step - 1)
    assert not programs.begun and executor._steps._awaiting_weight_gradients() == ()


def test_limits_that_come_in_the_middle_of_a_step_hold_from_the_next_one(interrupted: _Interrupted) -> None:
    executor, programs = interrupted.found.executor, interrupted.found.programs
    assert executor is not None and programs is not None
    steps, epoch = executor._steps, executor.configuration.epoch
    number, before = executor.placement.num_stages, executor._steps._limits
    assert before.put_off and programs.has_split_layers
    steps.receive_limits(m.Limits(epoch, (), (), (1,) * number))
    steps._begin(interrupted.step)  # as after each wait in which the mesh has changed
    assert steps._limits == before and programs.has_split_layers
    steps._begin(interrupted.step + 1)
    assert steps._limits == KeptLimits(1, 0) and not programs.has_split_layers
    steps.receive_limits(m.Limits(epoch, (1, 2), (0,) + (3,) * (number - 1), ()))
    steps._begin(interrupted.step + 2)
    assert steps._limits.put_off == 3 and programs.has_split_layers


def test_limits_of_another_mesh_epoch_are_not_taken(interrupted: _Interrupted) -> None:
    executor = interrupted.found.executor
    assert executor is not None
    steps, before, number = executor._steps, executor._steps._limits, executor.placement.num_stages
    for epoch in (executor.configuration.epoch - 1, executor.configuration.epoch + 1):
        steps.receive_limits(m.Limits(epoch, (), (), (1,) * number))
        steps._begin(interrupted.step + 1)
        assert steps._limits == before
    assert steps._next_limits is not None, "the epoch may begin yet"
