"""Failure domains: which workers one broken host or rack would take together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from elaswave_spmd.errors import MeshError

Path = tuple[str, ...]
"""Domains of a rank, outermost first: ("rack0", "host3")."""


@dataclass(frozen=True)
class Topology:
    """The failure domains of each rank.

    Args:
        domains: (rank, path) pairs. Paths are compared from the front, so "host0" of two racks are two hosts; all
            have the same depth. Ranks that left the mesh may stay.

    Raises:
        MeshError: a rank twice, a negative rank, or paths that are empty or differ in depth.
    """

    domains: tuple[tuple[int, Path], ...]

    def __post_init__(self) -> None:
        pairs = tuple(sorted((int(rank), tuple(path)) for rank, path in self.domains))
        object.__setattr__(self, "domains", pairs)
        if len(self._path_of) != len(pairs) or (pairs and pairs[0][0] < 0):
            raise MeshError(
                f"a rank is below 0 or named twice among {[rank for rank, _ in pairs][:16]}",
                rule="a topology has one path for each rank, 0 or more",
            )
        depths = {len(path) for _, path in pairs}
        if len(depths) > 1 or 0 in depths:
            raise MeshError(
                f"failure domains have the depths {sorted(depths)}",
                rule="all ranks have failure domains of the same depth, at least one",
                fix="name the same levels for each rank, outermost first: ('rack0', 'host3')",
            )

    @classmethod
    def of(cls, domains: Mapping[int, Path]) -> Topology:
        """The topology of a mapping from rank to path."""
        return cls(tuple(domains.items()))

    @classmethod
    def single_host(cls, ranks: Iterable[int]) -> Topology:
        """All ranks on one host: nothing lies in another failure domain."""
        return cls(tuple((rank, ("host0",)) for rank in ranks))

    @cached_property
    def _path_of(self) -> dict[int, Path]:
        return dict(self.domains)

    def __contains__(self, rank: object) -> bool:
        return rank in self._path_of

    def path(self, rank: int) -> Path:
        """The domains of a rank, outermost first.

        Raises:
            MeshError: the topology does not know the rank.
        """
        if rank not in self._path_of:
            raise MeshError(
                f"the failure domains of rank {rank} are not known",
                exists=f"{len(self.domains)} ranks, the first {[known for known, _ in self.domains[:8]]}",
                fix="add it by Topology.with_ranks",
            )
        return self._path_of[rank]

    def paths(self, ranks: Collection[int]) -> list[Path]:
        """`path` of each of many ranks, in their order.

        Raises:
            MeshError: as `path`, of the first rank that the topology does not know.
        """
        paths = [*map(self._path_of.get, ranks)]
        return [self.path(rank) if path is None else path for rank, path in zip(ranks, paths, strict=True)]

    def by_host(self, ranks: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host: those with the same domains, in the order in which hosts and ranks come.

        Raises:
            MeshError: as `paths`.
        """
        found: dict[Path, list[int]] = {}
        for rank, path in zip(ranks, self.paths(ranks), strict=True):
            found.setdefault(path, []).append(rank)
        return tuple(map(tuple, found.values()))

    def distance(self, a: int, b: int) -> int:
        """The levels to climb to a common domain: 0 within a host, 1 for two hosts of one rack, 2 for two racks."""
        path_a, path_b = self.path(a), self.path(b)
        shared = next(
            (level for level, pair in enumerate(zip(path_a, path_b, strict=True)) if pair[0] != pair[1]), len(path_a)
        )
        return len(path_a) - shared

    def with_ranks(self, ranks: Iterable[int], domains: Mapping[int, Path] | None = None) -> Topology:
        """This topology with the failure domains of `ranks` added.

        Args:
            ranks: the ranks. Those that the topology knows already keep their domains unless `domains` has them.
            domains: rank -> path. A new rank that is not in it gets the only path of this topology.

        Raises:
            MeshError: a new rank has no path in `domains`, and the topology has several.
        """
        merged = dict(self._path_of)
        paths = set(merged.values())
        for rank in ranks:
            if rank in merged and rank not in (domains or {}):
                continue
            if domains and rank in domains:
                merged[rank] = tuple(domains[rank])
            # On one host there is only one place where a newcomer can be.
            elif len(paths) == 1:
                merged[rank] = next(iter(paths))
            else:
                raise MeshError(
                    f"the failure domains of new rank {rank} are not known",
                    rule="a new rank needs failure domains where there are several",
                    exists=f"{len(paths)} domains, such as {sorted(paths)[:3]}",
                    fix=f"pass domains={{{rank}: (..., 'host')}}",
                )
        return Topology.of(merged)
