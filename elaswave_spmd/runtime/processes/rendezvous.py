"""Rendezvous of a run's machines: a record in c10d's TCPStore holds the address at which the controller listens.

Used for the start only. The store authenticates no client, so it contains no secret, and an agent trusts the record
only with a proof that its writer knows the shared secret. Links then use a key that is derived from the secret for this
run.
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
_STORE_TIMEOUT_S = 10.0  # for a store that listens already
_RETRY_S = 0.25


class Record(msgspec.Struct, frozen=True):
    """The content of the store; `proof` is a keyed hash of the other fields."""

    format: int  # `FORMAT_VERSION` of the controller
    address: str
    nonce: str
    proof: str


@dataclass(frozen=True)
class Found:
    """The result of `find_controller`.

    Args:
        peer: the peer id of this agent.
        address: of the controller's links.
        token: key of the links of this run.
        local_host: address of this machine from which the store was reached.
    """

    peer: int
    address: str
    token: bytes
    local_host: str


def read_secret(path: str, *, where: str) -> bytes:
    """Read the shared secret from a file that only its owner may read.

    Args:
        where: the option or setting that named the file, for errors.

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
        what = f"cannot read the token file {path} ({error.strerror or error})"
        raise ConfigError(what, where=where, fix=fix) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 or status.st_uid != os.geteuid():
        raise ConfigError(
            f"the token file {path} has mode {mode:04o} and owner {status.st_uid}",
            rule="only its owner, who starts the run, may read a token file",
            where=where,
            fix=f"chmod 600 {path}",
        )
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"the secret in {path} has {len(secret)} bytes",
            rule=f"a secret has at least {_SHORTEST_SECRET} bytes",
            where=where,
            fix=fix,
        )
    return secret


def resolve_address(host: str, *, where: str) -> str:
    """Resolve a name to an IPv4 address of this machine, to listen on.

    Raises:
        ConfigError: the name is unknown, or is no single address of this machine.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)):
            pass
    except OSError as error:
        raise ConfigError(
            f"{host} is no address of this machine ({error.strerror or error})",
            rule="links listen on an address of this machine",
            where=where,
            fix="hostname -I lists them",
        ) from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(
            f"{host} means every address of this machine",
            rule="links listen on one address, to which the other machines connect",
            where=where,
            fix="hostname -I lists them",
        )
    return address


class Rendezvous:
    """The controller's end: serves the store until `close`.

    Args:
        host, port: at which agents look for it. On loopback it listens there only, otherwise on all addresses.
        secret: shared with the agents.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_hex(16)
        loopback = is_loopback(host)
        try:
            listener = socket.create_server((host if loopback else "", port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host}:{port} ({error.strerror or error})",
                rule="the store of a run needs a port of its own on the controller's machine",
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
        """Publish the address at which the controller listens."""
        assert self._store is not None
        proof = _proof(self._secret, FORMAT_VERSION, address, self._nonce)
        self._store.set(_RECORD, msgspec.json.encode(Record(FORMAT_VERSION, address, self._nonce, proof)).decode())

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._store = None


def find_controller(host: str, port: int, secret: bytes, timeout_s: float) -> Found:
    """Wait for the controller's store, read its record, and draw the next peer id.

    Raises:
        RunError: no process listens there within `timeout_s` seconds.
        ConfigError: the controller has another secret or format version, or no run is announced there.
    """
    where = f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    while True:
        # Tried with a plain socket first: c10d's own client prints a warning at every try, and cannot be interrupted.
        try:
            with socket.create_connection((host, port), _STORE_TIMEOUT_S) as probe:
                local_host = str(probe.getsockname()[0])
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"no controller at {where} within {timeout_s:g} s: {error.strerror or error}") from error
            time.sleep(_RETRY_S)

    def read_record() -> tuple[Record, TCPStore]:
        store = connect_store(host, port, _STORE_TIMEOUT_S)
        return msgspec.json.decode(store.get(_RECORD), type=Record), store

    try:
        record, store = _call_with_timeout(read_record, 3 * _STORE_TIMEOUT_S)
    except (RuntimeError, TimeoutError, msgspec.MsgspecError) as error:  # c10d's errors are RuntimeErrors
        raise ConfigError(
            f"no run is announced at {where}, though a process listens there ({error})",
            rule="an agent joins the controller of a run at its runtime.rendezvous",
            where=where,
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
            f"the controller at {where} has another secret",
            rule="agents and controller have the same secret",
            where=f"the token file; {where}",
            fix="copy the controller's runtime.token_file to this machine",
        )
    return Found(-1 - int(store.add(_AGENTS, 1)), record.address, _token(secret, record.nonce), local_host)


def is_loopback(host: str) -> bool:
    """True if `host` is a name or address of the loopback interface; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _call_with_timeout(call: Callable[[], T], seconds: float) -> T:
    """The result of `call`, in a thread of its own: c10d waits without limit for a listener that never answers."""
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
