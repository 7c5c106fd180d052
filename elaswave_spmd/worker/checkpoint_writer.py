"""The worker's side of durable checkpoints.

At a due step each page range is copied to host memory by one of its replicas, its writer (`writers_of`), and written to
the run's directory by a thread beside training. The controller gathers the reports (`Wrote`) of all writers and then
commits the checkpoint by its manifest; without a manifest the shards do not count. At the start of a resumed run the
worker reads the state that it holds from a committed checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elaswave_spmd.errors import RunError, UserError
from elaswave_spmd.recovery.messages import Applied, Wrote
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path, write_shard
from elaswave_spmd.run_dir.checkpoints import open_checkpoint
from elaswave_spmd.run_dir.files import replacing, write_all
from elaswave_spmd.run_dir.lock import Ballot
from elaswave_spmd.run_dir.manifest import MANIFEST, writers_of
from elaswave_spmd.runtime.devices import Device, HostCopy
from elaswave_spmd.sharding.layout import ModelLayout
from elaswave_spmd.sharding.replicas import PageRange
from elaswave_spmd.worker.replica import StateReplica
from elaswave_spmd.worker.state import LEARNING

MASTER = "master"
"""The kind of state that is not the optimizer's: the fp32 master parameters."""

_NICE = 10
"""How far the priority of the writing thread is lowered, so that hashing does not slow training down."""

_MAX_WAITING = 2
"""Copies of the state that may wait to be written. Each has the size of this worker's share of the state."""

_MAX_REPORTS = 256
"""Applied steps that a worker remembers, for `write_now`."""

Arrays = dict[PageRange, dict[str, np.ndarray]]
"""Page range -> kind of state (`MASTER`, or one of the optimizer's) -> fp32 [elements]."""


