"""The next mesh: properties of `next_stages` over any mesh and any event, and its choices by example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.recovery.reconfiguration import next_stages
from elaswave_spmd.sharding.replicas import ReplicaSet, graduate
from elaswave_spmd.sharding.state_sharding import Stages


@st.composite
def events(draw: st.DrawFn) -> tuple[Stages, frozenset[int], tuple[int, ...], int]:
    """(stages, who is gone, who is new, stages wanted): ragged stages, some of them given up before."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    ranks = draw(st.permutations(range(100)))
    stages, first = [], 0
    for size in sizes:
        stages.append(tuple(ranks[first : first + size]))
        first += size
    members = ranks[:first]
    gone = draw(st.frozensets(st.sampled_from(members), max_size=len(members)))
    newcomers = tuple(ranks[first : first + draw(st.integers(0, 4))])
    return tuple(stages), gone, newcomers, len(sizes) + draw(st.integers(0, 2))


def flat(stages: Stages) -> list[int]:
    return [rank for members in stages for rank in members]


@given(events())
def test_everybody_who_is_left_or_new_has_one_place_and_nobody_else(event) -> None:
    stages, gone, newcomers, wanted = event
    assert sorted(flat(next_stages(stages, gone, newcomers, wanted))) == sorted({*flat(stages), *newcomers} - gone)


@given(events())
def test_no_stage_is_empty_and_there_are_as_many_as_wanted_and_possible(event) -> None:
    stages, gone, newcomers, wanted = event
    found = next_stages(stages, gone, newcomers, wanted)
    assert all(found) and len(found) == min(wanted, len(flat(found)))


@given(events())
def test_nothing_moves_where_nothing_has_to(event) -> None:
    """Whoever changes stages has other layers to fetch: only a stage without anybody takes a worker from another."""
    stages, gone, newcomers, _ = event
    found = next_stages(stages, gone, newcomers, len(stages))
    emptied = sum(gone >= set(members) for members in stages)
    if emptied:
        return
    for before, after in zip(stages, found, strict=True):
        kept = tuple(rank for rank in before if rank not in gone)
        assert after[: len(kept)] == kept and set(after[len(kept) :]) <= set(newcomers), "positions stay, too"


@given(events())
def test_at_most_one_worker_moves_for_each_stage_that_lost_all(event) -> None:
    stages, gone, _, _ = event
    found = next_stages(stages, gone, (), len(stages))
    if len(found) < len(stages):
        return  # a stage was given up: the others' layers are cut anew anyway
    emptied = sum(gone >= set(members) for members in stages)
    before = {rank: stage for stage, members in enumerate(stages) for rank in members}
    after = {rank: stage for stage, members in enumerate(found) for rank in members}
    assert sum(before[rank] != after[rank] for rank in after) <= emptied


@given(events())
def test_newcomers_make_stages_more_even_or_fill_empty_ones(event) -> None:
    stages, _, newcomers, _ = event
    found = next_stages(stages, (), newcomers, len(stages))
    smallest = min(map(len, found))
    for members in found:
        last = members[-1]
        assert last not in newcomers or len(members) <= smallest + 1 or len(members) == max(map(len, stages))


def test_it_is_a_function_of_its_arguments() -> None:
    stages = ((0, 1, 2), (3, 4), (5,))
    assert next_stages(stages, {5, 3}, (6, 7), 3) == next_stages(stages, (3, 5), [6, 7], 3)


@pytest.mark.parametrize(
    ("stages", "gone", "newcomers", "wanted", "found"),
    [
        (((0, 1), (2,)), {1}, (), 2, ((0,), (2,))),
        (((0, 1), (2,)), {2}, (7,), 2, ((0, 1), (7,))),  # the newcomer, before anybody moves
        (((0, 1), (2,)), {2}, (), 2, ((0,), (1,))),
        (((0, 1), (2,), (3, 4)), {2}, (), 3, ((0,), (1,), (3, 4))),  # as near and as large: the first
        (((0, 1), (2,), (3, 4, 5)), {2}, (), 3, ((0, 1), (5,), (3, 4))),  # as near: the larger one
        (((0, 1, 2), (3,), (4,), (5, 6)), {4}, (), 4, ((0, 1, 2), (3,), (6,), (5,))),  # the nearest, not the largest
        (((0,), (1,)), {0}, (), 2, ((1,),)),  # nobody to spare: the stage is given up
        (((1,),), (), (2,), 2, ((1,), (2,))),  # and opened again by the next who comes
        (((1, 2),), (), (), 2, ((1,), (2,))),  # or by whoever can be spared
        (((0, 1), (2,)), (), (7,), 2, ((0, 1), (2, 7))),  # to the smallest
        (((0,), (1,)), {0, 1}, (), 2, ()),
        (((0,), (1,)), {0, 1}, (2,), 2, ((2,),)),
    ],
)
def test_choices(stages: Stages, gone: set[int], newcomers: tuple[int, ...], wanted: int, found: Stages) -> None:
    assert next_stages(stages, gone, newcomers, wanted) == found


def test_learners_who_have_caught_up_are_replicas_and_primaries_stay() -> None:
    run = ReplicaSet(0, 0, 2, 1, frozenset({1, 2}), frozenset({3, 4}))
    other = ReplicaSet(0, 2, 3, 2, frozenset({2}))
    found = graduate({0: (run, other), 1: ()}, {3, 9})
    assert found == {0: (ReplicaSet(0, 0, 2, 1, frozenset({1, 2, 3}), frozenset({4})), other), 1: ()}
    assert found[0][1] is other, "runs that nobody learns are left as they are"
    assert graduate({0: (run,)}, ()) == {0: (run,)}
