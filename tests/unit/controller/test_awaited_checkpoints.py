"""Which checkpoints the end of a run waits for: the newest that is due, while it can still come."""

from __future__ import annotations

import pytest

from elaswave_spmd.controller.actions import Action, Record, RemoveShards, WriteManifest
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import ManifestWritten, OldRemoved
from elaswave_spmd.recovery.actions import Save
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


def test_a_best_one_that_a_lost_worker_had_a_part_of_is_not_awaited() -> None:
    """`awaits` is asked for the steps with the best validation losses, which may be any that are due."""
    found = coordinator(compares=False)
    found.committed(11)
    assert found.awaits(5) and found.awaits(10)
    found.worker_lost(until=7)
    assert not found.awaits(5), "the end of a run would wait for it for timeouts.shutdown, in vain"
    assert found.awaits(10), "the lost worker had left before that"
    found.worker_lost()
    assert not found.awaits(10)
    found.committed(15)
    assert found.awaits(15) and not found.awaits(16), "16 is not due"


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


def removed(actions: list[Action]) -> dict[int, tuple[str, ...]]:
    return {action.step: action.names for action in actions if isinstance(action, RemoveShards)}


def shard(step: int, rank: int, epoch: int = 0) -> ShardWritten:
    """One of three workers has written its part of a checkpoint."""
    ranges = (RANGES[:1], RANGES[1:2], RANGES[2:])[rank]
    return ShardWritten(step, rank, epoch, f"shard_{rank}_1-{epoch}", 1, "0" * 64, ranges)


NO_SPACE = "no space left"


def test_shards_of_a_checkpoint_that_is_given_up_leave_their_room_to_the_next() -> None:
    found = coordinator(compares=False)
    found.committed(7)
    assert found.wrote(shard(5, 0), 0.0) == []
    assert removed(found.wrote(ShardWritten(5, 1, 0, error=NO_SPACE), 0.0)) == {5: ("shard_0_1-0",)}
    assert removed(found.wrote(ShardWritten(5, 1, 0, error=NO_SPACE), 0.0)) == {}, "once"
    assert removed(found.wrote(shard(5, 2), 0.0)) == {5: ("shard_2_1-0",)}, "as soon as it is written"
    assert removed(found.wrote(shard(10, 0), 0.0)) == {}, "it may still be whole"


def test_those_of_a_version_at_which_workers_may_be_stay_until_they_are_past_it() -> None:
    """While the controller stands still workers may save that very state, under the same names."""
    found = coordinator(compares=False)
    found.committed(5)
    found.wrote(shard(5, 0), 0.0)
    assert removed(found.wrote(ShardWritten(5, 1, 0, error=NO_SPACE), 0.0)) == {}
    assert removed(found.committed(6)) == {5: ("shard_0_1-0",)}, "no other report has to come for that"
    assert removed(found.wrote(shard(5, 2), 0.0)) == {5: ("shard_2_1-0",)}


def test_a_run_that_stops_with_that_state_keeps_what_is_there() -> None:
    found = coordinator(compares=False)
    found.committed(5)
    found.wrote(shard(5, 0), 0.0)
    found.wrote(ShardWritten(5, 1, 0, error=NO_SPACE), 0.0)
    found.stop_and_save(Save(5, 0, "too few workers"))
    found.committed(6)
    assert removed(found.wrote(shard(5, 2), 0.0)) == {}


def test_a_whole_set_stays_for_whoever_resumes_the_run() -> None:
    """Unless its replicas differed: then it may be wrong."""
    for is_trusted in (True, False):
        found = coordinator()
        found.committed(7)
        assert [found.wrote(shard(5, rank), 0.0) for rank in range(3)] == [[]] * 3
        if is_trusted:
            assert removed(found.wrote(ShardWritten(5, 3, 0, error=NO_SPACE), 0.0)) == {}
        else:
            names = tuple(shard(5, rank).name for rank in range(3))
            assert removed(found.distrust(5, 0)) == {5: names}
            late = ShardWritten(5, 3, 0, "late", 1, "0" * 64, RANGES[:1])
            assert removed(found.wrote(late, 0.0)) == {5: ("late",)}
            right = shard(5, 0, epoch=1)
            assert removed(found.wrote(right, 0.0)) == {5: (right.name,)}, "it is not written again as a whole"


def test_those_that_a_newer_checkpoint_replaces_are_removed_with_it() -> None:
    found = coordinator(compares=False)
    found.committed(5)
    found.wrote(shard(5, 0), 0.0)
    found.wrote(ShardWritten(5, 1, 0, error=NO_SPACE), 0.0)
    complete(found, 10)
    found.committed(11)
    assert removed(found.wrote(ShardWritten(15, 1, 0, error=NO_SPACE), 0.0)) == {}
