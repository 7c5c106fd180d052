"""The worker's side of durable checkpoints.

At a due step each page range is copied to host memory by one of its replicas, its writer (`assign_writers`), and
written to the run's directory by a thread beside training. The controller gathers the reports (`ShardWritten`) of all
writers and then commits the checkpoint by its manifest; without a manifest the shards do not count. At the start of a
resumed run the worker reads the state that it holds from a committed checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from elaswave_spmd.errors import CheckpointError, RunError, UserError
from elaswave_spmd.recovery.messages import Applied, ShardWritten
from elaswave_spmd.regular_files import read_regular
from elaswave_spmd.run_dir.atomic_write import replacing
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path, make_checkpoint_folder, shard_name, write_shard
from elaswave_spmd.run_dir.checkpoint_writers import assign_writers
from elaswave_spmd.run_dir.in_place import InPlace
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.run_dir.json_lines import float_of_hex, read_json
from elaswave_spmd.run_dir.manifest import load_manifest
from elaswave_spmd.runtime.devices import Device, HostCopy
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.state import LEARNING, MASTER
from elaswave_spmd.worker.state_replica import StateReplica

_NICE = 10
"""How far the priority of the writing thread is lowered, so that hashing does not slow training down."""

_MAX_WAITING = 2
"""Copies of the state that may wait to be written. Each has the size of this worker's share of the state."""

_MAX_REPORTS = 8192
"""Applied steps that a worker remembers, for `write_now`. A controller that stands still for a minute before it is lost
has written none of them down, and a checkpoint without the lines of all steps before it does not count."""

_OTHERS_S, _POLL_S = 1.0, 0.02
"""For how long `write_now` waits for other workers' shards, at least, and how often it looks."""

_REPORTS = "reports_*.json"

Arrays = dict[PageRange, dict[str, np.ndarray]]
"""Page range -> kind of state (`MASTER`, or one of the optimizer's) -> fp32 [elements]."""


@dataclass(frozen=True)
class _Copied:
    """A copy of this worker's share of the state, in host memory, that waits to be written.

    Args:
        step: the version of the state.
        epoch: the mesh epoch in which it was copied.
        arrays: the copy.
        copy_ms: for how long training was stopped by the copying.
    """

    step: int
    epoch: int
    arrays: Arrays
    copy_ms: float


