"""The event loop of a process's links: one thread that receives everything, with one wait for all sockets."""

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
_MOST_BURSTS = 4_000  # a million messages: what is to follow all messages that have arrived comes after so many at most
_MONITOR_EVENT = struct.Struct("=hi")  # the first frame of a monitor's message: event, value


@dataclass(frozen=True)
class LoopHandlers:
    """The functions that an event loop calls. All of them run in the loop's thread, and must not block.

    Args:
        file: called with each message. May raise MessageRejected.
        reject: called for each message that is dropped.
        fail: called with an exception that no handler has caught. Nothing is received after it.
        controller_lost: called when the life pipe has ended.
        readable: descriptor -> function that is called when the descriptor is readable, for descriptors that are not
            the loop's own.
        look: called every `look_s` seconds; None if nothing has to be checked regularly.
        look_s: the period of `look` in seconds.
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
        reader: reads messages from the PULL socket.
        admission: decides which connections are admitted; closed when the thread ends. None if all are admitted.
        handlers: the functions that the loop calls.
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
        self._num_bursts = 0
        # Calls that follow everything that has arrived before they were asked for: (the burst after which they come at
        # the latest, call).
        self._when_read: deque[tuple[int, Callable[[], None]]] = deque()
        self._stopping = False
        self._wake_lock = threading.Lock()  # guards the wake pipe against being closed while others write
        self._wake_open = True
        # Other threads wake this one, which waits in select, by writing a byte into this pipe.
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

        The monitor is closed only after its socket has stopped. Otherwise libzmq's thread would wait forever to deliver
        the next event, and all links would wait with it.
        """
        self._hand_over(lambda: self._add(monitor, on_event))

    def when_read(self, then: Callable[[], None]) -> None:
        """Call `then` in the loop's thread once all messages are received that have arrived by now. Any thread.

        If messages come without an end, faster than they are received, it is called after a million of them.
        """
        self._hand_over(lambda: self._when_read.append((self._num_bursts + _MOST_BURSTS, then)))

    def stop(self) -> None:
        """End the thread and close its sockets. Any other thread."""
        self._hand_over(lambda: setattr(self, "_stopping", True))

    def run(self) -> None:
        """The thread's main function; returns after `stop`."""
        try:
            self._serve()
        except BaseException as error:
            # `fail` ends the process. If only this thread ended, the process would go on and receive nothing.
            self._handlers.fail(error)
            self._wait_for_stop()
        # Before its monitor is closed below: a monitor must not be closed while its socket may still report to it.
        self._pull.disable_monitor()
        for monitor in list(self._monitors):
            self._remove(monitor)
        self._pull.close(0)
        if self._admission is not None:
            self._admission.close()
        self._selector.close()

    def _serve(self) -> None:
        # zmq's descriptors signal only changes of state, so read once before the first wait.
        pending = True
        if self._admission is not None:
            self._admission.answer()
        while not self._stopping:
            for key, _ in self._selector.select(0 if pending else self._patience_s()):
                key.data()
            self._look_if_due()
            while self._pending_work:
                self._pending_work.popleft()()
            pending = self._drain_pull()
            self._num_bursts += 1
            while self._when_read and (not pending or self._when_read[0][0] <= self._num_bursts):
                self._when_read.popleft()[1]()

    def _wait_for_stop(self) -> None:
        """After a failure: wait for `stop`. Until then the sockets are needed to send the report of the failure."""
        wake = select.poll()  # not select, which cannot wait for large descriptor numbers
        wake.register(self._wake_read, select.POLLIN)
        while True:
            # Also before the first wait: the loop may have failed after it had read the byte that announced `stop`.
            while self._pending_work:
                with contextlib.suppress(Exception):  # the loop has failed; `run` closes new monitors at its end
                    self._pending_work.popleft()()
            if self._stopping:
                return
            wake.poll()
            self._drain_wake()

    def _patience_s(self) -> float | None:
        """The number of seconds to wait for events; None if there is no limit."""
        return None if self._handlers.look is None else max(0.0, self._next_look - time.monotonic())

    def _look_if_due(self) -> None:
        if (look := self._handlers.look) is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self._handlers.look_s
            look()

    def close_wake_pipe(self) -> None:
        """Close the wake pipe. To be called after the thread has ended, as others may write into it until then."""
        with self._wake_lock:
            self._wake_open = False
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Have the event-loop thread call `work`, as a zmq socket may be used by one thread only."""
        self._pending_work.append(work)
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # the pipe is full, so the loop wakes anyway
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
            with contextlib.suppress(KeyError):  # it is not registered if the loop failed before that
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
