"""Payloads that are lent: they arrive as they were, go back to their owner, and never arrive as something else."""

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

from elaswave_spmd.runtime.transport.cross_memory import LEND_BYTES, Lender, LentGone, Loan, Reader
from elaswave_spmd.runtime.transport.links import Links, socket_directory
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, Mailbox, PeerClosed
from tests.waiting import PATIENCE_S

LARGE = LEND_BYTES + 12345

CHILD = """
import sys, time
import numpy as np
from elaswave_spmd.runtime.transport.cross_memory import Lender
lender = Lender()
values = np.arange({size}, dtype=np.uint8)
print(lender.lend(memoryview(values), 1).encode().hex(), flush=True)
sys.stdin.readline()
lender.take_back(1)
values[:] = 0
print("taken back", flush=True)
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
        patiently(lambda: all(link._links[1 - rank].lends for rank, link in enumerate(self.links)))

    def _tap(self, item: Item) -> bool:
        if self.hold.is_set():
            self.go.wait(30)
        return False

    def num_lent(self, rank: int) -> int:
        lender = self.links[rank]._lender
        assert lender is not None
        return lender.num_large

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


def loan_of(child: subprocess.Popen[str]) -> Loan:
    assert child.stdout is not None
    return Loan.decode(bytes.fromhex(child.stdout.readline().strip()))


def test_what_another_process_lends_is_read_while_it_is_lent(child: subprocess.Popen[str]) -> None:
    loan = loan_of(child)
    os.kill(child.pid, signal.SIGSTOP)  # it need not run
    found = Reader().read(loan)
    assert np.array_equal(np.frombuffer(found, np.uint8), np.arange(LARGE, dtype=np.uint8)) and not found.readonly
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("take it back\n")
    child.stdin.flush()
    assert child.stdout.readline() == "taken back\n"
    with pytest.raises(LentGone):
        Reader().read(loan)


def test_the_memory_of_a_killed_process_is_gone(child: subprocess.Popen[str]) -> None:
    loan = loan_of(child)
    child.kill()
    child.wait()
    with pytest.raises(LentGone):
        Reader().read(loan)


def test_a_slot_that_somebody_else_has_by_now_is_not_mistaken() -> None:
    lender, reader = Lender(), Reader()
    first = lender.lend(memoryview(bytes(LARGE)), 1)
    assert first is not None
    lender.take_back(1)
    second = lender.lend(memoryview(b"\1" * LARGE), 2)
    assert second is not None and second.slot == first.slot
    with pytest.raises(LentGone):
        reader.read(Loan(first.pid, second.address, LARGE, first.slot, first.number))
    assert bytes(reader.read(second)) == b"\1" * LARGE
    lender.returned(first.number)  # of no one any more
    assert lender.num_large == 1


def test_there_is_an_end_to_lending() -> None:
    lender, values = Lender(), memoryview(bytes(8))
    loans = [lender.lend(values, 1) for _ in range(1025)]
    assert loans[-1] is None and all(loans[:-1])
    lender.take_back(1)
    assert lender.lend(values, 1) is not None


def test_large_payloads_arrive_whole_in_order_and_go_back(pair: Pair) -> None:
    draw = random.Random(3)
    sizes = [draw.choice([0, 10, 70_000, LEND_BYTES - 1, LEND_BYTES, LARGE, 3_000_001]) for _ in range(120)]
    generator = np.random.default_rng(0)
    sent = [[generator.integers(0, 255, size, np.uint8), generator.integers(0, 255, 9, np.uint8)] for size in sizes]
    for number, payloads in enumerate(sent):
        assert pair.links[0].send(1, number.to_bytes(2, "big"), payloads, lend=bool(number % 5))
    for number, payloads in enumerate(sent):
        got = pair.got(1)
        assert got.header == number.to_bytes(2, "big")
        for expected, payload in zip(payloads, got.payloads, strict=True):
            assert np.array_equal(np.frombuffer(payload, np.uint8), expected)
    patiently(lambda: not pair.num_lent(0))


def test_what_was_received_is_not_the_senders_memory(pair: Pair) -> None:
    values = np.ones(LARGE, np.uint8)
    pair.links[0].send(1, b"x", [values], lend=True)
    got = pair.got(1)
    patiently(lambda: not pair.num_lent(0))
    values[:] = 2
    assert set(bytes(got.payloads[0])) == {1}


def test_a_lent_payload_stays_alive_until_it_is_read(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"holds up the loop")
    pair.links[0].send(1, b"x", [np.full(LARGE, 7, np.uint8)], lend=True)  # nobody here keeps it
    assert pair.num_lent(0) == 1
    pair.go.set()
    assert pair.got(1).header == b"holds up the loop"
    assert set(bytes(pair.got(1).payloads[0])) == {7}


def test_what_is_taken_back_before_it_is_read_never_arrives_nor_does_what_follows(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    values = np.ones(LARGE, np.uint8)
    pair.links[0].send(1, b"lost", [values], lend=True)
    pair.links[0].send(1, b"after it")
    pair.links[0].drop(1)
    assert not pair.num_lent(0)
    values[:] = 0
    pair.hold.clear()
    pair.go.set()
    assert pair.got(1).header == b"first"
    pair.links[0].connect(1, pair.links[1].address)
    patiently(lambda: pair.links[0]._links[1].lends)
    pair.links[0].send(1, b"again", [values], lend=True)
    again = pair.got(1)
    assert again.header == b"again" and set(bytes(again.payloads[0])) == {0}


def test_a_closed_peer_gives_everything_back(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    pair.links[0].send(1, b"x", [bytes(LARGE)], lend=True)
    assert pair.num_lent(0) == 1
    pair.links[1].drop(0)
    pair.go.set()
    pair.links[1].close()
    assert isinstance(pair.boxes[0].get(20), PeerClosed)
    patiently(lambda: not pair.num_lent(0))
    assert not pair.links[0].send(1, b"x", [bytes(LARGE)], lend=True) and not pair.num_lent(0)


def test_closing_waits_for_what_is_lent(pair: Pair) -> None:
    pair.hold.set()
    pair.links[0].send(1, b"first")
    pair.links[0].send(1, b"last words", [b"\5" * LARGE], lend=True)
    threading.Timer(0.3, pair.go.set).start()
    pair.links[0].close(20_000)
    assert pair.got(1).header == b"first" and set(bytes(pair.got(1).payloads[0])) == {5}


def test_without_a_way_back_or_over_tcp_nothing_is_lent() -> None:
    with ExitStack() as stack:
        directory = socket_directory()
        stack.callback(os.rmdir, directory)
        for transport in ("ipc", "tcp"):
            boxes = Mailbox(), Mailbox()
            one, other = (Links(i, box, transport=transport, directory=directory) for i, box in enumerate(boxes))
            stack.callback(one.close)
            stack.callback(other.close)
            one.connect(1, other.address)
            if transport == "tcp":
                other.connect(0, one.address)
            one.send(1, b"x", [b"\3" * LARGE], lend=True)
            item = boxes[1].get(20)
            assert isinstance(item, Envelope) and bytes(item.payloads[0]) == b"\3" * LARGE
            assert not one._links[1].lends
