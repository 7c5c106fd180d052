"""Credentials of a run's links: what a process shows when it connects, and what it asks of those that connect to it.

All processes of a run are one party: whoever has the run's credentials is in the run. libzmq asks for them in the
handshake of each connection (CURVE or PLAIN), before a byte of the other side reaches this package, so what a stranger
sends costs at most one frame of memory. `Admission` compares them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import zmq
from zmq.utils import z85

from elaswave_spmd.errors import ConfigError

_DOMAIN = b"elaswave"  # of ZAP requests; that of a socket must not be empty, or libzmq would ask nobody
_KEY_BYTES = 40  # a key of 32 bytes in Z85, ZeroMQ's text form
_TOKEN_BYTES = 32


class Credentials(Protocol):
    """The means by which the links of a run are authenticated: `RunKeys` or `RunToken`."""

    @property
    def mechanism(self) -> bytes:
        """The security mechanism of ZMTP (RFC 23)."""
        ...

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is about to bind ask for these credentials."""
        ...

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket that is about to connect show these credentials."""
        ...

    def match(self, shown: Sequence[bytes]) -> bool:
        """True if the credentials of a ZAP request are these. Takes the same time wherever they differ."""
        ...

    def to_dict(self) -> dict[str, str]:
        """The secrets as plain JSON, for this run's own processes and its journal; see `credentials_from_dict`."""
        ...


@dataclass(frozen=True, repr=False)
class RunKeys:
    """Keys of a run whose links are encrypted (CurveZMQ, RFC 26): each connection has a key of its own besides.

    Every process listens with the server key and connects with the client key; only that client key is admitted.

    Args:
        server, client: secret keys of Curve25519, in Z85.

    Raises:
        ValueError: not two keys.
    """

    server: str
    client: str

    def __post_init__(self) -> None:
        for name in ("server", "client"):
            key = getattr(self, name)
            try:
                whole = len(key) == _KEY_BYTES and zmq.curve_public(key.encode())  # refuses what is not Z85
            except (ValueError, KeyError, zmq.ZMQError):
                whole = False
            if not whole:
                raise ValueError(f"the {name} key of a run is no Curve25519 key in Z85 (a text of {len(key)} bytes)")
        if self.server == self.client:
            raise ValueError("the server key of a run is its client key too")

    def __repr__(self) -> str:
        return "RunKeys(...)"

    @classmethod
    def make(cls) -> RunKeys:
        """New keys, from the operating system's random numbers."""
        return cls(*(zmq.curve_keypair()[1].decode() for _ in range(2)))

    @classmethod
    def derive(cls, secret: bytes, purpose: str) -> RunKeys:
        """The keys that all who have a shared secret derive from it, for one purpose."""
        server, client = (
            hmac.new(secret, f"elaswave_spmd {purpose} {side}".encode(), hashlib.sha256).digest()
            for side in ("server", "client")
        )
        return cls(z85.encode(server).decode(), z85.encode(client).decode())

    @property
    def mechanism(self) -> bytes:
        return b"CURVE"

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        _ask(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.encode())

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(self.server.encode()))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.client.encode()))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.encode())

    def match(self, shown: Sequence[bytes]) -> bool:
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._client_public)

    @cached_property
    def _client_public(self) -> bytes:
        return z85.decode(zmq.curve_public(self.client.encode()))

    def to_dict(self) -> dict[str, str]:
        return {"server": self.server, "client": self.client}


@dataclass(frozen=True, repr=False)
class RunToken:
    """The password of a run whose links are authenticated and not encrypted (PLAIN, RFC 24).

    Who reads the network learns it; `runtime.encryption=false` is for networks that are trusted.

    Args:
        token: 64 hexadecimal digits.

    Raises:
        ValueError: not that.
    """

    token: str

    def __post_init__(self) -> None:
        try:
            num_bytes = len(bytes.fromhex(self.token))
        except ValueError:
            num_bytes = 0
        if num_bytes != _TOKEN_BYTES:
            raise ValueError(f"the token of a run has {_TOKEN_BYTES} bytes in hexadecimal digits")

    def __repr__(self) -> str:
        return "RunToken(...)"

    @classmethod
    def make(cls) -> RunToken:
        """A new one, from the operating system's random numbers."""
        return cls(secrets.token_hex(_TOKEN_BYTES))

    @property
    def mechanism(self) -> bytes:
        return b"PLAIN"

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        _ask(socket)
        socket.setsockopt(zmq.PLAIN_SERVER, 1)

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.PLAIN_USERNAME, _DOMAIN)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self.token.encode())

    def match(self, shown: Sequence[bytes]) -> bool:
        return len(shown) == 2 and shown[0] == _DOMAIN and hmac.compare_digest(shown[1], self.token.encode())

    def to_dict(self) -> dict[str, str]:
        return {"token": self.token}


def make_credentials(*, encrypted: bool) -> Credentials:
    """New credentials for one run.

    Raises:
        ConfigError: this libzmq cannot encrypt.
    """
    if not encrypted:
        return RunToken.make()
    require_curve("runtime.encryption=true", "runtime.encryption=false, if the network is trusted")
    return RunKeys.make()


def credentials_from_dict(fields: Mapping[str, str]) -> Credentials:
    """The inverse of `Credentials.to_dict`.

    Raises:
        ValueError: unknown keys, or values that are no credentials.
    """
    if fields.keys() == {"server", "client"}:
        return RunKeys(**fields)
    if fields.keys() == {"token"}:
        return RunToken(**fields)
    raise ValueError(f"credentials with the fields {sorted(fields)}")


def require_curve(where: str, other: str) -> None:
    """Refuse what needs encryption, where libzmq was built without it.

    Args:
        where: the setting that needs it.
        other: a way without it.

    Raises:
        ConfigError: libzmq has no CURVE.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"{where} needs CURVE, which the installed libzmq {zmq.zmq_version()} was built without",
            rule="encrypted links use ZeroMQ's CURVE",
            where=where,
            fix=f"pip install --force-reinstall pyzmq, whose wheels have it; or {other}",
        )


class Admission:
    """Answers libzmq for each connection whether it is admitted: a handler of ZAP (RFC 27), bound in one context.

    The thread that owns it polls `socket` and calls `answer`. pyzmq has handlers too, each with a thread and an asyncio
    loop of its own in every process; comparing one key needs neither. Must be made before a socket of the context binds
    that asks for credentials.

    Args:
        context: whose sockets ask.
        credentials: those that are admitted, and no others.
    """

    _VERSION, _WELCOME, _REFUSED = b"1.0", b"200", b"400"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], credentials: Credentials) -> None:
        self._credentials = credentials
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer what is asked by now; never waits."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
                self.socket.send_multipart(self.reply_to(request), zmq.NOBLOCK)
            except zmq.Again:
                return

    def reply_to(self, request: Sequence[bytes]) -> list[bytes]:
        """The reply to a request: version, request id, domain, address, identity, mechanism, credentials ..."""
        admitted = (
            len(request) > 5
            and request[0] == self._VERSION
            and request[2] == _DOMAIN
            and request[5] == self._credentials.mechanism
            and self._credentials.match(request[6:])
        )
        number = request[1] if len(request) > 1 else b""
        return [self._VERSION, number, self._WELCOME if admitted else self._REFUSED, b"", b"", b""]

    def close(self) -> None:
        """Stop answering; who asks from now on is refused."""
        self.socket.close(0)


def _ask(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody is admitted, rather than everybody
