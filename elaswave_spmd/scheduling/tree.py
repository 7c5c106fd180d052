"""The canonical tree: the one order in which the contributions of a step's units are added.

Units are numbered 0..U-1 by slot. The tree over [lo, hi) splits at lo + k, k the largest power of two below hi - lo;
its value is left + right, elementwise, in fp32. Who computes a unit, and when its gradient arrives, may change; the
tree never does (protocol.md, "Canonical tree"). A node is written (lo, hi).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Node = tuple[int, int]


def split(node: Node) -> int:
    """Where a node of at least two units is split: lo + the largest power of two below its length."""
    lo, hi = node
    assert hi - lo >= 2, node
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def parent_and_sibling(node: Node, num_units: int) -> tuple[Node, Node] | None:
    """The node above and the other half of it; None for the root."""
    lo, hi = 0, num_units
    assert lo <= node[0] < node[1] <= hi, (node, num_units)
    if node == (lo, hi):
        return None
    while True:
        middle = split((lo, hi))
        left, right = (lo, middle), (middle, hi)
        if node == left:
            return (lo, hi), right
        if node == right:
            return (lo, hi), left
        lo, hi = left if node[1] <= middle else right
        assert lo <= node[0] and node[1] <= hi, f"{node} is not a node of the tree over {num_units} units"


def maximal_nodes(units: Iterable[int], num_units: int) -> tuple[Node, ...]:
    """The largest nodes whose units are all in `units`: what a worker can add up by itself, left to right."""
    have = set(units)

    def walk(node: Node) -> Iterator[Node]:
        lo, hi = node
        if have.issuperset(range(lo, hi)):
            yield node
        elif hi - lo > 1 and not have.isdisjoint(range(lo, hi)):
            middle = split(node)
            yield from walk((lo, middle))
            yield from walk((middle, hi))

    return tuple(walk((0, num_units)))


def max_open_nodes(order: Iterable[int], num_units: int) -> int:
    """How many partial sums a worker holds at most while it adds up its units in this order (the memory it needs)."""
    sums, most = Reduction(num_units), 0
    for unit in order:
        merges = sums.add((unit, unit + 1))
        # The new leaf is added straight into its sibling when that is open (the first level costs no buffer).
        most = max(most, len(sums.held) + max(0, len(merges) - 1))
    return most


@dataclass(frozen=True)
class Merge:
    """Add two halves of `into`. Addition is commutative in IEEE arithmetic, so either buffer may take the sum."""

    left: Node
    right: Node
    into: Node


@dataclass
class Reduction:
    """Which nodes of one tree are held, and what can be added next. Knows ids only; the caller has the values.

    Duplicates, and nodes inside a held node, are ignored: contributions are pure functions of their id.
    """

    num_units: int
    held: set[Node] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return (0, self.num_units) in self.held

    def covers(self, node: Node) -> bool:
        return any(lo <= node[0] and node[1] <= hi for lo, hi in self.held)

    def add(self, node: Node) -> list[Merge]:
        """Files a node; returns the additions that it makes possible, in order. Does nothing if already covered."""
        if self.covers(node):
            return []
        # A node that covers smaller held ones supersedes them: their values are part of it.
        self.held = {n for n in self.held if not (node[0] <= n[0] and n[1] <= node[1])}
        self.held.add(node)
        merges = []
        while above := parent_and_sibling(node, self.num_units):
            into, sibling = above
            if sibling not in self.held:
                break
            merges.append(Merge(min(node, sibling), max(node, sibling), into))
            self.held -= {node, sibling}
            self.held.add(into)
            node = into
        return merges
