"""Decisions of the controller when a worker fails or is lost: the run goes on without it, or ends and says why.

Everything here takes events and returns actions, on the controller's thread. The common case, a worker that is killed
while the run can go on without it, is short: `worker_ended` -> `_declare_lost` -> `ControllerProtocol.lost`, which
begins a change of the mesh. The rest of the file is about the ends of a run, and about telling a lost device, after
which the run goes on, from a bug in the program, after which it would fail again on the next worker.

Where the cause of an end is not known yet (the report of a worker that failed may still be on its way when its process
has ended), the run is `ending`: for at most a second the only events that count are those that tell more about the
cause.
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
from elaswave_spmd.run_dir.discard import ROLLBACK
from elaswave_spmd.runtime.processes.fork_server_client import Exited

_LAST_WORDS_S = 1.0  # how long the report of a worker that failed may take after its process ended
_MOST_STARTS = 3  # how often the first mesh waits for a worker in one place
_START = 0  # the step of what fails before the first one
_WITH_REPORT = 1  # the exit code of a worker whose report comes as Failed
_MOST_TOLD = 8  # lost workers whose ends are told one by one
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


# ---- an end whose cause is not known yet


@dataclass(frozen=True)
class _AwaitReport:
    """A loss ends the run. The worker's own report, if one comes, tells more than its exit."""

    gone: WorkerEnded
    until: float


@dataclass(frozen=True)
class _AwaitExits:
    """A worker's report ends the run, unless it turns out that a worker was killed: then that is the cause."""

    error: RunError


@dataclass(frozen=True)
class SaveEnded:
    """The run stops: workers are too few, or somebody wants it to. Its state is saved; `why_not`: or could not be."""

    save: Save
    why_not: str = ""


@dataclass(frozen=True)
class _AwaitCauses:
    """The run cannot go on. The ends of some workers are not explained yet: one may be a crash."""

    end: Unrecoverable | SaveEnded
    until: float


@dataclass(frozen=True)
class _AwaitCheckpoint:
    """All that is left to know is the newest checkpoint, from which the run may begin again."""

    end: Unrecoverable | GoBack


_Ending: TypeAlias = _AwaitReport | _AwaitExits | _AwaitCauses | _AwaitCheckpoint


