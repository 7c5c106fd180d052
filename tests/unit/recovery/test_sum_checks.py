"""Checks of sums: what is drawn, who checks it, and who is wrong."""

from __future__ import annotations

import pytest

from elaswave_spmd.mesh import Mesh, MeshShape
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.sum_checks import (
    NORM,
    REDUCED_GRADIENT,
    SUM,
    Claim,
    Item,
    are_drawn,
    checker_of,
    drawn_ranges,
    find_wrong,
    first_different,
    sums_of,
)
from elaswave_spmd.scheduling.placement import place
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaSet
from tests.cluster.tiny import TinyRun

A, B, C = bytes(512), b"\1" + bytes(511), b"\2" + bytes(503) + b"\3" + bytes(7)
LEFT, RIGHT, ROOT, NORMS = Item(SUM, 0, 0, 2), Item(SUM, 0, 2, 4), Item(REDUCED_GRADIENT), Item(NORM)


def test_layers_are_drawn_with_the_rate() -> None:
    for rate in (0.0, 0.1, 0.5, 1.0):
        draw = CheckDraw(7, rate)
        drawn = sum(are_drawn(draw, step, layer) for step in range(1, 2001) for layer in range(5))
        assert abs(drawn / 10_000 - rate) < 0.02 and (0 < rate < 1 or drawn == 10_000 * rate)
    assert [are_drawn(CheckDraw(1, 0.5), 3, layer) for layer in range(64)] != [
        are_drawn(CheckDraw(2, 0.5), 3, layer) for layer in range(64)
    ]


def test_a_mirror_checks_each_in_its_turn_and_without_one_the_primary() -> None:
    pages = ReplicaSet(2, 3, 5, 1, frozenset((0, 1, 4)))
    assert {checker_of(step, pages) for step in range(10)} == {0, 4}
    assert checker_of(4, ReplicaSet(2, 3, 5, 1, frozenset((1,)), frozenset((0,)))) == 1, "a learner has no state"


@pytest.mark.parametrize("mesh", ["single", "dp3", "pp2", "stages3-2"])
def test_at_rate_1_all_trained_pages_are_checked_and_uneven_ranges_too(mesh: str) -> None:
    run = TinyRun(tied=True, frozen=TinyRun().names[2:3])
    layout = run.description.layout
    placement = place(Mesh.initial(MeshShape.parse(mesh)), layout, run.shardings.with_zero(2), run.microbatches)
    replicas = place_replicas(layout, placement.state_sharding(1, 0))
    found = list(drawn_ranges(CheckDraw(0, 1.0), 1, layout, replicas))
    wanted = [p for _, some in sorted(replicas.items()) for p in some if not layout.layers[p.layer].is_frozen(p.first)]
    assert [pages for pages, _ in found] == wanted
    assert all((checker == pages.primary) == (not pages.mirrors) for pages, checker in found)
    assert list(drawn_ranges(CheckDraw(0, 0.0), 1, layout, replicas)) == []


@pytest.mark.parametrize("mesh", ["single", "dp2", "dp4", "stages1-3"])
def test_the_sums_of_all_workers_cover_all_microbatches(mesh: str) -> None:
    run = TinyRun(microbatches=6)
    layout = run.description.layout
    placement = place(Mesh.initial(MeshShape.parse(mesh)), layout, run.shardings, run.microbatches)
    for layer in range(len(layout.layers)):
        covered = sorted(u for _, (lo, hi) in sums_of(placement, layer) for u in range(lo, hi))
        assert covered == list(range(6))


# ---- who is wrong: worker 0 is the primary, 1 the checker

RIGHT_SUMS = {LEFT: A, RIGHT: B, ROOT: A, NORMS: b"1234"}


def claims(left: bytes = A, right: bytes = B, root: bytes = A, norms: bytes = b"1234") -> list[Claim]:
    """Worker 0 adds up the first two micro-batches, worker 1 the others."""
    checked = [Claim(1, ROOT, A), Claim(1, NORMS, b"1234")]
    return [Claim(0, LEFT, left), Claim(1, RIGHT, right), Claim(0, ROOT, root), Claim(0, NORMS, norms), *checked]


