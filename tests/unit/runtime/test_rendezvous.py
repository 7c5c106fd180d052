"""The rendezvous at a store: secrets in files, the proof of a record, and a controller that is missing or another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.conf.format_version import FORMAT_VERSION
from elaswave_spmd.errors import ConfigError, DataError, RunError
from elaswave_spmd.runtime.processes import agent_messages as am
from elaswave_spmd.runtime.processes import rendezvous as module
from elaswave_spmd.runtime.processes.rendezvous import Rendezvous, find_controller, read_secret, resolve_address

SECRET, ADDRESS = b"a secret of some bytes", "tcp://127.0.0.1:1234"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def store(port: int) -> Iterator[Rendezvous]:
    made = Rendezvous("127.0.0.1", port, SECRET)
    made.announce(ADDRESS)
    yield made
    made.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_agents_find_the_controller_and_get_ids_of_their_own(store: Rendezvous, port: int) -> None:
    found = [find_controller("127.0.0.1", port, SECRET, 5.0) for _ in range(2)]
    assert [it.peer for it in found] == [-2, -3]
    assert {(it.address, it.token, it.local_host) for it in found} == {(ADDRESS, store.token, "127.0.0.1")}
    assert SECRET not in store.token and len(store.token) == 32


def test_every_run_has_a_key_of_its_own(store: Rendezvous, port: int) -> None:
    store.close()
    again = Rendezvous("127.0.0.1", port, SECRET)
    assert again.token != store.token
    again.close()


def test_another_secret_is_refused(store: Rendezvous, port: int) -> None:
    with pytest.raises(ConfigError, match="has another secret"):
        find_controller("127.0.0.1", port, SECRET + b"!", 5.0)


def test_an_address_that_somebody_else_wrote_is_not_believed(store: Rendezvous, port: int) -> None:
    Rendezvous.announce(store, ADDRESS)
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    record = client.get(module._RECORD).decode()
    client.set(module._RECORD, record.replace("1234", "4321"))
    with pytest.raises(ConfigError, match="has another secret"):
        find_controller("127.0.0.1", port, SECRET, 5.0)


def test_another_format_version_is_refused_with_both_named(
    store: Rendezvous, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORMAT_VERSION", FORMAT_VERSION + 1)
    store.announce(ADDRESS)
    with pytest.raises(ConfigError) as caught:
        find_controller("127.0.0.1", port, SECRET, 5.0)
    assert f"format version {FORMAT_VERSION + 1}," in caught.value.what
    assert caught.value.what.endswith(f"format version {FORMAT_VERSION}")


def test_a_missing_controller_is_reported_after_the_timeout(port: int) -> None:
    with pytest.raises(RunError, match=rf"no controller at 127.0.0.1:{port} within 0.2 s"):
        find_controller("127.0.0.1", port, SECRET, 0.2)


def test_a_listener_that_never_answers_is_not_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STORE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError) as caught:
        find_controller("127.0.0.1", silent.getsockname()[1], SECRET, 5.0)
    assert caught.value.what.startswith("no run is announced at 127.0.0.1:")


def test_a_taken_port_is_refused(store: Rendezvous, port: int) -> None:
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
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the token file"):
            read_secret(str(path), where="here")


def test_links_listen_on_one_address_of_this_machine() -> None:
    assert resolve_address("localhost", where="here") == "127.0.0.1"
    for wrong in ("203.0.113.1", "no-such-host.invalid"):
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
