"""The canonical tree: the one order in which the contributions of a step's micro-batches are added.

Micro-batches are numbered 0..U-1 by slot. The tree over [lo, hi) splits at lo + k, k the largest power of two below hi
- lo; its value is left + right, elementwise, in fp32. Who computes a micro-batch, and when its gradient arrives, may
change; the tree never does (protocol.md, "Canonical tree"). A node is written (lo, hi).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Node = tuple[int, int]


def split(node: Node) -> int:
    """Where a node of at least two micro-batches is split: lo + the largest power of two below its length."""
    lo, hi = node
    assert hi - lo >= 2, node
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def path(node: Node, num_microbatches: int) -> list[Node]:
    """The nodes from the root down to `node`, both included."""
    at: Node = (0, num_microbatches)
    assert 0 <= node[0] < node[1] <= num_microbatches, (node, num_microbatches)
    found: list[Node] = [at]
    while at != node:
        middle = split(at)
        at = (at[0], middle) if node[1] <= middle else (middle, at[1])
        assert at[0] <= node[0] and node[1] <= at[1], (
            f"{node} is not a node of the tree over {num_microbatches} micro-batches"
        )
        found.append(at)
    return found


def sibling_in(parent: Node, half: Node) -> Node:
    """The other half of a parent."""
    middle = split(parent)
    return (middle, parent[1]) if half[0] == parent[0] else (parent[0], middle)


def parent_and_sibling(node: Node, num_microbatches: int) -> tuple[Node, Node] | None:
    """The node above and the other half of it; None for the root."""
    above = path(node, num_microbatches)
    return (above[-2], sibling_in(above[-2], node)) if len(above) > 1 else None


def maximal_nodes(microbatches: Iterable[int], num_microbatches: int) -> tuple[Node, ...]:
    """The largest nodes whose micro-batches are all in `microbatches`: what a worker can add up by itself, left to
    right.
    """
    have = set(microbatches)

    def walk(node: Node) -> Iterator[Node]:
        lo, hi = node
        if have.issuperset(range(lo, hi)):
            yield node
        elif hi - lo > 1 and not have.isdisjoint(range(lo, hi)):
            middle = split(node)
            yield from walk((lo, middle))
            yield from walk((middle, hi))

    return tuple(walk((0, num_microbatches)))


def max_open_nodes(order: Iterable[int], num_microbatches: int) -> int:
    """How many partial sums a worker holds at most while it adds up its micro-batches in this order (the memory it
    needs).
    """
    sums, most = Reduction(num_microbatches), 0
    for microbatch in order:
        added = sums.add((microbatch, microbatch + 1))
        # The new leaf is added straight into its sibling when that is open (the first level costs no buffer).
        most = max(most, len(sums.held) + max(0, len(added.merges) - 1 if added else 0))
    return most


@dataclass(frozen=True)
class Merge:
    """Add two halves of `into`. Addition is commutative in IEEE arithmetic, so either buffer may take the sum."""

    left: Node
    right: Node
    into: Node


@dataclass(frozen=True)
class Added:
    """What follows from a new node: forget the sums inside it, then make these additions in order."""

    superseded: tuple[Node, ...]
    merges: tuple[Merge, ...]


@dataclass
class Reduction:
    """Which nodes of one tree are held, and what can be added next. Knows ids only; the caller has the values.

    Duplicates, and nodes inside a held node, are ignored: contributions are pure functions of their id.
    """

    num_microbatches: int
    held: set[Node] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return (0, self.num_microbatches) in self.held

    def add(self, node: Node) -> Added | None:
        """Files a node. None, and nothing filed, if a held node covers it already. O(log num_microbatches) for a single
        micro-batch.

        Held nodes are disjoint: a node is covered exactly if one on its path from the root is held.
        """
        above = path(node, self.num_microbatches)
        if not self.held.isdisjoint(above):
            return None
        superseded: tuple[Node, ...] = ()
        if node[1] - node[0] > 1:
            superseded = tuple(sorted(n for n in self.held if node[0] <= n[0] and n[1] <= node[1]))
            self.held.difference_update(superseded)
        self.held.add(node)
        merges = []
        for parent in reversed(above[:-1]):
            sibling = sibling_in(parent, node)
            if sibling not in self.held:
                break
            merges.append(Merge(min(node, sibling), max(node, sibling), parent))
            self.held -= {node, sibling}
            self.held.add(parent)
            node = parent
        return Added(superseded, tuple(merges))
