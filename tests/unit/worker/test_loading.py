"""Samples read ahead on a thread: which, how many, by whom, and what becomes of exceptions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from elaswave_spmd.data.samples import GenericDataset
from elaswave_spmd.worker.inputs import to_batch
from elaswave_spmd.worker.loading import BackgroundLoader
from tests.waiting import eventually


class Recorded:
    """A split that notes which samples were read, and by which thread; a gate stops reading until it is opened."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0
        self.most_inside = 0

    def __len__(self) -> int:
        return 100

    def batch(self, ids: np.ndarray, *more: int) -> Any:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.threads.add(threading.get_ident())
        self.gate.wait()
        self.read.append(ids.tolist())
        self.inside -= 1
        if 13 in ids:
            raise RuntimeError("sample 13")
        return (*ids.tolist(), *more)


class Keyed(Recorded):
    keyed = True


@contextmanager
def loading(train: Recorded, ahead: int, validation: Recorded | None = None) -> Iterator[BackgroundLoader]:
    loader = BackgroundLoader(train, validation, ahead)
    try:
        yield loader
    finally:
        train.gate.set()
        loader.close()
        eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "loader"])


def batches(*numbers: int, step: int = 1) -> list[tuple[int, np.ndarray]]:
    return [(step, np.array([number])) for number in numbers]


def test_what_is_announced_is_read_before_it_is_asked_for() -> None:
    """By another thread, in order, and no more than there is room for."""
    split = Recorded()
    with loading(split, 2) as loader:
        loader.expect(0, batches(5, 3, 8, 1))
        eventually(lambda: len(split.read) == 2)
        assert loader.train.batch(np.array([5])) == (5,)
        eventually(lambda: len(split.read) == 3)
        assert split.read == [[5], [3], [8]] and threading.get_ident() not in split.threads
        assert [loader.train.batch(np.array([n])) for n in (3, 8, 1)] == [(3,), (8,), (1,)]
        assert split.read == [[5], [3], [8], [1]]


def test_a_dataset_is_read_while_the_training_thread_goes_on() -> None:
    """The dataset returns only after the training thread, which never asks, has opened the gate."""
    split = Recorded()
    split.gate.clear()
    with loading(split, 4) as loader:
        loader.expect(0, batches(1, 2))
        eventually(lambda: split.inside == 1)  # it is in the user's code, and this thread is not
        split.gate.set()
        eventually(lambda: len(split.read) == 2)
        assert loader.pop_waited() == 0.0
        loader.train.batch(np.array([2]))
        assert loader.pop_waited() > 0.0 == loader.pop_waited()


def test_what_was_not_announced_is_read_when_it_is_asked_for() -> None:
    """Before what was announced, as after a change of the mesh; and twice, if it is asked for twice."""
    split = Recorded()
    split.gate.clear()
    with loading(split, 1) as loader:
        loader.expect(0, batches(1, 2, 3))
        eventually(lambda: split.inside == 1)
        opened = threading.Timer(0.0, split.gate.set)
        opened.start()
        assert loader.train.batch(np.array([50])) == (50,)
        assert split.read[:2] == [[1], [50]]
        assert loader.train.batch(np.array([50])) == (50,)
        assert [loader.train.batch(np.array([n])) for n in (3, 1, 2)] == [(3,), (1,), (2,)]  # in another order
        opened.join()


def test_a_new_announcement_drops_what_is_not_announced_again() -> None:
    split = Recorded()
    with loading(split, 2) as loader:
        loader.expect(0, batches(1, 2))
        eventually(lambda: len(split.read) == 2)
        loader.expect(0, batches(2, 3, 4))
        eventually(lambda: len(split.read) == 3)
        assert [loader.train.batch(np.array([n])) for n in (2, 3, 4, 1)] == [(2,), (3,), (4,), (1,)]
        assert split.read == [[1], [2], [3], [4], [1]]


