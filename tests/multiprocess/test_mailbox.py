"""The mailbox: nothing lost, nothing reordered per sender, nobody stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from elaswave_spmd.errors import RunError
from elaswave_spmd.runtime.transport.mailbox import Envelope, Interrupted, Item, LinksFailed, Mailbox, PeerClosed
from tests.waiting import PATIENCE_S


def test_take_all_returns_everything_in_order_and_empties():
    mailbox = Mailbox()
    items: list[Item] = [Envelope(1, b"a"), PeerClosed(2), Envelope(1, b"b")]
    for item in items:
        mailbox.put(item)
    assert len(mailbox) == 3
    assert mailbox.take_all() == items
    assert mailbox.take_all() == []


@pytest.mark.parametrize("takes", [Mailbox.get, Mailbox.take_all])
def test_nobody_goes_on_when_nothing_can_be_received_any_more(takes: Callable[[Mailbox], object]) -> None:
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, [LinksFailed(MemoryError())]).start()
    assert mailbox.wait()
    with pytest.raises(RunError, match="cannot receive messages any more: MemoryError"):
        takes(mailbox)
    assert mailbox.take_all() == []


def test_what_was_filed_before_the_failure_is_got_before_it() -> None:
    mailbox = Mailbox()
    mailbox.put(PeerClosed(1))
    mailbox.put(LinksFailed(MemoryError()))
    assert mailbox.get() == PeerClosed(1)
    with pytest.raises(RunError):
        mailbox.get()


def test_wait_times_out_even_after_an_item_was_taken_without_waiting():
    mailbox = Mailbox()
    mailbox.put(PeerClosed(0))
    mailbox.take_all()  # the bell has rung for an item that is gone
    start = time.monotonic()
    assert not mailbox.wait(0.05)
    assert mailbox.get(0) is None
    assert 0.04 < time.monotonic() - start < 60


def test_interrupt_wakes_a_waiting_thread_that_waits_for_ever():
    mailbox = Mailbox()
    timer = threading.Timer(0.05, mailbox.interrupt, ["stop"])
    timer.start()
    assert mailbox.get() == Interrupted("stop")
    timer.join()


def test_tap_keeps_what_it_handles_out_of_the_queue():
    handled: list[Item] = []

    def tap(item: Item) -> bool:
        if isinstance(item, PeerClosed):
            handled.append(item)
        return isinstance(item, PeerClosed)

    mailbox = Mailbox(tap)
    mailbox.put(PeerClosed(3))
    mailbox.put(Envelope(1, b"x"))
    assert handled == [PeerClosed(3)]
    assert mailbox.take_all() == [Envelope(1, b"x")]


@pytest.mark.parametrize("whole", [True, False], ids=["take_all", "get"])
def test_many_putting_threads_lose_nothing_and_keep_their_order(whole: bool):
    mailbox, senders, each = Mailbox(), 4, 3000

    def put(sender: int) -> None:
        for number in range(each):
            mailbox.put(Envelope(sender, number.to_bytes(4, "big")))

    threads = [threading.Thread(target=put, args=[sender]) for sender in range(senders)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {sender: [] for sender in range(senders)}
    count = 0
    while count < senders * each:
        assert mailbox.wait(PATIENCE_S)
        items = mailbox.take_all() if whole else [mailbox.get(0)]
        for item in items:
            assert isinstance(item, Envelope)
            seen[item.sender].append(int.from_bytes(item.header, "big"))
        count += len(items)
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(each)) for numbers in seen.values())
