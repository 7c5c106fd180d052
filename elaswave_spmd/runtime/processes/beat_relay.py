"""The relay of heartbeats on an agent's machine: the agent gathers those of its workers and sends them on together.

    worker's thread --datagram--> BeatRelay --Beats--> controller
         RelayClient <--an answer-- BeatRelay <--BeatsHeard-- controller

So the controller of a large run gets one message from each machine, not one from each worker. If the agent hangs, its
workers are still heard: a worker whose heartbeat got no answer sends the next one to the controller directly as well.
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

_HEAD = struct.Struct("<qd")  # precedes each heartbeat: the sender's rank, and the seconds until its next heartbeat
_LONGEST = 8192  # bytes of a datagram; a heartbeat has a few hundred
_MOST_AT_ONCE = 1000  # datagrams that are read before the thread checks whether a message is due
_LONGEST_S = 10.0  # the longest time between two messages, whatever period workers give
_ANSWER = b"\1"


class BeatRelay:
    """The agent's end: a thread that sends on the newest heartbeat of each worker, twice in a worker's period.

    Sending twice in a period means that a heartbeat is answered before its sender's next one is due. Only one message
    is on its way at a time. Otherwise messages to a stopped controller would pile up until the kernel ends the
    connection.

    Args:
        path: the path of its socket, in a private directory. An existing file there is replaced.
        ranks: the workers that live on this machine. The container is read whenever a heartbeat comes, and heartbeats
            in the name of other workers are dropped.
        send: sends (rank, heartbeat) for each worker that was heard since the last call. Called by the thread.

    Raises:
        OSError: the socket cannot be made.
        RuntimeError: no thread can be started.
    """

    def __init__(self, path: str, ranks: Container[int], send: Callable[[Sequence[tuple[int, bytes]]], object]) -> None:
        self._path = path
        self._ranks = ranks
        self._send = send
        self._lock = threading.Lock()  # guards the next two attributes
        self._newest: dict[int, bytes] = {}
        self._in_flight: tuple[int, ...] = ()  # ranks whose heartbeats were sent on and are not answered yet
        self._period_s = 0.0  # the shortest period that a worker has given since the last message
        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(_bound_socket(path))
            self._woken, self._closes = socket.socketpair()
            undo.enter_context(self._woken)
            undo.enter_context(self._closes)
            self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
            self._thread.start()
            undo.pop_all()

    def answered(self) -> None:
        """The controller has answered the last message: answer the workers whose heartbeats were in it."""
        with self._lock:
            heard, self._in_flight = self._in_flight, ()
        for rank in heard:
            with contextlib.suppress(OSError):  # it has ended, or does not read
                self._socket.sendto(_ANSWER, _address(self._path, rank))

    def forget(self, rank: int) -> None:
        """A worker has ended, and is not in `ranks` any more. After this call, no heartbeat of it is sent on."""
        with self._lock:
            self._newest.pop(rank, None)
        with contextlib.suppress(OSError):
            os.unlink(_address(self._path, rank))

    def close(self) -> None:
        """End the thread and remove the socket. From now on, workers send their heartbeats to the controller."""
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
        """Read the datagrams that have come and keep the newest of each worker.

        Their number is limited, so that a flood of datagrams does not keep the thread from sending on.
        """
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
        with self._lock:  # held while sending as well: otherwise `forget` could return before the message is sent
            if not self._in_flight:
                newest, self._newest = self._newest, {}
                self._in_flight = tuple(newest)
                self._send([*newest.items()])


class RelayClient:
    """A worker's end of its agent's relay. For the thread that sends heartbeats.

    Args:
        rank: this worker.
        path: the path of the relay's socket.

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
            beat: the encoded heartbeat.
            period_s: the seconds until the next one.

        Returns:
            False if the heartbeat before was not answered, or if this one could not be handed over: then the caller has
            to send it to the controller as well.
        """
        was_answered = self._take_answers()
        try:
            self._socket.sendto(_HEAD.pack(self._rank, period_s) + beat, self._path)
        except OSError:  # the relay's queue is full, or there is no relay
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
    """A non-blocking datagram socket at `path`. An existing file there is replaced."""
    with contextlib.ExitStack() as undo:
        made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        made.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        made.bind(path)
        undo.pop_all()
    return made
