"""What the controller does when a worker fails or is lost: the run goes on without it, or ends and says why."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from elaswave_spmd.conf.schema import ElasticSettings, MeshSettings, Settings
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator
from elaswave_spmd.controller.events import EpochEvents
from elaswave_spmd.controller.supervision import Loss, Supervision
from elaswave_spmd.errors import CheckpointError, RunError, WorkerError, exception_line
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Effect, Save
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.failure_detector import BrokenLinks
from elaswave_spmd.run_dir import RunObserver
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.checkpoints import Checkpoint, load_newest_good
from elaswave_spmd.runtime.processes.fork_server_client import Exited, ForkServerClient
from elaswave_spmd.runtime.processes.launcher import Launcher
from elaswave_spmd.runtime.transport.mailbox import Envelope, Mailbox
from elaswave_spmd.sharding.replicas import ReplicaSet

_LAST_WORDS_S = 1.0  # how long the report of a worker that failed may take after its process ended
_LOOK_S = 0.02
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class FailureHandler:
    """Part of the controller, in its thread.

    Args:
        workers: those that have been started and are neither lost nor let go; whom this loses is taken out.
        spawn: starts so many newcomers.
        perform: does what the protocol says.
    """

    def __init__(
        self,
        elastic: ElasticSettings,
        protocol: ControllerProtocol,
        supervision: Supervision,
        mailbox: Mailbox,
        launcher: Launcher | ForkServerClient,
        events: EpochEvents,
        workers: dict[int, int | None],
        spawn: Callable[[int], object],
        perform: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._elastic, self._protocol, self._supervision, self._mailbox = elastic, protocol, supervision, mailbox
        self._launcher, self._events, self._workers = launcher, events, workers
        self._spawn, self._perform = spawn, perform
        self._crashes: dict[int, tuple[int, str]] = {}  # step -> (rank, report) of the first one
        self._links = BrokenLinks()
        self._unexplained: dict[int, int] = {}  # rank -> the step in which its end was seen, before its cause is known

    def failed(self, message: m.Failed) -> None:
        """A worker says that an exception ends it. In the same step on a second worker it is a bug, no lost device.

        Raises:
            RunError: the run cannot go on.
        """
        rank, step, report = message.rank, message.step, message.report
        headline = exception_line(report)
        if self._survives and rank not in self._protocol.placement.mesh:  # it has never joined, or was let go
            return self._lose(rank, f"an exception: {headline}", time.monotonic())
        first = self._crashes.get(step, (rank, report))
        if not self._survives or first[0] != rank:
            self._raise_if_killed()
            raise WorkerError(*first)
        self._crashes[step] = rank, report
        return self._lose(rank, f"an exception: {headline}", time.monotonic())

    def lost(self, loss: Loss) -> None:
        """A worker is gone, or hangs.

        Raises:
            RunError: the run cannot go on.
        """
        if loss.rank not in self._workers:  # it was let go, or is known to be lost
            self._explain(loss)
            return
        if not self._survives:
            self._not_survived(loss)
        if loss.rank in self._protocol.placement.mesh:
            self._unexplained[loss.rank] = self._protocol.version + 1
            self._explain(loss)
        self._lose(loss.rank, loss.reason, loss.at)

    def link_closed(self, *ends: int) -> None:
        """A link between two workers, or ours to one, has ended: with one of its ends, or by itself."""
        if all(rank in self._workers for rank in ends):
            self._links.closed(*ends)

    def lives(self, rank: int) -> None:
        """A worker has said that it lives. Perhaps it has lost a link.

        Raises:
            RunError: the run cannot go on.
        """
        for verdict in self._links.heartbeat(rank):
            if verdict.evicted is None:
                self._perform(self._protocol.relink(verdict.ends, verdict.reason))
                continue
            if not self._survives:
                raise RunError(f"worker {verdict.evicted}: {verdict.reason}")
            self._lose(verdict.evicted, verdict.reason, time.monotonic())

    def _explain(self, loss: Loss) -> None:
        """How a member ended is known, mostly some time after that it did."""
        if loss.exited is None or (step := self._unexplained.pop(loss.rank, None)) is None:
            return
        if _is_crash(loss.exited):
            rank, _ = self._crashes.setdefault(step, (loss.rank, str(loss.exited)))
            if rank != loss.rank:
                raise RunError(f"{loss.exited}, as worker {rank} did in the same step {step}")

    def give_up(self, reason: str, last_resort: Callable[[], str] = lambda: "") -> NoReturn:
        """The protocol knows no way to go on.

        Args:
            last_resort: raises something else if there is a way after all; else says what the user can do.

        Raises:
            RunError: always.
        """
        self._wait_for_causes()
        if self._crashes:
            rank, report = self._crashes[max(self._crashes)]
            raise WorkerError(rank, report)
        raise RunError(f"the run cannot go on: {reason}. {last_resort()}".strip())

    def stop(self, version: int, message: str) -> NoReturn:
        """The run ends, its state is safe. An exception after step `version` that brought it to that is shown.

        Raises:
            RunError: always.
        """
        self._wait_for_causes()
        newest = max(self._crashes, default=0)
        if newest > version:
            rank, report = self._crashes[newest]
            message += f"\n\nworker {rank} failed:\n{report}"
        raise RunError(message)

    def _wait_for_causes(self) -> None:
        """The end of a process is seen some time before what ended it is known: it may be a crash."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._unexplained and time.monotonic() < deadline:
            item = self._mailbox.get(_LOOK_S)
            message = m.decode(item.header) if isinstance(item, Envelope) else None
            if isinstance(message, m.Failed):
                self.failed(message)
            for loss in self._supervision.losses():
                if loss.rank not in self._workers:
                    self._explain(loss)

    @property
    def _survives(self) -> bool:
        """Whether a loss now is something to go on from: not while the first workers start."""
        return self._elastic.enabled and self._protocol.started

    def _lose(self, rank: int, reason: str, at: float) -> None:
        if rank not in self._workers:
            return
        del self._workers[rank]
        self._links.forget(rank)
        mesh = self._protocol.placement.mesh
        if rank in mesh:
            self._events.lost(rank, at, self._supervision.last_sign(rank))
            if self._elastic.replace:
                self._spawn(1)
        else:
            self._events.newcomer_lost(rank, mesh, reason)
            self._supervision.forget(rank)
            self._supervision.end(rank)  # it may live, and be late
        self._perform(self._protocol.lost(rank, reason))

    def _not_survived(self, loss: Loss) -> None:
        """The run ends. A worker's own report, if there is one, says more than its exit."""
        self._raise_if_killed([loss.exited] if loss.exited else [])
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            item = self._mailbox.get(left)
            message = m.decode(item.header) if isinstance(item, Envelope) else None
            if isinstance(message, m.Failed) and message.rank == loss.rank:
                self.failed(message)
            for other in self._supervision.losses():
                self._raise_if_killed([other.exited] if other.exited else [])
                loss = other if other.rank == loss.rank and other.exited else loss
        raise RunError(str(loss.exited or f"worker {loss.rank}: {loss.reason}"))

    def _raise_if_killed(self, exits: Sequence[Exited] = ()) -> None:
        """If a worker was killed, that is the cause, and what others say a consequence.

        Who is known to be lost has been killed by us, for certain.
        """
        if not exits:
            self._launcher.signal(-1, 0)  # kills nobody; its answer comes after the notices of all who have ended
            exits = [loss.exited for loss in self._supervision.losses() if loss.exited]
        for exited in exits:
            if exited.signal is not None and exited.rank in self._workers:
                raise RunError(str(exited))


