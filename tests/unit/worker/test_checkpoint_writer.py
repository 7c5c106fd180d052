"""What a worker writes of its state at the end of a run, while older copies wait for a slow disk."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elaswave_spmd.errors import FilesError
from elaswave_spmd.recovery.messages import Applied, ShardWritten
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path, find_shards
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.runtime.devices import device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker import checkpoint_writer
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.checkpoint_writer import CheckpointWriter, StepRecord, _save_reports, read_reports
from elaswave_spmd.worker.state_replica import StateReplica
from tests.cluster.cluster import SimulatedCluster
from tests.cluster.processes import Worker
from tests.cluster.schedules import Schedule, cluster_of
from tests.cluster.tiny import TinyRun
from tests.unit.run_dir.checkpoint_cases import save
from tests.waiting import PATIENCE_S, eventually

RUN = TinyRun(steps=6)


class SlowDisk:
    """Writes nothing before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        """Of the shards, in the order in which they are begun."""
        self.goes_on = threading.Event()
        self._write, self._thread = checkpoint_writer.write_shard, threading.current_thread()
        monkeypatch.setattr(checkpoint_writer, "write_shard", self.write_shard)

    def write_shard(self, directory: Path, step: int, *args: Any, **options: Any) -> ShardInfo:
        self.steps.append(step)
        # What the training thread writes itself, at the end, is never held up.
        assert threading.current_thread() is self._thread or self.goes_on.wait(PATIENCE_S)
        return self._write(directory, step, *args, **options)


class Driven(SimulatedCluster):
    """A writer goes with the one worker, step by step."""

    writer: CheckpointWriter
    disk: SlowDisk
    last_step = 5

    def _save(self, worker: Worker) -> None:
        assert worker.executor is not None
        replica = worker.executor.replica
        version = replica.protocol.version
        if version <= self.last_step:
            self.writer.applied(Applied(version, 0, 0, 0.5, 0.25, True), replica)
            if version == 1:
                eventually(lambda: self.disk.steps == [1])  # it is being written; those that come wait
        if version == self.last_step:
            self.at_end(replica)

    def at_end(self, replica: StateReplica) -> None:
        """The worker's last step is applied."""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.goes_on.set()


def written(directory: Path) -> list[int]:
    """The steps of which there are shards."""
    return [step for step in range(1, 7) if list(checkpoint_path(directory, step).glob("shard_*"))]


def driven(kind: type[Driven], disk: SlowDisk, directory: Path, source: Path | None = None) -> list[ShardWritten]:
    """Drives a writer with all steps. Returns what it has reported.

    Args:
        source: the checkpoint that the run says it has begun with.
    """
    reports: list[ShardWritten] = []
    cluster = cluster_of(Schedule(0, RUN, mesh="single", checkpoint_every=1), kind=kind)
    assert isinstance(cluster, Driven)
    begun = None if source is None else str(source)
    orders = CheckpointOrders(str(directory), "run", 1, every=1, steps=RUN.steps, source=begun)
    cluster.writer = CheckpointWriter(0, orders, RUN.description.layout, HostDevice(device_of("cpu")), reports.append)
    cluster.disk = disk
    cluster.run()
    cluster.writer.close()
    assert cluster.writer._thread is None
    return reports


def test_the_state_of_an_orphan_is_written_before_the_copies_that_wait(disk: SlowDisk, tmp_path: Path) -> None:
    """The worker may be killed before all of them are written. The one being written is not waited for."""

    class Orphaned(Driven):
        def at_end(self, replica: StateReplica) -> None:
            assert self.writer.write_now(replica) == ""
            assert written(tmp_path) == [5] and self.disk.steps == [1, 5]
            assert sorted(read_reports(checkpoint_path(tmp_path, 5))[0]) == [1, 2, 3, 4, 5]
            self.disk.goes_on.set()

    reports = driven(Orphaned, disk, tmp_path)
    assert disk.steps == [1, 5, 2, 3] and written(tmp_path) == [1, 2, 3, 5]
    skipped = [report.step for report in reports if report.error]
    assert skipped == [4, 5], "of those that were due while two waited"


