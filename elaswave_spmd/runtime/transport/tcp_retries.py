"""Bounds of how TCP sends again: a network that is back is noticed within a second, one that is gone after a time.

The kernel doubles the time from one try to the next. After a cut of c seconds nothing may be heard for another c
seconds, so that a cut much shorter than `timeouts.suspect` cost the workers behind it. Linux 6.15 and later can bound
that time for one connection; elsewhere it stays as it is. After which time a connection ends can be set everywhere.
"""

from __future__ import annotations

import contextlib
import socket

_TCP_RTO_MAX_MS = 44  # linux/tcp.h; Python has no name for it
_MOST_MS = 1000  # from one try to the next; the kernel takes no less


def bound_retries(fd: int, give_up_s: float) -> bool:
    """Have a connection try again every second, and end at last. Returns False where the kernel cannot do the former.

    Args:
        fd: of a connected socket, which another owner may just have closed.
        give_up_s: from the first try without an answer until the connection ends. Otherwise the kernel
            counts tries, mostly 15: a quarter of an hour, or as many seconds where it tries every second.
    """
    try:
        connection = socket.socket(fileno=fd)
    except OSError:  # it is closed, or something else has its number by now
        return False
    try:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * give_up_s))
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _MOST_MS)
    except OSError:
        return False
    finally:
        connection.detach()  # its owner closes it
    return True
