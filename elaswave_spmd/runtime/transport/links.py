"""Links: the only way for host messages between processes. Pairwise ZeroMQ sockets that outlive mesh epochs.

Each process binds one PULL socket, owned by one event-loop thread that files whatever arrives in the mailbox, and opens
one PUSH socket to each peer that it may send to. Sending never blocks (no high-water mark: the placement bounds what is
in flight), so a stopped peer delays no other. Removing a member closes one socket; adding one opens its own.

Invariant: a dead peer stays dead. Sockets never reconnect by themselves, because a message to a successor under the
same address would belong to another life. The closed connection is filed as `PeerClosed`. The price: a connect to a
peer that has not bound yet is refused for good, so connect only after the peer has reported that it is bound, then call
`wait_connected` before the first message that matters.

On one host large payloads that their sender never writes to again go by cross-memory copies (cross_memory.py), once the
peer has shown that it can read this process's memory. A buffer that is withdrawn before it is read breaks the link as a
lost connection does: later messages of that sender are dropped until there is another link.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import zmq

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.transport.cross_memory import (
    CROSS_MEMORY_BYTES,
    BufferWithdrawn,
    OfferedBuffers,
    RemoteBuffer,
    RemoteReader,
    open_cross_memory,
)
from elaswave_spmd.runtime.transport.event_loop import EventLoop
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Mailbox, PeerClosed

SOCKETS = "elaswave-"
"""How the names of directories of sockets begin."""

CONTROLLER = -1
"""The controller's peer id; workers have their rank, agents ids from -2 downward."""

Transport = Literal["ipc", "tcp"]

ZERO_COPY_BYTES = 64 * 1024
"""From this size on a payload is sent by reference; below, pyzmq's thread that drops the reference costs more."""

# The first frame of a message: sender, token, one byte of kind, header. A kind below 0x80 is a message whose payload i
# is replaced by a `RemoteBuffer` if bit i is set; the others belong to the cross-memory handshake.
_SENDER = struct.Struct("<i")
_MESSAGE, _TRY_READING, _CAN_READ, _COPIED = 0, 0x81, 0x82, 0x83
_MAX_OFFERED = 7  # payloads of one message: one bit of the kind each
_OFFER_NUMBER = struct.Struct("<q")
_READING_TEST = b"can read"
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
    # $TMPDIR is not used: batch systems often set it to a path that is too long.
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = base and len(base) < 40 and os.access(base, os.W_OK)
    return tempfile.mkdtemp(prefix=SOCKETS, dir=base if usable else "/tmp")


