"""Heartbeats of the workers of an agent's machine: the agent gathers them, and sends one message in each period.

    worker's thread --datagram--> BeatRelay --Beats, once a period--> controller
         RelayClient <--an answer-- BeatRelay <--BeatsHeard-- controller

The controller of a large run hears machines, not workers. An agent that stands still costs nobody anything: a worker
whose heartbeats are not answered sends them to the controller itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

_RANK = struct.Struct("<q")  # of the sender, in front of its heartbeat
_LONGEST = 1 << 16  # bytes of a datagram; a heartbeat has some hundreds
_UNANSWERED = 2  # heartbeats without an answer, when a worker goes to the controller itself
_ANSWER = b"\1"


class BeatRelay:
    """The agent's end: a thread that sends on the newest heartbeat of each worker, once in each period.

    One message is on its way at a time: to a controller that is stopped nothing piles up, whose connection the kernel
    would end.

    Args:
        path: of its socket, in a private directory. What lies there is replaced.
        period_s: from one message to the next.
        send: sends (rank, heartbeat) of those that were heard since the last call. Called by the thread.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, path: str, period_s: float, send: Callable[[Sequence[tuple[int, bytes]]], object]) -> None:
        self._path = path
        self._period_s = period_s
        self._send = send
        self._lock = threading.Lock()  # guards the next three
        self._newest: dict[int, bytes] = {}
        self._in_flight: tuple[int, ...] = ()  # ranks whose heartbeats the controller has not answered
        self._gone = set[int]()
        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(_bound_socket(path))
            self._woken, self._closes = socket.socketpair()
            undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def answered(self) -> None:
        """The controller has heard what was sent last."""
        with self._lock:
            heard, self._in_flight = self._in_flight, ()
        for rank in heard:
            with contextlib.suppress(OSError):  # it has ended, or does not read
                self._socket.sendto(_ANSWER, _address(self._path, rank))

    def forget(self, rank: int) -> None:
        """The worker has ended. Nothing of it is sent on once this has returned."""
        with self._lock:
            self._gone.add(rank)
            self._newest.pop(rank, None)
        with contextlib.suppress(OSError):
            os.unlink(_address(self._path, rank))

    def close(self) -> None:
        """End the thread, and remove the socket. Workers go to the controller themselves from now on."""
        self._closes.close()
        self._thread.join()
        for end in (self._socket, self._woken):
            end.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            readable, *_ = select.select([self._socket, self._woken], [], [], max(0.0, due - time.monotonic()))
            if self._woken in readable:
                return
            if readable:
                self._receive()
            if time.monotonic() >= due:
                self._send_on()
                due = time.monotonic() + self._period_s

    def _receive(self) -> None:
        """File one datagram. No flood of them keeps the thread from its period."""
        try:
            data = self._socket.recv(_LONGEST)
        except BlockingIOError:
            return
        if len(data) <= _RANK.size:
            return  # none of a worker
        (rank,) = _RANK.unpack_from(data)
        with self._lock:
            if rank not in self._gone:
                self._newest[rank] = data[_RANK.size :]

    def _send_on(self) -> None:
        with self._lock:  # also while it is sent: what comes from `forget` on must not overtake it
            if self._newest and not self._in_flight:
                newest, self._newest = self._newest, {}
                self._in_flight = tuple(newest)
                self._send([*newest.items()])


class RelayClient:
    """A worker's end of its agent's relay. For the thread that sends heartbeats.

    Args:
        path: of the relay's socket.

    Raises:
        OSError: the worker's own socket cannot be made beside it.
    """

    def __init__(self, rank: int, path: str) -> None:
        self._head = _RANK.pack(rank)
        self._path = path
        self._unanswered = _UNANSWERED  # nothing is known of the relay yet
        self._socket = _bound_socket(_address(path, rank))

    def send(self, beat: bytes) -> bool:
        """Hand a heartbeat to the relay. Never waits.

        Returns:
            False if the relay does not answer: then the heartbeat is to be sent to the controller as well.
        """
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(len(_ANSWER)):
                self._unanswered = 0
        is_heard = self._unanswered < _UNANSWERED
        self._unanswered += 1
        try:
            self._socket.sendto(self._head + beat, self._path)
        except OSError:  # its queue is full, or it is not there
            return False
        return is_heard

    def close(self) -> None:
        """Close the socket; the relay removes its name."""
        self._socket.close()


def _address(path: str, rank: int) -> str:
    """The path of a worker's socket, beside that of the relay."""
    return f"{path}-{rank}"


def _bound_socket(path: str) -> socket.socket:
    """A datagram socket at `path`, on which nothing blocks. What lies there is replaced."""
    with contextlib.ExitStack() as undo:
        made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        made.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        made.bind(path)
        undo.pop_all()
    return made
