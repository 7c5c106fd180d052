"""Cross-memory copies: payloads arrive as they were sent, are released afterwards, and never arrive as other bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elaswave_spmd.runtime.transport.credentials import RunKeys
from elaswave_spmd.runtime.transport.cross_memory import (
    CROSS_MEMORY_BYTES,
    BufferWithdrawn,
    OfferedBuffers,
    RemoteBuffer,
    RemoteReader,
)
from elaswave_spmd.runtime.transport.links import Links, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, Mailbox, PeerClosed
from tests.waiting import PATIENCE_S

LARGE = CROSS_MEMORY_BYTES + 12345

CHILD = """
import sys, time
import numpy as np
from elaswave_spmd.runtime.transport.cross_memory import OfferedBuffers
offered = OfferedBuffers()
values = np.arange({size}, dtype=np.uint8)
print(offered.offer(memoryview(values), 1).encode().hex(), flush=True)
sys.stdin.readline()
offered.withdraw(1)
values[:] = 0
print("withdrawn", flush=True)
time.sleep(60)
"""


def patiently(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Pair:
    """Links 0 and 1 of this process to each other. `hold`: what arrives at 1 waits in its event loop until `go`."""

    def __init__(self, stack: ExitStack) -> None:
        self.directory = socket_directory()
        stack.callback(os.rmdir, self.directory)
        self.hold, self.go = threading.Event(), threading.Event()
        self.boxes = [Mailbox(), Mailbox(self._tap)]
        self.links = [Links(rank, box, directory=self.directory) for rank, box in enumerate(self.boxes)]
        for link in self.links:
            stack.callback(link.close)
        stack.callback(self.go.set)
        self.connect()
        assert self.links[1].wait_connected([0], PATIENCE_S) == []

    def connect(self) -> None:
        """Both ways, and until each knows that the other can read its memory."""
        for rank in (0, 1):
            self.links[rank].connect(1 - rank, self.links[1 - rank].address)
        patiently(lambda: all(link._links[1 - rank].peer_can_read for rank, link in enumerate(self.links)))

    def _tap(self, item: Item) -> bool:
        if self.hold.is_set():
            self.go.wait(30)
        return False

    def num_offered(self, rank: int) -> int:
        offered = self.links[rank]._offered
        assert offered is not None
        return offered.num_large

    def got(self, rank: int) -> Envelope:
        item = self.boxes[rank].get(20)
        assert isinstance(item, Envelope), item
        return item


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD.format(size=LARGE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        yield process
        process.kill()


def buffer_of(child: subprocess.Popen[str]) -> RemoteBuffer:
    assert child.stdout is not None
    return RemoteBuffer.decode(bytes.fromhex(child.stdout.readline().strip()))


def test_an_offered_buffer_is_read_until_it_is_withdrawn(child: subprocess.Popen[str]) -> None:
    buffer = buffer_of(child)
    os.kill(child.pid, signal.SIGSTOP)  # it need not run
    found = RemoteReader().read(buffer)
    assert np.array_equal(np.frombuffer(found, np.uint8), np.arange(LARGE, dtype=np.uint8)) and not found.readonly
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("withdraw it\n")
    child.stdin.flush()
    assert child.stdout.readline() == "withdrawn\n"
    with pytest.raises(BufferWithdrawn):
        RemoteReader().read(buffer)


def test_the_memory_of_a_killed_process_is_gone(child: subprocess.Popen[str]) -> None:
    buffer = buffer_of(child)
    child.kill()
    child.wait()
    with pytest.raises(BufferWithdrawn):
        RemoteReader().read(buffer)


def test_a_reused_slot_is_not_mistaken_for_the_first_offer() -> None:
    offered, reader = OfferedBuffers(), RemoteReader()
    first = offered.offer(memoryview(bytes(LARGE)), 1)
    assert first is not None
    offered.withdraw(1)
    second = offered.offer(memoryview(b"\1" * LARGE), 2)
    assert second is not None and second.slot == first.slot
    with pytest.raises(BufferWithdrawn):
        reader.read(RemoteBuffer(first.pid, second.address, LARGE, first.slot, first.number))
    assert bytes(reader.read(second)) == b"\1" * LARGE
    offered.release(first.number)  # withdrawn already: ignored
    assert offered.num_large == 1


def test_the_number_of_offers_is_limited() -> None:
    offered, values = OfferedBuffers(), memoryview(bytes(8))
    buffers = [offered.offer(values, 1) for _ in range(1025)]
    assert buffers[-1] is None and all(buffers[:-1])
    offered.withdraw(1)
    assert offered.offer(values, 1) is not None


def test_large_payloads_arrive_whole_in_order_and_are_released(pair: Pair) -> None:
    draw = random.Random(3)
    sizes = [
        draw.choice([0, 10, 70_000, CROSS_MEMORY_BYTES - 1, CROSS_MEMORY_BYTES, LARGE, 3_000_001]) for _ in range(120)
    ]
    generator = np.random.default_rng(0)
    sent = [[generator.integers(0, 255, size, np.uint8), generator.integers(0, 255, 9, np.uint8)] for size in sizes]
    for number, payloads in enumerate(sent):
        assert pair.links[0].send(1, number.to_bytes(2, "big"), payloads, immutable=bool(number % 5))
    for number, payloads in enumerate(sent):
        got = pair.got(1)
        assert got.header == number.to_bytes(2, "big")
        for expected, payload in zip(payloads, got.payloads, strict=True):
            assert np.array_equal(np.frombuffer(payload, np.uint8), expected)
    patiently(lambda: not pair.num_offered(0))


def test_what_was_received_is_not_the_senders_memory(pair: Pair) -> None:
    values = np.ones(LARGE, np.uint8)
    pair.links[0].send(1, b"x", [values], immutable=True)
    got = pair.got(1)
    patiently(lambda: not pair.num_offered(0))
    values[:] = 2
    assert set(bytes(got.payloads[0])) == {1}


def test_an_offered_payload_stays_alive_until_it_is_read(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"holds up the loop")
    pair.links[0].send(1, b"x", [np.full(LARGE, 7, np.uint8)], immutable=True)  # nobody here keeps it
    assert pair.num_offered(0) == 1
    pair.go.set()
    assert pair.got(1).header == b"holds up the loop"
    assert set(bytes(pair.got(1).payloads[0])) == {7}


def test_a_buffer_withdrawn_before_it_is_read_never_arrives_nor_do_later_messages(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    values = np.ones(LARGE, np.uint8)
    pair.links[0].send(1, b"lost", [values], immutable=True)
    pair.links[0].send(1, b"after it")
    pair.links[0].drop(1)
    assert not pair.num_offered(0)
    values[:] = 0
    pair.hold.clear()
    pair.go.set()
    assert pair.got(1).header == b"first"
    pair.links[0].connect(1, pair.links[1].address)
    patiently(lambda: pair.links[0]._links[1].peer_can_read)
    pair.links[0].send(1, b"again", [values], immutable=True)
    again = pair.got(1)
    assert again.header == b"again" and set(bytes(again.payloads[0])) == {0}


def test_a_closed_peer_releases_every_buffer(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    pair.links[0].send(1, b"x", [bytes(LARGE)], immutable=True)
    assert pair.num_offered(0) == 1
    pair.links[1].drop(0)
    pair.go.set()
    pair.links[1].close()
    assert isinstance(pair.boxes[0].get(20), PeerClosed)
    patiently(lambda: not pair.num_offered(0))
    assert not pair.links[0].send(1, b"x", [bytes(LARGE)], immutable=True) and not pair.num_offered(0)


def test_closing_waits_for_offered_buffers(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    pair.links[0].send(1, b"last words", [b"\5" * LARGE], immutable=True)
    threading.Timer(0.3, pair.go.set).start()
    pair.links[0].close(20_000)
    assert pair.got(1).header == b"first" and set(bytes(pair.got(1).payloads[0])) == {5}


def test_without_a_link_back_or_over_tcp_nothing_is_offered() -> None:
    with ExitStack() as stack:
        directory = socket_directory()
        stack.callback(os.rmdir, directory)
        for transport in ("ipc", "tcp"):
            boxes = Mailbox(), Mailbox()
            keys = RunKeys.make() if transport == "tcp" else None
            one, other = (
                Links(i, box, transport=transport, directory=directory, credentials=keys) for i, box in enumerate(boxes)
            )
            stack.callback(one.close)
            stack.callback(other.close)
            one.connect(1, other.address)
            if transport == "tcp":
                other.connect(0, one.address)
            one.send(1, b"x", [b"\3" * LARGE], immutable=True)
            item = boxes[1].get(20)
            assert isinstance(item, Envelope) and bytes(item.payloads[0]) == b"\3" * LARGE
            assert not one._links[1].peer_can_read
