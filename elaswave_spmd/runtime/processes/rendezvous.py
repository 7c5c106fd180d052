"""Where machines that start a run meet: a record in c10d's TCPStore says at which address the controller listens.

Bootstrap only. The store asks nobody who they are, so it holds no secret, and what it says is believed only with a
proof that its writer knows the secret; links then use a key that is derived from it for this run.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from elaswave_spmd.conf.format_version import FORMAT_VERSION, version_mismatch
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.transport.tcp_store import connect_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

T = TypeVar("T")
_RECORD, _AGENTS = "elaswave_spmd/controller", "elaswave_spmd/agents"
_SHORTEST_SECRET = 16  # bytes
_STORE_TIMEOUT_S = 10.0  # for one who listens already
_RETRY_S = 0.25


class Record(msgspec.Struct, frozen=True):
    """What the store holds. `proof` is a keyed hash of the rest."""

    format: int  # `FORMAT_VERSION` of the controller
    address: str
    nonce: str
    proof: str


@dataclass(frozen=True)
class Found:
    """What an agent learns: its peer id, the controller's link address, the key of the links, and the address of this
    machine from which the store was reached."""

    peer: int
    address: str
    token: bytes
    local_host: str


def read_secret(path: str, *, where: str) -> bytes:
    """The secret in a file that only its owner may read.

    Args:
        where: what named the file, for messages.

    Raises:
        ConfigError: no such file, one that others may read, or one that is too short.
    """
    file = Path(path).expanduser()
    fix = f"(umask 077; openssl rand -hex 32 > {path}), and the same file on every machine"
    try:
        with open(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            secret = stream.read(65536).strip()
    except OSError as error:
        raise ConfigError(
            "the token file can be read", got=error.strerror or str(error), where=where, fix=fix
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 or status.st_uid != os.geteuid():
        got = f"mode {mode:04o}, owner {status.st_uid}"
        raise ConfigError(
            "only its owner, who starts the run, may read a token file", got=got, where=where, fix=f"chmod 600 {path}"
        )
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"a secret has at least {_SHORTEST_SECRET} bytes", got=f"{len(secret)} bytes", where=where, fix=fix
        )
    return secret


def resolve(host: str, *, where: str) -> str:
    """The IPv4 address of a name, to listen on.

    Raises:
        ConfigError: unknown, or no address of this machine.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        raise ConfigError(
            "links listen on an address of this machine", got=f"{host}: {error.strerror or error}", where=where
        ) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(
            "links listen on one address, to which the others connect", got=host, where=where, fix="hostname -I"
        )
    return address


class Rendezvous:
    """The controller's end: serves the store until `close`.

    Args:
        host, port: where agents look for it. On loopback it listens there only, otherwise on all addresses.
        secret: what controller and agents share.

    Raises:
        ConfigError: the port is taken.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_hex(16)
        loopback = is_loopback(host)
        try:
            listener = socket.create_server((host if loopback else "", port))
        except OSError as error:
            raise ConfigError(
                "the store of a run needs a port of its own on the controller's machine",
                got=error.strerror or str(error),
                where=f"runtime.rendezvous={host}:{port}",
                fix="another port, here and for the agents",
            ) from error
        local = host if loopback else "127.0.0.1"
        self._store: TCPStore | None = serve_store(listener, local, _STORE_TIMEOUT_S)

    @property
    def token(self) -> bytes:
        """The key of this run's links to agents."""
        return _token(self._secret, self._nonce)

    def announce(self, address: str) -> None:
        """Say where the controller listens."""
        assert self._store is not None
        proof = _proof(self._secret, FORMAT_VERSION, address, self._nonce)
        self._store.set(_RECORD, msgspec.json.encode(Record(FORMAT_VERSION, address, self._nonce, proof)).decode())

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._store = None


def find_controller(host: str, port: int, secret: bytes, timeout_s: float) -> Found:
    """Wait for the controller's store, and take the next peer id.

    Raises:
        RunError: nobody listens there within `timeout_s` seconds.
        ConfigError: another secret, another version, or no store of a run.
    """
    where = f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    while True:
        # c10d's own client complains on stderr at every try, and cannot be interrupted.
        try:
            with socket.create_connection((host, port), _STORE_TIMEOUT_S) as probe:
                local_host = str(probe.getsockname()[0])
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"no controller at {where} within {timeout_s:g} s: {error.strerror or error}") from error
            time.sleep(_RETRY_S)

    def ask() -> tuple[Record, TCPStore]:
        store = connect_store(host, port, _STORE_TIMEOUT_S)
        return msgspec.json.decode(store.get(_RECORD), type=Record), store

    try:
        record, store = _in_time(ask, 3 * _STORE_TIMEOUT_S)
    except (RuntimeError, TimeoutError, msgspec.MsgspecError) as error:  # c10d's errors are RuntimeErrors
        raise ConfigError(
            "an agent meets the controller of a run", got=f"something else that listens there ({error})", where=where
        ) from error
    if mismatch := version_mismatch(record.format):
        raise ConfigError(
            f"the controller at {where} {mismatch}",
            rule="agents and controller have the same format version",
            where=where,
            fix="install the same version of elaswave_spmd on all machines",
        )
    if not hmac.compare_digest(record.proof, _proof(secret, record.format, record.address, record.nonce)):
        raise ConfigError(
            "agent and controller have the same secret",
            got="another one than the controller's",
            where=f"the token file; {where}",
            fix="copy the controller's runtime.token_file to this machine",
        )
    return Found(-1 - int(store.add(_AGENTS, 1)), record.address, _token(secret, record.nonce), local_host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, as far as its text tells."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_time(call: Callable[[], T], seconds: float) -> T:
    """What `call` returns. c10d waits without limit for one who listens and says nothing."""
    done: list[T | BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=work, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def _proof(secret: bytes, format_version: int, address: str, nonce: str) -> str:
    return hmac.new(secret, f"controller {format_version} {address} {nonce}".encode(), hashlib.sha256).hexdigest()


def _token(secret: bytes, nonce: str) -> bytes:
    return hmac.new(secret, f"links {nonce}".encode(), hashlib.sha256).digest()
