"""The state of each worker in words, as the live view shows it, from the start of a run through its changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.controller.worker_states import WorkerStates
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, ProtocolSpec
from elaswave_spmd.recovery.messages import Ready, StepReport
from elaswave_spmd.run_dir.workers_now import WorkerNow
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.annotations import Shardings
from tests.unit.controller.test_administration import LAYOUT, REPLICAS


class World:
    """A run of workers 0 and 1 on stage 0 and worker 2 on stage 1."""

    def __init__(self, elastic: ElasticSettings | None = None) -> None:
        mesh = Mesh.initial(MeshShape.of_stages((2, 1)))
        placement = Placement(mesh, 4, (0, 1, 2), ((3, 1), (4,)), Shardings(), replicas=REPLICAS)
        self.protocol = ControllerProtocol(placement, ProtocolSpec(LAYOUT, 9))
        self.roster = Roster(mesh.members)
        for rank in mesh.members:
            self.roster.add(rank, 100 + rank)
        self.measured = SimpleNamespace(slow=set[int](), speeds=dict[int, float]())
        self.replacements = Replacements(ReplacementPolicy.from_settings(elastic or ElasticSettings()), self.roster)
        self.states = WorkerStates(self.protocol, self.roster, self.replacements, cast(Any, self.measured))

    def start(self) -> None:
        for rank in (0, 1, 2):
            self.protocol.ready(Ready(rank, "address"))

    def answer(self, *ranks: int) -> None:
        """The members report where they are, and the next mesh epoch begins."""
        for rank in ranks:
            self.protocol.report_received(StepReport(self.protocol.last_epoch, rank, self.protocol.version))

    def shown(self) -> dict[int, tuple[int | None, str]]:
        return {worker.rank: (worker.stage, worker.state) for worker in self.states.now().workers}


def test_workers_start_and_train_with_their_micro_batches_and_speeds() -> None:
    world = World()
    assert world.shown() == {0: (0, "starting"), 1: (0, "starting"), 2: (1, "starting")}
    world.protocol.ready(Ready(1, "address"))
    assert world.shown()[1] == (0, "ready")
    world.start()
    world.measured.speeds.update({0: 1.0, 2: 0.5})
    world.measured.slow.add(2)
    now = world.states.now()
    assert now.workers == (
        WorkerNow(0, "training", 0, 3, 1.0),
        WorkerNow(1, "training", 0, 1, None),
        WorkerNow(2, "slow", 1, 4, 0.5),
    )
    assert (now.mesh, now.epoch, now.layer_cuts, now.is_changing) == ("stages2-1", 0, (0, 1, 2), False)


def test_a_lost_worker_stays_in_view_and_the_others_learn_what_it_had() -> None:
    world = World()
    world.start()
    world.protocol.lost(1, "killed")
    world.states.removed(1, lost=True)
    world.roster.remove(1)
    assert world.shown()[1] == (0, "lost") and world.states.now().is_changing
    world.answer(0, 2)
    assert world.states.now().epoch == 1
    assert world.shown()[1] == (0, "lost"), "it is no member of the mesh any more"
    assert {world.shown()[rank][1] for rank in (0, 2)} <= {"training", "learner"}
    assert [rank for rank, (_, state) in world.shown().items() if state == "learner"] == sorted(world.protocol.learners)


def test_a_worker_that_leaves_is_leaving_and_then_has_left() -> None:
    world = World()
    world.start()
    world.protocol.drain(1, "asked to leave")
    assert world.shown()[1] == (0, "leaving")
    world.states.removed(1, lost=False)
    world.roster.remove(1)
    assert world.shown()[1] == (0, "left")


def test_newcomers_and_spares_are_beside_the_mesh() -> None:
    world = World(ElasticSettings(spares=1))
    world.start()
    (spare,), _ = world.replacements.due(0.0, spares=True)
    world.roster.add(spare, 200)
    (newcomer,) = world.roster.allocate(1)
    world.roster.add(newcomer, 201)
    assert (world.shown()[spare], world.shown()[newcomer]) == ((None, "starting"), (None, "starting"))
    assert world.replacements.ready(Ready(spare, "address"))
    world.protocol.addresses[newcomer] = "address"
    assert (world.shown()[spare], world.shown()[newcomer]) == ((None, "spare"), (None, "joining"))


def test_of_many_workers_that_have_gone_the_last_are_shown() -> None:
    world = World()
    world.start()
    world.states.now()
    for _ in range(1000):
        world.states.removed(1, lost=True)
    assert len([worker for worker in world.states.now().workers if worker.is_gone]) == 16
