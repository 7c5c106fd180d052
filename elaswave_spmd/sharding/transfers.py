"""Transfers: boxes of an array that go from one rank to another. One by one as values, many as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Transfer:
    """One box of a global array, from one rank to another; src == dst means that the worker copies it locally."""

    src: int
    dst: int
    array: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    bytes: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the global array, one slice per dim."""
        return tuple(map(slice, self.starts, self.stops))

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True))
        return f"{self.src} -> {self.dst}  {self.array}[{box}]  {self.bytes:,} B"


@dataclass(frozen=True, eq=False)
class Transfers:
    """Transfers as arrays: src, dst, bytes are int64[n]; starts, stops int64[n, num_dims]. Iterates as `Transfer`."""

    array: str
    src: np.ndarray
    dst: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    bytes: np.ndarray

    def select(self, mask: np.ndarray) -> Transfers:
        """Those where `mask`, bool[n], is true."""
        return Transfers(self.array, *(getattr(self, column.name)[mask] for column in fields(self)[1:]))

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.src, self.dst, self.starts, self.stops, self.bytes)
        for src, dst, starts, stops, size in zip(*(column.tolist() for column in columns), strict=True):
            yield Transfer(src, dst, self.array, tuple(starts), tuple(stops), size)

    def _key(self) -> tuple[object, ...]:
        columns = (getattr(self, column.name) for column in fields(self)[1:])
        return (self.array, *((column.shape, column.tobytes()) for column in columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transfers) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())
