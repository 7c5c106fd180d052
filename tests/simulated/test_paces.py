"""Workers with paces and planned orders, of any kind: the bits of the undisturbed run, through losses and moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cluster.schedules import Schedule, cluster_of, run, undisturbed


@pytest.mark.parametrize("seed", range(40))
def test_no_pace_changes_a_bit_or_stands_still(seed: int) -> None:
    drawn = Schedule.draw(seed, late=True, moving=seed % 3 == 0, miscompute=seed % 4 == 0)
    assert drawn.late is not None
    found = run(replace(drawn, late=replace(drawn.late, paces=seed + 1)))
    assert not found.failure, f"{found.failure}: {found.detail}"


def test_paces_are_kept_to() -> None:
    """Without this the test above would pass with paces that nobody regards."""
    drawn = replace(Schedule.draw(3, late=True), faults=())
    assert drawn.late is not None
    cluster = cluster_of(replace(drawn, late=replace(drawn.late, paces=4, slow=0.0)))
    undisturbed(drawn.run.key)
    cluster.run()
    changed = [clock.changes for clock in cluster.clocks]
    assert len(changed) >= 3 and sum(changed) > 2 * len(changed)
