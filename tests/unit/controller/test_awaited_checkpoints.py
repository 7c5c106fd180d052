"""Which checkpoints the end of a run waits for: the newest that is due, while it can still come."""

from __future__ import annotations

import pytest

from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import ManifestWritten, WriteManifest
from elaswave_spmd.recovery.messages import ShardWritten
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from tests.unit.controller.test_compared_checkpoints import coordinator, write


def complete(found: CheckpointCoordinator, step: int) -> None:
    for action in write(found, step):
        if isinstance(action, WriteManifest):
            found.written(ManifestWritten(action.manifest), 0.0)


def test_the_newest_that_is_due_is_awaited_until_it_is_on_the_disk() -> None:
    found = coordinator(compares=False)
    found.committed(4)
    assert not found.awaits_newest, "one is due after every fifth step"
    found.committed(11)
    assert found.awaits_newest
    complete(found, 5)
    assert found.awaits_newest, "that of step 10 is the newest"
    complete(found, 10)
    assert not found.awaits_newest
    found.committed(20)
    assert found.awaits_newest, "of step 15; the last step, 20, has weights in place of a checkpoint"
    complete(found, 15)
    assert not found.awaits_newest


def test_one_that_failed_or_that_a_lost_worker_had_a_part_of_is_not() -> None:
    found = coordinator()
    found.committed(6)
    write(found, 5)
    found.distrust(5, 0)
    assert not found.awaits_newest
    found.committed(10)
    assert found.awaits_newest
    found.worker_lost()
    assert not found.awaits_newest
    found.committed(15)
    assert found.awaits_newest, "the others write all of it"


def test_where_the_newest_is_lost_the_one_before_it_is_awaited() -> None:
    """A disk that is too slow: the newest was not begun, as those before it were still being written."""
    found = coordinator(compares=False)
    found.committed(16)
    for step in (15, 10):
        found.wrote(ShardWritten(step, 0, 0, error="those before it are still being written"), 0.0)
        assert found.awaits_newest
    complete(found, 5)
    assert not found.awaits_newest


@pytest.mark.parametrize(("every", "validate_every"), [(0, 0), (5, 0), (0, 3), (5, 3), (30, 7), (1, 1)])
def test_the_newest_due_step_is_the_last_one_that_is_due(every: int, validate_every: int) -> None:
    orders = CheckpointOrders("run", "made up", 1, every, 20, validate_every=validate_every)
    for step in range(22):
        due = [each for each in range(1, step + 1) if orders.is_due(each)]
        assert orders.newest_due(step) == max(due, default=0)
