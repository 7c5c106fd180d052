"""How the controller notices what happens to workers, and what it makes of it, in simulated time.

A stopped worker is found by missing heartbeats, the end of a process comes as an event, and leaves and joins come as
messages. Nobody is suspected as long as nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elaswave_spmd.controller.actions import End
from elaswave_spmd.controller.events import WorkerEnded
from elaswave_spmd.controller.outcomes import RunFinished, RunStopped
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery.actions import Unrecoverable
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.faults import AnyFault, Fault
from tests.cluster.processes import LostStateError
from tests.cluster.schedules import Outcome, Schedule, cluster_of, undisturbed
from tests.cluster.simulated_io import TURN_S
from tests.cluster.tiny import TinyRun

MESHES = ("dp3", "pp3", "dp2_pp2", "dp3_pp2")
ORDERS = range(3)
RUN = TinyRun(steps=10, microbatches=5)  # 5 micro-batches: uneven on every mesh
LONG = 60  # turns of a stop: longer than timeouts.suspect (25 turns) and all that is on its way


def trained(mesh: str, order: int, faults: Sequence[AnyFault] = (), *, zero: int = 1) -> SimulatedCluster:
    """A cluster that has trained to its end with the undisturbed bits, after all of the faults."""
    cluster = cluster_of(Schedule(order, RUN, mesh, zero, faults=tuple(faults)))
    assert Outcome.of(cluster.run()) == undisturbed(RUN)
    assert isinstance(cluster.controller.outcome, RunFinished)
    assert cluster.plan.num_injected == len(faults)
    return cluster


def kinds_of(cluster: SimulatedCluster) -> dict[int, str]:
    """Rank -> "fail", "leave", "join" or "link", of all workers that changes were about, over all mesh epochs."""
    return {rank: kind for begun in cluster.result.epochs for rank, kind in begun.kinds.items()}


def test_no_loss_takes_a_result_away_that_is_there() -> None:
    """All workers have sent their final pages, and the run waits for the checkpoint that is to be kept."""
    for loss in (Unrecoverable((), "nobody is left"), End(RunStopped(RunError("a worker was killed")))):
        cluster = trained("dp2_pp2", 0)
        controller = cluster.controller
        controller.outcome = None
        controller.execute([loss])
        assert isinstance(controller.outcome, RunFinished)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_happens(mesh: str, zero: int, order: int) -> None:
    """Nobody is suspected as long as nothing is wrong."""
    assert trained(mesh, order, zero=zero).result.epochs == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("point", ["forward", "reduce", "norm", "publish"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_worker_is_killed(mesh: str, point: str, order: int) -> None:
    cluster = trained(mesh, order, [Fault(2, "kill", 1, point)])
    assert kinds_of(cluster) == {1: "fail"}


class _GoneTogether(SimulatedCluster):
    """A cluster in which worker 1 takes worker 2 along, as where their machine is lost: both ends are seen at once."""

    def _exits_later(self, rank: int) -> None:
        assert rank == 1 and 2 in self._workers
        for table in (self._lost, self._window, self._absent):
            table.append(2)
        self._kill(2)
        for gone in (1, 2):
            exited = Exited(gone, 1000 + gone, None, 9)
            self._notices.append((self.turn, WorkerEnded(gone, "killed", self.turn * TURN_S, exited)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("mesh", ["dp4", "dp3_pp2"])
def test_workers_that_are_lost_at_the_same_moment_are_one_change_of_the_mesh(mesh: str, zero: int, order: int) -> None:
    faults = (Fault(2, "kill", 1, "forward"),)
    cluster = cluster_of(Schedule(order, RUN, mesh, zero, mirror_count=2, faults=faults), kind=_GoneTogether)
    assert Outcome.of(cluster.run()) == undisturbed(RUN)
    assert kinds_of(cluster) == {1: "fail", 2: "fail"}
    first = cluster.result.epochs[0]
    assert first.kinds == {1: "fail", 2: "fail"} and first.placement.mesh.epoch == 2
    assert cluster.journal[0][0].epoch == 2, "nobody has heard of the first one"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("point", ["backward", "apply"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_stopped_worker_is_found_by_its_silence(mesh: str, point: str, order: int) -> None:
    """The worker comes back when it belongs to no epoch, and harms nobody."""
    cluster = trained(mesh, order, [Fault(2, "stop", 1, point, turns=10 * LONG)])
    assert kinds_of(cluster) == {1: "fail"}
    assert "no heartbeat for" in cluster.result.epochs[0].reasons[1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_worker_leaves(mesh: str, order: int) -> None:
    cluster = trained(mesh, order, [Fault(2, "term", 1, "forward")])
    assert kinds_of(cluster) == {1: "leave"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_worker_joins(mesh: str, order: int) -> None:
    cluster = trained(mesh, order, [Fault(1, "join", 0, "forward")])
    joined = cluster.first_mesh.num_workers  # the next rank
    assert kinds_of(cluster) == {joined: "join"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_lost_worker_is_replaced(mesh: str, order: int) -> None:
    cluster = trained(mesh, order, [Fault(1, "replace", 1, "backward")])
    assert kinds_of(cluster) == {1: "fail", cluster.first_mesh.num_workers: "join"}


@pytest.mark.parametrize("mesh", MESHES)
def test_too_few_are_left(mesh: str) -> None:
    """The controller has the others save their state, and ends the run."""
    schedule = Schedule(0, RUN, mesh, mirror_count=2, faults=(Fault(3, "kill", 1, "backward"),))
    workers = schedule.placement.mesh.num_workers
    cluster = cluster_of(schedule, min_workers=workers)
    with pytest.raises(LostStateError, match=f"elastic.min_workers is {workers}"):
        cluster.run()
    assert isinstance(cluster.controller.outcome, RunStopped)
    assert "Its state after step" in str(cluster.controller.outcome.error)
