"""What an agent tells the next controller of the workers that it has kept, and for how long it keeps them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from elaswave_spmd.controller import agent as module
from elaswave_spmd.controller import agent_deadline, agent_machine, agent_search
from elaswave_spmd.controller.agent_search import ControllerSearch, Offer
from elaswave_spmd.controller.agent_workers import AgentWorkers
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.adoption import write_address
from elaswave_spmd.runtime.processes.rendezvous import Found, NoRunYetError, Rendezvous, find_controller
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals
from elaswave_spmd.runtime.transport.credentials import RunKeys
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Envelope, PeerClosed, SelectableMailbox
from tests.ports import free_port
from tests.unit.controller.made_up_machines import agent_of
from tests.waiting import eventually

HELLO = am.Hello(2, "tcp://127.0.0.1:1", "b", 4, "2.0")
SPEC = {"checkpoints": {"run": "abc", "incarnation": 3}, "options": {"generation": 2}, "data": 1, "host": "x"}


def workers_of(*ranks: int, adopt_s: float | None = 100.0) -> AgentWorkers:
    made = AgentWorkers({"host": "b", "data": 2})
    made.set_timeouts(adopt_s, 20.0)
    for rank in ranks:
        made.started(rank, SPEC)
    return made


def test_workers_are_kept_only_where_another_controller_may_adopt_them() -> None:
    assert workers_of(1).may_wait
    assert not workers_of(1, adopt_s=None).may_wait, "the option is off"
    assert not workers_of().may_wait, "there is nobody to keep"


def test_a_specification_has_what_is_this_machines_and_says_who_holds_the_life_pipe_if_that_matters() -> None:
    off = workers_of(adopt_s=None).specification(SPEC, "/here", relays=False)
    assert off == {**SPEC, "data": 2, "host": "b", "directory": "/here"}
    on = workers_of().specification(SPEC, "/here", relays=False)
    assert on == {**off, "options": {"generation": 2, "has_agent": True}}


def test_a_specification_says_where_heartbeats_are_gathered_if_they_are() -> None:
    made = workers_of(adopt_s=None).specification(SPEC, "/here", relays=True)
    assert made["options"] == {"generation": 2, "beats": "/here/beats"}


def test_an_agent_that_has_lost_no_controller_says_hello() -> None:
    assert workers_of(1).offered(HELLO, "/nowhere", 5.0) == HELLO


def test_the_next_controller_hears_who_lives_where_and_whose_end_nobody_has_made_good(tmp_path: Path) -> None:
    workers = workers_of(1, 2, 3, 4, 5)
    for rank in (1, 3, 5):
        write_address(str(tmp_path), rank, f"tcp://b:{rank}")
    workers.ended(5)  # the controller heard of it
    workers.controller_lost(10.0)
    workers.ended(3)
    workers.ended(4)
    told = workers.offered(HELLO, str(tmp_path), 12.5)
    assert told == am.Back(HELLO, "abc", 3, {1: "tcp://b:1", 2: ""}, (4,), (3, 5), 2.5)


def test_ends_are_told_until_a_controller_has_made_them_good_and_the_time_begins_with_each(tmp_path: Path) -> None:
    workers = workers_of(1, 2)
    workers.controller_lost(10.0)
    workers.ended(2)
    workers.controller_lost(50.0)  # the one in between had not adopted all of them yet
    assert workers.wait_until == 150.0, "as those wait that it had adopted"
    again = workers.offered(HELLO, str(tmp_path), 60.0)
    assert isinstance(again, am.Back) and again.newcomers == (2,) and again.seconds == 50.0
    workers.settled()
    assert workers.offered(HELLO, str(tmp_path), 60.0) == HELLO
    workers.controller_lost(200.0)
    last = workers.offered(HELLO, str(tmp_path), 200.0)
    assert isinstance(last, am.Back) and (last.newcomers, last.gone) == ((), (2,))
    assert workers.wait_until == 300.0


# ---- the agent


class ForkServer:
    """One whose workers end when they are let go."""

    def __init__(self) -> None:
        self.how_ended: list[str] = []
        self.signalled = False  # a signal comes when they are let go

    def spawn(self, *_: object) -> None: ...

    def keep_up(self) -> None: ...

    def poll(self) -> list[Any]:
        return []

    def releasing(self, _: float) -> bool:
        self.how_ended.append("released")
        if self.signalled:
            self.signalled = False
            raise Signalled(15)
        return False

    def end_release(self) -> None: ...

    def stop(self, _: float) -> list[Any]:
        self.how_ended.append("stopped")
        return []


def lost_by(
    workers: AgentWorkers, *, leaves: bool = False, order: am.AgentMessage | None = None
) -> tuple[Exception, list[str]]:
    """The end of an agent whose connection to the controller has ended, or that gets an order instead.

    Returns the exception, and what became of its workers.
    """
    fork_server, mailbox = ForkServer(), SelectableMailbox()
    links = SimpleNamespace(address="tcp://127.0.0.1:1", me=-2, send=lambda *_: True, rejected={})
    agent = agent_of(links, mailbox, fork_server, workers, "/nowhere")
    agent._is_leaving = leaves
    fork_server.fileno = mailbox.fileno  # type: ignore[attr-defined]
    mailbox.put(Envelope(CONTROLLER, am.encode(am.Spawn(1, SPEC))))
    mailbox.put(PeerClosed(CONTROLLER) if order is None else Envelope(CONTROLLER, am.encode(order)))
    with pytest.raises((module.LostControllerError, RunError)) as caught:
        agent.serve(Offer("b", 2, "a:1", None, 30.0))
    mailbox.close()
    return caught.value, fork_server.how_ended


def test_an_agent_that_is_told_to_come_back_does_so_with_its_workers() -> None:
    workers = workers_of()
    error, how_ended = lost_by(workers, order=am.ConnectAgain(-2))
    assert isinstance(error, module.LostControllerError) and error.keeps_workers and not how_ended


def test_workers_stay_as_they_are_where_another_controller_may_come() -> None:
    workers = workers_of()
    error, how_ended = lost_by(workers)
    assert isinstance(error, module.LostControllerError) and error.keeps_workers and not how_ended
    assert workers.ranks == {1}


@pytest.mark.parametrize(("adopt_s", "leaves"), [(None, False), (100.0, True)], ids=["no adoption", "it leaves"])
def test_else_they_have_time_to_save_their_state_and_end(adopt_s: float | None, leaves: bool) -> None:
    error, how_ended = lost_by(workers_of(adopt_s=adopt_s), leaves=leaves)
    assert how_ended == ["released"]
    assert isinstance(error, RunError) if leaves else not cast(Any, error).keeps_workers


# ---- the search for the next controller

FOUND = Found(-7, "tcp://127.0.0.1:1", RunKeys.make(), "127.0.0.1")
Find = Callable[..., Found]


def searched(
    monkeypatch: pytest.MonkeyPatch, workers: AgentWorkers, *finds: BaseException | Found
) -> tuple[Any, list[str]]:
    """What comes of a search while workers wait: the result or the exception; and what became of the workers."""
    left, fork_server = list(finds), ForkServer()

    def find(*_: object) -> Found:
        found = left.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(agent_search, "find_controller", find)
    monkeypatch.setattr(agent_search, "LOOK_AGAIN_S", 0.0)
    search = ControllerSearch(Offer("b", 2, "a:1", None, 30.0), ("a", 1), b"", 300.0)
    try:
        result: object = search.with_workers(workers, cast(Any, fork_server), FOUND.credentials)
    except ConfigError as error:
        result = error
    return result, fork_server.how_ended


def waiting_workers(adopt_s: float) -> AgentWorkers:
    workers = workers_of(1, adopt_s=adopt_s)
    workers.controller_lost(time.monotonic())
    return workers


def test_a_controller_that_is_not_there_yet_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    finds = (NoRunYetError("no answer"), RunError("nothing listens there"), FOUND)
    assert searched(monkeypatch, waiting_workers(1e6), *finds) == (FOUND, [])


def test_workers_that_have_waited_long_enough_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(monkeypatch, waiting_workers(0.0)) == (None, ["released"])


def test_an_agent_that_is_refused_gives_workers_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError("another format")
    assert searched(monkeypatch, waiting_workers(1e6), error) == (error, ["released"])


def test_a_stranger_at_the_port_of_a_controller_that_has_died_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """He has not the secret: the next controller is still found there, once it listens."""
    port, secret, fork_server = free_port(), b"a secret of some bytes", ForkServer()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.ROUTER)
    stranger.bind(f"tcp://127.0.0.1:{port}")
    failed: list[str] = []

    def next_controller_listens() -> bool:
        with contextlib.suppress(ConfigError):  # libzmq's thread has not closed the stranger's port yet
            controller = Rendezvous("127.0.0.1", port, secret)
            ends.callback(controller.close)
            controller.announce(FOUND.address, FOUND.credentials)
            return True
        return False

    def find(*given: Any) -> Found:
        try:
            return find_controller(*given)
        except NoRunYetError as error:
            failed.append(error.what)
            if len(failed) == 2:
                stranger.close(0)
                eventually(next_controller_listens)
            raise

    monkeypatch.setattr(agent_search, "find_controller", find)
    monkeypatch.setattr(agent_search, "LOOK_AGAIN_S", 0.0)
    search = ControllerSearch(Offer("b", 2, "a:1", None, 30.0), ("127.0.0.1", port), secret, 300.0)
    with contextlib.ExitStack() as ends:
        ends.callback(context.destroy, 0)
        found = search.with_workers(waiting_workers(1e6), cast(Any, fork_server), FOUND.credentials)
    assert found is not None and found.credentials == FOUND.credentials and fork_server.how_ended == []
    assert len(failed) >= 2 and all("has another secret, or is no controller" in what for what in failed)


OTHER_LIFE = Found(-7, "tcp://127.0.0.1:1", RunKeys.make(), "127.0.0.1")


def test_another_life_of_the_run_adopts_nobody_so_that_workers_save_their_state_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was begun with other settings, or with timeouts.adopt=null, and waits for its agents before it begins."""
    assert searched(monkeypatch, waiting_workers(1e6), OTHER_LIFE) == (OTHER_LIFE, ["released"])
    assert capsys.readouterr().out.endswith("another life, which adopts nobody: 1 worker may save state and end\n")


