"""Links of a worker that follow a change of the mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.peers import Reached
from elaswave_spmd.runtime.transport.mailbox import Mailbox, PeerClosed
from elaswave_spmd.worker.process import WorkerProcess


class FullLinks:
    """Links of worker 0 that have no descriptor left for one to worker 2."""

    def __init__(self) -> None:
        self.connected: list[int] = []

    def drop_all_but(self, peers: object, unlinked: object) -> None:
        pass

    def connect(self, peer: int, address: str) -> None:
        if peer == 2:
            raise RunError("links of 0: there can be no link to 2 (Too many open files)")
        self.connected.append(peer)


def test_why_there_can_be_no_link_to_a_peer_is_said_and_the_others_get_theirs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The controller learns that the link is lost, as of any that has ended, and makes it again."""
    worker, links = WorkerProcess.__new__(WorkerProcess), FullLinks()
    worker._rank, worker._trace, worker._executor = 0, None, None
    worker._mailbox, worker._reached, worker._links = Mailbox(), Reached(), cast(Any, links)
    worker._progress = cast(Any, SimpleNamespace(num_workers=0))
    addresses = {rank: f"ipc:///tmp/{rank}" for rank in range(4)}
    worker._members_changed(m.Reconfigure(1, ((0, 1, 2, 3),), (0, 1), ((1, 1, 1, 1),), addresses, (), 0, ()))
    assert links.connected == [1, 3] and worker._mailbox.take_all() == [PeerClosed(2)]
    assert capfd.readouterr().err == "worker 0: links of 0: there can be no link to 2 (Too many open files)\n"
