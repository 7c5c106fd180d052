"""Decisions of the controller when a worker fails or is lost: the run goes on without it, or ends and says why.

Everything here takes events and returns actions, on the controller's thread. The common case, a worker that is killed
while the run can go on without it, is short: `worker_ended` -> `_declare_lost` -> `ControllerProtocol.lost`, which
begins a change of the mesh. The rest of the file is about the ways in which a run ends, and about telling two causes
apart: a lost device, after which the run can go on, and a bug in the program, which would fail on the next worker too.

When a run has to end, its cause may not be known yet: a worker's process may be seen to end before the worker's report
of an exception arrives. So the run is `ending` first. For at most a second, only events count that tell more about the
cause, or that bring the checkpoint with which the run begins again.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elaswave_spmd.conf.schema import MeshSettings, Settings
from elaswave_spmd.controller.actions import (
    Action,
    End,
    FindCheckpoint,
    GoBack,
    Kill,
    LinkFailed,
    Record,
    RecordLostWorker,
    ReportExits,
)
from elaswave_spmd.controller.events import (
    CheckpointFound,
    Event,
    ExitsReported,
    Received,
    SavedState,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.outcomes import RestartFrom, RunStopped
from elaswave_spmd.controller.replacements import Replacements
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.errors import ModelError, RunError, StoppedBySignal, UserError, WorkerError, exception_line
from elaswave_spmd.mesh.mesh import named_workers
from elaswave_spmd.mesh.shape import even_counts
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import RemoveMember, Save, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol
from elaswave_spmd.recovery.failure_detector import BrokenLinks, Suspect
from elaswave_spmd.recovery.standstill import Standstill
from elaswave_spmd.run_dir.checkpoint_shard import checkpoint_path
from elaswave_spmd.run_dir.rollback import ROLLBACK
from elaswave_spmd.runtime.processes.fork_server_client import Exited

_LAST_WORDS_S = 1.0  # how long to wait for the report (Failed) of a worker after its process has ended
_MOST_STARTS = 3  # how many workers, one after the other, the first mesh waits for in one place
_START = 0  # the step under which crashes before the first step are counted
_WITH_REPORT = 1  # the exit code of a worker that sends a report (Failed) before it ends
_MOST_TOLD = 8  # how many lost workers an error names one by one
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


# ---- an end whose cause is not known yet


@dataclass(frozen=True)
class _AwaitReport:
    """A loss ends the run. Its worker's report is awaited until a time, as it tells more than how the process ended."""

    gone: WorkerEnded
    until: float


@dataclass(frozen=True)
class _AwaitExits:
    """A worker's report ends the run, unless it turns out that another worker was killed: then that is the cause."""

    error: RunError


@dataclass(frozen=True)
class SaveEnded:
    """The run stops with its state saved: too few workers are left, or somebody asked for it.

    Args:
        why_not: the reason why the state could not be saved; empty if it was.
    """

    save: Save
    why_not: str = ""


@dataclass(frozen=True)
class _AwaitCauses:
    """The run cannot go on. Until a time it is awaited how some lost workers ended: one of them may have crashed."""

    end: Unrecoverable | SaveEnded
    until: float


@dataclass(frozen=True)
class _AwaitCheckpoint:
    """The answer to FindCheckpoint is awaited: the newest checkpoint, from which the run may begin again."""

    end: Unrecoverable | GoBack


_Ending: TypeAlias = _AwaitReport | _AwaitExits | _AwaitCauses | _AwaitCheckpoint


@dataclass(frozen=True)
class FailurePolicy:
    """The settings that decide what a failure leads to.

    Args:
        survives: True if the run goes on after a loss (elastic.enabled).
        replaces: True if a worker is started in place of each that is lost (elastic.replace or elastic.spares).
        start_s: how many seconds a worker of the first mesh may take to be ready (timeouts.start).
        min_workers: with fewer workers the run does not begin again (elastic.min_workers).
        max_skipped: this many steps in a row without an update end the run (optim.max_skipped), none with 0. A step
            has no update if its gradient is not finite, or if the weight of its loss is not above 0.
        restarts: True if the run may begin again, as its workers can be started a second time.
        mesh: the mesh of the run, from which the mesh is made on which it begins again.
        saves: True if the run writes checkpoints (checkpoint.every).
    """

    survives: bool
    replaces: bool
    start_s: float
    min_workers: int
    max_skipped: int
    restarts: bool
    mesh: MeshSettings
    saves: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> FailurePolicy:
        elastic = settings.elastic
        return cls(
            survives=elastic.enabled,
            replaces=elastic.replaces,
            start_s=settings.timeouts.start,
            min_workers=elastic.min_workers,
            max_skipped=settings.optim.max_skipped,
            # Agents end when the launcher that they have joined ends, so a run with agents cannot start its workers
            # again. The exception are agents with timeouts.adopt: they look for the run and join it again.
            restarts=settings.runtime.rendezvous is None or settings.timeouts.adopt is not None,
            mesh=settings.mesh,
            saves=settings.checkpoint.every > 0,
        )


