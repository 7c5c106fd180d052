"""Pairs that are made in the background, with gloo: two workers in one process, on real sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.devices.pair_groups import PairsInBackground, pairs_of
from elaswave_spmd.runtime.devices.process_group import DeviceGroups
from tests.unit.devices.test_groups_gloo import KIND, LASTS_S, Gloo, Stage
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    eventually(lambda: not any(t.name.startswith("group of") for t in threading.enumerate()))


def workers(stage: Stage, number: int) -> list[PairsInBackground]:
    return [PairsInBackground(Gloo(stage, rank), stage.patience_s) for rank in range(number)]


def enter(made: list[PairsInBackground], epoch: int, *ways: tuple[int, int]) -> None:
    """All enter an epoch in which these (sender, receiver) have something to send."""
    for rank, worker in enumerate(made):
        receivers = [receiver for sender, receiver in ways if sender == rank]
        senders = [sender for sender, receiver in ways if receiver == rank]
        worker.enter_epoch(epoch, receivers, senders, rank)


def are_ready(made: list[PairsInBackground], *ways: tuple[int, int]) -> bool:
    return all(made[a].sends_to(b) and made[b].receives_from(a) for a, b in ways)


def close(made: list[PairsInBackground], epoch: int) -> None:
    enter(made, epoch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_both_send_first_and_neither_waits(dtype: torch.dtype) -> None:
    """Each direction has a group of its own: two that send at the same time do not wait for each other."""
    made, ways = workers(Stage(patience_s=LASTS_S), 2), ((0, 1), (1, 0))
    enter(made, 0, *ways)
    eventually(lambda: are_ready(made, *ways))
    for size in (1, 1000, 300_001):
        values = [torch.full((size,), 3.0 + rank).to(dtype).view(torch.uint8) for rank in range(2)]
        found = [torch.zeros_like(one) for one in values]
        sends = [made[rank].send(1 - rank, values[rank], "Activation") for rank in range(2)]
        receives = [made[rank].receive(1 - rank, found[rank], "Activation") for rank in range(2)]
        eventually(lambda works=(*sends, *receives): all(work.is_completed() for work in works))
        for work in (*sends, *receives):
            work.wait()
        assert all(found[rank].equal(values[1 - rank]) for rank in range(2))
    close(made, 1)


def test_only_the_directions_that_are_needed_are_made() -> None:
    stage = Stage(patience_s=LASTS_S)
    made = workers(stage, 3)
    enter(made, 0, (0, 1), (0, 2))
    eventually(lambda: are_ready(made, (0, 1), (0, 2)))
    assert not made[1].sends_to(0) and not made[1].sends_to(2) and not made[0].receives_from(1)
    enter(made, 1, (2, 1))
    assert not made[0].sends_to(1), "the pairs of an epoch end with it, at once"
    eventually(lambda: are_ready(made, (2, 1)))
    close(made, 2)
    eventually(lambda: len(stage.ended) == 6)


def test_pairs_connect_for_exchanges_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never gather."""

    def gather(*args: Any) -> None:
        raise AssertionError("a pair gathers nothing")

    monkeypatch.setattr(DeviceGroups, "gather", gather)
    made = [pairs_of(HostDevice(KIND), "", "127.0.0.1", LASTS_S) for _ in range(2)]
    stage = Stage(patience_s=LASTS_S)
    monkeypatch.setattr(DeviceGroups, "open_store", lambda self, prefix: PrefixStore(prefix, stage.store))
    enter(made, 0, (0, 1))
    eventually(lambda: are_ready(made, (0, 1)))
    close(made, 1)


def test_a_pair_that_is_given_up_takes_no_other_with_it() -> None:
    stage = Stage(patience_s=LASTS_S)
    made, ways = workers(stage, 3), ((0, 1), (1, 0), (0, 2))
    enter(made, 0, *ways)
    eventually(lambda: are_ready(made, *ways))
    hangs = made[0].send(1, torch.zeros(8, dtype=torch.uint8))
    del hangs
    made[0].give_up(1)
    made[0].give_up(1)
    assert not made[0].sends_to(1) and not made[0].receives_from(1) and made[1].sends_to(0)
    values, found = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    works = made[0].send(2, values), made[2].receive(0, found)
    eventually(lambda: all(work.is_completed() for work in works))
    assert found.equal(values)
    close(made, 1)


def test_a_worker_that_never_comes_blocks_nobody() -> None:
    made = workers(Stage(patience_s=LASTS_S), 3)
    made[0].enter_epoch(0, [1, 2], [], 0)
    made[1].enter_epoch(0, [], [0], 1)
    eventually(lambda: are_ready(made, (0, 1)))
    assert not made[0].sends_to(2) and made[0].failure(2) == ""
    close(made, 1)


def test_a_transfer_that_takes_too_long_has_failed() -> None:
    made = workers(Stage(), 2)
    enter(made, 0, (0, 1))
    eventually(lambda: are_ready(made, (0, 1)))
    work = made[0].send(1, torch.zeros(1 << 20, dtype=torch.uint8), "PageState")
    eventually(work.is_completed)
    with pytest.raises(RuntimeError, match=r"\(PageState\) was not complete within|[Tt]imed out|[Cc]losed"):
        work.wait()
    close(made, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_while_the_other_connects_is_told_of() -> None:
    made = workers(Stage(dies={1}), 2)
    enter(made, 0, (0, 1))
    eventually(lambda: made[0].failure(1) != "")
    assert not made[0].sends_to(1)
    close(made, 1)


def test_groups_for_whose_end_there_is_no_thread_are_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(patience_s=LASTS_S)
    made, ways = workers(stage, 2), ((0, 1), (1, 0))
    enter(made, 0, *ways)
    eventually(lambda: are_ready(made, *ways))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        made[0].give_up(1)
        enter(made, 1, *ways)
        assert made[0].failure(1) == made[1].failure(0) == "RuntimeError: can't start new thread"
        assert not stage.ended
    enter(made, 2, *ways)
    eventually(lambda: are_ready(made, *ways) and len(stage.ended) == 4)
    close(made, 3)
    eventually(lambda: len(stage.ended) == 8)
