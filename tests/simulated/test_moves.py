"""Micro-batches, layers and workers move while training goes on, with losses, joins and leaves in between: the same
bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cluster.faults import ThenFault
from tests.cluster.schedules import Schedule, run, run_many
from tests.cluster.tiny import TinyRun

MOVE = ThenFault("rebalance", settled=True)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp4", "dp2_pp2", "pp3", "stages3-2"])
def test_moves_change_no_bit(mesh: str, zero: int) -> None:
    schedule = Schedule(0, TinyRun(steps=8), mesh, zero, faults=(MOVE, MOVE, MOVE))
    moves = 0
    for order in range(4):
        ended = run(replace(schedule, seed=order, uneven=order % 2 == 1))
        assert (ended.how, ended.failure, ended.injected) == ("bits", "", 3), (order, ended.detail)
        moves += ended.moves
    assert moves >= 4, f"{moves} moves came to their end"


@pytest.mark.parametrize("first", range(1000, 1080, 40))
def test_random_schedules_with_moves(first: int) -> None:
    tally = run_many(range(first, first + 40), moving=True)
    assert not tally.failures
    assert tally.ends["bits"] > 20 and tally.moves > 2


@pytest.mark.parametrize(("seed", "moving"), [(300523, True), (300595, True), (407333, False)])
def test_a_copy_that_is_a_step_ahead_of_its_worker(seed: int, moving: bool) -> None:
    """The sender of the state had applied a step, and was lost before any other worker had: nobody waits for the
    version before, or is asked for a vote for it."""
    ended = run(Schedule.draw(seed, moving=moving))
    assert (ended.how, ended.failure) == ("bits", ""), ended.detail


def test_a_step_that_cannot_begin_anew_ends_the_life_of_a_run() -> None:
    """All is checked, so that the step of a loss begins anew. Here all workers that had applied it are lost, and of a
    page only the state after it is left: the run stood still."""
    ended = run(Schedule.draw(8000574, moving=True, miscompute=True))
    assert (ended.how, ended.failure) == ("lost", "") and "it cannot begin anew" in ended.detail, ended


def test_a_former_replica_that_becomes_a_learner_is_sent_the_reduced_gradients_again() -> None:
    ended = run(Schedule.draw(505250, moving=True))
    assert (ended.how, ended.failure) == ("bits", ""), ended.detail