def machine_of(monkeypatch: pytest.MonkeyPatch, workers: AgentWorkers) -> tuple[Any, ForkServer]:
    """A machine with these workers, and their fork server."""
    fork_server = ForkServer()
    monkeypatch.setattr(agent_machine, "start_fork_server", lambda *_, **__: fork_server)
    machine = agent_machine.Machine(30.0, StopSignals(()))
    machine.workers = workers
    return machine, fork_server


def test_a_signal_at_any_time_while_workers_wait_gives_them_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """It interrupts whatever is done then: also the end of the links to the controller that is lost."""
    machine, fork_server = machine_of(monkeypatch, waiting_workers(1e6))
    with pytest.raises(Signalled), machine:
        raise Signalled(15)
    assert fork_server.how_ended == ["released", "stopped"]


def test_a_signal_that_comes_while_they_save_leaves_them_the_time_of_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_search, "find_controller", lambda *_: OTHER_LIFE)
    search = ControllerSearch(Offer("b", 2, "a:1", None, 30.0), ("a", 1), b"", 300.0)
    machine, fork_server = machine_of(monkeypatch, waiting_workers(1e6))
    fork_server.signalled = True
    with pytest.raises(Signalled), machine:
        search.with_workers(machine.workers, machine.fork_server, FOUND.credentials)
    assert fork_server.how_ended == ["released", "released", "stopped"]


