"""The canonical tree's sums at a primary: one tree per use of the parameters of a run of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from elaswave_spmd.determinism.reduction_tree import Node, Reduction


@dataclass
class Tree:
    """One tree: which nodes are held, and their sums, `num_elements` in all. `owned` sums may be overwritten."""

    reduction: Reduction
    sums: dict[Node, Tensor] = field(default_factory=dict)
    owned: set[Node] = field(default_factory=set)
    num_elements: int = 0

    def add(self, node: Node, value: Tensor, *, owned: bool) -> None:
        """Files a node's sum and makes the additions that it allows; what is already covered is ignored."""
        added = self.reduction.add(node)
        if added is None:
            return
        for old in added.superseded:
            del self.sums[old]
        self.sums[node] = value
        if owned:
            self.owned.add(node)
        for merge in added.merges:
            left, right = self.sums.pop(merge.left), self.sums.pop(merge.right)
            self.sums[merge.into] = add_sums(left, right, merge.left in self.owned, merge.right in self.owned)
            self.owned -= {merge.left, merge.right}
            self.owned.add(merge.into)
        self.num_elements += value.numel() * (1 - len(added.superseded) - len(added.merges))


def add_sums(left: Tensor, right: Tensor, left_owned: bool, right_owned: bool) -> Tensor:
    """left + right, into one of them where it may be overwritten (addition commutes bit for bit)."""
    if left_owned:
        return left.add_(right)
    return right.add_(left) if right_owned else left + right


class PrimaryRun:
    """The trees of one run at its primary: one per use of the parameters (two for a tied one), in layer order."""

    def __init__(self, uses: Sequence[int], num_units: int) -> None:
        self._trees = {use: Tree(Reduction(num_units)) for use in sorted(uses)}
        self._root = (0, num_units)
        self.done = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums held."""
        return sum(4 * tree.num_elements for tree in self._trees.values())

    def add(self, use: int, node: Node, value: Tensor, *, owned: bool) -> Tensor | None:
        """The entry, once every use's tree has its root; None before, and again after."""
        self._trees[use].add(node, value, owned=owned)
        if self.done or not all(tree.reduction.done for tree in self._trees.values()):
            return None
        self.done = True
        first, *rest = self._trees.values()
        entry, owned = first.sums.pop(self._root), self._root in first.owned
        for tree in rest:
            entry = add_sums(entry, tree.sums.pop(self._root), owned, self._root in tree.owned)
            owned = True
        self._trees.clear()
        return entry

    def finish(self) -> None:
        """Its entry is known."""
        self.done = True
        self._trees.clear()

    def nodes_of(self, use: int) -> tuple[Node, ...]:
        return tuple(self._trees[use].sums) if use in self._trees else ()

    def sums(self) -> Iterator[tuple[int, Node, Tensor]]:
        """(use, node, sum) of all that is held."""
        for use, tree in self._trees.items():
            for node, value in tree.sums.items():
                yield use, node, value

    def part(self, start: int, stop: int) -> PrimaryRun:
        """The trees of elements [start, stop) alone, in the same memory."""
        found = PrimaryRun(tuple(self._trees), self._root[1])
        found.done = self.done
        for use, tree in self._trees.items():
            sums = {node: value[start:stop] for node, value in tree.sums.items()}
            size = sum(value.numel() for value in sums.values())
            found._trees[use] = Tree(Reduction(self._root[1], set(tree.reduction.held)), sums, set(tree.owned), size)
        return found
