"""The rendezvous: secrets in files, what agents are told, and a controller that is missing or another."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.errors import ConfigError, DataError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes import rendezvous as module
from elaswave_spmd.runtime.processes.rendezvous import (
    NoRunYetError,
    Rendezvous,
    find_controller,
    read_secret,
    resolve_address,
)
from elaswave_spmd.runtime.processes.stop_signals import Signalled, StopSignals
from elaswave_spmd.runtime.transport.credentials import RunKeys, RunToken
from tests.descriptors import keepalive_of_accepted
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually, others_run_while_this_thread_waits

SECRET, ADDRESS = b"a secret of some bytes", "tcp://127.0.0.1:1234"
KEYS = RunKeys.make()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def controller(port: int) -> Iterator[Rendezvous]:
    made = Rendezvous("127.0.0.1", port, SECRET)
    made.announce(ADDRESS, KEYS)
    yield made
    made.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_a_signal_that_does_not_interrupt_the_wait_ends_it_all_the_same(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come just before the wait, or, as here, to another thread. Before the wait it would interrupt this one."""
    waits = threading.Event()

    class Poller(zmq.Poller):
        def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
            assert timeout is not None and timeout <= 1001, "in milliseconds"
            waits.set()  # the other thread goes on when this one is in the wait: see below
            return super().poll(timeout)

    def signal_this_thread() -> None:
        waits.wait(PATIENCE_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    monkeypatch.setattr(zmq, "Poller", Poller)
    thread = threading.Thread(target=signal_this_thread)
    with StopSignals((signal.SIGTERM,)), others_run_while_this_thread_waits(), pytest.raises(Signalled):
        thread.start()
        find_controller("127.0.0.1", port, SECRET, PATIENCE_S)
    thread.join()


def test_agents_find_the_controller_and_get_ids_of_their_own(controller: Rendezvous, port: int) -> None:
    found = [find_controller("127.0.0.1", port, SECRET, PATIENCE_S) for _ in range(2)]
    assert [it.peer for it in found] == [-2, -3]
    assert {(it.address, it.credentials, it.local_host) for it in found} == {(ADDRESS, KEYS, "127.0.0.1")}
    assert not controller.rejected, "whoever looks for a controller knocks once, with the right key"


def test_the_connection_of_a_machine_that_has_vanished_does_not_stay_for_good(
    controller: Rendezvous, port: int
) -> None:
    with socket.create_connection(("127.0.0.1", port)):
        eventually(lambda: keepalive_of_accepted(f"tcp://127.0.0.1:{port}") == [(True, 300, 60, 5)])


def test_another_secret_is_refused(controller: Rendezvous, port: int) -> None:
    with pytest.raises(ConfigError, match="has another secret, or is no controller"):
        find_controller("127.0.0.1", port, SECRET + b"!", PATIENCE_S)
    eventually(lambda: controller.rejected)


def test_a_record_of_a_run_that_has_ended_is_worthless(port: int) -> None:
    """Somebody who has copied all that passed, and serves it again at the same port, has no run to offer."""
    recorded: list[bytes] = []
    controller = Rendezvous("127.0.0.1", port, SECRET)
    controller.announce(ADDRESS, KEYS)
    with Tap(port, recorded) as tap:
        assert find_controller("127.0.0.1", tap.port, SECRET, PATIENCE_S).address == ADDRESS
    controller.close()
    for secret in (KEYS.client, KEYS.server, ADDRESS):
        assert secret.encode() not in b"".join(recorded), "what passes is encrypted"
    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=serve_again, args=[server, recorded], daemon=True).start()
        with pytest.raises(ConfigError, match="has another secret, or is no controller"):
            find_controller("127.0.0.1", port, SECRET, PATIENCE_S)


class Tap:
    """Passes one connection on to a port, and records what comes back."""

    def __init__(self, port: int, recorded: list[bytes]) -> None:
        self._to, self._recorded = port, recorded
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._server.close()

    def _pass_on(self) -> None:
        near, _ = self._server.accept()
        with near, socket.create_connection(("127.0.0.1", self._to)) as far:
            ends = {near: far, far: near}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    if not (data := end.recv(65536)):
                        return
                    if end is far:
                        self._recorded.append(data)
                    ends[end].sendall(data)


def serve_again(server: socket.socket, recorded: list[bytes], heard: list[bytes] | None = None) -> None:
    """Answer everybody with what was recorded, one piece for each that comes. What comes is appended to `heard`."""
    with suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                for piece in recorded:
                    client.sendall(piece)
                    data = client.recv(65536)
                    if heard is not None:
                        heard.append(data)


def test_it_listens_at_one_address_only(controller: Rendezvous, port: int) -> None:
    with socket.create_server(("127.0.0.2", port)):
        pass  # another process may have the same port at another address


