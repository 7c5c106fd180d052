"""The shape of a mesh: names and sizes of its axes, without members. One meaning is one value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from operator import index

from elaswave_spmd.errors import MeshError

AXES = ("pp", "dp", "tp", "fsdp")
"""Every axis there is, outermost first."""

WORKER_AXES = ("pp", "dp")
"""Axes whose coordinates are workers: pp counts stages, dp the workers of one stage."""

ISLAND_AXES = ("tp", "fsdp")
"""Axes inside a worker: its local devices, one XLA program over all of them."""

_NAME_ORDER = ("dp", "pp", "tp", "fsdp")
_GRAMMAR = "'single', or axes with sizes joined by '_': dp3, pp4, dp2_pp2, dp2_tp4; 'stages3-2' for ragged stages"


def check_axis_name(name: object) -> str:
    """Return `name` if it is an axis; else raise MeshError that lists the axes."""
    if name in AXES:
        return str(name)
    raise MeshError(f"{name!r} is no axis of a mesh", exists=", ".join(AXES), fix="use one of these names")


def _size(value: object, what: str) -> int:
    try:
        size = index(value)  # type: ignore[arg-type]
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise MeshError(
            f"{what} is {value!r}",
            rule="a size is a whole number, 1 or more",
            fix="leave the axis out to not use it",
        )
    return size


@dataclass(frozen=True)
class Axis:
    """A named axis of a mesh. It says which ranks, and never owns a communicator.

    Raises:
        MeshError: the name is no axis, or the size is not a whole number of at least 1.
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        check_axis_name(self.name)
        object.__setattr__(self, "size", _size(self.size, f"The size of mesh axis {self.name!r}"))

    def __str__(self) -> str:
        return f"{self.name}{self.size}"


