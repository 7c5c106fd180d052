"""Event loop of a process's links: one thread that receives everything, with one wait over all sockets."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq

from elaswave_spmd.runtime.transport.credentials import Admission
from elaswave_spmd.runtime.transport.frames import Message, MessageReader, MessageRejected

_BURST = 256  # messages received from the PULL socket before the other sockets are polled
_MONITOR_EVENT = struct.Struct("=hi")  # the first frame of a monitor's message: event, value


@dataclass(frozen=True)
class LoopHandlers:
    """Everything that an event loop calls. All of it runs in the loop's thread, and must not block.

    Args:
        file: takes each message. May raise MessageRejected.
        reject: is told of each message that is dropped.
        fail: takes an exception, of whatever was called, after which nothing is received any more.
        controller_lost: the life pipe has ended.
        readable: descriptor -> what is called when it can be read, beside the loop's own descriptors.
        look: is called now and then; None: nothing is.
        look_s: seconds from one look to the next.
    """

    file: Callable[[Message], None]
    reject: Callable[[MessageRejected], None]
    fail: Callable[[BaseException], None]
    controller_lost: Callable[[], None]
    readable: Mapping[int, Callable[[], None]]
    look: Callable[[], None] | None = None
    look_s: float = 1.0


class EventLoop:
    """The thread that owns the PULL socket, the monitors and the handler that admits connections.

    It waits for their file descriptors, the life pipe, and a pipe of its own through which other threads give it work.

    Args:
        pull: the bound PULL socket; closed when the thread ends.
        reader: reads its messages.
        admission: answers for its connections, closed when the thread ends; None if all are admitted.
        handlers: what it calls.
        life_fd: read end of the controller's life pipe, or None.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        reader: MessageReader,
        admission: Admission | None,
        handlers: LoopHandlers,
        life_fd: int | None,
    ) -> None:
        self._pull = pull
        self._reader = reader
        self._admission = admission
        self._handlers = handlers
        self._next_look = time.monotonic() + handlers.look_s
        self._monitors: dict[zmq.Socket[bytes], Callable[[int, int], None]] = {}
        self._pending_work: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._wake_lock = threading.Lock()  # guards the wake pipe against being closed while others write
        self._wake_open = True
        # The way to wake a thread that waits in select: other threads write a byte into this pipe.
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._wake_read = read
        self._wake_write = write
        self._selector = selectors.DefaultSelector()
        self._register(pull.FD, lambda: None)  # the PULL socket is read on every turn anyway
        self._register(self._wake_read, self._drain_wake)
        if admission is not None:
            self._register(admission.socket.FD, admission.answer)
        if life_fd is not None:
            self._register(life_fd, lambda: self._life_ended(life_fd))
        for fd, on_ready in handlers.readable.items():
            self._register(fd, on_ready)

    def watch(self, monitor: zmq.Socket[bytes], on_event: Callable[[int, int], None]) -> None:
        """Call `on_event` with each event of a link's monitor and its value. Any thread.

        The monitor is closed after its socket has stopped, and not before: libzmq's thread would wait for ever to
        deliver another event, and all links with it.
        """
        self._hand_over(lambda: self._add(monitor, on_event))

    def stop(self) -> None:
        """End the thread and close its sockets. Any other thread."""
        self._hand_over(lambda: setattr(self, "_stopping", True))

    def run(self) -> None:
        """The thread's main function; returns after `stop`."""
        try:
            self._serve()
        except BaseException as error:  # of `fail` the process ends; a thread that only ended would leave it deaf
            self._handlers.fail(error)
            self._wait_for_stop()
        # First, as with every monitor: it must not be closed while its socket may still report to it.
        self._pull.disable_monitor()
        for monitor in list(self._monitors):
            self._remove(monitor)
        self._pull.close(0)
        if self._admission is not None:
            self._admission.close()
        self._selector.close()

    def _serve(self) -> None:
        pending = True  # zmq's descriptors signal changes only, so read before the first wait
        if self._admission is not None:
            self._admission.answer()
        while not self._stopping:
            for key, _ in self._selector.select(0 if pending else self._patience_s()):
                key.data()
            self._look_if_due()
            while self._pending_work:
                self._pending_work.popleft()()
            pending = self._drain_pull()

    def _wait_for_stop(self) -> None:
        """After a failure: what is still to be sent, such as the report of it, needs the sockets until `stop`."""
        wake = select.poll()  # as it takes any descriptor
        wake.register(self._wake_read, select.POLLIN)
        while True:
            # Before the first wait as well: the loop may have failed after it had taken the byte that tells of `stop`.
            while self._pending_work:
                with contextlib.suppress(Exception):  # it has failed already; monitors that come are closed at the end
                    self._pending_work.popleft()()
            if self._stopping:
                return
            wake.poll()
            self._drain_wake()

    def _patience_s(self) -> float | None:
        """Seconds to wait for events; None: for ever."""
        return None if self._handlers.look is None else max(0.0, self._next_look - time.monotonic())

    def _look_if_due(self) -> None:
        if (look := self._handlers.look) is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._handlers.look_s
            look()

    def close_wake_pipe(self) -> None:
        """Close the wake pipe, after the thread has ended. Not in the thread: others may be about to write."""
        with self._wake_lock:
            self._wake_open = False
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Have the event-loop thread call `work`. Sockets of zmq may only be used by one thread."""
        self._pending_work.append(work)
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes the loop as well
            if self._wake_open:
                os.write(self._wake_write, b"\0")

    def _register(self, fd: int, on_ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, on_ready)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass

    def _life_ended(self, life_fd: int) -> None:
        # An ended pipe stays readable, so it must be removed, or the loop would never wait again.
        self._selector.unregister(life_fd)
        self._handlers.controller_lost()

    def _add(self, monitor: zmq.Socket[bytes], on_event: Callable[[int, int], None]) -> None:
        self._monitors[monitor] = on_event
        self._register(monitor.FD, lambda: self._drain_monitor(monitor))
        # Events from before the registration are not signalled again.
        self._drain_monitor(monitor)

    def _remove(self, monitor: zmq.Socket[bytes]) -> None:
        if self._monitors.pop(monitor, None) is not None:
            with contextlib.suppress(KeyError):  # there was no memory to register it
                self._selector.unregister(monitor.FD)
            monitor.close(0)

    def _drain_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        while monitor in self._monitors:
            try:
                event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_MONITOR_STOPPED:
                self._remove(monitor)
            else:
                self._monitors[monitor](event, value)

    def _drain_pull(self) -> bool:
        """Receive until nothing is left (False) or a burst is done (True: call again without waiting).

        Bursts keep a busy PULL socket from delaying the monitors, by which a lost peer is noticed.
        """
        for _ in range(_BURST):
            try:
                self._handlers.file(self._reader.read())
            except zmq.Again:
                return False
            except MessageRejected as rejected:
                self._handlers.reject(rejected)
        return True
