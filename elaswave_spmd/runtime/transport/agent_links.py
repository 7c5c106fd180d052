"""Links between the controller and agents on other machines: TCP that notices a machine that vanished."""

from __future__ import annotations

import zmq

from elaswave_spmd.runtime.transport.credentials import Credentials
from elaswave_spmd.runtime.transport.frames import MessageLimits
from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox

# A machine that loses power or network closes no connection. The kernel probes after 10 s of silence, then every 5 s,
# and closes the connection after 4 probes without an answer. A kernel also answers for a stopped process, so Ctrl-Z on
# the controller ends nothing.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}
# Settings, the names of data, a traceback: far below this. These messages have no payloads.
_LIMITS = MessageLimits(header_bytes=16 << 20, payload_bytes=0)


class AgentLinks(Links):
    """TCP links that also report `PeerClosed`, within half a minute, for a peer whose machine lost power or network."""

    _GIVE_UP_S = 30.0  # as keepalive does, which is not asked while an order is on its way

    def __init__(self, me: int, mailbox: Mailbox, *, credentials: Credentials, host: str) -> None:
        super().__init__(me, mailbox, transport="tcp", credentials=credentials, host=host, limits=_LIMITS)

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = super()._new_socket(kind)
        for option, value in _KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket
