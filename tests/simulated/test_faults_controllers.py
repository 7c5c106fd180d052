"""Random schedules in which the controller dies anywhere, and another one adopts the workers: A1 to A12."""

from __future__ import annotations

import pytest

from tests.cluster.schedules import Schedule, run, run_many

CHUNK = 30
# Failures that long searches have found, and that are mended.
FAILED_ONCE = {
    181: "a change was under way that a member had answered, and a wish to leave began another one for a later step",
}


def test_no_death_of_a_controller_changes_a_bit_or_gets_stuck() -> None:
    tally = run_many(range(CHUNK), controllers=True)
    assert tally.failures == {}
    assert tally.comebacks > CHUNK // 2 and tally.ends["bits"] > CHUNK // 2


@pytest.mark.parametrize("kind", ["checkpoints", "moving", "miscompute"])
def test_so_it_is_with_checkpoints_moves_and_workers_that_compute_wrongly(kind: str) -> None:
    tally = run_many(range(1000, 1000 + CHUNK // 2), controllers=True, **{kind: True})
    assert tally.failures == {}
    assert tally.comebacks > CHUNK // 4


@pytest.mark.parametrize("seed", FAILED_ONCE, ids=list(FAILED_ONCE.values()))
def test_what_failed_once(seed: int) -> None:
    ended = run(Schedule.draw(seed, controllers=True))
    assert ended.how and not ended.failure, ended.detail
