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

Who may connect is decided by libzmq in the handshake, over TCP by the credentials of the run (credentials.py), on one
host by the mode of the sockets' directory. What then comes may still be no message of ours: it is dropped and counted
(frames.py), and never an exception of the event loop.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import zmq

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.runtime.transport.credentials import Admission, Credentials
from elaswave_spmd.runtime.transport.cross_memory import (
    CROSS_MEMORY_BYTES,
    BufferWithdrawn,
    OfferedBuffers,
    RemoteBuffer,
    RemoteReader,
    open_cross_memory,
)
from elaswave_spmd.runtime.transport.event_loop import EventLoop
from elaswave_spmd.runtime.transport.frames import (
    FRAME_BYTES,
    MALFORMED,
    MAX_FRAME_BYTES,
    MAX_PAYLOADS,
    TOO_LARGE,
    Message,
    MessageLimits,
    MessageReader,
    MessageRejected,
    frames_of,
)
from elaswave_spmd.runtime.transport.mailbox import ControllerLost, Envelope, Mailbox, PeerClosed
from elaswave_spmd.runtime.transport.tcp_retries import bound_retries

SOCKETS = "elaswave-"
"""How the names of directories of sockets begin."""

CONTROLLER = -1
"""The controller's peer id; workers have their rank, agents ids from -2 downward."""

Transport = Literal["ipc", "tcp"]

ZERO_COPY_BYTES = 64 * 1024
"""From this size on a payload is sent by reference; below, pyzmq's thread that drops the reference costs more."""

REJECTED_CONNECTIONS: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "connection with other credentials",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "connection with another protocol or key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "connection without a handshake",
}
"""The events of a listening socket's monitor by which connections are counted that were not admitted."""

HANDSHAKE_MS = 10_000
"""How long a connection may take to show its credentials, from when it is accepted."""

# A kind below 0x80 is a message whose payload i is replaced by a `RemoteBuffer` if bit i is set; the others belong to
# the cross-memory handshake.
_MESSAGE, _TRY_READING, _CAN_READ, _COPIED = 0, 0x81, 0x82, 0x83
_MAX_OFFERED = 7  # payloads of one message: one bit of the kind each
_LAST_OFFERED = (1 << _MAX_OFFERED) - 1
_OFFER_NUMBER = struct.Struct("<q")
_READING_TEST = b"can read"
# Addresses that peers report. Names of hosts are none: libzmq's thread would wait for a name server, and all links too.
_ADDRESSES = {"ipc": re.compile(r"ipc:///[^\0]+"), "tcp": re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}")}
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
    usable = base and len(base) < 40 and os.access(base, os.W_OK) and not _why_not_private(base)
    return tempfile.mkdtemp(prefix=SOCKETS, dir=base if usable else "/tmp")


def _why_not_private(directory: str | Path) -> str:
    """The mode and owner of a directory that other users may look into or change; empty if it is private."""
    status = os.stat(directory)
    mode = stat.S_IMODE(status.st_mode)
    private = not mode & 0o077 and status.st_uid == os.geteuid()
    return "" if private else f"mode {mode:04o} and owner {status.st_uid}"


