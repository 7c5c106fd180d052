"""The end of an agent: deadlines that are kept, last words that are true, and a controller that is looked for again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.conf.schema import Settings
from elaswave_spmd.controller import agent as module
from elaswave_spmd.controller import agent_command, agent_deadline, agent_machine, agent_search
from elaswave_spmd.controller.address_note import take_note
from elaswave_spmd.controller.agent_search import Offer
from elaswave_spmd.controller.agent_workers import AgentWorkers
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes.fork_server_client import Exited, NoAnswerError
from elaswave_spmd.runtime.processes.rendezvous import Found, NoRunYetError
from elaswave_spmd.runtime.processes.stop_signals import Signalled
from elaswave_spmd.runtime.transport.credentials import RunKeys
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Envelope, PeerClosed, SelectableMailbox
from tests.unit.controller.made_up_machines import agent_of

OFFER = Offer("b", 2, "a:1", None, 30.0)
NEVER_S = 1e6
RESERVE_S = 7.5
"""The part of a deadline of 30 s that is for the end itself: a fourth of it, the most that it can be."""


class World:
    """An agent with two workers, a made-up fork server, and a controller that orders what it is told to."""

    me, address = -7, "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.mailbox = SelectableMailbox()
        self.read, self.write = os.pipe()
        self.sent: list[am.AnyAgentMessage | None] = []
        self.exits: list[Exited] = []
        self.how_ended: list[str] = []
        self.hangs = False
        self.rejected: dict[str, int] = {}
        self.answers: dict[type[am.AgentMessage], am.AgentMessage] = {}
        self.agent = agent_of(self, self.mailbox, self)
        for rank in (1, 2):
            self.agent._handle(self.envelope(am.Spawn(rank, {})))

    def envelope(self, order: am.AgentMessage) -> Envelope:
        return Envelope(CONTROLLER, am.encode(order))

    def order(self, *orders: am.AgentMessage) -> None:
        for order in orders:
            self.mailbox.put(self.envelope(order))

    def is_late(self) -> None:
        """The deadline of 30 s comes, as after a pause of the process. There is time for last words, and an answer."""
        self.agent._deadline._end_by = time.monotonic() + RESERVE_S - 0.1
        self.answers[am.AgentFailed] = am.Stop(0.0)

    # ---- of links

    def send(self, _: int, header: bytes) -> None:
        message = am.try_decode(header)
        self.sent.append(message)
        if (answer := self.answers.get(cast(Any, type(message)))) is not None:
            self.order(answer)

    # ---- of a fork server

    def fileno(self) -> int:
        return self.read

    def spawn(self, *_: object) -> None:
        if self.hangs:
            raise NoAnswerError("it hangs")

    def poll(self) -> list[Exited]:
        exits, self.exits = self.exits, []
        return exits

    def signal(self, *_: object) -> None:
        return None

    def order_signal(self, *_: object) -> None:
        return None

    def keep_up(self) -> None:
        return None

    def wait_at_most_until(self, _: float) -> None:
        return None

    def stop(self, _: float) -> list[Exited]:
        self.how_ended.append("stop")
        return [Exited(rank, rank, None, signal.SIGTERM) for rank in sorted(self.agent._workers.ranks)]

    def kill(self) -> list[Exited]:
        self.how_ended.append("kill")
        return []


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(agent_deadline, "_RESERVE_S", RESERVE_S)
    made = World()
    yield made
    made.mailbox.close()
    for fd in (made.read, made.write):
        os.close(fd)


def crashed(rank: int) -> Exited:
    return Exited(rank, rank, None, signal.SIGSEGV)


def left(rank: int) -> Exited:
    return Exited(rank, rank, 0, None)


def test_at_the_deadline_nothing_is_waited_for_but_that_the_controller_has_heard_of_it(world: World) -> None:
    """Else the end of the connection might be handled before the last message."""
    world.order(am.Drain(30.0, ""))
    world.agent._turn()
    world.is_late()
    with pytest.raises(RunError, match="30 s was over before workers 1, 2 had left: lost, as if killed"):
        world.agent.serve(OFFER)
    assert world.how_ended == ["kill"] and not world.mailbox.take_all(), "the answer was waited for"


def test_what_has_come_before_a_late_look_at_the_deadline_counts(world: World, capsys: Any) -> None:
    world.order(am.Drain(30.0, ""), am.LetGo("nothing was lost"))
    world.agent._set_deadline(30.0)
    world.is_late()
    world.agent.serve(OFFER)
    assert capsys.readouterr().out.endswith("nothing was lost\n") and world.how_ended == ["stop"]


def test_exits_before_a_late_look_at_the_deadline_are_no_losses(world: World, capsys: Any) -> None:
    world.order(am.Drain(30.0, ""))
    world.exits = [left(1), left(2)]
    world.agent._set_deadline(30.0)
    world.is_late()
    world.agent.serve(OFFER)
    assert "no worker was left here, and none had ended otherwise than in order" in capsys.readouterr().out
    assert [it for it in world.sent if isinstance(it, am.WorkerExited)] == [
        am.WorkerExited(rank, rank, 0, None) for rank in (1, 2)
    ]


def test_workers_that_crash_while_they_are_to_leave_are_told_at_the_deadline(world: World) -> None:
    world.order(am.Drain(30.0, ""))
    world.agent._turn()
    world.exits = [left(1), crashed(2)]
    world.is_late()
    with pytest.raises(RunError, match=r"30 s was over; worker 2 \(pid 2\) was ended by signal 11 \(SIGSEGV\)\n"):
        world.agent.serve(OFFER)


def test_an_agent_that_is_let_go_with_a_loss_says_so_as_an_error(world: World) -> None:
    world.order(am.Drain(None, ""), am.LetGo("worker 2 was lost before it could leave", True))
    with pytest.raises(RunError, match=r"^worker 2 was lost before it could leave$"):
        world.agent.serve(OFFER)
    assert world.how_ended == ["stop"]
    assert not any(isinstance(message, am.AgentFailed) for message in world.sent), "the controller knows"


def test_a_run_that_stops_after_a_notice_is_no_proof_that_its_state_is_saved(world: World, capsys: Any) -> None:
    world.order(am.Drain(30.0, "the run saves its state and stops"), am.Stop(1.0))
    world.agent.serve(OFFER)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "the controller has ended the run; whether its state is saved is told there, not here"


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_worker_that_has_crashed_before_the_run_stops_is_told(world: World, is_ordered: bool) -> None:
    """Not one that the controller has killed, such as a spare."""
    world.order(am.Drain(30.0, ""), *[am.Signal(2, 9)] * is_ordered)
    world.exits = [left(1), Exited(2, 2, None, 9) if is_ordered else crashed(2)]
    world.agent._turn()
    world.order(am.Stop(1.0))
    if is_ordered:
        world.agent.serve(OFFER)
        return
    with pytest.raises(RunError, match=r"worker 2 .* was ended by signal 11 \(SIGSEGV\), before it had left"):
        world.agent.serve(OFFER)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_fork_server_that_hangs_at_the_deadline_is_no_error_of_its_own(world: World, is_late: bool) -> None:
    world.order(am.Drain(30.0, ""))
    world.agent._turn()
    world.hangs = True
    world.order(am.Spawn(3, {}))
    if is_late:
        world.is_late()
    world.answers[am.AgentFailed] = am.Stop(0.0)
    with pytest.raises(RunError, match="before workers 1, 2, 3 had left" if is_late else "it hangs"):
        world.agent.serve(OFFER)


def test_a_signal_that_comes_just_before_the_order_to_prepare_is_not_too_late(world: World) -> None:
    world.agent.terminate(signal.SIGTERM)
    with pytest.raises(module._LeavesError):
        world.agent._prepare(2, cast(Settings, None), cast(PreparedData, None))


def test_last_words_take_no_longer_than_the_deadline_allows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for each in (module, agent_deadline):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert world.agent.farewell_s == 2.0
    world.agent._set_deadline(1.0)
    now[0] += 0.7
    assert world.agent.farewell_s == pytest.approx(0.2)
    now[0] += 0.7
    assert world.agent.farewell_s == 0.0
    world.agent._wait_for_stop()  # returns, though nobody answers

    lingered: list[int] = []
    links = SimpleNamespace(close=lingered.append, address="")
    monkeypatch.setattr(agent_command, "AgentLinks", lambda *_, **__: links)
    machine = SimpleNamespace(fork_server=world, scratch=None, workers=AgentWorkers({}))
    joined = agent_command._Joined(OFFER, FOUND, cast(Any, machine), cast(Any, None), cast(Any, None))
    joined._agent._set_deadline(0.75)
    joined.__exit__()
    assert lingered == [500]


def test_an_order_that_was_meant_for_another_agent_does_not_hide_the_end_of_the_connection(world: World) -> None:
    world.order(am.JoinAgain(-6, "no answer"))
    with pytest.raises(module._ConnectionClosedError):
        world.agent._handle(PeerClosed(CONTROLLER))
    world.order(am.JoinAgain(-6, "no answer"), am.Stop(0.0))
    assert world.agent._handle(PeerClosed(CONTROLLER)) is True


# ---- who joins again

FOUND = Found(-7, "tcp://127.0.0.1:1", RunKeys.make(), "127.0.0.1")
Story = Callable[..., list[str]]


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Story:
    """Runs an agent for which the steps of a story happen. Returns those that have happened."""
    (token := tmp_path / "token").touch(0o600)
    token.write_text("a secret of some bytes")
    nobody = SimpleNamespace(stop=lambda _: [], end_release=lambda: None)
    monkeypatch.setattr(agent_machine, "start_fork_server", lambda *_, **__: nobody)
    scratch = SimpleNamespace(path="", make_again=lambda: None, remove=lambda: None)
    monkeypatch.setattr(agent_machine, "Scratch", lambda: scratch)
    for each in (agent_command, agent_search):
        monkeypatch.setattr(each, "LOOK_AGAIN_S", 0.001)

    def run(
        *steps: tuple[str, Exception | None], timeout_s: float = NEVER_S, is_asked_to_end: bool = False
    ) -> list[str]:
        left, happened = list(steps), []

        def next_step(kind: str) -> None:
            wanted, error = left.pop(0) if left else (kind, NoRunYetError("nobody is there"))
            assert kind == wanted
            happened.append(kind)
            if error is not None:
                raise error

        def find(*_: object) -> Found:
            next_step("find")
            return FOUND

        class Joined:
            def __init__(self, *_: object) -> None:
                self.terminate = lambda _: None

            def __enter__(self) -> Any:
                next_step("join")
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def serve(self, *_: object) -> None:
                if is_asked_to_end:
                    signal.raise_signal(signal.SIGTERM)
                next_step("serve")

        monkeypatch.setattr(agent_search, "find_controller", find)
        monkeypatch.setattr(agent_command, "_Joined", Joined)
        words = ["127.0.0.1:1", "--token-file", str(token), "--timeout", str(timeout_s)]
        assert agent_command.main(words, "elaswave-spmd") == 0
        return happened

    return run


LOST = ("serve", module.LostControllerError("it is gone"))
UNREACHABLE = agent_command._UnreachableError("the controller cannot be reached")


def test_who_joins_again_outlives_a_second_disturbance(story: Story) -> None:
    """A controller that ends answers still; the network fails once more."""
    silent = ("find", NoRunYetError("no answer within 30 s"))
    steps = [
        *[("find", None), ("join", None), LOST],
        *[silent, silent, ("find", None), ("join", UNREACHABLE), ("find", None), ("join", UNREACHABLE)],
        *[silent, ("find", None), ("join", None), ("serve", None)],
    ]
    assert story(*steps) == [kind for kind, _ in steps]


def test_a_signal_that_comes_when_an_agent_does_not_listen_any_more_is_not_forgotten(story: Story) -> None:
    """It has lost the controller, and has not begun to look for it."""
    with pytest.raises(Signalled):
        story(("find", None), ("join", None), LOST, timeout_s=0.05, is_asked_to_end=True)


def test_who_joins_again_does_so_until_the_timeout(story: Story) -> None:
    steps = [("find", None), ("join", None), LOST]
    with pytest.raises(RunError, match=r"nobody answered there again within 0.05 s \(--timeout\) \(nobody is there\)"):
        story(*steps, timeout_s=0.05)


def test_who_joins_again_and_finds_nobody_behind_the_rendezvous_does_not_look_for_ever(story: Story) -> None:
    with pytest.raises(RunError, match="cannot be reached"):
        story(("find", None), ("join", None), LOST, ("find", None), ("join", UNREACHABLE), timeout_s=1e-9)


def test_a_refusal_is_final_also_for_who_joins_again(story: Story) -> None:
    with pytest.raises(ConfigError, match="has another format version"):
        story(("find", None), ("join", None), LOST, ("find", ConfigError("has another format version")))


@pytest.mark.parametrize(
    "steps", [[("find", NoRunYetError("no answer"))], [("find", None), ("join", UNREACHABLE)]], ids=["find", "join"]
)
def test_the_first_start_does_not_look_again(story: Story, steps: list[tuple[str, Exception | None]]) -> None:
    with pytest.raises((ConfigError, RunError), match=r"no answer|cannot be reached"):
        story(*steps)


@pytest.mark.parametrize("is_beside", [True, False])
def test_an_agent_on_the_controllers_machine_is_told_of_the_name_that_both_have(
    story: Story, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    monkeypatch.setattr(agent_command.socket, "gethostname", lambda: "node0")
    address = "tcp://10.0.0.1:7" if is_beside else "tcp://10.0.0.2:7"
    monkeypatch.setattr(sys.modules[__name__], "FOUND", replace(FOUND, address=address, local_host="10.0.0.1"))
    story(("find", None), ("join", None), ("serve", None))
    hint = "by the same name, node0: one failure domain. --name gives this agent another\n"
    assert (hint in capsys.readouterr().out) == is_beside


@pytest.mark.parametrize(
    ("word", "what"),
    [("node0", "is not HOST:PORT"), ("node0:0", "is not HOST:PORT"), ("node0..lan:29400", "cannot be looked up")],
)
def test_a_place_of_the_controller_that_can_be_none_is_told_of_as_it_was_typed(word: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        agent_command.main([word, "--token-file", "x"], "elaswave-spmd")
    error = caught.value
    assert error.what.startswith(f"{word} ") and error.where == word and "HOST:PORT=" not in str(error)
    assert error.fix.endswith("such as node0:29400")


@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_a_deadline_that_never_comes_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match=f"--drain {seconds} is no deadline"):
        agent_command._parse(["a:1", "--token-file", "x", "--drain", seconds], "elaswave-spmd")


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_a_time_to_look_for_the_controller_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match=f"--timeout {seconds} is no time") as caught:
        agent_command._parse(["a:1", "--token-file", "x", "--timeout", seconds], "elaswave-spmd")
    assert caught.value.rule and caught.value.fix
    assert agent_command._parse(["a:1", "--token-file", "x", "--timeout", "0.1"], "elaswave-spmd").timeout == 0.1


@pytest.mark.parametrize(("number", "told"), [(0, "leaves no place"), (2**16 + 1, "is more than"), (2**64, "is more")])
def test_places_for_workers_that_no_machine_has_are_refused(number: int, told: str) -> None:
    with pytest.raises(ConfigError, match=f"--workers {number} {told}") as caught:
        agent_command._parse(["a:1", "--token-file", "x", "--workers", str(number)], "elaswave-spmd")
    assert caught.value.rule and caught.value.fix
    assert agent_command._parse(["a:1", "--token-file", "x", "--workers", str(2**16)], "elaswave-spmd").workers == 2**16


def test_a_moved_file_that_is_none_is_refused_and_stays(tmp_path: Path) -> None:
    """It is taken away when it is read, and root may take away a device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is no regular file"):
            agent_command._parse(["a:1", "--token-file", "x", "--moved-file", str(path)], "elaswave-spmd")
        assert take_note(path) is None and os.path.lexists(path)
    (tmp_path / "note").write_text("node1:2\n")
    agent_command._parse(["a:1", "--token-file", "x", "--moved-file", str(tmp_path / "note")], "elaswave-spmd")
    assert take_note(tmp_path / "note") == "node1:2" and not (tmp_path / "note").exists()


@pytest.mark.parametrize("name", ["evil\nname\x1b[31m", "n" * 254, "\u202eedon"])
def test_a_name_that_cannot_be_printed_as_it_is_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name of a machine") as caught:
        agent_command._parse(["a:1", "--token-file", "x", "--name", name], "elaswave-spmd")
    assert "253 characters" in caught.value.rule and caught.value.what.isprintable() and caught.value.what.isascii()
    good = "Knöten 0 " + "n" * 244
    assert agent_command._parse(["a:1", "--token-file", "x", "--name", good], "elaswave-spmd").name == good