@dataclass(frozen=True)
class CheckpointOrders:
    """The checkpoint settings of a run as a worker gets them: plain values, the same on every worker.

    Args:
        run_dir: the run's directory, absolute; the same path on all machines.
        run: the run's id.
        incarnation: the number of the controller that started this worker, counted over all starts of the run.
        every: steps between checkpoints; 0 for none. The last step has none, since its weights are the result.
        steps: number of steps of the run.
        source: the directory of the checkpoint that the run begins with, or None.
        committed: the last step that was committed before the run was resumed; 0 if it is not a resumed run.
    """

    run_dir: str
    run: str
    incarnation: int
    every: int = 0
    steps: int = 0
    source: str | None = None
    committed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain JSON types. `CheckpointOrders(**fields)` inverts it."""
        return asdict(self)

    def is_due(self, step: int) -> bool:
        """True if the state after this step is to be written."""
        return self.every > 0 and step % self.every == 0 and step < self.steps

    def reader(self) -> Callable[[PageRange, str], Tensor] | None:
        """Opens the checkpoint that the run begins with.

        Its hashes are not verified again: the controller did so before it started the workers.

        Returns:
            (page range, kind of state) -> fp32 [elements]; None if the run begins with initial values.

        Raises:
            CheckpointError: the checkpoint cannot be read any more.
        """
        if self.source is None:
            return None
        checkpoint = open_checkpoint(Path(self.source), verify=False)
        return lambda page_range, kind: torch.from_numpy(checkpoint.read(*page_range, kind))


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
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    workers: int


class CheckpointWriter:
    """Writes this worker's shards of a run's checkpoints.

    `attach` it when the worker becomes a member; from then on it is called for every applied step. The training thread
    only copies the state. One shard at a time is written, by a thread of lower priority. A checkpoint that becomes due
    while two copies wait to be written is skipped, and reported as skipped.

    Args:
        rank: this worker's.
        orders: the run's checkpoint settings.
        send_report: sends a `Wrote` to the controller. It is called by the writing thread, and by the training thread
            for a skipped checkpoint.
    """

    def __init__(self, rank: int, orders: CheckpointOrders, send_report: Callable[[Wrote], object]) -> None:
        self._rank = rank
        self.orders = orders
        self._send_report = send_report
        self._thread: threading.Thread | None = None
        self._waiting: queue.Queue[_Copied | None] = queue.Queue()
        self._writers: Mapping[PageRange, int] = {}
        self._writers_epoch = -1
        self._reports: deque[StepRecord] = deque(maxlen=_MAX_REPORTS)

    def attach(self, replica: StateReplica, layout: ModelLayout, device: Device) -> None:
        """Starts to follow a replica's applied steps.

        Args:
            replica: this worker's.
            layout: of the model.
            device: holds the replica's state.
        """
        self._replica = replica
        self._layout = layout
        self._device = device
        replica.applied = self._on_applied

    def save(self) -> None:
        """Writes the state as it is, after the copies that wait already. Called before the run stops on request."""
        protocol = self._replica.protocol
        begin = time.perf_counter()
        if arrays := self._copy(protocol.version):
            self._enqueue(_Copied(protocol.version, protocol.epoch, arrays, 1e3 * (time.perf_counter() - begin)))

    def close(self) -> None:
        """Waits until all copies are written, and ends the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def write_now(self) -> None:
        """Writes the state as it is, and the records of the last steps, without a report: the controller is gone.

        Every worker does so on its own. If all of them are at the same version, the next controller finds a complete
        set of shards and makes a checkpoint of it.
        """
        self.close()
        step = self._replica.protocol.version
        directory = checkpoint_path(self.orders.run_dir, step)
        if not step or (directory / MANIFEST).exists():
            return
        if arrays := self._copy(step):
            wrote = self._write(_Copied(step, self._replica.protocol.epoch, arrays, 0.0))
            if not wrote.error:
                _save_reports(directory, self._rank, self._reports)

    def _on_applied(self, report: Applied) -> None:
        """Records a step, and copies the state if a checkpoint is due. The state changes after this call."""
        step = report.step
        num_workers = len(self._replica.placement.mesh.members)
        self._reports.append(StepRecord(step, report.epoch, report.loss, report.grad_norm, num_workers))
        if not self.orders.is_due(step):
            return
        begin = time.perf_counter()
        epoch = self._replica.protocol.epoch
        if self._waiting.qsize() >= _MAX_WAITING:
            self._send_report(Wrote(step, self._rank, epoch, error="those before it are still being written"))
            return
        if arrays := self._copy(step):
            self._enqueue(_Copied(step, epoch, arrays, 1e3 * (time.perf_counter() - begin)))

    def _enqueue(self, copied: _Copied) -> None:
        """Hands a copy to the writing thread, which is started for the first one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
            self._thread.start()
        self._waiting.put(copied)

    def _copy(self, step: int) -> Arrays:
        """Copies the page ranges that this worker is the writer of, at version `step`, to host memory."""
        placement = self._replica.placement
        if self._writers_epoch != placement.mesh.epoch:
            self._writers_epoch = placement.mesh.epoch
            self._writers = writers_of(placement.replica_map(self._layout), self._layout)
        copies: dict[PageRange, dict[str, HostCopy]] = {}
        for part in self._replica.state:
            if self._writers[part.run.key] == self._rank and part.version != LEARNING:
                assert part.version == step, (part.run, part.version, step)
                state = {MASTER: part.master, **part.optimizer_state}
                copies[part.run.key] = {kind: self._device.copy_to_host(values) for kind, values in state.items()}
        # All copies are started before the first one is waited for. They must be complete on return: the state changes.
        return {key: {kind: copy.wait().numpy() for kind, copy in kinds.items()} for key, kinds in copies.items()}

    def _write_all(self) -> None:
        """The writing thread: one shard after another, each reported to the controller."""
        with contextlib.suppress(OSError, AttributeError):  # on Linux a priority is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (copied := self._waiting.get()) is not None:
            self._send_report(self._write(copied))

    def _write(self, copied: _Copied) -> Wrote:
        """Writes one shard. A full disk or a missing directory ends this checkpoint, not the training."""
        begin = time.perf_counter()
        orders = self.orders
        step = copied.step
        epoch = copied.epoch
        directory = checkpoint_path(orders.run_dir, step)
        ballot = Ballot(orders.incarnation, epoch)
        try:
            shard = write_shard(directory, step, ballot, self._rank, copied.arrays, run=orders.run)
        except (RunError, UserError) as error:
            return Wrote(step, self._rank, epoch, error=str(error))
        write_ms = 1e3 * (time.perf_counter() - begin)
        content = (shard.name, shard.num_bytes, shard.sha256, shard.runs)
        return Wrote(step, self._rank, epoch, *content, copied.copy_ms, write_ms)


def read_reports(directory: Path) -> dict[int, StepRecord]:
    """Reads the records that workers wrote beside their shards (`CheckpointWriter.write_now`), by step.

    A file that cannot be read is left out: the records are for the metrics, the state does not need them.
    """
    found: dict[int, StepRecord] = {}
    for path in sorted(directory.glob("reports_*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            for fields in json.loads(path.read_text()):
                fields |= {name: float.fromhex(fields[name]) for name in ("loss", "grad_norm")}
                found[fields["step"]] = StepRecord(**fields)
    return found


def _save_reports(directory: Path, rank: int, reports: Iterable[StepRecord]) -> None:
    """Writes a worker's records. Floats are written in hexadecimal, so that they are read back bit for bit."""
    rows = [{**asdict(r), "loss": r.loss.hex(), "grad_norm": r.grad_norm.hex()} for r in reports]
    with contextlib.suppress(RunError), replacing(directory / f"reports_{rank}.json") as file:
        write_all(file, json.dumps(rows).encode())
