"""The launcher assigns ranks to machines; without agents it is the fork server and nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
import select
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes.agents import Agent, Agents, RemoteExited
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient, NotStartedError
from elaswave_spmd.runtime.processes.launcher import NO_PLACE, Launcher, divide_workers
from elaswave_spmd.runtime.transport.mailbox import Interrupted, SelectableMailbox


class FakeForkServer:
    """A double that records the calls of it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.exits: list[Exited] = []
        self.mailbox = SelectableMailbox()

    def ready(self) -> None:
        self.asked.append("ready")

    def spawn(self, rank: int, spec: dict[str, Any], limit_s: float | None = None) -> int:
        self.asked.append(("spawn", rank, spec))
        return 7

    def order_signal(self, rank: int, number: int) -> None:
        self.asked.append(("order_signal", rank, number))

    def keep_up(self) -> None:
        pass

    def signal(self, rank: int, number: int, limit_s: float | None = None) -> bool:
        self.asked.append(("signal", rank, number))
        return rank == 0

    def fileno(self) -> int:
        return self.mailbox.fileno()

    def poll(self) -> list[Exited]:
        found, self.exits = self.exits, []
        return found

    def stop(self, grace_s: float) -> list[Exited]:
        self.asked.append(("stop", grace_s))
        return self.poll()


class FakeAgents(FakeForkServer):
    """Agents on hosts a, b, ... with these capacities."""

    def __init__(self, *capacities: int) -> None:
        super().__init__()
        self.all = [Agent(-2 - i, "abcdef"[i], capacity, prepared=True) for i, capacity in enumerate(capacities)]

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.all)

    def spawn(self, agent: Agent, rank: int, spec: dict[str, Any]) -> None:  # type: ignore[override]
        agent.ranks.add(rank)
        self.asked.append(("spawn", agent.host, rank))

    def signal(self, agent: Agent, rank: int, number: int) -> bool:  # type: ignore[override]
        self.asked.append(("signal", agent.host, rank, number))
        return True

    def request_exits(self) -> None:
        self.asked.append("request_exits")

    def end(self, grace_s: float) -> None:
        self.asked.append(("end", grace_s))

    def close(self) -> list[Exited]:
        return self.poll()


def launcher_of(*capacities: int, starts_here: bool = True) -> tuple[Launcher, FakeForkServer, FakeAgents]:
    fork_server, agents = FakeForkServer(), FakeAgents(*capacities)
    launcher = Launcher(cast(ForkServerClient, fork_server), cast(Agents, agents), starts_here=starts_here)
    return launcher, fork_server, agents


def exit_of(rank: int, host: str = "") -> Exited:
    return RemoteExited(rank, 5, 1, None, host) if host else Exited(rank, 5, 1, None)


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_workers_fill_agents_evenly(capacities: list[int], data: st.DataObject) -> None:
    num = data.draw(st.integers(0, sum(capacities)))
    shares = divide_workers(num, capacities)
    assert sum(shares) == num
    assert all(0 <= taken <= capacity for taken, capacity in zip(shares, capacities, strict=True))
    for i, a in enumerate(capacities):
        for j, b in enumerate(capacities):
            # For no worker would another agent than the chosen one have been the better choice.
            assert not shares[i] or shares[j] == b or shares[i] * b <= (shares[j] + 1) * a


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_agents_get_consecutive_ranks_and_this_machine_the_first(capacities: list[int], data: st.DataObject) -> None:
    launcher, _, agents = launcher_of(*capacities)
    local = data.draw(st.integers(0, 5))
    num = local + data.draw(st.integers(0, sum(capacities)))
    launcher.assign(range(num), local)
    hosts = [launcher.host_of(rank) for rank in range(num)]
    assert hosts[:local] == [socket.gethostname()] * local
    assert hosts[local:] == sorted(hosts[local:]), "one run for each agent, in the order of agents"
    counts = Counter(hosts[local:])
    assert [counts[agent.host] for agent in agents] == divide_workers(num - local, capacities)


def test_without_a_number_the_workers_that_do_not_fit_on_agents_run_here() -> None:
    launcher, _, _ = launcher_of(2, 1)
    launcher.assign(range(5), None)
    assert [launcher.host_of(rank) for rank in range(2, 5)] == ["a", "a", "b"]
    launcher, _, _ = launcher_of(2, 2)
    launcher.assign(range(2), None)
    assert [launcher.host_of(rank) for rank in range(2)] == ["a", "b"]


def test_too_little_room_is_refused_with_the_room_of_each_agent() -> None:
    launcher, _, _ = launcher_of(2, 1)
    with pytest.raises(ConfigError) as caught:
        launcher.assign(range(6), 2)
    assert (
        caught.value.where == "runtime.local_workers=2"
        and caught.value.exists == "room for 3 workers on agents: a 2, b 1"
    )
    assert caught.value.fix.startswith("runtime.local_workers=3,")


