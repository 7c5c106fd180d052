"""Random schedules in which the controller dies anywhere, and another one adopts the workers: A1 to A12."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest

from elaswave_spmd.conf.schema import ElasticSettings, ScheduleSettings
from elaswave_spmd.controller.events import Event, Received, WorkerEnded
from elaswave_spmd.controller.model_checks import ModelChecks
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import ProtocolAction
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Predecessor
from elaswave_spmd.recovery.generations import ControllerFence
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo
from elaswave_spmd.worker.context import WorkerHooks
from elaswave_spmd.worker.kept_reports import KeptReports
from tests.cluster.cluster import WAYS, ControllerKilled, SimulatedCluster
from tests.cluster.faults import SENDER, Fault, MessageFault
from tests.cluster.processes import Worker
from tests.cluster.schedules import Schedule, cluster_of, judge, run, run_many, undisturbed
from tests.cluster.simulated_io import TIMEOUTS, TURN_S
from tests.cluster.starting import StartFault, Starting
from tests.cluster.tiny import TinyRun

CHUNK = 30
# Failures that long searches have found, and that are mended.
FAILED_ONCE = {
    181: "a change was under way that a member had answered, and a wish to leave began another one for a later step",
    20115: "a wish to leave began a change that waited for a validation whose losses had died with the controller",
}


def test_no_death_of_a_controller_changes_a_bit_or_gets_stuck() -> None:
    tally = run_many(range(CHUNK), controllers=True)
    assert tally.failures == {}
    assert tally.comebacks > CHUNK // 2 and tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize("kind", ["checkpoints", "moving", "miscompute"])
def test_so_it_is_with_checkpoints_moves_and_workers_that_compute_wrongly(kind: str) -> None:
    tally = run_many(range(1000, 1000 + CHUNK // 2), controllers=True, **{kind: True})
    assert tally.failures == {}
    assert tally.comebacks > CHUNK // 4


def test_workers_of_other_machines_come_back_with_their_agents_or_do_not() -> None:
    found = Counter[str]()
    for seed in range(2000, 2000 + 20):
        schedule = replace(Schedule.draw(seed, controllers=True), hosts=2)
        cluster = cluster_of(schedule)
        how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
        assert how and not failure, (seed, detail)
        found += cluster.agents_back
    assert found.keys() == {*WAYS}, found


@pytest.mark.parametrize(("way", "says"), [("lost and back", "adopted 4 workers"), ("lost", "did not come back")])
@pytest.mark.parametrize("deaths", [(30,), (30, 3)], ids=["one death", "and another one meanwhile"])
def test_workers_that_have_answered_are_lost_only_if_their_agent_is_not_back(
    way: str, says: str, deaths: tuple[int, ...]
) -> None:
    """The connection to the agent alone has ended: its workers live, and answer the controller."""
    schedule = Schedule(1, TinyRun(), hosts=2, mirror_count=2, deaths=deaths)
    cluster = cluster_of(schedule)
    cluster.agents_come = (way,)
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert how == "bits" and not failure, detail
    *_, (_, last) = [event for event in cluster.events if event[0] == "controller"]
    assert says in str(last["message"])
    assert cluster.agents_back == {way: len(deaths)}
    lost = [str(fields["message"]) for kind, fields in cluster.events if kind == "fail"]
    assert bool(lost) == (way == "lost") and all("its machine has not come back" in message for message in lost)


@pytest.mark.parametrize("seed", FAILED_ONCE, ids=list(FAILED_ONCE.values()))
def test_what_failed_once(seed: int) -> None:
    ended = run(Schedule.draw(seed, controllers=True))
    assert ended.how and not ended.failure, ended.detail


@pytest.mark.parametrize("spares", [1, 2])
def test_spares_are_spares_once_more_and_the_mesh_is_no_larger(spares: int) -> None:
    """Nothing tells spares from workers that were to join, which are started anew as such."""
    starting = Starting(elastic=ElasticSettings(spares=spares))
    schedule = Schedule(1, TinyRun(), "dp2_pp2", starting=starting, deaths=(90, 90))
    cluster = cluster_of(schedule)
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert how == "bits" and not failure, detail
    assert cluster.result.comebacks == 2
    assert cluster.protocol.placement.mesh.members == (0, 1, 2, 3)
    kinds = [kind for kind, _ in cluster.events]
    assert "spare" in kinds[kinds.index("controller") :]


@pytest.mark.parametrize("seed", range(2))
def test_a_replacement_in_the_first_mesh_may_be_lost_with_its_machine_and_the_controller(seed: int) -> None:
    """No Prepare has told the journal of its rank, but the others name it: their links to it have ended."""
    faults = StartFault("kill", 1, "import"), StartFault("kill", 2, "import")
    starting = Starting(faults, ElasticSettings(replace=True, replacements_per_minute=20))
    schedule = Schedule(seed, TinyRun(), hosts=2, mirror_count=2, starting=starting, deaths=(13,))
    cluster = cluster_of(schedule)
    cluster.agents_come = ("gone",)
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert how == "bits" and not failure, detail
    told = {kind: str(fields["message"]) for kind, fields in cluster.events if kind in ("begin", "controller")}
    assert "workers 0, 3, 4, 5" in told["begin"]
    assert "adopted 2 workers; workers 3, 5 did not come back" in told["controller"]
    assert {*cluster.protocol.placement.mesh.members} == {0, 4, 6, 7}, "no rank is given twice"
    assert cluster.journal[-1][1] == 8, "nor by the next controller"


SLOW = 9


class OneHasLeft(SimulatedCluster):
    """A cluster that a worker has left when the controller dies. It still writes its shard, and hears nothing."""

    then: Event | None = None  # what is heard of it once the next controller has adopted the others
    looks = 0  # for shards on the disk

    def __init__(self, *args: Any, **options: Any) -> None:
        self.killed: list[int] = []
        super().__init__(*args, **options)

    def _make_controller(self, adoption: Adoption | None) -> None:
        if adoption is not None:
            adoption = replace(adoption, pids={**adoption.pids, SLOW: 0}, made=(*adoption.made, SLOW), next_rank=10)
        super()._make_controller(adoption)
        find = self._io.find_shards

        def found() -> list[ShardInfo]:
            self.looks += 1
            return find()

        self._io.find_shards = found

    def take_turn(self) -> None:
        super().take_turn()
        if self.then is not None and self.looks:
            self._io.events.append(self.then)
            self.then = None

    def kill_for_certain(self, rank: int) -> None:
        self.killed.append(rank)
        super().kill_for_certain(rank)


@pytest.mark.parametrize(
    ("then", "looks", "killed"),
    [
        (None, 1, []),
        (WorkerEnded(SLOW, "it has ended", 0.0), 2, []),  # what it has written counts
        (Received(m.Adopted(SLOW, 2, 0, -1, b""), (), SLOW), 1, [SLOW]),  # it would wait for this controller
    ],
    ids=["it writes on", "it ends", "it answers late"],
)
def test_nobody_waits_for_a_worker_that_has_left(then: Event | None, looks: int, killed: list[int]) -> None:
    schedule = Schedule(1, TinyRun(), deaths=(60,))
    cluster = cluster_of(schedule, kind=OneHasLeft)
    assert isinstance(cluster, OneHasLeft)
    cluster.then = then
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert how == "bits" and not failure, detail
    assert cluster.result.comebacks == 1 and cluster.turn * TURN_S < TIMEOUTS.shutdown
    assert cluster.looks == looks and [rank for rank in cluster.killed if rank == SLOW] == killed


class HalfTold(SimulatedCluster):
    """A cluster whose controller is killed when it has sent the second Reconfigure to one of its members."""

    was_killed = False

    def from_controller(self, rank: int, header: bytes) -> None:
        super().from_controller(rank, header)
        is_told = isinstance(m.decode(header), m.PackedReconfigure)
        if is_told and self.protocol.placement.mesh.epoch and not self.was_killed:
            self.was_killed = True
            raise ControllerKilled


def half_told(seed: int) -> bool:
    """Runs one. Returns True if all bits are those of the undisturbed run."""
    fault = MessageFault("kill", "Applied", SENDER, True, 2 + seed)
    schedule = Schedule(seed, TinyRun(), zero=2, mirror_count=2, faults=(fault,), deaths=(10**9,))
    cluster = cluster_of(schedule, kind=HalfTold)
    assert isinstance(cluster, HalfTold)
    how, failure, _ = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert cluster.was_killed and cluster.result.comebacks == 1
    return how == "bits" and not failure


@pytest.mark.parametrize("seed", range(3))
def test_a_reconfigure_that_some_members_have_comes_to_the_others(seed: int) -> None:
    assert half_told(seed)


def test_without_that_members_wait_for_each_other_in_two_mesh_epochs() -> None:
    """So the test above can fail."""
    come_back = ControllerProtocol.come_back

    def without(self: ControllerProtocol, before: Predecessor) -> list[ProtocolAction]:
        return come_back(self, replace(before, lacking=()))

    with mock.patch.object(ControllerProtocol, "come_back", without):
        assert not half_told(1)


class Measuring(SimulatedCluster):
    """A cluster with little memory whose workers have checked their model: controllers that come back know what its
    layers keep by the workers alone."""

    in_flight: list[tuple[int, ...]]  # the limits in flight with which each mesh epoch after a comeback began
    memory: dict[int, list[tuple[int, int, int]]]  # rank -> the memory of layers that it has reported

    def _make_controller(self, adoption: Adoption | None) -> None:
        super()._make_controller(adoption)
        controller = self.controller
        limited = replace(controller._plan.settings, schedule=ScheduleSettings(memory_limit=1.0))
        controller._model_checks = ModelChecks(replace(controller._plan, settings=limited))
        if adoption is None:
            self.in_flight, self.memory = [], defaultdict(list)
        else:
            controller.protocol.split = None  # it is found out only now

    def _facts_of(self, worker: Worker) -> Callable[[Iterable[int]], m.Adopted] | None:
        facts, layers = super()._facts_of(worker), len(self._description.layout.layers)
        assert facts is not None
        checked = m.Checked(worker.rank, 0.1, ((0, layers, 5, 6, 7, bytes(16)),), (0,) * layers)
        return lambda members: msgspec.structs.replace(facts(members), checked=checked)

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        def measured(step: int, rows: object, weights: object, memory: Sequence[tuple[int, int, int]]) -> None:
            self.memory[worker.rank].extend(memory)

        return replace(super()._hooks_of(worker), step_measured=measured)

    def epoch_begun(self) -> None:
        super().epoch_begun()
        if self.result.comebacks:
            self.in_flight.append(self.protocol.running.limits)


def test_a_controller_that_comes_back_is_told_of_the_memory_that_layers_take() -> None:
    schedule = Schedule(1, TinyRun(microbatches=6, steps=8), "dp2_pp2", deaths=(30, 30))
    cluster = cluster_of(schedule, kind=Measuring)
    assert isinstance(cluster, Measuring)
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert how == "bits" and not failure, detail
    assert cluster.result.comebacks == 2
    assert {*cluster.in_flight} == {(1, 1)}, "no more micro-batches than there is memory for, from the first mesh on"
    assert cluster.memory.keys() == {0, 1, 2, 3}
    for rows in cluster.memory.values():
        # At most once to each controller: the second one may have died before the end of a step.
        assert {*Counter(rows).values()} <= {2, 3} and len({*rows}) == len({layer for layer, *_ in rows})


class DyingAgain(SimulatedCluster):
    """A cluster whose controller is killed when the run has begun again at step 8, and has done one step anew."""

    was_killed = False

    def controller_acts(self) -> None:
        super().controller_acts()
        if self.result.restarts and self.protocol.version == 9 and not self.was_killed:
            self.was_killed = True
            raise ControllerKilled


@pytest.mark.parametrize("seed", range(3))
def test_a_death_while_steps_are_done_a_second_time_goes_back_to_the_checkpoint(seed: int) -> None:
    fault = Fault(14, "kill", 0, "forward")
    steps = TinyRun(steps=16)
    schedule = Schedule(seed, steps, mirror_count=0, faults=(fault,), checkpoint_every=8, deaths=(10**9,))
    cluster = cluster_of(schedule, kind=DyingAgain)
    assert isinstance(cluster, DyingAgain)
    how, failure, detail = judge(schedule, cluster, undisturbed(schedule.run.key))
    assert cluster.was_killed and cluster.result.comebacks == 1
    assert cluster.result.restarts == [8, 8], "the steps up to 13 had been done"
    assert how == "bits" and not failure, detail


def test_without_the_fence_messages_of_the_past_are_followed() -> None:
    def admitted(self: ControllerFence, message: m.AnyMessage) -> m.AnyMessage | None:
        if isinstance(message, m.Adopt):
            self.generation = max(self.generation, message.generation)
            return message
        if isinstance(message, m.OfGeneration):
            message = m.decode(message.data)
        return self.unpacker.unpacked(message) if isinstance(message, m.PackedReconfigure) else message

    with mock.patch.object(ControllerFence, "admitted", admitted):
        assert any(run(Schedule.draw(seed, controllers=True)).failure for seed in (8, 11, 13))


def test_without_kept_reports_steps_are_not_written_down() -> None:
    with mock.patch.object(KeptReports, "keep", lambda self, message: None):
        assert any(run(Schedule.draw(seed, controllers=True)).failure for seed in (0, 2, 6))


def test_a_worker_that_was_cut_off_from_the_controller_before_counts_as_lost_when_it_is_missed() -> None:
    """Its agent is back with the next controller, which hears nothing of it: with the worker that dies then, two are
    lost at once. The simulated cluster had counted one, and took a true loss of all replicas for a false one. Since the
    controller's clock goes as far as it has read, this schedule loses one at a time, and keeps its state."""
    found = run(Schedule.draw(20158, controllers=True))
    assert not found.failure, (found.failure, found.detail)
