"""Random schedules of faults: a seeded part of what `python -m elaswave_spmd.testing.schedules` runs by thousands."""

from __future__ import annotations

import pytest

from elaswave_spmd.testing.schedules import run_many

CHUNK = 60


@pytest.mark.parametrize("first", range(0, 4 * CHUNK, CHUNK))
def test_no_schedule_of_faults_changes_a_bit_or_gets_stuck(first: int) -> None:
    tally = run_many(range(first, first + CHUNK))
    assert tally.failures == {}
    assert tally.struck > CHUNK and tally.ends["bits"] > CHUNK // 2, "faults did happen, and runs came to their ends"
