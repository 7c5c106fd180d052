"""The controller's input and output: the interface `ControllerIO`, and `ProcessIO`, which has real processes and links.

The simulated cluster (tests/cluster) passes its own `ControllerIO` to the same Controller.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from elaswave_spmd.conf import checks
from elaswave_spmd.conf.schema import GROUP, CheckpointSettings, RuntimeSettings, endpoint
from elaswave_spmd.controller.actions import (
    AdmitAgent,
    AgentOrder,
    DoubtAgent,
    DrainAgent,
    GiveUpAgent,
    LetAgentGo,
    RefuseAgent,
)
from elaswave_spmd.controller.admin_client import SOCKET
from elaswave_spmd.controller.admin_server import ControlSocket
from elaswave_spmd.controller.checkpoints import CheckpointSpec
from elaswave_spmd.controller.events import (
    BeatsReceived,
    CheckpointFound,
    Event,
    ExitsReported,
    LinkEnded,
    ManifestWritten,
    OldRemoved,
    Received,
    Rejected,
    SavedState,
    StopRequested,
    Tick,
    WorkerEnded,
)
from elaswave_spmd.controller.orphaned_run import NEXT_RANK, SCRATCH, adoption_record
from elaswave_spmd.controller.planning import HintRequest, PlanRequest, PlanThread
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.errors import CheckpointError, ConfigError, RunError, UserError
from elaswave_spmd.mesh.topology import Path as DomainPath
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.recovery.admission import DIRECTION, UNREADABLE, refused_heartbeat
from elaswave_spmd.recovery.messages import Adopt, Heartbeat, Prepare, decode, encode
from elaswave_spmd.run_dir.atomic_write import sync_file
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path
from elaswave_spmd.run_dir.checkpoints import (
    Looks,
    load_newest_good,
    prune,
    remove_shards,
    unfinished_shards,
    write_manifest,
)
from elaswave_spmd.run_dir.directory import EVENTS, METRICS
from elaswave_spmd.run_dir.journal import Journal
from elaswave_spmd.run_dir.manifest import Manifest, layout_summary
from elaswave_spmd.runtime.devices.group_store import GroupStore, group_host
from elaswave_spmd.runtime.processes import death_watch
from elaswave_spmd.runtime.processes.adoption import read_address
from elaswave_spmd.runtime.processes.agents import AgentBack, AgentNews, Agents, RemoteExited
from elaswave_spmd.runtime.processes.fork_server_client import ForkServerClient, NoAnswerError, NotStartedError
from elaswave_spmd.runtime.processes.launcher import Launcher, Machine
from elaswave_spmd.runtime.processes.rendezvous import is_loopback, resolve_address
from elaswave_spmd.runtime.processes.scratch import remove_with
from elaswave_spmd.runtime.processes.stop_signals import signal_name
from elaswave_spmd.runtime.transport.credentials import Credentials, make_credentials
from elaswave_spmd.runtime.transport.links import CONTROLLER, Links, Transport
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, Mailbox, PeerClosed, ReadMark, Request
from elaswave_spmd.worker.message_limits import message_limits, payload_limits
from elaswave_spmd.worker.spec import LinkSpec, OptionSpec, RunSpec, WorkerSpec

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_LOOK_S = 1.0  # seconds between two checks whether anything was refused
_POLL_S = 0.1  # the longest time, in seconds, that the end of a worker without a death watch goes unnoticed
_FORK_SERVER_S = 10.0  # seconds to wait for the fork server when it starts a newcomer, or reports exits at an end


@dataclass(frozen=True)
class Spawned:
    """A worker that was started.

    Args:
        pid: its process id; None if it runs on another machine, or could not be started.
        domain: its failure domain; None if the run has only one.
        why_not: the reason why it could not be started; empty if it was.
    """

    pid: int | None = None
    domain: DomainPath | None = None
    why_not: str = ""


class ControllerIO(Protocol):
    """The controller's only way to the outside: what it does, and the events that it gets.

    All methods but `stop_requested` are called by the controller's thread.
    """

    def now(self) -> float:
        """Seconds of a clock that never runs back."""
        ...

    def next_event(self, until: float) -> Event:
        """The next event. Waits for one until the clock has reached `until`, and then returns a Tick.

        A Tick that is due comes before everything else that waits, but not twice in a row: if the controller were
        always late for its deadlines, no other event would ever get through. It says up to which time everything was
        returned before.
        """
        ...

    def next_ends(self) -> list[WorkerEnded]:
        """Remove and return those next events that are ends of workers, as far as they are known already. Never waits.

        The controller decides all of them at once, as the workers of a machine end together.
        """
        ...

    def stop_requested(self, number: int) -> None:
        """A signal asks the run to end: StopRequested is among the next events. Called by the signal's handler."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send an encoded message. Never waits; what is sent to a worker without a link is dropped."""
        ...

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        """Open the link to a worker that is ready, and watch for its death.

        Args:
            holds_mutex: True if the worker holds the mutex by which its death is noticed at once.

        Returns:
            The reason why the mutex cannot be watched, so that the death is noticed only when the process is reaped;
            empty if it is watched, or if the worker holds no mutex.
        """
        ...

    def adopt(self, rank: int, generation: int) -> None:
        """Open the link to a worker of the previous controller, and send it this one's generation and address.

        A worker whose address nobody knows is killed: it was not a member of the mesh yet.
        """
        ...

    def disconnect(self, rank: int) -> None:
        """Close the link to a worker at once."""
        ...

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        """Start a worker.

        Args:
            host: for a newcomer, the machine on which it is to run; None for the one with the most room.
        """
        ...

    def machines(self) -> tuple[Machine, ...]:
        """The machines of the run as they are now; empty if the run can have no other machine than this one."""
        ...

    def order_agent(self, order: AgentOrder) -> None:
        """Carry out a decision about an agent. Never waits. Does nothing if the agent has gone meanwhile."""
        ...

    def kill(self, rank: int) -> None:
        """End a worker's process for certain, even one that is stopped."""
        ...

    def reject(self, reason: str) -> None:
        """Count a message that was refused."""
        ...

    def last_rejections(self) -> list[Rejected]:
        """At the end of the run: the counts of all that was refused, if they have grown since the last Rejected.

        Waits for the answers of agents for up to 2 seconds.
        """
        ...

    def report_exits(self) -> None:
        """Queue a WorkerEnded for every process that has ended by now, and then ExitsReported, as the next events."""
        ...

    def faulted_at(self, rank: int) -> float | None:
        """The time at which fault injection hit a worker, if it did and the worker wrote it down."""
        ...

    def open_admin(self) -> str:
        """Accept administrators' requests, as events, from now on.

        Returns:
            The reason if that is impossible; else empty.
        """
        ...

    def journal(self, prepare: Prepare, next_rank: int) -> None:
        """Write the epoch of a Prepare to the disk, before any worker gets it.

        Args:
            next_rank: the rank above all that were ever given to workers.
        """
        ...

    def plan(self, request: PlanRequest | HintRequest) -> None:
        """Plan a change of the mesh, or frequencies, in the background; Planned or Hinted follows."""
        ...

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        """Write a checkpoint's manifest in the background; ManifestWritten follows.

        Old checkpoints are removed after that, and OldRemoved follows, unless a newer one is complete before they are.

        Args:
            trusted: a version up to which all checks have agreed: the newest checkpoint up to it is kept, however old
                it is. None if none has to be kept for this reason.
            best: the validated steps from the lowest loss to the highest. The checkpoints of the first ones are kept
                (checkpoint.keep_best).
        """
        ...

    def remove_shards(self, step: int, names: Sequence[str]) -> None:
        """Remove shards of a checkpoint in the background, as far as that is possible."""
        ...

    def find_checkpoint(self, newest: int | None) -> None:
        """Wait for manifests that are being written, then look for the newest good checkpoint; CheckpointFound follows.

        No checkpoints are removed any more, as the life of the run ends.

        Args:
            newest: checkpoints of later steps are ignored; None for all.
        """
        ...

    def find_shards(self) -> list[ShardInfo]:
        """The shards on the disk that workers have written in this life of the run and that no manifest lists."""
        ...

    def settle(self) -> None:
        """Note that the adoption is complete: a later controller need not repeat anything for the previous one."""
        ...

    def finish_writing(self) -> list[ManifestWritten | OldRemoved]:
        """Wait until all manifests are written. Returns the results that have not been returned as events yet.

        Old checkpoints are not waited for.
        """
        ...

    def close(self) -> None:
        """Close everything except the workers' processes, which the launcher ends.

        Waits for the threads that write manifests and remove old checkpoints, for `timeouts.shutdown` at most.
        """
        ...


