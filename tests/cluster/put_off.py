"""Weight gradients that a worker has put off: how many there may be, what a report says, and that none is left over."""

from __future__ import annotations

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.scheduling.pipeline import in_flight_limits, weight_limits
from elaswave_spmd.worker.fault_points import FaultPoint
from tests.cluster.processes import Worker

OF_MICROBATCHES = (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.INPUT, FaultPoint.WEIGHTS, FaultPoint.REDUCE)
"""The points that tell what a worker does with a micro-batch; others come in the middle of it."""
_IN_FIRST_PART = (FaultPoint.BACKWARD, FaultPoint.INPUT)
_IN_SECOND_PART = (FaultPoint.WEIGHTS, FaultPoint.REDUCE)


def check_at_point(worker: Worker, point: FaultPoint) -> None:
    """Asserts that a worker puts off no more than its stage may, and that nothing is left over of a decided step."""
    if worker.executor is None or worker.programs is None:
        return
    begun = worker.programs.begun
    if point is FaultPoint.INPUT:
        placement = worker.executor.placement
        in_flight = in_flight_limits([len(members) for members in placement.mesh.stages], placement.microbatch_counts)
        limit = weight_limits(in_flight)[placement.mesh.stage_of(worker.rank)]
        assert len(begun) <= max(1, limit), f"worker {worker.rank} has put off {sorted(begun)}, and may {limit}"
    if point is FaultPoint.APPLY:
        assert not begun, f"worker {worker.rank} applies a step with weight gradients that are put off: {sorted(begun)}"


def check_report(worker: Worker, report: m.StepReport) -> None:
    """Asserts that a report names all micro-batches that are put off.

    Not one in the middle of the first part of its backward, nor one in the middle of the second where sums of it may
    have been given up.
    """
    executor, programs, point = worker.executor, worker.programs, worker.point
    if executor is None or programs is None or not any(part.assigned for part in report.partial_steps):
        return
    is_kept = point in _IN_SECOND_PART and not executor.replica.reducer.gives_up
    named = {microbatch for part in report.partial_steps for microbatch in part.put_off}
    unnamed = programs.begun - named
    is_right = len(unnamed) <= (point in _IN_FIRST_PART + _IN_SECOND_PART and not is_kept)
    assert is_right, f"worker {worker.rank} has put off {sorted(unnamed)}, and says {sorted(named)}"
