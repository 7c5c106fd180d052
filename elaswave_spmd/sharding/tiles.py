"""Tile maps: the part of a global array that each coordinate of a mesh shape holds, uneven sizes included.

The cutting rule: a dim of length n is cut into k parts of n // k elements, and n % k of the parts, by default the first
ones, are one element longer. The axes of an entry cut in turn, each one what the one before it left (see `P`). At
coordinate (stage, position) axis pp makes `num_stages` parts, of which this is part `stage`, and axis dp makes
`stage_sizes[stage]` parts, of which this is part `position`. So on stages of 3 and 2 workers, for an array of 12 rows:

    P("pp")           stage 0 rows 0-5, stage 1 rows 6-11; the workers of a stage hold the same rows
    P("dp")           stage 0 rows 0-3, 4-7, 8-11; stage 1 rows 0-5, 6-11: every stage holds the whole array
    P(("pp", "dp"))   stage 0 rows 0-1, 2-3, 4-5; stage 1 rows 6-8, 9-11: every row once
    P("pp", "dp")     rows over stages, columns over the workers of each stage

Axes that the spec leaves out hold replicas: workers that differ only there hold the same tile, and one worker for each
coordinate of the other axes covers the array exactly once. Where the axes divide the
array, tiles agree with those of jax.sharding.NamedSharding.

A run uses this for the pages of optimizer state (`StateSharding`): the array is the sequence of a layer's pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import MeshShape
from elaswave_spmd.sharding.spec import P, check_spec

Ints = Any
"""An int, or an int64 array of any shape: the arithmetic of tiles is elementwise."""

_SHOWN = 12


def part_start(length: Ints, parts: Ints, part: Ints, longer_from: int = 0) -> Ints:
    """The first element of `part` when `length` elements are cut in `parts`; part number `parts` starts at `length`.

    Args:
        longer_from: the part from which on the length % parts longer parts lie; after the last part they go on at
            part 0. 0 <= longer_from < parts.
    """
    extra = length % parts
    before = _clip(part - longer_from, extra)  # longer parts before `part`, among those from longer_from on
    if longer_from:
        before = before + _clip(part, _clip(longer_from + extra - parts, extra))  # and among those from part 0 on
    return part * (length // parts) + before


def _clip(value: Ints, most: Ints) -> Ints:
    """`value`, at least 0 and at most `most`."""
    if isinstance(value, np.ndarray) or isinstance(most, np.ndarray):
        return np.clip(value, 0, most)
    return max(0, min(value, most))


@dataclass(frozen=True)
class TileMap:
    """The tile of a global array at every coordinate of a mesh shape.

    Args:
        mesh_shape: sizes of the axes; no members are needed.
        spec: the axes that split each dim.
        shape: shape of the global array; lengths may be 0.
        name: name of the array, for error messages.
        longer_from: the position in a stage from which on the parts lie that axis dp makes one element longer. Many
            small arrays are spread evenly if each begins where the one before it ended. Needs stages of one size.

    Raises:
        SpecError: a negative length, more entries than dims, or an axis inside an island that does not divide its dim.
    """

    mesh_shape: MeshShape
    spec: P
    shape: tuple[int, ...]
    name: str = field(default="array", compare=False)
    longer_from: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(index, self.shape)))
        if any(length < 0 for length in self.shape):
            raise SpecError(
                f"array {self.name} has the negative length {min(self.shape)} in its shape {self.shape}",
                rule="the lengths of an array are 0 or more",
                where=self.name,
            )
        # Ragged stages have no common position to begin at, so the longer parts can only be shifted on even ones.
        assert 0 <= self.longer_from < min(self.mesh_shape.stage_sizes), (self.longer_from, self.mesh_shape)
        assert not self.longer_from or self.mesh_shape.stages is None, (self.longer_from, self.mesh_shape)
        check_spec(self.spec, self.shape, self.mesh_shape, self.name)

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
            starts[:, dim], stops[:, dim] = self._cut(length, self.spec.axes_of(dim), cuts)
        return _read_only(starts), _read_only(stops)

    def _cut(self, length: Ints, axes: tuple[str, ...], cuts: dict[str, tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
        """(start, stop) of what the cuts (parts, part) of `axes` leave of `length` elements; no cut leaves all."""
        start = 0
        for axis in axes:
            if axis in cuts:
                parts, part = cuts[axis]
                longer_from = self.longer_from if axis == "dp" else 0
                first, last = (part_start(length, parts, it, longer_from) for it in (part, part + 1))
                start, length = start + first, last - first
        return start, start + length

    def __str__(self) -> str:
        lines = [f"{self.name} {self.shape} by {self.spec} on {self.mesh_shape}"]
        starts, stops = self.bounds
        for row, (stage, position) in enumerate(self.coordinates[:_SHOWN].tolist()):
            tile = ", ".join(f"{start}:{stop}" for start, stop in zip(starts[row], stops[row], strict=True))
            lines.append(f"  stage {stage} position {position}: [{tile}]")
        if len(starts) > _SHOWN:
            lines.append(f"  ... {len(starts) - _SHOWN} more workers")
        return "\n".join(lines)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