class ProcessIO:
    """The `ControllerIO` over real worker processes and links.

    It uses threads of its own: that of the links, those of the death watch, one that writes manifests, one that removes
    old checkpoints, and one that plans changes of the mesh.

    Args:
        launcher: starts the workers and reports how they end.
        scratch: the directory of the sockets.
        run_dir: the run's directory, for the journal, manifests and the administrators' socket.
        checkpoints: the facts about the run that the journal and the workers' shards contain.
        frequency_guard: the socket of the process that sets the devices' frequencies, or None.
        adoption: the facts for adopting the workers of a controller that has died; None if there are none to adopt.

    Raises:
        ConfigError: the links, or the store where groups meet, cannot be opened with these settings.
        DataError: the journal is damaged.
        FilesError: the journal cannot be written.
    """

    def __init__(
        self,
        plan: RunPlan,
        launcher: Launcher | ForkServerClient,
        scratch: str,
        run_dir: Path,
        checkpoints: CheckpointSpec,
        *,
        frequency_guard: str | None = None,
        adoption: Adoption | None = None,
    ) -> None:
        settings = plan.settings
        self._launcher = launcher
        self._run_dir = run_dir
        self._scratch = scratch
        self._newest_at_begin = checkpoints.newest
        self._mailbox = Mailbox()
        self._ready: deque[Event] = deque()  # events that were found and not returned yet
        self._stops: deque[StopRequested] = deque()  # filled by a signal handler
        self._rejected: Counter[str] = Counter()
        self._look_at = 0.0
        self._has_ticked = False  # True if the last event was a Tick: then everything else comes before the next Tick
        self._read_until = time.monotonic()  # everything that came before was returned, or is in `_ready`
        self._awaits_mark = False  # True if the links were asked for a mark, by which `_read_until` advances
        self._deaths: deque[WorkerEnded] = deque()  # filled by the death watch's threads; a deque needs no lock
        agents = self._agents
        host, transport = listen_host(settings.runtime), cast(Transport, settings.runtime.transport)
        if adoption is not None:
            credentials = adoption.credentials
        else:
            credentials = agents.credentials if agents is not None else credentials_of(settings.runtime)
        payloads = payload_limits(plan)
        with contextlib.ExitStack() as undo:
            self._links = Links(
                CONTROLLER,
                self._mailbox,
                transport=transport,
                directory=scratch,
                credentials=credentials,
                host=host,
                limits=message_limits(payloads),
            )
            undo.callback(self._links.close)
            groups = settings.runtime.collectives == GROUP
            self._groups = GroupStore(group_host(settings.runtime, host)) if groups else None
            record = {} if settings.timeouts.adopt is None else adoption_record(settings, scratch, checkpoints.newest)
            self._writer = _ManifestWriter(
                run_dir,
                settings.checkpoint,
                checkpoints,
                self._mailbox,
                credentials,
                record,
                adoption,
                settings.timeouts.shutdown,
            )
            undo.callback(self._writer.close)
            table = death_watch.RobustMutexTable(scratch) if death_watch.is_available() else None
            self._mutexes = table
            self._watcher = death_watch.DeathWatch(table, self._died) if table is not None else None
            undo.pop_all()
        # If agents can keep workers while there is no controller, the next controller learns the ranks that were given
        # from the journal only: workers that it has not heard of may still come back.
        self._journals_ranks = settings.timeouts.adopt is not None and settings.runtime.has_agents
        self._planning = PlanThread(self._mailbox.interrupt)
        self._admin: ControlSocket | None = None
        self._spec = RunSpec(
            settings,
            plan.data,
            LinkSpec(self._links.address, scratch, credentials, host, payloads),
            checkpoints.orders,
            layout_summary(plan.description.layout),
            OptionSpec(
                profile=plan.costs.to_json() if settings.schedule.profile else None,
                trace=str(run_dir) if settings.run.trace else None,
                frequency_guard=frequency_guard,
                groups=self._groups.address if self._groups is not None else None,
                generation=None if adoption is None else adoption.generation,
            ),
        )

    def now(self) -> float:
        return time.monotonic()

    def next_event(self, until: float) -> Event:
        """See `ControllerIO.next_event`.

        Raises:
            RunError: the fork server, which is the parent of all workers, has died.
        """
        while True:
            if self._ready:
                return self._ready.popleft()
            left = until - time.monotonic()
            if left <= 0 and not self._has_ticked:
                self._has_ticked = True
                return self._tick()  # before the mailbox: a flood of messages must not delay what is due
            self._has_ticked = False
            item = self._mailbox.get(max(0.0, min(left, _POLL_S)))
            self._ready += [*self._asked(), *self._ended_after_words(), *self._rejections()]
            if item is not None and (event := self._event_of(item)) is not None:
                return event
            if (written := self._writer.next_result()) is not None:
                return written
            if (planned := self._planning.next_answer()) is not None:
                return planned

    def _tick(self) -> Tick:
        """A Tick, with the time up to which everything was read; and ask the links for a mark at the present time."""
        if not self._awaits_mark:
            self._awaits_mark = True
            self._links.mark(time.monotonic())
        return Tick(self._read_until)

    def next_ends(self) -> list[WorkerEnded]:
        found: list[WorkerEnded] = []
        while self._ready and isinstance(event := self._ready[0], WorkerEnded):
            found.append(event)
            self._ready.popleft()
        return found

    def stop_requested(self, number: int) -> None:
        # Runs in a signal handler, which may interrupt anything: so it only appends to a deque and wakes the thread.
        self._stops.append(StopRequested(signal_name(number)))
        self._mailbox.interrupt("a signal")

    def send(self, rank: int, message: bytes) -> None:
        self._links.send(rank, message)

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        try:
            self._links.connect(rank, address)
        except RunError as error:  # what the worker sent is no address, or this process has no descriptor left
            self._ready.append(WorkerEnded(rank, str(error), time.monotonic()))
            self.kill(rank)  # its process lives, and would go on sending heartbeats
        # `watch` is False for a worker that died between its Ready and this call, as its mutex is free already.
        try:
            if holds_mutex and self._watcher is not None and not self._watcher.watch(rank):
                self._ready.append(WorkerEnded(rank, "its process ended while it started", time.monotonic()))
        except death_watch.NotWatchedError as error:
            return str(error)
        return ""

    def adopt(self, rank: int, generation: int) -> None:
        there = self._launcher.address_of(rank) if isinstance(self._launcher, Launcher) else None
        address = read_address(self._scratch, rank) if there is None else there
        if not address:
            self.kill(rank)
            return
        # The mutex belongs to the previous controller's table, so the worker's end is noticed when it is reaped.
        self.connect(rank, address, holds_mutex=False)
        self._links.send(rank, encode(Adopt(generation, self._links.address)))

    def disconnect(self, rank: int) -> None:
        self._links.drop(rank)

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        spec = WorkerSpec(rank, self._spec, self._mutex_of(rank)).to_dict()
        launcher, pid, why_not = self._launcher, None, ""
        limit_s = _FORK_SERVER_S if self._links.peers else None
        try:
            if isinstance(launcher, Launcher):
                pid = launcher.spawn(rank, spec, host, limit_s)
            else:
                pid = launcher.spawn(rank, spec, limit_s)
        except NotStartedError as error:
            why_not = str(error)
        domain = launcher.domain_of(rank) if isinstance(launcher, Launcher) else None
        return Spawned(pid, domain, why_not)

    def machines(self) -> tuple[Machine, ...]:
        return self._launcher.machines if isinstance(self._launcher, Launcher) else ()

    def order_agent(self, order: AgentOrder) -> None:
        if (agents := self._agents) is None:
            return
        match order:
            case AdmitAgent(peer):
                agents.admit(peer)
            case RefuseAgent(peer, error):
                agents.refuse(peer, error)
            case DrainAgent(peer, within_s, says):
                agents.drain(peer, within_s, says)
            case LetAgentGo(peer, says, lost):
                agents.let_go(peer, says, lost=lost)
            case DoubtAgent(peer, ranks):
                agents.doubt(peer, ranks)
            case GiveUpAgent(peer, reason):
                agents.give_up(peer, reason)

    @property
    def _agents(self) -> Agents | None:
        return self._launcher.agents if isinstance(self._launcher, Launcher) else None

    def kill(self, rank: int) -> None:
        # Does not wait for the fork server's answer: it may be stopped, and what this worker does counts no more.
        self._launcher.order_signal(rank, signal.SIGKILL)

    def reject(self, reason: str) -> None:
        self._links.reject(reason)

    def last_rejections(self) -> list[Rejected]:
        if (agents := self._agents) is not None:
            agents.request_exits()  # agents send their counts of refusals along with the answer
        self._look_at = 0.0
        return self._rejections()

    def report_exits(self) -> None:
        # Signal 0 to no worker does nothing, but its answer comes after the notices of all processes that have ended.
        with contextlib.suppress(NoAnswerError):
            self._launcher.signal(-1, 0, _FORK_SERVER_S)
        self._ready += [*self._ended_after_words(), ExitsReported()]

    def faulted_at(self, rank: int) -> float | None:
        return self._mutexes.injected_at(rank) if self._mutexes is not None else None

    def open_admin(self) -> str:
        try:
            self._admin = ControlSocket(self._run_dir, self._mailbox)
        except OSError as error:  # a file system without sockets
            return error.strerror or str(error)
        remove_with(self._scratch, self._run_dir / SOCKET)
        return ""

    def journal(self, prepare: Prepare, next_rank: int) -> None:
        self._writer.journal(prepare, {NEXT_RANK: next_rank} if self._journals_ranks else {})

    def plan(self, request: PlanRequest | HintRequest) -> None:
        self._planning.ask(request)

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        self._writer.write(manifest, trusted, best)

    def remove_shards(self, step: int, names: Sequence[str]) -> None:
        self._writer.remove(step, names)

    def find_checkpoint(self, newest: int | None) -> None:
        self._writer.remove_no_more()  # nor what is found here
        self._ready += self.finish_writing()
        self._ready.append(CheckpointFound(newest_checkpoint(self._run_dir, newest)))

    def find_shards(self) -> list[ShardInfo]:
        return unfinished_shards(self._run_dir, self._spec.checkpoints.incarnation, self._newest_at_begin)

    def settle(self) -> None:
        self._launcher.settle()

    def finish_writing(self) -> list[ManifestWritten | OldRemoved]:
        return self._writer.finish()

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._planning.close()
        self._links.close()
        if self._groups is not None:
            self._groups.close()
        self._writer.close()
        if self._watcher is not None:
            self._watcher.close()
        if self._mutexes is not None:
            self._mutexes.close()

    def _mutex_of(self, rank: int) -> tuple[str, int] | None:
        """The mutex (path of the table, position in it) that a new worker on this machine holds while it lives.

        None if there is none: then the worker's end is noticed only when its process is reaped.
        """
        if self._mutexes is None:
            return None
        try:
            slot = self._mutexes.slot(rank)
        except OSError:  # no room in the folder of the sockets
            return None
        return str(slot.path), slot.position

    def _asked(self) -> list[StopRequested]:
        """Signals that have come since the last call."""
        return [self._stops.popleft() for _ in range(len(self._stops))]

    def _ended_after_words(self) -> list[Event]:
        """The events of `_ended`, with the messages of the mailbox in an order that shows causes before consequences.

        Messages of the workers that have ended come before their ends. A worker that fails reports why before its
        process ends; if the controller finds both at once and took the end first, the user would not see the exception,
        nor the steps that the worker had reported. Messages of the other workers come after the ends, which may be
        their cause. Heartbeats that agents have sent on come first.
        """
        ended, beats = self._ended(), self._beats()
        if not ended:
            return [*beats]
        ranks = {event.rank for event in ended if isinstance(event, WorkerEnded)}
        before: list[Event] = []
        after: list[Event] = []
        for item in self._mailbox.take_all():
            if (event := self._event_of(item)) is not None:
                (before if _peer_of(item) in ranks else after).append(event)
        return [*beats, *before, *ended, *after]

    def _ended(self) -> list[WorkerEnded | AgentNews]:
        """Ends of processes that were noticed since the last call, and news of agents."""
        now = time.monotonic()
        self._launcher.keep_up()
        exits = self._launcher.poll() if is_any_ready([self._launcher], timeout_s=0.0) else []
        found = [self._deaths.popleft() for _ in range(len(self._deaths))]
        news = self._agents.take_news() if self._agents is not None else []
        back = [event for event in news if isinstance(event, AgentBack)]
        for event in back:
            if isinstance(self._launcher, Launcher):
                self._launcher.take_back(event.peer)
        # If an agent's connection was lost and the agent is back already, the workers that were lost with that
        # connection come before its AgentBack. All other ends come after it: they may be ends of workers that AgentBack
        # lists as living.
        lost: list[WorkerEnded] = []
        ended: list[WorkerEnded] = []
        for exited in exits:
            is_lost = isinstance(exited, RemoteExited) and exited.reason != ""
            if not is_lost:  # else it may live, and be back with its agent
                self._links.drop(exited.rank)  # a link that has ended would stay in the table as long as the run lasts
            (lost if is_lost else ended).append(WorkerEnded(exited.rank, str(exited), now, exited))
        return [*lost, *back, *found, *ended, *(event for event in news if not isinstance(event, AgentBack))]

    def _beats(self) -> list[BeatsReceived]:
        """Heartbeats that agents have sent on since the last call. What is not a heartbeat is counted as rejected."""
        if self._agents is None or not (found := self._agents.take_beats()):
            return []
        event, refused = heartbeats_in(found)
        for why in refused:
            self._links.reject(why)
        return [event] if event is not None else []

    def _event_of(self, item: Item) -> Event | None:
        """The event for an item of the mailbox; None if there is none, as for an item that only wakes the thread.

        Events of items are returned before the next Tick, so a mark that is reached here counts from that one on.
        """
        match item:
            case Envelope():
                return self._decode(item)
            case Request():
                return item
            case PeerClosed():
                return LinkEnded(item.peer)
            case ReadMark(at):
                self._read_until, self._awaits_mark = at, False
                return None
            case _:
                return None

    def _decode(self, envelope: Envelope) -> Received | None:
        """Decode a message; None if it cannot be decoded, which is counted as rejected."""
        try:
            return Received(decode(envelope.header), envelope.payloads, envelope.sender)
        except msgspec.MsgspecError:
            self._links.reject(UNREADABLE)
            return None

    def _rejections(self) -> list[Rejected]:
        """The counts of all that this process has refused, if they have changed. Checked once in `_LOOK_S`."""
        if (now := time.monotonic()) < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        agents = self._agents
        counts = Counter(self._links.rejected) + Counter(agents.rejected if agents is not None else {})
        if counts == self._rejected:
            return []
        self._rejected = counts
        return [Rejected("the controller", counts)]

    def _died(self, rank: int) -> None:
        """A worker's process has died. Called in a death watch's thread, so it only appends to a deque and wakes the
        controller's thread."""
        self._deaths.append(WorkerEnded(rank, "its process ended", time.monotonic()))
        self._mailbox.interrupt("a process ended")


