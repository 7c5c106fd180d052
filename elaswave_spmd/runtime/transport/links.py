"""Links: the point-to-point connections by which processes send each other messages. They outlive mesh epochs.

Each process binds one ZeroMQ PULL socket and opens one PUSH socket to each peer that it may send to. One event-loop
thread owns the PULL socket and files whatever arrives in the mailbox. Sending never blocks, so a stopped peer delays no
other: there is no high-water mark, as the placement bounds what is in flight. When a member is removed one socket is
closed; when one is added one is opened.

Invariant: a dead peer stays dead. Sockets never reconnect by themselves, because a message to a successor under the
same address would belong to another life. A closed connection is filed as `PeerClosed`. The price is that a connect
which is refused is refused for good: to a peer that has not bound its socket yet, and on one host also to a peer that
stands still while `_MOST_WAITING` connections wait for it. So connect only after the peer has reported that it is
bound, and call `wait_connected` before the first message that matters.

Workers of one host share memory (`transport="shm"`), once the peer has shown that it can map this process's memory:
payloads are written there once and read in place (shared_memory.py), and messages go through a ring (rings.py), which
needs neither a system call nor another thread (shared_way.py). What finds no room there goes over the socket, as
everything does between hosts. Messages are numbered, so that the receiver can restore their order (shared_inbox.py).

Who may connect is decided during the handshake: over TCP by the credentials of the run (credentials.py), on one host by
the mode of the sockets' directory. What an admitted connection sends may still be malformed. Such a message is dropped
and counted (frames.py), and raises no exception in the event loop. If its thread fails nevertheless, for a lack of
memory, say, the process ends: the mailbox raises the exception in the consuming thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zmq

from elaswave_spmd.errors import ConfigError, RunError
from elaswave_spmd.forks import call_in_forks, close_bound
from elaswave_spmd.runtime.transport.credentials import Admission, Credentials
from elaswave_spmd.runtime.transport.event_loop import EventLoop, LoopHandlers
from elaswave_spmd.runtime.transport.frames import (
    FRAME_BYTES,
    MALFORMED,
    MAX_FRAME_BYTES,
    MAX_PAYLOADS,
    NOT_SHARED,
    NUMBERED,
    Message,
    MessageLimits,
    MessageReader,
    MessageRejected,
    frames_of,
    numbered_head,
)
from elaswave_spmd.runtime.transport.mailbox import (
    ControllerLost,
    Envelope,
    LinksFailed,
    Mailbox,
    PeerClosed,
    ReadMark,
)
from elaswave_spmd.runtime.transport.rings import MEMORY_BYTES, Bell
from elaswave_spmd.runtime.transport.shared_inbox import SharedInbox
from elaswave_spmd.runtime.transport.shared_memory import MemoryLocation, SharedMemory, is_ending, why_unsupported
from elaswave_spmd.runtime.transport.shared_way import BELL, SHARED_RING, SharedWay
from elaswave_spmd.runtime.transport.tcp_retries import bound_retries
from elaswave_spmd.runtime.transport.tcp_silence import Silence, has_unsent

SOCKETS = "elaswave-"
"""The prefix of the names of directories of sockets."""

CONTROLLER = -1
"""The controller's peer id; workers have their rank, agents ids from -2 downward."""

Transport = Literal["shm", "ipc", "tcp"]

ZERO_COPY_BYTES = 64 * 1024
"""Payloads of at least this many bytes are sent by reference. For smaller ones a copy costs less than the work of
pyzmq's thread that drops the reference."""

REJECTED_CONNECTIONS: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "connection with other credentials",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "connection with another protocol or key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "connection without a handshake",
}
"""Event of a listening socket's monitor -> the reason under which a connection that is not admitted is counted."""

_MOST_WAITING = 65_535
"""How many connections may wait for this process to accept them; the kernel allows up to net.core.somaxconn. Above that
a connect is refused on a Unix socket, and tried again by the kernel over TCP. libzmq's own limit is 100, and all
processes of a host may connect to one that stands still for a moment."""

