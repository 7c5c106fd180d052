"""The switch between hosts in namespaces: what becomes of frames on the ways that it is told to disturb."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import CUT, Way, why_not
from benchmarks.switch import Switch
from tests.waiting import PATIENCE_S

NUM_HOSTS = 3
BROADCAST = b"\xff" * 6


def to(number: int) -> bytes:
    """The destination of a frame to a host."""
    return bytes((2, 0, 0, 0, 0, number + 1))


class Cables:
    """Three hosts' ends of a switch that runs."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(NUM_HOSTS)]
        self.ends = [ours for ours, _ in pairs]
        self._taps = [theirs for _, theirs in pairs]
        for tap in self._taps:
            tap.setblocking(False)
        for end in self.ends:
            end.settimeout(PATIENCE_S)
        self.switch = Switch([tap.fileno() for tap in self._taps])
        orders, self._last_order = os.pipe()
        self._orders = orders
        self._thread = threading.Thread(target=self.switch.run, args=(orders,))
        self._thread.start()

    def close(self) -> None:
        os.close(self._last_order)
        self._thread.join()
        os.close(self._orders)
        for end in (*self.ends, *self._taps):
            end.close()

    def send(self, sender: int, destination: bytes, *texts: bytes) -> None:
        for text in texts:
            self.ends[sender].send(destination + text)

    def received(self, number: int, count: int) -> list[bytes]:
        return [self.ends[number].recv(100)[6:] for _ in range(count)]

    def num_waiting(self, number: int) -> int:
        """How many frames have come to a host by now; they are taken."""
        end, count = self.ends[number], 0
        while select.select([end], [], [], 0)[0]:
            end.recv(100)
            count += 1
        return count


@pytest.fixture
def cables() -> Iterator[Cables]:
    made = Cables()
    yield made
    made.close()


def test_a_frame_goes_to_whom_it_is_for_and_a_broadcast_to_all_others(cables: Cables) -> None:
    cables.send(0, to(1), b"a")
    cables.send(0, BROADCAST, b"b")
    assert cables.received(1, 2) == [b"a", b"b"] and cables.received(2, 1) == [b"b"]


def test_a_cut_may_be_of_one_direction(cables: Cables) -> None:
    cables.switch.set_ways({(0, 1): CUT})
    cables.send(0, to(1), b"lost")
    cables.send(1, to(0), b"comes")
    assert cables.received(0, 1) == [b"comes"]
    cables.send(0, to(2), b"also")
    assert cables.received(2, 1) == [b"also"], "what was sent before has been looked at"
    cables.switch.set_ways({})
    cables.send(0, to(1), b"comes again")
    assert cables.received(1, 1) == [b"comes again"]


def test_frames_that_wait_at_random_overtake_each_other(cables: Cables) -> None:
    cables.switch.set_ways({(0, 1): Way(delay_s=0.01, jitter_s=0.05)})
    # There is room for ten frames: all of them may have come before this thread looks for the first one.
    sent = [bytes((number,)) for number in range(10)]
    cables.send(0, to(1), *sent)
    came = cables.received(1, len(sent))
    assert sorted(came) == sent and came != sent


def test_a_share_is_lost(cables: Cables) -> None:
    cables.switch.set_ways({(0, 1): Way(lost=0.5)})
    came = 0
    for _ in range(10):  # few at a time: there is room for ten frames
        cables.send(0, to(1), *[b"maybe"] * 5)
        cables.send(0, to(2), b"all")
        assert cables.received(2, 1) == [b"all"], "what was sent before has been looked at"
        came += cables.num_waiting(1)
    assert 10 <= came <= 40, "of 50, by the switch's own seed"


def test_the_reason_is_told_where_there_can_be_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not() == "no hosts in namespaces here: ip and unshare and nsenter not installed (iproute2, util-linux)"
    monkeypatch.undo()
    monkeypatch.setattr(namespaces.switch, "__file__", "/nowhere/switch.py")
    assert why_not().startswith("no hosts in namespaces here: ")
