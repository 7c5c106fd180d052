"""A link that is dropped while its peer dies leaves the other links of the process as they were."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from elaswave_spmd.runtime.transport.links import CONTROLLER, Links
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
from tests.waiting import PATIENCE_S

TIMES = 300  # a race: without what this tests, it was lost after some 50


def test_other_links_go_on_when_one_is_dropped_as_its_peer_dies(tmp_path: Path) -> None:
    """libzmq's thread must never have an event to tell that nobody listens to any more: it would wait for ever."""
    heard = Mailbox()
    controller, me = Links(CONTROLLER, heard, directory=str(tmp_path)), Links(0, Mailbox(), directory=str(tmp_path))
    try:
        me.connect(CONTROLLER, controller.address)
        assert not me.wait_connected([CONTROLLER], PATIENCE_S)
        for number in range(1, TIMES + 1):
            peer = Links(number, Mailbox(), directory=str(tmp_path))
            me.connect(number, peer.address)
            assert not me.wait_connected([number], PATIENCE_S)
            me.send(number, b"on its way")
            dies = threading.Thread(target=peer.close)
            dies.start()
            time.sleep(number % 20 * 1e-4)
            me.drop(number)
            dies.join()
            me.send(CONTROLLER, str(number).encode())
            item = heard.get(PATIENCE_S)
            assert isinstance(item, Envelope) and item.header == str(number).encode(), f"silent after {number} drops"
    finally:
        me.close()
        controller.close()
