"""Reshard plans: what moves when an array goes from one (mesh, spec) to another.

A destination keeps what it holds already and receives every other element of its tile exactly once, so the bytes are
the least possible. It receives from the tiles of the source. Where the source has replicas, a worker that was part of
it reads within its own old stage if that stage has the whole array; everyone else takes replicas in turn, which
spreads the load over them.

A plan is a value, made of its inputs. Transfers between 10,000 workers can be 10^8, so they are never all in memory:
each worker expands its own (`incoming`, `outgoing`), and `chunks` goes through all of them in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import NamedTuple

import numpy as np

from elaswave_spmd.errors import LayoutError, MeshError, SpecError
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.sharding.spec import P
from elaswave_spmd.sharding.tiles import Coordinate, Sharding, TileMap, part_at, part_start
from elaswave_spmd.sharding.transfers import Transfer, Transfers

_CHUNK = 1 << 18
_SHOWN = 8


class _Rows(NamedTuple):
    """Per destination worker, rows in the order of the destination mesh's members; W of them."""

    home: np.ndarray  # int64[W, 2]: its (stage, position) in the source mesh, -1 where it has none
    missing: np.ndarray  # int64[W]: elements of its tile that it does not hold
    turn: np.ndarray  # int64[W]: its place among those that take replicas in turn


class _Pairs(NamedTuple):
    """(destination row, source stage) and the range of source positions first..last there, each int64[n]."""

    row: np.ndarray
    stage: np.ndarray
    first: np.ndarray
    last: np.ndarray


