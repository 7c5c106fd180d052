"""Replica maps as values: promotion, learning, adoption, what a set of losses loses, and the way over the wire."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape, Topology
from elaswave_spmd.sharding import P
from elaswave_spmd.sharding.layout import LayerUse, ParameterInfo, lay_out
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import (
    PageIndex,
    ReplicaSet,
    adopt,
    all_replica_sets,
    disown,
    dispensable,
    from_rows,
    joined,
    promote,
    to_rows,
    unsurvived,
    unsurvived_text,
    with_learners,
)
from elaswave_spmd.sharding.state_sharding import StateSharding
from tests.unit.sharding.replica_counts import pages_held, primary_pages


def test_a_replica_set_and_its_receivers():
    replica_set = ReplicaSet(3, 4, 9, 7, frozenset({7, 5, 6}), frozenset({1, 9}))
    assert (replica_set.key, replica_set.num_pages, replica_set.mirrors, replica_set.receivers) == (
        (3, 4, 9),
        5,
        (5, 6),
        (1, 5, 6, 9),
    )
    assert str(replica_set) == "layer 3 pages [4, 9): 7 mirrors [5, 6] learners [1, 9]"
    for wrong in ((3, 4, 4, 7, frozenset({7})), (3, 4, 5, 7, frozenset({6}))):
        with pytest.raises(AssertionError):
            ReplicaSet(*wrong)
    with pytest.raises(AssertionError):
        ReplicaSet(3, 4, 5, 7, frozenset({7}), frozenset({7}))


def test_promotion_names_what_is_lost_and_leaves_learners_alone():
    a, b = ReplicaSet(0, 0, 4, 1, frozenset({1, 2}), frozenset({3, 4})), ReplicaSet(0, 4, 5, 2, frozenset({2}))
    promoted, dead = promote({0: (a, b), 1: ()}, [2, 3])
    assert promoted == {0: (ReplicaSet(0, 0, 4, 1, frozenset({1}), frozenset({4})),), 1: ()} and dead == (b,)
    promoted, dead = promote({0: (a, b)}, [1, 2])
    assert promoted == {0: ()} and dead == (a, b)


def test_promotion_takes_a_choice_back_that_made_loads_uneven():
    """1 is chosen for the first range, which only 2 could have instead; then one of the three others has to go to 1."""
    two, three = frozenset({1, 2, 9}), frozenset({1, 3, 4, 9})
    ranges = [ReplicaSet(0, 0, 2, 9, two), *(ReplicaSet(0, 2 + 3 * i, 5 + 3 * i, 9, three) for i in range(3))]
    promoted, dead = promote({0: tuple(ranges)}, {9})
    assert primary_pages(promoted) == {1: 3, 2: 2, 3: 3, 4: 3} and not dead
    assert [pages_held(promoted, rank) for rank in (1, 2, 4, 9)] == [11, 2, 9, 0]


def test_a_target_is_adopted_only_with_all_its_state():
    a = {0: (ReplicaSet(0, 0, 2, 1, frozenset({1})),)}
    b = {0: (ReplicaSet(0, 0, 2, 2, frozenset({1, 2})),)}
    assert adopt(with_learners(a, b), b) == b
    with pytest.raises(AssertionError):
        adopt(a, b)
    halves = {0: (ReplicaSet(0, 0, 1, 1, frozenset({1})), ReplicaSet(0, 1, 2, 1, frozenset({1})))}
    with pytest.raises(AssertionError):
        with_learners(halves, a)


def test_ranges_are_joined_where_they_have_the_same_replicas_and_no_block_begins():
    trained, frozen = ParameterInfo("a.v", (320,), True), ParameterInfo("a.w", (192,), True, frozen=True)
    layout = lay_out([LayerUse("a", (trained, frozen))], page_size=64)
    assert [block.first_page for block in layout.layers[0].state_blocks] == [0, 5]
    here, there = frozenset({1, 2}), frozenset({2, 3})
    rows = [(0, 2, 1, here), (2, 3, 1, here), (3, 4, 2, here), (4, 5, 2, there), (5, 6, 2, there), (6, 8, 2, there)]
    ranges = tuple(ReplicaSet(0, *row) for row in rows)
    found = joined({0: ranges}, layout)
    assert [(pages.key[1:], pages.primary, pages.replicas) for pages in found[0]] == [
        ((0, 3), 1, here),
        ((3, 4), 2, here),
        ((4, 5), 2, there),
        ((5, 8), 2, there),
    ]
    assert joined(found, layout)[0] is found[0], "nothing is left to join"
    learning = (ReplicaSet(0, 0, 2, 1, here, frozenset({7})), ReplicaSet(0, 2, 3, 1, here), *ranges[2:])
    assert [pages.key for pages in joined({0: learning}, layout)[0]] == [*(p.key for p in ranges[:4]), (0, 5, 8)]


@given(st.data())
def test_the_ranges_that_have_all_of_a_range_are_found_whatever_was_cut_and_joined(data: st.DataObject):
    cuts = st.lists(st.integers(1, 19), unique=True, max_size=6).map(lambda inside: [0, *sorted(inside), 20])
    ranges = [(1, a, b) for a, b in itertools.pairwise(data.draw(cuts)) if data.draw(st.integers(0, 4))]
    first = data.draw(st.integers(0, 19))
    pages = (1, first, data.draw(st.integers(first + 1, 20)))
    found = PageIndex(data.draw(st.permutations([*ranges, (0, 0, 20), (2, 0, 20)]))).covering(pages)
    here, wanted = {page for _, a, b in ranges for page in range(a, b)}, set(range(*pages[1:]))
    if wanted <= here:
        assert list(found) == [key for key in ranges if wanted.intersection(range(*key[1:]))]
    else:
        assert found == ()


def test_whoever_gives_up_a_part_of_a_range_gives_up_the_range():
    """A worker that has not entered the mesh epoch which joined page ranges names those of before."""
    held = frozenset({1, 2})
    ranges = (ReplicaSet(0, 0, 4, 1, held), ReplicaSet(0, 4, 6, 1, held), ReplicaSet(0, 6, 9, 1, held))
    found, alone = disown({0: ranges}, 1, [(0, 1, 2), (0, 4, 6)])
    assert [(pages.primary, sorted(pages.replicas)) for pages in found[0]] == [(2, [2]), (2, [2]), (1, [1, 2])]
    assert alone == ()


def test_unsurvived_with_replicas_of_any_number():
    ranges = [frozenset({0}), frozenset({1, 2}), frozenset({3, 4, 5}), frozenset({1, 3, 9})]
    replicas = {0: tuple(ReplicaSet(0, i, i + 1, min(held), held) for i, held in enumerate(ranges))}
    for losses in (1, 2, 3, 4):
        sets = list(itertools.combinations(range(7), losses))
        bad = sum(any(held <= set(lost) for held in ranges) for lost in sets)
        assert unsurvived(replicas, range(7), losses) == (bad, len(sets))
    assert unsurvived_text(replicas, range(7), 1) == "1 of 7 single losses lose some page"
    assert unsurvived_text(replicas, range(7), 3).endswith("of 35 sets of 3 simultaneous losses lose some page")


def test_rows_share_sets_and_keep_empty_layers():
    held = frozenset({1, 2})
    replicas = {
        0: (),
        1: (ReplicaSet(1, 0, 2, 1, held), ReplicaSet(1, 2, 3, 2, held, frozenset({5}))),
        2: (ReplicaSet(2, 0, 1, 2, held),),
    }
    rows = to_rows(replicas)
    assert rows[1] == (1, 2, 3, 2, (1,), (5,))
    found = from_rows(rows)
    assert found == replicas and len({id(replica_set.replicas) for replica_set in all_replica_sets(found)}) == 1
    assert from_rows(()) == {}


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 2, 2), (0, 0, 1, 1, 2, 2)])
def test_where_hosts_allow_it_no_mirror_lies_on_its_primarys_host(hosts: tuple[int, ...]) -> None:
    """Also with the default width of copysets, which would reach back to the primary's own host."""
    topology = Topology.of({rank: (f"host{host}",) for rank, host in enumerate(hosts)})
    layout = lay_out(
        [LayerUse("a", (ParameterInfo("a.w", (64 * 64,)),)), LayerUse("b", (ParameterInfo("b.w", (999,)),))]
    )
    stages = (tuple(range(len(hosts))),)
    mesh = Mesh(MeshShape.of_stages(map(len, stages)), stages, 0, topology)
    replicas = place_replicas(layout, StateSharding(mesh, (0, 2), P("dp"), mirror_count=1))
    for replica_set in (replica_set for ranges in replicas.values() for replica_set in ranges):
        assert not any(topology.distance(replica_set.primary, mirror) == 0 for mirror in replica_set.mirrors), (
            replica_set
        )


