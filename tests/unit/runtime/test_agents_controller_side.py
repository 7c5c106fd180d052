"""The controller's side of agents, with agents that are only links: which are accepted, and the loss of one."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.errors import ConfigError, DataError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes import agents as module
from elaswave_spmd.runtime.processes.agents import (
    AdoptedLife,
    AgentBack,
    AgentCame,
    AgentGone,
    AgentNews,
    AgentNotice,
    AgentReady,
    Agents,
    RemoteExited,
)
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.processes.rendezvous import find_controller
from elaswave_spmd.runtime.transport.credentials import RunKeys, RunToken
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

SECRET = b"a secret of some bytes"


class Remote:
    """An agent's links; its answers are the test's."""

    def __init__(self, port: int) -> None:
        found = find_controller("127.0.0.1", port, SECRET, PATIENCE_S)
        self.mailbox = Mailbox()
        self.links = Links(found.peer, self.mailbox, transport="tcp", credentials=found.credentials)
        self.links.connect(CONTROLLER, found.address)
        self._answering: list[threading.Thread] = []
        self._is_closed = threading.Event()
        assert not self.links.wait_connected([CONTROLLER], PATIENCE_S)

    def close(self) -> None:
        """End the links, and wait for threads that still answer."""
        self._is_closed.set()
        for thread in self._answering:
            thread.join()
        self.links.close()

    def send(self, message: am.AgentMessage) -> None:
        self.links.send(CONTROLLER, am.encode(message))

    def hello(
        self,
        host: str = "b",
        capacity: int = 2,
        torch: str = "",
        address: str = "",
        *,
        before: tuple[int, ...] = (),
        format_version: int = FORMAT_VERSION,
    ) -> Remote:
        import torch as library

        version = torch or str(library.__version__)
        self.send(am.Hello(format_version, address or self.links.address, host, capacity, version, before))
        return self

    def receive(self) -> am.AgentMessage:
        item, deadline = None, time.monotonic() + PATIENCE_S
        while item is None and time.monotonic() < deadline and not self._is_closed.is_set():
            item = self.mailbox.get(0.1)
        assert isinstance(item, Envelope), item
        return am.decode(item.header)

    def answer_next(self, kind: type[am.AgentMessage], *answers: am.AgentMessage) -> None:
        """Give these answers to the next message, which is of this kind, in a thread; none: hang up."""

        def work() -> None:
            try:
                found = self.receive()
            except AssertionError:
                if self._is_closed.is_set():
                    return  # the test has ended without asking this
                raise
            assert isinstance(found, kind)
            for answer in answers:
                self.send(answer)
            if not answers:
                self.links.close()

        self._answering.append(threading.Thread(target=work, daemon=True))
        self._answering[-1].start()


Make = Callable[[], Remote]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that can be reached is, though this process stands still for some seconds."""
    monkeypatch.setattr(module, "_CONNECT_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def all_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a test in which every agent that is asked for exits answers or ends, however long that takes."""
    monkeypatch.setattr(module, "_REQUEST_TIMEOUT_S", PATIENCE_S)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def agents(port: int) -> Iterator[Agents]:
    made = Agents(("127.0.0.1", port), SECRET, RunKeys.make(), "127.0.0.1", wanted=2)
    yield made
    made.close(0.0)


@pytest.fixture
def remote(agents: Agents, port: int) -> Iterator[Make]:
    made: list[Remote] = []

    def make() -> Remote:
        made.append(Remote(port))
        return made[-1]

    yield make
    for each in made:
        each.close()


def settle(agents: Agents, done: Callable[[], object]) -> None:
    """Have the controller's side handle messages until `done`."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        agents._exits = agents.poll()
        assert time.monotonic() < deadline, "it takes too long"


def some_exits(agents: Agents) -> list[Exited]:
    """The first exits that `poll` returns."""
    found: list[Exited] = []
    settle(agents, lambda: found.extend(agents.poll()) or found)
    return found


def prepared(agents: Agents, remote: Make) -> tuple[Remote, Remote]:
    """Two agents, on hosts c and b, that are ready to spawn; the controller sorts them by host."""
    pair = remote().hello("c", 1), remote().hello("b", 2)
    agents.wait_for_all(PATIENCE_S)
    for each in pair:
        each.answer_next(am.PrepareRun, am.Prepared())
    agents.prepare(3, {"seed": 0}, {"corpus": "text"})
    return pair


def test_agents_are_accepted_and_sorted_by_host(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    assert [(agent.host, agent.capacity, agent.peer) for agent in agents] == [("b", 2, -3), ("c", 1, -2)]


def test_last_words_count_also_if_the_end_of_the_connection_was_filed_before_them(agents: Agents, remote: Make) -> None:
    """They come by two connections, and this process may have stood still when both came."""
    first, second = remote().hello("c", 1), remote().hello("b", 2)
    agents.wait_for_all(PATIENCE_S)
    second.answer_next(am.PrepareRun, am.Prepared())
    failed = am.AgentFailed(am.Problem.from_error(DataError("this machine's data differ"), ""))
    agents._mailbox.put(PeerClosed(first.links.me))
    agents._mailbox.put(Envelope(first.links.me, am.encode(failed)))
    with pytest.raises(DataError, match="data differ"):
        agents.prepare(3, {"seed": 0}, {"corpus": "text"})


def test_agents_that_are_missing_are_counted(agents: Agents, remote: Make) -> None:
    remote().hello()
    settle(agents, lambda: len(list(agents)) == 1)
    with pytest.raises(RunError, match=r"^1 of 2 agents came to 127.0.0.1:\d+ within 0.1 s$"):
        agents.wait_for_all(0.1)


def test_an_agent_that_leaves_before_the_start_is_not_counted(agents: Agents, remote: Make) -> None:
    first = remote().hello()
    settle(agents, lambda: list(agents))
    first.links.close()
    settle(agents, lambda: not list(agents))
    remote().hello()
    settle(agents, lambda: list(agents))
    with pytest.raises(RunError, match="1 of 2"):
        agents.wait_for_all(0.1)


def test_another_torch_is_refused_on_both_sides(agents: Agents, remote: Make) -> None:
    other = remote().hello(torch="1.0")
    settle(agents, lambda: agents._refused)
    with pytest.raises(RunError, match=r"0 of 2 .*\n  refused: the agent on b has torch 1.0, the controller has "):
        agents.wait_for_all(0.1)
    refused = other.receive()
    assert isinstance(refused, am.Refused) and isinstance(refused.problem.to_error(""), ConfigError)


BAD_NAMES = pytest.mark.parametrize("name", ["", "evil\nname\x1b[31m", "n" * 254], ids=["none", "control", "long"])


@BAD_NAMES
def test_a_name_that_cannot_be_printed_as_it_is_is_refused_on_both_sides(
    agents: Agents, remote: Make, name: str
) -> None:
    other = remote().hello(name)
    settle(agents, lambda: agents._refused)
    assert not list(agents) and not agents._news
    (told,) = agents._refused
    assert told.isprintable() and "is no name of a machine" in told
    refused = other.receive()
    assert isinstance(refused, am.Refused) and "253 characters" in refused.problem.to_error("the controller").args[0]


@BAD_NAMES
def test_a_late_agent_with_such_a_name_is_told_of_without_it(agents: Agents, remote: Make, name: str) -> None:
    prepared(agents, remote)
    late = remote().hello(name)
    gone = news_of(agents)
    assert isinstance(gone, AgentGone) and not gone.joined and len(list(agents)) == 2
    assert gone.host.isprintable() and gone.reason.isprintable() and len(gone.host) < 100
    assert isinstance(late.receive(), am.Refused)


def test_an_agent_with_another_format_version_is_refused_with_both_named(agents: Agents, remote: Make) -> None:
    other = remote().hello(format_version=FORMAT_VERSION + 1)
    settle(agents, lambda: agents._refused)
    assert not list(agents)
    refused = other.receive()
    assert isinstance(refused, am.Refused)
    error = refused.problem.to_error("the controller")
    assert isinstance(error, ConfigError)
    assert f"format version {FORMAT_VERSION + 1}" in error.what and f"format version {FORMAT_VERSION}" in error.what


def test_an_agent_that_cannot_be_reached_is_named(agents: Agents, remote: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    remote().hello(address=nobody)
    settle(agents, lambda: agents._refused)
    with pytest.raises(RunError, match=f"refused: b, which cannot be reached at {nobody}"):
        agents.wait_for_all(0.1)


def news_of(agents: Agents) -> AgentNews:
    """The next news."""
    settle(agents, lambda: agents._news)
    return agents._news.pop(0)


def returning_answer(agents: Agents, remote: Remote) -> am.AgentMessage:
    """The controller's answer to an agent that comes."""
    settle(agents, lambda: agents._refused or agents._news)
    return remote.receive()


def test_a_late_agent_asks_prepares_and_is_ready(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    late = remote().hello("d", 3)
    assert news_of(agents) == AgentCame(-4, "d", 3) and len(list(agents)) == 2
    agents.admit(-4)
    assert late.receive() == am.PrepareRun(3, {"seed": 0}, {"corpus": "text"}), "as the first agents got"
    assert [(agent.host, agent.prepared) for agent in agents] == [("b", True), ("c", True), ("d", False)]
    late.send(am.Prepared())
    assert news_of(agents) == AgentReady(-4, "d", 3) and all(agent.prepared for agent in agents)
    late.send(am.Prepared())
    settle(agents, lambda: agents.rejected.get(am.UNEXPECTED) == 1)


def test_a_late_agent_that_is_refused_gets_the_error(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    late = remote().hello("d")
    news_of(agents)
    agents.refuse(-4, ConfigError("the run is about to stop", rule="a rule"))
    refused = late.receive()
    assert isinstance(refused, am.Refused) and refused.problem.what == "the run is about to stop"
    agents.admit(-4)
    assert len(list(agents)) == 2, "once"


def test_a_late_agent_that_cannot_compute_the_same_bits_is_refused_at_once(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    late = remote().hello("d", torch="1.0")
    news = news_of(agents)
    assert isinstance(news, AgentGone) and not news.joined and "has torch 1.0" in news.reason
    assert isinstance(late.receive(), am.Refused)


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_late_agent_that_goes_is_news_and_ends_nothing(agents: Agents, remote: Make, is_admitted: bool) -> None:
    prepared(agents, remote)
    late = remote().hello("d")
    news_of(agents)
    if is_admitted:
        agents.admit(-4)
        late.receive()
    late.links.close()
    news = news_of(agents)
    assert isinstance(news, AgentGone) and not news.joined and news.reason.startswith("its connection closed")
    agents.admit(-4)
    assert len(list(agents)) == 2


def test_a_late_agent_whose_data_differ_is_news_with_the_reason(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    late = remote().hello("d")
    news_of(agents)
    agents.admit(-4)
    late.answer_next(am.PrepareRun, am.AgentFailed(am.Problem("DataError", "its text differs", {"rule": "a"})))
    assert news_of(agents) == AgentGone(-4, "d", 2, False, "its text differs")
    agents.request_exits()  # raises nothing


def test_an_agent_that_is_given_up_is_told_and_its_workers_are_lost(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 5, {})
    there.receive()
    agents.give_up(-3, "no answer")
    assert agents.poll() == [RemoteExited(5, 0, None, 9, "b", "no answer")]
    assert news_of(agents) == AgentGone(-3, "b", 2, True, "no answer") and len(list(agents)) == 1
    assert there.receive() == am.JoinAgain(-3, "no answer")
    again = remote().hello("b", before=(-3,))
    assert news_of(agents) == AgentCame(-4, "b", 2)
    again.send(am.WorkerExited(5, 7, None, 9))
    agents.give_up(-3, "once")
    assert not agents.poll() and not agents.take_news()


def test_heartbeats_that_an_agent_sends_on_are_answered_and_are_those_of_its_own_workers(
    agents: Agents, remote: Make
) -> None:
    _, there = prepared(agents, remote)
    for rank in (5, 6):
        agents.spawn(next(iter(agents)), rank, {})
        there.receive()
    there.send(am.Beats(((5, b"x"), (6, b"y"))))
    there.send(am.Beats(((5, b"x"), (0, b"of another machine"))))
    there.send(am.WorkerExited(5, 7, None, 9))
    there.send(am.Beats(((6, b"z"),)))
    assert len(some_exits(agents)) == 1
    settle(agents, lambda: len(agents._beats) == 4)
    assert agents.take_beats() == [(5, b"x"), (6, b"y"), (5, b"x"), (6, b"z")] and not agents.take_beats()
    assert [there.receive() for _ in range(3)] == [am.BeatsHeard()] * 3
    assert agents.rejected == {am.UNEXPECTED: 1}


def test_a_worker_that_its_agent_could_not_start_is_told_with_the_cause(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 5, {})
    there.receive()
    there.send(am.WorkerExited(5, 0, 1, None, "[Errno 12] Cannot allocate memory"))
    (exited,) = some_exits(agents)
    assert str(exited) == "worker 5 could not be started on b: [Errno 12] Cannot allocate memory"
    assert len(list(agents)) == 2 and not agents.take_news(), "the agent goes on"


def test_an_agent_that_joins_again_is_lost_before_its_connection_closes(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 5, {})
    remote().hello("b", before=(-3,))
    exits = some_exits(agents)
    assert exits == [RemoteExited(5, 0, None, 9, "b", "it has joined again")] and there.links.peers
    assert agents.take_news() == [AgentGone(-3, "b", 2, True, "it has joined again"), AgentCame(-4, "b", 2)]


def test_an_agent_to_which_only_the_connection_has_ended_is_told_to_join_again(agents: Agents, remote: Make) -> None:
    """It lives, and its own connection to the controller goes on: it would wait for orders for ever."""
    _, there = prepared(agents, remote)
    link = agents._links._links[-3]
    link.close()
    agents._mailbox.put(PeerClosed(-3))
    assert news_of(agents) == AgentGone(-3, "b", 2, True, "its connection closed")
    assert there.receive() == am.JoinAgain(-3, "the connection to it closed") and there.links.peers


def test_an_agent_that_is_given_up_is_told_though_the_connection_ends_before_the_order_has_left(
    agents: Agents, remote: Make
) -> None:
    """Its own connection goes on, so it would keep its workers, and wait for orders for ever."""
    _, there = prepared(agents, remote)
    agents._links._links[-3].close()  # what is queued on it goes nowhere
    agents.give_up(-3, "no answer")
    agents._mailbox.put(PeerClosed(-3))
    agents.poll()
    assert there.receive() == am.JoinAgain(-3, "no answer") and there.links.peers
    agents._mailbox.put(PeerClosed(-3))
    agents.poll()
    assert -3 not in agents._links._links, "once: whoever cannot be reached is not asked for ever"


def test_an_agent_that_has_heard_that_it_is_given_up_is_not_told_again(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.give_up(-3, "no answer")
    assert there.receive() == am.JoinAgain(-3, "no answer")
    remote().hello("b", before=(-3,))
    assert [news_of(agents), news_of(agents)] == [AgentGone(-3, "b", 2, True, "no answer"), AgentCame(-4, "b", 2)]
    there.links.close()
    settle(agents, lambda: -3 not in agents._links._links)


def test_a_silent_worker_makes_its_agent_doubtful_until_its_end_is_reported(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agent = next(iter(agents))
    for rank in (5, 6):
        agents.spawn(agent, rank, {})
    agents.doubt(-3, {5, 9})
    assert agent.is_doubtful and agent.silent == {5}
    there.send(am.WorkerExited(6, 7, None, 9))
    some_exits(agents)
    assert agent.is_doubtful
    there.send(am.WorkerExited(5, 7, None, 9))
    some_exits(agents)
    assert not agent.is_doubtful
    agents.doubt(-99, {5})


def test_an_agent_that_is_asked_to_end_is_drained_and_let_go(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 5, {})
    there.receive()
    there.send(am.Notice(30.0))
    assert news_of(agents) == AgentNotice(-3, "b", 30.0)
    agents.drain(-3, 30.0, "")
    assert there.receive() == am.Drain(30.0, "") and next(iter(agents)).leaving
    there.send(am.WorkerExited(5, 7, 0, None))
    some_exits(agents)
    agents.let_go(-3, "nothing was lost", lost=False)
    assert there.receive() == am.LetGo("nothing was lost") and len(list(agents)) == 1
    there.links.close()
    agents.request_exits()
    assert not agents.poll() and not agents.take_news(), "it is no loss"


def test_an_agent_that_is_asked_to_end_before_the_run_begins_is_let_go(agents: Agents, remote: Make) -> None:
    early = remote().hello("a")
    settle(agents, lambda: list(agents))
    early.send(am.Notice(30.0))
    settle(agents, lambda: not list(agents))
    assert early.receive() == am.LetGo("no worker was here")


def test_an_agent_that_comes_while_the_first_prepare_waits_for_the_run(agents: Agents, remote: Make) -> None:
    first, second, third = remote().hello("a"), remote().hello("b"), remote()
    agents.wait_for_all(PATIENCE_S)
    third.hello("c")
    settle(agents, lambda: agents._asking)
    third.links.close()  # which is not the end of the start, as it would be of one of the first
    for each in (first, second):
        each.answer_next(am.PrepareRun, am.Prepared())
    agents.prepare(3, {}, {})
    assert [agent.host for agent in agents] == ["a", "b"]


@pytest.mark.usefixtures("all_answer")
def test_nobody_waits_for_a_late_agent_that_prepares(port: int) -> None:
    """It stands still: neither requests for exits nor the end of the run wait."""
    agents = Agents(("127.0.0.1", port), SECRET, RunKeys.make(), "127.0.0.1", wanted=1)
    first = Remote(port).hello("b")
    agents.wait_for_all(PATIENCE_S)
    first.answer_next(am.PrepareRun, am.Prepared())
    agents.prepare(3, {}, {})
    late = Remote(port).hello("d")
    news_of(agents)
    agents.admit(-3)
    eventually(lambda: len(late.mailbox))  # the order has come: later the end of a connection could overtake it
    first.answer_next(am.ReportExits, am.ExitsReported())
    agents.request_exits()
    assert agents._reported == {-2}
    first.answer_next(am.Stop)
    agents.end(0.0)
    agents.close(1e6)
    assert isinstance(late.receive(), am.PrepareRun), "and it has read nothing until now"
    for each in (first, late):
        each.close()


def test_who_asks_when_the_run_ends_is_refused(agents: Agents, remote: Make) -> None:
    prepared(agents, remote)
    early, back = remote().hello("d"), remote().hello("b", before=(-9,))
    for _ in range(2):
        news_of(agents)
    agents.end(0.0)
    late, back_late = remote().hello("e"), remote().hello("b", before=(-9,))
    gone: list[AgentNews] = []
    settle(agents, lambda: gone.extend(agents.take_news()) or len(gone) == 2)
    for each in (early, late):
        refused = each.receive()
        assert isinstance(refused, am.Refused) and "is ending" in refused.problem.what
    for each in (back, back_late):
        over = each.receive()
        assert isinstance(over, am.LetGo) and "is ending" in over.says, "its run is over, which is no error"


def test_keys_of_another_run_are_counted(agents: Agents, remote: Make) -> None:
    remote()
    wrong = Links(-9, Mailbox(), transport="tcp", credentials=RunKeys.make())
    found = find_controller("127.0.0.1", int(agents._where.split(":")[1]), SECRET, PATIENCE_S)
    wrong.connect(CONTROLLER, found.address)
    assert wrong.wait_connected([CONTROLLER], PATIENCE_S)
    settle(agents, lambda: agents.rejected)
    with pytest.raises(RunError, match=r"0 of 2 .*\n  refused: 1 x connection with another protocol or key"):
        agents.wait_for_all(0.1)
    wrong.close()


def test_messages_that_are_none_are_counted_and_end_nothing(agents: Agents, remote: Make) -> None:
    """Of an agent of the run, which has its keys: nonsense, orders, a second Hello, the end of another's worker."""
    _, there = prepared(agents, remote)
    wrong = [
        *(b"", b"\xc1", b"\x91\xa5Hello", b"\xff" * 100, b"\x94\xa8Prepared" + b"\x91" * 5000),
        *map(am.encode, (am.Stop(1.0), am.Spawn(3, {}), am.WorkerExited(77, 1, None, 9), am.Beats(((77, b"x"),)))),
        am.encode(am.Hello(FORMAT_VERSION, there.links.address, "b", 0, "")),
    ]
    for header in wrong:
        there.links.send(CONTROLLER, header)
    settle(agents, lambda: agents.rejected.get(am.UNEXPECTED) == len(wrong))
    there.hello()
    settle(agents, lambda: agents.rejected.get(am.UNEXPECTED) == len(wrong) + 1)
    for number in (2, 3):
        there.send(am.Refusals({"elsewhere": number}))
        settle(agents, lambda number=number: agents.rejected.get("elsewhere") == number)
    assert [agent.host for agent in agents] == ["b", "c"] and not agents.poll()


def test_a_problem_with_unknown_fields_is_still_an_error_of_its_kind() -> None:
    error = am.Problem("DataError", "x", {"rule": "a", "colour": "b"}).to_error("the agent on b")
    assert isinstance(error, DataError) and error.rule == "a"


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        (
            [am.AgentFailed(am.Problem("DataError", "its text differs", {"rule": "a rule"}))],
            DataError,
            "the agent on b",
        ),
        ([am.AgentFailed(am.Problem("", "Traceback"))], RunError, "the agent on b failed:\nTraceback"),
        ([], RunError, "the agent on b was lost: its connection closed"),
    ],
    ids=["other data", "a bug", "gone"],
)
def test_an_agent_that_fails_to_prepare_ends_the_start(
    agents: Agents, remote: Make, answers: list[am.AgentMessage], kind: type[Exception], message: str
) -> None:
    first, second = remote().hello("a"), remote().hello("b")
    agents.wait_for_all(PATIENCE_S)
    first.answer_next(am.PrepareRun, am.Prepared())
    second.answer_next(am.PrepareRun, *answers)
    with pytest.raises(kind, match=message):
        agents.prepare(3, {}, {})


def test_orders_reach_the_agent_and_exits_come_back(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agent = next(iter(agents))
    agents.spawn(agent, 5, {"a": 1})
    assert there.receive() == am.Spawn(5, {"a": 1})
    assert agents.signal(agent, 5, 15) and not agents.signal(agent, 6, 15)
    assert there.receive() == am.Signal(5, 15)
    there.send(am.WorkerExited(5, 77, None, 15))
    exits = some_exits(agents)
    assert exits == [RemoteExited(5, 77, None, 15, "b")]
    assert not agents.signal(agent, 5, 15)


@pytest.mark.usefixtures("all_answer")
def test_requested_exits_include_all_workers_that_have_ended(agents: Agents, remote: Make) -> None:
    other, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 0, {})
    there.receive()
    there.answer_next(am.ReportExits, am.WorkerExited(0, 7, 1, None), am.ExitsReported())
    other.answer_next(am.ReportExits, am.ExitsReported())
    agents.request_exits()
    assert agents.poll() == [RemoteExited(0, 7, 1, None, "b")]


@pytest.mark.usefixtures("all_answer")
def test_a_lost_agent_is_not_waited_for_when_exits_are_requested(agents: Agents, remote: Make) -> None:
    other, there = prepared(agents, remote)
    other.answer_next(am.ReportExits, am.ExitsReported())
    there.answer_next(am.ReportExits)
    agents.request_exits()
    assert [agent.host for agent in agents] == ["c"]


def test_a_lost_agent_is_the_loss_of_its_workers(agents: Agents, remote: Make) -> None:
    other, there = prepared(agents, remote)
    agent, _ = agents
    for rank in (4, 2):
        agents.spawn(agent, rank, {})
    there.links.close()
    exits = some_exits(agents)
    reason = "its connection closed"
    assert exits == [RemoteExited(rank, 0, None, 9, "b", reason) for rank in (2, 4)]
    assert agents.take_news() == [AgentGone(-3, "b", 2, True, reason)]
    for rank in (6, 7):
        agents.spawn(agent, rank, {})
        assert agents.poll() == [RemoteExited(rank, 0, None, 9, "b", "it was lost before")]
    assert agents.take_news() == [], "that it is lost is told once"
    assert other.links.peers, "the other agent goes on"


def test_the_reason_of_a_failed_agent_is_reported_with_its_lost_workers(agents: Agents, remote: Make) -> None:
    _, there = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 1, {})
    there.send(am.AgentFailed(am.Problem("", "interrupted")))
    exits = some_exits(agents)
    assert str(exits[0]) == "worker 1 was lost with the agent on b: interrupted"


def test_close_waits_for_agents_to_end_and_returns_their_last_exits(port: int) -> None:
    agents = Agents(("127.0.0.1", port), SECRET, RunToken.make(), "127.0.0.1", wanted=1)
    there = Remote(port).hello()
    agents.wait_for_all(PATIENCE_S)
    there.answer_next(am.PrepareRun, am.Prepared())
    agents.prepare(1, {}, {})
    agents.spawn(next(iter(agents)), 0, {})
    assert there.receive() == am.Spawn(0, {})

    def end() -> None:
        assert there.receive() == am.Stop(1.5)
        there.send(am.WorkerExited(0, 7, None, 15))
        there.links.close(1000)

    thread = threading.Thread(target=end)
    thread.start()
    agents.end(1.5)
    # It reports how the worker ended, and closes; these are two connections, and either may be noticed first.
    gone = RemoteExited(0, 0, None, 9, "b", "its connection closed")
    assert agents.close(PATIENCE_S) in ([RemoteExited(0, 7, None, 15, "b")], [gone])
    thread.join()
    with pytest.raises(RunError, match="no controller"):
        find_controller("127.0.0.1", port, SECRET, 0.1)


# ---- agents that come back to the next controller

LIFE = ("the run", 2)
LIVING = {4: "tcp://127.0.0.1:4", 7: ""}


def back(remote: Remote, life: tuple[str, int] = LIFE, *, before: tuple[int, ...] = ()) -> am.Back:
    """An agent with two workers, one of which was no member yet; two others have ended."""
    import torch

    hello = am.Hello(FORMAT_VERSION, remote.links.address, "b", 3, str(torch.__version__), before)
    return am.Back(hello, *life, LIVING, (6,), (5,), 1.5)


@pytest.fixture
def next_agents(port: int) -> Iterator[Agents]:
    """Those of the second controller of a life of the run."""
    life = AdoptedLife(*LIFE, generation=2, here=frozenset({0, 1}), next_rank=8)
    made = Agents(("127.0.0.1", port), SECRET, RunKeys.make(), "127.0.0.1", 0, life)
    made.go_on(3, {}, {})
    yield made
    made.close(0.0)


@pytest.fixture
def returning(next_agents: Agents, port: int) -> Iterator[Remote]:
    made = Remote(port)
    yield made
    made.close()


@pytest.fixture
def once_more(returning: Remote, port: int) -> Iterator[Remote]:
    """The same agent, which has lost its connection, or another one."""
    made = Remote(port)
    yield made
    made.close()


def test_an_agent_that_is_back_is_one_of_the_run_with_its_workers(next_agents: Agents, returning: Remote) -> None:
    returning.send(back(returning))
    found = news_of(next_agents)
    assert found == AgentBack(
        returning.links.me, "b", frozenset({4, 7}), frozenset({6, 7}), frozenset({4, 5, 6, 7}), 1.5
    )
    (agent,) = next_agents
    assert agent.ranks == {4, 7} and agent.addresses == {4: "tcp://127.0.0.1:4", 7: ""} and agent.prepared
    next_agents.signal(agent, 7, 9)
    next_agents.settle()
    assert [returning.receive(), returning.receive()] == [am.Signal(7, 9), am.Settled()]
    returning.send(am.WorkerExited(7, 1, None, 9))
    assert some_exits(next_agents) == [RemoteExited(7, 1, None, 9, "b")]


def test_each_generation_gives_other_ids_to_agents(next_agents: Agents, returning: Remote) -> None:
    """An agent tells those that it had before: they must not be those of another one by now."""
    assert returning.links.me == -1_000_002


@pytest.mark.parametrize("life", [("the run", 1), ("another", 2)])
def test_workers_of_another_life_are_not_taken_over(
    next_agents: Agents, returning: Remote, life: tuple[str, int]
) -> None:
    returning.send(back(returning, life))
    settle(next_agents, lambda: returning.links.me in next_agents._links.peers)
    assert returning.receive() == am.JoinAgain(
        returning.links.me, "the run goes on without the workers that it has kept"
    )
    assert not list(next_agents) and not next_agents.take_news()


def test_an_agent_whose_workers_have_all_ended_hears_that_it_is_settled(next_agents: Agents, returning: Remote) -> None:
    """Else it would tell the next controller of them once more, and have no time left to wait for that."""
    returning.send(msgspec.structs.replace(back(returning), workers={}, gone=(4, 5, 7)))
    found = news_of(next_agents)
    assert isinstance(found, AgentBack) and not found.workers and found.made == {4, 5, 6, 7}
    next_agents.settle()
    assert returning.receive() == am.Settled()


def test_an_agent_that_is_back_with_another_torch_is_refused(next_agents: Agents, returning: Remote) -> None:
    """The controller may have another one by now, with which it would start workers beside those of the agent."""
    told = back(returning)
    returning.send(msgspec.structs.replace(told, hello=msgspec.structs.replace(told.hello, torch="1.0")))
    gone = news_of(next_agents)
    assert isinstance(gone, AgentGone) and not gone.joined and "has torch 1.0" in gone.reason
    assert isinstance(returning.receive(), am.Refused) and not list(next_agents)


@BAD_NAMES
def test_an_agent_that_is_back_with_a_name_that_cannot_be_printed_is_refused(
    next_agents: Agents, returning: Remote, name: str
) -> None:
    told = back(returning)
    returning.send(msgspec.structs.replace(told, hello=msgspec.structs.replace(told.hello, host=name)))
    assert isinstance(returning_answer(next_agents, returning), am.Refused) and not list(next_agents)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": {-1: ""}},
        {"newcomers": (-6,)},
        {"gone": (1 << 62,)},
        {"gone": (5, 0)},
        {"gone": (4,)},
        {"seconds": -1.0},
        {"seconds": math.inf},
        {"seconds": math.nan},
    ],
    ids=["no rank", "none either", "far above all", "of the controller's machine", "twice", "early", "never", "nan"],
)
def test_an_agent_that_says_what_cannot_be_joins_again(
    next_agents: Agents, returning: Remote, wrong: dict[str, Any]
) -> None:
    returning.send(msgspec.structs.replace(back(returning), **wrong))
    settle(next_agents, lambda: returning.links.me in next_agents._links.peers)
    assert returning.receive() == am.JoinAgain(returning.links.me, "what it says of its workers cannot be")
    assert not list(next_agents) and not next_agents.take_news() and next_agents.rejected.get(am.UNEXPECTED) == 1


def test_an_agent_that_is_back_with_workers_of_another_one_joins_again(
    next_agents: Agents, returning: Remote, once_more: Remote
) -> None:
    returning.send(back(returning))
    news_of(next_agents)
    once_more.send(back(once_more))
    settle(next_agents, lambda: once_more.links.me in next_agents._links.peers)
    assert isinstance(once_more.receive(), am.JoinAgain)
    assert [agent.peer for agent in next_agents] == [returning.links.me] and not next_agents.take_news()


def test_an_agent_that_has_lost_its_connection_alone_keeps_the_workers_that_live(
    next_agents: Agents, returning: Remote, once_more: Remote
) -> None:
    returning.send(back(returning))
    news_of(next_agents)
    told = back(once_more, before=(returning.links.me,))
    once_more.send(msgspec.structs.replace(told, workers={4: LIVING[4]}, newcomers=(6, 7)))
    found = news_of(next_agents)
    peer = once_more.links.me
    assert found == AgentBack(peer, "b", frozenset({4}), frozenset({6, 7}), frozenset({4, 5, 6, 7}), 1.5)
    assert next_agents.poll() == [RemoteExited(7, 0, None, 9, "b", "it has come back without it")]
    assert [(agent.peer, agent.ranks) for agent in next_agents] == [(peer, {4})] and not next_agents.take_news()


def test_an_agent_that_is_lost_before_anybody_has_heard_of_it_is_not_back(
    next_agents: Agents, returning: Remote
) -> None:
    returning.send(back(returning))
    settle(next_agents, lambda: list(next_agents))
    returning.links.close()
    reason = "its connection closed"
    assert some_exits(next_agents) == [RemoteExited(rank, 0, None, 9, "b", reason) for rank in (4, 7)]
    assert not next_agents.take_news(), "it may be back once more"
    next_agents.settle()
    assert next_agents.take_news() == [AgentGone(returning.links.me, "b", 3, True, reason)]


def test_an_agent_that_is_back_once_more_was_never_lost(
    next_agents: Agents, returning: Remote, once_more: Remote
) -> None:
    returning.send(back(returning))
    news_of(next_agents)
    returning.links.close()
    assert [exited.rank for exited in some_exits(next_agents)] == [4, 7]
    once_more.send(back(once_more, before=(returning.links.me,)))
    found = news_of(next_agents)
    assert isinstance(found, AgentBack) and found.workers == {4, 7}
    next_agents.settle()
    assert not next_agents.take_news() and [agent.peer for agent in next_agents] == [once_more.links.me]


def test_an_agent_to_which_only_the_connection_has_ended_meanwhile_is_told_to_come_back_with_its_workers(
    next_agents: Agents, returning: Remote
) -> None:
    """Its own goes on: it would wait for orders for ever. Told to join again it would end its workers."""
    returning.send(back(returning))
    news_of(next_agents)
    next_agents._links._links[returning.links.me].close()
    next_agents._mailbox.put(PeerClosed(returning.links.me))
    settle(next_agents, lambda: not list(next_agents))
    assert returning.receive() == am.ConnectAgain(returning.links.me) and returning.links.peers


def test_who_comes_back_when_all_is_settled_joins_again(next_agents: Agents, returning: Remote) -> None:
    next_agents.settle()
    returning.send(back(returning))
    settle(next_agents, lambda: returning.links.me in next_agents._links.peers)
    assert isinstance(returning.receive(), am.JoinAgain) and not list(next_agents)


def test_who_has_lost_a_controller_that_lives_joins_again(agents: Agents, remote: Make) -> None:
    """Only the connection had ended. Its workers are lost, also if nobody has noticed that."""
    _, first = prepared(agents, remote)
    agents.spawn(next(iter(agents)), 1, {})
    again = remote()
    again.send(back(again, before=(first.links.me,)))
    (exited,) = some_exits(agents)
    assert exited.rank == 1 and "it has joined again" in str(exited)
    assert isinstance(again.receive(), am.JoinAgain)


def test_agents_of_a_controller_that_cannot_begin_are_left_alone(next_agents: Agents, returning: Remote) -> None:
    returning.send(back(returning))
    news_of(next_agents)
    next_agents.give_back()
    item = returning.mailbox.get(PATIENCE_S)
    assert isinstance(item, PeerClosed), "no order comes before the end of the connection"
    next_agents.end(0.0)
    assert next_agents.close() == []


def test_agents_of_a_run_that_begins_again_join_it_again(next_agents: Agents, returning: Remote) -> None:
    returning.send(back(returning))
    news_of(next_agents)
    next_agents.dismiss("the run begins again")
    next_agents.end(0.0)
    assert returning.receive() == am.JoinAgain(returning.links.me, "the run begins again")
