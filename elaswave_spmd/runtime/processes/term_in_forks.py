"""SIGTERM in processes that code of the user forks from a worker, such as a pool of `multiprocessing`.

A worker takes SIGTERM as a request to leave, and its handler only notes it. A fork has the handler, too, so that
`Process.terminate()` would not end it, and a dataset that waits for its end would wait for ever.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time

from elaswave_spmd.forks import set_up_forks

_ONE_SIGNAL_S = 0.5
"""A process and its fork that get SIGTERM within so many seconds have got it as members of one group."""


class TermInForks:
    """Lets SIGTERM end the processes that are forked from this one, unless it was sent to this one as well.

    Batch systems and systemd send SIGTERM to all processes of a job. A worker goes on for a while then, to leave in an
    orderly way, and may need its forks for that.
    """

    def __init__(self) -> None:
        self._came = mmap.mmap(-1, 8)  # shared with the forks: the time of this process's newest SIGTERM
        set_up_forks(self._in_fork, {signal.SIGTERM})

    def came(self) -> None:
        """This process has got SIGTERM. For its handler: it does not block."""
        struct.pack_into("d", self._came, 0, time.monotonic())

    def _in_fork(self) -> None:
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        began = time.monotonic()  # of the machine, so it can be compared with the other process's
        while time.monotonic() < began + _ONE_SIGNAL_S:
            (came,) = struct.unpack_from("d", self._came, 0)
            if came > began - _ONE_SIGNAL_S:
                return
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
