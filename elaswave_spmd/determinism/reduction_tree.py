"""The reduction tree: the one order in which the gradients of a step's micro-batches are added.

Floating-point addition is not associative, so equal bits need a fixed order. Micro-batches are numbered 0 .. U-1. The
tree node (lo, hi) stands for the sum of micro-batches lo .. hi-1. It splits at lo + k, where k is the largest power of
two below hi - lo, and its value is left + right, elementwise, in fp32. The tree depends on U alone: which worker
computes a micro-batch, and when its gradient arrives, may change; the tree never does (docs/protocol.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

Node = tuple[int, int]

_NODES_KEPT = 1 << 14  # nodes whose way up is cached; meant for all micro-batches and sums that a worker handles


def split(node: Node) -> int:
    """The micro-batch at which a node splits: lo + the largest power of two below its length, which is at least 2."""
    lo, hi = node
    assert hi - lo >= 2, node
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def path(node: Node, num_microbatches: int) -> list[Node]:
    """The nodes from the root down to `node`, both included."""
    assert is_node(node, num_microbatches), f"{node} is not a node of the tree over {num_microbatches} micro-batches"
    found: list[Node] = [(0, num_microbatches)]
    while (at := found[-1]) != node:
        middle = split(at)
        found.append((at[0], middle) if node[1] <= middle else (middle, at[1]))
    return found


def is_node(node: Node, num_microbatches: int) -> bool:
    """True if (lo, hi) is a node of the tree over this number of micro-batches."""
    lo, hi = node
    if not 0 <= lo < hi <= num_microbatches:
        return False
    # Let `whole` be the least power of two that is not below the length of the node. The node begins at a multiple of
    # it, as all splits above the node were at multiples of this power or of larger ones. A left half has exactly
    # `whole` micro-batches. A right half is shorter only if it ends with the last micro-batch.
    whole = 1 << (hi - lo - 1).bit_length()
    return lo % whole == 0 and (hi - lo == whole or hi == num_microbatches)


def sibling_in(parent: Node, half: Node) -> Node:
    """The other half of `parent`, one half of which is `half`."""
    middle = split(parent)
    return (middle, parent[1]) if half[0] == parent[0] else (parent[0], middle)


@dataclass(frozen=True, slots=True)
class Merge:
    """Add the two halves of `into`. IEEE addition is commutative, so the sum may be stored in either buffer.

    The sum of two NaN is a NaN, and which one may depend on the buffer: whoever compares sums takes them for the same.
    """

    left: Node
    right: Node
    into: Node


@dataclass(frozen=True, slots=True)
class WayUp:
    """The way from a node up to the root: the nodes that contain it, and the additions on the way.

    Args:
        nodes: the node itself and all nodes above it, each of which covers it.
        halves: for each level, from the node up: (the other half, the addition of both halves).
    """

    nodes: tuple[Node, ...]
    halves: tuple[tuple[Node, Merge], ...]


@lru_cache(maxsize=_NODES_KEPT)
def way_up(node: Node, num_microbatches: int) -> WayUp:
    """The way from a node up to the root. Cached, as a worker needs it for each layer of each micro-batch."""
    if len(above := path(node, num_microbatches)) == 1:
        return WayUp((node,), ())
    parent = above[-2]
    other, rest = sibling_in(parent, node), way_up(parent, num_microbatches)
    merge = Merge(min(node, other), max(node, other), parent)
    return WayUp((node, *rest.nodes), ((other, merge), *rest.halves))


def sibling(node: Node, num_microbatches: int) -> Node | None:
    """The other half of the node's parent; None for the root."""
    halves = way_up(node, num_microbatches).halves
    return halves[0][0] if halves else None


def maximal_nodes(microbatches: Iterable[int], num_microbatches: int) -> tuple[Node, ...]:
    """The largest nodes whose micro-batches are all in `microbatches`, left to right.

    A worker with these micro-batches can compute the sums of these nodes by itself, so it sends these sums.
    """
    have = sorted(set(microbatches))

    def walk(node: Node) -> Iterator[Node]:
        lo, hi = node
        number = bisect_left(have, hi) - bisect_left(have, lo)  # how many of the node's micro-batches are in `have`
        if number == hi - lo:
            yield node
        elif number:
            middle = split(node)
            yield from walk((lo, middle))
            yield from walk((middle, hi))

    return tuple(walk((0, num_microbatches)))


def max_open_nodes(order: Iterable[int], num_microbatches: int) -> int:
    """The most partial sums that a worker holds while it adds up its micro-batches in this order.

    This number times the size of the worker's gradients is the memory that the reduction needs. Benchmarks compare it
    with measurements.
    """
    sums, most = Reduction(num_microbatches), 0
    for microbatch in order:
        added = sums.add((microbatch, microbatch + 1))
        # If the sibling of a new leaf is held, the leaf is added directly into it. So a merge of two leaves needs no
        # buffer of its own.
        most = max(most, len(sums.held) + max(0, len(added.merges) - 1 if added else 0))
    return most


@dataclass(frozen=True)
class Added:
    """What the caller has to do for a new node: drop the sums of the `superseded` nodes inside it, then carry out the
    additions in `merges` in this order."""

    superseded: tuple[Node, ...]
    merges: tuple[Merge, ...]


@dataclass
class Reduction:
    """The nodes of one tree whose sums a worker has. It finds the additions that are possible.

    It handles only the ids of nodes; the caller keeps the values. Duplicates, and nodes inside a held node, are
    ignored: the sum of a node is a pure function of its id, so a second copy has the same bits. Reconfigurations rely
    on this, because afterwards a sum may arrive from two workers.
    """

    num_microbatches: int
    held: set[Node] = field(default_factory=set)

    @property
    def done(self) -> bool:
        """True once the root, the sum over all micro-batches, is held."""
        return (0, self.num_microbatches) in self.held

    def add(self, node: Node) -> Added | None:
        """Add a node. Returns None and changes nothing if a held node covers it already.

        Held nodes are disjoint, so a node is covered if and only if a node on its path from the root is held. For a
        single micro-batch this takes O(log num_microbatches).
        """
        way, held = way_up(node, self.num_microbatches), self.held
        if not held.isdisjoint(way.nodes):
            return None
        superseded: tuple[Node, ...] = ()
        if node[1] - node[0] > 1:
            superseded = tuple(self._held_inside(node))
            held.difference_update(superseded)
        merges = []
        for other, merge in way.halves:
            if other not in held:
                break
            held.remove(other)
            merges.append(merge)
            node = merge.into
        held.add(node)
        return Added(superseded, tuple(merges))

    def _held_inside(self, node: Node) -> Iterator[Node]:
        """The held nodes below a node, left to right."""
        if len(self.held) <= node[1] - node[0]:  # looking at all held nodes takes less time than going down the tree
            yield from sorted(n for n in self.held if node[0] <= n[0] and n[1] <= node[1])
            return
        middle = split(node)
        for half in ((node[0], middle), (middle, node[1])):
            if half in self.held:
                yield half
            elif half[1] - half[0] > 1:
                yield from self._held_inside(half)