def _is_crash(exited: Exited) -> bool:
    """An end that a bug can cause; SIGKILL and SIGTERM come from outside."""
    return exited.signal in _CRASHES or exited.code not in (None, 0, 1)  # 1: its report comes as Failed


# What is left to do when state is lost for good: the run goes back to its newest good checkpoint, or ends.
_MAX_IN_A_ROW = 3


class RestartError(Exception):
    """The run begins again, at a checkpoint.

    Args:
        settings: of the run from now on.
        step: of the checkpoint.
    """

    def __init__(self, settings: Settings, step: int) -> None:
        super().__init__(f"the run begins again after step {step}")
        self.settings, self.step = settings, step


class Restarts:
    """Those of one command: a run that does not get ahead is not begun again for ever."""

    def __init__(self) -> None:
        self._steps: list[int] = []

    def next(self, restart: RestartError) -> Settings:
        """The settings to go on with.

        Raises:
            RunError: the run has been begun again at the same checkpoint too often.
        """
        self._steps.append(restart.step)
        if self._steps[-_MAX_IN_A_ROW - 1 :].count(restart.step) > _MAX_IN_A_ROW:
            raise RunError(
                f"the run was begun again {_MAX_IN_A_ROW} times after step {restart.step}, and got no further"
            )
        return restart.settings