class _Link:
    """The sending side of one link.

    Args:
        peer: peer id of the receiver.
        socket: connects to the receiver; closed by `close`.
        number: of this link in this process; no other link ever has it.
        me: this process's peer id.
        frame_bytes: the largest frame; None for any size.
        offered: the buffers of this process that others may copy; None without cross-memory copies.
    """

    def __init__(
        self,
        peer: int,
        socket: zmq.Socket[bytes],
        number: int,
        me: int,
        frame_bytes: int | None,
        offered: OfferedBuffers | None,
    ) -> None:
        self.peer = peer
        self.lock = threading.Lock()  # guards `open`
        self.open: zmq.Socket[bytes] | None = socket  # any thread may send; None once closed
        self.peer_can_read = False  # the peer has read this process's memory: payloads may be offered
        self.reading_test: int | None = None  # number of the offer with which that was tried
        self.up = threading.Event()  # set after the handshake, or when the link is closed
        self.bytes_sent = 0
        self.messages_sent = 0
        self._me = me
        self._frame_bytes = frame_bytes
        self._offered = offered
        self._number = number
        # pyzmq would name the monitor by a file descriptor, which the next link may get again too early.
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(
            _CLOSED_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED,
            f"inproc://monitor-{number}",
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
        if len(views) > MAX_PAYLOADS:
            raise ValueError(f"{len(views)} payloads in one message, which has at most {MAX_PAYLOADS}")
        size = sum(view.nbytes for view in views)
        offered = self._offer_large(views) if immutable and self.peer_can_read else 0
        head, frames = frames_of(self._me, self._number, kind | offered, header, views, self._frame_bytes)
        # The lock also keeps the frames of two threads' messages apart.
        with self.lock:
            sent = self.open is not None and self._put(self.open, head, frames)
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
    def _put(socket: zmq.Socket[bytes], head: bytes, frames: Sequence[memoryview]) -> bool:
        last = len(frames)
        try:
            # There is no high-water mark, so a socket that does not accept a message has lost its connection. Without
            # DONTWAIT the call would wait for another one, which never comes, and hold the lock that `close` needs.
            for i, frame in enumerate((head, *frames)):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if i < last else 0)
                socket.send(frame, flags, copy=i == 0 or frames[i - 1].nbytes < ZERO_COPY_BYTES)
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
        directory: existing directory for the ipc socket, which only its user may enter, see `socket_directory`; not
            used by tcp.
        credentials: of the run, for tcp: connections that do not show them are refused and counted. None for ipc.
        host: address that tcp binds and reports to peers.
        limits: of the messages that are taken; others are dropped and counted.
        life_fd: read end of a pipe whose write end only the controller holds; its end files `ControllerLost`.

    Raises:
        ConfigError: unknown transport, a directory that is missing, not private or has too long a path, or an address
            that cannot be bound.

    A new object runs one thread of its own named `links-<me>` beside libzmq's. `close` ends it.
    """

    # Of tcp: with nobody to acknowledge. Longer than a run may be suspended; heartbeats find the lost much earlier.
    _GIVE_UP_S = 86_400.0

    def __init__(
        self,
        me: int,
        mailbox: Mailbox,
        *,
        transport: Transport = "ipc",
        directory: str = "",
        credentials: Credentials | None = None,
        host: str = "127.0.0.1",
        limits: MessageLimits = MessageLimits(),  # noqa: B008  (frozen)
        life_fd: int | None = None,
    ) -> None:
        _check(transport, directory)
        assert (transport == "tcp") == (credentials is not None), "links over tcp have credentials, others have none"
        self.me = me
        self._addresses = _ADDRESSES[transport]  # of its peers
        self._credentials = credentials
        self._frame_bytes = FRAME_BYTES if transport == "tcp" else None
        self._limits = limits
        self._rejected: Counter[str] = Counter()
        self._mailbox = mailbox
        offered, reader = open_cross_memory() if transport == "ipc" else (None, None)  # ipc: all peers are on this host
        self._offered: OfferedBuffers | None = offered
        self._reader: RemoteReader | None = reader
        self._readable: dict[int, int] = {}  # peer -> number of the reading test that succeeded here
        # Peer -> its newest link on which a buffer was lost: the rest of that link, or of an older one, is dropped,
        # also what is read after the first message of the next link. Event-loop thread only.
        self._broken: dict[int, int] = {}
        self._links: dict[int, _Link] = {}
        self._num_connects = 0
        self._edit = threading.Lock()  # guards _links and closing; never held while sending
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)  # the default, 1,023, would be used up by a few hundred links
        self._pull = self._new_socket(zmq.PULL)
        admission = None
        try:
            if credentials is not None:
                admission = Admission(self._context, credentials)
                credentials.secure_server(self._pull)
                self._pull.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self.address = self._bind(transport, directory, host)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise ConfigError(f"links cannot bind an address in {directory or host} ({error})") from error
        reader = MessageReader(self._pull, limits, self._frame_bytes)
        lost = ControllerLost()
        self._loop = EventLoop(
            self._pull, reader, admission, self._file, self.reject, life_fd, lambda: mailbox.put(lost)
        )
        if credentials is not None:
            self._watch_strangers()
        self._thread = threading.Thread(target=self._loop.run, name=f"links-{me}", daemon=True)
        self._thread.start()

    def connect(self, peer: int, address: str) -> None:
        """Open the link to `peer`, which must have bound `address` already. Does nothing when it is open.

        Raises:
            RunError: the links are closed; or the address is none of this transport.
        """
        if not self._addresses.fullmatch(address):
            raise RunError(f"links of {self.me}: {address!r} is no address of {peer}")
        with self._edit:
            if self._closed:
                raise RunError(f"links of {self.me} are closed; cannot connect to {peer}")
            if peer in self._links and self._links[peer].open is not None:
                return
            socket = self._new_socket(zmq.PUSH)
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: see the invariant at the top
            if self._credentials is not None:
                self._credentials.secure_client(socket)
            self._num_connects += 1
            number = self._num_connects
            link = self._links[peer] = _Link(peer, socket, number, self.me, self._frame_bytes, self._offered)
            self._loop.watch(link.monitor, lambda event, value: self._link_event(link, event, value))
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
            ValueError: a buffer is not contiguous, or there are more than `MAX_PAYLOADS`; nothing is sent then.
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

    @property
    def rejected(self) -> dict[str, int]:
        """The connections that were not admitted and the messages that were dropped: reason -> number so far."""
        with self._edit:
            return dict(self._rejected)

    def reject(self, reason: str) -> None:
        """Count a connection or a message among those that were rejected. Any thread."""
        with self._edit:
            self._rejected[reason] += 1

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
        if self._frame_bytes is not None:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # a connection that sends a larger frame is closed
        return socket

    def _watch_strangers(self) -> None:
        """Count the connections that are not admitted."""
        address = "inproc://strangers"
        self._pull.monitor(address, sum(REJECTED_CONNECTIONS) | zmq.EVENT_MONITOR_STOPPED)
        # No high-water mark: a monitor that is full would hold up libzmq's thread, and all links with it.
        monitor = self._new_socket(zmq.PAIR)
        monitor.connect(address)
        self._loop.watch(monitor, lambda event, _: self.reject(REJECTED_CONNECTIONS[event]))

    def _bind(self, transport: Transport, directory: str, host: str) -> str:
        if transport == "tcp":
            port = self._pull.bind_to_random_port(f"tcp://{host}")
            return f"tcp://{host}:{port}"
        path = Path(directory).absolute() / f"{'c' if self.me == CONTROLLER else self.me}-{os.getpid()}"
        self._pull.bind(f"ipc://{path}")
        return f"ipc://{path}"

    def _file(self, message: Message) -> None:
        """File a message in the mailbox, or handle it if it is of the handshake. Event-loop thread.

        Raises:
            MessageRejected: it is of a kind that there is not, or has other contents than its kind.
        """
        sender, kind = message.sender, message.kind
        if kind >= _TRY_READING:
            self._handle_handshake(message)
        elif kind > _LAST_OFFERED or kind >> len(message.payloads):
            raise MessageRejected(MALFORMED)
        elif message.link > self._broken.get(sender, -1):
            whole = self._copy_offered(message) if kind else message.payloads
            if whole is not None:
                self._mailbox.put(Envelope(sender, message.header, whole))

    def _handle_handshake(self, message: Message) -> None:
        """Answer a message of the cross-memory handshake. Event-loop thread."""
        sender, kind = message.sender, message.kind
        if kind > _COPIED or message.payloads or self._credentials is not None:  # over TCP there is no handshake
            raise MessageRejected(MALFORMED)
        if kind == _TRY_READING:  # the first message on a link
            buffer = _decode_buffer(message.header, len(_READING_TEST))
            with contextlib.suppress(BufferWithdrawn, PermissionError):
                if self._reader is not None and self._reader.read(buffer) == _READING_TEST:
                    with self._edit:
                        self._readable[sender] = buffer.number
                    self._report_can_read(sender)
            return
        if len(message.header) != _OFFER_NUMBER.size:
            raise MessageRejected(MALFORMED)
        (number,) = _OFFER_NUMBER.unpack(message.header)
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

    def _copy_offered(self, message: Message) -> tuple[memoryview, ...] | None:
        """The payloads, with copies of those that the sender offered. Event-loop thread.

        Returns:
            None if a buffer was withdrawn: it is lost, and so is everything that follows on this link.

        Raises:
            MessageRejected: the location of a buffer is none, or it is over the limit.
        """
        sender = message.sender
        if self._reader is None or sender not in self._readable:  # nothing is offered before the reading test succeeded
            raise MessageRejected(MALFORMED)
        limit = self._limits.payload_limit(message.header)
        buffers = {
            i: _decode_buffer(payload, limit) for i, payload in enumerate(message.payloads) if message.kind >> i & 1
        }
        whole = list(message.payloads)
        for i, buffer in buffers.items():
            try:
                whole[i] = self._reader.read(buffer)
            except (BufferWithdrawn, PermissionError):
                self._broken[sender] = max(message.link, self._broken.get(sender, -1))
                return None
            if (link := self._links.get(sender)) is not None:
                link.send(_OFFER_NUMBER.pack(buffer.number), kind=_COPIED)
        return tuple(whole)

    def _link_event(self, link: _Link, event: int, value: int) -> None:
        """Handle an event of a link's monitor. Event-loop thread."""
        if event & zmq.EVENT_CONNECTED:
            if self._credentials is not None:
                bound_retries(value, self._GIVE_UP_S)
            return
        if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up.set()
            return
        # Closing frees what is queued for the dead; the entry stays, so that send() goes on answering False.
        was_open = link.close()
        with self._edit:
            ours = was_open and self._links.get(link.peer) is link and not self._closed
        if ours:
            self._mailbox.put(PeerClosed(link.peer))


