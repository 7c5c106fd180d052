"""The controller's decisions about workers that fail or are lost, with a made-up protocol."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller.actions import (
    Action,
    End,
    FindCheckpoint,
    GoBack,
    Kill,
    LinkFailed,
    Record,
    RecordLostWorker,
    ReportExits,
    Spawn,
)
from elaswave_spmd.controller.events import (
    CheckpointFound,
    Event,
    ExitsReported,
    Received,
    StopRequested,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.failures import FailureHandler, FailurePolicy, SaveEnded
from elaswave_spmd.controller.outcomes import RestartFrom, RunStopped
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.controller.stopping import Stopping
from elaswave_spmd.errors import ModelError, RunError, StoppedBySignal, WorkerError
from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.actions import RemoveMember, Save, Unrecoverable
from elaswave_spmd.recovery.failure_detector import Suspect
from elaswave_spmd.recovery.messages import Applied, Failed, Ready, Refused
from elaswave_spmd.recovery.standstill import Standstill
from elaswave_spmd.recovery.tick_clock import TickClock
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.sharding.replicas import ReplicaSet


class World:
    """Workers 0 and 1 are members, 2 is a newcomer; keeps what is decided about losses."""

    def __init__(
        self, *, mesh: Mapping[str, Any] | None = None, optim: Mapping[str, Any] | None = None, **elastic: Any
    ) -> None:
        self.roster = Roster([0, 1, 2])
        for rank in (0, 1, 2):
            self.roster.add(rank, None)
        self.told: list[tuple[int, str]] = []
        self.awaited: list[int | None] = []  # for each of these losses, the replacement that the first mesh waits for
        self.spares_used: list[int] = []
        self.relinked: list[tuple[set[int], str]] = []
        self.num_relinks = 0
        self.missed: list[set[int]] = []
        self.num_sent_again = 0
        self.alone: set[int] = set()  # members without whom state would be lost
        self.stops: list[tuple[str, bool]] = []  # reasons for which the run stops with its state saved; at once or not
        members = Mesh.initial(MeshShape.of_stages((2,)))
        self.protocol = SimpleNamespace(
            started=True,
            version=4,
            steps=9,
            stops=False,
            is_validating=False,
            is_saving=False,
            addresses={0: "a", 1: "b"},
            placement=SimpleNamespace(mesh=members),
            members=(0, 1),
            lost=self.lost,
            holds_alone=lambda rank: rank in self.alone,
            stop=self.stop,
            relink=self.relink,
            send_again=self.send_again,
            missed=lambda ends: self.missed.append(set(ends)),
        )
        settings = Settings.from_dict({"elastic": elastic, "mesh": mesh or {"dp": 2}, "optim": optim or {}})
        self.replacements = Replacements(ReplacementPolicy.from_settings(settings.elastic), self.roster)
        self.losses = FailureHandler(
            FailurePolicy.from_settings(settings),
            cast(Any, self.protocol),
            self.roster,
            self.replacements,
            Path("run"),
        )
        self.actions: list[Action] = []
        self.checkpoint: Any = None
        self.now = 1.0

    def lost(self, rank: int, reason: str, spare: Any = None, replacement: int | None = None) -> list[Any]:
        self.told.append((rank, reason))
        self.awaited.append(replacement)
        self.spares_used += [spare.rank] if spare is not None else []
        return []

    def stop(self, reason: str, *, at_once: bool = False) -> list[Any]:
        self.stops.append((reason, at_once))
        return []

    def saved(self, why_not: str = "") -> None:
        """The state is saved, or cannot be."""
        self.do(self.losses.end(SaveEnded(Save(4, 1, self.stops[0][0]), why_not), self.now))

    def relink(self, links: Mapping[frozenset[int], str]) -> list[Any]:
        self.num_relinks += 1
        self.relinked += [(set(ends), reason) for ends, reason in links.items()]
        return []

    def send_again(self) -> list[Any]:
        self.num_sent_again += 1
        return []

    def do(self, actions: Iterable[Action]) -> None:
        """Keeps the actions, and answers those that ask for something. Raises the error with which the run stops."""
        for action in actions:
            self.actions.append(action)
            match action:
                case End(RunStopped(error)):
                    raise error
                case ReportExits():
                    self.happens(ExitsReported())
                case FindCheckpoint():
                    self.happens(CheckpointFound(self.checkpoint))
                case LinkFailed(_, rank, reason):  # of workers on one machine
                    self.do(self.losses.cannot_reach(rank, reason, self.now))

    def happens(self, event: Event) -> None:
        self.do(self.losses.decide_while_ending(event, self.now))

    def failed(self, message: Failed) -> None:
        if self.losses.is_ending:
            self.happens(Received(message, (), message.rank))
        else:
            self.do(self.losses.failed(message, self.now))

    def gone(self, event: WorkerEnded) -> None:
        if self.losses.is_ending:
            self.happens(event)
        else:
            self.do(self.losses.worker_ended(event))

    def live(self, *ranks: int) -> None:
        for rank in (*ranks, *ranks):
            self.do(self.losses.heartbeat(rank, self.now, is_relayed=False))
        self.do(self.losses.open_links())

    def exits(self, rank: int, code: int | None = None, signal: int | None = None) -> None:
        exited = Exited(rank, 70 + rank, code, signal)
        self.gone(WorkerEnded(rank, str(exited), self.now, exited))

    def time_passes(self) -> None:
        """Long enough for everything that is waited for."""
        self.now += 60.0
        self.happens(Tick())

    def records(self, kind: str) -> list[Mapping[str, Any]]:
        return [action.fields for action in self.actions if isinstance(action, Record) and action.kind == kind]

    @property
    def spawned(self) -> list[int]:
        return [rank for action in self.actions if isinstance(action, Spawn) for rank in action.ranks]

    @property
    def reported(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, RecordLostWorker)]

    @property
    def ended(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, Kill)]

    @property
    def newcomers_lost(self) -> list[tuple[int, object]]:
        records = [action.fields for action in self.actions if isinstance(action, Record) and action.kind == "fail"]
        return [(rank, fields["reason"]) for fields in records for rank in cast(list[int], fields["ranks"])]


@pytest.mark.parametrize(("most", "ends"), [(0, []), (1, [1]), (3, [3])])
def test_so_many_steps_in_a_row_without_an_update_end_the_run_and_with_0_none(most: int, ends: list[int]) -> None:
    world, ended = World(optim={"max_skipped": most}), []
    for step in range(1, 51):
        world.do(world.losses.committed(Applied(step, 0, 0, math.nan, math.nan, updated=False), world.now))
        if world.stops:
            ended.append(step)
            break
    assert ended == ends


def test_a_loss_is_told_once() -> None:
    world = World()
    world.exits(1, signal=9)
    world.exits(1, signal=9)
    world.failed(Failed(1, "late words", 5))
    assert [rank for rank, _ in world.told] == world.reported == [1] and sorted(world.roster.pids) == [0, 2]
    assert "SIGKILL" in world.told[0][1] and not world.spawned


def test_a_lost_member_is_replaced_and_so_is_a_newcomer() -> None:
    world = World(replace=True)
    world.exits(0, signal=9)
    world.exits(2, signal=9)
    assert world.spawned == [3, 4]
    assert world.newcomers_lost == [(2, "worker 2 (pid 72) was ended by signal 9 (SIGKILL)")]
    assert world.reported == [0] and [rank for rank, _ in world.told] == [0, 2] and sorted(world.roster.pids) == [1]
    assert world.ended == [2], "it may only be late: it must not come when the mesh has given it up"


def test_nobody_is_started_at_once_where_there_was_no_room_for_the_last_one() -> None:
    world = World(replace=True)
    world.exits(1, signal=9)
    assert world.spawned == [3]
    world.roster.add(3, None)
    world.do(world.losses.not_started(3, "no memory", world.now))
    assert world.spawned == [3] and world.newcomers_lost == [(3, "it could not be started: no memory")]
    world.do(world.losses.replace_lost(world.now))  # with the next tick
    assert world.spawned == [3, 4]


def test_a_newcomer_that_cannot_be_started_ends_a_run_that_survives_no_loss() -> None:
    with pytest.raises(RunError, match="worker 2: it could not be started: no memory"):
        (world := World(enabled=False)).do(world.losses.not_started(2, "no memory", world.now))


def test_an_exception_is_a_lost_device_until_it_repeats_in_the_same_step() -> None:
    world = World()
    world.failed(Failed(0, "Traceback ...\nValueError: first", 5))
    assert world.told == [(0, "an exception: ValueError: first")]
    world.failed(Failed(1, "ValueError: second", 5))
    assert len(world.told) == 1, "worker 1 keeps its state until it is saved"
    assert world.stops == [("worker 0 failed: ValueError: first", True)]
    with pytest.raises(WorkerError) as caught:
        world.saved()
    assert (caught.value.rank, caught.value.report) == (0, "Traceback ...\nValueError: first")
    assert str(caught.value).endswith("Its state after step 4 is in run/checkpoints/step_00000004")


def test_that_the_first_one_was_ended_for_certain_does_not_hide_the_bug() -> None:
    world = World()
    world.failed(Failed(0, "ValueError: first", 5))
    world.failed(Failed(1, "ValueError: second", 5))
    world.exits(0, signal=9)
    with pytest.raises(WorkerError, match="ValueError: first"):
        world.saved()


def test_an_exception_of_the_only_one_with_some_state_ends_the_run_with_that_saved() -> None:
    world = World()
    world.alone.add(1)
    world.failed(Failed(1, "ValueError: second", 5))
    assert not world.told and world.stops == [("worker 1 failed: ValueError: second", True)]
    world.failed(Failed(1, "ValueError: second", 5))  # in the mesh epoch of another change
    world.failed(Failed(0, "ValueError: another", 5))
    assert not world.told and len(world.stops) == 1
    with pytest.raises(WorkerError, match="worker 1 failed") as caught:
        world.saved("not within 60 s")
    assert str(caught.value).endswith("Its state after step 4 could not be written: not within 60 s")


def test_whoever_should_save_the_state_and_ends_leaves_the_exception_as_the_cause() -> None:
    world = World(enabled=False)
    world.failed(Failed(0, "ValueError: first", 5))
    with pytest.raises(WorkerError, match="ValueError: first"):
        world.exits(0, code=1)
    world = World()
    world.failed(Failed(0, "ValueError: first", 5))
    world.failed(Failed(1, "ValueError: second", 5))
    world.exits(1, code=1)
    world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))
    with pytest.raises(WorkerError, match="ValueError: first"):
        world.time_passes()


def test_an_exception_after_the_last_step_has_nothing_to_save() -> None:
    world = World(enabled=False)
    world.protocol.version = world.protocol.steps
    with pytest.raises(WorkerError, match="ValueError: first"):
        world.failed(Failed(0, "ValueError: first", 9))
    assert not world.stops


def test_exceptions_in_different_steps_are_different_devices() -> None:
    world = World()
    world.failed(Failed(0, "ValueError", 5))
    world.failed(Failed(1, "ValueError", 6))
    assert len(world.told) == 2


@pytest.mark.parametrize("how", [{"signal": 11}, {"code": 3}])
def test_a_crash_that_repeats_in_the_same_step_is_a_bug(how: dict[str, int]) -> None:
    world = World()
    world.exits(0, **how)
    world.exits(1, **how)
    assert [rank for rank, _ in world.told] == [0, 1]
    with pytest.raises(
        RunError, match=r"worker 1 .*, as worker 0 did in the same step 5\. Its state after step 4 is in"
    ):
        world.saved()


def test_kills_in_the_same_step_come_from_outside() -> None:
    world = World()
    world.exits(0, signal=9)
    world.exits(1, signal=15)
    assert len(world.told) == 2


def test_newcomers_that_cannot_start_harm_nobody() -> None:
    world = World()
    for rank in world.roster.allocate(3):
        world.roster.add(rank, None)
    world.failed(Failed(2, "ImportError", 0))
    world.failed(Failed(3, "ImportError", 0))
    world.exits(4, signal=11)
    world.exits(5, signal=11)
    assert [rank for rank, _ in world.newcomers_lost] == [2, 3, 4, 5]
    assert sorted(world.roster.pids) == [0, 1] and not world.reported


def test_who_was_let_go_may_end_as_it_likes() -> None:
    world = World()
    world.protocol.placement.mesh = Mesh.initial(MeshShape.of_stages((1,)))
    world.roster.remove(1)
    world.failed(Failed(1, "ValueError", 5))
    world.exits(1, code=1)
    assert not world.told and not world.newcomers_lost


def starting(**elastic: Any) -> World:
    """Workers 0 and 1 are those of the first mesh, and start."""
    world = World(**elastic)
    world.protocol.started = False
    world.protocol.addresses = {}
    world.roster.remove(2)
    return world


def test_whoever_is_killed_while_workers_start_is_lost() -> None:
    world = starting()
    world.gone(WorkerEnded(1, "its process ended", 1.0))  # by a death watch: it may be a crash
    assert not world.told
    world.exits(1, signal=9)
    assert [rank for rank, _ in world.told] == [1] and world.awaited == [None] and not world.spawned
    (record,) = [action for action in world.actions if isinstance(action, Record)]
    assert (record.kind, record.fields["phase"], record.fields["ranks"]) == ("fail", "start", [1])


def test_the_first_mesh_waits_for_a_replacement_but_not_for_ever() -> None:
    world = starting(replace=True)
    for rank in (1, 3, 4, 5):
        for new in set(world.spawned) - set(world.roster.pids):
            world.roster.add(new, None)
        world.exits(rank, signal=9)
    assert world.spawned == [3, 4, 5, 6], "each is replaced"
    assert world.awaited == [3, 4, None, None]


def test_the_first_mesh_waits_for_one_replacement_of_a_worker_that_is_late() -> None:
    world = starting(replace=True)
    world.do(world.losses.suspected([Suspect(1, "not ready after 300.0 s")], world.now))
    world.roster.add(3, None)
    world.do(world.losses.suspected([Suspect(3, "not ready after 300.0 s")], world.now))
    assert world.awaited == [3, None] and world.spawned == [3, 4]
    assert world.ended == [1, 3], "they may live, and the first mesh may know nothing of them"


def test_who_is_ready_and_silent_is_not_late() -> None:
    world = starting(replace=True)
    for rank, new in ((1, 3), (3, 4)):
        world.protocol.addresses = {rank: "a"}
        world.do(world.losses.suspected([Suspect(rank, "no heartbeat for 2.0 s")], world.now))
        world.roster.add(new, None)
    assert world.awaited == [3, 4]


@pytest.mark.parametrize("signal", [11, 6])
def test_a_crash_that_repeats_while_workers_start_is_a_bug(signal: int) -> None:
    world = starting(replace=True)
    world.exits(1, signal=signal)
    assert [rank for rank, _ in world.told] == [1] and world.awaited == [3]
    world.roster.add(3, None)
    with pytest.raises(RunError, match=r"worker 3 .*, as worker 1 did while workers started"):
        world.exits(3, signal=signal)


def test_who_leaves_while_workers_start_is_lost() -> None:
    world = starting()
    world.exits(1, code=0)  # by SIGTERM
    assert [rank for rank, _ in world.told] == [1]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_exception_while_workers_start_ends_the_run(enabled: bool) -> None:
    world = starting(enabled=enabled)
    world.exits(1, code=7)  # its own report may come
    with pytest.raises(RunError, match=r"worker 1 .* exit code 7"):
        world.time_passes()
    world = starting(enabled=enabled)
    with pytest.raises(WorkerError, match="ValueError"):
        world.failed(Failed(0, "ValueError", 0))
    world = starting(enabled=enabled)
    world.exits(1, code=1)
    with pytest.raises(WorkerError, match="ValueError: the cause"):
        world.failed(Failed(1, "ValueError: the cause", 0))
    assert not world.told


REFUSAL = {"what": "layer block0 draws from torch's generator", "rule": "keys", "fix": "KeyedDropout(p)"}


@pytest.mark.parametrize("elastic", [{"enabled": False}, {"replace": True}, {"spares": 2}])
def test_a_refusal_ends_the_start_and_is_no_loss(elastic: dict[str, Any]) -> None:
    world = starting(**elastic)
    with pytest.raises(ModelError) as caught:
        world.do(world.losses.refused(Refused(1, REFUSAL), 1.0))
    assert caught.value.fields() == REFUSAL
    world = starting(**elastic)
    world.exits(1, code=1)  # the end of its process is seen before the refusal has come
    assert not world.told and not world.spawned
    with pytest.raises(ModelError) as caught:
        world.happens(Received(Refused(1, REFUSAL), (), 1))
    assert caught.value.fields() == REFUSAL
    assert not world.told and not world.spawned and not world.newcomers_lost


def test_a_newcomer_that_refuses_or_computes_otherwise_harms_nobody() -> None:
    """The run has been accepted by its members, so the newcomer alone is at fault."""
    world = World()
    world.do(world.losses.refused(Refused(2, REFUSAL), 1.0))
    (newcomer,) = world.roster.allocate(1)
    world.roster.add(newcomer, None)
    world.do(world.losses.computes_otherwise(newcomer, ModelError("layer block0 computes other bits"), 1.0))
    reasons = [(2, f"refused: {REFUSAL['what']}"), (newcomer, "layer block0 computes other bits")]
    assert world.newcomers_lost == reasons and sorted(world.roster.pids) == [0, 1]


def test_other_bits_on_a_worker_that_starts_end_the_start() -> None:
    world = starting(replace=True)
    with pytest.raises(ModelError, match="other bits"):
        world.do(world.losses.computes_otherwise(1, ModelError("layer block0 computes other bits"), 1.0))
    assert not world.told and not world.spawned


def test_workers_of_a_run_that_is_not_elastic_are_late() -> None:
    world = starting(enabled=False)
    with pytest.raises(RunError, match="workers 0, 1 did not start within 300 s"):
        world.do(world.losses.suspected([Suspect(0, "not ready"), Suspect(1, "not ready")], world.now))


def spares_of(world: World, *ranks: int) -> None:
    """These spares, the only ones, have been started and are ready."""
    world.do(world.losses.replace_lost(world.now))
    for rank in ranks:
        world.roster.add(rank, None)
        assert world.replacements.ready(Ready(rank, "s"))


def test_a_spare_takes_the_place_of_a_lost_member_and_another_one_is_started() -> None:
    world = World(spares=1)
    spares_of(world, 3)
    world.exits(1, signal=9)
    assert world.spares_used == [3] and world.spawned == [3, 4] and world.replacements.spares == {4: False}
    world.exits(2, signal=9)  # a newcomer; the next spare is not ready yet
    assert world.spares_used == [3] and world.spawned == [3, 4, 5]
    world.roster.add(4, None)
    world.roster.add(5, None)
    assert not world.replacements.ready(Ready(4, "a")), "it goes to the place"
    assert world.replacements.ready(Ready(5, "a"))


def test_a_spare_that_dies_is_noticed_and_replaced() -> None:
    world = World(spares=2)
    spares_of(world, 3, 4)
    world.exits(3, signal=9)
    assert world.told == [(3, world.told[0][1])] and not world.spares_used and not world.reported
    (record,) = [action for action in world.actions if isinstance(action, Record)]
    assert (record.kind, record.fields["phase"]) == ("fail", "spare")
    assert RemoveMember(3, lost=True) in world.actions and world.spawned == [3, 4, 5]
    world.exits(0, signal=9)
    assert world.spares_used == [4]


def test_nobody_is_started_for_a_run_that_ends() -> None:
    for name, value in (("version", 9), ("stops", True)):
        world = World(replace=True)
        setattr(world.protocol, name, value)
        world.exits(1, signal=9)
        assert not world.spawned


@pytest.mark.parametrize("started", [True, False])
def test_what_is_not_survived_ends_the_run(started: bool) -> None:
    def make() -> World:
        world = World(enabled=False)
        world.protocol.started = started
        return world

    world = make()
    with pytest.raises(RunError, match=r"worker 1 .* signal 9"):
        world.exits(1, signal=9)
    world = make()
    world.exits(1, code=7)  # its own report may come
    with pytest.raises(RunError, match=r"worker 1 .* exit code 7"):
        world.time_passes()
    world = make()
    with pytest.raises(WorkerError, match="ValueError"):
        world.failed(Failed(0, "ValueError", 1))
        assert started
        world.saved()
    assert not world.told


def test_a_report_that_comes_after_an_exit_that_ends_the_run_is_shown() -> None:
    world = World(enabled=False)
    world.exits(1, code=1)
    world.failed(Failed(0, "ValueError: a consequence", 1))
    with pytest.raises(WorkerError, match="ValueError: the cause"):
        world.failed(Failed(1, "ValueError: the cause", 1))


def test_a_worker_that_is_killed_meanwhile_is_the_cause() -> None:
    world = World(enabled=False)
    world.exits(1, code=1)
    with pytest.raises(RunError, match=r"worker 0 .* signal 9"):
        world.exits(0, signal=9)


def test_who_asks_to_leave_before_there_is_a_mesh_stops_nothing() -> None:
    """No worker of ours does; one that has gone wrong must not end the controller."""
    protocol = SimpleNamespace(started=False, stop=lambda _: pytest.fail("nothing is there to be saved"))
    assert Stopping(cast(Any, protocol), cast(Any, None), World().losses, TickClock(0.1, 0.0), 1.0).left_alone(0) == []


def test_who_asks_for_the_end_while_workers_are_adopted_hears_of_it_and_asked_again_it_comes_at_once() -> None:
    world = World()
    stopping = Stopping(cast(Any, world.protocol), cast(Any, None), world.losses, TickClock(0.1, 0.0), 1.0)
    (told,) = stopping.requested_early(StopRequested("SIGTERM"), 300.0)
    assert isinstance(told, Record) and told.kind == "signal" and "300 s at most" in str(told.fields["message"])
    (end,) = stopping.requested_early(StopRequested("SIGINT"), 300.0)
    assert isinstance(end, End) and isinstance(end.outcome, RunStopped)
    assert isinstance(end.outcome.error, StoppedBySignal) and "SIGINT" in str(end.outcome.error)


def test_the_wish_to_end_of_before_the_adoption_is_the_first_one_after_it() -> None:
    world = World()
    stopping = Stopping(cast(Any, world.protocol), cast(Any, None), world.losses, TickClock(0.1, 0.0), 1.0)
    stopping.requested_early(StopRequested("SIGTERM"), 300.0)
    stopping.requested(StopRequested("SIGTERM"))
    assert world.stops == [("it was asked to by SIGTERM", False)]


def test_a_pause_of_the_machine_is_no_time_in_which_the_state_could_have_been_saved() -> None:
    """Workers that write it were suspended as well, and go on."""
    world, clock = World(), TickClock(0.1, 0.0)
    checkpoints = SimpleNamespace(newest=0, why_not=lambda _: "", stop_and_save=lambda _: None)
    stopping = Stopping(cast(Any, world.protocol), cast(Any, checkpoints), world.losses, clock, 1.0)
    stopping.begin(Save(4, 1, "it was asked to by SIGTERM"))
    clock.tick(3600.0)
    assert stopping.check(3600.0) == [] and not world.losses.is_ending
    for tenth in range(1, 12):
        clock.tick(3600.0 + tenth / 10)
    with pytest.raises(RunError, match=r"could not be written: not within 1 s \(timeouts\.shutdown\)"):
        world.do(stopping.check(3601.1))


def test_giving_up_shows_the_last_crash() -> None:
    nobody = Unrecoverable((), "no worker is left")
    world = World()
    with pytest.raises(RunError, match="no worker is left"):
        world.do(world.losses.end(nobody, world.now))
    world = World()
    world.failed(Failed(0, "ValueError", 5))
    with pytest.raises(WorkerError, match="ValueError"):
        world.do(world.losses.end(nobody, world.now))


def test_giving_up_tells_how_those_were_lost_that_no_event_tells_of() -> None:
    nobody = Unrecoverable((), "no worker is left")
    world = World()
    world.gone(WorkerEnded(0, "its process ended", world.now))  # a death watch: how it ended is known later
    world.do(world.losses.suspected([Suspect(1, "no heartbeat for 2 s")], world.now))
    world.do(world.losses.end(nobody, world.now))
    how = r"\(worker 0 \(pid 70\) was ended by signal 9 \(SIGKILL\); worker 1: no heartbeat for 2 s\)$"
    with pytest.raises(RunError, match=f"no worker is left {how}"):
        world.exits(0, signal=9)
    world = World()
    world.exits(1, signal=9)
    world.protocol.placement.mesh = Mesh.initial(MeshShape.of_stages((1,)))  # without it, of which an event has told
    world.exits(0, signal=9)
    with pytest.raises(RunError, match=r"no worker is left \(worker 0 \(pid 70\) was ended by signal 9 \(SIGKILL\)\)$"):
        world.do(world.losses.end(nobody, world.now))


@pytest.mark.parametrize("step", [0, 3, 4])
def test_giving_up_has_nothing_to_do_with_a_crash_that_was_survived(step: int) -> None:
    """Step 4 is committed. 0: it was at the start, and no step is committed yet."""
    world = World() if step else starting()
    if step:
        world.failed(Failed(0, "ValueError", step))
    else:
        world.exits(1, signal=11)
        world.protocol.started, world.protocol.version = True, 0
    world.checkpoint = SimpleNamespace(step=2, path=Path("run/checkpoints/step_00000002"))
    world.do(world.losses.end(Unrecoverable((cast(ReplicaSet, SimpleNamespace(num_pages=1)),), "pages"), world.now))
    assert [action.outcome.step for action in world.actions if isinstance(action, End)] == [2]  # pyright: ignore


def test_giving_up_shows_the_crash_in_the_validation_of_the_newest_step() -> None:
    world = World()
    world.protocol.is_validating = True
    world.failed(Failed(0, "ValueError", 4))
    with pytest.raises(WorkerError, match="ValueError"):
        world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))


def test_giving_up_waits_for_the_cause_of_an_end() -> None:
    nobody = Unrecoverable((), "no worker is left")
    for is_crash in (True, False):
        world = World()
        world.gone(WorkerEnded(0, "its process ended", 1.0))
        world.do(world.losses.end(nobody, world.now))
        assert world.losses.is_ending and not any(isinstance(action, End) for action in world.actions)
        with pytest.raises(RunError, match="SIGSEGV" if is_crash else "no worker is left"):
            if is_crash:
                world.exits(0, signal=11)
            else:
                world.time_passes()


@pytest.mark.parametrize("reports", [0, 1, 2])
def test_giving_up_waits_for_the_reports_that_exits_have_overtaken(reports: int) -> None:
    """A controller that a busy machine lets stand still sees the ends of all workers before it reads what they say."""
    world = World()
    for rank in (0, 1):
        world.exits(rank, code=1)
    world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))
    assert world.losses.is_ending and not any(isinstance(action, End) for action in world.actions)
    with pytest.raises(RunError, match="ValueError: first" if reports else "no worker is left"):
        for rank in range(reports):
            world.failed(Failed(rank, f"Traceback ...\nValueError: {('first', 'second')[rank]}", 5))
        world.time_passes()


def test_a_crash_counts_when_its_cause_is_known_after_its_end() -> None:
    world = World()
    world.gone(WorkerEnded(0, "its process ended", 1.0))
    world.exits(0, signal=6)
    world.gone(WorkerEnded(1, "its process ended", 1.1))
    world.exits(1, signal=6)
    with pytest.raises(RunError, match=r"SIGABRT.*as worker 0 did in the same step 5"):
        world.saved()


def test_a_report_that_comes_after_the_exit_is_that_of_the_same_crash() -> None:
    world = World()
    world.exits(0, code=1)
    world.failed(Failed(0, "Traceback ...\nValueError: first", 5))
    assert [rank for rank, _ in world.told] == [0]


def test_giving_up_waits_for_the_report_of_an_exit_that_was_read_before_it() -> None:
    """A controller that was held up finds the ends of processes before what they had said."""
    nobody = Unrecoverable((), "no worker is left")
    for comes in (True, False):
        world = World()
        world.gone(WorkerEnded(0, "its process ended", 1.0))
        world.do(world.losses.end(nobody, world.now))
        world.exits(0, code=1)
        assert world.losses.is_ending and not any(isinstance(action, End) for action in world.actions)
        with pytest.raises(WorkerError if comes else RunError, match="ValueError" if comes else "no worker is left"):
            if comes:
                world.failed(Failed(0, "Traceback ...\nValueError: first", 5))
            else:
                world.time_passes()


def test_giving_up_does_not_wait_for_what_was_reported() -> None:
    world = World()
    world.exits(0, code=1)
    world.failed(Failed(0, "Traceback ...\nValueError: survived", 3))
    with pytest.raises(RunError, match="no worker is left"):
        world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))


def test_the_end_of_a_run_that_is_saved_shows_the_exception_that_brought_it_to_it() -> None:
    saved = SaveEnded(Save(4, 1, "too few workers are left"))
    world = World()
    world.failed(Failed(0, "Traceback ...\nValueError: old", 3))
    with pytest.raises(RunError) as caught:
        world.do(world.losses.end(saved, world.now))
    assert str(caught.value).startswith("the run stops: too few workers are left. Its state after step 4 is in ")
    assert "ValueError" not in str(caught.value)
    world = World()
    world.failed(Failed(1, "Traceback ...\nValueError: new", 5))
    with pytest.raises(RunError) as caught:
        world.do(world.losses.end(saved, world.now))
    assert str(caught.value).endswith("\n\nworker 1 failed:\nTraceback ...\nValueError: new")
    assert "ValueError" not in caught.value.headline


def test_a_link_that_is_lost_between_two_living_workers_is_made_again_once() -> None:
    world = World()
    world.losses.link_closed(0, 1)
    assert not world.relinked
    world.live(0, 1)
    assert world.relinked == [({0, 1}, "the link between workers 0 and 1 was lost")] and not world.told
    world.losses.link_closed(0, 1)
    world.live(0, 1)
    assert world.told == [(1, "the link between workers 0 and 1 was lost again")] and len(world.relinked) == 1
    assert world.reported == [1]


def test_links_that_break_together_change_the_mesh_once_with_each_tick() -> None:
    world = World()
    for ends in ((0, 1), (0, 2), (1, 2)):
        world.losses.link_closed(*ends)
        for rank in (*ends, *ends):
            world.do(world.losses.heartbeat(rank, world.now, is_relayed=False))
    assert world.num_relinks == 1 and [ends for ends, _ in world.relinked] == [{0, 1}], "the first one at once"
    for _ in range(2):
        world.do(world.losses.open_links())
        assert world.num_relinks == 2 and [ends for ends, _ in world.relinked[1:]] == [{0, 2}, {1, 2}]


def test_a_link_that_was_made_again_long_ago_and_carried_a_step_since_is_made_again_once_more() -> None:
    world = World()
    for turn in (1, 2, 3):
        world.losses.link_closed(0, 1)
        world.live(0, 1)
        assert len(world.relinked) == turn and not world.told
        world.now += 3600.0
        world.do(world.losses.committed(cast(Any, SimpleNamespace(updated=True)), world.now))


def test_a_link_that_there_was_not_is_made_each_time_and_loses_nobody() -> None:
    world = World()
    for turn in (1, 2, 3):
        world.losses.link_closed(0, 1, was_linked=False)
        assert world.missed == [{0, 1}] * turn, "so that the pair is linked from the next mesh epoch on"
        world.live(0, 1)
        assert world.relinked == [({0, 1}, "there was no link between workers 0 and 1")] * turn
    assert not world.told and not world.reported
    world.losses.link_closed(0, 1)
    world.live(0, 1)
    assert len(world.missed) == 3 and len(world.relinked) == 4 and not world.told


def test_links_that_end_with_a_worker_are_none_that_were_lost() -> None:
    world = World()
    world.losses.link_closed(0, 1)
    world.exits(1, signal=9)
    world.losses.link_closed(0, 1)
    world.live(0, 1)
    assert not world.relinked and [rank for rank, _ in world.told] == [1]


def test_who_has_lost_the_link_to_the_controller_and_lives_is_lost() -> None:
    world = World()
    world.losses.link_closed(0)
    world.live(0)
    assert world.told == [(0, "its link to the controller was lost")]
    world = World(enabled=False)
    world.losses.link_closed(0)
    with pytest.raises(RunError, match="worker 0: its link to the controller was lost"):
        world.live(0)


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_that_was_asked_to_stop_does_not_begin_again(asked: bool) -> None:
    world = World()
    world.checkpoint = SimpleNamespace(step=3, path=Path("run/checkpoints/step_00000003"))
    end = Unrecoverable((ReplicaSet(0, 0, 4, 1, frozenset({1})),), "all replicas of 1 page ranges are lost")
    if not asked:
        world.do(world.losses.end(end, world.now))
        assert isinstance(cast(End, world.actions[-1]).outcome, RestartFrom)
        return
    world.losses.stop_requested("SIGTERM")
    with pytest.raises(StoppedBySignal, match="the run cannot go on: all replicas of 1 page ranges are lost"):
        world.do(world.losses.end(end, world.now))


@pytest.mark.parametrize("started", [False, True])
def test_a_run_whose_workers_are_all_lost_at_each_start_does_not_begin_again(started: bool) -> None:
    """No state is lost before the first epoch; after it, and before the first step, it is made again."""
    world = World(replace=True)
    world.protocol.started, world.protocol.members = started, ()
    end = Unrecoverable((), "no worker is left")
    if started:
        world.do(world.losses.end(end, world.now))
        assert cast(End, world.actions[-1]).outcome == RestartFrom(Path("run"), MeshSettings(dp=2), 4, is_begin=True)
        return
    with pytest.raises(RunError, match="the run cannot go on: no worker is left"):
        world.do(world.losses.end(end, world.now))


def test_a_run_that_begins_again_tells_how_those_were_lost_whom_no_other_event_names() -> None:
    world = World()
    world.checkpoint = SimpleNamespace(step=3, path=Path("run/checkpoints/step_00000003"))
    world.exits(1, signal=9)
    world.do(world.losses.end(Unrecoverable((ReplicaSet(0, 0, 4, 1, frozenset({1})),), "all are lost"), world.now))
    (restart,) = (action for action in world.actions if isinstance(action, Record) and action.kind == "restart")
    message = str(restart.fields["message"])
    assert message.startswith("all are lost (worker 1 (pid 71) was ended by signal 9 (SIGKILL)): 4 pages of state")


def test_so_it_is_before_the_first_mesh_where_each_loss_has_its_own_event() -> None:
    world = World(replace=True)
    world.checkpoint = SimpleNamespace(step=3, path=Path("run/checkpoints/step_00000003"))
    world.protocol.started, world.protocol.members = False, ()
    world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))
    (restart,) = (action for action in world.actions if isinstance(action, Record) and action.kind == "restart")
    assert restart.fields["ranks"] == []


def test_a_run_that_replaces_its_workers_begins_again_on_its_own_ragged_mesh() -> None:
    """As even as can be it would be [2, 1]: the larger stage would be another one than the user's."""
    world = World(replace=True, mesh={"stages": [1, 2]})
    world.protocol.members = ()
    world.do(world.losses.end(Unrecoverable((), "no worker is left"), world.now))
    assert cast(End, world.actions[-1]).outcome == RestartFrom(
        Path("run"), MeshSettings(stages=(1, 2)), 4, is_begin=True
    )


