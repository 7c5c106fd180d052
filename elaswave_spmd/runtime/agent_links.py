"""Links between the controller and agents: as all over tcp, and a machine that is gone without a word is noticed."""

from __future__ import annotations

import zmq

from elaswave_spmd.runtime.transport.links import Links
from elaswave_spmd.runtime.transport.mailbox import Mailbox

# The kernel asks after 10 s of silence and every 5 s, and gives up after 4 questions. It also answers for a process
# that is stopped, so Ctrl-Z on the controller ends nothing.
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 4,
}


class AgentLinks(Links):
    """Tcp links whose `PeerClosed` also comes, within half a minute, for a peer whose machine lost power or network."""

    def __init__(self, me: int, mailbox: Mailbox, *, token: bytes, host: str) -> None:
        super().__init__(me, mailbox, transport="tcp", token=token, host=host)

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = super()._new_socket(kind)
        for option, value in _KEEPALIVE.items():
            socket.setsockopt(option, value)
        return socket
