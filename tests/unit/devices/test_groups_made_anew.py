"""Groups are made anew when members change: on backends that only record their calls."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_spmd.runtime.devices.process_group import GroupInBackground, GroupLibrary
from tests.waiting import eventually


class Library:
    """The calls that the workers of a stage make of their library, in words."""

    def __init__(self) -> None:
        self.store, self.asked = HashStore(), list[str]()
        self.connected, self.waited = list[str](), list[int]()  # first exchanges: begun, and ended
        self.hangs = False  # an exchange is not complete while this is true
        self.fails: str | None = None  # why an exchange fails

    def worker(self, rank: int) -> GroupInBackground:
        return GroupInBackground(OneWorker(self, rank), timeout_s=300.0)


class OneWorker(GroupLibrary):
    """The library as one worker calls it."""

    def __init__(self, library: Library, rank: int) -> None:
        self._library = library
        self._rank = rank

    def open_store(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, self._library.store)

    def make(self, store: Any, rank: int, size: int) -> str:
        self._library.asked.append(f"{self._rank} makes {size}")
        return f"of {size}"

    def gather(self, backend: Any, share: Any, gathered: Any) -> SimpleNamespace:
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def exchange(self, backend: Any, sent: Any, received: Any, sent_sizes: list[int], received_sizes: list[int]) -> Any:
        assert (sent, received) == (sum(sent_sizes), sum(received_sizes))
        self._library.connected.append(f"{self._rank}, {backend}: {sent_sizes}, {received_sizes}")
        if self._library.fails is not None:
            raise RuntimeError(self._library.fails)
        looks = iter((False, False))
        is_completed = lambda: next(looks, not self._library.hangs)  # noqa: E731
        return SimpleNamespace(is_completed=is_completed, wait=lambda: self._library.waited.append(self._rank))

    def token(self, size: int) -> int:
        return size

    def abort(self, backend: Any, reason: str) -> None:
        self._library.asked.append(f"{self._rank} ends {backend}")


def changed(library: Library, before: tuple[int, ...], after: tuple[int, ...], *failed: int) -> list[str]:
    """The calls when the members of a stage change. `failed`: members whose group has failed meanwhile."""
    workers = {rank: library.worker(rank) for rank in {*before, *after}}
    for epoch, members in enumerate((before, after)):
        for rank in members:
            workers[rank].enter_epoch(epoch, members, rank)
        eventually(lambda members=members, epoch=epoch: all(workers[rank].ready == epoch for rank in members))
        for rank in failed if epoch == 0 else ():
            workers[rank].give_up()
    eventually(lambda: not any(thread.name.startswith("group of") for thread in threading.enumerate()))
    ended = len({*before} & {*after} | {*failed})
    eventually(lambda: sum("ends" in call for call in library.asked) == ended)
    return sorted(library.asked)


def test_a_group_is_used_once_each_member_has_sent_to_each_other() -> None:
    """The first time NCCL connects two members in the call itself: in a backward the training thread would wait."""
    library = Library()
    changed(library, (1, 2, 3), (1, 3))
    assert sorted(library.connected) == [
        "1, of 2: [0, 1], [0, 1]",
        "1, of 3: [0, 1, 1], [0, 1, 1]",
        "2, of 3: [1, 0, 1], [1, 0, 1]",
        "3, of 2: [1, 0], [1, 0]",
        "3, of 3: [1, 1, 0], [1, 1, 0]",
    ]
    assert sorted(library.waited) == [1, 1, 2, 3, 3], "polled to its end"


@pytest.mark.parametrize(
    ("before", "after", "failed"),
    [
        pytest.param((1, 2, 3), (1, 3), (), id="a member is lost"),
        pytest.param((1, 2, 3), (1, 3), (3,), id="one has given it up"),
        pytest.param((1, 2, 3), (1, 3, 4), (), id="a member is new"),
        pytest.param((1, 2, 3), (3, 1), (), id="their order is another"),
        pytest.param((1, 2), (1, 2), (), id="nobody is gone"),
    ],
)
def test_the_old_group_is_ended_once_and_another_is_made(
    before: tuple[int, ...], after: tuple[int, ...], failed: tuple[int, ...]
) -> None:
    made = [f"{rank} makes {len(members)}" for members in (before, after) for rank in members]
    ended = [f"{rank} ends of {len(before)}" for rank in {*before} & {*after}]
    assert changed(Library(), before, after, *failed) == sorted(made + ended)


def test_a_group_that_hangs_while_it_connects_is_ended_in_the_next_epoch() -> None:
    """A member that stands still holds up its first exchange; nobody waits for the time limit of that."""
    library = Library()
    library.hangs = True
    workers = {rank: library.worker(rank) for rank in (1, 2)}
    for rank, worker in workers.items():
        worker.enter_epoch(0, [1, 2], rank)
    eventually(lambda: len(library.connected) == 2)
    workers[1].enter_epoch(1, [1], 1)
    eventually(lambda: "1 ends of 2" in library.asked)
    assert workers[1].failure is None and workers[1].ready is None
    library.hangs = False
    eventually(lambda: workers[2].ready == 0)  # the library lets it connect: it is given up in its next epoch
    assert "2 ends of 2" not in library.asked


def is_being_made(epoch: int) -> bool:
    return any(thread.name == f"group of epoch {epoch}" for thread in threading.enumerate())


def test_a_group_that_is_given_up_is_not_waited_for_any_more() -> None:
    """Its thread had asked the controller's store ten times a second whether the others had come."""
    library = Library()
    workers = {rank: library.worker(rank) for rank in (1, 2)}
    workers[1].enter_epoch(0, [1, 2], 1)
    assert is_being_made(0)
    workers[1].give_up()
    eventually(lambda: not is_being_made(0))
    workers[2].enter_epoch(0, [1, 2], 2)  # all have been there, but the first has left
    eventually(lambda: not is_being_made(0))
    assert not library.asked and {worker.ready for worker in workers.values()} == {None}
    for rank, worker in workers.items():
        worker.enter_epoch(1, [1, 2], rank)
    eventually(lambda: all(worker.ready == 1 for worker in workers.values()))