def heartbeats_in(sent_on: Iterable[tuple[int, bytes]]) -> tuple[BeatsReceived | None, list[str]]:
    """The heartbeats among the messages that agents have sent on, and the reasons why the others are refused.

    Args:
        sent_on: (rank, encoded message) of each.
    """
    beats: list[Heartbeat] = []
    refused: list[str] = []
    for rank, header in sent_on:
        try:
            beat = decode(header)
        except msgspec.MsgspecError:
            refused.append(UNREADABLE)
            continue
        if not isinstance(beat, Heartbeat):
            refused.append(DIRECTION)
        elif why := refused_heartbeat(beat, rank):
            refused.append(why)
        else:
            beats.append(beat)
    return BeatsReceived(tuple(beats)) if beats else None, refused


def _peer_of(item: Item) -> int | None:
    """The peer that an item of the mailbox comes from; None if it comes from no peer."""
    match item:
        case Envelope():
            return item.sender
        case PeerClosed():
            return item.peer
        case _:
            return None


def listen_host(runtime: RuntimeSettings) -> str:
    """The address on which links of the controller's machine listen.

    Raises:
        ConfigError: the address in the settings is not one of this machine, or other machines cannot reach it.
    """
    meeting = None if runtime.rendezvous is None else endpoint("runtime.rendezvous", runtime.rendezvous)[0]
    if runtime.host is not None:
        name, where = runtime.host, checks.override("runtime.host", runtime.host)
    elif meeting is not None:
        name, where = meeting, checks.override("runtime.rendezvous", runtime.rendezvous)
    else:
        return "127.0.0.1"
    address = resolve_address(name, where=where)
    if meeting is not None and is_loopback(address) and not is_loopback(meeting):
        found = f"{name} is" if name == address else f"{name} is {address} on this machine,"
        raise ConfigError(
            f"{found} an address that other machines cannot reach",
            rule="links between machines listen on an address that the others reach",
            where=where,
            fix="runtime.host=ADDRESS, one of those that `hostname -I` shows",
        )
    return address