@pytest.mark.parametrize(
    ("hosts", "count"), [((4, 4, 4, 4), 2), ((4, 4, 4), 2), ((2, 2, 2, 2, 2), 3), ((3, 4, 2, 4), 2)]
)
@pytest.mark.parametrize("scatter", [0, 2, 6])
def test_where_hosts_allow_it_no_two_mirrors_of_a_page_lie_on_one_host(
    hosts: tuple[int, ...], count: int, scatter: int
) -> None:
    """So a page outlives as many hosts as it has mirrors, and each worker mirrors as much as the others do."""
    numbers = [host for host, size in enumerate(hosts) for _ in range(size)]
    topology = Topology.of({rank: (f"host{host}",) for rank, host in enumerate(numbers)})
    layout = lay_out([LayerUse(name, (ParameterInfo(f"{name}.w", (64 * 999,)),)) for name in "ab"])
    stages = (tuple(range(len(numbers))),)
    mesh = Mesh(MeshShape.of_stages(map(len, stages)), stages, 0, topology)
    replicas = place_replicas(layout, StateSharding(mesh, (0, 2), P("dp"), mirror_count=count, scatter=scatter))
    for pages in all_replica_sets(replicas):
        assert len({numbers[rank] for rank in pages.replicas}) == count + 1, pages
    held = [pages_held(replicas, rank) for rank in range(len(numbers))]
    assert max(held) - min(held) <= 2 * (count + 1)


@given(
    st.lists(st.frozensets(st.integers(0, 7), min_size=1, max_size=4), max_size=8),
    st.frozensets(st.integers(0, 7), max_size=3),
    st.lists(st.integers(0, 9), max_size=8),
)
def test_who_can_be_removed_leaves_each_page_a_replica(
    sets: list[frozenset[int]], gone: frozenset[int], leaving: list[int]
) -> None:
    """Held to the definition: taken in turn, whoever is not the last replica of a page that still has one."""
    replicas = {0: tuple(ReplicaSet(0, i, i + 1, min(held), held) for i, held in enumerate(sets))}
    wanted: list[int] = []
    for rank in dict.fromkeys(leaving):
        away = {*gone, *wanted}
        if all(held <= away or not held <= away | {rank} for held in sets):
            wanted.append(rank)
    assert dispensable(replicas, gone, leaving) == tuple(wanted)
