"""The controller of a run: it takes one event at a time, decides, and carries out the actions that were decided.

It decides membership, never the outcome of a step (docs/protocol.md, S2). All of it runs on one thread. Everything
outside is behind `ControllerIO`: real processes and links (io.py), or the simulated cluster of the tests.

To follow an event through the code, read `decide`, which picks the collaborator that handles it, and then `_execute`,
which carries out the actions that the collaborator returns. A killed worker, for example, arrives as WorkerEnded and
goes to FailureHandler.worker_ended and ControllerProtocol.lost, which return the actions RemoveMember and
Broadcast(Prepare) for `_execute`. docs/protocol.md goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from elaswave_spmd.conf.schema import EMULATED, GROUP
from elaswave_spmd.controller.actions import (
    Action,
    AdmitAgent,
    AdoptWorker,
    Connect,
    DoubtAgent,
    DrainAgent,
    End,
    EvictWorker,
    FindCheckpoint,
    FindShards,
    GiveUpAgent,
    GoBack,
    Kill,
    LetAgentGo,
    LinkFailed,
    PlanChange,
    PlanFrequencies,
    Record,
    RecordLostWorker,
    RefuseAgent,
    RemoveShards,
    Reply,
    ReportExits,
    Settled,
    Spawn,
    UsePlaces,
    WriteManifest,
)
from elaswave_spmd.controller.admin_client import SOCKET
from elaswave_spmd.controller.admin_server import Administration
from elaswave_spmd.controller.adopter import Adopter
from elaswave_spmd.controller.checkpoints import CheckpointCoordinator, CheckpointSpec
from elaswave_spmd.controller.dvfs import Frequencies
from elaswave_spmd.controller.events import (
    AgentBack,
    AgentCame,
    AgentGone,
    AgentNotice,
    AgentReady,
    BeatsReceived,
    Event,
    LinkEnded,
    ManifestWritten,
    MoveRequested,
    OldRemoved,
    Received,
    Rejected,
    StopRequested,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.failures import FailureHandler, FailurePolicy
from elaswave_spmd.controller.garbage import CollectorPaused
from elaswave_spmd.controller.io import ControllerIO
from elaswave_spmd.controller.machines import Machines, Whereabouts
from elaswave_spmd.controller.model_checks import ModelChecks, split_of_emulated
from elaswave_spmd.controller.notices import Notices
from elaswave_spmd.controller.outcomes import Outcome, RunFinished, RunStopped
from elaswave_spmd.controller.planning import Hinted, Planned
from elaswave_spmd.controller.released import ReleasedWorkers
from elaswave_spmd.controller.replacements import ReplacementPolicy, Replacements
from elaswave_spmd.controller.replica_verification import ReplicaVerifier
from elaswave_spmd.controller.rescheduler import MeasuredCosts, ReschedulePolicy, Rescheduler
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.controller.roster import Roster
from elaswave_spmd.controller.run_log import RunLog, mean_loss
from elaswave_spmd.controller.stopping import Stopping
from elaswave_spmd.controller.sum_verification import SumVerifier
from elaswave_spmd.controller.supervision import Supervision
from elaswave_spmd.controller.validations import Validations
from elaswave_spmd.controller.verdicts import Verdicts
from elaswave_spmd.controller.verification import Verifier
from elaswave_spmd.controller.worker_states import WorkerStates
from elaswave_spmd.errors import RunError
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import (
    Broadcast,
    Committed,
    Done,
    EpochBegun,
    RemoveMember,
    Save,
    Send,
    Unrecoverable,
    ValidationDone,
)
from elaswave_spmd.recovery.admission import SIZE, ControllerPosition, MessageBounds, refused_by_controller
from elaswave_spmd.recovery.checks import CheckDraw
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, MicrobatchAssigner, Policy, ProtocolSpec
from elaswave_spmd.recovery.generations import FIRST, stamped
from elaswave_spmd.recovery.packed_reconfigure import Packer
from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.runtime.processes.agents import RemoteExited
from elaswave_spmd.runtime.transport.mailbox import Request
from elaswave_spmd.worker.spec import message_bounds

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_ACKNOWLEDGED_STEPS = 32
"""The number of steps from one Written message to the next. With `timeouts.adopt` workers keep their reports of steps
until a Written covers them, for a controller that comes back."""


class Controller:
    """Drives one run. Takes one event at a time, decides, and carries out the actions that were decided.

    Its collaborators take events and return actions: the protocol (membership), failures, supervision (the failure
    detector), checkpoints, the rescheduler and administration. The run log listens.

    Args:
        checkpoints: the facts about the run that each of its checkpoints contains, and the step at which the run
            begins.
        frequencies: control of the frequencies of the workers' devices; None if they are left alone.
        model_checks: compares what workers computed when they checked the model, also with the digests of an earlier
            run; None if there are no such digests.
        has_gone_back: True if the run has been restarted from a checkpoint before because it could not be decided
            which worker computes wrongly.
        adoption: the facts for adopting the workers of a controller that has died; None if this one starts its own.
    """

    def __init__(
        self,
        plan: RunPlan,
        io: ControllerIO,
        log: RunLog,
        checkpoints: CheckpointSpec,
        frequencies: Frequencies | None = None,
        model_checks: ModelChecks | None = None,
        *,
        has_gone_back: bool = False,
        adoption: Adoption | None = None,
    ) -> None:
        settings, now = plan.settings, io.now()
        self.outcome: Outcome | None = None
        self._plan = plan
        self._io = io
        self._log = log
        policy = ReschedulePolicy.from_settings(settings, plan.job.steps)
        measured = MeasuredCosts(
            policy.schedule,
            plan.costs,
            follows_speeds=policy.schedule.microbatches,
            mirror_count=policy.mirror_count,
        )
        draw = CheckDraw(plan.job.seed, plan.job.verify_rate)
        came_back = adoption is not None
        self.protocol = _protocol_of(plan, checkpoints.step, measured, draw, log.validations, came_back=came_back)
        verdicts = Verdicts(settings, self.protocol, has_gone_back=has_gone_back)
        self._verifier = Verifier(verdicts, draw, self.protocol)
        self._sum_verifier = SumVerifier(verdicts, draw, self.protocol)
        self._roster = Roster(plan.placement.mesh.members)
        self._packer = Packer()
        self._ready: set[int] = set()  # the workers that have reported Ready
        self._bounds = _bounds_of(plan)
        self._supervision = Supervision(settings.timeouts, now)
        self._clock, within_s = self._supervision.clock, settings.timeouts.shutdown
        self._released = ReleasedWorkers(self._clock, within_s)
        self._replacements = Replacements(ReplacementPolicy.from_settings(settings.elastic), self._roster)
        self._machines = Machines(
            settings.elastic,
            self.protocol,
            self._roster,
            self._replacements,
            plan.placement.mesh.num_workers,
        )
        self._failures = FailureHandler(
            FailurePolicy.from_settings(settings),
            self.protocol,
            self._roster,
            self._replacements,
            log.observer.run_dir.path,
            came_back=came_back,
        )
        self._model_checks = model_checks or ModelChecks(plan)
        self._notices = Notices(settings.elastic, self.protocol, self._roster, self._failures)
        self._checkpoints = CheckpointCoordinator(checkpoints, compares=plan.job.compares_at(0))
        self._replicas = ReplicaVerifier(settings, self.protocol, plan.job.compares_at, self._checkpoints, verdicts)
        self._stopping = Stopping(self.protocol, self._checkpoints, self._failures, self._clock, within_s)
        frequencies = frequencies or Frequencies(settings.schedule)
        self._rescheduler = Rescheduler(policy, measured, self.protocol, frequencies, self._roster)
        self._worker_states = WorkerStates(self.protocol, self._roster, self._replacements, self._rescheduler)
        self._keeps_best = settings.checkpoint.keep_best > 0
        # The time of `_clock` until which the last checkpoints are waited for, once all steps are done; None before.
        self._done_by: float | None = None
        self._admin = Administration(
            self.protocol,
            self._roster,
            self._replacements,
            self._machines,
            self._notices,
            log.observer,
            settings.elastic,
        )
        self._generation = FIRST
        self._later: deque[Event] = deque()  # events that the adopter has postponed until the workers are adopted
        self._adopter: Adopter | None = None
        self._unheard = frozenset[int]()  # workers of the controller before this one, as in Adopter
        if adoption is not None:
            self._generation = adoption.generation
            self._roster.begin_at(adoption.next_rank)
            self._ready.update(adoption.pids)
            self._adopter = Adopter(
                adoption,
                plan,
                self.protocol,
                self._roster,
                self._supervision,
                self._failures,
                log.validations.newest,
                log.validations.ended_at,
            )

    def run(self) -> Outcome:
        """Run until the job has finished, has stopped, or must begin again.

        Raises:
            RunError: workers report different numbers for the same step; the fork server died; the run's files cannot
                be written.
        """
        try:
            self._log.started()
            self.execute(self.start())
            while self.outcome is None:
                # If nothing else happens, this returns a Tick when the failure detector is due.
                event = self._next_event()
                if self._adopter is not None and self._adopter.postpones(event):
                    # Neither refused nor logged yet: both need the version and mesh epoch, which the adoption finds.
                    self._later.append(event)
                    if isinstance(event, StopRequested):  # acknowledged at once: the user may not want to wait
                        self.execute(self._stopping.requested_early(event, self._adopter.longest_s))
                    continue
                if isinstance(event, Received) and (why := self._refusal(event)):
                    self._io.reject(why)
                    continue
                with CollectorPaused():
                    self._take(event)
                if self._log.observer.wants_workers:
                    self._log.observer.on_workers(self._worker_states.now())
            for rejected in self._io.last_rejections():
                self._log.event(rejected, self._io.now())
            if isinstance(self.outcome, RunFinished):
                self._finish()
            elif isinstance(self.outcome, RunStopped):
                self._log.stopped(self.outcome.error)
        except BaseException as error:
            self._log.stopped(error)
            raise
        finally:
            self._io.close()
        return self.outcome

    def _next_event(self) -> Event:
        """The next event. Events that were postponed while workers were adopted come before new ones."""
        if self._later and self._adopter is None:
            return self._later.popleft()
        return self._io.next_event(self._supervision.next_tick)

    def _take(self, event: Event) -> None:
        """Decide about an event, and carry out what follows.

        If a worker has ended, the WorkerEnded events that directly follow are decided together with this one: when a
        machine fails all of its workers end, and the mesh should change once for all of them.
        """
        now, events = self._io.now(), [event]
        if isinstance(event, WorkerEnded) and self._adopter is None:
            events += self._io.next_ends()
        self._note_room(is_known=isinstance(event, WorkerEnded | AgentReady))
        actions: list[Action] = []
        for some in events:
            self._log.event(some, now)  # before the decision, which may end the run
            actions += self.decide(some, now)
        self.execute(actions)

    def _note_room(self, *, is_known: bool, silent: Collection[int] = ()) -> None:
        """Tell what replaces workers how many free places there are, if no worker is started on this machine.

        Args:
            is_known: False if it is not worth counting them, or a machine may be about to leave: then nothing is
                started until the next tick.
            silent: workers that have fallen silent. Their machines take no others for now.
        """
        if self._plan.settings.runtime.local_workers == 0:
            machines = self._io.machines() if is_known else ()
            self._replacements.note_room(sum(m.free for m in machines if m.ranks.isdisjoint(silent)))

    def stop_requested(self, number: int) -> None:
        """A signal asks the run to end. This is the only method that a signal handler may call; it may at any time."""
        self._io.stop_requested(number)

    def _refusal(self, event: Received) -> str:
        """The reason why a message cannot be right; empty if it can. A refused message is neither logged nor handled.

        Also notes the sender of an acceptable Ready, since what else a worker may send depends on that.
        """
        protocol = self.protocol
        last_epoch = protocol.last_epoch if self._adopter is None else self._adopter.last_epoch
        at = ControllerPosition(protocol.version, last_epoch, self._roster.num_ranks, self._ready)
        num_elements = None
        if event.payloads:
            size = event.payloads[0].nbytes
            if len(event.payloads) > 1 or size % 4:  # workers send the controller one payload, of fp32
                return SIZE
            num_elements = size // 4
        why = refused_by_controller(self._bounds, event.message, event.sender, num_elements, at)
        if not why and isinstance(event.message, m.Ready):
            self._ready.add(event.sender)
        return why

    def start(self) -> list[Action]:
        """The first actions of a run."""
        why_not = self._io.open_admin()
        message = f"the run cannot be asked: no {SOCKET} in its directory ({why_not})"
        no_admin: list[Action] = [Record("no_ctl", {"message": message})] if why_not else []
        if self._adopter is not None:
            return [*no_admin, *self._adopter.start()]
        return [*no_admin, Spawn(self._plan.placement.mesh.members, newcomers=False)]

    # ---- events in, actions out

    def decide(self, event: Event, now: float) -> Iterable[Action]:
        """The actions that follow from an event.

        `run` has already refused messages that cannot be right. It also holds back the events that the adopter
        postpones, so they arrive here only when the adoption is over.
        """
        if isinstance(event, AgentBack):  # one that is too late, too: its workers may still have their ranks
            self._roster.begin_at(1 + max(event.made, default=-1))
        if (adopter := self._adopter) is not None:
            if isinstance(event, AgentBack):
                self._ready |= event.workers
            if isinstance(event, Received) and isinstance(event.message, m.Adopted):
                self._checked_before(event.message.checked)
            actions = adopter.decide(event, now)
            if adopter.is_over:
                self._adopter = None
                actions += self._acknowledge()
                self._unheard = adopter.unheard
                for rank in sorted(self._unheard):  # it may have left, and still write its part of a checkpoint
                    self._released.let_go(rank, self.protocol.version)
            return actions
        # Manifests first: a run that is ending may be waiting for its last one.
        if isinstance(event, ManifestWritten | OldRemoved):
            return [*self._of_checkpoints(event, now), *self._stopping.check(now), *self._end_if_saved()]
        if isinstance(event, StopRequested):
            return self._stopping.requested(event)
        if self._failures.is_ending:
            if isinstance(event, Tick):
                self._supervision.postpone(now, event.read_until)  # the run ends anyway: nobody is suspected any more
            # The end of a process may be seen before the last messages of its worker. Every step that was committed
            # must have its line in the metrics, whatever ends the run, so Applied still counts.
            if isinstance(event, Received) and isinstance(event.message, m.Applied):
                with suppress(RunError):  # reports that differ: the run ends already, with its first cause
                    return self.protocol.applied(event.message)
            return self._failures.decide_while_ending(event, now)
        match event:
            case Received(message):
                return self._decide_message(message, now)
            case BeatsReceived(beats):
                actions: list[Action] = []
                for beat in beats:
                    if not self._failures.is_ending:  # the heartbeat before this one may have led to the end
                        actions += self._heard(beat, now, is_relayed=True)
                return actions
            case WorkerEnded():
                is_unheard = event.rank in self._unheard
                # If an agent's connection has ended, a worker that was let go may still write, and be overdue then.
                if not (is_unheard and isinstance(event.exited, RemoteExited) and event.exited.reason):
                    self._released.ended(event.rank)
                # Its report of a shard went to the controller that it knew.
                written: list[Action] = [FindShards()] if is_unheard else []
                return [*written, *self._failures.worker_ended(event)]
            case LinkEnded(peer):
                # This alone is no loss. Usually the worker's process has ended too, which arrives as WorkerEnded. If
                # the worker's heartbeats go on, only the link was lost (BrokenLinks).
                self._failures.link_closed(peer)
            case AgentCame():
                return self._machines.agent_came(event)
            case AgentBack(peer, workers=workers):
                if workers and workers <= self._roster.pids.keys() | self._unheard:
                    return []  # its workers are adopted already: only its connection was lost since
                # Its workers were declared lost when the adoption ended. It joins again as a new agent.
                return [GiveUpAgent(peer, "it has come back too late")]
            case AgentReady():
                # Replacements for lost workers first: UsePlaces counts the free places after these were started.
                return [*self._machines.agent_ready(event, now), *self._failures.replace_lost(now), UsePlaces()]
            case AgentGone():
                return self._machines.agent_gone(event)
            case AgentNotice(peer, _, within_s):
                here = [machine for machine in self._io.machines() if machine.agent == peer]
                return self._notices.begin(here, within_s, "SIGTERM", now) if here else []
            case Request():
                return self._admin.answer(event, self._io.machines(), now)
            case MoveRequested(goal):
                return self.protocol.rebalance(goal)
            case Planned():
                return self._rescheduler.planned(event)
            case Hinted():
                return self._rescheduler.hinted(event, now)
            case Tick(read_until):
                return self._tick(now, read_until)
            case Rejected():
                pass  # for the log alone
        return []

    def _decide_message(self, message: m.AnyMessage, now: float) -> Iterable[Action]:
        protocol, failures = self.protocol, self._failures
        if not isinstance(message, m.Heartbeat):
            self._supervision.moved()
        match message:
            # The messages that a large mesh sends by the thousand are matched first: `match` tries case by case.
            case m.Heartbeat():
                return self._heard(message, now, is_relayed=False)
            case m.Applied():
                return protocol.applied(message)
            case m.Measured():
                self._rescheduler.report(message)
            case m.StepReport():
                return protocol.report_received(message)
            case m.Ready() if message.rank in self._roster:  # otherwise the worker was lost while it started
                self._supervision.watch(message.rank, now)
                connect = Connect(message.rank, message.address, message.holds_mutex)
                if self._replacements.ready(message):
                    about = {"ranks": [message.rank], "message": f"worker {message.rank} is ready, as a spare"}
                    return [connect, Record("spare", about)]
                return [connect, *protocol.ready(message)]
            case m.Checked() if message.rank in self._roster:
                if (error := self._model_checks.difference(message)) is not None:
                    return failures.computes_otherwise(message.rank, error, now)
                self._layers_tried()
                return self._model_checks.passed(message)
            case m.Constructed() if message.rank in self._roster:
                if (error := self._model_checks.constructions.difference(message)) is not None:
                    return failures.computes_otherwise(message.rank, error, now)
            case m.Refused() if message.rank in self._roster:
                return failures.refused(message, now)
            case m.CaughtUp():
                return protocol.caught_up(message)
            case m.ValidationLoss():
                return protocol.validation(message)
            case m.Finished():
                return protocol.finished(message)
            case m.Leaving() if not self._plan.settings.elastic.enabled:
                return self._stopping.left_alone(message.rank)
            case m.Leaving():
                self._supervision.wants_to_leave(message.rank)
                return protocol.drain(message.rank, "asked to leave")
            case m.SpawnRequest():
                return [Spawn(self._roster.allocate(message.count))]
            case m.ShardWritten():
                return [*self._checkpoints.wrote(message, now), *self._stopping.check(now), *self._end_if_saved()]
            case m.ChecksDiffer():
                return self._verifier.differ(message)
            case m.CheckedAgain():
                return self._verifier.answered(message)
            case m.SumsDiffer():
                return self._sum_verifier.differ(message)
            case m.AddedUp():
                return self._sum_verifier.added(message)
            case m.Fingerprints():
                return self._replicas.fingerprints(message)
            case m.Damaged():
                return protocol.damaged(message)
            case m.LinkClosed():  # between two workers; the controller's own links end as LinkEnded
                failures.link_closed(message.rank, message.peer, was_linked=message.was_linked)
            case m.LinksClosed(rank, peers):
                for peer in peers:
                    failures.link_closed(rank, peer)
            case m.Failed():
                return failures.failed(message, now)
            case m.Ready() | m.Checked() | m.Constructed() | m.Refused():
                pass  # from a worker that was declared lost meanwhile
            case m.FinalPages() | m.GroupLost() | m.PairLost():
                pass  # only the run log uses these, and it has had them in `_take`
            case m.Adopted():
                # Too late: it has been killed after its deadline, or nobody has waited for it. Then it waits now.
                return [Kill(message.rank)] if message.rank in self._unheard else []
            case _:
                raise AssertionError(f"the controller got {message}")
        return []

    def _checked_before(self, message: m.Checked | None) -> None:
        """A worker that is adopted says what its check of the model found, before the first epoch of this controller.

        So limits in flight go on to fit `schedule.memory_limit`, and backwards may go on to run in two parts.
        """
        if message is not None:
            self._model_checks.adopted(message)
            self._layers_tried()

    def _layers_tried(self) -> None:
        """Tell the protocol which layers can run their backward in two parts, if it does not know."""
        if self.protocol.split is None:
            self.protocol.layers_tried(self._model_checks.split)

    def _heard(self, beat: m.Heartbeat, now: float, *, is_relayed: bool) -> list[Action]:
        self._supervision.heartbeat(beat, now)
        return self._failures.heartbeat(beat.rank, now, is_relayed=is_relayed)

    def _tick(self, now: float, read_until: float) -> Iterable[Action]:
        """What is due by the clock: deadlines of workers and of the last checkpoint, and starts that had to wait."""
        # Only when it is needed: `free_to_leave` goes through all replica sets.
        free = self.protocol.free_to_leave if self._supervision.has_overdue_leavers else ()
        suspects, standstill = self._supervision.tick(now, read_until, self.protocol.unanswered, free)
        silent = [suspect.rank for suspect in suspects if suspect.is_silent]
        self._note_room(is_known=True, silent=silent)
        # Before the losses: the Prepare that is sent is then that of the losses, before replacements are started, which
        # takes long.
        opened = self._failures.open_links()
        lost = self._failures.suspected(suspects, now)
        if standstill is not None and self._done_by is None:
            lost += self._failures.stands_still(standstill)
        actions, unwritten = self._released.overdue()
        if actions:
            self._checkpoints.worker_lost(until=unwritten)  # what they were writing will not come
        if silent:
            # Before the losses are carried out: these start replacements, and none may go to a machine that is given
            # up here, or may be soon.
            actions += self._machines.fallen_silent(silent, self._io.machines(), self._ready)
        actions += [*opened, *lost, *self._failures.replace_lost(now)]
        if self._machines.has_arrivals:
            actions.append(UsePlaces())
        if self._notices.is_waiting:
            actions += self._notices.check(self._io.machines(), now)
        return [*actions, *self._stopping.check(now), *self._end_if_saved()]

    # ---- carrying actions out

    def execute(self, actions: Iterable[Action]) -> None:
        """Carry out actions and those that follow from them, in one queue.

        What follows from an action comes after all actions that were queued before.
        """
        queue = deque(actions)
        while queue and self.outcome is None:
            action = queue.popleft()
            if self._is_overtaken(action):
                continue
            if isinstance(action, LinkFailed):
                failed = [action]
                while queue and isinstance(following := queue[0], LinkFailed):
                    failed.append(following)
                    queue.popleft()
                queue.extend(self._links_failed(failed))
                for link in failed:
                    self._log.action(link, self._io.now())
                continue
            queue.extend(self._execute(action))
            self._log.action(action, self._io.now())

    def _links_failed(self, failed: Sequence[LinkFailed]) -> list[Action]:
        """One end of each of these links goes, or its machine.

        A network that is cut in two fails hundreds of links of each worker on its border, and one heartbeat tells of
        all of that worker's. So where workers are is looked up once for all that one event tells of.
        """
        where, now = Whereabouts.on(self._io.machines()), self._io.now()
        actions: list[Action] = []
        for link in failed:
            if not link.ends <= self._roster.pids.keys():
                continue  # something before this has removed one of the two workers
            severed = self._machines.link_failed(link, where)
            actions += self._failures.cannot_reach(link.rank, link.reason, now) if severed is None else severed
        return actions

    def _is_overtaken(self, action: Action) -> bool:
        """True for a Prepare that is followed by a newer one in the queue, as when several workers are lost at once.

        Only the last of them is sent; no worker ever hears of the mesh epochs before it. Each would cost a line on the
        disk and a message to all members: five million messages if a rack of 500 workers out of 10,000 is lost.
        """
        prepare = action.message if isinstance(action, Broadcast) else None
        return isinstance(prepare, m.Prepare) and prepare.epoch < self.protocol.last_epoch

    def _execute(self, action: Action) -> Iterable[Action]:
        """Carry one action out. Returns the actions that follow from it."""
        io, now = self._io, self._io.now()
        match action:
            case Send(rank, message):
                io.send(rank, stamped(m.encode(message), self._generation))
            case AdoptWorker(rank):
                io.adopt(rank, self._generation)
            case FindShards():
                return self._checkpoints.found(io.find_shards(), now)
            case Settled():
                io.settle()
            case Broadcast():
                self._broadcast(action)
            case Spawn(ranks, newcomers, host):
                return self._spawn(ranks, newcomers, host, now)
            case AdmitAgent() | RefuseAgent() | DrainAgent() | LetAgentGo() | DoubtAgent() | GiveUpAgent():
                io.order_agent(action)
            case UsePlaces():
                return self._machines.use_places(io.machines(), now)
            case Connect(rank, address, holds_mutex):
                if why := io.connect(rank, address, holds_mutex=holds_mutex):
                    message = f"the death of worker {rank} is noticed when its process is reaped, not before: {why}"
                    return [Record("no_death_watch", {"ranks": [rank], "reason": why, "message": message})]
            case RemoveMember(rank, lost):
                self._remove_member(rank, lost)
            case Kill(rank):
                self._supervision.forget(rank)
                io.kill(rank)
            case RecordLostWorker(rank, at):
                self._log.lost(rank, at, self._supervision.last_sign(rank, io.faulted_at(rank)))
            case EvictWorker(rank, reason):
                return self._failures.computes_wrongly(rank, reason, now)
            case GoBack():
                return self._failures.go_back(action)
            case Committed(applied):
                return self._committed(applied, now)
            case ValidationDone():
                return self._validated(action)
            case EpochBegun(placement, version=version):
                self._verifier.begun(action)
                self._sum_verifier.begun(action)
                return self._rescheduler.begun(placement, version)
            case Save():
                self._stopping.begin(action)
            case Unrecoverable() if self._done_by is not None:
                # All steps are done and the weights are collected; only checkpoints were waited for, and will not come.
                return [End(RunFinished())]
            case Unrecoverable():
                return self._failures.end(action, now)
            case Done():
                self._done_by = self._done_by or self._clock.now + self._plan.settings.timeouts.shutdown
                return self._end_if_saved()
            case End(outcome):
                # Once all results are here the run has finished, whatever loss or request has ended it after that.
                self.outcome = outcome if self._done_by is None else RunFinished()
            case PlanChange(request) | PlanFrequencies(request):
                io.plan(request)
            case WriteManifest(manifest):
                io.write_manifest(manifest, self._trusted, self._log.validations.ranked if self._keeps_best else ())
            case RemoveShards(step, names):
                io.remove_shards(step, names)
            case FindCheckpoint(newest):
                io.find_checkpoint(newest)
            case ReportExits():
                io.report_exits()
            case Reply(request, answer):
                request.reply(answer)
        return []

    def _broadcast(self, action: Broadcast) -> None:
        # Members may have been waiting for this message (for the first Reconfigure, say), so it counts as movement.
        self._supervision.moved()
        if isinstance(action.message, m.Prepare):
            # On the disk before any worker knows of the epoch: workers stamp their checkpoint shards with it, and a
            # later controller has to know which epochs there were.
            self._io.journal(action.message, self._roster.num_ranks)
        # Encoded once for all receivers: with a thousand workers, encoding it for each would cost more than all the
        # rest of the reconfiguration.
        for receivers, encoded in self._packer.encoded(action.ranks, action.message, action.peers):
            header = stamped(encoded, self._generation)
            for rank in receivers:
                self._io.send(rank, header)

    def _committed(self, applied: m.Applied, now: float) -> list[Action]:
        """A step is committed: tell all collaborators that count steps. Returns the actions that follow."""
        self._supervision.committed()
        removals = self._checkpoints.committed(applied.step)
        self._verifier.committed(applied)
        self._sum_verifier.committed(applied)
        if self._failures.is_ending:
            return []
        acknowledged = self._acknowledge() if applied.step % _ACKNOWLEDGED_STEPS == 0 else []
        planned = self._rescheduler.committed(applied.step, now)
        return [*removals, *acknowledged, *planned, *self._failures.committed(applied, now)]

    def _acknowledge(self) -> list[Action]:
        """Tell workers that they need not keep their reports of steps up to the version any more (Written).

        They keep them only with `timeouts.adopt`. This action is carried out after the log has written the lines of
        these steps, as `execute` logs a Committed before the actions that follow from it.
        """
        if self._plan.settings.timeouts.adopt is None or not self.protocol.version:
            return []
        return [Broadcast(self.protocol.members, m.Written(self.protocol.version))]

    # ---- validations

    def _validated(self, done: ValidationDone) -> list[Action]:
        """All losses of a validation have arrived. Returns the early end's record, if this loss ends the run."""
        loss = mean_loss(self._plan, done)
        self._log.validations.add(done.step, loss)
        self._checkpoints.validated(done.step, loss)
        return [self._early_end(done.step)] if done.is_last else []

    def _early_end(self, step: int) -> Record:
        about = self._log.validations.early_stop()
        why = f"the validation loss was best after step {about['best_step']}"
        if not about["best_step"]:
            why = "no validation loss was finite"
        return Record("early_stop", {"step": step, **about, "message": f"the run ends after step {step}: {why}"})

    def _end_if_saved(self) -> list[Action]:
        """The end of a run whose result is complete, once its newest checkpoint is on the disk, or time is up.

        With `checkpoint.keep_best` the checkpoints of the best validated steps are waited for as well.
        """
        if self._done_by is None:
            return []
        ranked = (step for step in self._log.validations.ranked if not self._checkpoints.why_not(step))
        best = islice(ranked, self._plan.settings.checkpoint.keep_best)
        is_awaited = self._checkpoints.awaits_newest or any(self._checkpoints.awaits(step) for step in best)
        if self._clock.now < self._done_by and is_awaited:
            return []
        return [End(RunFinished())]

    @property
    def _trusted(self) -> int | None:
        """The last version that all checks in use have confirmed; None if no check is in use, or if steps that may be
        wrong stay (`verify.action`). The newest checkpoint up to it must be kept, as the run may have to go back to it.
        """
        if self._plan.settings.verify.action not in ("rollback", "stop"):
            return None
        agreed = self.protocol.agreed if self._plan.job.verify_every else None
        known = [self._verifier.trusted, self._sum_verifier.trusted, agreed]
        return min((version for version in known if version is not None), default=None)

    def _spawn(self, ranks: Iterable[int], newcomers: bool, host: str | None, now: float) -> list[Action]:
        """Start workers. A newcomer that cannot be started is lost, and all others go on.

        Raises:
            RunError: one of the first workers cannot be started: nothing has begun yet that could go on.
        """
        actions: list[Action] = []
        for rank in ranks:
            self._supervision.expect(rank, joins=self.protocol.started)
            spawned = self._io.spawn(rank, host)
            if spawned.why_not and not newcomers:
                raise RunError(f"worker {rank} could not be started: {spawned.why_not}")
            self._roster.add(rank, spawned.pid)
            if newcomers:
                self.protocol.expect(rank, spawned.domain)
            if spawned.why_not:
                actions += self._failures.not_started(rank, spawned.why_not, now)
        return actions

    def _remove_member(self, rank: int, lost: bool) -> None:
        """The worker is not a member any more: nothing that it sends or does counts from now on.

        Args:
            lost: True if it failed: its process is killed. False if it has left: it ends by itself.
        """
        self._supervision.forget(rank)
        self._failures.worker_removed(rank)
        self._notices.removed(rank, lost=lost)
        self._worker_states.removed(rank, lost=lost)
        self._roster.remove(rank)
        if not lost:
            self._released.let_go(rank, self.protocol.version)
        else:
            self._checkpoints.worker_lost()
            # Its process may still live: it may be stopped, or on a machine that the others cannot reach.
            self._io.kill(rank)
            self._io.disconnect(rank)

    def _of_checkpoints(self, event: ManifestWritten | OldRemoved, now: float) -> list[Action]:
        if isinstance(event, OldRemoved):
            return self._checkpoints.removed(event)
        return self._checkpoints.written(event, now)

    def _finish(self) -> None:
        """End a run that has trained to its last step: write the result, and let all workers go.

        Raises:
            RunError: pages of the trained weights are missing.
        """
        # The loop has ended, so manifests that are completed now do not arrive as events any more.
        for result in self._io.finish_writing():
            now = self._io.now()
            for action in self._of_checkpoints(result, now):
                self._log.action(action, now)
        if not self._log.has_all_weights:
            raise RunError("all workers have finished, but pages of the trained weights have not come")
        # Before the workers get Stop: if this controller dies while it writes the result, or the disk is full, workers
        # still have the state, and save it or give it to the next controller.
        self._log.finished()
        stop = stamped(m.encode(m.Stop()), self._generation)
        for rank in (*self.protocol.addresses, *self._replacements.spares):
            self._io.send(rank, stop)


