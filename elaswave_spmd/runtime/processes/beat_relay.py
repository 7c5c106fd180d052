"""Heartbeats of the workers of an agent's machine: the agent gathers them, and sends on what has come in one message.

    worker's thread --datagram--> BeatRelay --Beats--> controller
         RelayClient <--an answer-- BeatRelay <--BeatsHeard-- controller

The controller of a large run hears machines, not workers. An agent that stands still costs nobody anything: a worker
whose heartbeat has had no answer sends the next one to the controller itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Sequence

from elaswave_spmd.ready import ready_among

_HEAD = struct.Struct("<qd")  # in front of a heartbeat: its sender's rank, and the seconds until the sender's next one
_LONGEST = 8192  # bytes of a datagram; a heartbeat has some hundreds
_MOST_AT_ONCE = 1000  # datagrams that are read before it is looked whether a message is due
_LONGEST_S = 10.0  # between two messages, whatever workers say
_ANSWER = b"\1"


class BeatRelay:
    """The agent's end: a thread that sends on the newest heartbeat of each worker, twice in a worker's period.

    So a heartbeat is answered before its sender's next one is due. One message is on its way at a time: to a controller
    that is stopped nothing piles up, whose connection the kernel would end.

    Args:
        path: of its socket, in a private directory. What lies there is replaced.
        ranks: of the workers that live here, at any time; what comes in the name of others is dropped.
        send: sends (rank, heartbeat) of those that were heard since the last call. Called by the thread.

    Raises:
        OSError, RuntimeError: the socket cannot be made, or no thread can be started.
    """

    def __init__(self, path: str, ranks: Container[int], send: Callable[[Sequence[tuple[int, bytes]]], object]) -> None:
        self._path = path
        self._ranks = ranks
        self._send = send
        self._lock = threading.Lock()  # guards the next two
        self._newest: dict[int, bytes] = {}
        self._in_flight: tuple[int, ...] = ()  # ranks whose heartbeats the controller has not answered
        self._period_s = 0.0  # the shortest that a worker has said since the last message
        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(_bound_socket(path))
            self._woken, self._closes = socket.socketpair()
            undo.enter_context(self._woken)
            undo.enter_context(self._closes)
            self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
            self._thread.start()
            undo.pop_all()

    def answered(self) -> None:
        """The controller has heard what was sent last."""
        with self._lock:
            heard, self._in_flight = self._in_flight, ()
        for rank in heard:
            with contextlib.suppress(OSError):  # it has ended, or does not read
                self._socket.sendto(_ANSWER, _address(self._path, rank))

    def forget(self, rank: int) -> None:
        """The worker has ended, and is none of `ranks` any more. Once this has returned nothing of it is sent on."""
        with self._lock:
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
            wait_s = max(0.0, due - time.monotonic()) if self._newest else None
            readable = ready_among([self._socket, self._woken], wait_s)
            if self._woken in readable:
                return
            self._receive()
            if self._newest and time.monotonic() >= due:
                due = time.monotonic() + min(self._period_s / 2, _LONGEST_S)
                self._send_on()

    def _receive(self) -> None:
        """File what has come, the newest of each worker. No flood keeps the thread from its other duties."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_AT_ONCE):
                self._file(self._socket.recv(_LONGEST + 1))

    def _file(self, data: bytes) -> None:
        if not _HEAD.size < len(data) <= _LONGEST:
            return
        rank, period_s = _HEAD.unpack_from(data)
        with self._lock:
            if rank not in self._ranks or not period_s > 0:
                return
            self._period_s = min(self._period_s, period_s) if self._newest else period_s
            self._newest[rank] = data[_HEAD.size :]

    def _send_on(self) -> None:
        with self._lock:  # also while it is sent: what comes from `forget` on must not overtake it
            if not self._in_flight:
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
        self._rank = rank
        self._path = path
        self._socket = _bound_socket(_address(path, rank))

    def send(self, beat: bytes, period_s: float) -> bool:
        """Hand a heartbeat to the relay. Never waits.

        Args:
            period_s: until the next one.

        Returns:
            False if the one before was not answered: then this one is to be sent to the controller as well.
        """
        was_answered = self._take_answers()
        try:
            self._socket.sendto(_HEAD.pack(self._rank, period_s) + beat, self._path)
        except OSError:  # its queue is full, or it is not there
            return False
        return was_answered

    def _take_answers(self) -> bool:
        """True if any answer has come since the last call."""
        found = False
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(len(_ANSWER)):
                found = True
        return found

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
