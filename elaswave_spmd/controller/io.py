"""Everything that a controller does to the outside, behind one protocol, and the real one over processes and links.

The simulated cluster (tests/cluster) passes its own `ControllerIO` to the same Controller.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
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
from elaswave_spmd.controller.planning import PlanRequest, PlanThread
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.errors import CheckpointError, ConfigError, RunError, UserError
from elaswave_spmd.mesh.topology import Path as DomainPath
from elaswave_spmd.ready import is_any_ready
from elaswave_spmd.recovery.admission import DIRECTION, UNREADABLE, refused_heartbeat
from elaswave_spmd.recovery.messages import Adopt, Heartbeat, Prepare, decode, encode
from elaswave_spmd.run_dir.atomic_write import sync_file
from elaswave_spmd.run_dir.checkpoint_shard import ShardInfo, checkpoint_path
from elaswave_spmd.run_dir.checkpoints import load_newest_good, prune, unfinished_shards, write_manifest
from elaswave_spmd.run_dir.directory import EVENTS, METRICS
from elaswave_spmd.run_dir.journal import Journal
from elaswave_spmd.run_dir.manifest import Manifest
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
from elaswave_spmd.runtime.transport.mailbox import Envelope, Item, Mailbox, PeerClosed, Request
from elaswave_spmd.worker.message_limits import message_limits, payload_limits
from elaswave_spmd.worker.spec import LinkSpec, OptionSpec, RunSpec, WorkerSpec

if TYPE_CHECKING:
    from elaswave_spmd.worker.plan_run import RunPlan

_LOOK_S = 1.0  # between two looks at what was refused
_POLL_S = 0.1  # how long the end of a worker that has no death watch can go unnoticed
_FORK_SERVER_S = 10.0  # that the fork server is waited for while others train, or may know why the run ends


@dataclass(frozen=True)
class Spawned:
    """A worker that was started.

    Args:
        pid: its process id; None: it runs on another machine.
        domain: its failure domain; None: that of all the others.
        why_not: it could not be started; empty: it was.
    """

    pid: int | None = None
    domain: DomainPath | None = None
    why_not: str = ""


class ControllerIO(Protocol):
    """The controller's only way to the outside: what it does, and the events that it gets. For one thread."""

    def now(self) -> float:
        """Seconds of a clock that never runs back."""
        ...

    def next_event(self, until: float) -> Event:
        """The next thing that has happened. Tick once the clock has reached `until`, whatever else waits.

        But never twice in a row while something else waits: a clock that is always late would let nothing else through.
        """
        ...

    def next_ends(self) -> list[WorkerEnded]:
        """The ends of workers that have been found and are the very next events; they are none any more."""
        ...

    def stop_requested(self, number: int) -> None:
        """A signal asks the run to end: StopRequested is among the next events. Called by the signal's handler."""
        ...

    def send(self, rank: int, message: bytes) -> None:
        """Send an encoded message. Never waits; what is sent to a worker without a link is dropped."""
        ...

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        """A worker is ready: open the link to it, and watch for its death where it holds its mutex for that.

        Returns:
            Why its death is noticed only later, when the process is reaped; empty: it holds no mutex, or is watched.
        """
        ...

    def adopt(self, rank: int, generation: int) -> None:
        """Open the link to a worker of the controller before, and tell it the generation and address of this one.

        A worker of which nobody knows where it listens, as it was no member of the mesh yet, is ended.
        """
        ...

    def disconnect(self, rank: int) -> None:
        """Close the link to a worker at once."""
        ...

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        """Start a worker; `host`: of a newcomer, the machine that was asked for."""
        ...

    def machines(self) -> tuple[Machine, ...]:
        """The machines of the run as they are now; none if it cannot have others than this one."""
        ...

    def order_agent(self, order: AgentOrder) -> None:
        """Carry out a decision about an agent; one that has gone meanwhile is ignored. Never waits."""
        ...

    def kill(self, rank: int) -> None:
        """End a worker's process for certain, even one that is stopped."""
        ...

    def reject(self, reason: str) -> None:
        """Count a message that was refused."""
        ...

    def last_rejections(self) -> list[Rejected]:
        """All that was refused since the last event of this kind, here and by agents, now that the run ends.

        Waits for the answers of agents for up to 2 seconds.
        """
        ...

    def report_exits(self) -> None:
        """Put WorkerEnded of every process that has ended by now, and then ExitsReported, among the next events."""
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

    def journal(self, prepare: Prepare) -> None:
        """Write the epoch of a Prepare to the disk, before any worker gets it."""
        ...

    def plan(self, request: PlanRequest) -> None:
        """Plan a change of the mesh in the background; Planned follows."""
        ...

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        """Write a checkpoint's manifest in the background; ManifestWritten follows. Old checkpoints are removed.

        Args:
            trusted: the newest checkpoint of this step or before stays, however old it is; None: there is none such.
            best: validated steps from the lowest loss to the highest, whose first ones stay (checkpoint.keep_best).
        """
        ...

    def find_checkpoint(self, newest: int | None) -> None:
        """Finish what is being written; then CheckpointFound is among the next events, of a step up to `newest`."""
        ...

    def find_shards(self) -> list[ShardInfo]:
        """Shards on the disk that this life of the run has written, of checkpoints without a manifest."""
        ...

    def settle(self) -> None:
        """All that died with the controller before is made good."""
        ...

    def finish_writing(self) -> list[ManifestWritten | OldRemoved]:
        """Wait until all manifests are written. Returns what has not been an event yet."""
        ...

    def close(self) -> None:
        """Close everything but the workers' processes; they are the launcher's to end.

        What is still being written or removed is waited for, for `timeouts.shutdown` at most.
        """
        ...