@dataclass(frozen=True)
class StepRecord:
    """One applied step as a worker knows it: what the controller would have written into the metrics.

    Args:
        step: its number.
        epoch: the mesh epoch in which it was applied.
        loss: mean over the tokens of the global batch.
        grad_norm: before clipping.
        workers: members of the mesh.
        weight: of the loss; None if losses have none.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    workers: int
    weight: float | None = None


class CheckpointWriter:
    """Writes this worker's shards of a run's checkpoints.

    `applied` is called after every step. The training thread only copies the state. One shard at a time is written, by
    a thread of lower priority. A checkpoint that becomes due while two copies wait to be written is skipped, and
    reported as skipped. At the end of a run its last state is written before the copies that wait: the time until the
    worker is killed may be enough for one of them only.

    Args:
        rank: this worker's.
        orders: the run's checkpoint settings.
        layout: of the model.
        device: holds the state.
        send_report: sends a `ShardWritten` to the controller. It is called by the writing thread, and by the training
            thread for a skipped checkpoint.
    """

    def __init__(
        self,
        rank: int,
        orders: CheckpointOrders,
        layout: ModelLayout,
        device: Device,
        send_report: Callable[[ShardWritten], object],
    ) -> None:
        self._rank = rank
        self._orders = orders
        self._in_place = InPlace(orders.run_dir)
        self._layout = layout
        self._device = device
        self._send_report = send_report
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards the next three
        self._waiting: deque[_Copied] = deque()
        self._is_closing = False
        self._being_written: int | None = None  # the step of the copy that the thread writes now
        self._writers: Mapping[PageRange, int] = {}
        self._writers_epoch = -1
        self._reports: deque[StepRecord] = deque(maxlen=_MAX_REPORTS)

    def save(self, replica: StateReplica) -> None:
        """Writes the state as it is, before the copies that wait already. Called before the run stops on request."""
        protocol = replica.protocol
        begin = time.perf_counter()
        if arrays := self._copy(replica, protocol.version):
            copied = _Copied(protocol.version, protocol.epoch, arrays, 1e3 * (time.perf_counter() - begin))
            self._enqueue(copied, first=True)

    def close(self) -> None:
        """Waits until all copies are written, and ends the thread."""
        if self._thread is not None:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
            self._thread.join()
            self._thread, self._is_closing = None, False

    def write_now(self, replica: StateReplica) -> str:
        """Writes the state as it is, and the records of the last steps, without a report: the controller is gone.

        Every worker does so on its own. If all of them are at the same version, the next controller finds a complete
        set of shards and makes a checkpoint of it. The share of a worker that is gone as well is written by all workers
        that hold it: a machine may have been lost on which both were.

        Copies of older steps that wait are not written before; `close` writes them.

        Returns:
            Why the state could not be written; empty if it was, or if there was nothing to write.
        """
        with self._changed:
            older = [copied for copied in self._waiting if copied.step != replica.protocol.version]
            self._waiting.clear()
        try:
            return self._write_last(replica)
        finally:
            for copied in older:
                self._enqueue(copied)

    def _write_last(self, replica: StateReplica) -> str:
        """Writes the state of a run whose controller is gone. See `write_now`."""
        step, epoch = replica.protocol.version, replica.protocol.epoch
        directory = checkpoint_path(self._orders.run_dir, step)
        with self._changed:  # perhaps it is the file that is about to be written
            self._changed.wait_for(lambda: self._being_written != step)
        if not step or self._is_complete(directory):
            return ""  # initial values can be drawn again; or the controller had completed this checkpoint
        began, wrote, unsaid = time.monotonic(), None, ""
        has_share = self._has_share(replica, step)
        if has_share and (arrays := self._copy(replica, step)):
            unsaid = self._report_to(directory)
            wrote = self._write(_Copied(step, epoch, arrays, 0.0))
        if wrote is None or not wrote.error:
            ended = time.monotonic()  # others take about as long
            lacking = self._writers_that_lack(replica, directory, ended + max(_OTHERS_S, ended - began))
            if not has_share:  # other replicas see that its shard is missing, and write what this worker cannot
                lacking |= {self._rank}
            if arrays := self._copy(replica, step, lacking):
                unsaid = unsaid if wrote is not None else self._report_to(directory)
                wrote = self._write(_Copied(step, epoch, arrays, 0.0), for_others=True)
        if wrote is None:
            return ""
        if why := wrote.error or unsaid:
            return f"its state after step {step} could not be written to {directory}: {why}"
        return ""

    def _report_to(self, directory: Path) -> str:
        """Writes the records of the last steps, without which the state is worth nothing to the next controller.

        Before the state, as they may be written where it has no room any more. If they cannot be written, the state is
        all the same: those of another worker will do.

        Returns:
            Why they could not be written; empty if they were.
        """
        try:
            self._in_place.check()
            _save_reports(directory, self._rank, self._reports)
        except (RunError, UserError) as error:
            return str(error)
        return ""

    def _has_share(self, replica: StateReplica, step: int) -> bool:
        """True if all state that this worker is the writer of is at version `step`.

        It may have learned some from a primary that had applied the next step, and is lost.
        """
        writers = self._writers_of(replica.placement)
        own = (part for part in replica.state if writers[part.pages.key] == self._rank)
        return all(part.version in (LEARNING, step) for part in own)

    def _is_complete(self, directory: Path) -> bool:
        """True if this life of the run has completed a checkpoint, or began with it.

        One of an earlier life does not count: this life computes its step again because it is bad.
        """
        if str(directory) == self._orders.source:
            return True
        try:
            return load_manifest(directory).ballot.incarnation == self._orders.incarnation
        except CheckpointError:  # there is none, or it is damaged
            return False

    def _writers_that_lack(self, replica: StateReplica, directory: Path, until: float) -> frozenset[int]:
        """The workers that have not written their shards by then, of pages which this worker holds as well.

        Args:
            until: by the monotonic clock.
        """
        ballot = Ballot(self._orders.incarnation, replica.protocol.epoch)
        writers = self._writers_of(replica.placement)
        version = replica.protocol.version
        others = {writers[part.pages.key] for part in replica.state if part.version == version} - {self._rank}
        while others := {rank for rank in others if not (directory / shard_name(rank, ballot)).exists()}:
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_S)
        return frozenset(others)

    def applied(self, report: Applied, replica: StateReplica) -> None:
        """Records a step, and copies the state if a checkpoint is due. The state changes after this call."""
        step = report.step
        num_workers = len(replica.placement.mesh.members)
        self._reports.append(StepRecord(step, report.epoch, report.loss, report.grad_norm, num_workers, report.weight))
        if not self._orders.is_due(step):
            return
        begin = time.perf_counter()
        epoch = replica.protocol.epoch
        # The disk is slower than the checkpoints come due: skip one, rather than fill the memory with copies.
        if len(self._waiting) >= _MAX_WAITING:
            self._send_report(ShardWritten(step, self._rank, epoch, error="those before it are still being written"))
            return
        if arrays := self._copy(replica, step):
            self._enqueue(_Copied(step, epoch, arrays, 1e3 * (time.perf_counter() - begin)))

    def _enqueue(self, copied: _Copied, *, first: bool = False) -> None:
        """Hands a copy to the writing thread, which is started for the first one.

        Args:
            first: it is written before those that wait.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting.insert(0 if first else len(self._waiting), copied)
            self._changed.notify_all()

    def _writers_of(self, placement: Placement) -> Mapping[PageRange, int]:
        """The writer of each page range: a function of the replica map, so all workers agree without a message."""
        if self._writers_epoch != placement.mesh.epoch:
            self._writers_epoch = placement.mesh.epoch
            self._writers = assign_writers(placement.replica_map(self._layout), self._layout)
        return self._writers

    def _copy(self, replica: StateReplica, step: int, of_writers: Collection[int] | None = None) -> Arrays:
        """Copies page ranges at version `step` to host memory.

        Args:
            of_writers: the page ranges at that version that this worker holds and one of these is the writer of; None:
                those that this worker is the writer of, all of which are at that version.
        """
        writers, chosen = self._writers_of(replica.placement), {self._rank} if of_writers is None else of_writers
        copies: dict[PageRange, dict[str, HostCopy]] = {}
        for part in replica.state:
            if writers[part.pages.key] in chosen and part.version != LEARNING:
                if part.version != step and of_writers is not None:
                    continue
                assert part.version == step, (part.pages, part.version, step)
                state = {MASTER: part.master, **part.optimizer_state}
                copies[part.pages.key] = {kind: self._device.copy_to_host(values) for kind, values in state.items()}
        # All copies are started before the first one is waited for. They must be complete on return: the state changes.
        return {key: {kind: copy.wait().numpy() for kind, copy in kinds.items()} for key, kinds in copies.items()}

    def _write_all(self) -> None:
        """The writing thread: one shard after another, each reported to the controller."""
        with contextlib.suppress(OSError, AttributeError):  # on Linux a priority is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (copied := self._next()) is not None:
            self._send_report(self._write(copied))

    def _next(self) -> _Copied | None:
        """The copy that the writing thread writes next; None if all are written, and there is to be none more."""
        with self._changed:
            self._being_written = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            copied = self._waiting.popleft()
            self._being_written = copied.step
            return copied

    def _write(self, copied: _Copied, *, for_others: bool = False) -> ShardWritten:
        """Writes one shard. A full disk or a missing directory ends this checkpoint, not the training.

        Args:
            for_others: as for `write_shard`.
        """
        begin = time.perf_counter()
        orders = self._orders
        step = copied.step
        epoch = copied.epoch
        directory = checkpoint_path(orders.run_dir, step)
        ballot = Ballot(orders.incarnation, epoch)
        try:
            self._in_place.check()  # another run may have begun where this one's directory was
            shard = write_shard(
                directory, step, ballot, self._rank, copied.arrays, run=orders.run, for_others=for_others
            )
        except (RunError, UserError) as error:
            return ShardWritten(step, self._rank, epoch, error=str(error))
        write_ms = 1e3 * (time.perf_counter() - begin)
        content = (shard.name, shard.num_bytes, shard.sha256, shard.pages)
        return ShardWritten(step, self._rank, epoch, *content, copied.copy_ms, write_ms)


