"""A group that is given up is never destroyed in the training thread: gloo's destructor waits for its peers."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_spmd.runtime.devices import process_group
from elaswave_spmd.runtime.devices.process_group import GroupInBackground, GroupLibrary
from elaswave_spmd.worker.stage_collectives import StageCollectives
from tests.unit.worker.test_stage_collectives import CPU, LAYOUT, ME, begin_a_step, gather, placement, replicas

TIMEOUT_S = 60.0


@dataclass
class Library(GroupLibrary):
    """A made-up c10d that notes by which thread each of its groups is destroyed."""

    refuses: bool = False  # the next collective, at once
    fails: bool = False  # collectives under way
    made: int = 0
    destroyed_by: list[threading.Thread] = field(default_factory=list)

    def make(self, store: object, rank: int, size: int) -> Backend:
        self.made += 1
        return Backend(self)

    def gather(self, backend: Backend, share: object, gathered: object) -> Work:
        return backend.begin()

    def exchange(
        self, backend: Backend, sent: object, received: object, sent_sizes: list[int], received_sizes: list[int]
    ) -> Work:
        return backend.begin()

    def token(self, size: int) -> torch.Tensor:
        return torch.zeros(size)

    def open_store(self, prefix: str) -> PrefixStore:
        store = PrefixStore(prefix, HashStore())
        store.add("here", 2)  # the two other members of the stage
        return store


class Backend:
    def __init__(self, library: Library) -> None:
        self._library = library

    def __del__(self) -> None:
        self._library.destroyed_by.append(threading.current_thread())

    def begin(self) -> Work:
        if self._library.refuses:
            raise RuntimeError("a peer is gone")
        return Work(self, self._library)


@dataclass
class Work:
    """A collective; like gloo's, it keeps its group alive."""

    backend: Backend
    library: Library

    def is_completed(self) -> bool:
        if self.library.fails:
            raise RuntimeError("connection closed by peer")
        return True

    def wait(self) -> None:
        self.is_completed()


class ThreadThatIsFirst(threading.Thread):
    """The worst order of two threads: the one that was started has ended before its starter goes on."""

    def start(self) -> None:
        super().start()
        self.join(TIMEOUT_S)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setattr(process_group.threading, "Thread", ThreadThatIsFirst)
    return Library()


def make(library: Library) -> StageCollectives:
    """The collectives of a worker whose training thread is the thread of the test, with two under way."""
    group = GroupInBackground(library, TIMEOUT_S)
    collectives = StageCollectives(ME, LAYOUT, CPU, torch.float32, lambda *_: None, group)
    collectives.enter_epoch(placement(), replicas())
    assert collectives.ready and library.made == 1
    gather(collectives)
    gather(collectives, 2)
    assert not collectives.idle
    return collectives


def destroyed_elsewhere(library: Library, number: int) -> None:
    gc.collect()
    assert len(library.destroyed_by) == number, "the group is still referred to"
    assert threading.current_thread() not in library.destroyed_by


def test_after_an_all_gather_that_failed(library: Library) -> None:
    collectives = make(library)
    library.fails = True
    assert list(collectives.arrived()) == [] and not collectives.serves
    destroyed_elsewhere(library, 1)


def test_after_an_all_gather_that_was_refused(library: Library) -> None:
    collectives = make(library)
    library.refuses = True
    gather(collectives, version=3)
    assert not collectives.serves
    destroyed_elsewhere(library, 1)


def test_after_an_exchange_that_was_refused(library: Library) -> None:
    collectives = make(library)
    library.refuses = True
    begin_a_step(collectives)
    assert not collectives.serves
    destroyed_elsewhere(library, 1)


def test_after_an_exchange_that_failed(library: Library) -> None:
    collectives = make(library)
    assert len(list(collectives.arrived())) == 4
    begin_a_step(collectives)
    library.fails = True
    assert list(collectives.arrived()) == [] and not collectives.serves
    destroyed_elsewhere(library, 1)


def test_after_another_member_has_given_it_up(library: Library) -> None:
    collectives = make(library)
    collectives.give_up()
    destroyed_elsewhere(library, 1)


def test_in_another_epoch(library: Library) -> None:
    collectives = make(library)
    assert len(list(collectives.arrived())) == 4
    collectives.enter_epoch(placement(1), replicas())
    destroyed_elsewhere(library, 1)
    assert collectives.ready


def test_after_a_group_that_could_not_be_made(library: Library) -> None:
    collectives = make(library)
    library.refuses = True  # the first all-gather of the next group, by which the library connects
    collectives.enter_epoch(placement(1), replicas())
    destroyed_elsewhere(library, 2)
    collectives.check()
    assert not collectives.serves