def test_workers_that_cannot_receive_in_the_same_step_are_losses_and_no_bug() -> None:
    """Their machine may be short of memory."""
    world = World()
    for rank in (0, 1):
        world.failed(Failed(rank, "Traceback ...\nLinksError: this process cannot receive", 5, True))
    assert [rank for rank, _ in world.told] == [0, 1] and "cannot receive" in world.told[0][1]
    with pytest.raises(RunError):
        world = World(enabled=False)
        world.failed(Failed(0, "LinksError: this process cannot receive", 5, True))


def test_a_spare_that_goes_with_its_machine_is_no_failure_and_another_one_is_started() -> None:
    world = World(spares=1)
    spares_of(world, 3)
    world.do(world.losses.withdrawn(3, "its machine leaves", world.now))
    assert world.actions.count(RemoveMember(3, lost=True)) == 1 and 3 not in world.roster
    assert world.spawned == [3, 4] and world.replacements.spares == {4: False} and world.spares_used == []
    assert not [action for action in world.actions if isinstance(action, Record)]


@pytest.mark.parametrize("replace", [True, False])
def test_the_place_of_a_newcomer_that_goes_with_its_machine_is_filled_where_places_are(replace: bool) -> None:
    world = World(replace=replace)
    world.do(world.losses.withdrawn(2, "its machine leaves", world.now))
    assert world.told == [(2, "its machine leaves")] and world.spawned == ([3] if replace else [])
    world.exits(2, signal=9)
    assert world.reported == [] and len(world.told) == 1, "it is known"


