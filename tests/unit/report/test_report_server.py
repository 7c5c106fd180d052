"""What a live page is sent, how much of a core that may take, and what strangers on the machine may take of it."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.report.server import MOST_CONNECTIONS, REQUEST_S, SHARE, LiveRun, LiveServer, _Handler
from tests.descriptors import none_left
from tests.waiting import PATIENCE_S, eventually


@dataclass
class Clocks:
    """Time stands still but for what the test adds; each look takes `cost` seconds of processor time."""

    now: float = 0.0
    spent: float = 0.0
    cost: float = 0.5

    def passed(self) -> float:
        return self.now

    def used(self) -> float:
        self.spent += self.cost
        return self.spent


def test_a_page_is_brought_up_to_date_within_its_share_of_a_core(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    clocks = Clocks()
    live = LiveRun(RunReader(tmp_path), clocks.passed, clocks.used)
    assert json.loads(live.changes(""))["version"] == "0.0"
    (tmp_path / "events.jsonl").write_text('{"event": "finish", "time": 1.0}\n')
    clocks.now = clocks.cost / SHARE - 1e-6
    assert json.loads(live.changes("0.0")) == {"version": "0.0", "state": "not ended"}
    clocks.now = clocks.cost / SHARE
    changed = json.loads(live.changes("0.0"))
    assert (changed["version"], changed["state"]) == ("0.1", "finished") and "columns" in changed
    assert "columns" not in json.loads(live.changes("0.1"))


@pytest.fixture
def live(tmp_path: Path) -> LiveRun:
    (tmp_path / "config.yaml").write_text("model: m\n")
    return LiveRun(RunReader(tmp_path))


@pytest.fixture
def connections() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_silent_connections_keep_nobody_out_for_longer_than_a_request_may_take(
    live: LiveRun, connections: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the machine can connect without the token: each connection took a thread for as long as it was."""
    monkeypatch.setattr(_Handler, "timeout", None)  # of one read
    clocks = Clocks()
    with LiveServer(live, clock=clocks.passed) as server:
        serving = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        serving.start()
        connections.callback(server.shutdown)
        silent = [
            connections.enter_context(socket.create_connection(("127.0.0.1", server.server_port), PATIENCE_S))
            for _ in range(MOST_CONNECTIONS + 8)
        ]
        eventually(lambda: server.connections == MOST_CONNECTIONS)
        for link in silent[:2]:
            link.sendall(b"GET / HTTP/1.1\r\n")  # a request that goes on and on is late as well
        clocks.now = REQUEST_S
        for link in silent[:MOST_CONNECTIONS]:
            with suppress(ConnectionResetError):
                while link.recv(4096):
                    pass
        eventually(lambda: server.connections == 8)
        with urllib.request.urlopen(f"{server.address}changes", timeout=PATIENCE_S) as answer:
            assert answer.status == 200 and json.loads(answer.read())["version"] == "0.0"
        eventually(lambda: server.connections == 8)


def test_where_no_file_can_be_opened_the_server_pauses_after_each_try(live: LiveRun, connections: ExitStack) -> None:
    """The connection waits to be accepted, so `serve_forever` tried again at once, and took a core."""
    with LiveServer(live) as server:
        pauses: list[float] = []
        server._ended = SimpleNamespace(wait=pauses.append)  # type: ignore[assignment]
        link = connections.enter_context(socket.create_connection(("127.0.0.1", server.server_port), PATIENCE_S))
        link.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with none_left():
            for number in range(1, 4):
                server.handle_request()
                assert len(pauses) == number and server.connections == 0
        server.handle_request()
        assert link.recv(4096).startswith(b"HTTP/1.0 403 ") and len(pauses) == 3
