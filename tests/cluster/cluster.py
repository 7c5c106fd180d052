"""N executors and the product's controller in one process over links made of lists, in an order drawn from a seed.

Everything that trains and everything that decides is the product's own: the Controller of real runs
(elaswave_spmd/controller/loop.py) with its failure detector, under simulated time. Only processes, sockets, clocks and
files are made up (simulated_io.py). A worker can be killed at any point of a step, or be stopped and come back when it
is in no mesh any more; what it had sent arrives in part.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from elaswave_spmd.conf.schema import LINKS
from elaswave_spmd.controller.events import AgentBack, BeatsReceived, Event, MoveRequested, Received, WorkerEnded
from elaswave_spmd.controller.loop import Controller
from elaswave_spmd.controller.outcomes import RestartFrom, RunFinished, RunStopped
from elaswave_spmd.controller.resume import Adoption
from elaswave_spmd.mesh import Mesh
from elaswave_spmd.models import LayeredModel, Objective
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import Save, Unrecoverable
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.recovery.generations import FIRST, ControllerFence, stamped
from elaswave_spmd.recovery.packed_reconfigure import Unpacker
from elaswave_spmd.recovery.partial_step import WEIGHTS_ONLY
from elaswave_spmd.recovery.peers import Reached
from elaswave_spmd.recovery.vote_exchange import WIDEST
from elaswave_spmd.run_dir import MetricsLine
from elaswave_spmd.run_dir.checkpoint_shard import shard_name
from elaswave_spmd.run_dir.checkpoint_writers import assign_writers
from elaswave_spmd.run_dir.journal import Ballot
from elaswave_spmd.runtime.devices import Device, device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.processes.agents import RemoteExited
from elaswave_spmd.runtime.processes.fork_server_client import Exited
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.cost_model import MemoryRule
from elaswave_spmd.scheduling.placement import Placement, place
from elaswave_spmd.scheduling.split_backward import SplitBackward
from elaswave_spmd.sharding.replica_placement import place_replicas
from elaswave_spmd.sharding.replicas import ReplicaSet, all_replica_sets
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.checkpoint_orders import CheckpointOrders
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerContext, WorkerHooks
from elaswave_spmd.worker.device_fault import DeviceRecovery
from elaswave_spmd.worker.direct_channel import Pairs
from elaswave_spmd.worker.fault_injection import with_a_flipped_bit
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.initial_values import MadeValues
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.model_layout import ModelDescription
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms, program_args
from elaswave_spmd.worker.spec import Job
from elaswave_spmd.worker.stage_collectives import StageGroup
from elaswave_spmd.worker.state import LEARNING, MASTER, HeldRange
from elaswave_spmd.worker.state_replica import StateReplica
from tests.cluster.failing_device import DEVICE_FAULT, FailingDevice
from tests.cluster.faults import LOSSES, RECEIVER, SENDER, AnyFault, Link, MessageFault, Plan
from tests.cluster.kept_checkpoints import RUN_DIR, KeptCheckpoint, KeptCheckpoints
from tests.cluster.link_breaks import RECONFIGURED, LinkBreak, LinkBreaks, LostLink
from tests.cluster.paces import TurnClock, drawn_pace
from tests.cluster.processes import Killed, LostStateError, Trained, Worker, domain_of, victims
from tests.cluster.put_off import OF_MICROBATCHES, DrawnLimits, TriedLimits, check_at_point, check_report
from tests.cluster.simulated_io import (
    HEARTBEAT_TURNS,
    LONGEST_TURNS,
    MOST_TURNS,
    STOP,
    TURN_S,
    MoveDue,
    SimulatedIO,
    SimulatedLog,
    checkpoint_spec,
    run_plan,
)
from tests.cluster.starting import Phases, StartFault, Starting
from tests.cluster.stories import draw_goal
from tests.cluster.wires import PUT_OFF, Lateness, SimulatedChannel, Wires

# Messages that may begin a change of the mesh.
_CHANGES = (m.Leaving, m.SpawnRequest, m.Ready, m.Failed, m.Damaged, m.LinkClosed)


class ControllerKilled(BaseException):
    """The end of the controller's process, wherever it is."""


WAYS = ("now", "now", "later", "later", "gone", "cut off", "lost and back", "lost")
"""In which agents come back to a controller, or do not."""

_PATIENCE = 1000  # turns that the last of the faults are waited for when nothing else moves


def bytes_of(payload: Tensor) -> memoryview:
    return memoryview(payload.reshape(-1).view(torch.uint8).numpy().tobytes())


def _overlap(one: ReplicaSet, other: ReplicaSet) -> bool:
    return one.layer == other.layer and one.first < other.stop and other.first < one.stop


def _is_frozen(replica: StateReplica, part: HeldRange) -> bool:
    """A worker has pages that are not trained: they are current at every version (S8)."""
    return replica.is_frozen(part.pages) and part.version != LEARNING


def is_heartbeat(event: Event | MoveDue) -> bool:
    return isinstance(event, BeatsReceived) or (isinstance(event, Received) and isinstance(event.message, m.Heartbeat))