# ---- nothing moves


STANDSTILL = Standstill(30.0, {0: "votes of step 5", 1: "parameters of layer 2", 2: "start"})


def test_a_standstill_has_members_send_again_once_and_then_ends_the_run_with_its_state() -> None:
    world = World()
    world.do(world.losses.stands_still(STANDSTILL))
    (record,) = world.records("standstill")
    assert world.num_sent_again == 1 and not world.stops
    assert record["waits"] == {"votes of step 5": [0], "parameters of layer 2": [1]} and not record["again"]
    waits = "worker 0 waits for votes of step 5; worker 1 waits for parameters of layer 2"
    assert f"nothing has moved for 30.0 s after step 4: {waits}" in record["message"]
    world.do(world.losses.stands_still(STANDSTILL))
    ((reason, at_once),) = world.stops
    assert at_once and waits in reason and world.num_sent_again == 1
    world.do(world.losses.stands_still(STANDSTILL))
    assert len(world.records("standstill")) == 2, "the state is being saved"
    with pytest.raises(RunError, match=r"stands still.*Its state after step 4 is in"):
        world.saved()


@pytest.mark.parametrize("change", [{"version": 5}, {"members": (0,)}, {"is_validating": True}])
def test_a_standstill_is_another_one_after_a_step_a_loss_or_in_a_validation(change: Mapping[str, Any]) -> None:
    world = World()
    world.do(world.losses.stands_still(STANDSTILL))
    vars(world.protocol).update(change)
    world.do(world.losses.stands_still(STANDSTILL))
    assert world.num_sent_again == 2 and not world.stops


