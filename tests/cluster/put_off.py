"""Weight gradients that a worker has put off: how many there may be, what a report says, and that none is left over."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.scheduling.step_time import Assignment
from elaswave_spmd.worker.fault_points import FaultPoint
from tests.cluster.processes import Worker

OF_MICROBATCHES = (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.INPUT, FaultPoint.WEIGHTS, FaultPoint.REDUCE)
"""The points that tell what a worker does with a micro-batch; others come in the middle of it."""
_IN_FIRST_PART = (FaultPoint.BACKWARD, FaultPoint.INPUT)
_IN_SECOND_PART = (FaultPoint.WEIGHTS, FaultPoint.REDUCE)


@dataclass(frozen=True)
class DrawnLimits(SplitBackward):
    """Layers that are split, with limits that are drawn for every mesh epoch: with any of them the bits are the same.

    Args:
        seed: of what is drawn.
    """

    seed: int = 0

    def executed(self, assignment: Assignment, more: int = 0) -> Assignment:
        draw = random.Random(f"limits {self.seed} {more} {assignment.stages} {assignment.microbatch_counts}")
        in_flight = tuple(draw.randint(1, 5) for _ in assignment.stages)
        put_off = tuple(draw.randint(0, 4) if stage else 0 for stage in range(assignment.num_stages))
        return replace(assignment, in_flight=in_flight, put_off=put_off if any(put_off) else ())


class TriedLimits:
    """Limits that workers are sent in the middle of a run, at any moment and each by itself: any other bits are faults.

    Args:
        seed: of what is drawn, and when.
    """

    _EVERY = 12  # turns, in the mean

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"tried {seed}")
        self.sent = 0

    def drawn(self, protocol: ControllerProtocol) -> tuple[int, m.Limits] | None:
        """A member, and what it is sent in this turn; mostly None: nothing is."""
        draw, mesh, split = self._draw, protocol.placement.mesh, protocol.split
        if draw.random() * self._EVERY > 1 or not protocol.started or split is None:
            return None
        self.sent += 1
        in_flight = tuple(draw.randint(1, 5) for _ in mesh.stages)
        put_off = tuple(draw.randint(0, 4) if stage else 0 for stage in range(mesh.num_stages))
        is_whole = draw.random() < 0.5 or not any(put_off)
        limits = m.Limits(mesh.epoch, () if is_whole else split.layers, () if is_whole else put_off, in_flight)
        return draw.choice(mesh.members), limits


def check_at_point(worker: Worker, point: FaultPoint) -> None:
    """Asserts that a worker puts off no more than its stage may, and that nothing is left over of a decided step."""
    if worker.executor is None or worker.programs is None:
        return
    begun = worker.programs.begun
    if point is FaultPoint.INPUT:
        configuration = worker.executor._steps._configuration  # with the limits that it was told last
        stage = configuration.placement.mesh.stage_of(worker.rank)
        limit = configuration.put_off[stage] if configuration.put_off else 0
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
