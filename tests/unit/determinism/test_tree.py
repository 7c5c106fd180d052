"""The canonical tree: any assignment of micro-batches, any order of arrival, the same additions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.determinism.reduction_tree import (
    Reduction,
    is_node,
    max_open_nodes,
    maximal_nodes,
    sibling,
    split,
    way_up,
)

MICROBATCHES = st.integers(1, 70)


def tree_value(lo: int, hi: int) -> str:
    """The sum written out with its brackets: two trees are the same if these are."""
    if hi - lo == 1:
        return str(lo)
    middle = split((lo, hi))
    return f"({tree_value(lo, middle)}+{tree_value(middle, hi)})"


class Sums:
    """A reduction whose values are the bracketed sums themselves."""

    def __init__(self, num_microbatches: int) -> None:
        self.reduction, self.values = Reduction(num_microbatches), {}

    def add(self, node: tuple[int, int], value: str) -> None:
        added = self.reduction.add(node)
        if added is None:
            return
        for old in added.superseded:
            del self.values[old]
        self.values[node] = value
        for merge in added.merges:
            self.values[merge.into] = f"({self.values.pop(merge.left)}+{self.values.pop(merge.right)})"
        assert set(self.values) == self.reduction.held


def test_worked_example():
    assert tree_value(0, 10) == "((((0+1)+(2+3))+((4+5)+(6+7)))+(8+9))"
    assert maximal_nodes(range(4), 10) == ((0, 4),)
    assert maximal_nodes([4, 5, 6], 10) == ((4, 6), (6, 7))
    assert maximal_nodes([7, 8, 9], 10) == ((7, 8), (8, 10))


def nodes_below(lo: int, hi: int) -> set[tuple[int, int]]:
    if hi - lo == 1:
        return {(lo, hi)}
    middle = split((lo, hi))
    return {(lo, hi)} | nodes_below(lo, middle) | nodes_below(middle, hi)


@pytest.mark.parametrize("num_microbatches", range(1, 70))
def test_what_is_a_node(num_microbatches: int) -> None:
    around = range(-2, num_microbatches + 3)
    found = {(lo, hi) for lo in around for hi in around if is_node((lo, hi), num_microbatches)}
    assert found == nodes_below(0, num_microbatches)


@given(MICROBATCHES, st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_tree(num_microbatches: int, rng: random.Random):
    order = list(range(num_microbatches))
    rng.shuffle(order)
    sums = Sums(num_microbatches)
    for microbatch in order:
        sums.add((microbatch, microbatch + 1), str(microbatch))
        if rng.random() < 0.3:  # the same contribution twice
            again = rng.choice(order[: order.index(microbatch) + 1])
            sums.add((again, again + 1), "wrong")
    assert sums.reduction.done
    assert sums.values[0, num_microbatches] == tree_value(0, num_microbatches)


@given(MICROBATCHES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_assignment_gives_the_tree(num_microbatches: int, workers: int, rng: random.Random):
    owner = [rng.randrange(workers) for _ in range(num_microbatches)]
    nodes = [
        n
        for w in range(workers)
        for n in maximal_nodes([u for u in range(num_microbatches) if owner[u] == w], num_microbatches)
    ]
    assert sorted(u for lo, hi in nodes for u in range(lo, hi)) == list(range(num_microbatches))
    rng.shuffle(nodes)
    sums = Sums(num_microbatches)
    for node in nodes:
        sums.add(node, tree_value(*node))
    assert sums.values[0, num_microbatches] == tree_value(0, num_microbatches)


@given(MICROBATCHES, st.randoms(use_true_random=False))
def test_covering_nodes_supersede_and_inside_nodes_are_ignored(num_microbatches: int, rng: random.Random):
    """Salvage re-sends sums of other cuts: whatever mixture arrives, each micro-batch counts once."""
    nodes = []
    stack = [(0, num_microbatches)]
    while stack:
        node = stack.pop()
        nodes.append(node)
        if node[1] - node[0] > 1:
            middle = split(node)
            stack += [(node[0], middle), (middle, node[1])]
    picked = rng.sample(nodes, rng.randint(0, len(nodes)))
    picked += [(u, u + 1) for u in range(num_microbatches)]
    rng.shuffle(picked)
    sums = Sums(num_microbatches)
    for node in picked:
        sums.add(node, tree_value(*node))
    assert sums.values[0, num_microbatches] == tree_value(0, num_microbatches)


@given(st.integers(1, 70))
def test_the_way_up_inverts_split(num_microbatches: int):
    for lo in range(num_microbatches):
        way, node = way_up((lo, lo + 1), num_microbatches), (lo, lo + 1)
        assert sibling(node, num_microbatches) == (way.halves[0][0] if num_microbatches > 1 else None)
        for other, merge in way.halves:
            parent = merge.into
            assert [merge.left, merge.right] == [(parent[0], split(parent)), (split(parent), parent[1])]
            assert {merge.left, merge.right} == {node, other}
            node = parent
        assert node == (0, num_microbatches)
        assert set(way.nodes) == {(lo, lo + 1), *(merge.into for _, merge in way.halves)}


@pytest.mark.parametrize(("microbatches", "most"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 4)])
def test_open_nodes_grow_with_the_logarithm(microbatches: int, most: int):
    assert max_open_nodes(range(microbatches), microbatches) == most
