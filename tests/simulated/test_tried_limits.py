"""Workers are told other limits in the middle of a run, each at its own time: the bits of the undisturbed run, through
losses in the middle of both parts of a backward, and through moves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from elaswave_spmd.controller import backward_trial
from elaswave_spmd.controller.events import Received
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.worker.fault_points import FaultPoint
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import Fault
from tests.cluster.processes import Worker
from tests.cluster.schedules import Outcome, Schedule, cluster_of, run, undisturbed
from tests.cluster.tiny import TinyRun
from tests.cluster.wires import Lateness


@pytest.mark.parametrize("seed", range(30))
def test_no_change_of_limits_changes_a_bit_or_stands_still(seed: int) -> None:
    drawn = Schedule.draw(seed, late=True, moving=seed % 3 == 0, miscompute=seed % 4 == 0)
    assert drawn.late is not None
    found = run(replace(drawn, late=replace(drawn.late, tried=seed + 1, limits=0)))
    assert not found.failure, f"{found.failure}: {found.detail}"


class _Watched(SimulatedCluster):
    """A cluster that notes which points of backwards the workers behind the first stage pass in each step."""

    passed: defaultdict[tuple[int, int], set[FaultPoint]]  # of (rank, step)

    def _visit(self, worker: Worker, point: FaultPoint, step: int) -> None:
        super()._visit(worker, point, step)
        if worker.executor is not None and worker.executor.placement.mesh.stage_of(worker.rank):
            self.passed[worker.rank, step].add(point)


def test_workers_do_change_their_limits() -> None:
    """Without this the test above would pass with limits that nobody regards."""
    late = Lateness("backward", 30, 0.0, tried=4)
    schedule = Schedule(seed=1, mesh="dp2_pp2", run=TinyRun(microbatches=6, steps=6), late=late)
    cluster = cluster_of(schedule, kind=_Watched)
    assert isinstance(cluster, _Watched)
    cluster.passed = defaultdict(set)
    cluster.run()
    steps = [points for points in cluster.passed.values() if FaultPoint.BACKWARD in points]
    in_parts = [points for points in steps if FaultPoint.WEIGHTS in points]
    assert 0 < len(in_parts) < len(steps), "some steps with weight gradients put off, some with whole backwards"


@pytest.mark.parametrize(("mesh", "kill"), [("dp2_pp2", ()), ("stages1-3", (Fault(39, "kill", 2, "weights"),))])
def test_a_trial_comes_to_its_end_and_changes_no_bit(
    mesh: str, kill: tuple[Fault, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product's own trial, with short blocks: in virtual time either way may seem to be the faster one."""
    monkeypatch.setattr(backward_trial, "BLOCK", 2)
    schedule = Schedule(seed=1, mesh=mesh, run=TinyRun(microbatches=6, steps=42), faults=kill)
    cluster = cluster_of(schedule)
    assert Outcome.of(cluster.run()) == undisturbed(schedule.run.key)
    found = [fields for kind, fields in cluster.events if kind == "split_backward"]
    assert len(found) == 1 and found[0]["kept"] in ("put off", "whole")
    split, running = cluster.protocol.split, cluster.protocol.running
    assert split is not None and split.keeps_whole == (found[0]["kept"] == "whole") == (running.put_off == ())
    rank, layers = running.stages[0][0], running.layer_cuts[-1]
    newcomer = m.Checked(rank, 0.1, ((0, layers, 5, 6, 7, bytes(16)),), (0,) * layers)
    cluster.controller.decide(Received(newcomer, (), rank), 0.0)
    assert cluster.controller._model_checks.split is not None, "the message was heard"
    assert cluster.protocol.split is split, "what a newcomer says of its layers decides nothing anew"
