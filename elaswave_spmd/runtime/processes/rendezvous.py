"""Rendezvous of a run's machines: a port at which the controller gives agents what they need to join the run.

Both ends derive the keys of a conversation from the shared secret. So it is encrypted, and only processes that have the
secret can ask or answer. A recording of it is worthless: it cannot be decrypted, nor replayed to pretend to be a run
that has ended. An agent gets an id, the address of the controller's links, and the run's own credentials.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from elaswave_spmd.conf.format_version import FORMAT_VERSION, version_mismatch
from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.forks import call_in_forks, close_bound
from elaswave_spmd.regular_files import open_regular
from elaswave_spmd.runtime.transport.credentials import (
    Admission,
    Credentials,
    RunKeys,
    credentials_from_dict,
    require_curve,
)
from elaswave_spmd.runtime.transport.links import HANDSHAKE_MS, KEEPALIVE, REJECTED_CONNECTIONS

_SHORTEST_SECRET = 16  # bytes
_ANSWER_TIMEOUT_S = 30.0
_RETRY_S = 0.25
_CONNECT_S = 2.0  # of one attempt to connect
_LOOK_S = 1.0  # the longest wait, since a signal that comes just before a wait does not interrupt it
_REFUSALS = 3  # failed handshakes in a row: one may be the end of a controller, or a machine that is too busy
_LARGEST_BYTES = 4096  # the most bytes of a frame, in either direction
_BAD_QUESTION = "question that is none, at the rendezvous"
_NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last: of arrays that are nested deeply
_FAILED_HANDSHAKES = sum(REJECTED_CONNECTIONS)
_MONITOR = "inproc://monitor"
_MONITOR_EVENT = struct.Struct("=hi")  # the first frame of a monitor's message: event, value


class Question(msgspec.Struct, frozen=True, array_like=True):
    """An agent's question. The format comes first, so that it can be read whatever other versions send after it."""

    format: int  # `FORMAT_VERSION` of the agent


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The controller's answer. To an agent of another format version, it has only the format."""

    format: int  # `FORMAT_VERSION` of the controller
    peer: int = 0
    address: str = ""
    credentials: dict[str, str] = {}


class NoRunYetError(ConfigError):
    """A process listens at the rendezvous but gives no answer, ends each connection, or does not show the secret.

    An agent that looks for a run for the first time takes this for a process that is not a controller, or has another
    secret. But a controller that is ending, or cut off, looks the same; and where a controller has died its port is
    free, so that anybody may listen there until the next one does. So an agent that has been in the run before tries
    again.
    """


@dataclass(frozen=True)
class Found:
    """The result of `find_controller`.

    Args:
        peer: the peer id of this agent.
        address: the address of the controller's links.
        credentials: the credentials of the run's links.
        local_host: the address of this machine from which the rendezvous was reached.
    """

    peer: int
    address: str
    credentials: Credentials
    local_host: str