class ProcessIO:
    """The controller's side of real worker processes. All but the threads inside is for the controller's thread.

    Args:
        scratch: directory of the sockets.
        run_dir: the run's directory, for the journal, manifests and the administrators' socket.
        frequency_guard: socket of the process that sets the devices' frequencies, or None.
        adoption: this controller adopts the workers of one that has died; None: it does not.

    Raises:
        ConfigError: the links, or the store where groups meet, cannot be opened with these settings.
        DataError: the journal is damaged.
        FilesError: it cannot be written.
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
        self._mailbox = Mailbox()
        self._ready: deque[Event] = deque()  # events that were found and not returned yet
        self._stops: deque[StopRequested] = deque()  # filled by a signal handler
        self._rejected: Counter[str] = Counter()
        self._look_at = 0.0
        self._has_ticked = False  # the event before was a Tick: what has come meanwhile is looked at before another one
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
            record = {} if settings.timeouts.adopt is None else adoption_record(settings, scratch)
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
        # Above all that were given to workers: where agents may keep some, the journal is the only one to know.
        self._next_rank = 0 if adoption is None else adoption.next_rank
        self._journals_ranks = settings.timeouts.adopt is not None and settings.runtime.has_agents
        self._planning = PlanThread(self._mailbox.interrupt)
        self._admin: ControlSocket | None = None
        self._spec = RunSpec(
            settings,
            plan.data,
            LinkSpec(self._links.address, scratch, credentials, host, payloads),
            checkpoints.orders,
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
                return Tick()  # before the mailbox: a flood of messages must not keep the detector from its deadlines
            self._has_ticked = False
            item = self._mailbox.get(max(0.0, min(left, _POLL_S)))
            self._ready += [*self._asked(), *self._ended_after_words(), *self._rejections()]
            if item is not None and (event := self._event_of(item)) is not None:
                return event
            if (written := self._writer.next_result()) is not None:
                return written
            if (planned := self._planning.next_answer()) is not None:
                return planned

    def next_ends(self) -> list[WorkerEnded]:
        found: list[WorkerEnded] = []
        while self._ready and isinstance(event := self._ready[0], WorkerEnded):
            found.append(event)
            self._ready.popleft()
        return found

    def stop_requested(self, number: int) -> None:
        # In the handler of a signal: a deque and a wake-up, nothing else.
        self._stops.append(StopRequested(signal_name(number)))
        self._mailbox.interrupt("a signal")

    def send(self, rank: int, message: bytes) -> None:
        self._links.send(rank, message)

    def connect(self, rank: int, address: str, *, holds_mutex: bool) -> str:
        try:
            self._links.connect(rank, address)
        except RunError as error:  # no address, as of a worker that has gone wrong; or no descriptor is left here
            self._ready.append(WorkerEnded(rank, str(error), time.monotonic()))
            self.kill(rank)  # it lives, and its heartbeats would go on
        # A worker that died between its Ready and this call is not watched: its mutex is free already.
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
        self.connect(rank, address, holds_mutex=False)  # its end is noticed when it is reaped
        self._links.send(rank, encode(Adopt(generation, self._links.address)))

    def disconnect(self, rank: int) -> None:
        self._links.drop(rank)

    def spawn(self, rank: int, host: str | None = None) -> Spawned:
        self._next_rank = max(self._next_rank, rank + 1)
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
        # Nothing is waited for: the fork server may stand still, and what this worker does counts no more.
        self._launcher.order_signal(rank, signal.SIGKILL)

    def reject(self, reason: str) -> None:
        self._links.reject(reason)

    def last_rejections(self) -> list[Rejected]:
        if (agents := self._agents) is not None:
            agents.request_exits()  # with which they tell their refusals
        self._look_at = 0.0
        return self._rejections()

    def report_exits(self) -> None:
        # Signal 0 reaches nobody, but the launcher's answer comes after the notices of all that have ended.
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

    def journal(self, prepare: Prepare) -> None:
        self._writer.journal(prepare, {NEXT_RANK: self._next_rank} if self._journals_ranks else {})

    def plan(self, request: PlanRequest) -> None:
        self._planning.ask(request)

    def write_manifest(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        self._writer.write(manifest, trusted, best)

    def find_checkpoint(self, newest: int | None) -> None:
        self._ready += self.finish_writing()
        self._ready.append(CheckpointFound(newest_checkpoint(self._run_dir, newest)))

    def find_shards(self) -> list[ShardInfo]:
        return unfinished_shards(self._run_dir, self._spec.checkpoints.incarnation)

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
        """The mutex that a new worker on this machine holds while it lives; None: its end is noticed later."""
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
        """Ends and news as `_ended` has them, each end after all that has come from that worker.

        A worker that fails says why before its process ends. A controller that does not get to read for a moment finds
        both, and the end alone would not tell the user of the exception, nor of the steps that were done before. What
        others have said comes after the ends, which may be the cause of it. Heartbeats that agents have sent on come
        first.
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
            self._next_rank = max(self._next_rank, 1 + max(event.made, default=-1))
        # An agent may be back whose connection was lost just before: first whoever was lost with that. Whoever else has
        # ended comes after those that are back, as they may have ended since their agent said that they live.
        lost: list[WorkerEnded] = []
        ended: list[WorkerEnded] = []
        for exited in exits:
            is_lost = isinstance(exited, RemoteExited) and exited.reason != ""
            (lost if is_lost else ended).append(WorkerEnded(exited.rank, str(exited), now, exited))
        return [*lost, *back, *found, *ended, *(event for event in news if not isinstance(event, AgentBack))]

    def _beats(self) -> list[BeatsReceived]:
        """Heartbeats that agents have sent on since the last call; what is none is counted."""
        if self._agents is None or not (found := self._agents.take_beats()):
            return []
        event, refused = heartbeats_in(found)
        for why in refused:
            self._links.reject(why)
        return [event] if event is not None else []

    def _event_of(self, item: Item) -> Event | None:
        """The event that an item of the mailbox is; None if it is none, and has only woken the thread."""
        match item:
            case Envelope():
                return self._decode(item)
            case Request():
                return item
            case PeerClosed():
                return LinkEnded(item.peer)
            case _:
                return None

    def _decode(self, envelope: Envelope) -> Received | None:
        """The message; None if it is none, which is counted."""
        try:
            return Received(decode(envelope.header), envelope.payloads, envelope.sender)
        except msgspec.MsgspecError:
            self._links.reject(UNREADABLE)
            return None

    def _rejections(self) -> list[Rejected]:
        """The counts of all that this process has refused, if they have grown. Looked at once a second."""
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
        """Called in the death watch's thread, at the instant of the death: a deque and a wake-up, nothing else."""
        self._deaths.append(WorkerEnded(rank, "its process ended", time.monotonic()))
        self._mailbox.interrupt("a process ended")