HANDSHAKE_MS = 10_000
"""How long a connection may take to show its credentials, from when it is accepted."""

KEEPALIVE: Mapping[int, int] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 300,
    zmq.TCP_KEEPALIVE_INTVL: 60,
    zmq.TCP_KEEPALIVE_CNT: 5,
}
"""Options of a listening TCP socket: the kernel asks after 300 s of silence, then every 60 s, and closes a connection
after 5 times without an answer. A machine that loses power or network closes none, and what it had sent of a message
would stay in memory for good. Ten minutes, as a link between workers that fails twice within them costs a machine: here
nobody waits for anything, so a cut need not be noticed soon. A kernel also answers for a process that is stopped."""

# The kinds of messages besides NUMBERED. The last three are the handshake by which memory is shared. _SHARE: the sender
# says where its memory is. The receiver answers with _MAPPED once it has mapped that memory, or with _BROKEN when it
# takes nothing more from that link.
_MESSAGE, _SHARE, _MAPPED, _BROKEN = 0, 0x81, 0x82, 0x83
_MAPPED_LINK = struct.Struct("<Ii")  # number of the link, pid of the receiver
_BROKEN_LINK = struct.Struct("<I")  # number of the link
_LONGEST_SILENCE_S = 1e6  # libzmq and the kernel count milliseconds in 32 bits; nobody waits for so long
_LOOKS = 10  # how often links are checked within the time after which a silent one is closed (`silence_s`)
# The form of addresses that peers may report. Host names are not allowed: libzmq's thread would wait for a name server,
# and with it all links of this process.
_IPC_ADDRESS = re.compile(r"ipc:///[^\0]+")
_ADDRESSES = {"shm": _IPC_ADDRESS, "ipc": _IPC_ADDRESS, "tcp": re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}")}
_SHORT_PATH = re.compile(r"/[!-~]{0,38}")  # absolute, and without what the controller takes for no address (a space)
# logind makes the directories in this one, and removes each with all that is in it when its user logs out, though
# processes of a run go on: that could start no worker any more.
_OF_LOGINS = "/run/user"
_LONGEST_IPC_DIRECTORY = 80  # bytes; sockaddr_un holds 108, and the socket's own name must fit
_CLOSED_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINK_EVENTS = _CLOSED_EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


def socket_directory() -> str:
    """Make a new private directory whose path can be in the address of an ipc socket. The caller removes it.

    Raises:
        ConfigError: none can be made.
    """
    # $TMPDIR is not used: batch systems often set it to a path that is too long.
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = _SHORT_PATH.fullmatch(base) and os.access(base, os.W_OK) and not _why_not_private(base)
    usable = usable and not Path(base).resolve().is_relative_to(_OF_LOGINS)
    base = base if usable else "/tmp"
    try:
        return tempfile.mkdtemp(prefix=SOCKETS, dir=base)
    except OSError as error:
        raise no_socket_directory(base, error) from error


def no_socket_directory(base: str | Path, error: OSError) -> ConfigError | RunError:
    """The error of a command that can make no directory for its sockets in `base`, or cannot lock what it has made.

    Where the machine has no process, descriptor or memory left the directory has no part in it, nor have the settings.
    """
    if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return RunError(
            f"this command cannot begin ({error.strerror or error}): it needs one more process, and descriptors for "
            "the locks of its directory of sockets; end other processes, or raise ulimit -u and ulimit -n"
        )
    return ConfigError(
        f"no directory for the sockets of this command can be made in {base} ({error.strerror or error})",
        rule="its processes meet in a new directory, on a file system that has room and locks",
        fix=f"make room in {base}; or XDG_RUNTIME_DIR=DIR, a directory of yours with mode 0700 and a path shorter than "
        "40 characters, not below /run/user",
    )


def _why_not_private(directory: str | Path) -> str:
    """The mode and owner of a directory, in words, if other users may read or change it; empty if it is private."""
    status = os.stat(directory)
    mode = stat.S_IMODE(status.st_mode)
    private = not mode & 0o077 and status.st_uid == os.geteuid()
    return "" if private else f"mode {mode:04o} and owner {status.st_uid}"