def _decode_buffer(data: bytes | memoryview, most_bytes: int) -> RemoteBuffer:
    """The location of a buffer of another process.

    Raises:
        MessageRejected: it is none, or the buffer is larger than `most_bytes`.
    """
    try:
        buffer = RemoteBuffer.decode(data)
    except (ValueError, struct.error):
        raise MessageRejected(MALFORMED) from None
    if buffer.num_bytes > most_bytes:
        raise MessageRejected(TOO_LARGE)
    return buffer


def _check(transport: str, directory: str) -> None:
    if transport not in ("ipc", "tcp"):
        raise ConfigError(
            f"runtime.transport={transport} is no transport", where="runtime.transport", exists="ipc, tcp"
        )
    if transport == "tcp":
        return
    if not Path(directory).is_dir():
        raise ConfigError(f"the directory {directory!r} for ipc sockets does not exist", where="directory")
    if len(os.fsencode(str(Path(directory).absolute()))) > _LONGEST_IPC_DIRECTORY:
        raise ConfigError(
            f"the directory {directory} is too long for ipc sockets",
            rule="the path of an ipc socket must fit into 108 bytes",
            fix="use links.socket_directory()",
        )
    if why_not := _why_not_private(directory):
        raise ConfigError(
            f"the directory {directory} for ipc sockets has {why_not}",
            rule="only the user who starts the run may enter the directory of its sockets: who does is admitted",
            fix="use links.socket_directory()",
        )