def test_records_that_cannot_be_written_are_told_of_and_the_state_is_written_all_the_same(
    disk: SlowDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another worker will do; without any the next controller can make no checkpoint of the state."""
    steps: list[int] = []

    class Orphaned(Driven):
        def at_end(self, replica: StateReplica) -> None:
            why = self.writer.write_now(replica)
            assert "its state after step 5 could not be written" in why and "No space left on device" in why
            self.disk.goes_on.set()

    def full(directory: Path, *_: object) -> None:
        steps.extend(disk.steps[1:])  # that of step 1 is being written
        raise FilesError(directory / "reports_0.json", OSError(28, "No space left on device"))

    monkeypatch.setattr(checkpoint_writer, "_save_reports", full)
    driven(Orphaned, disk, tmp_path)
    assert not steps, "before the state, which may take the last room of the disk"
    assert 5 in written(tmp_path)


def test_an_orphan_writes_no_state_that_is_a_step_ahead_of_it(disk: SlowDisk, tmp_path: Path) -> None:
    """It has learned these pages from a worker that had applied the next step, and is lost.

    Its shard would be taken for all that it is the writer of, so it writes the rest as if for another worker.
    """
    ahead: list[PageRange] = []

    class Orphaned(Driven):
        def at_end(self, replica: StateReplica) -> None:
            part = next(iter(replica.state))
            ahead.append(part.pages.key)
            part.version += 1
            try:
                assert self.writer.write_now(replica) == ""
            finally:
                part.version -= 1
                self.disk.goes_on.set()

    reports = driven(Orphaned, disk, tmp_path)
    every = next(set(report.page_ranges) for report in reports if report.step == 2)
    (shard,) = find_shards(checkpoint_path(tmp_path, 5))[0]
    assert set(shard.pages) == every - set(ahead) and len(ahead) == 1
    assert shard.name.endswith("_for_others.safetensors")


@pytest.mark.parametrize(
    ("incarnation", "begun_with", "is_written"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_a_checkpoint_of_an_earlier_life_is_written_anew(
    disk: SlowDisk, tmp_path: Path, incarnation: int, begun_with: bool, is_written: bool
) -> None:
    """This life has gone on from one before it, as it is bad. One of this life, or that it began with, is good."""

    class Orphaned(Driven):
        def at_end(self, replica: StateReplica) -> None:
            assert self.writer.write_now(replica) == ""
            self.disk.goes_on.set()

    before, _ = save(tmp_path, 5, Ballot(incarnation, 3))
    driven(Orphaned, disk, tmp_path, before if begun_with else None)
    assert (5 in disk.steps) == is_written == bool(read_reports(before)[0])


def test_records_of_steps_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    """JSON has no numbers for a weight that is not finite, and one such step must not hide the others."""
    records = [
        StepRecord(1, 3, 0.1, 0.2, 2, 0.3),
        StepRecord(2, 3, math.inf, -math.inf, 2, math.inf),
        StepRecord(3, 3, 1.5, 0.5, 2),
    ]
    _save_reports(tmp_path, 0, records)
    assert list(read_reports(tmp_path)[0].values()) == records
    _save_reports(tmp_path, 0, [StepRecord(4, 3, math.nan, math.nan, 2, math.nan)])
    (read,) = read_reports(tmp_path)[0].values()
    assert all(value is not None and math.isnan(value) for value in (read.loss, read.grad_norm, read.weight))


@pytest.mark.parametrize("weight", [{}, {"weight": None}, {"weight": 2.5}])
def test_records_of_earlier_versions_are_read(tmp_path: Path, weight: dict[str, float | None]) -> None:
    """They wrote the weight as a number, and before that there was none."""
    rows = [{"step": 7, "epoch": 3, "loss": "0x1.8p+0", "grad_norm": "0x1p-1", "workers": 2, **weight}]
    (tmp_path / "reports_0.json").write_text(json.dumps(rows))
    assert read_reports(tmp_path)[0] == {7: StepRecord(7, 3, 1.5, 0.5, 2, weight.get("weight"))}


def test_the_state_of_a_run_that_stops_is_written_before_the_copies_that_wait(disk: SlowDisk, tmp_path: Path) -> None:
    """The controller waits for it, and not for these (timeouts.shutdown)."""

    class Stopping(Driven):
        def at_end(self, replica: StateReplica) -> None:
            self.writer.save(replica)
            self.disk.goes_on.set()

    reports = driven(Stopping, disk, tmp_path)
    assert disk.steps == [1, 5, 2, 3] and written(tmp_path) == [1, 2, 3, 5]
    assert [report.step for report in reports if not report.error] == [1, 5, 2, 3]


def test_a_copy_of_the_same_step_that_is_being_written_is_waited_for(disk: SlowDisk, tmp_path: Path) -> None:
    """It is the same file."""

    class Orphaned(Driven):
        last_step = 1

        def at_end(self, replica: StateReplica) -> None:
            done: list[str] = []
            thread = threading.Thread(target=lambda: done.append(self.writer.write_now(replica)))
            thread.start()
            thread.join(0.2)
            assert self.disk.steps == [1] and thread.is_alive()
            self.disk.goes_on.set()
            thread.join(PATIENCE_S)
            assert done == [""]

    driven(Orphaned, disk, tmp_path)
    assert disk.steps == [1, 1] and written(tmp_path) == [1]


def test_without_the_end_of_a_run_copies_are_written_in_their_order(disk: SlowDisk, tmp_path: Path) -> None:
    class Training(Driven):
        def at_end(self, replica: StateReplica) -> None:
            self.disk.goes_on.set()

    driven(Training, disk, tmp_path)
    assert disk.steps == [1, 2, 3] and written(tmp_path) == [1, 2, 3]