def test_without_agents_it_is_the_fork_server() -> None:
    fork_server = FakeForkServer()
    launcher = Launcher(cast(ForkServerClient, fork_server))
    launcher.ready()
    launcher.spawn(3, {"a": 1})
    assert launcher.signal(0, 9) and not launcher.signal(1, 0)
    assert launcher.fileno() == fork_server.fileno() and launcher.agents is None
    fork_server.exits = [exit_of(3)]
    assert launcher.poll() == [exit_of(3)] and launcher.poll() == []
    assert launcher.host_of(3) == socket.gethostname() and launcher.domain_of(3) is None
    launcher.stop(0.5)
    assert fork_server.asked == [
        "ready", ("spawn", 3, {"a": 1}), ("signal", 0, 9), ("signal", 1, 0), ("stop", 0.5)
    ]  # fmt: skip


def test_orders_go_where_the_rank_is() -> None:
    launcher, fork_server, agents = launcher_of(2, 1)
    launcher.assign(range(4), 1)
    for rank in range(4):
        launcher.spawn(rank, {})
    launcher.signal(0, 15)
    launcher.signal(3, 15)
    launcher.order_signal(0, 9)
    launcher.order_signal(3, 9)
    assert fork_server.asked == [("spawn", 0, {}), ("signal", 0, 15), ("order_signal", 0, 9)]
    places = [("spawn", "a", 1), ("spawn", "a", 2), ("spawn", "b", 3)]
    assert agents.asked == [*places, ("signal", "b", 3, 15), ("signal", "b", 3, 9)]


@pytest.mark.parametrize(("rank", "there"), [(0, True), (1, True)])
def test_signal_0_asks_every_machine_for_ended_workers(rank: int, there: bool) -> None:
    launcher, fork_server, agents = launcher_of(1)
    launcher.assign(range(2), 1)
    launcher.spawn(1, {})
    assert launcher.signal(rank, 0) is there
    assert fork_server.asked == [("signal", rank, 0)] and agents.asked[-1] == "request_exits"


def test_exits_of_all_machines_are_polled_and_their_ranks_forgotten() -> None:
    launcher, fork_server, agents = launcher_of(2)
    launcher.assign(range(3), 1)
    fork_server.exits, agents.exits = [exit_of(0)], [exit_of(2, "a")]
    assert launcher.poll() == [exit_of(0), exit_of(2, "a")]
    assert not launcher.signal(2, 9), "the fork server knows no rank 2"
    assert agents.asked == []
    launcher.spawn(3, {})
    launcher.spawn(4, {})
    assert launcher.domain_of(3) == ("a",), "the place of rank 2"
    assert launcher.domain_of(4) == (socket.gethostname(),), "no place is left there"
    assert agents.asked == [("spawn", "a", 3)] and fork_server.asked[1:] == [("spawn", 4, {})]


def test_newcomers_go_where_the_largest_share_is_free() -> None:
    launcher, _, _ = launcher_of(4, 2)
    launcher.assign(range(2), 0)
    for rank in range(2, 7):
        launcher.spawn(rank, {})
    hosts = [launcher.host_of(rank) for rank in range(7)]
    assert hosts[:3] == ["a", "a", "b"] and Counter(hosts[:6]) == {"a": 4, "b": 2}
    assert hosts[6] == socket.gethostname()


def test_a_newcomer_goes_to_the_machine_that_was_asked_for() -> None:
    launcher, fork_server, agents = launcher_of(4, 2)
    agents.all.append(Agent(-9, "b", 1, prepared=True))
    for rank in range(4):
        launcher.spawn(rank, {}, "b")
    assert [launcher.host_of(rank) for rank in range(4)] == ["b", "b", "b", socket.gethostname()], "as it is full"
    assert (agents.all[1].ranks, agents.all[2].ranks) == ({1, 2}, {0}), "the newest agent of that name first"
    launcher.spawn(4, {}, socket.gethostname())
    assert fork_server.asked == [("spawn", 3, {}), ("spawn", 4, {})]


@pytest.mark.parametrize("host", [None, "a", socket.gethostname()], ids=["anywhere", "agent", "here"])
def test_a_machine_that_is_to_have_no_workers_gets_none(host: str | None) -> None:
    launcher, fork_server, agents = launcher_of(1, starts_here=False)
    launcher.assign(range(1), 0)
    launcher.spawn(0, {})
    with pytest.raises(NotStartedError, match=re.escape(NO_PLACE)):
        launcher.spawn(1, {}, host)
    own, a = launcher.machines
    assert (own.places, own.free, a.ranks, fork_server.asked) == (0, 0, {0}, [])
    agents.exits = [exit_of(0, "a")]
    launcher.poll()
    launcher.spawn(2, {})
    assert launcher.host_of(2) == "a" and agents.asked == [("spawn", "a", 0), ("spawn", "a", 2)]