@dataclass(frozen=True, repr=False)
class MeshShape:
    """Names and sizes of the axes of a mesh; the members come with `Mesh`.

    Args:
        axes: the axes, in any order. An axis of size 1 says nothing and is dropped, so that `dp1_pp2 == pp2`.
        stages: number of workers of each stage where they differ, in place of `pp` and `dp`. Equal numbers become
            `pp` and `dp`, so that `of_stages((2, 2)) == parse("dp2_pp2")`: `stages` is None exactly when the shape is
            not ragged.

    Raises:
        MeshError: an axis twice; `stages` beside `pp` or `dp`, empty, or with a stage without workers.
    """

    axes: tuple[Axis, ...] = ()
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for axis in self.axes:
            if axis.name in sizes:
                raise MeshError(
                    f"mesh {'_'.join(map(str, self.axes))} names axis {axis.name} twice",
                    rule="a mesh names an axis at most once",
                    fix=f"keep one of {axis.name}{sizes[axis.name]} and {axis}",
                )
            sizes[axis.name] = axis.size
        stages = self.stages
        if stages is not None:
            stages = _check_stages(stages, sizes)
            # One meaning, one value: equal stages become pp and dp, so that equal shapes compare and hash as equal.
            if len(set(stages)) == 1:
                sizes |= {"pp": len(stages), "dp": stages[0]}
                stages = None
        object.__setattr__(self, "axes", tuple(Axis(name, sizes[name]) for name in AXES if sizes.get(name, 1) > 1))
        object.__setattr__(self, "stages", stages)

    @classmethod
    def of(cls, *, dp: int = 1, pp: int = 1, tp: int = 1, fsdp: int = 1) -> MeshShape:
        """The shape with these sizes: `MeshShape.of(dp=2, pp=2)`."""
        return cls((Axis("dp", dp), Axis("pp", pp), Axis("tp", tp), Axis("fsdp", fsdp)))

    @classmethod
    def of_stages(cls, stages: Iterable[int], *, tp: int = 1, fsdp: int = 1) -> MeshShape:
        """The shape with `stages[s]` workers in stage s: `MeshShape.of_stages((3, 2))`."""
        return cls((Axis("tp", tp), Axis("fsdp", fsdp)), tuple(stages))

    @classmethod
    def parse(cls, name: str) -> MeshShape:
        """The inverse of `name`: "single", "dp2_pp2", "dp3", "stages3-2". The axes may come in any order.

        Raises:
            MeshError: the name does not follow the grammar, has a size of 0, or an axis twice.
        """
        axes: list[Axis] = []
        stages: tuple[int, ...] | None = None
        for word in () if name == "single" else name.split("_"):
            if re.fullmatch(r"stages[0-9]+(x[0-9]+)?(-[0-9]+(x[0-9]+)?)*", word):
                if stages is not None:
                    raise MeshError(
                        f"mesh {name!r} names its stages twice",
                        rule="a mesh names its stages at most once",
                        fix="keep one list of stages",
                    )
                # `4x3` is short for three stages of four: a mesh of 16 equal stages but one keeps a readable name.
                runs = (run.partition("x") for run in word[len("stages") :].split("-"))
                stages = tuple(int(size) for size, _, times in runs for _ in range(int(times or 1)))
            elif found := re.fullmatch(rf"({'|'.join(AXES)})([0-9]+)", word):
                axes.append(Axis(found[1], int(found[2])))
            else:
                raise MeshError(
                    f"{word!r} in the mesh name {name!r} is no axis with a size",
                    rule="a mesh name is made of axes and sizes",
                    exists=f"axes {', '.join(AXES)}",
                    fix=f"write {_GRAMMAR}",
                )
        return cls(tuple(axes), stages)

    def axis_size(self, name: str) -> int:
        """Number of coordinates on axis `name`; 1 where the mesh lacks it.

        Raises:
            MeshError: no such axis; or "dp" of a ragged shape, which has one size per stage.
        """
        check_axis_name(name)
        if self.stages is not None and name == "pp":
            return len(self.stages)
        if self.stages is not None and name == "dp":
            raise MeshError(
                f"mesh {self.name} has several sizes of axis 'dp'",
                rule="axis 'dp' of ragged stages has one size per stage",
                fix="use stage_sizes",
            )
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    @property
    def num_stages(self) -> int:
        """Number of stages, the size of axis pp."""
        return self.axis_size("pp")

    @cached_property
    def stage_sizes(self) -> tuple[int, ...]:
        """Number of workers of each stage."""
        return self.stages or (self.axis_size("dp"),) * self.num_stages

    @cached_property
    def num_workers(self) -> int:
        """Number of workers of all stages."""
        return sum(self.stage_sizes)

    @property
    def island_size(self) -> int:
        """Number of local devices of each worker."""
        return prod(self.axis_size(name) for name in ISLAND_AXES)

    @property
    def name(self) -> str:
        """ "single", "dp2_pp2", "stages3-2", "stages3x4-2" (four of 3, one of 2), "dp2_tp4": what `parse` reads."""
        words = [f"{name}{size}" for name in _NAME_ORDER if (size := self._listed(name)) > 1]
        if self.stages is not None:
            runs = [(size, len(list(run))) for size, run in groupby(self.stages)]
            words.insert(0, "stages" + "-".join(f"{size}x{times}" if times > 1 else f"{size}" for size, times in runs))
        return "_".join(words) or "single"

    def _listed(self, name: str) -> int:
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"MeshShape.parse({self.name!r})"


def _check_stages(stages: Iterable[int], sizes: dict[str, int]) -> tuple[int, ...]:
    beside = [f"{name}{sizes[name]}" for name in WORKER_AXES if sizes.get(name, 1) > 1]
    if beside:
        raise MeshError(
            f"stages={list(stages)} is given beside {' and '.join(beside)}",
            rule="both say how many workers each stage has",
            fix="give either stages, or dp and pp",
        )
    checked = tuple(_size(size, "The number of workers of a stage") for size in stages)
    if not checked:
        raise MeshError(
            "stages=[] names no stage",
            rule="a mesh has at least one stage",
            fix="name the workers of each stage: [3, 2]",
        )
    return checked


def even_counts(total: int, parts: int) -> tuple[int, ...]:
    """`total` micro-batches over `parts` workers, as evenly as whole micro-batches allow; the first ones get one
    more.
    """
    base, extra = divmod(total, parts)
    return (base + 1,) * extra + (base,) * (parts - extra)