def test_one_thread_reads_at_a_time_both_splits() -> None:
    split = Recorded()
    with loading(split, 3, validation=split) as loader:
        assert loader.validation is not None
        for round in range(20):
            loader.expect(0, batches(*range(3 * round % 50 + 20, 3 * round % 50 + 26)))
            assert loader.validation.batch(np.array([60 + round])) == (60 + round,)
            assert loader.train.batch(np.array([99])) == (99,)
        assert split.most_inside == 1 and len(split.threads) == 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_exception_is_raised_when_its_batch_is_asked_for(ahead: int) -> None:
    """Not when it is read, and not for other batches."""
    split = Recorded()
    with loading(split, ahead) as loader:
        loader.expect(0, batches(12, 13, 14))
        assert loader.train.batch(np.array([12])) == (12,)
        assert loader.train.batch(np.array([14])) == (14,)
        with pytest.raises(RuntimeError, match="sample 13"):
            loader.train.batch(np.array([13]))
        assert loader.train.batch(np.array([15])) == (15,)


class Rows(list[Any]):
    """Samples without tokens, joined by the thread that reads them."""

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        if len({len(sample) for sample in samples}) > 1:
            raise ValueError("rows of other lengths") from KeyError("pad")
        return {"x": torch.stack(samples), "by": int(threading.current_thread().name == "loader")}


def test_samples_without_tokens_are_collated_by_the_thread_that_reads() -> None:
    """What cannot be collated is raised, with its cause and the place, when the training thread comes to it."""
    split = GenericDataset(Rows([torch.ones(2), torch.zeros(2), torch.ones(3)]), 0, 3, "rows")
    loader, place = BackgroundLoader(split, None, 2), torch.device("cpu")
    loader.expect(0, [(1, np.array([1, 0])), (1, np.array([0, 2])), (1, np.array([2]))])
    try:
        read = to_batch(loader.train, np.array([1, 0]), place, 0, 1)
        assert read["x"].tolist() == [[0.0, 0.0], [1.0, 1.0]] and int(read["by"]) == 1
        with pytest.raises(ValueError, match="other lengths") as raised:
            to_batch(loader.train, np.array([0, 2]), place, 0, 1)
        assert isinstance(raised.value.__cause__, KeyError)
        assert vars(raised.value)["__notes__"] == ["in collate(samples) of rows, of sample float32[2]"]
        assert len(to_batch(loader.train, np.array([2]), place, 0, 1)["x"]) == 1
    finally:
        loader.close()


def test_without_room_there_is_no_thread() -> None:
    split = Recorded()
    with loading(split, 0) as loader:
        loader.expect(0, batches(1))
        assert loader.train.batch(np.array([1])) == (1,)
    assert split.threads == {threading.get_ident()}


def test_the_thread_reads_the_first_batch_too() -> None:
    """It is one of the checks before the first step: a dataset that is bound to a thread is refused there."""
    split = Recorded()
    with loading(split, 4) as loader:
        assert loader.train.batch(np.array([1])) == (1,)
        loader.expect(0, batches(2))
        assert loader.train.batch(np.array([2])) == (2,)
    assert len(split.threads) == 1 and threading.get_ident() not in split.threads


def test_a_dataset_whose_samples_depend_on_the_step_is_given_it() -> None:
    """The same samples of another step are another batch."""
    split = Keyed()
    with loading(split, 2) as loader:
        loader.expect(7, batches(1, step=3))
        eventually(lambda: split.read == [[1]])
        assert loader.train.batch(np.array([1]), 7, 4) == (1, 7, 4)
        assert loader.train.batch(np.array([1]), 7, 3) == (1, 7, 3)
        assert split.read == [[1], [1]]


def test_closing_ends_a_thread_that_waits_for_room() -> None:
    split = Recorded()
    with loading(split, 1) as loader:
        loader.expect(0, batches(1, 2))
        eventually(lambda: len(split.read) == 1)
        assert [thread.name for thread in threading.enumerate()].count("loader") == 1
