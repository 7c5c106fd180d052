"""A loss that has a weight for some micro-batches only is the model's fault; a count of them that cannot be is none."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from elaswave_spmd.controller.outcomes import RunFinished, RunStopped
from elaswave_spmd.errors import WorkerError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.context import WorkerHooks
from elaswave_spmd.worker.fault_points import FaultPoint
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker
from tests.cluster.schedules import Outcome, Schedule, cluster_of, run, undisturbed
from tests.cluster.tiny import TinyRun

RUN = TinyRun(steps=4, microbatches=5)


class ReportingCluster(SimulatedCluster):
    """Workers report exceptions, as real ones do."""

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        def failed(error: Exception) -> m.Failed:
            assert worker.executor is not None
            return m.Failed(worker.rank, "".join(traceback.format_exception(error)), worker.executor.version + 1)

        return replace(super()._hooks_of(worker), failed=failed)


class MixedCluster(ReportingCluster):
    """From step 3 on the loss of every second micro-batch has a weight, and no worker notices it by its own."""

    def _advance(self, worker: Worker) -> None:
        if (programs := worker.programs) is not None and "_check_weighted" not in vars(programs):
            loss = programs._loss

            def mixed(output: Tensor, batch: Any) -> Tensor | tuple[Tensor, float]:
                assert worker.executor is not None
                is_weighed = worker.executor.version >= 2 and int(batch.tokens.sum()) % 2
                return (loss(output, batch), 1.0) if is_weighed else loss(output, batch)

            vars(programs).update(_loss=mixed, _check_weighted=lambda weighted: None)
        super()._advance(worker)


class MiscountingCluster(ReportingCluster):
    """In step 3 one worker's device changes the number of weights in the reduced gradient of the loss page, once."""

    has_changed = False

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        hooks = super()._hooks_of(worker)

        def wrong_result(point: FaultPoint, step: int, result: Tensor) -> Tensor:
            assert worker.executor is not None
            replica = worker.executor.replica
            is_loss = any(replica.is_loss(pages) for pages in replica._held.values() if pages.primary == worker.rank)
            # The loss page is the one whose first element is a loss, and whose others are 0.
            if point is FaultPoint.NORM and step == 3 and is_loss and not self.has_changed and not result[1:].any():
                self.has_changed, result = True, result.clone()
                result[2] = 1e-41
            return hooks.computed(point, step, result)

        return replace(hooks, wrong_result=wrong_result)


def ended(kind: type[SimulatedCluster], rate: float, mesh: str = "dp3") -> SimulatedCluster:
    cluster = cluster_of(Schedule(0, RUN, mesh, 1, verify_rate=rate), kind=kind)
    cluster.controller.run()
    return cluster


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2"])
def test_a_loss_with_a_weight_for_some_micro_batches_ends_the_run_with_its_state(mesh: str, rate: float) -> None:
    """With checks it is the checker that says so, once both sums have been found to be the same."""
    outcome = ended(MixedCluster, rate, mesh).controller.outcome
    assert isinstance(outcome, RunStopped) and isinstance(outcome.error, WorkerError)
    assert "loss(output, batch) has returned a weight for" in outcome.error.report
    assert "of 5 micro-batches in step 3" in outcome.error.report
    assert "Its state after step 2 is in" in str(outcome.error)


@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2"])
def test_an_impossible_count_is_no_mistake_of_the_model(mesh: str) -> None:
    """Without checks the worker that has made the sum is lost by it, and another one makes it again."""
    cluster = ended(MiscountingCluster, 0.0, mesh)
    assert isinstance(cluster.controller.outcome, RunFinished)
    assert Outcome.of(cluster.result) == undisturbed(RUN)
    (lost,) = [fields for kind, fields in cluster.events if kind == "fail"]
    assert "says that 9.99967e-42 of 5 micro-batches have a weight" in str(lost["message"])


@pytest.mark.parametrize("mesh", ["dp3", "dp2_pp2"])
def test_a_check_finds_the_worker_that_has_miscounted(mesh: str) -> None:
    cluster = ended(MiscountingCluster, 1.0, mesh)
    assert isinstance(cluster.controller.outcome, RunFinished)
    assert Outcome.of(cluster.result) == undisturbed(RUN)
    (wrong,) = [fields for kind, fields in cluster.events if kind == "corrupt"]
    assert wrong["tensor"] == "reduced gradient" and wrong["step"] == 3


def test_a_bit_that_flips_in_the_count_is_found_by_the_check() -> None:
    """Two workers are wrong before, one after the other, and the last flip hits the number of weights."""
    found = run(Schedule.draw(20443, miscompute=True))
    assert found.how == "bits", (found.failure, found.detail)