def test_a_group_that_is_given_up_while_it_connects_is_ended_and_never_used() -> None:
    library = Library()
    library.hangs = True
    workers = {rank: library.worker(rank) for rank in (1, 2)}
    for rank, worker in workers.items():
        worker.enter_epoch(0, [1, 2], rank)
    eventually(lambda: len(library.connected) == 2)
    workers[1].give_up()
    eventually(lambda: "1 ends of 2" in library.asked)
    library.hangs = False
    eventually(lambda: workers[2].ready == 0)
    assert workers[1].ready is None and workers[1].failure is None


def test_a_group_that_fails_while_it_connects_is_ended() -> None:
    library = Library()
    library.fails = "a member is gone"
    workers = {rank: library.worker(rank) for rank in (1, 2)}
    for rank, worker in workers.items():
        worker.enter_epoch(0, [1, 2], rank)
    eventually(lambda: {"1 ends of 2", "2 ends of 2"} <= {*library.asked})
    eventually(lambda: workers[1].failure == workers[2].failure == "RuntimeError: a member is gone")
    assert workers[1].ready is None


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_group_for_which_there_is_no_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    worker = library.worker(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        worker.enter_epoch(0, [1, 2], 1)
    assert worker.failure == "RuntimeError: can't start new thread" and worker.ready is None
    worker.give_up()
    worker.enter_epoch(1, [1], 1)
    assert worker.failure is None


def test_one_member_alone_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    worker = Library().worker(1)
    worker.enter_epoch(0, [1], 1)
    assert worker.failure is None and worker.ready is None


@pytest.mark.parametrize("how", ["another epoch", "given up", "closed"])
def test_a_group_for_whose_end_there_is_no_thread_is_ended_later(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor must not run in the training thread, which drops it."""
    library = Library()
    workers = {rank: library.worker(rank) for rank in (1, 2)}
    for rank, worker in workers.items():
        worker.enter_epoch(0, [1, 2], rank)
    eventually(lambda: all(worker.ready == 0 for worker in workers.values()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        if how == "another epoch":
            workers[1].enter_epoch(1, [1, 3], 1)
        elif how == "given up":
            workers[1].give_up()
        else:
            assert not workers[1].close()
    assert "1 ends of 2" not in library.asked
    if how == "closed":
        assert workers[1].close()
    else:
        workers[1].enter_epoch(2, [1], 1)
    eventually(lambda: library.asked.count("1 ends of 2") == 1)
    assert workers[1].close()
