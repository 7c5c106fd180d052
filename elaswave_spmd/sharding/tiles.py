"""Tile maps: which part of a global array each coordinate of a mesh shape holds, uneven sizes included.

How a dim of length n is cut: into k parts of n // k elements, the first n % k one longer. The axes of an entry cut in
turn, each one what the one before it left (see `P`). At coordinate (stage, position) pp has `num_stages` parts, of
which this is part `stage`, and dp has `stage_sizes[stage]` parts, of which this is part `position`. So on stages of 3
and 2 workers, for an array of 12 rows:

    P("pp")           stage 0 rows 0-5, stage 1 rows 6-11; the workers of a stage hold the same rows
    P("dp")           stage 0 rows 0-3, 4-7, 8-11; stage 1 rows 0-5, 6-11: every stage holds the whole array
    P(("pp", "dp"))   stage 0 rows 0-1, 2-3, 4-5; stage 1 rows 6-8, 9-11: every row once
    P("pp", "dp")     rows over stages, columns over the workers of each stage

Axes that the spec leaves out hold replicas. Every replica set covers the array exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import numpy as np

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import ISLAND_AXES, Mesh, MeshShape
from elaswave_spmd.sharding.spec import P, check_spec

Ints = Any
"""An int, or an int64 array of any shape: the arithmetic of tiles is elementwise."""

_SHOWN = 12


class Coordinate(NamedTuple):
    """Where a worker stands in a mesh: its stage (axis pp) and its position within the stage (axis dp)."""

    stage: int
    position: int


def part_start(length: Ints, parts: Ints, part: Ints) -> Ints:
    """First element of `part` when `length` elements are cut in `parts`; part number `parts` starts at `length`."""
    extra = length % parts
    lower = np.minimum if isinstance(part, np.ndarray) or isinstance(extra, np.ndarray) else min
    return part * (length // parts) + lower(part, extra)


def part_at(length: Ints, parts: Ints, element: np.ndarray) -> np.ndarray:
    """The part that holds `element`, for 0 <= element < length: the inverse of `part_start`."""
    short, extra = length // parts, length % parts
    long_end = extra * (short + 1)
    return np.where(element < long_end, element // (short + 1), extra + (element - long_end) // np.maximum(short, 1))


@dataclass(frozen=True)
class TileMap:
    """The tile of a global array at every coordinate of a mesh shape.

    Args:
        mesh_shape: sizes of the axes; no members are needed.
        spec: which axes split which dims.
        shape: of the global array; lengths may be 0.
        name: of the array, for error messages.

    Raises:
        SpecError: a negative length, more entries than dims, or an axis inside an island that does not divide its dim.
    """

    mesh_shape: MeshShape
    spec: P
    shape: tuple[int, ...]
    name: str = field(default="array", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(index, self.shape)))
        if any(length < 0 for length in self.shape):
            raise SpecError("Lengths of an array are 0 or more", got=self.shape, where=self.name)
        check_spec(self.spec, self.shape, self.mesh_shape, self.name)

    def tile(self, stage: int = 0, position: int = 0, **island: int) -> tuple[slice, ...]:
        """The tile at a coordinate, one slice per dim: of the worker, or with `tp=`, `fsdp=` of one of its devices.

        Raises:
            SpecError: the mesh shape has no such coordinate, or some axes of the island are named and others not.
        """
        sizes = self.mesh_shape.stage_sizes
        self._check_index("stage", stage, len(sizes))
        self._check_index("position", position, sizes[stage])
        cuts: dict[str, tuple[Ints, Ints]] = {"pp": (len(sizes), stage), "dp": (sizes[stage], position)}
        for axis in {*island, *ISLAND_AXES} if island else ():
            size = self.mesh_shape.axis_size(axis)
            self._check_index(axis, island.get(axis, 0 if size == 1 else None), size)
            cuts[axis] = (size, island.get(axis, 0))
        bounds = [_cut(length, self.spec.axes_of(dim), cuts) for dim, length in enumerate(self.shape)]
        return tuple(slice(start, stop) for start, stop in bounds)

    @cached_property
    def coordinates(self) -> np.ndarray:
        """int64[num_workers, 2]: (stage, position) of each worker, stage by stage, in the order of `Mesh.members`."""
        sizes = np.array(self.mesh_shape.stage_sizes, np.int64)
        stages = np.repeat(np.arange(len(sizes)), sizes)
        first = np.cumsum(sizes) - sizes
        return _read_only(np.stack([stages, np.arange(len(stages)) - first[stages]], axis=1))

    @cached_property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, stops), both int64[num_workers, num_dims]: the tile of each worker, rows as in `coordinates`."""
        stages, positions = self.coordinates.T
        sizes = np.array(self.mesh_shape.stage_sizes, np.int64)
        cuts: dict[str, tuple[Ints, Ints]] = {"pp": (len(sizes), stages), "dp": (sizes[stages], positions)}
        starts = np.zeros((len(stages), len(self.shape)), np.int64)
        stops = starts.copy()
        for dim, length in enumerate(self.shape):
            starts[:, dim], stops[:, dim] = _cut(length, self.spec.axes_of(dim), cuts)
        return _read_only(starts), _read_only(stops)

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64[num_workers]: number of elements each worker holds."""
        starts, stops = self.bounds
        return _read_only((stops - starts).prod(axis=1))

    def owners(self, *element: int) -> tuple[Coordinate, ...]:
        """The coordinates that hold an element, given by one index per dim.

        Raises:
            SpecError: the array has no such element.
        """
        inside = len(element) == len(self.shape) and all(0 <= at < n for at, n in zip(element, self.shape, strict=True))
        if not inside:
            raise SpecError("An element lies in its array", got=element, where=self.name, exists=f"shape {self.shape}")
        starts, stops = self.bounds
        at = np.array(element, np.int64)
        held = ((starts <= at) & (at < stops)).all(axis=1)
        return tuple(Coordinate(*row) for row in self.coordinates[held].tolist())

    def _check_index(self, what: str, value: int | None, size: int) -> None:
        if value is None or not 0 <= value < size:
            raise SpecError(
                "A tile belongs to a coordinate of the mesh",
                got=f"{what} {value}" if value is not None else f"no {what} beside the other axes of the island",
                where=self.name,
                exists=f"{what} 0-{size - 1} on mesh {self.mesh_shape}",
            )

    def __str__(self) -> str:
        lines = [f"{self.name} {self.shape} by {self.spec} on {self.mesh_shape}"]
        starts, stops = self.bounds
        for row, (stage, position) in enumerate(self.coordinates[:_SHOWN].tolist()):
            tile = ", ".join(f"{start}:{stop}" for start, stop in zip(starts[row], stops[row], strict=True))
            lines.append(f"  stage {stage} position {position}: [{tile}]")
        if len(starts) > _SHOWN:
            lines.append(f"  ... {len(starts) - _SHOWN} more workers")
        return "\n".join(lines)


class Sharding(NamedTuple):
    """A mesh and a spec: which tile of a global array each worker holds."""

    mesh: Mesh
    spec: P

    def tiles(self, shape: tuple[int, ...], name: str = "array") -> TileMap:
        """The tile map of an array of this shape."""
        return TileMap(self.mesh.shape, self.spec, shape, name)

    def tile_of(self, rank: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The tile that a rank holds, one slice per dim. MeshError if it is no member."""
        return self.tiles(shape).tile(*self.mesh.coordinate(rank))

    def __str__(self) -> str:
        return f"{self.spec} on {self.mesh.shape}"


def _cut(length: Ints, axes: tuple[str, ...], cuts: dict[str, tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """(start, stop) of what the cuts (parts, part) of `axes` leave of `length` elements; no cut leaves all."""
    start = 0
    for axis in axes:
        if axis in cuts:
            parts, part = cuts[axis]
            first, last = part_start(length, parts, part), part_start(length, parts, part + 1)
            start, length = start + first, last - first
    return start, start + length


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