@pytest.mark.parametrize("leaving", [False, True], ids=["prepares", "leaves"])
def test_nobody_is_placed_on_an_agent_that_still_prepares_or_leaves(leaving: bool) -> None:
    launcher, _, agents = launcher_of(4, 2)
    agents.all[0].prepared, agents.all[0].leaving = leaving, leaving
    for rank in range(3):
        launcher.spawn(rank, {})
    assert [launcher.host_of(rank) for rank in range(3)] == ["b", "b", socket.gethostname()]
    own, a, b = launcher.machines
    assert (own.agent, own.host, own.places, own.free) == (None, socket.gethostname(), None, 0)
    assert (a.host, a.places, a.ranks, a.is_ready, a.free) == ("a", 4, frozenset(), leaving, 0)
    assert (b.host, b.places, b.ranks, b.is_ready, b.free) == ("b", 2, {0, 1}, True, 0)
    assert Launcher(cast(ForkServerClient, FakeForkServer())).machines == ()


def test_nobody_is_placed_on_an_agent_with_a_silent_worker_until_its_end_is_reported() -> None:
    """Its machine may stand still: a replacement there would be lost as well."""
    launcher, _, agents = launcher_of(4, 1)
    launcher.assign(range(1), 0)
    launcher.spawn(0, {})
    agents.all[0].silent = {0}
    launcher.spawn(1, {})
    launcher.spawn(2, {})
    launcher.spawn(3, {}, "a")
    here = socket.gethostname()
    assert [launcher.host_of(rank) for rank in range(4)] == ["a", "b", here, here]
    _, a, _ = launcher.machines
    assert (a.is_doubtful, a.is_ready, a.free) == (True, True, 0)
    agents.all[0].ranks.discard(0)
    agents.exits = [exit_of(0, "a")]
    launcher.poll()
    launcher.spawn(4, {})
    assert launcher.host_of(4) == "a" and launcher.machines[1].free == 3


def test_the_death_of_the_fork_server_says_nothing_of_the_workers_of_agents() -> None:
    launcher, fork_server, _ = launcher_of(1, 1)
    launcher.assign(range(3), 1)
    for rank in (1, 2):
        launcher.spawn(rank, {})
    fork_server.exits = [exit_of(0)]
    assert launcher.may_live([0, 1, 2]) == [0, 1, 2], "worker 0 has ended: that is asked one by one"
    with pytest.MonkeyPatch.context() as patch:
        for call in ("poll", "signal"):
            patch.setattr(fork_server, call, Mock(side_effect=RunError("the fork server ended")))
        assert launcher.may_live([0, 1, 2]) == [1, 2] and launcher.signal(2, 0)
        with pytest.raises(RunError):
            launcher.signal(0, 0)
        without = Launcher(cast(ForkServerClient, fork_server))
        assert without.may_live([0, 1]) == []


def test_both_descriptors_wake_a_select_loop() -> None:
    for which in (0, 1):
        launcher, *sources = launcher_of(1)
        assert not select.select([launcher], [], [], 0)[0]
        sources[which].mailbox.put(Interrupted(""))
        assert select.select([launcher], [], [], 0)[0]


def test_stop_ends_all_machines_at_once_and_returns_exits_not_polled() -> None:
    launcher, fork_server, agents = launcher_of(1)
    fork_server.exits, agents.exits = [exit_of(0)], [exit_of(1, "a")]
    assert launcher.stop(1.5) == [exit_of(0), exit_of(1, "a")]
    assert agents.asked == [("end", 1.5)] and fork_server.asked == [("stop", 1.5)]
    assert launcher.agents is None


def test_the_text_for_a_worker_on_another_machine() -> None:
    killed = RemoteExited(2, 77, None, 9, "b")
    assert str(killed) == "worker 2 (pid 77) was ended by signal 9 (SIGKILL), on b"
    lost = dataclasses.replace(killed, pid=0, reason="its connection closed")
    assert str(lost) == "worker 2 was lost with the agent on b: its connection closed"


def test_a_selectable_mailbox_is_readable_until_all_is_taken() -> None:
    mailbox = SelectableMailbox()
    for _ in range(2):
        assert not select.select([mailbox], [], [], 0)[0] and mailbox.take_all() == []
        mailbox.put(Interrupted("a"))
        mailbox.put(Interrupted("b"))
        assert mailbox.get() == Interrupted("a") and select.select([mailbox], [], [], 0)[0]
        assert mailbox.take_all() == [Interrupted("b")]
    mailbox.close()


def test_a_thread_woken_by_a_selectable_mailbox_finds_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, write, read = SelectableMailbox(), os.write, os.read
    there: list[int] = []

    def count_and_write(fd: int, data: bytes) -> int:
        there.append(len(mailbox))
        return write(fd, data)

    def put_and_read(fd: int, size: int) -> bytes:
        """An item comes while another thread takes."""
        monkeypatch.setattr(os, "read", read)
        mailbox.put(Interrupted("late"))
        return read(fd, size)

    monkeypatch.setattr(os, "write", count_and_write)
    monkeypatch.setattr(os, "read", put_and_read)
    mailbox.put(Interrupted("early"))
    assert mailbox.take_all() == [Interrupted("early"), Interrupted("late")], "its wake-up was read: it is taken"
    assert there == [1, 2], "the item is there before the wake-up"
    mailbox.close()
