"""Sending to a peer that has just died never blocks, whether or not its end has been noticed yet."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox
from tests.waiting import PATIENCE_S, eventually


def test_a_send_between_a_peers_end_and_its_notice_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread may be in `send` when the connection goes; a PUSH socket without a peer waits for ever."""
    monkeypatch.chdir(tmp_path)  # the path of an ipc socket is short
    mailbox, other = Mailbox(), Mailbox()
    peer = Links(1, other, directory=".")
    links = Links(0, mailbox, directory=".")
    events: list[int] = []
    monkeypatch.setattr(links, "_link_event", lambda _, event, __: events.append(event))  # the notice is late
    links.connect(1, peer.address)
    eventually(lambda: links.send(1, b"hello") and len(other))
    peer.close()
    eventually(lambda: any(event & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED) for event in events))
    assert links.reaches(1), "the end was noticed: the sends below would meet a link that is closed"

    def send_until_refused() -> None:
        """libzmq takes some more, until its other thread has told the socket that it has no connection any more."""
        while links.send(1, b"x", [bytes(100)]):
            pass

    sender = threading.Thread(target=send_until_refused, daemon=True)
    sender.start()
    sender.join(PATIENCE_S)
    assert not sender.is_alive(), "a send to a dead peer blocks"
    assert links.reaches(1), "the end was not noticed before a send was refused"
    links.close()