@dataclass(frozen=True)
class FailurePolicy:
    """The settings that decide what a failure leads to.

    Args:
        survives: the run goes on after a loss (elastic.enabled).
        replaces: a worker is started in place of each that is lost (elastic.replace or elastic.spares).
        start_s: how long a worker of the first mesh may take to be ready (timeouts.start).
        min_workers: with fewer the run does not begin again (elastic.min_workers).
        max_skipped: this many steps in a row without an update end the run (optim.max_skipped): their gradient is not
            finite, or the weight of their loss not above 0.
        restarts: the run may begin again: its workers can be started a second time.
        mesh: of the run, for the mesh of fewer workers with which it begins again.
        saves: the run writes checkpoints (checkpoint.every).
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
            # Agents end with the launcher that they have met, so a run with agents cannot start its workers again;
            # but for those that another controller may adopt: they look for the run, and join it again.
            restarts=settings.runtime.rendezvous is None or settings.timeouts.adopt is not None,
            mesh=settings.mesh,
            saves=settings.checkpoint.every > 0,
        )


class FailureHandler:
    """Failures of workers and of links, and the ends of a run that follow from them.

    All methods are called by the controller's thread, with events in the order in which they came.

    Args:
        replacements: what is started in place of workers that are lost.
        run_dir: the run's directory, in which the state lies that the error of a saved run names.
        came_back: the run has begun under another controller.
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
        # The step at which the run begins. One that a controller takes over has begun at another one.
        self._first = protocol.version if not came_back else -1
        self._num_skipped = 0  # steps in a row without an update
        self._crashes: dict[int, tuple[int, str]] = {}  # step -> (rank, report) of the first one
        self._links = BrokenLinks()
        self._signal = ""  # by which the run was asked to end
        self._cause: RunError | None = None  # for which the run stops, with its state saved
        self._unexplained: dict[int, int] = {}  # rank -> the step in which its end was seen, before its cause is known
        self._untold: dict[int, str] = {}  # rank -> how a lost member went, which has no line while its epoch has none
        self._lost_before: dict[int, int] = {}  # rank -> how many were lost in its place while workers start
        # The version, whether it was being validated, and the members, when the run stood still last.
        self._stood_still: tuple[int, bool, tuple[int, ...]] | None = None
        self._ending: _Ending | None = None

    @property
    def is_ending(self) -> bool:
        """True once nothing counts any more but `decide_while_ending`."""
        return self._ending is not None

    # ---- workers

    def failed(self, message: m.Failed, now: float) -> list[Action]:
        """A worker reports an exception that it cannot go on after.

        Others go on without it. The same step failing on a second worker is a bug in the program, not a lost device:
        the run ends. It ends, too, where this worker alone has some of the state. It is there still, and is saved.
        """
        rank, step, report = message.rank, message.step, message.report
        self._unexplained.pop(rank, None)
        headline = exception_line(report)
        if self._survives_exceptions and rank not in self._protocol.placement.mesh:  # it has not joined, or has left
            return self._declare_lost(rank, f"an exception: {headline}", now)
        if self._survives_exceptions and message.is_deaf:
            return self._declare_lost(rank, headline, now)
        if not self._may_stop_saved or message.is_deaf:
            if (bug := self._end_by_bug(message)) is not None:
                return bug
        elif self._cause is not None:
            return []  # the run ends: whoever has failed keeps its state until it is saved
        elif self._is_bug(message) or self._protocol.holds_alone(rank):
            return self._stop_for(WorkerError(*self._first_crash(message)))
        self._crashes[step] = rank, report
        return self._declare_lost(rank, f"an exception: {headline}", now)

    def refused(self, message: m.Refused, now: float) -> list[Action]:
        """A worker that starts refuses what the run was given, its model. All others would: it is no loss.

        Once the run has begun, its workers have accepted it: then this worker alone is at fault.
        """
        if self._protocol.started:
            return self._declare_lost(message.rank, f"refused: {message.error['what']}", now)
        return [End(RunStopped(ModelError(**message.error)))]

    def computes_otherwise(self, rank: int, error: UserError, now: float) -> list[Action]:
        """A worker that starts has computed other bits than the others: the run is refused, or goes on without it."""
        if self._protocol.started:
            return self._declare_lost(rank, error.what, now)
        return [End(RunStopped(error))]

    def worker_ended(self, event: WorkerEnded) -> list[Action]:
        """A worker's process has ended."""
        if event.rank not in self._roster:
            # It has left, or is known to be lost: a death watch reports a death before the process is reaped, so the
            # second event about the same worker brings the exit code.
            return self._stop_for(crash) if (crash := self._explain(event)) is not None else []
        if not self._policy.survives:
            if event.exited is not None and event.exited.signal is not None:
                return [End(RunStopped(RunError(str(event.exited))))]
            if self._cause is not None:  # it was to save its state
                return [End(RunStopped(self._cause))]
            self._ending = _AwaitReport(event, event.at + _LAST_WORDS_S)
            return []
        if not self._protocol.started:
            return self._ended_at_start(event)
        if event.rank in self._protocol.placement.mesh:
            # Filed under the step that was under way: two crashes in one step are taken for a bug.
            self._unexplained[event.rank] = self._protocol.version + 1
            if (crash := self._explain(event)) is not None:  # the stop first: nobody is started in its place
                return [*self._stop_for(crash), *self._declare_lost(event.rank, event.reason, event.at)]
        return self._declare_lost(event.rank, event.reason, event.at)

    def not_started(self, rank: int, why: str, now: float) -> list[Action]:
        """A newcomer could not be started, as the system has nothing left for it: it is lost before it joined."""
        reason = f"it could not be started: {why}"
        if not self._policy.survives:
            return [End(RunStopped(RunError(f"worker {rank}: {reason}")))]
        # The next one in its place with the next tick, not at once: there is as little left for it now.
        return self._declare_lost(rank, reason, now, replaced_at_once=False)

    def withdrawn(self, rank: int, reason: str, now: float) -> list[Action]:
        """A worker that is no member goes with its machine, and no state with it. Another one may get its place."""
        self._roster.remove(rank)
        self._links.forget(rank)
        change = self._protocol.lost(rank, reason, spare=self._replacements.lost(rank))
        ended = [] if RemoveMember(rank, lost=True) in change else [RemoveMember(rank, lost=True)]
        return [*ended, *change, *self.replace_lost(now)]

    def suspected(self, suspects: Sequence[Suspect], now: float) -> list[Action]:
        """Workers live, as far as is known, and hang, or are not ready in time. They are lost."""
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
        """All members live and wait, and nothing comes. They send everything again that another one may lack.

        No rule of the protocol leads there, so if the same step stands still once more, sending again does not help:
        the run ends, with its state saved.
        """
        protocol = self._protocol
        if not protocol.started or protocol.is_saving or self._cause is not None:
            return []  # workers start, or the state is being saved: there are deadlines for both
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
        """A worker lives, and what it computes is wrong: it is lost. The step that is under way begins anew."""
        if not self._policy.survives:
            return [End(RunStopped(RunError(f"worker {rank}: {reason}")))]
        return self._declare_lost(rank, reason, now)

    def committed(self, applied: m.Applied, now: float) -> list[Action]:
        """A step is committed. Too many in a row without an update end the run."""
        self._links.committed(now)
        self._num_skipped = 0 if applied.updated else self._num_skipped + 1
        if not applied.updated and self._num_skipped >= self._policy.max_skipped:
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
        """Start the workers that are missing by now. With every loss, and with every tick, since starts are limited."""
        protocol = self._protocol
        if protocol.version >= protocol.steps or protocol.stops or self.is_ending:
            return []
        return self._replacements.due(now, spares=protocol.started)[1]

    @property
    def _may_stop_saved(self) -> bool:
        """True while there is state to go on from later: at the end what is left is to collect the weights."""
        protocol = self._protocol
        return protocol.started and (protocol.version < protocol.steps or protocol.is_validating)

    @property
    def _survives_exceptions(self) -> bool:
        """True while the run can go on after an exception: not while the first workers start.

        An exception before the first step is one of the program or of its machine: the next worker would raise it, too.
        """
        return self._policy.survives and self._protocol.started

    def _ended_at_start(self, event: WorkerEnded) -> list[Action]:
        """A worker of the first mesh has ended before there is one. What ends it from outside is a loss.

        An exit code is the end of the run, as an exception is; so is a crash in native code that repeats.
        """
        if (exited := event.exited) is None:
            return []  # a death watch; what follows tells how the process ended, which is no hurry while nobody trains
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
        """Go on without a worker. A worker is lost once, whichever of its detectors is the first.

        Args:
            is_late: it is given up since it was not ready in time.
            replaced_at_once: if at all, and once the first mesh is formed; else with the next tick.
        """
        if rank not in self._roster:
            return []
        # Now, not with RemoveMember, which carries the decision out: what comes in between is of a lost worker already.
        self._roster.remove(rank)
        self._links.forget(rank)
        if not self._protocol.started:
            return self._lost_at_start(rank, reason, at, is_late=is_late)
        mesh, is_spare = self._protocol.placement.mesh, rank in self._replacements.spares
        # Of members that are gone since the mesh was made; those before have a line of their own.
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
        return [record, Kill(rank), *change, *replacement]  # it may live, and be late

    def _lost_at_start(self, rank: int, reason: str, now: float, *, is_late: bool) -> list[Action]:
        """The first mesh is formed without a worker, or with the one that is started in its place.

        The first mesh does not wait for the third one in a place, nor for a second one where the first was late: what
        ends or stops workers in every start shall not keep the others waiting for ever.
        """
        record = self._record_loss(rank, reason, "start", f"worker {rank} is lost while workers start ({reason})")
        number = self._lost_before.pop(rank, 0) + 1
        self._replacements.lost(rank)
        ranks, started = self._replacements.due(now, spares=False)
        self._lost_before.update(dict.fromkeys(ranks, number))
        awaited = ranks[0] if ranks and number < (2 if is_late else _MOST_STARTS) else None
        change = self._protocol.lost(rank, reason, replacement=awaited)
        # It may live, and be late: who is no member of the first mesh is not removed from it, and is ended here.
        ended = [] if RemoveMember(rank, lost=True) in change else [Kill(rank)]
        return [record, *ended, *change, *started]

    def _record_loss(self, rank: int, reason: str, phase: str, message: str) -> Record:
        """The event of a worker that is lost as no member of the mesh."""
        mesh = self._protocol.placement.mesh
        about = {"ranks": [rank], "mesh_epoch": mesh.epoch, "mesh": mesh.shape.name}
        return Record("fail", {**about, "phase": phase, "reason": reason, "message": message})

    def _is_bug(self, message: m.Failed) -> bool:
        """True if a report ends the run: no loss is survived now, or another worker has failed in this step.

        The same step on the same data raises the same exception on every worker that runs it. So two workers that fail
        in one step are taken for a bug in the program: without an end, all would be lost one after the other.
        """
        return not self._survives_exceptions or self._first_crash(message)[0] != message.rank

    def _first_crash(self, message: m.Failed) -> tuple[int, str]:
        """The first worker that has failed in the step of a report, and its own report."""
        return self._crashes.get(message.step, (message.rank, message.report))

    def _end_by_bug(self, message: m.Failed) -> list[Action] | None:
        """The end of the run without anything to save, if this report ends it."""
        if not self._is_bug(message):
            return None
        # A worker may have failed because another one was killed: then that is the cause, and its exit is known by now.
        self._ending = _AwaitExits(WorkerError(*self._first_crash(message)))
        return [ReportExits()]

    def _stop_for(self, cause: RunError) -> list[Action]:
        """The run cannot go on, and has all of its state: that is saved first, and `cause` is what ends it."""
        if self._cause is not None:
            return []
        self._cause = cause
        if not self._may_stop_saved:
            return [End(RunStopped(cause))]
        return [*self._protocol.stop(cause.headline, at_once=True)]

    def _explain(self, event: WorkerEnded) -> RunError | None:
        """Note how a member's process ended, which is mostly known some time later than the fact that it did.

        A crash in native code (a signal, no report) is counted like an exception: two in one step are a bug, for which
        the run ends. With exit code 1 comes the report of an exception, which explains the end; the exit may be read
        before it.
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
        """A link between two workers, or the controller's to one, has ended: with one of its ends, or by itself.

        Args:
            was_linked: False if there was none, and one of the two wanted it.
        """
        if all(rank in self._roster for rank in ends):
            self._links.closed(*ends, was_linked=was_linked)
            if not was_linked:
                self._protocol.missed(frozenset(ends))

    def heartbeat(self, rank: int, now: float, *, is_relayed: bool) -> list[Action]:
        """A worker lives. If it has lost a link, to a worker that lives as well, the link is made again, once."""
        actions: list[Action] = []
        for verdict in self._links.heartbeat(rank, now, is_relayed=is_relayed):
            if verdict.lost is None:
                actions += self._protocol.relink(verdict.ends, verdict.reason)
            elif not self._policy.survives:
                return [*actions, End(RunStopped(RunError(f"worker {verdict.lost}: {verdict.reason}")))]
            elif len(verdict.ends) == 1:
                actions += self._declare_lost(verdict.lost, verdict.reason, now)
            else:
                actions.append(LinkFailed(verdict.ends, verdict.lost, verdict.reason))
        return actions

    def cannot_reach(self, rank: int, reason: str, now: float) -> list[Action]:
        """A worker and another one that stays cannot reach each other: it is lost."""
        return self._declare_lost(rank, reason, now)

    # ---- the end of a run

    def stop_requested(self, signal: str) -> None:
        """A user or a batch system wants the run to end: it does not begin again, and its end is told as theirs."""
        self._signal = signal

    def end(self, why: Unrecoverable | SaveEnded, now: float) -> list[Action]:
        """The run cannot go on, or stops with its state saved. A crash that brought it to that is shown."""
        self._ending = _AwaitCauses(why, now + _LAST_WORDS_S)
        return self._end_with_causes(now)

    def go_back(self, action: GoBack) -> list[Action]:
        """Begin the run again at a checkpoint from before something was committed that may be wrong, if it can."""
        if not self._policy.restarts:
            why = "a run with agents cannot begin again by itself, as they end with it"
            return self._cannot_go_back(action, f"{why}: resume it from a checkpoint of step {action.newest} or before")
        if not self._policy.survives:
            return self._cannot_go_back(action, "with elastic.enabled=false it does not begin again")
        self._ending = _AwaitCheckpoint(action)
        return [FindCheckpoint(action.newest)]

    def _cannot_go_back(self, action: GoBack, why: str) -> list[Action]:
        return [End(RunStopped(self._error(f"{action.reason}; the run ends, since {why}")))]

    def _back_to(self, action: GoBack, checkpoint: SavedState | None) -> list[Action]:
        """The run begins again at this checkpoint, or as it began if there was none yet."""
        policy, protocol = self._policy, self._protocol
        num_members = policy.mesh.shape.num_workers if policy.replaces else len(protocol.members)
        left = num_members - (0 if policy.replaces else len({*action.without} & {*protocol.members}))
        if self._signal:
            return self._cannot_go_back(action, f"it was asked to by {self._signal}")
        if left < policy.min_workers:
            return self._cannot_go_back(
                action, f"{left} workers would be left, elastic.min_workers is {policy.min_workers}"
            )
        if checkpoint is None and (self._first or (not policy.saves and protocol.version)):
            return self._cannot_go_back(action, f"there is no checkpoint of step {action.newest} or before")
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
        """The decision about an event once the run is ending."""
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
        """The end, once all causes are known or have been waited for long enough."""
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
        """True if a crash in a step has nothing to do with what happens now: others have committed the step since.

        An exception in the validation of the newest step counts as one of that step.
        """
        protocol = self._protocol
        is_under_way = protocol.is_validating or not protocol.started
        return step < protocol.version or (step == protocol.version and not is_under_way)

    def _end_with_checkpoint(self, end: Unrecoverable, checkpoint: SavedState | None) -> list[Action]:
        if restart := self._restart(end, checkpoint):
            return restart
        return [End(RunStopped(self._error(f"the run cannot go on: {end.reason}{self._how_lost()}")))]

    def _how_lost(self) -> str:
        """How the members went whose loss is the end: no `fail` tells of them, as no mesh without them came."""
        mesh = self._protocol.placement.mesh
        lost = [how for rank, how in sorted(self._untold.items()) if rank in mesh]
        more = f"; {len(lost) - _MOST_TOLD} more" if len(lost) > _MOST_TOLD else ""
        return f" ({'; '.join(lost[:_MOST_TOLD])}{more})" if lost else ""

    def _stop(self, save: Save, message: str) -> list[Action]:
        """The end; an exception after the saved version, which brought it to that, is shown."""
        newest = max(self._crashes, default=0)
        if newest > save.version:
            rank, report = self._crashes[newest]
            message += f"\n\nworker {rank} failed:\n{report}"
        return [End(RunStopped(self._error(f"the run stops: {message}")))]

    def _stopped_for(self, state: str) -> list[Action]:
        """The end of a run that cannot go on, with what became of its state."""
        cause = self._cause
        if isinstance(cause, WorkerError):
            return [End(RunStopped(WorkerError(cause.rank, cause.report, state)))]
        return [End(RunStopped(RunError(f"{cause}. {state}")))]

    def _error(self, message: str) -> RunError:
        """The error of an end; one that was asked for is no failure."""
        return StoppedBySignal(message) if self._signal else RunError(message)

    def _restart(self, end: Unrecoverable, checkpoint: SavedState | None) -> list[Action]:
        """The run begins again with the workers that are left, if they are enough and have something to begin with.

        That is a good checkpoint. Before the first step is committed it is also what the run began with: initial values
        are a function of the seed, and a checkpoint of another directory is still there.
        """
        policy, protocol = self._policy, self._protocol
        left = policy.mesh.shape.num_workers if policy.replaces else len(protocol.members)
        is_lost = end.lost or not protocol.members
        # Before the first epoch no state is lost: workers that end at every start would do so again.
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
            "ranks": [rank for rank in protocol.placement.mesh.members if rank not in protocol.members],
            "workers": left,
            "mesh": mesh.shape.name,
            "reason": end.reason,
            "message": f"{end.reason}{self._how_lost()}: {pages} pages of state after step {protocol.version} are "
            f"gone; {left} workers ({mesh.shape.name}) begin again after step {step}, {where}",
        }
        return [Record("restart", fields), End(RestartFrom(self._run_dir, mesh, step, is_begin=is_begin))]

    def _mesh_for(self, num_workers: int) -> MeshSettings:
        """The run's own mesh if it has so many workers, ragged stages included; else one as even as can be."""
        mesh = self._policy.mesh
        return mesh if num_workers == mesh.shape.num_workers else mesh_of(num_workers, mesh)

    def _killed(self, event: WorkerEnded) -> list[Action]:
        """The end of the run, if the worker was killed: that is the cause, and what others report a consequence.

        A worker that is known to be lost has been killed by the controller, for certain: it does not count.
        """
        if event.exited is None or event.exited.signal is None or event.rank not in self._roster:
            return []
        return [End(RunStopped(RunError(str(event.exited))))]


def _is_crash(exited: Exited) -> bool:
    """An end that a bug can cause; SIGKILL and SIGTERM come from outside."""
    return exited.signal in _CRASHES or exited.code not in (None, 0, _WITH_REPORT)


def mesh_of(num_workers: int, mesh: MeshSettings) -> MeshSettings:
    """A mesh of so many workers, as they are inside, on as many stages as `mesh` has or on fewer, as even as can be."""
    stages = min(num_workers, mesh.shape.num_stages)
    sizes = even_counts(num_workers, stages)
    if len(set(sizes)) == 1:
        return MeshSettings(dp=sizes[0], pp=stages, tp=mesh.tp, fsdp=mesh.fsdp)
    return MeshSettings(stages=sizes, tp=mesh.tp, fsdp=mesh.fsdp)
