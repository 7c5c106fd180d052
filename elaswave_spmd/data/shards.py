"""Data that is read by iterating over shards, as a map-style dataset: a sample is a shard and an offset in it.

An iterator alone cannot be trained on here. Samples are taken in a keyed random order, and which worker reads which of
them changes when workers are lost, join or resume, so each must be able to read any sample by its number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from elaswave_spmd.errors import DataError

Shard = TypeVar("Shard")
_PASSED = 64  # samples that one iterator has passed and keeps


class ShardedDataset(ABC, Generic[Shard]):
    """Base class of a user's dataset over shards. Samples are numbered through the shards in their order.

    A subclass has `shards`, `shard_length` and `open_shard`, and like any dataset `vocab_size` if its samples are
    tokens. Sample (shard, offset) has to be the same whatever was read before it, in every process.

    A few iterators stay open. One that is at most `read_forward` samples before the one that is asked for reads on to
    it, and keeps what it passes; otherwise `open_shard` is called. As samples are asked for in random order that is the
    usual case: `open_shard` should find an offset without reading all that is before it.
    """

    shards: Sequence[Shard]
    """The shards, such as names of files, in an order that is always the same; an attribute or a property."""
    open_iterators = 4
    """Iterators that are kept open, those that were used last."""
    read_forward = 16
    """Samples that an iterator reads on at most, before another one is opened in its place."""

    @abstractmethod
    def shard_length(self, shard: Shard) -> int:
        """The number of samples of a shard."""

    @abstractmethod
    def open_shard(self, shard: Shard, offset: int) -> Iterator[Any]:
        """An iterator over the samples of a shard from `offset` on."""

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Any:
        """Sample `index`.

        Raises:
            IndexError: there is no such sample.
            DataError: its shard ends before it.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        offset = int(index - (self._ends[number - 1] if number else 0))
        reader = self._reader_at(number, offset)
        try:
            return reader.read(offset)
        except BaseException:
            # A generator that has raised is at its end: asked again, it would hide what was wrong behind a short shard.
            del self._readers[id(reader)]
            reader.close()
            raise

    @cached_property
    def _listed(self) -> list[Shard]:
        return list(self.shards)

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of samples up to the end of each shard."""
        lengths = [self.shard_length(shard) for shard in self._listed]
        for shard, length in zip(self._listed, lengths, strict=True):
            if length < 0:
                raise DataError(
                    f"shard_length({shard!r}) of {type(self).__name__} is {length}",
                    rule="a shard has 0 or more samples",
                    where="data.target",
                    fix="return the number of samples that open_shard(shard, 0) iterates over",
                )
        return np.cumsum(lengths, dtype=np.int64)

    @cached_property
    def _readers(self) -> _Readers:
        return _Readers()

    def _reader_at(self, number: int, offset: int) -> _Reader:
        """A reader from which the sample can be read: one that is open, or a new one."""
        readers = self._readers
        for key, reader in readers.items():
            if reader.number == number and reader.reaches(offset, self.read_forward):
                readers.move_to_end(key)
                return reader
        shard = self._listed[number]
        made = _Reader(number, repr(shard), self.shard_length(shard), iter(self.open_shard(shard, offset)), offset)
        readers[id(made)] = made
        while len(readers) > self.open_iterators:
            _, oldest = readers.popitem(last=False)
            oldest.close()
        return made


class _Readers(OrderedDict[int, "_Reader"]):
    """The open iterators of a dataset: a number of its own -> reader, the last used one last.

    Pickled it is empty. An iterator often cannot be pickled, or only with all that is left of its shard.
    """

    def __reduce__(self) -> tuple[type[_Readers], tuple[()]]:
        return _Readers, ()


@dataclass
class _Reader:
    """An open iterator over a shard, and the samples that it has passed and nobody has asked for."""

    number: int
    name: str
    length: int
    samples: Iterator[Any]
    position: int

    def __post_init__(self) -> None:
        self._passed: dict[int, Any] = {}

    def reaches(self, offset: int, most: int) -> bool:
        return offset in self._passed or self.position <= offset <= self.position + most

    def read(self, offset: int) -> Any:
        while self.position <= offset:
            try:
                sample = next(self.samples)
            except StopIteration:
                raise DataError(
                    f"shard {self.name} ended before its sample {self.position}",
                    rule=f"it has as many samples as shard_length says: {self.length}",
                    where="data.target",
                    fix="correct shard_length(shard), or open_shard(shard, offset)",
                ) from None
            self._passed[self.position] = sample
            self.position += 1
        found = self._passed.pop(offset)
        # A sample that is handed out is not kept: who gets it may write into it.
        while len(self._passed) > _PASSED:
            del self._passed[next(iter(self._passed))]
        return found

    def close(self) -> None:
        if callable(close := getattr(self.samples, "close", None)):
            close()
