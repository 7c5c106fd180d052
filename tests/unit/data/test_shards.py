"""Datasets over shards: samples by number, few iterators, and what can only be iterated over is refused."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaswave_spmd.data import DataSpec, ShardedDataset, open_split, prepare_data
from elaswave_spmd.errors import DataError

LENGTHS = {"a": 5, "b": 0, "c": 40, "d": 1}


class Counted(ShardedDataset[str]):
    """Samples are (shard, offset); what is opened and closed is written down."""

    shards = tuple(LENGTHS)

    def __init__(self) -> None:
        self.opened: list[tuple[str, int]] = []
        self.open_now = 0

    def shard_length(self, shard: str) -> int:
        return LENGTHS[shard]

    def open_shard(self, shard: str, offset: int) -> Iterator[tuple[str, int]]:
        self.opened.append((shard, offset))
        return self._iterate(shard, offset)

    def _iterate(self, shard: str, offset: int) -> Iterator[tuple[str, int]]:
        self.open_now += 1
        try:
            for number in range(offset, LENGTHS[shard]):
                yield shard, number
        finally:
            self.open_now -= 1


SAMPLES = [(shard, offset) for shard, length in LENGTHS.items() for offset in range(length)]


@pytest.mark.parametrize("open_iterators", [1, 2, 4])
@pytest.mark.parametrize("read_forward", [0, 3, 100])
def test_samples_are_the_same_in_any_order(open_iterators: int, read_forward: int) -> None:
    dataset = Counted()
    dataset.open_iterators, dataset.read_forward = open_iterators, read_forward
    assert len(dataset) == len(SAMPLES)
    asked = random.Random(read_forward).choices(range(len(SAMPLES)), k=300)
    for index in asked:
        assert dataset[index] == SAMPLES[index]
        assert dataset.open_now <= open_iterators


def test_samples_in_order_open_each_shard_once() -> None:
    dataset = Counted()
    assert [dataset[index] for index in range(len(dataset))] == SAMPLES
    assert dataset.opened == [("a", 0), ("c", 0), ("d", 0)]


def test_an_iterator_that_is_near_reads_on_and_keeps_what_it_passes() -> None:
    dataset = Counted()
    for offset in (10, 13, 11, 12, 14):
        assert dataset[5 + offset] == ("c", offset)
    assert dataset.opened == [("c", 10)]
    dataset[5 + 14 + dataset.read_forward + 2]  # too far: another one is opened
    dataset[5 + 13]  # handed out already: not kept
    assert dataset.opened == [("c", 10), ("c", 14 + dataset.read_forward + 2), ("c", 13)]


def test_a_dataset_that_was_read_is_pickled_without_its_open_iterators() -> None:
    """The next run is given the same object; its workers open shards by themselves."""
    dataset = Counted()
    assert dataset[7] == SAMPLES[7] and dataset.open_now == 1
    copy = pickle.loads(pickle.dumps(dataset))
    copy.opened.clear()
    assert copy[8] == SAMPLES[8] and copy.opened == [("c", 3)]
    assert dataset[8] == SAMPLES[8] and dataset.opened == [("c", 2)], "its own iterator reads on"


@pytest.mark.parametrize("index", [-1, len(SAMPLES)])
def test_numbers_outside_are_refused(index: int) -> None:
    with pytest.raises(IndexError):
        Counted()[index]


def test_a_shard_that_ends_early_is_refused() -> None:
    class Short(Counted):
        def shard_length(self, shard: str) -> int:
            return LENGTHS[shard] + 1

    with pytest.raises(DataError, match="shard 'a' ended before its sample 5") as caught:
        Short()[5]
    assert "6" in caught.value.rule


def test_a_shard_that_raises_is_opened_anew_and_raises_the_same_again() -> None:
    class Broken(Counted):
        repaired = False

        def _iterate(self, shard: str, offset: int) -> Iterator[tuple[str, int]]:
            for sample in super()._iterate(shard, offset):
                if sample == ("c", 12) and not self.repaired:
                    raise OSError("the file server is away")
                yield sample

    dataset = Broken()
    assert dataset[5 + 11] == ("c", 11)
    for _ in range(2):
        with pytest.raises(OSError, match="the file server is away"):
            dataset[5 + 12]
    dataset.repaired = True
    assert dataset[5 + 12] == ("c", 12)
    assert dataset.opened == [("c", 11), ("c", 12), ("c", 12)]


def test_a_negative_length_is_refused() -> None:
    class Negative(Counted):
        def shard_length(self, shard: str) -> int:
            return -1

    with pytest.raises(DataError, match=r"shard_length\('a'\) of Negative is -1"):
        len(Negative())


FILE = """
import glob
import numpy as np
from torch.utils.data import IterableDataset
from elaswave_spmd.data import ShardedDataset

class Records(ShardedDataset):
    vocab_size = 100
    def __init__(self, path):
        self.shards = sorted(glob.glob(path))
    shards = ()
    def shard_length(self, shard):
        return len(np.load(shard, mmap_mode="r"))
    def open_shard(self, shard, offset):
        return iter(np.load(shard, mmap_mode="r")[offset:])

class OfTorch(IterableDataset):
    vocab_size = 100
    def __iter__(self):
        return iter([[1, 2]])

class WithLength(OfTorch):
    def __len__(self):
        return 1

class Plain:
    vocab_size = 100
    def __iter__(self):
        return iter([[1, 2]])

def generator():
    yield [1, 2]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "of_shards.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("of_shards", None)


@pytest.mark.parametrize("name", ["OfTorch", "WithLength", "Plain", "generator"])
@pytest.mark.usefixtures("folder")
def test_what_can_only_be_iterated_over_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"of_shards.{name} is an iterable dataset") as caught:
        prepare_data(DataSpec(target=f"of_shards.{name}"), 4)
    assert "open_shard(shard, offset)" in caught.value.fix and "random order" in caught.value.rule


def test_shards_as_a_dataset_of_a_run(folder: Path) -> None:
    import numpy as np

    for number in range(3):
        rows = np.arange(10 * number, 10 * number + 10)[:, None] + np.arange(5)
        np.save(folder / f"r{number}.npy", rows)
    prepared = prepare_data(DataSpec(target="of_shards.Records", path="r*.npy"), 4)
    assert prepared.num_train_samples + prepared.num_validation_samples == 30
    tokens, targets = open_split(prepared, "train").batch(np.array([25, 3]))
    assert tokens.tolist() == [[25, 26, 27, 28], [3, 4, 5, 6]] and np.array_equal(targets, tokens + 1)
