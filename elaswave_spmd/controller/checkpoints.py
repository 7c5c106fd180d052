"""The controller's side of durable checkpoints: the journal of epochs, and the manifest once all shards are there.

Nothing here waits for a disk but the journal, whose line comes before a PREPARE: manifests are written and old
checkpoints removed by a thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from elaswave_spmd.controller.resume import ResumePoint
from elaswave_spmd.controller.run_identity import identity_of
from elaswave_spmd.data import PreparedData
from elaswave_spmd.errors import CheckpointError, RunError, UserError
from elaswave_spmd.recovery.messages import Message, Prepare, Wrote
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path
from elaswave_spmd.run_dir.checkpoints import prune, write_manifest
from elaswave_spmd.run_dir.directory import METRICS
from elaswave_spmd.run_dir.lock import Ballot, Journal
from elaswave_spmd.run_dir.manifest import Manifest, layout_fingerprint
from elaswave_spmd.worker.checkpoint_writer import MASTER, CheckpointOrders

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan


@dataclass
class _Pending:
    """A checkpoint whose shards are coming in."""

    since: float
    shards: dict[str, ShardInfo] = field(default_factory=dict)
    copy_ms: float = 0.0
    write_ms: float = 0.0
    is_queued: bool = False


@dataclass(frozen=True)
class _Outcome:
    """What became of a manifest."""

    manifest: Manifest
    error: str = ""


class CheckpointCoordinator:
    """One controller's checkpoints.

    Args:
        start: where the run begins; its ballot is journalled at once.
        wake: called, by a thread, when there is something for `poll`.

    Raises:
        DataError: the journal is damaged.
        FilesError: it cannot be written.
    """

    def __init__(
        self, plan: RunPlan, data: PreparedData, observer: RunObserver, start: ResumePoint, wake: Callable[[], None]
    ) -> None:
        self._plan, self._observer, self._start, self._wake = plan, observer, start, wake
        self._run_dir = observer.run_dir.path
        self._identity = identity_of(plan.settings, data)
        self._layout = layout_fingerprint(plan.description.layout)
        self._num_pages = sum(layer.num_state_pages for layer in plan.description.layout.layers)
        self._pending: dict[int, _Pending] = {}
        self._newest = start.step if start.is_in(self._run_dir) else 0
        self._last: tuple[int, int] | None = None  # (step, mesh epoch) of the one at which the run stops
        self._lost: dict[int, str] = {}  # step -> why it will have none
        self._validation: dict[str, object] | None = None
        self._manifests: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._outcomes: deque[_Outcome] = deque()
        self._thread: threading.Thread | None = None
        self._journal = Journal(self._run_dir)
        self._kinds = (MASTER, *plan.job.optimizer.state_names)
        # If this controller dies, the next one reads here what the run was, to complete what the workers wrote.
        told = {"run": start.run, "identity": self._identity, "layout": self._layout, "kinds": self._kinds}
        self._journal.append(start.incarnation, 0, "resume" if start.step else "start", **told)
        self._last_epoch = 0

    def orders(self) -> CheckpointOrders:
        """What the workers are told."""
        start, settings = self._start, self._plan.settings
        return CheckpointOrders(
            str(self._run_dir.absolute()),
            start.run,
            start.incarnation,
            settings.checkpoint.every,
            self._plan.job.steps,
            str(start.checkpoint.path.absolute()) if start.checkpoint else None,
            max(start.lines, default=0),
        )

    def sending(self, message: Message) -> None:
        """Journals the epoch of a PREPARE, on the disk before anybody is told of it.

        Raises:
            FilesError: the disk is full.
        """
        if isinstance(message, Prepare) and message.epoch > self._last_epoch:
            self._last_epoch = message.epoch
            self._journal.append(self._start.incarnation, message.epoch, "prepare", after=message.after)

    def validated(self, step: int, loss: float) -> None:
        """A validation is known; later manifests repeat it."""
        self._validation = {"step": step, "loss_hex": loss.hex()}

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint of this run; 0: it has none."""
        return self._newest

    def stops_at(self, step: int, epoch: int) -> None:
        """The run stops at the checkpoint of this step, whose shards are about to be written in this mesh epoch.

        What went wrong with it before does not count; shards that are there already do.
        """
        self._last = step, epoch
        self._lost.pop(step, None)

    def why_not(self, step: int) -> str:
        """Why there will be no checkpoint of a step; empty while there may be one."""
        return self._lost.get(step, "")

    def wrote(self, message: Wrote) -> None:
        """A worker's shard is on the disk, or it could not be written."""
        if message.step <= self._newest:
            return
        if message.error:
            if self._last is not None and message.step == self._last[0] and message.epoch < self._last[1]:
                return
            self._abandon(message.step, f"worker {message.rank}: {message.error.splitlines()[0]}")
            return
        pending = self._pending.setdefault(message.step, _Pending(time.monotonic()))
        ballot = Ballot(self._start.incarnation, message.epoch)
        pending.shards[message.name] = ShardInfo(
            message.name,
            self._start.run,
            message.step,
            ballot,
            message.rank,
            message.num_bytes,
            message.sha256,
            message.runs,
        )
        pending.copy_ms = max(pending.copy_ms, message.copy_ms)
        pending.write_ms = max(pending.write_ms, message.write_ms)
        runs = {run for shard in pending.shards.values() for run in shard.runs}
        if not pending.is_queued and sum(stop - first for _, first, stop in runs) >= self._num_pages:
            self._finish(message.step, pending)

    def _finish(self, step: int, pending: _Pending) -> None:
        """All pages are there: the manifest may be written."""
        shards = tuple(pending.shards.values())
        last = self._observer.last.step if self._observer.last is not None else self._start.step
        try:
            manifest = Manifest(
                self._start.run,
                step,
                max(shard.ballot for shard in shards),
                max(last, step),
                self._identity,
                self._layout,
                self._kinds,
                shards,
                self._validation,
            )
        except CheckpointError:
            return  # workers of two mesh epochs have cut pages differently; more shards may come
        pending.is_queued = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_manifests, name="manifests", daemon=True)
            self._thread.start()
        self._manifests.put(manifest)

    def _write_manifests(self) -> None:
        """The thread: one manifest after another, and whatever is to be removed after each."""
        while (manifest := self._manifests.get()) is not None:
            error = ""
            try:
                # The lines up to this step are part of what a resumed run begins with.
                _flush(self._run_dir / METRICS)
                write_manifest(checkpoint_path(self._run_dir, manifest.step), manifest)
                prune(self._run_dir, self._plan.settings.checkpoint.keep)
            except (RunError, UserError, OSError) as caught:
                error = str(caught)
            self._outcomes.append(_Outcome(manifest, error))
            self._wake()

    def poll(self) -> None:
        """Says what the thread has done, in events."""
        while self._outcomes:
            outcome = self._outcomes.popleft()
            step = outcome.manifest.step
            if outcome.error:
                self._abandon(step, outcome.error.splitlines()[0])
                continue
            pending = self._pending.pop(step)
            self._newest = max(self._newest, step)
            for old in [s for s in self._pending if s < step]:
                self._abandon(old, "a part of it was never written")
            shards = outcome.manifest.shards
            total, seconds = sum(s.num_bytes for s in shards), time.monotonic() - pending.since
            self._observer.on_event(
                "checkpoint",
                step=step,
                shards=len(shards),
                bytes=total,
                copy_ms=round(pending.copy_ms, 3),
                write_ms=round(pending.write_ms, 3),
                message=f"step {step}: {total:,} bytes in {len(shards)} shards; training stood still for "
                f"{pending.copy_ms:.1f} ms, on the disk {seconds:.2f} s after the first shard",
            )

    def _abandon(self, step: int, why: str) -> None:
        self._lost[step] = why
        if self._pending.pop(step, None) is not None or step > self._newest:
            self._observer.on_event("checkpoint_lost", step=step, message=f"no checkpoint of step {step}: {why}")

    def drain(self) -> None:
        """Waits for the manifest that is being written, and begins no other."""
        self._pending = {step: pending for step, pending in self._pending.items() if pending.is_queued}
        self._newest = max([self._newest, *self._pending])
        if self._thread is not None:
            self._manifests.put(None)
            self._thread.join()
            self._thread = None
            self.poll()

    def close(self) -> None:
        """Waits for the manifest that is being written; closes the journal."""
        with contextlib.suppress(Exception):
            self.drain()
        self._journal.close()


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
