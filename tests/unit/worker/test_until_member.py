"""What ends a worker that is no member of the mesh yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.runtime.transport.mailbox import Interrupted, Item, Mailbox, PeerClosed
from elaswave_spmd.worker import process as module
from elaswave_spmd.worker.channel import WorkerStopped
from elaswave_spmd.worker.process import WorkerProcess
from elaswave_spmd.worker.spec import OptionSpec


def left_at_the_end(monkeypatch: pytest.MonkeyPatch, options: OptionSpec) -> list[Item]:
    """Its link to the controller is closed, then a signal comes: what is left in the mailbox when it has ended."""
    monkeypatch.setattr(module, "message_bounds", lambda *_: None)
    worker = WorkerProcess.__new__(WorkerProcess)
    worker._mailbox = Mailbox()
    worker._spec = cast(Any, SimpleNamespace(run=SimpleNamespace(options=options)))
    worker._mailbox.put(PeerClosed(CONTROLLER))
    worker._mailbox.interrupt("SIGTERM")
    plan = SimpleNamespace(job=None, description=SimpleNamespace(layout=None))
    with pytest.raises(WorkerStopped):
        worker._until_member(cast(Any, plan))
    return worker._mailbox.take_all()


def test_the_end_of_its_link_to_the_controller_does_where_its_life_pipe_is_that_of_an_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert left_at_the_end(monkeypatch, OptionSpec(has_agent=True)) == [Interrupted("SIGTERM")]


def test_elsewhere_the_link_alone_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The life pipe tells of the controller's end; the controller decides about a link."""
    assert left_at_the_end(monkeypatch, OptionSpec()) == []