class FailureHandler:
    """Failures of workers and of links, and the ends of a run that follow from them.

    All methods are called by the controller's thread, with events in the order in which they came.

    Args:
        roster: the workers that live, as far as is known.
        replacements: the workers that are started in place of lost ones.
        run_dir: the run's directory, for the paths of checkpoints that errors name.
        came_back: True if this controller adopts the workers of one that has died.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        protocol: ControllerProtocol,
        roster: Roster,
        replacements: Replacements,
        run_dir: Path,
        *,
        came_back: bool = False,
    ) -> None:
        self._policy = policy
        self._protocol = protocol
        self._roster = roster
        self._replacements = replacements
        self._run_dir = run_dir
        # The step at which the run began; -1, which is no step, if it began under another controller.
        self._first = protocol.version if not came_back else -1
        self._num_skipped = 0  # steps in a row without an update
        self._crashes: dict[int, tuple[int, str]] = {}  # step -> (rank, report) of the first worker that crashed in it
        self._links = BrokenLinks()
        self._broken: dict[frozenset[int], str] = {}  # links that are to be opened again -> why
        self._opened = False  # some were opened again since the last tick: others wait for the next one
        self._signal = ""  # the name of the signal by which the run was asked to end
        self._cause: RunError | None = None  # the error for which the run stops, once its state is saved
        # Rank -> step under way, of members whose process has ended and of which it is not known yet how.
        self._unexplained: dict[int, int] = {}
        # Rank -> how a member was lost, until the epoch without it begins: only then has its loss a line in the log.
        self._untold: dict[int, str] = {}
        # Rank of a worker started for the first mesh in place of a lost one -> how many were lost in that place before.
        self._lost_before: dict[int, int] = {}
        # The version, whether it was being validated, and the members, when the run stood still last.
        self._stood_still: tuple[int, bool, tuple[int, ...]] | None = None
        self._ending: _Ending | None = None

    @property
    def is_ending(self) -> bool:
        """True once the run has to end. From then on events go to `decide_while_ending` only."""
        return self._ending is not None

    # ---- workers

    def failed(self, message: m.Failed, now: float) -> list[Action]:
        """A worker reports an exception after which it cannot go on.

        The others go on without it. If the same step has failed on another worker before, this is taken for a bug in
        the program, not for a lost device, and the run ends. The run also ends if this worker has the only replica of
        some page: its process still has the state, which can be saved.
        """
        rank, step, report = message.rank, message.step, message.report
        self._unexplained.pop(rank, None)
        headline = exception_line(report)
        if self._survives_exceptions and rank not in self._protocol.placement.mesh:  # it has not joined, or has left
            return self._declare_lost(rank, f"an exception: {headline}", now)
        # Its links failed, for lack of memory, say: that is the fault of its machine, and no sign of a bug.
        if self._survives_exceptions and message.is_deaf:
            return self._declare_lost(rank, headline, now)
        if not self._may_stop_saved or message.is_deaf:
            if (bug := self._end_by_bug(message)) is not None:
                return bug
        elif self._cause is not None:
            return []  # the run ends already: this worker keeps its state until it is saved
        elif self._is_bug(message) or self._protocol.holds_alone(rank):
            return self._stop_for(WorkerError(*self._first_crash(message)))
        self._crashes[step] = rank, report
        return self._declare_lost(rank, f"an exception: {headline}", now)

    def refused(self, message: m.Refused, now: float) -> list[Action]:
        """A worker that starts refuses the model or the plan of the run.

        Before the run has begun this ends the run, as every other worker would refuse it, too. Once it has begun, other
        workers have accepted the same model, so the fault is with this worker: it is lost.
        """
        if self._protocol.started:
            return self._declare_lost(message.rank, f"refused: {message.error['what']}", now)
        return [End(RunStopped(ModelError(**message.error)))]

    def computes_otherwise(self, rank: int, error: UserError, now: float) -> list[Action]:
        """A worker that starts has computed other bits than the first one in its check of the model.

        Before the run has begun this ends the run with `error`; afterwards the run goes on without the worker.
        """
        if self._protocol.started:
            return self._declare_lost(rank, error.what, now)
        return [End(RunStopped(error))]

    def worker_ended(self, event: WorkerEnded) -> list[Action]:
        """A worker's process has ended."""
        if event.rank not in self._roster:
            # The worker has left, or is known to be lost. A death watch reports a death before the process is reaped,
            # so there may be a second event about the same worker, which brings the exit code.
            return self._stop_for(crash) if (crash := self._explain(event)) is not None else []
        if not self._policy.survives:
            if event.exited is not None and event.exited.signal is not None:
                return [End(RunStopped(RunError(str(event.exited))))]
            if self._cause is not None:  # it was to save its state first, and has ended before that
                return [End(RunStopped(self._cause))]
            self._ending = _AwaitReport(event, event.at + _LAST_WORDS_S)
            return []
        if not self._protocol.started:
            return self._ended_at_start(event)
        if event.rank in self._protocol.placement.mesh:
            # Crashes are counted by the step that was under way: two in one step are taken for a bug.
            self._unexplained[event.rank] = self._protocol.version + 1
            # The actions of the stop come before those of the loss, so that no replacement is started.
            if (crash := self._explain(event)) is not None:
                return [*self._stop_for(crash), *self._declare_lost(event.rank, event.reason, event.at)]
        return self._declare_lost(event.rank, event.reason, event.at)

    def not_started(self, rank: int, why: str, now: float) -> list[Action]:
        """A newcomer could not be started, for lack of memory or processes, say: it is lost before it joined."""
        reason = f"it could not be started: {why}"
        if not self._policy.survives:
            return [End(RunStopped(RunError(f"worker {rank}: {reason}")))]
        # Its replacement is started with the next tick, not at once: now it would fail for the same reason.
        return self._declare_lost(rank, reason, now, replaced_at_once=False)

    def withdrawn(self, rank: int, reason: str, now: float) -> list[Action]:
        """A worker that is not a member is lost with its machine. It has no state; another one may get its place."""
        self._roster.remove(rank)
        self._links.forget(rank)
        change = self._protocol.lost(rank, reason, spare=self._replacements.lost(rank))
        ended = [] if RemoveMember(rank, lost=True) in change else [RemoveMember(rank, lost=True)]
        return [*ended, *change, *self.replace_lost(now)]

    def suspected(self, suspects: Sequence[Suspect], now: float) -> list[Action]:
        """The failure detector suspects workers: they hang, fell silent, or were not ready in time.

        They are treated as lost; in a run that does not survive losses this ends the run.
        """
        actions: list[Action] = []
        late = [suspect.rank for suspect in suspects if suspect.rank not in self._protocol.addresses]
        if late and not (self._policy.survives or self._protocol.started):
            error = RunError(f"{named_workers(late)} did not start within {self._policy.start_s:g} s")
            return [End(RunStopped(error))]
        for suspect in suspects:
            if self._policy.survives:
                actions += self._declare_lost(suspect.rank, suspect.reason, now, is_late=suspect.rank in late)
            else:
                actions += self.worker_ended(WorkerEnded(suspect.rank, suspect.reason, now))
        return actions

    def stands_still(self, found: Standstill) -> list[Action]:
        """All members live and wait, and no message comes. They are told to send again whatever others may lack.

        By the rules of the protocol this cannot happen, so a message was lost, or there is a bug. If the same step
        stands still once more, sending again does not help: the run ends, with its state saved.
        """
        protocol = self._protocol
        if not protocol.started or protocol.is_saving or self._cause is not None:
            return []  # workers are starting, or the state is being saved: both have deadlines of their own
        at = protocol.version, protocol.is_validating, protocol.members
        is_again, self._stood_still = at == self._stood_still, at
        waits = found.told(protocol.members)
        what = f"nothing has moved for {found.seconds:.1f} s after step {protocol.version}: {waits}"
        fields = {
            "step": protocol.version,
            "mesh_epoch": protocol.placement.mesh.epoch,
            "ranks": list(protocol.members),
            "seconds": found.seconds,
            "waits": found.by_reason(protocol.members),
            "again": is_again,
            "message": what if is_again else f"{what}; they send again what others may lack, in a new mesh epoch",
        }
        record = Record("standstill", fields)
        if not is_again:
            return [record, *protocol.send_again()]
        return [record, *self._stop_for(RunError(f"the run stands still, also after all was sent again: {what}"))]

    def computes_wrongly(self, rank: int, reason: str, now: float) -> list[Action]:
        """A worker lives, but computes wrong results: it is treated as lost. The step under way begins anew."""
        if not self._policy.survives:
            return [End(RunStopped(RunError(f"worker {rank}: {reason}")))]
        return self._declare_lost(rank, reason, now)

    def committed(self, applied: m.Applied, now: float) -> list[Action]:
        """A step is committed. Too many in a row without an update end the run."""
        self._links.committed(now)
        self._num_skipped = 0 if applied.updated else self._num_skipped + 1
        if 0 < self._policy.max_skipped <= self._num_skipped:
            last = f"last: step {applied.step}, loss {applied.loss}"
            if applied.weight is not None and not applied.weight > 0:
                why = (
                    f"{last}, the weight of its loss {applied.weight:g}. Samples have to count: see loss(output, batch)"
                )
            else:
                why = f"{last}. A lower optim.lr, or optim.warmup_steps, may help"
            skipped = f"{self._num_skipped} steps in a row had no update (optim.max_skipped)"
            return self._stop_for(RunError(f"{skipped}: the gradient was not finite, or a weight not positive; {why}"))
        return []

    def worker_removed(self, rank: int) -> None:
        """A worker is no member any more: its links end with it."""
        self._links.forget(rank)

    def replace_lost(self, now: float) -> list[Action]:
        """The actions that start workers in the empty places, as far as the limit on starts allows it now.

        Called with every loss, and with every tick for those that the limit has held back.
        """
        protocol = self._protocol
        if protocol.version >= protocol.steps or protocol.stops or self.is_ending:
            return []
        return self._replacements.due(now, spares=protocol.started)[1]

    @property
    def _may_stop_saved(self) -> bool:
        """True while a saved state is worth going on from: after the last step only the weights are left to collect."""
        protocol = self._protocol
        return protocol.started and (protocol.version < protocol.steps or protocol.is_validating)

    @property
    def _survives_exceptions(self) -> bool:
        """True while the run can go on after a worker's exception, which is not so while the first workers start.

        What raises an exception before the first step is the program or its machine: the next worker would raise it,
        too.
        """
        return self._policy.survives and self._protocol.started

    def _ended_at_start(self, event: WorkerEnded) -> list[Action]:
        """A worker's process has ended before the first mesh is formed. If it was killed from outside, it is lost.

        A nonzero exit code ends the run, as an exception does; so does a crash in native code on a second worker.
        """
        if (exited := event.exited) is None:
            # From a death watch. A later event tells how the process ended, and can be awaited, as nobody trains yet.
            return []
        if exited.signal is None and exited.code:
            self._ending = _AwaitReport(event, event.at + _LAST_WORDS_S)
            return []
        if _is_crash(exited):
            first, _ = self._crashes.setdefault(_START, (event.rank, str(exited)))
            if first != event.rank:
                return [End(RunStopped(RunError(f"{exited}, as worker {first} did while workers started")))]
        return self._declare_lost(event.rank, event.reason, event.at)

    def _declare_lost(
        self, rank: int, reason: str, at: float, *, is_late: bool = False, replaced_at_once: bool = True
    ) -> list[Action]:
        """Go on without a worker. Several detectors may report the same loss; only the first report counts.

        Args:
            is_late: True if it is given up because it was not ready in time.
            replaced_at_once: False if its replacement is to be started with the next tick. Has no effect while the
                first mesh is not formed.
        """
        if rank not in self._roster:
            return []
        # At once, and not when RemoveMember is carried out: an event between the two must find that the worker is lost.
        self._roster.remove(rank)
        self._links.forget(rank)
        if not self._protocol.started:
            return self._lost_at_start(rank, reason, at, is_late=is_late)
        mesh, is_spare = self._protocol.placement.mesh, rank in self._replacements.spares
        # Workers that are not in the present mesh were lost before it was made: their loss has its line in the log.
        self._untold = {other: how for other, how in self._untold.items() if other in mesh}
        if rank in mesh:
            self._untold[rank] = reason if reason.startswith(f"worker {rank} ") else f"worker {rank}: {reason}"
        # The Prepare in `change` comes before the replacement, whose start takes long: until it is sent, the other
        # workers may wait for the one that is lost.
        change = self._protocol.lost(rank, reason, spare=self._replacements.lost(rank))
        replacement = self.replace_lost(at) if replaced_at_once else []
        if rank in mesh:
            return [RecordLostWorker(rank, at), *change, *replacement]
        if is_spare:
            record = self._record_loss(rank, reason, "spare", f"spare worker {rank} is lost ({reason})")
            return [record, RemoveMember(rank, lost=True), *replacement]
        record = self._record_loss(rank, reason, "join", f"worker {rank} is lost before it joined ({reason})")
        return [record, Kill(rank), *change, *replacement]  # its process may live: it may just have been late

    def _lost_at_start(self, rank: int, reason: str, now: float, *, is_late: bool) -> list[Action]:
        """A worker is lost before the first mesh is formed: this goes on without it, or waits for a replacement.

        The first mesh waits for up to `_MOST_STARTS` workers in one place, one after the other, and for no further one
        if the second was late: a fault that ends or stops workers at every start must not keep the others waiting
        forever. A replacement that is not awaited joins the mesh later, as a newcomer.
        """
        record = self._record_loss(rank, reason, "start", f"worker {rank} is lost while workers start ({reason})")
        number = self._lost_before.pop(rank, 0) + 1
        self._replacements.lost(rank)
        ranks, started = self._replacements.due(now, spares=False)
        self._lost_before.update(dict.fromkeys(ranks, number))
        awaited = ranks[0] if ranks and number < (2 if is_late else _MOST_STARTS) else None
        change = self._protocol.lost(rank, reason, replacement=awaited)
        # Its process may live, if it was just late. If it is not in the first mesh, no RemoveMember kills it.
        ended = [] if RemoveMember(rank, lost=True) in change else [Kill(rank)]
        return [record, *ended, *change, *started]

    def _record_loss(self, rank: int, reason: str, phase: str, message: str) -> Record:
        """The log line for the loss of a worker that is not a member of the mesh."""
        mesh = self._protocol.placement.mesh
        about = {"ranks": [rank], "mesh_epoch": mesh.epoch, "mesh": mesh.shape.name}
        return Record("fail", {**about, "phase": phase, "reason": reason, "message": message})

    def _is_bug(self, message: m.Failed) -> bool:
        """True if a report ends the run: it cannot survive an exception now, or another worker failed in this step.

        A bug raises the same exception on every worker that runs the same step on the same data. So if two workers fail
        in one step it is taken for a bug in the program: the run would otherwise lose all workers, one after the other.
        """
        return not self._survives_exceptions or self._first_crash(message)[0] != message.rank

    def _first_crash(self, message: m.Failed) -> tuple[int, str]:
        """The first worker that failed in the step of this report, and the report of that worker."""
        return self._crashes.get(message.step, (message.rank, message.report))

    def _end_by_bug(self, message: m.Failed) -> list[Action] | None:
        """End the run without saving state, if this report ends it; else None."""
        if not self._is_bug(message):
            return None
        # This worker may have failed because another one was killed, which is the true cause then. That process has
        # ended by now, so ReportExits finds it.
        self._ending = _AwaitExits(WorkerError(*self._first_crash(message)))
        return [ReportExits()]

    def _stop_for(self, cause: RunError) -> list[Action]:
        """Stop the run for `cause`. All state is still there, and is saved first if training could go on from it."""
        if self._cause is not None:
            return []
        self._cause = cause
        if not self._may_stop_saved:
            return [End(RunStopped(cause))]
        return [*self._protocol.stop(cause.headline, at_once=True)]

    def _explain(self, event: WorkerEnded) -> RunError | None:
        """Note how a member's process ended. This is usually known later than the fact that it ended.

        A crash in native code (a signal or an exit code, without a report) is counted like an exception: two in one
        step are taken for a bug, for which the run ends. A worker that exits with code 1 has sent a report, which may
        be read after the exit: then the report explains the end.

        Returns:
            The error that ends the run if this is the second crash in its step; else None.
        """
        if event.exited is None or event.exited.code == _WITH_REPORT:
            return None
        if (step := self._unexplained.pop(event.rank, None)) is None:
            return None
        if event.rank in self._untold:
            self._untold[event.rank] = str(event.exited)
        if _is_crash(event.exited):
            rank, _ = self._crashes.setdefault(step, (event.rank, str(event.exited)))
            if rank != event.rank:
                return RunError(f"{event.exited}, as worker {rank} did in the same step {step}")
        return None

    # ---- links

    def link_closed(self, *ends: int, was_linked: bool = True) -> None:
        """A link has ended, either because one of its ends died, or by itself. That is decided by later heartbeats.

        Args:
            ends: the two workers, or one for its link with the controller.
            was_linked: False if there was no link, and one of the two had something to send on it (C16).
        """
        if all(rank in self._roster for rank in ends):
            self._links.closed(*ends, was_linked=was_linked)
            if not was_linked:
                self._protocol.missed(frozenset(ends))

    def heartbeat(self, rank: int, now: float, *, is_relayed: bool) -> list[Action]:
        """A worker sends a heartbeat. If a link of it was lost and the other end lives as well, it is opened again.

        A link between two workers is opened again once; if it fails again, one of the two has to go (LinkFailed). A
        worker whose link to the controller was lost while it lives is lost.

        Many links break together if a network fails, and heartbeats tell of one worker's at a time. So the mesh changes
        at once for the first of them, and for all others once with each tick (`open_links`).

        Args:
            is_relayed: True if the worker's agent has sent the heartbeat on.
        """
        actions: list[Action] = []
        for verdict in self._links.heartbeat(rank, now, is_relayed=is_relayed):
            if verdict.lost is None:
                self._broken[verdict.ends] = verdict.reason
            elif not self._policy.survives:
                return [*actions, End(RunStopped(RunError(f"worker {verdict.lost}: {verdict.reason}")))]
            elif len(verdict.ends) == 1:
                actions += self._declare_lost(verdict.lost, verdict.reason, now)
            else:
                actions.append(LinkFailed(verdict.ends, verdict.lost, verdict.reason))
        return actions if self._opened or not self._broken else [*actions, *self.open_links()]

    def open_links(self) -> list[Action]:
        """Have the lost links that wait opened again, in one change of the mesh. With every tick."""
        broken, self._broken = self._broken, {}
        self._opened = bool(broken)
        return [*self._protocol.relink(broken)] if broken else []

    def cannot_reach(self, rank: int, reason: str, now: float) -> list[Action]:
        """The worker is lost, as it and another worker, which stays, cannot reach each other."""
        return self._declare_lost(rank, reason, now)

    # ---- the end of a run

    def stop_requested(self, signal: str) -> None:
        """A user or a batch system asks the run to end. It will not begin again, and ends with StoppedBySignal."""
        self._signal = signal

    def end(self, why: Unrecoverable | SaveEnded, now: float) -> list[Action]:
        """The run cannot go on, or stops with its state saved. If a crash led to it, the error will show that crash."""
        self._ending = _AwaitCauses(why, now + _LAST_WORDS_S)
        return self._end_with_causes(now)

    def go_back(self, action: GoBack) -> list[Action]:
        """Begin the run again at a checkpoint that is older than what may be wrong; end the run if it cannot."""
        self._ending = _AwaitCheckpoint(action)
        return [FindCheckpoint(action.newest)]

    def _why_not_back(self, action: GoBack, checkpoint: SavedState | None, left: int) -> str:
        """Why the run cannot begin again; empty if it can."""
        policy = self._policy
        if not policy.restarts:
            return "a run with agents cannot begin again by itself, as they end with it"
        if not policy.survives:
            return "with elastic.enabled=false it does not begin again"
        if self._signal:
            return f"it was asked to by {self._signal}"
        if left < policy.min_workers:
            return f"{left} workers would be left, elastic.min_workers is {policy.min_workers}"
        if checkpoint is None and (self._first or (not policy.saves and self._protocol.version)):
            return self._no_checkpoint(action)
        return ""

    def _cannot_go_back(self, action: GoBack, why: str, checkpoint: SavedState | None) -> list[Action]:
        """The run ends. If committed steps may be wrong, whoever resumes it goes back first."""
        version, text = self._protocol.version, action.reason
        if not action.ends:
            text += f"; the run ends, since {why}"
        if action.newest >= version:
            return [End(RunStopped(self._error(text)))]
        if checkpoint is not None:
            text += f"; a run that is resumed goes back to {checkpoint.path}"
        else:
            text += f"; {self._no_checkpoint(action)}"
            if action.ends:
                return [End(RunStopped(self._error(text)))]
            text += ", so it is not resumed: begin it again with another run.dir"
        step = 0 if checkpoint is None else checkpoint.step
        fields = {
            "step": step,
            "given_up": version,
            "ranks": list(action.without),
            "reason": action.reason,
            "message": f"whoever resumes the run goes back to step {step}, and gives up what was committed after it, "
            f"up to step {version}"
            if checkpoint is not None
            else f"all {version} steps are given up, as no checkpoint is from before what may be wrong",
        }
        return [Record(ROLLBACK, fields), End(RunStopped(self._error(text)))]

    def _no_checkpoint(self, action: GoBack) -> str:
        return f"there is no checkpoint of step {action.newest} or before"

    def _back_to(self, action: GoBack, checkpoint: SavedState | None) -> list[Action]:
        """The run begins again at this checkpoint, or as it began at step 0 if there is no checkpoint yet."""
        policy, protocol = self._policy, self._protocol
        num_members = policy.mesh.shape.num_workers if policy.replaces else len(protocol.members)
        left = num_members - (0 if policy.replaces else len({*action.without} & {*protocol.members}))
        why = self._why_not_back(action, checkpoint, left)
        if action.ends or why:
            return self._cannot_go_back(action, why, checkpoint)
        step, where = (0, "its begin") if checkpoint is None else (checkpoint.step, str(checkpoint.path))
        mesh = self._mesh_for(left)
        again = f"{left} workers ({mesh.shape.name}) begin again after step {step}, from {where}"
        fields = {
            "step": step,
            "given_up": protocol.version,
            "ranks": list(action.without),
            "workers": left,
            "mesh": mesh.shape.name,
            "reason": action.reason,
            "message": f"{action.reason}: {again}; what was committed after it, up to step {protocol.version}, is "
            "given up",
        }
        back = RestartFrom(
            self._run_dir,
            mesh,
            step,
            is_begin=checkpoint is None,
            doubted=protocol.version,
            is_undecided=action.is_undecided,
        )
        return [Record(ROLLBACK, fields), End(back)]

    def decide_while_ending(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from an event once the run is ending, by what is still awaited."""
        match self._ending:
            case _AwaitReport() as state:
                return self._await_report(state, event, now)
            case _AwaitExits(error):
                if isinstance(event, WorkerEnded) and (killed := self._killed(event)):
                    return killed
                return [End(RunStopped(error))] if isinstance(event, ExitsReported) else []
            case _AwaitCauses():
                return self._await_causes(event, now)
            case _AwaitCheckpoint(end):
                if isinstance(event, CheckpointFound) and isinstance(end, GoBack):
                    return self._back_to(end, event.checkpoint)
                if isinstance(event, CheckpointFound) and isinstance(end, Unrecoverable):
                    return self._end_with_checkpoint(end, event.checkpoint)
        return []

    def _await_report(self, state: _AwaitReport, event: Event, now: float) -> list[Action]:
        match event:
            case Received(message=m.Failed() as message) if message.rank == state.gone.rank:
                return self._end_by_bug(message) or []
            case Received(message=m.Refused() as message) if message.rank == state.gone.rank:
                return self.refused(message, now)
            case WorkerEnded() if killed := self._killed(event):
                return killed
            case WorkerEnded() if event.rank == state.gone.rank and event.exited is not None:
                self._ending = _AwaitReport(event, state.until)
            case Tick() if now >= state.until:
                gone = state.gone
                return [End(RunStopped(RunError(str(gone.exited or f"worker {gone.rank}: {gone.reason}"))))]
        return []

    def _await_causes(self, event: Event, now: float) -> list[Action]:
        match event:
            case Received(message=m.Failed() as message):
                self._unexplained.pop(message.rank, None)
                if (bug := self._end_by_bug(message)) is not None:
                    return bug
                self._crashes[message.step] = message.rank, message.report
            case WorkerEnded() if event.rank not in self._roster:
                if (crash := self._explain(event)) is not None:
                    return [End(RunStopped(crash))]
        return self._end_with_causes(now)

    def _end_with_causes(self, now: float) -> list[Action]:
        """The actions that end the run, once it is known how all lost workers ended, or the time for that is over."""
        state = self._ending
        assert isinstance(state, _AwaitCauses)
        if self._unexplained and now < state.until:
            return []
        newest = max(self._crashes, default=0)
        match state.end:
            case Unrecoverable() if self._cause is not None:
                self._ending = _AwaitExits(self._cause)
                return [ReportExits()]
            case Unrecoverable() if self._crashes and not self._has_survived(newest):
                return [End(RunStopped(WorkerError(*self._crashes[newest])))]
            case SaveEnded(save, why_not):
                where = checkpoint_path(self._run_dir, save.version)
                outcome = f"could not be written: {why_not}" if why_not else f"is in {where}"
                what = f"Its state after step {save.version} {outcome}"
                return self._stop(save, f"{save.reason}. {what}") if self._cause is None else self._stopped_for(what)
            case end:
                self._ending = _AwaitCheckpoint(end)
                return [FindCheckpoint()]

    def _has_survived(self, step: int) -> bool:
        """True if a crash in a step has nothing to do with what happens now, as that step was committed since.

        An exception in the validation after the newest step is counted as one of that step, so it still matters while
        the validation is under way.
        """
        protocol = self._protocol
        is_under_way = protocol.is_validating or not protocol.started
        return step < protocol.version or (step == protocol.version and not is_under_way)

    def _end_with_checkpoint(self, end: Unrecoverable, checkpoint: SavedState | None) -> list[Action]:
        if restart := self._restart(end, checkpoint):
            return restart
        return [End(RunStopped(self._error(f"the run cannot go on: {end.reason}{self._how_lost()}")))]

    def _how_lost(self) -> str:
        """How the members were lost whose loss ends the run. No mesh without them begins, so the log has no `fail`
        line for them."""
        mesh = self._protocol.placement.mesh
        lost = [how for rank, how in sorted(self._untold.items()) if rank in mesh]
        more = f"; {len(lost) - _MOST_TOLD} more" if len(lost) > _MOST_TOLD else ""
        return f" ({'; '.join(lost[:_MOST_TOLD])}{more})" if lost else ""

    def _stop(self, save: Save, message: str) -> list[Action]:
        """The end of a run that was saved. The message also shows an exception in a step after the saved version."""
        newest = max(self._crashes, default=0)
        if newest > save.version:
            rank, report = self._crashes[newest]
            message += f"\n\nworker {rank} failed:\n{report}"
        return [End(RunStopped(self._error(f"the run stops: {message}")))]

    def _stopped_for(self, state: str) -> list[Action]:
        """The end of a run that stops for `_cause`.

        Args:
            state: a sentence that says where the state was saved, or why it could not be.
        """
        cause = self._cause
        if isinstance(cause, WorkerError):
            return [End(RunStopped(WorkerError(cause.rank, cause.report, state)))]
        return [End(RunStopped(RunError(f"{cause}. {state}")))]

    def _error(self, message: str) -> RunError:
        """The error that ends the run. A run that was asked to end by a signal did not fail: StoppedBySignal."""
        return StoppedBySignal(message) if self._signal else RunError(message)

    def _restart(self, end: Unrecoverable, checkpoint: SavedState | None) -> list[Action]:
        """The run begins again with the workers that are left; empty if they are too few or have no state to begin at.

        The state to begin at is a good checkpoint. Before the first step is committed, what the run began with serves
        as well: initial values are a function of the seed, and a checkpoint in another directory is still there.
        """
        policy, protocol = self._policy, self._protocol
        left = policy.mesh.shape.num_workers if policy.replaces else len(protocol.members)
        is_lost = end.lost or not protocol.members
        # Before the first mesh is formed there is no state to lose: workers that end at every start would do so again.
        is_begin = checkpoint is None and protocol.started and protocol.version == self._first
        nothing = checkpoint is None and not is_begin
        if self._signal or nothing or not is_lost or not policy.restarts or left < policy.min_workers:
            return []
        step = self._first if checkpoint is None else checkpoint.step
        where = "with what the run began with" if checkpoint is None else f"from {checkpoint.path}"
        where += "" if checkpoint is None else " or one that is becoming whole just now"
        mesh = self._mesh_for(left)
        pages = sum(replica_set.num_pages for replica_set in end.lost) or "all"
        fields = {
            "step": step,
            "lost_after": protocol.version,
            "lost_pages": pages,
            "ranks": self._untold_ranks(),
            "workers": left,
            "mesh": mesh.shape.name,
            "reason": end.reason,
            "message": f"{end.reason}{self._how_lost()}: {pages} pages of state after step {protocol.version} are "
            f"gone; {left} workers ({mesh.shape.name}) begin again after step {step}, {where}",
        }
        return [Record("restart", fields), End(RestartFrom(self._run_dir, mesh, step, is_begin=is_begin))]

    def _untold_ranks(self) -> list[int]:
        """The members whose loss no `fail` tells of. Before the first mesh each loss has its own."""
        protocol = self._protocol
        members = protocol.placement.mesh.members if protocol.started else ()
        return [rank for rank in members if rank not in protocol.members]

    def _mesh_for(self, num_workers: int) -> MeshSettings:
        """The run's own mesh if it has this many workers, with its ragged stages if any; else as even as possible."""
        mesh = self._policy.mesh
        return mesh if num_workers == mesh.shape.num_workers else mesh_of(num_workers, mesh)

    def _killed(self, event: WorkerEnded) -> list[Action]:
        """End the run if the worker was killed by a signal: this is the cause, and what others report its consequence.

        A worker that is not in the roster any more was declared lost before, and the controller killed it: it does not
        count.
        """
        if event.exited is None or event.exited.signal is None or event.rank not in self._roster:
            return []
        return [End(RunStopped(RunError(str(event.exited))))]


def _is_crash(exited: Exited) -> bool:
    """True for an end that a bug in native code can cause. SIGKILL and SIGTERM come from outside."""
    return exited.signal in _CRASHES or exited.code not in (None, 0, _WITH_REPORT)


def mesh_of(num_workers: int, mesh: MeshSettings) -> MeshSettings:
    """A mesh of `num_workers` workers whose stages are as even as possible.

    It has as many stages as `mesh`, or one for each worker if they are fewer. The axes inside a worker (tp, fsdp) are
    those of `mesh`.
    """
    stages = min(num_workers, mesh.shape.num_stages)
    sizes = even_counts(num_workers, stages)
    if len(set(sizes)) == 1:
        return MeshSettings(dp=sizes[0], pp=stages, tp=mesh.tp, fsdp=mesh.fsdp)
    return MeshSettings(stages=sizes, tp=mesh.tp, fsdp=mesh.fsdp)
