"""Chains of micro-batches as leaves of the reduction tree: gradients, loads after losses, what is computed again."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chain_sums import HandedOn, added_up, hand_on, held_in_order, shares
from benchmarks.chains import AIM, CHAINS, Again, again, bytes_of_case, load, main, measured, of_stages
from elaswave_spmd.determinism.reduction_tree import max_open_nodes

MICROBATCHES = st.integers(1, 40)


@given(MICROBATCHES, st.randoms(use_true_random=False))
def test_a_chain_of_one_is_the_tree_as_it_is_in_any_order(microbatches: int, draw: random.Random):
    order = draw.sample(range(microbatches), microbatches)
    assert added_up(order, microbatches, 1).most == max_open_nodes(order, microbatches)


@given(MICROBATCHES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_one_sum_is_left_of_any_order_and_no_more_is_held_than_was_made(
    microbatches: int, chain: int, draw: random.Random
):
    order = draw.sample(range(microbatches), microbatches)
    sums = added_up(order, microbatches, chain)
    assert sums.tree.done and sums.held == 1 and 1 <= sums.most <= microbatches
    assert sums.additions < microbatches
    assert added_up(range(microbatches), microbatches, chain).most <= sums.most, "ascending order holds the fewest"


@pytest.mark.parametrize(("chain", "most"), [(1, (3, 4, 5)), (2, (3, 4, 5)), (4, (2, 3, 4)), (8, (1, 2, 3))])
def test_gradients_grow_with_the_logarithm_of_the_chains(chain: int, most: tuple[int, ...]):
    assert tuple(added_up(range(each), 2 * each, chain).most for each in (8, 16, 32)) == most


def test_a_gradient_waits_for_those_before_it_in_its_chain():
    assert added_up([0, 1, 2, 3], 4, 4).most == 1
    assert added_up([1, 0, 2, 3], 4, 4).most == 1, "the first two may be added either way round"
    assert added_up([3, 2, 1, 0], 4, 4).most == 3
    assert added_up([0, 4, 1, 5, 2, 6, 3, 7], 8, 4).most == 2
    assert [added_up(range(8), 8, chain).additions for chain in CHAINS] == [3, 3, 1, 0]


def test_the_aim_takes_one_gradient_and_so_one_chain_for_all_micro_batches_of_a_worker():
    sizes = bytes_of_case()
    assert sizes.plain / sizes.gradient == pytest.approx(4, rel=0.01), "parameters, two moments and a gradient"
    for chain in CHAINS:
        gradients = added_up(range(8), 16, chain).most
        ratio = (sizes.ours(gradients) - sizes.plain + measured(8).plain) / measured(8).plain
        assert (ratio <= AIM) == (gradients == 1) == (chain == 8)


@pytest.mark.parametrize(
    ("workers", "left", "now", "four"), [(4, 3, 1.03125, 1.125), (8, 5, 1.015625, 1.25), (8, 7, 1.09375, 1.3125)]
)
def test_cuts_at_chains_only_make_loads_uneven(workers: int, left: int, now: float, four: float):
    assert (load(shares(8 * workers, left)), load(shares(8 * workers, left, 4))) == (now, four)
    assert all(part.start % 4 == 0 for part in shares(8 * workers, left, 4))


def test_what_is_computed_again_if_a_worker_dies_in_the_middle_of_chains():
    """All have 8 micro-batches: the lost worker has done 3.5 of them in the mean, and its sum is sent with the last."""
    assert again(4, 8, 1) == Again(lost=3.5, begun=0, rest=7.5, kept=7.5, handed=7.5)
    four = again(4, 8, 4)
    assert (four.lost, four.begun) == (3.5, 3 * 1.5), "each of three others has begun 0, 1, 2 or 3 micro-batches"
    assert (four.rest, four.kept) == (6 + 4, 4.5 + 4), "chains are done whole, and one of the lost ones besides"


def test_a_sum_that_is_handed_on_is_waited_for_or_held_beside_others():
    """Micro-batches 0-2, 3-5 and 6-7 in chains of 4: two sums are handed on."""
    parts = [range(3), range(3, 6), range(6, 8)]
    assert hand_on(parts, 8, 4) == HandedOn(sums=2, waiting_s=6, apart=3, ordered_s=3, waits=1, ordered=2)
    assert hand_on([range(4), range(4, 8)], 8, 4) == HandedOn(0, 4, 1, 4, 0, 1)
    # One chain over three workers: the second passes on what it was given.
    assert hand_on([range(2), range(2, 4), range(4, 6)], 6, 6).waiting_s == 4


def test_a_sum_is_handed_on_once_however_late_its_worker_goes_on():
    parts = [range(6), range(6, 8)]
    added = [(0, 4), (0, 5), (1, 6), (1, 7), (0, 0), (0, 1), (0, 2), (0, 3)]
    assert held_in_order(parts, added, 8, 4) == [2, 1]


def test_stages_add_up_in_an_order_of_their_own_after_a_loss():
    whole, lost = of_stages((4, 4), 8, 8, 1), of_stages((3, 4), 8, 8, 1)
    assert whole[0] == 1 and lost[0] > of_stages((3, 4), 8, 1, 1)[0] > whole[0]
    assert of_stages((3, 4), 8, 8, 8)[1] > lost[1], "cut at chains, the step is longer"


def test_the_command_writes_its_tables(tmp_path, capsys):
    path = tmp_path / "chains.json"
    assert main(["--quick", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    titles, shown = [table["title"] for table in written["tables"]], capsys.readouterr().out
    assert written["benchmark"] == "chains" and len(titles) == 5
    assert all(title.startswith("Modelled: ") and title in shown for title in titles)
