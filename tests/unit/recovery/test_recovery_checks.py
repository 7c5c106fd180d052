"""Checks of micro-batches: which are drawn, who checks them, and the verdict when two results differ."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.checks import (
    DIGEST_BYTES,
    INPUT_GRADIENT,
    OUTPUT,
    WEIGHT_GRADIENT,
    CheckDraw,
    Difference,
    Pair,
    begins_anew,
    first_difference,
    judges,
    verdict,
)
from elaswave_spmd.recovery.messages import DigestRow
from elaswave_spmd.scheduling.placement import Placement, place
from tests.cluster.tiny import TinyRun

RUN = TinyRun(blocks=2)
Rows = tuple[DigestRow, ...]


def placed(mesh: str, microbatches: int, zero: int = 1) -> Placement:
    shape = MeshShape.parse(mesh)
    return place(Mesh.initial(shape), RUN.description.layout, RUN.shardings.with_zero(zero), microbatches)


meshes = st.sampled_from(["single", "dp2", "dp3", "pp3", "dp2_pp2", "stages3-1", "stages1-4"])


@given(meshes, st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**40), st.integers(1, 2**40), st.floats(0, 1))
def test_a_checker_is_another_worker_of_the_stage(
    mesh: str, microbatches: int, zero: int, seed: int, step: int, rate: float
) -> None:
    placement, draw = placed(mesh, microbatches, zero), CheckDraw(seed, rate)
    number = 0
    for stage, members in enumerate(placement.mesh.stages):
        pairs = draw.pairs(step, stage, placement)
        number += len(pairs)
        assert pairs == CheckDraw(seed, rate).pairs(step, stage, placement), "all workers draw the same"
        assert [pair.microbatch for pair in pairs] == sorted({pair.microbatch for pair in pairs})
        for pair in pairs:
            assert pair.stage == stage and pair.checker in members
            assert pair.owner == placement.worker_of_microbatch(stage, pair.microbatch)
            assert (pair.checker == pair.owner) == (len(members) == 1)
    assert number == draw.num_pairs(step, placement)
    assert rate < 1 or number == microbatches * placement.num_stages
    assert rate > 0 or number == 0


@given(st.integers(2, 6), st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 1000))
def test_checks_are_spread_evenly(workers: int, microbatches: int, seed: int, step: int) -> None:
    placement = placed(f"dp{workers}", microbatches)
    load = Counter(dict(zip(placement.mesh.members, placement.microbatch_counts[0], strict=True)))
    load.update(pair.checker for pair in CheckDraw(seed, 1.0).pairs(step, 0, placement))
    # Who has the last micro-batches left to be checked may be the one with the least to do.
    assert max(load.values()) - min(load.values()) <= 2


def test_the_least_loaded_worker_checks_first() -> None:
    placement = placed("dp3", 7)
    assert placement.microbatch_counts == ((3, 2, 2),)
    first = [CheckDraw(seed, 0.2).pairs(1, 0, placement)[:1] for seed in range(200)]
    checkers = {(pair.owner, pair.checker) for pairs in first for pair in pairs}
    assert {(0, 1), (0, 2), (1, 2), (2, 1)} >= checkers and len(checkers) >= 3


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_the_rate_is_the_share_of_pairs(rate: float) -> None:
    placement, draw = placed("dp2_pp2", 16), CheckDraw(7, rate)
    found = sum(draw.num_pairs(step, placement) for step in range(1, 1001))
    assert abs(found - 32_000 * rate) < 5 * (32_000 * rate) ** 0.5


def test_other_steps_and_seeds_have_other_pairs() -> None:
    placement = placed("dp2", 40)
    drawn = {CheckDraw(seed, 0.5).pairs(step, 0, placement) for seed in range(5) for step in range(1, 6)}
    assert len(drawn) == 25


@pytest.mark.parametrize(("rate", "fault", "steps"), [(0.1, 1.0, 10), (0.1, 0.2, 60), (0.02, 1.0, 40)])
def test_a_fault_is_found_as_soon_as_the_formula_says(rate: float, fault: float, steps: int) -> None:
    """docs/assumptions.md: of 1,000 runs with a device that computes one of its micro-batches wrongly now and then."""
    placement, runs = placed("dp2_pp2", 8), 1000
    found = 0
    for seed in range(runs):
        draw, chance = CheckDraw(seed, rate), random.Random(f"{seed} {rate}")
        wrong = (step for step in range(1, steps + 1) if chance.random() < fault)
        found += any(any(pair.microbatch == 2 for pair in draw.pairs(step, 0, placement)) for step in wrong)
    expected = 1 - (1 - fault * rate) ** steps
    assert abs(found / runs - expected) < 4 * (expected * (1 - expected) / runs) ** 0.5


# ---- a difference


def rows(*kinds: tuple[str, str, str]) -> Rows:
    return tuple((layer, a.encode(), b.encode(), c.encode()) for layer, (a, b, c) in enumerate(kinds))


RIGHT = rows(("a", "", "b"), ("c", "d", "e"))


@pytest.mark.parametrize(
    ("wrong", "layer", "kind"),
    [
        (rows(("x", "", "x"), ("x", "x", "x")), 0, OUTPUT),
        (rows(("a", "", "x"), ("x", "x", "x")), 1, OUTPUT),
        (rows(("a", "", "x"), ("c", "x", "e")), 1, INPUT_GRADIENT),
        (rows(("a", "", "x"), ("c", "d", "x")), 1, WEIGHT_GRADIENT),
        (rows(("a", "", "x"), ("c", "d", "e")), 0, WEIGHT_GRADIENT),
    ],
)
def test_the_first_wrong_tensor_is_named_and_not_what_follows_from_it(wrong: Rows, layer: int, kind: str) -> None:
    assert first_difference(RIGHT, wrong) == first_difference(wrong, RIGHT) == Difference(layer, kind, 1)


def test_equal_results_have_no_difference() -> None:
    assert first_difference(RIGHT, RIGHT) is None


def test_differing_columns_are_counted() -> None:
    one, other = bytes(8 * DIGEST_BYTES), b"".join(bytes([n % 3 == 0] * DIGEST_BYTES) for n in range(8))
    found = first_difference(((0, one, b"", b""),), ((0, other, b"", b""),))
    assert found is not None and found.elements == 3


# ---- the verdict

PAIR = Pair(0, 4, owner=1, checker=2)
WRONG = rows(("x", "", "b"), ("c", "d", "e"))
ODD = rows(("y", "", "b"), ("c", "d", "e"))


@given(st.sets(st.integers(3, 9)))
def test_a_third_worker_is_asked_while_there_is_one(others: set[int]) -> None:
    members, asked = {1, 2, *others}, ()
    for _ in others:
        (third,) = judges(PAIR, members, asked)
        assert third in others and third not in asked
        asked = (*asked, third)
    assert judges(PAIR, members, asked) == (1, 2), "then both again"
    assert judges(PAIR, members, (*asked, 1, 2)) == ()


def test_a_worker_that_differs_from_itself_is_wrong() -> None:
    alone = Pair(0, 4, 1, 1)
    assert judges(alone, {1}) == () and verdict(alone, {1: RIGHT}, {}) == (1,)


@pytest.mark.parametrize(
    ("first", "again", "wrong"),
    [
        ({1: RIGHT, 2: WRONG}, {5: RIGHT}, (2,)),
        ({1: WRONG, 2: RIGHT}, {5: RIGHT}, (1,)),
        ({1: WRONG, 2: ODD}, {5: RIGHT}, ()),
        ({1: WRONG, 2: ODD}, {5: RIGHT, 6: ODD}, (1, 5)),
        ({1: WRONG, 2: RIGHT}, {5: ODD, 6: RIGHT}, (1, 5)),
        ({1: WRONG, 2: ODD}, {5: RIGHT, 6: RIGHT}, (1, 2)),
        ({1: RIGHT, 2: WRONG}, {1: RIGHT, 2: RIGHT}, (2,)),
        ({1: WRONG, 2: RIGHT}, {1: RIGHT, 2: RIGHT}, (1,)),
        ({1: WRONG, 2: RIGHT}, {1: WRONG, 2: RIGHT}, ()),
        ({1: WRONG, 2: ODD}, {1: RIGHT, 2: RIGHT}, (1, 2)),
        ({1: WRONG, 2: ODD}, {5: RIGHT, 1: RIGHT, 2: RIGHT}, (1, 2)),
        ({1: WRONG, 2: ODD}, {5: RIGHT, 1: WRONG, 2: ODD}, ()),
    ],
)
def test_the_verdict(first: dict[int, Rows], again: dict[int, Rows], wrong: tuple[int, ...]) -> None:
    assert verdict(PAIR, first, again) == wrong


@given(st.integers(0, 3), st.booleans())
def test_one_wrong_worker_among_three_or_more_is_found_whoever_it_is(wrong: int, repeats: bool) -> None:
    """It may be the owner, the checker or the third one itself, and be wrong once or always."""
    members, pair, runs = range(4), Pair(0, 7, 0, 1), Counter[int]()

    def computes(rank: int) -> Rows:
        runs[rank] += 1
        return WRONG if rank == wrong and (repeats or runs[rank] == 1) else RIGHT

    first, again, asked = {0: computes(0), 1: computes(1)}, {}, ()
    if first[0] == first[1]:
        return
    while not (found := verdict(pair, first, again)):
        more = judges(pair, members, asked)
        assert more, "somebody can tell"
        again |= {rank: computes(rank) for rank in more}
        asked = (*asked, *more)
    assert found == (wrong,)


# ---- attempts


@pytest.mark.parametrize(
    ("rate", "is_begun", "results_differ", "anew"),
    [
        (0.0, True, False, False),
        (0.01, True, False, False),
        (0.01, True, True, True),
        (1.0, True, False, True),
        (1.0, True, True, True),
        (1.0, False, False, False),
    ],
)
def test_a_loss_below_rate_1_does_not_begin_a_step_anew(
    rate: float, is_begun: bool, results_differ: bool, anew: bool
) -> None:
    assert begins_anew(rate, is_begun=is_begun, results_differ=results_differ) is anew
