"""What ends a worker that is no member of the mesh yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.recovery.generations import FIRST, ControllerFence
from elaswave_spmd.recovery.messages import Stop, encode
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Interrupted, Item, Mailbox, PeerClosed
from elaswave_spmd.worker import process as module
from elaswave_spmd.worker.channel import WorkerStopped
from elaswave_spmd.worker.process import WorkerProcess
from elaswave_spmd.worker.spec import OptionSpec


def left_at_the_end(monkeypatch: pytest.MonkeyPatch, options: OptionSpec, *then: Item) -> list[Item]:
    """Its link to the controller is closed, then something comes: what is left in the mailbox when it has ended."""
    monkeypatch.setattr(module, "message_bounds", lambda *_: None)
    monkeypatch.setattr(module, "_EXPLAINED_S", 0.0)
    worker = WorkerProcess.__new__(WorkerProcess)
    worker._mailbox = Mailbox()
    worker._rank = 3
    worker._links, worker._fence = cast(Any, SimpleNamespace(me=3)), ControllerFence(FIRST)
    worker._spec = cast(Any, SimpleNamespace(run=SimpleNamespace(options=options)))
    for item in (PeerClosed(CONTROLLER), *then):
        worker._mailbox.put(item)
    plan = SimpleNamespace(job=None, description=SimpleNamespace(layout=None))
    with pytest.raises(WorkerStopped):
        worker._until_member(cast(Any, plan))
    return worker._mailbox.take_all()


SIGTERM = Interrupted("SIGTERM")


def test_the_end_of_its_link_to_the_controller_does_where_its_life_pipe_is_that_of_an_agent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert left_at_the_end(monkeypatch, OptionSpec(has_agent=True), SIGTERM) == [SIGTERM]
    assert not capfd.readouterr().err


def test_elsewhere_it_says_that_the_link_alone_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would never be a member, and the controller would wait for it, up to timeouts.start."""
    assert left_at_the_end(monkeypatch, OptionSpec()) == []
    assert capfd.readouterr().err.startswith("worker 3: its link to the controller has ended")


@pytest.mark.parametrize(
    "end", [SIGTERM, ControllerLost(), Envelope(CONTROLLER, encode(Stop()))], ids=["signal", "life pipe", "stop"]
)
def test_nothing_is_said_where_the_controller_is_gone_or_has_ended_it(
    end: Item, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end of a link may be noticed before what came over another one."""
    assert left_at_the_end(monkeypatch, OptionSpec(), end) == []
    assert not capfd.readouterr().err
