"""N executors and a controller in one process over links made of lists, in an order drawn from a seed.

Everything that trains is the product's own; only processes, sockets and clocks are missing. A worker can be killed at
any point of a step, or stand still and come back when nobody wants it any more; what it had sent arrives in part.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from elaswave_spmd.controller.summary import collect_pages
from elaswave_spmd.models import LayeredModel
from elaswave_spmd.recovery import messages as m
from elaswave_spmd.recovery.actions import (
    Action,
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
from elaswave_spmd.recovery.controller_protocol import ControllerProtocol, Policy
from elaswave_spmd.recovery.replica_check import Copies
from elaswave_spmd.runtime.devices import Device, device_of
from elaswave_spmd.runtime.devices.host import HostDevice
from elaswave_spmd.runtime.transport.links import CONTROLLER
from elaswave_spmd.scheduling.placement import Placement
from elaswave_spmd.sharding.replicas import all_runs
from elaswave_spmd.worker.channel import Incoming
from elaswave_spmd.worker.configuration import Configuration
from elaswave_spmd.worker.context import Datasets, LocalModel, WorkerContext, WorkerHooks
from elaswave_spmd.worker.fault_points import FaultPoint
from elaswave_spmd.worker.loop import Executor
from elaswave_spmd.worker.model_layout import ModelDescription
from elaswave_spmd.worker.parameter_broadcast import StageGroup
from elaswave_spmd.worker.programs.eager import Batches, StagePrograms, program_args
from elaswave_spmd.worker.spec import Job
from tests.cluster.faults import LOSSES, SENDER, AnyFault, MessageFault, Plan
from tests.cluster.processes import Killed, LostStateError, Trained, Worker, domain_of, victims
from tests.cluster.stories import rebalance
from tests.cluster.wires import Link, SimulatedChannel, Wires

_PATIENCE = 1000  # turns that the last of the faults are waited for when nothing else moves


class LocalCluster:
    """Runs a placement to the end in this process.

    Args:
        make_model: a new model, with real parameters or on the meta device; workers get copies of its layers.
        seed: of the order of workers and messages; not of the training.
        faults: what happens on the way.
        policy: how the controller answers.
        uneven: some workers and some links are much slower than others.
        trace: told of everything that a reader of a failed run wants to know, line by line.
        device: that all workers share; None: the CPU.
    """

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
    ) -> None:
        self._job, self._description, self._healthy = job, description, placement
        self._model, self._train, self._validation = make_model(), train, validation
        self._random = random.Random(seed)
        self.plan = Plan(faults)
        self._uneven, self._trace, self._device = uneven, trace, device or HostDevice(device_of("cpu"))
        self._next_rank = max(placement.mesh.members) + 1
        self._wires = Wires(job.torch_dtype, self._device, self._random, uneven=uneven)
        self._workers: dict[int, Worker] = {}
        self._lost: list[int] = []
        self._given_up: set[int] = set()  # of those, the ones that the controller knows of
        self._window: list[int] = []  # lost since every page had all its mirrors
        self._mirrored = placement.mesh.num_workers  # members when that was so last
        self._paused = 0  # the controller does nothing before this turn
        self._applied: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._notices: list[tuple[int, Callable[[], list[Action]]]] = []  # (turn, what the controller then knows)
        self._turn, self._done = 0, False
        self.result = Trained()
        self.copies = Copies()
        validates_at = job.validates_at if validation is not None else lambda _: False
        what = placement, description.layout, job.steps, job.validation_microbatches, validates_at, policy or Policy()
        self._controller = ControllerProtocol(*what)
        self._started = False
        for rank in placement.mesh.members:
            self._spawn(rank)
        self._started = True

    def _note(self, *what: object) -> None:
        if self._trace:
            self._trace(" ".join(map(str, (f"{self._turn:5}", *what))))

    # ---- messages

    def deliver_some(self, rank: int) -> None:
        """Moves some of what is in flight to a worker into its inbox."""
        self._workers[rank].port.inbox.extend(self._wires.arrivals(rank))

    def send(self, sender: int, peer: int, message: m.Message, payload: Tensor | None) -> None:
        """A worker's message begins its way."""
        self.at_message(sender, message, SENDER)
        self._wires.put(sender, peer, message, payload)
        if peer == CONTROLLER and not isinstance(message, m.FinalPages):
            self._note(sender, "->", message)
        if then := self.after_message(sender, message, SENDER):
            self.strike(sender, then, out=(sender, peer))

    def at_message(self, rank: int, message: m.Message, side: str) -> None:
        """What happens to the worker before it sends or takes a message."""
        at = self.plan.at_message
        if self._started and rank not in self._lost and (fault := at(type(message).__name__, side, after=False)):
            self.strike(rank, fault)

    def after_message(self, rank: int, message: m.Message, side: str) -> MessageFault | None:
        """What is to happen to the worker after it has sent or taken a message."""
        if not self._started or rank in self._lost:
            return None
        return self.plan.at_message(type(message).__name__, side, after=True)

    def _to_controller(self) -> None:
        if self._turn < self._paused:
            return
        for incoming in self._wires.arrivals(CONTROLLER):
            self._report(incoming)
        for notice in [n for n in self._notices if n[0] <= self._turn]:
            self._notices.remove(notice)
            self._perform(notice[1]())

    def _give_up(self, rank: int, reason: str) -> list[Action]:
        self._given_up.add(rank)
        return self._controller.lost(rank, reason)

    # ---- workers

    def _spawn(self, rank: int) -> None:
        worker = self._workers[rank] = Worker(rank, SimulatedChannel(rank, self))
        self._controller.expect(rank, domain_of(self._healthy.mesh, rank))
        if self._uneven:
            worker.pace = self._random.choice((1.0, 1.0, 1.0, 0.05))
        try:
            worker.port.send(CONTROLLER, m.Ready(rank, f"sim://{rank}"))
        except Killed as killed:
            self._kill(rank, *killed.args)

    def _begin(self, worker: Worker, place: m.Reconfigure) -> None:
        """The worker becomes a member."""
        layout, model = self._description.layout, self._model

        def modules(layers: Iterable[int]) -> dict[int, nn.Module]:
            return {layer: copy.deepcopy(model.layers[layer]) for layer in layers}

        programs = StagePrograms(**program_args(self._job, layout, model.loss))
        context = WorkerContext(
            worker.rank,
            self._job,
            self._healthy,
            LocalModel(layout, self._description.inits, modules, programs),
            Datasets(self._train, self._validation),
            self._device,
            worker.port,
            self._hooks_of(worker),
        )
        worker.executor = Executor(context, Configuration.from_message(self._healthy, place))
        worker.running = worker.executor.train()

    def _hooks_of(self, worker: Worker) -> WorkerHooks:
        """What is optional around a worker."""
        return WorkerHooks(
            on_point=lambda point, step: self._visit(worker, point, step), stage_group=self._group_of(worker.rank)
        )

    def _group_of(self, rank: int) -> StageGroup | None:
        """The group of a worker's stage, for new parameters; none: links alone."""

    def _advance(self, worker: Worker) -> None:
        """One turn of a worker."""
        try:
            if worker.running is None:
                self.deliver_some(worker.rank)
                inbox = worker.port.inbox
                at = next((i for i, e in enumerate(inbox) if isinstance(e.message, m.Reconfigure)), None)
                if at is None:  # what came before its PLACE is not lost
                    return
                place = worker.port.take_one(at).message
                assert isinstance(place, m.Reconfigure)
                self._begin(worker, place)
            assert worker.running is not None
            worker.waiting = next(worker.running)
        except Killed as killed:
            self._kill(worker.rank, *killed.args)
        except Exception as error:
            if worker.rank not in self._lost or worker.rank in self._controller.members:
                raise
            self._note(worker.rank, "is fenced and ends:", repr(error))
            del self._workers[worker.rank]

    def _visit(self, worker: Worker, point: FaultPoint, step: int) -> None:
        if worker.rank not in self._lost:
            for fault in self.plan.at_point(worker.rank, point, step):
                self.strike(worker.rank, fault)

    def strike(self, rank: int, fault: AnyFault, out: Link | None = None) -> None:
        """A fault happens to a worker. Raises Killed if that is its end.

        Args:
            out: what is on this link is out already, whatever becomes of the worker.
        """
        if rank in self._lost:
            return
        self.plan.struck(self._turn)
        self._note("FAULT", rank, fault)
        later, kind = self._turn + self._random.randint(0, 60), fault.kind
        if kind in LOSSES:
            self._lost.append(rank)
            self._notices.append((later, lambda: self._give_up(rank, "hangs" if kind == "stop" else "killed")))
        if kind in (*LOSSES, "term"):
            self._window.append(rank)
        if kind in ("join", "replace"):
            self._next_rank += 1
            self._spawn(self._next_rank - 1)
        if kind == "corrupt" and (executor := self._workers[rank].executor) is not None:
            executor.replica.state.flip_a_bit()
        if kind == "rebalance":
            self._notices.append((later, lambda: rebalance(self._controller, self._random)))
        if kind == "pause":
            self._paused = self._turn + fault.turns
        if kind == "term":
            self._leaving.add(rank)
            self._notices.append((later, lambda: self._controller.drain(rank, "asked to leave")))
        if kind in ("kill", "replace"):
            raise Killed(out)
        if kind == "stop":
            self._workers[rank].asleep = fault.turns
            self._wires.freeze(rank)

    def _strike_next(self, ahead: int = 0) -> bool:
        """A fault that follows another one, if it is due that many turns from now. Returns whether it was."""
        if not self.plan.waits:
            return False
        fault = self.plan.due(self._turn + ahead, self._controller.settled and not self._notices)
        if fault is None:
            return False
        members = {r: self._workers[r] for r in self._controller.members if r in self._workers and r not in self._lost}
        runs = self._controller.placement.replica_map(self._description.layout)
        newest = self._workers.get(self._next_rank - 1)
        able = victims(fault, members, all_runs(runs), self._lost, newest)
        if not able:
            return False
        self.plan.take()
        rank = self._random.choice(able)
        try:
            self.strike(rank, fault)
        except Killed as killed:
            self._kill(rank, *killed.args)
        return True

    def _kill(self, rank: int, out: Link | None = None) -> None:
        """The process is gone; of what it had not got out, each link delivers some first part."""
        del self._workers[rank]
        self._wires.cut(rank, out)

    # ---- the controller

    def _report(self, incoming: Incoming) -> None:
        controller, message = self._controller, incoming.message
        match message:
            case m.Ready() if message.rank in self._given_up:  # the controller's links are as deaf
                pass
            case m.Ready():
                self._perform(controller.ready(message))
            case m.Applied():
                before = self._applied.setdefault(message.rank, message.step - 1)
                assert message.step == before + 1, f"worker {message.rank} applied {message.step} after {before}"
                self._applied[message.rank] = message.step
                self._perform(controller.applied(message))
            case m.StepReport():
                self._perform(controller.report_received(message))
            case m.CaughtUp():
                self._perform(controller.caught_up(message))
            case m.Damaged():
                self._perform(controller.damaged(message))
            case m.Fingerprints():
                found = self.copies.add(message)
                assert not found, f"copies differ: {found}"
            case m.ValidationLoss():
                self._perform(controller.validation(message))
            case m.Finished():
                self._perform(controller.finished(message))
            case m.FinalPages():
                assert incoming.payload is not None
                collect_pages(self._description.layout, message, incoming.payload, self.result.weights)
            case _:
                raise AssertionError(f"the controller got {message}")

    def _perform(self, effects: Sequence[Action]) -> None:
        for effect in effects:
            match effect:
                case Send(rank, message):
                    self._send(rank, message)
                case Broadcast(ranks, message):
                    for rank in ranks:
                        self._send(rank, message)
                case RemoveMember(rank, lost):
                    if not lost:
                        self._workers.pop(rank, None)
                case Committed(applied):
                    self.result.losses.append(applied.loss.hex())
                    self.result.norms.append(applied.grad_norm.hex())
                case ValidationDone(step, total):
                    self.result.validation[step] = total
                case EpochBegun():
                    self.result.epochs.append(effect)
                    self._note("EPOCH", effect)
                case Done():
                    self._done = True
                case Unrecoverable() | Save():
                    left = len({*self._controller.members} - {*self._lost, *self._leaving})
                    losses = len(self._window) if not {*self._window}.isdisjoint(self._lost) else 0
                    raise LostStateError(effect, losses, self._mirrored, left)

    def _send(self, rank: int, message: m.Message) -> None:
        if rank in self._workers:
            self._wires.put(CONTROLLER, rank, message, None)
            self._note("->", rank, message)

    def run(self) -> Trained:
        """All steps.

        Raises:
            AssertionError: nothing can go on (a deadlock), with what each worker waits for.
            LostStateError: all replicas of some pages are gone.
        """
        while True:
            self._turn += 1
            self._to_controller()
            able = [rank for rank in sorted(self._workers) if self._can_go(self._workers[rank])]
            if self._done:
                break
            if not able:
                self._skip()
                continue
            worker = self._workers[self._choose(able)]
            if worker.asleep:
                worker.asleep -= 1
                if not worker.asleep:
                    self._wires.thaw(worker.rank)
                continue
            self._advance(worker)
            self._look(worker)
        self.result.turns = self._turn
        self.result.state_bytes = {rank: w.executor.state_bytes() for rank, w in self._workers.items() if w.executor}
        return self.result

    def _can_go(self, worker: Worker) -> bool:
        """Whether a turn can make a difference: who waits, waits for a message."""
        port = worker.port
        return bool(worker.asleep or port.inbox or port.then or self._wires.has_some_for(worker.rank))

    def _choose(self, ranks: Sequence[int]) -> int:
        if not self._uneven:
            return self._random.choice(ranks)
        return self._random.choices(ranks, [self._workers[rank].pace for rank in ranks])[0]

    def _skip(self) -> None:
        """No worker can do anything: what comes next comes by itself."""
        silent = [rank for rank in self._lost if rank in self._controller.addresses and rank not in self._workers]
        if self._turn < self._paused:
            self._turn = self._paused
        elif self._wires.has_some_for(CONTROLLER):
            pass
        elif self._notices:
            self._turn = max(self._turn, min(turn for turn, _ in self._notices))
        elif silent:  # as heartbeats would tell
            self._perform(self._controller.lost(silent[0], "silent"))
        elif not any(self._strike_next(ahead) for ahead in (0, _PATIENCE)):
            waits = {rank: w.waiting for rank, w in self._workers.items()}
            raise AssertionError(f"nothing moves: {waits}, {self._controller}")

    def _look(self, worker: Worker) -> None:
        """What must be true at any time; and faults that come by themselves."""
        version = worker.executor.version if worker.executor is not None else worker.version
        if version != worker.version:
            worker.version = version
            at = [w.executor.version for r in self._controller.members if (w := self._workers.get(r)) and w.executor]
            assert not at or max(at) - min(at) <= 1, f"members are at versions {at}"
        if self._controller.settled and not self._notices:
            self._window.clear()
            self._mirrored = len(self._controller.members)
        self._strike_next()