@dataclass(frozen=True)
class ReshardPlan:
    """What moves when an array goes from sharding `src` to sharding `dst`. Made by `plan_reshard`.

    Every member of the source mesh serves. If some are gone, say so by `src.mesh.without(ranks)` where the spec names
    no dp (the tiles stay the same); state split over dp survives through the mirrors of its pages instead.
    """

    shape: tuple[int, ...]
    itemsize: int
    src: Sharding
    dst: Sharding
    array: str = "array"

    def __post_init__(self) -> None:
        if index(self.itemsize) < 1:
            raise SpecError("An element has at least 1 byte", got=f"itemsize {self.itemsize}", where=self.array)
        object.__setattr__(self, "shape", self._src_tiles.shape)
        _ = self._dst_tiles

    @cached_property
    def bytes(self) -> int:
        """Bytes that the transfers of this plan move between workers."""
        return self._totals[1]

    @cached_property
    def lower_bound(self) -> int:
        """Bytes that any plan moves: of every destination tile, the elements that its worker does not hold."""
        return sum(self._rows.missing.tolist()) * self.itemsize

    @property
    def num_transfers(self) -> int:
        """Number of transfers."""
        return self._totals[0]

    def incoming(self, rank: int) -> Transfers:
        """What a worker receives; nothing if it leaves. MeshError if it is in neither mesh."""
        rows = [self._row(rank)] if self._is_in(rank, self.dst.mesh) else []
        return self._expand(self._pairs(np.array(rows, np.int64)))

    def outgoing(self, rank: int) -> Transfers:
        """What a worker sends; nothing if it joins. MeshError if it is in neither mesh."""
        if not self._is_in(rank, self.src.mesh):
            return self._expand(self._pairs(np.zeros(0, np.int64)))
        every_row = np.arange(self.dst.mesh.num_workers)
        return self._expand(self._pairs(every_row, Coordinate(*self.src.mesh.coordinate(rank))))

    def local_copy(self, rank: int) -> Transfer | None:
        """The part of its new tile that a worker holds already: a box, or None if it is empty."""
        if not (self._is_in(rank, self.src.mesh) and self._is_in(rank, self.dst.mesh)):
            return None
        old, new = (sharding.tile_of(rank, self.shape) for sharding in (self.src, self.dst))
        starts = tuple(max(a.start, b.start) for a, b in zip(old, new, strict=True))
        stops = tuple(min(a.stop, b.stop) for a, b in zip(old, new, strict=True))
        size = self.itemsize
        for start, stop in zip(starts, stops, strict=True):
            size *= max(0, stop - start)
        return Transfer(rank, rank, self.array, starts, stops, size) if size else None

    def chunks(self) -> Iterator[Transfers]:
        """All transfers, by destination, some 100,000 at a time."""
        for pairs in self._pair_chunks():
            for part in _batches(pairs.last - pairs.first + 1):
                yield self._expand(_Pairs(*(column[part] for column in pairs)))

    def __iter__(self) -> Iterator[Transfer]:
        for chunk in self.chunks():
            yield from chunk

    def __str__(self) -> str:
        lines = [
            f"reshard {self.array} {self.shape} x {self.itemsize} B: {self.src} -> {self.dst}",
            f"  {self.num_transfers:,} transfers, {self.bytes:,} B (lower bound {self.lower_bound:,} B)",
        ]
        lines += [f"  {transfer}" for transfer, _ in zip(self, range(_SHOWN), strict=False)]
        if self.num_transfers > _SHOWN:
            lines.append(f"  ... {self.num_transfers - _SHOWN:,} more")
        return "\n".join(lines)

    @cached_property
    def _src_tiles(self) -> TileMap:
        return self.src.tiles(self.shape, self.array)

    @cached_property
    def _dst_tiles(self) -> TileMap:
        return self.dst.tiles(self.shape, self.array)

    @cached_property
    def _first_row(self) -> np.ndarray:
        """int64[stages]: row of position 0 of each source stage."""
        sizes = np.array(self.src.mesh.shape.stage_sizes, np.int64)
        return np.cumsum(sizes) - sizes

    def _row(self, rank: int) -> int:
        stage, position = self.dst.mesh.coordinate(rank)
        return sum(self.dst.mesh.shape.stage_sizes[:stage]) + position

    def _is_in(self, rank: int, mesh: Mesh) -> bool:
        if rank not in self.src.mesh and rank not in self.dst.mesh:
            raise MeshError(
                "A plan is for workers of its two meshes",
                got=f"rank {rank}",
                where=f"reshard {self.array}",
                exists=f"{self.src.mesh}; {self.dst.mesh}",
            )
        return rank in mesh

    @cached_property
    def _rows(self) -> _Rows:
        old = self.src.mesh
        home = np.array([old.coordinate(rank) if rank in old else (-1, -1) for rank in self.dst.mesh.members], np.int64)
        is_old = home[:, 0] >= 0
        held_row = np.where(is_old, self._first_row[home[:, 0]] + home[:, 1], 0)
        (starts, stops), (old_starts, old_stops) = self._dst_tiles.bounds, self._src_tiles.bounds
        held = np.minimum(stops, old_stops[held_row]) - np.maximum(starts, old_starts[held_row])
        missing = self._dst_tiles.sizes - np.maximum(held, 0).prod(axis=1) * is_old
        in_turn = missing > 0
        if "pp" not in self.src.spec.axes:
            in_turn &= ~is_old
        return _Rows(home, missing, np.cumsum(in_turn) - 1)

    def _replica(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(stage, position) that a row reads from if every stage has the whole array; position matters without dp only.

        Members stay in their old stage. Newcomers take stages in turn, or single workers if each has the whole array.
        """
        turn, home = self._rows.turn[rows], self._rows.home[rows]
        if "dp" in self.src.spec.axes:
            stage, position = turn % self.src.mesh.num_stages, np.zeros_like(turn)
        else:
            stage, position = self._src_tiles.coordinates[turn % self.src.mesh.num_workers].T
        return np.where(home[:, 0] >= 0, home[:, 0], stage), position

    def _stage_range(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last source stage that each row reads from."""
        dim = self.src.spec.dim_of("pp")
        if dim is None:
            stage, _ = self._replica(rows)
            return stage, stage
        starts, stops = self._dst_tiles.bounds
        length, stages = self.shape[dim], self.src.mesh.num_stages
        return part_at(length, stages, starts[rows, dim]), part_at(length, stages, stops[rows, dim] - 1)

    def _pairs(self, rows: np.ndarray, only: Coordinate | None = None) -> _Pairs:
        """What `rows` read, own tiles included; `only` from one source worker."""
        rows = rows[self._rows.missing[rows] > 0]
        first, last = self._stage_range(rows)
        if only is not None:
            first, last = np.maximum(first, only.stage), np.minimum(last, only.stage)
        counts = np.maximum(last - first + 1, 0)
        row = np.repeat(rows, counts)
        stage = np.repeat(first, counts) + _count_up(counts)
        first, last = self._position_range(row, stage)
        if only is not None:
            first, last = np.maximum(first, only.position), np.minimum(last, only.position)
            keep = first <= last
            return _Pairs(row[keep], stage[keep], first[keep], last[keep])
        return _Pairs(row, stage, first, last)

    def _position_range(self, row: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last position within `stage` that `row` reads from; all between hold part of its tile."""
        dim = self.src.spec.dim_of("dp")
        sizes = np.array(self.src.mesh.shape.stage_sizes, np.int64)[stage]
        if dim is None:
            position = self._rows.turn[row] % sizes if "pp" in self.src.spec.axes else self._replica(row)[1]
            return position, position
        starts, stops = self._dst_tiles.bounds
        base, length = np.zeros_like(stage), np.full_like(stage, self.shape[dim])
        if dim == self.src.spec.dim_of("pp"):
            stages = self.src.mesh.num_stages
            base = part_start(self.shape[dim], stages, stage)
            length = part_start(self.shape[dim], stages, stage + 1) - base
        start = np.maximum(starts[row, dim] - base, 0)
        stop = np.minimum(stops[row, dim] - base, length)
        return part_at(length, sizes, start), part_at(length, sizes, stop - 1)

    def _expand(self, pairs: _Pairs) -> Transfers:
        counts = pairs.last - pairs.first + 1
        row, stage = np.repeat(pairs.row, counts), np.repeat(pairs.stage, counts)
        position = np.repeat(pairs.first, counts) + _count_up(counts)
        home = self._rows.home[row]
        own = (home[:, 0] == stage) & ((home[:, 1] == position) | ("dp" not in self.src.spec.axes))
        row, source = row[~own], (self._first_row[stage] + position)[~own]
        (starts, stops), (old_starts, old_stops) = self._dst_tiles.bounds, self._src_tiles.bounds
        starts, stops = np.maximum(starts[row], old_starts[source]), np.minimum(stops[row], old_stops[source])
        sizes = (stops - starts).prod(axis=1) * self.itemsize
        return Transfers(self.array, self._src_ranks[source], self._dst_ranks[row], starts, stops, sizes)

    @cached_property
    def _src_ranks(self) -> np.ndarray:
        return np.array(self.src.mesh.members, np.int64)

    @cached_property
    def _dst_ranks(self) -> np.ndarray:
        return np.array(self.dst.mesh.members, np.int64)

    def _pair_chunks(self) -> Iterator[_Pairs]:
        rows = np.flatnonzero(self._rows.missing)
        first, last = self._stage_range(rows)
        for part in _batches(last - first + 1):
            yield self._pairs(rows[part])

    @cached_property
    def _totals(self) -> tuple[int, int]:
        """(transfers, bytes), counted on pairs without expanding them."""
        spec, (starts, stops) = self.src.spec, self._dst_tiles.bounds
        old_starts, old_stops = self._src_tiles.bounds
        transfers = elements = 0
        for row, stage, first, last in self._pair_chunks():
            # The box that all positions first..last hold together.
            low, high = self._first_row[stage] + first, self._first_row[stage] + last
            box = np.minimum(stops[row], old_stops[high]) - np.maximum(starts[row], old_starts[low])
            home = self._rows.home[row]
            own = (home[:, 0] == stage) & ("dp" not in spec.axes or (first <= home[:, 1]) & (home[:, 1] <= last))
            mine = (self._first_row[stage] + home[:, 1])[own]
            kept = np.minimum(stops[row[own]], old_stops[mine]) - np.maximum(starts[row[own]], old_starts[mine])
            transfers += int((last - first + 1).sum() - own.sum())
            elements += sum(box.prod(axis=1).tolist()) - sum(kept.prod(axis=1).tolist())
        return transfers, elements * self.itemsize


def plan_reshard(
    shape: tuple[int, ...], itemsize: int, *, src: tuple[Mesh, P], dst: tuple[Mesh, P], array: str = "array"
) -> ReshardPlan:
    """Plan the way of a global array of `shape`, `itemsize` bytes per element, from one (mesh, spec) to another.

    Axes inside an island are not a matter between workers: a worker holds its whole tile.

    Raises:
        SpecError: a spec that does not fit the shape.
    """
    return ReshardPlan(tuple(shape), itemsize, Sharding(*src), Sharding(*dst), array)


@dataclass(frozen=True)
class PagePlan:
    """Pages that change their owner. `starts` and `stops` of the transfers are page numbers, one page range each.

    Args:
        num_pages: pages in the owner maps.
        transfers: what moves.
        bytes: bytes that the transfers move.
        lower_bound: bytes that any map moves which gives each rank as many pages as the new one.
    """

    num_pages: int
    transfers: Transfers
    bytes: int
    lower_bound: int

    def incoming(self, rank: int) -> Transfers:
        """What a rank receives."""
        return self.transfers.select(self.transfers.dst == rank)

    def outgoing(self, rank: int) -> Transfers:
        """What a rank sends."""
        return self.transfers.select(self.transfers.src == rank)

    def __str__(self) -> str:
        moved = f"{len(self.transfers):,} transfers, {self.bytes:,} B (lower bound {self.lower_bound:,} B)"
        head = f"{self.num_pages:,} pages: {moved}"
        shown = [f"  {transfer}" for transfer, _ in zip(self.transfers, range(_SHOWN), strict=False)]
        more = [f"  ... {len(self.transfers) - _SHOWN:,} more"] if len(self.transfers) > _SHOWN else []
        return "\n".join([head, *shown, *more])


def plan_pages(src_owner: np.ndarray, dst_owner: np.ndarray, page_bytes: int, array: str = "pages") -> PagePlan:
    """Plan the way from one owner map to another: int[num_pages] arrays that give the rank of each page.

    Raises:
        LayoutError: maps of different length or not of whole numbers, a negative rank, or pages without bytes.
    """
    src, dst = np.asarray(src_owner), np.asarray(dst_owner)
    ints = all(np.issubdtype(owner.dtype, np.integer) or owner.size == 0 for owner in (src, dst))
    if (
        not ints
        or src.ndim != 1
        or src.shape != dst.shape
        or page_bytes < 1
        or min(src.min(initial=0), dst.min(initial=0)) < 0
    ):
        raise LayoutError(
            "Owner maps give a rank, 0 or more, for each page; a page has at least 1 byte",
            got=f"{src.dtype}{list(src.shape)} -> {dst.dtype}{list(dst.shape)}, {page_bytes} B per page",
            where=array,
            fix="pass two int arrays of one length",
        )
    src, dst = src.astype(np.int64), dst.astype(np.int64)
    page = np.flatnonzero(src != dst)
    follows = (np.diff(page) == 1) & (np.diff(src[page]) == 0) & (np.diff(dst[page]) == 0)
    start = page[np.flatnonzero(np.concatenate([np.ones(min(1, len(page)), bool), ~follows]))]
    stop = page[np.flatnonzero(np.concatenate([~follows, np.ones(min(1, len(page)), bool)]))] + 1
    moved = Transfers(array, src[start], dst[start], start[:, None], stop[:, None], (stop - start) * page_bytes)
    ranks = int(max(src.max(initial=-1), dst.max(initial=-1))) + 1
    more = np.bincount(dst, minlength=ranks) - np.bincount(src, minlength=ranks)
    return PagePlan(len(src), moved, len(page) * page_bytes, int(more[more > 0].sum()) * page_bytes)


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _batches(counts: np.ndarray) -> Iterator[slice]:
    """Cut `counts` into runs that sum to at most _CHUNK, or have one element."""
    ends, start = np.cumsum(counts), 0
    while start < len(counts):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + _CHUNK, side="right")))
        yield slice(start, stop)
        start = stop
