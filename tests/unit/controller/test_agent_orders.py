"""What an agent gets that is no order of its controller is counted, and ends nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave_spmd.controller import agent as module
from elaswave_spmd.errors import ConfigError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fork_server_client import Exited, NotStartedError
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox, PeerClosed, SelectableMailbox
from tests.unit.controller.made_up_machines import agent_of

REPORTS = (
    am.Hello(2, "tcp://127.0.0.1:1", "b", 2, "2.0"),
    am.Back(am.Hello(2, "tcp://127.0.0.1:1", "b", 2, "2.0"), "r", 1, {1: "tcp://127.0.0.1:2", 2: ""}, (3,), (4,), 1.5),
    am.Prepared(),
    am.Notice(30.0),
    am.WorkerExited(1, 2, None, 9),
    am.ExitsReported(),
    am.Refusals({"a": 1}),
    am.Beats(((1, b"x"), (2, b"y"))),
    am.AgentFailed(am.Problem("DataError", "x", {"rule": "y"})),
)
ORDERS = (
    am.Refused(am.Problem("", "x")),
    am.JoinAgain(-2, "x"),
    am.ConnectAgain(-2),
    am.PrepareRun(2, {}, {}),
    am.Settled(),
    am.Spawn(1, {}),
    am.Signal(1, 9),
    am.BeatsHeard(),
    am.Stop(1.0),
)


class Counting:
    """Links that only count."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    me = -7

    def reject(self, reason: str) -> None:
        self.reasons.append(reason)


def handled(sender: int, header: bytes) -> list[str]:
    """The reasons by which an agent counts a message. It has no fork server: whatever it did with one would fail."""
    links = Counting()
    agent = agent_of(links, None, None)
    assert agent._handle(Envelope(sender, header)) is False
    return links.reasons


def test_reports_of_agents_and_orders_of_others_are_counted() -> None:
    for message in REPORTS:
        assert handled(CONTROLLER, am.encode(message)) == [am.UNEXPECTED]
    for message in (*REPORTS, *ORDERS):
        assert handled(-3, am.encode(message)) == [am.UNEXPECTED]


@settings(max_examples=500)
@given(st.lists(st.binary(max_size=40), min_size=20, max_size=20), st.data())
def test_ten_thousand_messages_that_are_none_are_counted(drawn: list[bytes], data: st.DataObject) -> None:
    """Any bytes, and beginnings of orders."""
    for header in drawn:
        whole = am.encode(data.draw(st.sampled_from(ORDERS)))
        cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
        for wrong in (header, cut, cut + header[:1] * 40):
            if am.try_decode(wrong) is None:
                assert handled(CONTROLLER, wrong) == [am.UNEXPECTED]


def test_an_order_to_join_again_that_was_meant_for_another_agent_ends_nothing() -> None:
    """Which had the same address before."""
    assert handled(CONTROLLER, am.encode(am.JoinAgain(-6, "no answer"))) == []
    with pytest.raises(module._GivenUpError, match="no answer"):
        handled(CONTROLLER, am.encode(am.JoinAgain(-7, "no answer")))
    assert handled(CONTROLLER, am.encode(am.ConnectAgain(-6))) == []
    with pytest.raises(module._ConnectionClosedError):  # as if its own connection had ended
        handled(CONTROLLER, am.encode(am.ConnectAgain(-7)))


@pytest.mark.parametrize("order", [am.Stop(0.0), am.Refused(am.Problem("ConfigError", "late")), None], ids=str)
def test_the_last_order_may_follow_the_end_of_the_connection(order: am.AgentMessage | None) -> None:
    """They come by two connections."""
    mailbox = Mailbox()
    agent = agent_of(Counting(), mailbox, FakeForkServer())
    mailbox.put(Envelope(CONTROLLER, am.encode(am.Signal(1, 9))))
    if order is not None:
        mailbox.put(Envelope(CONTROLLER, am.encode(order)))
    if isinstance(order, am.Stop):
        assert agent._handle(PeerClosed(CONTROLLER)) is True
        return
    with pytest.raises(module._ConnectionClosedError if order is None else ConfigError):
        agent._handle(PeerClosed(CONTROLLER))


@pytest.mark.parametrize("is_first", [True, False])
def test_an_order_to_end_counts_also_if_the_end_of_the_connection_was_filed_before_it(is_first: bool) -> None:
    mailbox, (read, write) = SelectableMailbox(), os.pipe()
    fork_server = SimpleNamespace(fileno=lambda: read, stop=lambda _: [], poll=list, keep_up=lambda: None)
    links = SimpleNamespace(rejected={}, send=lambda *_: True)
    agent = agent_of(links, mailbox, fork_server)
    items = [Envelope(CONTROLLER, am.encode(am.Stop(0.0))), PeerClosed(CONTROLLER)]
    for item in items if is_first else reversed(items):
        mailbox.put(item)
    assert agent._turn() is True
    mailbox.close()
    for fd in (read, write):
        os.close(fd)


class FakeForkServer:
    """One that has no worker."""

    def stop(self, grace_s: float) -> list[Exited]:
        return []


class Told:
    """Links that have refused something, and a fork server of which nothing is left to report."""

    def __init__(self) -> None:
        self.rejected = {"a reason": 3}
        self.sent: list[am.AnyAgentMessage | None] = []

    def send(self, _: int, header: bytes) -> None:
        self.sent.append(am.try_decode(header))

    def signal(self, *_: float) -> bool:
        return False

    def spawn(self, rank: int, spec: object, limit_s: float) -> int:
        raise NotStartedError("[Errno 12] Cannot allocate memory")

    def poll(self) -> list[Exited]:
        return []


def test_an_agent_that_is_asked_tells_what_it_has_refused_by_now() -> None:
    told = Told()
    agent = agent_of(told, None, told)
    for _ in range(2):
        agent._handle(Envelope(CONTROLLER, am.encode(am.ReportExits())))
    assert told.sent == [am.Refusals({"a reason": 3}), am.ExitsReported(), am.ExitsReported()]


def test_a_worker_that_cannot_be_started_is_reported_and_the_agent_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told()
    agent = agent_of(told, None, told, folder="folder")
    assert agent._handle(Envelope(CONTROLLER, am.encode(am.Spawn(3, {})))) is False
    assert told.sent == [am.WorkerExited(3, 0, 1, None, "[Errno 12] Cannot allocate memory")]
    assert capsys.readouterr().out == "worker 3 could not be started: [Errno 12] Cannot allocate memory\n"
    assert not agent._workers.ranks, "nobody waits for its end"


@pytest.mark.parametrize("can_relay", [True, False])
def test_a_worker_is_told_of_the_relay_of_heartbeats_that_there_is(
    can_relay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_relay(*_: object) -> None:
        raise OSError("there is no room for a socket")

    if not can_relay:
        monkeypatch.setattr(module, "BeatRelay", no_relay)
    specs: list[dict[str, Any]] = []
    fork_server = SimpleNamespace(spawn=lambda _, spec, limit_s: specs.append(spec))
    agent = agent_of(None, None, fork_server, folder=str(tmp_path))
    agent._start_relay()
    agent._handle(Envelope(CONTROLLER, am.encode(am.Spawn(3, {"options": {}}))))
    agent._end_relay()
    assert specs[0]["options"] == ({"beats": f"{tmp_path}/beats"} if can_relay else {})