def has_reports(directory: Path) -> bool:
    """True if workers whose controller was gone have saved their state in this directory (`write_now`).

    Raises:
        OSError: it cannot be listed now.
    """
    return any(fnmatchcase(name, _REPORTS) for name in os.listdir(directory))


def remove_reports(directory: Path) -> None:
    """Remove what `has_reports` looks for, as far as that is possible."""
    for path in directory.glob(_REPORTS):
        with contextlib.suppress(OSError):
            path.unlink()


def read_reports(directory: Path) -> tuple[dict[int, StepRecord], list[str]]:
    """Reads the records that workers wrote beside their shards (`CheckpointWriter.write_now`).

    Returns:
        The records by step, without those of damaged files; and for each file that cannot be read now, why.
    """
    found: dict[int, StepRecord] = {}
    unread: list[str] = []
    for path in sorted(directory.glob(_REPORTS)):
        try:
            text = read_regular(path)
        except OSError as error:
            unread.append(f"cannot read {path.name} ({error.strerror or error})")
            continue
        with contextlib.suppress(ValueError, LookupError, TypeError):
            for fields in read_json(text):
                fields |= {name: float_of_hex(fields[name]) for name in ("loss", "grad_norm")}
                if isinstance(weight := fields.get("weight"), str):  # earlier versions wrote it as a number
                    fields["weight"] = float_of_hex(weight)
                found[fields["step"]] = StepRecord(**fields)
    return found, unread


def _save_reports(directory: Path, rank: int, reports: Iterable[StepRecord]) -> None:
    """Writes a worker's records. Floats are written in hexadecimal, so that they are read back bit for bit.

    Raises:
        FilesError: the disk is full, or the run's directory is missing.
    """
    rows = [{name: v.hex() if isinstance(v, float) else v for name, v in asdict(r).items()} for r in reports]
    make_checkpoint_folder(directory)
    with replacing(directory / f"reports_{rank}.json", durable=True) as scratch:
        scratch.write_text(json.dumps(rows))
