"""The worker's side of durable checkpoints: copies what it is the writer of, writes beside training, reads at start."""

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
_NICE = 10
_MAX_WAITING = 2
_MAX_REPORTS = 256

Arrays = dict[PageRange, dict[str, np.ndarray]]
"""Run of pages -> kind of state -> fp32 [elements]."""


@dataclass(frozen=True)
class CheckpointOrders:
    """What a worker needs to know of a run's checkpoints: plain values, the same on every worker.

    Args:
        run_dir: the run's directory, absolute; on other machines the same path.
        run: id of the run.
        incarnation: of the controller.
        every: steps between checkpoints; 0 for none. The last step has none: its weights are the result.
        steps: of the run.
        source: the directory of the checkpoint that the run begins with, or None.
        committed: steps up to this one were committed before the run was resumed; 0: it was not.
    """

    run_dir: str
    run: str
    incarnation: int
    every: int = 0
    steps: int = 0
    source: str | None = None
    committed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `CheckpointOrders(**fields)` inverts it."""
        return asdict(self)

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0 and step < self.steps

    def reader(self) -> Callable[[PageRange, str], Tensor] | None:
        """(page range, kind of state) -> fp32 [elements], from the checkpoint that the run begins with.

        The controller has compared it with its hashes.

        Raises:
            CheckpointError: it has become unreadable since.
        """
        if self.source is None:
            return None
        checkpoint = open_checkpoint(Path(self.source), verify=False)
        return lambda run, kind: torch.from_numpy(checkpoint.read(*run, kind))


@dataclass(frozen=True)
class _Copied:
    """State that waits to be written."""

    step: int
    epoch: int
    arrays: Arrays
    copy_ms: float


@dataclass(frozen=True)
class StepRecord:
    """What a worker knows of a step that it has applied."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    workers: int


class CheckpointWriter:
    """Writes this worker's shards. `attach` it once the worker is a member; then it looks at every applied step.

    The training thread only copies. One shard is written at a time, by a thread of lower priority; a checkpoint that
    comes due while two wait to be written is left out, and said so.

    Args:
        tell: sends a `Wrote` to the controller; called in the writing thread.
    """

    def __init__(self, rank: int, orders: CheckpointOrders, tell: Callable[[Wrote], object]) -> None:
        self._rank, self.orders, self._tell = rank, orders, tell
        self._thread: threading.Thread | None = None
        self._waiting: queue.Queue[_Copied | None] = queue.Queue()
        self._writers: Mapping[PageRange, int] = {}
        self._writers_epoch = -1
        self._reports: deque[StepRecord] = deque(maxlen=_MAX_REPORTS)

    def attach(self, replica: StateReplica, layout: ModelLayout, device: Device) -> None:
        """From now on. `device`: where the replica's state lies."""
        self._replica, self._layout, self._device = replica, layout, device
        replica.applied = self._applied

    def save(self) -> None:
        """The run is about to stop: writes the state as it is, after whatever waits; the controller is told."""
        protocol, begin = self._replica.protocol, time.perf_counter()
        if arrays := self._copy(protocol.version):
            self._put(_Copied(protocol.version, protocol.epoch, arrays, 1e3 * (time.perf_counter() - begin)))

    def close(self) -> None:
        """Waits until what was copied is written."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def write_now(self) -> None:
        """The controller is gone: writes the state as it is, and what is known of the last steps; nobody is told.

        Every worker does. If all are at the same version, the next controller makes a checkpoint of it.
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

    def _applied(self, report: Applied) -> None:
        step, workers = report.step, len(self._replica.placement.mesh.members)
        self._reports.append(StepRecord(step, report.epoch, report.loss, report.grad_norm, workers))
        if not self.orders.is_due(step):
            return
        begin = time.perf_counter()
        epoch = self._replica.protocol.epoch
        if self._waiting.qsize() >= _MAX_WAITING:
            self._tell(Wrote(step, self._rank, epoch, error="those before it are still being written"))
            return
        if arrays := self._copy(step):
            self._put(_Copied(step, epoch, arrays, 1e3 * (time.perf_counter() - begin)))

    def _put(self, copied: _Copied) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="checkpoints", daemon=True)
            self._thread.start()
        self._waiting.put(copied)

    def _copy(self, step: int) -> Arrays:
        """The state of the runs that this worker is the writer of, at version `step`."""
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
        # All of them are under way; the state changes after this call.
        return {key: {kind: copy.wait().numpy() for kind, copy in of_run.items()} for key, of_run in copies.items()}

    def _write_all(self) -> None:
        """The thread: one shard after another."""
        with contextlib.suppress(OSError, AttributeError):  # Linux: of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (copied := self._waiting.get()) is not None:
            self._tell(self._write(copied))

    def _write(self, copied: _Copied) -> Wrote:
        begin, orders, step, epoch = time.perf_counter(), self.orders, copied.step, copied.epoch
        directory, ballot = checkpoint_path(orders.run_dir, step), Ballot(orders.incarnation, epoch)
        try:
            shard = write_shard(directory, step, ballot, self._rank, copied.arrays, run=orders.run)
        except (RunError, UserError) as error:
            return Wrote(step, self._rank, epoch, error=str(error))
        write_ms = 1e3 * (time.perf_counter() - begin)
        content = (shard.name, shard.num_bytes, shard.sha256, shard.runs)
        return Wrote(step, self._rank, epoch, *content, copied.copy_ms, write_ms)


def read_reports(directory: Path) -> dict[int, StepRecord]:
    """What workers wrote of the last steps beside their shards, by step."""
    found: dict[int, StepRecord] = {}
    for path in sorted(directory.glob("reports_*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            for fields in json.loads(path.read_text()):
                fields |= {name: float.fromhex(fields[name]) for name in ("loss", "grad_norm")}
                found[fields["step"]] = StepRecord(**fields)
    return found


def _save_reports(directory: Path, rank: int, reports: Iterable[StepRecord]) -> None:
    rows = [{**asdict(r), "loss": r.loss.hex(), "grad_norm": r.grad_norm.hex()} for r in reports]
    with contextlib.suppress(RunError), replacing(directory / f"reports_{rank}.json") as file:
        write_all(file, json.dumps(rows).encode())
