"""Machines that leave on notice: who leaves, when their agents are let go, and what is said of it. No process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import ElasticSettings
from elaswave_spmd.controller.actions import Action, DrainAgent, LetAgentGo, Record
from elaswave_spmd.controller.notices import Notices
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.runtime.processes.launcher import Machine
from elaswave_spmd.sharding.replicas import ReplicaSet


class World:
    """A run of workers 0 to 3, of which 2 and 3 are on host b. Its protocol only says what it was asked."""

    def __init__(self, **elastic: Any) -> None:
        self.asked: list[object] = []
        self.replicas = (ReplicaSet(0, 0, 1, 0, frozenset({0, 1})),)
        self.protocol = SimpleNamespace(
            **{"started": True, "stops": False, "version": 7, "steps": 9, "leaving": (), "members": (0, 1, 2, 3)},
            joining=(),
            settled=True,
            layout=None,
            placement=SimpleNamespace(replica_map=lambda _: {0: self.replicas}),
            drain=lambda rank, why: self.asked.append(("drain", rank)) or [],
            stop=lambda why: self.asked.append("stop") or [],
        )
        self.roster = Roster(range(4))
        for rank in range(4):
            self.roster.add(rank, None)
        settings = ElasticSettings(**elastic)
        self.notices = Notices(settings, cast(Any, self.protocol), self.roster, cast(Any, self))
        self.machine = Machine(-2, "b", 4, frozenset({2, 3}))

    def withdrawn(self, rank: int, reason: str, now: float) -> list[Action]:
        self.asked.append(("withdraw", rank))
        return []

    def notice(self, within_s: float | None = 30.0, now: float = 100.0) -> tuple[str, Record]:
        """Returns what the agent is told, and the event."""
        drain, record = self.notices.begin([self.machine], within_s, "SIGTERM", now)
        assert isinstance(drain, DrainAgent) and (drain.peer, drain.within_s) == (-2, within_s)
        assert isinstance(record, Record) and record.kind == "notice"
        return drain.says, record

    def leave(self, *ranks: int, lost: bool = False) -> None:
        """The members have gone, and their processes have ended."""
        for rank in ranks:
            self.roster.remove(rank)
            self.notices.removed(rank, lost=lost)
        self.protocol.members = tuple(rank for rank in self.protocol.members if rank not in ranks)
        self.machine = Machine(-2, "b", 4, self.machine.ranks - set(ranks))

    def check(self, now: float = 101.0, *, left: Sequence[int] = (2, 3), lost: bool = False) -> str:
        """What the agent is told when it is let go; empty if it is not.

        Args:
            left: the workers that have left, by the event.
            lost: what else the agent is told.
        """
        actions = self.notices.check([self.machine], now)
        if not actions:
            return ""
        record, go = actions
        assert isinstance(go, LetAgentGo) and isinstance(record, Record) and (go.peer, go.lost) == (-2, lost)
        assert record.fields["state"] == "left" and not self.notices.is_waiting
        assert record.fields["ranks"] == list(left) and go.says in str(record.fields["message"])
        return go.says


def test_the_workers_of_a_machine_leave_and_then_its_agent_is_let_go() -> None:
    world = World()
    says, record = world.notice()
    assert says == "" and world.asked == [("drain", 2), ("drain", 3)]
    assert (record.fields["ranks"], record.fields["deadline"], record.fields["from"]) == ([2, 3], 30.0, "SIGTERM")
    assert world.check() == ""
    world.leave(2)
    assert world.check() == "", "worker 3 is there"
    world.leave(3)
    world.protocol.settled = False
    assert world.check() == "", "new replicas are being made"
    world.protocol.settled = True
    assert world.check() == (
        "nothing was lost: workers 2, 3 left between two steps; state version 7 is on 2 workers, replicas complete "
        "(2 or more of each page)"
    )


def test_near_the_deadline_replicas_are_not_waited_for() -> None:
    world = World()
    world.notice(within_s=30.0)
    world.leave(2, 3)
    world.protocol.settled = False
    world.replicas = (ReplicaSet(0, 0, 1, 0, frozenset({0}), frozenset({1})),)
    assert world.check(125.9) == ""
    assert "1 or more replicas of each page, and more are still made of 1 page ranges" in world.check(126.1)


def test_without_a_deadline_they_are() -> None:
    world = World()
    world.notice(within_s=None)
    world.leave(2, 3)
    world.protocol.settled = False
    assert world.check(1e9) == ""


def test_workers_that_are_no_members_end_at_once() -> None:
    world = World()
    world.protocol.members = (0, 1, 2)
    world.notice()
    assert world.asked == [("withdraw", 3), ("drain", 2)]


def test_a_worker_that_is_lost_before_it_has_left_is_told() -> None:
    world = World()
    world.notice()
    world.leave(2)
    world.leave(3, lost=True)
    says = world.check(left=[2], lost=True)
    assert says.startswith("worker 2 left between two steps; worker 3 was lost before it could leave; state version")
    world = World()
    world.notice()
    world.leave(2, 3, lost=True)
    assert world.check(left=[], lost=True).startswith("workers 2, 3 were lost before they could leave; state version")


@pytest.mark.parametrize(
    ("elastic", "asked", "why"),
    [
        ({"min_workers": 3}, [("drain", 2), ("drain", 3)], "2 workers would stay, elastic.min_workers=3"),
        ({"enabled": False}, ["stop"], "elastic.enabled is false"),
    ],
    ids=str,
)
def test_a_run_that_cannot_do_without_a_machine_saves_its_state(
    elastic: dict[str, Any], asked: list[object], why: str
) -> None:
    """By the protocol's own rule about too few workers, or by its stop."""
    world = World(**elastic)
    says, _ = world.notice()
    assert says.startswith("the run saves its state and stops") and why in says and world.asked == asked


