"""The mailbox: nothing lost, nothing reordered per sender, nobody stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import pytest

from elaswave_spmd.errors import RunError
from elaswave_spmd.runtime.transport import mailbox as module
from elaswave_spmd.runtime.transport.mailbox import Envelope, Interrupted, Item, LinksFailed, Mailbox, PeerClosed
from tests.waiting import PATIENCE_S, others_run_while_this_thread_waits


def test_take_all_returns_everything_in_order_and_empties():
    mailbox = Mailbox()
    items: list[Item] = [Envelope(1, b"a"), PeerClosed(2), Envelope(1, b"b")]
    for item in items:
        mailbox.put(item)
    assert len(mailbox) == 3
    assert mailbox.take_all() == items
    assert mailbox.take_all() == []


Found = TypeVar("Found")


def waits_until(happens: Callable[[], None], wait: Callable[[], Found]) -> Found:
    """What a wait returns that has begun when another thread does what it waits for."""
    begins = threading.Event()

    def happens_then() -> None:
        begins.wait(PATIENCE_S)
        happens()

    thread = threading.Thread(target=happens_then)
    with others_run_while_this_thread_waits():
        thread.start()
        begins.set()
        found = wait()
    thread.join()
    return found


@pytest.mark.parametrize("takes", [Mailbox.get, Mailbox.take_all])
def test_nobody_goes_on_when_nothing_can_be_received_any_more(takes: Callable[[Mailbox], object]) -> None:
    mailbox = Mailbox()
    assert waits_until(lambda: mailbox.put(LinksFailed(MemoryError())), mailbox.wait)
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


class Bell:
    """The lock of a mailbox that nobody rings while it is waited for, by a clock of its own.

    Attributes:
        now: of the clock: a wait takes all of its time, and a quarter of a second if the bell has rung before.
        waits: how long each was to take.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self._has_rung = False

    def release(self) -> None:
        self._has_rung = True

    def acquire(self, timeout: float) -> bool:
        has_rung, self._has_rung = self._has_rung, False
        self.waits.append(timeout)
        self.now += 0.25 if has_rung else timeout
        return has_rung


def test_a_wait_takes_its_time_also_after_an_item_was_taken_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, bell = Mailbox(), Bell()
    monkeypatch.setattr(mailbox, "_bell", bell)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: bell.now))
    mailbox.put(PeerClosed(0))
    mailbox.take_all()  # the bell has rung for an item that is gone
    assert not mailbox.wait(1.0)
    assert (bell.waits, bell.now) == ([1.0, 0.75], 1.0), "it goes on to wait for what is left of its time"
    assert mailbox.get(0) is None and bell.now == 1.0


def test_a_wait_ends_when_nothing_comes() -> None:
    mailbox = Mailbox()
    mailbox.put(PeerClosed(0))
    mailbox.take_all()
    assert not mailbox.wait(0.05) and mailbox.get(0.05) is None and mailbox.get(0) is None


def test_interrupt_wakes_a_waiting_thread_that_waits_for_ever():
    mailbox = Mailbox()
    assert waits_until(lambda: mailbox.interrupt("stop"), mailbox.get) == Interrupted("stop")


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