def read_secret(path: str, *, where: str) -> bytes:
    """Read the shared secret from a file that only its owner may read.

    Args:
        where: the option or setting that named the file, for errors.

    Raises:
        ConfigError: the file does not exist, may be read by other users, or is too short.
    """
    file = Path(os.path.expanduser(path))
    fix = f"(umask 077; openssl rand -hex 32 > {path}), and the same file on every machine"
    try:
        with open_regular(file) as stream:
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
        ConfigError: the name is unknown, or does not name one single address of this machine.
    """
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)):
            pass
    except (OSError, UnicodeError) as error:  # the latter of a name with a part that is empty or too long
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"{host} is no address of this machine ({why})",
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
    """The controller's end: a thread that answers agents, from `announce` until `close`.

    Args:
        host: the one address on which it listens.
        port: the port.
        secret: the secret that is shared with the agents.
        given: the number of peer ids that earlier rendezvous of the same run have given, which are not given again.

    Raises:
        ConfigError: the address is not of this machine, or in use; or this libzmq cannot encrypt.
    """

    def __init__(self, host: str, port: int, secret: bytes, given: int = 0) -> None:
        where = f"runtime.rendezvous={host}:{port}"
        require_curve(where, "a run on one machine")
        keys = _keys_of(secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._admission = Admission(self._context, keys)
        self._socket = _new_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        for option, value in KEEPALIVE.items():
            self._socket.setsockopt(option, value)
        keys.secure_server(self._socket)
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(
                f"cannot listen at {host}:{port} ({error.strerror or error})",
                rule="the rendezvous of a run needs a port of its own on the controller's machine",
                where=where,
                fix="another port, here and for the agents",
            ) from error
        self._socket.monitor(_MONITOR, _FAILED_HANDSHAKES)
        self._monitor = _new_socket(self._context, zmq.PAIR)
        self._monitor.connect(_MONITOR)
        self._lock = threading.Lock()  # guards the counts
        self._rejected: Counter[str] = Counter()
        self._num_agents = given
        self._answer = Answer(FORMAT_VERSION)
        self._stop_read, self._stop_write = os.pipe()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._address = host, port
        call_in_forks(self._let_go)

    @property
    def rejected(self) -> Mapping[str, int]:
        """The connections and questions that were refused: reason -> number."""
        with self._lock:
            return dict(self._rejected)

    def announce(self, address: str, credentials: Credentials) -> None:
        """Begin to answer.

        Args:
            address: the address at which the controller's links listen.
            credentials: the credentials of these links.
        """
        self._answer = Answer(FORMAT_VERSION, 0, address, credentials.to_dict())
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; idempotent."""
        if self._closed:
            return
        self._closed = True
        os.close(self._stop_write)  # ends the thread
        if self._thread is not None:
            self._thread.join()
        os.close(self._stop_read)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(100)  # an answer may be on its way
        self._admission.close()
        self._context.term()

    def _let_go(self) -> None:
        """Close the port in a process that is forked from this one, so that the next controller can listen there."""
        if not self._closed:
            close_bound(self._address)

    def _serve(self) -> None:
        """The thread: it answers questions, admits connections, and counts refusals."""
        poller = zmq.Poller()
        for waited in (self._socket, self._admission.socket, self._monitor, self._stop_read):
            poller.register(waited, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_read in ready:
                return
            self._admission.answer()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._reply(self._socket.recv_multipart(zmq.NOBLOCK))
            with contextlib.suppress(zmq.Again):
                while True:
                    self._count(
                        REJECTED_CONNECTIONS[_MONITOR_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])[0]]
                    )

    def _reply(self, frames: list[bytes]) -> None:
        """Answer one question. It comes from a process that has the secret, but may be of another version."""
        try:
            if len(frames) != 2:
                raise msgspec.ValidationError("a question has one frame")
            question = msgspec.msgpack.decode(frames[1], type=Question)
        except _NOT_DECODED:
            self._count(_BAD_QUESTION)
            return
        answer = Answer(FORMAT_VERSION)
        if not version_mismatch(question.format):
            self._num_agents += 1
            answer = msgspec.structs.replace(self._answer, peer=-1 - self._num_agents)
        with contextlib.suppress(zmq.ZMQError):  # the agent has gone meanwhile
            self._socket.send_multipart([frames[0], msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def _count(self, reason: str) -> None:
        with self._lock:
            self._rejected[reason] += 1


def find_controller(host: str, port: int, secret: bytes, timeout_s: float) -> Found:
    """Wait until a process listens at the rendezvous, and ask it how to join the run.

    Args:
        host: the name or address of the rendezvous.
        port: its port.
        secret: the secret that is shared with the controller.
        timeout_s: the seconds within which a process must listen there.

    Raises:
        RunError: no process listens there within `timeout_s` seconds.
        NoRunYetError: the process does not answer, ends each connection, or has another secret or none.
        ConfigError: the process has the secret, and has another format version, or is no controller.
    """
    where = f"{host}:{port}"
    require_curve(f"the rendezvous {where}", "a run on one machine")
    deadline = time.monotonic() + timeout_s
    address, local_host = _addresses_of(host, port, deadline, timeout_s)
    with _Inquiry(address, _keys_of(secret)) as inquiry:
        answer = inquiry.answer(where, deadline, timeout_s)
    if mismatch := version_mismatch(answer.format):
        raise ConfigError(
            f"the controller at {where} {mismatch}",
            rule="agents and controller have the same format version",
            where=where,
            fix="install the same version of elaswave_spmd on all machines",
        )
    try:
        credentials = credentials_from_dict(answer.credentials)
    except ValueError as error:
        raise _no_controller(where, f"its answer is none: {error}") from error
    return Found(answer.peer, answer.address, credentials, local_host)


class _Inquiry:
    """One question to the process that listens at an address, as a context manager.

    Both sides of the connection have to show that they have the secret.
    """

    def __init__(self, address: str, keys: RunKeys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = _new_socket(self._context, zmq.DEALER)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, int(1e3 * _RETRY_S))
        # While the network is cut, the kernel tries to connect less and less often. Without a limit for one attempt, it
        # would notice up to a minute too late that the network is back.
        self._dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(1e3 * _CONNECT_S))
        keys.secure_client(self._dealer)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKES
        self._monitor = self._dealer.get_monitor_socket(events, _MONITOR)
        self._dealer.connect(address)

    def __enter__(self) -> _Inquiry:
        return self

    def __exit__(self, *_: object) -> None:
        monitor = self._monitor
        self._dealer.disable_monitor()
        self._dealer.close(0)
        monitor.close(0)
        self._context.term()

    def answer(self, where: str, deadline: float, timeout_s: float) -> Answer:
        """Wait for the answer. The errors are those of `find_controller`.

        Args:
            where: the rendezvous, for errors.
            deadline: the time until which a process must listen, in seconds of time.monotonic.
            timeout_s: the seconds that the caller has given, for errors.
        """
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        patience, listens, refusals = deadline, False, 0
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1e3 * min(left, _LOOK_S)) + 1))
            if self._dealer in ready:
                return self._decode(where)
            if self._monitor not in ready:
                continue
            event, _ = _MONITOR_EVENT.unpack(self._monitor.recv_multipart()[0])
            if event == zmq.EVENT_CONNECTED:
                listens, deadline = True, time.monotonic() + _ANSWER_TIMEOUT_S
                continue
            if event == zmq.EVENT_DISCONNECTED:  # the process has ended: another one may listen there soon
                listens, deadline = False, patience
                continue
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # Ask again on every connection: if a controller ends, the question is lost with it.
                self._dealer.send(msgspec.msgpack.encode(Question(FORMAT_VERSION)))
                refusals = 0
                continue
            # A handshake that fails without a detail may be due to a controller that ends, or to a busy machine. So it
            # takes _REFUSALS of them in a row; any other failure is one of the secret at once.
            refusals += 1 if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else _REFUSALS
            if refusals >= _REFUSALS:
                raise NoRunYetError(
                    f"the process that listens at {where} has another secret, or is no controller of elaswave_spmd",
                    rule="agents and controller have the same secret",
                    where=f"the token file; {where}",
                    fix="copy the controller's runtime.token_file to this machine",
                )
        if listens:
            raise _no_controller(where, f"no answer within {_ANSWER_TIMEOUT_S:g} s", NoRunYetError)
        raise RunError(f"no controller at {where} within {timeout_s:g} s: nothing listens there")

    def _decode(self, where: str) -> Answer:
        try:
            return msgspec.msgpack.decode(self._dealer.recv(), type=Answer)
        except _NOT_DECODED as error:
            raise _no_controller(where, f"its answer is none: {error}") from error


def _addresses_of(host: str, port: int, deadline: float, timeout_s: float) -> tuple[str, str]:
    """ZeroMQ's address of the rendezvous, and the address of this machine that reaches it.

    Raises:
        RunError: the name is unknown, or no network leads there, until the deadline.
    """
    while True:
        try:
            address = socket.gethostbyname(host)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, port))  # sends nothing: it chooses the interface
                return f"tcp://{address}:{port}", str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or error
                raise RunError(f"no controller at {host}:{port} within {timeout_s:g} s: {why}") from error
            time.sleep(_RETRY_S)


def _no_controller(where: str, why: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    return kind(
        f"no run is announced at {where}, though a process listens there ({why})",
        rule="an agent joins the controller of a run at its runtime.rendezvous",
        where=where,
    )


def is_loopback(host: str) -> bool:
    """True if `host` is a name or address of the loopback interface; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys_of(secret: bytes) -> RunKeys:
    """The keys of the rendezvous. The run's links have other keys, which are made anew for each run."""
    return RunKeys.derive(secret, "rendezvous")


def _new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVHWM, 0)  # a monitor that is full would hold up libzmq's thread
    made.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
    return made