def socket_names(me: int, pid: int) -> tuple[str, str]:
    """The names of a process's Unix socket and of its bell, in the directory of sockets."""
    name = f"{'c' if me == CONTROLLER else me}-{pid}"
    return name, name + BELL


class _Link:
    """The sending side of one link.

    Args:
        peer: peer id of the receiver.
        socket: the socket that connects to the receiver; closed by `close`.
        monitor: the monitor of the socket, for `_LINK_EVENTS`; closed by the event loop.
        number: the number of this link in this process; no other link ever has it.
        me: this process's peer id.
        frame_bytes: the size of the largest frame in bytes; None if it is not limited.
        shared: the path of this link through shared memory; None if there is none.
    """

    def __init__(
        self,
        peer: int,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        number: int,
        me: int,
        frame_bytes: int | None,
        shared: SharedWay | None,
    ) -> None:
        self.peer = peer
        self.lock = threading.Lock()  # guards `open`
        self.open: zmq.Socket[bytes] | None = socket  # any thread may send; None once closed
        self.monitor = monitor
        self.number = number
        self.shared = shared
        self.copies_payloads = False
        self.up = threading.Event()  # set after the handshake, or when the link is closed
        self.fd: int | None = None  # descriptor of the TCP connection; only the event-loop thread sets it
        self.num_waits = 0  # how many checks found it not connected yet; only for the event-loop thread
        self.silence = Silence()
        self.bytes_sent = 0
        self.messages_sent = 0
        self._me = me
        self._frame_bytes = frame_bytes

    def send(self, header: bytes, payloads: Sequence[Any], *, ordered: bool) -> bool:
        """Send one message, see `Links.send`; False if the link is closed."""
        # All checks come before the first frame is sent: the receiver would take the next message for the rest of a
        # message that was sent in part.
        views = [memoryview(payload) for payload in payloads]
        for view in views:
            if not view.c_contiguous:
                raise ValueError(f"a payload must be contiguous; got shape {view.shape}, strides {view.strides}")
        if len(views) > MAX_PAYLOADS:
            raise ValueError(f"{len(views)} payloads in one message, which has at most {MAX_PAYLOADS}")
        if self.shared is not None:
            return self._send_shared(self.shared, header, views, ordered)
        size = sum(view.nbytes for view in views)
        head, frames = frames_of(self._me, self.number, _MESSAGE, header, views, self._frame_bytes)
        # The lock also keeps the frames of messages of two threads from being interleaved.
        with self.lock:
            sent = self.open is not None and self._put(self.open, head, frames)
            if sent:
                self._count(len(head) + size)
        return sent

    def send_handshake(self, kind: int, header: bytes) -> None:
        """Send one message of the handshake by which memory is shared."""
        head, _ = frames_of(self._me, self.number, kind, header, (), self._frame_bytes)
        with self.lock:
            if self.open is not None:
                self._put(self.open, head, ())

    def _send_shared(self, way: SharedWay, header: bytes, views: Sequence[memoryview], ordered: bool) -> bool:
        sizes = [view.nbytes for view in views]
        places = [way.place(view) for view in views]
        rest = [
            view.cast("B") if view.nbytes else memoryview(b"")
            for view, place in zip(views, places, strict=True)
            if place == NOT_SHARED
        ]
        with self.lock:
            number = way.next_number(ordered)
            head = numbered_head(self._me, self.number, header, sizes, number, places)
            by_ring = self.open is not None and ordered and way.write(head, rest)
            sent = by_ring or (self.open is not None and self._put(self.open, head, rest))
            if sent:
                self._count(len(head) + sum(sizes))
            if by_ring:
                way.wake()
        # If it was not sent, the link is closed. The blocks of its payloads become free when the receiver has ended.
        return sent

    def _count(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        self.messages_sent += 1

    def _put(self, socket: zmq.Socket[bytes], head: bytes, frames: Sequence[memoryview]) -> bool:
        last = len(frames)
        copied = sys.maxsize if self.copies_payloads else ZERO_COPY_BYTES
        try:
            # There is no high-water mark, so a socket that does not accept a message has lost its connection. Without
            # DONTWAIT the call would wait for another one, which never comes, and hold the lock that `close` needs.
            for i, frame in enumerate((head, *frames)):
                flags = zmq.DONTWAIT | (zmq.SNDMORE if i < last else 0)
                socket.send(frame, flags, copy=i == 0 or frames[i - 1].nbytes < copied)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> bool:
        """Close the socket; True if it was open. The event loop closes the monitor when libzmq has stopped it."""
        with self.lock:
            socket, self.open = self.open, None
            if socket is not None:
                socket.close(linger_ms)
                if self.shared is not None:
                    self.shared.close()
        self.up.set()
        return socket is not None


class Links:
    """All links of one process.

    Sending and the counters may be used by any thread.

    Args:
        me: this process's peer id: a rank, or `CONTROLLER`.
        mailbox: received messages and notices of closed links are filed here.
        transport: "ipc" (Unix sockets; peers on one host), "shm" (these, and shared memory between workers) or "tcp".
        directory: existing directory for the Unix socket, which only its user may enter, see `socket_directory`; not
            used by tcp.
        credentials: the credentials of the run, for tcp: connections that do not show them are refused and counted.
            None for the other transports.
        host: the address that tcp binds and reports to peers.
        limits: the limits of messages; a message beyond them is dropped and counted.
        life_fd: read end of a pipe whose write end only the controller holds; when it ends `ControllerLost` is filed.
        silence_s: for tcp: a link to a worker is closed if it is not connected within this many seconds, or if nothing
            that was sent over it has been acknowledged for so long. None: there is no limit. The link to the controller
            has none in any case, as the controller itself gives up a worker that is cut off from it.

    Raises:
        ConfigError: unknown transport, a directory that is missing, not private or has too long a path, or an address
            that cannot be bound.

    A new object starts one thread of its own, named `links-<me>`, besides those of libzmq. `close` ends it.
    """

    # How many seconds the kernel goes on sending to a TCP peer that acknowledges nothing. Longer than a run may be
    # suspended, as heartbeats find peers that are really lost much earlier.
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
        silence_s: float | None = None,
    ) -> None:
        _check(transport, directory)
        assert (transport == "tcp") == (credentials is not None), "links over tcp have credentials, others have none"
        self.me = me
        self._addresses = _ADDRESSES[transport]  # of its peers
        self._credentials = credentials
        self._copies_payloads = transport == "shm"
        self._frame_bytes = FRAME_BYTES if transport == "tcp" else None
        is_read = transport == "tcp"
        self._silence_s = min(silence_s, _LONGEST_SILENCE_S) if is_read and silence_s is not None else None
        self._limits = limits
        self._rejected: Counter[str] = Counter()
        self._mailbox = mailbox
        self._mapped: dict[int, int] = {}  # peer -> number of its newest link whose ring this process has mapped
        self._broken: dict[int, int] = {}  # peer -> number of its newest link from which nothing more is taken
        self._unmapped: set[int] = set()  # peers for which it was reported why their memory cannot be mapped
        self._links: dict[int, _Link] = {}
        # Peer -> numbers of the links to it whose rings it may have mapped, closed links included.
        self._with_rings: defaultdict[int, set[int]] = defaultdict(set)
        self._unlinked: set[int] = set()  # members to which this process has no link, as it should send them nothing
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
        self._memory: SharedMemory | None = None
        self._bell: Bell | None = None
        # The controller uses sockets only: its messages are few, and it waits for other things besides its mailbox.
        self._takes_numbered = transport == "shm" and me != CONTROLLER
        self.why_not_shared = self._share_memory() if self._takes_numbered else ""
        self._inbox = SharedInbox(mailbox, limits, self._on_broken)
        if self._memory is not None:
            mailbox.attach(self._inbox)
        reader = MessageReader(self._pull, limits, self._frame_bytes)
        lost = ControllerLost()
        handlers = LoopHandlers(
            file=self._file,
            reject=self._on_rejected,
            fail=lambda error: mailbox.put(LinksFailed(error)),
            controller_lost=lambda: mailbox.put(lost),
            readable={} if self._bell is None else {self._bell.fd: self._on_bell},
            look=None if self._silence_s is None else self._close_silent,
            look_s=(self._silence_s or 0.0) / _LOOKS,
        )
        self._loop = EventLoop(self._pull, reader, admission, handlers, life_fd)
        if credentials is not None:
            self._watch_strangers()
        self._thread = threading.Thread(target=self._loop.run, name=f"links-{me}", daemon=True)
        self._thread.start()
        call_in_forks(self._let_go)

    def connect(self, peer: int, address: str) -> None:
        """Open the link to `peer`, which must have bound `address` already. Does nothing when it is open.

        Raises:
            RunError: the links are closed; the address is not one of this transport; or no descriptor is left.
        """
        if not self._addresses.fullmatch(address):
            raise RunError(f"links of {self.me}: {address!r} is no address of {peer}")
        with self._edit:
            if self._closed:
                raise RunError(f"links of {self.me} are closed; cannot connect to {peer}")
            if peer in self._links and self._links[peer].open is not None:
                return
            self._num_connects += 1
            number = self._num_connects
            socket, monitor = self._new_connection(peer, number)
            shared = self._new_way(peer, number, address)
            link = self._links[peer] = _Link(peer, socket, monitor, number, self.me, self._frame_bytes, shared)
            link.copies_payloads = self._copies_payloads
            self._loop.watch(link.monitor, lambda event, value: self._link_event(link, event, value))
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                link.close()
                raise RunError(f"links of {self.me}: {address!r} is no address of {peer}: {error}") from error
        if link.shared is not None:
            link.send_handshake(_SHARE, link.shared.location())
        self._report_ring(peer)

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

    def send(self, peer: int, header: bytes, payloads: Sequence[Any] = (), *, ordered: bool = True) -> bool:
        """Send one message, from any thread, without blocking. False if the link is closed: the message is lost.

        Args:
            payloads: contiguous buffers (bytes, memoryview, numpy array). Unless `copies_payloads`, those of
                `ZERO_COPY_BYTES` and more are sent in place, some time later: they must not be written to until the
                protocol reports that `peer` has them.
            ordered: False if the message need not arrive after those that were sent before it. It is then filed as soon
                as it arrives, and not only when the peer's consuming thread looks for messages.

        Raises:
            ValueError: a buffer is not contiguous, or there are more than `MAX_PAYLOADS`; nothing is sent then.
        """
        link = self._links.get(peer)
        if link is None and peer in self._unlinked:
            self._miss(peer)
        return link is not None and link.send(header, payloads, ordered=ordered)

    def lend(self, peer: int, num_bytes: int) -> np.ndarray | None:
        """Memory that is shared with a peer, for a payload that the caller writes and then sends to that peer, once.

        Sending does not copy it. It must not be written to after it was sent.

        Returns:
            uint8 [num_bytes]; None if no memory is shared with the peer, or none is left.
        """
        link = self._links.get(peer)
        return None if link is None or link.shared is None else link.shared.lend(num_bytes)

    def reaches(self, peer: int) -> bool:
        """True if the link to `peer` is open."""
        link = self._links.get(peer)
        return link is not None and link.open is not None

    def unacknowledged_s(self, peer: int) -> float:
        """Seconds for which the machine of a peer has acknowledged nothing of what was sent to it over TCP.

        0 if nothing is unacknowledged, or if the link is not over TCP. Only for peers that are not workers (the event
        loop checks those itself), and to be called by one thread only.
        """
        link = self._links.get(peer)
        fd = None if link is None else link.fd
        return 0.0 if link is None or fd is None else link.silence.seconds(fd, time.monotonic())

    def is_sending(self) -> bool:
        """True if data for some peer over TCP still waits to be sent, as the network takes it no faster. Any thread.

        If the peer acknowledges nothing this ends with the link at the latest.
        """
        return any(has_unsent(fd) for link in list(self._links.values()) if (fd := link.fd) is not None)

    def mark(self, at: float) -> None:
        """File a `ReadMark(at)` behind all messages that have arrived by now. Any thread; never blocks.

        Messages that come through shared memory are not among them: the controller, which asks for marks, gets none.
        """
        self._loop.when_read(lambda: self._mailbox.put(ReadMark(at)))

    def _miss(self, peer: int) -> None:
        """A message was to be sent to a member without a link: file a `PeerClosed` for it, the first time only."""
        with self._edit:
            is_new = peer in self._unlinked
            self._unlinked.discard(peer)
        if is_new:
            self._mailbox.put(PeerClosed(peer, was_linked=False))

    @property
    def copies_payloads(self) -> bool:
        """True if payloads may be written to as soon as `send` has returned."""
        return self._copies_payloads

    def drop(self, peer: int) -> None:
        """Close the link to `peer` at once, unsent messages included. No notice is filed. Unknown peers are ignored."""
        self._drop([peer])

    def _drop(self, peers: Sequence[int]) -> None:
        for peer in peers:
            with self._edit:
                link = self._links.pop(peer, None)
            if link is not None:
                link.close()
        self._inbox.forget(*peers)

    def drop_all_but(self, peers: Collection[int], unlinked: Collection[int] = ()) -> None:
        """Drop every peer except `peers`, also those whose links are closed already: nothing more of them is expected.

        Args:
            peers: the peers to keep.
            unlinked: members that have no link, as nothing should be sent to them. If a message is sent to one
                nevertheless it is lost, as on a link that has ended, and the first one files a `PeerClosed`.
        """
        with self._edit:
            self._unlinked = set(unlinked)
        self._drop([peer for peer in [*self._links] if peer not in peers])

    @property
    def peers(self) -> tuple[int, ...]:
        """The peers with an open link."""
        return tuple(peer for peer, link in list(self._links.items()) if link.open is not None)

    @property
    def rejected(self) -> dict[str, int]:
        """The connections that were not admitted and the messages that were dropped: reason -> number so far.

        Every heartbeat contains these counts, so this is called regularly, and unmaps the memory of peers that have
        ended as well.
        """
        self._inbox.unmap_dead()
        for reason in self._inbox.take_rejected():
            self.reject(reason)
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
        for link in links:
            link.close(linger_ms)
        self._loop.stop()
        self._thread.join()
        self._loop.close_wake_pipe()
        self._context.term()  # every socket is closed: waits for lingering ones only
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)  # libzmq leaves it behind
        self._inbox.close()
        if self._bell is not None:
            self._bell.close()
        if self._memory is not None:
            self._memory.close()

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)  # closing discards unsent messages at once, unless `close` says otherwise
        socket.setsockopt(zmq.SNDHWM, 0)  # no high-water mark: sending never blocks
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._frame_bytes is not None:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # a connection that sends a larger frame is closed
            for option, value in KEEPALIVE.items() if kind == zmq.PULL else ():
                socket.setsockopt(option, value)
        if kind == zmq.PULL:
            socket.setsockopt(zmq.BACKLOG, _MOST_WAITING)
        return socket

    def _new_connection(self, peer: int, number: int) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A socket that can connect to a peer, and its monitor.

        Raises:
            RunError: no descriptor is left for them.
        """
        with contextlib.ExitStack() as undo:
            try:
                socket = undo.enter_context(self._new_socket(zmq.PUSH))
                socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: see the invariant at the top
                if self._silence_s is not None and peer != CONTROLLER:
                    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(1e3 * self._silence_s))  # the kernel tries for minutes
                if self._credentials is not None:
                    self._credentials.secure_client(socket)
                # The monitor is connected before the socket has any event: a socket whose monitor nobody reads cannot
                # be closed. Its name contains the number of the link. pyzmq would use the file descriptor, which the
                # next link may get while the old name is still in use.
                monitor = undo.enter_context(self._new_socket(zmq.PAIR))
                socket.monitor(f"inproc://monitor-{number}", _LINK_EVENTS)
                monitor.connect(f"inproc://monitor-{number}")
            except zmq.ZMQError as error:
                raise RunError(f"links of {self.me}: there can be no link to {peer} ({error})") from error
            undo.pop_all()
        return socket, monitor

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
        path = Path(directory).absolute() / socket_names(self.me, os.getpid())[0]
        self._pull.bind(f"ipc://{path}")
        return f"ipc://{path}"

    def _let_go(self) -> None:
        """In a process that was forked from this one: close the copy of the listening socket.

        Otherwise peers would not notice the end of this process as long as its fork lives.
        """
        if not self._closed:
            kind, _, place = self.address.partition("://")
            host, _, port = place.rpartition(":")
            close_bound(place if kind == "ipc" else (host, int(port)))

    def _share_memory(self) -> str:
        """Make what this process needs in order to share memory.

        Returns:
            The reason if that fails, so that everything goes over sockets; else empty.
        """
        if why_unsupported():
            return ""  # no failure of this process: the controller reports it once for the machine
        try:
            self._bell = Bell(self.address.removeprefix("ipc://") + BELL)
            self._memory = SharedMemory()
        except OSError as error:
            return str(error)
        return ""

    def _new_way(self, peer: int, number: int, address: str) -> SharedWay | None:
        """A path to a peer through shared memory; None if this process or the peer has none, or no memory is left."""
        if self._memory is None or peer == CONTROLLER or (at := self._memory.reserve(MEMORY_BYTES, number)) is None:
            return None
        self._with_rings[peer].add(number)
        return SharedWay(self._memory, at, number, address)

    def _on_bell(self) -> None:
        """A peer has sent something while the consumer slept. Event-loop thread."""
        assert self._bell is not None
        self._bell.quiet()
        self._mailbox.wake()

    def _on_rejected(self, rejected: MessageRejected) -> None:
        """Count a message that was dropped. Event-loop thread."""
        self.reject(str(rejected))
        if rejected.numbered is not None:
            self._inbox.skip(*rejected.numbered)

    def _file(self, message: Message) -> None:
        """File a message in the mailbox, or handle it if it belongs to the handshake. Event-loop thread.

        Raises:
            MessageRejected: its kind does not exist, or its contents do not fit its kind.
        """
        if message.kind == _MESSAGE:
            self._mailbox.put(Envelope(message.sender, message.header, message.payloads))
        elif not self._takes_numbered:
            raise MessageRejected(MALFORMED)
        elif message.kind == NUMBERED:
            self._inbox.accept(message)
        elif self._memory is not None:  # else peers send everything over sockets, as nothing is mapped here
            self._handle_handshake(message)

    def _handle_handshake(self, message: Message) -> None:
        """Map a peer's memory, or begin or end to use the link to a peer that maps this one's. Event-loop thread."""
        sender, kind = message.sender, message.kind
        form = {_SHARE: SHARED_RING, _MAPPED: _MAPPED_LINK, _BROKEN: _BROKEN_LINK}.get(kind)
        if form is None or message.payloads or len(message.header) != form.size:
            raise MessageRejected(MALFORMED)
        if kind == _MAPPED:
            number, pid = form.unpack(message.header)
            link = self._links.get(sender)
            if link is not None and link.shared is not None and link.number == number:
                with link.lock:  # a message that is being sent now goes entirely by the socket or entirely by the ring
                    if link.open is not None:
                        link.shared.open(pid)
                self._take_back_rings(sender, number)
            return
        if kind == _BROKEN:
            link = self._links.get(sender)
            if link is not None and (link.number,) == form.unpack(message.header):  # else it is of an older link
                self._end(link)
            return
        *location, at = form.unpack(message.header)
        self._map_memory(sender, message.link, MemoryLocation(*location), at)

    def _map_memory(self, sender: int, number: int, location: MemoryLocation, at: int) -> None:
        """Map a peer's memory for a link with a ring in it, and report that to the peer. Event-loop thread."""
        try:
            self._inbox.add_ring(sender, number, location, at)
        except ValueError:
            raise MessageRejected(MALFORMED) from None
        except FileNotFoundError:  # the peer has ended or closed its links, after it had sent this
            return
        except OSError as error:  # everything of this peer comes over the socket then
            if not is_ending(location.pid):
                self._report_unmapped(sender, error)
            return
        with self._edit:  # `max`, as the message of an older link may arrive late
            self._mapped[sender] = max(number, self._mapped.get(sender, number))
        self._report_ring(sender)

    def _report_unmapped(self, peer: int, error: OSError) -> None:
        """Print, once per peer, why the memory of a living peer cannot be mapped. Event-loop thread."""
        if peer not in self._unmapped:
            self._unmapped.add(peer)
            text = f"links of {self.me}: all from {peer} comes over a socket, as its memory cannot be mapped ({error})"
            with contextlib.suppress(OSError):  # one write, as other processes may write to stderr at the same moment
                os.write(2, f"{text}\n".encode())

    def _take_back_rings(self, peer: int, number: int) -> None:
        """A peer has mapped the ring of its newest link, so it has read all older ones to their ends: free those.

        On a large mesh peers come and go while their processes live. Without this, each new link would take more memory
        for good.
        """
        assert self._memory is not None
        with self._edit:
            older = {link for link in self._with_rings[peer] if link < number}
            self._with_rings[peer] -= older
        self._memory.replace_links(older)

    def _on_broken(self, peer: int, number: int) -> None:
        """Nothing more is taken from a peer's link, which it cannot see: tell it. Any thread; the inbox is locked."""
        with self._edit:
            self._broken[peer] = number
        self._report_ring(peer)

    def _report_ring(self, peer: int) -> None:
        """Tell a peer whether its ring is mapped, or broken. Called when that changes, and when a link to it is opened.

        The peer ignores what concerns an older link than its present one.
        """
        with self._edit:
            link, mapped, broken = self._links.get(peer), self._mapped.get(peer), self._broken.get(peer)
        if link is not None and mapped is not None:
            link.send_handshake(_MAPPED, _MAPPED_LINK.pack(mapped, os.getpid()))
        if link is not None and broken is not None:
            link.send_handshake(_BROKEN, _BROKEN_LINK.pack(broken))

    def _link_event(self, link: _Link, event: int, value: int) -> None:
        """Handle an event of a link's monitor. Event-loop thread."""
        if event & zmq.EVENT_CONNECTED:
            if self._credentials is not None:
                link.fd = value
                bound_retries(value, self._GIVE_UP_S)
            return
        if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            link.up.set()
            return
        self._end(link)

    def _close_silent(self) -> None:
        """Close links to workers that acknowledge nothing any more, or that do not get connected. Event-loop thread."""
        assert self._silence_s is not None
        now = time.monotonic()
        with self._edit:
            links = [link for link in self._links.values() if link.peer != CONTROLLER and link.open is not None]
        for link in links:
            if link.fd is not None:
                is_over = link.silence.seconds(link.fd, now) >= self._silence_s
            else:
                # libzmq ends an attempt to connect that takes longer than `_silence_s`. But if it cannot begin one, as
                # no descriptor is left, it reports nothing, and does not try again. Checks are counted instead of
                # seconds, as time also passes while this process is stopped.
                link.num_waits += 1
                is_over = link.num_waits > 2 * _LOOKS
            if is_over:
                self._end(link)

    def _end(self, link: _Link) -> None:
        """A link has ended. Event-loop thread."""
        link.fd = None
        # Closing frees the messages that are queued for the dead peer. The entry stays, so that `send` goes on
        # returning False. Nobody opens the link again before the notice is filed: only the notice says that messages
        # may be lost.
        with self._edit:
            was_open = link.close()
            ours = was_open and self._links.get(link.peer) is link and not self._closed
        if ours:
            self._mailbox.put(PeerClosed(link.peer))


def _check(transport: str, directory: str) -> None:
    if transport not in _ADDRESSES:
        raise ConfigError(
            f"runtime.transport={transport} is no transport", where="runtime.transport", exists=", ".join(_ADDRESSES)
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
