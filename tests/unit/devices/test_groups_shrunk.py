"""Groups that lose members without being made anew, as NCCL's can: on backends that only record their calls."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_spmd.runtime.devices.process_group import GroupInBackground, GroupLibrary
from tests.waiting import eventually


class Library:
    """The calls that the workers of a stage make of their library, in words.

    Args:
        refuses: what it raises when a group is to be shrunk.
    """

    def __init__(self, refuses: BaseException | None = None) -> None:
        self.store, self.refuses, self.asked = HashStore(), refuses, list[str]()
        self.connected, self.waited = list[str](), list[int]()  # first exchanges: begun, and ended

    def worker(self, rank: int) -> GroupInBackground:
        return GroupInBackground(OneWorker(self, rank), timeout_s=5.0)


class OneWorker(GroupLibrary):
    """The library as one worker calls it."""

    shrinks = True

    def __init__(self, library: Library, rank: int) -> None:
        self._library = library
        self._rank = rank

    def open_store(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, self._library.store)

    def make(self, store: Any, rank: int, size: int) -> str:
        self._library.asked.append(f"{self._rank} makes {size}")
        return "made"

    def broadcast(self, backend: Any, values: Any, root: int) -> SimpleNamespace:
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def exchange(self, backend: Any, sent: Any, received: Any, sent_sizes: list[int], received_sizes: list[int]) -> Any:
        assert (sent, received) == (sum(sent_sizes), sum(received_sizes))
        self._library.connected.append(f"{self._rank}, {backend}: {sent_sizes}, {received_sizes}")
        looks = iter((False, False, True))
        return SimpleNamespace(is_completed=lambda: next(looks), wait=lambda: self._library.waited.append(self._rank))

    def token(self, size: int) -> int:
        return size

    def shrink(self, backend: str, lost: list[int]) -> str:
        self._library.asked.append(f"{self._rank} shrinks {backend} by {lost}")
        if self._library.refuses is not None:
            raise self._library.refuses
        return "shrunk"


def changed(library: Library, before: tuple[int, ...], after: tuple[int, ...], *failed: int) -> list[str]:
    """The calls when the members of a stage change. `failed`: members whose group has failed meanwhile."""
    workers = {rank: library.worker(rank) for rank in {*before, *after}}
    for epoch, members in enumerate((before, after)):
        library.asked.clear()
        for rank in members:
            workers[rank].change(epoch, members, rank)
        eventually(lambda members=members, epoch=epoch: all(workers[rank].ready == epoch for rank in members))
        for rank in failed if epoch == 0 else ():
            workers[rank].give_up()
    eventually(lambda: not any(thread.name.startswith("group of") for thread in threading.enumerate()))
    return sorted(library.asked)


def test_a_lost_member_is_taken_out_of_the_group_that_all_others_have() -> None:
    assert changed(Library(), (1, 2, 3), (1, 3)) == ["1 shrinks made by [1]", "3 shrinks made by [1]"]


def test_a_group_is_used_once_each_member_has_sent_to_each_other() -> None:
    """The first time NCCL connects two members in the call itself: in a backward the training thread would wait."""
    library = Library()
    changed(library, (1, 2, 3), (1, 3))
    assert sorted(library.connected) == [
        "1, made: [0, 1, 1], [0, 1, 1]",
        "1, shrunk: [0, 1], [0, 1]",
        "2, made: [1, 0, 1], [1, 0, 1]",
        "3, made: [1, 1, 0], [1, 1, 0]",
        "3, shrunk: [1, 0], [1, 0]",
    ]
    assert sorted(library.waited) == [1, 1, 2, 3, 3], "polled to its end"


@pytest.mark.parametrize(
    ("before", "after", "failed"),
    [
        pytest.param((1, 2, 3), (1, 3), (3,), id="one has given it up"),
        pytest.param((1, 2, 3), (1, 3, 4), (), id="a member is new"),
        pytest.param((1, 2, 3), (3, 1), (), id="their order is another"),
        pytest.param((1, 2), (1, 2), (), id="nobody is gone"),
    ],
)
def test_else_a_group_is_made_anew(before: tuple[int, ...], after: tuple[int, ...], failed: tuple[int, ...]) -> None:
    assert changed(Library(), before, after, *failed) == sorted(f"{rank} makes {len(after)}" for rank in after)


@pytest.mark.parametrize("error", [AttributeError("shrink"), TypeError("no shrinking"), RuntimeError("NCCL 2.27")])
def test_a_library_that_cannot_shrink_makes_a_new_one(error: BaseException) -> None:
    asked = changed(Library(error), (1, 2, 3), (1, 3))
    assert asked == ["1 makes 2", "1 shrinks made by [1]", "3 makes 2", "3 shrinks made by [1]"]