@pytest.mark.parametrize("change", [{"started": False}, {"is_saving": True}])
def test_workers_that_start_or_save_their_state_do_not_stand_still(change: Mapping[str, Any]) -> None:
    world = World()
    vars(world.protocol).update(change)
    world.do(world.losses.stands_still(STANDSTILL))
    assert world.actions == [] and world.num_sent_again == 0


def test_a_standstill_that_is_not_over_after_the_last_step_ends_the_run() -> None:
    world = World()
    vars(world.protocol).update(version=9)
    world.do(world.losses.stands_still(STANDSTILL))
    with pytest.raises(RunError, match="stands still"):
        world.do(world.losses.stands_still(STANDSTILL))


# ---- steps that may be wrong

AT_20: Any = SimpleNamespace(step=20, path=Path("run/checkpoints/step_00000020"))
DOUBTED = GoBack("worker 1 is wrong; steps 24 to 56 may be wrong", 23, (1,))


@pytest.mark.parametrize("why", ["elastic.min_workers is 2", "elastic.enabled=false", "SIGTERM", ""])
def test_a_run_that_ends_in_place_of_going_back_leaves_that_to_whoever_resumes_it(why: str) -> None:
    """What its last lines name is the checkpoint that it goes back to, and not a newer one, which may be wrong."""
    world = World(min_workers=2 if "min_workers" in why else 1, enabled="enabled" not in why)
    world.protocol.version, world.checkpoint = 56, AT_20
    if why == "SIGTERM":
        world.losses.stop_requested(why)
    with pytest.raises(StoppedBySignal if why == "SIGTERM" else RunError) as caught:
        world.do(world.losses.go_back(replace(DOUBTED, ends=not why)))
    since = "; the run ends, since .*" if why else ""
    ended = (
        rf"steps 24 to 56 may be wrong{since}{why}.*; a run that is resumed goes back to run/checkpoints/step_00000020"
    )
    assert re.search(f"{ended}$", str(caught.value))
    assert FindCheckpoint(23) in world.actions
    (back,) = world.records("rollback")
    assert (back["step"], back["given_up"], back["ranks"]) == (20, 56, [1])
    assert [type(action) for action in world.actions[-2:]] == [Record, End]


def test_without_a_checkpoint_that_is_right_a_run_is_not_resumed_but_where_it_was_left_to_its_user() -> None:
    world = World(min_workers=2)
    world.protocol.version = 56
    with pytest.raises(RunError, match=r"elastic\.min_workers is 2; there is no checkpoint .* with another run\.dir$"):
        world.do(world.losses.go_back(DOUBTED))
    assert [back["step"] for back in world.records("rollback")] == [0]
    assert world.records("rollback")[0]["message"].startswith("all 56 steps are given up")
    world = World()
    world.protocol.version = 56
    with pytest.raises(RunError, match=r"may be wrong; there is no checkpoint of step 23 or before$"):
        world.do(world.losses.go_back(replace(DOUBTED, ends=True)))
    assert not world.records("rollback")


def test_where_nothing_that_is_committed_is_in_doubt_nothing_is_given_up() -> None:
    world = World(enabled=False)
    world.protocol.version, world.checkpoint = 56, AT_20
    with pytest.raises(RunError, match=r"elastic\.enabled=false it does not begin again$"):
        world.do(world.losses.go_back(GoBack("workers [0, 1] differ", 56, is_undecided=True)))
    assert not world.records("rollback")