def credentials_of(runtime: RuntimeSettings) -> Credentials | None:
    """New credentials for the links of a run; None if it needs none, as all links are sockets in a private directory.

    Raises:
        ConfigError: encryption is wanted, and this libzmq has none.
    """
    return make_credentials(encrypted=runtime.encryption) if runtime.transport == "tcp" else None


def newest_checkpoint(run_dir: Path, newest: int | None = None) -> SavedState | None:
    """The newest good checkpoint in a run's directory, of a step up to `newest` if given; None if there is none."""
    try:
        return load_newest_good(run_dir, newest)[0]
    except CheckpointError:
        return None


@dataclass(frozen=True)
class _Completion:
    """A manifest to be written; `trusted` and `best` as for `ControllerIO.write_manifest`."""

    manifest: Manifest
    trusted: int | None
    best: Sequence[int]


@dataclass(frozen=True)
class _Removal:
    """Shards to be removed, as for `ControllerIO.remove_shards`."""

    step: int
    names: Sequence[str]


class _ManifestWriter:
    """The journal of mesh epochs, and a thread that writes manifests and removes useless shards.

    The controller's thread waits for the disk only for the journal, whose line must be on it before a Prepare is sent.
    Old checkpoints are removed by a thread of their own (`_OldRemover`).

    Args:
        record: the fields of the journal's first line by which workers may be adopted (timeouts.adopt); empty if they
            may not.
        adoption: set if the controller goes on with the journal of one that has died; else None.
        patience_s: for how many seconds `close` waits for the threads.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointSettings,
        spec: CheckpointSpec,
        mailbox: Mailbox,
        credentials: Credentials | None,
        record: Mapping[str, object],
        adoption: Adoption | None,
        patience_s: float,
    ) -> None:
        self._patience_s = patience_s
        self._is_left = False  # True once `close` has given up waiting for the thread
        self._run_dir = run_dir
        self._mailbox = mailbox
        self._incarnation = spec.incarnation
        self._due: queue.SimpleQueue[_Completion | _Removal | None] = queue.SimpleQueue()  # None: the thread ends
        self._results: deque[ManifestWritten | OldRemoved] = deque()
        self._thread: threading.Thread | None = None
        self._disk = threading.Lock()  # no manifest is written to a checkpoint while that is removed
        self._old = _OldRemover(run_dir, settings, self._disk, self._tell)
        self._journal = Journal(run_dir)
        if adoption is not None:  # the epoch number in this line does not begin a mesh epoch
            here = record[SCRATCH]  # differs from the previous one if the previous fork server had ended
            moved = {} if here == adoption.scratch else {SCRATCH: here}
            self._journal.append(
                spec.incarnation, adoption.last_epoch, "adopt", generation=adoption.generation, **moved
            )
            return
        # If this controller dies, the next one reads from this line what the run is, to complete the checkpoint that
        # the workers write.
        about = {"run": spec.run, "identity": spec.fingerprint, "layout": spec.layout, "kinds": spec.kinds}
        # With the credentials the next controller can also adopt workers that still live. They are safe here, as only
        # the owner of the journal can read it.
        links = {"credentials": credentials.to_dict()} if credentials is not None else {}
        self._journal.append(spec.incarnation, 0, "resume" if spec.step else "start", **about, **links, **record)

    def journal(self, prepare: Prepare, fields: Mapping[str, object]) -> None:
        self._journal.append(self._incarnation, prepare.epoch, "prepare", after=prepare.after, **fields)

    def write(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        self._ask(_Completion(manifest, trusted, best))

    def remove(self, step: int, names: Sequence[str]) -> None:
        self._ask(_Removal(step, names))

    def _ask(self, due: _Completion | _Removal) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="manifests", daemon=True)
            self._thread.start()
        self._due.put(due)

    def next_result(self) -> ManifestWritten | OldRemoved | None:
        return self._results.popleft() if self._results else None

    def finish(self) -> list[ManifestWritten | OldRemoved]:
        if self._thread is not None:
            self._due.put(None)
            self._thread.join()
            self._thread = None
        return [self._results.popleft() for _ in range(len(self._results))]

    def remove_no_more(self) -> None:
        """Give up the removal of old checkpoints that is under way, and all later ones."""
        self._old.give_up()

    def close(self) -> None:
        """End the threads. If a slow disk keeps them longer than `patience_s`, leave them: they remove nothing then.

        A run that needs the results of manifests calls `finish` before this.
        """
        until = time.monotonic() + self._patience_s
        if self._thread is not None:
            self._due.put(None)
            self._thread.join(min(self._patience_s, threading.TIMEOUT_MAX))
            self._is_left = self._thread.is_alive()
            self._thread = None
        self._old.close(until)
        self._journal.close()

    def _work(self) -> None:
        """The thread: one manifest or removal after another."""
        while (due := self._due.get()) is not None and not self._is_left:
            match due:
                case _Completion():
                    self._complete(due)
                case _Removal(step, names):
                    remove_shards(self._run_dir, step, names)

    def _complete(self, due: _Completion) -> None:
        """Write a manifest, and have old checkpoints removed after that."""
        manifest, error = due.manifest, ""
        try:
            # On the disk before the manifest: a run that is resumed from the checkpoint needs the metrics and the
            # validations up to its step.
            sync_file(self._run_dir / METRICS)
            sync_file(self._run_dir / EVENTS)
            with self._disk:
                write_manifest(checkpoint_path(self._run_dir, manifest.step), manifest)
        except (RunError, UserError, OSError) as caught:
            error = str(caught)
        self._tell(ManifestWritten(manifest, error))
        if not error:
            self._old.ask(due)

    def _tell(self, result: ManifestWritten | OldRemoved) -> None:
        self._results.append(result)
        self._mailbox.interrupt("a manifest is written, or old checkpoints are removed")


class _OldRemover:
    """A thread that removes old checkpoints after a new one is complete.

    No manifest waits for checkpoints to be read, but for one removal at most. Before it removes any it reads those that
    are kept as a whole, which may take longer than it takes until the next one is complete. Of several that are
    complete meanwhile only the last one counts.

    Args:
        disk: held during each removal.
        tell: called with the result.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointSettings,
        disk: threading.Lock,
        tell: Callable[[OldRemoved], None],
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._disk = disk
        self._tell = tell
        self._looks = Looks()
        self._changed = threading.Condition()
        self._due: _Completion | None = None
        self._is_last = False  # True once nothing more becomes due
        self._is_over = False  # True once nothing more may be removed
        self._thread: threading.Thread | None = None

    def ask(self, due: _Completion) -> None:
        """This checkpoint is complete."""
        with self._changed:
            if self._is_last:
                return
            self._due = due
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="old checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify()

    def give_up(self) -> None:
        """Remove nothing more, and read nothing more."""
        self._is_over = True
        self._end()

    def close(self, until: float) -> None:
        """Wait for the thread, until this time by `time.monotonic` at most; then it removes nothing more."""
        self._end()
        if self._thread is not None:
            self._thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
        self._is_over = True

    def _end(self) -> None:
        with self._changed:
            self._is_last = True
            self._changed.notify()

    def _work(self) -> None:
        """The thread: it removes what the newest checkpoint that is complete has made superfluous, again and again."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_last or self._due is not None)
                due, self._due = self._due, None
            if due is None or self._is_over:
                return
            why_not = self._remove_before(due)
            if not self._is_over:
                self._tell(OldRemoved(due.manifest.step, why_not))

    def _remove_before(self, due: _Completion) -> str:
        """Remove old checkpoints. Returns why one of them could not be removed; empty if all were."""
        keep, keep_best = self._settings.keep, self._settings.keep_best
        try:
            prune(
                self._run_dir,
                keep,
                due.trusted,
                due.best,
                keep_best,
                looks=self._looks,
                is_over=lambda: self._is_over,
                disk=self._disk,
            )
        except (RunError, UserError, OSError) as caught:
            return str(caught)
        return ""