def test_questions_that_are_none_are_counted(controller: Rendezvous, port: int) -> None:
    """Of a program that has the secret, but is no agent of ours."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    module._keys_of(SECRET).secure_client(dealer)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    nested = b"\x92\x01" + b"\x91" * 4000 + b"\x01"
    for frames in ([b""], [b"\xc1"], [b"\x91\xa1x"], [nested], [b"a", b"b"], [b""] * 100):
        dealer.send_multipart(frames)
    eventually(lambda: controller.rejected == {module._BAD_QUESTION: 6})
    context.destroy(0)
    assert find_controller("127.0.0.1", port, SECRET, PATIENCE_S).credentials == KEYS


def test_a_token_is_told_as_well_as_keys(port: int) -> None:
    token = RunToken.make()
    controller = Rendezvous("127.0.0.1", port, SECRET)
    controller.announce(ADDRESS, token)
    assert find_controller("127.0.0.1", port, SECRET, PATIENCE_S).credentials == token
    controller.close()
    controller.close()


def test_another_format_version_is_refused_with_both_named(
    controller: Rendezvous, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    with pytest.raises(ConfigError) as caught:
        find_controller("127.0.0.1", port, SECRET, PATIENCE_S)
    assert not isinstance(caught.value, NoRunYetError), "it stays refused"
    assert f"format version {FORMAT_VERSION + 1}," in caught.value.what
    assert caught.value.what.endswith(f"format version {FORMAT_VERSION}")


def test_a_missing_controller_is_reported_after_the_timeout(port: int) -> None:
    with pytest.raises(RunError, match=rf"no controller at 127.0.0.1:{port} within 0.2 s"):
        find_controller("127.0.0.1", port, SECRET, 0.2)


def test_a_listener_that_never_answers_is_not_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoRunYetError) as caught:
        find_controller("127.0.0.1", silent.getsockname()[1], SECRET, PATIENCE_S)
    assert caught.value.what.startswith("no run is announced at 127.0.0.1:")


def test_who_ends_each_connection_may_be_a_controller_later() -> None:
    def end_each(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=end_each, args=[server], daemon=True).start()
        with pytest.raises(NoRunYetError, match="has another secret, or is no controller"):
            find_controller("127.0.0.1", server.getsockname()[1], SECRET, PATIENCE_S)


def test_a_controller_that_ends_before_it_answers_makes_room_for_the_next(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question goes with the first one, so the second is asked as well."""
    asked = threading.Event()
    first = Rendezvous("127.0.0.1", port, SECRET)
    monkeypatch.setattr(first, "_reply", lambda _: asked.set())
    first.announce("tcp://127.0.0.1:1", KEYS)
    found: list[str] = []
    agent = threading.Thread(
        target=lambda: found.append(find_controller("127.0.0.1", port, SECRET, PATIENCE_S).address), daemon=True
    )
    agent.start()
    assert asked.wait(PATIENCE_S)
    first.close()
    with closing(Rendezvous("127.0.0.1", port, SECRET)) as second:
        second.announce(ADDRESS, KEYS)
        agent.join(PATIENCE_S)
    assert found == [ADDRESS]


def test_a_taken_port_is_refused(controller: Rendezvous, port: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Rendezvous("127.0.0.1", port, SECRET)
    assert caught.value.where == f"runtime.rendezvous=127.0.0.1:{port}"


def test_a_secret_ends_before_the_end_of_the_line(token_file: Path) -> None:
    assert read_secret(str(token_file), where="here") == SECRET
    token_file.chmod(0o400)
    assert read_secret(str(token_file), where="here") == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o755])
def test_a_secret_that_others_may_read_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_secret(str(token_file), where="here")
    assert caught.value.fix == f"chmod 600 {token_file}" and f"mode {mode:04o}" in caught.value.what


@pytest.mark.parametrize("content", [b"", b"fifteen bytes..\n"])
def test_a_short_secret_is_refused(token_file: Path, content: bytes) -> None:
    token_file.write_bytes(content)
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        read_secret(str(token_file), where="here")


def test_a_missing_token_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, "~nobody-has-this-name/token"):
        with pytest.raises(ConfigError, match="cannot read the token file"):
            read_secret(str(path), where="here")


def test_links_listen_on_one_address_of_this_machine() -> None:
    assert resolve_address("localhost", where="here") == "127.0.0.1"
    for wrong in ("203.0.113.1", "no-such-host.invalid", "node0..lan"):
        with pytest.raises(ConfigError, match="no address of this machine"):
            resolve_address(wrong, where="here")
    with pytest.raises(ConfigError, match="every address of this machine"):
        resolve_address("0.0.0.0", where="here")


def test_errors_travel() -> None:
    error = DataError("data.path=a is empty", rule="a rule", where="data.path=a", exists="b", fix="c")
    there = am.Problem.from_error(error)
    message = am.decode(am.encode(am.AgentFailed(there)))
    assert message == am.AgentFailed(there)
    here = there.to_error("the agent on b")
    assert isinstance(here, DataError)
    assert (here.what, here.rule, here.exists, here.fix) == ("data.path=a is empty", "a rule", "b", "c")
    assert here.where == "data.path=a, the agent on b"
    other = am.Problem.from_error(ValueError("x"), "Traceback ...").to_error("the agent on b")
    assert isinstance(other, RunError) and str(other) == "the agent on b failed:\nTraceback ..."


# A controller that ends while a process lives that was forked from it; this one lives until the input is closed.
_FORKS = """
import os, sys
from elaswave_spmd.runtime.processes.rendezvous import Rendezvous
rendezvous, (read, write) = Rendezvous("127.0.0.1", int(sys.argv[1]), b"a secret of some bytes"), os.pipe()
if not os.fork():
    os.write(write, b".")
    sys.stdin.read()
    os._exit(0)
os.read(read, 1)
rendezvous.close()
print("closed", flush=True)
os.wait()
"""


def test_a_process_that_code_of_the_user_has_forked_leaves_the_port_to_the_next_controller(port: int) -> None:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", _FORKS, str(port)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "closed\n"
        Rendezvous("127.0.0.1", port, SECRET).close()
        assert process.poll() is None, "the other one lives"