def test_otherwise_the_end_of_an_agent_ends_its_workers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has told the controller, or they have no state that nobody else has."""
    machine, fork_server = machine_of(monkeypatch, workers_of(1))
    with pytest.raises(Signalled), machine:
        raise Signalled(15)
    machine, other = machine_of(monkeypatch, waiting_workers(1e6))
    with pytest.raises(RunError), machine:
        raise RunError("no controller")
    assert fork_server.how_ended == other.how_ended == ["stopped"]


def test_an_agent_that_is_refused_with_the_workers_that_it_has_kept_lets_them_save_their_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_deadline, "_FAREWELL_S", 0.0)
    fork_server, mailbox = ForkServer(), SelectableMailbox()
    sent: list[am.AnyAgentMessage] = []
    links = SimpleNamespace(
        address="tcp://127.0.0.1:1", me=-2, send=lambda _, header: sent.append(am.decode(header)), rejected={}
    )
    agent = agent_of(links, mailbox, fork_server, waiting_workers(1e6), "/nowhere")
    fork_server.fileno = mailbox.fileno  # type: ignore[attr-defined]
    refused = am.Problem.from_error(ConfigError("the agent on b has torch 1.0", rule="all have the same"))
    mailbox.put(Envelope(CONTROLLER, am.encode(am.Refused(refused))))
    with pytest.raises(ConfigError, match=r"has torch 1\.0"):
        agent.serve(Offer("b", 2, "a:1", None, 30.0))
    mailbox.close()
    first, last = sent
    assert isinstance(first, am.Back) and isinstance(last, am.AgentFailed)
    assert fork_server.how_ended == ["released"]
