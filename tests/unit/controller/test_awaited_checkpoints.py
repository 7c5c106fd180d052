"""Which checkpoints the end of a run waits for: the newest that is due, while it can still come."""

from __future__ import annotations

import pytest

from elaswave_spmd.controller.actions import Record, WriteManifest
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import ManifestWritten, OldRemoved
from elaswave_spmd.recovery.messages import ShardWritten
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from tests.unit.controller.test_compared_checkpoints import RANGES, coordinator, write


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


def test_one_that_was_skipped_is_said_once_with_its_reason_and_forgotten() -> None:
    found = coordinator(compares=False)
    (lost,) = found.wrote(ShardWritten(5, 1, 0, error="those before it are still being written"), 0.0)
    assert isinstance(lost, Record) and "those before it are still being written" in str(lost.fields["message"])
    assert found.wrote(ShardWritten(5, 0, 0, "a shard of another worker", 1, "0" * 64, RANGES[:1]), 0.0) == []
    assert found.wrote(ShardWritten(5, 0, 0, error="those before it are still being written"), 0.0) == []
    (written,) = write(found, 10)
    assert isinstance(written, WriteManifest)
    (record,) = found.written(ManifestWritten(written.manifest), 0.0)
    assert isinstance(record, Record) and record.kind == "checkpoint"
    assert found.why_not(5) == "", "a run has no end of them"


def test_an_old_one_that_cannot_be_removed_is_no_reason_against_the_new_one() -> None:
    found = coordinator(compares=False)

    def kinds(step: int, not_removed: str) -> list[str]:
        (written,) = write(found, step)
        assert isinstance(written, WriteManifest)
        actions = [
            *found.written(ManifestWritten(written.manifest), 0.0),
            *found.removed(OldRemoved(step, not_removed)),
        ]
        return [action.kind for action in actions if isinstance(action, Record)]

    assert kinds(5, "step_00000001 (Directory not empty)") == ["checkpoint", "checkpoint_kept"] and found.newest == 5
    assert kinds(10, "step_00000001 (Directory not empty)") == ["checkpoint"], "it is said once"
    assert kinds(15, "step_00000005 (Directory not empty)") == ["checkpoint", "checkpoint_kept"] and found.newest == 15


def test_one_that_is_being_written_is_not_given_up() -> None:
    """It was whole, and all replicas were the same: what a later mesh epoch finds says nothing of it."""
    found = coordinator(compares=False)
    (written,) = write(found, 5)
    assert isinstance(written, WriteManifest)
    assert found.distrust(5, 7) == []
    assert found.wrote(ShardWritten(5, 1, 9, error="no space left"), 0.0) == []
    (record,) = found.written(ManifestWritten(written.manifest), 0.0)
    assert isinstance(record, Record) and record.kind == "checkpoint" and found.newest == 5


def test_one_whose_manifest_cannot_be_written_is_lost_and_training_goes_on() -> None:
    found = coordinator(compares=False)
    (written,) = write(found, 5)
    assert isinstance(written, WriteManifest)
    (lost,) = found.written(ManifestWritten(written.manifest, "no space left"), 0.0)
    assert isinstance(lost, Record) and lost.kind == "checkpoint_lost" and found.newest < 5
