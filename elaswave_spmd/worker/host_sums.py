"""Adding up the sums of one host's workers before they go to other hosts (`runtime.collectives=group`, E8).

If the micro-batches of a whole host are a node of the reduction tree, a primary on another host gets one sum from the
host instead of one from each of its workers. The additions are still those of the tree. But some of them are made by a
worker of the sending host, the *collector* of that primary's pages, and not by the primary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from elaswave_spmd.determinism.reduction_tree import Node, maximal_nodes
from elaswave_spmd.scheduling.placement import Placement

NodesByWorker = Mapping[int, tuple[Node, ...]]


@dataclass(frozen=True)
class Hosts:
    """The workers of a stage by host.

    Args:
        members: for each host its workers, in the order of the stage.
        computing: the workers that have micro-batches.
    """

    members: tuple[tuple[int, ...], ...]
    computing: frozenset[int]

    @classmethod
    def of(cls, placement: Placement, stage: int) -> Hosts:
        """The hosts of a stage: two workers are on one host if all of their failure domains are the same."""
        members = placement.mesh.stages[stage]
        counts = zip(members, placement.microbatch_counts[stage], strict=True)
        computing = frozenset(rank for rank, count in counts if count)
        return cls(placement.mesh.topology.by_host(members), computing)

    def share_one(self, one: int, other: int) -> bool:
        """True if two workers are on the same host."""
        return self._host_of[one] == self._host_of[other]

    def collector(self, sender: int, primary: int) -> int | None:
        """The worker on the sender's host that adds up the sums of this host for a primary on another host.

        It has micro-batches, so that it is among the workers that are asked when a check finds a wrong sum (V8). None
        if no worker of the host has any. The primaries of all other hosts are shared evenly among a host's workers.
        """
        candidates = self._candidates[self._host_of[sender]]
        at = self._position[primary] % len(candidates) if candidates else 0
        return candidates[at] if candidates else None

    def added_up(self, nodes: NodesByWorker, num_microbatches: int) -> dict[int, tuple[Node, ...]]:
        """Worker -> the tree nodes of its host, after the sums of the host's workers are added as far as possible.

        Two sums can be added if they are the children of a node of the reduction tree.

        Args:
            nodes: worker -> the tree nodes that it can complete by itself.
        """
        found = dict[int, tuple[Node, ...]]()
        for members in self.members:
            mine = chain.from_iterable(range(*node) for rank in members for node in nodes[rank])
            found |= dict.fromkeys(members, maximal_nodes(mine, num_microbatches))
        return found

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: host for host, members in enumerate(self.members) for rank in members}

    @cached_property
    def _position(self) -> dict[int, int]:
        """Worker -> its place among all workers, host by host."""
        return {rank: at for at, rank in enumerate(chain.from_iterable(self.members))}

    @cached_property
    def _candidates(self) -> list[tuple[int, ...]]:
        return [tuple(rank for rank in members if rank in self.computing) for members in self.members]