class _Link:
    """The sending side of one link.

    Args:
        peer: peer id of the receiver.
        socket: connects to the receiver; closed by `close`.
        number: of this link in this process; no other link ever has it.
        prefix: sender and token, the beginning of each message.
        offered: the buffers of this process that others may copy; None without cross-memory copies.
    """

    def __init__(
        self, peer: int, socket: zmq.Socket[bytes], number: int, prefix: bytes, offered: OfferedBuffers | None
    ) -> None:
        self.peer = peer
        self.lock = threading.Lock()  # guards `open`
        self.open: zmq.Socket[bytes] | None = socket  # any thread may send; None once closed
        self.peer_can_read = False  # the peer has read this process's memory: payloads may be offered
        self.reading_test: int | None = None  # number of the offer with which that was tried
        self.up = threading.Event()  # set after the handshake, or when the link is closed
        self.bytes_sent = 0
        self.messages_sent = 0
        self._prefix = prefix
        self._offered = offered
        self._number = number
        # pyzmq would name the monitor by a file descriptor, which the next link may get again too early.
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            _CLOSED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED, f"inproc://monitor-{number}"
        )

    def test_reading(self) -> None:
        """Ask the peer to read something of this process; it answers `_CAN_READ` with the offer's number if it can."""
        if self._offered is not None and (buffer := self._offered.offer(memoryview(_READING_TEST), self._number)):
            self.reading_test = buffer.number
            self.send(buffer.encode(), kind=_TRY_READING)

    def send(
        self, header: bytes, payloads: Sequence[Any] = (), *, kind: int = _MESSAGE, immutable: bool = False
    ) -> bool:
        """Send one message, see `Links.send`; False if the link is closed."""
        # Everything that can be refused is refused before the first frame: half a message would swallow the next one.
        views = [memoryview(payload) for payload in payloads]
        for view in views:
            if not view.c_contiguous:
                raise ValueError(f"a payload must be contiguous; got shape {view.shape}, strides {view.strides}")
        size = sum(view.nbytes for view in views)
        offered = self._offer_large(views) if immutable and self.peer_can_read else 0
        head = b"".join((self._prefix, bytes((kind | offered,)), header))
        # The lock also keeps the frames of two threads' messages apart.
        with self.lock:
            sent = self.open is not None and self._put(self.open, head, views)
            if sent and kind == _MESSAGE:
                self.bytes_sent += len(head) + size
                self.messages_sent += 1
        if offered and not sent:
            assert self._offered is not None
            self._offered.withdraw(self._number)
        return sent

    def _offer_large(self, views: list[memoryview]) -> int:
        """Replace large payloads by the locations of offered buffers. Returns which: bit i for payload i."""
        assert self._offered is not None
        replaced = 0
        for i, view in enumerate(views[:_MAX_OFFERED]):
            if view.nbytes >= CROSS_MEMORY_BYTES and (buffer := self._offered.offer(view, self._number)):
                views[i] = memoryview(buffer.encode())
                replaced |= 1 << i
        return replaced

    @staticmethod
    def _put(socket: zmq.Socket[bytes], head: bytes, views: Sequence[memoryview]) -> bool:
        last = len(views)
        try:
            # There is no high-water mark, so a socket that does not accept a message has lost its connection. Without
            # DONTWAIT the call would wait for another one, which never comes, and hold the lock that `close` needs.
            for i, frame in enumerate((head, *views)):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if i < last else 0)
                socket.send(frame, flags, copy=i == 0 or views[i - 1].nbytes < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> bool:
        """Close the socket; True if it was open. The event loop closes the monitor when libzmq has stopped it."""
        with self.lock:
            socket, self.open = self.open, None
            if socket is not None:
                socket.close(linger_ms)
        if self._offered is not None:
            self._offered.withdraw(self._number)
        self.up.set()
        return socket is not None


class Links:
    """All links of one process.

    Args:
        me: this process's peer id: a rank, or `CONTROLLER`.
        mailbox: messages and notices are filed here.
        transport: "ipc" (Unix sockets; peers on one host) or "tcp".
        directory: existing directory for the ipc socket, see `socket_directory`; not used by tcp.
        token: secret of the run, sent in each message; messages with another one are dropped and counted.
        host: address that tcp binds and reports to peers. Beyond loopback a token of 16 bytes or more is required.
        life_fd: read end of a pipe whose write end only the controller holds; its end files `ControllerLost`.

    Raises:
        ConfigError: unknown transport, directory missing or its path too long, token too short for `host`, or an
            address that cannot be bound.

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
        offered, reader = open_cross_memory() if transport == "ipc" else (None, None)  # ipc: all peers are on this host
        self._offered: OfferedBuffers | None = offered
        self._reader: RemoteReader | None = reader
        self._readable: dict[int, int] = {}  # peer -> number of the reading test that succeeded here
        self._broken: set[int] = set()  # peers whose messages are dropped: a buffer was lost. Event-loop thread only
        self._links: dict[int, _Link] = {}
        self._num_connects = 0
        self._edit = threading.Lock()  # guards _links and closing; never held while sending
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)  # the default, 1,023, would be used up by a few hundred links
        self._pull = self._new_socket(zmq.PULL)
        try:
            self.address = self._bind(transport, directory, host)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"links cannot bind an address in {directory or host} ({error})") from error
        self._loop = EventLoop(self._pull, self._file, life_fd, lambda: mailbox.put(ControllerLost()))
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
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: see the invariant at the top
            self._num_connects += 1
            link = self._links[peer] = _Link(peer, socket, self._num_connects, self._prefix, self._offered)
            self._loop.watch(link.monitor, lambda event: self._link_event(link, event))
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                link.close()
                raise RunError(f"links of {self.me}: {address!r} is no address of {peer}: {error}") from error
        link.test_reading()
        self._report_can_read(peer)

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

    def send(self, peer: int, header: bytes, payloads: Sequence[Any] = (), *, immutable: bool = False) -> bool:
        """Send one message, from any thread, without blocking. False if the link is closed: the message is lost.

        Args:
            payloads: contiguous buffers (bytes, memoryview, numpy array). Those of `ZERO_COPY_BYTES` and more are sent
                from where they lie, some time later: they must not be written to until the protocol reports that
                `peer` has them.
            immutable: the payloads are never written to again. Large ones may then go by a cross-memory copy, and stay
                alive for however long the receiver takes.

        Raises:
            ValueError: a buffer is not contiguous; nothing is sent then.
        """
        link = self._links.get(peer)
        return link is not None and link.send(header, payloads, immutable=immutable)

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
        while self._offered is not None and self._offered.num_large and time.monotonic() < deadline:
            time.sleep(1e-3)  # receivers are still to copy what was offered
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
        socket.setsockopt(zmq.LINGER, 0)  # closing discards unsent messages at once, unless `close` says otherwise
        socket.setsockopt(zmq.SNDHWM, 0)  # no high-water mark: sending never blocks
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
        # Compared in constant time, so that the time of a refusal tells nothing about the token.
        if len(head) <= start or not hmac.compare_digest(head[_SENDER.size : start], self._token):
            self.wrong_tokens += 1
            return
        sender, kind, header = _SENDER.unpack_from(head)[0], head[start], head[start + 1 :]
        if kind >= _TRY_READING:
            self._handle_handshake(sender, kind, header)
        elif sender not in self._broken:
            whole = self._copy_offered(sender, kind, payloads) if kind else payloads
            if whole is not None:
                self._mailbox.put(Envelope(sender, header, whole))

    def _handle_handshake(self, sender: int, kind: int, header: bytes) -> None:
        """Answer a message of the cross-memory handshake. Event-loop thread."""
        if kind == _TRY_READING:  # the first message on a link
            self._broken.discard(sender)
            buffer = RemoteBuffer.decode(header)
            with contextlib.suppress(BufferWithdrawn, PermissionError):
                if self._reader is not None and self._reader.read(buffer) == _READING_TEST:
                    with self._edit:
                        self._readable[sender] = buffer.number
                    self._report_can_read(sender)
            return
        (number,) = _OFFER_NUMBER.unpack(header)
        link = self._links.get(sender)
        if kind == _CAN_READ and link is not None and link.reading_test == number:
            link.peer_can_read = True
        if self._offered is not None:
            self._offered.release(number)

    def _report_can_read(self, peer: int) -> None:
        """Report to the peer that its memory can be read; called when either of the two is new: link or test."""
        with self._edit:
            link, number = self._links.get(peer), self._readable.get(peer)
        if link is not None and number is not None:
            link.send(_OFFER_NUMBER.pack(number), kind=_CAN_READ)

    def _copy_offered(
        self, sender: int, offered: int, payloads: tuple[memoryview, ...]
    ) -> tuple[memoryview, ...] | None:
        """The payloads, with copies of those that the sender offered. Event-loop thread.

        Returns:
            None if a buffer was withdrawn: it is lost, and so is everything that follows on this link.
        """
        assert self._reader is not None, "a sender offers nothing before the reading test has succeeded"
        whole = list(payloads)
        for i, payload in enumerate(payloads):
            if offered >> i & 1:
                buffer = RemoteBuffer.decode(payload)
                try:
                    whole[i] = self._reader.read(buffer)
                except (BufferWithdrawn, PermissionError):
                    self._broken.add(sender)
                    return None
                if (link := self._links.get(sender)) is not None:
                    link.send(_OFFER_NUMBER.pack(buffer.number), kind=_COPIED)
        return tuple(whole)

    def _link_event(self, link: _Link, event: int) -> None:
        """Handle an event of a link's monitor. Event-loop thread."""
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
        raise ConfigError(
            f"runtime.transport={transport} is no transport", where="runtime.transport", exists="ipc, tcp"
        )
    if transport == "ipc" and not Path(directory).is_dir():
        raise ConfigError(f"the directory {directory!r} for ipc sockets does not exist", where="directory")
    if transport == "ipc" and len(os.fsencode(str(Path(directory).absolute()))) > _LONGEST_IPC_DIRECTORY:
        raise ConfigError(
            f"the directory {directory} is too long for ipc sockets",
            rule="the path of an ipc socket must fit into 108 bytes",
            fix="use links.socket_directory()",
        )
    if transport == "tcp" and len(token) < 16 and not _is_loopback(host):
        raise ConfigError(
            f"the links' token has {len(token)} bytes",
            rule="links beyond loopback need a token of at least 16 bytes",
            where=f"host {host}",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