def heartbeats_in(sent_on: Iterable[tuple[int, bytes]]) -> tuple[BeatsReceived | None, list[str]]:
    """The heartbeats in what agents have sent on, (rank, encoded message); and why the others are refused."""
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
        ConfigError: it is not one of this machine's, or one that other machines do not reach.
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
    """New credentials for the links of a run; None where all of them are sockets in a private directory.

    Raises:
        ConfigError: encryption is wanted, and this libzmq has none.
    """
    return make_credentials(encrypted=runtime.encryption) if runtime.transport == "tcp" else None


def newest_checkpoint(run_dir: Path, newest: int | None = None) -> SavedState | None:
    """The newest good checkpoint in a run's directory, of a step up to `newest`."""
    try:
        return load_newest_good(run_dir, newest)[0]
    except CheckpointError:
        return None


class _ManifestWriter:
    """The journal of mesh epochs, and a thread that writes manifests and removes old checkpoints.

    Nothing in the controller waits for a disk but the journal, whose line comes before a Prepare.

    Args:
        record: what the journal says of workers that may be adopted (timeouts.adopt); {}: they may not.
        adoption: the controller goes on with the journal of one that has died.
        patience_s: how long `close` waits for the thread.
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
        self._is_left = False  # nobody waits for the thread any more
        self._run_dir = run_dir
        self._settings = settings
        self._mailbox = mailbox
        self._incarnation = spec.incarnation
        self._manifests: queue.SimpleQueue[tuple[Manifest, int | None, Sequence[int]] | None] = queue.SimpleQueue()
        self._results: deque[ManifestWritten | OldRemoved] = deque()
        self._thread: threading.Thread | None = None
        self._journal = Journal(run_dir)
        if adoption is not None:  # the number of this line is that of no mesh epoch
            here = record[SCRATCH]  # another one, if the fork server before had ended
            moved = {} if here == adoption.scratch else {SCRATCH: here}
            self._journal.append(
                spec.incarnation, adoption.last_epoch, "adopt", generation=adoption.generation, **moved
            )
            return
        # If this controller dies, the next one reads here what the run was, to complete what the workers wrote.
        about = {"run": spec.run, "identity": spec.fingerprint, "layout": spec.layout, "kinds": spec.kinds}
        # With them it may also adopt workers that still live. The journal is its owner's alone.
        links = {"credentials": credentials.to_dict()} if credentials is not None else {}
        self._journal.append(spec.incarnation, 0, "resume" if spec.step else "start", **about, **links, **record)

    def journal(self, prepare: Prepare, fields: Mapping[str, object]) -> None:
        self._journal.append(self._incarnation, prepare.epoch, "prepare", after=prepare.after, **fields)

    def write(self, manifest: Manifest, trusted: int | None, best: Sequence[int]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="manifests", daemon=True)
            self._thread.start()
        self._manifests.put((manifest, trusted, best))

    def next_result(self) -> ManifestWritten | OldRemoved | None:
        return self._results.popleft() if self._results else None

    def finish(self) -> list[ManifestWritten | OldRemoved]:
        if self._thread is not None:
            self._manifests.put(None)
            self._thread.join()
            self._thread = None
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """End the thread, or leave it to the end of the process where a disk keeps it: it removes nothing more then.

        Whatever the run has to know of its checkpoints was waited for before, by `finish`.
        """
        if self._thread is not None:
            self._manifests.put(None)
            self._thread.join(self._patience_s)
            self._is_left = self._thread.is_alive()
            self._thread = None
        self._journal.close()

    def _write_all(self) -> None:
        """The thread: one manifest after another, and the removal of old checkpoints after each."""
        while (due := self._manifests.get()) is not None and not self._is_left:
            manifest, trusted, best = due
            error = why_not = ""
            try:
                # The lines and validations up to this step are part of what a resumed run begins with.
                sync_file(self._run_dir / METRICS)
                sync_file(self._run_dir / EVENTS)
                write_manifest(checkpoint_path(self._run_dir, manifest.step), manifest)
            except (RunError, UserError, OSError) as caught:
                error = str(caught)
            self._tell(ManifestWritten(manifest, error))
            if error:
                continue
            # The new checkpoint is complete, whatever becomes of old ones. Those that stay are read as a whole first.
            try:
                keep, keep_best = self._settings.keep, self._settings.keep_best
                prune(self._run_dir, keep, trusted, best, keep_best, is_over=lambda: self._is_left)
            except (RunError, UserError, OSError) as caught:
                why_not = str(caught)
            self._tell(OldRemoved(manifest.step, why_not))

    def _tell(self, result: ManifestWritten | OldRemoved) -> None:
        self._results.append(result)
        self._mailbox.interrupt("a manifest is written, or old checkpoints are removed")
