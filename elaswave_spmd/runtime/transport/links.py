"""The one doorway for host messages between processes: pairwise ZeroMQ links that outlive mesh epochs.

Each process binds one PULL socket, owned by one event-loop thread that takes whatever comes and files it in the
mailbox, and opens one PUSH socket to each peer it may send to. Sending never blocks (no high-water mark: the placement
bounds what is in flight), so a stopped peer holds up nobody. Removing a member closes one socket; adding one opens its
own.

A dead peer stays dead: sockets never reconnect by themselves, because a message to a successor under the same address
would belong to another life. The closed connection is filed as `PeerClosed`. The price is that a connect to a peer that
has not yet bound is refused for good: connect only after the peer said that it is bound, then `wait_connected` before
the first message that matters.

On one host large payloads may be lent, not sent (runtime.lending), once the peer has shown that it can read this
process's memory. A loan that is gone before it is read breaks the link as a lost connection does: what its sender said
after it is dropped, until there is another link.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import resource
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import zmq

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.transport.cross_memory import LEND_BYTES, Lender, LentGone, Loan, lending
from elaswave_spmd.runtime.transport.event_loop import EventLoop
from elaswave_spmd.runtime.transport.mailbox import ControllerGone, Envelope, Mailbox, PeerClosed

CONTROLLER = -1
Transport = Literal["ipc", "tcp"]

# From this size on a payload is sent by reference; below, pyzmq's thread that drops the reference costs more.
ZERO_COPY_BYTES = 64 * 1024
_SENDER = struct.Struct("<i")
_PLAIN, _ASK, _CAN_READ, _RETURNED = 0, 0x81, 0x82, 0x83  # after sender and token; below 0x80: payloads that are lent
_MOST_LENT = 7  # payloads of a message
_NUMBER = struct.Struct("<q")
_LONGEST_IPC_DIRECTORY = 80  # bytes; sockaddr_un holds 108, and the socket's own name must fit
_CLOSED_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def socket_directory() -> str:
    """Make a new private directory whose path is short enough for ipc sockets. The caller removes it."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = base and len(base) < 40 and os.access(base, os.W_OK)
    return tempfile.mkdtemp(prefix="elaswave-", dir=base if usable else "/tmp")


