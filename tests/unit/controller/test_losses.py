"""What the controller does about workers that fail or are lost, with a made-up protocol."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller import failures as module
from elaswave_spmd.controller.failures import FailureHandler
from elaswave_spmd.controller.supervision import Loss
from elaswave_spmd.errors import RunError, WorkerError
from elaswave_spmd.recovery.messages import Failed
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.transport.mailbox import Mailbox


class World:
    """Workers 0 and 1 are members, 2 is a newcomer; keeps what is done about losses."""

    def __init__(self, **elastic: bool) -> None:
        self.workers: dict[int, int | None] = {0: None, 1: None, 2: None}
        self.spawned: list[int] = []
        self.reported: list[int] = []
        self.newcomers_lost: list[tuple[int, str]] = []
        self.told: list[tuple[int, str]] = []
        self.protocol = SimpleNamespace(started=True, version=4, placement=SimpleNamespace(mesh=(0, 1)), lost=self.lost)
        self.protocol.relink = self.relink
        self.relinked: list[tuple[set[int], str]] = []
        self.signs: list[str] = []
        self.ended: list[int] = []
        self.found: list[Loss] = []
        supervision = SimpleNamespace(
            losses=lambda: self.found,
            last_sign=lambda rank: f"of {rank}",
            forget=lambda rank: None,
            end=self.ended.append,
        )
        events = SimpleNamespace(
            lost=lambda rank, at, sign: (self.reported.append(rank), self.signs.append(sign)),
            newcomer_lost=lambda rank, mesh, reason: self.newcomers_lost.append((rank, reason)),
        )
        self.losses = FailureHandler(
            ElasticSettings(**elastic),
            cast(Any, self.protocol),
            cast(Any, supervision),
            Mailbox(),
            cast(Any, SimpleNamespace(signal=lambda rank, number: True)),
            cast(Any, events),
            self.workers,
            self.spawned.append,
            self.perform,
        )

    def lost(self, rank: int, reason: str) -> list[Any]:
        self.told.append((rank, reason))
        return []

    def relink(self, ends: frozenset[int], reason: str) -> list[Any]:
        self.relinked.append((set(ends), reason))
        return []

    def live(self, *ranks: int) -> None:
        for rank in (*ranks, *ranks):
            self.losses.lives(rank)

    def perform(self, effects: Sequence[object]) -> None: ...

    def exits(self, rank: int, code: int | None = None, signal: int | None = None) -> None:
        exited = Exited(rank, 70 + rank, code, signal)
        self.losses.lost(Loss(rank, str(exited), 1.0, exited))


def test_a_loss_is_told_once() -> None:
    world = World()
    world.exits(1, signal=9)
    world.exits(1, signal=9)
    world.losses.failed(Failed(1, "late words", 5))
    assert [rank for rank, _ in world.told] == world.reported == [1] and sorted(world.workers) == [0, 2]
    assert "SIGKILL" in world.told[0][1] and not world.spawned and world.signs == ["of 1"]


def test_a_lost_member_is_replaced_and_a_newcomer_is_not() -> None:
    world = World(replace=True)
    world.exits(0, signal=9)
    world.exits(2, signal=9)
    assert world.spawned == [1]
    assert world.newcomers_lost == [(2, "worker 2 (pid 72) was ended by signal 9 (SIGKILL)")]
    assert world.reported == [0] and [rank for rank, _ in world.told] == [0, 2] and sorted(world.workers) == [1]
    assert world.ended == [2], "it may only be late: it must not come when the mesh has given it up"


def test_an_exception_is_a_lost_device_until_it_repeats_in_the_same_step() -> None:
    world = World()
    world.losses.failed(Failed(0, "Traceback ...\nValueError: first", 5))
    assert world.told == [(0, "an exception: ValueError: first")]
    with pytest.raises(WorkerError) as caught:
        world.losses.failed(Failed(1, "ValueError: second", 5))
    assert (caught.value.rank, caught.value.report) == (0, "Traceback ...\nValueError: first")


def test_that_the_first_one_was_ended_for_certain_does_not_hide_the_bug() -> None:
    world = World()
    world.losses.failed(Failed(0, "ValueError: first", 5))
    ended = Exited(0, 70, None, 9)
    world.found.append(Loss(0, str(ended), 1.0, ended))
    with pytest.raises(WorkerError, match="ValueError: first"):
        world.losses.failed(Failed(1, "ValueError: second", 5))


def test_exceptions_in_different_steps_are_different_devices() -> None:
    world = World()
    world.losses.failed(Failed(0, "ValueError", 5))
    world.losses.failed(Failed(1, "ValueError", 6))
    assert len(world.told) == 2


@pytest.mark.parametrize("how", [{"signal": 11}, {"code": 3}])
def test_a_crash_that_repeats_in_the_same_step_is_a_bug(how: dict[str, int]) -> None:
    world = World()
    world.exits(0, **how)
    with pytest.raises(RunError, match=r"worker 1 .*, as worker 0 did in the same step 5"):
        world.exits(1, **how)


def test_kills_in_the_same_step_come_from_outside() -> None:
    world = World()
    world.exits(0, signal=9)
    world.exits(1, signal=15)
    assert len(world.told) == 2


def test_newcomers_that_cannot_start_harm_nobody() -> None:
    world = World()
    world.workers[3] = world.workers[4] = world.workers[5] = None
    world.losses.failed(Failed(2, "ImportError", 0))
    world.losses.failed(Failed(3, "ImportError", 0))
    world.exits(4, signal=11)
    world.exits(5, signal=11)
    assert [rank for rank, _ in world.newcomers_lost] == [2, 3, 4, 5]
    assert sorted(world.workers) == [0, 1] and not world.reported


def test_who_was_let_go_may_end_as_it_likes() -> None:
    world = World()
    world.protocol.placement.mesh = (0,)
    del world.workers[1]
    world.losses.failed(Failed(1, "ValueError", 5))
    world.exits(1, code=1)
    assert not world.told and not world.newcomers_lost


@pytest.mark.parametrize("started", [True, False])
def test_what_is_not_survived_ends_the_run(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.01)
    world = World(enabled=not started)
    world.protocol.started = started
    with pytest.raises(RunError, match=r"worker 1 .* signal 9"):
        world.exits(1, signal=9)
    with pytest.raises(RunError, match=r"worker 1 .* exit code 7"):
        world.exits(1, code=7)
    with pytest.raises(WorkerError, match="ValueError"):
        world.losses.failed(Failed(0, "ValueError", 1))
    assert not world.told


def test_giving_up_shows_the_last_crash() -> None:
    world = World()
    with pytest.raises(RunError, match="no worker is left"):
        world.losses.give_up("no worker is left")
    world.losses.failed(Failed(0, "ValueError", 5))
    with pytest.raises(WorkerError, match="ValueError"):
        world.losses.give_up("no worker is left")


def test_a_crash_counts_when_its_cause_is_known_after_its_end() -> None:
    world = World()
    world.losses.lost(Loss(0, "its process ended", 1.0))
    world.exits(0, signal=6)
    world.losses.lost(Loss(1, "its process ended", 1.1))
    with pytest.raises(RunError, match=r"SIGABRT.*as worker 0 did in the same step 5"):
        world.exits(1, signal=6)


def test_a_report_that_comes_after_the_exit_is_that_of_the_same_crash() -> None:
    world = World()
    world.exits(0, code=1)
    world.losses.failed(Failed(0, "Traceback ...\nValueError: first", 5))
    assert [rank for rank, _ in world.told] == [0]


def test_the_end_of_a_run_that_is_saved_shows_the_exception_that_brought_it_to_it() -> None:
    world = World()
    world.losses.failed(Failed(0, "Traceback ...\nValueError: old", 3))
    with pytest.raises(RunError) as caught:
        world.losses.stop(4, "the run stops")
    assert str(caught.value) == "the run stops"
    world.losses.failed(Failed(1, "Traceback ...\nValueError: new", 5))
    with pytest.raises(RunError) as caught:
        world.losses.stop(4, "the run stops")
    assert str(caught.value) == "the run stops\n\nworker 1 failed:\nTraceback ...\nValueError: new"
    assert caught.value.headline == "the run stops"


def test_a_link_that_is_lost_between_two_living_workers_is_made_again_once() -> None:
    world = World()
    world.losses.link_closed(0, 1)
    assert not world.relinked
    world.live(0, 1)
    assert world.relinked == [({0, 1}, "the link between workers 0 and 1 was lost")] and not world.told
    world.losses.link_closed(1, 0)
    world.live(0, 1)
    assert world.told == [(1, "the link between workers 0 and 1 was lost again")] and len(world.relinked) == 1
    assert world.reported == [1]


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
