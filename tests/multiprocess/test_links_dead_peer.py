"""Sending to a peer that has just died never blocks, whether or not its end has been noticed yet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from elaswave_spmd.runtime.transport.credentials import RunKeys
from elaswave_spmd.runtime.transport.links import Links, Transport, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Mailbox, PeerClosed
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


# A process with links, that forks another one when it is told to. It says its address, and the other one's id.
_FORKS = """
import json, os, sys, time
from elaswave_spmd.runtime.transport.credentials import credentials_from_dict
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox
transport, directory, credentials = json.loads(sys.argv[1])
keys = credentials and credentials_from_dict(credentials)
links = Links(7, Mailbox(), transport=transport, directory=directory, credentials=keys)
print(links.address, flush=True)
sys.stdin.readline()
if child := os.fork():
    print(child, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_the_end_of_a_peer_is_noticed_while_a_process_lives_that_its_user_has_forked(transport: Transport) -> None:
    keys = RunKeys.make() if transport == "tcp" else None
    directory, mailbox, pipe = socket_directory(), Mailbox(), subprocess.PIPE
    links = Links(0, mailbox, transport=transport, directory=directory, credentials=keys)
    words = json.dumps([transport, directory, keys and keys.to_dict()])
    command = [sys.executable, "-c", _FORKS, words]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        child = 0
        try:
            links.connect(7, peer.stdout.readline().strip())
            assert not links.wait_connected([7], PATIENCE_S)
            print(file=peer.stdin, flush=True)
            child = int(peer.stdout.readline())
            peer.kill()
            eventually(lambda: PeerClosed(7) in mailbox.take_all())
            os.kill(child, 0)
        finally:
            peer.kill()
            if child:
                os.kill(child, signal.SIGKILL)
            links.close()
            shutil.rmtree(directory)
