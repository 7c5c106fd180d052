"""Heartbeats over real links: they say how far the training thread is, and end with the link."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from elaswave_spmd.conf.schema import Timeouts
from elaswave_spmd.recovery.messages import Heartbeat, decode
from elaswave_spmd.runtime.processes.beat_relay import RelayClient
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
from elaswave_spmd.worker.heartbeat import HeartbeatSender, Progress
from tests.waiting import PATIENCE_S, eventually

RANK = 5
_LONG = Timeouts(suspect=4e3, status=5e3, progress=6e3, start=7e3, join=7e3, leave=7e3)
OFTEN, SELDOM = replace(_LONG, heartbeat=0.01), replace(_LONG, heartbeat=1000.0)


class Scene:
    """A controller's and a worker's links, in one process."""

    def __init__(self, directory: str) -> None:
        self.mailbox = Mailbox()
        self.controller = Links(CONTROLLER, self.mailbox, directory=directory)
        self.worker = Links(RANK, Mailbox(), directory=directory)
        self.worker.connect(CONTROLLER, self.controller.address)
        assert self.worker.wait_connected([CONTROLLER], PATIENCE_S) == []

    def beat(self) -> Heartbeat:
        item = self.mailbox.get(PATIENCE_S)
        assert isinstance(item, Envelope) and item.sender == RANK and not item.payloads
        message = decode(item.header)
        assert isinstance(message, Heartbeat)
        return message

    def beat_like(self, wanted: Heartbeat) -> bool:
        return any(self.beat() == wanted for _ in range(2000))


@pytest.fixture
def scene() -> Iterator[Scene]:
    directory = socket_directory()
    made = Scene(directory)
    yield made
    made.worker.close()
    made.controller.close()
    shutil.rmtree(directory)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("heartbeat-")]


def test_the_first_comes_without_a_wait_and_says_what_is(scene: Scene) -> None:
    sender = HeartbeatSender(RANK, scene.worker, Progress(7, True, "votes of step 3"), SELDOM)
    assert scene.beat() == Heartbeat(RANK, 7, True, "votes of step 3")
    sender.stop()
    assert len(scene.mailbox) == 0


def test_they_go_on_while_nothing_changes_and_follow_what_does(scene: Scene) -> None:
    progress = Progress()
    sender = HeartbeatSender(RANK, scene.worker, progress, OFTEN)
    assert [scene.beat() for _ in range(3)] == [Heartbeat(RANK, 0, False, "")] * 3
    progress.count, progress.action = 4, "backward of micro-batch 1"
    assert scene.beat_like(Heartbeat(RANK, 4, False, "backward of micro-batch 1"))
    progress.waiting = True
    assert scene.beat_like(Heartbeat(RANK, 4, True, "backward of micro-batch 1"))
    sender.stop()
    sender.stop()


def test_one_that_has_waited_says_whether_much_is_still_on_its_way(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not looked at of a worker that has gone on since the last one: in most steps never."""
    num_looks = 0

    def is_sending() -> bool:
        nonlocal num_looks
        num_looks += 1
        return True

    monkeypatch.setattr(scene.worker, "is_sending", is_sending)
    progress = Progress(7, False, "forward")
    sender = HeartbeatSender(RANK, scene.worker, progress, OFTEN)
    assert [scene.beat() for _ in range(3)] == [Heartbeat(RANK, 7, False, "forward")] * 3 and not num_looks
    progress.waiting = True
    assert scene.beat_like(Heartbeat(RANK, 7, True, "forward", is_sending=True)) and num_looks
    sender.stop()


def test_they_come_less_often_on_many_workers(scene: Scene) -> None:
    """Also of a sender that was started when there were fewer."""
    progress = Progress()
    sender = HeartbeatSender(RANK, scene.worker, progress, OFTEN)
    scene.beat()
    progress.num_workers = 10_000_000
    progress.count = 1  # told by those alone that were made when there were many: others may still be on their way
    sender._stopping.wait(1.0)  # a hundred periods
    beats = [decode(item.header) for item in scene.mailbox.take_all() if isinstance(item, Envelope)]
    of_many = [beat for beat in beats if isinstance(beat, Heartbeat) and beat.progress == 1]
    assert len(of_many) <= 1, "the next one, with the period that it had begun"
    sender.stop()


@pytest.mark.parametrize("is_relayed", [False, True])
def test_they_end_with_the_link(scene: Scene, is_relayed: bool) -> None:
    relay = cast(RelayClient, Relay(answers=True)) if is_relayed else None
    sender = HeartbeatSender(RANK, scene.worker, Progress(), OFTEN, relay)
    if relay is None:
        scene.beat()
    scene.worker.drop(CONTROLLER)
    sender._thread.join(PATIENCE_S)
    assert not sender._thread.is_alive()


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_a_worker_whose_link_has_failed_is_silent_though_its_agent_would_send_on_what_it_says(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Else all would wait for what it has to say, for as long as another controller may come."""
    relay = Relay(answers=True)
    sender = HeartbeatSender(RANK, scene.worker, Progress(), OFTEN, cast(RelayClient, relay), outlives_link=True)
    relay.beats.get(timeout=PATIENCE_S)
    if how == "closed":
        scene.worker.drop(CONTROLLER)
    else:
        monkeypatch.setattr(scene.worker, "unacknowledged_s", lambda _: OFTEN.suspect / 2)
        scene.beat()  # it takes the link again, on which nothing would come through

    def is_quiet() -> bool:
        while not relay.beats.empty():
            relay.beats.get()
        sender._stopping.wait(20 * OFTEN.heartbeat)
        return relay.beats.empty()

    eventually(is_quiet)
    assert sender._thread.is_alive()
    sender.stop()


def test_they_go_by_a_relay_that_answers_and_to_the_controller_as_well_when_it_does_not(scene: Scene) -> None:
    relay = Relay(answers=True)
    sender = HeartbeatSender(RANK, scene.worker, Progress(), OFTEN, cast(RelayClient, relay))
    beats = [relay.beats.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [decode(beat) for beat in beats] == [Heartbeat(RANK, 0, False, "")] * 3
    assert len(scene.mailbox) == 0
    relay.answers = False
    assert scene.beat() == Heartbeat(RANK, 0, False, "")
    sender.stop()


class Relay:
    """The worker's end of a relay that answers, or does not."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.beats: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, beat: bytes, period_s: float) -> bool:
        assert period_s == OFTEN.heartbeat
        self.beats.put(beat)
        return self.answers
