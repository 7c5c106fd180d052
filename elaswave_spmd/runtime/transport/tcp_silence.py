"""TCP connections on which the other end acknowledges nothing any more, while nobody closes them; and on which more is
being sent than the network has room for.

So it is when the network between two machines fails, in both directions or in one: the kernel sends again for as long
as it is allowed to, which may be for ever. The kernel also acknowledges for a process that stands still, so a stopped
peer is not taken for a network that has failed, for however long it stands still.
"""

from __future__ import annotations

import socket
import struct

_TCP_INFO = struct.Struct("=3xB20xI28xI")  # linux/tcp.h, tcp_info: probes, unacked, last_ack_recv in milliseconds
_UNSENT = struct.Struct("=144xI")  # notsent_bytes


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


def has_unsent(fd: int) -> bool:
    """True if the kernel has bytes to send for which there is no room in the network, or at the receiver, yet.

    So it is while a large payload is under way. False where the kernel does not tell.

    Args:
        fd: of a connected socket, which another owner may just have closed.
    """
    info = _info_of(fd, _UNSENT.size)
    return info is not None and _UNSENT.unpack(info)[0] > 0


def _waiting(fd: int) -> float | None:
    """Seconds since the last acknowledgement, of a connection that waits for one; None if it does not."""
    if (info := _info_of(fd, _TCP_INFO.size)) is None:
        return None
    probes, unacknowledged, last_ms = _TCP_INFO.unpack(info)
    # Probes ask a receiver that has had no room; one that stands still answers each.
    return last_ms / 1e3 if unacknowledged or probes else None


def _info_of(fd: int, size: int) -> bytes | None:
    """The first bytes of what the kernel tells of a connection; None if it tells nothing, or less."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except (OSError, AttributeError):  # it is closed, or something else has its number by now; or this is not Linux
        return None
    finally:
        connection.detach()  # its owner closes it
    return info if len(info) == size else None
