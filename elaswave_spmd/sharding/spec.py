"""`P`, a partition spec: the axes that split each dim of an array. No mesh inside: it serves every mesh epoch."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from elaswave_spmd.errors import SpecError
from elaswave_spmd.mesh import AXES, ISLAND_AXES, MeshShape

Entry = str | tuple[str, ...] | None
"""The axes that split one dim: none, one, or several, the first one coarsest."""


@dataclass(frozen=True, init=False, repr=False)
class P:
    """The axes that split each dim: `P("dp", None)` splits dim 0 over dp; dims beyond the last entry are whole.

    Several axes on one dim cut in turn, the later ones cutting what the earlier ones left: `P(("pp", "dp"))` gives each
    stage a part, and each worker of a stage a part of that. The order is pp, dp, then tp and fsdp as wished: stages may
    have different numbers of workers at any epoch, so cutting by dp first would have no meaning.

    Raises:
        SpecError: unknown axis, axis used twice, axes of one dim out of order, or an entry that is none of the above.
    """

    entries: tuple[Entry, ...]

    def __init__(self, *entries: Entry) -> None:
        object.__setattr__(self, "entries", tuple(_canonical(entry, entries) for entry in entries))
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise SpecError(
                    f"{self} uses axis {axis!r} twice",
                    rule="a spec uses an axis at most once",
                    fix="keep it on one dim",
                )
        for dim, entry in enumerate(self.entries):
            axes = self.axes_of(dim)
            ordered = tuple(sorted(axes, key=lambda axis: (axis in ISLAND_AXES, axis == "dp")))
            if axes != ordered:
                raise SpecError(
                    f"{entry!r} in {self} has its axes out of order",
                    rule="axes of one dim cut stages first, then the workers of a stage, then inside a worker",
                    fix=f"write {ordered!r}",
                )

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes in the spec, in the order of the dims."""
        return tuple(axis for dim in range(len(self.entries)) for axis in self.axes_of(dim))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split `dim`, coarsest first; empty where the dim is whole."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    @property
    def splits_workers(self) -> bool:
        """True if the workers of a stage have different parts of the array: if some dim is split over dp."""
        return "dp" in self.axes

    def __repr__(self) -> str:
        return f"P({', '.join(map(_show, self.entries))})"


def check_spec(spec: P, shape: tuple[int, ...], mesh_shape: MeshShape | None = None, name: str = "array") -> None:
    """Check that `spec` can split an array of `shape`, on a mesh if one is given. Worker axes may divide unevenly.

    Raises:
        SpecError: more entries than dims, or a dim that the axes inside an island (tp, fsdp) do not divide. Names the
            array.
    """
    if len(spec.entries) > len(shape):
        raise SpecError(
            f"{spec} has {len(spec.entries)} entries for shape {shape} with {len(shape)} dims",
            rule="a spec has at most one entry per dim",
            where=name,
            exists=f"dims {', '.join(map(str, range(len(shape)))) or 'none: a scalar is whole everywhere, P()'}",
            fix=f"write {P(*spec.entries[: len(shape)])}",
        )
    for dim, length in enumerate(shape if mesh_shape else ()):
        sizes = {axis: mesh_shape.axis_size(axis) for axis in spec.axes_of(dim) if mesh_shape and axis in ISLAND_AXES}
        parts = prod(sizes.values())
        if length % parts:
            raise SpecError(
                f"{length} is no multiple of {parts}, the parts in which {spec} splits dim {dim} of shape {shape}",
                rule="axes inside an island divide their dim evenly",
                where=name,
                exists=f"mesh {mesh_shape}: {', '.join(f'{axis} of size {size}' for axis, size in sizes.items())}",
                fix=f"make dim {dim} a multiple of {parts}, split another dim, or choose sizes that divide {length}",
            )


def _canonical(entry: object, entries: tuple[object, ...]) -> Entry:
    axes = (entry,) if isinstance(entry, str) else () if entry is None else entry
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise SpecError(
            f"{entry!r} in P({', '.join(map(repr, entries))}) names no axes",
            rule="an entry of a spec is None, an axis, or a tuple of axes",
            exists=f"axes {', '.join(AXES)}",
            fix='write P("dp", None), or P(("pp", "dp"))',
        )
    for axis in axes:
        if axis not in AXES:
            close = get_close_matches(axis, AXES, n=1)
            raise SpecError(
                f"{axis!r} in P({', '.join(map(_show, entries))}) is no axis of a mesh",
                rule="a spec names axes of the mesh",
                exists=f"axes {', '.join(AXES)}",
                fix=f"write {close[0]!r}" if close else "use one of these, or None for a dim that stays whole",
            )
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _show(entry: object) -> str:
    if isinstance(entry, str):
        return f'"{entry}"'
    if isinstance(entry, tuple | list) and len(entry) > 1:
        return f"({', '.join(map(_show, entry))})"
    return f"({_show(entry[0])},)" if isinstance(entry, tuple | list) and entry else repr(entry)
