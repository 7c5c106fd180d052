"""Whom a controller that comes back waits for, and for how long, where workers may live on machines with agents."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

from elaswave_spmd.controller.actions import AdoptWorker, Kill
from elaswave_spmd.controller.adopter import Adopter
from elaswave_spmd.controller.events import AgentBack, AgentCame, BeatsReceived, Received, Tick, WorkerEnded
from elaswave_spmd.controller.io import ProcessIO
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.messages import AT_ONCE, Prepare
from elaswave_spmd.recovery.packed_reconfigure import Packer, Unpacker
from elaswave_spmd.recovery.tick_clock import TickClock
from elaswave_spmd.runtime.processes.agents import AgentNews, Agents, RemoteExited
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.transport.links import Links
from tests.cluster.kept_checkpoints import RUN_DIR
from tests.unit.runtime.test_launcher import FakeAgents, FakeForkServer

PROGRESS_S, START_S = 30, 100
HEARTBEAT_S = 1.0  # the most that a tick counts


class World:
    """An adopter with workers 0 and 1 beside the controller, and members 2 and 3 elsewhere; `over`: it has all.

    Args:
        others: further workers beside the controller, which are no members.
        prepared: the epoch of the last Prepare in the journal, if there is one.
        written: the last step that has its line.
    """

    def __init__(
        self, *, has_agents: bool = True, others: tuple[int, ...] = (), prepared: int | None = None, written: int = 0
    ) -> None:
        timeouts = SimpleNamespace(progress=float(PROGRESS_S), start=float(START_S), heartbeat=HEARTBEAT_S)
        plan = SimpleNamespace(settings=SimpleNamespace(timeouts=timeouts))
        last = None if prepared is None else Prepare(prepared, AT_ONCE)
        here = (0, 1, *others)
        pids = {rank: 10 + rank for rank in here}
        adoption = Adoption(RUN_DIR, 2, 1, last, pids=pids, made=here, has_agents=has_agents, seconds=1.0)
        ignored, clock = dict.fromkeys(("forget", "heartbeat"), lambda *_: None), TickClock(HEARTBEAT_S, 0.0)
        self.watched: dict[int, float] = {}  # rank -> since when its silence counts
        watch = self.watched.__setitem__
        supervision = SimpleNamespace(**ignored, watch=watch, clock=clock, postpone=lambda now, _: clock.tick(now))
        protocol = SimpleNamespace(version=written)
        arguments: list[Any] = [adoption, plan, protocol, None, supervision, None, 0, None]
        self.adopter = Adopter(*cast(Any, arguments))
        self.now = 0.0
        self.over: list[float] = []
        self.adopter._finish = lambda now: self.over.append(now) or []  # type: ignore[method-assign]
        assert self.adopter.start() == [AdoptWorker(rank) for rank in here]

    def happens(self, event: Any) -> list[Any]:
        assert not self.adopter.postpones(event)
        return self.adopter.decide(event, self.now)

    def ticks(self, seconds: int) -> list[Any]:
        """So many seconds pass. Returns what follows."""
        actions: list[Any] = []
        for _ in range(seconds):
            self.now += HEARTBEAT_S
            actions += self.happens(Tick())
        return actions

    def answer(self, *ranks: int, epoch: int = 0, members: tuple[int, ...] = (0, 1, 2, 3), version: int = 0) -> None:
        """Members of a mesh, of four if no other is given, answer. It began at this version."""
        addresses = {rank: f"tcp://a:{rank}" for rank in members}
        reconfigure = m.Reconfigure(epoch, (members,), (0, 2), ((1,) * len(members),), addresses, (), version, ())
        ((_, encoded),) = Packer().encoded(members, reconfigure)
        (unpacker := Unpacker()).unpacked(cast(m.PackedReconfigure, m.decode(encoded)))
        for rank in ranks:
            self.happens(Received(m.Adopted(rank, 2, 5, *unpacker.last), (), rank))

    def back(self, *workers: int, peer: int = -2, newcomers: tuple[int, ...] = (), gone: tuple[int, ...] = ()) -> Any:
        made = frozenset({*workers, *newcomers, *gone})
        return self.happens(AgentBack(peer, "b", frozenset(workers), frozenset(newcomers), made, 3.0))

    def lost_with_their_agent(self, *ranks: int) -> None:
        """The connection to the agent of these workers has ended."""
        for rank in ranks:
            self.happens(WorkerEnded(rank, "lost", self.now, lost_with_agent(rank)))

    @property
    def answers(self) -> list[int]:
        """Who has answered, and lives as far as is known."""
        return sorted(self.adopter._gathered.answers)


def lost_with_agent(rank: int, host: str = "b") -> RemoteExited:
    return RemoteExited(rank, 0, None, 9, host, "its connection closed")


def test_without_agents_it_is_over_with_the_last_answer() -> None:
    world = World(has_agents=False)
    world.answer(0)
    assert not world.over
    world.answer(1)
    assert world.over


def test_members_of_machines_that_are_not_back_are_waited_for() -> None:
    world = World()
    world.answer(0, 1)
    assert not world.over, "the newest mesh epoch has two more"
    assert world.back(2, 3) == [AdoptWorker(2), AdoptWorker(3)]
    world.answer(2)
    assert not world.over
    world.answer(3)
    assert world.over


def test_a_machine_that_was_not_asked_about_yet_may_have_the_newest_epoch() -> None:
    """Nobody is here: an agent may still come, as nothing tells that there is none."""
    world = World()
    for rank in (0, 1):
        world.happens(WorkerEnded(rank, "it has ended", 1.0))
    assert not world.over
    world.back(2, 3)
    world.answer(2, 3)
    assert world.over


def test_members_that_are_known_to_have_ended_are_not_waited_for() -> None:
    world = World()
    world.back(2, gone=(3,))
    world.answer(0, 1, 2)
    assert world.over
    world = World()
    world.back(2, 3)
    world.answer(0, 1, 2)
    world.happens(WorkerEnded(3, "it has ended", 1.0))
    assert world.over


def test_heartbeats_that_an_agent_sends_on_are_heard_of_those_that_have_answered() -> None:
    world, heard = World(), list[int]()
    world.adopter._supervision = cast(
        Any, SimpleNamespace(heartbeat=lambda beat, _: heard.append(beat.rank), watch=Mock())
    )
    world.back(2, 3)
    world.answer(2)
    world.happens(BeatsReceived((m.Heartbeat(2, 1, True), m.Heartbeat(3, 1, True))))
    world.happens(Received(m.Heartbeat(2, 2, True), (), 2))
    assert heard == [2, 2] and not world.over


def test_agents_that_join_are_for_later() -> None:
    world = World()
    assert world.adopter.postpones(AgentCame(-3, "c", 1))
    assert not world.adopter.postpones(AgentBack(-3, "c", frozenset(), frozenset(), frozenset(), 0.0))


# ---- for how long


def test_a_machine_that_is_not_back_is_waited_for_as_long_as_an_action_may_take() -> None:
    world = World()
    world.answer(0, 1)
    assert world.ticks(PROGRESS_S) == [] and not world.over
    assert world.ticks(1) == [] and world.over
    assert world.adopter._why_lost(2) == "its machine has not come back"


def test_each_worker_has_as_long_as_a_first_action_since_it_was_asked() -> None:
    """The first action of a worker may compile, and a machine may come back late: then the rest would be too little."""
    world = World()
    world.answer(0, 1)
    world.ticks(PROGRESS_S - 1)
    world.back(2, 3)
    world.answer(3)
    assert world.ticks(START_S) == [] and not world.over
    assert world.ticks(1) == [Kill(2)] and world.over, "it has not answered"
    assert world.adopter._why_lost(2) == "it has not answered the controller that came back"
    assert world.adopter._why_lost(3) == "its process ended while there was no controller"


def test_workers_that_are_asked_late_are_waited_for_when_no_machine_is_any_more() -> None:
    world = World()
    world.answer(0)
    world.ticks(PROGRESS_S + 1)
    assert not world.over, "worker 1 may be in its first action"
    world.back(2)
    world.answer(1)
    assert not world.over
    world.answer(2)
    assert world.over, "the machine of worker 3 is not waited for"


def test_a_pause_of_the_controller_is_no_time_that_anybody_has_had() -> None:
    """Its machine stood still: answers wait to be read, and agents have had no controller to come back to."""
    world = World()
    world.answer(0, 1)
    world.back(2)
    for _ in range(PROGRESS_S):
        world.now += 10 * START_S
        assert world.happens(Tick()) == [] and not world.over
    world.answer(2)
    assert not world.over
    world.back(3, peer=-3)
    world.answer(3)
    assert world.over


def test_heartbeats_and_ticks_do_not_look_for_the_newest_mesh_epoch() -> None:
    """It is the largest of all messages, and there are thousands of heartbeats."""
    world = World()
    newest = world.adopter._newest
    looks: list[int] = []
    world.adopter._newest = lambda: looks.append(1) or newest()  # type: ignore[method-assign]
    world.answer(0, 1)
    assert len(looks) == 1, "when the first one has answered"
    for _ in range(5):
        world.happens(Received(m.Heartbeat(0, 1, False, "forward"), (), 0))
    world.ticks(5)
    assert len(looks) == 1
    world.back(2)
    world.answer(2)
    assert len(looks) == 1 and not world.over, "it is in the same epoch"
    world.lost_with_their_agent(2)
    world.back(gone=(2,))
    assert len(looks) == 2, "a newer one may have gone with that worker"


# ---- workers that are no members any more


def test_who_is_no_member_of_the_last_mesh_epoch_is_not_waited_for() -> None:
    """It may have left, and write its shard to a slow disk; or it was lost, and cannot be ended now."""
    members = (0, 1)
    for has_agents in (False, True):
        for prepared, epoch in ((None, 0), (4, 4)):
            world = World(has_agents=has_agents, others=(4,), prepared=prepared)
            world.answer(0, members=members, epoch=epoch)
            assert not world.over, "a member has not answered"
            world.answer(1, members=members, epoch=epoch)
            assert world.over
    world = World(others=(4,))
    world.back(2, 3, 5)
    world.answer(0, 1, 2)
    assert not world.over
    world.happens(WorkerEnded(3, "it has ended", 1.0))
    assert world.over, "worker 5 is on another machine"


def test_who_may_be_a_member_of_a_newer_mesh_epoch_is_waited_for() -> None:
    """A change was under way: its Reconfigure may have been sent, and have come to a newcomer alone."""
    world = World(has_agents=False, others=(4,), prepared=5)
    world.answer(0, 1, members=(0, 1), epoch=4)
    assert not world.over
    world.answer(4, members=(1, 4), epoch=5)
    assert world.over
    world = World(has_agents=False, others=(4,), prepared=5)
    world.answer(0, 1, members=(0, 1), epoch=4)
    assert world.ticks(START_S) == [] and not world.over
    assert world.ticks(1) == [Kill(4)] and world.over


def test_who_has_the_last_mesh_epoch_may_answer_last() -> None:
    world = World(has_agents=False, others=(4, 5), prepared=5)
    world.answer(0, members=(0, 1), epoch=4)
    world.answer(4, members=(1, 4), epoch=5)
    assert not world.over
    world.answer(1, members=(0, 1), epoch=4)
    assert world.over, "worker 5 is in no mesh"


def test_who_ended_with_the_last_mesh_epoch_leaves_it_unknown_who_is_in_it() -> None:
    world = World(has_agents=False, others=(4, 5), prepared=5)
    world.answer(4, members=(1, 4), epoch=5)
    world.answer(0, members=(0, 1), epoch=4)
    world.happens(WorkerEnded(4, "it has ended", 1.0))
    world.answer(1, members=(0, 1), epoch=4)
    assert not world.over


def test_who_may_have_reports_of_steps_before_that_epoch_is_waited_for() -> None:
    """The machine of the controller has crashed, and lines that were written are not on its disk."""
    world = World(has_agents=False, others=(4,), written=2)
    world.answer(0, 1, members=(0, 1), version=3)
    assert not world.over
    world = World(has_agents=False, others=(4,), written=3)
    world.answer(0, 1, members=(0, 1), version=3)
    assert world.over


# ---- an agent that loses its connection meanwhile, and is back


def test_workers_that_have_answered_are_not_asked_again_when_their_agent_is_back_once_more() -> None:
    world = World()
    world.answer(0, 1)
    world.back(2, 3)
    world.answer(2)
    world.lost_with_their_agent(2, 3)
    world.answer(3)
    assert not world.over and world.answers == [0, 1, 2, 3], "they may live: the connection alone may be lost"
    world.ticks(5)
    assert world.back(2, 3, peer=-3) == [] and world.over
    assert world.watched == {0: 0.0, 1: 0.0, 2: 5.0, 3: 5.0}, "their heartbeats had no way while the agent was away"
    assert world.answers == [0, 1, 2, 3]


def test_those_that_have_not_are_asked_again_and_have_no_more_time_by_that() -> None:
    world = World()
    world.answer(0, 1)
    world.back(2, 3)
    world.answer(2)
    world.ticks(START_S)
    world.lost_with_their_agent(2, 3)
    assert world.back(2, 3, peer=-3) == [AdoptWorker(3)] and not world.over
    assert world.ticks(1) == [Kill(3)] and world.over


def test_who_has_ended_until_the_agent_is_back_is_lost() -> None:
    world = World()
    world.answer(0, 1)
    world.back(2, 3)
    world.answer(2)
    world.lost_with_their_agent(2, 3)
    world.answer(3)
    world.back(2, gone=(3,), peer=-3)
    assert world.over and world.answers == [0, 1, 2]


def test_an_agent_that_is_not_back_is_waited_for_as_one_that_has_not_come_yet() -> None:
    world = World()
    world.answer(0, 1)
    world.back(2, 3)
    world.answer(2)
    world.lost_with_their_agent(2, 3)
    world.answer(3)
    world.ticks(PROGRESS_S)
    assert not world.over
    world.ticks(1)
    assert world.over


def test_nobody_waits_longer_for_the_answers_of_a_machine_that_is_gone_once_more_than_for_the_machine() -> None:
    """It may have lost its power, or its network, when its workers had been asked and had not answered."""
    world = World()
    world.answer(0, 1)
    world.back(2, 3)
    world.answer(2)
    world.ticks(1)
    world.lost_with_their_agent(2, 3)
    assert world.ticks(PROGRESS_S) == [] and not world.over
    assert world.ticks(1) == [] and world.over
    missing = world.adopter._gathered
    missing.late.add(3)
    missing.made -= missing.doubted.keys()
    assert world.adopter._why_lost(3) == "its machine has not come back", "it could not have answered"


def test_who_is_asked_on_other_machines_is_waited_for_meanwhile() -> None:
    world = World()
    world.answer(0)
    world.back(2, 3)
    world.lost_with_their_agent(2, 3)
    world.ticks(PROGRESS_S + 1)
    assert not world.over, "worker 1 may be in its first action"
    world.answer(1)
    assert world.over


class TellingAgents(FakeAgents):
    """Agents with news."""

    news: tuple[AgentNews, ...] = ()

    def take_news(self) -> list[AgentNews]:
        return [*self.news]


def test_who_is_lost_with_an_agent_comes_before_it_is_back_and_who_has_ended_comes_after_it() -> None:
    fork_server, agents = FakeForkServer(), TellingAgents(2)
    (agent,) = agents.all
    agent.ranks = {4}
    back = AgentBack(agent.peer, "a", frozenset({4}), frozenset(), frozenset({4, 5}), 1.0)
    came = AgentCame(-9, "c", 1)
    agents.news = (came, back)
    agents.exits = [RemoteExited(5, 7, None, 9, "a"), lost_with_agent(4, "a")]
    agents.mailbox.interrupt("there is something to poll")
    launcher = Launcher(cast(ForkServerClient, fork_server), cast(Agents, agents))
    io = ProcessIO.__new__(ProcessIO)
    io._launcher, io._deaths = launcher, deque()
    dropped: list[int] = []
    io._links = cast(Links, SimpleNamespace(drop=dropped.append))
    lost, *events = io._ended()
    assert isinstance(lost, WorkerEnded) and lost.rank == 4
    (ended,) = [event for event in events if isinstance(event, WorkerEnded)]
    assert events == [back, ended, came] and ended.rank == 5
    assert launcher.host_of(4) == "a"
    assert dropped == [5], "a worker that may be back with its agent keeps its link"