def begin_again(
    observer: RunObserver,
    protocol: ControllerProtocol,
    settings: Settings,
    lost: Sequence[ReplicaSet],
    reason: str,
) -> str:
    """Has the run begin again with the workers that are left, if there is a good checkpoint and they are enough.

    Args:
        lost: page ranges that nobody holds any more.

    Returns:
        If it does not: what the user can do.

    Raises:
        RestartError: it does; the event `restart` is written.
    """
    run_dir = observer.run_dir.path
    checkpoint = _newest(run_dir)
    left = settings.mesh.shape.num_workers if settings.elastic.replace else len(protocol.members)
    is_lost = lost or not protocol.members
    # With agents the launcher cannot be started again: they end with it.
    is_possible = left >= settings.elastic.min_workers and settings.runtime.rendezvous is None
    if checkpoint is None or not is_lost or not is_possible:
        return _advice(run_dir, checkpoint)
    mesh = mesh_of(left, settings.mesh)
    pages = sum(run.num_pages for run in lost) or "all"
    observer.on_event(
        "restart",
        step=checkpoint.step,
        lost_after=protocol.version,
        lost_pages=pages,
        workers=left,
        mesh=mesh.shape.name,
        reason=reason,
        message=f"{reason}: {pages} pages of state after step {protocol.version} are gone; "
        f"{left} workers ({mesh.shape.name}) begin again after step {checkpoint.step}, "
        f"from {checkpoint.path} or one that is becoming whole just now",
    )
    again = dataclasses.replace(
        settings,
        mesh=mesh,
        train=dataclasses.replace(settings.train, resume=str(run_dir)),
        run=dataclasses.replace(settings.run, dir=None),
    )
    raise RestartError(again, checkpoint.step)


def advice(run_dir: Path) -> str:
    """What the user of a run that has ended can do: where its newest good checkpoint is, and how to go on from it."""
    return _advice(run_dir, _newest(run_dir))


def _advice(run_dir: Path, checkpoint: Checkpoint | None) -> str:
    if checkpoint is None:
        return "There is no checkpoint to go on from (checkpoint.every=N makes them)"
    return f"Its newest checkpoint is {checkpoint.path}; to go on from there: {resume_command(run_dir)}"


def resume_command(run_dir: Path) -> str:
    """What a user types to go on from the newest checkpoint of a run."""
    return f"python train.py train.resume={run_dir}"


def mesh_of(num_workers: int, mesh: MeshSettings) -> MeshSettings:
    """So many workers, as they are inside, on as many stages as `mesh` has, or on fewer, as evenly as it goes."""
    stages = min(num_workers, mesh.shape.num_stages)
    sizes = even_counts(num_workers, stages)
    if len(set(sizes)) == 1:
        return MeshSettings(dp=sizes[0], pp=stages, tp=mesh.tp, fsdp=mesh.fsdp)
    return MeshSettings(stages=sizes, tp=mesh.tp, fsdp=mesh.fsdp)


def _newest(run_dir: Path) -> Checkpoint | None:
    try:
        return load_newest_good(run_dir)[0]
    except CheckpointError:
        return None


# A run that has too few workers left to go on: their state is written, then it ends and says how to resume it.
class Stopping:
    """Part of the controller, in its thread.

    Args:
        seconds: how long the last checkpoint may take (timeouts.shutdown).
    """

    def __init__(
        self, durability: CheckpointCoordinator, losses: FailureHandler, run_dir: Path, seconds: float
    ) -> None:
        self._durability, self._losses, self._run_dir, self._seconds = durability, losses, run_dir, seconds
        self._save: Save | None = None
        self._until = 0.0

    def begin(self, save: Save) -> None:
        """The workers have been told; again if one more is lost meanwhile."""
        self._save, self._until = save, time.monotonic() + self._seconds
        self._durability.stops_at(save.version, save.epoch)

    def look(self) -> None:
        """Ends the run if there is something to wait for no longer.

        Raises:
            RunError: the checkpoint is there, or will not be.
        """
        if self._save is None:
            return
        step, reason = self._save.version, self._save.reason
        if self._durability.newest >= step:
            where = checkpoint_path(self._run_dir, step)
            self._losses.stop(
                step,
                f"the run stops: {reason}. Its state after step {step} is in {where}; "
                f"to go on from there: {resume_command(self._run_dir)}",
            )
        why = self._durability.why_not(step)
        if not why and time.monotonic() > self._until:
            why = f"not within {self._seconds:g} s (timeouts.shutdown)"
        if why:
            self._durability.drain()
            self._losses.stop(
                step,
                f"the run stops: {reason}. Its state after step {step} could not be written: {why}. "
                f"{advice(self._run_dir)}",
            )
