"""SIGTERM in processes that code of the user forks from a worker, such as a pool of `multiprocessing`.

A worker takes SIGTERM as a request to leave, and its handler only notes it. A fork has the handler, too, so that
`Process.terminate()` would not end it, and a dataset that waits for its end would wait for ever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import time

from elaswave_spmd.forks import call_in_forks

_ONE_SIGNAL_S = 0.5
"""A process and its fork that get SIGTERM within so many seconds have got it as members of one group."""

_TERM = bytes([signal.SIGTERM])
_MOST = 65536  # more than the socket has room for, as the system counts hundreds of bytes for each signal


class TermInForks:
    """Lets SIGTERM end the processes that are forked from this one, unless it was sent to this one as well.

    Batch systems and systemd send SIGTERM to all processes of a job. A worker goes on for a while then, to leave in an
    orderly way, and may need its forks for that. To be made by the main thread.
    """

    def __init__(self) -> None:
        self._came = mmap.mmap(-1, 8)  # shared with the forks: the time of this process's newest SIGTERM
        # Python calls a handler when the main thread is back from a call of a library, which may take seconds. It
        # writes the signal's number to this socket at once, as it does for each signal that has a handler of Python's.
        self._unhandled, self._written = socket.socketpair()
        for end in (self._unhandled, self._written):
            end.setblocking(False)
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        call_in_forks(self._in_fork, {signal.SIGTERM})

    def came(self) -> None:
        """This process has got SIGTERM. For its handler: it does not block."""
        struct.pack_into("d", self._came, 0, time.monotonic())
        with contextlib.suppress(BlockingIOError):
            self._unhandled.recv(_MOST)

    def drop_others(self) -> None:
        """Make room for the next SIGTERM, where other signals have filled the socket, such as those of a profiler.

        To be called now and then by the main thread. What follows a SIGTERM whose handler has not been called stays.
        """
        if others := self._written_for().partition(_TERM)[0]:
            with contextlib.suppress(BlockingIOError):  # SIGTERM has come since, whose handler has emptied it
                self._unhandled.recv(len(others))

    def _in_fork(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        began = time.monotonic()  # of the machine, so it can be compared with the other process's
        while time.monotonic() < began + _ONE_SIGNAL_S:
            if self._has_come_since(began - _ONE_SIGNAL_S):
                return
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _has_come_since(self, earliest: float) -> bool:
        """True if the process that forked this one has got SIGTERM, in a fork."""
        return _TERM in self._written_for() or struct.unpack_from("d", self._came, 0)[0] > earliest

    def _written_for(self) -> bytes:
        """The signals of the process that forked this one, or of this one, that were not removed from the socket."""
        try:
            return self._unhandled.recv(_MOST, socket.MSG_PEEK)
        except BlockingIOError:  # nothing is there
            return b""