def _protocol_of(
    plan: RunPlan,
    version: int,
    assigner: MicrobatchAssigner,
    draw: CheckDraw,
    known: Validations,
    *,
    came_back: bool,
) -> ControllerProtocol:
    """Make the controller's protocol of a run from its settings.

    Args:
        version: the version at which this controller begins.
        assigner: decides how many micro-batches each worker gets.
        draw: which computations are checked (verify.rate).
        known: the validations up to `version`.
        came_back: True if it adopts the workers of a controller that has died.
    """
    settings, job = plan.settings, plan.job
    spec = ProtocolSpec(
        layout=plan.description.layout,
        steps=job.steps,
        num_validation_microbatches=job.num_validation_microbatches,
        validates_at=job.validates_at,
        mean_loss=partial(mean_loss, plan),
        version=version,
        began_at=0 if came_back else None,
        # A controller that comes back must get the addresses of all members from any one of them. So with
        # timeouts.adopt every member is sent all addresses, on meshes of any size.
        widest=WIDEST if settings.timeouts.adopt is None else None,
        tells_hosts=settings.runtime.collectives == GROUP,
    )
    policy = Policy(
        mirror_count=settings.mirror.count,
        mirror_scatter=settings.mirror.scatter,
        min_workers=settings.elastic.min_workers,
        compares_at=job.compares_at,
        early_stop=job.early_stop,
        reads_masters=job.reads_masters,
    )
    split = split_of_emulated(plan) if settings.runtime.device == EMULATED else None
    losses = {step: known.loss_at(step) for step in known.ranked}
    return ControllerProtocol(plan.placement, spec, policy, assigner, draw, split, losses)


def _bounds_of(plan: RunPlan) -> MessageBounds:
    """The ids and sizes that messages of a run can have; the controller refuses any others."""
    chaos = plan.settings.chaos
    spawns = chaos.random or any(event.kind == "join" for event in chaos.events)
    return message_bounds(plan.job, plan.description.layout, spawns=spawns, pairs=plan.settings.runtime.pairs)