@pytest.mark.parametrize("is_elastic", [True, False])
def test_before_the_first_step_the_machine_goes_at_once_and_its_workers_are_lost(is_elastic: bool) -> None:
    world = World(enabled=is_elastic)
    world.protocol.started = False
    world.notice()
    says = world.check(left=[], lost=True)
    ends = "" if is_elastic else ". The run ends, since elastic.enabled is false"
    assert says == f"workers 2, 3 were lost before the first step, when no worker had state{ends}"
    assert world.asked == []


def test_before_the_first_step_a_machine_without_workers_goes_without_a_loss() -> None:
    world = World()
    world.protocol.started = False
    world.machine = Machine(-2, "b", 4)
    world.notice()
    assert world.check(left=[]) == "nothing was lost, no worker of the mesh was there"


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_notice_just_before_the_first_step_is_carried_out_after_it(is_elastic: bool) -> None:
    """The last worker gets ready before the tick that would have let the machine go."""
    world = World(enabled=is_elastic)
    world.protocol.started = False
    world.notice()
    world.protocol.started = True
    for _ in range(2):
        assert world.check() == "" and world.asked == ([("drain", 2), ("drain", 3)] if is_elastic else ["stop"])
    world.leave(2, 3)
    assert world.check().startswith("nothing was lost: workers 2, 3 left between two steps")


def test_newcomers_that_are_ready_count_among_those_who_stay() -> None:
    """As in the protocol's own rule. Those of the machine itself do not."""
    world = World(min_workers=3)
    world.protocol.joining = (4,)
    assert world.notice()[0] == ""
    world = World(min_workers=3)
    world.roster.add(4, None)
    world.machine = Machine(-2, "b", 4, frozenset({2, 3, 4}))
    world.protocol.joining = (4,)
    assert "2 workers would stay, elastic.min_workers=3" in world.notice()[0]


@pytest.mark.parametrize("elastic", [{"enabled": False}, {"min_workers": 3}], ids=str)
def test_after_the_last_step_nothing_is_saved_and_nothing_stops(elastic: dict[str, Any]) -> None:
    world = World(**elastic)
    world.protocol.version = world.protocol.steps
    assert world.notice()[0] == "the run has done its last step, and ends"


def test_an_agent_without_workers_goes_at_once() -> None:
    world = World()
    world.machine = Machine(-2, "b", 4)
    world.notice()
    assert world.check(left=[]) == "nothing was lost, no worker of the mesh was there"


def test_of_two_deadlines_the_earlier_one_counts_and_of_an_agent_that_ends_nothing_is_left() -> None:
    world = World()
    world.notice(within_s=None)
    world.notice(within_s=20.0)
    world.notice(within_s=60.0)
    world.leave(2, 3)
    world.protocol.settled = False
    assert world.check(115.9) == "" and world.check(116.1) != ""
    world = World()
    world.notice(within_s=20.0)
    world.notice(within_s=None)
    world.leave(2, 3)
    world.protocol.settled = False
    assert world.check(115.9) == "" and world.check(116.1) != "", "one without a deadline takes none back"
    world = World()
    world.notice()
    assert world.notices.check([], 101.0) == [] and not world.notices.is_waiting