class _Link:
    """The sending side of one link. `lock` guards `open`, the socket that any thread may use; None once closed.

    `lends`: the peer can read this process's memory.
    """

    def __init__(self, peer: int, socket: zmq.Socket[bytes], number: int, prefix: bytes, lender: Lender | None) -> None:
        self.peer, self.lock = peer, threading.Lock()
        self._prefix, self._lender, self._number = prefix, lender, number
        self.lends, self.asked = False, 0
        self.up = threading.Event()  # handshake done, or closed
        self.bytes_sent = self.messages_sent = 0
        self.open: zmq.Socket[bytes] | None = socket
        # pyzmq would name the monitor by a file descriptor, which the next link may get again too early.
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            _CLOSED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED, f"inproc://monitor-{number}"
        )

    def ask(self) -> None:
        """Has the peer try to read something here; it says `_CAN_READ` with the number of that loan if it could."""
        if self._lender is not None and (loan := self._lender.lend(memoryview(b"can read"), self._number)):
            self.asked = loan.number
            self.send(loan.encode(), kind=_ASK)

    def send(self, header: bytes, payloads: Sequence[Any] = (), *, kind: int = _PLAIN, lend: bool = False) -> bool:
        # Everything that can be refused is refused before the first frame: half a message would swallow the next one.
        views = [memoryview(payload) for payload in payloads]
        for view in views:
            if not view.c_contiguous:
                raise ValueError(f"a payload must be contiguous; got shape {view.shape}, strides {view.strides}")
        size = sum(view.nbytes for view in views)
        lent = self._lend(views) if lend and self.lends else 0
        head = b"".join((self._prefix, bytes((kind | lent,)), header))
        with self.lock:
            sent = self.open is not None and self._put(self.open, head, views)
            if sent and kind < _ASK:
                self.bytes_sent += len(head) + size
                self.messages_sent += 1
        if lent and not sent:
            assert self._lender is not None
            self._lender.take_back(self._number)
        return sent

    def _lend(self, views: list[memoryview]) -> int:
        """Puts loans in the place of large payloads. Returns which: bit i for payload i."""
        assert self._lender is not None
        found = 0
        for i, view in enumerate(views[:_MOST_LENT]):
            if view.nbytes >= LEND_BYTES and (loan := self._lender.lend(view, self._number)):
                views[i] = memoryview(loan.encode())
                found |= 1 << i
        return found

    @staticmethod
    def _put(socket: zmq.Socket[bytes], head: bytes, views: Sequence[memoryview]) -> bool:
        last = len(views)
        try:
            # There is no high-water mark, so a socket that cannot take a message has lost its connection. Without
            # DONTWAIT the call would wait for another one, which never comes, and hold the lock that `close` needs.
            for i, frame in enumerate((head, *views)):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if i < last else 0)
                socket.send(frame, flags, copy=i == 0 or views[i - 1].nbytes < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> bool:
        """Returns whether it was open. The monitor is closed by the event loop, when it says that it has stopped."""
        with self.lock:
            socket, self.open = self.open, None
            if socket is not None:
                socket.close(linger_ms)
        if self._lender is not None:
            self._lender.take_back(self._number)
        self.up.set()
        return socket is not None


class Links:
    """All links of one process.

    Args:
        me: this process's peer id: a rank, or `CONTROLLER`.
        mailbox: where messages and notices are filed.
        transport: "ipc" (Unix sockets; peers on one host) or "tcp".
        directory: existing directory for the ipc socket, see `socket_directory`; not used by tcp.
        token: secret of the run, sent in each message; messages with another one are dropped and counted.
        host: address that tcp binds and tells peers. Beyond loopback a token of 16 bytes or more is required.
        life_fd: read end of a pipe whose write end the controller alone holds; its end files `ControllerGone`.

    Raises:
        ConfigError: unknown transport, directory missing or its path too long, token too short for `host`.

    A new object runs one thread of its own named `links-<me>` beside libzmq's. `close` ends it.
    """

    def __init__(
        self,
        me: int,
        mailbox: Mailbox,
        *,
        transport: Transport = "ipc",
        directory: str = "",
        token: bytes = b"",
        host: str = "127.0.0.1",
        life_fd: int | None = None,
    ) -> None:
        _check(transport, directory, token, host)
        self.me = me
        self.wrong_tokens = 0
        self._token = token
        self._mailbox = mailbox
        self._prefix = _SENDER.pack(me) + token
        self._lender, self._reader = lending() if transport == "ipc" else (None, None)
        self._shown: dict[int, int] = {}  # peer -> number of the loan that shows that its memory can be read
        self._broken: set[int] = set()  # peers whose messages are dropped: one of theirs was lost; the event loop's own
        self._links: dict[int, _Link] = {}
        self._num_connects = 0
        self._edit = threading.Lock()  # guards _links and closing; never held while sending
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._pull = self._new_socket(zmq.PULL)
        try:
            self.address = self._bind(transport, directory, host)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError("the link address could not be bound", got=str(error), where=directory or host) from error
        self._loop = EventLoop(self._pull, self._file, life_fd, lambda: mailbox.put(ControllerGone()))
        self._thread = threading.Thread(target=self._loop.run, name=f"links-{me}", daemon=True)
        self._thread.start()

    def connect(self, peer: int, address: str) -> None:
        """Open the link to `peer`, which must have bound `address` already. Does nothing when it is open."""
        with self._edit:
            if self._closed:
                raise RunError(f"links of {self.me} are closed; cannot connect to {peer}")
            if peer in self._links and self._links[peer].open is not None:
                return
            socket = self._new_socket(zmq.PUSH)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._num_connects += 1
            link = self._links[peer] = _Link(peer, socket, self._num_connects, self._prefix, self._lender)
            self._loop.watch(link.monitor, lambda event: self._link_event(link, event))
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                link.close()
                raise RunError(f"links of {self.me}: {address!r} is no address of {peer}: {error}") from error
        link.ask()
        self._tell_can_read(peer)

    def wait_connected(self, peers: Iterable[int], timeout: float) -> list[int]:
        """Wait until the link to each of `peers` is up; returns those closed or not up after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        missing = []
        for peer in peers:
            link = self._links.get(peer)
            waited = link is not None and link.up.wait(max(0.0, deadline - time.monotonic()))
            if link is None or not waited or link.open is None:
                missing.append(peer)
        return missing

    def send(self, peer: int, header: bytes, payloads: Sequence[Any] = (), *, lend: bool = False) -> bool:
        """Send one message; any thread; never blocks. False when the link is closed: the message is nobody's any more.

        A payload is any contiguous buffer (bytes, memoryview, numpy array). Those of `ZERO_COPY_BYTES` and more are
        sent from where they lie, some time later: they must not be written to until the protocol says that `peer` has
        them. ValueError for a buffer that is not contiguous; nothing is sent then.

        `lend`: payloads will never be written to again, so that large ones may be lent, for however long it takes the
        receiver to look.
        """
        link = self._links.get(peer)
        return link is not None and link.send(header, payloads, lend=lend)

    def drop(self, peer: int) -> None:
        """Close the link to `peer` at once, unsent messages included. No notice is filed. Unknown peers are ignored."""
        with self._edit:
            link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    @property
    def peers(self) -> tuple[int, ...]:
        """The peers with an open link."""
        return tuple(peer for peer, link in list(self._links.items()) if link.open is not None)

    def bytes_sent(self, peer: int) -> int:
        """Bytes handed to the present link of `peer`, headers included."""
        link = self._links.get(peer)
        return link.bytes_sent if link else 0

    def messages_sent(self, peer: int) -> int:
        """Messages handed to the present link of `peer`."""
        link = self._links.get(peer)
        return link.messages_sent if link else 0

    def close(self, linger_ms: int = 0) -> None:
        """Close everything; what is unsent gets `linger_ms` more. Idempotent. Received payloads stay valid."""
        with self._edit:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
        deadline = time.monotonic() + linger_ms / 1e3
        while self._lender is not None and self._lender.num_large and time.monotonic() < deadline:
            time.sleep(1e-3)
        for link in links:
            link.close(linger_ms)
        self._loop.stop()
        self._thread.join()
        self._loop.close_wake_pipe()
        self._context.term()  # every socket is closed: waits for lingering ones only
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)  # libzmq leaves it behind

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _bind(self, transport: Transport, directory: str, host: str) -> str:
        if transport == "tcp":
            port = self._pull.bind_to_random_port(f"tcp://{host}")
            return f"tcp://{host}:{port}"
        path = Path(directory).absolute() / f"{'c' if self.me == CONTROLLER else self.me}-{os.getpid()}"
        self._pull.bind(f"ipc://{path}")
        return f"ipc://{path}"

    def _file(self, head: bytes, payloads: tuple[memoryview, ...]) -> None:
        start = len(self._prefix)
        if len(head) <= start or not hmac.compare_digest(head[_SENDER.size : start], self._token):
            self.wrong_tokens += 1
            return
        sender, kind, header = _SENDER.unpack_from(head)[0], head[start], head[start + 1 :]
        if kind >= _ASK:
            self._file_of_loans(sender, kind, header)
        elif sender not in self._broken:
            found = self._borrow(sender, kind, payloads) if kind else payloads
            if found is not None:
                self._mailbox.put(Envelope(sender, header, found))

    def _file_of_loans(self, sender: int, kind: int, header: bytes) -> None:
        if kind == _ASK:  # the first on a link
            self._broken.discard(sender)
            loan = Loan.decode(header)
            with contextlib.suppress(LentGone, PermissionError):
                if self._reader is not None and self._reader.read(loan) == b"can read":
                    with self._edit:
                        self._shown[sender] = loan.number
                    self._tell_can_read(sender)
            return
        (number,) = _NUMBER.unpack(header)
        link = self._links.get(sender)
        if kind == _CAN_READ and link is not None and link.asked == number:
            link.lends = True
        if self._lender is not None:
            self._lender.returned(number)

    def _tell_can_read(self, peer: int) -> None:
        with self._edit:
            link, number = self._links.get(peer), self._shown.get(peer)
        if link is not None and number is not None:
            link.send(_NUMBER.pack(number), kind=_CAN_READ)

    def _borrow(self, sender: int, which: int, payloads: tuple[memoryview, ...]) -> tuple[memoryview, ...] | None:
        """Payloads with those that are lent; None: one is lost, and so is everything that follows on this link."""
        assert self._reader is not None, "it is asked whether it can read before anything is lent"
        found = list(payloads)
        for i, payload in enumerate(payloads):
            if which >> i & 1:
                loan = Loan.decode(payload)
                try:
                    found[i] = self._reader.read(loan)
                except (LentGone, PermissionError):
                    self._broken.add(sender)
                    return None
                if (link := self._links.get(sender)) is not None:
                    link.send(_NUMBER.pack(loan.number), kind=_RETURNED)
        return tuple(found)

    def _link_event(self, link: _Link, event: int) -> None:
        """Called in the event loop."""
        if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up.set()
            return
        # Closing frees what is queued for the dead; the entry stays, so that send() goes on answering False.
        was_open = link.close()
        with self._edit:
            ours = was_open and self._links.get(link.peer) is link and not self._closed
        if ours:
            self._mailbox.put(PeerClosed(link.peer))


def _check(transport: str, directory: str, token: bytes, host: str) -> None:
    if transport not in ("ipc", "tcp"):
        raise ConfigError("unknown transport", got=transport, where="runtime.transport", exists="ipc, tcp")
    if transport == "ipc" and not Path(directory).is_dir():
        raise ConfigError("links over ipc need an existing directory", got=directory, where="directory")
    if transport == "ipc" and len(os.fsencode(str(Path(directory).absolute()))) > _LONGEST_IPC_DIRECTORY:
        raise ConfigError(
            "the path of an ipc socket must fit into 108 bytes", got=directory, fix="use links.socket_directory()"
        )
    if transport == "tcp" and len(token) < 16 and not _is_loopback(host):
        raise ConfigError(
            "links beyond loopback need a token of at least 16 bytes", got=f"{len(token)} bytes", where=f"host {host}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Links between the controller and agents: as all over tcp, and a machine that is gone without a word is noticed.
# The kernel asks after 10 s of silence and every 5 s, and gives up after 4 questions. It also answers for a process
# that is stopped, so Ctrl-Z on the controller ends nothing.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}


class AgentLinks(Links):
    """Tcp links whose `PeerClosed` also comes, within half a minute, for a peer whose machine lost power or network."""

    def __init__(self, me: int, mailbox: Mailbox, *, token: bytes, host: str) -> None:
        super().__init__(me, mailbox, transport="tcp", token=token, host=host)

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = super()._new_socket(kind)
        for option, value in _KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket


# Room for the links of a run among the files that a process may have open.
PER_LINK = 5  # both directions: two sockets, their connections' ends, a monitor
_OTHERS = 100  # data, logs, pipes, what libraries keep open


def make_room(num_workers: int) -> None:
    """Raises this process's soft limit of open files to the hard one if `num_workers` links would not fit.

    To be called before the workers' processes are made: they inherit it, and each has as many links.

    Raises:
        ConfigError: the hard limit is too low.
    """
    needed = PER_LINK * num_workers + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return
    if not _allows(hard, needed):
        raise ConfigError(
            f"every process has a link to every worker, and a link takes {PER_LINK} open files",
            got=f"{num_workers} workers, {needed} open files",
            where="mesh",
            exists=f"{hard} open files for a process (ulimit -Hn)",
            fix=f"ulimit -n {needed}, which may need an administrator, or fewer workers",
        )
    # Some systems refuse an unlimited soft limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def has_room(num_workers: int) -> bool:
    """Whether `num_workers` links fit among the files that a process of this run may have open."""
    return _allows(resource.getrlimit(resource.RLIMIT_NOFILE)[0], PER_LINK * num_workers + _OTHERS)


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