class SimulatedCluster:
    """Runs a placement to the end in this process.

    Args:
        make_model: a new model, with real parameters or on the meta device; workers get copies of its layers.
        seed: of the order of workers and messages; not of the training.
        faults: what happens on the way.
        policy: how the controller answers.
        uneven: some workers and some links are much slower than others.
        trace: gets a line for everything that a reader of a failed run wants to know.
        device: that all workers share; None: the CPU.
        checkpoint_every: steps between checkpoints, which are kept in memory; 0: none.
        starting: workers take time to start; None: they are ready at once, and nothing happens to them before.
        action: what becomes of a worker that is wrong (verify.action).
        late: when the controller's messages arrive; None: as any other.
        widest: members up to which all vote to all.
        deaths: the controller is killed at its n-th act (something that it sends, decides or writes down) since it
            began, or has adopted the workers of the one before, and another one comes; for each of these numbers.
        breaks: links between living workers that are lost.
        relays: all machines but the first have agents, which send on the heartbeats of their workers.
        loses: (message by name, number): of the messages of this kind that workers send the n-th is lost, and nobody
            notices.
        joined: pages for each worker of a stage below which a new mesh cuts layers together; 0: none are.
    """

    collectives = LINKS
    """What the settings say of process groups."""

    def __init__(
        self,
        job: Job,
        placement: Placement,
        description: ModelDescription,
        make_model: Callable[[], LayeredModel],
        train: Batches,
        validation: Batches | None = None,
        *,
        seed: int = 0,
        faults: Sequence[AnyFault] = (),
        policy: Policy | None = None,
        uneven: bool = False,
        trace: Callable[[str], None] | None = None,
        device: Device | None = None,
        checkpoint_every: int = 0,
        starting: Starting | None = None,
        action: str = "evict",
        late: Lateness | None = None,
        widest: int = WIDEST,
        deaths: Sequence[int] = (),
        breaks: Sequence[LinkBreak] = (),
        relays: bool = False,
        loses: tuple[str, int] | None = None,
        joined: int = 0,
    ) -> None:
        self.link_breaks = LinkBreaks(breaks, seed)
        self._relays, self._seed = relays, seed
        self._loses, self._num_sent = loses, 0
        self._joined = joined
        self._gathered: dict[tuple[str, ...], dict[int, m.Heartbeat]] = {}  # by machine: what its agent has not sent on
        self._deaths, self._adopts = list(deaths), bool(deaths)
        self._acts: int | None = None  # of the controller, since its first mesh; None: before it
        self._generation = FIRST
        self._is_away = False  # there is no controller
        self._takes_over = False  # it has not begun a mesh epoch of its own yet
        self.agents_come: Sequence[str] = WAYS  # back to a controller; one is drawn for each of them
        self.agents_back = Counter[str]()  # so many have
        self._ended: list[int] = []  # workers whose end no controller has made good
        self._were_members: set[int] = set()
        self.is_settled = True  # the controller has made good what had died with the one before
        self.journal: list[tuple[m.Prepare, int]] = []  # with the next free rank
        self.lines: dict[int, MetricsLine] = {}  # that the run has written, by step
        self._widest = widest
        self._reached: defaultdict[int, Reached] = defaultdict(Reached)  # worker -> the members that it has links to
        self._strangers: dict[int, frozenset[int]] = {}  # worker -> members that it has no link to
        self._linked: dict[int, frozenset[int]] = {}  # worker -> members that it has made links to
        self._missing: set[Link] = set()  # links that there are not, and whose senders have wanted them
        self._job = job if validation is not None or not job.validates else dataclasses.replace(job, validate_every=0)
        self._job = dataclasses.replace(self._job, checkpoint_every=checkpoint_every)
        self._action = action
        self._has_gone_back = False
        self.events: list[tuple[str, dict[str, object]]] = []  # that the run has written: kind, fields
        self.held_up = 0  # standstills while a message of the controller was on its way that a member may wait for
        self._description = description
        self._model = make_model()
        self._train = train
        self._validation = validation
        self._random = random.Random(seed)
        self.plan = Plan(faults)
        self._uneven, self._late = uneven, late
        self.tried = TriedLimits(late.tried) if late is not None and late.tried else None
        self.clocks: list[TurnClock] = []  # of workers' devices, where paces are sent
        self._trace = trace
        self._device = device or HostDevice(device_of("cpu"))
        self._policy = policy or Policy()
        self._starting = starting or Starting()
        self._phases = Phases(starting, seed) if starting is not None else None
        self._newest = -1  # the highest rank of a worker that was started in this life of the run
        self._workers: dict[int, Worker] = {}
        self._lost: list[int] = []  # killed, or evicted by the controller
        self._let_go: set[int] = set()  # they have been told to end, and have ended
        self._absent: list[int] = []  # gone, or stopped
        self._window: list[int] = []  # lost, or with wrong state, since every page had all its mirrors
        self._damaged: set[int] = set()  # workers that have given up state
        self._caught_up: set[tuple[int, int]] = set()  # (learner, mesh epoch), as the controller has heard
        self._paused = 0  # the controller does nothing before this turn
        self._applied: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._notices: list[tuple[int, Event | MoveDue]] = []  # (turn, what the controller then hears)
        self._validation_losses: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._validation_weights: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._validated_in: defaultdict[int, int] = defaultdict(int)  # step -> the mesh epoch of these losses
        self._end: LostStateError | None = None  # why the run cannot go on
        self._idle_since = 0
        self.turn = 0
        self.rejected: Counter[str] = Counter()  # reason -> messages that the controller and workers have refused
        self._started = False
        self.result = Trained()
        self.heard: list[m.AnyMessage] = []  # by the controller, without heartbeats and weights
        self.broken_links: dict[Link, int] = {}  # -> mesh epoch of the sender when it broke
        self._down: set[Link] = set()  # those that are not made again yet
        self.lost_with_links: Counter[str] = Counter()  # messages, by kind
        self._closed_links: dict[Link, int] = {}  # -> the turn from which the sender can find that it is closed
        self._found_behind: set[Link] = set()  # those of which it finds that after what arrives at the same time
        self._devices_fail = any(fault.kind == "device" for fault in faults)
        self.checkpoints = KeptCheckpoints(description.layout)
        self._orders = CheckpointOrders(str(RUN_DIR), "simulated", 1, checkpoint_every, job.steps)
        self._start_controller(placement, None)

    def _start_controller(self, placement: Placement, checkpoint: KeptCheckpoint | None) -> None:
        """A controller, for a run that begins or goes on from a checkpoint. It starts the workers of the placement."""
        for table in (self._workers, self._lost, self._absent, self._let_go, self._window, self._notices):
            table.clear()
        self._damaged.clear()
        self._caught_up.clear()
        self._ended.clear()
        self._were_members.clear()
        self.is_settled = True
        for known in (
            self._were_members,
            self._applied,
            self._leaving,
            self._validation_losses,
            self._validation_weights,
            self._validated_in,
            self.broken_links,
            self._closed_links,
            self._found_behind,
        ):
            known.clear()
        if self._phases is not None:
            self._phases.clear()
        self._healthy = placement
        self._checkpoint = checkpoint
        self._mirrored = placement.mesh.num_workers  # members when every page had all its mirrors last
        self._end = None
        self._unpackers: defaultdict[int, Unpacker] = defaultdict(Unpacker)  # the controller's messages to each worker
        self._reached.clear()
        self._strangers.clear()
        self._linked.clear()
        self._missing.clear()
        self._down.clear()
        self._wires = Wires(self._job.torch_dtype, self._device, self._random, uneven=self._uneven, late=self._late)
        self._acts, self._generation, self._takes_over, self._newest = None, FIRST, False, -1
        self._last_epoch = 0
        self.journal.clear()
        self._make_controller(None)

    def _make_controller(self, adoption: Adoption | None) -> None:
        """A controller, which starts the workers of the placement, or adopts those that live."""
        checkpoint, arguments = self._checkpoint, (self._policy, self._starting.elastic, self._action)
        how = {"adopts": self._adopts, "collectives": self.collectives}
        plan = run_plan(self._job, self._healthy, self._description, *arguments, **how)
        self._io = SimulatedIO(self)
        spec = checkpoint_spec(plan, self._orders, checkpoint)
        if adoption is not None:
            step = len(self.result.losses)
            spec = dataclasses.replace(spec, step=step, newest=adoption.newest_checkpoint, came_back=True)
        self.controller = Controller(
            plan,
            self._io,
            SimulatedLog(plan, self, checkpoint, adoption),
            spec,
            has_gone_back=self._has_gone_back,
            adoption=adoption,
        )
        if self.controller.protocol.widest is not None:  # else everybody has a link to everybody, as by the settings
            self.controller.protocol.widest = self._widest
        # Workers of the cluster try no model; the layers of these models have the same bits in two parts.
        every = tuple(range(len(self._description.layout.layers)))
        split = every, (1,) * len(every), plan.costs, MemoryRule()
        drawn = self._late is not None and self._late.limits
        self.controller.protocol.layers_tried(DrawnLimits(*split, seed=drawn) if drawn else SplitBackward(*split))

    @property
    def protocol(self) -> ControllerProtocol:
        """The controller's half of the protocol."""
        return self.controller.protocol

    @property
    def first_mesh(self) -> Mesh:
        return self._healthy.mesh

    @property
    def is_paused(self) -> bool:
        """True while the controller's process stands still."""
        return self.turn < self._paused

    def note(self, *what: object) -> None:
        """A line for the reader of a failed run."""
        if self._trace:
            self._trace(" ".join(map(str, (f"{self.turn:5}", *what))))

    # ---- messages

    def deliver_some(self, rank: int) -> None:
        """Moves some of what is in flight to a worker into its inbox."""
        worker = self._workers[rank]
        if worker.has_put_off:
            self._wires.passed(rank, PUT_OFF)
        self._find_closed_links(worker)
        worker.port.inbox.extend(self._wires.arrivals(rank))
        self._find_closed_links(worker, behind=True)

    def _find_closed_links(self, worker: Worker, *, behind: bool = False) -> None:
        """The worker finds links closed, in the middle of an action, too: reported and handled, as by its channel.

        Args:
            behind: those that it finds closed after what has arrived; else the others.
        """
        for link in self._closed_links_of(worker.rank):
            if (link in self._found_behind) != behind:
                continue
            del self._closed_links[link]
            self._found_behind.discard(link)
            closed = m.LinkClosed(*link, was_linked=link not in self._missing)
            self._missing.discard(link)
            worker.port.send(CONTROLLER, closed)
            worker.port.inbox.append(Incoming(worker.rank, closed))

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        """Sends a worker's message, with the faults that happen before and after that."""
        link = sender, peer
        if self.is_stranger(sender, peer):
            self.meets_stranger(link, message)
        if peer == CONTROLLER and (self._is_away or self._wires.fences[sender].generation < self._generation):
            return  # it has no link to this controller yet
        if isinstance(message, m.StepReport):
            check_report(self._workers[sender], message)
        if isinstance(message, m.PageState):
            self._check_state(sender, message)
        self.at_message(sender, message, SENDER, link)
        if self._is_broken(link):
            self.lost_with_links[type(message).__name__] += 1
            return
        if self._loses is not None and type(message).__name__ == self._loses[0]:
            self._num_sent += 1
            if self._num_sent == self._loses[1]:
                self.note("MESSAGE LOST", link, message)
                return
        if self._devices_fail and payload is not None:  # a copy in the host's memory, which does not fail
            payload = payload.clone()
        self._wires.put(sender, peer, message, payload)
        if peer == CONTROLLER and not isinstance(message, m.FinalPages):
            self.note(sender, "->", message)
        if then := self.after_message(sender, message, SENDER):
            self.inject(sender, then, out=link)

    def refused(self, rank: int, reason: str) -> None:
        """A worker has refused a message."""
        self.note(rank, "refuses a message:", reason)
        self.rejected[reason] += 1

    def _check_state(self, sender: int, message: m.PageState) -> None:
        """Asserts that state which is sent is of the version that the message says."""
        executor, pages = self._workers[sender].executor, (message.layer, message.first, message.stop)
        assert executor is not None
        for part in executor.replica.state:
            if part.pages.key == pages and not executor.replica.is_frozen(part.pages):
                assert part.version == message.step, (sender, message, part.version, "is sent as another version")

    def at_message(self, rank: int, message: m.Message, side: str, link: Link | None = None) -> None:
        """Injects the fault that is due before a worker sends or receives a message; `link`: where it is sent."""
        if not self._started or rank in self._lost:
            return
        at, name = self.plan.at_message, type(message).__name__
        if link is not None and side == SENDER:
            self._lose_links(self.link_breaks.sent(name, rank, link, self._links))
        elif side == RECEIVER:
            self._lose_links(self.link_breaks.taken(name, rank, self._links))
        if fault := at(name, side, after=False):
            if fault.kind == "unlink":
                assert link is not None and side == SENDER, fault
                self.plan.injected(self.turn)
                self.break_link(link)
            else:
                self.inject(rank, fault)

    def _links(self) -> dict[Link, int]:
        """The links between living workers that are not lost -> how many messages are on them."""
        living = {rank for rank in self._workers if rank not in self._lost}
        made = {(rank, peer) for rank in living for peer in self._linked.get(rank, frozenset()) & living}
        return {link: len(self._wires.in_flight.get(link, ())) for link in made - self._down}

    def _lose_links(self, lost: Iterable[LostLink]) -> None:
        for it in lost:
            self.break_link(it.link, kept=it.kept, noticed_after=it.noticed_after)
            if it.is_behind:
                self._found_behind.add(it.link)

    def break_link(
        self, link: Link, *, was_linked: bool = True, kept: float = 0.0, noticed_after: int | None = None
    ) -> None:
        """The link is lost while both ends live, with what is on it and what is sent on it until it is made again.

        The sender finds that it is closed at some later time, or that there was none. It makes it again when the next
        Reconfigure comes after that, which is some time before it has its place in that mesh epoch.

        Args:
            kept: this share of what is on the link, from the oldest message on, arrives all the same.
            noticed_after: turns until the sender can find it closed; None: drawn.
        """
        self.note("LINK LOST" if was_linked else "NO LINK", link)
        if not was_linked:
            self._missing.add(link)
        self.broken_links[link] = self._epoch_of(link[0])
        self._down.add(link)
        for message in self._wires.drop(link, kept):
            self.lost_with_links[type(m.decode(message.header)).__name__] += 1
        self._closed_links[link] = self.turn + (self._random.randint(0, 40) if noticed_after is None else noticed_after)

    def _is_broken(self, link: Link) -> bool:
        return link in self._down

    def _epoch_of(self, rank: int) -> int:
        executor = self._workers[rank].executor
        return executor.placement.mesh.epoch if executor is not None else 0

    def _closed_links_of(self, rank: int) -> list[Link]:
        """Lost links of a worker that it finds closed now."""
        return [link for link, turn in self._closed_links.items() if link[0] == rank and turn <= self.turn]

    def after_message(self, rank: int, message: m.Message, side: str) -> MessageFault | None:
        """Returns the fault that is due after a worker has sent or received a message."""
        if not self._started or rank in self._lost:
            return None
        return self.plan.at_message(type(message).__name__, side, after=True)

    def from_controller(self, rank: int, header: bytes) -> None:
        """Sends an encoded message of the controller. Workers that have ended get none."""
        if rank not in self._workers:
            return
        if header in (STOP, stamped(STOP, self._generation)):  # the worker ends
            del self._workers[rank]
            self._let_go.add(rank)
            return
        message = m.decode(header)
        if isinstance(message, m.OfGeneration):
            message = m.decode(message.data)
        if isinstance(message, m.PeerAddresses):
            self._wires.put_first(CONTROLLER, rank, header)
            self._unpackers[rank].addresses_received(message)
            return
        self._wires.put_encoded(CONTROLLER, rank, header, None)
        if isinstance(message, m.PackedReconfigure):
            message = self._unpackers[rank].unpacked(message)
        if self._trace:
            self.note("->", rank, message)
        if isinstance(message, m.Reconfigure) and self._late is not None and self._late.paces:
            pace = drawn_pace(self._late.paces, rank, message)
            self._wires.put_encoded(CONTROLLER, rank, m.encode(pace), None)

    def _to_controller(self) -> None:
        """Turns the messages that have arrived at the controller, and the notices that are due, into events."""
        if self._is_away:
            for notice in [n for n in self._notices if n[0] <= self.turn]:
                self._notices.remove(notice)
                self._unheard(notice[1])
            return
        for incoming in self._wires.arrivals(CONTROLLER):
            payloads = () if incoming.payload is None else (bytes_of(incoming.payload),)
            self._io.events.append(Received(incoming.message, payloads, incoming.sender))
        for notice in [n for n in self._notices if n[0] <= self.turn]:
            self._notices.remove(notice)
            event = notice[1]
            if isinstance(event, AgentBack):  # it says who lives now
                event = dataclasses.replace(event, workers=event.workers & self._workers.keys())
            self._io.events.append(event)
        if self.turn % HEARTBEAT_TURNS == 0:
            self._io.events += self._heartbeats()

    def _heartbeats(self) -> list[Event]:
        """A heartbeat of each worker that can send one, by the agent of its machine where agents send them on."""
        beats = [
            m.Heartbeat(rank, worker.num_points, True, worker.waiting or "")
            for rank, worker in self._workers.items()
            if not worker.stopped_for and not worker.silent
        ]
        if not self._relays:
            return [Received(beat, (), beat.rank) for beat in beats]
        here, found = domain_of(self.first_mesh, 0), list[Event]()
        for beat in beats:
            domain = domain_of(self.first_mesh, beat.rank)
            if domain is None or domain == here:
                found.append(Received(beat, (), beat.rank))
            else:
                self._gathered.setdefault(domain, {})[beat.rank] = beat
        draw = random.Random(f"relay {self._seed} {self.turn}")
        for domain, gathered in self._gathered.items():
            if draw.random() < 0.3:  # the agent is slow: it sends them on later, and some workers go to the controller
                found += [
                    Received(beat, (), beat.rank) for beat in beats if beat.rank in gathered and draw.random() < 0.5
                ]
            else:
                found.append(BeatsReceived(tuple(gathered.values())))
                self._gathered[domain] = {}
        return found

    # ---- a controller that dies, and the next one

    def controller_acts(self) -> None:
        """The controller has done something. Raises ControllerKilled if that was the last that it did."""
        if self._acts is None or not self._deaths or self._is_away:
            return
        self._acts += 1
        if self._acts >= self._deaths[0]:
            self._deaths.pop(0)
            raise ControllerKilled

    def _unheard(self, event: Event | MoveDue) -> None:
        """Something has happened while there is no controller. What workers say of themselves they say again."""
        if isinstance(event, WorkerEnded) and not isinstance(event.exited, RemoteExited):  # else its agent was lost
            self._ended.append(event.rank)

    def _come_back(self) -> None:
        """The controller was killed. The workers go on for a while, and another controller adopts them."""
        self.note("CONTROLLER KILLED, generation", self._generation)
        self._is_away = True
        if self.is_settled:
            self._ended.clear()
        self.is_settled = False
        for event in self._io.events:
            self._unheard(event)
        self._wires.controller_died(self._generation)
        for rank in [rank for rank, worker in self._workers.items() if worker.executor is None]:
            del self._workers[rank]  # it was no member, and ends without a controller
            self._wires.cut(rank, None)
            self._ended.append(rank)
        for _ in range(self._random.choice((0, 5, 50, 300))):
            self.take_turn()
        self._is_away, self._takes_over = False, True
        self._generation += 1
        self._unpackers.clear()
        self._notices = [notice for notice in self._notices if not isinstance(notice[1], AgentBack)]
        elsewhere = self._on_other_machines()
        made = set(range(self._newest + 1)) - elsewhere
        checkpoint = self.checkpoints.newest
        prepared, journaled = self.journal[-1] if self.journal else (None, 0)
        # The journal has a line of each controller that came back, with an epoch that no Prepare has.
        self._last_epoch = 1 + max(self._last_epoch, prepared.epoch if prepared is not None else 0)
        self._make_controller(
            Adoption(
                RUN_DIR,
                self._generation,
                self._last_epoch,
                prepared,
                newest_checkpoint=checkpoint.step if checkpoint is not None else 0,
                pids=dict.fromkeys(self._workers.keys() - elsewhere, 0),
                next_rank=max(1 + max(made), journaled),  # of the fork server, and of the journal
                newcomers=tuple(rank for rank in self._ended if rank in made and rank not in self._were_members),
                made=tuple(made),
                has_agents=bool(elsewhere),
            )
        )
        self._agents_come_back(elsewhere)
        self._acts = 0
        self.result.comebacks += 1

    def _on_other_machines(self) -> set[int]:
        """The workers, living or not, of all machines but the first one: they have agents."""
        domains = {rank: domain_of(self.first_mesh, rank) for rank in range(self._newest + 1)}
        return {rank for rank, domain in domains.items() if domain is not None and domain != domains[0]}

    def _agents_come_back(self, elsewhere: set[int]) -> None:
        """Their agents come back to the new controller, now or later; or one is gone, or is cut off.

        The connection to one that is back may be lost at once. Then it is back once more, or it is not.
        """
        draw = random.Random(f"agents {self._newest} {self.turn}")
        for domain in sorted({domain_of(self.first_mesh, rank) or () for rank in elsewhere}):
            made = frozenset(rank for rank in elsewhere if domain_of(self.first_mesh, rank) == domain)
            living, how = made & self._workers.keys(), draw.choice(self.agents_come)
            self.agents_back[how] += 1
            self.note("AGENT", how, sorted(living))
            host, later = "/".join(domain), self.turn + draw.randint(1, 300)
            unborn = frozenset(rank for rank in self._ended if rank in made and rank not in self._were_members)
            back = AgentBack(-2, host, living, unborn, made, 1.0)
            if how not in ("gone", "cut off"):
                self._notices.append((later if how == "later" else self.turn, back))
            if how in ("lost and back", "lost"):
                for rank in sorted(living):
                    lost = RemoteExited(rank, 0, None, 9, host, "its connection closed")
                    self._notices.append((self.turn, WorkerEnded(rank, "lost", self.turn * TURN_S, lost)))
            if how == "lost and back":
                self._notices.append((later, dataclasses.replace(back, peer=-3)))
            for rank in living if how in ("gone", "cut off", "lost") else ():
                self._lost.append(rank)
                self._window.append(rank)
                if how == "gone":  # its workers save their state and end
                    self._absent.append(rank)
                    self._kill(rank)
                else:  # they wait or answer, live longer than this run takes, and must harm nobody
                    self._workers[rank].silent = True

    def _facts_of(self, worker: Worker) -> Callable[[Iterable[int]], m.Adopted] | None:
        """What a worker's links tell a controller that has come back; None if none does."""
        if not self._adopts:
            return None
        rank, fence = worker.rank, self._wires.fences[worker.rank]

        def facts(members: Iterable[int]) -> m.Adopted:
            closed = tuple(sorted(peer for peer in members if peer != rank and self.is_closed(rank, peer)))
            leaves = rank in self._leaving
            return m.Adopted(rank, fence.generation, 0, *fence.unpacker.last, closed=closed, leaves=leaves)

        return facts

    def epoch_begun(self) -> None:
        """The controller has begun a mesh epoch."""
        self._takes_over = False

    def _exits_later(self, rank: int) -> None:
        exited = Exited(rank, 1000 + rank, None, 9)
        at = self.turn + self._random.randint(0, 60 if self._late is None else 3)
        self._notices.append((at, WorkerEnded(rank, "killed", at * TURN_S, exited)))

    def check(self, message: m.AnyMessage) -> None:
        """Asserts what must hold of every message that the controller takes."""
        self.heard.append(message)
        if isinstance(message, m.StepReport):
            self.result.num_put_off += sum(len(part.put_off) for part in message.partial_steps)
        if isinstance(message, m.Damaged) and not message.reason:  # until it has learned it again
            self._window.append(message.rank)
            self._damaged.add(message.rank)
        if isinstance(message, m.CaughtUp):
            self._caught_up.add((message.rank, message.epoch))
        if isinstance(message, m.Adopted):
            self._applied[message.rank] = message.version
        if isinstance(message, m.Applied):
            before = self._applied.setdefault(message.rank, message.step - 1)
            assert message.step == before + 1, f"worker {message.rank} applied {message.step} after {before}"
            self._applied[message.rank] = message.step
        if isinstance(message, m.ValidationLoss) and message.epoch >= self._validated_in[message.step]:
            if message.epoch > self._validated_in[message.step]:  # it is run again
                self._validated_in[message.step] = message.epoch
                self._validation_losses[message.step].clear()
                self._validation_weights[message.step].clear()
            self._validation_losses[message.step].update(zip(message.microbatches, message.losses, strict=True))
            self._validation_weights[message.step].update(zip(message.microbatches, message.weights, strict=False))

    def validated(self, step: int, loss: float, metrics: Mapping[str, float] | None = None) -> None:
        """The controller has written down the mean loss of a validation."""
        total = math.fsum(self._validation_losses[step].values())
        job = self._job
        weights = self._validation_weights[step]
        whole = job.num_validation_microbatches * job.microbatch_size * job.seq_len
        weight = math.fsum(weights.values()) if weights else whole
        mean = total / weight if weight else math.nan
        assert loss == mean or math.isnan(mean)
        self.result.validation[step] = total
        if metrics:
            self.result.metrics[step] = dict(metrics)

    def reconfigured(self, plan: Sequence[m.Recompute]) -> None:
        """The controller has sent a plan for what is left of a step."""
        self.result.num_weights_only += sum(line.backward == WEIGHTS_ONLY for line in plan)

    def cannot_go_on(self, action: Save | Unrecoverable) -> None:
        """The controller has found that state is lost, or that too few workers are left.

        Asserts that what is lost is lost (C4): no living member has any of it, as a replica.
        """
        if isinstance(action, Unrecoverable):
            held = {pages.key: found for pages in action.lost if (found := self._holders(pages))}
            assert not held, f"state is given up that members have: {held}"
        if self._end is None:
            left = len({*self.protocol.members} - {*self._lost, *self._leaving})
            has_losses = not {*self._window}.isdisjoint({*self._lost, *self._damaged})
            losses = len({*self._window}) if has_losses else 0
            self._end = LostStateError(action, losses, self._mirrored, left)

    @property
    def standstills(self) -> list[dict[str, Any]]:
        """The events that tell of one."""
        return [fields for kind, fields in self.events if kind == "standstill"]

    def _is_held_up(self, rank: int) -> bool:
        """A message of the controller is on its way to a worker that may wait for it: nobody waits for limits."""
        found = [m.decode(it.header) for it in self._wires.in_flight.get((CONTROLLER, rank), ())]
        found = [m.decode(it.data) if isinstance(it, m.OfGeneration) else it for it in found]
        return any(not isinstance(it, m.Limits | m.Pace) for it in found)

    def _holders(self, pages: ReplicaSet) -> list[int]:
        """The living members that are replicas of some of these pages, at the version of the step they applied last.

        So is a learner that the controller has heard to have caught up. What others have already, nobody knows (C4).
        Where replicas are compared, what a learner has may come from a wrong one, and counts for nothing then (H3).
        """
        found = []
        for rank in self.protocol.members:
            worker = self._workers.get(rank)
            if worker is None or worker.executor is None or rank in self._lost:
                continue
            replica, version = worker.executor.replica, worker.executor.version
            parts = [part for part in replica.state if part.version == version or _is_frozen(replica, part)]
            inside = [part.pages for part in parts if _overlap(part.pages, pages)]
            counts = (rank, worker.executor.configuration.epoch) in self._caught_up and not self._job.verify_every
            if any(counts or rank in it.replicas for it in inside):
                found.append(rank)
        return found

    def noted(self, kind: str, fields: dict[str, object]) -> None:
        """The run writes an event."""
        self.events.append((kind, fields))
        if kind == "standstill":
            self.held_up += any(map(self._is_held_up, self.protocol.members))
        if kind == "corrupt" and fields["tensor"] == "state":  # its copy is as good as lost until it is made again
            self._window += cast(list[int], fields["ranks"])

    # ---- workers

    def spawn(self, rank: int) -> None:
        """A worker starts, and is ready at once; or, where starts take time, in some of its turns."""
        self._newest = max(self._newest, rank)
        self._wires.fences[rank] = ControllerFence(self._generation)
        worker = self._workers[rank] = Worker(rank, SimulatedChannel(rank, self))
        if self._uneven:
            worker.pace = self._random.choice((1.0, 1.0, 1.0, 0.05))
        if self._phases is not None:
            self._phases.begin(rank)
            return
        try:
            worker.port.send(CONTROLLER, m.Ready(rank, f"sim://{rank}"))
        except Killed as killed:
            self._kill(rank, *killed.args)

    def _start(self, worker: Worker, phases: Phases) -> None:
        """A turn of a worker that starts."""
        phase, fault = phases.turn(worker.rank)
        if phase == "ready" and not phases.is_starting(worker.rank):
            worker.port.send(CONTROLLER, m.Ready(worker.rank, f"sim://{worker.rank}"))
        if fault is not None:
            self.inject(worker.rank, fault)

    def first_mesh_begun(self, members: Sequence[int]) -> None:
        """The first workers have their places. Who was lost before took no state away."""
        self._acts = 0
        self._window = [rank for rank in self._window if rank in members]
        self._mirrored = len(members)

    def _begin(self, worker: Worker, first: m.Reconfigure) -> None:
        """The worker becomes a member of the mesh, with the first Reconfigure that it gets."""
        layout, model = self._description.layout, self._model

        def modules(layers: Iterable[int]) -> dict[int, nn.Module]:
            return {layer: copy.deepcopy(model.layers[layer]) for layer in layers}

        programs = worker.programs = StagePrograms(**program_args(self._job, layout, Objective.of(model)))
        made = MadeValues(lambda layers: model) if self._description.has_own_values else None
        context = WorkerContext(
            worker.rank,
            self._job,
            self._healthy,
            LocalModel(
                layout,
                self._description.inits,
                modules,
                model.layers.__getitem__,
                programs,
                made,
                inputs=model.inputs,
            ),
            Datasets(self._train, self._validation),
            self._device,
            worker.port,
            self._hooks_of(worker),
            self._widest,
        )
        saved = self.checkpoints.reader(self._checkpoint) if self._checkpoint is not None else None
        self._note_peers(worker.rank, first)
        self._were_members.add(worker.rank)
        worker.executor = Executor(context, Configuration.from_message(self._healthy, first), saved)
        worker.running = worker.executor.train()

    def is_stranger(self, rank: int, peer: int) -> bool:
        """True if a worker has no link to a member of its mesh epoch."""
        return peer in self._strangers.get(rank, ())

    def is_closed(self, rank: int, peer: int) -> bool:
        """True if a worker has found its link to another one closed, and has not made it again."""
        return (rank, peer) in self._down - self._closed_links.keys()

    def meets_stranger(self, link: Link, message: m.Message) -> None:
        """A worker has a message for a member that it has no link to, which the peers of a mesh epoch rule out."""
        raise AssertionError(f"worker {link[0]} has no link to {link[1]}, and sends it {type(message).__name__}")

    def _note_peers(self, rank: int, message: m.Reconfigure) -> None:
        """A worker makes its links for a mesh epoch: to those whose addresses it was told."""
        members = {member for members in message.stages for member in members}
        assert rank in message.addresses, (rank, message)
        self._down -= {link for link in self._down - self._closed_links.keys() if link[0] == rank}
        executor = self._workers[rank].executor
        entered = -1 if executor is None else executor.configuration.epoch
        self._reached[rank] = self._reached[rank].after(message, entered)
        self._strangers[rank] = frozenset(members - self._reached[rank].ranks)
        self._linked[rank] = frozenset(members - self._strangers[rank] - {rank})
        self.result.most_strangers = max(self.result.most_strangers, len(self._strangers[rank]))
        if rank not in self._lost:
            self._lose_links(self.link_breaks.at(RECONFIGURED, rank, self._links))

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        """The optional parts of a worker: here, fault points, groups, checkpoints, and devices that can fail."""
        return WorkerHooks(
            on_point=lambda point, step: self._visit(worker, point, step),
            wrong_result=lambda point, step, result: self._computed(worker.rank, point, step, result),
            stage_group=self._group_of(worker.rank),
            pairs=self._pairs_of(worker.rank),
            applied=lambda report, _: self._save(worker) if self._orders.is_due(report.step) else None,
            save=lambda _: self._save(worker),
            clock=self._clock(),
            device_recovery=DeviceRecovery(cast(Device, FailingDevice())) if self._devices_fail else None,
            adopted=self._facts_of(worker),
            members_changed=lambda message: self._note_peers(worker.rank, message),
        )

    def _clock(self) -> TurnClock | None:
        """The clock of a worker's device; None where no paces are sent."""
        if self._late is None or not self._late.paces:
            return None
        self.clocks.append(TurnClock(lambda: self.turn))
        return self.clocks[-1]

    def _save(self, worker: Worker) -> None:
        """The worker writes its shard of a checkpoint: one is due, or the run is about to stop."""
        assert worker.executor is not None
        replica, layout = worker.executor.replica, self._description.layout
        epoch, version = replica.protocol.epoch, replica.protocol.version
        writers = assign_writers(replica.placement.replica_map(layout), layout)
        parts = [p for p in replica.state if writers.get(p.pages.key) == worker.rank and p.version == version]
        if parts:
            name = shard_name(worker.rank, Ballot(self._orders.incarnation, epoch))
            self.checkpoints.keep(version, name, parts)
            keys = tuple(sorted(part.pages.key for part in parts))
            worker.port.send(CONTROLLER, m.ShardWritten(version, worker.rank, epoch, name, 1, "0" * 64, keys))

    def _group_of(self, rank: int) -> StageGroup | None:
        """The process group of a worker's stage, which publishes parameters; None: they go by links."""

    def _pairs_of(self, rank: int) -> Pairs | None:
        """The pairs of a worker, through which boundary tensors and state go; None: they go by links."""

    def _advance(self, worker: Worker) -> None:
        """One turn of a worker."""
        try:
            if self._phases is not None and self._phases.is_starting(worker.rank):
                self._start(worker, self._phases)
                return
            self._find_closed_links(worker)
            if worker.running is None:
                self.deliver_some(worker.rank)
                inbox = worker.port.inbox
                at = next((i for i, e in enumerate(inbox) if isinstance(e.message, m.Reconfigure)), None)
                if at is None:  # data for this worker may come before its first Reconfigure: it stays in the inbox
                    return
                first = worker.port.receive_one(at).message
                assert isinstance(first, m.Reconfigure)
                self._begin(worker, first)
            assert worker.running is not None
            worker.waiting = next(worker.running)
        except Killed as killed:
            self._kill(worker.rank, *killed.args)
        except Exception as error:
            if worker.rank not in self._lost or worker.rank in self.protocol.members:
                raise
            self.note(worker.rank, "is fenced and ends:", repr(error))
            del self._workers[worker.rank]

    def _visit(self, worker: Worker, point: FaultPoint, step: int) -> None:
        if point in OF_MICROBATCHES:
            worker.point = point
        check_at_point(worker, point)
        worker.num_points += 1
        self._wires.passed(worker.rank, point.value)
        if worker.rank not in self._lost:
            self._lose_links(self.link_breaks.at(point.value, worker.rank, self._links))
            for fault in self.plan.at_point(worker.rank, point, step):
                self.inject(worker.rank, fault)

    def _computed(self, rank: int, point: FaultPoint, step: int, result: Tensor) -> Tensor:
        """What a worker goes on with in place of what it has computed: the same, or with a bit that is wrong."""
        fault = self.plan.at_result(rank, point, step) if result.numel() else None
        if fault is None:
            return result
        self.plan.injected(self.turn)
        self.note("FAULT", rank, fault)
        return with_a_flipped_bit(result, random.Random(f"{rank} {step} {point.value} {fault.count}"))

    def inject(self, rank: int, fault: AnyFault | StartFault, out: Link | None = None) -> None:
        """Lets a fault happen to a worker.

        Args:
            out: a link of the worker; messages that are on it arrive, whatever becomes of their sender.

        Raises:
            Killed: the fault is the end of the worker.
            RuntimeError: its device fails.
        """
        if rank in self._lost:
            return
        self.plan.injected(self.turn)
        self.note("FAULT", rank, fault)
        later, kind = self.turn + self._random.randint(0, 60), fault.kind
        if kind == "term" and self._phases is not None and self._workers[rank].executor is None:
            kind = "kill"  # a worker that is no member ends by itself, as nobody has to let it go
        if kind in LOSSES:
            self._absent.append(rank)
        if kind in ("kill", "replace"):
            self._lost.append(rank)
            self._exits_later(rank)
        if kind in ("kill", "replace", "term"):
            self._window.append(rank)
        if kind in ("join", "replace"):
            self._io.events.append(Received(m.SpawnRequest(rank, 1), (), rank))
        if kind == "corrupt" and (executor := self._workers[rank].executor) is not None:
            executor.replica.state.flip_a_bit(executor.replica.state.optimizer.state_names)
        if kind == "flip" and (executor := self._workers[rank].executor) is not None:
            executor.replica.state.flip_a_bit((MASTER,), random.Random(f"{rank} {fault}"))
        if kind == "rebalance":
            self._notices.append((later, MoveDue()))
        if kind == "pause":
            self._paused = self.turn + fault.turns
        if kind == "term":
            self._leaving.add(rank)
            self._notices.append((later, Received(m.Leaving(rank), (), rank)))
        if kind in ("kill", "replace"):
            raise Killed(out)
        if kind == "device":
            raise RuntimeError(DEVICE_FAULT)
        if kind in ("stop", "silent"):  # until the failure detector finds it, it is a worker as any other
            self._workers[rank].stopped_for = max(1, fault.turns)
            self._workers[rank].silent = kind == "silent"
            self._wires.freeze(rank)

    def drawn_move(self) -> MoveRequested:
        """Other work for the members that the run has now."""
        return MoveRequested(draw_goal(self.protocol.placement, self._random))

    def _inject_next(self, ahead: int = 0) -> bool:
        """Injects the next ThenFault, if it is due that many turns from now. Returns True if it was."""
        if not self.plan.waits:
            return False
        fault = self.plan.due(self.turn + ahead, self._is_settled)
        if fault is None:
            return False
        members = {r: self._workers[r] for r in self.protocol.members if r in self._workers and r not in self._lost}
        replicas = self.protocol.placement.replica_map(self._description.layout)
        newest = self._workers.get(self._newest)
        able = victims(fault, members, all_replica_sets(replicas), self._lost, newest)
        if not able:
            return False
        self.plan.remove_due()
        rank = self._random.choice(able)
        try:
            self.inject(rank, fault)
        except Killed as killed:
            self._kill(rank, *killed.args)
        return True

    def _kill(self, rank: int, out: Link | None = None) -> None:
        """Ends a process. Of the messages that it had sent, each link still delivers a first part, drawn."""
        del self._workers[rank]
        self._wires.cut(rank, out)

    def kill_for_certain(self, rank: int) -> None:
        """The controller has removed a worker, and ends its process. A worker that is stopped or silent is not reached,
        as on a machine that is cut off: it goes on, now or later, and must harm nobody."""
        if rank in self._lost or rank in self._let_go:  # of those it gets no notice of their ends
            return
        self._lost.append(rank)
        self._window.append(rank)
        if (worker := self._workers.get(rank)) is None:
            return
        if not worker.stopped_for and not worker.silent:
            self._absent.append(rank)
            self._kill(rank)
        self._exits_later(rank)

    # ---- turns

    def run(self, *, mends: Collection[str] = ()) -> Trained:
        """Trains to the last step.

        Args:
            mends: what the run may mend by itself: a "standstill", after which all send again, or a message that is
                "rejected". Links here lose and change nothing unasked, so either is a defect, whatever the bits are.

        Raises:
            AssertionError: nothing can go on (a deadlock), with what each worker waits for; or the controller has
                stopped for a reason that no fault explains; or the run has mended what is not in `mends`.
            LostStateError: all replicas of some pages are gone and there is no checkpoint, or too few workers are left.
        """
        while True:
            try:
                outcome = self.controller.run()
            except ControllerKilled:
                self._come_back()
                continue
            if not isinstance(outcome, RestartFrom):
                break
            self._restart(outcome)
        if isinstance(outcome, RunFinished) or self._end is not None:
            assert "standstill" in mends or not self.standstills, f"the run stood still: {self.standstills}"
            assert "rejected" in mends or not self.rejected, f"messages were refused: {dict(self.rejected)}"
        if isinstance(outcome, RunFinished):
            return self.result
        if self._end is not None:
            raise self._end
        assert isinstance(outcome, RunStopped), outcome
        raise AssertionError(f"the run has stopped: {outcome.error}")

    def _restart(self, restart: RestartFrom) -> None:
        """The run begins again with new workers, as a real launcher has it do: from its newest checkpoint, if any."""
        if restart.doubted is not None:
            self.checkpoints.discard_after(restart.step)
            for values in (self.result.losses, self.result.norms):
                del values[restart.step :]
            self.result.validation = {s: loss for s, loss in self.result.validation.items() if s <= restart.step}
            self._has_gone_back |= restart.is_undecided
        checkpoint = self.checkpoints.newest
        if checkpoint is None and not restart.is_begin:  # a controller that came back can adopt nobody
            losses = len({*self._window}) if not {*self._window}.isdisjoint(self._lost) else 0
            left = len({*self._workers} - {*self._lost})
            raise LostStateError(Unrecoverable((), "nobody can be adopted"), losses, self._mirrored, left)
        assert restart.is_begin == (checkpoint is None) and restart.step == (checkpoint.step if checkpoint else 0)
        self.note("RESTART", restart.mesh, "after step", restart.step)
        self.result.restarts.append(restart.step)
        mesh = Mesh.initial(restart.mesh.shape)
        layout, old = self._description.layout, self._healthy
        placement = place(mesh, layout, old.shardings, old.num_microbatches)
        sharding = placement.state_sharding(self._policy.mirror_count, self._policy.mirror_scatter)
        replicas = place_replicas(layout, sharding, least_joined=self._joined)
        placement = dataclasses.replace(placement, replicas=replicas)
        self._orders = dataclasses.replace(self._orders, incarnation=self._orders.incarnation + 1)
        self._start_controller(placement, checkpoint)

    def finished(self) -> None:
        """The controller has collected the weights. The Stop that it has sent to the workers ends them."""
        self.result.turns = self.turn

    def take_turn(self) -> None:
        """Takes one turn: messages that have arrived at the controller become events, and one worker goes on."""
        self._started = True
        self.turn += 1
        assert self.turn < MOST_TURNS, f"the run does not come to its end: {self.protocol}"
        self._to_controller()
        if self.tried is not None and (found := self.tried.drawn(self.protocol)) is not None:
            self.from_controller(found[0], m.encode(found[1]))
        if self._late is not None and any(isinstance(event, WorkerEnded) for _, event in self._notices):
            return  # the controller hears of a loss before others come to a halt for it
        able = [rank for rank in sorted(self._workers) if self._can_go(self._workers[rank])]
        if not able:
            self._skip()
            return
        self._idle_since = self.turn
        worker = self._workers[self._choose(able)]
        if worker.stopped_for:
            worker.stopped_for -= 1
            if not worker.stopped_for:
                self._wires.thaw(worker.rank)
                self._absent.remove(worker.rank)
            return
        self._advance(worker)
        self._after_turn(worker)

    @property
    def _is_settled(self) -> bool:
        """No change of the mesh is under way or about to come, and every page has all its mirrors."""
        # A worker that is stopped may be found to hang at any time. So may one that was cut off from a controller which
        # died before it had noticed, and that the next one has adopted.
        members = self.protocol.members
        is_stopped = any(
            w.stopped_for or w.silent
            for rank, w in self._workers.items()
            if rank not in self._lost or (w.silent and rank in members)
        )
        # Events that the controller has not taken yet may begin a change. Messages of a step change nothing.
        nothing_comes = all(isinstance(it, Received) and not isinstance(it.message, _CHANGES) for it in self._io.events)
        if self._is_away or self._takes_over:
            return False
        return self.protocol.settled and nothing_comes and not self._notices and not is_stopped

    def _can_go(self, worker: Worker) -> bool:
        """True if a turn can make a difference: a worker that waits, waits for a message, or for some time."""
        port = worker.port
        can_hear = port.inbox or port.then or self._wires.has_some_for(worker.rank)
        starts = self._phases is not None and self._phases.is_starting(worker.rank)
        wakes_at = worker.executor.wakes_at if worker.executor is not None else None
        wakes = wakes_at is not None and self.turn >= wakes_at
        return bool(starts or worker.stopped_for or can_hear or wakes or self._closed_links_of(worker.rank))

    def _choose(self, ranks: Sequence[int]) -> int:
        if not self._uneven:
            return self._random.choice(ranks)
        return self._random.choices(ranks, [self._workers[rank].pace for rank in ranks])[0]

    def _skip(self) -> None:
        """Passes a turn in which no worker can do anything: notices, faults and timeouts come by themselves."""
        if self._is_away:
            self._idle_since = self.turn
            return
        reports = any(not is_heartbeat(event) for event in self._io.events)  # heartbeats alone move nothing
        if reports or self._wires.has_some_for(CONTROLLER) or self._notices or self.is_paused:
            self._idle_since = self.turn
            return
        holds = any(w.executor is not None and w.executor.wakes_at is not None for w in self._workers.values())
        if holds or any(self._inject_next(ahead) for ahead in (0, _PATIENCE)):
            self._idle_since = self.turn
        elif self.turn > self._idle_since + LONGEST_TURNS:  # no timeout of the controller has changed anything
            waits = {rank: w.waiting for rank, w in self._workers.items()}
            raise AssertionError(f"nothing moves: {waits}, {self.protocol}")

    def _after_turn(self, worker: Worker) -> None:
        """Asserts that members differ by one version at most, and injects the next fault that waits for its time."""
        version = worker.executor.version if worker.executor is not None else worker.version
        if version != worker.version:
            worker.version = version
            # A controller that is about to come back does not know yet who is a member still.
            members = self.protocol.members if self.protocol.started else ()
            at = [w.executor.version for r in members if (w := self._workers.get(r)) and w.executor]
            assert not at or max(at) - min(at) <= 1, f"members are at versions {at}"
        if self._is_settled:
            self._window.clear()
            self._mirrored = len(self.protocol.members)
        self._inject_next()