@pytest.mark.parametrize(
    ("found", "item", "rank"),
    [
        (claims(left=C, root=C), LEFT, 0),
        (claims(right=C, root=C), RIGHT, 1),
        (claims(root=C), ROOT, 0),
        (claims(norms=b"1235"), NORMS, 0),
    ],
)
@pytest.mark.parametrize("third", [False, True])
def test_a_fault_that_does_not_repeat_is_found(found: list[Claim], item: Item, rank: int, third: bool) -> None:
    again = {0: RIGHT_SUMS, 1: RIGHT_SUMS, **({2: RIGHT_SUMS} if third else {})}
    finding = find_wrong(found, again)
    assert finding is not None and (finding.item, finding.wrong) == (item, (rank,))
    assert finding.elements == (1 if item == NORMS else 2)


def test_a_fault_that_repeats_is_found_by_a_third_worker_and_not_by_two() -> None:
    found = claims(root=C)
    two = {0: {**RIGHT_SUMS, ROOT: C}, 1: RIGHT_SUMS}
    finding = find_wrong(found, two)
    assert finding is not None and (finding.wrong, finding.disputed) == ((), (0, 1))
    finding = find_wrong(found, {**two, 2: RIGHT_SUMS})
    assert finding is not None and finding.wrong == (0,)


def test_a_worker_that_is_neither_is_found_by_both() -> None:
    found = [*claims(root=C), Claim(2, Item(SUM, 0, 4, 5), C)]
    right = {**RIGHT_SUMS, Item(SUM, 0, 4, 5): A}
    finding = find_wrong(found, {0: right, 1: right})
    assert finding is not None and (finding.wrong, finding.item) == ((2,), Item(SUM, 0, 4, 5)), "not the primary"


def test_who_has_added_a_wrong_sum_rightly_is_not_wrong() -> None:
    """Worker 2 has added what workers 0 and 1 of its host had made, of which one is wrong."""
    host, of_other_layer = Item(SUM, 0, 0, 4), Item(SUM, 1, 0, 4)
    right = {**RIGHT_SUMS, host: B, of_other_layer: B}
    found = [*claims(left=C, root=C), Claim(2, host, C), Claim(2, of_other_layer, B)]
    finding = find_wrong(found, {0: right, 1: right})
    assert finding is not None and (finding.item, finding.wrong) == (LEFT, (0,))
    finding = find_wrong([*claims(root=C), Claim(2, host, C)], {0: right, 1: right})
    assert finding is not None and (finding.item, finding.wrong) == (host, (2,))
    finding = find_wrong([*claims(root=C), Claim(2, host, C)], {0: right, 1: right, 2: {**right, host: C}})
    assert finding is not None and finding.wrong == (2,), "two of three"
    found = [*claims(left=C, root=C), Claim(2, host, C), Claim(2, of_other_layer, C)]
    finding = find_wrong(found, {0: right, 1: right})
    assert finding is not None and finding.wrong == (0, 2), "a sum of another layer is another matter"


def test_a_judge_that_is_wrong_itself_is_found() -> None:
    finding = find_wrong(claims(), {0: RIGHT_SUMS, 1: RIGHT_SUMS, 2: {**RIGHT_SUMS, ROOT: C}})
    assert finding is not None and finding.wrong == (2,)


def test_nobody_is_wrong_if_all_agree() -> None:
    assert find_wrong(claims(), {0: RIGHT_SUMS, 1: RIGHT_SUMS}) is None


def test_a_primary_alone_that_contradicts_itself_is_wrong() -> None:
    found = [Claim(0, LEFT, A), Claim(0, ROOT, C), Claim(0, ROOT, A)]
    finding = find_wrong(found, {0: RIGHT_SUMS})
    assert finding is not None and (finding.item, finding.wrong) == (ROOT, (0,))


def test_the_number_of_different_elements() -> None:
    assert first_different((A, b"1234"), (A, b"1234")) is None
    assert first_different((A, b"1234"), (C, b"1234")) == (REDUCED_GRADIENT, 2)
    assert first_different((A, b"12341234"), (A, b"12341235")) == (NORM, 1)
