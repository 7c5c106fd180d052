"""Groups that are made in the background, with gloo: the members of a stage in one process, on real sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.devices.process_group import Collective, DeviceGroups, GroupInBackground, _Group
from tests.waiting import eventually

LASTS_S = 60.0  # the same where nothing is to hang: longer than a busy machine stands still
KIND = device_of("cpu")
PATIENCE_S = 10.0
"""Of a group, and of a collective, that is to fail. Groups are also made within it: it is longer than a busy machine
stands still, mostly."""


@dataclass
class Stage:
    """Workers with one store. `dies`: whose thread ends where others connect; `ended`: why groups were aborted."""

    store: Any = field(default_factory=HashStore)
    dies: set[int] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    fails_to_end: bool = False
    patience_s: float = PATIENCE_S

    def worker(self, rank: int) -> GroupInBackground:
        return GroupInBackground(Gloo(self, rank), self.patience_s)

    def workers(self, number: int) -> list[GroupInBackground]:
        return [self.worker(rank) for rank in range(number)]


class Gloo(DeviceGroups):
    """The groups of one worker of a stage."""

    def __init__(self, stage: Stage, rank: int) -> None:
        super().__init__(HostDevice(KIND), "", "127.0.0.1", stage.patience_s)
        self._stage = stage
        self._rank = rank

    def open_store(self, prefix: str) -> Any:
        return PrefixStore(prefix, self._stage.store)

    def make(self, store: Any, rank: int, size: int) -> Any:
        if self._rank in self._stage.dies:
            raise SystemExit
        return super().make(store, rank, size)

    def abort(self, backend: Any, reason: str) -> None:
        self._stage.ended.append(reason)
        if self._stage.fails_to_end:
            raise RuntimeError("abort timed out")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    eventually(lambda: not any(t.name.startswith("group of") for t in threading.enumerate()))


def change(workers: dict[int, GroupInBackground], epoch: int) -> None:
    for rank, worker in workers.items():
        worker.enter_epoch(epoch, sorted(workers), rank)


def all_ready(workers: dict[int, GroupInBackground], epoch: int) -> bool:
    return all(worker.ready == epoch for worker in workers.values())


def gathers(workers: dict[int, GroupInBackground], size: int = 1000) -> None:
    """After an all-gather every member has the shares of all, in the order of members. In bf16, as parameters are."""
    shares = {rank: torch.full((size,), float(rank), dtype=torch.bfloat16) for rank in sorted(workers)}
    gathered = {rank: torch.zeros(size * len(workers), dtype=torch.bfloat16) for rank in workers}
    works = [worker.gather(shares[rank], gathered[rank]) for rank, worker in workers.items()]
    eventually(lambda: all(work.is_completed() for work in works))
    for work in works:
        work.wait()
    assert all(torch.equal(found, torch.cat(list(shares.values()))) for found in gathered.values())


def exchanges(workers: dict[int, GroupInBackground]) -> None:
    """After an exchange every member has what each other one sent it: sizes are uneven, and some are 0."""
    size = {(a, b): 0 if a == b else 1000 * a + 10 * b for a in workers for b in workers}
    workers = dict(sorted(workers.items()))
    works = {}
    for rank, worker in workers.items():
        to, come = [size[rank, other] for other in workers], [size[other, rank] for other in workers]
        sent = torch.cat([torch.full((size[rank, other],), 100.0 * rank + other) for other in workers])
        received = torch.zeros(sum(come))
        works[rank] = worker.exchange(sent, received, to, come), received
    eventually(lambda: all(work.is_completed() for work, _ in works.values()))
    for rank, (work, received) in works.items():
        work.wait()
        wanted = [torch.full((size[other, rank],), 100.0 * other + rank) for other in workers]
        assert torch.equal(received, torch.cat(wanted))


def test_members_come_and_go() -> None:
    """Each change gives up the group before at once, and the next one serves."""
    stage = Stage(patience_s=LASTS_S)
    workers = dict(enumerate(stage.workers(4)))
    for epoch, members in enumerate([(0, 1, 2), (0, 2), (0, 2, 3), (3, 2)]):
        some = {rank: workers[rank] for rank in members}
        change(some, epoch)
        assert not any(worker.ready == epoch - 1 for worker in some.values()), "links serve from the change on"
        eventually(lambda some=some, epoch=epoch: all_ready(some, epoch))
        gathers(some)
        exchanges(some)
    eventually(lambda: set(stage.ended) == {"mesh epoch 1", "mesh epoch 2", "mesh epoch 3"})  # by other threads


def test_two_stages_meet_in_one_store() -> None:
    stage = Stage(patience_s=LASTS_S)
    first, second = ({rank: stage.worker(rank) for rank in ranks} for ranks in ((0, 1), (2, 3)))
    change(first, 0)
    change(second, 0)
    eventually(lambda: all_ready(first, 0) and all_ready(second, 0))
    gathers(first)
    gathers(second)


def test_a_single_worker_has_no_group() -> None:
    worker = Stage(patience_s=LASTS_S).worker(5)
    worker.enter_epoch(0, [5], 5)
    eventually(lambda: not any(t.name == "group of epoch 0" for t in threading.enumerate()))
    assert worker.ready is None and worker.failure is None


@pytest.mark.parametrize("pause_s", [0.0, 0.003, 0.01, 0.05])
def test_changes_in_quick_succession_leave_no_thread_in_the_library(pause_s: float) -> None:
    """Some members see that all have met, others that there is a newer epoch: either all make the group, or none."""
    workers = dict(enumerate(Stage(patience_s=LASTS_S).workers(3)))
    for epoch in range(4):
        for rank, worker in workers.items():
            worker.enter_epoch(epoch, sorted(workers), rank)
            time.sleep(pause_s)
    eventually(lambda: all_ready(workers, 3))
    gathers(workers)


def test_a_member_that_never_comes_blocks_no_other() -> None:
    workers = dict(enumerate(Stage(patience_s=LASTS_S).workers(3)))
    for rank in (0, 1):
        workers[rank].enter_epoch(0, [0, 1, 2], rank)
    some = {rank: workers[rank] for rank in (0, 1)}
    change(some, 1)
    eventually(lambda: all_ready(some, 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_that_dies_while_others_connect_is_forgotten_in_the_next_epoch() -> None:
    """And a newcomer, which has no such failure behind it, meets those that have."""
    stage = Stage(dies={1})
    workers = dict(enumerate(stage.workers(4)))
    change({rank: workers[rank] for rank in (0, 1, 2)}, 0)
    eventually(lambda: workers[0].failure is not None and workers[2].failure is not None)
    assert workers[0].ready is None
    some = {rank: workers[rank] for rank in (0, 2, 3)}
    change(some, 1)
    eventually(lambda: all_ready(some, 1))
    gathers(some)


def test_an_all_gather_that_hangs_does_not_delay_the_next_group() -> None:
    stage = Stage(fails_to_end=True, patience_s=LASTS_S)  # whatever becomes of the old one
    workers = dict(enumerate(stage.workers(3)))
    change(workers, 0)
    eventually(lambda: all_ready(workers, 0))
    hangs = [workers[rank].gather(torch.zeros(1000), torch.zeros(3000)) for rank in (0, 2)]  # 1 takes no part
    some = {rank: workers[rank] for rank in (0, 2)}
    change(some, 1)
    eventually(lambda: all_ready(some, 1))
    gathers(some)
    assert not any(work.is_completed() for work in hangs), "nobody has waited for their end"
    workers[1].gather(torch.zeros(1000), torch.zeros(3000))  # so that nothing hangs when the test has ended


def test_an_all_gather_that_takes_too_long_has_failed() -> None:
    workers = dict(enumerate(Stage().workers(2)))
    change(workers, 0)
    eventually(lambda: all_ready(workers, 0))
    work = workers[0].gather(torch.zeros(8), torch.zeros(16))
    eventually(work.is_completed)
    with pytest.raises(RuntimeError, match=r"not complete within 10 s|[Tt]imed out|[Cc]losed"):
        work.wait()


def test_an_exchange_that_not_all_take_part_in_has_failed_and_blocks_nobody() -> None:
    workers = dict(enumerate(Stage().workers(3)))
    change(workers, 0)
    eventually(lambda: all_ready(workers, 0))
    received = {rank: torch.zeros(2) for rank in (0, 2)}
    sizes = {rank: [int(member != rank) for member in range(3)] for rank in (0, 2)}
    works = [
        workers[rank].exchange(torch.zeros(2), received[rank], sizes[rank], sizes[rank], "PartialSum")
        for rank in (0, 2)
    ]
    assert not any(work.is_completed() for work in works), "it is polled, never waited for"
    eventually(lambda: all(work.is_completed() for work in works))
    for work in works:
        with pytest.raises(RuntimeError, match=r"not complete within 10 s|[Tt]imed out|[Cc]losed"):
            work.wait()
    assert not any(work.is_over for work in works)


def test_the_reason_names_what_took_too_long() -> None:
    never = SimpleNamespace(is_completed=lambda: False)
    for what, name in (("ReducedGradient", "a collective \\(ReducedGradient\\)"), ("", "a collective")):
        work = Collective(never, None, 0.0, what)
        assert work.is_completed()
        with pytest.raises(RuntimeError, match=f"^{name} was not complete within 0 s$"):
            work.wait()


def refuses() -> None:
    raise RuntimeError("a peer is gone")


@pytest.mark.parametrize("why", ["", "not complete within 0 s", "a peer is gone"])
def test_memory_is_kept_until_the_library_writes_to_it_no_more(why: str) -> None:
    """c10d calls a collective completed that it knows to have failed: only `wait` raises."""
    is_late = why.startswith("not complete")
    work = SimpleNamespace(is_completed=lambda: not is_late, wait=refuses if why else lambda: None)
    collective = Collective(work, values := torch.zeros(8), 0.0 if is_late else 60.0)
    assert collective.is_completed() and not collective.is_over
    if why:
        with pytest.raises(RuntimeError, match=why):
            collective.wait()
        assert collective.values is values and not collective.is_over, "it may still be written to"
    else:
        collective.wait()
        assert collective.values is None and collective.is_over and collective.is_completed()
        collective.wait()


def test_a_group_keeps_the_memory_of_what_has_failed_until_it_is_ended() -> None:
    group = Stage(patience_s=LASTS_S).worker(0)
    group._made = _Group(0, (0, 1), None)
    done, failed = (SimpleNamespace(is_completed=lambda: True, wait=wait) for wait in (lambda: None, refuses))
    works = [group._begun(group._made, work, torch.zeros(1)) for work in (done, failed)]
    works[0].wait()
    assert group._serving().in_progress == deque(works[1:])
    with pytest.raises(RuntimeError, match="a peer is gone"):
        works[1].wait()
    assert group._serving().in_progress == deque(works[1:])


def test_a_group_that_has_failed_is_not_used_again() -> None:
    stage = Stage(patience_s=LASTS_S)
    workers = dict(enumerate(stage.workers(2)))
    change(workers, 0)
    eventually(lambda: all_ready(workers, 0))
    workers[0].give_up()
    assert workers[0].ready is None and workers[1].ready == 0
    eventually(lambda: stage.ended == ["it has failed"])
    change(workers, 1)
    eventually(lambda: all_ready(workers, 1))
    gathers(workers)
