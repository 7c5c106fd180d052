"""TCP connections on which the other end acknowledges nothing any more, while nobody closes them.

So it is when the network between two machines fails, in both directions or in one: the kernel sends again for as long
as it is allowed to, which may be for ever. The kernel also acknowledges for a process that stands still, so a stopped
peer is not taken for a network that has failed, for however long it stands still.
"""

from __future__ import annotations

import socket
import struct

_TCP_INFO = struct.Struct("=3xB20xI28xI")  # linux/tcp.h, tcp_info: probes, unacked, last_ack_recv in milliseconds


class Silence:
    """The time for which what was sent over one connection has had no answer, looked at now and then."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, fd: int, now: float) -> float:
        """Seconds for which something has waited for an acknowledgement, and none has come; 0 if nothing waits.

        Args:
            fd: of a connected socket, which another owner may just have closed.
            now: of a clock that does not run while the machine sleeps.
        """
        found = _waiting(fd)
        if found is None:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return min(now - self._since, found)


def _waiting(fd: int) -> float | None:
    """Seconds since the last acknowledgement, of a connection that waits for one; None if it does not."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, AttributeError):  # it is closed, or something else has its number by now; or this is not Linux
        return None
    finally:
        connection.detach()  # its owner closes it
    if len(info) < _TCP_INFO.size:
        return None
    probes, unacknowledged, last_ms = _TCP_INFO.unpack(info)
    # Probes ask a receiver that has had no room; one that stands still answers each.
    return last_ms / 1e3 if unacknowledged or probes else None
