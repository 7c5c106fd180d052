"""A mesh: a shape bound to its members at an epoch. Stages may be ragged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import index

from elaswave_spmd.errors import MeshError
from elaswave_spmd.mesh.shape import MeshShape
from elaswave_spmd.mesh.topology import Path, Topology

_SHOWN = 12


@dataclass(frozen=True)
class Mesh:
    """Which rank stands at which coordinate (stage, position) while one mesh epoch lasts.

    Args:
        shape: the shape; `shape.stage_sizes` are the lengths of `stages`.
        stages: the ranks of each stage, in the order of their positions.
        epoch: mesh epoch; every change of members makes the next one.
        topology: failure domains of at least the members. Everyone on one host by default.

    Raises:
        MeshError: members and shape differ, a rank twice or negative, or a member without failure domains.

    Lookups are O(1) and construction is linear, at 100,000 workers too.
    """

    shape: MeshShape
    stages: tuple[tuple[int, ...], ...]
    epoch: int = 0
    topology: Topology = Topology(())

    def __post_init__(self) -> None:
        stages = tuple(tuple(map(index, ranks)) for ranks in self.stages)
        object.__setattr__(self, "stages", stages)
        if tuple(map(len, stages)) != self.shape.stage_sizes:
            raise MeshError(
                f"a mesh has stages of {format_ints(map(len, stages))} workers on shape {self.shape}",
                rule="members and shape of a mesh agree",
                exists=f"stages of {format_ints(self.shape.stage_sizes)} workers",
                fix="take the shape from MeshShape.of_stages, or use Mesh.with_stages",
            )
        if self.epoch < 0:
            raise MeshError(f"mesh epoch {self.epoch} is below 0", rule="mesh epochs count from 0")
        if len(self._coordinate_of) != len(self.members) or min(self.members) < 0:
            seen: set[int] = set()
            wrong = [rank for rank in self.members if rank < 0 or rank in seen or seen.add(rank)]
            raise MeshError(
                f"rank {format_ints(wrong)} is below 0 or stands twice in stages {self._shown()}",
                rule="a rank is 0 or more and stands at one coordinate",
                fix="give every worker a rank of its own",
            )
        # Without a topology all workers are on one host: mirrors then do without other failure domains.
        if not self.topology.domains:
            object.__setattr__(self, "topology", Topology.single_host(self.members))
        self.topology.paths(self.members)  # raises of a member that has none

    @classmethod
    def initial(cls, shape: MeshShape, topology: Topology | None = None) -> Mesh:
        """Epoch 0: ranks 0, 1, ... assigned stage by stage, so that neighbours in rank are neighbours in a stage."""
        stages, first = [], 0
        for size in shape.stage_sizes:
            stages.append(tuple(range(first, first + size)))
            first += size
        return cls(shape, tuple(stages), 0, topology or Topology(()))

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All ranks, stage by stage: member i is row i of every per-worker array."""
        return tuple(rank for ranks in self.stages for rank in ranks)

    @property
    def num_workers(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinate_of

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(stage, position) of a member.

        Raises:
            MeshError: the rank is no member.
        """
        if rank not in self._coordinate_of:
            raise MeshError(
                f"rank {rank} is no member of the mesh",
                rule="only members of a mesh have a coordinate",
                where=f"mesh epoch {self.epoch}",
                exists=f"ranks {format_ints(sorted(self.members))}",
                fix="ask the mesh of an epoch in which it was a member, or test `rank in mesh` first",
            )
        return self._coordinate_of[rank]

    def stage_of(self, rank: int) -> int:
        """The stage of a member."""
        return self.coordinate(rank)[0]

    def with_stages(
        self, stages: Iterable[Iterable[int]], domains: Mapping[int, Path] | None = None, *, epoch: int | None = None
    ) -> Mesh:
        """A later epoch, the next one by default, with these members.

        Args:
            domains: of newcomers; needed where there are several domains.
        """
        ranks = tuple(tuple(map(index, stage)) for stage in stages)
        tp, fsdp = self.shape.axis_size("tp"), self.shape.axis_size("fsdp")
        shape = MeshShape.of_stages(map(len, ranks), tp=tp, fsdp=fsdp)
        members = [rank for stage in ranks for rank in stage]
        # The same object as long as nobody is new: a topology of 100,000 ranks is not copied at every epoch.
        known = domains is None and all(rank in self.topology for rank in members)
        topology = self.topology if known else self.topology.with_ranks(members, domains)
        return Mesh(shape, ranks, self.epoch + 1 if epoch is None else epoch, topology)

    @cached_property
    def _coordinate_of(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (stage, position) for stage, ranks in enumerate(self.stages) for position, rank in enumerate(ranks)
        }

    def _shown(self) -> str:
        return " | ".join(map(format_ints, self.stages[:_SHOWN])) + (" | ..." if self.num_stages > _SHOWN else "")

    def __str__(self) -> str:
        return f"mesh {self.shape}, epoch {self.epoch}, {self.num_workers} workers: {self._shown()}"


def named_workers(ranks: Collection[int]) -> str:
    """Workers in words, all of them: "worker 2", "workers 2, 3"."""
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def shortened_workers(ranks: Collection[int]) -> str:
    """Workers in words, where they may be many: "worker 2", "workers 0-3, 7, 9"."""
    return f"worker{'s' * (len(ranks) > 1)} {shortened_ranks(ranks)}"


def shortened_ranks(ranks: Iterable[int]) -> str:
    """The ranks of `shortened_workers` alone: "0-3, 7, 9"."""
    return format_ints(ranks).replace(" ", ", ")


def format_ints(values: Iterable[int]) -> str:
    """Whole numbers with their runs shortened and a long tail left out: "0-3 7 9-11"."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        elif len(runs) == _SHOWN:
            return " ".join(map(_format_run, runs)) + " ..."
        else:
            runs.append([value, value])
    return " ".join(map(_format_run, runs))


def _format_run(run: list[int]) -> str:
    first, last = run
    return str(first) if first == last else f"{first}{'-' if last > first + 1 else ' '}{last}"
